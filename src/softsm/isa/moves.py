"""mov in all its forms, and cvta: PTX ISA 9.7.9."""

from __future__ import annotations

from softsm.engine import program as pg
from softsm.engine import vec
from softsm.engine.program import SEEN
from softsm.isa.registry import lowers, micro
from softsm.isa.typed import KIND, operands, src16, unary
from softsm.ptx.ast import Sink, Special, Vector

micro("pack.b64", "q=uu", lambda a, b: vec.toq(a) | (vec.toq(b) << 32), hot=True)
micro("hi32", "u=q", lambda a: vec.tou(a >> 32), hot=True)

TYPES = ("pred", "b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64", "b128")


CLOCKS = ("clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo", "globaltimer_hi")


@lowers("mov")
def mov(asm, ins):
    if len(ins.modifiers) != 1 or ins.modifiers[0] not in TYPES:
        asm.refuse(ins, f"accepts one of {', '.join('.' + t for t in TYPES)}")
    t = ins.modifiers[0]
    d, a = operands(asm, ins, 2)
    if isinstance(a, Special) and a.name.lstrip("%") in CLOCKS:
        name = a.name.lstrip("%")
        wide = asm.type_of(a) == "u64"
        asm.src(a, "q" if wide else "u")
        return asm.macro(do_clock, ins, dst=asm.dst(d, "q" if wide else "u"), wide=wide, high=name.endswith("_hi"))
    if isinstance(a, Vector) and len(a.items) > 1:
        return pack(asm, ins, t, d, a.items)
    if isinstance(d, Vector) and len(d.items) > 1:
        return unpack(asm, ins, t, d.items, a)
    if t == "b128":
        target, row = asm.dst(d, "q"), asm.src(a, "q")
        asm.emit("mov.b64", target, row)
        return asm.emit("mov.b64", target + 1, row + 1)
    if t.endswith("16"):
        return asm.emit("mov.b32", asm.dst(d, "u"), src16(asm, a))
    name = "mov.pred" if t == "pred" else "mov.b64" if t.endswith("64") else "mov.b32"
    asm.emit(name, asm.dst(d, KIND[t]), asm.src(a, KIND[t]))


def do_clock(w, mask, o):
    """Counts a cycle, and a nanosecond, per warp instruction of the whole launch, so that runs can be repeated. Every
    reading differs from the one before. A loop that reads the clock is not a deadlock, because it may wait for time to
    pass; but the clock may only limit how long the loop polls, so it keeps nothing in flight."""
    m = w.machine
    m.clock = max(m.clock + 1, m.steps)
    on = [lane for lane in range(32) if mask >> lane & 1]
    if o.wide:
        w.Q[o.dst, on] = m.clock
    else:
        w.R[o.dst, on] = (m.clock >> 32 if o.high else m.clock) & pg.ALL
    return SEEN


def element_bits(asm, ins, t: str, count: int) -> int:
    """Returns the width of the parts; the type must be untyped bits."""
    if t[0] != "b" or count not in (2, 4) or (t, count) in (("b128", 4), ("b16", 4)):
        asm.refuse(ins, f"a .{t} has no {count} parts")
    return int(t[1:]) // count


def pack(asm, ins, t: str, d, items) -> None:
    bits = element_bits(asm, ins, t, len(items))
    if t == "b128":
        target = asm.dst(d, "q")
        for k, x in enumerate(items):
            asm.emit("mov.b64", target + k, asm.src(x, "q"))
        return
    rows = [src16(asm, x) if bits == 16 else asm.src(x, "u") for x in items]
    if bits == 8:
        rows = [unary(asm, "lo8", "u", r) for r in rows]
        pack, last = "pack.b8", "pack.b32"
    elif bits == 16:
        pack, last = "pack.b32", "pack.b64"
    else:
        return asm.emit("pack.b64", asm.dst(d, "q"), *rows)
    if len(rows) == 2:
        return asm.emit(pack, asm.dst(d, "u"), *rows)
    halves = [unary(asm, pack, "u", *rows[k : k + 2]) for k in (0, 2)]
    asm.emit(last, asm.dst(d, "q" if last == "pack.b64" else "u"), *halves)


def unpack(asm, ins, t: str, items, a) -> None:
    bits = element_bits(asm, ins, t, len(items))
    if t == "b128":
        row = asm.src(a, "q")
        for k, x in enumerate(items):
            if not isinstance(x, Sink):
                asm.emit("mov.b64", asm.dst(x, "q"), row + k)
        return
    wide = t == "b64"
    row = asm.src(a, "q" if wide else "u")
    for k, x in enumerate(items):
        if isinstance(x, Sink):
            continue
        target = asm.dst(x, "u")
        if bits == 32:
            asm.emit("hi32" if k else "cvt.u32.u64", target, row)
        elif bits == 16:
            part = unary(asm, "hi32" if k >= 2 else "cvt.u32.u64", "u", row) if wide else row
            asm.emit("hi16" if k % 2 else "lo16", target, part)
        else:
            part = unary(asm, "shr.b32", "u", row, asm.const(8 * k, "u")) if k else row
            asm.emit("lo8", target, part)


# The generic address at which each state space begins; None where the space's addresses are generic addresses.
# Parameters begin where the launch put them.
SPACES = {
    "global": None,
    "const": None,
    "param": None,
    "local": pg.LOCAL_WINDOW,
    "shared": pg.SHARED_WINDOW,
    "shared::cta": pg.SHARED_WINDOW,
    "shared::cluster": pg.SHARED_WINDOW,
    "param::entry": None,
}


@lowers("cvta")
def cvta(asm, ins):
    parts = list(ins.modifiers)
    to = parts[:1] == ["to"]
    parts = parts[1:] if to else parts
    if len(parts) != 2 or parts[0] not in SPACES or parts[1] != "u64":
        asm.refuse(ins, f"accepts {{.to}} one of {', '.join('.' + s for s in SPACES)}, and .u64")
    d, a = operands(asm, ins, 2)
    row, window = asm.src(a, "q"), SPACES[parts[0]]
    if parts[0].startswith("param"):
        return asm.emit("sub.u64" if to else "add.u64", asm.dst(d, "q"), row, asm.param_base())
    if window is None:
        return asm.emit("mov.b64", asm.dst(d, "q"), row)
    asm.emit("sub.u64" if to else "add.u64", asm.dst(d, "q"), row, asm.const(window, "q"))
