# ruff: noqa: E501  PTX text
"""Tiles whose rows are short pieces of long rows, by cp.async and by loads; what random reads find in the L2; code that jumps
before it is in any cache; stores in a row; mma.sync fed by ldmatrix with few warps."""

from __future__ import annotations

from collections.abc import Iterator

from bench import Bench, Row
from memory import gather
from ptx import frame, loop

PITCH = 4096  # bytes between rows


def strips(warps: int, piece: int, groups: int, load: bool = False, width: int = 16, l1: bool = False) -> str:
    """Every warp instruction copies 512 bytes, or 32 `width`, by rows of `piece` bytes; l1: through L1. Four of them follow each other along their
    rows, then others are taken by a hashed number. %m: mask of blocks of rows. At most `groups` instructions under way."""
    whole, by = 32 * width, "ca" if l1 or width < 16 else "cg"
    rows, lanes = whole // piece, piece // width
    block = rows * PITCH
    columns = PITCH // (4 * piece)
    if load:
        body = "".join(
            f"  ld.global.v4.b32 {{%f{4 * k}, %f{4 * k + 1}, %f{4 * k + 2}, %f{4 * k + 3}}}, [%d3+{k * piece}];\n"
            for k in range(4)
        )
        body += "".join(f"  xor.b32 %acc, %acc, %f{k};\n" for k in range(16))
    else:
        body = "".join(
            f"  cp.async.{by}.shared.global [%r7+{whole * k}], [%d3+{k * piece}], {width}; cp.async.commit_group;\n"
            for k in range(4)
        )
        body += f"  cp.async.wait_group {groups - 4};\n"
    text = loop(f"""  mul.lo.u32 %r3, %r2, 0x9E3779B1; shr.u32 %r4, %r3, 13; xor.b32 %r3, %r3, %r4; mul.lo.u32 %r3, %r3, 0x85EBCA77;
  shr.u32 %r5, %r3, 22; and.b32 %r5, %r5, {columns - 1}; mul.lo.u32 %r5, %r5, {4 * piece};
  shr.u32 %r3, %r3, 4; and.b32 %r3, %r3, %m; mul.wide.u32 %d3, %r3, {block}; add.u64 %d3, %d3, %d4; cvt.u64.u32 %d5, %r5; add.u64 %d3, %d3, %d5;
  and.b32 %r5, %i, {groups // 4 - 1}; mad.lo.u32 %r7, %r5, {4 * whole}, %r6;
{body}  add.u32 %r2, %r2, %r8;""")
    setup = f"""  mad.lo.u32 %r2, %cta, {warps}, %warp; mov.u32 %r8, %nctaid.x; mul.lo.u32 %r8, %r8, {warps};
  shr.u32 %r9, %lane, {lanes.bit_length() - 1}; mul.lo.u32 %r9, %r9, {PITCH}; and.b32 %r10, %lane, {lanes - 1}; mul.lo.u32 %r10, %r10, {width};
  add.u32 %r9, %r9, %r10; cvt.u64.u32 %d4, %r9; add.u64 %d4, %d4, %src;
  mul.lo.u32 %r6, %lane, {width}; mul.lo.u32 %r9, %warp, {whole * groups}; add.u32 %r6, %r6, %r9; add.u32 %r6, %r6, %sm;
"""
    return frame(32 * warps, text + ("" if load else "  cp.async.wait_all;\n"), setup)


ISSUED = {
    "sts.64": "  st.shared.v2.b32 [%r7+{o}], {{%r4, %r5}};\n",
    "sts.128": "  st.shared.v4.b32 [%r7+{o}], {{%r4, %r5, %r6, %lane}};\n",
    "stmatrix.x4": "  stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r7+{o}], {{%r4, %r5, %r6, %lane}};\n",
}


def issued(text: str, warps: int) -> str:
    """Sixteen in a row, at addresses of their own, again and again."""
    setup = """  shl.b32 %r6, %lane, 4; add.u32 %r7, %r6, %sm; mov.b32 %r4, %thread; mov.b32 %r5, %cta;
"""
    return frame(32 * warps, loop("".join(text.format(o=512 * k) for k in range(16))), setup)


def jumps(count: int, skipped: int) -> str:
    """`count` blocks of 16 instructions, each of which jumps over `skipped` more that never run."""
    parts = []
    for k in range(count):
        ran = "".join(f"  fma.rn.f32 %f{i % 8}, %f{i % 8}, %f300, %f301;\n" for i in range(16))
        over = "".join(f"  fma.rn.f32 %f{8 + i % 16}, %f{8 + i % 16}, %f{i % 8}, %f301;\n" for i in range(skipped))
        parts.append(f"{ran}  setp.ne.u32 %p2, %m, {77000 + k}; @%p2 bra J{k};\n{over}J{k}:\n")
    start = (
        "".join(f"  mov.b32 %f{i}, %thread;\n" for i in range(24)) + "  mov.b32 %f300, %thread; mov.b32 %f301, %lane;\n"
    )
    return frame(32, "".join(parts) + "".join(f"  xor.b32 %acc, %acc, %f{i};\n" for i in range(24)), start)


def chained(warps: int, tiles: int) -> str:
    """mma.sync m16n8k16 of operands from ldmatrix, `tiles` accumulators in turn."""
    text = ""
    for k in range(4):
        text += f"  ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r1+{k * 512}];\n"
        for j in range(0, tiles, 2):
            text += f"  ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r14, %r15, %r16, %r17}}, [%r1+{2048 + (k * tiles + j) % 16 * 512}];\n"
            for h in range(2):
                c = 4 * (j + h)
                d = f"{{%f{c}, %f{c + 1}, %f{c + 2}, %f{c + 3}}}"
                text += f"  mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d}, {{%r10, %r11, %r12, %r13}}, {{%r{14 + 2 * h}, %r{15 + 2 * h}}}, {d};\n"
    setup = "  shl.b32 %r1, %lane, 4; add.u32 %r1, %r1, %sm;\n" + "".join(
        f"  mov.b32 %f{i}, 0;\n" for i in range(4 * tiles)
    )
    return frame(32 * warps, loop(text) + "".join(f"  xor.b32 %acc, %acc, %f{i};\n" for i in range(4 * tiles)), setup)


class Strips(Bench):
    group = "strips"
    PIECES = (32, 64, 128, 256, 512)
    JUMPS = (24, 96, 480)
    WARPS = (1, 2, 4, 8)
    ROWS = ((128, 4), (256, 8), (512, 16), (1024, 16))  # bytes of a row, and of a lane's copy
    NARROW = tuple(
        (w, l1, p, n) for w, l1 in ((4, True), (8, True), (16, True), (16, False)) for p in (64, 128) for n in (4, 8)
    )
    CHAINS = ((1, 8), (2, 8), (4, 8), (8, 8), (10, 8), (16, 8), (1, 2), (4, 2), (16, 2))

    def kernels(self) -> Iterator[tuple[str, str]]:
        for piece in self.PIECES:
            for w, g in ((8, 16), (10, 8)):
                yield f"strips of {piece}, {w} warps, {g} under way", strips(w, piece, g)
            yield f"loads of strips of {piece}", strips(16, piece, 8, True)
        for w, g in ((8, 8), (4, 4)):
            yield f"gather {w} warps {g} rows", gather(w, 1024, g)
        for piece in self.PIECES:
            yield f"strips of {piece}, 4 warps, 16 under way", strips(4, piece, 16)
        for skipped in self.JUMPS:
            yield f"jumps over {skipped}", jumps(64, skipped)
        for row, size in self.ROWS:
            yield f"gather of rows of {row}", gather(16, row, 8, size)
        for width, l1, piece, w in self.NARROW:
            yield f"strips of {piece} by {width} {l1} {w}", strips(w, piece, 16, False, width, l1)
        for name, text in ISSUED.items():
            for w in self.WARPS:
                yield f"{name}, {w} warps", issued(text, w)
        for w, t in self.CHAINS:
            yield f"mma.sync {w} warps {t} tiles", chained(w, t)

    def rows(self, run) -> Iterator[Row]:
        big = self.device.memory(2 << 30)
        for piece in self.PIECES:
            block = 512 // piece * PITCH
            made = [
                (f"{w} warps, {g} under way each", strips(w, piece, g), w, 512 * g * w) for w, g in ((8, 16), (10, 8))
            ]
            made.append(("loads, 16 warps", strips(16, piece, 8, True), 16, 0))
            for what, text, w, shared in made:
                for where, size in (("L2", 16 << 20), ("HBM", 2 << 30)):
                    with self.point(f"strips of {piece} bytes, {what}, {where}") as report:
                        n = 2000 // w
                        mask = min(size, self.device.most) // block - 1
                        if where == "L2":
                            run(text, 132, 32 * w, shared, source=big, n=n, m=mask)
                        stamps = run(text, 132, 32 * w, shared, source=big, n=n, m=mask)
                        moved = n * w * 2048
                        yield report(
                            moved / stamps.ns(), "bytes/ns of an SM", stamps, bytes_a_cycle=moved / stamps.cycles()
                        )
        for grid in (1, 8, 132):  # one multiprocessor alone is not held up by the L2
            for piece in self.PIECES:
                for w in (8, 4):
                    with self.point(
                        f"strips of {piece} bytes, {w} warps, 16 under way each, L2, {grid} CTAs"
                    ) as report:
                        text, n = strips(w, piece, 16), 2000 // w
                        mask = min(16 << 20, self.device.most) // (512 // piece * PITCH) - 1
                        run(text, 132, 32 * w, 8192 * w, source=big, n=n, m=mask)
                        stamps = run(text, grid, 32 * w, 8192 * w, source=big, n=n, m=mask)
                        yield report(
                            stamps.cycles() / (n * w * 4),
                            "cycles of the SM an instruction",
                            stamps,
                            bytes_a_cycle=n * w * 2048 / stamps.cycles(),
                        )
        for w, g in ((8, 8), (4, 4)):
            for mb in (8, 16, 32, 64, 128, 256, 512):
                with self.point(f"gather of 1 KB rows out of {mb} MB, {w} warps, {g} under way each") as report:
                    text, rows = gather(w, 1024, g), min(mb << 10, self.device.most >> 10)
                    n = max(2000 // w, rows * 6 // (132 * w))  # each row six times in the mean
                    run(text, 132, 32 * w, w * g * 1024, source=big, n=n, m=rows - 1)
                    stamps = run(text, 132, 32 * w, w * g * 1024, source=big, n=n, m=rows - 1)
                    yield report(132 * n * w * 1024 / max(stamps.span_ns(), 1), "bytes/ns", stamps)
        for row, size in self.ROWS:
            for mb in (16, 51, 2048):
                with self.point(f"gather of rows of {row} bytes out of {mb} MB, 16 warps, 8 under way each") as report:
                    text, rows = (
                        gather(16, row, 8, size),
                        1 << (min(mb << 20, self.device.most) // row).bit_length() - 1,
                    )
                    run(text, 132, 512, 128 * row, source=big, n=200, m=rows - 1)
                    stamps = run(text, 132, 512, 128 * row, source=big, n=200, m=rows - 1, before=self.device.flush)
                    yield report(132 * 200 * 16 * row / max(stamps.span_ns(), 1), "bytes/ns", stamps)
        for width, l1, piece, w in self.NARROW:
            for grid in (1, 132):
                how = f"{width} bytes a lane{', through L1' * l1}, {w} warps"
                with self.point(f"strips of {piece} bytes, {how}, L2, {grid} CTAs") as report:
                    text, n = strips(w, piece, 16, False, width, l1), 2000 // w
                    mask = min(8 << 20, self.device.most) // (32 * width // piece * PITCH) - 1
                    run(text, 132, 32 * w, 8192 * w, source=big, n=n, m=mask)
                    stamps = run(text, grid, 32 * w, 8192 * w, source=big, n=n, m=mask)
                    yield report(stamps.cycles() / (n * w * 4), "cycles of the SM an instruction", stamps)
        for what, text in [(f"jumps over {16 * s} bytes", jumps(64, s)) for s in self.JUMPS]:
            for where in ("cold", "again", "flushed"):
                with self.point(f"code, 64 blocks of 16, {what}, {where}") as report:
                    if where == "flushed":
                        self.device.flush()
                    stamps = run(text, 132, 32, n=1, m=0)
                    yield report(stamps.cycles() / 64, "cycles a block", stamps)
        for name, text in ISSUED.items():
            for w in self.WARPS:
                with self.point(f"{name} in a row, {w} warps, 132 CTAs") as report:
                    stamps = run(issued(text, w), 132, 32 * w, 16 << 10, source=big, n=200)
                    yield report(stamps.cycles() / (200 * 16), "cycles between two of a warp", stamps)
        for w, t in self.CHAINS:
            with self.point(f"mma.sync with ldmatrix, {w} warps, {t} tiles") as report:
                stamps = run(chained(w, t), 132, 32 * w, 16 << 10, n=200)
                yield report(stamps.cycles() / (200 * 4 * t * w), "cycles of the SM a product", stamps)
