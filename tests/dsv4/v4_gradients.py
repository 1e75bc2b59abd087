"""Requests for the gradients of v4_attention, and what the formulas say: for tests of kernels, softsm and a GPU."""

from contextlib import nullcontext
from dataclasses import replace

import launches
import torch
from dsink import assert_dsink

import softsm
from dsv4 import reference
from dsv4.reference import backward as reference_backward
from dsv4.v4 import problem
from dsv4.v4.backward import V4Backward

BF16, FP16 = torch.bfloat16, torch.float16

# What the kernels of both architectures must get right: sizes and options of `request`.
TWO_POOLS = dict(n=3, heads=40, window=(50, 70), compressed=(30, 40), rope=64, dlse=True)
TWO_TILES_OF_HEADS = dict(n=3, heads=80, window=(90, 128), sink=False, paged=True, rope=96)
EIGHT_BLOCKS = dict(n=2, heads=64, window=(90, 400), compressed=(30, 70))  # every barrier goes round several times
LONG_LISTS = dict(n=2, heads=40, window=(50, 130), compressed=(30, 40), rope=64, dlse=True)
ANY_SIZE_FP16 = dict(n=3, heads=80, window=(50, 70), compressed=(30, 40), dlse=True, dtype=FP16)


def draw(*shape, seed, dtype=BF16, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def lists(n, width, rows, seed):
    """-1 here and there, duplicates, and the last query without a row."""
    found = torch.randint(-1, rows, (n, width), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    found[-1] = -1
    return found


def request(n, heads, window, compressed=None, sink=True, dlse=False, rope=0, deterministic=False, paged=False,
            device="cpu", dtype=BF16, size=1.0):  # fmt: skip
    """window, compressed: (rows, entries of a list). size: of dout and dlse. Inputs with their forward pass, gradients
    of NaN, the formulas."""
    args = dict(q=draw(n, heads, 512, seed=0, dtype=dtype), window=draw(window[0], 512, seed=1, dtype=dtype))
    args["window_indices"] = lists(n, window[1], window[0], 2)
    args["window"][7] = float("nan")
    args["window_indices"][args["window_indices"] == 7] = 8  # no query lists row 7
    if compressed is not None:
        rows, entries = compressed
        args |= dict(compressed=draw(rows, 512, seed=3, dtype=dtype), compressed_indices=lists(n, entries, rows, 4))
    if paged:
        args |= dict(
            compressed=draw(6, 8, 512, seed=3, dtype=dtype),
            compressed_block_table=torch.tensor([[5, 1], [2, 0]], dtype=torch.int32),
            request_starts=torch.tensor([0, 1, n - 1], dtype=torch.int32),
            compressed_lengths=torch.full((n,), 13, dtype=torch.int32),
        )
    args["sink"] = draw(heads, seed=5, dtype=torch.float32) if sink else None
    if isinstance(sink, tuple):  # of as many heads; the others have the last
        args["sink"] = torch.tensor([*sink, *sink[-1:] * (heads - len(sink))])
    args["inverse_rope"] = (reference.rope_table(60, rope), torch.arange(n) * 9 % 60) if rope else None
    args = {
        name: tuple(part.to(device) for part in x) if isinstance(x, tuple) else x if x is None else x.to(device)
        for name, x in args.items()
    }
    dout = draw(n, heads, 512, seed=6, device=device, dtype=dtype) * size
    dlse = draw(n, heads, seed=7, dtype=torch.float32, device=device) * size if dlse else None
    out, lse = reference.v4_attention(**args)
    p = replace(problem.build(**args, deterministic=deterministic), out=out.to(dtype), lse=lse.float())
    empty = [None if x is None else torch.full_like(x, float("nan")) for x in (p.q, p.window, p.compressed, p.sink)]
    b = V4Backward(p, dout, dlse, *empty)
    want = reference_backward.v4_attention(**args, dout=dout, dlse=dlse)
    return b, want, reference_backward.v4_attention(**args, dout=dout, dlse=dlse, p_dtype=dtype)


def check(b, want, low):
    for name, got in (("q", b.dq), ("window", b.dwindow), ("compressed", b.dcompressed)):
        if got is None:
            continue
        ref, rounded = getattr(want, name), getattr(low, name).to(got.dtype).double()
        error, bound = (float((x - ref).norm() / ref.norm()) for x in (got.double(), rounded))
        assert error <= 1.5 * bound, f"d{name}: {error:.2e}, rounded {bound:.2e}"
    for head in range(4):
        ref, rounded, got = (x[:, head].double() for x in (want.q, low.q.to(b.dq.dtype), b.dq))
        error, bound = (float((x - ref).norm() / ref.norm()) for x in (got, rounded))
        assert error <= 2 * bound, f"dq of head {head}: {error:.2e}, rounded {bound:.2e}"
    assert not b.dwindow[7].any() and not b.dq[-1].any()
    if b.dsink is not None:
        p = b.forward
        assert_dsink(b.dsink, want.sink, p.out, b.dout, p.lse, p.sink)


def check_in_softsm(arch, problem, order="", **options):
    """An architecture's kernels against the formulas; with an order of completion, also that nothing races."""
    b, want, low = request(**problem, **options)
    checked = softsm.checking(order=order, seed=7) if order else nullcontext()
    with softsm.use(arch), checked as report:
        launches.run(b)
    assert not report, str(report)
    check(b, want, low)
