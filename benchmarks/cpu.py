"""The cpu backend beside torch's SDPA, both sides timed in turn in one run, and the memory that it needs.

    python benchmarks/cpu.py [--threads N] [--repeat N] [--bf16-sdpa] [--json F]

A ratio is SDPA's time over ours: above 1 we are faster. Limits that the project holds itself to stand beside it and
decide the exit status. On a CPU without bf16 products SDPA takes half a minute for 2048 x 2048 in bf16, so there bf16
runs at 256 x 256 unless --bf16-sdpa asks for the full size.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention as sdpa

import cpu_v4
import dsv4
from dsv4.fmha import cpu

LIMIT_GIB = 1.0  # extra memory of v4_attention for 4096 queries x 64 heads x 640 rows


def compare(name: str, ours: Callable, theirs: Callable, repeat: int, limit: float | None = None) -> dict:
    a, b = ours(), theirs()
    error = ((a - b).float().norm() / b.float().norm()).item()
    assert error < 2e-2, f"{name}: the two sides differ by {error}"
    seconds = best({"dsv4": ours, "sdpa": theirs}, repeat)
    ratio = seconds["sdpa"] / seconds["dsv4"]
    return {
        "name": name,
        "dsv4_ms": seconds["dsv4"] * 1e3,
        "sdpa_ms": seconds["sdpa"] * 1e3,
        "ratio": ratio,
        "at_least": limit,
        "ok": limit is None or ratio >= limit,
    }


def best(calls: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Seconds of each call, best of `repeat`; the calls take turns, so that other work of the machine meets all."""
    seconds = dict.fromkeys(calls, float("inf"))
    for _ in range(repeat):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            seconds[name] = min(seconds[name], time.perf_counter() - begin)
    return seconds


def inputs(t: int, s: int, hq: int, hkv: int, d: int, dtype: torch.dtype):
    """q, k, v as dsv4 takes them, and the same memory as SDPA takes it."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, t, hq, d), (1, s, hkv, d), (1, s, hkv, d))
    ours = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return ours, [x.transpose(1, 2) for x in ours]


def causal(repeat: int, bf16_sdpa: bool) -> Iterator[dict]:
    """Where SDPA has a fast path of its own we may cost 1.2 times as much at most."""
    for dtype in (torch.float32, torch.bfloat16):
        for d in (64, 128):
            t = 2048 if bf16_sdpa or cpu.native(dtype) else 256
            (q, k, v), theirs = inputs(t, t, 8, 8, d, dtype)
            name = f"causal {t} x {t}, 8 heads, d {d}, {str(dtype).removeprefix('torch.')}"
            yield compare(
                name,
                lambda q=q, k=k, v=v: dsv4.fmha(q, k, v, causal=True),
                lambda x=theirs: sdpa(*x, is_causal=True).transpose(1, 2),
                repeat,
                1 / 1.2,
            )


def masked(repeat: int) -> Iterator[dict]:
    """Where SDPA needs a dense mask."""
    s = 8192
    at = torch.arange(s)
    window = (at[None] <= at[:, None]) & (at[None] > at[:, None] - 128)
    for hq, hkv, d in ((8, 8, 64), (8, 1, 128)):
        (q, k, v), theirs = inputs(s, s, hq, hkv, d, torch.float32)
        yield compare(
            f"window 128 of {s} keys, {hq} heads on {hkv}, d {d}, float32",
            lambda q=q, k=k, v=v: dsv4.fmha(q, k, v, window=(127, 0)),
            lambda x=theirs: sdpa(*x, attn_mask=window, enable_gqa=True).transpose(1, 2),
            max(1, repeat // 2),
            8.0,
        )
    sink = torch.zeros(8)
    (q, k, v), (qt, kt, vt) = inputs(2048, 2048, 8, 8, 64, torch.float32)
    # SDPA has no sink: it takes one more key, of zeros, whose column of the mask is the logit
    mask = torch.full((2048, 2048), float("-inf")).triu(1)
    mask = torch.cat([mask, sink[0].expand(2048, 1)], 1)
    k1, v1 = (torch.cat([x, torch.zeros(1, 8, 1, 64)], 2) for x in (kt, vt))
    yield compare(
        "causal 2048 x 2048 with sink, 8 heads, d 64, float32",
        lambda: dsv4.fmha(q, k, v, causal=True, sink=sink),
        lambda: sdpa(qt, k1, v1, attn_mask=mask).transpose(1, 2),
        repeat,
        1.0,
    )
    (q, k, v), theirs = inputs(1, 8192, 64, 1, 512, torch.float32)
    yield compare(
        "decode: 1 query on 8192 keys, 64 heads on 1, d 512, float32",
        lambda: dsv4.fmha(q, k, v, causal=True),
        lambda: sdpa(*theirs, enable_gqa=True).transpose(1, 2),
        repeat,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--bf16-sdpa", action="store_true", help="bf16 at the full 2048 x 2048")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console()
    console.print(f"torch {torch.__version__}, {options.threads} threads, best of {options.repeat}")

    table = Table("operation", "dsv4 ms", "SDPA ms", "SDPA / dsv4", "at least", "")
    results = []
    v4 = (compare(*case, options.repeat, 1.0) for case in cpu_v4.beside_dense_sdpa())
    for line in (*causal(options.repeat, options.bf16_sdpa), *masked(options.repeat), *v4):
        results.append(line)
        limit = "" if line["at_least"] is None else f"{line['at_least']:.2f}"
        table.add_row(
            line["name"],
            f"{line['dsv4_ms']:.1f}",
            f"{line['sdpa_ms']:.1f}",
            f"{line['ratio']:.2f}",
            limit,
            "ok" if line["ok"] else "TOO SLOW",
        )
    console.print(table)

    use = cpu_v4.memory()
    use["ok"] = use["extra_gib"] < LIMIT_GIB
    console.print(
        f"v4_attention, {use['name']}: {use['extra_gib']:.3f} GiB extra (under {LIMIT_GIB:g}), "
        f"{use['seconds']:.1f} s, {use['gflops']:.0f} GFLOP/s: {'ok' if use['ok'] else 'TOO MUCH'}"
    )
    if options.json:
        options.json.write_text(json.dumps({"speed": results, "memory": use}, indent=1))
    sys.exit(not all(line["ok"] for line in [*results, use]))


if __name__ == "__main__":
    main()
