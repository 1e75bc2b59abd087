# ruff: noqa: E501  PTX text
"""Warpgroups that make products and other work in turn, alone on a multiprocessor or beside others of their kind: who gets the
tensor core. Rings of tiles by cp.async that CTAs read in step, by the shape of the tile and the pitch of its rows, with and
without products behind them. Other work beside products of N = 64."""

from __future__ import annotations

from collections.abc import Iterator

from bench import Bench, Row
from instructions import OPERATIONS, SETUP
from products import COMMIT, FENCE, TILE, descriptors, product, use, wait_group, zero
from products import beside as beside_products
from ptx import fill_shared, frame, loop

CHAINS = 16  # accumulators that the other work goes over


def work_of(mix: tuple[str, ...], rounds: int) -> str:
    """`rounds` passes over the accumulators, the instructions of the mix in turn."""
    return "".join(
        f"  {OPERATIONS[mix[k % len(mix)]][0].format(d=f'%f{c}')}\n" for k in range(rounds) for c in range(CHAINS)
    )


def turns(mix: tuple[str, ...], rounds: int, first: int = 8, second: int = 4) -> str:
    """`first` products N = 64 with both operands in shared memory, work on their results, `second` products N = 128 with
    those results as A."""
    qk = FENCE + product(64, False) * first + COMMIT + wait_group(0)
    pv = FENCE + product(128, True, 64).replace("%f290, %f291, %f292, %f293", "%f0, %f1, %f2, %f3") * second + COMMIT + wait_group(0)
    start = zero(64) + "".join(f"  mov.b32 %f{64 + i}, 0;\n" for i in range(64)) + SETUP
    end = use(64) + "".join(f"  xor.b32 %acc, %acc, %f{64 + i};\n" for i in range(64))
    all_of_it = "".join(f"  xor.b32 %f{c % 4}, %f{c % 4}, %f{c};\n" for c in range(4, CHAINS))  # or some of it would sink behind products
    body = (qk if first else "") + work_of(mix, rounds) + (all_of_it + pv if second else "")
    return frame(128, loop(body) + end, fill_shared(TILE, 128) + descriptors() + start)


def tiles(shapes: tuple[tuple[int, int, int, int, int, int, int], ...], products: int, apart: int, stages: int = 4) -> str:
    """A ring of `stages` tiles, filled by cp.async of 128 threads. Each operand: (rows, bytes of a row, pitch, bytes a step goes
    on, CTAs that take the same tile, tiles in a row, bytes between tiles); %m: mask of the steps. `products` N = 128 a step.
    The second operand begins `apart` bytes behind the first."""
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
    body = loop(f"  cp.async.wait_group {stages - 2}; bar.sync 0;\n{made}  bar.sync 0;\n{fill}")
    end = wait_group(0) + use(128) if products else ""
    return frame(128, fill * (stages - 1) + body + "  cp.async.wait_all;\n" + end, fill_shared(TILE, 128) + descriptors() + zero(128) + setup)


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
        ((rows, piece, pitch, piece, by, -(-132 // by), rows * pitch),), window // piece - 1)
    for rows, piece in ((192, 64), (96, 128), (48, 256))
    for pitch in (8 * K, 16 * K, 16 * K + 128)
    for by, window in ((1, 512), (8, 2 * K))
}  # fmt: skip
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

    def kernels(self) -> Iterator[tuple[str, str]]:
        for name, mix in MIXES.items():
            for rounds in self.ROUNDS:
                yield f"turns {name} x {rounds}", turns(mix, rounds)
            yield f"{name} x 24 alone", turns(mix, 24, 0, 0)
        yield "first products alone", turns(("ffma",), 0, 8, 0)
        yield "second products alone", turns(("ffma",), 0, 0, 4)
        for name, (shapes, _) in (SHAPES | PAIRS).items():
            yield name, tiles(shapes, 0, self.device.most >> 4)
            if name in PAIRS:
                yield f"{name}, products", tiles(shapes, shapes[0][1] // 32, self.device.most >> 4)
        for op in self.BESIDE:
            yield f"{op} beside N=64 SS", beside_products(op, 64, False)
        for op in ("fadd", "fmul", "imad"):
            yield f"{op} beside N=128 RS", beside_products(op, 128, True)

    def rows(self, run) -> Iterator[Row]:
        n = 200 if self.device.name == "gpu" else 2
        made = [(f"8 products N=64, {name} x {r}, 4 products N=128", turns(mix, r)) for name, mix in MIXES.items() for r in self.ROUNDS if r or name == "ffma"]
        made += [(f"{name} x 24 alone", turns(mix, 24, 0, 0)) for name, mix in MIXES.items()]
        made += [("8 products N=64 alone", turns(("ffma",), 0, 8, 0)), ("4 products N=128 RS alone", turns(("ffma",), 0, 0, 4))]
        for name, text in made:
            for each in (1, 2, 3):
                with self.point(f"{name}, {each} CTAs a multiprocessor") as report:
                    stamps = run(text, 132 * each, 128, TILE, n=n)
                    yield report(stamps.cycles() / n, "cycles a turn", stamps)
        big = self.device.memory(1 << 30)
        for name, (shapes, mask) in (SHAPES | PAIRS).items():
            moved = sum(rows * piece for rows, piece, *_ in shapes)
            for products in (0, shapes[0][1] // 32) if name in PAIRS else (0,):
                for grid in (132, 8) if name in SHAPES else (128, 16):
                    with self.point(f"{name}, {products} products, {grid} CTAs") as report:
                        text, steps = tiles(shapes, products, self.device.most >> 4), 8 * n
                        shared = max(4 * moved, TILE)
                        if self.device.name != "gpu":
                            steps, mask = 2, 0
                        run(text, grid, 128, shared, source=big, n=steps, m=mask)
                        stamps = run(text, grid, 128, shared, source=big, n=steps, m=mask)
                        yield report(stamps.cycles() / steps, "cycles a step", stamps, bytes_a_cycle=moved * steps / stamps.cycles())
        ops = [(op, 64, False) for op in self.BESIDE] + [(op, 128, True) for op in ("fadd", "fmul", "imad")]
        for op, columns, register_a in ops:
            with self.point(f"{op} beside N={columns} {'RS' if register_a else 'SS'}") as report:
                text, rounds = beside_products(op, columns, register_a), 2 * n
                per = 64 * OPERATIONS[op][2]
                m = max(1, round(rounds * 8 * columns / 2 / (per * {"ex2": 8, "ffma": 1, "fadd": 1, "fmul": 1}.get(op, 2))))
                both = run(text, 132, 256, TILE, n=rounds, m=m)
                alone = run(text, 132, 256, TILE, n=1, m=m)
                yield report(both.cycles(slice(0, 4)) / (rounds * 8), "cycles a product", both,
                             work=both.cycles(slice(4, 8)) / (m * per), work_alone=alone.cycles(slice(4, 8)) / (m * per))  # fmt: skip
