"""Families of kernels that carry a state, reduce in odd ways or move images."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from softsm_time.case import BF16, FP8, FP16, FP32, SHORT, Call, cdiv, numbers, parts_of, power, values
from softsm_time.drawing import Drawn, Families, shuffled
from softsm_time.drawn.kernels import states as kernels

family = Families()


@family
def selective_scan(r: random.Random) -> Iterator[Drawn]:
    batch, T, channels, S = r.choice((1, 4, 8)), r.choice((256, 512, 1024)), r.choice((1024, 2048)), r.choice((8, 16))
    for block, warps in shuffled(r, (16, 32, 64, 128), (1, 2, 4)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, dt = values(batch * T, channels, device=device), values(batch * T, channels, device=device).abs()
            b, c = (values(batch * T, S, device=device) for _ in "bc")
            a, out = -values(channels, S, device=device, dtype=FP32).abs(), torch.empty_like(x)
            grid = (channels // block, batch)
            return lambda: kernels.selective_scan[grid](
                x, dt, a, b, c, out, T, channels, BLOCK=block, S=S, num_warps=warps
            )

        yield f"{batch}x{T}x{channels}x{S}", f"b{block} w{warps}", make


@family
def delta_rule(r: random.Random) -> Iterator[Drawn]:
    heads, T, D = r.choice((16, 64, 128)), r.choice((256, 512)), r.choice((64, 128))
    for bv, warps in shuffled(r, (8, 16, 32), (1, 2, 4)):

        def make(device: str, bv=bv, warps=warps) -> Call:
            q, k, v = (values(heads, T, D, device=device) for _ in "qkv")
            beta, out = values(heads, T, device=device, dtype=FP32), torch.empty_like(v)
            return lambda: kernels.delta_rule[(D // bv, heads)](q, k, v, beta, out, T, D=D, BV=bv, num_warps=warps)

        yield f"{heads}x{T}x{D}", f"b{bv} w{warps}", make


@family
def norm_atomics(r: random.Random) -> Iterator[Drawn]:
    many, columns = r.choice((4096, 8192, 16384)), r.choice((1024, 2560, 4096))
    for at_once, warps in shuffled(r, (4, 16, 32), (4, 8, 16)):

        def make(device: str, at_once=at_once, warps=warps) -> Call:
            x, dy = (values(many, columns, device=device) for _ in "xy")
            w, dx, dw = values(columns, device=device), torch.empty_like(x), torch.zeros(columns, device=device)
            return lambda: kernels.norm_atomics[(cdiv(many, at_once),)](
                x, w, dy, dx, dw, many, columns, 1e-5, ROWS=at_once, BLOCK=power(columns), num_warps=warps
            )

        yield f"{many}x{columns}", f"r{at_once} w{warps}", make


@family
def batch_norm(r: random.Random) -> Iterator[Drawn]:
    images, channels, side = r.choice((16, 64)), r.choice((64, 256, 512)), r.choice((14, 28, 56))
    for block, warps in shuffled(r, (256, 512, 1024, 2048), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, w = values(images, channels, side * side, device=device), values(channels, device=device)
            out = torch.empty_like(x)
            return lambda: kernels.batch_norm[(channels,)](
                x, w, out, images, channels, side * side, 1e-5, BLOCK=block, num_warps=warps
            )

        yield f"{images}x{channels}x{side}x{side}", f"b{block} w{warps}", make


@family
def jagged_softmax(r: random.Random) -> Iterator[Drawn]:
    many, of, dtype = r.choice((512, 2048, 8192)), r.choice((1 << 20, 1 << 22, 1 << 24)), r.choice((BF16, FP32))
    for block, warps in shuffled(r, (256, 512, 1024), (2, 4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, first = values(of, device=device, dtype=dtype), parts_of(of, many, device)
            out = torch.empty_like(x)
            return lambda: kernels.jagged_softmax[(many,)](x, first, out, BLOCK=block, num_warps=warps)

        yield f"{of} in {many} {SHORT[dtype]}", f"b{block} w{warps}", make


@family
def gumbel(r: random.Random) -> Iterator[Drawn]:
    many, columns = r.choice((64, 256, 1024)), r.choice((32000, 50257, 128256))
    for block, warps in shuffled(r, (1024, 2048, 4096), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, out = values(many, columns, device=device), torch.empty(many, dtype=torch.int32, device=device)
            return lambda: kernels.gumbel[(many,)](x, out, columns, 7, BLOCK=block, num_warps=warps)

        yield f"{many}x{columns}", f"b{block} w{warps}", make


@family
def hadamard(r: random.Random) -> Iterator[Drawn]:
    many, n, dtype = r.choice((8192, 32768)), r.choice((128, 256, 512, 1024)), r.choice((BF16, FP16))
    for (warps,) in shuffled(r, (1, 2, 4)):

        def make(device: str, warps=warps) -> Call:
            x = values(many, n, device=device, dtype=dtype)
            out = torch.empty_like(x)
            return lambda: kernels.hadamard[(many,)](x, out, N=n, STEPS=n.bit_length() - 1, num_warps=warps)

        yield f"{many}x{n} {SHORT[dtype]}", f"w{warps}", make


@family
def scan_columns(r: random.Random) -> Iterator[Drawn]:
    M, N = r.choice((1024, 4096)), r.choice((2048, 8192))
    for BM, BN, warps in shuffled(r, (16, 32, 64), (32, 64, 128), (2, 4, 8)):

        def make(device: str, BM=BM, BN=BN, warps=warps) -> Call:
            x = values(M, N, device=device, dtype=FP32)
            out = torch.empty_like(x)
            return lambda: kernels.scan_columns[(N // BN,)](x, out, M, N, BM=BM, BN=BN, num_warps=warps)

        yield f"{M}x{N}", f"{BM}x{BN} w{warps}", make


@family
def expert_counts(r: random.Random) -> Iterator[Drawn]:
    n, experts = r.choice((1 << 15, 1 << 17, 1 << 18)), r.choice((8, 32, 64, 128))
    for block, warps in shuffled(r, (64, 128, 256), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            ids, place = numbers(n, experts, device), torch.empty(n, dtype=torch.int32, device=device)
            count = torch.empty(n // block, experts, dtype=torch.int32, device=device)
            return lambda: kernels.expert_counts[(n // block,)](
                ids, place, count, n, E=experts, BLOCK=block, num_warps=warps
            )

        yield f"{n} of {experts}", f"b{block} w{warps}", make


@family
def cache_write(r: random.Random) -> Iterator[Drawn]:
    tokens, heads, d = r.choice((4096, 16384)), r.choice((8, 16, 32)), r.choice((64, 128))
    for at_once, warps in shuffled(r, (1, 4, 8), (1, 2, 4)):

        def make(device: str, at_once=at_once, warps=warps) -> Call:
            k, slots = values(tokens, heads, d, device=device), 2 * tokens
            slot = torch.randperm(slots, device=device)[:tokens].to(torch.int32)
            cache = torch.empty(slots, heads, d, dtype=FP8, device=device)
            scale, grid = torch.empty(slots, heads, device=device), (tokens, heads // at_once)
            return lambda: kernels.cache_write[grid](k, slot, cache, scale, heads, HEADS=at_once, D=d, num_warps=warps)

        yield f"{tokens}x{heads}x{d}", f"h{at_once} w{warps}", make


@family
def quantise_tiles(r: random.Random) -> Iterator[Drawn]:
    M, N = r.choice((2048, 4096, 8192)), r.choice((4096, 5120, 7168))
    for BM, BN, warps in shuffled(r, (64, 128), (64, 128), (4, 8)):

        def make(device: str, BM=BM, BN=BN, warps=warps) -> Call:
            x, out = values(M, N, device=device), torch.empty(N, M, dtype=FP8, device=device)
            scale, grid = torch.empty(N // BN, M // BM, device=device), (M // BM, N // BN)
            return lambda: kernels.quantise_tiles[grid](x, out, scale, M, N, BM=BM, BN=BN, num_warps=warps)

        yield f"{M}x{N}", f"{BM}x{BN} w{warps}", make


@family
def permute(r: random.Random) -> Iterator[Drawn]:
    batch, T, heads, d, dtype = r.choice((4, 8)), r.choice((2048, 4096)), r.choice((8, 32)), 64, r.choice((BF16, FP32))
    for bt, bh, warps in shuffled(r, (4, 16, 64), (1, 2, 8), (2, 4, 8)):
        if not 512 <= bt * bh * d <= 8192:
            continue

        def make(device: str, bt=bt, bh=bh, warps=warps) -> Call:
            x = values(batch, T, heads, d, device=device, dtype=dtype)
            out, grid = torch.empty_like(x), (T // bt, heads // bh, batch)
            return lambda: kernels.permute[grid](x, out, T, heads, D=d, BT=bt, BH=bh, num_warps=warps)

        yield f"{batch}x{T}x{heads}x{d} {SHORT[dtype]}", f"{bt}x{bh} w{warps}", make


@family
def stencil_3d(r: random.Random) -> Iterator[Drawn]:
    X, Y, Z = r.choice((64, 128, 256)), r.choice((128, 200, 256)), r.choice((128, 256, 300))
    for BY, BZ, warps in shuffled(r, (2, 4, 8), (64, 128, 256), (2, 4, 8)):

        def make(device: str, BY=BY, BZ=BZ, warps=warps) -> Call:
            x = values(X, Y, Z, device=device, dtype=FP32)
            out, grid = torch.empty_like(x), (X, cdiv(Y, BY), cdiv(Z, BZ))
            return lambda: kernels.stencil_3d[grid](x, out, Y, Z, BY=BY, BZ=BZ, num_warps=warps)

        yield f"{X}x{Y}x{Z}", f"{BY}x{BZ} w{warps}", make


@family
def upsample(r: random.Random) -> Iterator[Drawn]:
    images, side, dtype = r.choice((16, 64)), r.choice((128, 200, 256)), r.choice((FP16, FP32))
    for block, warps in shuffled(r, (128, 256, 512), (1, 2, 4)):

        def make(device: str, block=block, warps=warps) -> Call:
            x = values(images, side, side, device=device, dtype=dtype)
            out = torch.empty(images, 2 * side, 2 * side, dtype=dtype, device=device)
            grid = (images * 2 * side, cdiv(2 * side, block))
            return lambda: kernels.upsample[grid](x, out, side, side, BLOCK=block, num_warps=warps)

        yield f"{images}x{side}x{side} {SHORT[dtype]}", f"b{block} w{warps}", make


@family
def distances(r: random.Random) -> Iterator[Drawn]:
    M, N, D = r.choice((1024, 2048, 4096)), r.choice((1024, 2048, 4096)), r.choice((16, 32, 64, 128))
    for BM, BN, warps in shuffled(r, (32, 64), (32, 64, 128), (4, 8)):

        def make(device: str, BM=BM, BN=BN, warps=warps) -> Call:
            x, y = values(D, M, device=device, dtype=FP32), values(D, N, device=device, dtype=FP32)
            out, grid = torch.empty(M, N, device=device), (M // BM, N // BN)
            return lambda: kernels.distances[grid](x, y, out, M, N, D, BM=BM, BN=BN, num_warps=warps)

        yield f"{M}x{N}x{D}", f"{BM}x{BN} w{warps}", make


@family
def overlaps(r: random.Random) -> Iterator[Drawn]:
    n = r.choice((2048, 4096, 8192))
    for BM, BN, warps in shuffled(r, (16, 32, 64), (64, 128, 256), (2, 4, 8)):
        if BM * BN > 8192:
            continue

        def make(device: str, BM=BM, BN=BN, warps=warps) -> Call:
            box, out = values(4, n, device=device, dtype=FP32), torch.empty(n, n, dtype=torch.int8, device=device)
            return lambda: kernels.overlaps[(n // BM, n // BN)](box, out, n, BM=BM, BN=BN, num_warps=warps)

        yield f"{n}", f"{BM}x{BN} w{warps}", make


@family
def gemv_int4(r: random.Random) -> Iterator[Drawn]:
    N, K, group = r.choice((4096, 11008, 14336)), r.choice((4096, 8192)), r.choice((64, 128))
    for BN, BK, warps in shuffled(r, (8, 16, 32), (256, 512, 1024), (2, 4, 8)):
        if N % BN:
            continue

        def make(device: str, BN=BN, BK=BK, warps=warps) -> Call:
            w, scale = numbers(N * K // 8, 1 << 30, device), values(N, K // group, device=device, dtype=FP16)
            x, out = values(K, device=device, dtype=FP16), torch.empty(N, dtype=FP16, device=device)
            return lambda: kernels.gemv_int4[(N // BN,)](
                w, scale, x, out, N, K, GROUP=group, BN=BN, BK=BK, num_warps=warps
            )

        yield f"{N}x{K} groups of {group}", f"{BN}x{BK} w{warps}", make


@family
def attention_queries(r: random.Random) -> Iterator[Drawn]:
    heads, T, d, causal = r.choice((16, 32)), r.choice((1024, 2048)), r.choice((64, 128)), r.choice((True, False))
    for BM, BN, stages, warps in shuffled(r, (64, 128), (32, 64), (1, 2, 3), (4, 8)):
        if warps == 8 and BM == 64:
            continue

        def make(device: str, BM=BM, BN=BN, stages=stages, warps=warps) -> Call:
            q, k, v, do = (values(heads, T, d, device=device) for _ in "qkvo")
            lse, delta = (values(heads, T, device=device, dtype=FP32) for _ in "ld")
            dq = torch.empty_like(q)
            return lambda: kernels.attention_queries[(T // BM, heads)](
                q, k, v, do, lse, delta, dq, T, D=d, BM=BM, BN=BN, CAUSAL=causal, num_stages=stages, num_warps=warps
            )

        yield f"{'causal' if causal else 'full'} {heads}x{T}x{d}", f"{BM}x{BN} s{stages} w{warps}", make
