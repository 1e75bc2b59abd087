"""What accesses to memory request: wavefronts of shared memory, sectors of global memory, lookups of L1."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

NEAR_BYTES, SECTOR = 12 << 10, 32  # NEAR_BYTES: bytes that a CTA always finds in L1
TAGS = 4  # sets of L1, each of which looks up one line in a cycle
ALIGNED = 512  # bytes: alignment of PyTorch's allocator on a GPU
PAGE, MOST_PAGES = 12, 16  # sectors: 2 to the power of PAGE
AT_ONCE = 512  # loads that are evaluated together at first
ZEROS = 2  # lines that one counts for that cp.async fills with zeros instead of copying (parts.py, conv)


def _counts() -> dict:
    return defaultdict(int)


@dataclass
class Access:
    """Sums over the sampled executions (looks) of the memory instruction at one PTX line."""

    looks: int = 0
    ran: int = 0  # executions, sampled or not
    units: int = 0  # wavefronts of shared memory, or sectors of 32 bytes
    lines: int = 0  # lines of 128 bytes
    wavefronts: int = 0  # wavefronts of global loads that L1 holds, or lookups of their lines
    missed: int = 0  # sectors that the CTA had not requested before
    distant: int = 0  # ... that it had requested, but more than NEAR_BYTES before
    missing: int = 0  # looks with missed sectors, or that wait for a look with some; `again`: looks with distant ones
    again: int = 0
    later: int = 0  # missing looks at 64 bytes of which the CTA had requested a part: they are in L2, or on their way
    along: int = 0  # looks of a store that continue near the warp's last one
    jumps: int = 0  # looks of a load in another page of device memory than the warp's last one
    bytes: int = 0
    space: str = "shared"  # shared, load, store or atomic
    tensors: dict = field(default_factory=_counts)

    @property
    def times(self) -> float:
        """Executions that each look represents."""
        return self.ran / self.looks if self.looks else 0.0

    def sent(self, line: float) -> float:
        """Returns the bytes of L2's time that the sampled stores take, of which a part of a line takes at least
        `line`."""
        return max(line * self.lines, min(self.bytes, SECTOR * self.units))


def wavefronts(addresses: np.ndarray, size: int) -> np.ndarray:
    """Returns the wavefronts of accesses [n, 32] to shared memory. A bank serves one word at a time; wide accesses
    proceed by halves or quarters of the warp, 128 bytes each. Inactive lanes repeat the address of an active one."""
    bits = 4 if size >= 16 else 3 if size == 8 else 2
    per = 128 >> bits
    units = (addresses >> bits).reshape(len(addresses), -1, per)
    found = np.full(len(units), units.shape[1])
    # Within 128 bytes every word has its own bank; most accesses are like that.
    apart = (units.max(-1) - units.min(-1) >= per).any(-1).nonzero()[0]
    if len(apart):
        units = np.sort(units[apart])
        fresh = np.ones(units.shape, bool)
        fresh[..., 1:] = units[..., 1:] != units[..., :-1]
        banks = (units & per - 1)[..., None] == np.arange(per)
        found[apart] = (banks & fresh[..., None]).sum(-2).max(-1).sum(-1)
    return found


def held_wavefronts(
    step: np.ndarray, even: np.ndarray, sizes: np.ndarray, addresses: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Returns the cycles of loads of global memory that L1 holds: conflicts in its banks, which are those of shared
    memory, or lines in one of its four sets of tags. step: from each lane to the next where they are `even`."""
    out = np.zeros(len(step), np.int64)
    kinds, which = np.unique(2 * (64 * step + sizes) + even, return_inverse=True)
    for k, kind in enumerate(kinds.tolist()):
        those = (which == k).nonzero()[0]
        pace, size = divmod(kind >> 1, 64)
        found = pace * np.arange(32)[None] if kind & 1 else addresses(those)
        out[those] = np.maximum(wavefronts(found, size), lookups(found))
    return out


def lookups(addresses: np.ndarray) -> np.ndarray:
    """Returns how many lines of accesses [n, 32] the busiest of four sets of tags has. Which set is unknown; XORs of
    the line's bits fit lanes at random and at all measured strides (benchmarks/microbench, gathers and everyday)."""
    lines = np.sort(addresses >> 7)
    if (lines[:, -1] - lines[:, 0] < TAGS).all():
        return np.ones(len(lines), np.int64)
    fresh = np.ones(lines.shape, bool)
    fresh[:, 1:] = lines[:, 1:] != lines[:, :-1]
    folded = lines ^ lines >> 8
    folded ^= folded >> 4
    sets = (folded ^ folded >> 2) & TAGS - 1
    return ((sets[..., None] == np.arange(TAGS)) & fresh[..., None]).sum(1).max(-1)


def shifts(starts: list[int]) -> np.ndarray:
    """Returns offsets that move each tensor to where a GPU's allocator might place it, a multiple of 512 bytes. Here
    it is a multiple of 64 or 16, which differs from run to run. The last is for addresses before all tensors."""
    first = np.array([*starts, 0], np.int64)
    return (-first) % ALIGNED + 2 * ALIGNED * np.arange(len(first))  # all different


def in_machine_order(warps: np.ndarray, records: np.ndarray, blocks: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Returns the order in which the machine code executes rows that the emulator recorded: ptxas moves instructions
    within a block, and of several that request a line the first one issued brings it. blocks, numbers: of the machine
    instruction of each row."""
    there = np.argsort(warps, kind="stable")  # the rows of each warp
    again = np.ones(len(there), bool)  # a block begins, or begins again
    again[1:] = (np.diff(records[there]) <= 0) | (np.diff(blocks[there]) != 0) | (np.diff(warps[there]) != 0)
    order = np.empty(len(there), np.int64)
    order[there] = there[np.lexsort((numbers[there], again.cumsum()))]
    return order


def repeated(addresses: np.ndarray, on: np.ndarray) -> np.ndarray:
    """Counts the lanes of atomic operations [n, 32] whose word another lane of the instruction changes before them; in
    each sector only the word with the most lanes counts. on: active lanes."""
    words = np.sort(np.where(on, addresses >> 2, -8 * (1 + np.arange(32))))
    before = np.zeros(words.shape, np.int64)
    for lane in range(1, 32):
        before[:, lane] = (before[:, lane - 1] + 1) * (words[:, lane] == words[:, lane - 1])
    begins = np.ones(words.shape, bool)
    begins[:, 1:] = words[:, 1:] >> 3 != words[:, :-1] >> 3
    most = np.maximum.reduceat(before.ravel(), begins.ravel().nonzero()[0])
    return np.bincount(begins.nonzero()[0], most, len(words))


def turns_of(warps: np.ndarray) -> np.ndarray:
    """Returns, for each row, how many earlier rows have the same warp."""
    order = np.argsort(warps, kind="stable")
    sorted_ = warps[order]
    out = np.empty(len(warps), np.int64)
    out[order] = np.arange(len(warps)) - np.searchsorted(sorted_, sorted_)
    return out


def sectors_of(
    ends: np.ndarray | None, addresses: Callable[[], np.ndarray], store: np.ndarray, cta: np.ndarray, turn: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Returns, for accesses [n, 32] to global memory: sectors, sectors new to the CTA, sectors requested long ago,
    lines of 128 bytes.
    ends: addresses of the first and the last lane, if the lanes touch every sector between. The warps of a CTA run in
    step on a GPU but one by one in the emulator, so the first access of every warp is ordered before any second."""
    fresh = None
    if ends is not None:
        sectors = ends >> 5
        units, lines = sectors[:, 1] - sectors[:, 0] + 1, (sectors[:, 1] >> 2) - (sectors[:, 0] >> 2) + 1
    else:
        sectors, fresh = apart(addresses())
        of_line = sectors >> 2
        units, lines = fresh.sum(1), 1 + (of_line[:, 1:] != of_line[:, :-1]).sum(1)
    missed, distant = units.copy(), np.zeros_like(units)
    for k in np.bincount(cta).nonzero()[0].tolist():
        mine = (~store & (cta == k)).nonzero()[0]
        mine = mine[turn[mine].argsort(kind="stable")]
        found = ranges_first_asked(sectors[mine], units[mine])
        if found is None:
            if fresh is None:
                sectors, fresh = apart(addresses())
            found = first_asked(sectors[mine], fresh[mine])
        missed[mine], near = found
        distant[mine] = np.maximum(near - missed[mine], 0)
    return units, missed, distant, lines


def joins(which: np.ndarray, turn: np.ndarray, sector: np.ndarray, missed: np.ndarray) -> np.ndarray:
    """Returns whether some warp of the CTA fetches the same sector in the same iteration, so that all wait for it.
    which: the CTA and the instruction, because another instruction may request the sector much later."""
    step = which * (turn.max() + 1) + turn
    at = sector - sector.min()
    same = np.unique(step * (at.max() + 1) + at, return_inverse=True)[1]
    return np.bincount(same, missed)[same] > 0


def comes_later(cta: np.ndarray, turn: np.ndarray, warp: np.ndarray, order: np.ndarray, line: np.ndarray) -> np.ndarray:
    """Returns whether a warp of the CTA has requested a part of `line`, 64 bytes that device memory delivers
    together, in an earlier iteration, or this warp in an earlier instruction. turn, order: earlier executions of the
    instruction, and of all instructions, by the warp; warps that are in step may execute different numbers of them."""
    at = line - line.min()
    found = np.zeros(len(line), bool)
    for owner, when in ((cta, turn), (warp, order)):
        of = np.unique(owner * (at.max() + 1) + at, return_inverse=True)[1]
        earliest = np.full(of.max() + 1, when.max())
        np.minimum.at(earliest, of, when)
        found |= when > earliest[of]
    return found


def steps_of(which: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Returns the bytes from the previous address of a warp's instruction, `which`, to this one; 0 the first time."""
    order = np.argsort(which, kind="stable")
    out = np.zeros(len(which), np.int64)
    out[order[1:]] = np.diff(first[order]) * (np.diff(which[order]) == 0)
    return out


def apart(addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (sorted sectors of each access, whether each differs from the one before it)."""
    sectors = np.sort(addresses >> 5)
    fresh = np.ones(sectors.shape, bool)
    np.not_equal(sectors[:, 1:], sectors[:, :-1], out=fresh[:, 1:])
    return sectors, fresh


def ranges_first_asked(sectors: np.ndarray, units: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Like first_asked, if each load requests contiguous sectors and two ranges are equal or disjoint; else None."""
    first, last = sectors[:, 0], sectors[:, -1]
    order = first.argsort(kind="stable")
    begins, ends = first[order], last[order]
    again = begins[1:] == begins[:-1]
    if (last - first >= units).any() or not np.where(again, ends[1:] == ends[:-1], begins[1:] > ends[:-1]).all():
        return None
    which = np.zeros(len(order), np.int64)  # index of each load's range
    which[order[1:]] = (~again).cumsum()

    place = np.empty(len(order), np.int64)

    def new_from(begin: int, end: int) -> np.ndarray:
        those = which[begin:end]
        place[those[::-1]] = np.arange(end - 1, begin - 1, -1)
        return np.where(place[those] == np.arange(begin, end), units[begin:end], 0)

    return filled_again(len(order), new_from)


def first_asked(sectors: np.ndarray, fresh: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts the sectors of each load [n, 32] that no earlier load requested, and those that no recent load did."""
    units = fresh.sum(1)

    def new_from(begin: int, end: int) -> np.ndarray:
        there = fresh[begin:end]
        of = np.arange(len(there)).repeat(units[begin:end])
        return np.bincount(of[first_places(sectors[begin:end][there])], minlength=len(there))

    return filled_again(len(sectors), new_from)


def filled_again(loads: int, new_from: Callable[[int, int], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Counts the sectors that each load requests first, and those that it brings into an L1 of NEAR_BYTES."""
    missed = new_from(0, loads) if loads else np.zeros(0, np.int64)
    if SECTOR * missed.sum() <= NEAR_BYTES:
        return missed, missed
    # Two caches that are emptied at different times: a sector that is soon requested again hits one of them.
    near = (filled(loads, new_from, NEAR_BYTES, first) for first in (NEAR_BYTES, NEAR_BYTES // 2))
    return missed, np.minimum(*near)


def filled(loads: int, new_from: Callable[[int, int], np.ndarray], full: int, first: int = 0) -> np.ndarray:
    """Counts the sectors that each load brings into a cache that is emptied when full, the first time after `first`
    bytes. new_from(begin, end): the same for an unbounded cache that is empty at load `begin`."""
    out = np.zeros(loads, np.int64)
    begin, many = 0, AT_ONCE
    room = first or full
    while begin < loads:
        end = min(begin + many, loads)
        found = new_from(begin, end)
        held = SECTOR * found.cumsum()
        if held[-1] > room:
            end = begin + int((held > room).argmax()) + 1
        elif end < loads:  # the cache is not full yet
            many *= 4
            continue
        out[begin:end] = found[: end - begin]
        begin, room = end, full
    return out


def first_places(values: np.ndarray) -> np.ndarray:
    """Returns where each value first occurs; without sorting if they lie on a few pages, as a CTA's mostly do."""
    pages = values >> PAGE
    known = list(dict.fromkeys([*pages[:1].tolist(), *pages[1:][pages[1:] != pages[:-1]].tolist()]))
    if len(known) > MOST_PAGES:
        return np.unique(values, return_index=True)[1]
    at = values & (1 << PAGE) - 1
    for k, page in enumerate(known[1:], 1):
        at += (pages == page) * (k << PAGE)
    place = np.full(len(known) << PAGE, -1)
    place[at[::-1]] = np.arange(len(at) - 1, -1, -1)
    return place[place >= 0]
