"""Corners of Triton's language: atomics, scans, sorting, printing, assertions, math functions, device functions."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from bounds import within
from triton.language.extra import libdevice

import softsm
from softsm.errors import Fault, SoftsmError


@triton.jit
def atomic_kernel(counts, total, largest, bits, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0)
    tl.atomic_add(counts + v % 8, 1, mask=i < n)
    tl.atomic_add(total, tl.sum(v.to(tl.float32), axis=0))
    tl.atomic_max(largest + i * 0, v, mask=i < n)
    tl.atomic_or(bits + i * 0, (1 << (v % 31)).to(tl.int32), mask=i < n)


def test_atomics(sm):
    x = torch.randint(0, 1000, (700,), dtype=torch.int32)
    counts, total = torch.zeros(8, dtype=torch.int32), torch.zeros(1)
    largest, bits = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    atomic_kernel[(3,)](counts, total, largest, bits, x, 700, BLOCK=256)
    assert torch.equal(counts, torch.bincount(x % 8, minlength=8).int())
    assert total.item() == x.sum().item() and largest.item() == x.max().item()
    expected = 0
    for v in x.tolist():
        expected |= 1 << v % 31
    assert bits.item() == expected


def test_atomic_add_of_small_floats(sm):
    @triton.jit
    def kernel(x, half, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.atomic_add(half + i % 4, tl.load(x + i))

    for dtype in (torch.float16, torch.bfloat16):
        x, half = torch.ones(64, dtype=dtype), torch.zeros(4, dtype=dtype)
        kernel[(1,)](x, half, BLOCK=64)
        assert half.tolist() == [16] * 4


@triton.jit
def scan_kernel(x, sums, products, highest, where, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(sums + i, tl.cumsum(v, 0))
    tl.store(products + i, tl.cumprod(v, 0, reverse=True))
    tl.store(highest, tl.reduce(v.to(tl.int32), 0, larger))
    tl.store(where, tl.argmax(v, 0))


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


def test_scans_and_reductions(sm):
    x = torch.rand(128) + 0.5
    sums, products, highest, where = torch.empty(128), torch.empty(128), torch.empty(1), torch.empty(1)
    scan_kernel[(1,)](x, sums, products, highest, where, N=128)
    within(sums, x.double().cumsum(0), 64)  # 127 additions of positive numbers, half a step each
    exact = x.double().flip(0).cumprod(0).flip(0)
    assert ((products - exact).abs() <= 127 * 2.0**-24 * exact).all()  # 127 roundings, relative
    assert highest.item() == int(x.max()) and where.item() == x.argmax().item()


def test_sort_and_histogram(sm):
    @triton.jit
    def kernel(x, out, counts, N: tl.constexpr):
        i = tl.arange(0, N)
        v = tl.load(x + i)
        tl.store(out + i, tl.sort(v))
        tl.store(counts + tl.arange(0, 16), tl.histogram(v % 16, 16))

    x = torch.randint(0, 10_000, (32,), dtype=torch.int32)  # one of each thread
    out, counts = torch.empty_like(x), torch.empty(16, dtype=torch.int32)
    kernel[(1,)](x, out, counts, N=32, num_warps=1)
    assert torch.equal(out, x.sort().values) and torch.equal(counts, torch.bincount(x % 16, minlength=16).int())


def test_math_functions(sm):
    @triton.jit
    def kernel(x, out, N: tl.constexpr):
        i = tl.arange(0, N)
        v = tl.load(x + i)
        tl.store(out + i, tl.sin(v))
        tl.store(out + N + i, tl.exp(v))
        tl.store(out + 2 * N + i, tl.log(v))
        tl.store(out + 3 * N + i, tl.sqrt_rn(v))
        tl.store(out + 4 * N + i, libdevice.tanh(v))
        tl.store(out + 5 * N + i, libdevice.erf(v))
        tl.store(out + 6 * N + i, libdevice.pow(v, 1.7))
        tl.store(out + 7 * N + i, tl.rsqrt(v))
        tl.store(out + 8 * N + i, tl.floor(v * 3) + tl.ceil(v))

    n = 256
    x = torch.rand(n) * 5 + 0.01
    out = torch.empty(9, n)
    kernel[(1,)](x, out, N=n)
    y = x.double()
    exact = [
        y.sin(),
        y.exp(),
        y.log(),
        y.sqrt(),
        y.tanh(),
        y.erf(),
        y**1.7,
        y.rsqrt(),
        (x * 3).floor().double() + y.ceil(),
    ]
    for got, want in zip(out, exact):
        # ex2 and lg2 give 22 bits; exp and pow scale their argument first, to at most 5 * log2(e) < 2^3
        torch.testing.assert_close(got.double(), want, rtol=2.0**-19, atol=2.0**-19)


def test_integer_arithmetic(sm):
    @triton.jit
    def kernel(a, b, out, N: tl.constexpr):
        i = tl.arange(0, N)
        x, y = tl.load(a + i), tl.load(b + i)
        tl.store(out + i, x // y)
        tl.store(out + N + i, x % y)
        tl.store(out + 2 * N + i, (x >> 3) ^ (y << 2))
        tl.store(out + 3 * N + i, tl.umulhi(x.to(tl.uint64, bitcast=True), y.to(tl.uint64, bitcast=True)).to(tl.int64))
        tl.store(out + 4 * N + i, tl.where(x > y, x, -y))

    a = torch.randint(-(2**40), 2**40, (64,))
    b = torch.randint(1, 2**33, (64,)) * torch.tensor([1, -1]).repeat(32)
    out = torch.empty(5, 64, dtype=torch.int64)
    kernel[(1,)](a, b, out, N=64)
    quotient = torch.div(a, b, rounding_mode="trunc")
    assert torch.equal(out[0], quotient) and torch.equal(out[1], a - quotient * b)
    assert torch.equal(out[2], (a >> 3) ^ (b << 2)) and torch.equal(out[4], torch.where(a > b, a, -b))
    high = [((x % 2**64) * (y % 2**64)) >> 64 for x, y in zip(a.tolist(), b.tolist())]
    assert [v % 2**64 for v in out[3].tolist()] == high


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"])
def test_conversions_there_and_back(sm, name):
    @triton.jit
    def kernel(x, small, back, N: tl.constexpr):
        i = tl.arange(0, N)
        v = tl.load(x + i).to(small.dtype.element_ty)
        tl.store(small + i, v)
        tl.store(back + i, v.to(tl.float32))

    x = torch.cat([torch.randn(250) * 100, torch.tensor([0.0, -0.0, 1e-3, 2.0**-9, 448.0, -3e-8])])
    small, back = torch.empty(256, dtype=getattr(torch, name)), torch.empty(256)
    kernel[(1,)](x, small, back, N=256)
    expected = x.clamp(-448, 448).to(small.dtype) if name == "float8_e4m3fn" else x.to(small.dtype)
    assert torch.equal(small.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(back, expected.float())


def test_while_and_nested_branches(sm):
    @triton.jit
    def kernel(x, steps, n):
        pid = tl.program_id(0)
        v = tl.load(x + pid)
        count = 0
        while v != 1:
            if v % 2 == 0:
                v = v // 2
            else:
                v = 3 * v + 1
            count += 1
        tl.store(steps + pid, count)

    def collatz(v):
        count = 0
        while v != 1:
            v, count = (v // 2 if v % 2 == 0 else 3 * v + 1), count + 1
        return count

    x = torch.tensor([1, 6, 7, 27], dtype=torch.int32)
    steps = torch.zeros_like(x)
    kernel[(4,)](x, steps, 4)
    assert steps.tolist() == [collatz(v) for v in x.tolist()]


@triton.jit(noinline=True)
def polynomial(x, a, b):
    return x * x * a + x * b


def test_functions_that_are_not_inlined(sm):
    @triton.jit
    def kernel(x, out, n):
        for i in range(tl.program_id(0), n, tl.num_programs(0)):
            v = tl.load(x + i)
            tl.store(out + i, polynomial(v, 2.0, 3.0) + polynomial(v, -1.0, 1.0))

    x, out = torch.randn(20), torch.empty(20)
    compiled = kernel[(3,)](x, out, 20)
    assert "call.uni" in compiled.asm["ptx"]
    y = x.double()
    within(out, y * y + 4 * y, 8)


def test_inline_assembly(sm):
    @triton.jit
    def kernel(x, out, N: tl.constexpr):
        i = tl.arange(0, N)
        v = tl.load(x + i)
        y = tl.inline_asm_elementwise(
            "{ .reg .b32 t; add.s32 t, $1, 5; mul.lo.s32 $0, t, t; }", "=r,r", [v], dtype=tl.int32, is_pure=True, pack=1
        )
        tl.store(out + i, y)

    x, out = torch.arange(64, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
    kernel[(1,)](x, out, N=64)
    assert torch.equal(out, (x + 5) ** 2)


@triton.jit
def sparse_product_kernel(given, codes, b, out, K: tl.constexpr):
    """[16, K] by [8, K] for each program: two of every four int8 of A are given, 4 bits of `codes` say which."""
    t = tl.arange(0, 32)
    g, q = t // 4, t % 4
    d0, d1, d2, d3 = g * 0, g * 0, g * 0, g * 0
    b += tl.program_id(0) * 2 * K
    for k in range(K // 32):
        a0 = tl.load(given + g * (K // 8) + 4 * k + q)
        a1 = tl.load(given + (g + 8) * (K // 8) + 4 * k + q)
        b0 = tl.load(b + g * (K // 4) + 8 * k + q)
        b1 = tl.load(b + g * (K // 4) + 8 * k + 4 + q)
        e = tl.load(codes + (g + 8 * (q % 2)) * (K // 32) + k)  # threads 0 and 1 of each four
        d0, d1, d2, d3 = tl.inline_asm_elementwise(
            "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, {$4, $5}, "
            "{$6, $7}, {$8, $9, $10, $11}, $12, 0;",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
            [a0, a1, b0, b1, d0, d1, d2, d3, e],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    out += tl.program_id(0) * 8 + 2 * q + g * 8 * tl.num_programs(0)
    tl.store(out, d0)
    tl.store(out + 1, d1)
    tl.store(out + 64 * tl.num_programs(0), d2)
    tl.store(out + 64 * tl.num_programs(0) + 1, d3)


def test_sparse_product_by_inline_assembly(sm):
    K, N = 96, 24
    a = torch.randint(-128, 128, (16, K), dtype=torch.int8)
    b = torch.randint(-128, 128, (N, K), dtype=torch.int8)
    kept = torch.rand(16, K // 4, 4).argsort(-1)[..., :2].sort(-1).values  # two positions of every four
    given = a.view(16, K // 4, 4).gather(-1, kept).reshape(16, K // 2)
    pruned = torch.zeros(16, K // 4, 4, dtype=torch.int8).scatter_(-1, kept, given.view(16, -1, 2)).view(16, K)
    nibbles = (kept[..., 0] | kept[..., 1] << 2).view(16, K // 32, 8)
    codes = (nibbles << 4 * torch.arange(8)).sum(-1).to(torch.uint32).view(torch.int32)
    out = torch.full((16, N), -99, dtype=torch.int32)
    sparse_product_kernel[(N // 8,)](given.view(torch.int32), codes, b.view(torch.int32), out, K, num_warps=1)
    assert torch.equal(out, pruned.int() @ b.int().T)


@triton.jit(do_not_specialize=["rank"])
def multicast_sum_kernel(data, flag, all_data, all_flags, out, rank, N: tl.constexpr):
    """Each GPU fills its buffer, tells all, waits for all, and adds up all buffers: eight bf16 of every thread."""
    at = tl.arange(0, N)
    tl.store(data + at, (at % 64 + rank).to(tl.bfloat16))
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
        "@p multimem.red.release.sys.global.add.u32 [$1], 1; mov.u32 $0, 0; }",
        "=r,l",
        [all_flags + tl.arange(0, 32) * 0],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 2:
        pass
    tl.debug_barrier()
    place = all_data + 16 * tl.arange(0, N // 8)
    words = tl.inline_asm_elementwise(
        "multimem.ld_reduce.weak.global.add.acc::f32.v4.bf16x2 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        [place],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )
    for i in tl.static_range(4):
        tl.store(out + 4 * tl.arange(0, N // 8) + i, words[i])


def test_sum_over_gpus_by_multicast(sm):
    data, flags = torch.zeros(2, 256, dtype=torch.bfloat16), torch.zeros(2, 4, dtype=torch.int32)
    out = torch.zeros(2, 256, dtype=torch.bfloat16)
    all_data, all_flags = softsm.multicast(list(data)), softsm.multicast(list(flags))

    def program(rank):
        multicast_sum_kernel[(1,)](
            data[rank], flags[rank], all_data.multicast_ptr, all_flags.multicast_ptr, out[rank].view(torch.int32),
            rank, 256, num_warps=1,
        )  # fmt: skip

    with softsm.checking() as report:
        softsm.ranks(2, program)
    assert not report, str(report)
    assert torch.equal(out, (2 * (torch.arange(256) % 64) + 1).to(torch.bfloat16).expand(2, -1))


def test_print(sm, capfd):
    @triton.jit
    def kernel(x):
        tl.device_print("value", tl.load(x))

    kernel[(2,)](torch.tensor([42], dtype=torch.int32), num_warps=1)
    printed = capfd.readouterr().out
    assert "pid (0, 0, 0)" in printed and "pid (1, 0, 0)" in printed and "value: 42" in printed


def test_assertion(sm, capfd):
    """The launch fails, and the standard error has CUDA's line about it."""

    @triton.jit
    def kernel(x, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.device_assert(tl.load(x + i) >= 0, "a negative number")

    kernel[(1,)](torch.ones(64), N=64, debug=True)
    with pytest.raises(SoftsmError, match="a negative number"):
        kernel[(1,)](torch.tensor([1.0] * 60 + [-1.0] * 4), N=64, debug=True)
    assert "Assertion `a negative number` failed." in capfd.readouterr().err


def test_out_of_bounds_names_argument_and_line(sm):
    @triton.jit
    def kernel(x, out, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(out + i, tl.load(x + i))

    with pytest.raises(Fault, match="out-of-bounds.*argument x") as caught:
        kernel[(1,)](torch.ones(100), torch.ones(256), N=256)
    assert "test_language.py" in str(caught.value)


def test_grid_barrier_by_atomics(sm):
    """Programs that wait for each other: all of a small grid are resident at once."""

    @triton.jit
    def kernel(arrived, x, out, n):
        pid = tl.program_id(0)
        tl.store(x + pid, pid + 1)
        tl.debug_barrier()
        tl.atomic_add(arrived, 1)
        while tl.atomic_add(arrived, 0) < n:
            pass
        tl.store(out + pid, tl.load(x + (pid + 1) % n, volatile=True))

    n = 4
    arrived, x, out = (torch.zeros(n, dtype=torch.int32) for _ in range(3))
    kernel[(n,)](arrived, x, out, n)
    assert out.tolist() == [2, 3, 4, 1]
