"""Atomic operations: atom and red. The interpreter does those on 32 and 64 bits itself."""

from __future__ import annotations

import numpy as np

from softsm.engine import lanes as ln
from softsm.engine import program as pg
from softsm.engine.emitter import Emitter
from softsm.engine.program import SEEN
from softsm.isa import bulk_copy
from softsm.isa.memory import SPACES, VECTOR, address_of, is_hint, rows_of, synchronises
from softsm.isa.registry import lowers
from softsm.isa.slow_memory import locate
from softsm.ptx.ast import Instruction, Sink

ATOMIC_OPS = {name: getattr(ln, name.upper()) for name in "add min max and or xor exch cas inc dec".split()}
ATOMIC_TYPES = {t: getattr(ln, f"T_{t.upper()}") for t in "u32 s32 u64 s64 f32 f64".split()}
ATOMIC_TYPES |= {"b32": ln.T_U32, "b64": ln.T_U64}
PACKED = ("f16", "bf16", "f16x2", "bf16x2", "b16")


@lowers("atom", "red")
def atom(asm: Emitter, ins: Instruction):
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
    synchronises(asm, ins, space, row, offset, write=True)
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
    synchronises(asm, ins, space, row, offset, read=True)


def do_packed_atomic(w, mask, o):
    """Does atomics on 16-bit floats, packed pairs, vectors and 128-bit words, element by element, lanes in order."""
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
    changed = False
    for lane in range(32):
        if not mask >> lane & 1:
            continue
        raw = locate(w, lane, o.space, o.row, o.offset, size * o.count, "atomic", True)
        before = raw.tobytes()
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
        changed |= raw.tobytes() != before
    return None if changed else SEEN
