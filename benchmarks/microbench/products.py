"""M1 to M6: wgmma. Interval and latency by N and by the place of A, other work beside it, the clock under load."""

from __future__ import annotations

from collections.abc import Iterator

from bench import Bench, Row
from ptx import fill_shared, frame, init_barriers, loop, wait

from instructions import OPERATIONS, SETUP

TILE = 64 << 10  # of shared memory that operands lie in
DESCRIPTOR = (1 << 62) | (64 << 32) | (1 << 16)  # 128-byte swizzle, 1024 bytes between groups of eight rows


def descriptors() -> str:
    """%d8: A at the start of shared memory, %d9: B 16 KB further on."""
    return f"""
  shr.u32 %r5, %sm, 4; and.b32 %r5, %r5, 0x3fff; cvt.u64.u32 %d8, %r5; or.b64 %d8, %d8, {DESCRIPTOR};
  add.u64 %d9, %d8, {16384 // 16};
"""


def product(n: int, register_a: bool, first: int = 0, fp8: bool = False, step: int = 0) -> str:
    acc = ", ".join(f"%f{first + i}" for i in range(n // 2))
    a = "{%f290, %f291, %f292, %f293}" if register_a else "%d8"
    kind, k = ("e4m3.e4m3", 32) if fp8 else ("bf16.bf16", 16)
    flags = "" if fp8 else (", 0" if register_a else ", 0, 0")
    return f"  wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind} {{{acc}}}, {a}, %d9, 1, 1, 1{flags};\n"


FENCE, COMMIT = "  wgmma.fence.sync.aligned;\n", "  wgmma.commit_group.sync.aligned;\n"


def wait_group(n: int) -> str:
    return f"  wgmma.wait_group.sync.aligned {n};\n"


def zero(n: int) -> str:
    text = "".join(f"  mov.b32 %f{i}, 0;\n" for i in range(n // 2))
    return text + "".join(f"  mov.b32 %f{290 + i}, 0x3f803f80;\n" for i in range(4))


def use(n: int) -> str:
    return "".join(f"  xor.b32 %acc, %acc, %f{i};\n" for i in range(n // 2))


def interval(n: int, register_a: bool, groups: int, each: int, depth: int, zeros: bool = False, fp8=False) -> str:
    """`each` products to a group, at most `depth` groups under way."""
    threads = 128 * groups
    body = FENCE + product(n, register_a, fp8=fp8) * each + COMMIT + wait_group(depth)
    setup = fill_shared(TILE, threads, zeros) + descriptors() + zero(n)
    return frame(threads, loop(body) + wait_group(0) + use(n), setup)


def beside(op: str, n: int, register_a: bool) -> str:
    """Warps 0-3 make products, warps 4-7 run one instruction; %n and %m rounds."""
    chains = 8
    text = OPERATIONS[op][0]
    work = "".join(f"  {text.format(d=f'%f{c}')}\n" for _ in range(8) for c in range(chains))
    start = "".join(f"  add.u32 %f{c}, %thread, {c + 1};\n" for c in range(chains))
    end = "".join(f"  xor.b32 %acc, %acc, %f{c};\n" for c in range(chains))
    body = f"""  setp.ge.u32 %p3, %warp, 4; @%p3 bra OTHER;
{zero(n)}{loop(FENCE + product(n, register_a) * 8 + COMMIT + wait_group(1))}{wait_group(0)}{use(n)}  bra.uni FINISH;
OTHER:
{start}{loop(work, "M", "%r40", "%m")}{end}"""
    return frame(256, body, fill_shared(TILE, 256) + descriptors() + SETUP)


def beside_copies(n: int, box: int, stages: int) -> str:
    """Warps 0-3 make products with both operands in shared memory, a thread of warp 4 fills other parts of it."""
    ring = TILE + 1024
    first = "".join(
        f"  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%sm+{TILE + 8 * s}], {box};\n"
        f"  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r{20 + s}], [%d2], {box}, "
        f"[%sm+{TILE + 8 * s}];\n  add.u64 %d2, %d2, {box};\n"
        for s in range(stages)
    )
    again = "".join(
        f"  add.u32 %r41, %sm, {TILE + 8 * s};\n"
        + wait("%r41", "%r42", f"W{s}")
        + f"  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r41], {box};\n"
        f"  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r{20 + s}], [%d2], {box}, [%r41];\n"
        for s in range(stages)
    )
    drain = "".join(f"  add.u32 %r41, %sm, {TILE + 8 * s};\n" + wait("%r41", "%r42", f"E{s}") for s in range(stages))
    places = "".join(f"  add.u32 %r{20 + s}, %sm, {ring + s * box};\n" for s in range(stages))
    body = f"""  setp.ge.u32 %p3, %warp, 4; @%p3 bra OTHER;
{zero(n)}{loop(FENCE + product(n, False) * 8 + COMMIT + wait_group(1))}{wait_group(0)}{use(n)}  bra.uni FINISH;
OTHER: setp.ne.u32 %p3, %lane, 0; @%p3 bra FINISH;
{places}  mul.wide.u32 %d2, %cta, 65536; add.u64 %d2, %d2, %src; mov.u32 %r42, 0;
{first}{loop(again + "  xor.b32 %r42, %r42, 1;", "M", "%r40", "%m")}{drain}"""
    setup = fill_shared(TILE, 160) + init_barriers(TILE, stages) + descriptors()
    return frame(160, body, setup)


class Products(Bench):
    group = "products"
    WIDTHS = (8, 16, 32, 64, 96, 128, 192, 256)
    BESIDE = ("ffma", "ex2", "fmnmx", "f2fp bf16x2", "iadd3", "shfl")

    def points(self) -> Iterator[tuple[str, str, dict]]:
        for n in self.WIDTHS:
            for register_a in (False, True):
                where = "RS" if register_a else "SS"
                yield f"interval {where} N={n}", interval(n, register_a, 1, 16, 1), dict(each=16, groups=1)
        for n in (64, 128, 256):
            yield f"interval SS N={n}, two warpgroups", interval(n, False, 2, 16, 1), dict(each=16, groups=2)
            yield f"interval fp8 SS N={n}", interval(n, False, 1, 16, 1, fp8=True), dict(each=16, groups=1)
        for n in (64, 128, 256):
            for each in (1, 2, 4, 8):
                for depth in (0, 1):
                    name = f"group of {each}, wait {depth}, SS N={n}"
                    yield name, interval(n, False, 1, each, depth), dict(each=each, groups=1)
        for n in (64, 128):
            yield f"group of 1, wait 0, RS N={n}", interval(n, True, 1, 1, 0), dict(each=1, groups=1)

    def kernels(self) -> Iterator[tuple[str, str]]:
        for name, text, _ in self.points():
            yield name, text
        for op in self.BESIDE:
            for where in (False, True):
                yield f"{op} beside N=128 {'RS' if where else 'SS'}", beside(op, 128, where)
        for box, stages in ((4096, 4), (16384, 4), (32768, 3)):
            for n in (64, 256):
                yield f"copies of {box} beside SS N={n}", beside_copies(n, box, stages)

    def rows(self, run) -> Iterator[Row]:
        for name, text, counts in self.points():
            with self.point(name) as report:
                n = 100
                stamps = run(text, 132, 128 * counts["groups"], TILE, n=n)
                value = stamps.cycles() / (n * counts["each"] * counts["groups"])
                yield report(value, "cycles a product", stamps)
        for op in self.BESIDE:
            for where in (False, True):
                name = f"{op} beside N=128 {'RS' if where else 'SS'}"
                with self.point(name) as report:
                    text, n = beside(op, 128, where), 400
                    per = 64 * OPERATIONS[op][2]
                    m = max(1, round(n * 8 * 64 / (per * {"ex2": 8, "ffma": 1}.get(op, 2))))
                    both = run(text, 132, 256, TILE, n=n, m=m)
                    alone = run(text, 132, 256, TILE, n=1, m=m)
                    yield report(
                        both.cycles(slice(0, 4)) / (n * 8),
                        "cycles a product",
                        both,
                        work=both.cycles(slice(4, 8)) / (m * per),
                        work_alone=alone.cycles(slice(4, 8)) / (m * per),
                    )
        source = self.device.memory(256 << 20)
        for box, stages in ((4096, 4), (16384, 4), (32768, 3)):
            for n in (64, 256):
                with self.point(f"copies of {box} beside SS N={n}") as report:
                    text = beside_copies(n, box, stages)
                    rounds = 3000
                    m = max(1, int(rounds * 8 * n / 2 / (stages * box / 50)))
                    shared = TILE + 1024 + box * stages
                    run(text, 132, 160, shared, source=source, n=1, m=8)
                    both = run(text, 132, 160, shared, source=source, n=rounds, m=m)
                    alone = run(text, 132, 160, shared, source=source, n=1, m=m)
                    copied = (m + 1) * stages * box
                    yield report(
                        both.cycles(slice(0, 4)) / (rounds * 8),
                        "cycles a product",
                        both,
                        bytes_a_cycle=copied / both.cycles(slice(4, 5)),
                        bytes_a_cycle_alone=copied / alone.cycles(slice(4, 5)),
                    )


class Clock(Bench):
    """M1: the clock of the multiprocessors under products that last longer and longer, random data and zeros."""

    group = "clock"
    CASES = tuple((zeros, n) for zeros in (False, True) for n in (20, 200, 2000, 20000))

    def kernels(self) -> Iterator[tuple[str, str]]:
        for zeros in (False, True):
            yield f"zeros {zeros}", interval(256, False, 2, 8, 1, zeros)
            yield f"N=64, zeros {zeros}", interval(64, False, 2, 8, 1, zeros)

    def rows(self, run) -> Iterator[Row]:
        for n_columns in (256, 64):
            for zeros, n in self.CASES:
                with self.point(f"N={n_columns} {'zeros' if zeros else 'random'} x {n}") as report:
                    stamps = run(interval(n_columns, False, 2, 8, 1, zeros), 132, 256, TILE, n=n)
                    yield report(stamps.mhz(), "MHz", stamps)
