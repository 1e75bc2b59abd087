"""mma.sync: every shape and type against a plain matrix product. Elements are placed one by one by the fragment rules
of the PTX ISA. Small multiples of 1/2 make every sum exact, so results must agree bit for bit; random numbers are held
to a bound."""

import layouts
import numpy as np
import ptx_texts as kn
from mma_registers import BITS, accumulator_registers, left_registers, right_registers

FLOATS = [("f16", 8), ("f16", 16), ("bf16", 8), ("bf16", 16), ("tf32", 4), ("tf32", 8)]
FP8 = [("e4m3", 16), ("e5m2", 16), ("e4m3", 32), ("e5m2", 32)]
INTEGERS = [
    (8, "s8", 16),
    (16, "s8", 16),
    (16, "s8", 32),
    (16, "u8", 32),
    (8, "s4", 32),
    (16, "u4", 32),
    (16, "s4", 64),
]


def kernel(name, a_regs, b_regs, c_regs, d_regs):
    a, b = kn.names(8, a_regs), kn.names(8 + a_regs, b_regs)
    c, d = kn.names(24, c_regs), kn.names(32, d_regs)
    body = ""
    for i, regs in enumerate((a, b, c), 1):
        body += kn.thread_pointer(f"%rd{i}", len(regs), f"%rd{i + 8}") + kn.load_words(f"%rd{i + 8}", regs)
    body += f"{name} {kn.braces(d)}, {kn.braces(a)}, {kn.braces(b)}, {kn.braces(c)};\n"
    body += kn.thread_pointer("%rd4", d_regs, "%rd12") + kn.store_words("%rd12", d)
    return kn.text(body, ["a", "b", "c", "d"])


def run(name, a, b, a_type, b_type, c, c_type, d_type, want, bound=None):
    left, right = left_registers(a, a_type), right_registers(b, b_type)
    before = accumulator_registers(c, c_type)
    expected = accumulator_registers(want, d_type)
    words = lambda x: x.shape[1] * x.itemsize // 4  # noqa: E731
    ptx = kernel(name, left.shape[1], right.shape[1], words(before), words(expected))
    if bound is not None:
        bound = accumulator_registers(bound, np.float64)
    kn.check(name, ptx, [left, right, before], [np.zeros_like(expected)], [expected], bound=bound)


def test_float_types():
    rng = np.random.default_rng(1)
    for name, k in FLOATS + FP8:
        a, b = layouts.values(rng, (16, k), name), layouts.values(rng, (8, k), name)
        c = rng.choice(layouts.CHOICES, (16, 8))
        text = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{name}.{name}.f32"
        want = a @ b.T + c
        run(text, a, b, name, name, c, np.float32, np.float32, want)


def test_mixed_fp8_types():
    rng = np.random.default_rng(2)
    for left, right in (("e4m3", "e5m2"), ("e5m2", "e4m3")):
        a, b = layouts.values(rng, (16, 32), left), layouts.values(rng, (8, 32), right)
        c = rng.choice(layouts.CHOICES, (16, 8))
        text = f"mma.sync.aligned.m16n8k32.row.col.f32.{left}.{right}.f32"
        run(text, a, b, left, right, c, np.float32, np.float32, a @ b.T + c)


def test_half_accumulators():
    rng = np.random.default_rng(3)
    for k in (8, 16):
        a, b = layouts.values(rng, (16, k), "f16"), layouts.values(rng, (8, k), "f16")
        c = rng.choice(layouts.CHOICES, (16, 8))
        text = f"mma.sync.aligned.m16n8k{k}.row.col.f16.f16.f16.f16"
        run(text, a, b, "f16", "f16", c, np.float16, np.float16, a @ b.T + c)

    for k in (16, 32):
        a, b = layouts.values(rng, (16, k), "e4m3"), layouts.values(rng, (8, k), "e5m2")
        c = rng.choice(layouts.CHOICES, (16, 8))
        text = f"mma.sync.aligned.m16n8k{k}.row.col.f16.e4m3.e5m2.f16"
        run(text, a, b, "e4m3", "e5m2", c, np.float16, np.float16, a @ b.T + c)


def test_integers():
    rng = np.random.default_rng(4)
    for m, name, k in INTEGERS:
        bits = BITS[name]
        low, high = (-(1 << bits - 1), 1 << bits - 1) if name[0] == "s" else (0, 1 << bits)
        a, b = (rng.integers(low, high, (rows, k)).astype(np.float32) for rows in (m, 8))
        c = rng.integers(-1000, 1000, (m, 8))
        want = (a.astype(np.int64) @ b.astype(np.int64).T + c).astype(np.int32)
        text = f"mma.sync.aligned.m{m}n8k{k}.row.col.s32.{name}.{name}.s32"
        run(text, a, b, name, name, c, np.int32, np.int32, want)


def test_integers_wrap_or_saturate():
    a, b = np.full((16, 32), 127.0, np.float32), np.full((8, 32), 127.0, np.float32)
    c = np.full((16, 8), 2**31 - 1)
    for saturate, want in ((".satfinite", 2**31 - 1), ("", 2**31 - 1 + 32 * 127 * 127 - 2**32)):
        text = f"mma.sync.aligned.m16n8k32.row.col{saturate}.s32.s8.s8.s32"
        run(text, a, b, "s8", "s8", c, np.int32, np.int32, np.full((16, 8), want))


def test_bits():
    rng = np.random.default_rng(5)
    for m, k in ((8, 128), (16, 128), (16, 256)):
        a, b = rng.integers(0, 2, (m, k)), rng.integers(0, 2, (8, k))
        c = rng.integers(-5, 5, (m, 8))
        text = f"mma.sync.aligned.m{m}n8k{k}.row.col.s32.b1.b1.s32.and.popc"
        run(text, a, b, "b1", "b1", c, np.int32, np.int32, (a @ b.T + c).astype(np.int32))


def test_doubles():
    rng = np.random.default_rng(6)
    for m, k in ((8, 4), (16, 4), (16, 8), (16, 16)):
        a, b = (rng.integers(-8, 8, (rows, k)).astype(np.float64) for rows in (m, 8))
        c = rng.integers(-8, 8, (m, 8)).astype(np.float64)
        halves = m // 8
        left = np.zeros((32, m * k // 32))
        right = np.zeros((32, k // 4))
        for t in range(32):
            for i in range(left.shape[1]):
                left[t, i] = a[t // 4 + 8 * (i % halves), 4 * (i // halves) + t % 4]
            for i in range(right.shape[1]):
                right[t, i] = b[t // 4, 4 * i + t % 4]
        before = accumulator_registers(c, np.float64)
        want = accumulator_registers(a @ b.T + c, np.float64)
        counts = [x.shape[1] for x in (left, right, before, want)]
        regs, first = [], 0
        for count in counts:
            regs.append(kn.names(first, count, "%fd"))
            first += count
        name = f"mma.sync.aligned.m{m}n8k{k}.row.col.f64.f64.f64.f64"
        body = ""
        for i, group in enumerate(regs, 1):
            body += kn.thread_pointer(f"%rd{i}", 2 * len(group), f"%rd{i + 8}")
            if i < 4:
                body += "".join(f"ld.global.f64 {r}, [%rd{i + 8}+{8 * j}];\n" for j, r in enumerate(group))
        body += f"{name} {', '.join(kn.braces(regs[i]) for i in (3, 0, 1, 2))};\n"
        body += "".join(f"st.global.f64 [%rd12+{8 * j}], {r};\n" for j, r in enumerate(regs[3]))
        ptx = kn.text(body, ["a", "b", "c", "d"], doubles=first)
        kn.check(name, ptx, [left, right, before], [np.zeros_like(want)], [want])


def test_random_numbers_stay_within_the_bound():
    """PTX promises no order and no rounding: each of the k additions may lose half a unit of the largest partial sum,
    and the tensor cores truncate, which loses a whole one."""
    rng = np.random.default_rng(7)
    for name, k in FLOATS:
        a, b, c = (rng.standard_normal(s).astype(np.float32) for s in ((16, k), (8, k), (16, 8)))
        keep = {
            "f16": lambda x: x.astype(np.float16).astype(np.float32),
            "bf16": lambda x: (x.view(np.uint32) & 0xFFFF0000).view(np.float32),
            "tf32": lambda x: (x.view(np.uint32) & 0xFFFFE000).view(np.float32),
        }[name]
        a, b = keep(a), keep(b)
        wide = [x.astype(np.float64) for x in (a, b, c)]
        want = wide[0] @ wide[1].T + wide[2]
        bound = (np.abs(wide[0]) @ np.abs(wide[1]).T + np.abs(wide[2])) * (k + 1) * 2.0**-23
        text = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{name}.{name}.f32"
        run(text, a, b, name, name, c, np.float32, np.float32, want, bound)


def test_nan_and_infinity():
    """NaN comes out as 0x7fffffff whatever its payload was; infinities as usual; zero times inf is NaN."""
    for name, k in (("bf16", 16), ("tf32", 8)):
        a, b = np.ones((16, k), np.float32), np.ones((8, k), np.float32)
        c = np.ones((16, 8), np.float32)
        a[1, 0] = np.inf
        a[2, 0], a[2, 1] = np.inf, -np.inf
        a[3, 0] = np.array(0xFFA10000, np.uint32).view(np.float32)
        a[4, 0], b[3, 0] = np.inf, 0
        c[5, 1] = np.array(0x7FC12345, np.uint32).view(np.float32)
        c[6, 1] = -np.inf
        with np.errstate(invalid="ignore"):
            want = (a @ b.T + c).astype(np.float32)
        bits = np.where(np.isnan(want), np.uint32(0x7FFFFFFF), want.view(np.uint32))
        text = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{name}.{name}.f32"
        run(text, a, b, name, name, c, np.float32, np.uint32, bits)
