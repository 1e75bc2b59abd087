"""Loads, stores, atomics and addresses: ld, ldu, st, atom, red, mapa, isspacep, getctarank.

The interpreter does the plain case (own shared memory, known global allocations, aligned) itself; whatever else
happens to an address comes to `memory_event`, which either completes the access or says what is wrong with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from softsm.engine import lanes as ln
from softsm.engine import program as pg
from softsm.engine.asynchrony import SEEN
from softsm.errors import Fault
from softsm.isa import bulk_copy
from softsm.isa.registry import lowers
from softsm.isa.typed import needs_target
from softsm.ptx.ast import Address, Instruction, Sink, Symbol, Vector

if TYPE_CHECKING:
    from softsm.engine.assemble import Assembler

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
LOG = {
    "b8": 0,
    "u8": 0,
    "s8": 0,
    "b16": 1,
    "u16": 1,
    "s16": 1,
    "f16": 1,
    "bf16": 1,
    "b32": 2,
    "u32": 2,
    "s32": 2,
    "f32": 2,
    "f16x2": 2,
    "bf16x2": 2,
    "b64": 3,
    "u64": 3,
    "s64": 3,
    "f64": 3,
}
VECTOR = {"v2": 2, "v4": 4, "v8": 8}
ORDERING = {
    "weak",
    "volatile",
    "relaxed",
    "acquire",
    "release",
    "acq_rel",
    "cta",
    "cluster",
    "gpu",
    "sys",
    "mmio",
    "unified",
}
CACHE = {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc"}


STRONG = {"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"}  # such accesses do not race with each other


def is_hint(modifier: str) -> bool:
    """Cache operators, eviction priorities and prefetch sizes: permissions that change no value."""
    return modifier in CACHE or modifier in ORDERING or modifier.startswith(("L1::", "L2::"))


def split(asm: Assembler, ins: Instruction):
    """-> (space, elements, element type) of a load or store; refuses what it does not know."""
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
    """Register rows of a (vector) operand and whether they are 64-bit ones."""
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
    """-> (row, offset). Shared addresses are 32-bit rows; a 64-bit register holding one is narrowed."""
    bank, row, offset = asm.address(operand)
    want = "R" if space == ln.SHARED else "Q"
    if bank != want:
        narrow = asm.temp("u" if want == "R" else "q")
        asm.emit("cvt.u32.u64" if want == "R" else "cvt.u64.u32", narrow, row, guard=None)
        row = narrow
    return row, offset


def parameter_load(asm, ins, rows, wide, type_) -> bool:
    """`ld.param [entry parameter + constant]`: the value is known at launch, so it is a row and the load a move."""
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
    strong = not STRONG.isdisjoint(ins.modifiers)
    asm.record(LOAD_OP[space], asm.pooled(rows), row, offset, format_of(type_, count, wide), int(strong), ins=ins)
    if strong:
        synchronises(asm, ins, space, row, offset, read=True)


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


def synchronises(asm, ins, space: int, row: int, offset: int, *, read: bool = False, write: bool = False) -> None:
    """A strong access may release what came before it and acquire what others released: tell observers."""
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
    bases = (w.R if o.space == ln.SHARED else w.Q)[o.row].tolist()  # kernels that poll come here very often
    if mask != pg.ALL:
        bases = [base for lane, base in enumerate(bases) if mask >> lane & 1]
    for address in dict.fromkeys(bases):
        cta, address = None, address + o.offset
        if o.space == ln.SHARED or pg.SHARED_WINDOW <= address < pg.LOCAL_WINDOW:
            cta, address = w.cta.resolve_shared(address & pg.ALL)
        w.machine.observer.synchronised(w, address, cta, o.order, o.scope, read=o.read, write=o.write)
    return SEEN


# ---- atomics ---------------------------------------------------------------------------------------------------------

ATOMIC_OPS = {
    "add": ln.ADD,
    "min": ln.MIN,
    "max": ln.MAX,
    "and": ln.AND,
    "or": ln.OR,
    "xor": ln.XOR,
    "exch": ln.EXCH,
    "cas": ln.CAS,
    "inc": ln.INC,
    "dec": ln.DEC,
}
ATOMIC_TYPES = {
    "u32": ln.T_U32,
    "b32": ln.T_U32,
    "s32": ln.T_S32,
    "u64": ln.T_U64,
    "b64": ln.T_U64,
    "s64": ln.T_S64,
    "f32": ln.T_F32,
    "f64": ln.T_F64,
}
PACKED = ("f16", "bf16", "f16x2", "bf16x2", "b16")


@lowers("atom", "red")
def atom(asm: Assembler, ins: Instruction):
    if "async" in ins.modifiers:
        return bulk_copy.reduce_async(asm, ins)
    space, op, type_, count = ln.GENERIC, None, None, 1
    for m in ins.modifiers:
        if m in SPACES:
            space = SPACES[m]
        elif m in ATOMIC_OPS:
            op = m
        elif m in ATOMIC_TYPES or m in PACKED or m == "b128":
            type_ = m
        elif m in VECTOR:
            count = VECTOR[m]
        elif m != "noftz" and not is_hint(m):
            asm.refuse(ins, f"unknown modifier .{m}")
    if op is None or type_ is None:
        asm.refuse(ins, "needs an operation and a type")
    if type_ in ("f32", "f64") and op != "add" and op != "exch":
        asm.refuse(ins, f".{op} is not defined for .{type_}")
    operands = list(ins.operands)
    target = None if ins.opcode == "red" else operands.pop(0)
    address, *values = operands
    values = values[: 2 if op == "cas" else 1]  # a cache policy may follow
    row, offset = address_of(asm, address, space)
    if type_ in ATOMIC_TYPES and count == 1:
        wide = ATOMIC_TYPES[type_] in (ln.T_U64, ln.T_S64, ln.T_F64)
        kind = {"f32": "f", "f64": "d"}.get(type_, "q" if wide else "u")
        rd = -1 if target is None or isinstance(target, Sink) else asm.dst(target, kind)
        rb = asm.src(values[0], kind)
        rc = asm.src(values[1], kind) if len(values) > 1 else 0
        op_code = pg.OP_ATOM_S if space == ln.SHARED else pg.OP_ATOM_G
        fmt = ATOMIC_OPS[op] | ATOMIC_TYPES[type_] << 8
        generic = 1 if space == ln.GENERIC else 0
        synchronises(asm, ins, space, row, offset, write=True)
        asm.record(op_code, asm.pooled([rd, rb, rc]), row, offset, fmt, generic, ins=ins)
        synchronises(asm, ins, space, row, offset, read=True)
        return
    wide = type_ == "b128"
    rows = [] if target is None else rows_of(asm, target, count, type_, write=True)[0]
    sources = [rows_of(asm, v, count, type_, write=False)[0] for v in values]
    asm.macro(
        do_packed_atomic,
        ins,
        space=space,
        row=row,
        offset=offset,
        op=op,
        type=type_,
        count=count,
        rows=rows,
        sources=sources,
        wide=wide,
    )


def do_packed_atomic(w, mask, o):
    """Atomics on 16-bit floats, packed pairs, vectors and 128-bit words, element by element, lanes in order."""
    import ml_dtypes

    dtype = {
        "f16": np.float16,
        "f16x2": np.float16,
        "bf16": ml_dtypes.bfloat16,
        "bf16x2": ml_dtypes.bfloat16,
        "b16": np.uint16,
        "f32": np.float32,
        "b128": np.uint64,
    }[o.type]
    size = {"f16": 2, "bf16": 2, "b16": 2, "b128": 16}.get(o.type, 4)
    for lane in range(32):
        if not mask >> lane & 1:
            continue
        raw = locate(w, lane, o.space, o.row, o.offset, size * o.count, "atomic", True)
        bank = w.Q if o.wide else w.R
        unit = 8 if o.wide else size
        for i in range(size * o.count // unit):
            cell = raw[i * unit : (i + 1) * unit].view(dtype)
            old = cell.copy()
            b = bank[o.sources[0][i], lane : lane + 1].view(dtype)[: len(cell)]
            if o.op == "add":
                cell[:] = (cell.astype(np.float32) + b.astype(np.float32)).astype(dtype)
            elif o.op in ("min", "max"):
                cell[:] = (np.fmin if o.op == "min" else np.fmax)(cell, b)
            elif o.op == "exch":
                cell[:] = b
            elif o.op == "cas" and o.type == "b128":
                if i == 0:
                    full = raw.view(np.uint64).copy()
                expected = [int(w.Q[r, lane]) for r in o.sources[0]]
                if [int(x) for x in full] == expected:
                    cell[:] = w.Q[o.sources[1][i], lane]
            elif o.op == "cas":
                if old[0] == b[0]:
                    cell[:] = bank[o.sources[1][i], lane : lane + 1].view(dtype)[: len(cell)]
            else:
                raise w.fault("unsupported", f"atomic {o.op} on {o.type}")
            if o.rows:
                bank[o.rows[i], lane] = 0
                bank[o.rows[i], lane : lane + 1].view(dtype)[: len(cell)] = old
    w.machine.writes += 1


# ---- what the interpreter did not do itself --------------------------------------------------------------------------


def locate(
    w, lane: int, space: int, row: int, offset: int, size: int, access: str, strong: bool, new: np.ndarray | None = None
) -> np.ndarray:
    """The bytes one lane accesses, or a Fault that says why it may not. strong: neither weak nor a race with its like;
    new: what a store will write there."""
    if space == ln.SHARED:
        address = (int(w.R[row, lane]) + offset) & pg.ALL
    else:
        address = int(w.Q[row, lane]) + offset
    what = f"{access} by lane {lane}"
    if address & (size - 1):
        raise w.fault("misaligned", f"{what} of {size} bytes at address {address:#x}: it must be a multiple of {size}")
    if space == ln.GENERIC and pg.SHARED_WINDOW <= address < pg.LOCAL_WINDOW:
        space, address = ln.SHARED, address - pg.SHARED_WINDOW
    if space == ln.GENERIC and address >= pg.LOCAL_WINDOW:
        space, address = ln.LOCAL, address - pg.LOCAL_WINDOW
    try:
        if space == ln.SHARED:
            cta, at = w.cta.resolve_shared(address)
            cta.check_shared(at, size, what)
            there = cta.shared[at : at + size]
            if w.machine.observer is not None:
                same = new is not None and np.array_equal(there, new)
                w.machine.observer.accessed_shared(w, cta, at, at + size, access != "load", strong, lane, same)
            return there
        if space == ln.LOCAL:
            if address < 0 or address + size > w.local.shape[1]:
                raise w.fault(
                    "out-of-bounds",
                    f"{what} of {size} bytes at local address {address:#x}; a thread has {w.local.shape[1]}",
                )
            return w.local[lane, address : address + size]
        there = w.machine.global_memory.view(address, size, what)
        if w.machine.observer is not None:
            same = new is not None and np.array_equal(there, new)
            w.machine.observer.accessed_global(w, address, address + size, access != "load", strong, lane, same)
        return there
    except Fault as error:
        if error.placed:
            raise
        raise w.fault(error.code, error.message) from None


SPACE_OF = {
    pg.OP_LDG: ln.GLOBAL,
    pg.OP_STG: ln.GLOBAL,
    pg.OP_LDS: ln.SHARED,
    pg.OP_STS: ln.SHARED,
    pg.OP_LD: ln.GENERIC,
    pg.OP_ST: ln.GENERIC,
    pg.OP_LDL: ln.LOCAL,
    pg.OP_STL: ln.LOCAL,
}
LOADS = {pg.OP_LDG, pg.OP_LDS, pg.OP_LD, pg.OP_LDL}


def memory_event(machine, w, fragment, lanes: int) -> None:
    """An access that is not plain: to a peer's shared memory, through a generic window, or wrong."""
    op, rd, ra, rb, fmt, rx = (int(x) for x in w.cta.program.code[fragment.pc, :6])
    offset = rb - (1 << 32) if rb >= 1 << 31 else rb
    pool = w.cta.program.pool
    if op in (pg.OP_ATOM_G, pg.OP_ATOM_S):
        slow_atomic(w, op, rd, ra, offset, fmt, rx, lanes, pool)
        return
    space = SPACE_OF[op]
    log, count = fmt & 3, fmt >> 4 & 15
    unit = 1 << log
    for lane in range(32):
        if not lanes >> lane & 1:
            continue
        new: Any = None
        if op not in LOADS:
            bank = w.Q if fmt & ln.WIDE else w.R
            parts = [bank[int(pool[rd + i]), lane : lane + 1].view(np.uint8)[:unit] for i in range(count)]
            new = np.concatenate(parts)
        raw = locate(w, lane, space, ra, offset, unit * count, "load" if op in LOADS else "store", bool(rx), new)
        for i in range(count):
            row = int(pool[rd + i])
            bank = w.Q if fmt & ln.WIDE else w.R
            if op in LOADS:
                if row < 0:
                    continue
                value = int.from_bytes(raw[i * unit : (i + 1) * unit].tobytes(), "little", signed=bool(fmt & ln.SIGNED))
                bank[row, lane] = value & (0xFFFFFFFFFFFFFFFF if fmt & ln.WIDE else pg.ALL)
            else:
                raw[i * unit : (i + 1) * unit] = new[i * unit : (i + 1) * unit]
                machine.writes += 1
    fragment.pc += 1


def slow_atomic(w, op, rows, row, offset, fmt, generic, lanes, pool) -> None:
    code, t = fmt & 255, fmt >> 8
    wide = t in (ln.T_U64, ln.T_S64, ln.T_F64)
    space = ln.SHARED if op == pg.OP_ATOM_S else ln.GENERIC if generic else ln.GLOBAL
    bank = w.Q if wide else w.R
    rd, rb, rc = (int(x) for x in pool[rows : rows + 3])
    for lane in range(32):
        if not lanes >> lane & 1:
            continue
        there = locate(w, lane, space, row, offset, 8 if wide else 4, "atomic", True)
        cell = there.view(np.uint64 if wide else np.uint32)
        old = cell[0]
        cell[0] = (ln.atomic64 if wide else ln.atomic32)(code, t, old, bank[rb, lane], bank[rc, lane])
        if rd >= 0:
            bank[rd, lane] = old
        w.machine.writes += int(cell[0] != old)
    w.fragment.pc += 1


# ---- addresses ----------------------------------------------------------------------------------------------------


@lowers("mapa")
def mapa(asm, ins):
    """The address, in the CTA of that rank, which corresponds to an own shared address."""
    mods = set(ins.modifiers) - {"u32", "u64", "shared::cluster"}
    if mods:
        asm.refuse(ins, f"unknown modifiers {sorted(mods)}")
    wide = "u64" in ins.modifiers
    kind = "q" if wide else "u"
    source = ins.operands[1]
    a = asm.address_row(source, kind) if isinstance(source, Address) else asm.src(source, kind)
    asm.macro(do_mapa, ins, dst=asm.dst(ins.operands[0], kind), a=a, rank=asm.src(ins.operands[2], "u"), wide=wide)


def do_mapa(w, mask, o):
    keep = (1 << pg.RANK_SHIFT) - 1
    bank = w.Q if o.wide else w.R
    on = [lane for lane in range(32) if mask >> lane & 1]
    ranks = w.R[o.rank, on].astype(bank.dtype)
    # A rank that the cluster does not have is a mistake of who uses the address: a lane that does not may name any.
    ranks = np.minimum(ranks, bank.dtype.type(0xFF))
    window = bank[o.a, on] & bank.dtype.type((0xFFFFFFFF << 32 if o.wide else 0) & 0xFFFFFFFFFFFFFFFF)
    bank[o.dst, on] = window | (bank[o.a, on] & bank.dtype.type(keep)) | ranks << bank.dtype.type(pg.RANK_SHIFT)


@lowers("getctarank")
def getctarank(asm, ins):
    wide = "u64" in ins.modifiers
    source = ins.operands[1]
    kind = "q" if wide else "u"
    a = asm.address_row(source, kind) if isinstance(source, Address) else asm.src(source, kind)
    asm.macro(do_getctarank, ins, dst=asm.dst(ins.operands[0], "u"), a=a, wide=wide)


def do_getctarank(w, mask, o):
    on = [lane for lane in range(32) if mask >> lane & 1]
    a = (w.Q if o.wide else w.R)[o.a, on]
    w.R[o.dst, on] = (a.astype(np.uint64) & np.uint64(pg.ALL)) >> np.uint64(pg.RANK_SHIFT)


@lowers("isspacep")
def isspacep(asm, ins):
    space = ins.modifiers[0]
    if space not in ("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "param::entry"):
        asm.refuse(ins, f"unknown space .{space}")
    asm.macro(do_isspacep, ins, dst=asm.dst(ins.operands[0], "p"), a=asm.src(ins.operands[1], "q"), space=space)


def do_isspacep(w, mask, o):
    a = w.Q[o.a]
    shared = (a >= pg.SHARED_WINDOW) & (a < pg.LOCAL_WINDOW)
    own = shared & ((a & np.uint64(0xFF << pg.RANK_SHIFT)) >> np.uint64(pg.RANK_SHIFT) == w.cta.rank)
    answer = {
        "shared::cluster": shared,
        "shared": own,
        "shared::cta": own,
        "local": a >= pg.LOCAL_WINDOW,
        "global": a < pg.SHARED_WINDOW,
    }.get(o.space, np.zeros(32, bool))
    bits = sum(1 << i for i in range(32) if answer[i])
    w.P[o.dst] = (int(w.P[o.dst]) & ~mask) | (bits & mask)
