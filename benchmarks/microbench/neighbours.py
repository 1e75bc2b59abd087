"""What multiprocessors that read at the same time do to each other: lines that several of them ask for, by how far
apart their CTAs are in the grid, and reads of device memory between other work."""

from __future__ import annotations

from collections.abc import Iterator

from bench import Bench, Row
from copies import BARRIERS, ring

BOX, STAGES = 16384, 8
L2, DEVICE = 16 << 20, 2 << 30  # bytes that the CTAs go through


class Neighbours(Bench):
    group = "neighbours"
    SHARED = tuple((n, apart) for n in (1, 2, 4, 8, 16, 33, 132) for apart in (False, True) if apart or 1 < n < 132)
    STEPS = tuple((box, work) for box in (16384, 65536) for work in (0, 500, 1000, 2000, 4000, 8000))

    def kernels(self) -> Iterator[tuple[str, str]]:
        for n, apart in self.SHARED:
            yield f"shared {n} {apart}", ring("bulk", BOX, STAGES, n, apart)
        for box, work in self.STEPS:
            yield f"steps {box} {work}", ring("bulk", box, 1, 1, work=work)

    def rows(self, run) -> Iterator[Row]:
        big = self.device.memory(DEVICE)
        for n, apart in self.SHARED:
            with self.point(f"16 KB read by {n} CTAs each, {'far apart' if apart else 'in a row'}, L2") as report:
                text, shared = ring("bulk", BOX, STAGES, n, apart), BARRIERS + BOX * STAGES
                times = 64
                run(text, 132, 32, shared, source=big, n=times, m=L2 // BOX - 1)
                stamps = run(text, 132, 32, shared, source=big, n=times, m=L2 // BOX - 1)
                moved = (times + 1) * STAGES * BOX
                yield report(moved / stamps.cycles(), "bytes/cycle of an SM", stamps)
        for box, work in self.STEPS:
            with self.point(f"{box >> 10} KB from device memory, then {work} cycles of other work, 132 CTAs") as report:
                text, times = ring("bulk", box, 1, 1, work=work), 100
                self.device.flush()
                stamps = run(text, 132, 32, BARRIERS + box, source=big, n=times, m=DEVICE // box - 1)
                yield report(stamps.cycles() / times, "cycles a step", stamps)
