"""ldmatrix, stmatrix, movmatrix: small tiles between shared memory and a warp's registers.

Eight threads give the addresses of the eight 16-byte rows of each 8x8 matrix. Thread t holds the 32-bit word t%4 of row
t/4; .trans transposes the matrix during the move. The 8-bit shapes (sm_100):

    ldmatrix.m16n16.trans  register j, byte e: row 4*(t%4) + e, column t/4 + 8*j of a matrix of 16 rows
    ldmatrix.m8n16         4- or 6-bit elements, padded to 16 bytes a row, widened to bytes
    stmatrix.m16n8.trans   byte e of thread t goes to row 2*(t%4) + e%2, byte t/4 + 8*(e/2)
"""

from __future__ import annotations

import numpy as np

from softsm import formats
from softsm.engine import program as pg
from softsm.engine.warps import Cta
from softsm.isa.operands import located, shared_address, shared_operand
from softsm.isa.registry import lowers
from softsm.isa.tensor_memory import exactly, finish, rows_index, take
from softsm.isa.typed import needs_target

SPACES = ("shared", "shared::cta")


def row_addresses(w, place: tuple[int, bool], count: int, what: str) -> tuple[Cta, np.ndarray]:
    """Returns (CTA, shared offsets of the rows) from the first `count` threads; checks 16-byte alignment and bounds."""
    row, generic = place
    if generic:
        addresses = np.array([shared_address(w, place, t) for t in range(count)])
    else:
        addresses = w.R[row, :count].astype(np.int64)
    cta, _ = located(w, w.cta.resolve_shared, int(addresses[0]))
    offsets = addresses - cta.shared_base
    if (addresses & 15).any():
        lane = int(np.flatnonzero(addresses & 15)[0])
        at = int(addresses[lane])
        raise w.fault("misaligned", f"{what}: row address {at:#x} of lane {lane} is not a multiple of 16")
    for at in (int(offsets.min()), int(offsets.max())):
        located(w, cta.check_shared, at, 16, what)
    if w.machine.observer is not None and what != "stmatrix":
        w.machine.observer.accessed_rows(w, cta, offsets, False)
    return cta, offsets


def load_rows(cta, offsets: np.ndarray) -> np.ndarray:
    """Returns the 16-byte rows as uint8 [count, 16]."""
    lines = cta.shared[: cta.shared.size & ~15].view(np.complex128)
    return lines.take(offsets >> 4).view(np.uint8).reshape(-1, 16)


def words(matrices: np.ndarray, transpose: bool) -> np.ndarray:
    """Packs 8x8 matrices of 16-bit elements [x, 8, 8] into registers [x, 32], two neighbours of a row in each."""
    if transpose:
        matrices = matrices.transpose(0, 2, 1)
    return np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, 32)


@lowers("ldmatrix")
def lower_ldmatrix(asm, ins) -> None:
    modifiers = list(ins.modifiers)
    shape = take(asm, ins, modifiers, "m8n8", "m16n16", "m8n16")
    if shape != "m8n8":
        needs_target(asm, ins, 100)
    count = int(take(asm, ins, modifiers, "x1", "x2", "x4")[1:])
    trans = bool(take(asm, ins, modifiers, "trans", optional=True))
    space = take(asm, ins, modifiers, *SPACES, optional=True)
    source = ""
    if shape == "m8n8":
        take(asm, ins, modifiers, "b16")
    elif take(asm, ins, modifiers, "b8x16", optional=True):
        source = take(asm, ins, modifiers, "b6x16_p32", "b4x16_p64")
    else:
        take(asm, ins, modifiers, "b8")
    finish(asm, ins, modifiers, exactly(2), collective=True)
    if shape == "m16n16" and (not trans or count == 4):
        asm.refuse(ins, ".m16n16 needs .trans, and .x1 or .x2")
    if shape == "m8n16" and (trans or not source):
        asm.refuse(ins, ".m8n16 decompresses 4- or 6-bit elements, without .trans")
    place = shared_operand(asm, ins.operands[1], space or None)
    rows = asm.vector_rows(ins.operands[0], "u", write=True)
    expected = 2 * count if shape == "m16n16" else count
    if len(rows) != expected:
        raise asm.error(f"expected {expected} destination registers, got {len(rows)}")
    asm.macro(
        do_ldmatrix, ins, place=place, rows=rows_index(rows), shape=shape, count=count, trans=trans, source=source
    )
    in_loop(asm, pg.OP_LDMATRIX, place, rows, shape, trans)


def in_loop(asm, op: int, place: tuple[int, bool], rows: list[int], shape: str, trans: bool) -> None:
    """Lets the compiled loop do the usual case (engine/lanes.py, `matrices`)."""
    row, generic = place
    if shape == "m8n8" and not generic:
        _, _, number, _, _, _, *guard = asm.records[-1]
        asm.records[-1] = [op, asm.pooled(rows), number, row, len(rows), int(trans), *guard]


def do_ldmatrix(w, mask, o):
    per = 16 if o.shape == "m16n16" else 8
    cta, offsets = row_addresses(w, o.place, per * o.count, "ldmatrix")
    data = load_rows(cta, offsets)
    if o.source == "b4x16_p64":
        data = formats.unpack_padded(data, "e2m1") << 2
    elif o.source:
        data = formats.unpack_padded(data, "e3m2")
    if o.shape == "m8n8":
        w.R[o.rows] = words(data.view(np.uint16).reshape(-1, 8, 8), o.trans)
    elif o.shape == "m8n16":
        w.R[o.rows] = data.view(np.uint32).reshape(-1, 32)
    else:
        tiles = np.ascontiguousarray(data.reshape(-1, 16, 16).transpose(0, 2, 1))  # [matrix, column, row]
        w.R[o.rows] = tiles.view(np.uint32).reshape(-1, 32)


@lowers("stmatrix")
def lower_stmatrix(asm, ins) -> None:
    modifiers = list(ins.modifiers)
    shape = take(asm, ins, modifiers, "m8n8", "m16n8")
    if shape != "m8n8":
        needs_target(asm, ins, 100)
    count = int(take(asm, ins, modifiers, "x1", "x2", "x4")[1:])
    trans = bool(take(asm, ins, modifiers, "trans", optional=True))
    space = take(asm, ins, modifiers, *SPACES, optional=True)
    take(asm, ins, modifiers, "b16" if shape == "m8n8" else "b8")
    finish(asm, ins, modifiers, exactly(2), collective=True)
    if shape == "m16n8" and not trans:
        asm.refuse(ins, ".m16n8 needs .trans")
    place = shared_operand(asm, ins.operands[0], space or None)
    rows = asm.vector_rows(ins.operands[1], "u")
    if len(rows) != count:
        raise asm.error(f"expected {count} source registers, got {len(rows)}")
    asm.macro(do_stmatrix, ins, place=place, rows=rows_index(rows), shape=shape, count=count, trans=trans)
    in_loop(asm, pg.OP_STMATRIX, place, rows, shape, trans)


def do_stmatrix(w, mask, o):
    cta, offsets = row_addresses(w, o.place, 8 * o.count, "stmatrix")
    registers = np.ascontiguousarray(w.R[o.rows])
    if o.shape == "m8n8":
        halves = registers.view(np.uint16).reshape(-1, 8, 8)
        data = np.ascontiguousarray(halves.transpose(0, 2, 1) if o.trans else halves).view(np.uint8)
    else:
        quads = registers.view(np.uint8).reshape(-1, 8, 4, 2, 2)  # [matrix, t/4, t%4, e/2, e%2]
        data = np.ascontiguousarray(quads.transpose(0, 2, 4, 3, 1))  # [matrix, row (t%4, e%2), byte (e/2, t/4)]
    lines = cta.shared[: cta.shared.size & ~15].view(np.complex128)
    if w.machine.observer is not None:
        same = np.array_equal(load_rows(cta, offsets).reshape(-1), data.reshape(-1))
        w.machine.observer.accessed_rows(w, cta, offsets, True, same)
    lines[offsets >> 4] = data.reshape(-1).view(np.complex128)
    w.machine.writes += 1


@lowers("movmatrix")
def lower_movmatrix(asm, ins) -> None:
    modifiers = list(ins.modifiers)
    for name in ("m8n8", "trans", "b16"):
        take(asm, ins, modifiers, name)
    finish(asm, ins, modifiers, exactly(2), collective=True)
    asm.macro(do_movmatrix, ins, d=asm.dst(ins.operands[0], "u"), a=asm.src(ins.operands[1], "u"))


def do_movmatrix(w, mask, o):
    w.R[o.d] = words(w.R[o.a].copy().view(np.uint16).reshape(1, 8, 8), True)[0]
