"""A sixth set, of twelve kernels, drawn at random by SEED."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
import triton

from softsm_time.case import BF16, FP32, Call, cdiv, empty, numbers, values
from softsm_time.drawing import Drawn, Families, shuffled
from softsm_time.users import draw
from softsm_time.users.kernels import sixth as kernels

SEED = 20261919
drawn = Families()


@drawn
def black_scholes(r: random.Random) -> Iterator[Drawn]:
    n = r.choice((1 << 20, 1 << 22, 1 << 24))
    for block, warps in shuffled(r, (256, 512, 1024), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            given = [values(n, device=device, dtype=FP32).abs() + 0.1 for _ in range(3)]
            made = [empty(n, device=device, dtype=FP32) for _ in "cp"]
            return lambda: kernels.black_scholes[(cdiv(n, block),)](*given, *made, n, BLOCK=block, num_warps=warps)

        yield f"{n}", f"b{block} w{warps}", make


@drawn
def wkv(r: random.Random) -> Iterator[Drawn]:
    batch, T, C = r.choice(((8, 1024, 2048), (32, 512, 4096), (4, 256, 4096)))
    for block, warps in shuffled(r, (32, 64, 128), (1, 2)):

        def make(device: str, block=block, warps=warps) -> Call:
            rkv = [values(batch, T, C, device=device) for _ in "rkv"]
            wu = [values(C, device=device, dtype=FP32) for _ in "wu"]
            out = empty(batch, T, C, device=device)
            return lambda: kernels.wkv[(batch, C // block)](*rkv, *wu, out, T, C, BLOCK=block, num_warps=warps)

        yield f"{batch}x{T}x{C}", f"b{block} w{warps}", make


@drawn
def biquad(r: random.Random) -> Iterator[Drawn]:
    channels, T = r.choice(((4096, 2048), (65536, 512), (16896, 1000)))
    for block, warps in shuffled(r, (32, 64, 128), (1, 2)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, out = values(channels, T, device=device, dtype=FP32), empty(channels, T, device=device, dtype=FP32)
            return lambda: kernels.biquad[(channels // block,)](
                x, out, T, 0.2, 0.3, -0.5, 0.1, BLOCK=block, num_warps=warps
            )

        yield f"{channels}x{T}", f"b{block} w{warps}", make


@drawn
def viterbi(r: random.Random) -> Iterator[Drawn]:
    batch, T, states = r.choice((64, 256, 1024)), r.choice((256, 512)), r.choice((32, 64))
    for (warps,) in shuffled(r, (1, 2, 4)):

        def make(device: str, warps=warps) -> Call:
            emit, move = (values(*shape, device=device, dtype=FP32) for shape in ((batch, T, states), (states, states)))
            out = empty(batch, states, device=device, dtype=FP32)
            return lambda: kernels.viterbi[(batch,)](emit, move, out, T, N=states, num_warps=warps)

        yield f"{batch}x{T}x{states}", f"w{warps}", make


@drawn
def padded_softmax(r: random.Random) -> Iterator[Drawn]:
    rows, columns, dtype, share = r.choice((4096, 16384)), r.choice((1024, 4096)), r.choice((BF16, FP32)), r.random()
    seed = r.randrange(1000)
    for (warps,) in shuffled(r, (2, 4, 8)):

        def make(device: str, warps=warps) -> Call:
            any_length = torch.rand(rows, generator=torch.Generator().manual_seed(seed))
            lengths = (1 + (columns - 1) * (share + (1 - share) * any_length)).int().to(device)
            x = values(rows, columns, device=device, dtype=dtype)
            out = torch.empty_like(x)
            return lambda: kernels.padded_softmax[(rows,)](x, lengths, out, columns, BLOCK=columns, num_warps=warps)

        yield f"{rows}x{columns} from {share:.0%} {str(dtype)[6:]}", f"w{warps}", make


@drawn
def grid_sample(r: random.Random) -> Iterator[Drawn]:
    batch, C, H, smooth = *r.choice(((4, 32, 256), (1, 3, 1024), (8, 16, 128))), r.random() < 0.6
    for block, warps in shuffled(r, (128, 256, 512), (2, 4)):

        def make(device: str, block=block, warps=warps) -> Call:
            image, out = (values(batch, C, H, H, device=device, dtype=FP32) for _ in "io")
            line = torch.linspace(-0.9, 0.9, H)
            points = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).expand(batch, H, H, 2)
            grid = (points if smooth else torch.rand(batch, H, H, 2) * 2 - 1).contiguous().to(device)
            return lambda: kernels.grid_sample[(cdiv(H * H, block), batch)](
                image, grid, out, H, H, H * H, C=C, BLOCK=block, num_warps=warps
            )

        yield f"{batch}x{C}x{H} {'smooth' if smooth else 'random'}", f"b{block} w{warps}", make


@drawn
def smith_waterman(r: random.Random) -> Iterator[Drawn]:
    pairs, n, m = r.choice((1024, 8192)), r.choice((128, 256)), r.choice((64, 128))
    for (warps,) in shuffled(r, (1, 2, 4)):

        def make(device: str, warps=warps) -> Call:
            a, b = (torch.randint(0, 4, (pairs, k), dtype=torch.int8).to(device) for k in (n, m))
            out = empty(pairs, device=device, dtype=torch.int32)
            return lambda: kernels.smith_waterman[(pairs,)](
                a, b, out, n, m, BLOCK=triton.next_power_of_2(m), num_warps=warps
            )

        yield f"{pairs} of {n} by {m}", f"w{warps}", make


@drawn
def spmv(r: random.Random) -> Iterator[Drawn]:
    rows, mean = r.choice(((65536, 64), (20000, 400), (8192, 1000)))
    seed = r.randrange(1000)
    for block, warps in shuffled(r, (32, 128, 256), (1, 2, 4)):

        def make(device: str, block=block, warps=warps) -> Call:
            lengths = (-mean * torch.rand(rows, generator=torch.Generator().manual_seed(seed)).log()).int() + 1
            starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()]).to(device)
            many = int(lengths.sum())
            columns, x = numbers(many, rows, device), values(rows, device=device, dtype=FP32)
            entries, out = values(many, device=device, dtype=FP32), empty(rows, device=device, dtype=FP32)
            return lambda: kernels.spmv[(rows,)](starts, columns, entries, x, out, BLOCK=block, num_warps=warps)

        yield f"{rows} by {mean}", f"b{block} w{warps}", make


@drawn
def march(r: random.Random) -> Iterator[Drawn]:
    n, count, seed = r.choice((1 << 18, 1 << 20)), r.choice((4, 16)), r.randrange(1000)
    for block, warps in shuffled(r, (64, 128, 256), (1, 2, 4)):

        def make(device: str, block=block, warps=warps) -> Call:
            spheres = torch.rand(count, 4, generator=torch.Generator().manual_seed(seed)) * 4 - 2
            spheres[:, 2] += 5
            spheres[:, 3] = 0.4
            held, out = spheres.to(device), empty(n, device=device, dtype=FP32)
            return lambda: kernels.march[(n // block,)](held, out, count, BLOCK=block, num_warps=warps)

        yield f"{n} {count}", f"b{block} w{warps}", make


@drawn
def ranks(r: random.Random) -> Iterator[Drawn]:
    rows, columns = r.choice((8192, 32768)), r.choice((64, 128, 256))
    for (warps,) in shuffled(r, (1, 2, 4)):

        def make(device: str, warps=warps) -> Call:
            x, out = (values(rows, columns, device=device, dtype=FP32) for _ in "xo")
            return lambda: kernels.ranks[(rows,)](x, out, BLOCK=columns, num_warps=warps)

        yield f"{rows}x{columns}", f"w{warps}", make


@drawn
def packed_attention(r: random.Random) -> Iterator[Drawn]:
    heads, D, longest = r.choice((8, 16)), r.choice((64, 128)), r.choice((1000, 3000))
    lengths = [r.randint(50, longest) for _ in range(r.choice((6, 12)))]
    starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    for bm, bn, stages, warps in shuffled(r, (64, 128), (32, 64), (2, 3), (4, 8)):

        def make(device: str, bm=bm, bn=bn, stages=stages, warps=warps) -> Call:
            q, k, v, out = (values(starts[-1], heads, D, device=device) for _ in "qkvo")
            at = torch.tensor(starts, dtype=torch.int32).to(device)
            return lambda: kernels.packed_attention[(cdiv(max(lengths), bm), heads, len(lengths))](
                q, k, v, at, out, D**-0.5, H=heads, D=D, BLOCK_M=bm, BLOCK_N=bn, num_stages=stages, num_warps=warps
            )

        yield f"{len(lengths)} up to {longest} x {heads}x{D}", f"{bm}x{bn} s{stages} w{warps}", make


@drawn
def transpose(r: random.Random) -> Iterator[Drawn]:
    M, N = r.choice((2048, 4096, 8192)), r.choice((4096, 8192))
    for block, warps, swizzled in shuffled(r, (32, 64), (4, 8), (False, True)):

        def make(device: str, block=block, warps=warps, swizzled=swizzled) -> Call:
            x, out = values(M, N, device=device, dtype=FP32), empty(N, M, device=device, dtype=FP32)
            return lambda: kernels.transpose[(M // block, N // block)](
                x, out, M, N, BLOCK_M=block, BLOCK_N=block, WARPS=warps, SWIZZLED=swizzled, num_warps=warps
            )

        yield f"{M}x{N}", f"{block} w{warps}{' swizzled' if swizzled else ''}", make


CASES = draw(drawn, SEED)
