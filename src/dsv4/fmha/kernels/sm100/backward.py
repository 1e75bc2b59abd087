"""Gradients of fmha on sm_100a.

head dim    kernels                                                          products of the size of the scores
64, 128     backward_rows; backward_keys: dK, dV and a sum of dQ; round_sum  5, dQ by atomics
            deterministic: backward_tiles twice: dK and dV, then dQ          7, the same bits in every run
256, 512    backward_rows; the chain (fmha/kernels/chain.py):                5, the same bits in every run
            backward_scores, backward_products
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from dsv4.fmha.backward import FmhaBackward
from dsv4.fmha.kernels.backward import (
    FP16_P_SCALE,
    TILE,
    Adding,
    Packed,
    Rounding,
    Sequences,
    descriptor,
    keep_dq,
    prepare_at_once,
    prepare_round_sum,
    row_tiles,
    rows_box,
    rows_of_dq,
    sums_descriptor,
    supports,
)
from dsv4.fmha.kernels.backward_arguments import Gradient, GradientScales, GradientSizes, GradientTensors
from dsv4.fmha.kernels.by_sequence import prepare_by_sequence
from dsv4.fmha.kernels.chain import Chain
from dsv4.fmha.kernels.ragged import Ragged, ragged_descriptor
from dsv4.fmha.kernels.sm100.backward_keys import backward_keys
from dsv4.fmha.kernels.sm100.backward_products import backward_products
from dsv4.fmha.kernels.sm100.backward_scores import backward_scores
from dsv4.fmha.kernels.sm100.backward_tiles import backward_tiles
from dsv4.fmha.problem import FmhaProblem
from dsv4.kernels.compat import TensorDescriptor
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program, Slot

__all__ = ["prepare", "supports"]


def prepare(b: FmhaBackward, target: Target, program: Program) -> None:
    """Fill b.dq, b.dk, b.dv and b.dsink, those that are not None."""
    if b.forward.head_dim <= 128:
        prepare_at_once(b, program, prepare_tiles, find_adding)
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


def find_adding(p: FmhaProblem, keys: int, sequences: Sequences | None) -> Adding:
    """Return that only dQ is summed in memory: a CTA processes all rows that see its keys."""
    return Adding(p.group, 1)


class RaggedTiles(NamedTuple):
    """Ragged weights (ragged.py) of what a CTA owns of varlen tensors, K and V or Q and dO, and of the others."""

    x0: Ragged
    x1: Ragged
    y0: Ragged
    y1: Ragged


def operands(x: Packed) -> tuple[list[TensorDescriptor], RaggedTiles]:
    """Return the descriptors of q, dout, k and v, and the ragged weights for a CTA that owns keys."""
    boxes = [(y, rows_box(y, TILE)) for y in (x.q, x.dout, x.k, x.v)]
    if x.sequences is None:
        return [descriptor(*box) for box in boxes], RaggedTiles(*[Ragged(0, 0)] * 4)
    found = [ragged_descriptor(*box) for box in boxes]
    q, dout, k, v = (ragged for _, ragged in found)
    return [desc for desc, _ in found], RaggedTiles(k, v, q, dout)


def prepare_tiles(program: Program, x: Packed) -> None:
    """Add the kernels that keep scores out of memory."""
    (q, dout, k, v), ragged = operands(x)
    starts = (x.lse2, x.lse2, 0) if x.sequences is None else (*x.sequences[:2], x.sequences.count)  # else: not read
    common: dict[str, Any] = dict(
        tensors=GradientTensors(x.lse2, x.delta, *starts[:2]),
        whole=GradientSizes(**x.sizes, sequences=starts[2]),
        scales=GradientScales(x.scale, FP16_P_SCALE, x.p.softmax_scale, x.ds_scale),
    )
    constants = dict(D=x.width, SCALED=x.fp16, VARLEN=x.sequences is not None, num_warps=4)
    of_keys, of_rows = ((row_tiles(n, x.sequences), x.batch * x.heads) for n in (x.keys, x.rows))
    dk, dv = x.dk, x.dv
    if dk is not None or dv is not None:
        # One launch computes both.
        dk, dv = (program.workspace("unwanted", x.k.shape, x.k.dtype) if y is None else y for y in (dk, dv))
    if x.sums is not None:
        arguments = common | dict(
            q_desc=q, k_desc=k, dout_desc=dout, v_desc=v, ragged=ragged, sums_desc=sums_descriptor(x.sums),
            dk=Gradient(dk, *dk.stride()[:3]), dv=Gradient(dv, *dv.stride()[:3]),
        )  # fmt: skip
        score, add = (160, 144) if x.width == 128 else (176, 104)
        registers = dict(SCORE_REGS=score, ADD_REGS=add, WARP_REGS=40)
        program.launch(backward_keys, of_keys, arguments, **registers, **constants)
        cu = x.sequences and x.sequences.cu_q
        summed = Rounding(x.dq, x.sums, of_rows[0] * of_rows[1], scale=x.p.softmax_scale, cu=cu)
        prepare_round_sum(program, x, dict(dq=summed), BY_ROWS=True, **constants)
        return

    def launch(grid: tuple[int, int], first: Slot, second: Slot, own: tuple, other: tuple, keys: bool) -> None:
        arguments = common | dict(x0_desc=own[0], x1_desc=own[1], y0_desc=other[0], y1_desc=other[1])
        arguments["ragged"] = ragged if keys else RaggedTiles(*ragged[2:], *ragged[:2])
        arguments |= dict(
            gradient0=Gradient(first, *first.stride()[:3]), gradient1=Gradient(second, *second.stride()[:3])
        )
        program.launch(backward_tiles, grid, arguments, KEYS=keys, SCORE_REGS=224, WARP_REGS=56, **constants)

    if dk is not None:
        launch(of_keys, dk, dv, (k, v), (q, dout), True)
    if x.dq is not None:
        dq = rows_of_dq(program, x.dq, x.sequences)
        launch(of_rows, dq, dq, (q, dout), (k, v), False)
        keep_dq(program, x.dq, dq)
