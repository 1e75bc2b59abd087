"""What a group of microbenchmarks is, and the rows it makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]


class Bench:
    """A group: `kernels` gives (name, PTX) of all that may be assembled ahead, `rows` measures. A point that fails
    leaves a row that says why, and the others go on."""

    group = ""

    def __init__(self, device, keep: Callable[[Row], None]):
        self.device, self.keep = device, keep

    def kernels(self) -> Iterator[tuple[str, str]]:
        raise NotImplementedError

    def rows(self, run) -> Iterator[Row]:
        raise NotImplementedError

    @contextlib.contextmanager
    def point(self, name: str):
        def report(value: float, unit: str, stamps=None, **more: Any) -> Row:
            row: Row = {"group": self.group, "name": name, "value": value, "unit": unit, **more}
            if stamps is not None:
                row |= {"ns": stamps.ns(), "mhz": round(stamps.mhz(), 1)}
            return row

        try:
            yield report
        except Exception as why:  # one point must not lose the others
            self.keep({"group": self.group, "name": name, "error": f"{type(why).__name__}: {why}"[:300]})

    def measure(self) -> None:
        for row in self.rows(self.device.run):
            self.keep(row)
