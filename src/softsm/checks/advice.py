"""Advice on how to wait for an asynchronous operation, by its kind and what its issuer has already done."""

from __future__ import annotations

from collections.abc import Iterable

from softsm.engine.in_flight import AsyncOp, Groups, InFlight
from softsm.engine.warps import Cta
from softsm.ptx.roles import place_of

TENSOR = {"tcgen05.mma", "tcgen05.cp", "tcgen05.shift"}
STORES = {"TMA store (read)", "TMA reduction (read)", "bulk store (read)", "bulk reduction (read)"}
WRITES = {kind.removesuffix(" (read)") for kind in STORES}
NOT_BEHIND = (
    "who issued it has waited for it, but this access is not ordered after that wait: put a barrier, or an mbarrier "
    "arrive and wait, between the two; the wait stands before the arrive that announces the operation"
)


def before_the_end(op: AsyncOp) -> str:
    if op.kind in STORES:
        return "cp.async.bulk.commit_group, and cp.async.bulk.wait_group.read 0 before the exit"
    if op.kind in TENSOR:
        return "tcgen05.commit, and a wait for its mbarrier before the exit"
    return "wait for the mbarrier that it signals before the exit"


def before_the_access(op: AsyncOp, waited: bool, others: Iterable[AsyncOp], cta: Cta | None) -> str:
    """Returns advice to a CTA. waited: whether the issuer knows that the operation is complete. others: operations that
    may follow it."""
    if mine := named(op, cta):
        return (
            f"wait for the {op.kind} to complete (it signals {mine[0]}) before this access; a wait for the parity "
            "of an earlier phase of that mbarrier is not enough"
        )
    if waited:
        return NOT_BEHIND
    return f"wait for the {op.kind} to complete before this access: {by_kind(op, others)}"


def instead(op: AsyncOp, others: Iterable[AsyncOp]) -> str:
    """Returns more advice for a read of what the operation writes, if its mbarrier has completed a phase before, or
    its warp
    has waited for an earlier group: the read may have been meant for what that phase or group brought."""
    if op.kind == "cp.async" and turned(op, others):
        return "; where this was to read what was there before, put a barrier between it and the cp.async"
    if op.kind not in TENSOR and not named(op):
        return ""
    signals = op.signals or [b for x in commits_of(op, others) for b in x.signals]
    if not any(getattr(b, "phase", 0) for b in signals):
        return ""
    return f"; where this was to read what was there before, let the {op.kind} wait until it has been read"


def turned(op: AsyncOp, others: Iterable[AsyncOp]) -> bool:
    """Returns whether the warp of a cp.async has waited for an earlier one."""
    mine = op.warp.in_flight or InFlight()
    pending = {x for part in (mine.cp_async.closed, mine.cp_async.open) for _, ops in part for x in ops}
    return any(x.kind == op.kind and x.warp is op.warp and x.number < op.number and x not in pending for x in others)


def too_early(op: AsyncOp, cta: Cta | None) -> str:
    """Returns advice for a write over bytes that a CTA read before anything wrote them: the read was meant for this."""
    if mine := named(op, cta):
        return f"the read came before anything was written; to get what this one brings, let it wait for {mine[0]}"
    wait = "a wait for it" if op.kind != "cp.async" else "cp.async.wait_group in the threads that copy"
    return f"the read came before anything was written: put {wait}, and a barrier behind it, before the read"


def first_phase(op: AsyncOp) -> bool:
    """Returns whether the operation arrives at an mbarrier that has not completed a phase: nothing was there to read
    before.
    """
    return bool(named(op)) and not any(getattr(b, "phase", 0) for b in op.signals)


def commits_of(op: AsyncOp, others: Iterable[AsyncOp]) -> list[AsyncOp]:
    """Returns the first tcgen05.commit behind the operation, if there is one."""
    commits = [x for x in others if x.kind == "tcgen05.commit" and x.warp is op.warp and x.number > op.number]
    return sorted(commits, key=lambda x: x.number)[:1]


def by_kind(op: AsyncOp, others: Iterable[AsyncOp]) -> str:
    mine = op.warp.in_flight or InFlight()
    if op.kind == "cp.async":
        found = in_groups(op, mine.cp_async, "cp.async.commit_group", "cp.async.wait_group")
        names = {x.name for x in op.warp.cta.program.instructions}
        if "cp.async.commit_group" in names:
            return found
        return f"{found}; or let cp.async.mbarrier.arrive.noinc behind it arrive at an mbarrier, and wait for that"
    if op.kind in STORES or op.kind in WRITES:
        wait = "cp.async.bulk.wait_group" + (".read" if op.kind in STORES else "")
        return in_groups(op, mine.bulk, "cp.async.bulk.commit_group", wait)
    if op.kind in ("tcgen05.ld", "tcgen05.st"):
        return f"tcgen05.wait::{op.kind[-2:]} in the warp that issued it, and then a barrier or an mbarrier arrive"
    if op.kind == "wgmma":
        groups = mine.wgmma.group.batches if mine.wgmma is not None else {}
        number = next((n for n, batch in groups.items() if op in (batch.ops or ())), None)
        newer = 0 if number is None or mine.wgmma is None else mine.wgmma.committed - 1 - number
        return f"wgmma.wait_group {or_less(newer)}, after the product"
    if op.kind in TENSOR:
        commits = commits_of(op, others)
        if not commits:
            return "its thread has no tcgen05.commit after it so far; commit it, and wait for that mbarrier"
        first = commits[0]
        loc = place_of(first.instruction)
        place = f"{loc.file}:{loc.line}" if loc else f"PTX line {first.line}"
        told = f"the first tcgen05.commit after it ({place}) arrives at {named(first)[0]}"
        if len(first.signals) > 1:
            return f"{told} and in other CTAs; wait there, with a count of mbarrier.init for the commits of all CTAs"
        return f"{told}; wait for that"
    return "by its mbarrier, or a wait for its group"


def named(op: AsyncOp, cta: Cta | None = None) -> list[str]:
    """Returns the mbarriers at which its completion arrives, those of the CTA first."""
    ordered = sorted(op.signals, key=lambda b: getattr(b, "home", None) is not cta)
    return [name for name in (getattr(b, "name", "") for b in ordered) if name]


def in_groups(op: AsyncOp, groups: Groups, commit: str, wait: str) -> str:
    """Returns advice on group waits: a wait with operand n leaves the n newest groups of the thread pending."""
    if any(op in ops for _, ops in groups.open):
        return f"no {commit} follows it so far; commit it, and then {wait} 0"
    at = next((i for i, (_, ops) in enumerate(groups.closed) if op in ops), None)
    if at is None:
        return f"{commit}, then {wait} 0"
    own = groups.closed[at][0]
    newer = sum(bool(those & own) for those, _ in groups.closed[at + 1 :])
    return f"{wait} {or_less(newer)} in the thread that issued it, which has committed {newer} newer"


def or_less(number: int) -> str:
    return f"{number} or less" if number else "0"
