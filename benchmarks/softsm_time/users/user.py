"""The first set, of eighteen kernels, with shapes of models."""

from __future__ import annotations

import torch

from softsm_time.case import FP8, FP16, FP32, Call, Case, adding_to, empty, numbers, parts_of, power, values
from softsm_time.users.kernels import user as kernels

CASES: list[Case] = []
case = adding_to(CASES)

for rows, n, warps in ((8192, 4096, 8), (8192, 4096, 4), (4096, 768, 4)):

    @case("dropout_add_layer_norm", f"{rows}x{n}", f"w{warps}")
    def _(device: str, rows=rows, n=n, warps=warps) -> Call:
        x, res, w, b = (values(*s, device=device) for s in ((rows, n), (rows, n), (n,), (n,)))
        out, total = torch.empty_like(x), torch.empty_like(x)
        block = power(n)
        return lambda: kernels.dropout_add_layer_norm[(rows,)](
            x, res, w, b, out, total, n, 17, 0.1, 1e-5, BLOCK=block, num_warps=warps
        )


for tokens, heads, d in ((16384, 32, 128), (65536, 8, 64)):

    @case("rope_in_place", f"{tokens}x{heads}x{d}")
    def _(device: str, tokens=tokens, heads=heads, d=d) -> Call:
        q = values(tokens, heads, d, device=device)
        cos, sin = (values(8192, d // 2, device=device, dtype=FP32) for _ in "cs")
        pos = numbers(tokens, 8192, device)
        return lambda: kernels.rope_in_place[(tokens,)](q, cos, sin, pos, HEADS=heads, D=d, num_warps=4)


for batch, bd, warps in ((64, 64, 4), (64, 16, 4)):

    @case("state_update", f"{batch}x64x64x128", f"b{bd}")
    def _(device: str, batch=batch, bd=bd, warps=warps) -> Call:
        heads, d, n = 64, 64, 128
        state = values(batch, heads, d, n, device=device, dtype=FP32)
        x, dt = values(batch, heads, d, device=device), values(batch, heads, device=device, dtype=FP32)
        a, b, c = -torch.ones(heads, device=device), *(values(batch, n, device=device) for _ in "bc")
        out = torch.empty_like(x)
        return lambda: kernels.state_update[(d // bd, batch, heads)](
            state, x, dt, a, b, c, out, HEADS=heads, D=d, N=n, BD=bd, num_warps=warps
        )


for block in (1024, 4096):

    @case("copy_blocks", "512 of 4096 x 16384", f"b{block}")
    def _(device: str, block=block) -> Call:
        k, v = (values(4096, 16384, device=device) for _ in "kv")
        pairs = torch.randperm(4096, device=device)[:1024].to(torch.int64)
        return lambda: kernels.copy_blocks[(512,)](k, v, pairs, 16384, BLOCK=block, num_warps=4)


for bm, bk in ((128, 64), (64, 128)):

    @case("k_means", "262144x64 in 1024", f"{bm}x{bk}")
    def _(device: str, bm=bm, bk=bk) -> Call:
        x, c = values(262144, 64, device=device, dtype=FP16), values(1024, 64, device=device, dtype=FP16)
        norm, label, count = c.float().square().sum(1), numbers(262144, 2, device), numbers(1024, 2, device)
        return lambda: kernels.assign[(262144 // bm,)](
            x, c, norm, label, count, 1024, D=64, BM=bm, BK=bk, num_warps=4, num_stages=3
        )


for rows, n, warps in ((2048, 8192, 8), (512, 32000, 16)):

    @case("top_k_threshold", f"{rows}x{n}", f"w{warps}")
    def _(device: str, rows=rows, n=n, warps=warps) -> Call:
        x = values(rows, n, device=device, dtype=FP32)
        out, block = torch.empty_like(x), power(n)
        return lambda: kernels.top_k_threshold[(rows,)](x, out, n, 50, STEPS=20, BLOCK=block, num_warps=warps)


for b, warps in ((128, 8), (64, 4)):

    @case("quantise_both_ways", "8192x4096", f"b{b}")
    def _(device: str, b=b, warps=warps) -> Call:
        x, q, t = values(8192, 4096, device=device), *(empty(8192, 4096, device=device, dtype=FP8) for _ in "qt")
        scales = empty(8192 // b, 4096 // b, device=device, dtype=FP32)
        grid = (8192 // b, 4096 // b)
        return lambda: kernels.quantise_both_ways[grid](x, q, t, scales, 8192, 4096, B=b, num_warps=warps)


for block, warps in ((32, 4), (16, 2)):

    @case("grid_sample", "8x256x256x64", f"b{block}")
    def _(device: str, block=block, warps=warps) -> Call:
        x = values(8, 256, 256, 64, device=device, dtype=FP16)
        y, x_ = torch.meshgrid(torch.linspace(0, 1, 256), torch.linspace(0, 1, 256), indexing="ij")
        at = torch.stack((x_, y), -1).repeat(8, 1, 1, 1) * 0.9 + 0.01 * torch.randn(8, 256, 256, 2)
        at, out = at.to(device).contiguous(), torch.empty_like(x)
        grid = (8 * 65536 // block,)
        return lambda: kernels.grid_sample[grid](x, at, out, 256, 256, 65536, C=64, BLOCK=block, num_warps=warps)


for bm, bn, warps, stages in ((128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 2)):

    @case("window_attention", "64x8192x64 of 1024", f"{bm}x{bn} s{stages}")
    def _(device: str, bm=bm, bn=bn, warps=warps, stages=stages) -> Call:
        q, k, v, o = (values(64, 8192, 64, device=device) for _ in "qkvo")
        return lambda: kernels.window_attention[(8192 // bm, 64)](
            q, k, v, o, 8192, 0.18, WINDOW=1024, D=64, BM=bm, BN=bn, num_warps=warps, num_stages=stages
        )


for bn, stages in ((64, 3), (32, 4)):

    @case("varlen_attention", "16384 in 24 x 16x128", f"128x{bn} s{stages}")
    def _(device: str, bn=bn, stages=stages) -> Call:
        q, k, v, o = (values(16384, 16, 128, device=device) for _ in "qkvo")
        first = parts_of(16384, 24, device)
        tiles = -(-int((first[1:] - first[:-1]).max()) // 128)
        return lambda: kernels.varlen_attention[(tiles, 16, 24)](
            q, k, v, o, first, 0.127, HEADS=16, D=128, BM=128, BN=bn, num_warps=8, num_stages=stages
        )


for bc, bp in ((64, 64), (32, 256)):

    @case("instance_norm_silu", "16x64x64x320", f"{bp}x{bc}")
    def _(device: str, bc=bc, bp=bp) -> Call:
        x = values(16, 4096, 320, device=device, dtype=FP16)
        out = torch.empty_like(x)
        return lambda: kernels.instance_norm_silu[(320 // bc, 16)](x, out, 4096, 320, BC=bc, BP=bp, num_warps=8)


for group, warps in ((128, 1), (128, 4)):

    @case("silu_mul_quantise", "32768x2048 by list", f"w{warps}")
    def _(device: str, group=group, warps=warps) -> Call:
        h, q = values(32768, 4096, device=device), empty(32768, 2048, device=device, dtype=FP8)
        place = torch.randperm(32768, device=device).to(torch.int32)
        scales = empty(32768, 2048 // group, device=device, dtype=FP32)
        grid = (32768, 2048 // group)
        return lambda: kernels.silu_mul_quantise[grid](h, place, q, scales, 2048, GROUP=group, num_warps=warps)


for bt, bc in ((32, 64), (64, 128)):

    @case("short_conv", "8x2048x4096", f"{bt}x{bc}")
    def _(device: str, bt=bt, bc=bc) -> Call:
        x, w = values(8, 2048, 4096, device=device), values(4096, 4, device=device, dtype=FP32)
        out = torch.empty_like(x)
        return lambda: kernels.short_conv[(2048 // bt, 4096 // bc, 8)](x, w, out, 2048, 4096, BT=bt, BC=bc, num_warps=4)


for tokens, warps in ((256, 4), (2048, 4)):

    @case("lora", f"{tokens}x4096x4096 rank 16")
    def _(device: str, tokens=tokens, warps=warps) -> Call:
        x, out = values(tokens, 4096, device=device), values(tokens, 4096, device=device)
        a, b = values(32, 16, 4096, device=device), values(32, 4096, 16, device=device)
        index = numbers(tokens, 32, device)
        return lambda: kernels.lora[(tokens,)](x, a, b, index, out, 4096, 4096, R=16, BK=256, BN=128, num_warps=warps)


for bm, bn, bk, stages, warps in ((128, 128, 64, 3, 8), (64, 128, 64, 4, 4)):

    @case("norm_matmul", "4096x4096x2048", f"{bm}x{bn}x{bk} s{stages}")
    def _(device: str, bm=bm, bn=bn, bk=bk, stages=stages, warps=warps) -> Call:
        x, w, out = (values(*s, device=device) for s in ((4096, 2048), (4096, 2048), (4096, 4096)))
        return lambda: kernels.norm_matmul[(4096 // bm, 4096 // bn)](
            x, w, out, 4096, 2048, BM=bm, BN=bn, BK=bk, num_stages=stages, num_warps=warps
        )


for block in (512, 2048):

    @case("nf4", "67108864", f"b{block}")
    def _(device: str, block=block) -> Call:
        q = numbers(1 << 25, 256, device).to(torch.uint8)
        table, scale = values(16, device=device, dtype=FP32), values((1 << 26) // 64, device=device, dtype=FP32)
        out = empty(1 << 26, device=device)
        return lambda: kernels.nf4[((1 << 25) // block,)](q, table, scale, out, BLOCK=block, GROUP=64, num_warps=4)


for block, bn in ((16, 64), (32, 128)):

    @case("csr_rows", "524288 in 16384 x 128", f"{block}x{bn}")
    def _(device: str, block=block, bn=bn) -> Call:
        first, column = parts_of(524288, 16384, device), numbers(524288, 16384, device)
        value, x = values(524288, device=device, dtype=FP32), values(16384, 128, device=device)
        out = empty(16384, 128, device=device, dtype=FP32)
        grid = (16384, 128 // bn)
        return lambda: kernels.csr_rows[grid](value, column, first, x, out, 128, BLOCK=block, BN=bn, num_warps=2)


for splits in (8, 32):

    @case("merge_splits", f"128x64x{splits}x128")
    def _(device: str, splits=splits) -> Call:
        o = values(128 * 64, splits, 128, device=device, dtype=FP32)
        lse, out = values(128 * 64, splits, device=device, dtype=FP32), empty(128 * 64, 128, device=device)
        return lambda: kernels.merge_splits[(128, 64)](o, lse, out, 64, SPLITS=splits, D=128, num_warps=4)
