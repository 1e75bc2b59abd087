"""Streams and events of a program: which work is ordered before which, and work that meets without an order.

Every kernel, copy and set has a number in its stream and a clock: for each stream, the number of the last work that is
complete before it begins. Work of the default stream follows that of all streams that are not created with
cudaStreamNonBlocking, and precedes what follows in them. Events, waits of a stream and waits of the host pass clocks
on.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from softsm.checks import beside
from softsm.checks.checking import Checks
from softsm.checks.stream import READ, STRONG_WRITE, WROTE, Footprint, Part
from softsm.doors.cuda.guards import Guard, needed
from softsm.engine.options import current_options
from softsm.ptx.cplusplus import LIBRARIES
from softsm.report.diagnostics import Diagnostic, Party

Clock = dict[int, int]  # stream -> number
DEFAULT, LEGACY, PER_THREAD = 0, 1, 2  # handles that a program need not create
IN_ORDER = (1 << 64) - 1  # in place of a stream: all of them
APART = 8  # bit of a handle: the stream is not ordered with the default one
GRAPH, NUMBER, LANE = 1 << 60, 28, 4  # bit of the handle of a lane of a graph (graphs.py); where its numbers begin
KEPT, KEPT_BYTES = 1024, 1 << 28  # of work that the host does not know to be complete; older work is forgotten


HOST_FIX = "let the host wait in between: cudaDeviceSynchronize, cudaStreamSynchronize or cudaEventSynchronize"


class Work(NamedTuple):
    stream: int
    number: int
    footprint: Footprint
    guards: list[Guard]


def merge(into: Clock, other: Clock) -> Clock:
    for stream, number in other.items():
        into[stream] = max(into.get(stream, 0), number)
    return into


class Streams:
    def __init__(self) -> None:
        self.several = False  # whether the program has created a stream
        self.reachable: dict[int, int] = {}  # size of allocations that the host can reach, by address
        self.numbers: Clock = {}  # of the last work of each stream
        self.clocks: dict[int, Clock] = {}  # what the next work of a stream follows
        self.events: dict[int, Clock] = {}
        self.host: Clock = {}  # what the host knows to be complete
        self.work: list[Work] = []

    @property
    def checks(self) -> Checks | None:
        return next((x for x in current_options().sessions if isinstance(x, Checks) and x.races), None)

    def behind(self, stream: int) -> Clock:
        """Returns the clock of the next work in a stream."""
        clock = merge(dict(self.host), self.clocks.get(stream, {}))
        if stream == DEFAULT:
            for other, theirs in self.clocks.items():
                if not apart(other):
                    merge(clock, theirs)
        elif not apart(stream):
            merge(clock, self.clocks.get(DEFAULT, {}))
        return clock

    def unordered(self, clock: Clock) -> list[Work]:
        return [x for x in self.work if clock.get(x.stream, 0) < x.number]

    def done(self, stream: int, clock: Clock, footprint: Footprint) -> None:
        """Notes work that was issued to a stream."""
        self.numbers[stream] = clock[stream] = self.numbers.get(stream, 0) + 1
        self.clocks[stream] = clock
        self.work = [
            *self.unordered(self.host),
            Work(stream, clock[stream], footprint, needed(footprint, self.reachable.items())),
        ]
        while len(self.work) > KEPT or sum(x.footprint.nbytes for x in self.work) > KEPT_BYTES:
            del self.work[0]

    def launch(self, stream: int, who: str, source: Place | str, run: Callable[[], None]) -> None:
        """Runs a kernel, and compares it with the work that it may run beside."""
        checks, stream = self.checks, named(stream)
        if checks is None:
            return run()
        clock = self.behind(stream)
        checks.stream.beside = tuple(x.footprint for x in self.unordered(clock))
        checks.stream.keeps, checks.stream.left = self.several or bool(self.reachable), []
        try:
            run()
        finally:
            left = checks.stream.left
            checks.stream.beside, checks.stream.keeps, checks.stream.left = (), False, []
        self.done(stream, clock, Footprint(f"kernel {who} in {title(stream)}", source, left))

    def transfer(
        self, stream: int, who: str, source: Place | str, ranges: list[tuple[int, int, bool]], waits: bool
    ) -> None:
        """Compares a copy or a set with the work that it may run beside. ranges: (address, size, whether it is
        written). waits: the host waits for it."""
        checks, stream = self.checks, named(stream)
        if checks is None:
            return
        clock = self.behind(stream)
        mine = Footprint(f"{who} in {title(stream)}", source, [p for r in ranges if r[1] for p in beside.of_range(*r)])
        for other in self.unordered(clock):
            for address, writes, wrote in mine.meets(other.footprint):
                where = f"bytes {address:#x} to {address + 3:#x}"
                this = Party(mine.who, source=str(source), what=f"{'writes' if writes else 'reads'} {where}")
                theirs = f"{'wrote' if wrote else 'read'} {where}"
                that = Party(f"the {other.footprint.who}", source=str(other.footprint.source), what=theirs)
                checks.report.add(
                    Diagnostic("race", "two accesses of memory are not ordered", (this, that), beside.FIX)
                )
                break
        self.done(stream, clock, mine)
        if waits:
            merge(self.host, clock)

    def forget(self, start: int, size: int) -> None:
        """Notes that memory is gone: what is allocated next may have its addresses."""

        def cut(part: Part) -> list[Part]:
            low, high = part.meeting(start, -(-size // 4))
            if low >= high:
                return [part]
            end = part.start + 4 * len(part.flags)
            pieces = [Part(a, part.between(a, b)) for a, b in ((part.start, low), (high, end)) if a < b]
            return pieces

        self.work = [
            x._replace(footprint=x.footprint._replace(parts=[y for p in x.footprint.parts for y in cut(p)]))
            for x in self.work
        ]

    # ---- the host ----------------------------------------------------------------------------------------------

    def guards(self) -> list[Guard]:
        return [guard for x in self.unordered(self.host) for guard in x.guards]

    def accessed(self, address: int, writes: bool, source: Place | str) -> None:
        """Compares an access of the host with the work that may still run. A flag tells it what came before."""
        for x in self.unordered(self.host):
            flags = next((int(p.between(at, at + 4)[0]) for p in x.footprint.parts for at in p.word(address)), 0)
            if flags & STRONG_WRITE:
                merge(self.host, {x.stream: x.number})
            elif flags & WROTE or writes and flags & READ:
                where = f"bytes {address & ~3:#x} to {(address & ~3) + 3:#x}"
                this = Party("the host", source=str(source), what=f"{'writes' if writes else 'reads'} {where}")
                what = f"{'wrote' if flags & WROTE else 'read'} {where}"
                that = Party(f"the {x.footprint.who}", source=str(x.footprint.source), what=what)
                if self.checks is not None:
                    found = Diagnostic("race", "two accesses of memory are not ordered", (this, that), HOST_FIX)
                    self.checks.report.add(found)
                merge(self.host, {x.stream: x.number})  # what follows has the same cause
                return

    # ---- calls of the program ----------------------------------------------------------------------------------

    def created(self) -> None:
        self.several = True

    def record(self, event: int, stream: int) -> None:
        self.events[event] = self.behind(named(stream))

    def wait(self, stream: int, event: int) -> None:
        stream = named(stream)
        self.clocks[stream] = merge(self.behind(stream), self.events.get(event, {}))

    def host_waits(self, stream: int) -> None:
        merge(self.host, self.behind(named(stream)))

    def host_waits_for_event(self, event: int) -> None:
        merge(self.host, self.events.get(event, {}))

    def host_waits_for_all(self) -> None:
        self.host = dict(self.numbers)
        self.work = []


def named(stream: int) -> int:
    return DEFAULT if stream == LEGACY else stream


def apart(stream: int) -> bool:
    return bool(stream & APART)


def lane_of(graph: int, lane: int) -> int:
    """Returns the handle of a lane."""
    return GRAPH | graph << NUMBER | lane << LANE | APART


def title(stream: int) -> str:
    if stream & GRAPH:
        return f"graph {(stream ^ GRAPH) >> NUMBER}"
    known = {DEFAULT: "the default stream", PER_THREAD: "the stream of the thread"}
    return known.get(stream, f"stream {stream // 16}")


class Place(NamedTuple):
    """Where the program made a call."""

    library: Path
    offset: int

    def __str__(self) -> str:
        """The line, outside of headers; '' where no tool tells it."""
        tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
        if tool is None or not self.offset:
            return ""
        command = [tool, "-i", "-e", str(self.library), hex(self.offset - 1)]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        lines = [x.split(" (")[0] for x in said.splitlines() if re.search(r":\d+", x)]
        return next((x for x in lines if not LIBRARIES.search(x)), "")
