"""FMHA forward on sm_90a: the kernel and the tile sizes of a problem; kernels/prepare.py does the rest.

=========  ==========================================  ===================================
head dim   problems                                    kernel
=========  ==========================================  ===================================
64 - 256   all but the next                            forward.py
64 - 256   dense, varlen: about a row tile for an SM   forward_persistent.py
64 - 256   e4m3, up to 16 rows for a KV head, by TMA   decode.py
512        all                                         forward_d512.py, forward_d512_kv.py
=========  ==========================================  ===================================
"""

from dataclasses import replace
from typing import NamedTuple

from dsv4.fmha.kernels.causal_order import order_of
from dsv4.fmha.kernels.prepare import (
    MAX_GRID,
    Tiling,
    batch_reason,
    converted,
    converts_first,
    is_partial,
    keep_out,
    prepare_split,
    splits_keys,
    widened,
)
from dsv4.fmha.kernels.sm90.decode import fmha_decode
from dsv4.fmha.kernels.sm90.forward import fmha_forward
from dsv4.fmha.kernels.sm90.forward_d512 import fmha_forward_d512
from dsv4.fmha.kernels.sm90.forward_persistent import fmha_forward_persistent
from dsv4.fmha.kernels.sm90.varlen_order import prepare_order
from dsv4.fmha.problem import FmhaProblem
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program

DECODE_ROWS = 16  # most rows of decode.py
THREE_ROLES = 1.31  # time of a step of 192 rows with a causal mask at head dim 64, in steps of 128 rows
THREE_WITH_MASKS = 1.4  # the same if the loop tests for masks: 1.34 to 1.37 on five shapes, 1.5 for 900 tokens
FEW_KEYS = 128  # most keys of row tiles with 64 keys at a time at head dim 64
L2_BYTES = 24 << 20  # bytes of keys that CTAs may read at one time
FEW = 0.45  # row tiles per SM, from which on the looping kernel may pay


class Cost(NamedTuple):
    """Times of a kernel, in us: a launch, a row tile per SM, a step of 128 keys of it, and the addition for a varlen
    batch: an empty CTA per SM, or the list of row tiles. Fitted to 51 random problems, which lose 0.2 % by it."""

    launch: float
    tile: float
    step: float
    varlen: float


SHORT = {64: Cost(7.6, 1.53, 0.61, 0.5), 128: Cost(10.1, 0.86, 1.16, 0.25)}  # row tiles of 64
LOOPING = {64: Cost(8.9, 2.5, 1.11, 8.0), 128: Cost(13.2, 1.9, 1.62, 2.5)}  # row tiles of 128, or taken for such


def tiling(p: FmhaProblem, target: Target) -> Tiling:
    """Choose the tiling. Deterministic: nothing may depend on the batch, so CTAs do not loop; varlen has one tiling."""
    rows = p.max_seqlen_q * p.group  # rows of the longest sequence
    if p.head_dim == 512:
        # The registers that the load warp leaves go to left, which holds more if v is a separate tensor.
        producer = 40 if p.same_kv else 24 if p.kind == "dense" else 32
        if p.e4m3:
            options = dict(RIGHT_REGS=208, PRODUCER_REGS=88, LOAD_WARPS=4)
            return Tiling(64, 128, 64, options, fp16_partials=True)
        return Tiling(64, 128, 64, dict(RIGHT_REGS=232, PRODUCER_REGS=producer), fp16_partials=True)
    if swaps(p):
        # Two CTAs share an SM; with three, of 80 registers, (64, 64:8, 8192) takes 344 instead of 258 us.
        keys, stages = {64: (128, 6), 128: (128, 3), 256: (64, 2)}[p.head_dim]
        options = dict(D=p.head_dim, BN=keys, STAGES=stages, ROWS=DECODE_ROWS, PRODUCER_REGS=40, maxnreg=128)
        return Tiling(DECODE_ROWS, keys, keys, options, codes_by_tma=True)
    tiles = _row_tiles(p, 128)
    # CTAs that loop pay from one tile per SM on: (2, 16, 2048) causal at head dim 128 takes 71 instead of 89 us. Not at
    # head dim 64 without a mask: (4, 16, 1024) takes 57 instead of 53 us; decode was not measured with fewer than four.
    # A varlen batch of 4 x 377 to 2952 tokens at head dim 256, 159 tiles, takes 71 instead of 75 us.
    enough = 4 if rows <= 64 or p.head_dim == 64 and (p.right < 0 or p.kind == "varlen") else 1
    may_loop = p.kind != "paged" and not p.e4m3 and not p.deterministic and not is_partial(p)
    short = may_loop and is_short(p, target)
    if may_loop and not short and (tiles >= enough * target.num_sms or _loops_with_few(p, target, rows, tiles)):
        return _looping(p, target)
    few = rows <= 64 and not (p.deterministic and p.kind == "varlen")
    # 45 prompts of 176 tokens in pages take 39 instead of 70 us, 4 of 1233 tokens 61 instead of 68, one of 4361 435
    # instead of 395. The host does not know how many keys precede a prompt.
    prompt = p.kind == "paged" and p.head_dim == 128 and p.max_seqlen_q <= 512 and not (p.e4m3 or p.deterministic)
    if few or short or prompt or p.head_dim == 64:
        # The only attend warpgroup gets 2 * maxnreg - PRODUCER_REGS registers; with maxnreg 128 two CTAs share an SM.
        keys, stages, producer, maxnreg = {64: (128, 3, 40, 128), 128: (64, 3, 40, 128), 256: (64, 2, 96, 168)}[
            p.head_dim
        ]
        if p.head_dim == 64 and p.max_seqlen_k <= FEW_KEYS and p.kind != "paged" and not (p.e4m3 or p.deterministic):
            keys, stages, maxnreg = 64, 2, 80  # three CTAs share an SM: 136 x 30 to 51 tokens take 19 instead of 29 us
        if p.e4m3:
            return _rows_tiling(p.head_dim, keys, stages, 1, 0, 96, maxnreg=maxnreg, LOAD_WARPS=4)
        return _rows_tiling(p.head_dim, keys, stages, 1, 0, producer, maxnreg=maxnreg)
    keys = 128 if p.head_dim == 128 else 64
    if p.e4m3:
        return _rows_tiling(p.head_dim, keys, 2, 2, 208, 88, LOAD_WARPS=4)
    return _rows_tiling(p.head_dim, keys, 2, 2, 232, 40)


def is_short(p: FmhaProblem, target: Target) -> bool:
    """Return whether row tiles of 64, with two CTAs per SM, need less time than the looping kernel: they begin and end
    faster, and need more time per step."""
    varlen, rows = p.kind == "varlen", p.max_seqlen_q * p.group
    if not p.q.shape[-1] == p.v.shape[-1] == p.head_dim:  # other widths would need a copy
        return False
    small, large = (_row_tiles(p, size) / target.num_sms for size in (64, 128))
    keys = min(p.k.shape[0] / max(p.batch, 1), p.max_seqlen_k) if varlen else p.max_seqlen_k
    if p.left >= 0:
        keys = min(keys, p.left + max(p.right, 0) + 128 / p.group)
    elif p.right >= 0:
        keys = keys - min(p.max_seqlen_q, keys) / 2
    steps = max(keys / 128 + 0.5, 1)
    if p.head_dim == 256:
        # One CTA per SM: 14 x 98 to 232 tokens, 50 tiles of 128, take 14 instead of 18 us, (6, 1, 1065) causal 26.5
        # instead of 30.2; under a mask up to two rounds: 2 x 727 to 975 tokens with 8:2 heads 26 instead of 32.
        return rows > 64 and steps <= 5 and small <= (2 if p.right >= 0 and steps > 3 else 1)
    if large < 0.3:  # (3, 4:1, 407) causal takes 12.7 instead of 15.2 us; longer ones were not measured
        return rows > 64 and steps <= 8
    if rows <= 64 and steps > 4:  # not measured
        return False
    empty = -(-rows // 64) * p.kv_heads * p.batch / target.num_sms - small  # no list: a CTA per possible tile
    short, looping = SHORT[p.head_dim], LOOPING[p.head_dim]
    return (
        short.launch - 0.7 * longest_first(p) + small * (short.tile + short.step * steps) + short.varlen * empty
        < looping.launch + large * (looping.tile + looping.step * steps) + looping.varlen * varlen
    )


def longest_first(p: FmhaProblem) -> bool:
    """Return whether CTAs of all sequences and heads should begin with their longest row tiles, under a causal mask: if
    the L2 holds their keys. Otherwise the row tiles of a head go together."""
    if p.right < 0 or p.max_seqlen_q * p.group > 64 * MAX_GRID:
        return False
    keys = p.k.shape[0] if p.kind == "varlen" else p.batch * p.max_seqlen_k
    return keys * p.kv_heads * p.head_dim * p.k.element_size() * (1 if p.same_kv else 2) <= L2_BYTES


def _row_tiles(p: FmhaProblem, size: int) -> int:
    """Estimate the row tiles of `size` rows: a sequence of a varlen batch has half an empty one."""
    tiles = -(-p.max_seqlen_q * p.group // size) * p.batch
    if p.kind == "varlen":
        tiles = min(tiles, max(p.batch, p.q.shape[0] * p.group // size + p.batch // 2))
    return tiles * p.kv_heads


def _loops_with_few(p: FmhaProblem, target: Target, rows: int, tiles: int) -> bool:
    """Return whether the looping kernel, which has the better loop, pays with less than a row tile per SM: at head dim
    256 always, (1, 5, 2560) causal 58 instead of 65 us; at head dim 128, if not short, where keys would be split
    and without a mask on 1024 keys or more, (1, 4, 4000) 56 instead of 65 us. Measured from 60 tiles for 132 SMs on."""
    if p.kind == "varlen" or p.head_dim < 128 or rows <= 64 or tiles < FEW * target.num_sms:
        return False
    if p.head_dim == 256:
        return True
    return splits_keys(p, target, _rows_tiling(128, 128, 2, 2, 232, 40)) or p.right < 0 and p.max_seqlen_k >= 1024


def swaps(p: FmhaProblem) -> bool:
    """Return whether decode.py runs the problem."""
    boxes = p.kind != "paged" or p.page_size % 8 == 0  # whether TMA boxes fit the pages
    return p.e4m3 and boxes and p.head_dim < 512 and p.max_seqlen_q * p.group <= DECODE_ROWS


def _looping(p: FmhaProblem, target: Target) -> Tiling:
    """Return the settings for one CTA per SM that loops over the row tiles."""
    # At head dim 128 two stages would cost 8 %, a load warp of 24 registers 15 %.
    keys, stages, regs, producer = {64: (128, 3, 240, 24), 128: (128, 3, 232, 40), 256: (64, 2, 240, 24)}[p.head_dim]
    varlen = p.kind == "varlen"
    pdl = dict(launch_pdl=True) if varlen else {}  # launched early behind the kernel that lists its row tiles
    if varlen:
        producer = max(producer, 32)
    order = None if varlen else order_of(p, 128, keys, target.num_sms)
    ahead = 0 if varlen else p.max_seqlen_k - p.max_seqlen_q
    causal = p.left < 0 and p.right == 0 and (p.same_sequences or not varlen)
    diagonal = causal and 64 % p.group == 0 and ahead % (64 // p.group) == 0
    full = p.left < 0 and p.right < 0
    if p.head_dim == 64 and (p.right < 0 or causal):
        # At this head dim the softmax is the limit, and three warpgroups hide more of it.
        three = None if varlen else order_of(p, 192, keys, target.num_sms)
        masks = causal and not diagonal
        step = THREE_WITH_MASKS if masks else THREE_ROLES
        if order is None or three is None or p.right < 0 or step * three.longest < order.longest:
            even = dict(EVEN=full or causal, MASKS=masks, OWN_END=causal)
            c = _rows_tiling(64, 128, 3, 3, 160, 32 if varlen else 24, EARLY=True, **even, **pdl)
            return replace(c, loop=True, order=three and three.tile_order(p, 192))
    early = p.head_dim > 64  # with two roles at head dim 64, EARLY costs 4 %
    own_end = diagonal and p.head_dim == 256
    even = dict(EVEN=early and (full or own_end or diagonal and keys == 128 and ahead % 128 == 0), MASKS=False)
    c = _rows_tiling(p.head_dim, keys, stages, 2, regs, producer, EARLY=early, OWN_END=own_end, **even, **pdl)
    return replace(c, loop=True, order=order and order.tile_order(p, 128))


def _rows_tiling(head_dim: int, keys: int, stages: int, consumers: int, regs: int, producer: int, **options) -> Tiling:
    return Tiling(
        64 * consumers,
        keys,
        keys,
        dict(
            D=head_dim,
            BN=keys,
            STAGES=stages,
            CONSUMERS=consumers,
            CONSUMER_REGS=regs,
            PRODUCER_REGS=producer,
            **options,
        ),
    )


def supports(p: FmhaProblem) -> str | None:
    """Return None, or why these kernels cannot run the problem."""
    return batch_reason(p)


def prepare(p: FmhaProblem, target: Target, program: Program) -> None:
    p, out = converted(p, program) if converts_first(p) else p, p.out
    c = tiling(p, target)
    c = replace(c, clears_rest=True, tiles_last=not c.loop and longest_first(p))
    if not c.loop:
        p = widened(p, program)
    elif p.kind == "varlen":
        c = replace(c, order=prepare_order(p, program, c.rows))
    kernel = fmha_forward_persistent if c.loop else fmha_forward
    if p.head_dim == 512:
        kernel = fmha_forward_d512
    elif swaps(p):
        kernel = fmha_decode
    prepare_split(p, target, program, kernel, c)
    keep_out(out, p, program)
