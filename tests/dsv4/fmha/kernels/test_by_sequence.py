"""Which sequences of a varlen batch the chain of gradients processes together, if it does not accept all of them."""

from itertools import accumulate, pairwise

import pytest
import torch

pytest.importorskip("triton")
from dsv4.fmha import problem  # noqa: E402
from dsv4.fmha.kernels import by_sequence, chain  # noqa: E402


def sizes(pairs, heads=1, **options):
    """[[(queries, keys), ...], ...] of sequences with these numbers of queries and keys."""
    cu_q, cu_k = (torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in zip(*pairs))
    q = torch.zeros(int(cu_q[-1]), heads, 256, dtype=torch.bfloat16)
    k = torch.zeros(int(cu_k[-1]), 1, 256, dtype=torch.bfloat16)
    found = by_sequence.runs(problem.varlen(q, k, k, cu_q, cu_k, **options))
    return [list(zip(*([y - x for x, y in pairwise(cu)] for cu in (run.q, run.k)))) for run in found]


@pytest.fixture(autouse=True)
def room_for_eight_tiles(monkeypatch):
    """128 rows and 128 keys each."""
    monkeypatch.setattr(chain, "SLAB_BYTES", 8 * 4 * 128 * 128)


def test_all_that_fit():
    found = [(100, 100), (0, 9), (7, 0), (95, 95)]
    assert sizes(found, causal=True) == [found]


def test_as_many_as_have_room_for_the_longest():
    """Two row tiles of two key tiles for the longest, four for all."""
    found = [(100, 100), (256, 256), (100, 100), (300, 300), (256, 256)]
    assert sizes(found) == [found[:3], found[3:4], found[4:]]


def test_a_long_one_goes_alone():
    short, long = (100, 100), (1025, 1025)
    assert sizes([short, short, long, short, long], causal=True) == [[short] * 2, [long], [short], [long]]


def test_query_heads_are_rows():
    assert sizes([(256, 200)] * 2, heads=2) == [[(256, 200)]] * 2


def test_nothing_is_done_for_one_alone_without_queries_or_keys():
    assert sizes([(2000, 2000), (0, 1000), (2000, 2000)]) == [[(2000, 2000)]] * 2
