"""How an instruction's meaning is written down.

Two registries:

* `micro(name, signature, expression)`: one line = one operation of the interpreter on 32 lanes. The signature
  "f=ff" gives the destination and source kinds: u i f = a 32-bit row read as uint32, int32, float32;
  q l d = a 64-bit row read as uint64, int64, float64; p = a predicate (a lane mask, plain uint32). The expression
  uses a, b, c, d (the sources), m (the active lanes, uint32) and the names of `softsm.engine.vec`. `hot=True` puts
  it into the flat dispatch function (at most about 200 of them); the others go into banks of their own, one call
  further away.
* `@lowers("add")`: a function `(asm, ins)` which turns one PTX instruction with that base opcode into micro-operations
  (`asm.emit`), or a macro-operation (`asm.macro`: a Python function that runs outside the interpreter loop), or
  refuses it (`asm.refuse(ins, why)`) while the kernel is loaded. Nothing is ever skipped silently.

16-bit registers live in 32-bit rows with the upper half zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Micro:
    name: str
    dst: str  # one kind letter
    srcs: str  # up to four kind letters
    expression: str
    hot: bool


MICROS: dict[str, Micro] = {}
LOWERERS: dict[str, Callable] = {}


def micro(name: str, signature: str, expression: str, *, hot: bool = False) -> None:
    dst, srcs = signature.split("=")
    assert name not in MICROS, f"micro-operation {name} is defined twice"
    MICROS[name] = Micro(name, dst, srcs, expression, hot)


def lowers(*opcodes: str) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        for opcode in opcodes:
            assert opcode not in LOWERERS, f"{opcode} has two lowerings"
            LOWERERS[opcode] = function
        return function

    return register
