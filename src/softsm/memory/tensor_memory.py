"""Tensor memory: 128 lanes x 512 columns of 32-bit cells in each SM, and who owns which columns.

Cells are kept column by column (`cells[column, lane]`): an accumulator tile of 128 rows is one contiguous block, and a
32x32b load moves contiguous rows into registers. A tensor-memory address is `lane << 16 | column`.

The CTAs resident on one SM share its columns, so an allocation may have to wait. A pair of CTAs (cta_group::2) gets the
same columns in both SMs: the first of the two waits for the other.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from softsm.errors import Fault
from softsm.memory.waitable import Waitable

LANES, COLUMNS, GRANULE = 128, 512, 32
ALL_GROUPS = 0xFF  # all lanes, as a mask of groups of 16
SIZES = (32, 64, 128, 256, 512)  # columns one allocation may have
UNKNOWN, ACCUMULATOR, STORED_F32, STORED_PACKED = range(4)  # what a cell holds, as far as the program determines it
STORED = {"f32": STORED_F32, "packed": STORED_PACKED}  # by the type of the registers of a store
POISON = 0xFFFFFFFF  # a NaN: what was not written must not pass for a result


class Allocation(NamedTuple):
    owner: object  # the CTA
    column: int
    columns: int
    place: str  # of the tcgen05.alloc


class TensorMemory(Waitable):
    """The tensor memory of one SM. Waiting on it means waiting for columns to become free (or for the peer CTA)."""

    __slots__ = ("address", "allocations", "cells", "groups", "pair_grants", "pair_requests", "relinquished")

    def __init__(self) -> None:
        super().__init__()
        raw = np.empty(COLUMNS * LANES + 16, np.uint32)
        start = -raw.ctypes.data % 64 // 4  # the compiled kernels load whole vectors
        self.cells = raw[start : start + COLUMNS * LANES].reshape(COLUMNS, LANES)  # [column, lane]
        self.address = self.cells.ctypes.data
        self.cells[:] = POISON
        self.allocations: dict[int, Allocation] = {}  # by first column
        self.relinquished: set[int] = set()  # id(cta)
        self.groups: dict[int, int] = {}  # id(cta) -> the cta_group its instructions use
        self.pair_requests: dict[int, int] = {}  # id(cta) -> columns requested with cta_group::2
        self.pair_grants: dict[int, int] = {}  # id(cta) -> column allocated at the peer's request

    # ---- allocation --------------------------------------------------------------------------------------------

    def free_column(self, columns: int, *others: TensorMemory) -> int | None:
        """Returns the first column of a free block, aligned to its size, in this and the other memories; None if
        there is none.
        """
        used = np.zeros(COLUMNS // GRANULE, bool)
        for memory in (self, *others):
            for a in memory.allocations.values():
                used[a.column // GRANULE : (a.column + a.columns) // GRANULE] = True
        for column in range(0, COLUMNS, columns):
            if not used[column // GRANULE : (column + columns) // GRANULE].any():
                return column
        return None

    def check_alloc(self, cta, columns: int) -> None:
        if columns not in SIZES:
            raise Fault("tmem-granularity", f"tcgen05.alloc of {columns} columns; accepted: {SIZES}")
        if id(cta) in self.relinquished:
            raise Fault("tmem-relinquished", f"tcgen05.alloc in {cta} after tcgen05.relinquish_alloc_permit")

    def allocate(self, cta, columns: int, place: str = "") -> int | None:
        """Allocates -> the first column, or None if the caller has to wait for columns."""
        self.check_alloc(cta, columns)
        column = self.free_column(columns)
        if column is not None:
            self.take(cta, column, columns, place)
        return column

    def take(self, cta, column: int, columns: int, place: str) -> None:
        self.allocations[column] = Allocation(cta, column, columns, place)
        self.cells[column : column + columns] = POISON

    def deallocate(self, cta, column: int, columns: int) -> None:
        if columns not in SIZES:
            raise Fault("tmem-granularity", f"tcgen05.dealloc of {columns} columns; accepted: {SIZES}")
        found = self.allocations.get(column)
        if found is None or found.owner is not cta:
            raise Fault(
                "tmem-dealloc",
                f"tcgen05.dealloc of column {column}, which no tcgen05.alloc returned; {self.describe(cta)}",
            )
        if found.columns != columns:
            raise Fault(
                "tmem-dealloc",
                f"tcgen05.dealloc of {columns} columns at column {column}, but {found.columns} were allocated there "
                f"({found.place})",
            )
        del self.allocations[column]
        self.wake()

    def relinquish(self, cta) -> None:
        self.relinquished.add(id(cta))

    def describe(self, cta) -> str:
        mine = [f"{a.column}..{a.column + a.columns - 1}" for a in self.allocations.values() if a.owner is cta]
        return f"{cta} holds columns {', '.join(mine)}" if mine else f"{cta} holds no columns"

    def at_exit(self, cta) -> None:
        """Reports columns that an ended CTA still holds: a leak (they would block every later CTA on the SM)."""
        leaked = self.forget(cta)
        if leaked:
            self.wake()
            a = leaked[0]
            raise Fault(
                "tmem-leak",
                f"{cta} exits with tensor-memory columns {a.column}..{a.column + a.columns - 1} allocated at "
                f"{a.place}; add tcgen05.dealloc before the exit",
            )

    def forget(self, cta) -> list[Allocation]:
        """Removes a CTA and returns what it held."""
        held = [a for a in self.allocations.values() if a.owner is cta]
        for a in held:
            del self.allocations[a.column]
        self.relinquished.discard(id(cta))
        self.groups.pop(id(cta), None)
        self.pair_requests.pop(id(cta), None)
        self.pair_grants.pop(id(cta), None)
        return held

    # ---- checks ------------------------------------------------------------------------------------------------

    def check_group(self, cta, group: int) -> None:
        """Checks that all tcgen05 instructions of a kernel have the same cta_group."""
        used = self.groups.setdefault(id(cta), group)
        if used != group:
            raise Fault("tmem-cta-group", f"cta_group::{group} in {cta}, which used cta_group::{used} before")

    def check(self, cta, column: int, columns: int, what: str) -> None:
        """Checks that this CTA has allocated columns [column, column+columns)."""
        if column + columns > COLUMNS:
            raise Fault("tmem-bounds", f"{what} touches columns {column}..{column + columns - 1}; there are {COLUMNS}")
        for a in self.allocations.values():  # nearly always one allocation holds all of it
            if a.owner is cta and a.column <= column and column + columns <= a.column + a.columns:
                return
        end = column
        while end < column + columns:
            for a in self.allocations.values():
                if a.owner is cta and a.column <= end < a.column + a.columns:
                    end = a.column + a.columns
                    break
            else:
                mine = self.describe(cta)
                raise Fault("tmem-unallocated", f"{what} touches column {end}, which is not allocated; {mine}")


def check_lanes(warp_index: int, lane: int, shape: str, what: str) -> None:
    """Checks lanes: warp w may touch lanes 32*(w%4) .. +31 only; 16-lane shapes start at the first or the middle
    lane of them.
    """
    first = 32 * (warp_index % 4)
    starts = (first,) if shape == "32x32b" else (first, first + 16)
    if lane not in starts:
        own = f"lanes {first}..{first + 31}"
        if not first <= lane < first + 32:
            raise Fault("lane-ownership", f"{what} at lane {lane}: warp {warp_index} may access {own} only")
        raise Fault(
            "tmem-lane", f"{what} at lane {lane}: a .{shape} access of warp {warp_index} must start at one of {starts}"
        )


# ---- what a register of tcgen05.ld / st stands for --------------------------------------------------------------

REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}  # per repetition
WIDTHS = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 1}  # columns per repetition
ALIGNMENT = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 4, "16x32bx2": 1}  # alignment of the column


@cache
def register_map(shape: str, repeat: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (column, lane) of register r of thread t, relative to the address: two int arrays [registers, 32].
    For 16x32bx2 the second half of the threads (t >= 16) starts at its own column, which the caller adds."""
    r = np.arange(REGISTERS[shape] * repeat)[:, None]
    t = np.arange(32)[None, :]
    if shape == "32x32b":
        column, lane = r + 0 * t, t + 0 * r
    elif shape == "16x64b":
        column, lane = 2 * r + t // 2 % 2, t // 4 + 8 * (t % 2) + 0 * r
    elif shape == "16x128b":
        column, lane = 4 * (r // 2) + t % 4, t // 4 + 8 * (r % 2)
    elif shape == "16x256b":
        column, lane = 8 * (r // 4) + 2 * (t % 4) + r % 2, t // 4 + 8 * (r // 2 % 2)
    else:
        column, lane = r + 0 * t, t % 16 + 0 * r
    return column, lane


@cache
def cell_index(shape: str, repeat: int, packed: bool, split: int) -> np.ndarray:
    """Returns the offset of each register's cell in `cells.ravel()` from the cell of the address: intp [registers,
    32]; packed: of the first of its two cells. split: the 16x32bx2 immediate, an address difference (lane << 16 |
    column).
    """
    column, lane = register_map(shape, repeat)
    if packed:
        column = column * 2
    if shape == "16x32bx2":
        second = np.arange(32)[None, :] >= 16
        column = column + second * (split & 0xFFFF)
        lane = lane + second * (split >> 16)
    index = (column * LANES + lane).astype(np.intp)
    index.flags.writeable = False
    return index


def span(shape: str, repeat: int, packed: bool) -> int:
    """Returns the columns that one access covers (each half of a 16x32bx2)."""
    return WIDTHS[shape] * repeat * (2 if packed else 1)


def load(
    cells: np.ndarray, shape: str, repeat: int, packed: bool, lane: int, column: int, split: int = 0
) -> np.ndarray:
    """Executes tcgen05.ld -> uint32 [registers, 32]."""
    if shape == "32x32b" and not packed:
        return cells[column : column + repeat, lane : lane + 32]
    flat = cells.reshape(-1)
    index = cell_index(shape, repeat, packed, split) + (column * LANES + lane)
    if not packed:
        return flat.take(index)
    return flat.take(index) & 0xFFFF | flat.take(index + LANES) << 16


def store(
    cells: np.ndarray, values: np.ndarray, shape: str, repeat: int, packed: bool, lane: int, column: int, split: int = 0
) -> None:
    """Executes tcgen05.st, the inverse of `load`; unpacking writes each half of a register to the low half of its
    own cell.
    """
    if shape == "32x32b" and not packed:
        cells[column : column + repeat, lane : lane + 32] = values
        return
    flat = cells.reshape(-1)
    index = cell_index(shape, repeat, packed, split) + (column * LANES + lane)
    if packed:
        flat[index] = values & 0xFFFF
        flat[index + LANES] = values >> 16
    else:
        flat[index] = values


# ---- tcgen05.cp and tcgen05.shift --------------------------------------------------------------------------------

COPY_SHAPES = {"128x256b": (128, 2), "128x128b": (128, 1), "4x256b": (4, 2), "64x128b": (64, 1), "32x128b": (32, 1)}


@cache
def copy_lanes(shape: str, multicast: str) -> np.ndarray:
    """Returns the lanes that receive source row i, relative to the address: int [copies, rows]."""
    rows = np.arange(COPY_SHAPES[shape][0])
    if shape == "4x256b":
        return 32 * rows[None, :]
    if multicast == "warpx4":
        return rows[None, :] + 32 * np.arange(4)[:, None]
    if multicast == "warpx2::02_13":
        return rows[None, :] + 64 * np.arange(2)[:, None]
    if multicast == "warpx2::01_23":
        return (rows // 32 * 64 + rows % 32)[None, :] + 32 * np.arange(2)[:, None]
    return rows[None, :]


def copy_in(cells: np.ndarray, data: np.ndarray, shape: str, multicast: str, lane: int, column: int) -> None:
    """Executes tcgen05.cp: writes data uint8 [rows, 16*chunks] to the cells of every lane that shares the row."""
    words = data.view(np.uint32)  # [rows, columns]
    for lanes in copy_lanes(shape, multicast):
        cells[column : column + words.shape[1], lane + lanes] = words.T


def shift_down(cells: np.ndarray, lane: int, column: int) -> None:
    """Executes tcgen05.shift.down: in 8 columns, 31 lanes get the value of the next lane; the last lane stays."""
    block = cells[column : column + 8, lane : lane + 32]
    block[:, :-1] = block[:, 1:].copy()


# ---- where a matrix lives ----------------------------------------------------------------------------------------


class Block(NamedTuple):
    """Rows [m, m+rows) and columns [n, n+columns) of a matrix lie at lanes lane.. and columns column.. (relative)."""

    m: int
    rows: int
    n: int
    columns: int
    lane: int
    column: int


@cache
def accumulator_blocks(m: int, n: int, folded: bool) -> tuple[Block, ...]:
    """Returns how one CTA's part of D (m rows of this CTA: 32, 64 or 128) is spread over lanes and columns.

    128 rows: lane = row (layouts D, A). 64 rows: 16 rows in each lane quarter (F; C with a sparse A in a pair); folded,
    with .ws (E) or a dense A in a pair (B): two column halves on top of each other. 32 rows, .ws (G): four column
    quarters."""
    if m == 128:
        return (Block(0, 128, 0, n, 0, 0),)
    if m == 32:
        return tuple(Block(0, 32, q * (n // 4), n // 4, 32 * q, 0) for q in range(4))
    if folded:
        return tuple(Block(0, 64, h * (n // 2), n // 2, 64 * h, 0) for h in range(2))
    return tuple(Block(16 * q, 16, 0, n, 32 * q, 0) for q in range(4))
