"""Gradients of fmha on sm_90a.

head dim    kernels                                                          products of the size of the scores
64, 128     backward_rows; backward_keys: dK, dV and a sum of dQ; round_sum  5, dQ by atomics
            deterministic, or short causal sequences at head dim 128:
            backward_keys: dK and dV; backward_dq: dQ                        7, the same bits in every run
256, 512    backward_rows; the chain (fmha/kernels/chain.py):                5, the same bits in every run
            backward_scores, backward_products
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from dsv4.fmha.backward import FmhaBackward
from dsv4.fmha.kernels.backward import (
    FP16_P_SCALE,
    TILE,
    Packed,
    Rounding,
    descriptor,
    is_addressable,
    keep_dq,
    made_like,
    prepare_at_once,
    prepare_round_sum,
    row_tiles,
    rows_box,
    rows_of_dq,
    sums_descriptor,
    supports,
)
from dsv4.fmha.kernels.backward_arguments import GradientScales, GradientSizes, GradientTensors, KeyParts
from dsv4.fmha.kernels.by_sequence import prepare_by_sequence
from dsv4.fmha.kernels.chain import SLAB_BYTES, Chain, one_head_each
from dsv4.fmha.kernels.ragged import NOT_RAGGED, ragged_descriptor
from dsv4.fmha.kernels.sm90.adding import SHORT, find_adding, is_masked, loops, rows_of_step, split_rows, steps_of
from dsv4.fmha.kernels.sm90.backward_dq import backward_dq
from dsv4.fmha.kernels.sm90.backward_keys import backward_keys
from dsv4.fmha.kernels.sm90.backward_products import backward_products
from dsv4.fmha.kernels.sm90.backward_scores import backward_scores
from dsv4.fmha.kernels.sm90.key_tiles import key_order, list_sequences
from dsv4.fmha.problem import FmhaProblem
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program, Slot

__all__ = ["prepare", "supports"]

BLOCK = 64 * 64  # elements of a block of the sums (gradient_sums.py)
L2_BYTES = 48 << 20


def prepare(b: FmhaBackward, target: Target, program: Program) -> None:
    """Fill b.dq, b.dk, b.dv and b.dsink, those that are not None."""
    if b.forward.head_dim <= 128:
        prepare_at_once(b, program, partial(prepare_tiles, target), partial(find_adding, target.num_sms))
    else:
        prepare_by_sequence(b, target, program, partial(prepare_chain, target), one_head_each)


class HopperChain(Chain):
    scores, products = backward_scores, backward_products
    box_rows = 64
    tile_rows = 192
    score_options = dict(SLOTS=6, SCORE_REGS=240, LOAD_REGS=24, launch_pdl=True)
    product_options = dict(SLOTS=3, PRODUCT_REGS=240, LOAD_REGS=24, launch_pdl=True)

    def __init__(self, target: Target, program: Program, x: Packed):
        super().__init__(target, program, x)
        self.tile_rows = product_rows(x, target.num_sms, self.tile_rows)
        if self.tile_rows == 64:
            self.product_options = self.product_options | dict(SLOTS=4)


class ProductCost(NamedTuple):
    """Times of tiles of products, in us: a step of 64 rows, or keys, and the beginning and end of a tile."""

    step: float
    ends: float


CLEARLY = 0.9  # small tiles read more of the L2
MOST_ROUNDS = 6  # tiles of an SM; with more, ends hardly count: (9, 75:15, 431) is 3 % slower with small tiles
PRODUCT_COSTS = {64: ProductCost(0.36, 1.4), 192: ProductCost(0.9, 3.0)}  # costs by the rows, or keys, of a tile


def product_rows(x: Packed, num_sms: int, most: int) -> int:
    """Return the rows, or keys, of a tile of products: 64 instead of `most` if tiles are so few that many SMs would
    have none, or so short that they hardly do more than begin and end."""
    if 4 * x.rows * x.keys > SLAB_BYTES:  # tiles of 64 keep no sums
        return most
    (small, _), (large, rounds) = (_product_us(x, num_sms, size) for size in (64, most))
    return 64 if rounds <= MOST_ROUNDS and small < CLEARLY * large else most


def _product_us(x: Packed, num_sms: int, size: int) -> tuple[float, int]:
    """Return (the estimated time of the products: of the longest tile, or of as many average ones as an SM has; how
    many these are)."""
    sequences = 1 if x.sequences is None else max(x.sequences.count, 1)
    rows, keys = -(-x.rows // sequences), -(-x.keys // sequences)
    share = x.heads // x.k.shape[1]
    of_keys, of_rows = 2 * -(-keys // size), -(-rows // size) * share
    rows *= share
    steps = [max(1.0, n / 64 * _share_seen(x.p, size / most)) for n, most in ((rows, keys), (keys, rows / share))]
    cost = PRODUCT_COSTS[size]
    average = (of_keys * steps[0] + of_rows * steps[1]) / (of_keys + of_rows) * cost.step + cost.ends
    tiles = (of_keys + of_rows) * x.batch * x.k.shape[1] * sequences * (x.width // 256)
    rounds = -(-tiles // num_sms)
    return max(max(rows, keys) / 64 * cost.step + cost.ends, rounds * average), rounds


def _share_seen(p: FmhaProblem, tile: float) -> float:
    """Return the share of rows, or keys, that a tile multiplies, if it has that share of the others."""
    return min(1.0, (1 + tile) / 2) if is_masked(p) else 1.0


def prepare_chain(target: Target, program: Program, x: Packed) -> None:
    HopperChain(target, program, x).prepare()


def prepare_tiles(target: Target, program: Program, x: Packed) -> None:
    """Add the kernels that keep scores out of memory."""
    starts = (x.lse2, x.lse2, 0) if x.sequences is None else (*x.sequences[:2], x.sequences.count)  # else: not read
    common: dict[str, Any] = dict(
        tensors=GradientTensors(x.lse2, x.delta, *starts[:2]),
        whole=GradientSizes(**x.sizes, sequences=starts[2]),
        scales=GradientScales(x.scale, FP16_P_SCALE, x.p.softmax_scale, x.ds_scale),
    )
    constants = dict(D=x.width, SLOTS=2, SCALED=x.fp16, VARLEN=x.sequences is not None, BY_ROWS=False, num_warps=4)
    of_rows = (row_tiles(x.rows, x.sequences) * x.batch * x.heads,)
    if x.dk is not None or x.dv is not None:
        summed = _prepare_keys(target, program, x, common, constants)
        if x.sums is not None:
            summed["dq"] = Rounding(
                x.dq, x.sums, of_rows[0], scale=x.p.softmax_scale, cu=x.sequences and x.sequences.cu_q
            )
        if summed:
            prepare_round_sum(program, x, summed, **constants, launch_pdl=True)
    if x.dq is not None and x.sums is None:
        dq = rows_of_dq(program, x.dq, x.sequences)
        target = dq if is_addressable(dq) else made_like(program, dq.shape, dq.dtype, x.sequences)
        arguments = common | operands(x, dict(q=64, dout=64, k=TILE, v=TILE, dq=64), dq=target)
        registers, load = _registers(x, of_keys=False)
        program.launch(backward_dq, of_rows, arguments, DQ_REGS=registers, LOAD_REGS=load, **constants)
        if target is not dq:
            program.copy(dq, target)
        keep_dq(program, x.dq, dq)


def _prepare_keys(
    target: Target, program: Program, x: Packed, common: dict[str, Any], constants: dict
) -> dict[str, Rounding]:
    """Add the kernel for dK and dV, and for the sum of dQ if there is one; return those of dK and dV that are sums."""
    rows = rows_of_step(x.width, x.sums is not None)
    tiles = row_tiles(x.keys, x.sequences) * x.batch * x.k.shape[1]
    packs = x.heads // x.k.shape[1]
    splits = (
        split_rows(tiles, steps_of(x.rows, rows, x.sequences), target.num_sms) if x.adding is None else x.adding.splits
    )
    shared = splits * packs > 1
    wanted = (x.dk, x.dv)
    made = [
        grad if grad is not None and is_addressable(grad) else made_like(program, like.shape, like.dtype, x.sequences)
        for grad, like in zip(wanted, (x.k, x.v))
        if not shared
    ]
    dk, dv = made or (x.k, x.v)  # the kernel writes neither of these
    parts = x.lse2  # unread
    boxes = operands(x, dict(q=rows, dout=rows, k=64, v=64, dk=64, dv=64), dk=dk, dv=dv)
    sums_box, dk_block, dv_block, count = boxes["dk_desc"], 0, 0, splits  # unread
    if x.sums is not None:
        sums_box = sums_descriptor(x.sums)
        size, count = tiles * TILE * x.width, 1
        dk_block, dv_block = ((x.sums.numel() - n * size) // BLOCK for n in (2, 1))
        if shared:
            parts = x.sums[x.sums.numel() - 2 * size :].view((2, size), (size, 1))
    elif shared:
        parts = program.workspace("parts of dk and dv", (2, splits * tiles * TILE * x.width), torch.float32)
    pairs = x.batch * x.heads
    tiles_of_pair, at_once = row_tiles(x.keys, x.sequences), min(pairs_at_once(x), pairs)
    unread = x.ticket  # a stand-in for the list
    order = key_order(unread, pairs, tiles_of_pair, splits, packs, x.heads, at_once)
    short = x.sums is None and x.p.max_seqlen_q <= SHORT
    loop = loops(x.width, x.sequences is not None, order.count, target.num_sms, short)
    listed = loop and lengths_differ(x)
    if listed:
        of_sequences = list_sequences(program, *x.sequences[:2], x.p.max_seqlen_q, x.keys, tiles_of_pair)
        order = order._replace(list_ptr=of_sequences)
    shares = KeyParts(dk_block, dv_block, parts)
    arguments = common | boxes | dict(sums_desc=sums_box, order=order, shares=shares, ticket_ptr=x.ticket)
    registers, load = _registers(x, of_keys=True)
    program.launch(
        backward_keys,
        (min(order.count, target.num_sms) if loop else order.count,),
        arguments,
        ADD_DQ=x.sums is not None,
        LOOP=loop,
        LISTED=listed,
        ROWS=rows,
        GRADIENT_REGS=registers,
        LOAD_REGS=load,
        launch_pdl=True,
        **constants,
    )
    if shared:
        cu = x.sequences and x.sequences.cu_k
        return {
            name: Rounding(grad.unflatten(3, (1, -1)), parts[n], tiles, count, cu=cu)
            for n, (name, grad) in enumerate(zip(("dk", "dv"), wanted))
            if grad is not None
        }
    for grad, found in zip(wanted, made):
        if grad is not None and found is not grad:
            program.copy(grad, found)
    return {}


def operands(x: Packed, boxes: dict[str, int], **gradients: Slot) -> dict[str, Any]:
    """Return the descriptors of tensors and gradients, and `ragged`. boxes: their rows."""
    ragged = NOT_RAGGED
    found: dict[str, Any] = {}
    for name, rows in boxes.items():
        y = gradients[name] if name in gradients else getattr(x, name)
        box = rows_box(y, rows)
        if x.sequences is None:
            found[f"{name}_desc"] = descriptor(y, box)
        else:
            found[f"{name}_desc"], place = ragged_descriptor(y, box)
            ragged = ragged._replace(**{name: place})
    return found | dict(ragged=ragged)


def pairs_at_once(x: Packed) -> int:
    """Return the pairs of sequence and pack that are scheduled together. Under a mask key tiles have different numbers
    of rows, and the longest of many pairs are first: as many pairs as have Q, dO and the sum of dQ in the L2 together.
    Otherwise two: (3, 20, 5000) at head dim 128 takes 3270 us with eight, 3106 with two."""
    if not is_masked(x.p):
        return 2
    pairs = x.batch * x.heads
    return -(-pairs // max(1, pairs * x.rows * x.width * 8 // L2_BYTES))


def lengths_differ(x: Packed) -> bool:
    """Return whether the order of the sequences of a varlen batch matters: under a mask, where key tiles have different
    numbers of rows, and if the longest sequence is clearly longer than the average one. (20, 12:3, 591 to 3698) at head
    dim 128 takes 1914 us in the given order, 1811 by length; 300 sequences of 10 to 300 tokens take 616 and 629."""
    if x.sequences is None or not is_masked(x.p):
        return False
    average = x.keys / max(x.sequences.count, 1)
    return average >= 2 * TILE and x.sequences.longest_k >= 1.25 * average


def _registers(x: Packed, of_keys: bool) -> tuple[int, int]:
    """Return the registers of the gradient roles and of load. load needs more for sequences; at head dim 128 dK and dV
    leave none."""
    return (240, 24) if x.sequences is None or of_keys and x.width == 128 else (232, 40)
