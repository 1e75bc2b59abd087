"""The CTAs of one launch in several processes.

A launch that has run for a while is divided: the process forks, and each copy goes on with its share of the clusters,
those in the middle of their work included. That gives what one process would give as long as clusters do not
communicate, which `independent` reads off the program: no atomics and no strong accesses of global memory, no %smid, no
clock. Only 'eager' and 'latest' are divided; what 'random' finds must not depend on the number of cores.

Shared and tensor memory belong to a cluster. Global memory is each copy's own after the fork; a child compares it with
what it was and tells which bytes it has changed. Errors travel as they are. With races checked a child also tells which
words it has touched, and accesses of two processes to one word are compared at the end (checks/division.py).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import signal
import threading
import time
import warnings

import numpy as np

from softsm.memory.global_memory import Allocation
from softsm.ptx.ast import Call, Instruction, Module, Symbol

WORTH = 0.03  # seconds a launch has run before it is divided: a fork takes about 5 ms
LARGEST = 1 << 29  # bytes of global memory that are compared afterwards
LINE = 64
STRONG = {"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio", "sc"}
WIDE = {"gpu", "sys", "gl"}
ATOMIC = {"atom", "red", "multimem", "clusterlaunchcontrol"}
SAME_FOR_ALL = {"smid", "clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo", "globaltimer_hi"}


def independent(module: Module, specials) -> bool:
    """Do clusters of the program stay away from each other, whatever they compute?"""
    items = (item for f in module.functions.values() for item in f.body if isinstance(item, Instruction))
    return not set(specials) & SAME_FOR_ALL and not any(communicates(module, ins) for ins in items)


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
    """As many as there are CPUs for this process, or $SOFTSM_PROCESSES."""
    chosen = os.environ.get("SOFTSM_PROCESSES", "")
    if chosen:
        if not chosen.isdigit() or int(chosen) < 1:
            raise ValueError(f"SOFTSM_PROCESSES: got {chosen!r}, accepted is a number from 1 on")
        return int(chosen)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


class Division:
    """What a machine asks between the turns of its warps, and at its end."""

    def __init__(self, machine):
        self.machine = machine
        self.parts = machine.options.processes or processes()
        self.children: list[Child] = []
        self.due = self.never = float("inf")
        # Another thread may hold a lock that the copy would wait for.
        if self.parts > 1 and hasattr(os, "fork") and threading.active_count() == 1 and self.possible():
            self.due = time.perf_counter() + WORTH

    def possible(self) -> bool:
        machine = self.machine
        checks = machine.options.checks
        many = machine.left * machine.cluster_size + len(machine.live) > machine.cluster_size
        followed = not machine.divisible or machine.gpus > 1 or checks is not None and checks.report.tap is not None
        return (many and not followed and machine.options.order != "random" and machine.kernel.independent
                and sum(a.size for a in machine.global_memory.allocations) <= LARGEST)

    def divide(self) -> None:
        self.due = self.never
        machine = self.machine
        started = list(dict.fromkeys(cta.cluster[0] for cta in machine.live))
        waiting = list(machine.clusters)
        parts = min(self.parts, len(started) + len(waiting))
        if parts < 2:
            machine.clusters = iter(waiting)
            return
        if machine.checker is not None:
            machine.checker.dividing()
        for number in range(1, parts):
            child = Child(machine)
            if child.pid == 0:
                self.children = []
                child.become(lambda number=number: self.keep(started, waiting, number, parts))
            self.children.append(child)
        self.keep(started, waiting, 0, parts)

    def keep(self, started: list, waiting: list, number: int, parts: int) -> None:
        """Go on with this share of the clusters alone."""
        machine = self.machine
        mine = started[number::parts]
        gone = [cta for first in started if first not in mine for cta in first.cluster]
        rest = waiting[number::parts]
        machine.clusters, machine.left = iter(rest), len(rest)
        drop(machine, gone)
        machine.admit()

    def join(self) -> None:
        """This process has done its share: take in what the others did."""
        children, self.children = self.children, []
        try:
            while children:
                children.pop(0).finish(self.machine)
        finally:
            stop(children)

    def stop(self) -> None:
        """The launch is over, or has failed here."""
        stop(self.children)
        self.children, self.due = [], self.never


def stop(children: list[Child]) -> None:
    for child in children:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        child.close()


def drop(machine, gone: list) -> None:
    """These CTAs go on in another process."""
    ids = {id(cta) for cta in gone}
    machine.live = [cta for cta in machine.live if id(cta) not in ids]
    for warp in [w for w in machine.ready if id(w.cta) in ids]:
        machine.ready.remove(warp)
    pending = machine.engine.pending
    for key in [key for key, op in pending.items() if id(op.warp.cta) in ids]:
        del pending[key]
    for cta in gone:
        cta.sm.resident -= 1
        if cta.sm.tmem is not None:
            cta.sm.tmem.forget(cta)
        if machine.checker is not None:
            machine.checker.abandon(cta)
        cta.forget()
    for sm in machine.sms:
        if sm.tmem is not None:
            sm.tmem.wake()


class Child:
    """Another process with a share of the launch, seen from the first one; in it, pid is 0."""

    def __init__(self, machine):
        self.machine = machine
        allocations = machine.global_memory.allocations
        size = sum(a.size for a in allocations)
        words = size // 4 + 2 * len(allocations) if machine.checker is not None else 0
        self.changes = mmap.mmap(-1, size + (size // LINE + len(allocations) + 1) * 16 + words + mmap.PAGESIZE)
        self.answers, back = os.pipe()
        questions, self.questions = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads: torch's, which the child never asks
            self.pid = os.fork()
        mine, theirs = ((back, questions), (self.answers, self.questions)) if self.pid == 0 else (
            (self.answers, self.questions), (back, questions))
        for descriptor in theirs:
            os.close(descriptor)
        self.out, self.inward = mine if self.pid == 0 else mine[::-1]

    # ---- in the child ------------------------------------------------------------------------------------------

    def become(self, keep) -> None:
        """Do the share, tell what came of it, end."""
        machine = self.machine
        try:
            steps, completed = machine.steps, machine.engine.completed
            before = [a.bytes.copy() for a in machine.global_memory.allocations]
            found: dict = {}
            if machine.options.checks is not None:
                machine.options.checks.report.follow(found)
            told: dict = {"error": None}
            try:
                keep()
                machine.loop()
            except BaseException as error:  # noqa: BLE001 - whatever it is, the first process raises it
                told["error"] = error
            told |= {"steps": machine.steps - steps, "completed": machine.engine.completed - completed,
                     "found": list(found.values())}  # fmt: skip
            told["lines"], end = self.tell_changes(before)
            if machine.checker is not None:
                flags = machine.checker.division.touched()
                self.changes[end : end + flags.size] = flags.tobytes()
                told["touched"] = (end, flags.size)
            self.send(told)
            while machine.checker is not None and told["error"] is None:
                question = self.receive()
                if question is None:
                    break
                self.send(machine.checker.division.answer(question))
        finally:
            os._exit(0)

    def tell_changes(self, before: list[np.ndarray]) -> tuple[list[tuple[int, int, int]], int]:
        """Puts the lines of global memory that differ into the shared pages: (allocation, lines, where) of each, and
        the end."""
        told, at = [], 0
        for number, (a, old) in enumerate(zip(self.machine.global_memory.allocations, before)):
            now, was = lines_of(a.bytes), lines_of(old)
            index = np.flatnonzero((now.view(np.uint64) != was.view(np.uint64)).any(1))
            if len(index):
                told.append((number, len(index), at))
                changed = np.packbits(now[index] != was[index], axis=1)
                for part in (index, now[index], changed):
                    data = part.tobytes()
                    self.changes[at : at + len(data)] = data
                    at += len(data)
        return told, at

    # ---- in the first process ----------------------------------------------------------------------------------

    def finish(self, machine) -> None:
        told = self.receive()
        if told is None:
            os.waitpid(self.pid, 0)
            self.close()
            raise RuntimeError("a process with a share of the launch has died; SOFTSM_PROCESSES=1 runs it in one")
        try:
            for diagnostic in told["found"]:
                machine.options.checks.report.add(diagnostic)
            if told["error"] is not None:
                raise told["error"]
            if machine.checker is not None:
                at, size = told["touched"]
                machine.checker.division.compare(np.frombuffer(self.changes, np.uint8, size, at).copy(), self)
            for change in told["lines"]:
                self.take(machine.global_memory.allocations, *change)
            machine.steps += told["steps"]
            machine.engine.completed += told["completed"]
        finally:
            with contextlib.suppress(BrokenPipeError):
                self.send(None)
            os.waitpid(self.pid, 0)
            self.close()

    def take(self, allocations: list[Allocation], number: int, count: int, at: int) -> None:
        index = np.frombuffer(self.changes, np.int64, count, at)
        data = np.frombuffer(self.changes, np.uint8, count * LINE, at + 8 * count).reshape(count, LINE)
        changed = np.frombuffer(self.changes, np.uint8, count * LINE // 8, at + (8 + LINE) * count)
        a = allocations[number]
        lines = lines_of(a.bytes)
        lines[index] = np.where(np.unpackbits(changed).reshape(count, LINE), data, lines[index])
        if a.size % LINE:
            a.bytes[:] = lines.reshape(-1)[: a.size]

    def ask(self, question):
        self.send(question)
        return self.receive()

    # ---- both --------------------------------------------------------------------------------------------------

    def send(self, thing) -> None:
        try:
            data = pickle.dumps(thing)
        except Exception:  # an error that cannot travel: its words can
            data = pickle.dumps({"error": RuntimeError(repr(thing.get("error"))), "found": []})
        with os.fdopen(os.dup(self.out), "wb") as stream:
            stream.write(len(data).to_bytes(8, "little") + data)

    def receive(self):
        with os.fdopen(os.dup(self.inward), "rb", buffering=0) as stream:
            size = int.from_bytes(exactly(stream, 8), "little")
            return pickle.loads(exactly(stream, size)) if size else None  # noqa: S301 - from our own copy

    def close(self) -> None:
        os.close(self.out)
        os.close(self.inward)


def exactly(stream, size: int) -> bytes:
    parts = []
    while size:
        part = stream.read(size)
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def lines_of(data: np.ndarray) -> np.ndarray:
    """uint8 [lines, LINE], a view where the size allows it; else a copy with zeros at the end."""
    if data.size % LINE:
        whole = np.zeros(-(-data.size // LINE) * LINE, np.uint8)
        whole[: data.size] = data
        return whole.reshape(-1, LINE)
    return data.reshape(-1, LINE)
