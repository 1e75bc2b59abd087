"""moe on sm_100a: the kernel in products.py computes the products and the shared kernels the rest, or the kernel in
mega.py computes everything."""

from __future__ import annotations

from typing import Any

import torch

from dsv4.kernels.compat import TensorDescriptor, gl
from dsv4.moe.kernels.prepare import Product, prepare_moe, prepare_route, rows_per_expert, supports_moe, supports_route
from dsv4.moe.kernels.sm100.prepare_mega import prepare_mega
from dsv4.moe.problem import MoeProblem, RouteProblem
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program, Slot

RECIPES = (("mxfp4", "fp8_128"), ("mxfp4", "fp8_32"), ("nvfp4", "nvfp4"))  # weights, activations
SHARED_BYTES = 208 << 10  # shared memory for stages; the rest is for exchanges between warps
MOST_STAGES = 6
# Most rows expected per expert -> rows of activations per tile
TILES = ((16.5, 16), (32.5, 32), (64.5, 64), (float("inf"), 128))


def supports(p: MoeProblem | RouteProblem) -> str | None:
    """Return None, or why these kernels cannot run the problem."""
    return supports_route(p) if isinstance(p, RouteProblem) else supports_moe(p, "sm100", RECIPES)


def prepare(p: MoeProblem | RouteProblem, target: Target, program: Program, ranks: Any = None) -> None:
    """Add the launches of a problem. ranks: distributed.experts.Ranks, or None."""
    if isinstance(p, RouteProblem):
        prepare_route(p, program)
        return
    # Their layouts need Triton 3.9; code that imports this module only for `supports` may have another version.
    from dsv4.moe.kernels.sm100.mega import moe_mega_sm100
    from dsv4.moe.kernels.sm100.products import moe_product_sm100

    program.room = p.scratch
    size = 1 if ranks is None else ranks.size
    expected = rows_per_expert(p, size)
    n = next(rows for most, rows in TILES if expected <= most)
    nvfp4 = p.format == "nvfp4"
    constants: dict[str, Any] = dict(
        N=n,
        STAGES=min(SHARED_BYTES // stage_bytes(n, nvfp4), MOST_STAGES),
        RECIPE=p.activations,
        EXPERTS=max(32, 1 << (p.experts - 1).bit_length()),
        num_warps=4,
    )
    slots = size * p.tokens * p.topk
    most_tiles = min(slots, p.experts + slots // n)

    def multiply(product: Product) -> None:
        arguments = operands(product, n, nvfp4) | dict(rows=product.rows, weights=product.weights, out=product.out)
        grid = (min(target.num_sms, most_tiles * product.weights.blocks),)
        program.launch(moe_product_sm100, grid, arguments, FIRST=product.first, **constants, launch_pdl=True)

    def whole(first: Product, second: Product, arguments: dict[str, object]) -> None:
        for product in (first, second):
            arguments |= operands(product, n, nvfp4, "w13" if product.first else "w2", "x" if product.first else "h")
        grid = (min(target.num_sms, most_tiles * max(first.weights.blocks, second.weights.blocks)),)
        program.launch(
            moe_mega_sm100, grid, arguments, TOPK=p.topk, SHARED=p.shared_w13 is not None, RANKS=size, **constants
        )

    if p.fused:
        prepare_mega(p, program, whole, n, ranks)
    else:
        prepare_moe(p, program, multiply, n)


def stage_bytes(n: int, nvfp4: bool) -> int:
    return 256 * 64 + 2048 + n * 64 + 1024 if nvfp4 else 256 * 128 + 1024 + n * 128 + 512


def operands(product: Product, n: int, nvfp4: bool, w_name: str = "w", x_name: str = "x") -> dict[str, object]:
    """Return descriptors by the names of the kernels' parameters."""
    # 128 FP4 values fill 64 bytes; with FP8 activations, 128 bytes with gaps.
    packed = gl.NVMMASharedLayout(64, 8, rank=2)
    padded = gl.NVMMASharedLayout(128, 8, rank=2, fp4_padded=True)
    swizzled = gl.NVMMASharedLayout(128, 8, rank=2)
    words = 2 if nvfp4 else 1
    lines = product.tiles.seen_as(lambda x: x.view(-1, 64))
    x = product.x
    x_layout = packed if nvfp4 else swizzled
    return {
        f"{w_name}_desc": TensorDescriptor(lines, list(lines.shape), [64, 1], [256, 64], packed if nvfp4 else padded),
        f"{w_name}_scales_desc": _atoms(product.scales, 2 * words),
        f"{x_name}_desc": TensorDescriptor(x, list(x.shape), list(x.stride()), [n, 128 // words], x_layout),
        f"{x_name}_scales_desc": _atoms(product.x_scales, words),
    }


def _atoms(scales: Slot, count: int) -> TensorDescriptor:
    """Return the descriptor of scales: a copy loads `count` atoms, each two lines of 256 bytes."""
    lines = scales.seen_as(lambda x: x.view(torch.uint8).view(-1, 256))
    return TensorDescriptor(lines, list(lines.shape), [256, 1], [2 * count, 256], gl.NVMMASharedLayout(0, 8, rank=2))
