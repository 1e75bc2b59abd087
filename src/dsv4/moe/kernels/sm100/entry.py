"""moe on sm_100a: the products by the kernel in products.py, the rest by the shared ones."""

from __future__ import annotations

import torch

from dsv4.kernels.compat import TensorDescriptor, gl
from dsv4.moe.kernels.prepare import Product, prepare_moe, prepare_route, rows_per_expert, supports_moe, supports_route
from dsv4.moe.problem import MoeProblem, RouteProblem
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program, Slot

RECIPES = (("mxfp4", "fp8_128"), ("mxfp4", "fp8_32"), ("nvfp4", "nvfp4"))  # weights, activations
SHARED_BYTES = 208 << 10  # for stages; the rest is for exchanges between warps
MOST_STAGES = 6
# Rows of an expert that are expected, up to -> rows of activations to a tile
TILES = ((16.5, 16), (32.5, 32), (64.5, 64), (float("inf"), 128))


def supports(p: MoeProblem | RouteProblem) -> str | None:
    """None, or why these kernels cannot run the problem."""
    return supports_route(p) if isinstance(p, RouteProblem) else supports_moe(p, "sm100", RECIPES)


def prepare(p: MoeProblem | RouteProblem, target: Target, program: Program) -> None:
    if isinstance(p, RouteProblem):
        prepare_route(p, program)
        return
    # Its layouts need Triton 3.9; what imports this module to ask `supports` may have another.
    from dsv4.moe.kernels.sm100.products import moe_product_sm100

    expected = rows_per_expert(p)
    n = next(rows for most, rows in TILES if expected <= most)
    nvfp4 = p.format == "nvfp4"
    stages = min(SHARED_BYTES // stage_bytes(n, nvfp4), MOST_STAGES)
    slots = p.tokens * p.topk
    most_tiles = min(slots, p.experts + slots // n)

    def multiply(product: Product) -> None:
        program.launch(
            moe_product_sm100, (min(target.num_sms, most_tiles * product.weights.blocks),),
            descriptors(product, n, nvfp4), FIRST=product.first, RECIPE=p.activations, N=n, STAGES=stages,
            EXPERTS=max(32, 1 << (p.experts - 1).bit_length()), num_warps=4, launch_pdl=True,
        )  # fmt: skip

    prepare_moe(p, program, multiply, n)


def stage_bytes(n: int, nvfp4: bool) -> int:
    return 256 * 64 + 2048 + n * 64 + 1024 if nvfp4 else 256 * 128 + 1024 + n * 128 + 512


def descriptors(product: Product, n: int, nvfp4: bool) -> dict[str, object]:
    # 128 FP4 values have 64 bytes, beside FP8 values 128 with gaps.
    packed = gl.NVMMASharedLayout(64, 8, rank=2)
    padded = gl.NVMMASharedLayout(128, 8, rank=2, fp4_padded=True)
    swizzled = gl.NVMMASharedLayout(128, 8, rank=2)
    words = 2 if nvfp4 else 1
    lines = product.tiles.seen_as(lambda x: x.view(-1, 64))
    x = product.x
    return dict(
        w_desc=TensorDescriptor(lines, list(lines.shape), [64, 1], [256, 64], packed if nvfp4 else padded),
        w_scales_desc=_atoms(product.scales, 2 * words),
        x_desc=TensorDescriptor(x, list(x.shape), list(x.stride()), [n, 128 // words], packed if nvfp4 else swizzled),
        x_scales_desc=_atoms(product.x_scales, words),
        rows=product.rows,
        weights=product.weights,
        out=product.out,
    )


def _atoms(scales: Slot, count: int) -> TensorDescriptor:
    """So many of them to a copy; two lines of 256 bytes each."""
    lines = scales.seen_as(lambda x: x.view(torch.uint8).view(-1, 256))
    return TensorDescriptor(lines, list(lines.shape), [256, 1], [2 * count, 256], gl.NVMMASharedLayout(0, 8, rank=2))
