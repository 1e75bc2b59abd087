"""What memory instructions ask for: wavefronts of shared memory, sectors of global memory, by PTX line.

The registers with the addresses are copied while a CTA runs (clock/noting.py) and looked at when it is over, all of an
instruction at once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from softsm.clock import noting
from softsm.engine import program as pg

SHARED_ACCESS = (pg.OP_LDS, pg.OP_STS, pg.OP_ATOM_S)
GLOBAL_ACCESS = (pg.OP_LDG, pg.OP_STG, pg.OP_ATOM_G, pg.OP_LD, pg.OP_ST)
STORES = (pg.OP_STG, pg.OP_ST)
LOOKS = 400  # at the addresses of one instruction
L1_BYTES = 200 << 10
PAGE, MOST_PAGES = 12, 16  # sectors: 2 to the power of PAGE


def _counts() -> dict:
    return defaultdict(int)


@dataclass
class Access:
    """One memory instruction, by PTX line: sums over the looks that were taken."""

    looks: int = 0
    units: int = 0  # wavefronts of shared memory, or sectors of 32 bytes
    lines: int = 0  # of 128 bytes
    missed: int = 0  # sectors that the CTA had not asked for before
    bytes: int = 0
    space: str = "shared"
    tensors: dict = field(default_factory=_counts)


def wavefronts(addresses: np.ndarray, size: int) -> np.ndarray:
    """Of accesses [n, 32] to shared memory: a bank serves one word at a time; wide accesses go by halves or quarters of
    the warp, 128 bytes together. Lanes that are off have the address of one that is on."""
    bits = 4 if size >= 16 else 3 if size == 8 else 2
    per = 128 >> bits
    units = np.sort((addresses >> bits).reshape(len(addresses), -1, per))
    fresh = np.ones(units.shape, bool)
    fresh[..., 1:] = units[..., 1:] != units[..., :-1]
    banks = (units & per - 1)[..., None] == np.arange(per)
    return (banks & fresh[..., None]).sum(-2).max(-1).sum(-1)


class Instructions:
    """The memory instructions of a program, by record."""

    def __init__(self, program) -> None:
        code = program.code
        ops, forms, offsets = code[:, 0], code[:, 4].astype(np.int64), code[:, 3].astype(np.int64)
        self.shared = np.isin(ops, SHARED_ACCESS)
        self.there = self.shared | np.isin(ops, GLOBAL_ACCESS)
        self.generic = np.isin(ops, (pg.OP_LD, pg.OP_ST))
        self.store = np.isin(ops, STORES)
        atomic = np.isin(ops, (pg.OP_ATOM_G, pg.OP_ATOM_S))
        self.size = np.where(atomic, 4, np.maximum(1, forms >> 4 & 15) << (forms & 3))
        self.offset = np.where(offsets >> 31 != 0, offsets - (1 << 32), offsets)
        self.line = np.array([ins.line for ins in program.instructions])


class Looks:
    """Of one run."""

    def __init__(self, instructions: Instructions) -> None:
        self.instructions = instructions
        self.notes = noting.Notes(np.where(instructions.there, LOOKS, 0))

    def accesses(self, starts: list[int], ctas: list[int], traces: list) -> dict[int, Access]:
        """By PTX line. starts: addresses of the tensors; ctas: the CTA of each warp; traces: of each CTA the trace that
        its traffic is added to."""
        rows = self.notes.rows()
        if not len(rows):
            return {}
        records = rows[:, noting.RECORD]
        known = self.instructions
        sizes = known.size[records]
        addresses = rows[:, noting.LANES :] + known.offset[records][:, None]
        lanes = rows[:, noting.ACTIVE, None] >> np.arange(32) & 1
        first = addresses[np.arange(len(lanes)), lanes.argmax(1)]
        addresses = np.where(lanes == 1, addresses, first[:, None])
        generic = known.generic[records] & (first >= pg.SHARED_WINDOW)
        shared = known.shared[records] | (generic & (first < pg.LOCAL_WINDOW))
        units, missed, asked_lines = (np.zeros(len(rows), np.int64) for _ in range(3))
        for size in np.unique(sizes[shared]).tolist():
            those = np.flatnonzero(shared & (sizes == size))
            inside = addresses[those] - np.where(generic[those], pg.SHARED_WINDOW, 0)[:, None]
            units[those] = wavefronts(inside, size)
        lines, of = np.unique(known.line[records], return_inverse=True)
        out = [Access() for _ in lines]
        those = np.flatnonzero(~shared & ~generic)
        if len(those):
            tensor = np.searchsorted(np.array(starts), first[those], "right") - 1
            store = known.store[records[those]]
            cta = np.array(ctas)[rows[those, noting.WARP]]
            turn = turns_of(rows[:, noting.WARP])[those]
            units[those], missed[those], asked_lines[those] = sectors_of(addresses[those] >> 5, store, cta, turn)
            keys = ((of[those] * 4096 + tensor + 1) * 2 + store) * len(traces) + cta
            keys, same = np.unique(keys, return_inverse=True)
            sums = np.bincount(same, units[those]), np.bincount(same, missed[those])
            for key, all_, new in zip(keys.tolist(), *(x.astype(int).tolist() for x in sums)):
                key, k = divmod(key, len(traces))
                line, at, stored = key // 8192, key // 2 % 4096 - 1, key % 2
                out[line].space = "store" if stored else "load"
                out[line].tensors[at] += all_
                traces[k].traffic[at, "write" if stored else "read"] += 32 * new
        counted = shared | ~generic
        found = (counted, units, asked_lines, missed, counted * sizes * lanes.sum(1))
        sums = [np.bincount(of, x, len(lines)).astype(int).tolist() for x in found]
        for a, *a_sums in zip(out, *sums):
            a.looks, a.units, a.lines, a.missed, a.bytes = a_sums
        return dict(zip(lines.tolist(), out))


def turns_of(warps: np.ndarray) -> np.ndarray:
    """How many rows of the same warp stand before each."""
    order = np.argsort(warps, kind="stable")
    sorted_ = warps[order]
    out = np.empty(len(warps), np.int64)
    out[order] = np.arange(len(warps)) - np.searchsorted(sorted_, sorted_)
    return out


def sectors_of(sectors: np.ndarray, store: np.ndarray, cta: np.ndarray, turn: np.ndarray) -> tuple[np.ndarray, ...]:
    """Of accesses [n, 32] to global memory: sectors, those that the CTA had not asked for before, lines of 128 bytes.
    The warps of a CTA run in step on a GPU, while the emulator takes one after the other: the first of every warp come
    first, then the second."""
    steps = np.diff(sectors)
    if (steps < 0).any():
        sectors.sort()
        steps = np.diff(sectors)
    fresh = np.ones(sectors.shape, bool)
    np.not_equal(steps, 0, out=fresh[:, 1:])
    units = np.count_nonzero(fresh, 1)
    missed = units.copy()
    for k in np.unique(cta).tolist():
        mine = np.flatnonzero(~store & (cta == k))
        mine = mine[np.argsort(turn[mine], kind="stable")]
        missed[mine] = first_asked(sectors[mine], fresh[mine])
    return units, missed, 1 + np.count_nonzero(np.diff(sectors >> 2), 1)


def first_asked(sectors: np.ndarray, fresh: np.ndarray) -> np.ndarray:
    """How many of the sectors of each load [n, 32] the loads before it had not asked for. L1 begins anew when it is
    full."""
    new = np.zeros(len(sectors), np.int64)
    begin = 0
    while begin < len(sectors):
        there = fresh[begin:]
        of = np.repeat(np.arange(len(there)), np.count_nonzero(there, 1))
        found = np.bincount(of[first_places(sectors[begin:][there])], minlength=len(there))
        full = np.flatnonzero(np.cumsum(found) * 32 > L1_BYTES)
        end = begin + int(full[0]) + 1 if len(full) else len(sectors)
        new[begin:end] = found[: end - begin]
        begin = end
    return new


def first_places(values: np.ndarray) -> np.ndarray:
    """Where each value stands first. Without sorting where they lie on a few pages, as those of a CTA mostly do."""
    pages = values >> PAGE
    known = list(dict.fromkeys(pages[np.flatnonzero(np.diff(pages, prepend=-1))].tolist()))
    if len(known) > MOST_PAGES:
        return np.unique(values, return_index=True)[1]
    at = values & (1 << PAGE) - 1
    for k, page in enumerate(known[1:], 1):
        at += (pages == page) * (k << PAGE)
    place = np.full(len(known) << PAGE, -1)
    place[at[::-1]] = np.arange(len(at) - 1, -1, -1)
    return place[place >= 0]
