"""How many CTAs choose the rows of one query."""

import pytest

from dsv4.index.sizes import index_shares


@pytest.mark.parametrize("queries, multiprocessors, listed, not_listed", [
    (1, 132, 32, 64), (2, 132, 32, 64), (4, 132, 32, 32), (5, 132, 16, 16), (8, 132, 16, 16), (9, 132, 1, 1),
    (4096, 132, 1, 1), (0, 132, 32, 64), (1, 16, 16, 16), (1, 4, 1, 1),
])  # fmt: skip
def test_few_queries_are_shared_by_as_many_ctas_as_there_is_room_for(queries, multiprocessors, listed, not_listed):
    """Of 65536 rows and a list of 512 not all groups are looked into; of 16384 they are."""
    assert index_shares(queries, 65536, 512, multiprocessors) == listed
    assert index_shares(queries, 16384, 512, multiprocessors) == not_listed
