"""Accesses that the interpreter does not do itself: to a peer's shared memory, through a generic window, or illegal.

`memory_event` completes such an access or raises a fault.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from softsm.engine import lanes as ln
from softsm.engine import program as pg
from softsm.errors import Fault


def locate(
    w, lane: int, space: int, row: int, offset: int, size: int, access: str, strong: bool, new: np.ndarray | None = None
) -> np.ndarray:
    """Returns the bytes that one lane accesses, or raises a Fault. strong: the access does not race with other strong
    ones; new: the bytes that a store will write there."""
    if space == ln.SHARED:
        address = (int(w.R[row, lane]) + offset) & pg.ALL
    else:
        address = int(w.Q[row, lane]) + offset
    what = f"{access} by lane {lane}"
    if address & (size - 1):
        raise w.fault("misaligned", f"{what} of {size} bytes at address {address:#x}: it must be a multiple of {size}")
    if space == ln.GENERIC and pg.SHARED_WINDOW <= address < pg.LOCAL_WINDOW:
        space, address = ln.SHARED, address - pg.SHARED_WINDOW
    if space == ln.GENERIC and address >= pg.LOCAL_WINDOW:
        space, address = ln.LOCAL, address - pg.LOCAL_WINDOW
    try:
        if space == ln.SHARED:
            if (
                address >> pg.RANK_SHIFT >= len(w.cta.cluster)
                and "shared::cluster" not in w.cta.program.instructions[w.pc].text
            ):
                w.cta.check_shared(address, size, what)  # no peer was meant: the address is too large, or negative
            cta, at = w.cta.resolve_shared(address)
            cta.check_shared(at, size, what)
            there = cta.shared[at : at + size]
            if w.machine.observer is not None:
                same = new is not None and np.array_equal(there, new)
                w.machine.observer.accessed_shared(w, cta, at, at + size, access != "load", strong, lane, same)
            return there
        if space == ln.LOCAL:
            if address < 0 or address + size > w.local.shape[1]:
                raise w.fault(
                    "out-of-bounds",
                    f"{what} of {size} bytes at local address {address:#x}; a thread has {w.local.shape[1]}",
                )
            return w.local[lane, address : address + size]
        there = w.machine.global_memory.view(address, size, what)
        if w.machine.observer is not None:
            same = new is not None and np.array_equal(there, new)
            w.machine.observer.accessed_global(w, address, address + size, access != "load", strong, lane, same)
        return there
    except Fault as error:
        if error.placed:
            raise
        raise w.fault(error.code, error.message) from None


SPACE_OF = {
    pg.OP_LDG: ln.GLOBAL,
    pg.OP_STG: ln.GLOBAL,
    pg.OP_LDS: ln.SHARED,
    pg.OP_STS: ln.SHARED,
    pg.OP_LD: ln.GENERIC,
    pg.OP_ST: ln.GENERIC,
    pg.OP_LDL: ln.LOCAL,
    pg.OP_STL: ln.LOCAL,
}
LOADS = {pg.OP_LDG, pg.OP_LDS, pg.OP_LD, pg.OP_LDL}


def memory_event(machine, w, fragment, lanes: int) -> None:
    """Handles an access that is not plain: to a peer's shared memory, through a generic window, or illegal."""
    op, rd, ra, rb, fmt, rx = (int(x) for x in w.cta.program.code[fragment.pc, :6])
    offset = rb - (1 << 32) if rb >= 1 << 31 else rb
    pool = w.cta.program.pool
    if op in (pg.OP_ATOM_G, pg.OP_ATOM_S):
        slow_atomic(w, op, rd, ra, offset, fmt, rx, lanes, pool)
        return
    space = SPACE_OF[op]
    log, count = fmt & 3, fmt >> 4 & 15
    unit = 1 << log
    for lane in range(32):
        if not lanes >> lane & 1:
            continue
        new: Any = None
        if op not in LOADS:
            bank = w.Q if fmt & ln.WIDE else w.R
            parts = [bank[int(pool[rd + i]), lane : lane + 1].view(np.uint8)[:unit] for i in range(count)]
            new = np.concatenate(parts)
        raw = locate(w, lane, space, ra, offset, unit * count, "load" if op in LOADS else "store", bool(rx), new)
        for i in range(count):
            row = int(pool[rd + i])
            bank = w.Q if fmt & ln.WIDE else w.R
            if op in LOADS:
                if row < 0:
                    continue
                value = int.from_bytes(raw[i * unit : (i + 1) * unit].tobytes(), "little", signed=bool(fmt & ln.SIGNED))
                bank[row, lane] = value & (0xFFFFFFFFFFFFFFFF if fmt & ln.WIDE else pg.ALL)
            else:
                raw[i * unit : (i + 1) * unit] = new[i * unit : (i + 1) * unit]
                machine.writes += 1
    fragment.pc += 1


def slow_atomic(w, op, rows, row, offset, fmt, generic, lanes, pool) -> None:
    code, t = fmt & 255, fmt >> 8
    wide = t in (ln.T_U64, ln.T_S64, ln.T_F64)
    space = ln.SHARED if op == pg.OP_ATOM_S else ln.GENERIC if generic else ln.GLOBAL
    bank = w.Q if wide else w.R
    rd, rb, rc = (int(x) for x in pool[rows : rows + 3])
    for lane in range(32):
        if not lanes >> lane & 1:
            continue
        there = locate(w, lane, space, row, offset, 8 if wide else 4, "atomic", True)
        cell = there.view(np.uint64 if wide else np.uint32)
        old = cell[0]
        cell[0] = (ln.atomic64 if wide else ln.atomic32)(code, t, old, bank[rb, lane], bank[rc, lane])
        if rd >= 0:
            bank[rd, lane] = old
        w.machine.writes += int(cell[0] != old)
    w.fragment.pc += 1
