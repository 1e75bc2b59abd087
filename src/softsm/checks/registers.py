"""Registers that are read although nothing on any way to the instruction writes them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from softsm.ptx.ast import Instruction
from softsm.ptx.flow import blocks_of

if TYPE_CHECKING:
    from softsm.engine.launch import Kernel

_known: weakref.WeakKeyDictionary[Kernel, list[tuple[Instruction, str]]] = weakref.WeakKeyDictionary()


def undefined_in(kernel: Kernel) -> list[tuple[Instruction, str]]:
    """Returns (instruction, register) of reads that no write comes before."""
    if kernel not in _known:
        wide = {name for name, kind in kernel.function.registers.items() if kind == "b128"}
        found = undefined(kernel.program.flow[kernel.function.name], kernel.function.branch_targets)
        _known[kernel] = [(ins, name) for ins, name in found if name not in wide]
    return _known[kernel]


def undefined(flow: list[tuple], tables: dict[str, tuple[str, ...]]) -> list[tuple[Instruction, str]]:
    """Returns [(instruction, register)]. flow: (instruction or label, names read, names written) in the order of
    the text;
    tables: the lists of brx. A guarded write counts as one: only what is never written before is found."""
    names = sorted({name for _, read, written in flow for name in (*read, *written)})
    bit = {name: 1 << i for i, name in enumerate(names)}
    blocks = blocks_of([item for item, _, _ in flow], tables)
    written = [0] * len(blocks)
    for b, block in enumerate(blocks):
        for _, _, names_written in flow[block.start : block.stop]:
            for name in names_written:
                written[b] |= bit[name]
    before = [0] * len(blocks)
    reached = {0}
    work = [0]
    while work:
        b = work.pop()
        after = before[b] | written[b]
        for s in blocks[b].follows:
            if s not in reached or after & ~before[s]:
                reached.add(s)
                before[s] |= after
                work.append(s)
    found = []
    for b in sorted(reached):
        have = before[b]
        for item, read, names_written in flow[blocks[b].start : blocks[b].stop]:
            found += [(item, name) for name in sorted(read) if not have & bit[name]]
            for name in names_written:
                have |= bit[name]
    return found
