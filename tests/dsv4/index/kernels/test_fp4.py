"""The kernels for FP4 keys and for two levels on a CPU, through softsm."""

from dataclasses import replace

import index_cases
import launches
import pytest
import torch
import v41_index

import dsv4
from dsv4.index import cpu, problem
from dsv4.kernels.compat import TRITON_VERSION

BLACKWELL = pytest.param(
    "sm_100a",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(TRITON_VERSION < (3, 9), reason="the Blackwell kernels need triton >= 3.9"),
    ],
)
pytestmark = pytest.mark.parametrize("arch", ["sm_90a", BLACKWELL])


def source(arch, order="latest", **arguments):
    """(lists, blocks) of the kernels, races checked."""
    out = torch.full((len(arguments["q"]), arguments["topk"]), -2, dtype=torch.int32)
    with launches.race_free(arch, order=order):
        got = dsv4.index_blocks(**arguments, out=out, backend="softsm")
    return got


def assert_two_levels(arch, arguments, other, topk_blocks, order="latest"):
    """Scores of whole numbers are exact, so lists and blocks are, ties included."""
    got, want = (
        source(arch, order, **arguments, topk_blocks=topk_blocks),
        dsv4.index_blocks(**arguments, topk_blocks=topk_blocks),
    )
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    consumer = arguments | {name: other[name] for name in ("q", "weights", "q_scales") if name in other}
    consumer["blocks"] = want[1]
    index_cases.assert_exact(index_cases.kernel(arch, order, **consumer), **consumer)


@pytest.mark.compile
def test_a_source_and_its_consumer(arch):
    """700 rows are 88 blocks, of which 40 are kept; the last one is not full."""
    given = dict(lengths=(700, 683, 9), topk=40, whole=True)
    assert_two_levels(arch, v41_index.problem(3, 700, **given)[0], v41_index.problem(3, 700, seed=2, **given)[0], 40)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["eager", "latest", "random"])
@pytest.mark.parametrize("page, fp4_queries, heads", [(32, True, 32), (24, False, 12), (128, True, 64), (64, False, 5)])
def test_pages_queries_and_heads(arch, page, fp4_queries, heads, order):
    """Pages of less than a tile, of part of one, and of several."""
    given = dict(lengths=(300, 257, 8, 0, 1), topk=20, whole=True, page=page, fp4_queries=fp4_queries, heads=heads)
    other = v41_index.problem(5, 300, seed=2, **given)[0]
    assert_two_levels(arch, v41_index.problem(5, 300, **given)[0], other, 16, order)


@pytest.mark.slow
@pytest.mark.parametrize("sms", [1, 20])
def test_tiles_of_a_cta_are_neighbours_or_far_apart(arch, sms, monkeypatch):
    """More CTAs than there are places for, and fewer; most requests are far shorter than the block table."""
    launches.num_sms(monkeypatch, sms)
    given = dict(lengths=(700, 130, 9, 0, 520), topk=40, whole=True)
    other = v41_index.problem(5, 700, seed=2, **given)[0]
    assert_two_levels(arch, v41_index.problem(5, 700, **given)[0], other, 40, "random")


@pytest.mark.slow
@pytest.mark.parametrize("each", [2, 5, 9])
def test_many_queries_share_keys(arch, each):
    lengths = (700, 699, 640, 129, 128, 127, 1, 0, 513)[:each]
    arguments = v41_index.problem(each, 700, lengths=lengths, requests=1, whole=True, topk=30)[0]
    index_cases.assert_exact(index_cases.kernel(arch, **arguments), **arguments)
    assert_two_levels(arch, arguments, v41_index.problem(each, 700, requests=1, whole=True, seed=3)[0], 20)


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("fp4_queries", [False, True])
def test_random_numbers(arch, fp4_queries, bf16):
    """Scores to the rounding of fp32, or of bf16, where a sum that is rounded another way moves by one unit."""
    arguments, q, keys = v41_index.problem(2, 700, lengths=(700, 129), fp4_queries=fp4_queries)
    lists, scores = index_cases.kernel(arch, **arguments, bf16_scores=bf16)
    full = v41_index.scores_of(arguments, *((x.bfloat16() if bf16 else x) for x in (q, keys)), bf16=bf16).double()
    exact = v41_index.scores_of(arguments, q, keys)
    bound = (2.0**-8 if bf16 else 2 * (32 * 130) ** 0.5 * 2.0**-24) * exact.abs().max()
    for n, seen in enumerate((700, 129)):
        chosen = lists[n].long()
        assert len(chosen.unique()) == 64 and (chosen < seen).all()
        assert (scores[n].double() - full[n, chosen]).abs().max() <= bound
        assert full[n, chosen].min() >= full[n, :seen].topk(64).values[-1] - 2 * bound


def test_groups_far_apart_are_exact_up_to_2_11(arch):
    """Keys whose four scales differ by up to 2^11; a group further below counts as nothing."""
    arguments, _, _ = v41_index.problem(3, 700, lengths=(700, 683, 9), topk=40, whole=True)
    cache = arguments["k"]
    steps = torch.tensor([0, -1, -7, -11])[
        torch.randint(0, 4, (cache.rows, 4), generator=torch.Generator().manual_seed(1))
    ]
    steps[:, 0] = 0
    cache.scale_view().copy_((127 + steps).to(torch.uint8).view(cache.pages, 64, 4))
    lists, scores = index_cases.kernel(arch, **arguments)
    want = dsv4.index_topk(**arguments, return_scores=True)
    assert torch.equal(scores, want[1])  # sums of few whole numbers times 2^-11: exact in fp32
    cache.scale_view()[:, :, 3] = 127 - 12
    _, less = index_cases.kernel(arch, **arguments)
    cache.data_view()[:, :, 48:] = 0
    assert torch.equal(less, dsv4.index_topk(**arguments, return_scores=True)[1])


@pytest.mark.slow
def test_a_page_that_is_not_there_is_chosen_last_and_has_no_name(arch, monkeypatch):
    """Where values are not checked, as on a GPU; nor blocks that are none."""
    monkeypatch.setattr("dsv4.runtime.checks.values_checked", lambda x: False)
    arguments, _, _ = v41_index.problem(2, 300, lengths=(300, 290), topk=280, whole=True, page=32)
    arguments["weights"] = -arguments["weights"].abs() - 1  # all scores are negative: zeros would come first
    arguments["block_table"][0, 3], arguments["block_table"][1, 1] = -7, 10**6
    blocks = torch.arange(48, dtype=torch.int32).repeat(2, 1)
    blocks[0, 5], blocks[1, 7] = -5, 2**31 - 1
    for more in ({}, dict(blocks=blocks)):
        lists, scores = index_cases.kernel(arch, **arguments, **more)
        given = problem.build(**(arguments | more | dict(k=arguments["k"].page_view())))
        want = replace(given, out=torch.empty_like(lists), scores=torch.empty_like(scores))
        cpu.forward(want)
        assert torch.equal(lists, want.out) and torch.equal(scores, want.scores)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_other_keys_in_two_levels(arch, kind):
    arguments = index_cases.ragged() if kind == "bf16" else index_cases.fp8_ragged()
    assert_two_levels(arch, arguments, {}, 12)
    index_cases.assert_exact(index_cases.kernel(arch, **arguments, bf16_scores=True), **arguments, bf16_scores=True)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 2, 30, 60])
def test_blocks_in_several_rounds(arch, most, monkeypatch):
    """Pieces of 128 blocks, of which a round keeps at most half: 3000 rows are 375 of them."""
    for name in ("dsv4.index.sizes.INDEX_PIECE", "dsv4.index.kernels.choice.INDEX_PIECE"):
        monkeypatch.setattr(name, 128)
    arguments, _, _ = v41_index.problem(3, 3000, lengths=(3000, 2049, 7), topk=8, whole=True, heads=3)
    got, want = source(arch, **arguments, topk_blocks=most), dsv4.index_blocks(**arguments, topk_blocks=most)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.slow
def test_a_large_piece_of_blocks(arch):
    """8180 blocks, for which a CTA has 32 warps."""
    arguments, _, _ = v41_index.problem(1, 8192 * 8 - 100, heads=3, topk=512, whole=True)
    got, want = source(arch, **arguments, topk_blocks=2048), dsv4.index_blocks(**arguments, topk_blocks=2048)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
