"""Registers that can share a row of the register file.

A compiler gives nearly every value a register of its own; a row for each makes a file of a megabyte for a warp, and a
launch waits for the CPU's caches. A register that is written before it is read, and only used, within one stretch of
code without a label, jump or call is empty outside of it: its row serves others there. Lanes of a warp that are
elsewhere have their own part of each row. Operands of asynchronous instructions keep rows of their own.
"""

from __future__ import annotations

from softsm.ptx.ast import Address, Call, Function, Instruction, Label, Pair, Reg, Vector

# Their first operand is what they write, all of it, when they are executed; they lower to nothing that stays behind.
WRITES_FIRST = frozenset(
    "abs add addc and bfe bfi bfind bmsk brev clz copysign cnot cos cvt cvta div dp2a dp4a ex2 fma fns ld lg2 lop3 mad "
    "mad24 madc max min mov mul mul24 neg not or popc prmt rcp rem rsqrt sad selp set setp shf shfl shl shr sin slct "
    "sqrt sub subc szext tanh xor".split()
)
MEMORY = frozenset(("ld", "shfl"))  # of these: their operands are looked at by more than arithmetic
NAMED_LATER = frozenset(("tcgen05", "wgmma", "call"))  # what they name is used later, or by another function
ENDS = frozenset(("bra", "brx", "ret", "exit", "trap", "call"))
BANKS = dict.fromkeys("b16 u16 s16 f16 b32 u32 s32 f32 f16x2 bf16 bf16x2".split(), "R")
BANKS |= dict.fromkeys("b64 u64 s64 f64".split(), "Q")


def registers(operand) -> list[str]:
    """Names in an operand, however deep."""
    if isinstance(operand, Reg):
        return [operand.name]
    if isinstance(operand, Vector):
        return [name for x in operand.items for name in registers(x)]
    if isinstance(operand, Address):
        return [name for x in (operand.base, *operand.coords, *operand.extra) for name in registers(x)]
    if isinstance(operand, Pair):
        return registers(operand.first) + registers(operand.second)
    if isinstance(operand, tuple):
        return [name for x in operand for name in registers(x)]
    if isinstance(operand, Call):
        return registers(operand.callee) + registers(operand.arguments)
    return []


def shared_rows(function: Function) -> dict[str, tuple[str, int]]:
    """Register -> (register file, number of a shared row), for those that can. Registers that arithmetic alone uses,
    whose values engine/blocks.py need not keep, have negative numbers."""
    stretch, home = 0, {}  # name -> the only stretch it occurs in, or -1
    lives: dict[str, list[int]] = {}  # name -> first and last instruction
    looked_at: set[str] = set()  # by other instructions
    for i, item in enumerate(function.body):
        if isinstance(item, Label):
            stretch += 1
            continue
        arithmetic = item.opcode in WRITES_FIRST and item.opcode not in MEMORY
        for position, operand in enumerate(item.operands):
            for name in registers(operand):
                if not arithmetic:
                    looked_at.add(name)
                if name not in home:
                    home[name] = stretch if position == 0 and _plain_write(item, name) else -1
                    lives[name] = [i, i]
                elif home[name] != stretch or item.opcode in NAMED_LATER:
                    home[name] = -1
                else:
                    lives[name][1] = i
        if item.guard is not None:
            home[item.guard.name] = -1
        if item.opcode in ENDS:
            stretch += 1
    begins: dict[int, list[str]] = {}
    for name, where in home.items():
        if where >= 0 and function.registers[name] in BANKS:
            begins.setdefault(lives[name][0], []).append(name)
    return _dealt(function, begins, lives, looked_at)


def _plain_write(item: Instruction, name: str) -> bool:
    """Is it a write of the whole register by every active lane, before the instruction reads anything of the name?"""
    if item.opcode not in WRITES_FIRST or item.guard is not None:
        return False
    return not any(name in registers(x) for x in item.operands[1:])


def _dealt(
    function: Function, begins: dict[int, list[str]], lives: dict[str, list[int]], looked_at: set[str]
) -> dict[str, tuple[str, int]]:
    """Row numbers, the one that was free last first. A row is free behind the last use: never within an instruction,
    whose parts may write before they read."""
    free: dict[tuple[str, int], list[int]] = {(bank, sign): [] for bank in "RQ" for sign in (1, -1)}
    used = dict.fromkeys(free, 0)
    ends: dict[int, list[tuple[tuple[str, int], int]]] = {}
    rows: dict[str, tuple[str, int]] = {}
    for i in range(len(function.body)):
        for name in begins.get(i, ()):
            pool = BANKS[function.registers[name]], 1 if name in looked_at else -1
            if free[pool]:
                row = free[pool].pop()
            else:
                used[pool] += 1
                row = used[pool] * pool[1]
            rows[name] = pool[0], row
            ends.setdefault(lives[name][1], []).append((pool, row))
        for pool, row in ends.pop(i, ()):
            free[pool].append(row)
    return rows
