"""The findings about a program: one `Diagnostic` each, collected in a `Report`."""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass, field
from typing import Any

from softsm.ptx.ast import brief
from softsm.report.codes import CODES, depth, fix

__all__ = ["CODES", "Diagnostic", "Party", "Report"]


_NUMBERS = re.compile(r"0x[0-9a-f]+|[0-9]+")
_PLACE = re.compile(r"warp (\d+)(?: \(.*?\))? of CTA \(([^)]*)\)(?: of GPU (\d+))?")


@dataclass(frozen=True)
class Party:
    """One side of a finding: the instruction, who executed it and what it accessed."""

    who: str  # 'warp 5 of CTA (0, 0, 0)', 'tcgen05.mma issued by warp 12 of ...'
    ptx_line: int = 0
    instruction: str = ""
    source: str = ""  # 'kernel.py:120 in softmax_role'
    what: str = ""  # 'wrote shared bytes 0x400 to 0x403'

    def deed(self) -> str:
        """Returns what the party did, without numbers and tense."""
        verb, _, rest = _NUMBERS.sub("#", self.what).partition(" ")
        return f"{ {'wrote': 'writes', 'read': 'reads'}.get(verb, verb) } {rest}"

    def __str__(self) -> str:
        place = f"PTX line {self.ptx_line}: {brief(self.instruction)}" if self.ptx_line else ""
        return ", ".join(x for x in (self.who, self.what, place, self.source) if x)


def launches(count: int) -> str:
    return f"{count} launch" if count == 1 else f"{count} launches"


@dataclass(frozen=True)
class Diagnostic:
    """A finding: its `code`, which `softsm explain` knows, the `message`, up to two `parties` and a `fix`."""

    code: str  # 'race', 'uninitialised', 'in-flight', ...; `softsm explain CODE`
    message: str  # one sentence: what happened
    parties: tuple[Party, ...] = ()
    fix: str = ""
    raised: bool = False  # the finding stopped the kernel, and the launch raised it as well

    def key(self) -> tuple:
        """Returns a key that is equal for duplicate findings: the same places in either order or, without places, the
        same words."""
        if not self.parties:
            return self.code, _NUMBERS.sub("#", self.message.split("\n")[0])
        return self.code, *sorted((p.source or f"{p.ptx_line} {p.instruction}", p.deed()) for p in self.parties)

    def apart(self) -> int:
        """Returns how far apart the parties are: 0 in one warp, 1 in one CTA, 2 in different CTAs, 3 on different GPUs.
        Which warp of a CTA issued an asynchronous operation makes no difference."""
        found = [place.groups() for place in (_PLACE.search(p.who) for p in self.parties) if place]
        levels = 2 if any(" issued by " in p.who for p in self.parties) else 3
        return max((3 - k for k in range(levels) if len({place[2 - k] for place in found}) > 1), default=0)

    def __str__(self) -> str:
        lines = [f"{self.code}: {self.message}"]
        lines += [f"  {name} {party}" for name, party in zip(("this  ", "other ", "      "), self.parties)]
        advice = self.fix or fix(self.code)[:1].lower() + fix(self.code)[1:].removesuffix(".")
        if advice:
            lines.append(f"  fix: {advice}")
        return "\n".join(lines)


@dataclass
class Report:
    """Everything found while a `checking` block ran: a sequence of `Diagnostic`, causes first. Truthy if there are
    findings. `warnings` are violations of the PTX specification without effect so far; they are not findings."""

    diagnostics: list[Diagnostic] = field(default_factory=list)  # causes first, then in the order they were found
    launches: int = 0
    tap: Any = None  # softsm.checks.products.Tap, with checking(tap=True)
    warnings: list[Diagnostic] = field(default_factory=list)  # violations of the PTX specification, without effect yet
    _seen: dict[tuple, tuple[Diagnostic, set]] = field(default_factory=dict)  # by key, with the places in the PTX
    additions: int = 0  # how often `add` was called

    def add(self, diagnostic: Diagnostic) -> None:
        """Adds each finding once: the same pair of places in the source is not new, whatever the PTX lines and the
        order of the two. A pair that is further apart replaces the one shown: what orders the lanes of a warp does not
        order warps, and a CTA's barrier does not order CTAs."""
        key = diagnostic.key()
        lines = sorted((p.ptx_line, p.instruction) for p in diagnostic.parties)
        self.additions += 1
        if key in self._seen and diagnostic.parties:
            shown, places = self._seen[key]
            places.add(tuple(lines))
            if diagnostic.apart() > shown.apart():
                which = next(i for i, d in enumerate(self.diagnostics) if d is shown)
                self.diagnostics[which], self._seen[key] = diagnostic, (diagnostic, places)
            return
        self._seen[key] = diagnostic, {tuple(lines)}
        bisect.insort(self.diagnostics, diagnostic, key=lambda d: depth(d.code))

    def warn(self, diagnostic: Diagnostic) -> None:
        """Adds each warning once."""
        if all(diagnostic.key() != d.key() for d in self.warnings):
            self.warnings.append(diagnostic)

    def codes(self) -> list[str]:
        """Returns the code of each finding."""
        return [d.code for d in self.diagnostics]

    def again(self) -> dict[int, int]:
        """Maps a diagnostic's number to how often it occurred at other PTX lines, between the same source lines."""
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
