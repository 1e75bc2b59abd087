"""Programs that the model has no number for: their path depends on CTAs that a timing run does not execute.

Two ways are known. A CTA waits for memory that another one writes: the run then stands still. Or a branch depends on
what an atomic operation on global memory returned (a counter that hands out work, the last CTA of a group): the few
CTAs that run would take the work of all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from softsm.errors import SoftsmError

_STATEMENT = re.compile(r"^\s*(?:[\w$]+:\s*)*(?:@!?(%[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)
_REGISTER = re.compile(r"%[A-Za-z_$][\w$]*")
_ADDRESS = re.compile(r"\[([^\]]*)\]")


class CannotFollow(SoftsmError):
    """The model has no number for this program."""


def branch_on_atomic(source: str, ran: Iterable[int]) -> tuple[int, int] | None:
    """(line of an atomic operation, line of a branch that depends on its result) of a PTX text; `ran`: the lines that
    were executed. Values are followed through registers, and through shared memory under one and the same address."""
    executed = set(ran)
    statements = [
        (number, m.groups())
        for number, line in enumerate(source.splitlines(), 1)
        for text in line.partition("//")[0].split(";")
        if (m := _STATEMENT.match(text))
    ]
    origin: dict[str, int] = {}  # register or shared address -> line of the atomic
    for line, (_, name, rest) in statements:
        shared = ".shared" in name
        if name.startswith("atom.") and not shared and line in executed:
            written = _REGISTER.findall(rest.partition("[")[0])
            origin |= {r: line for r in written if r != "%_"}
    grew = bool(origin)
    while grew:
        grew = False
        for _, (guard, name, rest) in statements:
            if name.startswith(("bra", "bar", "ret")):
                continue
            address = _ADDRESS.search(rest)
            if name.startswith("st.shared") and address:
                target = [f"[{address[1].strip()}]"]
                read = _REGISTER.findall(rest[address.end() :])
            elif name.startswith("ld.shared") and address:
                target = _REGISTER.findall(rest[: address.start()])
                read = [f"[{address[1].strip()}]"]
            elif name.startswith(("st.", "red.")):
                continue
            else:
                first = re.match(r"\s*(\{[^}]*\}|[^,]*)", rest)
                end = first.end() if first else 0
                target, read = _REGISTER.findall(rest[:end]), _REGISTER.findall(rest[end:])
            found = next((origin[r] for r in [*read, guard or ""] if r in origin), None)
            if found is not None:
                for r in target:
                    if r not in origin:
                        origin[r] = found
                        grew = True
    for line, (guard, name, _) in statements:
        if name.startswith("bra") and guard in origin and line in executed:
            return origin[guard], line
    return None
