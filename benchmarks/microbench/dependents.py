"""Programmatic dependent launches: what a grid that is launched early and waits (griddepcontrol) saves beside one that
begins when the grid before it has ended."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from bench import Bench, Row
from ptx import frame

FIRST = 132  # CTAs of the first grid; the stamps of the second (by %m) lie behind its own


def first(lets_in: bool) -> str:
    """Lasts %n cycles, one CTA to a multiprocessor; lets the next grid begin at once."""
    early = "  griddepcontrol.launch_dependents;\n" if lets_in else ""
    body = """  mov.u64 %d1, %clock64;
TURN: mov.u64 %d2, %clock64; sub.u64 %d3, %d2, %d1; cvt.u32.u64 %r1, %d3; setp.lt.u32 %p1, %r1, %n; @%p1 bra TURN;
"""
    return frame(128, early + body)


def second(work: int) -> str:
    """Works for this many cycles, then waits for the grid before: stamps of the beginning, and of the wait's end."""
    body = f"""  mov.u64 %d1, %clock64;
TURN: mov.u64 %d2, %clock64; sub.u64 %d3, %d2, %d1; cvt.u32.u64 %r1, %d3; setp.lt.u32 %p1, %r1, {work}; @%p1 bra TURN;
  griddepcontrol.wait;
"""
    return frame(128, body, "  add.u32 %cta, %cta, %m;\n")


class Dependents(Bench):
    group = "dependents"

    def kernels(self) -> Iterator[tuple[str, str]]:
        yield from ((f"first {x}", first(x)) for x in (False, True))
        yield from ((f"second {work}", second(work)) for work in (0, 2000))

    def rows(self, run) -> Iterator[Row]:
        if self.device.name != "gpu":
            for _, text in self.kernels():
                run(text, 1, 128, n=1)
            return
        device = self.device
        device.flush()
        for cycles in (4000, 20000):
            for work in (0, 2000):
                for grid in (132, 256, 1024):
                    for early in (False, True):

                        def before(early=early, cycles=cycles) -> None:
                            device.launch(first(early), FIRST, 128, 0, 0, cycles, 0, b"")

                        def after(early=early, work=work, grid=grid) -> None:
                            device.launch(second(work), grid, 128, 0, 0, 0, FIRST, b"", early)

                        name = (
                            f"{grid} CTAs that work {work} cycles and wait, behind {cycles} cycles, "
                            f"{'launched early' if early else 'in order'}"
                        )
                        with self.point(name) as report:
                            alone = device.graph_behind_us([before])
                            both = device.graph_behind_us([before, after])
                            found = device.stamps[: (FIRST + grid) * 128].cpu().numpy().reshape(-1, 32, 4)[:, 0]
                            ended, began, passed = found[:FIRST, 3].max(), found[FIRST:, 1], found[FIRST:, 3]
                            since = {"began_ns": began - ended, "passed_ns": passed - ended}
                            spread = {k: [int(x) for x in np.percentile(v, (0, 50, 100))] for k, v in since.items()}
                            yield report(both - alone, "us", alone=alone, both=both, **spread)
