"""Turns the compiled code's findings into diagnostics that name both parties."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from softsm.checks import benign_races, grids, ranks
from softsm.checks import clocks as cl
from softsm.checks import shadow as sh
from softsm.checks.advice import WRITES, before_the_access, first_phase, instead, named, too_early
from softsm.engine import program as pg
from softsm.errors import Fault
from softsm.ptx.cplusplus import readable
from softsm.ptx.roles import called_at, function_at, place_of, role_of
from softsm.report.diagnostics import Diagnostic, Party, Report

EARLIER = {**grids.FIXES, ranks.KIND: ranks.FIX}  # advice against launches before this one
BETWEEN_LANES = (
    "the two are lanes of one warp: put bar.warp.sync between them; running in lockstep does not order memory"
)
NOT_RELEASED = (
    "the warp of the other access has released, but only {lanes} did, and a release passes on what its own lane did: "
    "put bar.warp.sync before it, or let every lane arrive; if it is to cover other warps too, put a barrier before it"
)
ONE_INSTRUCTION = (
    "the two are lanes of one store, and which value stays is undefined: let one of them write, or use an atomic"
)
BETWEEN_WARPS = (
    "the two are warps in one store, which no barrier can part: use an atomic, or let each thread write its own "
    "address (if they are in different turns of a loop, put a barrier at its end)"
)
IN_EACH_CTA = (
    "; where one thread raises the flag or waits for it, its CTA needs a barrier before it is raised and one after the "
    "wait"
)
BETWEEN_CTAS = (
    "the two are CTAs of one grid, which no barrier orders: use atomics, or a flag released and acquired at .gpu "
    "scope (or relaxed, with a fence before it is raised and one after the read), or split the work into two launches"
)
BETWEEN_GPUS = (
    "the two run on different GPUs: order them by a flag released and acquired at .sys scope, or split the work into "
    "launches with a synchronisation between them"
)
BEHIND_STORE = (
    "the store has written global memory when cp.async.bulk.wait_group, without .read, is over in the thread that "
    "issued it: release a flag at .{scope} scope after that, and acquire it before this access"
)
UNFENCED = (
    "the write is ordered before this operation, but in the generic proxy: put fence.proxy.async between them, in the "
    "threads that write, before they arrive or release, or after the wait and before this operation"
)
WITHIN_CLUSTER = (
    "the two are CTAs of one cluster: put barrier.cluster.arrive and barrier.cluster.wait, or an mbarrier arrive and "
    "wait of .cluster scope, between them"
)


def add_failure(report: Report, machine, failure: BaseException | None) -> None:
    """Reports the failure that stopped a kernel, and barriers that explain it: bytes that warps wait for in vain, or
    bytes whose absence lets a slot be refilled too early."""
    for barrier in [b for cta in machine.live for b in cta.barriers.values()] if failure is not None else ():
        if barrier.skipped is not None and barrier.waiters:
            report.add(barrier.skipped)
    if isinstance(failure, Fault) and failure.code in ("deadlock", "barrier-reuse"):
        for diagnostic in wrong_bytes(machine):
            report.add(diagnostic)
    if isinstance(failure, Fault):
        what, *rest = failure.message.split("\n")
        unseen = unseen_phases(machine) if failure.code == "deadlock" else []
        report.add(Diagnostic(failure.code, "\n".join([what, *unseen, *rest]), raised=True))


def unseen_phases(machine) -> list[str]:
    """Returns the mbarriers on which warps wait although the previous phase has completed and no warp has waited for
    it.
    """
    found = [
        f"  phase {b.phase - 1} of {b.name} has ended and no warp waited for it; the wait that hangs is for phase "
        f"{b.phase}: does it have the wrong parity?"
        for cta in machine.live
        for b in cta.barriers.values()
        if b.waiters and b.watched is not None and b.watched[cl.WAITED] < b.phase - 1
    ]
    return list(dict.fromkeys(found))


def wrong_bytes(machine) -> Iterator[Diagnostic]:
    """Reports mbarriers that lack only bytes, which no copy in flight will deliver."""
    coming = {id(barrier) for op in machine.engine.pending.values() for barrier in op.signals}
    said = set()  # report an error of all CTAs once
    for barrier in [b for cta in machine.live for b in cta.barriers.values()]:
        if barrier.waiters and barrier.pending == 0 and barrier.tx and id(barrier) not in coming:
            if barrier.tx > 0:
                what = f"{barrier.tx} of the bytes announced by expect_tx never arrive"
            else:
                what = f"{-barrier.tx} more bytes have arrived than expect_tx announced"
            if (barrier.name, what) not in said:
                said.add((barrier.name, what))
                yield Diagnostic("barrier-tx", f"{barrier.name}: {what}; it is {barrier.state()}", announcer(barrier))


def announcer(barrier) -> tuple[Party, ...]:
    """Returns who announced bytes to the mbarrier last; empty if nobody has."""
    last = barrier.announced
    if last is None or not hasattr(last.who, "instruction"):
        return ()
    ins, role = last.who.instruction, role_of(last.who.instruction)
    who = f"warp {last.who.warp}{f' ({role})' if role else ''} of CTA {last.who.ctaid}"
    return (Party(who, ins.line, ins.text, source_of(ins), f"announced {last.amount} bytes"),)


def source_of(ins) -> str:
    """Returns the place in the source, its function and the callers of that."""
    loc = place_of(ins)
    if loc is None:
        return ""
    function = function_at(loc.file, loc.line) or readable(loc.function)
    return f"{loc.file}:{loc.line}{f' in {function}' if function else ''}{called_at(loc)}"


class Findings:
    """The part of the checker that makes diagnostics."""

    def __init__(self, checker):
        self.checker = checker
        self.machine, self.report, self.strict = checker.machine, checker.report, checker.strict
        self.unwritten: set[tuple[int, int]] = set()  # (program, pc) of shared loads that read what nobody has written
        self.confined_pairs: dict[tuple[int, int, int], bool] = {}  # (program, load, store), see checks/benign_races.py

    def collect(self, w, op=None) -> None:
        """Turns the compiled code's findings into diagnostics."""
        races = self.checker.memory.races
        n = races.item(0)
        if not n:
            return
        entries = races[1 : 1 + n * sh.RACE_FIELDS].reshape(n, sh.RACE_FIELDS).tolist()
        races[0] = 0
        agents, operations = self.checker.agents, self.checker.operations
        for kind, place, address, pc, agent, epoch, other_pc, lanes in entries:
            lane, other_lane = (lanes, -1) if lanes < 64 else (lanes & 63, (lanes >> 6) - 1)
            if kind == sh.OVER_BARRIER:
                self.checker.barriers.over_barrier(w, op, agents[other_pc + 1].cta, address & ~7, pc, lane)
                continue
            if kind == sh.UNINITIALISED and not self.strict and benign_races.masked_atomic(w.cta.program, pc):
                continue
            if kind == sh.SAME:
                if agent < sh.ASYNC and (not self.strict or one_statement(w, pc, agents[agent], other_pc)):
                    continue
                earlier = operations.get(epoch) if agent >= sh.ASYNC else None
                if earlier is not None and earlier.kind == ranks.KIND and not self.strict:
                    continue
                kind = sh.WAW
            if place and op is None and kind != sh.WAR and behind_flag(w, address, agent, epoch):
                continue
            if op is None and agent < sh.ASYNC and kind in (sh.RAW, sh.WAR) and not self.strict:
                load, atomic = (pc, other_pc) if kind == sh.RAW else (other_pc, pc)
                if benign_races.compared(w.cta.program, load, atomic):
                    continue
            memory = "global" if place else "shared"
            where = f"{memory} bytes {address:#x} to {address + 3:#x}"
            verb = "writes" if kind in (sh.WAW, sh.WAR) else "reads"
            this = self.party(w, op, f"{verb} {where}", pc=pc, lane=lane)
            if kind == sh.UNINITIALISED:
                self.unwritten.add((id(w.cta.program), pc))
                said = "nothing wrote them"
                parties: tuple[Party, ...] = (this,)
                if place:
                    that = self.party(agents[agent], None, f"discarded {where}", pc=other_pc)
                    said, parties = "discard.L2 took their values", (this, that)
                self.report.add(Diagnostic("uninitialised", f"{memory} bytes are read, but {said}", parties))
                continue
            did = "wrote" if kind != sh.WAR or agent < sh.ASYNC and stores(agents[agent], other_pc) else "read"
            if agent >= sh.ASYNC:
                other_op = operations.get(epoch)
                if other_op is None:
                    other = Party("an earlier operation")
                elif other_op.kind in EARLIER:
                    other = Party(f"the {other_op.kind}", what=f"{did} {where}")
                else:
                    other = self.party(other_op.warp, other_op, f"{did} {where}")
            else:
                other_op = None
                other = self.party(agents[agent], None, f"{did} {where}", pc=other_pc, lane=other_lane)
            them = agents[agent] if agent < sh.ASYNC else other_op.warp if other_op is not None else None
            if (
                op is not None
                and kind == sh.RAW
                and agent < sh.ASYNC
                and them is not None
                and other_lane < 0
                and seen(w, them, epoch)
            ):
                fix = UNFENCED
            elif other_lane < 0:
                fix = self.across(w, them)
                if fix == WITHIN_CLUSTER and other_op is not None:  # a wait for its completion is possible
                    fix = ""
                elif fix and other_op is not None and other_op.kind in WRITES:
                    fix = BEHIND_STORE.format(scope="sys" if fix.startswith(BETWEEN_GPUS) else "gpu")
            elif them is w:
                fix = ONE_INSTRUCTION if pc == other_pc else BETWEEN_LANES
            else:
                fix = NOT_RELEASED.format(lanes=self.checker.order.releasing(them, epoch))
            over_read = op if kind == sh.WAR and place == 0 and agent < sh.ASYNC else None
            early = them is not None and (id(them.cta.program), other_pc) in self.unwritten
            if over_read is not None and early:
                fix = too_early(over_read)
            if not fix and kind == sh.WAW and op is None and agent < sh.ASYNC and pc == other_pc:
                fix = BETWEEN_WARPS
            found = self.race(this, other, f"{memory} memory", other_op, fix)
            if over_read is not None and not early and first_phase(over_read):
                more = f"; where it was to read what this one brings, let it wait for {named(over_read)[0]}"
                found = dataclasses.replace(found, fix=found.fix + more)
            if place and op is None and agent < sh.ASYNC and kind in (sh.RAW, sh.WAR) and not self.strict:
                by_this = w, pc, other_pc, lane
                reader, load, store, which = by_this if kind == sh.RAW else (them, other_pc, pc, other_lane)
                if them is not None and them.cta is w.cta and self.confined(w.cta.program, load, store):
                    self.suspect(reader, found, store, 1 << which if other_lane >= 0 else pg.ALL)
                    continue
            self.report.add(found)

    def across(self, w, other) -> str:
        """Returns advice for warps of different CTAs, or '' for warps of one CTA."""
        if other is None or other.cta is w.cta:
            return ""
        behind = IN_EACH_CTA if flagged(w.cta.program) else ""
        if other.cta.gpu != w.cta.gpu:
            return BETWEEN_GPUS + behind
        shape = self.machine.cluster_shape
        mine, theirs = ([c // s for c, s in zip(x.cta.ctaid, shape)] for x in (w, other))
        return WITHIN_CLUSTER if mine == theirs else BETWEEN_CTAS + behind

    def confined(self, program: pg.Program, load: int, store: int) -> bool:
        key = id(program), load, store
        known = self.confined_pairs.get(key)
        if known is None:
            known = self.confined_pairs[key] = benign_races.confined(program, load, store)
        return known

    def suspect(self, reader, found: Diagnostic, store: int, lanes: int) -> None:
        """Holds a race back until the reader has ended. It is benign if the last value of the store's guard shows that
        the reader's lanes never executed the store."""
        reader.view.suspected.append((found, store, lanes))
        if not reader.fragments:
            self.ended(reader)

    def ended(self, w) -> None:
        """Handles the exit of a warp while its predicates can still be read."""
        if w.view.predicates is None:
            w.view.predicates = w.P.copy()
        for found, store, lanes in w.view.suspected:
            row, inverted = w.cta.program.code[store, 6:8].tolist()
            if (int(w.view.predicates[row]) ^ inverted) & lanes:
                self.report.add(found)
        w.view.suspected.clear()

    def misused(self, w, code: str, message: str, what: str, lane: int = -1) -> None:
        """Reports an error that an instruction itself detects."""
        self.report.add(Diagnostic(code, message, (self.party(w, None, what, lane=lane),)))

    def doubtful(self, w, code: str, message: str, what: str) -> None:
        """Reports what production kernels do as a warning; as a finding at the strict level."""
        found = Diagnostic(code, message, (self.party(w, None, what),))
        self.report.add(found) if self.strict else self.report.warn(found)

    def used_early(self, w, load) -> None:
        """Checks a use of registers of a tcgen05.ld without a wait. Triton computes with them before the wait, and
        the hardware respects the dependency, so only the strict level reports it."""
        other = self.party(load.warp, load, "may still be writing its registers")
        self.add_race(
            self.party(w, None, "uses registers of a tcgen05.ld"),
            other,
            "registers",
            None,
            "put tcgen05.wait::ld.sync.aligned between the load and the first use of its registers",
        )

    def add_race(self, this: Party, other: Party, memory: str, other_op, fix: str = "") -> None:
        self.report.add(self.race(this, other, memory, other_op, fix))

    def race(self, this: Party, other: Party, memory: str, other_op, fix: str = "") -> Diagnostic:
        if fix:
            pass
        elif other_op is not None and other_op.kind in EARLIER:
            fix = EARLIER[other_op.kind]
        elif other_op is not None:
            waited = self.checker.order.knows(other_op.warp, other_op.number)
            fix = before_the_access(other_op, waited, self.checker.operations.by_number.values())
            if this.what.startswith("reads "):
                fix += instead(other_op, self.checker.operations.by_number.values())
            if memory == "global memory" and other_op.kind in WRITES and this.who.startswith(other_op.kind):
                fix += "; if they were to write different places, compare their coordinates"
            if memory == "tensor memory" and other.what.startswith("read "):
                fix += (
                    f"; where it was to read what this one writes, let it wait for the {this.who.split(' issued')[0]}"
                )
        elif this.who.startswith("warp"):
            fix = "put a barrier, or an mbarrier arrive and wait, between the two"
        elif other.what.startswith("read "):
            fix = (
                "before this operation wait until who reads has given the memory back: by an mbarrier arrive, or a "
                "barrier, after its last read"
            )
        else:
            fix = (
                "order them by a barrier, and put fence.proxy.async between the generic write and the "
                "asynchronous access"
            )
        return Diagnostic("race", f"two accesses of {memory} are not ordered", (this, other), fix)

    def party(self, w, op, what: str, pc: int | None = None, lane: int = -1) -> Party:
        program = w.cta.program
        ins = program.instructions[w.pc if pc is None else pc]
        if op is not None and pc is None:
            ins = op.instruction or ins
        if op is not None and ins.line != op.line:  # a wgmma is issued with its group: name the MMA itself
            ins = next((x for x in program.instructions if x.line == op.line), ins)
        role = role_of(ins)
        warp = str(w).replace(" of ", f" ({role}) of ", 1) if role else str(w)
        who = f"{op.kind} issued by {warp}" if op is not None else warp + (f", lane {lane}" if 0 <= lane < 32 else "")
        return Party(who, ins.line, ins.text, source_of(ins), what)


def flagged(program: pg.Program) -> bool:
    """Returns whether the kernel has fences, or loads that acquire: CTAs may tell each other by flags."""
    words = {"acquire", "acq_rel", "sc", "volatile"}
    return any(x.opcode == "membar" or words & {*x.modifiers} for x in program.instructions)


def stores(w, pc: int) -> bool:
    """Returns whether it is an ordinary store. One that an atomic follows is kept among the reads
    (checks/global_shadow.py).
    """
    return w.cta.program.instructions[pc].name.startswith("st.")


def seen(w, other, epoch: int) -> bool:
    """Returns whether an access by another warp happens before the warp's next one, in the generic proxy."""
    return int(w.view.clock[other.view.slot]) >= epoch


def behind_flag(w, address: int, agent: int, epoch: int) -> bool:
    """Returns whether the other access is the write of a flag that the warp has acquired with a read and a fence.
    Ordinary accesses may then read or reset the flag."""
    return any(w.view.flags.get((at, agent - 1), -1) == epoch for at in (address, address - 4))


def one_statement(w, pc: int, other, other_pc: int) -> bool:
    """Returns whether the compiler made both instructions from one source statement. It duplicates the end of a branch
    or peels a loop. Warps on both paths that store one value count as warps in one instruction."""
    here, there = w.cta.program.instructions[pc].loc, other.cta.program.instructions[other_pc].loc
    return here is not None and here == there
