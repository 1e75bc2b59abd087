"""wmma: load, mma and store, the products of `nvcuda::wmma`, as loads, products and stores of mma.sync.

PTX leaves open which thread holds which element. Here fragments are those of mma.sync (isa/fragments.py): the larger
side of the product in tiles of 16 rows, the other one in tiles of 8 columns. Where A has 8 rows, sides are exchanged.
An f16 fragment of A or B has always 8 registers; those that it does not need repeat the others.
"""

from __future__ import annotations

from typing import NamedTuple

from softsm.engine import lanes as ln
from softsm.engine.emitter import Emitter
from softsm.isa import fragments, memory, mma
from softsm.isa.registry import lowers
from softsm.isa.tensor_memory import finish, take
from softsm.ptx.ast import Address, Instruction, Vector

SIZES = {"m16n16k16": (16, 16, 16), "m32n8k16": (32, 8, 16), "m8n32k16": (8, 32, 16)}
# type of A and B -> shapes
SHAPES = {
    **dict.fromkeys(("f16", "bf16", "s8", "u8"), SIZES),
    "tf32": {"m16n16k8": (16, 16, 8)},
    "f64": {"m8n8k4": (8, 8, 4)},
}
BYTES = {"f16": 2, "bf16": 2, "s8": 1, "u8": 1, "tf32": 4, "f64": 8, "f32": 4, "s32": 4}
RESULTS = {"f16": ("f16", "f32"), "bf16": ("f32",), "tf32": ("f32",), "f64": ("f64",), "s8": ("s32",), "u8": ("s32",)}


class Fragment(NamedTuple):
    """How registers hold a matrix. Thread t has g = t/4 and q = t%4; a register's elements are at (i + g, j + width q)
    and the places after it, in the order of `places`."""

    places: list[tuple[int, int]]
    across: bool  # g counts columns, not rows
    type: str
    width: int  # elements that lie next to each other
    packed: int  # elements packed in one register
    registers: int


def fragment(part: str, m: int, n: int, k: int, name: str) -> Fragment:
    """Returns the fragment. part: a, b, c or d."""
    left = "b" if m < n else "a"
    rows, columns = {"a": (m, k), "b": (n, k)}.get(part, (max(m, n), min(m, n)))
    packed = fragments.PER_REGISTER.get(name, 1)
    tall = 16 if part in ("c", "d", left) and max(m, n) > 8 else 8
    if part in ("c", "d"):
        packed = 2 if name == "f16" else 1
        tiles = [(i, j) for i in range(0, rows, tall) for j in range(0, columns, 8)]
        places = [(i + h, j + e) for i, j in tiles for h in range(0, tall, 8) for e in range(0, 2, packed)]
        return Fragment(places, left == "b", name, 2, packed, len(places))
    places = [
        (i + h, j) for i in range(0, rows, tall) for j in range(0, columns, 4 * packed) for h in range(0, tall, 8)
    ]
    registers = 8 if name == "f16" else len(places)
    return Fragment(places, part == "b", name, packed, packed, registers)


def moved(asm: Emitter, ins: Instruction, operation: str) -> None:
    """Lowers a load or store: `.load.a.sync.aligned.row.m16n16k16.shared.f16 {registers}, [address], stride`."""
    modifiers = list(ins.modifiers)
    take(asm, ins, modifiers, operation)
    part = take(asm, ins, modifiers, *(("a", "b", "c") if operation == "load" else ("d",)))
    layout = take(asm, ins, modifiers, "row", "col")
    space = take(asm, ins, modifiers, "global", "shared", "shared::cta", "shared::cluster", optional=True)
    names = SHAPES if part in ("a", "b") else ("f16", "f32", "s32", "f64")
    name = take(asm, ins, modifiers, *names)
    shapes = SHAPES[name] if part in ("a", "b") else {k: v for x in SHAPES.values() for k, v in x.items()}
    m, n, k = shapes[take(asm, ins, modifiers, *shapes)]
    if part in ("c", "d") and (name == "f64") != (k == 4):
        asm.refuse(ins, "no such combination of shape and type")
    finish(asm, ins, modifiers, range(2, 4), collective=True)
    held = fragment(part, m, n, k, name)
    listed, place = ins.operands[:2] if operation == "load" else ins.operands[1::-1]
    if len(listed.items if isinstance(listed, Vector) else (listed,)) != held.registers:
        asm.refuse(ins, f"this fragment has {held.registers} registers")
    rows = asm.vector_rows(listed, "d" if name == "f64" else "u", write=operation == "load")
    along = {"a": (k, m), "b": (n, k)}.get(part, (n, m))[
        layout == "col"
    ]  # elements from one row, or column, to the next
    Mover(asm, ins, memory.SPACES.get(space, ln.GENERIC), held, (layout == "row") != held.across, place, along).move(
        rows, operation == "load"
    )


class Mover:
    """Emits the accesses of a fragment. Both strides are rows of 64 bits, or of 32 for shared memory."""

    def __init__(self, asm, ins, space: int, held: Fragment, beside: bool, place: Address, along: int):
        self.asm, self.ins, self.space, self.held, self.beside = asm, ins, space, held, beside
        self.kind = "u" if space == ln.SHARED else "q"
        self.mad = "mad.lo.u32" if self.kind == "u" else "mad.lo.u64"
        self.size = BYTES[held.type]
        wide = self.kind == "q"
        stride = asm.src(ins.operands[2], "u") if len(ins.operands) == 3 else asm.const(along, "u")
        lane, g, q = asm.special("laneid", "R"), asm.temp("u"), asm.temp("u")
        asm.emit("shr.b32", g, lane, asm.const(2, "u"))
        asm.emit("and.b32", q, lane, asm.const(3, "u"))
        asm.emit("mul.lo.u32", q, q, asm.const(held.width, "u"))
        self.stride = asm.temp(self.kind)  # stride in bytes
        asm.emit("mul.wide.u32" if wide else "mul.lo.u32", self.stride, stride, asm.const(self.size, "u"))
        if wide:
            narrow, (g, q) = (g, q), (asm.temp("q"), asm.temp("q"))
            for row, source in zip((g, q), narrow):
                asm.emit("cvt.u64.u32", row, source)
        first, self.offset = memory.address_of(asm, place, space)
        self.base = asm.temp(self.kind)
        near, far = (q, g) if beside else (g, q)
        asm.emit(self.mad, self.base, far, self.stride, first)
        asm.emit(self.mad, self.base, near, asm.const(self.size, self.kind), self.base)

    def at(self, i: int, j: int) -> tuple[int, int]:
        """Returns row and offset of the address of an element of thread 0."""
        near, far = (j, i) if self.beside else (i, j)
        row = self.base
        if far:
            row = self.asm.temp(self.kind)
            self.asm.emit(self.mad, row, self.asm.const(far, self.kind), self.stride, self.base)
        return row, self.offset + near * self.size

    def access(self, operation: dict, row: int, i: int, j: int, nbytes: int) -> None:
        base, offset = self.at(i, j)
        how = memory.format_of(f"b{8 * nbytes}", 1, nbytes == 8)
        self.asm.record(operation[self.space], self.asm.pooled([row]), base, offset, how, 0, ins=self.ins)

    def move(self, rows: list[int], load: bool) -> None:
        asm, held = self.asm, self.held
        operation = memory.LOAD_OP if load else memory.STORE_OP
        for row, (i, j) in zip(rows, held.places):
            if held.packed == 1 or self.beside:
                self.access(operation, row, i, j, self.size * held.packed)
                continue
            parts = [asm.temp("u") for _ in range(held.packed)]
            bits = [asm.const(8 * self.size * e, "u") for e in range(held.packed)]
            for e, part in enumerate(parts):
                if not load:
                    asm.emit("shr.b32", part, row, bits[e])
                self.access(operation, part, i, j + e, self.size)
            if load:
                for e, part in enumerate(parts[1:], 1):
                    asm.emit("shl.b32", part, part, bits[e])
                    asm.emit("or.b32", parts[0], parts[0], part)
                asm.emit("mov.b32", row, parts[0])
        for e in range(len(held.places), len(rows)):
            asm.emit("mov.b32", rows[e], rows[e % len(held.places)])


@lowers("wmma")
def lower(asm: Emitter, ins: Instruction) -> None:
    if ins.modifiers[0] in ("load", "store"):
        return moved(asm, ins, ins.modifiers[0])
    modifiers = list(ins.modifiers)
    take(asm, ins, modifiers, "mma")
    for name in ("sync", "aligned"):
        take(asm, ins, modifiers, name)
    saturate = bool(take(asm, ins, modifiers, "satfinite", optional=True))
    take(asm, ins, modifiers, "rn", optional=True)
    types = [x for x in modifiers if x in BYTES]
    d, a, b, c = types if len(types) == 4 else (types[0], "f16", "f16", types[1]) if len(types) == 2 else [""] * 4
    if a not in SHAPES or a != b or c not in RESULTS[a] or d not in RESULTS[a] or (saturate and d != "s32"):
        asm.refuse(ins, f"no such combination of types, of {', '.join(SHAPES)}")
    m, n, k = SHAPES[a][take(asm, ins, modifiers, *SHAPES[a])]
    if len(ins.operands) != 4 or len(modifiers) != 2 + len(types) or not {*modifiers[:2]} <= {"row", "col"}:
        asm.refuse(ins, "expected .layout.layout.shape.types and the operands D, A, B and C")
    kind = "d" if a == "f64" else "u"
    rows = {}
    for part, name, operand in zip("dabc", (d, a, b, c), ins.operands):
        rows[part] = asm.vector_rows(operand, kind, write=part == "d")
        held = fragment(part, m, n, k, name)
        if len(rows[part]) != held.registers:
            asm.refuse(ins, f"{part.upper()} has {held.registers} registers")
        rows[part] = rows[part][: len(held.places)]
    given = rows["d"]
    if rows["d"] != rows["c"] or {*given} & {
        *rows["a"],
        *rows["b"],
    }:  # a tile's result may not replace what another one reads
        rows["d"] = [asm.temp(kind) for _ in given]
    left, right = ("b", "a") if m < n else ("a", "b")
    tall = 16 if max(m, n) > 8 else 8
    tiles = max(m, n) // tall, min(m, n) // 8
    for t in range(tiles[0]):
        for u in range(tiles[1]):
            one = {"a": cut(rows[left], tiles[0], t), "b": cut(rows[right], tiles[1], u)}
            one |= {x: cut(rows[x], tiles[0] * tiles[1], t * tiles[1] + u) for x in "cd"}
            mma.multiply(asm, ins, tall, (d, a, b, c), [one[x] for x in "dabc"], "", saturate)
    for to, made in zip(given, rows["d"]):
        if to != made:
            asm.emit("mov.b64" if kind == "d" else "mov.b32", to, made)


def cut(rows: list[int], parts: int, which: int) -> list[int]:
    size = len(rows) // parts
    return rows[which * size : (which + 1) * size]
