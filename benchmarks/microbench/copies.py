# ruff: noqa: E501  PTX text
"""M12 to M15, M18: TMA. Issue, latency by size and source, rings of all depths on one and on all multiprocessors, tiles
that many multiprocessors read, stores, multicast."""

from __future__ import annotations

from collections.abc import Iterator

from bench import Bench, Row
from ptx import frame, init_barriers, loop, wait

BARRIERS = 1024  # bytes at the start of shared memory
COLUMNS = 64  # of a box: 128 bytes, as the swizzle wants it


def copy(how: str, box: int, barrier: str, target: str) -> str:
    """A copy of `box` bytes: 'bulk' from %d2, or 'tile' of 128-byte rows from row %r30 and column 0 on of the tensor map."""
    if how == "bulk":
        return (
            f"  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{target}], [%d2], {box}, "
            f"[{barrier}];\n"
        )
    return (
        "  cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[{target}], [%map, {{%r31, %r30}}], [{barrier}];\n"
    )


def advance(how: str, box: int, step: str) -> str:
    """To chunk %r33 (32 bits), masked by %m; `step` chunks further on the next time."""
    text = f"  and.b32 %r34, %r33, %m; add.u32 %r33, %r33, {step};\n"
    if how == "bulk":
        return text + f"  mul.wide.u32 %d2, %r34, {box}; add.u64 %d2, %d2, %src;\n"
    # Tiles: columns of 64 elements of a matrix 512 wide, then the next rows.
    rows = box // 128
    return (
        text
        + f"  and.b32 %r31, %r34, 7; shl.b32 %r31, %r31, 6; shr.u32 %r30, %r34, 3; mul.lo.u32 %r30, %r30, {rows};\n"
    )


def spin(cycles: int, label: str) -> str:
    if not cycles:
        return ""
    return f"""  mov.u64 %d8, %clock64; add.u64 %d8, %d8, {cycles};
{label}: mov.u64 %d9, %clock64; setp.lt.u64 %p4, %d9, %d8; @%p4 bra {label};
"""


def ring(how: str, box: int, stages: int, shared_by: int, apart: bool = False, work: int = 0) -> str:
    """One thread keeps `stages` copies under way, %n rounds of them. CTAs in groups of shared_by read the same, those that
    follow each other or those that are far apart. After each wait, `work` cycles pass."""
    order = f"  mov.u32 %r35, %nctaid.x; add.u32 %r35, %r35, {shared_by - 1}; div.u32 %r35, %r35, {shared_by}; "
    order += "rem.u32 %r33, %cta, %r35;\n" if apart else f"div.u32 %r33, %cta, {shared_by};\n"
    first, again, drain = "", "", ""
    for s in range(stages):
        arrive = f"  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%sm+{8 * s}], {box};\n"
        place = f"  add.u32 %r41, %sm, {BARRIERS + s * box}; add.u32 %r43, %sm, {8 * s};\n"
        issue = arrive + place + advance(how, box, "%r35") + copy(how, box, "%r43", "%r41")
        first += issue
        again += f"  add.u32 %r43, %sm, {8 * s};\n" + wait("%r43", "%r42", f"W{s}") + spin(work, f"S{s}") + issue
        drain += f"  add.u32 %r43, %sm, {8 * s};\n" + wait("%r43", "%r42", f"E{s}")
    body = f"""  setp.ne.u32 %p3, %thread, 0; @%p3 bra FINISH;
{order}  mov.u32 %r42, 0;
{first}{loop(again + "  xor.b32 %r42, %r42, 1;")}{drain}"""
    return frame(32, body, init_barriers(0, stages))


def latency(how: str, box: int) -> str:
    return ring(how, box, 1, 1)


def issue(how: str, box: int, count: int) -> str:
    """`count` copies into one place, no wait between them."""
    one = advance(how, box, "%r35") + copy(how, box, "%r43", "%r41")
    body = f"""  setp.ne.u32 %p3, %thread, 0; @%p3 bra FINISH;
  mov.u32 %r33, %cta; mov.u32 %r35, 1; mov.u32 %r43, %sm; add.u32 %r41, %sm, {BARRIERS};
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%sm], {box * count};
{one * count}  mov.u64 %t4, %clock64;
{wait("%r43", "0", "W")}  mov.u64 %t2, %t4; mov.u64 %t3, %globaltimer; bra.uni ISSUED;
"""
    text = frame(32, body, init_barriers(0, 1))
    return text.replace("  setp.eq.u32 %p0, %acc", "ISSUED:\n  setp.eq.u32 %p0, %acc")


def store(box: int, depth: int, reads: bool) -> str:
    """Bulk stores from shared memory, `depth` groups under way; waits for the reads, or for the writes."""
    wait_ = f"  cp.async.bulk.wait_group{'.read' if reads else ''} {depth - 1};\n"
    text = advance("bulk", box, "%r35") + f"  add.u32 %r41, %sm, {BARRIERS};\n"
    text += (
        f"  cp.async.bulk.global.shared::cta.bulk_group [%d2], [%r41], {box};\n  cp.async.bulk.commit_group;\n" + wait_
    )
    body = f"""  setp.ne.u32 %p3, %thread, 0; @%p3 bra FINISH;
  mov.u32 %r33, %cta; mov.u32 %r35, %nctaid.x;
{loop(text)}  cp.async.bulk.wait_group 0;
"""
    return frame(32, body)


class Copies(Bench):
    group = "copies"
    SIZES = (512, 2048, 8192, 16384, 32768)
    RINGS = tuple((b, s) for b, s in (
        (2048, 1), (2048, 4), (2048, 16), (8192, 1), (8192, 2), (8192, 4), (8192, 8), (16384, 1), (16384, 2), (16384, 4),
        (16384, 8), (16384, 12), (32768, 1), (32768, 2), (32768, 4), (32768, 6)))  # fmt: skip
    SOURCES = (("L2", 16 << 20), ("HBM", 2 << 30))

    def kernels(self) -> Iterator[tuple[str, str]]:
        for how in ("bulk", "tile"):
            for box in self.SIZES:
                yield f"issue {how} {box}", issue(how, box, 16)
                yield f"latency {how} {box}", latency(how, box)
        for box, stages in self.RINGS:
            for how in ("bulk", "tile"):
                yield f"ring {how} {box} {stages}", ring(how, box, stages, 1)
        for shared_by in (2, 4, 16, 132):
            yield f"shared {shared_by}", ring("tile", 16384, 8, shared_by)
        for box, depth in ((2048, 4), (16384, 1), (16384, 4), (32768, 2)):
            for reads in (True, False):
                yield f"store {box} {depth} {reads}", store(box, depth, reads)

    def map(self, big: int, box: int) -> bytes:
        return self.device.tensor_map(big, self.device.most // 1024, 512, box // 128, COLUMNS)

    def rows(self, run) -> Iterator[Row]:
        big = self.device.memory(2 << 30)
        for how in ("bulk", "tile"):
            for box in self.SIZES:
                tensor = self.map(big, box) if how == "tile" else b""
                shared = BARRIERS + box
                with self.point(f"issue of {how} {box}") as report:
                    run(issue(how, box, 16), 1, 32, shared, source=big, m=(16 << 20) // box - 1, map=tensor)
                    stamps = run(issue(how, box, 16), 1, 32, shared, source=big, m=(16 << 20) // box - 1, map=tensor)
                    yield report(stamps.cycles() / 16, "cycles", stamps)
                for where, size in self.SOURCES:
                    for grid in (1, 132):
                        with self.point(f"latency {how} {box}, {where}, {grid} CTAs") as report:
                            n = 100
                            text = latency(how, box)
                            if where == "L2":
                                run(text, 132, 32, shared, source=big, n=400, m=size // box - 1, map=tensor)
                            else:
                                self.device.flush()
                            stamps = run(text, grid, 32, shared, source=big, n=n, m=size // box - 1, map=tensor)
                            yield report(stamps.ns() / (n + 1), "ns", stamps, cycles=stamps.cycles() / (n + 1))
        for box, stages in self.RINGS:
            for how in ("bulk", "tile"):
                tensor = self.map(big, box) if how == "tile" else b""
                for where, size in self.SOURCES:
                    for grid in (1, 132):
                        if grid == 1 and how == "bulk":
                            continue
                        with self.point(f"ring {how} {box} x {stages}, {where}, {grid} CTAs") as report:
                            text, shared = ring(how, box, stages, 1), BARRIERS + box * stages
                            n = max(2, (8 << 20) // (box * stages))
                            if where == "L2":
                                run(text, 132, 32, shared, source=big, n=8, m=size // box - 1, map=tensor)
                            stamps = run(text, grid, 32, shared, source=big, n=n, m=size // box - 1, map=tensor)
                            moved = (n + 1) * stages * box
                            yield report(
                                moved / stamps.ns(),
                                "bytes/ns of an SM",
                                stamps,
                                bytes_a_cycle=moved / stamps.cycles(),
                                all=grid * moved / stamps.span_ns(),
                            )
        for shared_by in (2, 4, 16, 132):
            for where, size in self.SOURCES:
                with self.point(f"ring tile 16384 x 8, {where}, read by {shared_by} CTAs each") as report:
                    box, stages = 16384, 8
                    n = max(2, (8 << 20) // (box * stages))
                    stamps = run(ring("tile", box, stages, shared_by), 132, 32, BARRIERS + box * stages, source=big, n=n,
                                 m=size // box - 1, map=self.map(big, box))  # fmt: skip
                    moved = (n + 1) * stages * box
                    yield report(
                        moved / stamps.ns(), "bytes/ns of an SM", stamps, bytes_a_cycle=moved / stamps.cycles()
                    )
        for box, depth in ((2048, 4), (16384, 1), (16384, 4), (32768, 2)):
            for reads in (True, False):
                for grid in (1, 132):
                    with self.point(
                        f"store {box}, {depth} under way, {'read' if reads else 'written'}, {grid} CTAs"
                    ) as report:
                        n = (4 << 20) // box
                        stamps = run(
                            store(box, depth, reads), grid, 32, BARRIERS + box, source=big, n=n, m=(1 << 30) // box - 1
                        )
                        yield report(
                            n * box / stamps.ns(),
                            "bytes/ns of an SM",
                            stamps,
                            all=grid * n * box / stamps.span_ns(),
                            cycles_each=stamps.cycles() / n,
                        )
