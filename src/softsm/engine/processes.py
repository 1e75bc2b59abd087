"""Runs the CTAs of one launch in several processes.

After TURNS turns of its warps the process forks. Each child continues with a share of the clusters, including those
that have started. Their results are used only if every child finished, found nothing, never needed the deadlock watch,
and accessed no word (without checks: changed no byte) that another cluster wrote. Otherwise they are discarded, and the
process continues alone from the fork. So results, steps, errors, findings and their order are those of one process and
do not depend on the number or load of CPUs. Without checks, one case goes unnoticed: a cluster reads what a cluster in
another process wrote.

Clusters that communicate are not divided (`independent` reads this from the program). Neither is the order 'random',
which draws over all clusters.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
import warnings
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple, cast

import numpy as np

from softsm.engine.deadlock import PATIENCE
from softsm.memory.global_memory import Allocation
from softsm.ptx.ast import Call, Instruction, Module, Symbol

TURNS = 300  # turns of warps, about 30 ms; a fork takes about 5 ms
LARGEST = 1 << 29  # the most bytes of global memory to compare afterwards
LINE = 64
MAPS = "/proc/self/maps"
STRONG = {"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio", "sc"}
WIDE = {"gpu", "sys", "gl"}
ATOMIC = {"atom", "red", "multimem", "clusterlaunchcontrol"}
SAME_FOR_ALL = {"smid", "clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo", "globaltimer_hi"}


def independent(module: Module, specials) -> bool:
    """Returns whether clusters of the program cannot communicate, whatever they compute."""
    items = [item for f in module.functions.values() for item in f.body if isinstance(item, Instruction)]
    # A CTA that allocates part of tensor memory may wait for another CTA of the SM.
    pieces = sum(ins.name.startswith("tcgen05.alloc") for ins in items)
    return pieces < 2 and not set(specials) & SAME_FOR_ALL and not any(communicates(module, ins) for ins in items)


def communicates(module: Module, ins: Instruction) -> bool:
    modifiers = set(ins.modifiers)
    shared = any(m.startswith("shared") for m in modifiers)
    if ins.opcode in ATOMIC:
        return not (shared and ins.opcode in ("atom", "red"))
    if ins.opcode in ("ld", "st"):
        return bool(modifiers & STRONG) and not shared
    if ins.opcode in ("fence", "membar"):
        return bool(modifiers & WIDE) or not modifiers
    if ins.opcode == "cp":
        return "reduce" in modifiers and bool(modifiers & {"global", "tensor"})
    if ins.opcode == "call":  # printf, assertions
        call = next((x for x in ins.operands if isinstance(x, Call)), None)
        return not (call and isinstance(call.callee, Symbol) and call.callee.name in module.functions)
    return False


def processes() -> int:
    """Returns $SOFTSM_PROCESSES, or the number of CPUs that this process may use."""
    chosen = os.environ.get("SOFTSM_PROCESSES", "")
    if chosen:
        if not chosen.isdigit() or int(chosen) < 1:
            raise ValueError(f"SOFTSM_PROCESSES: got {chosen!r}; accepted: numbers >= 1")
        return int(chosen)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def shared_between_processes(allocations: list[Allocation]) -> bool:
    """Returns whether a child would write to this process's memory (np.memmap, torch's share_memory_)."""
    try:
        with open(MAPS) as maps:
            lines = [line.split(None, 2) for line in maps]
    except OSError:
        return True  # the system does not provide this
    spans = [[int(x, 16) for x in line[0].split("-")] for line in lines if line[1][3] == "s"]
    return any(a.start < end and start < a.end for start, end in spans for a in allocations)


def dealt(items: list, parts: int) -> list[list]:
    """Returns shares of nearly equal length, dealt back and forth: later clusters often have more work."""
    hands: list[list] = [[] for _ in range(parts)]
    for i, item in enumerate(items):
        there, k = divmod(i, parts)
        hands[parts - 1 - k if there % 2 else k].append(item)
    return hands


class Processes:
    """Divides a launch among processes. The machine calls it between the turns of its warps."""

    def __init__(self, machine):
        self.machine = machine
        self.parts = machine.options.processes or processes()
        # Another thread may hold a lock that a child would wait for.
        able = self.parts > 1 and hasattr(os, "fork") and threading.active_count() == 1 and self.possible()
        self.turns = TURNS if able else 0  # turns left until the launch is divided

    def possible(self) -> bool:
        machine = self.machine
        observer = machine.observer
        many = machine.left * machine.cluster_size + len(machine.live) > machine.cluster_size
        return (
            many
            and machine.gpus == 1
            and (observer is None or observer.divisible and not observer.follows)
            and machine.options.order != "random"
            and machine.kernel.independent
            and sum(a.size for a in machine.global_memory.allocations) <= LARGEST
        )

    def quiet(self) -> bool:
        """Returns whether nothing has happened so far that an observer would report."""
        observer = self.machine.observer
        return observer is None or observer.uneventful()

    def divide(self) -> None:
        machine = self.machine
        started = list(dict.fromkeys(cta.cluster[0] for cta in machine.live))
        waiting = list(machine.clusters)
        machine.clusters = iter(waiting)
        parts = min(self.parts, len(started) + len(waiting))
        if parts < 2 or not self.quiet() or shared_between_processes(machine.global_memory.allocations):
            return
        outcomes = self.outcomes(list(zip(dealt(started, parts), dealt(waiting, parts))))
        if outcomes is not None and self.agree(outcomes):
            self.take(outcomes)
            machine.clusters, machine.left = iter(()), 0
            drop(machine, list(machine.live))

    def outcomes(self, shares: list) -> list[Outcome] | None:
        """Returns the outcomes of the children, or None as soon as one of them has something to report."""
        children: list[Child] = []
        before = Before(self.machine)
        try:
            for share in shares:
                children.append(Child(self, share, before))
            told: dict[Connection, Outcome] = {}
            while len(told) < len(children):
                for ready in wait([c.connection for c in children if c.connection not in told]):
                    connection = cast(Connection, ready)
                    outcome = connection.recv()
                    if outcome is None:
                        return None
                    told[connection] = outcome
            return [told[c.connection] for c in children]
        except (EOFError, OSError):  # no more processes or memory for them
            return None
        finally:
            for child in children:
                child.end()

    def agree(self, outcomes: list[Outcome]) -> bool:
        """Returns whether one process would have done the same."""
        machine = self.machine
        # In one process no warp would have waited longer than in all of them together.
        if sum(o.longest for o in outcomes) >= PATIENCE:
            return False
        if machine.steps + sum(o.steps for o in outcomes) > machine.options.budget:
            return False
        if machine.observer is not None and machine.observer.conflict([o.observed for o in outcomes]):
            return False
        changed = [np.zeros((-(-a.size // LINE), LINE // 8), np.uint8) for a in machine.global_memory.allocations]
        for change in (change for o in outcomes for change in o.changes):
            if (changed[change.allocation][change.lines] & change.bytes).any():
                return False
            changed[change.allocation][change.lines] |= change.bytes
        return True

    def take(self, outcomes: list[Outcome]) -> None:
        machine = self.machine
        for outcome in outcomes:
            for change in outcome.changes:
                change.apply(machine.global_memory.allocations)
            if machine.observer is not None:
                machine.observer.adopt(outcome.observed)
            for index in outcome.compiled:
                machine.kernel.blocks.compile(index)
            machine.steps += outcome.steps
            machine.engine.completed += outcome.completed

    # ---- in a copy ---------------------------------------------------------------------------------------------

    def work(self, started: list, waiting: list) -> bool:
        """Runs a share of the clusters. Returns whether there is nothing to report."""
        machine = self.machine
        drop(machine, [cta for cta in machine.live if cta.cluster[0] not in started])
        machine.clusters, machine.left = iter(waiting), len(waiting)
        machine.admit()
        pushes = machine.watch.pushes
        machine.loop()
        return machine.watch.pushes == pushes and self.quiet()

    def outcome(self, before: Before) -> Outcome:
        machine, observer = self.machine, self.machine.observer
        return Outcome(
            machine.steps - before.steps,
            machine.engine.completed - before.completed,
            max(machine.watch.longest, machine.watch.turns),
            before.changes(machine.global_memory.allocations),
            np.flatnonzero((machine.kernel.blocks.table[:, 0] != 0) & ~before.compiled).tolist(),
            observer.since(before.observed) if observer is not None else None,
        )


class Change(NamedTuple):
    """Lines of an allocation that a child has changed."""

    allocation: int
    lines: np.ndarray  # int64
    data: np.ndarray  # uint8 [lines, LINE]
    bytes: np.ndarray  # uint8 [lines, LINE / 8], a bit for each changed byte

    def apply(self, allocations: list[Allocation]) -> None:
        a = allocations[self.allocation]
        whole = lines_of(a.bytes)
        changed = np.unpackbits(self.bytes, axis=1)
        whole[self.lines] = np.where(changed, self.data, whole[self.lines])
        if a.size % LINE:
            a.bytes[:] = whole.reshape(-1)[: a.size]


class Outcome(NamedTuple):
    """The result of a child."""

    steps: int
    completed: int
    longest: int  # turns without progress
    changes: list[Change]
    compiled: list[int]  # blocks
    observed: Any  # result of `Observer.since`


class Before:
    """The state of the machine at the fork."""

    def __init__(self, machine):
        self.steps, self.completed = machine.steps, machine.engine.completed
        self.memory = [a.bytes.copy() for a in machine.global_memory.allocations]
        self.compiled = machine.kernel.blocks.table[:, 0] != 0
        self.observed = machine.observer.checkpoint() if machine.observer is not None else None

    def changes(self, allocations: list[Allocation]) -> list[Change]:
        found = []
        for number, (a, old) in enumerate(zip(allocations, self.memory)):
            now, was = lines_of(a.bytes), lines_of(old)
            lines = np.flatnonzero((now.view(np.uint64) != was.view(np.uint64)).any(1))
            if len(lines):
                found.append(Change(number, lines, now[lines], np.packbits(now[lines] != was[lines], axis=1)))
        return found


class Child:
    """A forked process with a share of the launch."""

    def __init__(self, processes: Processes, share: tuple[list, list], before: Before):
        self.connection, theirs = Pipe(duplex=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads are torch's, which the child never uses
            self.pid = os.fork()
        if self.pid == 0:
            try:
                uneventful = False
                with contextlib.suppress(BaseException):  # a single process will meet the same error
                    uneventful = processes.work(*share)
                theirs.send(processes.outcome(before) if uneventful else None)
            except Exception:  # the process continues alone, but this is a bug
                traceback.print_exc()
            finally:
                os._exit(0)
        theirs.close()

    def end(self) -> None:
        self.connection.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def drop(machine, gone: list) -> None:
    """Removes CTAs that continue in another process."""
    ids = {id(cta) for cta in gone}
    machine.live = [cta for cta in machine.live if id(cta) not in ids]
    for warp in [w for w in machine.ready if id(w.cta) in ids]:
        machine.ready.remove(warp)
    engine = machine.engine
    for key in [key for key, op in engine.pending.items() if id(op.warp.cta) in ids]:
        del engine.pending[key]
        engine.signalling.pop(key, None)
    for cta in gone:
        cta.sm.resident -= 1
        if cta.sm.tmem is not None:
            cta.sm.tmem.forget(cta)
        if machine.observer is not None:
            machine.observer.cta_moved(cta)
        cta.forget()
    for sm in machine.sms:
        if sm.tmem is not None:
            sm.tmem.wake()


def lines_of(data: np.ndarray) -> np.ndarray:
    """Returns uint8 [lines, LINE]: a view if the size is a multiple of LINE, else a copy padded with zeros."""
    if data.size % LINE:
        whole = np.zeros(-(-data.size // LINE) * LINE, np.uint8)
        whole[: data.size] = data
        return whole.reshape(-1, LINE)
    return data.reshape(-1, LINE)
