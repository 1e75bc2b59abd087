# ruff: noqa: E501  PTX text
"""Warpgroups that make products and other work in turn, alone on a multiprocessor or beside others of their kind: who gets the
tensor core. Rings of tiles by cp.async that CTAs read in step, by the shape of the tile and the pitch of its rows, with and
without products behind them. Other work beside products of N = 64."""

from __future__ import annotations

from collections.abc import Iterator

from bench import Bench, Row
from products import COMMIT, FENCE, TILE, descriptors, interval, product, use, wait_group, zero
from products import beside as beside_products
from ptx import fill_shared, frame, loop

from instructions import OPERATIONS, SETUP

CHAINS = 16  # accumulators that the other work goes over


def work_of(mix: tuple[str, ...], rounds: int) -> str:
    """`rounds` passes over the accumulators, the instructions of the mix in turn."""
    return "".join(
        f"  {OPERATIONS[mix[k % len(mix)]][0].format(d=f'%f{c}')}\n" for k in range(rounds) for c in range(CHAINS)
    )


def turns(mix: tuple[str, ...], rounds: int, first: int = 8, second: int = 4, groups: int = 1) -> str:
    """Each of `groups` warpgroups: `first` products N = 64 with both operands in shared memory, work on their results,
    `second` products N = 128 with those results as A."""
    qk = FENCE + product(64, False) * first + COMMIT + wait_group(0)
    pv = (
        FENCE
        + product(128, True, 64).replace("%f290, %f291, %f292, %f293", "%f0, %f1, %f2, %f3") * second
        + COMMIT
        + wait_group(0)
    )
    start = zero(64) + "".join(f"  mov.b32 %f{64 + i}, 0;\n" for i in range(64)) + SETUP
    end = use(64) + "".join(f"  xor.b32 %acc, %acc, %f{64 + i};\n" for i in range(64))
    all_of_it = "".join(
        f"  xor.b32 %f{c % 4}, %f{c % 4}, %f{c};\n" for c in range(4, CHAINS)
    )  # or some of it would sink behind products
    body = (qk if first else "") + work_of(mix, rounds) + (all_of_it + pv if second else "")
    return frame(128 * groups, loop(body) + end, fill_shared(TILE, 128 * groups) + descriptors() + start)


# Descriptors as Triton makes them: A of 64-byte rows (64-byte swizzle, 512 bytes between groups of eight rows); B with its
# columns in a row (128-byte swizzle, 4 KB between 64 columns).
NARROW_A = (2 << 62) | (32 << 32) | (1 << 16)
COLUMNS_B = (1 << 62) | (64 << 32) | (256 << 16)


def laid_out(text: str, narrow_a: bool, columns_b: bool) -> str:
    """The products of a kernel with other layouts of their operands."""
    setup = ""
    if narrow_a:
        setup += f"  cvt.u64.u32 %d8, %r5; or.b64 %d8, %d8, {NARROW_A};\n"
    if columns_b:
        setup += f"  add.u32 %r6, %r5, 1024; cvt.u64.u32 %d9, %r6; or.b64 %d9, %d9, {COLUMNS_B};\n"
        text = text.replace(", 1, 1, 1, 0, 0;", ", 1, 1, 1, 0, 1;").replace(", 1, 1, 1, 0;", ", 1, 1, 1, 1;")
    return text.replace(descriptors(), descriptors() + setup)


def computed(n: int, each: int, chain: int, other: bool = False) -> str:
    """Groups of `each` products whose descriptors are computed anew, by `chain` instructions one after the other (and as many
    of a chain that nothing of the products needs, with `other`); one group under way."""
    text = ""
    for k in range(each):
        text += f"  add.u32 %r30, %i, {k};\n"
        for j in range(chain):
            text += f"  {('add.u32', 'xor.b32')[j % 2]} %r30, %r30, {(j * 37 + 11) & 255};\n"
        text += "  and.b32 %r30, %r30, 0x180; add.u32 %r31, %r5, %r30; cvt.u64.u32 %d8, %r31;\n"
        text += (
            f"  or.b64 %d8, %d8, {(1 << 62) | (64 << 32) | (1 << 16)};\n"
            + (FENCE if k == 0 else "")
            + product(n, False)
        )
    if other:
        text += "".join(f"  {('add.u32', 'xor.b32')[j % 2]} %r40, %r40, {(j * 41 + 7) & 255};\n" for j in range(chain))
    body = text + COMMIT + wait_group(1)
    end = wait_group(0) + use(n) + "  xor.b32 %acc, %acc, %r40;\n"
    return frame(128, loop(body) + end, fill_shared(TILE, 128) + descriptors() + zero(n) + "  mov.u32 %r40, %n;\n")


def tiles(
    shapes: tuple[tuple[int, int, int, int, int, int, int], ...],
    products: int,
    apart: int,
    stages: int = 4,
    by_stage: bool = False,
) -> str:
    """A ring of `stages` tiles, filled by cp.async of 128 threads. Each operand: (rows, bytes of a row, pitch, bytes a step goes
    on, CTAs that take the same tile, tiles in a row, bytes between tiles); %m: mask of the steps. `products` N = 128 a step.
    The second operand begins `apart` bytes behind the first. `by_stage`: the products' operands are those of the stage, their
    descriptors computed and laid out as Triton does it."""
    setup, copies, at = "", "", 0
    total = sum(rows * piece for rows, piece, *_ in shapes)
    for k, (rows, piece, pitch, step, by, count, between) in enumerate(shapes):
        lanes = piece // 16
        at_once = 128 // lanes
        setup += f"""  shr.u32 %r10, %thread, {lanes.bit_length() - 1}; mul.lo.u32 %r10, %r10, {pitch}; and.b32 %r11, %thread, {lanes - 1}; shl.b32 %r11, %r11, 4;
  add.u32 %r10, %r10, %r11; div.u32 %r11, %cta, {by}; rem.u32 %r11, %r11, {count}; mul.lo.u32 %r11, %r11, {between};
  add.u32 %r10, %r10, %r11; cvt.u64.u32 %d{10 + k}, %r10; add.u64 %d{10 + k}, %d{10 + k}, %src; add.u64 %d{10 + k}, %d{10 + k}, {k * apart};
"""
        copies += f"  and.b32 %r12, %r20, %m; mul.lo.u32 %r12, %r12, {step}; cvt.u64.u32 %d14, %r12; add.u64 %d14, %d14, %d{10 + k};\n"
        for j in range(rows // at_once):
            copies += f"  cp.async.cg.shared.global [%r14+{at}], [%d14+{j * at_once * pitch}], 16;\n"
            at += 2048
    setup += "  shl.b32 %r13, %thread, 4; add.u32 %r13, %r13, %sm; mov.u32 %r20, 0;\n"
    fill = f"  and.b32 %r14, %r20, {stages - 1}; mul.lo.u32 %r14, %r14, {total}; add.u32 %r14, %r14, %r13;\n{copies}  cp.async.commit_group; add.u32 %r20, %r20, 1;\n"
    made = FENCE + product(128, False) * products + COMMIT + wait_group(1) if products else ""
    if by_stage:
        a, b = (rows * piece for rows, piece, *_ in shapes)
        made = f"""  and.b32 %r30, %i, {stages - 1}; mul.lo.u32 %r31, %r30, {a}; add.u32 %r31, %r31, %sm; shr.u32 %r31, %r31, 4; and.b32 %r31, %r31, 0x3fff;
  cvt.u64.u32 %d8, %r31; or.b64 %d8, %d8, {NARROW_A}; mul.lo.u32 %r31, %r30, {b}; add.u32 %r31, %r31, %sm; add.u32 %r31, %r31, {stages * a};
  shr.u32 %r31, %r31, 4; and.b32 %r31, %r31, 0x3fff; cvt.u64.u32 %d9, %r31; or.b64 %d9, %d9, {COLUMNS_B};
{FENCE}"""
        for _ in range(products):
            made += (
                product(128, False).replace(", 1, 1, 1, 0, 0;", ", 1, 1, 1, 0, 1;")
                + "  add.u64 %d8, %d8, 2; add.u64 %d9, %d9, 128;\n"
            )
        made += COMMIT + wait_group(1)
    body = loop(f"  cp.async.wait_group {stages - 2}; bar.sync 0;\n{made}  bar.sync 0;\n{fill}")
    end = wait_group(0) + use(128) if products else ""
    return frame(
        128,
        fill * (stages - 1) + body + "  cp.async.wait_all;\n" + end,
        fill_shared(TILE, 128) + descriptors() + zero(128) + setup,
    )


MIXES = {
    "ffma": ("ffma",),
    "ex2": ("ex2",),
    "fmnmx": ("fmnmx",),
    "softmax": ("fmnmx", "ffma", "ex2", "fadd", "fmul", "f2fp bf16x2"),
}
K = 1 << 10
# name -> operands, mask of steps
SHAPES = {
    f"{rows} rows of {piece}, pitch {pitch}, {by} of a tile": (
        ((rows, piece, pitch, piece, by, -(-132 // by), rows * pitch),),
        window // piece - 1,
    )
    for rows, piece in ((192, 64), (96, 128), (48, 256))
    for pitch in (8 * K, 16 * K, 16 * K + 128)
    for by, window in ((1, 512), (8, 2 * K))
}
PAIRS = {  # two operands that CTAs in a square share: A by rows, B by columns
    "A 64 x 64 of pitch 16384, B 32 x 256 of pitch 2048": (
        ((64, 64, 16 * K, 64, 8, 16, 64 * 16 * K), (32, 256, 2 * K, 64 * K, 1, 8, 256)), 255),
    "A 64 x 64 of pitch 16512, B 32 x 256 of pitch 2176": (
        ((64, 64, 16512, 64, 8, 16, 64 * 16512), (32, 256, 2176, 32 * 2176, 1, 8, 256)), 255),
    "A 64 x 128 of pitch 16384, B 64 x 256 of pitch 2048": (
        ((64, 128, 16 * K, 128, 8, 16, 64 * 16 * K), (64, 256, 2 * K, 128 * K, 1, 8, 256)), 127),
}  # fmt: skip


class Turns(Bench):
    group = "turns"
    ROUNDS = (0, 6, 12, 24)
    BESIDE = ("ffma", "fadd", "fmul", "fmnmx", "ex2", "f2fp bf16x2", "iadd3", "imad")
    LAYOUTS = ((True, False, "A of 64-byte rows"), (False, True, "B by columns"), (True, True, "both"))

    @classmethod
    def besides(cls) -> list[tuple[str, int, bool]]:
        """(instruction, N, whether A is in registers)"""
        return [(op, 64, False) for op in cls.BESIDE] + [(op, 128, True) for op in ("fadd", "fmul", "imad")]

    def in_turn(self) -> Iterator[tuple[str, str, int]]:
        for groups in (1, 2, 3):
            for name, mix in MIXES.items():
                for r in self.ROUNDS:
                    if r or name == "ffma":
                        yield (f"8 products N=64, {name} x {r}, 4 products N=128", turns(mix, r, groups=groups), groups)
                yield f"{name} x 24 alone", turns(mix, 24, 0, 0, groups), groups
            yield "8 products N=64 alone", turns(("ffma",), 0, 8, 0, groups), groups
            yield "4 products N=128 RS alone", turns(("ffma",), 0, 0, 4, groups), groups

    def products(self) -> Iterator[tuple[str, str, int]]:
        for n in (64, 128, 256):
            for a, b, what in self.LAYOUTS:
                yield f"interval SS N={n}, {what}", laid_out(interval(n, False, 1, 16, 1), a, b), 16
                yield f"group of 2, wait 1, SS N={n}, {what}", laid_out(interval(n, False, 1, 2, 1), a, b), 2
            yield f"interval RS N={n}, B by columns", laid_out(interval(n, True, 1, 16, 1), False, True), 16
        for n, each in ((64, 1), (64, 2), (128, 2), (64, 4)):
            for chain in (0, 4, 8, 16, 32):
                yield (f"group of {each}, wait 1, SS N={n}, descriptors by {chain}", computed(n, each, chain), each)
        for chain in (8, 32):
            yield (
                f"group of 2, wait 1, SS N=128, descriptors by {chain}, another chain",
                computed(128, 2, chain, True),
                2,
            )

    def rings(self) -> Iterator[tuple[str, str, tuple, int, int]]:
        apart = self.device.most >> 4
        for name, (shapes, mask) in (SHAPES | PAIRS).items():
            made = [(0, False)]
            if name in PAIRS:
                made += [(shapes[0][1] // 32, False)] + [(2, True)] * (shapes[0][1] == 64)
            for count, by_stage in made:
                text = tiles(shapes, count, apart, by_stage=by_stage)
                yield (
                    f"{name}, {count} products{' of their stage' * by_stage}",
                    text,
                    shapes,
                    mask,
                    128 if name in PAIRS else 132,
                )

    def kernels(self) -> Iterator[tuple[str, str]]:
        for made in (self.in_turn(), self.products(), self.rings()):
            for name, text, *_ in made:
                yield name, text
        for op, columns, register_a in self.besides():
            yield f"{op} beside N={columns} {'RS' if register_a else 'SS'}", beside_products(op, columns, register_a)

    def rows(self, run) -> Iterator[Row]:
        n = 200 if self.device.name == "gpu" else 2
        for name, text, groups in self.in_turn():
            with self.point(f"{name}, {groups} warpgroups") as report:
                stamps = run(text, 132, 128 * groups, TILE, n=n)
                yield report(stamps.cycles() / n, "cycles a turn", stamps)
        for name, text, each in self.products():
            with self.point(name) as report:
                stamps = run(text, 132, 128, TILE, n=n)
                yield report(stamps.cycles() / (n * each), "cycles a product", stamps)
        big = self.device.memory(1 << 30)
        for name, text, shapes, mask, all_ in self.rings():
            moved = sum(rows * piece for rows, piece, *_ in shapes)
            for grid in (all_, all_ // 16):
                with self.point(f"{name}, {grid} CTAs") as report:
                    steps, shared = 8 * n, max(4 * moved, TILE)
                    if self.device.name != "gpu":
                        steps, mask = 2, 0
                    run(text, grid, 128, shared, source=big, n=steps, m=mask)
                    stamps = run(text, grid, 128, shared, source=big, n=steps, m=mask)
                    yield report(
                        stamps.cycles() / steps, "cycles a step", stamps, bytes_a_cycle=moved * steps / stamps.cycles()
                    )
        for op, columns, register_a in self.besides():
            with self.point(f"{op} beside N={columns} {'RS' if register_a else 'SS'}") as report:
                text, rounds = beside_products(op, columns, register_a), 2 * n
                per = 64 * OPERATIONS[op][2]
                m = max(
                    1, round(rounds * 8 * columns / 2 / (per * {"ex2": 8, "ffma": 1, "fadd": 1, "fmul": 1}.get(op, 2)))
                )
                both = run(text, 132, 256, TILE, n=rounds, m=m)
                alone = run(text, 132, 256, TILE, n=1, m=m)
                yield report(
                    both.cycles(slice(0, 4)) / (rounds * 8),
                    "cycles a product",
                    both,
                    work=both.cycles(slice(4, 8)) / (m * per),
                    work_alone=alone.cycles(slice(4, 8)) / (m * per),
                )
