"""Triton kernels of the usual kind as cases."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from softsm_time import usual_kernels as kernels
from softsm_time.case import BF16, FP32, Call, Case, cdiv, empty, power, values


def matmul(M: int, N: int, K: int, BM: int, BN: int, BK: int, stages: int, warps: int) -> Case:
    def make(device: str) -> Call:
        a, b, c = values(M, K, device=device), values(K, N, device=device), empty(M, N, device=device)
        grid = (cdiv(M, BM) * cdiv(N, BN),)
        return lambda: kernels.matmul_kernel[grid](
            a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), BM=BM, BN=BN, BK=BK, GROUP=8, num_stages=stages,
            num_warps=warps,
        )  # fmt: skip

    tile = f"{BM}x{BN}x{BK} s{stages} w{warps}"
    return Case(f"matmul {M}x{N}x{K} {tile}", "triton matmul", make, f"matmul {M}x{N}x{K}")


def tma_matmul(M: int, N: int, K: int, BM: int, BN: int, BK: int, stages: int, warps: int) -> Case:
    def make(device: str) -> Call:
        a, b, c = values(M, K, device=device), values(N, K, device=device), empty(M, N, device=device)
        ad, bd, cd = (TensorDescriptor.from_tensor(x, box) for x, box in ((a, [BM, BK]), (b, [BN, BK]), (c, [BM, BN])))
        grid = (min(132, cdiv(M, BM) * cdiv(N, BN)),)
        return lambda: kernels.tma_matmul_kernel[grid](
            ad, bd, cd, M, N, K, SMS=132, BM=BM, BN=BN, BK=BK, GROUP=8, num_stages=stages, num_warps=warps
        )

    return Case(
        f"matmul TMA {M}x{N}x{K} {BM}x{BN}x{BK} s{stages} w{warps}", "triton matmul", make, f"matmul {M}x{N}x{K}"
    )


def attention(heads: int, tokens: int, d: int, BM: int, BN: int, warps: int, stages: int, causal: bool = False) -> Case:
    def make(device: str) -> Call:
        q, k, v = (values(heads, tokens, d, device=device) for _ in "qkv")
        out = torch.empty_like(q)
        return lambda: kernels.attention_kernel[(tokens // BM, heads)](
            q, k, v, out, d**-0.5 * 1.4427, tokens * d, tokens, D=d, BM=BM, BN=BN, CAUSAL=causal, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip

    what = f"{heads}x{tokens}x{d}{' causal' if causal else ''}"
    return Case(f"attention {what} {BM}x{BN} w{warps} s{stages}", "triton attention", make, f"attention {what}")


def rowwise(which: str, rows: int, columns: int, warps: int, dtype: torch.dtype = BF16) -> Case:
    def make(device: str) -> Call:
        x, y = values(rows, columns, device=device, dtype=dtype), values(rows, columns, device=device, dtype=dtype)
        out = torch.empty_like(x)
        w, b = (values(columns, device=device, dtype=FP32) for _ in "wb")
        block = power(columns)
        if which == "add":
            n = rows * columns
            return lambda: kernels.add_kernel[(cdiv(n, 1024),)](x, y, out, n, BLOCK=1024, num_warps=warps)
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
