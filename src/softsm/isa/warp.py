"""Exchanges between lanes: shfl.sync, vote.sync, match.sync, redux.sync, elect.sync, activemask, bar.warp.sync.

A .sync instruction waits until every living lane of its membermask has arrived (the scheduler parks the early ones).
Lanes that execute it together may have different membermasks: each set of lanes then has a result of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from softsm.engine import lanes as ln
from softsm.engine import program as pg
from softsm.engine import vec
from softsm.engine.emitter import Emitter
from softsm.engine.program import SEEN
from softsm.isa.registry import lowers, micro
from softsm.isa.typed import unary
from softsm.ptx.ast import Imm, Instruction, Pair, Sink

SHUFFLES = ("up", "down", "bfly", "idx")
for _mode in SHUFFLES:
    micro(f"shfl.{_mode}", "u=uuu", getattr(vec, f"shfl_{_mode}"), exchange=True, hot=_mode in ("bfly", "idx"))
    micro(f"inside.{_mode}", "p=uu", getattr(vec, f"{_mode}_inside"))
for _step in (1, 2, 4, 8, 16):  # the steps of a reduction over the warp
    micro(f"shfl.bfly.{_step}", "u=u", partial(vec.xor_lanes, k=_step), exchange=True, hot=True)
micro("redux.max.f32", "f=fm", vec.warp_max, exchange=True, hot=True)
micro("redux.min.f32", "f=fm", vec.warp_min, exchange=True, hot=True)
micro("any.nan.f32", "p=fm", lambda a, m: vec.everywhere(vec.any_lane((a != a) & m)), exchange=True)
VOTES = {"any": ln.V_ANY, "all": ln.V_ALL, "uni": ln.V_UNI, "ballot": ln.V_BALLOT}
REDUCTIONS = {
    ("add", "u32"): ln.R_ADD,
    ("add", "s32"): ln.R_ADD,
    ("min", "u32"): ln.R_MIN,
    ("max", "u32"): ln.R_MAX,
    ("min", "s32"): ln.R_SMIN,
    ("max", "s32"): ln.R_SMAX,
    ("and", "b32"): ln.R_AND,
    ("or", "b32"): ln.R_OR,
    ("xor", "b32"): ln.R_XOR,
}


def converge(asm, ins, member) -> None:
    """Emits a wait for the lanes of the membermask (an operand)."""
    row = asm.src(member, "u")
    if asm.checking and not (isinstance(member, Imm) and int(member.value) & pg.ALL == pg.ALL):
        asm.macro(do_check_members, ins, aligned=False, row=row)
        asm.answered(pg.OP_MEMBERS, 0, row)
    asm.record(pg.OP_CONVERGE, 0, row, ins=ins)


def do_check_members(w, mask, o):
    """Checks that the membermask of a .sync instruction names every thread that executes it."""
    named = w.R[o.row]
    strangers = [lane for lane in range(32) if mask >> lane & 1 and not int(named[lane]) >> lane & 1]
    if strangers:
        text = f"the membermask {int(named[strangers[0]]):#010x} does not name the lanes that execute the instruction"
        w.machine.observer.misused(w, "divergent", text, "is not named", strangers[0])
    return SEEN


def do_check_sources(w, mask, o):
    """shfl.sync waits for living lanes only. What it takes from a lane that the membermask names, and that has exited,
    is undefined. Reductions do read lanes that the membermask does not name, and ignore what they get."""
    for lane in (i for i in range(32) if mask >> i & 1):
        b, clamp, segment = int(w.R[o.b, lane]) & 31, int(w.R[o.c, lane]) & 31, int(w.R[o.c, lane]) >> 8 & 31
        first, last = lane & segment, lane & segment | clamp & ~segment
        source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": first | b & ~segment}[o.mode]
        inside = source >= last if o.mode == "up" else source <= last
        if inside and int(w.R[o.row, lane]) & ~mask & 0xFFFFFFFF & 1 << source:
            text = f"what comes from lane {source} is undefined: the membermask names it, and it has exited"
            w.machine.observer.misused(w, "divergent", text, f"takes the value of lane {source}", lane)
            break
    return SEEN


@lowers("shfl")
def shfl(asm: Emitter, ins: Instruction):
    if ins.modifiers[0] != "sync" or ins.modifiers[1] not in SHUFFLES or ins.modifiers[2:] != ("b32",):
        asm.refuse(ins, "expected shfl.sync.{up,down,bfly,idx}.b32")
    target, a, b, c, member = ins.operands
    mode, inside = ins.modifiers[1], None
    converge(asm, ins, member)
    ra, rb, rc = (asm.src(x, "u") for x in (a, b, c))
    if asm.checking:
        row = asm.src(member, "u")
        asm.macro(do_check_sources, ins, aligned=False, mode=mode, b=rb, c=rc, row=row)
        asm.answered(pg.OP_SOURCES, 0, row)
    if isinstance(target, Pair):
        if not isinstance(target.second, Sink):
            inside = asm.temp("p")  # computed before the destination is written, which may be b or c
            asm.emit(f"inside.{mode}", inside, rb, rc)
        target, p = target.first, target.second
    whole = isinstance(b, Imm) and isinstance(c, Imm) and int(c.value) == 31  # one segment of 32 lanes
    if mode == "bfly" and whole and int(b.value) in (1, 2, 4, 8, 16):
        asm.emit(f"shfl.bfly.{int(b.value)}", asm.dst(target, "u"), ra)
    else:
        asm.emit(f"shfl.{mode}", asm.dst(target, "u"), ra, rb, rc)
    if inside is not None:
        asm.emit("mov.pred", asm.dst(p, "p"), inside)


@lowers("vote")
def vote(asm, ins):
    if ins.modifiers[0] != "sync" or ins.modifiers[1] not in VOTES:
        asm.refuse(ins, "expected vote.sync.{any,all,uni}.pred or vote.sync.ballot.b32")
    target, a, member = ins.operands
    mode = VOTES[ins.modifiers[1]]
    converge(asm, ins, member)
    rd = asm.dst(target, "u" if mode == ln.V_BALLOT else "p")
    asm.record(pg.OP_VOTE, rd, asm.src(a, "p"), asm.src(member, "u"), mode, ins=ins)


@lowers("activemask")
def activemask(asm, ins):
    asm.record(pg.OP_ACTIVEMASK, asm.dst(ins.operands[0], "u"), ins=ins)


@lowers("elect")
def elect(asm, ins):
    if ins.modifiers != ("sync",):
        asm.refuse(ins, "expected elect.sync")
    target, member = ins.operands
    pair = target if isinstance(target, Pair) else Pair(target, Sink())
    converge(asm, ins, member)
    rd = 0 if isinstance(pair.first, Sink) else asm.dst(pair.first, "u")
    p = 0 if isinstance(pair.second, Sink) else asm.dst(pair.second, "p")
    asm.record(pg.OP_ELECT, rd, p, asm.src(member, "u"), ins=ins)


@lowers("redux")
def redux(asm, ins):
    if ins.modifiers[0] != "sync":
        asm.refuse(ins, "expected redux.sync")
    target, a, member = ins.operands
    mods = ins.modifiers[1:]
    if mods[-1] == "f32":
        op, flags = mods[0], set(mods[1:-1])
        if op not in ("min", "max") or flags - {"abs", "NaN"}:
            asm.refuse(ins, "redux.sync on .f32 is .min or .max with .abs and .NaN")
        converge(asm, ins, member)
        if not isinstance(member, Imm):
            rows = {"dst": asm.dst(target, "f"), "a": asm.src(a, "f"), "member": asm.src(member, "u")}
            return asm.macro(do_redux, ins, op=op, flags=flags, **rows)
        row = asm.src(a, "f")
        if "abs" in flags:
            row = unary(asm, "abs.f32", "f", row)
        if "NaN" not in flags:
            return asm.emit(f"redux.{op}.f32", asm.dst(target, "f"), row)
        nan = unary(asm, "any.nan.f32", "p", row)
        best = unary(asm, f"redux.{op}.f32", "f", row)
        return asm.emit("selp.b32", asm.dst(target, "f"), asm.const(0x7FFFFFFF, "f"), best, nan)
    if mods not in REDUCTIONS:
        asm.refuse(ins, f"redux.sync.{'.'.join(mods)} is not defined")
    converge(asm, ins, member)
    member_row = asm.src(member, "u")
    asm.record(pg.OP_REDUX, asm.dst(target, "u"), asm.src(a, "u"), REDUCTIONS[mods], member_row, ins=ins)


@lowers("match")
def match(asm, ins):
    if len(ins.modifiers) != 3 or ins.modifiers[1] != "sync" or ins.modifiers[0] not in ("any", "all"):
        asm.refuse(ins, "expected match.{any,all}.sync.{b32,b64}")
    target, a, member = ins.operands
    wide = ins.modifiers[2] == "b64"
    pair = target if isinstance(target, Pair) else Pair(target, Sink())
    converge(asm, ins, member)
    p = 0 if isinstance(pair.second, Sink) else asm.dst(pair.second, "p")
    asm.macro(
        do_match,
        ins,
        dst=asm.dst(pair.first, "u"),
        p=p,
        a=asm.src(a, "q" if wide else "u"),
        member=asm.src(member, "u"),
        wide=wide,
        all=ins.modifiers[0] == "all",
    )


def together(w, mask: int, row: int) -> Iterator[tuple[int, list[int]]]:
    """Yields the lanes that act together, as a mask and as a list: each names the others in its membermask."""
    while mask:
        first = (mask & -mask).bit_length() - 1
        group = int(w.R[row, first]) & mask | 1 << first
        yield group, [lane for lane in range(32) if group >> lane & 1]
        mask &= ~group


def do_redux(w, mask, o):
    values = w.R[o.a].view(np.float32)
    values = np.abs(values) if "abs" in o.flags else values.copy()
    lossy, strict = (np.fmin, np.minimum) if o.op == "min" else (np.fmax, np.maximum)
    choose = (strict if "NaN" in o.flags else lossy).reduce
    for _, on in together(w, mask, o.member):
        best = choose(values[on])
        w.R[o.dst, on] = 0x7FFFFFFF if np.isnan(best) else np.float32(best).view(np.uint32)


def do_match(w, mask, o):
    values = (w.Q if o.wide else w.R)[o.a].copy()
    for group, on in together(w, mask, o.member):
        if o.all:
            same = len({int(values[i]) for i in on}) == 1
            w.R[o.dst, on] = group if same else 0
            if o.p:
                w.P[o.p] = (int(w.P[o.p]) & ~group) | (group if same else 0)
            continue
        for i in on:
            w.R[o.dst, i] = sum(1 << j for j in on if values[j] == values[i])
