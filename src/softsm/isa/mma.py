"""mma.sync: the warp's own matrix product, all operands in registers. Done at once, as the instruction is.

Shapes and types: f16, bf16, tf32, e4m3/e5m2, f64, s8/u8, s4/u4, b1 (xor.popc, and.popc); accumulators f32, f16, s32,
f64. Sparse products (mma.sp): all but f64 and b1. Register maps are in isa/fragments.py, metadata in isa/sparsity.py.
"""

from __future__ import annotations

import re

import numpy as np

from softsm.engine.emitter import Emitter
from softsm.isa import fragments, sparsity, tensor_core
from softsm.isa.operands import located
from softsm.isa.registry import lowers
from softsm.isa.tensor_kernels import warp_product
from softsm.isa.tensor_memory import take
from softsm.ptx.ast import Imm, Instruction

# element type -> shapes (m, k); n is always 8
SHAPES = {
    "f16": ((16, 8), (16, 16)),
    "bf16": ((16, 8), (16, 16)),
    "tf32": ((16, 4), (16, 8)),
    "e4m3": ((16, 16), (16, 32)),
    "e5m2": ((16, 16), (16, 32)),
    "f64": ((8, 4), (16, 4), (16, 8), (16, 16)),
    "s8": ((8, 16), (16, 16), (16, 32)),
    "u8": ((8, 16), (16, 16), (16, 32)),
    "s4": ((8, 32), (16, 32), (16, 64)),
    "u4": ((8, 32), (16, 32), (16, 64)),
    "b1": ((8, 128), (16, 128), (16, 256)),
}
SPARSE_K = {
    "f16": (16, 32), "bf16": (16, 32), "tf32": (8, 16), "e4m3": (64,), "e5m2": (64,),
    "s8": (32, 64), "u8": (32, 64), "s4": (64, 128), "u4": (64, 128),
}  # fmt: skip
RESULTS = {"f16": ("f32", "f16"), "e4m3": ("f32", "f16"), "e5m2": ("f32", "f16"), "bf16": ("f32",), "tf32": ("f32",),
           "f64": ("f64",)}  # fmt: skip
FAMILIES = ({"s8", "u8"}, {"s4", "u4"}, {"e4m3", "e5m2"})
TABLED = ("f16", "bf16", "tf32", "e4m3", "e5m2")  # the types that the compiled kernel multiplies


def alike(a: str, b: str) -> bool:
    return a == b or any({a, b} <= family for family in FAMILIES)


@lowers("mma")
def lower(asm: Emitter, ins: Instruction) -> None:
    modifiers = list(ins.modifiers)
    sparse = take(asm, ins, modifiers, "sp", "sp::ordered_metadata", optional=True)
    if any(x.startswith("kind::") or x == "block_scale" for x in modifiers):
        asm.refuse(ins, "block-scaled mma.sync belongs to sm_120")
    take(asm, ins, modifiers, "sync")
    take(asm, ins, modifiers, "aligned")
    saturate = bool(take(asm, ins, modifiers, "satfinite", optional=True))
    bitwise = ""
    if take(asm, ins, modifiers, "popc", optional=True):
        bitwise = take(asm, ins, modifiers, "xor", "and")
    if len(modifiers) != 7:
        asm.refuse(ins, "expected .mMnNkK.row.col and the types of D, A, B and C")
    shape, row, col, d, a, b, c = modifiers
    size = re.fullmatch(r"m(\d+)n8k(\d+)", shape)
    if (row, col) != ("row", "col") or size is None:
        asm.refuse(ins, "only .row.col products with n = 8 exist here")
    m, k = int(size[1]), int(size[2])
    if sparse:
        if bitwise:
            asm.refuse(ins, "sparse products of single bits do not exist")
        return lower_sparse(asm, ins, sparse == "sp::ordered_metadata", saturate, (m, k), (d, a, b, c))
    results = RESULTS.get(a, ("s32",))
    if a not in SHAPES or not alike(a, b) or (m, k) not in SHAPES[a] or d not in results or c not in results:
        asm.refuse(ins, "no such combination of shape and types")
    if (a == "b1") != bool(bitwise) or (saturate and results != ("s32",)):
        asm.refuse(ins, "modifier .popc or .satfinite does not go with these types")
    if d != c and a != "f16":
        asm.refuse(ins, "C and D must have the same type")
    if len(ins.operands) != 4:
        raise asm.error(f"expected 4 operands, got {len(ins.operands)}")
    kind = "d" if a == "f64" else "u"
    operands = [asm.vector_rows(x, kind, write=i == 0) for i, x in enumerate(ins.operands)]
    counts = register_counts(m, k, d, a, c)
    for name, rows, count in zip("DABC", operands, counts):
        if len(rows) != count:
            raise asm.error(f"{name} needs {count} registers, got {len(rows)}")
    multiply(asm, ins, m, (d, a, b, c), operands, bitwise, saturate)


def multiply(asm, ins, m: int, types: tuple[str, ...], operands: list[list[int]], bitwise: str, saturate: bool) -> None:
    """Emits one product; operands: the rows of D, A, B and C."""
    d, a, b, c = types
    d_rows, a_rows, b_rows, c_rows = (np.array(x) for x in operands)
    if a in TABLED and c == d == "f32":
        per = fragments.PER_REGISTER[a]
        every = np.array([*operands[1], *operands[2], *operands[3], *operands[0]])
        tables = [kernel_table(x) for x in (a, b)]
        asm.macro(
            do_float,
            ins,
            rows=every,
            a_count=len(a_rows),
            d_count=len(d_rows),
            per=per,
            tables=tables,
            m=m,
            types=types,
        )
    else:
        asm.macro(
            do_any, ins, d=d_rows, a=a_rows, b=b_rows, c=c_rows, m=m, types=types, bitwise=bitwise, saturate=saturate
        )


def lower_sparse(asm, ins, ordered: bool, saturate: bool, shape: tuple[int, int], types: tuple[str, ...]) -> None:
    m, k = shape
    d, a, b, c = types
    results = ("f32",) if a in ("e4m3", "e5m2") else RESULTS.get(a, ("s32",))
    if m != 16 or k not in SPARSE_K.get(a, ()) or not alike(a, b) or d != c or d not in results:
        asm.refuse(ins, "no such combination of shape and types for a sparse product")
    if saturate and d != "s32":
        asm.refuse(ins, "modifier .satfinite does not go with these types")
    if len(ins.operands) != 6:
        raise asm.error(f"expected 6 operands, got {len(ins.operands)}")
    chunks = sparsity.chunks_of(a, k)
    selector, choices = ins.operands[5], 16 // chunks
    if not isinstance(selector, Imm) or selector.value not in range(choices):
        accepted = f"a constant below {choices}" if choices > 1 else "0"
        asm.refuse(ins, f"the sparsity selector is {accepted} for K = {k} of {a}")
    operands = [asm.vector_rows(x, "u", write=i == 0) for i, x in enumerate(ins.operands[:4])]
    result, left, right, _ = register_counts(m, k, d, a, c)
    for name, rows, count in zip("DABC", operands, (result, left // 2, right, result)):
        if len(rows) != count:
            raise asm.error(f"{name} needs {count} registers, got {len(rows)}")
    d_rows, a_rows, b_rows, c_rows = (np.array(x) for x in operands)
    asm.macro(
        do_sparse,
        ins,
        d=d_rows,
        a=a_rows,
        b=b_rows,
        c=c_rows,
        e=asm.src(ins.operands[4], "u"),
        chunks=chunks,
        m=m,
        selector=int(selector.value),
        types=types,
        ordered=ordered,
        saturate=saturate,
    )


def do_sparse(w, mask, o):
    kind = sparsity.granularity(o.types[1])
    codes = sparsity.register_codes(w.R[o.e], o.selector, o.chunks, o.types[1])
    located(w, sparsity.check, codes, kind, sparsity.ASCENDING if o.ordered else sparsity.DIFFERENT)
    where = sparsity.columns(codes, kind)
    left = sparsity.expand(fragments.left(w.R[o.a], o.types[1], o.m), where)
    right = fragments.right(w.R[o.b], o.types[2])
    aside = sparsity.set_aside(left, where, right)
    product = right @ left.T
    add_product(w, o, product if aside is None else product + aside)


def register_counts(m: int, k: int, d: str, a: str, c: str) -> tuple[int, int, int, int]:
    per = 1 if a == "f64" else fragments.PER_REGISTER[a]
    left, right = m * k // (32 * per), 8 * k // (32 * per)
    result = m * 8 // 32
    return result // 2 if d == "f16" else result, left, right, result // 2 if c == "f16" else result


def kernel_table(name: str) -> np.ndarray:
    """Returns the float32 bits of every code; empty for formats that are the upper bits of a float32."""
    return tensor_core.decoding(name)


def do_float(w, mask, o):
    observer = w.machine.observer
    tapped = observer is not None and observer.operands
    if tapped:  # D may be C's registers, or A's
        n, b_count = o.a_count, len(o.rows) - o.a_count - 2 * o.d_count
        a = fragments.left(w.R[o.rows[:n]], o.types[1], o.m)
        b = fragments.right(w.R[o.rows[n : n + b_count]], o.types[2])
        c = w.R[o.rows[n + b_count : n + b_count + o.d_count]].any()
    warp_product(w.R, o.rows, o.a_count, o.per, *o.tables)
    if tapped:
        d_rows = o.rows[-o.d_count :]
        d = fragments.accumulator(w.R[d_rows], "f32", o.m).view(np.float32).T
        observer.warp_product(w, a, b, d, bool(c), tuple(d_rows.tolist()))


def do_any(w, mask, o):
    _, a, b, _ = o.types
    if a == "f64":
        q = w.Q.view(np.float64)
        left = fragments.left_values(q[o.a][:, :, None], o.m)
        right = fragments.right_values(q[o.b][:, :, None])
        c_matrix = fragments.accumulator(q[o.c], "f64", o.m)  # [8, m]
        q[o.d] = fragments.accumulator_registers(right @ left.T + c_matrix, "f64")
        return
    left, right = fragments.left(w.R[o.a], a, o.m), fragments.right(w.R[o.b], b)
    product = right @ left.T  # [8, m]
    if o.bitwise == "xor":  # |a ^ b| = |a| + |b| - 2 |a & b|
        product = right.sum(1)[:, None] + left.sum(1)[None, :] - 2 * product
    add_product(w, o, product)


def add_product(w, o, product: np.ndarray) -> None:
    """Computes D = product + C; product: [8, m]."""
    d, _, _, c = o.types
    old = fragments.accumulator(w.R[o.c], c, o.m)
    if d == c:
        fresh = tensor_core.accumulate(old, product, d, True, 0, o.saturate)
    else:  # f16 and f32 accumulators mixed
        wide = old.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32) if c == "f16" else old
        fresh = tensor_core.accumulate(wide, product, "f32", True)
        if d == "f16":
            fresh = tensor_core.accumulate(fresh, fresh.view(np.float32), "f16", False)
    w.R[o.d] = fragments.accumulator_registers(fresh, d)
