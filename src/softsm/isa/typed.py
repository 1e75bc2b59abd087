"""Helpers of the arithmetic chapters: dispatch by type, and a reader of modifiers that overlooks none."""

from __future__ import annotations

from collections.abc import Callable

from softsm.engine.emitter import Emitter
from softsm.isa.registry import LOWERERS
from softsm.ptx.ast import Imm, Instruction

KIND = {
    t: kind
    for kind, types in {
        "u": "u32 b32 u16 s16 b16 f16 bf16 f16x2 bf16x2 u16x2 s16x2 u8 s8 b8",
        "i": "s32",
        "q": "u64 b64 f32x2",
        "l": "s64",
        "f": "f32",
        "d": "f64",
        "p": "pred",
    }.items()
    for t in types.split()
}

_TYPED: dict[str, dict[str, Callable]] = {}


def lowers_typed(opcode: str, *types: str) -> Callable[[Callable], Callable]:
    """Registers a lowering for one opcode and some instruction types (the last modifier): `add` of integers, of floats
    and of halves are in different chapters."""

    def register(function: Callable) -> Callable:
        table = _TYPED.setdefault(opcode, {})
        for t in types:
            assert t not in table, f"{opcode}.{t} has two lowerings"
            table[t] = function
        if opcode not in LOWERERS:

            def dispatch(asm: Emitter, ins: Instruction) -> None:
                chosen = table.get(ins.modifiers[-1]) if ins.modifiers else None
                if chosen is None:
                    asm.refuse(ins, f"{opcode} accepts the types {', '.join('.' + t for t in table)}")
                chosen(asm, ins)

            LOWERERS[opcode] = dispatch
        return function

    return register


class Modifiers:
    """The modifiers of an instruction before its type(s), read one by one; `done` rejects those that remain."""

    def __init__(self, asm, ins, types: int = 1):
        self.asm, self.ins = asm, ins
        self.left = list(ins.modifiers[:-types] if types else ins.modifiers)

    def one_of(self, *names: str) -> str | None:
        """Returns the one of `names` that is present, or None; two of them are an error."""
        found = [m for m in self.left if m in names]
        if len(found) > 1:
            self.asm.refuse(self.ins, f".{found[0]} and .{found[1]} exclude each other")
        if not found:
            return None
        self.left.remove(found[0])
        return found[0]

    def flag(self, name: str) -> bool:
        return self.one_of(name) is not None

    def done(self) -> None:
        if self.left:
            self.asm.refuse(self.ins, f"unknown modifier .{self.left[0]}")


def operands(asm, ins, *counts: int) -> tuple:
    """Returns the operands, after a check of their number."""
    if len(ins.operands) not in counts:
        wanted = " or ".join(str(n) for n in counts)
        raise asm.error(f"{ins.name} needs {wanted} operands, got {len(ins.operands)}")
    return ins.operands


def src16(asm, operand) -> int:
    """Returns the row of a 16-bit source. Rows keep the upper half zero, so a literal is truncated to 16 bits."""
    if isinstance(operand, Imm) and operand.kind == "int":
        return asm.const(int(operand.value) & 0xFFFF, "u")
    return asm.src(operand, "u")


def signed16(asm, operand) -> int:
    """Returns the row of a 16-bit source, sign-extended to 32 bits."""
    if isinstance(operand, Imm) and operand.kind == "int":
        value = int(operand.value) & 0xFFFF
        return asm.const((value ^ 0x8000) - 0x8000, "i")
    return unary(asm, "cvt.s32.s16", "i", asm.src(operand, "u"))


def unary(asm, name: str, kind: str, *rows: int) -> int:
    """Emits a micro-operation into a fresh row and returns the row."""
    row = asm.temp(kind)
    asm.emit(name, row, *rows)
    return row


def needs_target(asm, ins, number: int) -> None:
    """Rejects an instruction that the module's .target does not have."""
    target = asm.module.target
    digits = "".join(ch for ch in target.removeprefix("sm_") if ch.isdigit())
    if digits and int(digits) < number:
        asm.refuse(ins, f"needs .target sm_{number} or higher, the module has {target}")
