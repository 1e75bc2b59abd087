"""wgmma: tiles laid out in shared memory element by element, multiplied by the warpgroup, D read from its registers.

Small multiples of 1/2 make every sum exact, so results must agree bit for bit; random numbers are held to a bound."""

import layouts
import numpy as np
import ptx_texts as kn
from layouts import NONE, SW32, SW64, SW128

A_AT, B_AT = 0, 8192  # in `buf`
SIZE = 40960
K = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}


def d_position(t, v):
    """Row and column of element v of the accumulator of thread t (0..127)."""
    return 16 * (t // 32) + t % 32 // 4 + 8 * (v // 2 % 2), 8 * (v // 4) + 2 * (t % 4) + v % 2


def d_registers(matrix, dtype):
    n = matrix.shape[1]
    out = np.zeros((128, n // 2), dtype)
    for t in range(128):
        for v in range(n // 2):
            out[t, v] = matrix[d_position(t, v)]
    return out


def a_registers(a, name):
    """Return A [64, k] in registers: uint32 [128, 4]."""
    e = layouts.BYTES.get(name, 1)
    per, raw = 4 // e, layouts.bits(a, name)
    out = np.zeros((128, 4, 4), np.uint8)
    for t in range(128):
        for i in range(4):
            for x in range(per):
                row = 16 * (t // 32) + t % 32 // 4 + 8 * (i % 2)
                out[t, i, x * e : (x + 1) * e] = raw[row, 4 * per * (i // 2) + per * (t % 4) + x]
    return out.view(np.uint32).reshape(128, 4)


def kernel(name, words, steps, *, from_registers, immediates, add=1):
    """steps: (descriptor of A, descriptor of B) of each product, relative to `buf`; all add to one accumulator."""
    d = kn.names(32, words)
    body = kn.fill_shared("%rd1", SIZE, 128)
    body += kn.thread_pointer("%rd3", words, "%rd8") + kn.load_words("%rd8", d)
    if from_registers:
        body += kn.thread_pointer("%rd2", 4, "%rd9") + kn.load_words("%rd9", kn.names(8, 4))
    body += "cvt.u64.u32 %rd10, %r1;\nshr.u64 %rd10, %rd10, 4;\nand.b64 %rd10, %rd10, 0x3FFF;\n"
    body += f"setp.ne.u32 %p1, {add}, 0;\nsetp.eq.u32 %p2, 0, 0;\nwgmma.fence.sync.aligned;\n"
    for i, (a_desc, b_desc) in enumerate(steps):
        body += f"add.s64 %rd11, %rd10, {a_desc};\nadd.s64 %rd12, %rd10, {b_desc};\n"
        a = kn.braces(kn.names(8, 4)) if from_registers else "%rd11"
        body += f"{name} {kn.braces(d)}, {a}, %rd12, %p{1 if i == 0 else 2}{immediates};\n"
    body += "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
    body += kn.thread_pointer("%rd4", words, "%rd13") + kn.store_words("%rd13", d)
    return kn.text(body, ["image", "a", "c", "d"], registers=32 + words, shared=SIZE)


def run(n, a_type, b_type, d_type="f32", *, a_mode=SW128, b_mode=SW128, a_k=True, b_k=True, from_registers=False,
        seed=0, add=1, signs=(1, 1), random=False, saturate=False):  # fmt: skip
    rng = np.random.default_rng(seed)
    k = K[a_type]
    if random:
        mask = {"bf16": 0xFFFF0000, "tf32": 0xFFFFE000, "f16": 0xFFFFFFFF}[a_type]

        def keep(x):
            x = x.astype(np.float16).astype(np.float32) if a_type == "f16" else x
            return (x.view(np.uint32) & mask).view(np.float32)

        a, b = (keep(rng.standard_normal((rows, k)).astype(np.float32)) for rows in (64, n))
        c = rng.standard_normal((64, n)).astype(np.float32)
    else:
        a, b = layouts.values(rng, (64, k), a_type), layouts.values(rng, (n, k), b_type)
        c = rng.integers(-8, 8, (64, n)).astype(np.float32)
    image = np.zeros(SIZE, np.uint8)
    a_desc = 0
    if not from_registers:
        a_desc = layouts.descriptor(A_AT, *layouts.place(image, a, a_type, a_mode, a_k, A_AT), a_mode, False)
    b_desc = layouts.descriptor(B_AT, *layouts.place(image, b, b_type, b_mode, b_k, B_AT), b_mode, False)
    dtype = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[d_type]
    wide = [x.astype(np.float64) for x in (a, b, c)]
    want = signs[0] * signs[1] * (wide[0] @ wide[1].T) + add * wide[2]
    bound = None
    if random:
        largest = np.abs(wide[0]) @ np.abs(wide[1]).T + np.abs(wide[2])
        bound = d_registers(largest * (k + 1) * 2.0**-23, np.float64)
    if d_type == "s32":
        immediates = ""
    elif k == 16:
        immediates = f", {signs[0]}, {signs[1]}" + ("" if from_registers else f", {int(not a_k)}") + f", {int(not b_k)}"
    else:
        immediates = f", {signs[0]}, {signs[1]}"
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d_type}.{a_type}.{b_type}" + (".satfinite" if saturate else "")
    before, expected = d_registers(c, dtype), d_registers(want, np.float64 if random else dtype)
    words = before.shape[1] * before.itemsize // 4
    ptx = kernel(name, words, [(a_desc, b_desc)], from_registers=from_registers, immediates=immediates, add=add)
    a_regs = a_registers(a, a_type) if from_registers else np.zeros((128, 4), np.uint32)
    label = f"{name} {'registers' if from_registers else 'shared'}"
    if random:
        got = np.zeros(before.shape, dtype)
        kn.check(label, ptx, [image, a_regs, before], [got], [expected.astype(np.float32)], block=128, bound=bound)
    else:
        kn.check(label, ptx, [image, a_regs, before], [np.zeros_like(expected)], [expected], block=128)


def test_k_major_swizzles():
    for mode in (NONE, SW32, SW64, SW128):
        run(64, "bf16", "bf16", a_mode=mode, b_mode=mode)


def test_mn_major_swizzles():
    for mode in (NONE, SW32, SW64, SW128):
        run(128, "f16", "f16", a_mode=mode, b_mode=mode, a_k=False, b_k=False)
        run(64, "bf16", "bf16", a_mode=SW128, b_mode=mode, a_k=True, b_k=False)


def test_widths():
    for n in (8, 16, 24, 40, 104, 256):
        run(n, "bf16", "bf16", seed=n)


def test_types():
    for a_type, b_type in (("tf32", "tf32"), ("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e4m3", "e4m3"), ("f16", "f16")):
        run(32, a_type, b_type)
        run(32, a_type, b_type, from_registers=True)


def test_half_accumulators():
    run(32, "f16", "f16", "f16")
    run(32, "e4m3", "e4m3", "f16")
    run(32, "f16", "f16", "f16", from_registers=True, b_k=False)


def test_integers():
    for a_type, b_type in (("s8", "s8"), ("u8", "u8"), ("s8", "u8"), ("u8", "s8")):
        run(32, a_type, b_type, "s32")
    run(48, "s8", "s8", "s32", from_registers=True)
    run(16, "s8", "s8", "s32", saturate=True)


def test_single_bits():
    """k256: sum of a AND b; 32 bytes of bits in each row."""
    rng = np.random.default_rng(13)
    n = 24
    a, b = rng.integers(0, 2, (64, 256), dtype=np.uint8), rng.integers(0, 2, (n, 256), dtype=np.uint8)
    c = rng.integers(-9, 9, (64, n)).astype(np.int32)
    image = np.zeros(SIZE, np.uint8)
    descs = []
    for tile, at in ((a, A_AT), (b, B_AT)):
        packed = np.packbits(tile, axis=1, bitorder="little")
        for r in range(len(tile)):
            for i in range(32):
                image[layouts.element_address(SW128, True, at, 0, 1024, r, i, 1)] = packed[r, i]
        descs.append(layouts.descriptor(at, 0, 1024, SW128, False))
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k256.s32.b1.b1.and.popc"
    ptx = kernel(name, n // 2, [tuple(descs)], from_registers=False, immediates="")
    want = d_registers(a.astype(np.int32) @ b.astype(np.int32).T + c, np.int32)
    inputs = [image, np.zeros((128, 4), np.uint32), d_registers(c, np.int32)]
    kn.check(name, ptx, inputs, [np.zeros_like(want)], [want], block=128)


def test_base_offset():
    """A tile whose swizzle pattern does not start on 1024 bytes names the phase in bits 49-51 of its descriptor."""
    rng = np.random.default_rng(14)
    a, b = layouts.values(rng, (64, 16), "bf16"), layouts.values(rng, (32, 16), "bf16")
    c = np.zeros((64, 32), np.float32)
    image = np.zeros(SIZE, np.uint8)
    a_at, b_at, descs = 512, B_AT + 1024 + 256, []
    for tile, at in ((a, a_at), (b, b_at)):
        code = layouts.bits(tile, "bf16")
        for r in range(len(tile)):
            for i in range(16):
                offset = (r % 8) * 128 + (r // 8) * 1024 + i * 2
                offset ^= (offset >> 7 & 7) << 4  # relative to the start of the pattern
                image[at + offset : at + offset + 2] = code[r, i]
        descs.append(layouts.descriptor(at, 0, 1024, SW128, False) | (at >> 7 & 7) << 49)
    name = "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16"
    ptx = kernel(name, 16, [tuple(descs)], from_registers=False, immediates=", 1, 1, 0, 0")
    want = d_registers(a @ b.T, np.float32)
    inputs = [image, np.zeros((128, 4), np.uint32), d_registers(c, np.float32)]
    kn.check(f"{name} base offset", ptx, inputs, [np.zeros_like(want)], [want], block=128)


def test_a_from_registers():
    for mode, b_k in ((SW128, True), (SW128, False), (SW64, False), (NONE, True)):
        run(64, "bf16", "bf16", b_mode=mode, b_k=b_k, from_registers=True)


def test_scale_d_and_signs():
    run(32, "bf16", "bf16", add=0)
    run(32, "bf16", "bf16", signs=(-1, 1))
    run(32, "f16", "f16", signs=(1, -1), from_registers=True)
    run(32, "f16", "f16", signs=(-1, -1))


def test_steps_through_a_swizzled_row():
    """K = 64 is four products: the start addresses advance by 32 bytes inside the 128-byte rows."""
    rng = np.random.default_rng(9)
    a, b = layouts.values(rng, (64, 64), "bf16"), layouts.values(rng, (96, 64), "bf16")
    c = rng.integers(-8, 8, (64, 96)).astype(np.float32)
    image = np.zeros(SIZE, np.uint8)
    a_strides = layouts.place(image, a, "bf16", SW128, True, A_AT)
    b_strides = layouts.place(image, b, "bf16", SW128, True, B_AT)
    steps = [
        (
            layouts.descriptor(A_AT + 32 * i, *a_strides, SW128, False),
            layouts.descriptor(B_AT + 32 * i, *b_strides, SW128, False),
        )
        for i in range(4)
    ]
    name = "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16"
    ptx = kernel(name, 48, steps, from_registers=False, immediates=", 1, 1, 0, 0")
    before, want = d_registers(c, np.float32), d_registers(a @ b.T + c, np.float32)
    inputs = [image, np.zeros((128, 4), np.uint32), before]
    kn.check(f"{name} x4", ptx, inputs, [np.zeros_like(want)], [want], block=128)


def test_random_numbers_stay_within_the_bound():
    for name in ("f16", "bf16", "tf32"):
        run(64, name, name, random=True, seed=11)
        run(64, name, name, random=True, seed=12, from_registers=True)


def test_nan_and_infinity():
    """NaN comes out as 0x7fffffff whatever its payload was; zero times inf is NaN."""
    a, b, c = np.ones((64, 16), np.float32), np.ones((16, 16), np.float32), np.ones((64, 16), np.float32)
    a[1, 0] = np.inf
    a[2, 0], a[2, 1] = np.inf, -np.inf
    a[3, 0] = np.array(0xFFA10000, np.uint32).view(np.float32)
    a[20, 0], b[3, 0] = np.inf, 0
    c[5, 1] = np.array(0x7FC12345, np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        want = (a @ b.T + c).astype(np.float32)
    bits = np.where(np.isnan(want), np.uint32(0x7FFFFFFF), want.view(np.uint32))
    image = np.zeros(SIZE, np.uint8)
    a_desc = layouts.descriptor(A_AT, *layouts.place(image, a, "bf16", SW128, True, A_AT), SW128, False)
    b_desc = layouts.descriptor(B_AT, *layouts.place(image, b, "bf16", SW128, True, B_AT), SW128, False)
    name = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16"
    ptx = kernel(name, 8, [(a_desc, b_desc)], from_registers=False, immediates=", 1, 1, 0, 0")
    inputs = [image, np.zeros((128, 4), np.uint32), d_registers(c, np.float32)]
    expected = d_registers(bits, np.uint32)
    kn.check(f"{name} NaN", ptx, inputs, [np.zeros_like(expected)], [expected], block=128)
