"""What macro-operations of many chapters need: active lanes, registers that agree, places in shared memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from softsm.engine import entry
from softsm.engine import program as pg
from softsm.errors import Fault
from softsm.ptx.roles import place_of


class Issuer:
    """The issuer of an operation, stored cheaply and formatted only when a report needs it."""

    __slots__ = ("ctaid", "instruction", "warp", "what")

    def __init__(self, w, what: str = ""):
        cta = w.cta
        self.ctaid, self.warp, self.what = cta.ctaid, w.index, what
        self.instruction = cta.program.instructions[w.pc]

    def __str__(self) -> str:
        loc = place_of(self.instruction)
        source = f"{Path(loc.file).name}:{loc.line}, " if loc else ""
        by = f"{self.what} of " if self.what else ""
        return f"{by}warp {self.warp} of CTA {self.ctaid}, {source}PTX line {self.instruction.line}"


def lanes(mask: int) -> list[int]:
    if mask & (mask - 1) == 0:
        return [mask.bit_length() - 1]
    return [lane for lane in range(32) if mask >> lane & 1]


def set_predicate(w, row: int, mask: int, bits: int) -> None:
    w.P[row] = (w.P.item(row) & ~mask) | (bits & mask)


def uniform(values: np.ndarray) -> int | None:
    """Returns the value of a register if it is the same in all 32 lanes, active or not; else None."""
    data = values.tobytes()
    first = data[: len(data) // 32]
    return int.from_bytes(first, "little") if data == first * 32 else None


def agreed(w, row: int) -> int | None:
    """Does the same for a 32-bit register of the warp, in a third of the time."""
    value = entry.agreed(w.S.item(pg.S_R) + 128 * row)
    return None if value < 0 else value


# -- shared addresses as macro-operations see them ---------------------------------------------------------------------


def shared_operand(asm, operand, space: str | None) -> tuple[int, bool]:
    """Returns (row, generic): a 32-bit shared address, or a generic one when the instruction names no space."""
    generic = space is None
    return asm.address_row(operand, "q" if generic else "u"), generic


def shared_address(w, place: tuple[int, bool], lane: int) -> int:
    """Returns the 32-bit shared::cluster address that one lane gives."""
    row, generic = place
    if not generic:
        return w.R.item(row, lane)
    address = w.Q.item(row, lane)
    if not pg.SHARED_WINDOW <= address < pg.LOCAL_WINDOW:
        raise w.fault("out-of-bounds", f"generic address {address:#x} of lane {lane} is not in shared memory")
    return address - pg.SHARED_WINDOW


def located(w, function, *args):
    """Runs `function`; a Fault without a place gets the current instruction's."""
    try:
        return function(*args)
    except Fault as error:
        if error.placed:
            raise
        raise w.fault(error.code, error.message) from None


def shared_bytes(w, address: int, size: int, what: str, align: int = 16):
    """Returns (cta, offset) of `size` bytes of shared memory, after checks of alignment and bounds."""
    cta, offset = located(w, w.cta.resolve_shared, address)
    if offset % align:
        raise w.fault("misaligned", f"{what}: shared address {address:#x} is not a multiple of {align} bytes")
    located(w, cta.check_shared, offset, size, what)
    return cta, offset
