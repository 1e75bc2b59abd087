"""Gradients of fmha on sm_90a, without atomics: the same bits on every run.

head dim    kernels                                                          products of the size of the scores
64, 128     backward_rows; backward_keys: dK and dV; backward_dq: dQ         7
256, 512    backward_rows; the chain (fmha/kernels/chain.py)                 5
            with backward_scores of this folder
"""

from __future__ import annotations

from functools import partial
from typing import Any

from dsv4.fmha.backward import FmhaBackward
from dsv4.fmha.kernels.backward import (
    FP16_P_SCALE,
    TILE,
    Packed,
    descriptor,
    is_addressable,
    made_like,
    prepare_at_once,
    supports,
)
from dsv4.fmha.kernels.by_sequence import prepare_by_sequence
from dsv4.fmha.kernels.chain import Chain
from dsv4.fmha.kernels.sm90.backward_dq import backward_dq
from dsv4.fmha.kernels.sm90.backward_keys import backward_keys
from dsv4.fmha.kernels.sm90.backward_scores import backward_scores
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program

__all__ = ["prepare", "supports"]


def prepare(b: FmhaBackward, target: Target, program: Program) -> None:
    """Fill b.dq, b.dk, b.dv and b.dsink, those that are not None."""
    if b.forward.head_dim <= 128:
        prepare_at_once(b, program, prepare_tiles)
    else:
        prepare_by_sequence(b, target, program, partial(prepare_chain, target))


class HopperChain(Chain):
    kernel = backward_scores
    stored = [1, 64, 64]
    options = dict(SLOTS=6, SCORE_REGS=240, LOAD_REGS=24)


def prepare_chain(target: Target, program: Program, x: Packed) -> None:
    HopperChain(target, program, x).prepare()


def prepare_tiles(program: Program, x: Packed) -> None:
    """Without scores in memory."""
    wanted = (x.dq, x.dk, x.dv)
    dq, dk, dv = made = [
        grad if grad is not None and is_addressable(grad) else made_like(program, like, x.sequences)
        for grad, like in zip(wanted, (x.q, x.k, x.v))
    ]
    starts = (x.lse2, x.lse2, 0) if x.sequences is None else (*x.sequences, x.sequences.count)  # or unread
    common: dict[str, Any] = x.sizes | dict(
        lse2_ptr=x.lse2, delta_ptr=x.delta, ds_scale_ptr=x.ds_scale, q_desc=descriptor(x.q, [1, 1, 64, 64]),
        dout_desc=descriptor(x.dout, [1, 1, 64, 64]), **dict(zip(("cu_q_ptr", "cu_k_ptr", "sequences"), starts)),
        scale2=x.scale, scale=x.p.softmax_scale, p_scale=FP16_P_SCALE,
    )  # fmt: skip
    constants = dict(D=x.width, SLOTS=2, SCALED=x.fp16, VARLEN=x.sequences is not None, num_warps=4)
    if x.dk is not None or x.dv is not None:
        k, v, dk_box, dv_box = (descriptor(y, [1, 1, 64, 64]) for y in (x.k, x.v, dk, dv))
        arguments = common | dict(
            k_desc=k, v_desc=v, dk_desc=dk_box, dv_desc=dv_box, dk_ptr=dk, dv_ptr=dv, dk_head=dk.stride(1),
            dk_row=dk.stride(2), dv_head=dv.stride(1), dv_row=dv.stride(2),
        )  # fmt: skip
        roles, load = _registers(x, of_keys=True)
        grid = (_tiles(x, x.keys) * x.batch * x.heads,)
        program.launch(backward_keys, grid, arguments, GRADIENT_REGS=roles, LOAD_REGS=load, **constants)
    if x.dq is not None:
        k, v = (descriptor(y, [1, 1, TILE, 64]) for y in (x.k, x.v))
        arguments = common | dict(
            k_desc=k, v_desc=v, dq_desc=descriptor(dq, [1, 1, 64, 64]), dq_ptr=dq, dq_head=dq.stride(1),
            dq_row=dq.stride(2),
        )  # fmt: skip
        roles, load = _registers(x, of_keys=False)
        grid = (_tiles(x, x.rows) * x.batch * x.heads,)
        program.launch(backward_dq, grid, arguments, DQ_REGS=roles, LOAD_REGS=load, **constants)
    for grad, found in zip(wanted, made):
        if grad is not None and found is not grad:
            program.copy(grad, found)


def _tiles(x: Packed, rows: int) -> int:
    """Of a pair; for sequences as many as there may be."""
    return -(-rows // TILE) if x.sequences is None else rows // TILE + x.sequences.count


def _registers(x: Packed, of_keys: bool) -> tuple[int, int]:
    """Of the gradient roles and of load, which needs more for sequences; at head dim 128 dK and dV leave none."""
    return (240, 24) if x.sequences is None or of_keys and x.width == 128 else (232, 40)
