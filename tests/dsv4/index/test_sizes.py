"""How many CTAs choose the rows of one query."""

import pytest

from dsv4.index.sizes import index_shares


@pytest.mark.parametrize(
    "queries, num_sms, shares",
    [(1, 132, 64), (2, 132, 64), (4, 132, 32), (5, 132, 16), (8, 132, 16), (9, 132, 1), (4096, 132, 1), (0, 132, 64),
     (1, 16, 16), (1, 4, 1)],
)  # fmt: skip
def test_few_queries_are_shared_by_as_many_ctas_as_there_is_room_for(queries, num_sms, shares):
    assert index_shares(queries, num_sms) == shares
