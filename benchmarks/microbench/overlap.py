# ruff: noqa: E501  PTX text
"""M5, M6, M19, M21: what engines take from each other (cp.async, conversion of FP8 rows and shared memory beside products),
CTAs that follow each other, launches, lines of the L2 that multiprocessors ask for one after another, loads that wait for
the load before."""

from __future__ import annotations

from collections.abc import Iterator

from bench import Bench, Row
from copies import BARRIERS, ring
from products import COMMIT, FENCE, TILE, descriptors, product, use, wait_group, zero
from ptx import fill_shared, frame, loop
from synchronisation import spin

AREA = 32 << 10  # of shared memory behind the operands that the other warps write
# e4m3 to bf16 as V4's kernels make it: four values of a word, two words out; the factors are exact powers of two.
CONVERT = """  shl.b32 %r20, {x}, 4; and.b32 %r20, %r20, 0xf0f0f0f0; shr.u32 %r21, {x}, 4; and.b32 %r21, %r21, 0x07070707;
  lop3.b32 %r21, {x}, 0x80808080, %r21, 0xea; prmt.b32 {a}, %r20, %r21, 0x5140; prmt.b32 {b}, %r20, %r21, 0x7362;
  mul.rn.bf16x2 {a}, {a}, %r50; mul.rn.bf16x2 {b}, {b}, %r50; mul.rn.bf16x2 {a}, {a}, %r51; mul.rn.bf16x2 {b}, {b}, %r51;
"""
SETUP = """  mov.b32 %r50, 0x7b807b80; mov.b32 %r51, 0x3f803f80; and.b32 %r52, %thread, 127; shl.b32 %r53, %r52, 4;
  add.u32 %r54, %sm, {tile}; add.u32 %r54, %r54, %r53; cvt.u64.u32 %d20, %r53; mul.wide.u32 %d21, %cta, 65536;
  add.u64 %d20, %d20, %d21; add.u64 %d20, %d20, %src; mov.b32 %r10, %thread; mov.b32 %r11, %lane; mov.b32 %r12, %thread;
  mov.b32 %r13, %lane;
"""


def converted(words: int, out: int) -> str:
    return "".join(CONVERT.format(x=f"%f{k}", a=f"%f{out + 2 * k}", b=f"%f{out + 2 * k + 1}") for k in range(words))


def stored(first: int, count: int, at: int) -> str:
    """`count` registers by fours, 2 KB apart."""
    return "".join(
        f"  st.shared.v4.b32 [%r54+{at + 2048 * (k // 4)}], {{{', '.join(f'%f{first + k + j}' for j in range(4))}}};\n"
        for k in range(0, count, 4)
    )


LOADS = "".join(
    f"  ld.global.v4.b32 {{{', '.join(f'%f{4 * k + j}' for j in range(4))}}}, [%d20+{2048 * k}];\n" for k in range(4)
)
# name -> (PTX of one round by a warpgroup, what a round is counted in, how many)
WORK = {
    "cp.async 16 B": ("".join(f"  cp.async.cg.shared.global [%r54+{2048 * k}], [%d20+{2048 * k}], 16;\n"
                              for k in range(8)) + "  cp.async.commit_group;\n  cp.async.wait_group 2;\n", "bytes", 8 * 2048),
    "st.shared.v4": (stored(0, 32, 0), "warp instructions", 32),
    "ld.shared.v4": ("".join(f"  ld.volatile.shared.v4.b32 {{%f{4 * k}, %f{4 * k + 1}, %f{4 * k + 2}, %f{4 * k + 3}}}, "
                             f"[%r54+{2048 * k}];\n" for k in range(8)), "warp instructions", 32),
    "e4m3 to bf16": (converted(16, 32), "words of 4 per warp", 64),
    "e4m3 to bf16, stored": (converted(16, 32) + stored(32, 32, 0), "words of 4 per warp", 64),
    "e4m3 loaded, to bf16, stored": (LOADS + converted(16, 32) + stored(32, 32, 0), "words of 4 per warp", 64),
}  # fmt: skip


def beside(work: str, n: int, register_a: bool, groups: int) -> str:
    """Warps 0-3 make products, %n rounds of eight; `groups` more warpgroups do the other work, %m rounds."""
    text = WORK[work][0]
    if work == "e4m3 to bf16":  # the results feed the next round
        text += "".join(f"  xor.b32 %f{k}, %f{32 + 2 * k}, %f{33 + 2 * k};\n" for k in range(16))
    start = "".join(f"  add.u32 %f{c}, %thread, {c + 1};\n" for c in range(64))
    end = "".join(f"  xor.b32 %acc, %acc, %f{c};\n" for c in range(64))
    if work.startswith("cp.async"):
        end += "  cp.async.wait_all;\n"
    body = f"""  setp.ge.u32 %p3, %warp, 4; @%p3 bra OTHER;
{zero(n)}{loop(FENCE + product(n, register_a) * 8 + COMMIT + wait_group(1))}{wait_group(0)}{use(n)}  bra.uni FINISH;
OTHER:
{start}{loop(text, "M", "%r40", "%m")}{end}"""
    threads = 128 * (1 + groups)
    return frame(threads, body, fill_shared(TILE, threads) + descriptors() + SETUP.format(tile=TILE))


def late_ring(box: int, stages: int, shared_by: int, apart: int) -> str:
    """The ring of copies, where each of the CTAs that read the same tiles begins `apart` cycles after the one before."""
    wait = f"""  rem.u32 %r60, %cta, {shared_by}; mul.lo.u32 %r60, %r60, {apart}; cvt.u64.u32 %d30, %r60; add.u64 %d30, %d30, %t0;
LATE: mov.u64 %d31, %clock64; setp.lt.u64 %p9, %d31, %d30; @%p9 bra LATE;
  mov.u64 %t0, %clock64; mov.u64 %t1, %globaltimer;
"""
    text = ring("tile", box, stages, shared_by)
    first = "  setp.ne.u32 %p3, %thread, 0; @%p3 bra FINISH;\n"
    assert text.count(first) == 1
    return text.replace(first, first + wait)


def chase(bypass: str) -> str:
    """Every load's address waits for the load before: its value, shifted away by an amount the assembler does not know."""
    one = f"""  ld.global{bypass}.u32 %r20, [%d3]; shr.u32 %r20, %r20, %r21; shr.u32 %r20, %r20, %r21; add.u32 %r22, %r22, %r20;
  add.u32 %r22, %r22, 4224; and.b32 %r22, %r22, %m; cvt.u64.u32 %d4, %r22; add.u64 %d3, %d4, %src;
"""
    setup = (
        "  mov.u32 %r21, %ntid.x; sub.u32 %r21, %r21, 8; mov.u32 %r22, 0; mov.u64 %d3, %src;\n"  # 24: twice, all bits
    )
    return frame(32, loop(one * 4) + "  xor.b32 %acc, %acc, %r22;\n", setup)


class Overlap(Bench):
    group = "overlap"
    SHAPES = ((64, False), (256, False), (128, True))
    CHASES = (
        ("L2, 8 MB", (8 << 20) - 1, ".cg"),
        ("device memory", (1 << 30) - 1, ".cg"),
        ("L1", (16 << 10) - 1, ".ca"),
    )

    def kernels(self) -> Iterator[tuple[str, str]]:
        for work in WORK:
            for n, register_a in self.SHAPES:
                for groups in (1,) if register_a else (1, 2):  # registers of 384 threads are too few for A in them
                    yield (
                        f"{work} x {groups} beside N={n} {'RS' if register_a else 'SS'}",
                        beside(work, n, register_a, groups),
                    )
        for by in (4, 16):
            for apart in (0, 500, 2000, 10000):
                yield f"shared by {by}, {apart} apart", late_ring(16384, 8, by, apart)
        for where, _, bypass in self.CHASES:
            yield f"chase {where}", chase(bypass)

    def rows(self, run) -> Iterator[Row]:
        source = self.device.memory(256 << 20)
        shared = TILE + AREA
        for work, (_, unit, count) in WORK.items():
            for n, register_a in self.SHAPES:
                for groups in (1,) if register_a else (1, 2):
                    with self.point(f"{work} x {groups} beside N={n} {'RS' if register_a else 'SS'}") as report:
                        text, threads = beside(work, n, register_a, groups), 128 * (1 + groups)
                        rounds, m = 500, 3
                        if self.device.name == "gpu":
                            for _ in range(2):
                                few = run(text, 132, threads, shared, source=source, n=1, m=50)
                            each = few.cycles(slice(4, 8)) / 50  # of a round, alone
                            m = max(1, round(1.5 * rounds * 8 * n / 2 / each))
                        both = run(text, 132, threads, shared, source=source, n=rounds, m=m)
                        alone = run(text, 132, threads, shared, source=source, n=1, m=m)
                        products = run(text, 132, threads, shared, source=source, n=rounds, m=1)
                        # The products last shorter than the work: what the work does behind them, it does alone.
                        p, w, a = both.cycles(slice(0, 4)), both.cycles(slice(4, None)), alone.cycles(slice(4, None))
                        beside_ = m - (w - p) / max(a / m, 1e-9)
                        yield report(
                            p / (rounds * 8),
                            "cycles a product",
                            both,
                            products_alone=products.cycles(slice(0, 4)) / (rounds * 8),
                            work=p / max(beside_, 1e-9),
                            work_alone=a / m,
                            work_unit=f"cycles a round of {count} {unit}",
                        )
        big = self.device.memory(2 << 30)
        tensor = self.device.tensor_map(big, self.device.most // 1024, 512, 128, 64)
        for by in (4, 16):
            for apart in (0, 500, 2000, 10000):
                with self.point(f"ring of 16384 x 8, L2, read by {by} CTAs, {apart} cycles apart") as report:
                    text, most, n = late_ring(16384, 8, by, apart), (16 << 20) // 16384 - 1, 100
                    smem = BARRIERS + 8 * 16384
                    run(text, 132, 32, smem, source=big, n=n, m=most, map=tensor)
                    stamps = run(text, 132, 32, smem, source=big, n=n, m=most, map=tensor)
                    yield report((n + 1) * 8 * 16384 / stamps.ns(), "bytes/ns of an SM", stamps)
        for where, mask, bypass in self.CHASES:
            with self.point(f"load after load, {where}") as report:
                n = 500
                self.device.flush()
                if where != "device memory":
                    run(chase(bypass), 1, 32, source=big, n=2 * ((mask + 1) // 4224 + 1), m=mask)
                stamps = run(chase(bypass), 1, 32, source=big, n=n, m=mask)
                yield report(stamps.cycles() / (4 * n), "cycles", stamps, load_ns=stamps.ns() / (4 * n))
        for threads, smem in ((128, 200 << 10), (384, 200 << 10), (128, 100 << 10)):
            with self.point(f"gap between CTAs of {threads} threads and {smem} bytes") as report:
                each = 10000
                places = 1 if smem > 114 << 10 else 2
                text = spin().replace(".reqntid 32", f".reqntid {threads}")
                spans = {
                    w: min(run(text, 132 * places * w, threads, smem, n=each).span_ns() for _ in range(3))
                    for w in (1, 3)
                }
                stamps = run(text, 132 * places * 3, threads, smem, n=each)
                yield report((spans[3] - spans[1]) / 2 - stamps.ns(), "ns", stamps, spans=spans)
        if self.device.name != "gpu":
            return
        yield from self.launches()

    def launches(self) -> Iterator[Row]:
        """In graphs, with work before them that keeps the host ahead of the GPU."""
        device = self.device
        device.flush()

        def launching(grid: int, threads: int, shared: int = 0, n: int = 0):
            text = spin().replace(".reqntid 32", f".reqntid {threads}")
            return lambda: device.launch(text, grid, threads, shared, 0, n, 0, b"")

        for count in (1, 2, 3, 5):
            for grid, threads, shared in (
                (1, 32, 0),
                (132, 128, 0),
                (132, 128, 200 << 10),
                (132, 384, 200 << 10),
                (1056, 128, 0),
            ):
                with self.point(
                    f"{count} launches of {grid} CTAs, {threads} threads, {shared} bytes, in a graph"
                ) as report:
                    yield report(device.graph_behind_us([launching(grid, threads, shared)] * count), "us")
        for first, second in ((0, 200 << 10), (200 << 10, 0)):
            with self.point(f"a launch with {first} bytes, then one with {second}, in a graph") as report:
                yield report(device.graph_behind_us([launching(132, 128, first), launching(132, 128, second)]), "us")
