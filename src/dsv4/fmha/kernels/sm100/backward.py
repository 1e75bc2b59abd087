"""Gradients of fmha on sm_100a: which kernels, and their launches. Deterministic, without atomics.

head dim    kernels                                              products of the size of the scores, workspace
64, 128     backward_rows, then backward_tiles twice             7, none
256, 512    backward_rows, then the chain (fmha/kernels/         5, 1 GiB for P and dS
            chain.py): backward_scores, backward_products
"""

from __future__ import annotations

from functools import partial
from typing import Any

from dsv4.fmha.backward import FmhaBackward
from dsv4.fmha.kernels.backward import FP16_P_SCALE, Packed, descriptor, prepare_at_once, supports
from dsv4.fmha.kernels.backward_arguments import Gradient, GradientScales, GradientSizes, GradientTensors
from dsv4.fmha.kernels.by_sequence import prepare_by_sequence
from dsv4.fmha.kernels.chain import Chain
from dsv4.fmha.kernels.sm100.backward_products import backward_products
from dsv4.fmha.kernels.sm100.backward_scores import backward_scores
from dsv4.fmha.kernels.sm100.backward_tiles import backward_tiles
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program, Slot

__all__ = ["prepare", "supports"]


def prepare(b: FmhaBackward, target: Target, program: Program) -> None:
    """Fill b.dq, b.dk, b.dv and b.dsink, those that are not None."""
    if b.forward.head_dim <= 128:
        prepare_at_once(b, program, prepare_tiles)
    else:
        prepare_by_sequence(b, target, program, partial(prepare_chain, target))


class BlackwellChain(Chain):
    scores, products = backward_scores, backward_products
    box_rows = 128
    tile_rows = 128
    score_options = dict(SLOTS=5, SCORE_REGS=208, LOAD_REGS=88)
    product_options = dict(SLOTS=3, PRODUCT_REGS=208, LOAD_REGS=88)


def prepare_chain(target: Target, program: Program, x: Packed) -> None:
    BlackwellChain(target, program, x).prepare()


def prepare_tiles(program: Program, x: Packed) -> None:
    of_rows, of_keys = [[descriptor(y, [1, 1, 128, 64]) for y in pair] for pair in ((x.q, x.dout), (x.k, x.v))]
    count, starts = 0, (x.lse2, x.lse2)  # or unread
    if x.sequences is not None:
        count, starts = x.sequences.count, x.sequences
    common: dict[str, Any] = dict(
        tensors=GradientTensors(x.lse2, x.delta, *starts),
        whole=GradientSizes(**x.sizes, sequences=count),
        scales=GradientScales(x.scale, FP16_P_SCALE, x.p.softmax_scale, x.ds_scale),
    )
    options = dict(D=x.width, SCALED=x.fp16, VARLEN=x.sequences is not None, SCORE_REGS=224, WARP_REGS=56, num_warps=4)

    def launch(rows: int, first: Slot, second: Slot, own: list, other: list, keys: bool) -> None:
        tiles = -(-rows // 128) if x.sequences is None else rows // 128 + count  # as many as may be
        arguments = common | dict(x0_desc=own[0], x1_desc=own[1], y0_desc=other[0], y1_desc=other[1])
        arguments |= dict(
            gradient0=Gradient(first, *first.stride()[:3]), gradient1=Gradient(second, *second.stride()[:3])
        )
        program.launch(backward_tiles, (tiles, x.batch * x.heads), arguments, KEYS=keys, **options)

    if x.dk is not None or x.dv is not None:
        # Both come from one launch.
        dk, dv = (program.workspace("unwanted", x.k.shape, x.k.dtype) if y is None else y for y in (x.dk, x.dv))
        launch(x.keys, dk, dv, of_keys, of_rows, True)
    if x.dq is not None:
        launch(x.rows, x.dq, x.dq, of_rows, of_keys, False)
