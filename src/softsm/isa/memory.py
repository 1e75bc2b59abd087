"""Loads and stores: ld, ldu, st, discard.

The interpreter does the plain case itself (aligned, in the CTA's own shared memory or a known global allocation);
isa/slow_memory.py has the rest.
"""

from __future__ import annotations

import numpy as np

from softsm.engine import lanes as ln
from softsm.engine import program as pg
from softsm.engine.emitter import Emitter
from softsm.engine.program import SEEN
from softsm.isa import bulk_copy
from softsm.isa.operands import lanes, located
from softsm.isa.registry import lowers
from softsm.isa.typed import needs_target
from softsm.ptx.ast import Address, Imm, Instruction, Sink, Symbol, Vector
from softsm.ptx.declarations import TYPE_BYTES

SPACES = {
    "global": ln.GLOBAL,
    "const": ln.GLOBAL,
    "shared": ln.SHARED,
    "shared::cta": ln.SHARED,
    "shared::cluster": ln.SHARED,
    "local": ln.LOCAL,
    "param": ln.GLOBAL,
    "param::entry": ln.GLOBAL,
    "param::func": ln.LOCAL,
}
LOAD_OP = {ln.GLOBAL: pg.OP_LDG, ln.SHARED: pg.OP_LDS, ln.GENERIC: pg.OP_LD, ln.LOCAL: pg.OP_LDL}
STORE_OP = {ln.GLOBAL: pg.OP_STG, ln.SHARED: pg.OP_STS, ln.GENERIC: pg.OP_ST, ln.LOCAL: pg.OP_STL}
# log2 of the size in bytes of the types that ld and st accept
LOG = {
    t: TYPE_BYTES[t].bit_length() - 1
    for t in "b8 u8 s8 b16 u16 s16 f16 bf16 b32 u32 s32 f32 f16x2 bf16x2 b64 u64 s64 f64".split()
}
DISCARDED = 128  # bytes
VECTOR = {"v2": 2, "v4": 4, "v8": 8}
ORDERING = set("weak volatile relaxed acquire release acq_rel cta cluster gpu sys mmio unified".split())
CACHE = {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc"}


STRONG = {"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"}  # such accesses do not race with each other


def is_hint(modifier: str) -> bool:
    """Recognises cache operators, eviction priorities and prefetch sizes, hints that change no value."""
    return modifier in CACHE or modifier in ORDERING or modifier.startswith(("L1::", "L2::"))


def split(asm: Emitter, ins: Instruction):
    """Returns (space, elements, element type) of a load or store; rejects unknown modifiers."""
    space, count, type_ = ln.GENERIC, 1, None
    named = ""
    for m in ins.modifiers:
        if m in SPACES:
            space, named = SPACES[m], m
        elif m in VECTOR:
            count = VECTOR[m]
        elif m in LOG or m == "b128":
            type_ = m
        elif not is_hint(m):
            asm.refuse(ins, f"unknown modifier .{m}")
    if type_ is None:
        asm.refuse(ins, "no type given")
    nbytes = count * (16 if type_ == "b128" else 1 << LOG[type_])
    if nbytes > 16 and (nbytes > 32 or type_ == "b128" or named not in ("", "global")):
        asm.refuse(ins, f"{nbytes} bytes at once; at most 16, or 32 of global memory")
    if nbytes > 16:
        needs_target(asm, ins, 100)
    return space, named, count, type_


def rows_of(asm, operand, count: int, type_: str, *, write: bool) -> tuple[list[int], bool]:
    """Returns the register rows of a (vector) operand and whether they are 64-bit rows."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise asm.error(f"expected {count} registers, got {len(items)}")
    if type_ == "b128":
        return [r + i for x in items for r in [asm.register(x, "Q")] for i in (0, 1)], True
    rows, wide = [], False
    for x in items:
        t = asm.type_of(x)
        if t in ("b64", "u64", "s64", "f64") or LOG[type_] == 3:
            wide = True
    kind = {"f32": "f", "f64": "d"}.get(type_, "q" if wide else "u")
    for x in items:
        if write:
            rows.append(-1 if isinstance(x, Sink) else asm.dst(x, kind))
        else:
            rows.append(asm.src(x, kind))
    return rows, wide


def format_of(type_: str, count: int, wide: bool) -> int:
    if type_ == "b128":
        return 3 | 2 * count << 4 | ln.WIDE
    return LOG[type_] | count << 4 | (ln.SIGNED if type_[0] == "s" else 0) | (ln.WIDE if wide else 0)


def address_of(asm, operand, space: int) -> tuple[int, int]:
    """Returns (row, offset). Shared addresses are 32-bit rows; a 64-bit register that holds one is narrowed."""
    bank, row, offset = asm.address(operand)
    want = "R" if space == ln.SHARED else "Q"
    if bank != want:
        narrow = asm.temp("u" if want == "R" else "q")
        asm.emit("cvt.u32.u64" if want == "R" else "cvt.u64.u32", narrow, row, guard=None)
        row = narrow
    return row, offset


def parameter_load(asm, ins, rows, wide, type_) -> bool:
    """Lowers `ld.param [entry parameter + constant]` to a move: the value is known at launch, so it is a row."""
    operand = ins.operands[1]
    base = operand.base
    if not (isinstance(base, Symbol) and base.name in asm.param_offsets and type_ != "b128"):
        return False
    size = 1 << LOG[type_]
    for i, row in enumerate(rows):
        offset = asm.param_offsets[base.name] + base.offset + operand.offset + i * size
        if offset + size > asm.param_bytes:
            raise asm.error(f"parameter bytes {offset} to {offset + size} are outside the {asm.param_bytes} there are")
        key = (offset, size, type_[0] == "s", wide)
        if key not in asm.parameters:
            asm.parameters[key] = asm.fresh("Q" if wide else "R")
        asm.emit("mov.b64" if wide else "mov.b32", row, asm.parameters[key])
    return True


@lowers("ld", "ldu")
def ld(asm, ins):
    space, named, count, type_ = split(asm, ins)
    address: Address = ins.operands[1]
    rows, wide = rows_of(asm, ins.operands[0], count, type_, write=True)
    if named.startswith("param"):
        if parameter_load(asm, ins, rows, wide, type_):
            return
        if isinstance(address.base, Symbol) and address.base.name in asm.local_variables:
            space = ln.LOCAL
    row, offset = address_of(asm, address, space)
    if named.startswith("param") and space != ln.LOCAL and not isinstance(address.base, Symbol):
        total = asm.temp("q")  # a register holds the place within the param space
        asm.emit("add.u64", total, row, asm.param_base(), guard=None)
        row = total
    if asm.checking and "nc" in ins.modifiers:
        asm.macro(do_read_only, ins, aligned=False, row=row, offset=offset)
    strong = not STRONG.isdisjoint(ins.modifiers)
    asm.record(LOAD_OP[space], asm.pooled(rows), row, offset, format_of(type_, count, wide), int(strong), ins=ins)
    if strong:
        synchronises(asm, ins, space, row, offset, read=True)


def do_read_only(w, mask, o):
    lanes = [lane for lane in range(32) if mask >> lane & 1]
    w.machine.observer.read_only(w, lanes, w.Q[o.row, lanes].astype(np.int64) + o.offset)
    return SEEN


@lowers("st")
def st(asm, ins):
    if ins.modifiers[:1] == ("async",):
        return bulk_copy.store_async(asm, ins, ins.modifiers[1:], None)
    if ins.modifiers[:1] == ("bulk",):
        return bulk_copy.store_bulk(asm, ins, ins.modifiers[1:])
    space, named, count, type_ = split(asm, ins)
    if named.startswith("param") or named == "const":
        if not (isinstance(ins.operands[0].base, Symbol) and ins.operands[0].base.name in asm.local_variables):
            asm.refuse(ins, "kernel parameters and constants cannot be written")
        space = ln.LOCAL
    rows, wide = rows_of(asm, ins.operands[1], count, type_, write=False)
    row, offset = address_of(asm, ins.operands[0], space)
    strong = not STRONG.isdisjoint(ins.modifiers)
    if strong:
        synchronises(asm, ins, space, row, offset, write=True)
    asm.record(STORE_OP[space], asm.pooled(rows), row, offset, format_of(type_, count, wide), int(strong), ins=ins)


@lowers("discard")
def discard(asm, ins):
    """Executes discard: a weak write of undefined values."""
    if (
        {*ins.modifiers} not in ({"L2"}, {"global", "L2"})
        or len(ins.operands) != 2
        or ins.operands[1] != Imm(DISCARDED)
    ):
        asm.refuse(ins, f"it is discard{{.global}}.L2 [address], {DISCARDED}")
    row, offset = address_of(asm, ins.operands[0], ln.GLOBAL)
    asm.macro(do_discard, ins, row=row, offset=offset)


def do_discard(w, mask, o):
    for lane in lanes(mask):
        address = int(w.Q[o.row, lane]) + o.offset
        here = f"discard.L2 by lane {lane} at address {address:#x}"
        if address % DISCARDED:
            raise w.fault("misaligned", f"{here}: it must be a multiple of {DISCARDED}")
        there = located(w, w.machine.global_memory.view, address, DISCARDED, here)
        if w.machine.observer is not None:
            w.machine.observer.discarded(w, address, address + DISCARDED, lane)
        there[:] = 0xFF
        w.machine.writes += 1


def synchronises(asm, ins, space: int, row: int, offset: int, *, read: bool = False, write: bool = False) -> None:
    """Tells observers of a strong access, which may release what precedes it and acquire what others released."""
    if asm.checking:
        order = next((m for m in ins.modifiers if m in ("acquire", "release", "acq_rel", "volatile")), "relaxed")
        default = "sys" if {"volatile", "mmio"} & set(ins.modifiers) else "gpu"
        scope = next((m for m in ins.modifiers if m in ("cta", "cluster", "gpu", "sys")), default)
        asm.macro(
            do_synchronise,
            ins,
            aligned=False,
            space=space,
            row=row,
            offset=offset,
            order=order,
            scope=scope,
            read=read,
            write=write,
        )


def do_synchronise(w, mask, o):
    bases = (w.R if o.space == ln.SHARED else w.Q)[o.row].tolist()  # kernels that poll execute this very often
    if mask != pg.ALL:
        bases = [base for lane, base in enumerate(bases) if mask >> lane & 1]
    for address in dict.fromkeys(bases):
        cta, address = None, address + o.offset
        if o.space == ln.SHARED or pg.SHARED_WINDOW <= address < pg.LOCAL_WINDOW:
            cta, address = w.cta.resolve_shared(address & pg.ALL)
        w.machine.observer.synchronised(w, address, cta, o.order, o.scope, read=o.read, write=o.write)
    return SEEN
