# ruff: noqa: E501  PTX text
"""M9, M16, M17: shared memory, matrix loads and stores, fences; loads from L1, L2 and device memory, cp.async."""

from __future__ import annotations

from collections.abc import Iterator

from bench import Bench, Row
from ptx import frame, loop


def shared_rate(text: str, threads: int, stride: int, unroll: int = 16) -> str:
    setup = f"  mul.lo.u32 %r1, %lane, {stride}; and.b32 %r1, %r1, 0x7fff; mul.lo.u32 %r2, %warp, 0; add.u32 %r1, %r1, %sm;\n"
    setup += "  mov.b32 %r4, %thread; mov.b32 %r5, %thread; mov.b32 %r6, %thread; mov.b32 %r7, %thread;\n"
    return frame(threads, loop(text * unroll) + "  xor.b32 %acc, %acc, %r8;\n", setup)


RATES = {  # name: (text, bytes between lanes)
    "lds.32": ("  ld.volatile.shared.b32 %r8, [%r1];\n", 4),
    "lds.64": ("  ld.volatile.shared.v2.b32 {%r8, %r9}, [%r1];\n", 8),
    "lds.128": ("  ld.volatile.shared.v4.b32 {%r8, %r9, %r10, %r11}, [%r1];\n", 16),
    "sts.32": ("  st.volatile.shared.b32 [%r1], %r4;\n", 4),
    "sts.128": ("  st.volatile.shared.v4.b32 [%r1], {%r4, %r5, %r6, %r7};\n", 16),
    "lds.32, 2 ways": ("  ld.volatile.shared.b32 %r8, [%r1];\n", 8),
    "lds.32, 8 ways": ("  ld.volatile.shared.b32 %r8, [%r1];\n", 32),
    "lds.32, 32 ways": ("  ld.volatile.shared.b32 %r8, [%r1];\n", 128),
    "sts.32, 8 ways": ("  st.volatile.shared.b32 [%r1], %r4;\n", 32),
    "ldmatrix.x4": (
        "  ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r9, %r10, %r11, %r12}, [%r1]; xor.b32 %r8, %r8, %r9;\n",
        16,
    ),
    "stmatrix.x4": ("  stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r4, %r5, %r6, %r7};\n", 16),
}
LATENCIES = {
    "lds": "  ld.shared.b32 %r1, [%r1];\n",
    "ldmatrix.x4": "  ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r10, %r11, %r12}, [%r1];\n",
    "sts+lds": "  st.volatile.shared.b32 [%r1], %r1; ld.volatile.shared.b32 %r1, [%r1];\n",
    "atom.shared": "  atom.shared.add.u32 %r8, [%r1], %r8;\n",
    "fence.proxy.async": "  fence.proxy.async.shared::cta;\n",
    "8 stmatrix, fence": "  stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r2], {%r4, %r5, %r6, %r7};\n" * 8
    + "  fence.proxy.async.shared::cta;\n",
    "membar.cta": "  fence.acq_rel.cta;\n",
}


def shared_latency(text: str) -> str:
    """Every word of shared memory that is read holds its own address."""
    setup = """  shl.b32 %r1, %lane, 4; add.u32 %r1, %r1, %sm; add.u32 %r2, %r1, 4096;
  st.shared.v4.b32 [%r1], {%r1, %r1, %r1, %r1}; mov.b32 %r8, 0; mov.b32 %r4, 1; mov.b32 %r5, 1; mov.b32 %r6, 1; mov.b32 %r7, 1;
"""
    return frame(32, loop(text * 16) + "  xor.b32 %acc, %r1, %r8;\n", setup)


def stream(per_thread: int, threads: int, store: bool = False, bytes_: int = 16) -> str:
    """Grid-stride over %n chunks of per_thread x 16 bytes per thread; offsets masked by %m (0: none)."""
    chunk = threads * bytes_ * per_thread
    vec = {16: "v4", 8: "v2", 4: ""}[bytes_]
    dot = f".{vec}" if vec else ""

    def names(k: int) -> str:
        part = [f"%f{4 * k + j}" for j in range(bytes_ // 4)]
        return "{" + ", ".join(part) + "}" if vec else part[0]

    step = threads * bytes_
    if store:
        moves = "".join(f"  st.global{dot}.b32 [%d3+{k * step}], {names(k)};\n" for k in range(per_thread))
    else:
        moves = "".join(f"  ld.global{dot}.b32 {names(k)}, [%d3+{k * step}];\n" for k in range(per_thread))
        moves += "".join(
            f"  xor.b32 %acc, %acc, %f{4 * k + j};\n" for k in range(per_thread) for j in range(bytes_ // 4)
        )
    body = f"""  mov.u32 %r1, %nctaid.x; mul.wide.u32 %d5, %r1, {chunk}; mul.wide.u32 %d6, %cta, {chunk};
  cvt.u64.u32 %d7, %m; mul.wide.u32 %d4, %thread, {bytes_}; add.u64 %d4, %d4, %src; not.b64 %d10, %d7;
{loop(f"  and.b64 %d3, %d6, %d7; add.u64 %d3, %d3, %d4; {moves}  add.u64 %d6, %d6, %d5;")}"""
    start = "".join(f"  mov.b32 %f{i}, %thread;\n" for i in range(4 * per_thread))
    return frame(threads, body, start)


def chase(kind: str = "") -> str:
    """One thread walks addresses that depend on what it reads (zeros are never there: values only steer by 0)."""
    body = loop(f"""  ld.global{kind}.b32 %r2, [%d3]; and.b32 %r2, %r2, 0; add.u32 %r3, %r3, 4224; add.u32 %r3, %r3, %r2;
  and.b32 %r3, %r3, %m; cvt.u64.u32 %d4, %r3; add.u64 %d3, %src, %d4;""")
    return frame(32, body + "  xor.b32 %acc, %acc, %r2;\n", "  mov.u64 %d3, %src; mov.u32 %r3, 0;\n")


def gather(warps: int, row: int, groups: int, size: int = 16) -> str:
    """Rows of `row` bytes by a hashed number, by cp.async; a warp has at most `groups` rows under way. %m: row mask."""
    per = row // (32 * size)
    cp = "cg" if size == 16 else "ca"
    copies = "".join(
        f"  cp.async.{cp}.shared.global [%r7+{k * 32 * size}], [%d3+{k * 32 * size}], {size};\n" for k in range(per)
    )
    body = loop(f"""  mul.lo.u32 %r3, %r2, 0x9E3779B1; shr.u32 %r4, %r3, 13; xor.b32 %r3, %r3, %r4; mul.lo.u32 %r3, %r3, 0x85EBCA77;
  shr.u32 %r3, %r3, 5; and.b32 %r3, %r3, %m; mul.wide.u32 %d3, %r3, {row}; add.u64 %d3, %d3, %d4;
  and.b32 %r5, %i, {groups - 1}; mad.lo.u32 %r7, %r5, {row}, %r6;
{copies}  cp.async.commit_group; cp.async.wait_group {groups - 1}; add.u32 %r2, %r2, %r8;""")
    setup = f"""  mad.lo.u32 %r2, %cta, {warps}, %warp; mov.u32 %r8, %nctaid.x; mul.lo.u32 %r8, %r8, {warps};
  mul.lo.u32 %r6, %lane, {size}; cvt.u64.u32 %d4, %r6; add.u64 %d4, %d4, %src;
  mul.lo.u32 %r9, %warp, {row * groups}; add.u32 %r6, %r6, %r9; add.u32 %r6, %r6, %sm;
"""
    return frame(32 * warps, body + "  cp.async.wait_all;\n", setup)


def issue_of_copies(count: int) -> str:
    copies = "".join(f"  cp.async.cg.shared.global [%r7+{k * 512}], [%d3+{k * 512}], 16;\n" for k in range(count))
    setup = """  mul.lo.u32 %r6, %lane, 16; cvt.u64.u32 %d4, %r6; add.u64 %d3, %d4, %src; add.u32 %r7, %r6, %sm;
"""
    return frame(32, loop(copies + "  cp.async.commit_group;") + "  cp.async.wait_all;\n", setup)


class Memory(Bench):
    group = "memory"
    STREAMS = tuple(
        (k, t, c) for k, t, c in ((1, 128, 4), (4, 256, 1), (4, 256, 2), (8, 256, 1), (8, 256, 4), (16, 128, 8))
    )
    GATHERS = tuple((w, g) for w in (4, 8) for g in (2, 4, 8, 16) if w * g * 1024 <= 128 << 10)

    def kernels(self) -> Iterator[tuple[str, str]]:
        for name, (text, stride) in RATES.items():
            for threads in (32, 512):
                yield f"{name}, {threads // 32} warps", shared_rate(text, threads, stride)
        for name, text in LATENCIES.items():
            yield f"{name} latency", shared_latency(text)
        for k, t, c in self.STREAMS:
            for store in (False, True):
                yield f"{'store' if store else 'load'} {k} x 16 B x {t} threads x {c} CTAs", stream(k, t, store)
        yield "load 4 B", stream(8, 256, False, 4)
        yield "chase", chase()
        yield "chase L1", chase(".ca")
        for w, g in self.GATHERS:
            yield f"gather {w} warps {g} rows", gather(w, 1024, g)
        yield "issue of cp.async", issue_of_copies(16)

    def rows(self, run) -> Iterator[Row]:
        device = self.device
        for name, (text, stride) in RATES.items():
            for threads in (32, 512):
                with self.point(f"{name}, {threads // 32} warps") as report:
                    stamps = run(shared_rate(text, threads, stride), 132, threads, 40 << 10, n=200)
                    yield report(stamps.cycles() / (200 * 16 * threads / 32), "cycles of the SM", stamps)
        for name, text in LATENCIES.items():
            with self.point(f"{name} latency") as report:
                stamps = run(shared_latency(text), 1, 32, 16 << 10, n=100)
                yield report(stamps.cycles() / 1600, "cycles", stamps)
        big = device.memory(2 << 30)
        for k, t, c in self.STREAMS:
            for store in (False, True):
                for where, mask, total in (("HBM", (2 << 30) - 1, 2 << 30), ("L2", (16 << 20) - 1, 1 << 30)):
                    with self.point(
                        f"{'store' if store else 'load'} {k} x 16 B x {t} threads x {c} CTAs, {where}"
                    ) as report:
                        text, grid = stream(k, t, store), 132 * c
                        n = total // (grid * t * 16 * k)
                        if where == "L2":
                            run(text, grid, t, source=big, n=max(1, n // 16), m=mask)
                        stamps = run(text, grid, t, source=big, n=n, m=mask)
                        moved = grid * n * t * 16 * k
                        yield report(moved / stamps.span_ns(), "bytes/ns", stamps, bytes=moved)
        for where, mask in (("L2, 4 MB", (4 << 20) - 1), ("L2, 32 MB", (32 << 20) - 1), ("HBM", (1 << 30) - 1)):
            with self.point(f"load latency, {where}") as report:
                text = chase()
                n = 2000
                if where != "HBM":
                    run(text, 1, 32, source=big, n=(mask + 1) // 4224 * 2, m=mask)
                else:
                    device.flush()
                stamps = run(text, 1, 32, source=big, n=n, m=mask)
                yield report(stamps.cycles() / n, "cycles", stamps)
        with self.point("load latency, L1") as report:
            text = chase(".ca")
            run(text, 1, 32, source=big, n=100, m=(16 << 10) - 1)
            stamps = run(text, 1, 32, source=big, n=2000, m=(16 << 10) - 1)
            yield report(stamps.cycles() / 2000, "cycles", stamps)
        for w, g in self.GATHERS:
            for where, mask, grid in (
                ("L2", (1 << 14) - 1, 132),
                ("HBM", (1 << 21) - 1, 132),
                ("L2", (1 << 14) - 1, 1),
            ):
                with self.point(f"gather of 1 KB rows, {w} warps, {g} under way each, {where}, {grid} CTAs") as report:
                    text, n = gather(w, 1024, g), 2000 // w
                    mask = min(mask, device.most // 1024 - 1)
                    if where == "L2":
                        run(text, 132, 32 * w, w * g * 1024, source=big, n=n, m=mask)
                    stamps = run(text, grid, 32 * w, w * g * 1024, source=big, n=n, m=mask)
                    moved = n * w * 1024
                    yield report(
                        moved / stamps.ns(), "bytes/ns of an SM", stamps, bytes_a_cycle=moved / stamps.cycles()
                    )
        with self.point("issue of cp.async, 16 B") as report:
            stamps = run(issue_of_copies(16), 1, 32, 16 << 10, source=big, n=50)
            yield report(stamps.cycles() / 800, "cycles", stamps)
