"""Families of kernels that do several things at once, or go by tables."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from softsm_time.case import BF16, FP8, FP32, SHORT, Call, cdiv, numbers, parts_of, power, values
from softsm_time.drawing import Drawn, Families, shuffled
from softsm_time.drawn.kernels import fused as kernels

family = Families()


@family
def softmax_dropout(r: random.Random) -> Iterator[Drawn]:
    many, columns, dtype = r.choice((4096, 16384)), r.choice((512, 1024, 3000, 4096)), r.choice((BF16, FP32))
    for (warps,) in shuffled(r, (2, 4, 8, 16)):

        def make(device: str, warps=warps) -> Call:
            x = values(many, columns, device=device, dtype=dtype)
            out = torch.empty_like(x)
            return lambda: kernels.softmax_dropout[(many,)](
                x, out, columns, 0.1, 7, BLOCK=power(columns), num_warps=warps
            )

        yield f"{many}x{columns} {SHORT[dtype]}", f"w{warps}", make


@family
def norm_backward(r: random.Random) -> Iterator[Drawn]:
    many, columns = r.choice((4096, 8192, 20000)), r.choice((768, 1024, 2048, 4096))
    for programs, warps in shuffled(r, (132, 264, 528), (4, 8, 16)):

        def make(device: str, programs=programs, warps=warps) -> Call:
            x, dy = (values(many, columns, device=device) for _ in "xy")
            w, dx = values(columns, device=device), torch.empty_like(x)
            dw, db = (torch.empty(programs, columns, device=device) for _ in "wb")
            gw, gb = (torch.empty(columns, dtype=BF16, device=device) for _ in "wb")

            def call() -> None:
                kernels.norm_backward[(programs,)](
                    x, w, dy, dx, dw, db, many, columns, 1e-5, BLOCK=power(columns), num_warps=warps
                )
                for parts, out in ((dw, gw), (db, gb)):
                    kernels.sum_parts[(cdiv(columns, 32),)](parts, out, programs, columns, BM=32, BN=32)

            return call

        yield f"{many}x{columns}", f"by {programs} w{warps}", make


@family
def add_norm(r: random.Random) -> Iterator[Drawn]:
    many, columns = r.choice((1024, 4096, 16384)), r.choice((2048, 4096, 7168))
    for (warps,) in shuffled(r, (2, 4, 8, 16)):

        def make(device: str, warps=warps) -> Call:
            x, h, w = (
                values(many, columns, device=device),
                values(many, columns, device=device),
                values(columns, device=device),
            )
            out = torch.empty_like(x)
            return lambda: kernels.add_norm[(many,)](x, h, w, out, columns, 1e-6, BLOCK=power(columns), num_warps=warps)

        yield f"{many}x{columns}", f"w{warps}", make


@family
def adamw(r: random.Random) -> Iterator[Drawn]:
    n = r.choice((1 << 20, 1 << 22, 1 << 24, 11_000_000))
    for block, warps in shuffled(r, (512, 1024, 2048), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            p, m = (values(n, device=device, dtype=FP32) for _ in "pm")
            g, v = values(n, device=device), values(n, device=device, dtype=FP32).abs()
            return lambda: kernels.adamw[(cdiv(n, block),)](
                p, g, m, v, n, 1e-3, 0.9, 0.99, 1e-8, 0.1, BLOCK=block, num_warps=warps
            )

        yield f"{n}", f"b{block} w{warps}", make


@family
def loss_and_gradient(r: random.Random) -> Iterator[Drawn]:
    many, columns = r.choice((256, 1024, 2048)), r.choice((32000, 128256))
    for block, warps in shuffled(r, (2048, 4096, 8192), (4, 8, 16)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, target = values(many, columns, device=device), numbers(many, columns, device)
            loss = torch.empty(many, device=device)
            return lambda: kernels.loss_and_gradient[(many,)](
                x, target, loss, columns, 1 / many, BLOCK=block, num_warps=warps
            )

        yield f"{many}x{columns}", f"b{block} w{warps}", make


@family
def rope_quantise(r: random.Random) -> Iterator[Drawn]:
    tokens, heads, half = r.choice((2048, 8192)), r.choice((8, 32, 64)), r.choice((32, 64))
    for at_once, warps in shuffled(r, (1, 4, 8), (1, 2, 4)):

        def make(device: str, at_once=at_once, warps=warps) -> Call:
            x = values(tokens, heads, 2 * half, device=device)
            cos, sin = (values(tokens, half, device=device, dtype=FP32) for _ in "cs")
            out = torch.empty(tokens, heads, 2 * half, dtype=FP8, device=device)
            scale, grid = torch.empty(tokens, heads, device=device), (tokens, heads // at_once)
            return lambda: kernels.rope_quantise[grid](
                x, cos, sin, out, scale, heads, HALF=half, HEADS=at_once, num_warps=warps
            )

        yield f"{tokens}x{heads}x{2 * half}", f"h{at_once} w{warps}", make


@family
def top_p(r: random.Random) -> Iterator[Drawn]:
    many, columns = r.choice((64, 512, 2048)), r.choice((256, 512, 1024))
    for (warps,) in shuffled(r, (2, 4, 8)):

        def make(device: str, warps=warps) -> Call:
            x, u = values(many, columns, device=device), torch.rand(many, device=device)
            out = torch.empty(many, dtype=torch.int32, device=device)
            return lambda: kernels.top_p[(many,)](x, u, out, columns, 0.9, BLOCK=columns, num_warps=warps)

        yield f"{many}x{columns}", f"w{warps}", make


@family
def sort_pairs(r: random.Random) -> Iterator[Drawn]:
    many, columns = r.choice((512, 2048, 4096)), r.choice((128, 256, 512, 1024))
    for (warps,) in shuffled(r, (1, 2, 4, 8)):

        def make(device: str, warps=warps) -> Call:
            key, value = (numbers(many * columns, 1 << 30, device) for _ in "kv")
            return lambda: kernels.sort_pairs[(many,)](key, value, columns, BLOCK=columns, num_warps=warps)

        yield f"{many}x{columns}", f"w{warps}", make


@family
def scan_parts(r: random.Random) -> Iterator[Drawn]:
    """A long sum in three launches."""
    n = r.choice((1 << 20, 1 << 22, 1 << 24))
    for block, warps in shuffled(r, (1024, 2048, 4096), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, parts = values(n, device=device, dtype=FP32), n // block
            sums, out = torch.empty(parts, device=device), torch.empty_like(x)

            def call() -> None:
                kernels.part_sums[(parts,)](x, sums, n, BLOCK=block, num_warps=warps)
                kernels.scan_sums[(1,)](sums, parts, BLOCK=1024)
                kernels.scan_parts[(parts,)](x, sums, out, n, BLOCK=block, num_warps=warps)

            return call

        yield f"{n}", f"b{block} w{warps}", make


@family
def long_rows(r: random.Random) -> Iterator[Drawn]:
    many, columns, dtype = r.choice((64, 264, 1024)), r.choice((16384, 65536, 100_000)), r.choice((BF16, FP32))
    for block, warps in shuffled(r, (1024, 2048, 4096), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x = values(many, columns, device=device, dtype=dtype)
            out = torch.empty_like(x)
            return lambda: kernels.long_rows[(many,)](x, out, columns, BLOCK=block, num_warps=warps)

        yield f"{many}x{columns} {SHORT[dtype]}", f"b{block} w{warps}", make


@family
def segments(r: random.Random) -> Iterator[Drawn]:
    many, of, columns = r.choice((256, 1024, 4096)), r.choice((16384, 65536)), r.choice((256, 512, 1024))
    for at_once, block, warps in shuffled(r, (4, 8, 16), (128, 256), (2, 4)):

        def make(device: str, at_once=at_once, block=block, warps=warps) -> Call:
            x, first = values(of, columns, device=device), parts_of(of, many, device)
            out, grid = torch.empty(many, columns, dtype=BF16, device=device), (many, columns // block)
            return lambda: kernels.segment_sums[grid](
                x, first, out, columns, ROWS=at_once, BLOCK=block, num_warps=warps
            )

        yield f"{of} in {many} x {columns}", f"r{at_once} b{block} w{warps}", make


@family
def embedding_bag(r: random.Random) -> Iterator[Drawn]:
    bags, each, of, columns = (
        r.choice((4096, 16384)),
        r.choice((4, 16, 32)),
        r.choice((10000, 200_000)),
        r.choice((64, 128, 256, 512)),
    )
    for (warps,) in shuffled(r, (1, 2, 4)):

        def make(device: str, warps=warps) -> Call:
            table, index = values(of, columns, device=device), numbers(bags * each, of, device)
            out = torch.empty(bags, columns, dtype=BF16, device=device)
            return lambda: kernels.embedding_bag[(bags,)](
                table, index, out, columns, EACH=each, BLOCK=columns, num_warps=warps
            )

        yield f"{bags}x{each} of {of} x {columns}", f"w{warps}", make


@family
def combine(r: random.Random) -> Iterator[Drawn]:
    tokens, k, columns = r.choice((1024, 4096)), r.choice((2, 4, 6, 8)), r.choice((2048, 4096, 7168))
    for block, warps in shuffled(r, (512, 1024, 2048), (2, 4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            y = values(tokens * k, columns, device=device)
            place = torch.randperm(tokens * k, device=device, dtype=torch.int32)
            weight, out = (
                values(tokens, k, device=device, dtype=FP32),
                torch.empty(tokens, columns, dtype=BF16, device=device),
            )
            grid = (tokens, cdiv(columns, block))
            return lambda: kernels.combine[grid](y, place, weight, out, columns, K=k, BLOCK=block, num_warps=warps)

        yield f"{tokens}x{k}x{columns}", f"b{block} w{warps}", make


@family
def bin_count(r: random.Random) -> Iterator[Drawn]:
    n, bins = r.choice((1 << 18, 1 << 20, 1 << 22)), r.choice((256, 4096, 100_000))
    for block, warps in shuffled(r, (512, 1024, 2048), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, out = numbers(n, bins, device), torch.zeros(bins, dtype=torch.int32, device=device)
            return lambda: kernels.bin_count[(cdiv(n, block),)](x, out, n, BLOCK=block, num_warps=warps)

        yield f"{n} in {bins}", f"b{block} w{warps}", make


@family
def compact(r: random.Random) -> Iterator[Drawn]:
    n = r.choice((1 << 20, 1 << 22, 1 << 23))
    for block, warps in shuffled(r, (512, 1024, 2048, 4096), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x = values(n, device=device, dtype=FP32)
            out, count = torch.empty(n, device=device), torch.zeros(1, dtype=torch.int32, device=device)
            return lambda: kernels.compact[(cdiv(n, block),)](x, out, count, n, BLOCK=block, num_warps=warps)

        yield f"{n}", f"b{block} w{warps}", make


@family
def depthwise(r: random.Random) -> Iterator[Drawn]:
    images, side, C = r.choice((4, 16)), r.choice((28, 56, 112)), r.choice((64, 128, 256))
    for BW, BC, warps in shuffled(r, (8, 16, 32), (32, 64), (2, 4)):

        def make(device: str, BW=BW, BC=BC, warps=warps) -> Call:
            x, w = values(images, side, side, C, device=device), values(9, C, device=device)
            out, grid = torch.empty_like(x), (images * side, cdiv(side, BW), C // BC)
            return lambda: kernels.depthwise[grid](x, w, out, side, side, C, BW=BW, BC=BC, num_warps=warps)

        yield f"{images}x{side}x{side}x{C}", f"{BW}x{BC} w{warps}", make


@family
def max_pool(r: random.Random) -> Iterator[Drawn]:
    images, side, dtype = r.choice((64, 256)), r.choice((128, 256, 512)), r.choice((BF16, FP32))
    for block, warps in shuffled(r, (64, 128, 256), (1, 2, 4)):

        def make(device: str, block=block, warps=warps) -> Call:
            x = values(images, side, side, device=device, dtype=dtype)
            out = torch.empty(images, side // 2, side // 2, dtype=dtype, device=device)
            grid = (images * side // 2, cdiv(side // 2, block))
            return lambda: kernels.max_pool[grid](x, out, side, side, BLOCK=block, num_warps=warps)

        yield f"{images}x{side}x{side} {SHORT[dtype]}", f"b{block} w{warps}", make
