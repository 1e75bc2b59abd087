"""The index_topk kernels on a CPU, through softsm: the scores of each architecture, one choice for both."""

from dataclasses import replace

import index_cases
import pytest
import torch

import dsv4
from dsv4.commands import variants
from dsv4.index import cpu, problem, sizes
from dsv4.index.kernels.scores import OWN
from dsv4.kernels.compat import TRITON_VERSION
from dsv4.runtime import aot


@pytest.fixture(params=["sm_90a", pytest.param("sm_100a", marks=pytest.mark.compile)])
def arch(request):
    if request.param == "sm_100a" and TRITON_VERSION < (3, 9):
        pytest.skip("the Blackwell kernels need triton >= 3.9")
    return request.param


@pytest.mark.compile
@pytest.mark.skipif(TRITON_VERSION < (3, 9), reason="the Blackwell kernels need triton >= 3.9")
def test_keys_of_a_decode_are_loaded_ahead_on_blackwell():
    """Triton pipelines a loop or not, without a word: without cp.async 128 requests take twice as long."""
    kernels = [x for x in variants.launches(("index", False, 1), variants.Sizes(), "sm_100a") if "OWNER" in x.constants]
    launch = next(x for x in kernels if x.kernel.__name__ == "index_scores" and x.constants["OWNER"] == OWN)
    compiled = aot.compile_kernel(launch.kernel, launch.arguments, launch.constants, 100)
    assert compiled.asm["ptx"].count("cp.async.cg.shared.global") >= 16


def test_requests_in_pages_with_ties(arch):
    arguments = index_cases.ragged()
    index_cases.assert_exact(index_cases.kernel(arch, **arguments), **arguments)


def test_a_page_that_is_not_there_is_chosen_last_and_has_no_name(arch, monkeypatch):
    """Where values are not checked, as on a GPU."""
    monkeypatch.setattr("dsv4.runtime.checks.values_checked", lambda x: False)
    arguments = index_cases.ragged()
    arguments["weights"] = -arguments["weights"].abs() - 1  # all scores are negative: zeros would come first
    arguments["block_table"][0, 3] = -7
    arguments["block_table"][2, 1] = 10**6
    lists, scores = index_cases.kernel(arch, **arguments)
    given = problem.build(**arguments)
    want = replace(given, out=torch.empty_like(lists), scores=torch.empty_like(scores))
    cpu.forward(want)
    assert torch.equal(lists, want.out) and torch.equal(scores, want.scores)


@pytest.mark.parametrize("arch, page, heads, dtype", [
    ("sm_90a", 64, 33, torch.bfloat16),
    *(pytest.param(*x, marks=pytest.mark.slow) for x in (
        ("sm_90a", 128, 12, torch.float16), ("sm_100a", 64, 33, torch.bfloat16), ("sm_100a", 128, 12, torch.float16),
    )),
], indirect=["arch"])  # fmt: skip
@pytest.mark.compile
def test_pages_of_whole_boxes_of_which_some_are_not_there(arch, page, heads, dtype, monkeypatch):
    """128 dims: TMA copies them on Hopper, for four queries at a time, of 33 heads in two products. Requests of 7 and 1
    queries, a CTA has both. 512 rows have as many groups as those of index_cases.ragged: the same choice."""
    monkeypatch.setattr("dsv4.runtime.checks.values_checked", lambda x: False)
    whole = index_cases.whole_numbers
    k = torch.cat([whole(9, page, 128), torch.full((9, page, 8), index_cases.NAN)], -1)[..., :128]  # rows apart
    table = torch.full((2, 512 // page), 99, dtype=torch.int32)
    table[:, :3] = torch.tensor([[4, 0, 7], [2, -1, 5]])
    lengths = torch.tensor([3 * page, 2 * page + 1, page, 1, 0, 7, 130, 3 * page - 7], dtype=torch.int32)
    weights = -whole(8, heads, size=2).float().abs() - 1  # all scores are negative: zeros would come first
    arguments = dict(q=whole(8, heads, 128).to(dtype), k=k.to(dtype), weights=weights, topk=20, scale=1.0,
                     lengths=lengths, block_table=table,
                     request_starts=torch.tensor([0, 7, 8], dtype=torch.int32))  # fmt: skip
    lists, scores = index_cases.kernel(arch, **arguments)
    want = replace(problem.build(**arguments), out=torch.empty_like(lists), scores=torch.empty_like(scores))
    cpu.forward(want)
    assert torch.equal(lists, want.out) and torch.equal(scores, want.scores)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["eager", "latest", "random"])
def test_one_sequence_of_the_models_size(arch, order):
    arguments = index_cases.one_sequence()
    index_cases.assert_best(index_cases.kernel(arch, order, **arguments), **arguments)


@pytest.mark.slow
def test_many_queries_share_keys(arch):
    """Nine queries, four to a CTA; six tiles and more than one split."""
    arguments = index_cases.one_sequence(n=9, rows=700, lengths=(700, 699, 640, 129, 128, 127, 1, 0, 513), topk=100)
    index_cases.assert_best(index_cases.kernel(arch, **arguments), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("heads, d", [(1, 8), (5, 24), (16, 64), (128, 128), (33, 256), (128, 256)])
def test_heads_and_dims(arch, heads, d):
    arguments = index_cases.one_sequence(n=5, rows=200, heads=heads, d=d, topk=7, lengths=(200, 150, 7, 6, 0))
    index_cases.assert_best(index_cases.kernel(arch, **arguments), **arguments)


def test_sequences_without_queries(arch="sm_90a"):
    arguments = dict(q=torch.zeros(2, 0, 4, 16), k=torch.zeros(2, 50, 16), weights=torch.zeros(2, 0, 4))
    arguments = {name: x.bfloat16() for name, x in arguments.items()} | dict(topk=3, positions=torch.zeros(2, 0).int())
    lists, scores = index_cases.kernel(arch, **arguments)
    assert lists.shape == scores.shape == (2, 0, 3)


@pytest.mark.slow
def test_a_batch_and_float16_and_strides(arch):
    q, k, w = (index_cases.whole_numbers(*s).half() for s in ((3, 5, 4, 16), (3, 150, 16), (3, 5, 4)))
    arguments = dict(q=q, k=k, weights=w, topk=11, positions=torch.randint(0, 602, (3, 5)), scale=1.0)
    index_cases.assert_exact(index_cases.kernel(arch, **arguments), **arguments)
    wide = dict(arguments, q=q.mT.contiguous().mT, k=torch.stack([k, k + 1], -1)[..., 0], weights=w.mT.contiguous().mT)
    assert torch.equal(index_cases.kernel(arch, **wide)[0], index_cases.kernel(arch, **arguments)[0])


@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 5, 100, 128, 1000])
@pytest.mark.parametrize("what", ["random", "equal", "two values", "rising", "far apart"])
def test_the_choice_in_one_round_and_in_several(arch, what, topk, monkeypatch):
    """Pieces have 256 items: 900 rows need two rounds, more for wide lists."""
    monkeypatch.setattr(sizes, "INDEX_PIECE", 256)
    monkeypatch.setattr("dsv4.index.kernels.choice.INDEX_PIECE", 256)
    monkeypatch.setattr("dsv4.index.kernels.choice.MAX_TOPK_BY_GROUPS", 0)  # not by groups
    g = torch.Generator().manual_seed(topk)
    scores = {
        "random": torch.randn(900, generator=g),
        "equal": torch.full((900,), -3.0),
        "two values": torch.randint(0, 2, (900,), generator=g).float(),
        "rising": torch.arange(900.0) / 7,
        "far apart": torch.randn(900, generator=g) * 10.0 ** torch.randint(-37, 38, (900,), generator=g),
    }[what].bfloat16()
    index_cases.assert_select(arch, scores, topk)


@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 60])
@pytest.mark.parametrize("what", ["random", "equal", "two values", "rising", "falling"])
def test_the_choice_of_more_groups_than_a_piece_has(arch, what, topk, monkeypatch):
    """Pieces have 1024 items: 17000 rows are 1063 groups, the best of which are in pieces of 512."""
    for name in ("dsv4.index.sizes.INDEX_PIECE", "dsv4.index.kernels.choice.INDEX_PIECE"):
        monkeypatch.setattr(name, 1024)
    assert sizes.index_candidates(17000, topk) == 3 * 128
    g = torch.Generator().manual_seed(topk)
    scores = {
        "random": torch.randn(17000, generator=g),
        "equal": torch.full((17000,), -3.0),
        "two values": torch.randint(0, 2, (17000,), generator=g).float(),
        "rising": torch.arange(17000.0) / 7,
        "falling": -torch.arange(17000.0) / 7,
    }[what].bfloat16()
    index_cases.assert_select(arch, scores, topk)


@pytest.mark.slow
def test_blocks_of_queries_and_a_plan_that_is_small(arch, monkeypatch):
    arguments = index_cases.ragged()
    want = dsv4.index_topk(**arguments)
    monkeypatch.setattr(sizes, "INDEX_BYTES", 4 * 2 * sizes.index_words(12 * 24, 20))  # two queries at a time
    assert torch.equal(index_cases.kernel(arch, **arguments)[0], want)
