"""Registers that are read although nothing on any way to the instruction writes them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from softsm.ptx.ast import Instruction, Label, Symbol

if TYPE_CHECKING:
    from softsm.engine.launch import Kernel

ENDS = ("ret", "exit", "trap")


_known: weakref.WeakKeyDictionary[Kernel, list[tuple[Instruction, str]]] = weakref.WeakKeyDictionary()


def undefined_in(kernel: Kernel) -> list[tuple[Instruction, str]]:
    """(instruction, register) of reads that no write comes before."""
    if kernel not in _known:
        wide = {name for name, kind in kernel.function.registers.items() if kind == "b128"}
        found = undefined(kernel.program.flow, kernel.function.branch_targets)
        _known[kernel] = [(ins, name) for ins, name in found if name not in wide]
    return _known[kernel]


def undefined(flow: list[tuple], tables: dict[str, tuple[str, ...]]) -> list[tuple[Instruction, str]]:
    """[(instruction, register)]. flow: (instruction or label, names read, names written) in the order of the text;
    tables: the lists of brx. A guarded write counts as one: only what is never written before is found."""
    names = sorted({name for _, read, written in flow for name in (*read, *written)})
    bit = {name: 1 << i for i, name in enumerate(names)}
    starts = [0] + [i for i, (item, _, _) in enumerate(flow) if isinstance(item, Label)]
    starts += [i + 1 for i, (item, _, _) in enumerate(flow) if ends_block(item)]
    starts = sorted({s for s in starts if s < len(flow)})
    stops = [*starts[1:], len(flow)]
    block_of = {flow[s][0].name: b for b, s in enumerate(starts) if isinstance(flow[s][0], Label)}
    written = [0] * len(starts)
    follows: list[list[int]] = []
    for b, (start, stop) in enumerate(zip(starts, stops)):
        for _, _, names_written in flow[start:stop]:
            for name in names_written:
                written[b] |= bit[name]
        follows.append(successors(flow[stop - 1][0], b, len(starts), block_of, tables))
    before = [0] * len(starts)
    reached = {0}
    work = [0]
    while work:
        b = work.pop()
        after = before[b] | written[b]
        for s in follows[b]:
            if s not in reached or after & ~before[s]:
                reached.add(s)
                before[s] |= after
                work.append(s)
    found = []
    for b in sorted(reached):
        have = before[b]
        for item, read, names_written in flow[starts[b] : stops[b]]:
            found += [(item, name) for name in sorted(read) if not have & bit[name]]
            for name in names_written:
                have |= bit[name]
    return found


def ends_block(item) -> bool:
    return isinstance(item, Instruction) and item.opcode in ("bra", "brx", *ENDS)


def successors(last, b: int, count: int, block_of: dict[str, int], tables: dict) -> list[int]:
    """Blocks that may follow block b, which ends in the instruction `last`."""
    out = []
    if isinstance(last, Instruction) and last.opcode == "bra":
        out = [block_of[last.operands[0].name]] if last.operands[0].name in block_of else []
    elif isinstance(last, Instruction) and last.opcode == "brx":
        operand = last.operands[1]
        targets = tables.get(operand.name, ()) if isinstance(operand, Symbol) or hasattr(operand, "name") else ()
        return [block_of[name] for name in targets if name in block_of]
    goes_on = not ends_block(last) or last.guard is not None
    return out + ([b + 1] if goes_on and b + 1 < count else [])
