"""Parts of drawn kernels that were predicted wrongly, timed alone (`timing.py --parts`): what device memory, L2 and
cp.async do that no rule of the model knew. results/timing/parts-measured.json has the times of an H200."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from softsm_time.case import BF16, FP32, Call, Case, numbers, values
from softsm_time.drawn.kernels import states


@triton.jit
def scan(state_ptr, out_ptr, decay_ptr, chunks, size, BLOCK: tl.constexpr, LOADS: tl.constexpr, STORES: tl.constexpr,
         DECAY: tl.constexpr):  # fmt: skip
    """States of chunks one after another; in place if out is state."""
    head = tl.program_id(1)
    at = head * size + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.zeros([BLOCK], tl.float32)
    for chunk in range(chunks):
        where = chunk * tl.num_programs(1) * size + at
        new = tl.load(state_ptr + where) if LOADS else h * 0.5 + 1.0
        if STORES:
            tl.store(out_ptr + where, h)
        decay = tl.exp(tl.load(decay_ptr + chunk * tl.num_programs(1) + head)) if DECAY else 0.9
        h = h * decay + new
    if not STORES:
        tl.store(out_ptr + at, h)


@triton.jit
def convolution(
    x_ptr, w_ptr, out_ptr, H, W, C, F, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ALL: tl.constexpr
):
    """3 x 3; if not ALL, the nine places are one and need no masks."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    image, h, w = m // (H * W), m // W % H, m % W
    k = tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    for place in range(9):
        y, x = (h + place // 3 - 1, w + place % 3 - 1) if ALL else (h, w)
        inside = (y >= 0) & (y < H) & (x >= 0) & (x < W)
        at = ((image * H + y) * W + x) * C
        for first in range(0, C, BK):
            where = x_ptr + at[:, None] + first + k[None, :]
            a = tl.load(where, mask=inside[:, None], other=0.0) if ALL else tl.load(where)
            weights = tl.load(w_ptr + ((place if ALL else 0) * C + first + k[:, None]) * F + n[None, :])
            acc = tl.dot(a, weights, acc)
    tl.store(out_ptr + m[:, None] * F + n[None, :], acc.to(out_ptr.dtype.element_ty))


@triton.jit
def bins(x_ptr, out_ptr, BLOCK: tl.constexpr, SEM: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + tl.load(x_ptr + at), 1, sem=SEM)


@triton.jit
def split(
    a_ptr, b_ptr, c_ptr, M, N, K, each, SPLITS: tl.constexpr, ATOMIC: tl.constexpr, HINT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A product in parts of K, added in memory or stored, of `each` of K; HINT: 16 bytes are copied at a time."""
    m, n = tl.program_id(0) % (M // BM), tl.program_id(0) // (M // BM)
    am, bn = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    first = tl.program_id(1) * (K // SPLITS)
    k = (tl.multiple_of(first, 16) if HINT else first) + tl.arange(0, BK)
    a, b = a_ptr + am[:, None] * K + k[None, :], b_ptr + k[:, None] * N + bn[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for _ in range(0, each, BK):
        acc = tl.dot(tl.load(a), tl.load(b), acc)
        a += BK
        b += BK * N
    to = c_ptr + am[:, None] * N + bn[None, :]
    if ATOMIC:
        tl.atomic_add(to, acc, sem="relaxed")
    else:
        tl.store(to, acc)


SPLITS = (
    (128, 1024, 8192, (128, 128, 32), 2),
    (128, 1024, 8192, (128, 128, 32), 4),
    (512, 2048, 8192, (128, 128, 32), 4),
    (512, 4096, 4096, (128, 64, 64), 4),
    (512, 4096, 4096, (128, 64, 64), 8),
)


def make_scan(form: str, chunks: int, heads: int, size: int, device: str) -> Call:
    state = torch.zeros(chunks, heads, size, device=device)
    out = torch.zeros_like(state) if form == "apart" else state
    ends = -values(chunks, heads, device=device, dtype=FP32).abs()
    return lambda: scan[(size // 512, heads)](state, out, ends, chunks, size, BLOCK=512, LOADS=form != "stores",
                                              STORES=form != "loads", DECAY=form in ("full", "apart"))  # fmt: skip


def make_convolution(every: bool, C: int, stages: int, device: str) -> Call:
    x, w = values(16, 64, 64, C, device=device), values(9, C, 128, device=device)
    out = torch.empty(16, 64, 64, 128, dtype=BF16, device=device)
    return lambda: convolution[(1024, 2)](x, w, out, 64, 64, C, 128, BM=64, BN=64, BK=64, ALL=every, num_stages=stages)


def make_bins(form: str, many: int, sem: str, device: str) -> Call:
    n, lane = 1 << 20, torch.arange(32, dtype=torch.int32)
    base = torch.randint(0, many, (n // 32, 1), dtype=torch.int32)
    if form == "random":
        x = numbers(n, many, device)
    else:  # the lanes of a warp side by side, in sectors of their own, or at one word
        step = {"lanes": 1, "sectors": 8, "one": 0}[form]
        x = ((base // max(32 * step, 1) * max(32 * step, 1) if step else base) + step * lane) % many
        x = x.reshape(-1).to(torch.int32).to(device)
    out = torch.zeros(many, dtype=torch.int32, device=device)
    return lambda: bins[(n // 1024,)](x, out, BLOCK=1024, SEM=sem)


def make_split(form: str, M: int, N: int, K: int, tile: tuple[int, int, int], by: int, device: str) -> Call:
    (BM, BN, BK), a, b = tile, values(M, K, device=device), values(K, N, device=device)
    c, grid, each = torch.zeros(M, N, device=device), (M // BM * (N // BN), by), 0 if form == "sums" else K // by
    return lambda: split[grid](a, b, c, M, N, K, each, SPLITS=by, ATOMIC=form != "stores",
                               HINT=form == "hint", BM=BM, BN=BN, BK=BK, num_stages=4)  # fmt: skip


def make_distances(M: int, N: int, D: int, device: str) -> Call:
    """A sector after another of lines that all CTAs read."""
    x, y = values(D, M, device=device, dtype=FP32), values(D, N, device=device, dtype=FP32)
    out = torch.empty(M, N, device=device)
    return lambda: states.distances[(M // 64, N // 64)](x, y, out, M, N, D, BM=64, BN=64)


def cases() -> list[Case]:
    out = []
    for chunks, heads, size in ((128, 64, 8192), (64, 64, 8192), (128, 16, 4096), (64, 16, 4096)):
        for form in ("full", "apart", "loads", "stores", "nodecay"):
            name = f"scan {chunks}x{heads * size >> 8}KB {form}"
            out.append(Case(name, "scan", partial(make_scan, form, chunks, heads, size)))
    for C in (64, 256):
        for stages in (1, 2, 3, 4):
            for form, every in (("full", True), ("sameAB", False)):
                name = f"conv C={C} s{stages} {form}"
                out.append(Case(name, "conv", partial(make_convolution, every, C, stages)))
    forms = [("random", n, "relaxed") for n in (1, 8, 32, 256, 1024, 4096, 65536)]
    forms += [(form, n, "relaxed") for n in (256, 4096, 65536) for form in ("lanes", "sectors", "one")]
    for form, n, sem in [*forms, ("random", 256, "acq_rel"), ("random", 65536, "acq_rel")]:
        name = f"bins {n} {form}{'' if sem == 'relaxed' else ' ' + sem}"
        out.append(Case(name, "bins", partial(make_bins, form, n, sem)))
    for M, N, D in ((4096, 2048, 16), (4096, 2048, 64), (1024, 2048, 16), (1024, 2048, 64), (512, 512, 64)):
        out.append(Case(f"dist {M}x{N}x{D}", "dist", partial(make_distances, M, N, D)))
    for M, N, K, tile, by in SPLITS:
        for form in ("full", "stores", "hint", "sums"):
            name = f"split {M}x{N}x{K} {'x'.join(map(str, tile))} by {by} {form}"
            out.append(Case(name, "split", partial(make_split, form, M, N, K, tile, by)))
    return out
