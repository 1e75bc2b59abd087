"""Which sequences of a varlen batch go together as a dense one."""

from itertools import accumulate

import pytest
import torch

pytest.importorskip("triton")
from dsv4.fmha import problem  # noqa: E402
from dsv4.fmha.kernels import by_sequence  # noqa: E402


def sizes(pairs, heads=1, **options):
    """[[(queries, keys), ...], ...] of sequences with these numbers of queries and keys."""
    cu_q, cu_k = (torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in zip(*pairs))
    q, k = (torch.zeros(int(cu[-1]), heads, 256, dtype=torch.bfloat16) for cu in (cu_q, cu_k))
    found = by_sequence.together(problem.varlen(q, k, k, cu_q, cu_k, **options))
    return [[(x.queries, x.keys) for x in spans] for spans in found]


def test_causal_ones_of_about_one_length():
    found = sizes([(100, 100), (90, 90), (200, 200), (95, 95)], causal=True)
    assert found == [[(100, 100), (90, 90), (95, 95)], [(200, 200)]]


def test_causal_ones_with_as_many_more_keys():
    assert sizes([(100, 130), (90, 90), (95, 125)], causal=True) == [[(100, 130), (95, 125)], [(90, 90)]]


@pytest.mark.parametrize("options", [dict(), dict(window=(20, 1))])
def test_others_only_of_one_size(options):
    assert sizes([(60, 70), (60, 71), (60, 70)], **options) == [[(60, 70), (60, 70)], [(60, 71)]]


def test_long_ones_go_alone():
    long, few = (1025, 1025), (4, 1025)
    assert sizes([long, long, few, few], causal=True) == [[long]] * 2 + [[few]] * 2


@pytest.mark.parametrize("heads", [1, 64])
def test_the_longest_that_go_together(heads):
    assert sizes([(1024, 1024)] * 2, heads=heads, causal=True) == [[(1024, 1024)] * 2]


def test_nothing_is_done_for_those_without_queries_or_keys():
    assert sizes([(0, 9), (5, 5), (7, 0)], causal=True) == [[(5, 5)]]


def test_copies_are_no_larger_than_the_batch():
    """One sequence of 128 tokens and many of one: at 128 tokens each they would take 100 times the memory."""
    found = sizes([(128, 128), *[(1, 1)] * 600], causal=True)
    assert sum(map(len, found)) == 601 and max(map(len, found)) == 728 // 128
