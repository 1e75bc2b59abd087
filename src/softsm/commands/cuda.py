"""Runs a CUDA C++ program for `softsm run`, `check`, `trace` and `time`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from softsm import accepted
from softsm.doors.cuda.compile import Program, compiled
from softsm.doors.cuda.runtime import Runtime
from softsm.engine.ranks import MOST


@dataclass
class CudaFile:
    file: Path
    arguments: Sequence[str]
    arch: str
    flags: Sequence[str]
    ranks: int

    def __post_init__(self) -> None:
        accepted.whole("ranks", self.ranks, 1, MOST)

    @cached_property
    def program(self) -> Program:
        return compiled(self.file, self.arch, self.flags)

    def run(self, sms: int, order: str, seed: int) -> None:
        runtime = Runtime(self.arch, sms, self.ranks, order=order, seed=seed)
        status = runtime.call(self.program, [str(self.file), *self.arguments])
        if status:
            raise SystemExit(status)
