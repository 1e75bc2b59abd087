"""Validation cases of the timing model. None of them is ever used to fit a parameter.

A case makes its inputs on a device and gives back the call that is timed. On a CPU (for softsm) values are a short
random pattern repeated: only what decides the path of a kernel has to be right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from timing_case import Call, Case, values
from timing_foreign import cases as foreign

import dsv4
from dsv4.index.sizes import GROUP, index_block, index_line, index_list_words, index_shares, index_words
from dsv4.runtime import plan as plans

SMS = 132


def fmha(batch: int, q_heads: int, kv_heads: int, queries: int, keys: int, d: int, causal=False, same=False) -> Case:
    def make(device: str) -> Call:
        q = values(batch, queries, q_heads, d, device=device)
        k = values(batch, keys, kv_heads, d, device=device)
        v = k if same else values(batch, keys, kv_heads, d, device=device)
        out = torch.empty_like(q)
        sizes = dict(batch=batch, q_heads=q_heads, kv_heads=kv_heads, max_seqlen_q=queries, max_seqlen_k=keys)
        plan = dsv4.plan(dsv4.fmha, head_dim=d, device=q.device, **sizes)
        if device == "cpu":  # as many splits as a GPU would get
            splits, words = plans.RULES["fmha"](plans.Capacities(head_dim=d, **sizes), SMS, True)
            plan = dataclasses.replace(plan, num_splits=splits, scratch=torch.empty(words))
        return lambda: dsv4.fmha(q, k, v, causal=causal, plan=plan, out=out, backend=backend(device))

    kind = "decode" if queries == 1 else "prefill"
    heads = f"{q_heads}" if q_heads == kv_heads else f"{q_heads}:{kv_heads}"
    shape = (
        f"{batch} x {heads} x {keys}" if queries == 1 or queries == keys else f"{batch} x {heads} x {queries} x {keys}"
    )
    return Case(f"fmha {kind} hd{d} {shape}{' causal' if causal else ''}", f"fmha {kind}", make)


def backend(device: str) -> str:
    return "cuda" if device == "cuda" else "softsm"


def v4(queries: int, heads: int, window: int, compressed: int, fp8: bool, pool: int = 200_000) -> Case:
    def make(device: str) -> Call:
        rows = values(pool, 512, device=device)
        held: Any = dsv4.Fp8Cache.pack(rows) if fp8 else rows
        q = values(queries, heads, 512, device=device)
        sink = values(heads, device=device, dtype=torch.float32)
        picks = [
            torch.randint(0, pool, (queries, n), device=device, dtype=torch.int32) for n in (window, compressed) if n
        ]
        out = torch.empty_like(q)
        given = [x for pick in picks for x in (held, pick)]
        return lambda: dsv4.v4_attention(q, *given, sink=sink, out=out, backend=backend(device))

    listed = f"{window}+{compressed}" if compressed else f"{window}"
    kind = "fp8" if fp8 else "bf16"
    return Case(f"v4 {kind} {queries} x {heads} x {listed} of {pool}", f"v4 {kind}", make)


def scored(queries: int, keys: int, topk: int) -> torch.Tensor:
    """A plan's room with scores as the first kernel would leave them: a timing run executes a few of its CTAs, without
    their products, and how many rounds the choice takes depends on the scores of all."""
    line, words = index_line(keys), index_words(keys, topk)
    room = index_block(queries, keys, topk)
    count = -(-queries // -(-queries // room))
    shares = index_shares(queries, SMS, keys, topk, 0)
    scratch = torch.zeros(room * words + (queries * index_list_words(keys, shares, topk) if shares > 1 else 0))
    scores = values(count, line, device="cpu", dtype=torch.float32)
    scratch[: scores.numel()] = scores.flatten()
    maxima = scores.view(count, line // GROUP, GROUP).amax(2)
    scratch[scores.numel() :][: maxima.numel()] = maxima.flatten()
    return scratch


def index(requests: int, each: int, keys: int, topk: int = 512) -> Case:
    def make(device: str) -> Call:
        n, pages = requests * each, keys // 64
        q, weights = values(n, 64, 128, device=device), values(n, 64, device=device)
        pool = values(requests * pages, 64, 128, device=device)
        table = torch.randperm(requests * pages, device=device).int().view(requests, pages)
        lengths = torch.full((n,), keys, dtype=torch.int32, device=device)
        starts = torch.arange(0, n + 1, each, dtype=torch.int32, device=device) if each > 1 else None
        out = torch.empty(n, topk, dtype=torch.int32, device=device)
        plan = dsv4.plan(
            dsv4.index_topk, batch=n, q_heads=64, kv_heads=1, head_dim=128, max_seqlen_k=keys, device=q.device
        )
        if device == "cpu":  # a plan of the CPU has no room for scores
            scratch = scored(n, keys, topk)
            plan = dataclasses.replace(plan, scratch=scratch)
        return lambda: dsv4.index_topk(q, pool, weights, topk, lengths=lengths, block_table=table,
                                       request_starts=starts, out=out, plan=plan, backend=backend(device))  # fmt: skip

    # From 16 queries of a sequence on, the CTA that is looked at makes all scores of the queries that are looked at.
    return Case(f"index {requests} x {each} x {keys}", "index", make, values=each >= 16)


def backward(batch: int, heads: int, tokens: int, d: int, causal: bool = False) -> Case:
    """Forward and backward pass, as a training step makes them; predictions are of all launches."""

    def make(device: str) -> Call:
        q, k, v = (values(batch, tokens, heads, d, device=device).requires_grad_() for _ in "qkv")
        dout = values(batch, tokens, heads, d, device=device)
        return lambda: dsv4.fmha(q, k, v, causal=causal, backend=backend(device)).backward(dout)

    shape = f"{batch} x {heads} x {tokens}{' causal' if causal else ''}"
    return Case(f"fmha forward and backward hd{d} {shape}", "fmha backward", make)


def v4_backward(queries: int, heads: int, window: int, pool: int) -> Case:
    def make(device: str) -> Call:
        rows, q = values(pool, 512, device=device).requires_grad_(), values(queries, heads, 512, device=device)
        sink = values(heads, device=device, dtype=torch.float32)
        picks = torch.randint(0, pool, (queries, window), device=device, dtype=torch.int32)
        dout = values(queries, heads, 512, device=device)
        given = q.requires_grad_()
        return lambda: dsv4.v4_attention(given, rows, picks, sink=sink, backend=backend(device)).backward(dout)

    return Case(f"v4 forward and backward {queries} x {heads} x {window} of {pool}", "v4 backward", make)


def compress(kind: str, tokens: int) -> Case:
    d, m, overlap = {"csa": (512, 4, True), "keys": (128, 4, True), "hca": (512, 128, False)}[kind]

    def make(device: str) -> Call:
        from dsv4.reference import rope_table

        width = d * (1 + overlap)
        rest: dict[str, Any] = dict(
            position_bias=values(m, width, device=device, dtype=torch.float32),
            norm_weight=values(d, device=device, dtype=torch.float32),
            cos_sin=rope_table(max(8192, tokens), 64, 160000.0, factor=16.0).to(device),
        )
        kv, gate = values(tokens, width, device=device), values(tokens, width, device=device)
        return lambda: dsv4.compress(kv, gate, **rest, backend=backend(device))

    return Case(f"compress {kind} {tokens}", "compress", make)


def matmul(M: int, N: int, K: int, BM: int, BN: int, BK: int, stages: int, warps: int) -> Case:
    def make(device: str) -> Call:
        from timing_kernels import matmul_kernel

        a, b, c = (
            values(M, K, device=device),
            values(K, N, device=device),
            torch.empty(M, N, dtype=torch.bfloat16, device=device),
        )
        grid = (-(-M // BM) * -(-N // BN),)
        return lambda: matmul_kernel[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), BM=BM, BN=BN, BK=BK,
                                           GROUP=8, num_stages=stages, num_warps=warps)  # fmt: skip

    tile = f"{BM}x{BN}x{BK} s{stages} w{warps}"
    return Case(f"matmul {M}x{N}x{K} {tile}", "triton matmul", make, f"matmul {M}x{N}x{K}")


def tma_matmul(M: int, N: int, K: int, BM: int, BN: int, BK: int, stages: int, warps: int) -> Case:
    def make(device: str) -> Call:
        from timing_kernels import tma_matmul_kernel
        from triton.tools.tensor_descriptor import TensorDescriptor

        a, b, c = (
            values(M, K, device=device),
            values(N, K, device=device),
            torch.empty(M, N, dtype=torch.bfloat16, device=device),
        )
        ad, bd, cd = (TensorDescriptor.from_tensor(x, box) for x, box in ((a, [BM, BK]), (b, [BN, BK]), (c, [BM, BN])))
        grid = (min(132, -(-M // BM) * -(-N // BN)),)
        return lambda: tma_matmul_kernel[grid](
            ad, bd, cd, M, N, K, SMS=132, BM=BM, BN=BN, BK=BK, GROUP=8, num_stages=stages, num_warps=warps
        )

    return Case(
        f"matmul TMA {M}x{N}x{K} {BM}x{BN}x{BK} s{stages} w{warps}", "triton matmul", make, f"matmul {M}x{N}x{K}"
    )


def attention(heads: int, tokens: int, d: int, BM: int, BN: int, warps: int, stages: int, causal: bool = False) -> Case:
    def make(device: str) -> Call:
        from timing_kernels import attention_kernel

        q, k, v = (values(heads, tokens, d, device=device) for _ in "qkv")
        out = torch.empty_like(q)
        return lambda: attention_kernel[(tokens // BM, heads)](q, k, v, out, d**-0.5 * 1.4427, tokens * d, tokens, D=d,
                                                               BM=BM, BN=BN, CAUSAL=causal, num_warps=warps,
                                                               num_stages=stages)  # fmt: skip

    what = f"{heads}x{tokens}x{d}{' causal' if causal else ''}"
    return Case(f"attention {what} {BM}x{BN} w{warps} s{stages}", "triton attention", make, f"attention {what}")


def rowwise(which: str, rows: int, columns: int, warps: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    def make(device: str) -> Call:
        import timing_kernels as kernels

        x, y = values(rows, columns, device=device, dtype=dtype), values(rows, columns, device=device, dtype=dtype)
        out = torch.empty_like(x)
        w, b = (values(columns, device=device, dtype=torch.float32) for _ in "wb")
        block = 1 << (columns - 1).bit_length()
        if which == "add":
            n = rows * columns
            return lambda: kernels.add_kernel[(-(-n // 1024),)](x, y, out, n, BLOCK=1024, num_warps=warps)
        if which == "softmax":
            return lambda: kernels.softmax_kernel[(rows,)](x, out, columns, columns, BLOCK=block, num_warps=warps)
        if which == "layer_norm":
            return lambda: kernels.layer_norm_kernel[(rows,)](
                x, out, w, b, columns, columns, 1e-5, BLOCK=min(block, 1024), num_warps=warps
            )
        if which == "rms_norm":
            return lambda: kernels.rms_norm_kernel[(rows,)](
                x, out, w, columns, columns, 1e-5, BLOCK=block, num_warps=warps
            )
        return lambda: kernels.swiglu_kernel[(rows,)](x, y, out, columns, columns, BLOCK=block, num_warps=warps)

    return Case(f"{which} {rows}x{columns} w{warps}", "triton rows", make, f"{which} {rows}x{columns}")


PREFILL = [
    fmha(b, h, h, t, t, d, causal)
    for d in (64, 128, 256, 512)
    for b, h, t, causal in (
        (4, 16, 4096, False),
        (4, 16, 4096, True),
        (1, 16, 2048, True),
        (2, 8, 8192, False),
        (16, 16, 512, False),
    )
]
DECODE = [
    *(fmha(b, 64, 1, 1, s, 512, same=True) for b, s in ((128, 4096), (1, 65536), (32, 8192), (8, 16384), (1, 8192))),
    *(fmha(b, 64, 8, 1, s, 128) for b, s in ((64, 8192), (16, 4096), (1, 32768))),
    fmha(32, 32, 8, 1, 8192, 64),
    fmha(32, 16, 8, 1, 4096, 256),
]
V4 = [
    v4(4096, 64, 512, 0, False, 8192), v4(4096, 128, 1024, 0, False, 8192), v4(1024, 64, 128, 512, False),
    v4(128, 64, 128, 512, False), v4(1, 64, 128, 512, False), v4(1, 64, 128, 512, True), v4(32, 64, 128, 512, True),
    v4(128, 64, 128, 512, True), v4(128, 128, 128, 1024, True), v4(4096, 64, 128, 512, True),
]  # fmt: skip
INDEX = [index(1, 1, 16384), index(32, 1, 16384), index(128, 1, 16384), index(32, 4, 16384), index(1, 1024, 16384)]
COMPRESS = [
    compress("csa", 4096),
    compress("csa", 512),
    compress("keys", 4096),
    compress("hca", 4096),
    compress("hca", 1024),
]
MATMUL = [
    matmul(4096, 4096, 4096, *c) for c in ((128, 128, 64, 3, 4), (128, 256, 64, 3, 8), (64, 64, 32, 4, 4),
                                           (128, 64, 64, 4, 4), (128, 128, 32, 4, 8), (64, 256, 64, 3, 4))
] + [
    matmul(8192, 8192, 2048, 128, 256, 64, 3, 8), matmul(512, 512, 4096, 64, 64, 64, 4, 4),
    matmul(2048, 2048, 2048, 128, 128, 64, 3, 4), matmul(2048, 2048, 2048, 128, 128, 64, 3, 8),
    matmul(2048, 2048, 2048, 64, 128, 64, 4, 4),
    tma_matmul(4096, 4096, 4096, 128, 128, 64, 3, 4), tma_matmul(4096, 4096, 4096, 128, 256, 64, 3, 8),
    tma_matmul(2048, 2048, 2048, 128, 128, 64, 4, 8),
]  # fmt: skip
ATTENTION = [attention(64, 4096, 128, *c) for c in ((128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3))] + [
    attention(64, 4096, 64, 128, 64, 4, 3),
    attention(64, 4096, 64, 128, 128, 8, 2),
    attention(16, 2048, 64, 128, 64, 4, 3),
    attention(64, 4096, 128, 128, 64, 8, 3, True),
    attention(64, 4096, 128, 64, 64, 4, 3, True),
]
ROWS = [
    rowwise("add", 8192, 8192, 4), rowwise("add", 1024, 1024, 4), rowwise("softmax", 8192, 4096, 8),
    rowwise("softmax", 8192, 4096, 4), rowwise("softmax", 8192, 4096, 16), rowwise("layer_norm", 8192, 8192, 8),
    rowwise("layer_norm", 8192, 8192, 4), rowwise("layer_norm", 512, 4096, 4), rowwise("rms_norm", 16384, 4096, 8),
    rowwise("rms_norm", 16384, 4096, 4), rowwise("swiglu", 8192, 8192, 8), rowwise("swiglu", 8192, 8192, 16),
]  # fmt: skip
FOREIGN = foreign(Case, values, lambda: SMS)
CASES: list[Case] = [*PREFILL, *DECODE, *V4, *INDEX, *COMPRESS, *MATMUL, *ATTENTION, *ROWS, *FOREIGN]
# One case or more for every sm_100a kernel of the library, then some that were published for a B200.
BLACKWELL = [
    *(fmha(4, 16, 16, 8192, 8192, d, causal) for d in (64, 128) for causal in (False, True)),
    *(fmha(4, 16, 16, 4096, 4096, d) for d in (64, 128, 256, 512)), fmha(4, 16, 16, 4096, 4096, 128, True),
    fmha(128, 64, 1, 1, 4096, 512, same=True), fmha(64, 64, 8, 1, 8192, 128),
    v4(4096, 64, 512, 0, False, 8192), v4(4096, 128, 1024, 0, False, 8192), v4(4096, 64, 128, 512, True),
    v4(4096, 128, 128, 1024, True), v4(128, 64, 128, 512, True), v4(256, 128, 2048, 0, True),
    index(128, 1, 16384), index(1, 1024, 16384), compress("csa", 4096), compress("keys", 4096), compress("hca", 4096),
    *(backward(4, 16, 8192, 128, causal) for causal in (False, True)), backward(4, 16, 8192, 64),
    backward(1, 16, 2048, 512), v4_backward(4096, 64, 512, 8192),
    *foreign(Case, values, lambda: SMS, blackwell=True),
]  # fmt: skip
# What a timing run costs: programs as a function of their number of CTAs, and the numbers that are timed.
COSTS: list[tuple[Callable[[int], Case], tuple[int, ...]]] = [
    (lambda n: matmul(128 * n, 128, 1024, 128, 128, 64, 3, 4), (1, 400)),
    (lambda n: attention(n, 128, 64, 128, 64, 4, 3), (1, 1056)),
    (lambda n: rowwise("add", n, 1024, 4), (1, 8192)),
    (lambda n: rowwise("softmax", n, 1024, 4), (1, 8192)),
    (lambda n: rowwise("softmax", n, 4096, 4), (1, 8192)),
    (lambda n: rowwise("layer_norm", n, 8192, 4), (1, 4096)),
    (lambda n: rowwise("layer_norm", n, 1 << 18, 4), (1,)),
]
