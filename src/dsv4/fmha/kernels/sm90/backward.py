"""Gradients of fmha on sm_90a.

head dim    kernels                                                          products of the size of the scores
64, 128     backward_rows; backward_keys: dK, dV and a sum of dQ; round_sum  5, dQ by atomics
            deterministic: backward_keys: dK and dV; backward_dq: dQ         7, the same bits in every run
256, 512    backward_rows; the chain (fmha/kernels/chain.py)                 5
            with backward_scores of this folder
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from dsv4.fmha.backward import FmhaBackward
from dsv4.fmha.kernels.backward import (
    FP16_P_SCALE,
    TILE,
    Packed,
    descriptor,
    is_addressable,
    keep_dq,
    made_like,
    prepare_at_once,
    row_tiles,
    rows_descriptor,
    rows_of_dq,
    supports,
)
from dsv4.fmha.kernels.backward_arguments import (
    Gradient,
    GradientScales,
    GradientSizes,
    GradientTensors,
    GroupedGradient,
    Parts,
)
from dsv4.fmha.kernels.by_sequence import prepare_by_sequence
from dsv4.fmha.kernels.chain import Chain
from dsv4.fmha.kernels.sm90.backward_dq import backward_dq
from dsv4.fmha.kernels.sm90.backward_keys import backward_keys
from dsv4.fmha.kernels.sm90.backward_scores import backward_scores
from dsv4.fmha.kernels.sm90.gradient_sums import round_sum
from dsv4.kernels.compat import TensorDescriptor, gl
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program

__all__ = ["prepare", "supports"]


def prepare(b: FmhaBackward, target: Target, program: Program) -> None:
    """Fill b.dq, b.dk, b.dv and b.dsink, those that are not None."""
    if b.forward.head_dim <= 128:
        prepare_at_once(b, program, partial(prepare_tiles, target), by_tma=True)
    else:
        prepare_by_sequence(b, target, program, partial(prepare_chain, target))


class HopperChain(Chain):
    kernel = backward_scores
    stored = [1, 64, 64]
    options = dict(SLOTS=6, SCORE_REGS=240, LOAD_REGS=24)


def prepare_chain(target: Target, program: Program, x: Packed) -> None:
    HopperChain(target, program, x).prepare()


def prepare_tiles(target: Target, program: Program, x: Packed) -> None:
    """Without scores in memory."""
    starts = (x.lse2, x.lse2, 0) if x.sequences is None else (*x.sequences, x.sequences.count)  # or unread
    common: dict[str, Any] = dict(
        tensors=GradientTensors(x.lse2, x.delta, *starts[:2]),
        whole=GradientSizes(**x.sizes, sequences=starts[2]),
        scales=GradientScales(x.scale, FP16_P_SCALE, x.p.softmax_scale, x.ds_scale),
        q_desc=rows_descriptor(x.q, 64),
        dout_desc=rows_descriptor(x.dout, 64),
    )
    constants = dict(D=x.width, SLOTS=2, SCALED=x.fp16, VARLEN=x.sequences is not None, num_warps=4)
    of_rows = (row_tiles(x.rows, x.sequences) * x.batch * x.heads,)
    add_dq = x.dq_sum is not None
    if x.dk is not None or x.dv is not None:
        _prepare_keys(target, program, x, common, constants)
        if add_dq:
            arguments = common | dict(parts=Parts(x.dq_sum, 1), out=GroupedGradient(x.dq, *x.dq.stride()[:4]))
            program.launch(round_sum, of_rows, arguments, **constants)
    if x.dq is not None and not add_dq:
        dq = rows_of_dq(program, x.dq, x.sequences)
        target = dq if is_addressable(dq) else made_like(program, dq.shape, dq.dtype, x.sequences)
        k, v = (descriptor(y, [1, 1, TILE, 64]) for y in (x.k, x.v))
        dq_desc = descriptor(target, [1, 1, 64, 64])
        arguments = common | dict(k_desc=k, v_desc=v, dq_desc=dq_desc, dq=Gradient(target, *target.stride()[:3]))
        registers, load = _registers(x, of_keys=False)
        program.launch(backward_dq, of_rows, arguments, DQ_REGS=registers, LOAD_REGS=load, **constants)
        if target is not dq:
            program.copy(dq, target)
        keep_dq(program, x.dq, dq)


def _prepare_keys(target: Target, program: Program, x: Packed, common: dict[str, Any], constants: dict) -> None:
    """dK and dV, and the sum of dQ if there is one."""
    add_dq = x.dq_sum is not None
    rows = 128 if add_dq and x.width == 64 else 64
    tiles = row_tiles(x.keys, x.sequences) * x.batch * x.heads
    sequences = 1 if x.sequences is None else max(x.sequences.count, 1)
    splits = split_rows(tiles, -(-x.rows // (sequences * rows)), target.num_sms)
    wanted = (x.dk, x.dv)
    made = [
        grad if grad is not None and is_addressable(grad) else made_like(program, like.shape, like.dtype, x.sequences)
        for grad, like in zip(wanted, (x.k, x.v))
        if splits == 1
    ]
    dk, dv = made or (x.k, x.v)  # these are not written
    parts = x.lse2  # unread
    if splits > 1:
        parts = program.workspace("parts of dk and dv", (2, splits * tiles * TILE * x.width), torch.float32)
    k, v, dk_box, dv_box = (descriptor(y, [1, 1, 64, 64]) for y in (x.k, x.v, dk, dv))
    dq_box = dk_box  # unread
    if x.dq_sum is not None:
        lines = x.dq_sum.view((x.dq_sum.numel() // 32, 32), (32, 1))
        dq_box = TensorDescriptor(lines, list(lines.shape), [32, 1], [128, 32], gl.NVMMASharedLayout(128, 32))
    arguments = common | dict(
        q_desc=rows_descriptor(x.q, rows), dout_desc=rows_descriptor(x.dout, rows), k_desc=k, v_desc=v,
        dq_desc=dq_box, dk_desc=dk_box, dv_desc=dv_box, dk=Gradient(dk, *dk.stride()[:3]),
        dv=Gradient(dv, *dv.stride()[:3]), parts=Parts(parts, splits),
    )  # fmt: skip
    registers, load = _registers(x, of_keys=True)
    program.launch(
        backward_keys, (tiles * splits,), arguments, ADD_DQ=add_dq, ROWS=rows, GRADIENT_REGS=registers,
        LOAD_REGS=load, **constants,
    )  # fmt: skip
    if splits > 1:
        tensors, whole, scales = common["tensors"], common["whole"], common["scales"]
        by_key = dict(
            tensors=tensors._replace(cu_q_ptr=tensors.cu_k_ptr),
            whole=whole._replace(rows=x.keys, tokens=x.keys, group=1),
            scales=scales._replace(gradient=1.0),
        )
        for n, grad in enumerate(wanted):
            if grad is not None:
                summed = by_key | dict(parts=Parts(parts[n], splits), out=GroupedGradient(grad, *grad.stride()[:3], 0))
                program.launch(round_sum, (tiles,), summed, **constants | dict(SCALED=False))
        return
    for grad, found in zip(wanted, made):
        if grad is not None and found is not grad:
            program.copy(grad, found)


def split_rows(tiles: int, steps: int, num_sms: int) -> int:
    """How many parts the rows of a key tile are cut into. `steps`: of an average sequence. The answer needs the fewest
    steps, if the beginning and the end of a CTA take as long as four. A part has at least eight."""
    if tiles >= 4 * num_sms:
        return 1
    most = max(1, min(steps // 8, 4 * num_sms // max(tiles, 1)))
    return min(range(1, most + 1), key=lambda n: -(-tiles * n // num_sms) * (-(-steps // n) + 4))


def _registers(x: Packed, of_keys: bool) -> tuple[int, int]:
    """The registers of the gradient roles and of load. load needs more for sequences; at head dim 128 dK and dV leave
    none."""
    return (240, 24) if x.sequences is None or of_keys and x.width == 128 else (232, 40)
