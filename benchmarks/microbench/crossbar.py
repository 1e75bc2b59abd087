# ruff: noqa: E501  PTX text
"""What goes through the crossbar of shared memory together: shuffles, loads and stores with conflicts, barriers between
them, and loads of global memory beside them."""

from __future__ import annotations

from collections.abc import Iterator

from bench import Bench, Row
from ptx import frame, loop

UNROLLED = 8
# At address %r1 + n, a lane's own; %f registers are the values.
PARTS = {
    "shfl": "  shfl.sync.bfly.b32 %f{k}, %f{k}, 1, 31, -1;\n",
    "lds": "  ld.shared.b32 %f{k}, [%r1+{at}];\n",
    "sts": "  st.shared.b32 [%r1+{at}], %f{k};\n",
    "lds16": "  ld.shared.b16 %h{k}, [%r1+{at}];\n",
    "sts16": "  st.shared.b16 [%r1+{at}], %h{k};\n",
    "lds8": "  ld.shared.u8 %h{k}, [%r1+{at}];\n",
    "sts8": "  st.shared.u8 [%r1+{at}], %h{k};\n",
    "bar": "  bar.sync 0;\n",
    "ffma": "  fma.rn.f32 %f{k}, %f{k}, %f300, %f301;\n",
    "prmt": "  prmt.b32 %f{k}, %f{k}, %f300, 0x5410;\n",
    "ldg": "  ld.global.b32 %f{k}, [%d3+{at}];\n",
}
HALVES = ("lds16", "sts16", "lds8", "sts8")


def mixed(parts: tuple[str, ...], stride: int, warps: int) -> str:
    """The parts in turn, with `stride` bytes between lanes."""
    text = ""
    for k in range(UNROLLED):
        for j, p in enumerate(parts):
            text += PARTS[p].format(k=8 * j % 64 + k if p not in HALVES else k, at=k * 128)
    text += "  xor.b32 %r1, %r1, 4096;\n"
    used = {8 * j % 64 + k for k in range(UNROLLED) for j in range(len(parts))}
    text += "".join(f"  xor.b32 %acc, %acc, %f{i};\n" for i in sorted(used))
    if set(parts) & set(HALVES):
        text += "".join(f"  cvt.u32.u16 %r9, %h{k}; xor.b32 %acc, %acc, %r9;\n" for k in range(UNROLLED))
    setup = f"  mul.lo.u32 %r1, %lane, {stride}; add.u32 %r1, %r1, %sm; mul.wide.u32 %d3, %lane, 4; add.u64 %d3, %d3, %src;\n"
    setup += "".join(f"  mov.b32 %f{i}, %thread;\n" for i in (*range(64), 300, 301))
    setup += "".join(f"  cvt.u16.u32 %h{i}, %thread;\n" for i in range(8))
    return frame(32 * warps, loop(text), setup)


def reduction(ways: int, loads: bool, barriers: bool, warps: int = 8) -> str:
    """Four stores and four loads with conflicts for each turn, as sums over the warps of a CTA have them; `loads`: and 16
    KB from device memory before."""
    text = ""
    if loads:
        text += "".join(
            f"  ld.global.v4.b32 {{%f{4 * k}, %f{4 * k + 1}, %f{4 * k + 2}, %f{4 * k + 3}}}, [%d3+{k * 4096}];\n"
            for k in range(4)
        )
        text += "  add.u64 %d3, %d3, %d6;\n"
    bar = "  bar.sync 0;\n" if barriers else ""
    text += "".join(f"  st.shared.b32 [%r1+{128 * k}], %f{4 * k};\n" for k in range(4)) + bar
    text += "".join(f"  ld.shared.b32 %f{16 + k}, [%r1+{128 * k}]; xor.b32 %acc, %acc, %f{16 + k};\n" for k in range(4))
    setup = f"""  mul.lo.u32 %r1, %lane, {4 * ways}; add.u32 %r1, %r1, %sm; mul.wide.u32 %d3, %thread, 16; add.u64 %d3, %d3, %src;
  mul.wide.u32 %d4, %cta, 16384; add.u64 %d3, %d3, %d4; mov.u32 %r8, %nctaid.x; mul.wide.u32 %d6, %r8, 16384;
"""
    setup += "".join(f"  mov.b32 %f{i}, %thread;\n" for i in range(16))
    return frame(32 * warps, loop(text + bar), setup)


class Crossbar(Bench):
    group = "crossbar"
    MIXED = tuple(
        (parts, stride)
        for parts, strides in (
            (("shfl",), (4,)),
            (("lds", "shfl"), (4, 32)),
            (("sts", "shfl"), (4, 32)),
            (("lds", "sts"), (4, 32, 64)),
            (("lds", "sts", "shfl"), (4, 64)),
            (("lds16",), (2, 4, 64)),
            (("sts16",), (2, 4, 64)),
            (("lds16", "sts16"), (4, 64)),
            (("lds8",), (1, 64)),
            (("sts8",), (1, 64)),
            (("ldg", "shfl"), (4,)),
            (("ldg", "lds"), (4, 32)),
            (("shfl", "prmt", "prmt"), (4,)),
            (("shfl", "ffma", "ffma"), (4,)),
            (("lds", "prmt", "prmt"), (4, 32)),
        )
        for stride in strides
    )
    REDUCED = tuple((w, g, b, n) for w in (1, 16) for g in (False, True) for b in (False, True) for n in (1, 4, 8))

    def kernels(self) -> Iterator[tuple[str, str]]:
        for parts, stride in self.MIXED:
            yield f"{parts} {stride}", mixed(parts, stride, 16)
        for w, g, b, _ in self.REDUCED:
            yield f"reduction {w} {g} {b}", reduction(w, g, b)

    def rows(self, run) -> Iterator[Row]:
        size = min(1 << 30, self.device.most)
        buffer = self.device.memory(size)
        for parts, stride in self.MIXED:
            with self.point(f"{' + '.join(parts)}, lanes {stride} apart, 16 warps") as report:
                stamps = run(mixed(parts, stride, 16), 132, 512, 16 << 10, source=buffer, n=40)
                yield report(stamps.cycles() / (40 * UNROLLED * 16), "cycles of the SM a turn of a warp", stamps)
        for w, g, b, n in self.REDUCED:
            name = f"sums, {w} ways{', loads' if g else ''}{', barriers' if b else ''}, {n} CTAs of 8 warps"
            with self.point(name) as report:
                rounds = max(2, min(40, size // (132 * n * 16384) - 1))
                stamps = run(reduction(w, g, b), 132 * n, 256, 8 << 10, source=buffer, n=rounds)
                yield report(stamps.cycles() / (rounds * n), "cycles of the SM a turn of a CTA", stamps)
