"""CUDA graphs: what a program captures from a stream, or adds node by node, and what a launch of it does.

A node keeps a piece of work as a function of the stream in which it runs, and the nodes behind which it runs. A launch
does the work of all nodes in the order in which the program gave them. For the question of what nothing orders
(streams.py), nodes are in lanes, which are streams of the graph: the nodes of one lane follow each other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Set
from typing import NamedTuple, Protocol

from softsm.doors.cuda.streams import APART, DEFAULT, IN_ORDER, Clock, Streams, apart, lane_of, merge, named

SUCCESS, INVALID_VALUE, ILLEGAL_STATE, UPDATE_FAILURE = 0, 1, 401, 910
UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT = range(900, 908)
HANDLE = ctypes.c_uint64
RELAXED = 2  # cudaStreamCaptureModeRelaxed
NO_CAPTURE, CAPTURES, BROKEN = range(3)  # cudaStreamCaptureStatus
ADDED = 1 << 62 | APART  # in place of a stream: the node that the program adds
NOW = -1  # in place of a status: host.cpp calls a function of the program
CALLS = "begin end capturing create add added host include size instantiate update launch resume forget".split()


class Runs(Protocol):
    """What runs the work: runtime.Runtime."""

    streams: Streams
    failure: BaseException | None

    def synchronise(self) -> int: ...

    def failed(self) -> int: ...


class Refused(Exception):
    """A call that CUDA rejects with this status. why: to be printed, if not said before"""

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


class Node(NamedTuple):
    kind: str
    run: Callable[[int], int]  # does the work in a stream, returns the CUDA status
    call: tuple[int, int] | None  # function and argument: the host calls it then
    behind: frozenset[int]
    lane: int


class Graph:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.ends: list[int] = []  # the last node of each lane

    def add(self, kind: str, run: Callable[[int], int], call: tuple[int, int] | None, behind: Set[int]) -> int:
        number = len(self.nodes)
        lane = next((self.nodes[x].lane for x in sorted(behind) if x in self.ends), len(self.ends))
        self.ends[lane : lane + 1] = [number]
        self.nodes.append(Node(kind, run, call, frozenset(behind), lane))
        return number

    def include(self, nodes: Iterable[Node], behind: Set[int]) -> set[int]:
        """Adds the nodes of another graph; returns those that none of them follows."""
        base = len(self.nodes)
        last: set[int] = set()
        for node in nodes:
            last -= (inside := {base + x for x in node.behind})
            last.add(self.add(node.kind, node.run, node.call, inside or behind))
        return last or set(behind)

    def reached(self, front: Iterable[int]) -> set[int]:
        """Returns these nodes and all that they follow."""
        found, open_ = set(), list(front)
        while open_:
            found.add(at := open_.pop())
            open_ += self.nodes[at].behind - found
        return found


class Executable:
    """A graph that can be launched."""

    def __init__(self, number: int, nodes: Iterable[Node]):
        self.number, self.nodes = number, tuple(nodes)
        self.clock: Clock = {}  # of its last launch, which the next one follows


class Capture:
    def __init__(self, graph: Graph, origin: int, mode: int, front: Iterable[int] = ()):
        self.graph, self.origin, self.mode = graph, origin, mode
        self.fronts = {origin: set(front)}  # for each stream, the nodes behind which its next one comes
        self.broken = False


class Graphs:
    """The graphs of a program, by their handles, and the streams that it captures."""

    def __init__(self, runtime: Runs):
        self.runtime, self.streams = runtime, runtime.streams
        self.graphs: dict[int, Graph] = {}
        self.executables: dict[int, Executable] = {}
        self.captures: dict[int, Capture] = {}  # by stream
        self.events: dict[int, tuple[Capture, frozenset[int]]] = {}  # events recorded in a captured stream
        self.count, self.instantiated = 0, 0
        self.replaying: Iterator[tuple[Node, int]] = iter(())  # of the launch that host.cpp has interrupted
        self.before = 0  # nodes of the graph to which the program adds one

    # ---- capture -----------------------------------------------------------------------------------------------

    def takes(self, stream: int, kind: str, run: Callable[[int], int], call: tuple[int, int] | None = None) -> bool:
        """Keeps work of a captured stream."""
        capture = self.of(stream)
        if capture is not None:
            capture.fronts[stream] = {capture.graph.add(kind, run, call, capture.fronts[stream])}
        return capture is not None

    def of(self, stream: int) -> Capture | None:
        """Returns the capture of a stream that is used."""
        capture = self.captures.get(stream)
        if capture is not None and capture.broken:
            raise Refused(INVALIDATED, "")
        if stream == DEFAULT:
            text = "the default stream would wait for a captured stream that was not created with cudaStreamNonBlocking"
            self.refuse((x for s, x in self.captures.items() if not apart(s)), IMPLICIT, text)
        return capture

    def refuse(self, captures: Iterable[Capture], status: int, why: str) -> None:
        """Makes captures invalid, if there are any."""
        found = list(captures)
        for capture in found:
            capture.broken = True
        if found:
            raise Refused(status, why)

    def forbid(self, call: str) -> None:
        text = f"{call} is not allowed while a stream is captured, except in mode cudaStreamCaptureModeRelaxed"
        self.refuse((x for x in self.captures.values() if x.mode != RELAXED), UNSUPPORTED, text)

    def recorded(self, event: int, stream: int) -> bool:
        """Whether the event belongs to a capture."""
        capture = self.of(stream)
        self.events.pop(event, None)
        if capture is not None:
            self.events[event] = capture, frozenset(capture.fronts[stream])
        return capture is not None

    def waits(self, stream: int, event: int) -> bool:
        """Whether this stream waits as part of a capture: its own, or that of the event, which it joins."""
        mine, (theirs, front) = self.of(stream), self.events.get(event, (None, frozenset()))
        if theirs is not None and theirs not in self.captures.values():
            raise Refused(CAPTURED_EVENT, "the event was recorded in a capture that has ended")
        if mine is not None and theirs is None and event in self.streams.events:
            self.refuse([mine], ISOLATION, "a captured stream cannot wait for an event that was recorded outside")
        if mine is not None and theirs not in (None, mine):
            self.refuse([mine, theirs], MERGE, "a captured stream waits for an event of another capture")
        if theirs is not None:
            self.captures[stream] = theirs
            theirs.fronts.setdefault(stream, set()).update(front)
        return mine is not None or theirs is not None

    def awaited(self, stream: int, event: int) -> None:
        """The host waits for a stream or an event; stream: IN_ORDER for all."""
        text = "the host cannot wait for work that is captured: it does not run"
        found = self.captures.values() if stream == IN_ORDER else filter(None, [None if event else self.of(stream)])
        self.refuse(found, UNSUPPORTED, text)
        if event in self.events:
            self.refuse([self.events[event][0]], CAPTURED_EVENT, text)

    def replay(self, executable: Executable, stream: int) -> Iterator[tuple[Node, int]]:
        """Yields the nodes with the streams in which they run; each has run when the next one is asked for."""
        clock = merge(self.streams.behind(stream), executable.clock)
        after: list[Clock] = []
        for node in executable.nodes:
            lane = lane_of(executable.number, node.lane)
            self.streams.clocks[lane] = before = dict(clock)
            for x in node.behind:
                merge(before, after[x])
            yield node, lane
            after.append(self.streams.clocks[lane])
        for theirs in after:
            merge(clock, theirs)
        self.streams.clocks[stream] = executable.clock = clock

    # ---- calls of the program (graphs.cpp) ---------------------------------------------------------------------
    # Each has two addresses or handles and a number, and returns a CUDA status.

    def begin(self, stream: int, _: int, mode: int) -> int:
        stream = named(stream)
        if stream == DEFAULT:
            raise Refused(UNSUPPORTED, "the default stream cannot be captured")
        if stream in self.captures:
            raise Refused(ILLEGAL_STATE, "the stream is captured already")
        self.captures[stream] = Capture(Graph(), stream, mode)
        return SUCCESS

    def end(self, stream: int, to: int, _: int) -> int:
        stream = named(stream)
        capture = self.captures.get(stream)
        if capture is None:
            raise Refused(ILLEGAL_STATE, "the stream is not captured")
        if capture.origin != stream:
            self.refuse([capture], UNMATCHED, "a capture ends in the stream in which it began")
        self.captures = {s: x for s, x in self.captures.items() if x is not capture}
        if capture.broken:
            raise Refused(INVALIDATED, "")
        joined = capture.graph.reached(capture.fronts[stream])
        if any(front - joined for front in capture.fronts.values()):
            raise Refused(UNJOINED, "the stream in which the capture began does not wait for all others of the capture")
        return self.keep(to, self.graphs, capture.graph)

    def capturing(self, stream: int, to: int, _: int) -> int:
        capture = self.captures.get(named(stream))
        return write(to, ctypes.c_int, NO_CAPTURE if capture is None else BROKEN if capture.broken else CAPTURES)

    def create(self, to: int, _: int, __: int) -> int:
        return self.keep(to, self.graphs, Graph())

    def add(self, graph: int, behind: int, count: int) -> int:
        """What the program does next in the stream ADDED becomes a node of the graph."""
        if graph not in self.graphs:
            return INVALID_VALUE
        front = {x - 1 for x in (HANDLE * count).from_address(behind)} if count else set()
        self.captures[ADDED] = Capture(self.graphs[graph], ADDED, RELAXED, front)
        self.before = len(self.graphs[graph].nodes)
        return SUCCESS

    def added(self, to: int, _: int, status: int) -> int:
        """Tells the number of that node; one without work stands for no work, or for several last nodes."""
        capture = self.captures[ADDED]
        if not status and (len(capture.graph.nodes) == self.before or len(capture.fronts[ADDED]) > 1):
            self.takes(ADDED, "nothing", lambda _: SUCCESS)
        del self.captures[ADDED]
        return status or write(to, HANDLE, 1 + max(capture.fronts[ADDED]))

    def host(self, function: int, argument: int, stream: int) -> int:
        self.runtime.synchronise()
        call = function, argument
        return SUCCESS if self.takes(named(stream), "host", lambda _: self.runtime.synchronise(), call) else NOW

    def include(self, graph: int, _: int, stream: int) -> int:
        if graph not in self.graphs:
            return INVALID_VALUE
        capture = self.captures[stream]
        capture.fronts[stream] = capture.graph.include(self.graphs[graph].nodes, capture.fronts[stream])
        return SUCCESS

    def size(self, graph: int, to: int, _: int) -> int:
        return write(to, HANDLE, len(self.graphs[graph].nodes)) if graph in self.graphs else INVALID_VALUE

    def instantiate(self, graph: int, to: int, _: int) -> int:
        if graph not in self.graphs:
            return INVALID_VALUE
        self.streams.created()
        self.instantiated += 1
        return self.keep(to, self.executables, Executable(self.instantiated, self.graphs[graph].nodes))

    def update(self, executable: int, graph: int, _: int) -> int:
        old, new = self.executables.get(executable), self.graphs.get(graph)
        if old is None or new is None:
            return INVALID_VALUE
        if [(x.kind, x.behind) for x in old.nodes] != [(x.kind, x.behind) for x in new.nodes]:
            return UPDATE_FAILURE
        old.nodes = tuple(new.nodes)
        return SUCCESS

    def launch(self, executable: int, to: int, stream: int) -> int:
        stream, found = named(stream), self.executables.get(executable)
        if found is None:
            return INVALID_VALUE
        capture = self.of(stream)
        if capture is not None:
            capture.fronts[stream] = capture.graph.include(found.nodes, capture.fronts[stream])
            return SUCCESS
        self.replaying = self.replay(found, stream)
        return self.resume(0, to, 0)

    def resume(self, _: int, to: int, __: int) -> int:
        """Goes on with the launch of a graph, up to a function that host.cpp must call."""
        runtime = self.runtime
        for node, lane in self.replaying:
            status = node.run(lane)
            if status or runtime.failure is not None:
                return status or runtime.failed()
            if node.call is not None:
                (HANDLE * 2).from_address(to)[:] = list(node.call)
                return NOW
        return SUCCESS

    def forget(self, handle: int, _: int, __: int) -> int:
        self.graphs.pop(handle, None)
        self.executables.pop(handle, None)
        return SUCCESS

    def keep(self, to: int, group: dict, made: Graph | Executable) -> int:
        self.count += 1
        group[16 * self.count] = made
        return write(to, HANDLE, 16 * self.count)


def write(to: int, kind: type[ctypes.c_int] | type[ctypes.c_uint64], value: int) -> int:
    kind.from_address(to).value = value
    return SUCCESS
