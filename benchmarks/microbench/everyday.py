# ruff: noqa: E501  PTX text
"""What kernels of every kind do beside products: straight code that is longer than the instruction caches, reductions and
atomics in device memory and in shared memory, loads that find their lines in L1, products of one-byte types with their
sums kept elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from bench import Bench, Row
from products import COMMIT, FENCE, TILE, descriptors, fill_shared, use, wait_group, zero
from ptx import frame, loop

HASH = "mul.lo.u32 {d}, {s}, 0x9E3779B1; shr.u32 %r4, {d}, 13; xor.b32 {d}, {d}, %r4; mul.lo.u32 {d}, {d}, 0x85EBCA77; shr.u32 {d}, {d}, 5;"


def straight(instructions: int, warps: int, apart: bool) -> str:
    """A loop of this many FFMA. apart: warps begin at different times, so that they are not in step."""
    body = "".join(f"  fma.rn.f32 %f{i % 8}, %f{i % 8}, %f300, %f301;\n" for i in range(instructions))
    start = (
        "".join(f"  mov.b32 %f{i}, %thread;\n" for i in range(8)) + "  mov.b32 %f300, %thread; mov.b32 %f301, %lane;\n"
    )
    late = "  mul.lo.u32 %r1, %warp, 150; add.u32 %r1, %r1, 1; mov.b32 %r3, %lane;\n" + loop(
        "  mad.lo.s32 %r3, %r3, %r3, %lane; mad.lo.s32 %r3, %r3, %r3, %lane;", "S", "%r2", "%r1"
    )
    end = "".join(f"  xor.b32 %acc, %acc, %f{i};\n" for i in range(8)) + "  xor.b32 %acc, %acc, %r3;\n"
    return frame(32 * warps, (late if apart else "  mov.b32 %r3, 0;\n") + loop(body) + end, start)


OPS = {  # name: (text at address %d3, bytes of a lane)
    "red.f32": ("  red.relaxed.gpu.global.add.f32 [%d3], %f0;\n", 4),
    "red.u32": ("  red.relaxed.gpu.global.add.u32 [%d3], %r6;\n", 4),
    "atom.f32": ("  atom.relaxed.gpu.global.add.f32 %f1, [%d3], %f0; xor.b32 %acc, %acc, %f1;\n", 4),
    "atom.acq_rel.f32": ("  atom.acq_rel.gpu.global.add.f32 %f1, [%d3], %f0; xor.b32 %acc, %acc, %f1;\n", 4),
    "red.v4.f32": ("  red.relaxed.gpu.global.add.v4.f32 [%d3], {%f0, %f0, %f0, %f0};\n", 16),
    "red.v2.f32": ("  red.relaxed.gpu.global.add.v2.f32 [%d3], {%f0, %f0};\n", 8),
    "red.bf16x2": ("  red.relaxed.gpu.global.add.noftz.bf16x2 [%d3], %r6;\n", 4),
    "st.32": ("  st.global.b32 [%d3], %f0;\n", 4),
}


def atomics(op: str, warps: int, scattered: bool) -> str:
    """A warp's lanes at neighbouring words of a line by a hashed number, or each at a word of its own. %m: mask."""
    text, size = OPS[op]
    key = "mad.lo.u32 %r3, %r2, 32, %lane;" if scattered else "mov.b32 %r3, %r2;"
    place = "mov.b32 %r5, 0;" if scattered else f"mul.lo.u32 %r5, %lane, {size};"
    unit = size if scattered else 32 * size
    body = loop(f"""  {key} {HASH.format(d="%r3", s="%r3")} and.b32 %r3, %r3, %m; {place}
  mul.wide.u32 %d3, %r3, {unit}; cvt.u64.u32 %d5, %r5; add.u64 %d3, %d3, %d5; add.u64 %d3, %d3, %src;
{text}  add.u32 %r2, %r2, %r8;""")
    setup = f"""  mad.lo.u32 %r2, %cta, {warps}, %warp; mov.u32 %r8, %nctaid.x; mul.lo.u32 %r8, %r8, {warps}; mov.b32 %f0, 0; mov.b32 %r6, 0;
"""
    return frame(32 * warps, body, setup)


def shared_atomics(warps: int, pattern: str, bins: int) -> str:
    """atom.shared.add.u32: lanes at words of their own banks, at random bins, or all at one word."""
    where = {
        "apart": "  shl.b32 %r3, %lane, 2;\n",
        "same": "  mov.b32 %r3, 0;\n",
        "random": f"  mad.lo.u32 %r3, %r2, 1024, %thread; {HASH.format(d='%r3', s='%r3')} and.b32 %r3, %r3, {bins - 1}; shl.b32 %r3, %r3, 2;\n",
    }[pattern]
    ops = "".join(
        f"{where}  add.u32 %r3, %r3, %sm; red.shared.add.u32 [%r3], %r6; add.u32 %r2, %r2, 1;\n" for _ in range(8)
    )
    return frame(32 * warps, loop(ops), "  mov.b32 %r6, 1; mov.b32 %r2, 0;\n")


def shared_loads(width: int, stride: int, warps: int, store: bool = False) -> str:
    """Accesses whose addresses differ from one to the next, so that ptxas keeps them all; stride: bytes between lanes."""
    vec = {4: "", 8: ".v2", 16: ".v4"}[width]
    text = ""
    for k in range(16):
        names = [f"%f{4 * k + j}" for j in range(width // 4)]
        group = "{" + ", ".join(names) + "}" if vec else names[0]
        text += (
            f"  st.shared{vec}.b32 [%r1+{k * 1024}], {group};\n"
            if store
            else f"  ld.shared{vec}.b32 {group}, [%r1+{k * 1024}];\n"
        )
    if not store:
        text += "".join(f"  xor.b32 %acc, %acc, %f{4 * k + j};\n" for k in range(16) for j in range(width // 4))
    text += "  xor.b32 %r1, %r1, 16384;\n"
    setup = f"  mul.lo.u32 %r1, %lane, {stride}; add.u32 %r1, %r1, %sm;\n" + "".join(
        f"  mov.b32 %f{i}, %thread;\n" for i in range(64)
    )
    return frame(32 * warps, loop(text), setup)


def held_loads(width: int, stride: int, warps: int) -> str:
    """Loads of global memory that L1 holds."""
    vec = {4: "", 8: ".v2", 16: ".v4"}[width]
    text = ""
    for k in range(16):
        names = [f"%f{4 * k + j}" for j in range(width // 4)]
        group = "{" + ", ".join(names) + "}" if vec else names[0]
        text += f"  ld.global{vec}.b32 {group}, [%d3+{k * 1024}];\n"
    text += "".join(f"  xor.b32 %acc, %acc, %f{4 * k + j};\n" for k in range(16) for j in range(width // 4))
    text += "  xor.b64 %d6, %d6, 16384; add.u64 %d3, %d4, %d6;\n"
    setup = f"  mul.wide.u32 %d4, %lane, {stride}; add.u64 %d4, %d4, %src; mov.b64 %d3, %d4; mov.b64 %d6, 0;\n"
    return frame(32 * warps, loop(text), setup)


def one_byte(kind: str, n: int, groups: int, each: int, depth: int, sums: bool) -> str:
    """Products of e4m3, s8 or tf32. sums: the accumulators are added to others after each group, as Triton does for FP8."""
    types, k = {"e4m3": ("f32.e4m3.e4m3", 32), "s8": ("s32.s8.s8", 32), "tf32": ("f32.tf32.tf32", 8)}[kind]
    acc = ", ".join(f"%f{i}" for i in range(n // 2))
    scale = "1" if kind == "s8" else "1, 1, 1"
    made = f"  wgmma.mma_async.sync.aligned.m64n{n}k{k}.{types} {{{acc}}}, %d8, %d9, {scale};\n"
    if sums:
        fresh = made.replace(f"%d9, {scale}", "%d9, %p4, 1, 1")
        body = FENCE + fresh + made * (each - 1) + COMMIT + wait_group(0)
        body += "".join(f"  add.f32 %f{128 + i}, %f{128 + i}, %f{i};\n" for i in range(n // 2))
    else:
        body = FENCE + made * each + COMMIT + wait_group(depth)
    setup = fill_shared(TILE, 128 * groups) + descriptors() + zero(n) + "  setp.eq.u32 %p4, %thread, 9999;\n"
    setup += "".join(f"  mov.b32 %f{128 + i}, 0;\n" for i in range(n // 2)) if sums else ""
    end = "".join(f"  xor.b32 %acc, %acc, %f{128 + i};\n" for i in range(n // 2)) if sums else ""
    return frame(128 * groups, loop(body) + wait_group(0) + use(n) + end, setup)


def waited(nbytes: int, warps: int) -> str:
    """A CTA asks for `nbytes` at a hashed place by cp.async, waits for all of them, and asks for the next. %m: mask of
    the places. (With loads into registers ptxas asks for the next before it waits.)"""
    each = 512 * warps
    copies = "".join(f"  cp.async.cg.shared.global [%r7+{k}], [%d3+{k}], 16;\n" for k in range(0, nbytes, each))
    body = loop(f"""  {HASH.format(d="%r3", s="%r2")} and.b32 %r3, %r3, %m; mul.wide.u32 %d3, %r3, {nbytes}; add.u64 %d3, %d3, %d4;
{copies}  cp.async.wait_all; add.u32 %r2, %r2, %r8; bar.sync 0;""")
    setup = """  mov.b32 %r2, %cta; mov.u32 %r8, %nctaid.x; shl.b32 %r6, %thread, 4; add.u32 %r7, %r6, %sm;
  cvt.u64.u32 %d4, %r6; add.u64 %d4, %d4, %src;
"""
    return frame(32 * warps, body, setup)


class Everyday(Bench):
    WAITED = ((512, 1), (2048, 4), (8192, 4), (16384, 4), (32768, 4))
    group = "everyday"
    STRAIGHT = tuple(
        (n, w, a)
        for n in (1024, 2048, 4096, 8192, 16384, 32768)
        for w, a in ((4, False), (8, False), (8, True), (16, False), (16, True), (32, True))
    )
    LINES = (1, 16, 256, 4096, 1 << 16, 1 << 19)
    SHARED = tuple(
        (w, s, n, st)
        for w, s in (
            (4, 4),
            (8, 8),
            (16, 16),
            (4, 8),
            (4, 16),
            (4, 32),
            (4, 128),
            (4, 132),
            (8, 16),
            (16, 32),
            (16, 80),
        )
        for n in (4, 16)
        for st in (False, True)
    )
    HELD = tuple((w, s, n) for w, s in ((4, 4), (8, 8), (16, 16), (4, 8), (4, 32), (4, 0), (16, 32), (4, 64), (4, 128), (4, 132), (8, 136), (4, 516)) for n in (4, 16))  # fmt: skip
    PRODUCTS = tuple((k, n, g, e, d, s) for k in ("e4m3", "s8", "tf32") for n in (64, 128, 256) for g, e, d, s in
                     ((1, 4, 1, False), (2, 4, 1, False), (1, 2, 0, True), (1, 4, 0, True), (2, 2, 0, True), (2, 4, 0, True)) if not (s and (k != "e4m3" or n == 256)))  # fmt: skip

    def kernels(self) -> Iterator[tuple[str, str]]:
        for at in self.STRAIGHT:
            yield f"straight {at}", straight(*at)
        for op in OPS:
            for scattered in (False, True):
                yield f"{op} {scattered}", atomics(op, 8, scattered)
        for pattern, bins in (("apart", 1), ("same", 1), ("random", 64), ("random", 1024)):
            for w in (4, 16):
                yield f"atom.shared {pattern} {bins} {w}", shared_atomics(w, pattern, bins)
        for s in self.SHARED:
            yield f"shared {s}", shared_loads(*s)
        for h in self.HELD:
            yield f"held {h}", held_loads(*h)
        for p in self.PRODUCTS:
            yield f"product {p}", one_byte(*p)
        for at in self.WAITED:
            yield f"waited {at}", waited(*at)

    def rows(self, run) -> Iterator[Row]:
        big = self.device.memory(2 << 30)
        for nbytes, w in self.WAITED:
            for where, size in (("L2", 8 << 20), ("HBM", 2 << 30)):
                for grid in (1, 132, 264):
                    name = f"{nbytes} bytes by cp.async of {w} warps, one after another, {where}"
                    with self.point(f"{name}, {grid} CTAs") as report:
                        text, mask = waited(nbytes, w), min(size, self.device.most) // nbytes - 1
                        if where == "L2":
                            run(text, 264, 32 * w, nbytes, source=big, n=max(4, mask // 100), m=mask)
                        stamps = run(text, grid, 32 * w, nbytes, source=big, n=60, m=mask)
                        yield report(stamps.ns() / 60, "ns a round", stamps)
        for kind, n, g, e, d, s in self.PRODUCTS:
            what = ", summed elsewhere" if s else f", wait {d}"
            with self.point(f"{kind} SS N={n}, {g} warpgroups, groups of {e}{what}") as report:
                rounds = 400
                run(one_byte(kind, n, g, e, d, s), 132, 128 * g, TILE + 2048, n=50)
                stamps = run(one_byte(kind, n, g, e, d, s), 132, 128 * g, TILE + 2048, n=rounds)
                yield report(stamps.cycles() / (rounds * e * g), "cycles of the SM a product", stamps)
        for n, w, a in self.STRAIGHT:
            with self.point(f"straight code of {n} FFMA, {w} warps{', apart' * a}") as report:
                stamps = run(straight(n, w, a), 132, 32 * w, n=5)
                more = 300 * w * (w - 1) / w * 4.1 * a if a else 0  # the last one's delay
                yield report(
                    (stamps.cycles() - more) / (5 * n * max(1, w // 4)), "cycles of a scheduler an instruction", stamps
                )
        for w, s, n, st in self.SHARED:
            with self.point(f"{'sts' if st else 'lds'} of {w} bytes, {s} apart, {n} warps") as report:
                stamps = run(shared_loads(w, s, n, st), 132, 32 * n, 64 << 10, n=40)
                yield report(stamps.cycles() / (40 * 16 * n), "cycles of the SM an instruction", stamps)
        buffer = self.device.memory(1 << 28)
        for w, s, n in self.HELD:
            with self.point(f"ldg of {w} bytes in L1, {s} apart, {n} warps") as report:
                stamps = run(held_loads(w, s, n), 132, 32 * n, source=buffer, n=40)
                yield report(stamps.cycles() / (40 * 16 * n), "cycles of the SM an instruction", stamps)
        for pattern, bins in (("apart", 1), ("same", 1), ("random", 64), ("random", 1024)):
            for w in (4, 16):
                with self.point(f"atom.shared {pattern} {bins}, {w} warps") as report:
                    stamps = run(shared_atomics(w, pattern, bins), 132, 32 * w, 8192, n=50)
                    yield report(stamps.cycles() / (50 * 8 * w), "cycles of the SM an instruction", stamps)
        for op, (_, size) in OPS.items():
            for scattered in (False, True):
                for lines in self.LINES:
                    mask = lines * (32 if scattered else 1) - 1
                    while (mask + 1) * (size if scattered else 32 * size) > 1 << 28:
                        mask >>= 1
                    with self.point(
                        f"{op} {'scattered over' if scattered else 'to'} {mask + 1} {'words' if scattered else 'lines'}"
                    ) as report:
                        n = 4 if scattered and lines < 256 else 16 if scattered or lines < 256 else 64
                        text = atomics(op, 8, scattered)
                        run(text, 132, 256, source=buffer, n=2, m=mask)
                        stamps = run(text, 132 * 4, 256, source=buffer, n=n, m=mask)
                        yield report(132 * 4 * 8 * n / stamps.span_ns(), "warp instructions/ns", stamps)
