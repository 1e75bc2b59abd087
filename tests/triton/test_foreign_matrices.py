"""Matrix programs in the manner of public kernel collections: quantised and grouped products, decoding, linear
attention, split sums, persistent loops. Each must be right and give no finding, on both targets."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from bounds import assert_matmul, within

pytestmark = pytest.mark.usefixtures("silent")


@triton.jit
def int4_kernel(a_ptr, w_ptr, s_ptr, out_ptr, K, N: tl.constexpr, M: tl.constexpr, BK: tl.constexpr):
    """Weights of 4 bits, two in a byte along K, one scale per 32 of them."""
    m, n = tl.arange(0, M), tl.arange(0, N)
    acc = tl.zeros((M, N), tl.float32)
    for k in range(0, K, BK):
        i = k + tl.arange(0, BK)
        a = tl.load(a_ptr + m[:, None] * K + i[None, :])
        half = k // 2 + tl.arange(0, BK // 2)
        byte = tl.load(w_ptr + half[:, None] * N + n[None, :])
        low, high = (byte & 15).to(tl.int8) - 8, (byte >> 4).to(tl.int8) - 8
        w = tl.join(low, high).permute(0, 2, 1).reshape(BK, N)
        scale = tl.load(s_ptr + (i[:, None] // 32) * N + n[None, :])
        acc = tl.dot(a, (w.to(tl.float32) * scale).to(a.dtype), acc)
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc)


def test_product_with_weights_of_four_bits(sm):
    a, w = torch.randn(16, 64).half(), torch.randint(-8, 8, (64, 32))
    scale = 2.0 ** torch.randint(-3, 2, (2, 32)).float()  # powers of two: the product with a weight is exact in fp16
    packed = ((w[0::2] + 8) | (w[1::2] + 8) << 4).to(torch.uint8)
    out = torch.empty(16, 32)
    int4_kernel[(1,)](a, packed, scale, out, 64, N=32, M=16, BK=32)
    assert_matmul(out, a, w * scale.repeat_interleave(32, 0))


@triton.jit
def grouped_kernel(a_ptr, b_ptr, out_ptr, start_ptr, groups, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr):
    """A fixed number of programs walks over the tiles of all groups; the groups have different numbers of rows."""
    tile = tl.program_id(0)
    first = 0
    for g in range(groups):
        begin, end = tl.load(start_ptr + g), tl.load(start_ptr + g + 1)
        tiles = tl.cdiv(end - begin, BM)
        while tile >= first and tile < first + tiles:
            m = begin + (tile - first) * BM + tl.arange(0, BM)
            n, k = tl.arange(0, N), tl.arange(0, K)
            a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=m[:, None] < end, other=0.0)
            b = tl.load(b_ptr + g * K * N + k[:, None] * N + n[None, :])
            tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b), mask=m[:, None] < end)
            tile += tl.num_programs(0)
        first += tiles


def test_grouped_product(sm):
    starts = torch.tensor([0, 5, 5, 40, 57], dtype=torch.int32)
    a, b = torch.randn(57, 32).bfloat16(), torch.randn(4, 32, 64).bfloat16()
    out = torch.empty(57, 64)
    grouped_kernel[(3,)](a, b, out, starts, 4, N=64, K=32, BM=16)
    for g in range(4):
        rows = slice(starts[g], starts[g + 1])
        if starts[g] < starts[g + 1]:
            assert_matmul(out[rows], a[rows], b[g])


@triton.jit
def decode_kernel(q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, part_ptr, lse_ptr, scale, H: tl.constexpr,
                  D: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """One query against a paged cache, its keys split over programs."""
    b, s = tl.program_id(0), tl.program_id(1)
    length = tl.load(length_ptr + b)
    per = tl.cdiv(tl.cdiv(length, PAGE), SPLIT)
    h, d, p = tl.arange(0, 16), tl.arange(0, D), tl.arange(0, PAGE)
    q = tl.load(q_ptr + (b * H + h[:, None]) * D + d[None, :], mask=h[:, None] < H, other=0.0)
    m, total = tl.full((16,), float("-inf"), tl.float32), tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, D), tl.float32)
    for i in range(s * per, min((s + 1) * per, tl.cdiv(length, PAGE))):
        page = tl.load(table_ptr + b * PAGES + i)
        at = (page * PAGE + p[:, None]) * D + d[None, :]
        seen = i * PAGE + p < length
        k = tl.load(k_ptr + at, mask=seen[:, None], other=0.0)
        scores = tl.where(seen[None, :], tl.dot(q, k.T) * scale, float("-inf"))
        new = tl.maximum(m, tl.max(scores, 1))
        e = tl.exp(scores - new[:, None])
        v = tl.load(v_ptr + at, mask=seen[:, None], other=0.0)
        acc = acc * tl.exp(m - new)[:, None] + tl.dot(e.to(v.dtype), v)
        total, m = total * tl.exp(m - new) + tl.sum(e, 1), new
    some = total > 0
    row = (b * SPLIT + s) * H + h
    out = acc / tl.where(some, total, 1.0)[:, None]
    tl.store(part_ptr + row[:, None] * D + d[None, :], out, mask=h[:, None] < H)
    tl.store(lse_ptr + row, tl.where(some, m + tl.log(total), float("-inf")), mask=h < H)


@triton.jit
def merge_kernel(part_ptr, lse_ptr, out_ptr, H: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr):
    b, h = tl.program_id(0), tl.program_id(1)
    s, d = tl.arange(0, SPLIT), tl.arange(0, D)
    row = (b * SPLIT + s) * H + h
    w = tl.load(lse_ptr + row)
    w = tl.exp(w - tl.max(w))
    part = tl.load(part_ptr + row[:, None] * D + d[None, :])
    tl.store(out_ptr + (b * H + h) * D + d, tl.sum(part * w[:, None], 0) / tl.sum(w))


def test_decoding_from_pages_with_split_keys(sm):
    lengths, table = torch.tensor([37, 5], dtype=torch.int32), torch.tensor([[3, 0, 4, 1], [2, 5, 5, 5]])
    table = table.int()
    q, k, v = torch.randn(2, 3, 32).half(), torch.randn(6, 16, 32).half(), torch.randn(6, 16, 32).half()
    k[2, 5:], v[2, 5:] = float("nan"), float("nan")  # rows behind the end belong to no sequence
    part, lse, out = torch.empty(2, 2, 3, 32), torch.empty(2, 2, 3), torch.empty(2, 3, 32)
    decode_kernel[(2, 2)](q, k, v, table, lengths, part, lse, 32**-0.5, H=3, D=32, PAGE=16, PAGES=4, SPLIT=2)
    merge_kernel[(2, 3)](part, lse, out, H=3, D=32, SPLIT=2)
    for b in range(2):
        rows = [x[table[b].long()].reshape(-1, 32)[: lengths[b]].double() for x in (k, v)]
        p = torch.softmax(q[b].double() @ rows[0].t() * 32**-0.5, -1)
        bound = 2.0**-11 * (p @ rows[1].abs()) + 2.0**-16  # P is rounded to fp16
        assert ((out[b].double() - p @ rows[1]).abs() <= bound).all()


@triton.jit
def linear_attention_kernel(q_ptr, k_ptr, v_ptr, g_ptr, out_ptr, T, D: tl.constexpr, C: tl.constexpr):
    """Compute chunks of a gated linear attention: inside by masked products, between them by a state [D, D]."""
    c, d = tl.arange(0, C), tl.arange(0, D)
    state = tl.zeros((D, D), tl.float32)
    for start in range(0, T, C):
        at = (start + c)[:, None] * D + d[None, :]
        q, k, v = tl.load(q_ptr + at), tl.load(k_ptr + at), tl.load(v_ptr + at)
        g = tl.cumsum(tl.load(g_ptr + start + c))
        last = tl.sum(tl.where(c == C - 1, g, 0.0))
        decay = tl.where(c[:, None] >= c[None, :], tl.exp(g[:, None] - g[None, :]), 0.0)
        scores = tl.dot(q, k.T, input_precision="ieee") * decay
        out = tl.dot(scores, v, input_precision="ieee")
        out += tl.dot(q * tl.exp(g)[:, None], state, input_precision="ieee")
        tl.store(out_ptr + at, out)
        state = state * tl.exp(last) + tl.dot((k * tl.exp(last - g)[:, None]).T, v, input_precision="ieee")


def test_gated_linear_attention(sm):
    q, k, v = (torch.randn(48, 16) for _ in range(3))
    g = -torch.rand(48)
    out = torch.empty(48, 16)
    linear_attention_kernel[(1,)](q, k, v, g, out, 48, D=16, C=16)
    state, want = torch.zeros(16, 16, dtype=torch.float64), []
    for t in range(48):
        state = state * g[t].double().exp() + torch.outer(k[t].double(), v[t].double())
        want.append(q[t].double() @ state)
    within(out, torch.stack(want), 48 * 16)


@triton.jit
def split_k_kernel(a_ptr, b_ptr, out_ptr, lock_ptr, M: tl.constexpr, N: tl.constexpr, K, PER: tl.constexpr):
    """Parts of K by different programs, added up under a lock in no fixed order."""
    part = tl.program_id(0)
    m, n = tl.arange(0, M), tl.arange(0, N)
    k = part * PER + tl.arange(0, PER)
    acc = tl.dot(tl.load(a_ptr + m[:, None] * K + k[None, :]), tl.load(b_ptr + k[:, None] * N + n[None, :]))
    at = out_ptr + m[:, None] * N + n[None, :]
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    first = tl.load(lock_ptr + 1, volatile=True) == 0
    tl.debug_barrier()  # all threads have read it; Triton 3.6 adds none before the exchange
    if first:
        tl.store(at, acc)
        tl.atomic_xchg(lock_ptr + 1, 1)
    else:
        tl.store(at, tl.load(at) + acc)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


def test_split_sums_under_a_lock(sm):
    a, b = torch.randn(16, 128).half(), torch.randn(128, 32).half()
    out, lock = torch.full((16, 32), float("nan")), torch.zeros(2, dtype=torch.int32)
    split_k_kernel[(4,)](a, b, out, lock, M=16, N=32, K=128, PER=32)
    assert_matmul(out, a, b)


@triton.jit
def descriptor_kernel(a_ptr, b_ptr, out_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Persistent, with descriptors made on the device; edges are outside the tensors. Sums of two halves of K meet in
    a reducing store."""
    a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK])
    b = tl.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BN, BK])
    out = tl.make_tensor_descriptor(out_ptr, [M, N], [N, 1], [BM, BN])
    wide = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), 2 * tl.cdiv(M, BM) * wide, tl.num_programs(0)):
        half, place = tile % 2, tile // 2
        m, n = place // wide * BM, place % wide * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(half * BK, K, 2 * BK):
            acc = tl.dot(a.load([m, k]), b.load([n, k]).T, acc)
        out.atomic_add([m, n], acc)


def test_descriptors_with_edges_and_reducing_stores(sm):
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8))
    a, b = torch.randn(72, 96).half(), torch.randn(40, 96).half()
    out = torch.zeros(72, 40)
    descriptor_kernel[(2,)](a, b, out, 72, 40, 96, BM=64, BN=32, BK=32)
    assert_matmul(out, a, b.t())


@triton.jit
def scaled_kernel(a_ptr, sa_ptr, b_ptr, sb_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Operands with a scale of 8 bits for each 32 elements."""
    m, n, k, s = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K), tl.arange(0, K // 32)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + n[:, None] * K + k[None, :])
    sa = tl.load(sa_ptr + m[:, None] * (K // 32) + s[None, :])
    sb = tl.load(sb_ptr + n[:, None] * (K // 32) + s[None, :])
    out = tl.dot_scaled(a, sa, "e4m3", b.T, sb, "e4m3")
    tl.store(out_ptr + m[:, None] * N + n[None, :], out)


def test_block_scaled_product(sm):
    a, b = (torch.randn(n, 64).to(torch.float8_e4m3fn) for n in (128, 32))
    sa, sb = (torch.randint(120, 132, (n, 2), dtype=torch.uint8) for n in (128, 32))
    out = torch.empty(128, 32)
    scaled_kernel[(1,)](a, sa, b, sb, out, M=128, N=32, K=64)
    left, right = (x.double() * torch.exp2(s.double() - 127).repeat_interleave(32, 1) for x, s in ((a, sa), (b, sb)))
    assert_matmul(out, left, right.t())


@triton.autotune(
    [triton.Config({"BM": 16}, num_warps=2), triton.Config({"BM": 32}, num_warps=4)],
    key=["n"],
    reset_to_zero=["out_ptr"],
)
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BM"] == 0})
@triton.jit
def gram_kernel(x_ptr, out_ptr, n, D: tl.constexpr, BM: tl.constexpr, EVEN: tl.constexpr):
    """X^T X by blocks of rows, added with atomics; configurations are tried, the result is cleared between them."""
    r, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    if EVEN:
        x = tl.load(x_ptr + r[:, None] * D + d[None, :])
    else:
        x = tl.load(x_ptr + r[:, None] * D + d[None, :], mask=r[:, None] < n, other=0.0)
    tl.atomic_add(out_ptr + d[:, None] * D + d[None, :], tl.dot(x.T, x))


@pytest.mark.parametrize("n", [64, 50])
def test_autotuned_gram_matrix(sm, n):
    x, out = torch.randn(n, 32).half(), torch.zeros(32, 32)
    gram_kernel[lambda meta: (triton.cdiv(n, meta["BM"]),)](x, out, n, D=32)
    assert_matmul(out, x.t(), x)


@triton.jit
def lora_kernel(x_ptr, a_ptr, b_ptr, which_ptr, out_ptr, D: tl.constexpr, R: tl.constexpr, M: tl.constexpr):
    """x A B with an adapter of its own for each block of rows, in a type of 16 bits between the two products."""
    block = tl.program_id(0)
    which = tl.load(which_ptr + block)
    if which >= 0:
        m, d, r = block * M + tl.arange(0, M), tl.arange(0, D), tl.arange(0, R)
        x = tl.load(x_ptr + m[:, None] * D + d[None, :])
        a = tl.load(a_ptr + which * D * R + d[:, None] * R + r[None, :])
        b = tl.load(b_ptr + which * R * D + r[:, None] * D + d[None, :])
        y = tl.dot(tl.dot(x, a).to(x.dtype), b)
        at = out_ptr + m[:, None] * D + d[None, :]
        tl.store(at, tl.load(at) + y)


def test_adapters_by_block(sm):
    x = torch.randn(48, 32).bfloat16()
    a, b = torch.randn(2, 32, 16).bfloat16(), torch.randn(2, 16, 32).bfloat16()
    which, out = torch.tensor([1, -1, 0], dtype=torch.int32), torch.ones(48, 32)
    lora_kernel[(3,)](x, a, b, which, out, D=32, R=16, M=16)
    assert (out[16:32] == 1).all()
    for block, adapter in ((0, 1), (2, 0)):
        rows = slice(16 * block, 16 * block + 16)
        between = x[rows].double() @ a[adapter].double()
        exact = 1 + between @ b[adapter].double()
        bound = 2.0**-8 * (between.abs() @ b[adapter].double().abs()) + 2.0**-14  # bf16 between the products
        assert ((out[rows].double() - exact).abs() <= bound).all()


@triton.jit
def pieces_kernel(x_ptr, out_ptr, N: tl.constexpr, REPEAT: tl.constexpr):
    """A block by inline assembly on packed halves, a transpose, a flip, and a device function called in a loop."""
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i[:, None] * N + i[None, :])
    y = tl.inline_asm_elementwise("{ fma.rn.f16x2 $0, $1, $1, $1; }", "=r,r", [x], tl.float16, True, 2)
    y = tl.flip(y.T, 1)
    for _ in tl.static_range(REPEAT):
        y = tl.where(y > 1, y * 0.5, y)
    tl.store(out_ptr + i[:, None] * N + i[None, :], y)


def test_inline_assembly_on_packed_halves(sm):
    x = torch.randint(-4, 5, (16, 16)).half() / 2
    out = torch.empty(16, 16).half()
    pieces_kernel[(1,)](x, out, N=16, REPEAT=2)
    want = (x * x + x).t().flip(1)
    for _ in range(2):
        want = torch.where(want > 1, want * 0.5, want)
    assert torch.equal(out, want)
