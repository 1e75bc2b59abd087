"""One case of a suite: its contenders, their results and their times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from dsv4.bench.timing import Sample, in_one_line, time_calls

OURS = "dsv4"  # the names of our own contenders begin with it


class Contest(Protocol):
    """A case with its tensors made."""

    def contenders(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield (name, call) of ours, then of everything here that can compute the case; calls can be repeated."""
        ...

    def error(self, name: str, result: Any) -> float:
        """Return how far the result of a call is from the right one; at most 1 is right."""
        ...


class Case(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def flops(self) -> float: ...

    @property
    def bytes(self) -> float: ...

    def on_device(self, aot: Path | None = None) -> Contest:
        """Make the contest. aot: a directory of `dsv4 compile` whose kernels are contenders too, if the suite has
        them.
        """
        ...


@dataclass
class Measured:
    case: Case
    samples: dict[str, Sample] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def microseconds(self) -> dict[str, float]:
        return {who: sample.microseconds for who, sample in self.samples.items()}

    def as_json(self) -> dict[str, Any]:
        us = self.microseconds
        return {
            "case": self.case.name,
            "flops": self.case.flops,
            "bytes": self.case.bytes,
            "microseconds": {who: round(t, 2) for who, t in us.items()},
            "quartiles": {who: [round(s.low, 2), round(s.high, 2)] for who, s in self.samples.items()},
            "megahertz": {who: round(s.megahertz) for who, s in self.samples.items()},
            "replays": {who: s.replays for who, s in self.samples.items()},
            "tflops": {who: round(self.case.flops / t / 1e6, 1) for who, t in us.items()},
            "terabytes_per_second": {who: round(self.case.bytes / t / 1e6, 3) for who, t in us.items()},
            "errors": {who: float(f"{error:.3g}") for who, error in self.errors.items()},
            "refused": self.refused,
        }


def measure(case: Case, repeats: int = 30, aot: Path | None = None, peers: Sequence[str] = ("",)) -> Measured:
    """Check every contender, then time those that are right. Errors are relative to the bound of the case: at most 1
    is right. peers: words; of the peers, those whose name contains one of them are measured."""
    result = Measured(case)
    contest = case.on_device(aot)
    calls: dict[str, Callable[[], Any]] = {}
    for name, call in contest.contenders():
        if not name.startswith(OURS) and not any(word in name for word in peers):
            continue
        try:
            error = contest.error(name, call())
        except Exception as why:  # a peer may fail in any way; that is one line of the record, not the end of it
            if name.startswith(OURS) and not isinstance(why, (RuntimeError, NotImplementedError)):
                raise
            result.refused[name] = in_one_line(why)
            continue
        result.errors[name] = error
        if error <= 1:
            calls[name] = call
        else:
            result.refused[name] = f"wrong: its error is {error:.3g} of the bound"
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
    result.samples, refused = time_calls(calls, repeats, getattr(case, "mode", "graph"))
    result.refused |= refused
    return result
