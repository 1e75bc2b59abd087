"""What memory instructions ask for: wavefronts of shared memory, sectors of global memory, by PTX line.

The registers with the addresses are copied while a CTA runs and looked at when it is over, all of an instruction at
once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from softsm.engine import program as pg

SHARED_ACCESS = (pg.OP_LDS, pg.OP_STS, pg.OP_ATOM_S)
GLOBAL_ACCESS = (pg.OP_LDG, pg.OP_STG, pg.OP_ATOM_G, pg.OP_LD, pg.OP_ST)
STORES = (pg.OP_STG, pg.OP_ST)
LOOKS = 400  # at the addresses of one instruction
L1_BYTES = 200 << 10


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
        self.where = {
            pc: (int(code[pc, 2]), not self.shared[pc], int(code[pc, 6]), int(code[pc, 7]))
            for pc in np.flatnonzero(self.there).tolist()
        }


class Looks:
    """Of one run: `note` is called before a memory instruction is executed."""

    def __init__(self, instructions: Instructions) -> None:
        self.instructions, self.where = instructions, instructions.where
        self.left = np.where(instructions.there, LOOKS, 0)
        self.rows: list[tuple] = []  # (record, active lanes, CTA, addresses without the offset)

    def note(self, warp, pc: int, mask: int) -> bool:
        """-> whether this was the last look at the instruction"""
        register, wide, guard, flip = self.where[pc]
        active = mask & (int(warp.P[guard]) ^ flip) & 0xFFFFFFFF
        if not active:
            return False
        self.rows.append((pc, active, warp.cta, (warp.Q if wide else warp.R)[register].copy()))
        self.left[pc] -= 1
        return self.left[pc] == 0

    def accesses(self, starts: list[int], home: dict) -> dict[int, Access]:
        """By PTX line. starts: addresses of the tensors; home: CTA -> the trace that its traffic is added to."""
        if not self.rows:
            return {}
        records = np.array([row[0] for row in self.rows])
        known = self.instructions
        lines, sizes = known.line[records], known.size[records]
        addresses = np.array([row[3] for row in self.rows], np.uint64).astype(np.int64)
        addresses += known.offset[records][:, None]
        lanes = np.array([row[1] for row in self.rows], np.uint32)[:, None] >> np.arange(32, dtype=np.uint32) & 1
        first = addresses[np.arange(len(lanes)), lanes.argmax(1)]
        addresses = np.where(lanes == 1, addresses, first[:, None])
        generic = known.generic[records] & (first >= pg.SHARED_WINDOW)
        shared = known.shared[records] | (generic & (first < pg.LOCAL_WINDOW))
        asked = sizes * lanes.sum(1)
        out = {line: Access() for line in np.unique(lines).tolist()}
        for size in np.unique(sizes[shared]).tolist():
            those = np.flatnonzero(shared & (sizes == size))
            inside = addresses[those] - np.where(generic[those], pg.SHARED_WINDOW, 0)[:, None]
            _add(out, lines[those], units=wavefronts(inside, size), bytes=asked[those])
        those = np.flatnonzero(~shared & ~generic)
        if len(those):
            tensors = np.searchsorted(np.array(starts), first[those], "right") - 1
            store = known.store[records[those]]
            self._global(those, out, home, addresses[those] >> 5, store, lines[those], tensors, asked[those])
        return out

    def _global(self, numbers, out, home, sectors, store, lines, tensors, asked) -> None:
        sectors.sort()
        fresh = np.ones(sectors.shape, bool)
        fresh[:, 1:] = sectors[:, 1:] != sectors[:, :-1]
        units = fresh.sum(1)
        lines_asked = 1 + (sectors[:, 1:] >> 2 != sectors[:, :-1] >> 2).sum(1)
        missed = units.copy()
        ctas = [self.rows[n][2] for n in numbers.tolist()]
        places = {cta: k for k, cta in enumerate(dict.fromkeys(ctas))}
        place = np.array([places[cta] for cta in ctas])
        for k in range(len(places)):
            mine = np.flatnonzero(~store & (place == k))
            missed[mine] = first_asked(sectors[mine], fresh[mine])
        _add(out, lines, units=units, bytes=asked, missed=missed, lines=lines_asked)
        owner = list(places)
        keys = ((lines * 4096 + tensors + 1) * 2 + store) * len(owner) + place
        keys, of = np.unique(keys, return_inverse=True)
        sums = np.bincount(of, units), np.bincount(of, missed)
        for key, all_, new in zip(keys.tolist(), *(x.astype(int).tolist() for x in sums)):
            key, k = divmod(key, len(owner))
            line, tensor, stored = key // 8192, key // 2 % 4096 - 1, key % 2
            out[line].space = "store" if stored else "load"
            out[line].tensors[tensor] += all_
            home[owner[k]].traffic[tensor, "write" if stored else "read"] += 32 * new


def _add(out: dict[int, Access], where: np.ndarray, **amounts: np.ndarray) -> None:
    keys, of, looks = np.unique(where, return_inverse=True, return_counts=True)
    for k, line in enumerate(keys.tolist()):
        out[line].looks += int(looks[k])
    for name, values in amounts.items():
        for line, total in zip(keys.tolist(), np.bincount(of, values).astype(int).tolist()):
            setattr(out[line], name, getattr(out[line], name) + total)


def first_asked(sectors: np.ndarray, fresh: np.ndarray) -> np.ndarray:
    """How many of the sectors of each load [n, 32] the loads before it had not asked for. L1 begins anew when it is
    full."""
    new = np.zeros(len(sectors), np.int64)
    begin = 0
    while begin < len(sectors):
        rows, columns = np.nonzero(fresh[begin:])
        _, at = np.unique(sectors[begin:][rows, columns], return_index=True)
        found = np.bincount(rows[at], minlength=len(sectors) - begin)
        full = np.flatnonzero(np.cumsum(found) * 32 > L1_BYTES)
        end = begin + int(full[0]) + 1 if len(full) else len(sectors)
        new[begin:end] = found[: end - begin]
        begin = end
    return new
