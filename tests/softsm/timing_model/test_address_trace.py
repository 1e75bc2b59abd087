"""What compiled code notes of a run: memory instructions with the addresses of their lanes, and the way of a warp."""

from dataclasses import replace

import numpy as np
import pytest

import softsm
from softsm.engine import program as pg
from softsm.timing_model import address_trace, looks

PTX = """
.version 8.6 .target sm_90a .address_size 64
.visible .entry walk(.param .u64 p_x, .param .u32 p_n)
{
  .reg .b32 %n, %i, %v, %t; .reg .b64 %x, %a; .reg .pred %p;
  ld.param.u64 %x, [p_x]; ld.param.u32 %n, [p_n];
  mov.u32 %t, %tid.x; mul.wide.u32 %a, %t, 4; add.u64 %a, %a, %x; mov.u32 %i, 0;
LOOP:
  ld.global.u32 %v, [%a];
  add.u32 %v, %v, 1;
  st.global.u32 [%a+128], %v;
  add.u64 %a, %a, 256;
  add.u32 %i, %i, 1; setp.lt.u32 %p, %i, %n; @%p bra LOOP;
  ret;
}
"""


def words(count: int, offset: int = 0) -> np.ndarray:
    """Return `count` words that begin `offset` bytes after the start of a 128-byte line of the host."""
    raw = bytearray(4 * count + 256)
    first = np.frombuffer(raw, np.uint8).ctypes.data
    return np.frombuffer(raw, np.uint32, count, -first % 128 + offset)


def traced(turns: int, threads: int = 32, x: np.ndarray | None = None, ptx: str = PTX):
    if x is None:
        x = words(64 * (turns + 1) + threads)
    with softsm.timing("h200") as timer:
        softsm.load(ptx).launch(1, threads, [x, turns], sms=132)
    return timer.predictions[0].trace


def accesses(trace) -> dict:
    """Return accesses by line, with tensors as (name, bytes): their numbers depend on addresses, which differ by
    launch."""
    return {
        line: replace(found, tensors={trace.tensors[n]: count for n, count in found.tensors.items()})
        for line, found in trace.access.items()
    }


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(PTX.splitlines(), 1) if text in line)


@pytest.mark.parametrize("turns", [1, 2, 7, 300, 3000])
def test_every_turn_of_a_loop_is_on_the_trail(turns) -> None:
    trace = traced(turns)
    loop = trace.blocks.of(line_of("ld.global"))
    (warp,) = trace.clusters[0].warps
    assert warp.blocks.count(loop) == turns
    assert warp.marks == [0] * len(warp.blocks)


def test_loads_and_stores_are_noted_with_their_sectors() -> None:
    trace = traced(5)
    load, store = trace.access[line_of("ld.global")], trace.access[line_of("st.global")]
    assert (load.looks, load.units, load.space, load.bytes) == (5, 5 * 4, "load", 5 * 128)
    assert (store.looks, store.units, store.space) == (5, 5 * 4, "store")
    assert sum(n for (_, way), n in trace.clusters[0].traffic.items() if way == "read") == 5 * 128


@pytest.mark.parametrize("offset", [4, 16, 64, 124])
def test_where_the_host_has_a_tensor_does_not_count(offset) -> None:
    """A GPU's allocator begins each at a multiple of 512 bytes."""
    whole, moved = (traced(5, x=words(64 * 6 + 32, n)).access for n in (0, offset))
    assert [(a.units, a.lines, a.missed) for a in moved.values()] == [(20, 5, 20)] * 2
    assert [(a.units, a.lines, a.missed) for a in whole.values()] == [(20, 5, 20)] * 2


def test_traffic_counts_what_was_not_looked_at() -> None:
    """A launch looks at the first addresses of an instruction only; the bytes it asks for are those of all."""
    turns = looks.LOOKS + 200
    trace = traced(turns)
    load = trace.access[line_of("ld.global")]
    assert (load.looks, load.ran) == (looks.LOOKS, turns)
    assert sum(n for (_, way), n in trace.clusters[0].traffic.items() if way == "read") == turns * 128


def test_every_warp_is_looked_at() -> None:
    """They run one after the other and ask for the same: the first does not use up all looks, and bytes come once."""
    turns = 2 * looks.LOOKS
    trace = traced(turns, 128, ptx=PTX.replace("%tid.x;", "%tid.x; and.b32 %t, %t, 31;"))
    load = trace.access[line_of("ld.global")]
    assert (load.looks, load.ran) == (4 * looks.LOOKS, 4 * turns)
    assert load.missing == load.looks  # all four wait for what one of them fetches
    assert sum(n for (_, way), n in trace.clusters[0].traffic.items() if way == "read") == turns * 128


def test_more_rows_than_the_buffer_has_room_for(monkeypatch) -> None:
    whole = traced(300, 128)
    monkeypatch.setattr(address_trace, "ROOM", 8)
    again = traced(300, 128)
    assert accesses(again) == accesses(whole)
    assert [w.blocks for w in again.clusters[0].warps] == [w.blocks for w in whole.clusters[0].warps]


def test_a_launch_after_a_timed_one_has_its_native_blocks_again() -> None:
    """Warps of a timed launch run without them; their register files are used again."""
    kernel, x = softsm.load(PTX), words(64 * 41)
    with softsm.timing("h200"):
        kernel.launch(1, 32, [x.copy(), 40], sms=132)
    assert kernel.spare_files
    assert all(files[3][pg.S_CODE] == kernel.blocks.code.ctypes.data for files in kernel.spare_files)
    kernel.launch(1, 32, [x, 40])
    assert (x.reshape(-1, 64)[:40, 32:] == 1).all()
