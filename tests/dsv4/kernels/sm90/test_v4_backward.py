"""The gradients of v4_attention by the Hopper kernels, through softsm, against the fp64 formulas."""

from dataclasses import replace

import pytest
import torch

import softsm
from dsv4 import reference, reference_backward
from dsv4.kernels.sm90.v4 import backward
from dsv4.v4 import problem
from dsv4.v4.backward import V4Backward

BF16 = torch.bfloat16


def draw(*shape, seed, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def lists(n, width, rows, seed):
    """-1 here and there, duplicates, and the last query without a row."""
    found = torch.randint(-1, rows, (n, width), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    found[-1] = -1
    return found


def request(n, heads, window, compressed=None, sink=True, dlse=False, rope=False, deterministic=False, paged=False):
    """window, compressed: (rows, entries of a list). Inputs with their forward pass, gradients of NaN, the formulas."""
    args = dict(q=draw(n, heads, 512, seed=0), window=draw(window[0], 512, seed=1))
    args["window_indices"] = lists(n, window[1], window[0], 2)
    args["window"][7] = float("nan")
    args["window_indices"][args["window_indices"] == 7] = 8  # nobody lists row 7
    if compressed is not None:
        rows, entries = compressed
        args |= dict(compressed=draw(rows, 512, seed=3), compressed_indices=lists(n, entries, rows, 4))
    if paged:
        args |= dict(
            compressed=draw(6, 8, 512, seed=3),
            compressed_block_table=torch.tensor([[5, 1], [2, 0]], dtype=torch.int32),
            request_starts=torch.tensor([0, 1, n - 1], dtype=torch.int32),
            compressed_lengths=torch.full((n,), 13, dtype=torch.int32),
        )
    args["sink"] = draw(heads, seed=5, dtype=torch.float32) if sink else None
    args["inverse_rope"] = (reference.rope_table(60, 64), torch.arange(n) * 9) if rope else None
    dout = draw(n, heads, 512, seed=6)
    dlse = draw(n, heads, seed=7, dtype=torch.float32) if dlse else None
    out, lse = reference.v4_attention(**args)
    p = replace(problem.build(**args), out=out.to(BF16), lse=lse.float())
    empty = [None if x is None else torch.full_like(x, float("nan")) for x in (p.q, p.window, p.compressed, p.sink)]
    b = V4Backward(p, dout, dlse, *empty, deterministic=deterministic)
    want = reference_backward.v4_attention(**args, dout=dout, dlse=dlse)
    return b, want, reference_backward.v4_attention(**args, dout=dout, dlse=dlse, p_dtype=BF16)


def run(b):
    with softsm.use("sm_90a"):
        backward.backward(b)


def check(b, want, low):
    for name, got in (("q", b.dq), ("window", b.dwindow), ("compressed", b.dcompressed)):
        if got is None:
            continue
        ref, rounded = getattr(want, name), getattr(low, name).to(BF16).double()
        error, bound = (float((x - ref).norm() / ref.norm()) for x in (got.double(), rounded))
        assert error <= 1.5 * bound, f"d{name}: {error:.2e}, rounded {bound:.2e}"
    assert not b.dwindow[7].any() and not b.dq[-1].any()
    if b.dsink is not None:  # a sum with cancellation: held to the size of its terms
        assert float(((b.dsink.double() - want.sink).abs() / (1 + want.sink.abs())).max()) < 1e-2


def test_window_alone():
    b, want, low = request(3, 64, (90, 70))
    run(b)
    check(b, want, low)


@pytest.mark.parametrize("deterministic", [False, True])
def test_two_pools_rotation_and_the_gradient_of_the_lse(deterministic):
    b, want, low = request(3, 40, (50, 70), (30, 40), rope=True, dlse=True, deterministic=deterministic)
    run(b)
    check(b, want, low)


@pytest.mark.slow
def test_two_tiles_of_heads_and_rows_by_block_table():
    for deterministic in (False, True):
        b, want, low = request(3, 80, (90, 128), sink=False, paged=True, deterministic=deterministic)
        run(b)
        check(b, want, low)


@pytest.mark.slow
def test_deterministic_in_parts(monkeypatch):
    """One query at a time is held, and the sums are those of all at once."""
    b, want, low = request(4, 16, (50, 70), deterministic=True)
    run(b)
    whole = b.dwindow.clone()
    monkeypatch.setattr(backward, "STORED_BYTES", 0)
    run(b)
    check(b, want, low)
    assert torch.equal(b.dwindow, whole)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["latest", "eager", "random"])
def test_no_race_whenever_copies_and_products_complete(order):
    """Eight blocks, so that every barrier goes round several times."""
    b, want, low = request(2, 64, (90, 400), (30, 70))
    with softsm.use("sm_90a"), softsm.checking(races=True, order=order, seed=7) as report:
        backward.backward(b)
    assert "nothing found" in str(report), str(report)
    check(b, want, low)


def test_what_the_kernels_do_not_take_is_said():
    b, _, _ = request(2, 8, (20, 9))
    assert backward.supports(b) is None
    assert "float16" in backward.supports(replace(b, forward=replace(b.forward, q=b.forward.q.half())))
