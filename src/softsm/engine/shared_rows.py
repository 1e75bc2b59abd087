"""Registers that can share a row of the register file.

A compiler gives nearly every value its own register. With a row for each, a warp's register file would have a megabyte
and exceed the CPU's caches. A register that occurs in only one basic block, and is written there before it is read, is
dead elsewhere, so other registers can use its row. Diverged lanes have their own part of each row. Operands of
asynchronous instructions keep their own rows.
"""

from __future__ import annotations

from softsm.ptx.ast import Address, Call, Function, Instruction, Label, Pair, Reg, Vector

# They write their first operand completely and at once, and nothing refers to it later.
WRITES_FIRST = frozenset(
    "abs add addc and bfe bfi bfind bmsk brev clz copysign cnot cos cvt cvta div dp2a dp4a ex2 fma fns ld lg2 lop3 mad "
    "mad24 madc max min mov mul mul24 neg not or popc prmt rcp rem rsqrt sad selp set setp shf shfl shl shr sin slct "
    "sqrt sub subc szext tanh xor".split()
)
MEMORY = frozenset(("ld", "shfl"))  # among these, those whose operands not only arithmetic uses
NAMED_LATER = frozenset(("tcgen05", "wgmma", "call"))  # operands are used later, or by another function
ENDS = frozenset(("bra", "brx", "ret", "exit", "trap", "call"))
BANKS = dict.fromkeys("b16 u16 s16 f16 b32 u32 s32 f32 f16x2 bf16 bf16x2".split(), "R")
BANKS |= dict.fromkeys("b64 u64 s64 f64".split(), "Q")


def registers(operand) -> list[str]:
    """Returns the register names in an operand, at any depth."""
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
    """Maps each register that can share a row to (register file, number of the row). Numbers are negative for registers
    that only arithmetic uses, whose values engine/blocks.py need not keep."""
    stretch, home = 0, {}  # name -> the only basic block in which it occurs, or -1
    lives: dict[str, list[int]] = {}  # name -> first and last instruction
    looked_at: set[str] = set()  # used by other than arithmetic instructions
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
    """Returns whether every active lane writes the whole register before the instruction reads it."""
    if item.opcode not in WRITES_FIRST or item.guard is not None:
        return False
    return not any(name in registers(x) for x in item.operands[1:])


def _dealt(
    function: Function, begins: dict[int, list[str]], lives: dict[str, list[int]], looked_at: set[str]
) -> dict[str, tuple[str, int]]:
    """Assigns row numbers, the most recently freed one first. A row becomes free after the instruction with its last
    use, since parts of an instruction may write before they read."""
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
