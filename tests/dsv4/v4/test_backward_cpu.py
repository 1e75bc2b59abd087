"""The gradients of v4_attention on a CPU, in fp64, against the formulas: blocks must not show."""

from dataclasses import replace

import pytest
import torch
from live_bytes import LiveBytes

from dsv4 import reference
from dsv4.reference import backward as reference_backward
from dsv4.v4 import backward_cpu, cpu, problem
from dsv4.v4.backward import V4Backward
from dsv4.v4.options import V4Options

D, N, H = 16, 9, 3


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def lists(n, width, rows, seed):
    """-1 here and there, duplicates, and one query without a row."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(-2, rows, (n, width), generator=generator, dtype=torch.int32).clamp_min(-1)
    found[4] = -1
    return found


WANTED = ("q", "window", "compressed")


def gradients(q, window, window_indices, compressed=None, *, dout, dlse=None, wanted=WANTED, **options):
    """Call the backend directly: the public function does not accept fp64."""
    out, lse = reference.v4_attention(q, window, window_indices, compressed, **options)
    rope = options.pop("inverse_rope", (None, None))
    p = problem.V4Problem(
        q=q, window=window, window_indices=window_indices, options=V4Options(softmax_scale=D**-0.5),
        compressed=compressed, out=out, lse=lse, cos_sin=rope[0], positions=rope[1],
        block_table=options.pop("compressed_block_table", None), **options,
    )  # fmt: skip
    pools = dict(q=q, window=window, compressed=compressed)
    empty = {f"d{name}": torch.full_like(pools[name], float("nan")) for name in wanted if pools[name] is not None}
    b = V4Backward(p, dout, dlse, **empty)
    if p.sink is not None:
        b = replace(b, dsink=torch.full_like(p.sink, float("nan")))
    backward_cpu.backward(b)
    return b.dq, b.dwindow, b.dcompressed, b.dsink


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(cpu, "ROW_BLOCK", 4)
    monkeypatch.setattr(backward_cpu, "BLOCK_BYTES", 20000)


def agree(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)  # fp64: sums that cancel, 2^-53 a rounding


CALLS = {
    "window alone": dict(),
    "lengths": dict(window_lengths=torch.tensor([7, 0, 3, 1, 7, 2, 5, 6, 4], dtype=torch.int32)),
    "two pools": dict(compressed=normal(12, D), compressed_indices=lists(N, 6, 12, 1)),
    "pages": dict(
        compressed=normal(5, 4, D),
        compressed_block_table=torch.tensor([[4, 1, 0], [2, 2, 3]], dtype=torch.int32),
        request_starts=torch.tensor([0, 5, 7], dtype=torch.int32),
        compressed_lengths=torch.tensor([1, 4, 9, 12, 0, 11, 8, 3, 3], dtype=torch.int32),
    ),
    "rotated": dict(inverse_rope=(reference.rope_table(30, 6).double(), torch.arange(N) * 3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients(name):
    window = normal(4, 5, D) if name == "pages" else normal(20, D)
    args = (normal(N, H, D), window, lists(N, 7, 20, 0))
    for more in ({}, dict(sink=normal(H)), dict(dlse=normal(N, H)), dict(sink=normal(H), dlse=normal(N, H))):
        options = dict(CALLS[name]) | more | dict(dout=normal(N, H, D, seed=9))
        agree(gradients(*args, **options), reference_backward.v4_attention(*args, **options))


def test_rows_nobody_lists_hold_nan_and_get_nothing():
    window, indices = normal(20, D), lists(N, 7, 20, 0)
    unlisted = torch.ones(20, dtype=torch.bool)
    unlisted[indices[indices >= 0].long()] = False
    window[unlisted] = float("nan")
    assert unlisted.any()
    dq, dwindow, _, _ = gradients(normal(N, H, D), window, indices, dout=normal(N, H, D, seed=9))
    assert dq.isfinite().all() and dwindow.isfinite().all() and not dwindow[unlisted].any()


def test_only_what_is_wanted():
    args, options = (normal(N, H, D), normal(20, D), lists(N, 7, 20, 0)), dict(CALLS["two pools"], dout=normal(N, H, D))
    want = reference_backward.v4_attention(*args, **options)
    for wanted in ("q", "window", "compressed"):
        got = gradients(*args, **options, wanted=(wanted,))
        for name, a, b in zip(("q", "window", "compressed"), got, want):
            assert (a is None) == (name != wanted)
            if a is not None:
                torch.testing.assert_close(a, b)


def test_memory_is_within_twice_the_forward_pass(monkeypatch):
    """Besides inputs, output and gradients no more than twice the bytes of q, rows, lists and out: the rows that all
    queries list would be seven times as many."""
    n, heads, d, rows, listed = 512, 4, 64, 300, 64
    q, out, dout, dq = (torch.randn(n, heads, d) for _ in range(4))
    window, dwindow = (torch.randn(rows, d) for _ in range(2))
    indices = torch.randint(0, rows, (n, listed), dtype=torch.int32)
    lse = torch.full((n, heads), 8.0)
    p = problem.V4Problem(
        q=q, window=window, window_indices=indices, options=V4Options(softmax_scale=0.1), out=out, lse=lse
    )
    forward = sum(x.nbytes for x in (q, out, window, indices))
    monkeypatch.setattr(cpu, "ROW_BLOCK", listed)
    for block, few in ((1 << 18, True), (1 << 30, False)):  # all queries at once: the meter sees them
        monkeypatch.setattr(backward_cpu, "BLOCK_BYTES", block)
        with LiveBytes(q, out, dout, dq, window, dwindow, indices, lse) as live:
            backward_cpu.backward(V4Backward(p, dout, None, dq, dwindow))
        assert (0 < live.peak <= 2 * forward) == few, f"{live.peak / forward:.2f} times the forward's tensors"
