"""The registries that define what instructions mean.

There are two:

* `micro(name, signature, function)`: one operation of the interpreter on 32 lanes. The signature "f=ff" gives the
  destination and source kinds: u i f = a 32-bit row read as uint32, int32, float32; q l d = a 64-bit row read as
  uint64, int64, float64; p = a predicate (a lane mask, plain uint32); m after the sources = the active lanes, as
  another argument. The function receives the sources and is written in the vocabulary of `softsm.engine.vec`; it is
  called once, on symbolic vectors, to generate the code. Without a function, `micro` is a decorator.
  `hot` puts an operation into the flat dispatch function (at most about 200 of them); the others go into separate
  groups, one call further away. `canonical_nan`: a NaN result becomes PTX's, 0x7fffffff, whichever NaN the operation
  reads or computes. `exchange`: the operation works on all lanes together, so a few of them cannot be computed alone.
* `@lowers("add")`: a function `(asm, ins)` that turns one PTX instruction with that base opcode into micro-operations
  (`asm.emit`) or a macro-operation (`asm.macro`: a Python function that runs outside the interpreter loop), or
  rejects it (`asm.refuse(ins, why)`) when the kernel is loaded. Nothing is ever skipped silently.

16-bit registers live in 32-bit rows with the upper half zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True, slots=True)
class Micro:
    name: str
    dst: str  # one kind letter
    srcs: str  # kinds of up to four operands, a letter each
    function: Callable
    masked: bool  # is the mask of active lanes another argument?
    hot: bool
    canonical_nan: bool
    exchange: bool


MICROS: dict[str, Micro] = {}
LOWERERS: dict[str, Callable] = {}


def micro(
    name: str,
    signature: str,
    function: Callable | None = None,
    *,
    hot: bool = False,
    canonical_nan: bool = False,
    exchange: bool = False,
) -> Callable:
    if function is None:
        return partial(micro, name, signature, hot=hot, canonical_nan=canonical_nan, exchange=exchange)
    dst, srcs = signature.split("=")
    assert name not in MICROS, f"micro-operation {name} is defined twice"
    MICROS[name] = Micro(name, dst, srcs.removesuffix("m"), function, srcs.endswith("m"), hot, canonical_nan, exchange)
    return function


def lowers(*opcodes: str) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        for opcode in opcodes:
            assert opcode not in LOWERERS, f"{opcode} has two lowerings"
            LOWERERS[opcode] = function
        return function

    return register
