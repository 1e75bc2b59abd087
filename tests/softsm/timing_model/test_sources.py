"""Words read here and there: what L1 has of them already, and what device memory gives for them. Long waits."""

from collections import Counter
from types import SimpleNamespace

import pytest

from softsm.timing_model.accesses import Access
from softsm.timing_model.machine import CP_ASYNC, LOAD
from softsm.timing_model.parameters import GPUS
from softsm.timing_model.sources import Source, absent_from_l1, gone, parts_of, shares, slowest, sources_of, tables_of
from softsm.timing_model.trace import ClusterTrace, WarpTrace

L1 = 256 << 10


def words(table: int, reads: int) -> Source:
    """Return the source of `reads` words of a table of `table` bytes, each in a different sector."""
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


@pytest.mark.parametrize(("size", "absent"), [(256 << 10, 0.0), (512 << 10, 0.8), (1 << 20, 0.92), (8 << 20, 0.99)])
def test_a_line_that_l1_has_is_there_in_part(size, absent):
    """Words at random of a table four times as large as L1 took 0.92 of the time of those of a much larger one."""
    assert absent_from_l1(words(size, 1 << 28), L1, 132) == pytest.approx(absent, abs=0.01)


def test_of_a_table_of_many_parts_l1_holds_the_one_that_is_read():
    """Tables of 16 levels, level after level: a hash grid was 1.5 to 2.4 times too slow."""
    table = words(2 << 20, 1 << 24)
    assert absent_from_l1(table, L1, 132) > 0.85
    table.parts = 16
    assert absent_from_l1(table, L1, 132) < 0.5


@pytest.mark.parametrize(
    ("axis", "index", "span", "parts"),
    (
        ("y", "%r3", 60_000, {0: 16}),
        ("y", "%r3", 900_000, {}),  # its words lie all over the table
        ("x", "%r3", 60_000, {}),  # CTAs that run together read different parts
        ("y", "%r1", 60_000, {}),  # no word here and there
    ),
)
def test_tables_of_the_last_side_of_a_grid_are_read_one_after_another(axis, index, span, parts) -> None:
    ptx = f"""
    mov.u32 %r1, %ctaid.{axis}; ld.global.u32 %r3, [%d1];
    mul.wide.u32 %d2, %r1, 65536; mul.wide.u32 %d3, {index}, 4; add.u64 %d2, %d2, %d3; ld.global.u32 %r4, [%d2];
    """
    cluster = ClusterTrace((0, 0, 0), 0, traffic=Counter({(0, "read span"): span}))
    access = {3: Access(looks=1, ran=1, space="load", tensors=Counter({0: 32}))}
    trace = SimpleNamespace(
        grid=(64, 16, 1), source=ptx, clusters=[cluster], tensors=[("table", 1 << 20)], access=access
    )
    assert tables_of(trace) == parts


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


def test_words_that_fill_blocks_are_read_as_blocks():
    """Lanes are far apart, but a CTA requests both sectors of each block of 64 bytes: device memory reads them once."""
    alone = Source("x", 1 << 20, asked=32.0 * 1000, lines=1000.0, blocks=1000.0)
    together = Source("x", 1 << 20, asked=32.0 * 1000, lines=1000.0, blocks=500.0)
    rows = Source("x", 1 << 20, asked=128.0 * 1000, lines=1000.0)
    assert (alone.block, together.block, rows.block) == (32, 64, 128)
    assert alone.scattered and together.scattered and not rows.scattered


@pytest.mark.parametrize("kind", [CP_ASYNC, LOAD])
def test_a_wait_for_many_lines_is_longer(kind):
    """Bytes of a turn count, whatever the number of turns and of warps that ask for them."""

    def asked(size: int, turns: int, warps: int = 4) -> float:
        events = [(7, kind, 0, size // warps, 0)] * turns
        cluster = ClusterTrace((0, 0, 0), 0, [WarpTrace(0, n, events=events) for n in range(warps)])
        return slowest(SimpleNamespace(clusters=[cluster], access={}))

    assert asked(4096, 1) == asked(4096, 50) == asked(1024, 3) == 0
    assert asked(8192, 9) == asked(8192, 9, 1) == pytest.approx(0.5)
    assert asked(16384, 2) == asked(1 << 20, 1) == 1


@pytest.mark.parametrize(("jumps", "wanted"), ((0, -1.0), (4, 0.0), (2, -0.65)))
def test_a_wait_for_few_lines_of_an_open_page_is_shorter(jumps, wanted):
    """1 KB by four warps; loads that jump to other pages of device memory wait as long as they did."""
    cluster = ClusterTrace((0, 0, 0), 0, [WarpTrace(0, n) for n in range(4)])
    load = Access(looks=4, ran=4, missed=32, jumps=jumps, space="load")
    found = slowest(SimpleNamespace(clusters=[cluster], access={7: load}))
    assert found == pytest.approx(wanted)


def test_loads_before_a_loop_do_not_lengthen_its_waits():
    """A matrix is loaded once, and then 256 bytes in each of 500 turns."""
    cluster = ClusterTrace((0, 0, 0), 0, [WarpTrace(0, 0)])
    once = {line: Access(looks=1, ran=1, missed=16, space="load") for line in range(32)}
    turns = Access(looks=64, ran=500, missed=64 * 8, space="load")
    assert slowest(SimpleNamespace(clusters=[cluster], access=once)) == 1
    assert slowest(SimpleNamespace(clusters=[cluster], access=once | {99: turns})) == pytest.approx(-1.3)


def test_pieces_of_rows_are_written_at_their_own_rates():
    """CTAs that go along rows: device memory takes pieces of 2 KB more slowly than larger ones."""
    cluster = ClusterTrace((0, 0, 0), 0, [WarpTrace(0, n) for n in range(4)])
    trace = SimpleNamespace(clusters=[cluster], tensors=[("a", 1 << 20)], total=1, access={})
    ways = []
    for size, along in ((512, 3), (1024, 3), (1024, 0)):
        trace.access = {7: Access(looks=4, ran=4, along=along, bytes=4 * size, space="store", tensors={0: 1})}
        ways.append(sources_of(trace, GPUS["h200"], {})[0].way_written)
    assert ways == ["hbm.rows", "hbm.rows.wide", "hbm.mixed"]


def test_parts_of_lines_are_counted_one_by_one():
    """Threads that write a word of each line: L2 takes 79 of them per ns, and 34 whole lines."""
    cluster = ClusterTrace((0, 0, 0), 0, [WarpTrace(0, 0)], traffic=Counter({(0, "write"): 4 * 32 * 32}))
    store = Access(looks=4, ran=4, units=4 * 32, lines=4 * 32, bytes=4 * 128, space="store", tensors={0: 1})
    trace = SimpleNamespace(clusters=[cluster], tensors=[("a", 1 << 20)], total=1, access={7: store})
    (found,) = sources_of(trace, GPUS["h200"], {})
    assert found.sent / GPUS["h200"]["hbm.write"] == pytest.approx(4 * 32 / 79)


def test_tensors_that_tma_reads_are_known():
    """Their lines are asked for at once: L2 answers more of those who share them together."""
    events = [(7, LOAD, 0, 4096, 1), (8, CP_ASYNC, 0, 512, 4), (9, LOAD, 0, 4096, -2)]
    cluster = ClusterTrace((0, 0, 0), 0, [WarpTrace(0, 0, events=events)])
    trace = SimpleNamespace(clusters=[cluster], tensors=[("a", 64), ("b", 64), ("c", 64)], total=1, access={})
    assert [s.boxes for s in sources_of(trace, GPUS["h200"], {})] == [False, True, False]


@pytest.mark.parametrize(("lines", "scattered"), ((1, False), (32, True)))
def test_a_number_that_all_lanes_read_is_not_scattered(lines, scattered):
    """One sector of a line says nothing; one of each of many lines does."""
    traffic = Counter({(0, "read"): 32 * lines, (0, "read lines"): lines})
    cluster = ClusterTrace((0, 0, 0), 0, [WarpTrace(0, 0)], traffic=traffic)
    trace = SimpleNamespace(clusters=[cluster], tensors=[("a", 1 << 20)], total=100, access={})
    (found,) = sources_of(trace, GPUS["h200"], {})
    assert (found.scattered, found.random) == (scattered, scattered)


def test_a_word_brings_its_neighbour():
    """As many random words as the table has sectors read 86 % of its blocks of 64 bytes, 0.43 blocks per word."""
    size = 16 << 20
    cluster = ClusterTrace((0, 0, 0), 0)
    cluster.traffic = Counter({(0, "read"): size, (0, "read lines"): size // 32, (0, "read blocks"): size // 32})
    trace = SimpleNamespace(clusters=[cluster], tensors=[("table", size)], total=1, access={})
    (found,) = sources_of(trace, GPUS["h200"], {})
    assert found.random and found.device == pytest.approx(0.43, abs=0.01)


@pytest.mark.parametrize(("slots", "share", "random"), ((8, 1.0, False), (7, 1.0, True), (8, 0.5, True)))
def test_clusters_that_run_together_request_each_others_halves(slots, share, random):
    """A column of 32 bytes: the cluster next to it reads the other half of each block, if all run at the same time and
    read the whole tensor."""
    size = 1 << 20
    mine = int(share * size / 8)
    cluster = ClusterTrace((0, 0, 0), 0)
    cluster.traffic = Counter({(0, "read"): mine, (0, "read lines"): mine // 32, (0, "read blocks"): mine // 32})
    trace = SimpleNamespace(clusters=[cluster], tensors=[("columns", size)], total=8, lengths=None, access={})
    (found,) = sources_of(trace, GPUS["h200"], {}, slots)
    assert (found.block, found.random) == (32 if random else 64, random)


def test_what_is_read_tile_by_tile_leaves_an_l2_that_it_does_not_fit() -> None:
    """Two passes over a tensor find it again only if it and its share of the others fit."""

    def share(size: float, other: float, reads: float = 16, copied: bool = True, parts: int = 1) -> float:
        mine = Source("a", int(size), asked=reads * size, copied=copied, parts=parts)
        return gone(mine, [mine, Source("b", int(other), asked=16 * other, copied=True, parts=parts)], 4.0, 26e6)

    assert share(8e6, 8e6) == 0.0
    assert share(24e6, 32e6) == 1.0
    assert share(1e5, 60e6, reads=64) == 0.0  # a table that every CTA reads again and again
    assert share(24e6, 32e6, copied=False) == 0.0
    assert share(64e6, 64e6, parts=32) == 0.0  # head after head


def test_parts_of_the_last_side_of_a_grid_are_read_one_after_another() -> None:
    """A depends on x, B on y, which changes last: what has been read of B is not read again."""
    ptx = """
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mul.wide.u32 %d2, %r1, 64; mul.wide.u32 %d3, %r2, 64;
    cp.async.cg.shared.global [ %r9 + 0 ], [ %d2 + 0 ], 16, %r2;
    cp.async.bulk.tensor.2d.shared::cluster.global [%r9], [%d1, {%r8, %r2}], [%r7];
    """
    events = [(3, CP_ASYNC, 0, 512, 4), (4, LOAD, 0, 512, 1)]
    cluster = SimpleNamespace(warps=[SimpleNamespace(events=events)])
    trace = SimpleNamespace(grid=(8, 32, 1), source=ptx, clusters=[cluster])
    assert parts_of(trace) == {1: 32}
    trace.grid = (256, 1, 1)
    assert parts_of(trace) == {}
