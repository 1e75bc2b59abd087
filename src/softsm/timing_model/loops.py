"""The loop depth of each block of a graph; finds natural loops by dominators."""

from __future__ import annotations

import re
from collections.abc import Iterable

from softsm.timing_model.sass import Code

JUMPS = ("BRA", "BRX", "CALL")
TARGET = re.compile(r"\.L_[A-Za-z0-9_]+")


def depths(count: int, edges: Iterable[tuple[int, int]], entries: Iterable[int]) -> list[int]:
    """Returns the number of loops around each of `count` blocks. A loop is an edge back to a block that dominates the
    edge's source; all back edges to one block are one loop."""
    after: list[list[int]] = [[] for _ in range(count)]
    before: list[list[int]] = [[] for _ in range(count)]
    for a, b in set(edges):
        after[a].append(b)
        before[b].append(a)
    entries = set(entries)
    order: list[int] = []  # each block after its successors
    seen = [False] * count
    for first in sorted(entries):
        stack = [] if seen[first] else [(first, iter(after[first]))]
        seen[first] = True
        while stack:
            node, rest = stack[-1]
            follow = next((x for x in rest if not seen[x]), None)
            if follow is None:
                order.append(node)
                stack.pop()
            else:
                seen[follow] = True
                stack.append((follow, iter(after[follow])))
    order.reverse()
    everything = (1 << count) - 1
    dominators = [everything] * count  # sets of blocks as bit masks
    changed = True
    while changed:
        changed = False
        for node in order:
            common = 0 if node in entries else everything
            for x in before[node] if common else ():
                common &= dominators[x]
            common |= 1 << node
            changed |= common != dominators[node]
            dominators[node] = common
    loops: dict[int, set[int]] = {}
    for a in order:
        for head in after[a]:
            if dominators[a] >> head & 1:
                body = loops.setdefault(head, {head})
                todo = [a]
                while todo:
                    x = todo.pop()
                    if x not in body and seen[x]:
                        body.add(x)
                        todo += before[x]
    found = [0] * count
    for body in loops.values():
        for node in body:
            found[node] += 1
    return found


def machine_depths(code: Code) -> list[int]:
    """Returns the loop depth of each block of a kernel's machine code. Blocks without predecessors are entries."""
    block_at = {block[0]: n for n, block in enumerate(code.blocks)}
    targets = {name: block_at[i] for name, i in code.labels.items() if i in block_at}
    edges: list[tuple[int, int]] = []
    for n, block in enumerate(code.blocks):
        last = code.instructions[block[-1]]
        name = last.opcode.split(".")[0]
        edges += [(n, targets[t]) for t in TARGET.findall(last.text) if name in JUMPS and t in targets]
        always = name in ("EXIT", "RET", "BRX") or (name == "BRA" and last.text.startswith("`"))
        if (last.guarded or not always) and n + 1 < len(code.blocks):
            edges.append((n, n + 1))
    led_to = {b for _, b in edges}
    return depths(len(code.blocks), edges, {0} | set(range(len(code.blocks))) - led_to)
