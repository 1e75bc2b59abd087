"""The basic blocks of a function and their successors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from softsm.ptx.ast import Instruction, Label

ENDS = ("ret", "exit", "trap")


class Block(NamedTuple):
    start: int  # the block is items[start:stop]
    stop: int
    follows: list[int]  # numbers of the successor blocks


def blocks_of(items: Sequence[Instruction | Label], tables: dict[str, tuple[str, ...]]) -> list[Block]:
    """Returns the blocks. items: in the order of the text; tables: the target lists of brx."""
    starts = {0, *(i for i, item in enumerate(items) if isinstance(item, Label))}
    starts |= {i + 1 for i, item in enumerate(items) if ends_block(item)}
    first = sorted(s for s in starts if s < len(items))
    number = {}
    for b, start in enumerate(first):
        label = items[start]
        if isinstance(label, Label):
            number[label.name] = b
    stops = [*first[1:], len(items)]
    return [
        Block(start, stop, _successors(items[stop - 1], b, len(first), number, tables))
        for b, (start, stop) in enumerate(zip(first, stops))
    ]


def ends_block(item: Instruction | Label) -> bool:
    return isinstance(item, Instruction) and item.opcode in ("bra", "brx", *ENDS)


def _successors(last, b: int, count: int, number: dict[str, int], tables: dict[str, tuple[str, ...]]) -> list[int]:
    """Returns the successors of block b, whose last item is `last`."""
    out = []
    if isinstance(last, Instruction) and last.opcode == "bra":
        out = [number[last.operands[0].name]] if last.operands[0].name in number else []
    elif isinstance(last, Instruction) and last.opcode == "brx":
        targets = tables.get(getattr(last.operands[1], "name", ""), ())
        return [number[name] for name in targets if name in number]
    goes_on = not ends_block(last) or last.guard is not None
    return out + ([b + 1] if goes_on and b + 1 < count else [])
