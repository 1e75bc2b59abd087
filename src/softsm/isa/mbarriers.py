"""mbarrier.*: init, inval, arrive, arrive_drop, expect_tx, complete_tx, test_wait, try_wait, pending_count.

The state machine is `softsm.memory.mbarrier`; this file connects PTX to it. A barrier is found by the shared address
of its word, in the thread's own CTA or, for arrivals, in a peer. try_wait suspends the warp until the phase completes;
test_wait returns at once.
"""

from __future__ import annotations

import re
from functools import lru_cache, partial

from softsm.engine import program as pg
from softsm.engine.arrivals import arrivals, at_barrier
from softsm.engine.program import POLLED, Blocked
from softsm.errors import Fault
from softsm.isa.operands import (
    Issuer,
    agreed,
    lanes,
    located,
    set_predicate,
    shared_address,
    shared_bytes,
    shared_operand,
    uniform,
)
from softsm.isa.registry import lowers
from softsm.memory.mbarrier import Mbarrier, pending_count
from softsm.ptx.ast import Sink
from softsm.ptx.cplusplus import variable
from softsm.ptx.roles import place_of, source_lines
from softsm.ptx.spelling import mbarrier_at

SHARED_SPACES = ("shared", "shared::cta", "shared::cluster")
# The semantics that an operation may have, together with a scope; generic memory is always coherent.
_ORDER = {
    "arrive": {"release", "relaxed"},
    "arrive_drop": {"release", "relaxed"},
    "expect_tx": {"relaxed"},
    "complete_tx": {"relaxed"},
    "test_wait": {"acquire", "relaxed"},
    "try_wait": {"acquire", "relaxed"},
}
_SCOPES = {"cta", "cluster"}


def barrier_at(w, address: int) -> Mbarrier:
    cta = w.cta
    offset = address - cta.shared_base
    if offset >> pg.RANK_SHIFT:  # a peer's
        cta, offset = located(w, cta.resolve_shared, address)
    barrier = cta.barriers.get(offset)
    if barrier is not None and cta.machine.observer is not None:
        cta.machine.observer.barrier_used(w, barrier)
    if barrier is None:
        shared_bytes(w, address, 8, "mbarrier", 8)
        if offset in cta.invalidated:
            name, who = cta.invalidated[offset]
            raise w.fault("barrier-inval", f"{name} is used after mbarrier.inval by {who}")
        raise w.fault(
            "barrier-uninitialised",
            f"no mbarrier was initialised at shared offset {offset:#x} of {cta}; there are "
            f"{', '.join(f'{at:#x}' for at in sorted(cta.barriers)[:8]) or 'none'}",
        )
    return barrier


def arrived_at(w, address: int) -> Mbarrier:
    """Returns the mbarrier that this thread itself changes now, its own CTA's or a peer's."""
    barrier = barrier_at(w, address)
    if w.machine.observer is not None and barrier.home is not None and barrier.home is not w.cta:
        w.machine.observer.accessed_peer(w, barrier.home)
    return barrier


def source_name(ins, offset: int, cta) -> tuple[str, str]:
    """Returns (`mbarrier slot_ready.index(2) (0x1408)`, `slot_ready`): the name in the program's source, where it
    initialises the mbarrier or else arrives on it, and the array of the mbarrier; '' if there is none. A variable
    index is counted from the first mbarrier of the array."""

    loc = place_of(ins)
    found = (initialised_at(loc.file, loc.line) if loc else "") or used_as(cta.program, offset)
    if not found:
        return "", ""
    array, bracket, index = found.removesuffix(")").partition(".index(")
    if not bracket:
        array, bracket, index = found.removesuffix(")").partition("_at(")
    if bracket and not index.isdecimal():
        first = min([offset, *(at for at, b in cta.barriers.items() if b.array == array)])
        found = f"{array}{bracket}{(offset - first) // 8})"
    where = f" of CTA rank {cta.rank}" if len(cta.cluster) > 1 else ""
    return f"mbarrier {found} ({offset:#x}){where}", array


@lru_cache(maxsize=1024)
def initialised_at(file: str, line: int) -> str:
    """Returns what a line of the source initialises, as the line spells it."""
    lines = source_lines(file, line, 0)
    found = re.search(r"\binit\(\s*([A-Za-z_][\w.]*(?:\([^()]*\))?)\s*(?:,|\)|$)", lines[0][1]) if lines else None
    return found.group(1) if found else ""


def used_as(program: pg.Program, offset: int) -> str:
    """Returns the source's name of the mbarrier at an offset, where it arrives on it; '' if it has none."""
    if program.arrivals is None:
        program.arrivals = [a for a in arrivals(program) if a.instruction.loc is not None]
    names = (mbarrier_at(a.instruction.loc) for a in at_barrier(program.arrivals, offset))
    return next(filter(None, names), "")


def name_of(cta, offset: int) -> str:
    """Returns `mbarrier k_ready+8 (0x1408)`, named by the nearest shared variable if there is one."""
    best = ("", -1)
    for name, start in cta.program.shared_variables.items():
        if best[1] < start <= offset:
            best = (name, start)
    label = f"{variable(best[0])}+{offset - best[1]}" if best[1] >= 0 else ""
    where = f" of CTA rank {cta.rank}" if len(cta.cluster) > 1 else ""
    return f"mbarrier {label} ({offset:#x}){where}" if label else f"mbarrier {offset:#x}{where}"


# -- lowering ----------------------------------------------------------------------------------------------------------


@lowers("mbarrier")
def mbarrier(asm, ins):
    op, *rest = ins.modifiers
    flags = set(rest) - {"b64"}
    if "b64" not in rest:
        asm.refuse(ins, "mbarrier instructions end in .b64")
    space = next((s for s in SHARED_SPACES if s in flags), None)
    allowed = {"arrive": {"expect_tx", "noComplete"}, "arrive_drop": {"expect_tx", "noComplete"}}
    allowed |= {"test_wait": {"parity"}, "try_wait": {"parity"}}
    if op not in _LOWERINGS:
        asm.refuse(ins, f"no such operation .{op}; there are {', '.join(_LOWERINGS)}")
    order = flags & _ORDER.get(op, set())
    scope = flags & _SCOPES if op in _ORDER else set()
    extra = flags - set(SHARED_SPACES) - order - scope - allowed.get(op, set())
    if extra:
        asm.refuse(ins, f"unknown modifiers {', '.join(sorted(extra))}")
    if len(order) != len(scope) or len(order) > 1:
        asm.refuse(ins, f"expected one of .{', .'.join(sorted(_ORDER[op]))} with .cta or .cluster, or neither")
    if "noComplete" in flags and (
        "expect_tx" in flags or space == "shared::cluster" or "relaxed" in order or "cluster" in scope
    ):
        asm.refuse(ins, ".noComplete goes with .release.cta on the own CTA's barriers only, without .expect_tx")
    if op in ("init", "inval", "test_wait", "try_wait", "pending_count") and space == "shared::cluster":
        asm.refuse(ins, f"mbarrier.{op} works on the own CTA's barriers only")
    _LOWERINGS[op](asm, ins, flags, space)


def _init(asm, ins, flags, space):
    address, count = ins.operands
    asm.macro(do_init, ins, at=shared_operand(asm, address, space), count=asm.src(count, "u"))


def _inval(asm, ins, flags, space):
    asm.macro(do_inval, ins, at=shared_operand(asm, ins.operands[0], space))


def _arrive(asm, ins, flags, space):
    state, address, *amount = ins.operands
    expect = "expect_tx" in flags
    if space == "shared::cluster" and not isinstance(state, Sink):
        asm.refuse(ins, "an arrival on shared::cluster returns no state; write _")
    if len(amount) > 1 or (("noComplete" in flags or expect) and not amount):
        asm.refuse(ins, f"{len(ins.operands)} operands")
    asm.macro(
        do_arrive,
        ins,
        at=shared_operand(asm, address, space),
        state=None if isinstance(state, Sink) else asm.dst(state, "q"),
        count=asm.src(amount[0], "u") if amount and not expect else None,
        tx=asm.src(amount[0], "u") if expect else None,
        drop=ins.modifiers[0] == "arrive_drop",
        no_complete="noComplete" in flags,
        relaxed="relaxed" in flags,
        scope="".join(flags & _SCOPES),
    )


def _transaction(asm, ins, flags, space):
    address, amount = ins.operands
    asm.macro(
        do_transaction,
        ins,
        at=shared_operand(asm, address, space),
        tx=asm.src(amount, "u"),
        complete=ins.modifiers[0] == "complete_tx",
    )


def _wait(asm, ins, flags, space):
    done, address, what, *hint = ins.operands
    if len(hint) > (ins.modifiers[0] == "try_wait"):
        asm.refuse(ins, f"{len(ins.operands)} operands")
    for operand in hint:  # suspendTimeHint
        asm.src(operand, "u")
    parity = "parity" in flags
    predicate, at = asm.dst(done, "p"), shared_operand(asm, address, space)
    phase = asm.src(what, "u" if parity else "q")
    asm.macro(
        do_wait if ins.modifiers[0] == "try_wait" else do_test,
        ins,
        dst=predicate,
        at=at,
        what=phase,
        parity=parity,
        relaxed="relaxed" in flags,
        scope="".join(flags & _SCOPES),
    )
    if parity and not at[1] and not (asm.checking and "relaxed" in flags):  # the compiled loop can do it
        asm.answered(pg.OP_CHECKED_WAIT if asm.checking else pg.OP_WAIT, predicate, at[0], phase)


def _pending_count(asm, ins, flags, space):
    count, state = ins.operands
    asm.macro(do_pending_count, ins, dst=asm.dst(count, "u"), state=asm.src(state, "q"))


_LOWERINGS = {
    "init": _init,
    "inval": _inval,
    "arrive": _arrive,
    "arrive_drop": _arrive,
    "expect_tx": _transaction,
    "complete_tx": _transaction,
    "test_wait": _wait,
    "try_wait": _wait,
    "pending_count": _pending_count,
}


# -- at run time -------------------------------------------------------------------------------------------------------


def do_init(w, mask, o):
    for lane in lanes(mask):
        address = shared_address(w, o.at, lane)
        cta, offset = shared_bytes(w, address, 8, "mbarrier.init", 8)
        if cta is not w.cta:
            raise w.fault(
                "barrier-remote", f"mbarrier.init at {address:#x} of a peer CTA; only its own CTA may execute it"
            )
        old = cta.barriers.get(offset)
        if old is not None and old.waiters:
            raise w.fault("barrier-init", f"{old.name} is initialised again while a warp waits on it")
        count, observer = int(w.R[o.count, lane]), w.machine.observer
        name, array = "", ""
        if observer is not None:
            name, array = source_name(w.instruction(), offset, cta)
        barrier = located(w, _new, count, name or name_of(cta, offset), Issuer(w))
        barrier.array = array
        cta.barriers[offset] = barrier
        cta.invalidated.pop(offset, None)
        barrier.shown, barrier.place = cta.phases, offset // 8
        cta.phases[offset // 8] = 1
        if observer is not None:
            barrier.observer = observer
            observer.barrier_initialised(w, barrier, old, cta, offset)
    w.machine.writes += 1


def _new(count: int, name: str, who: Issuer) -> Mbarrier:
    return Mbarrier(count, name=name, who=who)


def do_inval(w, mask, o):
    for lane in lanes(mask):
        barrier = barrier_at(w, shared_address(w, o.at, lane))
        if barrier.waiters:
            raise w.fault("barrier-inval", f"{barrier.name} is invalidated while a warp waits on it")
        cta, offset = w.cta.resolve_shared(shared_address(w, o.at, lane))
        del cta.barriers[offset]
        cta.invalidated[offset] = barrier.name, Issuer(w)
        cta.phases[offset // 8] = 0
        if w.machine.observer is not None:
            w.machine.observer.barrier_invalidated(cta, offset)
    w.machine.writes += 1


def do_arrive(w, mask, o):
    """Counts the arrivals of one instruction together: an H200 faults when they exceed what the phase still expects,
    even if one by one they would have ended it and begun the next."""
    who = Issuer(w)
    w.machine.writes += 1
    on = lanes(mask)
    if len(on) > 1:
        totals = _together(w, on, o)
        if o.state is None and o.tx is None and not (o.drop or o.no_complete):
            for address, count in totals.items():
                located(w, partial(arrived_at(w, address).arrive, relaxed=o.relaxed, scope=o.scope), count, who)
            return
        for address, count in totals.items():
            located(w, barrier_at(w, address).check_arrivals, count, who)
    for lane in on:
        barrier = arrived_at(w, shared_address(w, o.at, lane))
        count = 1 if o.count is None else w.R.item(o.count, lane)
        how = dict(drop=o.drop, relaxed=o.relaxed, scope=o.scope)
        try:
            if o.tx is not None:
                token = barrier.arrive_expect_tx(int(w.R[o.tx, lane]), count, who, **how)
            else:
                token = barrier.arrive(count, who, no_complete=o.no_complete, **how)
        except Fault as error:
            raise w.fault(error.code, error.message) from None
        if o.state is not None:
            w.Q[o.state, lane] = token


def _together(w, on: list[int], o) -> dict[int, int]:
    """Returns the address of each barrier -> arrivals of these lanes on it."""
    if o.count is None and not o.at[1]:
        address = agreed(w, o.at[0])
        if address is not None:
            return {address: len(on)}
    total: dict[int, int] = {}
    for lane in on:
        address = shared_address(w, o.at, lane)
        total[address] = total.get(address, 0) + (1 if o.count is None else int(w.R[o.count, lane]))
    return total


def do_transaction(w, mask, o):
    who = Issuer(w)
    for lane in lanes(mask):
        barrier = arrived_at(w, shared_address(w, o.at, lane))
        step = barrier.complete_tx if o.complete else barrier.expect_tx
        located(w, step, int(w.R[o.tx, lane]), who)
    w.machine.writes += 1


class Waiting:
    """What a blocked warp waits for, as text that is made only for a report."""

    __slots__ = ("barrier", "parity", "phase")

    def __init__(self, barrier: Mbarrier, parity: int | None):
        self.barrier, self.parity, self.phase = barrier, parity, barrier.phase

    def __str__(self) -> str:
        which = f"phase {self.phase}" + (f" (parity {self.parity})" if self.parity is not None else "")
        return f"{which} of {self.barrier.name}, which is {self.barrier.state()}"


def _answers(w, mask, o) -> tuple[int, Mbarrier | None]:
    """Returns the lanes whose phase is over, and the barrier the others wait on (None when there are several)."""
    one = mask if mask & (mask - 1) == 0 or _uniform(w, o) else 0  # one lane then decides for all
    on = lanes(mask & -mask if one else mask)
    bits, waits = 0, set()
    known: dict[tuple[int, int], bool] = {}
    phases = w.R if o.parity else w.Q
    for lane in on:
        address, what = shared_address(w, o.at, lane), phases.item(o.what, lane)
        passed = known.get((address, what))
        if passed is None:
            barrier = barrier_at(w, address)
            if o.parity:
                passed = barrier.passed_parity(what)
            else:
                passed = located(w, barrier.passed_token, what)
            if not passed:
                waits.add(barrier)
            elif w.cta.machine.observer is not None:
                w.cta.machine.observer.passed(w, barrier, o.relaxed, o.scope)
            if one:
                return (mask, None) if passed else (0, barrier)
            known[address, what] = passed
        if passed:
            bits |= 1 << lane
    return bits, waits.pop() if len(waits) == 1 else None


def _awaited(w, mask: int, o) -> Mbarrier | None:
    """Returns the mbarrier in the usual case of a wait that must block: all lanes name, by parity, one phase of one
    mbarrier of their own CTA, and the phase is not over. Returns None in every other case."""
    row, generic = o.at
    if generic or not o.parity or (mask & (mask - 1) and not _uniform(w, o)):
        return None
    cta, lane = w.cta, (mask & -mask).bit_length() - 1
    barrier = cta.barriers.get(w.R.item(row, lane) - cta.shared_base)
    if barrier is None or barrier.passed_parity(w.R.item(o.what, lane)):
        return None
    if cta.machine.observer is not None:
        cta.machine.observer.barrier_used(w, barrier)
    return barrier


def _uniform(w, o) -> bool:
    """Returns whether all lanes, active or not, name the same barrier and phase."""
    row, generic = o.at
    if (uniform(w.Q[row]) if generic else agreed(w, row)) is None:
        return False
    return (agreed(w, o.what) if o.parity else uniform(w.Q[o.what])) is not None


def do_test(w, mask, o):
    bits = _answers(w, mask, o)[0]
    set_predicate(w, o.dst, mask, bits)
    return None if bits == mask else POLLED


def do_wait(w, mask, o):
    """Suspends while no lane can continue. Lanes that can continue must not wait for those that cannot, because the
    others may need their arrival. The time limit expires, and the wait returns false, when nothing else can happen any
    more; in order 'random' it may expire at once."""
    fragment = w.fragment
    barrier = None if fragment.timed_out else _awaited(w, mask, o)
    if barrier is not None and not w.machine.engine.impatient(w):
        return Blocked(barrier, Waiting(barrier, w.R.item(o.what, (mask & -mask).bit_length() - 1)), limited=True)
    if barrier is not None:
        set_predicate(w, o.dst, mask, 0)
        return POLLED
    bits, barrier = _answers(w, mask, o)
    if not bits and barrier is not None and not fragment.timed_out and not w.machine.engine.impatient(w):
        lane = (mask & -mask).bit_length() - 1
        return Blocked(barrier, Waiting(barrier, w.R.item(o.what, lane) if o.parity else None), limited=True)
    if fragment.timed_out:
        fragment.timed_out = False
        if not any(f.timed_out for f in w.fragments):
            w.S[pg.S_PHASES] = w.cta.phases_address
    set_predicate(w, o.dst, mask, bits)
    return None if bits == mask else POLLED


def do_pending_count(w, mask, o):
    for lane in lanes(mask):
        w.R[o.dst, lane] = pending_count(int(w.Q[o.state, lane]))
