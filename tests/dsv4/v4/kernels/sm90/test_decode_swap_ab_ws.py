"""The Hopper kernel of V4 attention for FP8 rows and few heads, on a CPU through softsm."""

import launches
import pytest
import torch
from agreement import assert_agrees
from v41_problem import numbers

import dsv4
from dsv4 import reference
from dsv4.runtime import calls
from dsv4.v4.kernels.sm90 import entry

SEED = 13
NAN = float("nan")


def pool(count: int, per_page: int = 64) -> dsv4.Fp8Cache:
    return dsv4.Fp8Cache.pack(torch.randn(count, 512).bfloat16(), rows_per_page=per_page)


@pytest.fixture
def check(monkeypatch):
    """The kernel with this many heads per CTA and splits, races checked, agrees with the definition."""
    names = launches.launched(monkeypatch)

    def checked(heads: int, splits: int, order: str = "latest", **arguments) -> None:
        options = next(options for options, *_ in entry.SWAP_AB_WS[0] if options["HEADS"] == heads)
        monkeypatch.setattr(entry, "decode_kernel", lambda p, target: (entry.v4_decode_swap_ab_ws, options, splits))
        calls.forget()
        out = torch.full_like(arguments["q"], NAN)
        with launches.race_free("sm_90a", order=order, seed=SEED):
            got = dsv4.v4_attention(**arguments, out=out, return_lse=True, backend="softsm")
        assert names[0] == "v4_decode_swap_ab_ws"
        assert_agrees(got, reference.v4_attention, **arguments)

    return checked


@pytest.mark.compile
@pytest.mark.parametrize(
    "order", ["latest", pytest.param("eager", marks=pytest.mark.slow), pytest.param("random", marks=pytest.mark.slow)]
)
def test_slots_are_filled_again_and_again(order, check):
    """Nine blocks of one query in two slots; none of the next one, whose Q must have landed before its memory serves
    the sums at the end; two of the last."""
    check(
        16, 1, order, q=torch.randn(3, 12, 512).bfloat16(), window=pool(100), window_indices=numbers(3, 150, of=100),
        window_lengths=torch.tensor([150, 0, 3], dtype=torch.int32), compressed=pool(90, 2),
        compressed_indices=numbers(3, 370, of=90), compressed_lengths=torch.tensor([370, 0, 7], dtype=torch.int32),
        sink=torch.randn(12), inverse_rope=(reference.rope_table(50, 64), torch.tensor([3, 49, 1], dtype=torch.int32)),
    )  # fmt: skip


@pytest.mark.compile
def test_scores_that_rise_late(check):
    """A block of nothing; one of small scores; one that lifts them by less than what moves a maximum; one far above."""
    rows = torch.randn(192, 512) * torch.tensor([0.1, 1.0, 40.0]).repeat_interleave(64)[:, None]
    window = torch.cat([torch.full((64,), -1), torch.arange(192), torch.arange(10)]).int()
    check(
        16, 1, q=torch.randn(1, 12, 512).bfloat16(), window=dsv4.Fp8Cache.pack(rows.bfloat16(), rows_per_page=64),
        window_indices=window[None], window_lengths=torch.tensor([266], dtype=torch.int32), compressed=pool(90, 2),
        compressed_indices=numbers(1, 70, of=90), compressed_lengths=torch.tensor([70], dtype=torch.int32),
        sink=torch.randn(12), inverse_rope=(reference.rope_table(50, 64), torch.tensor([3], dtype=torch.int32)),
    )  # fmt: skip


@pytest.mark.compile
def test_a_first_block_far_below_the_guess(check):
    """Maxima begin with 0, and every score is about -180: made with 0, all of P would vanish."""
    q = torch.randn(1, 1, 512).expand(1, 12, 512)
    rows = -q[0, :1] + torch.randn(90, 512) * 0.1
    window = dsv4.Fp8Cache.pack(rows.bfloat16(), rows_per_page=64)
    check(
        16, 1, q=(q * 8).bfloat16(), window=window,
        window_indices=torch.arange(70, dtype=torch.int32)[None], window_lengths=torch.tensor([70], dtype=torch.int32),
        compressed=pool(90, 2), compressed_indices=numbers(1, 70, of=90),
        compressed_lengths=torch.tensor([0], dtype=torch.int32), sink=torch.full((12,), -2000.0),
        inverse_rope=(reference.rope_table(50, 64), torch.tensor([3], dtype=torch.int32)),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("order", ["latest", "eager", "random"])
def test_32_heads_split_and_merged(order, check):
    """40 heads are two tiles; a split has two blocks of rows, or one, or none."""
    check(
        32, 3, order, q=torch.randn(2, 40, 512).bfloat16(), window=pool(64), window_indices=numbers(2, 60, of=64),
        compressed=pool(300, 2), compressed_indices=numbers(2, 300, of=300),
        compressed_lengths=torch.tensor([300, 70], dtype=torch.int32), softmax_scale=-0.1,
    )  # fmt: skip


@pytest.mark.slow  # two variants of their own
@pytest.mark.parametrize("order", ["latest", "eager", "random"])
def test_queries_that_are_left_over_are_split(order, monkeypatch):
    """Six queries for four SMs: four whole, then two in two splits each, by a second launch, which may begin before the
    first has ended. What follows must not: the same call again writes the same rows."""
    names = launches.launched(monkeypatch)
    monkeypatch.setattr(entry, "WORTH_BLOCKS", 2)
    rows = pool(99, 3)
    arguments = dict(
        q=torch.randn(6, 12, 512).bfloat16(), window=rows, window_indices=numbers(6, 130, of=99), compressed=rows,
        compressed_indices=numbers(6, 190, of=99), sink=torch.randn(12),
        window_lengths=torch.tensor([130, 0, 130, 1, 70, 130], dtype=torch.int32),
        compressed_lengths=torch.tensor([190, 0, 10, 190, 100, 180], dtype=torch.int32),
        inverse_rope=(reference.rope_table(50, 64), torch.tensor([3, 49, 0, 7, 8, 1], dtype=torch.int32)),
    )  # fmt: skip
    out = torch.full_like(arguments["q"], NAN)
    with launches.race_free("sm_90a", sms=4, order=order, seed=SEED):
        for _ in range(2):
            got = dsv4.v4_attention(**arguments, out=out, return_lse=True, backend="softsm")
    assert names == 2 * ["v4_decode_swap_ab_ws", "v4_decode_swap_ab_ws", "combine"]
    assert_agrees(got, reference.v4_attention, **arguments)
