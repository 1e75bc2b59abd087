"""index_topk on FP4 keys, with FP4 and with e4m3 queries, against the definition; wrong arguments are named."""

import pytest
import torch
import v41_index

import dsv4
from dsv4.caches.index_keys import IndexCache


@pytest.mark.parametrize("fp4_queries", [True, False])
def test_lists_are_the_best_rows_by_the_definition(fp4_queries):
    arguments, q, keys = v41_index.problem(4, 500, lengths=(500, 300, 50, 0), fp4_queries=fp4_queries)
    lists, scores = dsv4.index_topk(**arguments, return_scores=True)
    full = v41_index.scores_of(arguments, q, keys)
    want = v41_index.select(full, arguments["lengths"], 64)
    assert torch.equal(lists.sort(-1, descending=True).values, want.sort(-1, descending=True).values)
    there = lists >= 0
    bound = 2 * (32 * 130) ** 0.5 * 2.0**-24 * full.abs().max()  # as in index_cases.assert_best
    assert (scores.double() - full.gather(1, lists.clamp_min(0).long()))[there].abs().max() <= bound
    assert (scores[~there] == -torch.inf).all()


def test_scores_are_rounded_where_the_reference_rounds():
    """Equal scores are common then: the sets agree but for rows with the last score of a list."""
    arguments, q, keys = v41_index.problem(3, 700, lengths=(700, 650, 20))
    lists, scores = dsv4.index_topk(**arguments, bf16_scores=True, return_scores=True)
    full = v41_index.scores_of(arguments, q.bfloat16(), keys.bfloat16(), bf16=True)
    for n, seen in enumerate((700, 650, 20)):
        count = min(seen, 64)
        best = full[n, :seen].sort(descending=True).values[:count]
        assert torch.equal(scores[n, :count].double(), best.double())
        assert torch.equal(full[n, lists[n, :count].long()].double(), best.double())
    assert len(scores[0].unique()) < 64  # ties


def test_ties_take_the_lower_row():
    arguments, q, keys = v41_index.problem(2, 300, heads=3, topk=100, whole=True)
    lists = dsv4.index_topk(**arguments)
    full = v41_index.scores_of(arguments, q, keys)
    for n in range(2):
        order = sorted(range(300), key=lambda row: (-float(full[n, row]), row))[:100]
        assert lists[n].tolist() == order


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(q_scales=None), "q: .*uint8.*float8_e4m3fn"),
        (dict(q_scales=torch.zeros(2, 31, dtype=torch.int32)), "q_scales"),
        (dict(q_scales=torch.zeros(2, 32)), "q_scales: .*int32"),
        (dict(k=IndexCache.empty(9, 64)), "q_scales: .*FP4"),
        (dict(q=torch.zeros(2, 32, 32, dtype=torch.uint8)), "q: .*64"),
        (dict(k=torch.zeros(4, 64, 67, dtype=torch.uint8)), "q_scales: .*FP4"),
        (dict(bf16_scores=1), "bf16_scores"),
        (dict(blocks=torch.zeros(2, 4)), "blocks: .*int32"),
        (dict(blocks=torch.zeros(3, 4, dtype=torch.int32)), "blocks"),
        (dict(blocks=torch.full((2, 4), 99, dtype=torch.int32)), "blocks: .*99"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, words):
    arguments, _, _ = v41_index.problem(2, 500)
    with pytest.raises(ValueError, match=words):
        dsv4.index_topk(**(arguments | change))
