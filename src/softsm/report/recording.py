"""The data of a recorded launch: slices on the tracks of warps and engines, waits, arrivals, memory, buffers.

report/launch_recorder.py observes the launch and fills these classes.

The emulator runs one warp after another; a recording gives every warp its own clock, as if all ran at once. A warp
instruction lasts one cycle. Copies, matrix products and accesses of tensor memory last as long as the timing model
predicts (timing_model/engines.py), and operations of one engine queue. A wait ends with the last arrival that it waits
for. The picture shows which warp waits for which; report/predicted.py draws the predicted time in nanoseconds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from softsm.engine.in_flight import AsyncOp
from softsm.ptx.roles import place_of

GAP = 200  # cycles between launches
MAX_SLICES = 200_000
MAX_CTAS = 8  # CTAs whose slices are kept

ENGINES = {
    "TMA": ("TMA load", "TMA store", "TMA reduction", "bulk"),
    "tensor core": ("tcgen05.mma", "tcgen05.cp", "tcgen05.shift", "tcgen05.commit", "wgmma"),
    "copies": ("cp.async", "st.async"),
}


class Track(NamedTuple):
    launch: int
    cta: int  # number, in order of start
    kind: str  # 'warp', or the name of an engine
    number: int


@dataclass(slots=True)
class Slice:
    track: Track
    name: str
    start: int
    end: int
    kind: str  # 'run', 'wait', 'arrive', 'issue', 'copy', 'mma', 'tmem'
    details: dict


@dataclass(slots=True)
class Barrier:
    """A row of the table of mbarriers: which warps arrive and wait, how often, and how long."""

    launch: int
    cta: int
    name: str
    offset: int
    count: int
    line: int
    phases: int = 0
    arrivals: int = 0
    bytes: int = 0
    arrivers: set = field(default_factory=set)  # tracks
    waiters: set = field(default_factory=set)
    waited: int = 0  # cycles
    time: int = 0  # time of the latest arrival in this phase
    cause: int = -1  # slice of that arrival
    ended: int = 0  # time when the previous phase ended
    ended_cause: int = -1


@dataclass(slots=True)
class Buffer:
    """A part of shared memory that copies or products access."""

    low: int
    high: int
    written_by: set = field(default_factory=set)
    read_by: set = field(default_factory=set)
    swizzles: set = field(default_factory=set)
    bytes: int = 0


@dataclass(slots=True)
class Launch:
    kernel: str
    arch: str
    grid: tuple
    block: tuple
    cluster: tuple
    shared: int
    order: str
    source: str  # PTX
    start: int
    end: int = 0
    ctas: list = field(default_factory=list)
    steps: int = 0
    variables: dict = field(default_factory=dict)


@dataclass(slots=True)
class Clock:
    """The time of one warp, and the open slices of its track."""

    track: Track
    time: int
    drawn: int = 0  # end of the last slice on the track
    run_start: int = -1
    run_steps: int = 0
    run_place: str = ""
    instructions: int = 0
    role: str = ""
    deeds: set = field(default_factory=set)
    waiting: dict = field(default_factory=dict)  # fragment -> (start, instruction, what it waits on, in words)
    macs: int = 0
    groups: list = field(default_factory=list)  # times when the wgmma groups end
    stores: list = field(default_factory=list)  # times when the bulk stores end


class Recorder:
    def __init__(self) -> None:
        self.unit = "cycles"
        self.model = ""  # the source of the times, in words
        self.launches: list[Launch] = []
        self.slices: list[Slice] = []
        self.flows: list[tuple[int, int]] = []  # slice -> slice
        self.barriers: list[Barrier] = []
        self.buffers: dict[tuple[int, int, int], Buffer] = {}  # (launch, low, high)
        self.tensor: list[tuple[int, int, int, int, int, int, str]] = []  # launch, cta, start, end, columns, what
        self.allocations: list[list] = []  # launch, sm, cta, start, end, column, columns
        self.clocks: dict[Track, Clock] = {}
        self.operations: dict[tuple[Track, str], list[int]] = defaultdict(lambda: [0, 0])  # count, bytes
        self.lines: dict[tuple[int, int], int] = defaultdict(int)  # (launch, PTX line) -> times a macro ran
        self.named: set[int] = set()  # launches whose source names roles
        self.dropped = 0

    def add(self, track: Track, name: str, start: int, end: int, kind: str, **details) -> int:
        if track.cta >= MAX_CTAS or len(self.slices) >= MAX_SLICES:
            self.dropped += 1
            return -1
        self.slices.append(Slice(track, name, start, end, kind, details))
        return len(self.slices) - 1

    def flow(self, source: int, target: int) -> None:
        if source >= 0 and target >= 0:
            self.flows.append((source, target))

    def role(self, track: Track) -> str:
        clock = self.clocks.get(track)
        if clock is None:
            return track.kind
        if clock.role:
            return clock.role
        if "tcgen05.mma" in clock.deeds:
            return "mma"
        if "TMA load" in clock.deeds and "tmem" not in clock.deeds:
            return "load"
        return "idle" if track.launch in self.named and not clock.deeds else "compute"

    def track_name(self, track: Track) -> str:
        if track.kind == "warp":
            return f"warp {track.number} {self.role(track)}"
        return track.kind + (f" {track.number + 1}" if track.number else "")


def place(ins) -> str:
    loc = place_of(ins)
    where = f" {loc.file.rpartition('/')[2]}:{loc.line}" if loc else ""
    return f"PTX line {ins.line}{where}: {ins.text}"


def macs(text: str, footprint=None) -> int:
    """Returns the multiply-adds of a product, in units of 16-bit ones."""
    found = re.search(r"m64n(\d+)k(\d+)", text)
    if found:
        return 64 * int(found[1]) * 16
    if footprint is None:
        return 0
    _, _, m, n, _ = footprint.accumulator
    return m * n * 16  # K of every kind is 32 bytes: half the width runs at twice the rate


def volume(op: AsyncOp) -> int:
    """Returns the bytes that an operation moves; 0 for a product."""
    if op.kind in ("tcgen05.ld", "tcgen05.st"):
        return sum(128 * (r[3] - r[2]) for r in (*op.reads, *op.writes) if r[0] == "tmem")
    if "mma" in op.kind or op.kind == "tcgen05.commit":
        return 0
    for regions in (op.writes, op.reads):
        total = sum(r[3] - r[2] for r in regions if r[0] == "shared")
        if total:
            return total
    return 0
