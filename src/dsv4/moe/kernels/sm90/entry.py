"""moe on sm_90a: the kernel in products.py computes the products, the shared kernels the rest."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.kernels.compat import TensorDescriptor, gl
from dsv4.moe import formats
from dsv4.moe.kernels.arguments import Signals, Sizes
from dsv4.moe.kernels.prepare import Product, prepare_moe, prepare_route, rows_per_expert, supports_moe, supports_route
from dsv4.moe.kernels.sm90.products import moe_products_sm90, scales_width
from dsv4.moe.kernels.sm90.sums import STEP
from dsv4.moe.kernels.sm90.wide import WIDTH, moe_products_wide_sm90
from dsv4.moe.problem import MoeProblem, RouteProblem
from dsv4.runtime import checks
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program, Slot

RECIPES = (("mxfp4", "fp8_128"),)  # weights, activations
SHARED_BYTES = 204 << 10  # shared memory for stages; the rest is for exchanges between warps
WIDE_BYTES = 64 << 10  # bytes of decoded weights
MOST_STAGES = 8  # more are not faster
NARROW_ROWS = 8  # rows of activations per tile, up to which there are four compute roles


class Tiling(NamedTuple):
    """Rows of activations per tile: w, and the rest in a separate product, which tiles of up to w rows leave out if
    `middle`. Another loop makes the others slower."""

    w: int
    rest: int = 0
    middle: bool = False

    @property
    def height(self) -> int:
        return self.w + self.rest


# Most rows expected per expert -> tiling. Real experts have more and fewer rows, and one row over a tile costs
# another tile, so tiles of 16 and 32 rows are for fewer; those of 8 are faster only for a few tokens. Tiles of 96 pay
# from few rows on, if those of up to 64 cost less. Tiles of 128 have another kernel (wide.py), which is faster where
# it saves tiles, and for many rows.
TILINGS = (
    (1.5, Tiling(8)), (13.0, Tiling(16)), (22.5, Tiling(32)), (33.0, Tiling(64)), (78.5, Tiling(64, 32, True)),
    (92.0, Tiling(64, 32)), (131.0, Tiling(128)), (187.5, Tiling(64, 32, True)), (float("inf"), Tiling(128)),
)  # fmt: skip


def supports(p: MoeProblem | RouteProblem) -> str | None:
    """Return None, or why these kernels cannot run the problem."""
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
    chosen = next(i for i, (most, _) in enumerate(TILINGS) if expected <= most)
    tiling = TILINGS[chosen][1]
    w, rest = tiling.w, tiling.rest
    slots = p.tokens * p.topk
    wide = w == WIDTH.value
    kernel = moe_products_wide_sm90 if wide else moe_products_sm90
    shape = dict(COMPUTE_REGS=240, LOAD_REGS=24) if wide else dict(W=w, REST=rest, MIDDLE=tiling.middle, **roles(w))
    stages = min((SHARED_BYTES - WIDE_BYTES * wide) // stage_bytes(w, rest), MOST_STAGES)
    # A plan also serves fewer tokens, so it has room for what their tilings would need.
    heights = {tiling.height for _, tiling in TILINGS[: chosen + 1]}
    most_tiles = {height: min(slots, p.experts + slots // height) for height in heights}
    hidden = max(n * height for height, n in most_tiles.items())
    line = max(n * scales_width(height) for height, n in most_tiles.items())

    found: list[Product] = []

    def multiply(product: Product) -> None:
        """Launch both products at once."""
        found.append(product)
        if not product.first:
            tiles = most_tiles[tiling.height] * sum(one.weights.blocks for one in found)
            program.launch(
                kernel,
                (min(target.num_sms, tiles),),
                arguments(*found, w, rest),
                STAGES=stages,
                EXPERTS=max(32, 1 << (p.experts - 1).bit_length()),
                **shape,
                num_warps=4,
                launch_pdl=True,
            )

    prepare_moe(p, program, multiply, hidden=(hidden, line))


def roles(w: int) -> dict[str, int]:
    """Return the number of compute roles, and the registers of a compute thread and of a load thread."""
    few = w <= NARROW_ROWS
    return dict(ROLES=4 if few else 2, COMPUTE_REGS=112 if few else 232, LOAD_REGS=32 if few else 40)


def stage_bytes(w: int, rest: int) -> int:
    return 256 * 64 + 256 * 4 + (w + rest) * 128 + 4 * scales_width(w + rest)


def arguments(first: Product, second: Product, w: int, rest: int) -> dict[str, object]:
    one, two, signals = first.weights, second.weights, first.signals
    assert signals is not None
    return dict(
        **_operands("w13", "x", first, w, rest),
        **_operands("w2", "h", second, w, rest),
        rows=first.rows,
        sizes=Sizes(one.blocks, one.steps, two.blocks, two.steps),
        hidden=first.out,
        slots=second.out,
        signals=Signals(signals.seen_as(lambda x: x[-1:]), signals),
    )


def _operands(weights: str, activations: str, product: Product, w: int, rest: int) -> dict[str, object]:
    plain, swizzled = gl.NVMMASharedLayout(0, 32, rank=2), gl.NVMMASharedLayout(128, 8, rank=2)
    x, scales, width = product.x, product.x_scales, scales_width(w + rest)
    return {
        f"{weights}_desc": _words(product.tiles, 16, plain),
        f"{weights}_offsets_desc": _words(product.scales, 1, plain),
        f"{weights}_factors_desc": _words(product.weights.factor_ptr, 1, plain),
        f"{activations}_desc": TensorDescriptor(
            x, list(x.shape), list(x.stride()), [rest or min(w, 64), STEP.value], swizzled
        ),
        f"{activations}_scales_desc": TensorDescriptor(
            scales, list(scales.shape), list(scales.stride()), [1, width], plain
        ),
    }


def _words(tiles: Slot, lines: int, layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """View consecutive tiles as lines of 256 words; `lines` of them are a tile."""
    words = tiles.seen_as(lambda x: x.view(torch.int32).view(-1, 256))
    return TensorDescriptor(words, list(words.shape), [256, 1], [lines, 256], layout)
