"""Checks that LLVM compiles the vector operations correctly for this CPU, whenever the interpreter is compiled.

A compiler error in one operation would make results silently wrong; LLVM 20 had one in llvm.minimumnum on x86. Each
operation runs on corner cases and is compared with NumPy bit by bit, except that all NaNs are equal.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import llvmlite
import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from softsm.engine import native, vec_ops
from softsm.engine.vec_rows import load_row, store_row
from softsm.engine.vec_types import _I32, _I64, FULL, Bits, D, F, I, Kind, Q, U, building, sel

TYPES = {U: np.uint32, I: np.int32, F: np.float32, Q: np.uint64, D: np.float64}
FLOATS = (0.0, -0.0, 1.0, -1.0, np.nan, -np.nan, np.inf, -np.inf, 1.5, 2.5, -2.5, 3e9, -3e9, 1e-40, 65519.9, 65520.0)


@dataclass(frozen=True)
class Trial:
    name: str
    operate: Callable
    expected: Callable  # the operation on NumPy arrays
    kinds: tuple[Kind, ...]
    result: Kind


def _smaller(x, y, least: bool):
    pick = np.signbit(x) if least else ~np.signbit(x)
    return np.where(x == y, np.where(pick, x, y), (np.fmin if least else np.fmax)(x, y))


def _saturated(x):
    return np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0).clip(-(2**31), 2**31 - 1).astype(np.int32)


def _fused(x, y, z):
    return (x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)).astype(np.float32)


def _half(x):
    return x.astype(np.float16).view(np.uint16).astype(np.uint32)


TRIALS = [
    *(Trial(f"{name}.{k.name}", op, lambda x, y, least=least: _smaller(x, y, least), (k, k), k)
      for k in (F, D) for name, op, least in (("min", vec_ops.minnum, True), ("max", vec_ops.maxnum, False))),
    Trial("add.F", lambda x, y: x + y, lambda x, y: x + y, (F, F), F),
    Trial("div.F", lambda x, y: x / y, lambda x, y: x / y, (F, F), F),
    Trial("sqrt.F", vec_ops.vsqrt, np.sqrt, (F,), F),
    Trial("rint.F", vec_ops.vrint, np.rint, (F,), F),
    # Product and sum are exact in double precision, so both sides round once.
    Trial("fma.F", vec_ops.fma, _fused, (F, F, F), F),
    Trial("select.F", lambda x, y: sel(x < y, x, y), lambda x, y: np.where(x < y, x, y), (F, F), F),
    Trial("float to int", vec_ops.toi, _saturated, (F,), I),
    Trial("float to half", lambda x: vec_ops.float_to_half(vec_ops.canonical(x)), _half, (F,), U),
    Trial("double to float", vec_ops.tof, lambda x: x.astype(np.float32), (D,), F),
    Trial("high product", vec_ops.mulhi, lambda x, y: (x.astype(np.uint64) * y >> np.uint64(32)).astype(np.uint32),
          (U, U), U),
]  # fmt: skip


def corners(kind: Kind, shift: int) -> np.ndarray:
    """Returns 32 corner cases. Different shifts pair them differently."""
    if kind.floating:
        values = np.roll(np.array(FLOATS * 2, TYPES[kind]), shift)
        return np.concatenate([values[:16], values[16:][:: 1 if shift % 2 else -1]])
    return np.random.default_rng(shift).integers(0, 1 << kind.bits, 32, TYPES[kind])


def _build(trials: list[Trial]) -> Callable[[ir.Module], None]:
    def build(module: ir.Module) -> None:
        for number, trial in enumerate(trials):
            function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * 4), f"trial{number}")
            with building(ir.IRBuilder(function.append_basic_block("entry"))) as b:
                operands = [load_row(at, _I32(0), kind) for at, kind in zip(function.args[1:], trial.kinds)]
                store_row(function.args[0], _I32(0), Bits(_I32(FULL)), trial.operate(*operands))
                b.ret_void()

    return build


def wrong(trials: list[Trial] = TRIALS) -> list[str]:
    """Returns a description of each operation that LLVM compiles incorrectly."""
    names = [f"trial{number}" for number in range(len(trials))]
    at = native.addresses(native.object_code(_build(trials), "selftest"), names)
    found = []
    for trial, name in zip(trials, names):
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(at[name])
        for shift in range(16):
            operands = [corners(kind, shift * (i + 1)) for i, kind in enumerate(trial.kinds)]
            got = np.zeros(32, TYPES[trial.result])
            pointers = [x.ctypes.data for x in operands]
            function(got.ctypes.data, *pointers, *[0] * (3 - len(pointers)))
            with np.errstate(all="ignore"):
                want = trial.expected(*operands)
            bits = f"u{got.itemsize}"
            same = (got.view(bits) == want.view(bits)) | ((got != got) & (want != want))
            if trial.name == "float to half":  # PTX's NaN, not NumPy's
                same |= np.isnan(operands[0]) & (got == 0x7FFF)
            if not same.all():
                lane = int(np.argmin(same))
                values = ", ".join(str(x[lane]) for x in operands)
                found.append(f"{trial.name}({values}) is {got[lane]} instead of {want[lane]}")
                break
    return found


def check() -> None:
    """Raises RuntimeError if LLVM's code for this CPU is wrong."""
    found = wrong()
    if found:
        version = ".".join(map(str, llvm.llvm_version_info))
        which = f"llvmlite {llvmlite.__version__} (LLVM {version})"
        raise RuntimeError(
            f"softsm cannot be used with {which} on {llvm.get_host_cpu_name()}: its code is wrong: "
            f"{'; '.join(found)}. Install another numba and llvmlite."
        )
