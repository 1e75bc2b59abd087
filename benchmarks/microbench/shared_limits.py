# ruff: noqa: E501  PTX text
"""What all warps of a multiprocessor share beside pipes: the fetch of code by warps that are not in step, and fences."""

from __future__ import annotations

from collections.abc import Iterator

from bench import Bench, Row
from everyday import HASH, straight
from ptx import frame, loop

SIZE = 1 << 28
# At address %d3, a line by a hashed number; %d4 is another one, never asked for before.
FENCED = {
    "fence": "  fence.acq_rel.gpu;\n",
    "atom": "  atom.relaxed.gpu.global.add.f32 %f1, [%d3], %f0; xor.b32 %acc, %acc, %f1;\n",
    "atom.acq_rel": "  atom.acq_rel.gpu.global.add.f32 %f1, [%d3], %f0; xor.b32 %acc, %acc, %f1;\n",
    "load": "  ld.global.b32 %f2, [%d4]; xor.b32 %acc, %acc, %f2;\n",
    "load, fence": "  ld.global.b32 %f2, [%d4]; xor.b32 %acc, %acc, %f2; fence.acq_rel.gpu;\n",
    "load, atom": "  ld.global.b32 %f2, [%d4]; xor.b32 %acc, %acc, %f2;\n  atom.relaxed.gpu.global.add.f32 %f1, [%d3], %f0; xor.b32 %acc, %acc, %f1;\n",
    "load, atom.acq_rel": "  ld.global.b32 %f2, [%d4]; xor.b32 %acc, %acc, %f2;\n  atom.acq_rel.gpu.global.add.f32 %f1, [%d3], %f0; xor.b32 %acc, %acc, %f1;\n",
}


def fenced(what: str, warps: int, size: int) -> str:
    """%m: mask of the lines that are changed, in the first half of `size` bytes; loads are from the other."""
    body = loop(f"""  {HASH.format(d="%r3", s="%r2")} and.b32 %r3, %r3, %m; mul.wide.u32 %d3, %r3, 128; add.u64 %d3, %d3, %d7;
  and.b32 %r9, %r2, {size // 256 - 1}; mul.wide.u32 %d4, %r9, 128; add.u64 %d4, %d4, %d7; add.u64 %d4, %d4, {size // 2};
{FENCED[what]}  add.u32 %r2, %r2, %r8;""")
    setup = f"""  mad.lo.u32 %r2, %cta, {warps}, %warp; mov.u32 %r8, %nctaid.x; mul.lo.u32 %r8, %r8, {warps}; mov.b32 %f0, 0;
  mul.wide.u32 %d7, %lane, 4; add.u64 %d7, %d7, %src;
"""
    return frame(32 * warps, body, setup)


class SharedLimits(Bench):
    group = "shared limits"
    CODE = tuple((n, w) for n in (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144) for w in (4, 8, 16, 32))
    CTAS = (1, 2, 4, 8)  # of eight warps on a multiprocessor

    def kernels(self) -> Iterator[tuple[str, str]]:
        for n, w in self.CODE:
            yield f"straight {n} {w}", straight(n, w, True)
        for what in FENCED:
            yield what, fenced(what, 8, min(SIZE, self.device.most))

    def rows(self, run) -> Iterator[Row]:
        for n, w in self.CODE:
            with self.point(f"straight code of {n} FFMA, {w} warps apart, many rounds") as report:
                rounds = max(4, self.device.most // 32768 // n)
                stamps = run(straight(n, w, True), 132, 32 * w, n=rounds)
                more = 300 * (w - 1) * 4.1  # the last one's delay
                value = (stamps.cycles() - more) / (rounds * n * max(1, w // 4))
                yield report(value, "cycles of a scheduler an instruction", stamps)
        size = min(SIZE, self.device.most)
        buffer = self.device.memory(size)
        for what in FENCED:
            for ctas in self.CTAS:
                for lines in (64, 1 << 14):
                    with self.point(f"{what}, {8 * ctas} warps of a multiprocessor, {lines} lines") as report:
                        text, n = fenced(what, 8, size), 24
                        stamps = run(text, 132 * ctas, 256, source=buffer, n=n, m=lines - 1)
                        yield report(stamps.ns() / n, "ns a round of a warp", stamps)
