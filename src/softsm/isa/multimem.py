"""multimem.ld_reduce, multimem.st, multimem.red: one access of the same place in the memories of several GPUs.

The address is one of `softsm.multicast`. Loads and reductions visit the GPUs in order of rank. PTX leaves the order
open, so floating-point sums may differ from a GPU's. Sums of 16-bit floats are rounded to their type after each term,
with .acc::f32 once. 8-bit floats are rejected, because PTX does not define how their sums overflow.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from softsm.engine import lanes as ln
from softsm.isa.memory import LOG, VECTOR, address_of, rows_of
from softsm.isa.operands import lanes, located
from softsm.isa.registry import lowers
from softsm.isa.typed import needs_target
from softsm.memory import multicast

DTYPES = {
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
    "f16": np.float16, "f16x2": np.float16, "bf16": ml_dtypes.bfloat16, "bf16x2": ml_dtypes.bfloat16,
    "f32": np.float32, "f64": np.float64,
}  # fmt: skip
HALVES = ("f16", "f16x2", "bf16", "bf16x2")
OPS = {
    "add": ("u32", "u64", "s32", *HALVES, "f32", "f64"),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "min": ("u32", "s32", "u64", "s64", *HALVES),
    "max": ("u32", "s32", "u64", "s64", *HALVES),
}
SEMANTICS = {
    "ld_reduce": ("weak", "relaxed", "acquire"),
    "st": ("weak", "relaxed", "release"),
    "red": ("relaxed", "release"),
}
SCOPES = ("cta", "cluster", "gpu", "sys")


@lowers("multimem")
def lower(asm, ins) -> None:
    needs_target(asm, ins, 90)
    what, *modifiers = ins.modifiers
    if what not in SEMANTICS:
        asm.refuse(ins, "expected multimem.ld_reduce, multimem.st or multimem.red")
    order, scope, op, wide_sum, count, type_ = "", "", "", False, 1, ""
    for m in modifiers:
        if m in SEMANTICS[what]:
            order = m
        elif m in SCOPES:
            scope = m
        elif m in VECTOR:
            count = VECTOR[m]
        elif m in OPS and what != "st":
            op = m
        elif m == "acc::f32" and what == "ld_reduce":
            wide_sum = True
        elif m in DTYPES:
            type_ = m
        elif m.startswith(("e4m3", "e5m2")):
            asm.refuse(ins, f"sums of .{m} are not implemented: PTX does not say what they do when they overflow")
        elif m != "global":
            asm.refuse(ins, f"unknown modifier .{m}")
    if not type_ or (what != "st" and type_ not in OPS.get(op, ())):
        asm.refuse(ins, f".{op or '?'} is not defined for .{type_ or '?'}")
    floating = type_ in (*HALVES, "f32", "f64")
    if what == "red" and floating and op != "add":
        asm.refuse(ins, "multimem.red of floating-point numbers is .add")
    if wide_sum and type_ not in HALVES:
        asm.refuse(ins, ".acc::f32 goes with 16-bit floats")
    size = count << LOG[type_]
    if (count > 1 and (not floating or type_ == "f64")) or size not in (4, 8, 16):
        asm.refuse(ins, f"{count} elements of .{type_}; floating-point vectors have 4, 8 or 16 bytes in all")
    target, *values = reversed(ins.operands) if what == "ld_reduce" else ins.operands
    rows, wide = rows_of(asm, values[0], count, type_, write=what == "ld_reduce")
    row, offset = address_of(asm, target, ln.GLOBAL)
    order = order or ("relaxed" if what == "red" else "weak")
    asm.macro(
        do_multimem,
        ins,
        what=what,
        op=op,
        wide_sum=wide_sum,
        rows=rows,
        wide=wide,
        row=row,
        offset=offset,
        size=size,
        dtype=np.dtype(DTYPES[type_]),
        order=order,
        scope=scope or "sys",
    )


def do_multimem(w, mask, o):
    for lane in lanes(mask):
        address = int(w.Q[o.row, lane]) + o.offset
        here = f"multimem.{o.what} by lane {lane} of {o.size} bytes at address {address:#x}"
        if address % o.size:
            raise w.fault("misaligned", f"{here}: it must be a multiple of {o.size}")
        found = multicast.find(address, o.size)
        if found is None:
            raise w.fault("out-of-bounds", f"{here}: that is not an address of softsm.multicast")
        places = found.places(address)
        parts = [located(w, w.machine.global_memory.view, x, o.size, here).view(o.dtype) for x in places]
        if o.what == "ld_reduce":
            put(w, lane, o, reduced(parts, o.op, o.wide_sum))
            noted(w, lane, o, places, [False] * len(places))
            continue
        given = taken(w, lane, o)
        new = [given if o.what == "st" else combined(part, given, o.op) for part in parts]
        noted(w, lane, o, places, [np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(parts, new)])
        for part, value in zip(parts, new):
            part[:] = value
        w.machine.writes += 1


def noted(w, lane: int, o, places: list[int], same: list[bool]) -> None:
    """Tells observers of an access to every place."""
    observer = w.machine.observer
    if observer is None:
        return
    write, strong = o.what != "ld_reduce", o.order != "weak"
    for place, unchanged in zip(places, same):
        if strong and write:
            observer.synchronised(w, place, None, o.order, o.scope, read=False, write=True)
        observer.accessed_global(w, place, place + o.size, write, strong, lane, unchanged)
        if strong and o.what != "st":
            observer.synchronised(w, place, None, o.order, o.scope, read=True, write=False)


def put(w, lane: int, o, value: np.ndarray) -> None:
    data = value.view(np.uint8).reshape(len(o.rows), -1)
    bank = w.Q if o.wide else w.R
    for row, element in zip(o.rows, data):
        if row >= 0:
            bank[row, lane] = int.from_bytes(element.tobytes(), "little")


def taken(w, lane: int, o) -> np.ndarray:
    unit, bank = o.size // len(o.rows), w.Q if o.wide else w.R
    words = [int(bank[row, lane]) & (1 << 8 * unit) - 1 for row in o.rows]
    return np.frombuffer(b"".join(x.to_bytes(unit, "little") for x in words), o.dtype)


def reduced(parts: list[np.ndarray], op: str, wide_sum: bool) -> np.ndarray:
    total = parts[0].astype(np.float32) if wide_sum else parts[0].copy()
    for part in parts[1:]:
        total = combined(total, part.astype(total.dtype), op)
    return total.astype(parts[0].dtype)


def combined(a: np.ndarray, b: np.ndarray, op: str) -> np.ndarray:
    """Performs one step of a reduction; 16-bit floats are rounded once."""
    if op in ("and", "or", "xor"):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op](a, b)
    with np.errstate(over="ignore", invalid="ignore"):
        x, y = (v.astype(np.float32) if v.dtype.itemsize == 2 else v for v in (a, b))
        return {"add": np.add, "min": np.fmin, "max": np.fmax}[op](x, y).astype(a.dtype)
