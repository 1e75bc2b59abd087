"""A second set, of ten kernels."""

from __future__ import annotations

import torch

from softsm_time.case import FP8, FP16, FP32, Call, Case, adding_to, empty, numbers, values
from softsm_time.users.kernels import second as kernels

CASES: list[Case] = []
case = adding_to(CASES)

for page, warps in ((64, 4), (16, 2)):

    @case("gather_pages", "32x4096x8x128", f"of {page}")
    def _(device: str, page=page, warps=warps) -> Call:
        count = 32 * 4096 // page
        kv = values(count * 2, page, 8, 128, device=device, dtype=FP16).to(FP8)
        scales = values(count * 2 * page * 8, device=device, dtype=FP32)
        table = torch.randperm(count * 2, device=device)[:count].to(torch.int32)
        out, each = empty(32 * 4096, 8, 128, device=device), 4096 // page
        return lambda: kernels.gather_pages[(each, 32, 8)](
            kv, scales, table, out, each, HEADS=8, D=128, PAGE=page, num_warps=warps
        )


for bh, bw, warps in ((8, 32, 4), (4, 128, 4)):

    @case("grouped_conv", "8x32x4x56x56 to 4", f"{bh}x{bw}")
    def _(device: str, bh=bh, bw=bw, warps=warps) -> Call:
        x, w = values(8, 32, 4, 56, 56, device=device, dtype=FP16), values(32, 4, 4, 9, device=device, dtype=FP32)
        out = torch.empty_like(x)
        grid = (-(-56 // bw), -(-56 // bh), 256)
        return lambda: kernels.grouped_conv[grid](x, w, out, 56, 56, CIN=4, COUT=4, BW=bw, BH=bh, num_warps=warps)


for block, loops in ((1024, 8), (4096, 4)):

    @case("radix_digits", "16777216", f"b{block} x {loops}")
    def _(device: str, block=block, loops=loops) -> Call:
        keys, parts = numbers(1 << 24, 1 << 30, device), (1 << 24) // (block * loops)
        counts = empty(256 * parts, device=device, dtype=torch.int32)
        return lambda: kernels.radix_digits[(parts,)](
            keys, counts, 1 << 24, SHIFT=8, BLOCK=block, LOOPS=loops, num_warps=4
        )


for radius, bh, bw in ((2, 4, 64), (3, 8, 64)):

    @case("bilateral", "4096x4096", f"r{radius} {bh}x{bw}")
    def _(device: str, radius=radius, bh=bh, bw=bw) -> Call:
        image = values(4096, 4096, device=device, dtype=FP16)
        out = torch.empty_like(image)
        return lambda: kernels.bilateral[(4096 // bw, 4096 // bh)](
            image, out, 4096, 4096, 0.1, 0.5, R=radius, BH=bh, BW=bw, num_warps=4
        )


for block, warps in ((256, 4), (1024, 4)):

    @case("pass_states", "4x64x48x8192", f"b{block}")
    def _(device: str, block=block, warps=warps) -> Call:
        states, decay = values(4, 64, 48, 8192, device=device), values(4, 64, 48, device=device, dtype=FP32)
        out, last = torch.empty_like(states), empty(4, 48, 8192, device=device, dtype=FP32)
        return lambda: kernels.pass_states[(8192 // block, 48, 4)](
            states, decay, out, last, 64, 8192, BLOCK=block, num_warps=warps
        )


for rows, warps in ((4, 4), (1, 1)):

    @case("router", "16384x256 best 8", f"r{rows} w{warps}")
    def _(device: str, rows=rows, warps=warps) -> Call:
        logits = values(16384, 256, device=device)
        weights, ids = empty(16384, 8, device=device, dtype=FP32), empty(16384, 8, device=device, dtype=torch.int32)
        return lambda: kernels.router[(16384 // rows,)](
            logits, weights, ids, 16384, E=256, K=8, ROWS=rows, num_warps=warps
        )


for bm, bn, warps, stages in ((64, 64, 4, 3), (128, 64, 8, 2)):

    @case("listed_attention", "32x8192x128", f"{bm}x{bn} s{stages}")
    def _(device: str, bm=bm, bn=bn, warps=warps, stages=stages) -> Call:
        q, k, v, o = (values(32, 8192, 128, device=device) for _ in "qkvo")
        lists = numbers(32 * (8192 // bm) * 16, 8192 // bn, device)
        return lambda: kernels.listed_attention[(8192 // bm, 32)](
            q, k, v, o, lists, 8192, 0.127, NB=16, D=128, BM=bm, BN=bn, num_warps=warps, num_stages=stages
        )


for bv, warps in ((64, 4), (16, 1)):

    @case("wkv", "256x1024x64", f"b{bv} w{warps}")
    def _(device: str, bv=bv, warps=warps) -> Call:
        r, k, v = (values(256, 1024, 64, device=device) for _ in "rkv")
        w = values(256, 1024, 64, device=device, dtype=FP32).sigmoid()
        u, out = values(256, 64, device=device, dtype=FP32), torch.empty_like(r)
        return lambda: kernels.wkv[(64 // bv, 256)](r, k, v, w, u, out, 1024, D=64, BV=bv, num_warps=warps)


for bm, bn, bk, stages, warps in ((128, 128, 64, 3, 8), (64, 256, 64, 3, 8)):

    @case("linear_loss", "16384x8192x1024", f"{bm}x{bn}x{bk} s{stages}")
    def _(device: str, bm=bm, bn=bn, bk=bk, stages=stages, warps=warps) -> Call:
        x, w = values(16384, 1024, device=device), values(8192, 1024, device=device)
        target, loss = numbers(16384, 8192, device), empty(16384, device=device, dtype=FP32)
        return lambda: kernels.linear_loss[(16384 // bm,)](
            x, w, target, loss, 8192, 1024, BM=bm, BN=bn, BK=bk, num_stages=stages, num_warps=warps
        )


for bm, bn in ((64, 64), (128, 32)):

    @case("n_body", "16384", f"{bm}x{bn}")
    def _(device: str, bm=bm, bn=bn) -> Call:
        pos, acc = values(4, 16384, device=device, dtype=FP32), empty(3, 16384, device=device, dtype=FP32)
        return lambda: kernels.n_body[(16384 // bm,)](pos, acc, 16384, 0.01, BM=bm, BN=bn, num_warps=4)
