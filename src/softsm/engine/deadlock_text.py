"""Describes a deadlock: which warp waits for what, which arrivals are missing, and the cycle of warps that wait."""

from __future__ import annotations

import math

from softsm.engine.arrivals import Arrival, arrivals, at_barrier, reached, silent
from softsm.memory.mbarrier import Mbarrier
from softsm.ptx.ast import brief
from softsm.ptx.roles import called_at, place_of, role_of

SHOWN = 40
POLLING = "every warp that runs only polls, and no memory changes"


def describe(machine, why: str) -> str:
    resident, left = len(machine.live), machine.left
    started = f", {left} cluster{'s have' if left > 1 else ' has'} not started" if left else ""
    lines = [f"{why}; {resident} CTA{'s are' if resident > 1 else ' is'} resident{started}", *progress(machine)]
    if left and why == POLLING:
        fit = machine.sms_per_gpu * machine.per_sm
        lines.append(
            f"  a CTA starts when another one ends: {fit} fit on {machine.sms_per_gpu} SMs (sms=), the grid has "
            f"{math.prod(machine.grid)}; a barrier of the whole grid needs all of them resident"
        )
    text = Text(machine)
    found, barriers = cycle(machine, text)
    lines += [f"  {clue}" for clue in clues(machine, text, barriers)]
    lines += standing(machine)
    if found:
        lines += ["  they wait for each other:", *(f"    {line}" for line in found)]
    lines += [f"  {line}" for line in missing(machine, text, barriers)]
    return "\n".join(lines)


def going_on(machine, why: str) -> str:
    """Describes a launch that is ended although its warps run."""
    return "\n".join([why, *progress(machine), *standing(machine, "run")])


def clues(machine, text: Text, ring: list) -> list[str]:
    """Returns likely causes, the most specific first. ring: barriers of a cycle."""
    waits = [b for b in dict.fromkeys(awaited(machine).values()) if isinstance(b, Mbarrier) and b.pending]
    others = {b: elsewhere(machine, b) for b in waits if untouched(b)}
    never = [b for b, other in others.items() if not (other or text.silent or text.anywhere(b))]
    found = [
        f"no instruction is known to arrive at {name(b)}: an mbarrier.arrive, a tcgen05.commit or an arrive.expect_tx "
        "is missing"
        for b in never
    ]
    found += [
        f"{name(b)} misses {b.pending} of {b.expected} arrivals, and every warp that can reach its arrival has done so "
        "in this phase: is the count of its mbarrier.init too large, or has a warp left without arriving?"
        for b in waits
        if all_came(machine, b, text)
    ]
    fresh = [b for b in ring or awaited(machine).values() if isinstance(b, Mbarrier) and not others.get(b)]
    if fresh and not never and all(untouched(b) for b in fresh):
        found.append(
            f"nothing has arrived at {' and '.join(dict.fromkeys(map(name, fresh)))} since mbarrier.init: who waits "
            "for buffers that are free from the start waits for parity 1 first, as the phase before phase 0 counts as "
            "complete"
        )
    found += [
        f"nothing has arrived at {name(b)} since mbarrier.init, but at {name(other)}: does an arrival, or this wait, "
        "have the wrong index?"
        for b, other in others.items()
        if other
    ]
    return list(dict.fromkeys(found))


def all_came(machine, barrier: Mbarrier, text: Text) -> bool:
    """Returns whether every warp that can reach the only code that arrives there has done so in this phase."""
    came = {
        (e.who.ctaid, e.who.warp)
        for e in barrier.history
        if e.phase == barrier.phase and hasattr(e.who, "warp") and e.what in ("arrive", "drop")
    }
    able = {(w.cta.ctaid, w.index) for w, ins in suppliers(machine, barrier, text) if ins is None or guarded(w, ins)}
    return bool(came) and able <= came and len(text.anywhere(barrier)) == 1 and not text.silent


def guarded(warp, ins) -> bool:
    """Returns whether the instruction's predicate holds for a lane of the warp, with its present value."""
    program = warp.cta.program
    row, inverted = program.code[program.instructions.index(ins), 6:8].tolist()
    return bool(int(warp.P[row]) ^ inverted)


def standing(machine, running: str = "poll") -> list[str]:
    """Returns what each warp waits for, or where it does `running`. Warps of a CTA that wait for the same thing share a
    line, and so do CTAs whose lines differ only in their names."""
    shown: dict[tuple[int, str], list[str]] = {}  # (GPU, text without the CTA's name) -> names of the CTAs
    for home in machine.live:
        alike: dict[tuple[str, str, str], list[int]] = {}
        for w in home.warps:
            for f in w.fragments:
                ins = home.program.instructions[f.pc]
                if f.blocked is not None:
                    verb, what = "wait", f"\n      for {f.blocked.text}"
                elif f.parked:
                    verb, what = "wait", f"\n      for lanes {f.parked & ~f.mask:#010x} of the same warp"
                else:
                    verb, what = running, ""
                alike.setdefault((role_of(ins), verb, f" at {place(ins)}{what}"), []).append(w.index)
        for (role, verb, rest), warps in alike.items():
            numbers = list(dict.fromkeys(warps))
            who = f"warp {numbers[0]}" if len(numbers) == 1 else f"warps {', '.join(map(str, numbers))}"
            who += f" ({role})" if role else ""
            text = f"  {who} of {{}} {verb}{'s' if len(numbers) == 1 else ''}{rest}"
            shown.setdefault((home.gpu, text.replace(str(home), "{}")), []).append(str(home))
    lines = []
    for (_, text), ctas in list(shown.items())[:SHOWN]:
        more = f"\n      and so in {len(ctas) - 1} more CTA{'s' if len(ctas) > 2 else ''}" if len(ctas) > 1 else ""
        lines.append(text.replace("{}", ctas[0]) + more)
    if len(shown) > SHOWN:
        lines.append(f"  ... and {len(shown) - SHOWN} more")
    return lines


def progress(machine) -> list[str]:
    """Returns the progress of each GPU, if there are several."""
    if machine.gpus == 1:
        return []
    lines = []
    for gpu in [gpu for gpu, kernel in enumerate(machine.kernels) if kernel is not None]:
        resident = sum(cta.gpu == gpu for cta in machine.live)
        waiting = sum(where[3] == gpu for where in machine.clusters) * machine.cluster_size
        ctas = math.prod(machine.grid)
        ended = f"{ctas - resident - waiting} of {ctas} CTAs have ended"
        lines.append(f"  GPU {gpu}: {ended}, {resident} are resident, {waiting} have not started")
    return lines


class Text:
    """Finds arrivals in the kernel's text."""

    def __init__(self, machine):
        kernels = [x for x in machine.kernels if x is not None]
        self.live = machine.live
        self.found = {x: arrivals(x.program) for x in kernels}
        self.silent = any(silent(x.program) for x in kernels)
        self.ahead: dict[tuple, set[int]] = {}

    def of(self, barrier: Mbarrier, cta) -> list[Arrival]:
        offset = next((at for at, b in cta.barriers.items() if b is barrier), None)
        found = [] if offset is None else at_barrier(self.found[cta.kernel], offset)
        return [a for a in found if not a.waits]

    def anywhere(self, barrier: Mbarrier) -> list:
        """Returns the instructions of all CTAs."""
        return list(dict.fromkeys(a.instruction for cta in self.live for a in self.of(barrier, cta)))

    def can_reach(self, warp, arrival: Arrival) -> bool:
        kernel = warp.cta.kernel
        for f in warp.fragments:
            if (kernel, f.pc) not in self.ahead:
                self.ahead[kernel, f.pc] = reached(kernel.program, f.pc)
            if arrival.pc in self.ahead[kernel, f.pc]:
                return True
        return False


def awaited(machine) -> dict:
    """Returns, for each running warp, the barrier that it is blocked on."""
    return {w: f.blocked.on for cta in machine.live for w in cta.warps for f in w.fragments if f.blocked is not None}


def suppliers(machine, barrier, text: Text) -> list[tuple]:
    """Returns [(warp, where it should arrive or None)] for the warps that a barrier still needs. For an mbarrier these
    are warps whose role contains code that arrives there, or that arrived in earlier phases; for barriers of whole CTAs
    and clusters, the warps that have not arrived."""
    living = [w for cta in machine.live for w in cta.warps if w.fragments]
    if isinstance(barrier, Mbarrier):
        came = {
            (e.who.ctaid, e.who.warp): e.phase
            for e in barrier.history
            if hasattr(e.who, "warp") and e.what not in ("init", "increment")
        }
        here = {cta.gpu for cta in machine.live if any(b is barrier for b in cta.barriers.values())}
        late = [
            w for w in living if w.cta.gpu in here and came.get((w.cta.ctaid, w.index), barrier.phase) < barrier.phase
        ]
        found: list[tuple] = []
        for cta in machine.live:
            for arrival in text.of(barrier, cta):
                if bool(barrier.pending) == arrival.bytes:  # either arrivals are missing or bytes
                    continue
                able = [w for w in living if w.cta in (cta, *cta.cluster) and text.can_reach(w, arrival)]
                role = role_of(arrival.instruction)
                ours = [w for w in able if role and role_of(w.cta.program.instructions[w.fragments[0].pc]) == role]
                found += [(w, arrival.instruction) for w in ours or able if not late or w in late]
        if not barrier.pending:  # a warp that waits for the bytes of this phase does not deliver them
            there = {w for w, other in awaited(machine).items() if other is barrier}
            return [(w, ins) for w, ins in found if w not in there]
        return found or [(w, None) for w in late]
    if hasattr(barrier, "missing"):
        return [(w, None) for w in barrier.missing()]
    if hasattr(barrier, "inside_now"):
        inside = barrier.inside_now()
        return [(w, None) for w in barrier.cta.warps if w.fragments and w.index not in inside]
    return []


def untouched(barrier: Mbarrier) -> bool:
    """Returns whether nothing has arrived yet."""
    return barrier.phase == 0 and not any(e.what not in ("init", "increment") for e in barrier.history)


def elsewhere(machine, barrier: Mbarrier) -> Mbarrier | None:
    """Returns another mbarrier of its array at which a warp has arrived: the first wait succeeded then."""
    homes = (cta for cta in machine.live if any(b is barrier for b in cta.barriers.values()))
    array = (b for cta in homes for b in cta.barriers.values() if barrier.array and b.array == barrier.array)
    return next((b for b in array if not untouched(b)), None)


def cycle(machine, text: Text) -> tuple[list[str], list]:
    """Returns sentences about warps that wait for each other, and their barriers; both are empty if no running warp
    could supply what is missing."""
    waits = awaited(machine)
    needs = {}
    for barrier in set(waits.values()):
        needs[barrier] = [(w, ins) for w, ins in suppliers(machine, barrier, text) if w in waits]
    for start in waits:
        path, w = [], start
        while w in waits and w not in path:
            path.append(w)
            w = next((x for x, _ in needs[waits[w]] if x is not w), None)
        if w in path:
            ring = path[path.index(w) :]
            lines = [sentence(a, b, waits[a], needs) for a, b in zip(ring, [*ring[1:], ring[0]])]
            return lines, list(dict.fromkeys(waits[a] for a in ring))
    return [], []


def sentence(waiter, supplier, barrier, needs) -> str:
    where = next((ins for w, ins in needs[barrier] if w is supplier), None)
    arrives = f", to arrive in {place(where)}" if where is not None else ""
    return f"{called(waiter)} waits for {called(supplier)} at {name(barrier)}{arrives}"


def missing(machine, text: Text, named: list) -> list[str]:
    """Returns one line for each mbarrier that a warp waits on: the code that should arrive. `named`: barriers that the
    cycle has mentioned already."""
    lines = []
    for barrier in dict.fromkeys(awaited(machine).values()):
        if not isinstance(barrier, Mbarrier) or not barrier.pending or barrier in named:
            continue
        found = list(dict.fromkeys(a.instruction for cta in machine.live for a in text.of(barrier, cta) if not a.bytes))
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            lines.append(f"arrivals at {name(barrier)}: {'; '.join(place(x) for x in found[:3])}{more}")
    return list(dict.fromkeys(lines))[:SHOWN]


def called(warp) -> str:
    role = role_of(warp.cta.program.instructions[warp.fragments[0].pc]) if warp.fragments else ""
    return str(warp).replace(" of ", f" ({role}) of ", 1) if role else str(warp)


def place(ins) -> str:
    loc = place_of(ins)
    source = f"{loc.file}:{loc.line}{called_at(loc)}, " if loc else ""
    return f"{source}PTX line {ins.line}: {brief(ins.text).rstrip(';')}"


def name(barrier) -> str:
    return getattr(barrier, "name", "") or (f"barrier {barrier.number}" if hasattr(barrier, "number") else "a barrier")
