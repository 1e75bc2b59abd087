"""What softsm reports about a program: one `Diagnostic` per finding, collected in a `Report`."""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass, field
from typing import Any

from softsm.ptx.ast import brief
from softsm.report.codes import CODES, depth, fix

__all__ = ["CODES", "Diagnostic", "Party", "Report"]


_NUMBERS = re.compile(r"0x[0-9a-f]+|[0-9]+")


@dataclass(frozen=True)
class Party:
    """One side of a finding: the instruction, who executed it and what it touched."""

    who: str  # 'warp 5 of CTA (0, 0, 0)', 'tcgen05.mma issued by warp 12 of ...'
    ptx_line: int = 0
    instruction: str = ""
    source: str = ""  # 'kernel.py:120 in softmax_role'
    what: str = ""  # 'wrote shared bytes 0x400 to 0x403'

    def deed(self) -> str:
        """What it did, without numbers and tense."""
        verb, _, rest = _NUMBERS.sub("#", self.what).partition(" ")
        return f"{ {'wrote': 'writes', 'read': 'reads'}.get(verb, verb) } {rest}"

    def __str__(self) -> str:
        place = f"PTX line {self.ptx_line}: {brief(self.instruction)}" if self.ptx_line else ""
        return ", ".join(x for x in (self.who, self.what, place, self.source) if x)


def launches(count: int) -> str:
    return f"{count} launch" if count == 1 else f"{count} launches"


@dataclass(frozen=True)
class Diagnostic:
    code: str  # 'race', 'uninitialised', 'in-flight', ...; `softsm explain CODE`
    message: str  # one sentence of what
    parties: tuple[Party, ...] = ()
    fix: str = ""
    raised: bool = False  # it stopped the kernel: the launch raised it as well

    def key(self) -> tuple:
        """Equal for findings that say the same: the same places in either order, or where there are none the same
        words."""
        if not self.parties:
            return self.code, _NUMBERS.sub("#", self.message.split("\n")[0])
        return self.code, *sorted((p.source or f"{p.ptx_line} {p.instruction}", p.deed()) for p in self.parties)

    def across_ctas(self) -> bool:
        """Are the parties in different CTAs?"""
        return len({p.who.partition(" of CTA ")[2].partition(")")[0] for p in self.parties}) > 1

    def __str__(self) -> str:
        lines = [f"{self.code}: {self.message}"]
        lines += [f"  {name} {party}" for name, party in zip(("this  ", "other ", "      "), self.parties)]
        advice = self.fix or fix(self.code)
        if advice:
            lines.append(f"  fix: {advice}")
        return "\n".join(lines)


@dataclass
class Report:
    """Everything found while a `checking` block ran. Truthy if there are findings, which a warning is not."""

    diagnostics: list[Diagnostic] = field(default_factory=list)  # causes first, then in the order they were found
    launches: int = 0
    tap: Any = None  # softsm.checks.products.Tap, with checking(tap=True)
    warnings: list[Diagnostic] = field(default_factory=list)  # against the letter of PTX, and without effect so far
    _seen: dict[tuple, tuple[Diagnostic, set]] = field(default_factory=dict)  # by key: its places in the PTX
    additions: int = 0  # how often `add` was called

    def add(self, diagnostic: Diagnostic) -> None:
        """Each finding once: the same pair of places in the source says nothing new, at however many lines of PTX and
        whoever came first. Only that the two are in different CTAs is said rather than that they are in one: then a
        barrier does not help."""
        key = diagnostic.key()
        lines = sorted((p.ptx_line, p.instruction) for p in diagnostic.parties)
        self.additions += 1
        if key in self._seen and diagnostic.parties:
            shown, places = self._seen[key]
            places.add(tuple(lines))
            if diagnostic.across_ctas() and not shown.across_ctas():
                which = next(i for i, d in enumerate(self.diagnostics) if d is shown)
                self.diagnostics[which], self._seen[key] = diagnostic, (diagnostic, places)
            return
        self._seen[key] = diagnostic, {tuple(lines)}
        bisect.insort(self.diagnostics, diagnostic, key=lambda d: depth(d.code))

    def warn(self, diagnostic: Diagnostic) -> None:
        """Each warning once."""
        if all(diagnostic.key() != d.key() for d in self.warnings):
            self.warnings.append(diagnostic)

    def codes(self) -> list[str]:
        return [d.code for d in self.diagnostics]

    def again(self) -> dict[int, int]:
        """Number of a diagnostic -> how often it came at other lines of PTX, between the same lines of the source."""
        more = {id(shown): len(lines) - 1 for shown, lines in self._seen.values() if len(lines) > 1}
        return {i: more[id(d)] for i, d in enumerate(self.diagnostics) if id(d) in more}

    def __bool__(self) -> bool:
        return bool(self.diagnostics)

    def __iter__(self):
        return iter(self.diagnostics)

    def __len__(self) -> int:
        return len(self.diagnostics)

    def __str__(self) -> str:
        again = self.again()
        lines = [
            f"{d}\n  and {again[i]} more between the same source lines" if again.get(i) else str(d)
            for i, d in enumerate(self.diagnostics)
        ] or [f"nothing found in {launches(self.launches)}"]
        return "\n".join([*lines, *(f"warning: {w}" for w in self.warnings)])
