"""Logic and shifts: PTX ISA 9.7.8 (and, or, xor, not, cnot, lop3, shf, shl, shr) and prmt (9.7.9)."""

from __future__ import annotations

from softsm.engine import vec
from softsm.isa.registry import lowers, micro
from softsm.isa.typed import KIND, Modifiers, operands, signed16, src16, unary
from softsm.ptx.ast import Imm, Pair

for _t, _k in (("b32", "u"), ("b64", "q"), ("pred", "p")):
    micro(f"and.{_t}", f"{_k}={_k}{_k}", lambda a, b: a & b, hot=True)
    micro(f"or.{_t}", f"{_k}={_k}{_k}", lambda a, b: a | b, hot=True)
    micro(f"xor.{_t}", f"{_k}={_k}{_k}", lambda a, b: a ^ b, hot=True)
    micro(f"not.{_t}", f"{_k}={_k}", lambda a: ~a, hot=True)
    if _k != "p":
        micro(f"cnot.{_t}", f"{_k}={_k}", lambda a: vec.sel(a == 0, vec.as_vector(1, a.kind), 0))
micro("mov.pred", "p=p", lambda a: a, hot=True)
micro("mux.b32", "u=uuu", lambda a, b, c: (a & c) | (b & ~c))

micro("shl.b32", "u=uu", vec.shl, hot=True)
micro("shr.b32", "u=uu", vec.shr, hot=True)
micro("shr.s32", "i=iu", vec.sar, hot=True)
micro("shl.b64", "q=qu", vec.shl64, hot=True)
micro("shr.b64", "q=qu", vec.shr64, hot=True)
micro("shr.s64", "l=lu", vec.sar64, hot=True)
# Amounts known to be below the width, as literals mostly are.
micro("shl.in.b32", "u=uu", lambda a, b: a << b, hot=True)
micro("shr.in.b32", "u=uu", lambda a, b: a >> b, hot=True)
micro("shr.in.s32", "i=ii", lambda a, b: a >> b, hot=True)
micro("shl.in.b64", "q=qq", lambda a, b: a << b, hot=True)
micro("shr.in.b64", "q=qq", lambda a, b: a >> b, hot=True)
micro("shr.in.s64", "l=ll", lambda a, b: a >> b)
micro("shf.l", "u=uuu", lambda a, b, c: vec.tou(((vec.toq(b) << 32 | vec.toq(a)) << vec.toq(c & 63)) >> 32))
micro("shf.r", "u=uuu", lambda a, b, c: vec.tou((vec.toq(b) << 32 | vec.toq(a)) >> vec.toq(c & 63)))
micro("prmt.b32", "u=uuu", vec.prmt, hot=True)
micro("prmt.5410", "u=uu", lambda a, b: (a & 0xFFFF) | (b << 16), hot=True)
micro("prmt.7632", "u=uu", lambda a, b: (a >> 16) | (b & 0xFFFF0000), hot=True)
# Entry b & 3 of a table of four 16-bit selectors.
micro("pick16", "u=qu", lambda a, b: vec.tou(a >> vec.toq((b & 3) << 4)) & 0xFFFF)

WIDTHS = ("b16", "b32", "b64", "pred")


def logical(asm, ins, count: int):
    t = ins.modifiers[-1] if ins.modifiers else ""
    Modifiers(asm, ins).done()
    if t not in WIDTHS:
        asm.refuse(ins, f"accepts {', '.join('.' + w for w in WIDTHS)}")
    d, *sources = operands(asm, ins, count + 1)
    rows = [src16(asm, x) if t == "b16" else asm.src(x, KIND[t]) for x in sources]
    return t, d, rows


@lowers("and", "or", "xor")
def and_or_xor(asm, ins):
    t, d, rows = logical(asm, ins, 2)
    asm.emit(f"{ins.opcode}.{'b32' if t == 'b16' else t}", asm.dst(d, KIND[t]), *rows)


@lowers("not", "cnot")
def invert(asm, ins):
    t, d, rows = logical(asm, ins, 1)
    if t == "pred" and ins.opcode == "cnot":
        asm.refuse(ins, "accepts .b16, .b32 and .b64")
    if t == "b16" and ins.opcode == "not":
        return asm.emit("xor.b32", asm.dst(d, "u"), rows[0], asm.const(0xFFFF, "u"))
    asm.emit(f"{ins.opcode}.{'b32' if t == 'b16' else t}", asm.dst(d, KIND[t]), *rows)


@lowers("shl", "shr")
def shift(asm, ins):
    t = ins.modifiers[-1] if ins.modifiers else ""
    Modifiers(asm, ins).done()
    left = ins.opcode == "shl"
    if t not in (("b16", "b32", "b64") if left else ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64")):
        asm.refuse(ins, "accepts .b16, .b32, .b64" + ("" if left else " and the .u and .s types"))
    d, a, b = operands(asm, ins, 3)
    amount, bits = asm.src(b, "u"), t[1:]
    if bits == "16":
        if t[0] == "s":
            row = unary(asm, "shr.s32", "i", signed16(asm, a), amount)
            return asm.emit("lo16", asm.dst(d, "u"), row)
        if left:
            return asm.emit("lo16", asm.dst(d, "u"), unary(asm, "shl.b32", "u", src16(asm, a), amount))
        return asm.emit("shr.b32", asm.dst(d, "u"), src16(asm, a), amount)
    kind = "q" if bits == "64" else "u"
    name = f"s{bits}" if t[0] == "s" else f"b{bits}"
    if isinstance(b, Imm) and 0 <= int(b.value) < int(bits):
        inside = asm.const(int(b.value), kind)
        return asm.emit(f"{ins.opcode}.in.{name}", asm.dst(d, kind), asm.src(a, kind), inside)
    asm.emit(f"{ins.opcode}.{name}", asm.dst(d, kind), asm.src(a, kind), amount)


@lowers("shf")
def funnel(asm, ins):
    m = Modifiers(asm, ins)
    side, mode = m.one_of("l", "r"), m.one_of("wrap", "clamp")
    m.done()
    if side is None or mode is None or ins.modifiers[-1] != "b32":
        asm.refuse(ins, "accepts .l or .r, .wrap or .clamp, and .b32")
    d, a, b, c = operands(asm, ins, 4)
    n = asm.src(c, "u")
    if mode == "wrap":
        n = unary(asm, "and.b32", "u", n, asm.const(31, "u"))
    else:
        n = unary(asm, "min.u32", "u", n, asm.const(32, "u"))
    asm.emit(f"shf.{side}", asm.dst(d, "u"), asm.src(a, "u"), asm.src(b, "u"), n)


# Two-input functions by truth table f(0,0), f(0,1), f(1,0), f(1,1) as bits 0..3, a being the first input.
def two_input(asm, table: int, a: int, b: int) -> int:
    ones = asm.const(0xFFFFFFFF, "u")
    simple = {0b0000: asm.const(0, "u"), 0b1111: ones, 0b1100: a, 0b1010: b}
    if table in simple:
        return simple[table]
    named = {0b1000: "and.b32", 0b1110: "or.b32", 0b0110: "xor.b32"}
    if table in named:
        return unary(asm, named[table], "u", a, b)
    if table in (0b0011, 0b0101):
        return unary(asm, "not.b32", "u", a if table == 0b0011 else b)
    if table ^ 0b1111 in named:
        return unary(asm, "not.b32", "u", unary(asm, named[table ^ 0b1111], "u", a, b))
    # The other functions invert one input: a & ~b, ~a & b, a | ~b, ~a | b.
    name, flip_a = {
        0b0100: ("and.b32", False),
        0b0010: ("and.b32", True),
        0b1101: ("or.b32", False),
        0b1011: ("or.b32", True),
    }[table]
    flipped = unary(asm, "not.b32", "u", a if flip_a else b)
    return unary(asm, name, "u", *((flipped, b) if flip_a else (a, flipped)))


@lowers("lop3")
def lop3(asm, ins):
    """Lowers any function of three bits: c selects one of two functions of a and b."""
    m = Modifiers(asm, ins)
    boolean = m.one_of("or", "and")
    m.done()
    if ins.modifiers[-1:] != ("b32",):
        asm.refuse(ins, "accepts .b32")
    d, a, b, c, lut, *q = operands(asm, ins, 6 if boolean else 5)
    if not isinstance(lut, Imm) or not 0 <= int(lut.value) <= 255:
        raise asm.error("immLut must be a literal from 0 to 255")
    table = int(lut.value)  # bit (a << 2 | b << 1 | c)
    without = sum((table >> (2 * i) & 1) << i for i in range(4))  # c = 0
    with_c = sum((table >> (2 * i + 1) & 1) << i for i in range(4))  # c = 1
    ra, rb, rc = (asm.src(x, "u") for x in (a, b, c))
    if without == with_c:
        row = two_input(asm, without, ra, rb)
    elif without ^ with_c == 0b1111:
        row = unary(asm, "xor.b32", "u", two_input(asm, without, ra, rb), rc)
    elif without == 0:
        row = unary(asm, "and.b32", "u", two_input(asm, with_c, ra, rb), rc)
    elif with_c == 0b1111:
        row = unary(asm, "or.b32", "u", two_input(asm, without, ra, rb), rc)
    else:
        row = unary(asm, "mux.b32", "u", two_input(asm, with_c, ra, rb), two_input(asm, without, ra, rb), rc)
    target = d.first if isinstance(d, Pair) else d
    if boolean:
        if not isinstance(d, Pair):
            raise asm.error("lop3 with a boolean operation writes d|p")
        some = unary(asm, "setp.ne.u32", "p", row, asm.const(0, "u"))
        condition = asm.src(q[0], "p")
        asm.emit("mov.b32", asm.dst(target, "u"), row)
        return asm.emit(f"{boolean}.pred", asm.dst(d.second, "p"), some, condition)
    asm.emit("mov.b32", asm.dst(target, "u"), row)


# prmt modes: the selectors for c & 3 = 0, 1, 2, 3.
PRMT_MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


@lowers("prmt")
def prmt(asm, ins):
    if ins.modifiers[:1] != ("b32",) or len(ins.modifiers) > 2:
        asm.refuse(ins, "accepts .b32 and one mode")
    mode = ins.modifiers[1] if len(ins.modifiers) == 2 else None
    if mode is not None and mode not in PRMT_MODES:
        asm.refuse(ins, f"unknown mode .{mode}; there are {', '.join('.' + m for m in PRMT_MODES)}")
    d, a, b, c = operands(asm, ins, 4)
    ra, rb = asm.src(a, "u"), asm.src(b, "u")
    if mode:
        table = sum(s << 16 * i for i, s in enumerate(PRMT_MODES[mode]))
        selector = unary(asm, "pick16", "u", asm.const(table, "q"), asm.src(c, "u"))
    elif isinstance(c, Imm) and int(c.value) & 0xFFFF in (0x5410, 0x7632):
        return asm.emit(f"prmt.{int(c.value) & 0xFFFF:04x}", asm.dst(d, "u"), ra, rb)
    else:
        selector = asm.src(c, "u")
    asm.emit("prmt.b32", asm.dst(d, "u"), ra, rb, selector)
