# ruff: noqa: E501  PTX text
"""Sums in device memory to which several CTAs add at the same time: in the same order, so that they meet at a line, or at
lines that they choose at random; by threads and in bulk."""

from __future__ import annotations

from collections.abc import Iterator

from bench import Bench, Row
from everyday import HASH, atomics
from ptx import frame, loop

CHUNK = 4096  # bytes of a bulk reduction
ADDS = {
    "red.f32": ("  red.relaxed.gpu.global.add.f32 [%d3], %f0;\n", 4),
    "red.v4.f32": ("  red.relaxed.gpu.global.add.v4.f32 [%d3], {%f0, %f0, %f0, %f0};\n", 16),
}


def in_step(op: str, warps: int) -> str:
    """%m CTAs after one another add to the same %n pieces of a tile per warp, in the same order."""
    text, size = ADDS[op]
    body = loop(f"{text}  add.u64 %d3, %d3, %d6;\n")
    setup = f"""  div.u32 %r2, %cta, %m; mul.lo.u32 %r2, %r2, %n; mul.lo.u32 %r2, %r2, {warps}; add.u32 %r2, %r2, %warp; mov.b32 %f0, 0;
  mul.wide.u32 %d3, %r2, {32 * size}; mul.wide.u32 %d4, %lane, {size}; add.u64 %d3, %d3, %d4; add.u64 %d3, %d3, %src;
  mov.b64 %d6, {warps * 32 * size};
"""
    return frame(32 * warps, body, setup)


def in_bulk(warps: int, depth: int) -> str:
    """The same by one thread of each warp, {CHUNK} bytes at a time, at most `depth` groups unread."""
    body = loop(f"""  @%p2 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d3], [%r6], {CHUNK};
  @%p2 cp.async.bulk.commit_group; @%p2 cp.async.bulk.wait_group.read {depth}; add.u64 %d3, %d3, %d6;
""")
    setup = f"""  div.u32 %r2, %cta, %m; mul.lo.u32 %r2, %r2, %n; mul.lo.u32 %r2, %r2, {warps}; add.u32 %r2, %r2, %warp;
  mul.wide.u32 %d3, %r2, {CHUNK}; add.u64 %d3, %d3, %src; mov.b64 %d6, {warps * CHUNK}; mov.b32 %r6, %sm;
  setp.eq.u32 %p2, %lane, 0; fence.proxy.async;
"""
    return frame(32 * warps, body + "  @%p2 cp.async.bulk.wait_group 0;\n", setup)


def rows_apart(stride: int) -> str:
    """Eight lanes of four words each at rows `stride` bytes apart, as the accumulators of a product lie: %m CTAs in step."""
    body = loop("  red.relaxed.gpu.global.add.v2.f32 [%d3], {%f0, %f0};\n  add.u64 %d3, %d3, 32;\n")
    setup = f"""  div.u32 %r2, %cta, %m; mad.lo.u32 %r2, %r2, 8, %warp; mov.b32 %f0, 0; mul.wide.u32 %d3, %r2, {8 * stride};
  shr.u32 %r3, %lane, 2; mul.wide.u32 %d4, %r3, {stride}; and.b32 %r3, %lane, 3; mul.wide.u32 %d5, %r3, 8;
  add.u64 %d3, %d3, %d4; add.u64 %d3, %d3, %d5; add.u64 %d3, %d3, %src;
"""
    return frame(256, body, setup)


class Sums(Bench):
    group = "sums"
    LINES = (2, 4, 8, 32, 64, 128, 512, 1024)
    TOGETHER = (1, 2, 4, 8, 16, 66)

    def kernels(self) -> Iterator[tuple[str, str]]:
        for op in ADDS:
            yield f"{op} in step", in_step(op, 8)
        yield "bulk", in_bulk(4, 1)
        yield "rows", rows_apart(4096)
        for scattered in (False, True):
            yield f"red.u32 {scattered}", atomics("red.u32", 8, scattered)

    def rows(self, run) -> Iterator[Row]:
        buffer = self.device.memory(1 << 29)
        for scattered in (False, True):
            for lines in self.LINES:
                mask = lines * (32 if scattered else 1) - 1
                where = f"scattered over {mask + 1} words" if scattered else f"to {lines} lines"
                with self.point(f"red.u32 {where}") as report:
                    text, n = atomics("red.u32", 8, scattered), 8
                    run(text, 132, 256, source=buffer, n=2, m=mask)
                    stamps = run(text, 132 * 4, 256, source=buffer, n=n, m=mask)
                    yield report(132 * 4 * 8 * n / stamps.span_ns(), "warp instructions/ns", stamps)
        for ctas in (1, 4):
            for together in self.TOGETHER:
                for cold in (False, True):
                    how = f"{together} CTAs in step, {132 * ctas} CTAs, {'HBM' if cold else 'L2'}"
                    kinds = [(op, in_step(op, 8), 256, 0, 32, 8) for op in ADDS]
                    kinds += [
                        (f"bulk {CHUNK}", in_bulk(4, 1), 128, CHUNK, 16, 4),
                        ("red.v2.f32 by rows", rows_apart(4096), 256, 0, 32, 8),
                    ]
                    for name, text, threads, shared, n, warps in kinds:
                        with self.point(f"{name}, {how}") as report:
                            run(text, 132 * ctas, threads, shared, source=buffer, n=n, m=together)
                            stamps = run(
                                text,
                                132 * ctas,
                                threads,
                                shared,
                                source=buffer,
                                n=n,
                                m=together,
                                before=self.device.flush if cold else None,
                            )
                            yield report(132 * ctas * warps * n / stamps.span_ns(), "warp instructions/ns", stamps)
        for grid in (16, 32, 132):
            for name, text in (("red.v4.f32", in_step("red.v4.f32", 4)), ("red.v2.f32 by rows", rows_apart(4096))):
                with self.point(f"{name}, {grid} CTAs, HBM") as report:
                    stamps = run(
                        text, grid, 128 if "v4" in name else 256, source=buffer, n=32, m=1, before=self.device.flush
                    )
                    yield report(stamps.ns() / 32, "ns an instruction of each warp", stamps)


def held_at_random(width: int, warps: int) -> str:
    """Loads of lanes at random words of a table of 2 (%m + 1) `width` bytes: sixteen places a lane, in one half and the other."""
    vec = {2: ".b16", 4: ".b32", 8: ".v2.b32"}[width]
    setup = "".join(
        f"  mad.lo.u32 %r2, %thread, 16, {k}; mad.lo.u32 %r2, %cta, 16384, %r2; {HASH.format(d='%r3', s='%r2')} and.b32 %r{16 + k}, %r3, %m; mul.lo.u32 %r{16 + k}, %r{16 + k}, {width};\n"
        for k in range(16)
    )
    setup += f"  add.u32 %r5, %m, 1; mul.lo.u32 %r5, %r5, {width};\n"
    text = ""
    for k in range(16):
        to = {2: f"%h{k % 8}", 4: f"%f{k}", 8: f"{{%f{2 * k}, %f{2 * k + 1}}}"}[width]
        text += f"  mad.wide.u32 %d3, %r{16 + k}, 1, %src; ld.global{vec} {to}, [%d3];\n"
        if width == 2:
            text += f"  cvt.u32.u16 %f{k}, %h{k % 8};\n"
    text += "".join(f"  xor.b32 %acc, %acc, %f{k};\n" for k in range(32 if width == 8 else 16))
    text += "".join(f"  xor.b32 %r{16 + k}, %r{16 + k}, %r5;\n" for k in range(16))
    return frame(32 * warps, loop(text), setup)


class Gathers(Bench):
    """Lanes at random words, which L1 or L2 holds."""

    group = "gathers"
    TABLES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 17, 1 << 18, 1 << 20, 1 << 23, 1 << 25)

    def kernels(self) -> Iterator[tuple[str, str]]:
        for width in (2, 4, 8):
            for warps in (4, 16):
                yield f"{width} {warps}", held_at_random(width, warps)

    def rows(self, run) -> Iterator[Row]:
        buffer = self.device.memory(1 << 28)
        for width in (2, 4, 8):
            for warps in (4, 16):
                for size in (s for s in self.TABLES if s <= self.device.most):
                    for ctas in (1, 2):
                        with self.point(
                            f"ldg of {width} bytes at random in {size} bytes, {ctas} x {warps} warps"
                        ) as report:
                            text, mask = held_at_random(width, warps), size // 2 // width - 1
                            run(text, 132 * ctas, 32 * warps, source=buffer, n=4, m=mask)
                            stamps = run(text, 132 * ctas, 32 * warps, source=buffer, n=24, m=mask)
                            yield report(
                                stamps.cycles() / (24 * 16 * warps * ctas), "cycles of the SM an instruction", stamps
                            )
