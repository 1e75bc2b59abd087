"""Many CTAs to a query, on a CPU through softsm: a multiprocessor has four here, so two or four are many."""

import index_cases
import launches
import pytest
import torch
import v41_index

import dsv4
from dsv4.index import sizes
from dsv4.kernels.compat import TRITON_VERSION
from dsv4.runtime import launch

BLACKWELL = pytest.param(
    "sm_100a",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(TRITON_VERSION < (3, 9), reason="the Blackwell kernels need triton >= 3.9"),
    ],
)
# What chooses is the same for both architectures.
pytestmark = [pytest.mark.compile, pytest.mark.parametrize("arch", ["sm_90a", BLACKWELL])]


@pytest.fixture(autouse=True)
def seen(monkeypatch):
    """The launches of a test."""
    monkeypatch.setattr(sizes, "LEAST_SHARES", 2)
    monkeypatch.setattr(sizes, "BLOCK_SHARES", 2)
    monkeypatch.setattr(sizes, "LEAST_ROWS", {})
    found, ready = [], launch.ready_launch
    monkeypatch.setattr(launch, "ready_launch", lambda given, target: found.append(given) or ready(given, target))
    return found


def two_levels(arch, order, topk_blocks, **arguments):
    out = torch.full((len(arguments["q"]), arguments["topk"]), -2, dtype=torch.int32)
    with launches.race_free(arch, order=order):
        return dsv4.index_blocks(**arguments, topk_blocks=topk_blocks, out=out, backend="softsm")


@pytest.mark.parametrize("rows", [2100, *(pytest.param(x, marks=pytest.mark.slow) for x in (300, 4200))])
def test_two_shares_of_a_query(arch, rows, seen):
    """Ties everywhere, so that more rows than there is room for are not below the first cut; a list that is not full,
    and a query that sees nothing. 4200 rows: a share has more groups than it looks into at a time."""
    whole = index_cases.whole_numbers
    arguments = dict(q=whole(2, 4, 16), k=whole(rows, 16), weights=whole(2, 4).float(), topk=20, scale=1.0,
                     lengths=torch.tensor([rows, 7], dtype=torch.int32))  # fmt: skip
    index_cases.assert_exact(index_cases.kernel(arch, **arguments), **arguments)
    assert seen[-1].constants["SHARES"] == 2 and seen[-1].grid == (2, 2, 1)
    arguments["lengths"][1] = 0
    index_cases.assert_exact(index_cases.kernel(arch, **arguments), **arguments)


@pytest.mark.parametrize(
    "topk, each", [(5, 8), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((12, 4), (60, 1), (200, 1)))]
)
@pytest.mark.parametrize("what", ["equal", *(
    pytest.param(x, marks=pytest.mark.slow) for x in ("random", "two values", "rising", "falling", "side by side")
)])  # fmt: skip
def test_the_choice_by_units(arch, what, topk, each, seen):
    """2100 rows are 132 groups. If all are equal, five units of 128 rows are 640 keys, more than the shares rank: they
    are cut by number."""
    g = torch.Generator().manual_seed(topk)
    scores = {
        "random": torch.randn(2100, generator=g),
        "equal": torch.full((2100,), -3.0),
        "two values": torch.randint(0, 2, (2100,), generator=g).float(),
        "rising": torch.arange(2100.0) / 7,
        "falling": -torch.arange(2100.0) / 7,
        "side by side": torch.randn(2100, generator=g) * torch.where(torch.arange(2100) // 400 == 3, 40.0, 0.01),
    }[what].bfloat16()
    index_cases.assert_select(arch, scores, topk)
    assert seen[-2].constants["EACH"] == each and seen[-1].grid == (1, 4, 1)
    assert seen[-2].constants["SINGLE"] == (topk == 200)  # rows are the units


@pytest.mark.parametrize("order", ["latest", *(pytest.param(x, marks=pytest.mark.slow) for x in ("eager", "random"))])
@pytest.mark.parametrize("most", [40, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 2, 100))])
def test_blocks_of_few_queries(arch, most, order, seen):
    """700 rows are 88 blocks, the last one not full; and a consumer of those that are kept."""
    given = dict(lengths=(700, 683), topk=40, whole=True)
    arguments, other = v41_index.problem(2, 700, **given)[0], v41_index.problem(2, 700, seed=2, **given)[0]
    want = dsv4.index_blocks(**arguments, topk_blocks=most)
    got = two_levels(arch, order, most, **arguments)
    assert seen[-1].kernel.__name__ == "index_rank" and seen[-1].grid == (2, 2, 2)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    consumer = arguments | {name: other[name] for name in ("q", "weights", "q_scales")} | dict(blocks=want[1])
    index_cases.assert_exact(index_cases.kernel(arch, order, **consumer), **consumer)
    assert seen[-1].grid == (2, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("most", [3, 30])
@pytest.mark.parametrize("weights", ["whole", "none"])
def test_blocks_of_units_and_ties(arch, most, weights, seen):
    """4100 rows are 513 blocks in 65 units of eight groups, or in 257 groups; without weights all scores are equal."""
    arguments, _, _ = v41_index.problem(1, 4100, lengths=(4093,), topk=8, whole=True, heads=3)
    if weights == "none":
        arguments["weights"] = torch.zeros(1, 3)
    got, want = two_levels(arch, "latest", most, **arguments), dsv4.index_blocks(**arguments, topk_blocks=most)
    assert seen[-2].constants["BLOCK_EACH"] == {3: 8, 30: 4}[most]
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.slow
@pytest.mark.parametrize("what", ["random", "equal"])
def test_rows_in_several_turns_and_lists_too_long_for_registers(arch, what, monkeypatch, seen):
    """A share looks into 32 groups at a time, and has 66 of 263; equal rows of 13 units are 1664 keys."""
    monkeypatch.setattr("dsv4.index.kernels.choice.HELD_KEYS", 1024)
    monkeypatch.setattr("dsv4.index.kernels.choice.INDEX_PIECE", 512)
    scores = torch.randn(4200, generator=torch.Generator().manual_seed(1)).bfloat16()
    index_cases.assert_select(arch, scores if what == "random" else torch.full_like(scores, 2.0), 12)
    assert seen[-2].constants["EACH"] == 8 and seen[-2].constants["AT_ONCE"] == 32
