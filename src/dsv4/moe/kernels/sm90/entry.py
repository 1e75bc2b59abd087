"""moe on sm_90a: the products by the kernel in products.py or, for many rows of an expert, wide.py; the rest by the
shared ones."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.kernels.compat import TensorDescriptor, gl
from dsv4.moe import formats
from dsv4.moe.kernels.arguments import Signals, Sizes
from dsv4.moe.kernels.prepare import Product, prepare_moe, prepare_route, rows_per_expert, supports_moe, supports_route
from dsv4.moe.kernels.sm90.products import moe_products_sm90, scales_width
from dsv4.moe.kernels.sm90.sums import STEP
from dsv4.moe.kernels.sm90.wide import moe_wide_products_sm90
from dsv4.moe.problem import MoeProblem, RouteProblem
from dsv4.runtime import checks
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program, Slot

RECIPES = (("mxfp4", "fp8_128"),)  # weights, activations
SHARED_BYTES = 204 << 10  # for stages, and what is kept beside them; the rest is for exchanges between warps
MOST_STAGES = 8  # more are no faster
FEW_SLOTS, FEW_STAGES = 8, 4  # one token: a CTA has one tile or none, and more stages only take time to begin with


class Tiling(NamedTuple):
    w: int  # rows of activations to a product
    parts: int = 1  # products to a tile
    wide: bool = False  # by halves of a tile's rows of weights (wide.py)


# Rows of an expert that are expected, up to -> tiling
TILINGS = ((8.5, Tiling(8)), (16.5, Tiling(16)), (32.5, Tiling(32)), (float("inf"), Tiling(64)))


def supports(p: MoeProblem | RouteProblem) -> str | None:
    """None, or why these kernels cannot run the problem."""
    if isinstance(p, RouteProblem):
        return supports_route(p)
    if p.fused:
        checks.fail("fused", True, "False on sm_90a, where no kernel does the whole layer")
    if p.spread > formats.MAX_SPREAD:
        return f"exponents that spread by {p.spread} in a row of weights; the kernels accept {formats.MAX_SPREAD}"
    return supports_moe(p, "sm90", RECIPES)


def prepare(p: MoeProblem | RouteProblem, target: Target, program: Program) -> None:
    if isinstance(p, RouteProblem):
        prepare_route(p, program)
        return
    program.room = p.scratch
    expected = rows_per_expert(p)
    tiling = next(tiling for most, tiling in TILINGS if expected <= most)
    slots = p.tokens * p.topk
    room = SHARED_BYTES - kept_bytes(tiling)
    stages = min(room // stage_bytes(tiling), FEW_STAGES if slots <= FEW_SLOTS else MOST_STAGES)
    most_tiles = min(slots, p.experts + slots // (tiling.w * tiling.parts))

    found: list[Product] = []

    def multiply(product: Product) -> None:
        """Both in one launch."""
        found.append(product)
        if not product.first:
            tiles = most_tiles * sum(one.weights.blocks for one in found)
            program.launch(
                moe_wide_products_sm90 if tiling.wide else moe_products_sm90, (min(target.num_sms, tiles),),
                arguments(*found, tiling), W=tiling.w, PARTS=tiling.parts, STAGES=stages,
                EXPERTS=max(32, 1 << (p.experts - 1).bit_length()), num_warps=4, launch_pdl=True,
            )  # fmt: skip

    prepare_moe(p, program, multiply)


def stage_bytes(tiling: Tiling) -> int:
    rows, n = 128 if tiling.wide else 256, tiling.w * tiling.parts
    return rows * 64 + rows * 4 + n * 128 + 4 * scales_width(tiling.w, tiling.parts)


def kept_bytes(tiling: Tiling) -> int:
    return 128 * tiling.w * tiling.parts if tiling.wide else 0


def arguments(first: Product, second: Product, tiling: Tiling) -> dict[str, object]:
    one, two, signals = first.weights, second.weights, first.signals
    assert signals is not None
    return dict(
        **_operands("w13", "x", first, tiling),
        **_operands("w2", "h", second, tiling),
        rows=first.rows,
        sizes=Sizes(one.blocks, one.steps, two.blocks, two.steps),
        hidden=first.out,
        slots=second.out,
        signals=Signals(signals.seen_as(lambda x: x[-1:]), signals),
    )


def _operands(weights: str, activations: str, product: Product, tiling: Tiling) -> dict[str, object]:
    plain, swizzled = gl.NVMMASharedLayout(0, 32, rank=2), gl.NVMMASharedLayout(128, 8, rank=2)
    x, scales, width = product.x, product.x_scales, scales_width(tiling.w, tiling.parts)
    names = {f"{weights}_desc": product.tiles, f"{weights}_offsets_desc": product.scales}
    names[f"{weights}_factors_desc"] = product.weights.factor_ptr
    return {
        **{
            name: _halves(tiles, each, product.first) if tiling.wide else _words(tiles, each, plain)
            for (name, tiles), each in zip(names.items(), (16, 1, 1))
        },
        f"{activations}_desc": TensorDescriptor(x, list(x.shape), list(x.stride()), [tiling.w, STEP.value], swizzled),
        f"{activations}_scales_desc": TensorDescriptor(
            scales, list(scales.shape), list(scales.stride()), [1, width], plain
        ),
    }


def _words(tiles: Slot, each: int, layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """Tiles one after the other, so many words to a row of weights, as lines of 256 words."""
    words = tiles.seen_as(lambda x: x.view(torch.int32).view(-1, 256))
    return TensorDescriptor(words, list(words.shape), [256, 1], [each, 256], layout)


def _halves(tiles: Slot, each: int, first: bool) -> TensorDescriptor:
    """The same by halves of a tile: [tiles, eights of a half by twos, two eights, halves, words of 8 rows]. The eights
    by twos are the fragments of wgmma: in product 1 of gate and of up, a half being every second eight of both; in
    product 2 neighbours, a half being half of the rows."""
    words = tiles.seen_as(lambda x: x.view(torch.int32).view(-1, 256 * each))
    eight, shape = 8 * each, [words.shape[0], 8, 2, 2, 8 * each]
    strides = [32 * eight, 2 * eight, *((16 * eight, eight) if first else (eight, 16 * eight)), 1]
    return TensorDescriptor(words, shape, strides, [1, 8, 2, 1, eight], gl.NVMMASharedLayout(0, 32, rank=5))
