"""What a deadlock looks like: who waits for what, what is missing, and the cycle that keeps everybody waiting."""

from __future__ import annotations

from softsm.memory.mbarrier import Mbarrier
from softsm.report.diagnostics import Diagnostic
from softsm.report.roles import role_of

SHOWN = 40


def describe(machine, why: str) -> str:
    lines = [f"{why}. {len(machine.live)} CTAs are resident, {machine.left} clusters have not started."]
    alike: dict[tuple, list[int]] = {}  # what is the same for several warps of a CTA is said once
    for cta in machine.live:
        for w in cta.warps:
            for f in w.fragments:
                ins = machine.program.instructions[f.pc]
                if f.blocked is not None:
                    state = f"waits for {f.blocked.text}"
                elif f.parked:
                    state = f"waits for lanes {f.parked & ~f.mask:#010x} of its own warp"
                else:
                    state = "polls"
                source = f" ({ins.loc.file}:{ins.loc.line})" if ins.loc else ""
                key = (cta.ctaid, role_of(ins), f"{state} at PTX line {ins.line}{source}: {ins.text}")
                alike.setdefault(key, []).append(w.index)
    for (ctaid, role, text), warps in list(alike.items())[:SHOWN]:
        numbers = list(dict.fromkeys(warps))
        who = f"warp {numbers[0]}" if len(numbers) == 1 else f"warps {', '.join(map(str, numbers))}"
        who += f" ({role})" if role else ""
        lines.append(f"  {who} of CTA {ctaid}: {text}")
    if len(alike) > SHOWN:
        lines.append(f"  ... and {len(alike) - SHOWN} more")
    found = cycle(machine)
    if found:
        lines.append("  cycle: " + "; ".join(found))
    return "\n".join(lines)


def awaited(machine) -> dict:
    """warp -> the barrier it is blocked on, for each living warp."""
    return {
        w: f.blocked.on
        for cta in machine.live
        for w in cta.warps
        for f in w.fragments
        if f.blocked is not None
    }


def suppliers(machine, barrier) -> list:
    """Warps that the barrier still needs: those that arrived in earlier phases but not in this one; for barriers of
    whole CTAs and clusters, those that are not there."""
    living = [w for cta in machine.live for w in cta.warps if w.fragments]
    if isinstance(barrier, Mbarrier):
        came = {
            (e.who.ctaid, e.who.warp): e.phase
            for e in barrier.history
            if hasattr(e.who, "warp") and e.what != "init"
        }
        if not came:  # nobody has arrived ever: it can only be one of those that wait for something else
            return [w for w, on in awaited(machine).items() if on is not barrier]
        return [w for w in living if came.get((w.cta.ctaid, w.index), barrier.phase) < barrier.phase]
    if hasattr(barrier, "missing"):
        return barrier.missing()
    if hasattr(barrier, "inside_now"):
        inside = barrier.inside_now()
        return [w for w in barrier.cta.warps if w.fragments and w.index not in inside]
    return []


def cycle(machine) -> list[str]:
    """Warps that wait for each other, as sentences; empty when nobody is left who could do what is missing."""
    waits = awaited(machine)
    for start in waits:
        path, w = [], start
        while w in waits and w not in path:
            path.append(w)
            needed = [x for x in suppliers(machine, waits[w]) if x is not w]
            w = next((x for x in needed if x in waits), None)
        if w in path:
            ring = path[path.index(w) :]
            return [f"{a} waits for {b} at {name(waits[a])}" for a, b in zip(ring, [*ring[1:], ring[0]])]
    return []


def name(barrier) -> str:
    return getattr(barrier, "name", "") or (
        f"barrier {barrier.number}" if hasattr(barrier, "number") else "a barrier"
    )


def findings(machine) -> list[Diagnostic]:
    """Barriers that explain the deadlock by themselves: wrong bytes."""
    out = []
    for cta in machine.live:
        for barrier in cta.barriers.values():
            if barrier.waiters and barrier.pending == 0 and barrier.tx:
                if barrier.tx > 0:
                    what = f"{barrier.tx} of the bytes announced by expect_tx never come"
                else:
                    what = f"{-barrier.tx} more bytes have come than expect_tx announced"
                out.append(Diagnostic("barrier-tx", f"{barrier.name}: {what}; it is {barrier.state()}"))
    return out
