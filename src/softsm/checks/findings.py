"""Turns the compiled code's findings into diagnostics that name both parties."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from softsm.checks import benign_races, beside, grids, ranks
from softsm.checks import clocks as cl
from softsm.checks import shadow as sh
from softsm.checks.advice import WRITES, before_the_access, first_phase, instead, named, too_early
from softsm.engine import program as pg
from softsm.engine.warps import Cta
from softsm.errors import Fault
from softsm.ptx.cplusplus import readable
from softsm.ptx.roles import called_at, function_at, place_of, role_of
from softsm.report.diagnostics import Diagnostic, Party, Report

EARLIER = {**grids.FIXES, ranks.KIND: ranks.FIX}  # advice against launches before this one; else it is beside.FIX
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


@dataclass(frozen=True)
class Entry:
    """A finding of the compiled code (`report` in checks/shadow.py): an access and an earlier one of the same bytes."""

    kind: int
    same: bool  # both store the same value
    place: int  # 0: shared memory, 1: global memory
    address: int
    pc: int
    agent: int  # of the earlier access, as in the records of checks/shadow.py
    epoch: int  # of a warp; of an asynchronous operation its number
    other_pc: int
    lane: int
    other_lane: int  # -1: the finding is not about lanes

    @classmethod
    def of(cls, fields: list[int]) -> Entry:
        kind, place, address, pc, agent, epoch, other_pc, lanes = fields
        lane, other_lane = (lanes, -1) if lanes < 64 else (lanes & 63, (lanes >> 6) - 1)
        same = kind == sh.SAME
        return cls(sh.WAW if same else kind, same, place, address, pc, agent, epoch, other_pc, lane, other_lane)

    by_warp = property(lambda self: self.agent < sh.ASYNC)  # the earlier access
    memory = property(lambda self: "global" if self.place else "shared")
    where = property(lambda self: f"{self.memory} bytes {self.address:#x} to {self.address + 3:#x}")
    verb = property(lambda self: "writes" if self.kind in (sh.WAW, sh.WAR) else "reads")

    @property
    def load_and_store(self) -> tuple[int, int]:
        return (self.pc, self.other_pc) if self.kind == sh.RAW else (self.other_pc, self.pc)


class Findings:
    """The part of the checker that makes diagnostics."""

    def __init__(self, checker):
        self.checker = checker
        self.machine, self.report, self.strict = checker.machine, checker.report, checker.strict
        self.unwritten: set[tuple[int, int]] = set()  # (program, pc) of shared loads that read what nobody has written
        self.confined_pairs: dict[tuple[int, int, int], bool] = {}  # (program, load, store), see checks/benign_races.py

    def collect(self, w, op=None) -> None:
        """Turns the compiled code's findings into diagnostics. They are about an access by warp w, or by its operation
        op, and an earlier one."""
        races = self.checker.memory.races
        n = races.item(0)
        if not n:
            return
        entries = races[1 : 1 + n * sh.RACE_FIELDS].reshape(n, sh.RACE_FIELDS).tolist()
        races[0] = 0
        for entry in map(Entry.of, entries):
            if entry.kind == sh.OVER_BARRIER:
                cta = self.checker.agents[entry.other_pc + 1].cta
                self.checker.barriers.over_barrier(w, op, cta, entry.address & ~7, entry.pc, entry.lane)
            elif not self.allowed(w, op, entry):
                this = self.party(w, op, f"{entry.verb} {entry.where}", pc=entry.pc, lane=entry.lane)
                if entry.kind == sh.UNINITIALISED:
                    self.uninitialised(w, entry, this)
                else:
                    self.unordered(w, op, entry, this)

    def allowed(self, w, op, entry: Entry) -> bool:
        """Returns whether the two accesses are benign, or ordered by what the compiled code does not see."""
        program = w.cta.program
        if entry.kind == sh.UNINITIALISED and not self.strict and benign_races.masked_atomic(program, entry.pc):
            return True
        if entry.same and entry.by_warp:
            if not self.strict or one_statement(w, entry.pc, self.checker.agents[entry.agent], entry.other_pc):
                return True
        elif entry.same and not self.strict:
            earlier = self.checker.operations.get(entry.epoch)
            if earlier is not None and earlier.warp is None and earlier.kind not in grids.FIXES:
                return True
        if op is not None:
            return False
        if entry.place and entry.kind != sh.WAR and behind_flag(w, entry.address, entry.agent, entry.epoch):
            return True
        return self.may_be_confined(op, entry) and benign_races.compared(program, *entry.load_and_store)

    def may_be_confined(self, op, entry: Entry) -> bool:
        """Returns whether a load and a store of two warps race, at the default level."""
        return op is None and entry.by_warp and entry.kind in (sh.RAW, sh.WAR) and not self.strict

    def uninitialised(self, w, entry: Entry, this: Party) -> None:
        self.unwritten.add((id(w.cta.program), entry.pc))
        said, parties = "nothing wrote them", [this]
        if entry.place:
            that = self.party(self.checker.agents[entry.agent], None, f"discarded {entry.where}", pc=entry.other_pc)
            said, parties = "discard.L2 took their values", [this, that]
        self.report.add(Diagnostic("uninitialised", f"{entry.memory} bytes are read, but {said}", tuple(parties)))

    def unordered(self, w, op, entry: Entry, this: Party) -> None:
        """Reports a race, or holds it back if the reader may be confined to lanes that never store."""
        other_op = None if entry.by_warp else self.checker.operations.get(entry.epoch)
        them = self.checker.agents[entry.agent] if entry.by_warp else other_op.warp if other_op is not None else None
        over_read = op if entry.kind == sh.WAR and not entry.place and entry.by_warp else None
        whose = them.cta if them is not None else None
        early = them is not None and (id(them.cta.program), entry.other_pc) in self.unwritten
        fix = too_early(over_read, whose) if over_read is not None and early else self.fix(w, op, entry, them, other_op)
        found = self.race(this, self.other(entry, them, other_op), f"{entry.memory} memory", other_op, fix, w.cta)
        if over_read is not None and not early and first_phase(over_read):
            more = f"; where it was to read what this one brings, let it wait for {named(over_read, whose)[0]}"
            found = replace(found, fix=found.fix + more)
        if entry.place and them is not None and them.cta is w.cta and self.may_be_confined(op, entry):
            reader, lane = (w, entry.lane) if entry.kind == sh.RAW else (them, entry.other_lane)
            load, store = entry.load_and_store
            if self.confined(w.cta.program, load, store):
                self.suspect(reader, found, store, 1 << lane if entry.other_lane >= 0 else pg.ALL)
                return
        self.report.add(found)

    def other(self, entry: Entry, them, other_op) -> Party:
        """Returns the earlier access. them: the warp that made or issued it, if it is known."""
        wrote = entry.kind != sh.WAR or entry.by_warp and stores(them, entry.other_pc)
        footprint = other_op.footprint if other_op is not None and other_op.warp is None else None
        if footprint is not None:
            wrote = wrote or footprint.wrote(entry.address)
        what = f"{'wrote' if wrote else 'read'} {entry.where}"
        if entry.by_warp:
            return self.party(them, None, what, pc=entry.other_pc, lane=entry.other_lane)
        if other_op is None:
            return Party("an earlier operation")
        if other_op.warp is None:
            return Party(
                f"the {other_op.kind}", source=str(footprint.source) if footprint is not None else "", what=what
            )
        return self.party(them, other_op, what)

    def fix(self, w, op, entry: Entry, them, other_op) -> str:
        """Returns advice that these two accesses need, or '' if that for any race will do."""
        if entry.other_lane >= 0:
            if them is w:
                return ONE_INSTRUCTION if entry.pc == entry.other_pc else BETWEEN_LANES
            return NOT_RELEASED.format(lanes=self.checker.order.releasing(them, entry.epoch))
        if op is not None and entry.kind == sh.RAW and entry.by_warp and seen(w, them, entry.epoch):
            return UNFENCED
        copied = other_op is not None and other_op.kind == "cp.async"
        if op is not None and entry.kind == sh.RAW and copied and self.checker.order.knows(w, other_op.number):
            return UNFENCED
        fix = self.across(w, them)
        if fix and other_op is not None:
            if fix == WITHIN_CLUSTER:  # a wait for its completion is possible
                return ""
            if other_op.kind in WRITES:
                return BEHIND_STORE.format(scope="sys" if fix.startswith(BETWEEN_GPUS) else "gpu")
        in_one_store = entry.kind == sh.WAW and op is None and entry.by_warp and entry.pc == entry.other_pc
        return fix or (BETWEEN_WARPS if in_one_store else "")

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

    def add_race(self, this: Party, other: Party, memory: str, other_op, fix: str) -> None:
        self.report.add(self.race(this, other, memory, other_op, fix))

    def race(self, this: Party, other: Party, memory: str, other_op, fix: str, cta: Cta | None = None) -> Diagnostic:
        if fix:
            pass
        elif other_op is not None and other_op.warp is None:
            fix = EARLIER.get(other_op.kind, beside.FIX)
        elif other_op is not None:
            waited = self.checker.order.knows(other_op.warp, other_op.number)
            fix = before_the_access(other_op, waited, self.checker.operations.by_number.values(), cta)
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
