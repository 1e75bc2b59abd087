"""How many CTAs choose the rows of one query."""

import pytest

from dsv4.index.sizes import index_shares, index_splits


@pytest.mark.parametrize(
    "queries, num_sms, shares",
    [(1, 132, 64), (2, 132, 64), (4, 132, 32), (5, 132, 16), (8, 132, 16), (9, 132, 1), (4096, 132, 1), (0, 132, 64),
     (1, 16, 16), (1, 4, 1)],
)  # fmt: skip
def test_few_queries_are_shared_by_as_many_ctas_as_there_is_room_for(queries, num_sms, shares):
    assert index_shares(queries, num_sms, 1 << 20, 512, 0) == shares


@pytest.mark.parametrize(
    "queries, rows, topk, blocks, shared",
    [(1, 13440, 512, 0, True), (2, 62912, 512, 0, True), (2, 6528, 1024, 0, True), (1, 16384, 1024, 0, False),
     (4, 16384, 512, 0, False), (4, 65536, 512, 0, True), (8, 8192, 512, 0, False), (6, 25792, 1024, 0, False),
     (6, 173952, 1024, 0, True), (4, 87936, 512, 2048, True), (6, 30656, 512, 2048, False),
     (8, 65536, 512, 2048, False)],
)  # fmt: skip
def test_the_way_that_was_faster_on_an_h200(queries, rows, topk, blocks, shared):
    assert (index_shares(queries, 132, rows, topk, blocks) > 1) == shared


@pytest.mark.parametrize(
    "queries, spare, splits", [(200, True, 3), (180, True, 3), (140, True, 4), (331, True, 3), (200, False, 5)]
)
def test_scores_are_one_wave_where_that_nearly_fills_the_sms(queries, spare, splits):
    """A query has 8192 rows. One CTA for each of 331 queries would be half of what keeps the memory busy."""
    assert index_splits(queries, 132, 4, 8192, 64, spare) == splits
