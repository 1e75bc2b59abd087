"""moe on sm_90a: the products by the kernel in products.py, the rest by the shared ones."""

from __future__ import annotations

import torch

from dsv4.kernels.compat import TensorDescriptor, gl
from dsv4.moe.kernels.prepare import Product, prepare_moe, rows_per_expert, supports
from dsv4.moe.kernels.sm90.products import STEP, moe_product_sm90, scales_width
from dsv4.moe.problem import MoeProblem
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program, Slot

__all__ = ["prepare", "supports"]

SHARED_BYTES = 200 << 10  # for stages; the rest is for exchanges between warps
# Expected rows of an expert up to -> (rows of activations to a product, products to a tile)
TILINGS = ((8.5, 8, 1), (16.5, 16, 1), (32.5, 32, 1), (64.5, 64, 1), (96.5, 32, 3), (float("inf"), 32, 4))


MORE: dict = {}


def prepare(p: MoeProblem, target: Target, program: Program, tiling: tuple[int, int] | None = None, **more) -> None:
    expected = rows_per_expert(p)
    w, parts = tiling or next((w, parts) for most, w, parts in TILINGS if expected <= most)

    def multiply(product: Product) -> None:
        stages = min(SHARED_BYTES // stage_bytes(w, parts), 12)
        experts = max(32, 1 << (p.experts - 1).bit_length())
        tiles = min(p.tokens * p.topk, p.experts + p.tokens * p.topk // (w * parts)) * product.weights.blocks
        program.launch(
            moe_product_sm90, (min(target.num_sms, tiles),), descriptors(product, w, parts), FIRST=product.first,
            W=w, PARTS=parts, STAGES=stages, EXPERTS=experts, num_warps=8, **(more or MORE),
        )  # fmt: skip

    prepare_moe(p, program, multiply)


def stage_bytes(w: int, parts: int) -> int:
    return 256 * 64 + 256 * 4 + w * parts * 128 + 4 * scales_width(w, parts) + 32


def descriptors(product: Product, w: int, parts: int) -> dict[str, object]:
    plain, swizzled = gl.NVMMASharedLayout(0, 32, rank=2), gl.NVMMASharedLayout(128, 8, rank=2)
    x, scales = product.x, product.x_scales
    return dict(
        values_desc=_words(product.tiles, 16, plain),
        offsets_desc=_words(product.scales, 1, plain),
        x_desc=TensorDescriptor(x, list(x.shape), list(x.stride()), [w, STEP.value], swizzled),
        x_scales_desc=TensorDescriptor(
            scales, list(scales.shape), list(scales.stride()), [1, scales_width(w, parts)], plain
        ),
        rows=product.rows,
        weights=product.weights,
        out=product.out,
    )


def _words(tiles: Slot, lines: int, layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """Tiles one after the other as lines of 256 words, so many of them to a tile."""
    words = tiles.seen_as(lambda x: x.view(torch.int32).view(-1, 256))
    return TensorDescriptor(words, list(words.shape), [256, 1], [lines, 256], layout)
