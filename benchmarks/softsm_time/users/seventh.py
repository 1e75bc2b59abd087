"""A seventh set, of twelve kernels, drawn at random by SEED."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from softsm_time.case import BF16, FP16, FP32, SHORT, Call, cdiv, empty, numbers, power, values
from softsm_time.drawing import Drawn, Families, shuffled
from softsm_time.users import draw
from softsm_time.users.kernels import seventh as kernels

SEED = 20262020
INT32 = torch.int32
drawn = Families()


@drawn
def lattice(r: random.Random) -> Iterator[Drawn]:
    W, H = r.choice(((1024, 1024), (2048, 1536), (4096, 512)))
    for block, warps in shuffled(r, (128, 256, 512), (2, 4)):

        def make(device: str, block=block, warps=warps) -> Call:
            f, out = (values(9, H, W, device=device, dtype=FP32).abs() + 0.1 for _ in "fo")
            return lambda: kernels.lattice[(W // block, H)](f, out, W, H, 1.2, BLOCK=block, num_warps=warps)

        yield f"{W}x{H}", f"b{block} w{warps}", make


@drawn
def murmur(r: random.Random) -> Iterator[Drawn]:
    records, words = r.choice(((65536, 64), (262144, 25), (32768, 300), (131072, 16)))
    for block, warps in shuffled(r, (64, 128, 256), (1, 2, 4)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, out = numbers(records * words, 1 << 30, device), empty(records, device=device, dtype=INT32)
            return lambda: kernels.murmur[(records // block,)](x, out, words, BLOCK=block, num_warps=warps)

        yield f"{records} of {4 * words} bytes", f"b{block} w{warps}", make


@drawn
def forces(r: random.Random) -> Iterator[Drawn]:
    n, K, reach = r.choice((100000, 500000)), r.choice((16, 48)), r.choice((500, 20000))
    for block, warps in shuffled(r, (64, 128, 256), (2, 4)):

        def make(device: str, block=block, warps=warps) -> Call:
            atoms, out = values(n, 3, device=device, dtype=FP32) * 3, empty(n, 3, device=device, dtype=FP32)
            away = torch.randint(-reach, reach, (K, n), generator=torch.Generator().manual_seed(n))
            near = ((torch.arange(n) + away) % n).int().to(device)
            return lambda: kernels.forces[(cdiv(n, block),)](atoms, near, out, n, K=K, BLOCK=block, num_warps=warps)

        yield f"{n} by {K} within {reach}", f"b{block} w{warps}", make


@drawn
def median(r: random.Random) -> Iterator[Drawn]:
    W, H = r.choice(((1920, 1080), (3840, 2160), (8000, 6000)))
    for block, warps in shuffled(r, (256, 512, 1024), (2, 4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x = torch.randint(0, 256, (H, W), dtype=torch.uint8).to(device)
            out = torch.empty_like(x)
            return lambda: kernels.median[(cdiv(W, block), H)](x, out, W, H, BLOCK=block, num_warps=warps)

        yield f"{W}x{H}", f"b{block} w{warps}", make


@drawn
def tridiagonal(r: random.Random) -> Iterator[Drawn]:
    n, systems = r.choice(((128, 65536), (512, 16384), (256, 8192)))
    for block, warps in shuffled(r, (32, 64, 128, 256), (1, 2)):

        def make(device: str, block=block, warps=warps) -> Call:
            made = [values(n, systems, device=device, dtype=FP32) for _ in "lur"]
            diagonal = values(n, systems, device=device, dtype=FP32).abs() + 4
            c, out = (empty(n, systems, device=device, dtype=FP32) for _ in "co")
            return lambda: kernels.tridiagonal[(systems // block,)](
                made[0], diagonal, made[1], made[2], c, out, n, systems, BLOCK=block, num_warps=warps
            )

        yield f"{n}x{systems}", f"b{block} w{warps}", make


@drawn
def lstm_cell(r: random.Random) -> Iterator[Drawn]:
    rows, width, dtype = r.choice((2048, 16384)), r.choice((512, 1000, 2048)), r.choice((BF16, FP16))
    for block, warps in shuffled(r, (256, 512, 1024), (2, 4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            gates, bias = (
                values(rows, 4 * width, device=device, dtype=dtype),
                values(4 * width, device=device, dtype=FP32),
            )
            cell, new = (values(rows, width, device=device, dtype=FP32) for _ in "cn")
            hidden = empty(rows, width, device=device, dtype=dtype)
            return lambda: kernels.lstm_cell[(rows, cdiv(width, block))](
                gates, bias, cell, hidden, new, width, BLOCK=block, num_warps=warps
            )

        yield f"{rows}x{width} {SHORT[dtype]}", f"b{block} w{warps}", make


@drawn
def deltas(r: random.Random) -> Iterator[Drawn]:
    n = r.choice((1 << 22, 1 << 24, 1 << 26))
    for block, warps in shuffled(r, (512, 1024, 4096), (2, 4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            packed = torch.randint(0, 256, (n // 2 * 3,), dtype=torch.uint8).to(device)
            first, out = numbers(n // block, 1000, device), empty(n, device=device, dtype=INT32)
            return lambda: kernels.deltas[(n // block,)](packed, first, out, BLOCK=block, num_warps=warps)

        yield f"{n}", f"b{block} w{warps}", make


@drawn
def ctc(r: random.Random) -> Iterator[Drawn]:
    batch, T, C, L = r.choice((32, 256, 2048)), r.choice((200, 500)), r.choice((32, 1000)), r.choice((20, 60))
    for (warps,) in shuffled(r, (1, 2, 4)):

        def make(device: str, warps=warps) -> Call:
            logits = -values(batch, T, C, device=device, dtype=FP32).abs()
            labels = 1 + numbers(batch * L, C - 1, device)
            out = empty(batch, power(2 * L + 1), device=device, dtype=FP32)
            return lambda: kernels.ctc[(batch,)](logits, labels, out, T, C, L, BLOCK=power(2 * L + 1), num_warps=warps)

        yield f"{batch} of {T}x{C} to {L}", f"w{warps}", make


@drawn
def walk(r: random.Random) -> Iterator[Drawn]:
    n, mean, many, steps = (
        r.choice((20000, 1000000)),
        r.choice((8, 30)),
        r.choice((1 << 16, 1 << 19)),
        r.choice((10, 40)),
    )
    for block, warps in shuffled(r, (64, 128, 256), (1, 2, 4)):

        def make(device: str, block=block, warps=warps) -> Call:
            lengths = 1 + torch.randint(0, 2 * mean, (n,), generator=torch.Generator().manual_seed(mean))
            starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int().to(device)
            edges, out = numbers(int(lengths.sum()), n, device), empty(many, device=device, dtype=INT32)
            return lambda: kernels.walk[(many // block,)](starts, edges, out, n, steps, BLOCK=block, num_warps=warps)

        yield f"{many} by {steps} on {n} of {mean}", f"b{block} w{warps}", make


@drawn
def butterflies(r: random.Random) -> Iterator[Drawn]:
    n, half = r.choice((1 << 21, 1 << 24)), r.choice((1, 16, 1024, 1 << 16))
    for block, warps in shuffled(r, (256, 512, 1024), (2, 4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            prime = 998244353
            x, out = numbers(n, prime, device), empty(n, device=device, dtype=INT32)
            given = torch.randint(1, prime, (half,), generator=torch.Generator().manual_seed(half))
            roots, quotients = (
                given.int().to(device),
                (given * (1 << 32) // prime).to(torch.uint32).view(INT32).to(device),
            )
            return lambda: kernels.butterflies[(n // 2 // block,)](
                x, roots, quotients, out, half, prime, BLOCK=block, num_warps=warps
            )

        yield f"{n} half {half}", f"b{block} w{warps}", make


@drawn
def gram(r: random.Random) -> Iterator[Drawn]:
    M, K = r.choice(((2048, 4096), (4096, 2048), (1024, 16384)))
    for block, bk, stages, warps in shuffled(r, (64, 128), (32, 64), (3, 4), (4, 8)):

        def make(device: str, block=block, bk=bk, stages=stages, warps=warps) -> Call:
            x, out = values(M, K, device=device), empty(M, M, device=device)
            side = M // block
            return lambda: kernels.gram[(side * (side + 1) // 2,)](
                x, out, M, K, BLOCK=block, BLOCK_K=bk, num_stages=stages, num_warps=warps
            )

        yield f"{M}x{K}", f"{block}x{bk} s{stages} w{warps}", make


@drawn
def min_plus(r: random.Random) -> Iterator[Drawn]:
    M, N, K = r.choice(((1024, 1024, 512), (2048, 2048, 256), (4096, 1024, 100)))
    for bm, bn, warps in shuffled(r, (32, 64), (64, 128), (4, 8)):

        def make(device: str, bm=bm, bn=bn, warps=warps) -> Call:
            a, b = (values(*shape, device=device, dtype=FP32) for shape in ((M, K), (K, N)))
            out = empty(M, N, device=device, dtype=FP32)
            return lambda: kernels.min_plus[(M // bm, N // bn)](
                a, b, out, N, K, BLOCK_M=bm, BLOCK_N=bn, num_warps=warps
            )

        yield f"{M}x{N}x{K}", f"{bm}x{bn} w{warps}", make


CASES = draw(drawn, SEED)
