"""Words read here and there: what L1 has of them already."""

import pytest

from softsm.timing_model.sources import Source, absent_from_l1, shares

L1 = 256 << 10


def words(table: int, reads: int) -> Source:
    """So many words of a table of so many bytes, each in a sector of its own."""
    return Source("table", table, asked=32.0 * reads, lines=float(reads))


@pytest.mark.parametrize(
    "table, reads, low, high",
    [
        (128 << 10, 1 << 24, 0.03, 0.04),  # 127 k reads of each multiprocessor: its 4096 sectors once
        (256 << 10, 1 << 22, 0.24, 0.27),  # 32 k reads of 8192 sectors
        (256 << 10, 1 << 16, 0.96, 1.0),  # hardly a sector twice
        (64 << 20, 1 << 24, 0.99, 1.0),  # far larger than L1
    ],
)
def test_small_tables_are_found_in_l1(table, reads, low, high):
    assert low <= absent_from_l1(words(table, reads), L1, 132) <= high


def test_what_shared_memory_takes_is_not_there():
    table = words(256 << 10, 1 << 24)
    assert absent_from_l1(table, L1 / 4, 132) > 0.7 > absent_from_l1(table, L1, 132)


def test_whole_lines_are_not_words():
    assert absent_from_l1(Source("rows", 1 << 10, asked=128.0 * 1000, lines=1000.0), L1, 132) == 1.0


@pytest.mark.parametrize("looked", [1, 2, 3])
def test_clusters_that_are_looked_at_stand_for_the_grid(looked):
    """Bytes that grow along it, 0 to 1 on the way: half of them on average."""
    along = {1: [0.5], 2: [0.0, 1.0], 3: [0.0, 0.5, 1.0]}[looked]
    assert sum(shares(looked)) == pytest.approx(1)
    assert sum(a * b for a, b in zip(along, shares(looked))) == pytest.approx(0.5)
