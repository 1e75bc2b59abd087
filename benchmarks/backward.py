"""Speed of the gradients on the GPU at hand: ours, its parts, torch's own. TFLOP/s count 2.5 x the forward's products.

    PYTHONPATH=src python benchmarks/backward.py [--json FILE] [--seconds 150]

Times are medians of CUDA events; the inputs are larger than the L2. The errors in the
last columns are relative, against fp64 formulas, at a small size with the same code.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import dsv4
from dsv4 import reference, reference_backward
from dsv4.fmha import problem
from dsv4.fmha.backward import FmhaBackward
from dsv4.kernels.sm90.fmha import backward as hopper
from dsv4.kernels.sm90.v4 import backward as hopper_v4
from dsv4.v4 import problem as v4_problem
from dsv4.v4.backward import V4Backward

CASES = [  # batch, heads, tokens, head dim
    (4, 16, 4096, 512), (1, 16, 16384, 512), (4, 16, 4096, 256), (4, 16, 4096, 128), (4, 16, 4096, 64),
]  # fmt: skip
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
         "efficient": SDPBackend.EFFICIENT_ATTENTION}  # fmt: skip


def milliseconds(call, repeats: int = 5) -> float:
    call()
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def request(b: int, h: int, t: int, d: int, causal: bool, dtype=torch.bfloat16, kv_heads: int = 0, **options):
    """Inputs, their forward pass and empty gradients."""
    q, dout = (torch.randn(b, t, h, d, device="cuda", dtype=dtype) for _ in "qd")
    k, v = (torch.randn(b, t, kv_heads or h, d, device="cuda", dtype=dtype) for _ in "kv")
    out, lse = dsv4.fmha(q, k, v, causal=causal, return_lse=True, **options)
    p = replace(problem.dense(q, k, v, causal=causal, **options), out=out, lse=lse)
    sink = options.get("sink")
    return FmhaBackward(p, dout, None, *(torch.full_like(x, float("nan")) for x in (q, k, v)),
                        None if sink is None else torch.empty_like(sink))  # fmt: skip


def errors() -> list[dict]:
    """Small, against fp64; the bound is 1.5 x the error of the rounded formulas."""
    rows = []
    for d in (64, 128, 256, 512):
        for dtype in (torch.bfloat16, torch.float16):
            for name, causal, heads, options in (
                ("full", False, (2, 2), {}),
                ("causal gqa sink", True, (4, 2), {"sink": torch.randn(4, device="cuda")}),
                ("window", False, (2, 1), {"window": (300, 17)}),
            ):
                b = request(2, heads[0], 1111, d, causal, dtype, heads[1], **options)
                hopper.backward(b)
                p, given = b.forward, dict(causal=causal, **options)
                want = reference_backward.fmha(p.q, p.k, p.v, b.dout, **given)
                low = reference_backward.fmha(p.q, p.k, p.v, b.dout, p_dtype=dtype, **given)
                row = {"case": f"hd{d} {str(dtype)[6:]} {name}"}
                for part, got in zip("qkv", (b.dq, b.dk, b.dv)):
                    ref, rounded = getattr(want, part), getattr(low, part).to(dtype).double()
                    row[f"d{part}"] = float((got.double() - ref).norm() / ref.norm())
                    row[f"d{part} bound"] = 1.5 * float((rounded - ref).norm() / ref.norm())
                row["ok"] = all(row[f"d{part}"] <= row[f"d{part} bound"] for part in "qkv")
                rows.append(row)
                print(row, flush=True)
    return rows


def ours(case, causal: bool) -> dict:
    b, h, t, d = case
    one = request(b, h, t, d, causal)
    flops = 10.0 * b * h * d * (t * (t + 1) // 2 if causal else t * t)
    whole = milliseconds(lambda: hopper.backward(one))
    row = {"case": f"{case} {'causal' if causal else 'full'}", "ms": whole, "TFLOP/s": flops / whole / 1e9}
    row["rows ms"] = milliseconds(lambda: hopper._rows(one))
    products = hopper.Chain._products
    hopper.Chain._products = lambda *args: None
    try:
        row["scores and rows ms"] = milliseconds(lambda: hopper.backward(one))
    finally:
        hopper.Chain._products = products
    executed = flops / 5 * 2 / (row["scores and rows ms"] - row["rows ms"]) / 1e9
    row["scores TFLOP/s"] = executed
    row["products TFLOP/s"] = flops / 5 * 3 / (whole - row["scores and rows ms"]) / 1e9
    first = [x.clone() for x in (one.dq, one.dk, one.dv)]
    hopper.backward(one)
    row["same bits"] = all(torch.equal(a, b) for a, b in zip(first, (one.dq, one.dk, one.dv)))
    p, given = one.forward, one.dout
    q, k, v = (x.transpose(1, 2).contiguous().requires_grad_() for x in (p.q, p.k, p.v))
    dout = given.transpose(1, 2).contiguous()
    for name, backend in PEERS.items():
        try:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            ms = milliseconds(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))  # noqa: B023
            row[f"{name} TFLOP/s"] = flops / ms / 1e9
        except RuntimeError as why:
            row[f"{name} TFLOP/s"] = str(why).split("\n")[0][:60]
    return row


def v4(queries: int, heads: int, window: int, listed: int) -> dict:
    """Every query sees `window` rows before it and `listed` of the compressed ones; random lists, all full."""
    def draw(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    q, dout, rows = draw(queries, heads, 512), draw(queries, heads, 512), draw(queries + window, 512)
    position = torch.arange(queries, device="cuda", dtype=torch.int32)
    window_indices = position[:, None] + torch.arange(window, device="cuda", dtype=torch.int32)
    compressed = draw(max(queries // 4, listed, 1), 512)
    indices = torch.rand(queries, compressed.shape[0], device="cuda").argsort(1)[:, :listed].int().contiguous()
    sink = torch.randn(heads, device="cuda")
    rope = (reference.rope_table(queries, 64, device="cuda"), position)
    given = dict(compressed=compressed, compressed_indices=indices) if listed else {}
    arguments = dict(q=q, window=rows, window_indices=window_indices, **given, sink=sink, inverse_rope=rope)
    out, lse = dsv4.v4_attention(**arguments, return_lse=True)
    p = replace(v4_problem.build(**arguments), out=out, lse=lse)
    empty = [torch.full_like(x, float("nan")) for x in ((q, rows, compressed) if listed else (q, rows))]
    request = V4Backward(p, dout, None, *empty, *([] if listed else [None]), torch.empty_like(sink))
    flops = 10.0 * queries * heads * (window + listed) * 512
    row = {"case": f"V4 {queries} x {heads} x {window} + {listed}"}
    for name, one in (("ms", request), ("deterministic ms", replace(request, deterministic=True))):
        row[name] = milliseconds(lambda: hopper_v4.backward(one))  # noqa: B023
    row["TFLOP/s"] = flops / row["ms"] / 1e9
    lse2, delta, _ = hopper_v4._rows(request)
    row["rows ms"] = milliseconds(lambda: hopper_v4._rows(request))
    row["lists ms"] = milliseconds(lambda: hopper_v4._listed(p))
    row["rotation ms"] = milliseconds(lambda: hopper_v4._turned(request))
    few = slice(0, 8)
    small = dict(arguments, q=q[few], window_indices=window_indices[few], inverse_rope=(rope[0], position[few]))
    small.update({"compressed_indices": indices[few]} if listed else {})
    want = reference_backward.v4_attention(**small, dout=dout[few])
    row["dq error of 8 queries"] = float((request.dq[few].double() - want.q).norm() / want.q.norm())
    again = [x.clone() for x in empty]
    hopper_v4.backward(replace(request, deterministic=True))
    kept = [x.clone() for x in empty]
    row["deterministic against atomics"] = max(
        float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(kept, again))
    hopper_v4.backward(replace(request, deterministic=True))
    row["same bits"] = all(torch.equal(a, b) for a, b in zip(kept, empty))
    return row


V4_CASES = [(4096, 64, 128, 512), (4096, 128, 128, 1024), (4096, 64, 128, 0), (4096, 64, 128, 32)]


def slots() -> list[dict]:
    """The score kernel alone with fewer slots, and slabs of other sizes."""
    rows = []
    for slab in (28, 29, 30, 31, 32):
        hopper.SLAB_BYTES = 1 << slab
        one = request(4, 16, 4096, 512, True)
        rows.append({"case": f"slab 2^{slab}, (4, 16, 4096, 512) causal", "ms": milliseconds(lambda: hopper.backward(one))})  # noqa: B023, E501
        print(rows[-1], flush=True)
    hopper.SLAB_BYTES = 1 << 30
    chosen = dict(hopper.PIECES)
    for d in (64, 128, 256, 512):
        for pieces in (1, 2, 4, 8):
            hopper.PIECES[d] = pieces
            one = request(4, 16, 4096, d, True)
            ms = milliseconds(lambda: hopper.backward(one))  # noqa: B023
            rows.append({"case": f"{pieces} pieces, (4, 16, 4096, {d}) causal", "ms": ms})
            print(rows[-1], flush=True)
    hopper.PIECES.update(chosen)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--seconds", type=float, default=150)
    options = parser.parse_args()
    torch.manual_seed(0)
    started, rows = time.monotonic(), []
    for sizes in V4_CASES:
        rows.append(v4(*sizes))
        print(rows[-1], flush=True)
        torch.cuda.empty_cache()
    rows += errors()
    for case in CASES:
        for causal in (False, True):
            if time.monotonic() - started < options.seconds:
                rows.append(ours(case, causal))
                print(rows[-1], flush=True)
                torch.cuda.empty_cache()
    if time.monotonic() - started < options.seconds:
        rows += slots()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
