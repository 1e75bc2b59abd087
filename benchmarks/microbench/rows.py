# ruff: noqa: E501  PTX text
"""Lanes that go along rows of their own, as in recursive filters and hashes of records: every access has 32 lines. What
depends on the pitch of the rows (do their lines evict each other from L1?) and on the number of rows."""

from __future__ import annotations

from collections.abc import Iterator

from bench import Bench, Row
from ptx import frame, loop

WAYS, UNROLLED, WORDS = ("loads", "stores", "both"), 4, 64


def along(way: str) -> str:
    """%m: bytes from a row to the next. `both`: each word is loaded, changed and stored to another tensor before the
    next one is loaded, because ptxas does not know where that is."""
    text = ""
    for k in range(UNROLLED):
        if way != "stores":
            text += f"  ld.global.b32 %f{k}, [%d3+{4 * k}]; xor.b32 %acc, %acc, %f{k};\n"
        if way != "loads":
            text += f"  st.global.b32 [%d4+{4 * k}], %acc;\n"
    text += f"  add.u64 %d3, %d3, {4 * UNROLLED}; add.u64 %d4, %d4, {4 * UNROLLED};\n"
    setup = """  mad.lo.u32 %r2, %cta, 32, %lane; mul.wide.u32 %d3, %r2, %m; add.u64 %d3, %d3, %src;
  mov.u32 %r3, %nctaid.x; mul.lo.u32 %r3, %r3, 32; mul.wide.u32 %d4, %r3, %m; add.u64 %d4, %d4, %d3;
"""
    return frame(32, loop(text), setup)


class Rows(Bench):
    group = "rows"
    PITCHES, CTAS = (256, 272, 512, 528, 2048, 2176, 8192, 8320), (1, 4, 8, 16)
    MOST = 1 << 30  # bytes of both tensors

    def kernels(self) -> Iterator[tuple[str, str]]:
        for way in WAYS:
            yield way, along(way)

    def rows(self, run) -> Iterator[Row]:
        buffer, n = self.device.memory(self.MOST), WORDS // UNROLLED
        for way in WAYS:
            for pitch in self.PITCHES:
                for ctas in (c for c in self.CTAS if 2 * 132 * 32 * c * pitch <= self.MOST):
                    with self.point(f"{way} along rows of {pitch} bytes, {ctas} x 32 rows of an SM") as report:
                        text, grid = along(way), 132 * ctas
                        run(text, grid, 32, source=buffer, n=n, m=pitch)
                        stamps = run(text, grid, 32, source=buffer, n=n, m=pitch)
                        yield report(stamps.cycles() / (WORDS * ctas), "cycles of the SM a word of 32 lanes", stamps)
