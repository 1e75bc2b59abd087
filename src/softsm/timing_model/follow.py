"""Detects programs that the model cannot predict: their path depends on CTAs that a timing run does not execute.

Two kinds are known. A CTA waits for memory that another one writes; the run then deadlocks. Or a branch depends on the
result of an atomic operation on global memory (a counter that hands out work, the last CTA of a group); the few CTAs
that run would then do the work of all others.

The CTAs that run follow branches on loaded data. Where their paths differ, the paths of the other CTAs are a guess, as
the report states.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from softsm.errors import SoftsmError
from softsm.ptx.roles import place_of

_STATEMENT = re.compile(r"^\s*(?:[\w$]+:\s*)*(?:@!?(%[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)
REGISTER = re.compile(r"%[A-Za-z_$][\w$]*")
ADDRESS = re.compile(r"\[([^\]]*)\]")
_TARGET = re.compile(r"\s*(\{[^}]*\}|[^,]*)")
_SUM = re.compile(r"^([%\w$]+)(?:\+(-?\d+))?$")
_CTA = re.compile(r"%ctaid\.[xyz]")
_LOADS = ("ld.global", "ld.acquire", "ld.relaxed", "ld.volatile", "ld.weak")


class CannotFollow(SoftsmError):
    """Raised for a program that the model cannot predict."""


class Statement(NamedTuple):
    line: int
    guard: str | None
    name: str
    rest: str

    @property
    def target(self) -> str:
        found = _TARGET.match(self.rest)
        return found[0] if found else ""


def statements_of(source: str) -> list[Statement]:
    return [
        Statement(number, *m.groups())
        for number, line in enumerate(source.splitlines(), 1)
        for text in line.partition("//")[0].split(";")
        if (m := _STATEMENT.match(text))
    ]


def addressed_by(source: str, loads: bool = False) -> dict[int, frozenset[str]]:
    """Maps the PTX line of each atomic operation on global memory and of each copy from there, with `loads` of each
    load, to what its address depends on: %ctaid.x, y, z, or loaded "data"."""
    statements = statements_of(source)
    found: dict[str, frozenset[str]] = {}
    grew = True
    while grew:
        grew = False
        for s in statements:
            if s.name.startswith(("bra", "bar", "ret", "st.", "red.")):
                continue
            read = s.rest[len(s.target) :]
            loaded = s.name.startswith(("ld.", "atom.")) and not s.name.startswith("ld.param")
            new = {"data"} if loaded else set(_CTA.findall(read))
            for r in () if loaded else REGISTER.findall(read):
                new |= found.get(r, frozenset())
            for r in REGISTER.findall(s.target):
                if not new <= found.get(r, frozenset()):
                    found[r] = found.get(r, frozenset()) | new
                    grew = True
    out: dict[int, frozenset[str]] = {}
    for s in statements:
        copies = s.name.startswith("cp.async") and ".shared" in s.name and ".global" in s.name
        addresses = ADDRESS.findall(s.rest)[copies:]  # a copy's first address is in shared memory
        known = ("atom.", "red.", *_LOADS) if loads else ("atom.", "red.")
        if addresses and (copies or s.name.startswith(known) and ".shared" not in s.name):
            out[s.line] = frozenset().union(*(found.get(r, frozenset()) for r in REGISTER.findall(addresses[0])))
    return out


class Addresses:
    """Resolves shared addresses to a name and a number, whatever register holds them: `[box]` and, after
    `mov.b32 %r6, box`, `[ %r6 + 0 ]` are the same."""

    def __init__(self, statements: list[Statement]):
        written = Counter(r for s in statements for r in REGISTER.findall(s.target) if not s.name.startswith("st."))
        self.known: dict[str, str] = {}
        for s in statements:
            register = s.target.strip()
            if written[register] == 1 and s.guard is None and s.name.startswith(("mov.", "add.")):
                terms = [x.strip() for x in s.rest.split(",")[1:]]
                found = "+".join(terms)
                if _SUM.match(found) and not found[:1].isdigit():
                    self.known[register] = found

    def of(self, text: str) -> str:
        name, number = text.replace(" ", ""), 0
        for _ in range(8):  # names of names
            found = _SUM.match(name)
            if found is None:
                break
            name, number = found[1], number + int(found[2] or 0)
            if name not in self.known:
                break
            name = self.known[name]
        return f"[{name}+{number}]"


_COMPARED = re.compile(r"setp\.\w+\.(?:\w+\.)*(?:bf16|f16|f32|f64)")
# Of the CTA's number they make what neither grows nor falls along the grid; `and` with a negative number aligns.
_FOLDS = ("rem.", "bfe.", "xor.", "mul.hi.", "div.", "shr.", "and.", "sub.", "min.", "max.")
_ALIGNS = re.compile(r",\s*-\d+\s*$")


def _branch_on(
    source: str,
    ran: Iterable[int],
    begins: Callable[[Statement], bool],
    one_cell: bool = False,
    ends: tuple[str, ...] = ("bra",),
) -> tuple[int, int] | None:
    """Returns (line of an operation that `begins` accepts, line of a branch that depends on its result) of a PTX text.
    `ran`: the executed lines. Values are followed through registers, and through shared memory at a single address;
    one_cell: at any, as if it had only one. ends: what may depend on it instead of a branch."""
    executed = set(ran)
    statements = statements_of(source)
    addresses = Addresses(statements)
    cell = (lambda text: "[shared]") if one_cell else addresses.of
    origin: dict[str, int] = {}  # register or shared address -> line of the operation
    for s in statements:
        if s.line in executed and begins(s):
            origin |= {r: s.line for r in REGISTER.findall(s.target) if r != "%_"}
    grew = bool(origin)
    while grew:
        grew = False
        for s in statements:
            if s.name.startswith(("bra", "bar", "ret")):
                continue
            address = ADDRESS.search(s.rest)
            if s.name.startswith(("st.shared", "stmatrix")) and address:
                target = [cell(address[1])]
                read = REGISTER.findall(s.rest[address.end() :])
            elif s.name.startswith(("ld.shared", "ldmatrix")) and address:
                target = REGISTER.findall(s.rest[: address.start()])
                read = [cell(address[1])]
            elif s.name.startswith(("st.", "red.")):
                continue
            else:
                target, read = REGISTER.findall(s.target), REGISTER.findall(s.rest[len(s.target) :])
            found = next((origin[r] for r in [*read, s.guard or ""] if r in origin), None)
            if found is not None:
                for r in target:
                    if r not in origin:
                        origin[r] = found
                        grew = True
    for s in statements:
        if s.name.startswith(ends) and s.guard in origin and s.line in executed:
            return origin[s.guard], s.line
    return None


@functools.lru_cache(64)
def mask_on_load(source: str) -> bool:
    """Returns whether loaded values decide which lanes access global memory."""
    ran = range(1, source.count("\n") + 2)
    return _branch_on(source, ran, _loads, ends=("ld.global", "st.global", "cp.async")) is not None


def _loads(s: Statement, beginnings: tuple[str, ...] = _LOADS) -> bool:
    return s.name.startswith(beginnings) and ".shared" not in s.name


def branch_on_atomic(source: str, ran: Iterable[int]) -> tuple[int, int] | None:
    return _branch_on(source, ran, lambda s: _loads(s, ("atom.",)))


def branch_on_load(source: str, ran: Iterable[int]) -> tuple[int, int] | None:
    return _branch_on(source, ran, _loads)


def branch_on_value(source: str, ran: Iterable[int], computed: bool = False) -> tuple[int, int] | None:
    """Also of a comparison of floating-point values: a loop that ends when something has converged, or left a circle.
    Without the results of products (computed: they have them) such a comparison has no meaning."""
    ran = set(ran)
    found = branch_on_load(source, ran)
    if found is None and (computed or "mma" not in source):
        found = _branch_on(source, ran, lambda s: bool(_COMPARED.match(s.name)), one_cell=True)
    return found


@functools.lru_cache(64)
def branch_on_place(source: str, axis: int) -> bool:
    """Returns whether a branch depends on a CTA's number in another way than by growing or falling along one axis
    of the grid, as with tiles of causal attention in a grid of one dimension. CTAs along that axis do not tell of
    all then.
    """
    statements = statements_of(source)
    along = {"xyz"[axis]}
    first: set[str] = set()  # registers that hold the number or a multiple
    folded: set[str] = set()
    before = -1
    while before != len(first) + len(folded):
        before = len(first) + len(folded)
        for s in statements:
            if s.name.startswith(("bra", "bar", "ret", "st.", "red.", "ld.", "atom.")):
                continue
            read = s.rest[len(s.target) :]
            registers = {s.guard, *REGISTER.findall(read)}
            axes = {name[-1] for name in _CTA.findall(read)}
            folds = s.name.startswith(_FOLDS) and not (s.name.startswith("and.") and _ALIGNS.search(s.rest))
            if registers & folded or axes - along or (folds and registers & first):
                folded.update(REGISTER.findall(s.target))
            elif registers & first or axes:
                first.update(REGISTER.findall(s.target))
    return any(s.name.startswith("bra") and s.guard in folded for s in statements)


def places_of(source: str, kernel: str) -> dict[int, str]:
    """Maps PTX lines to file:line of the program."""
    return {line: f"{Path(file).name}:{n}" for line, (file, n) in locations(source, kernel).items()}


def locations(source: str, kernel: str) -> dict[int, tuple[str, int]]:
    """Maps PTX lines to the file and line of the program."""
    from softsm.engine.launch import load

    places = ((ins.line, place_of(ins)) for ins in load(source, kernel).program.instructions)
    return {line: (loc.file, loc.line) for line, loc in places if loc}


def refuse_work_by_atomics(name: str, source: str, lines: list[int], ran: str) -> None:
    """Raises CannotFollow if a branch that the CTAs came to depends on what an atomic operation returns."""
    found = branch_on_atomic(source, lines) if "atom." in source else None
    if found is not None:
        atomic, branch = (places_of(source, name).get(n, f"PTX line {n}") for n in found)
        raise CannotFollow(
            f"{name}: the branch at {branch} depends on what the atomic operation at {atomic} returns, that is on "
            f"other CTAs; a timing run executes {ran} and has no prediction for this kernel"
        )
