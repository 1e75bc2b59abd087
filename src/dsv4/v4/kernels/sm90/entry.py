"""V4 attention on sm_90a: the kernel for a problem, and the host's arguments for it.

sparse.py                64 heads per CTA, roles and a ring: throughput
decode_swap_ab.py        16 or 32 heads per CTA, keys on the rows of the MMA: latency of few queries
decode_swap_ab_ws.py     the same, warp-specialised: packed rows of few heads
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dsv4.caches import kv as caches
from dsv4.caches.formats import PLAIN as PLAIN_ROWS
from dsv4.caches.formats import format_of
from dsv4.caches.pages import PackedRows
from dsv4.fmha.kernels.prepare import is_aligned, is_partial
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program
from dsv4.runtime.splits import (
    DECODE_HEADS,
    DECODE_KEYS,
    WHOLE,
    choose_splits,
    decode_splits,
    whole_first,
    whole_rounds,
)
from dsv4.v4.kernels import prepare as shared
from dsv4.v4.kernels import unpack_pools
from dsv4.v4.kernels.prepare import is_packed, lacks, prepare_sparse
from dsv4.v4.kernels.sm90.decode_swap_ab import v4_decode_swap_ab
from dsv4.v4.kernels.sm90.decode_swap_ab_ws import v4_decode_swap_ab_ws
from dsv4.v4.kernels.sm90.sparse import v4_sparse
from dsv4.v4.problem import V4Problem

__all__ = ["prepare", "supports"]

STEP = 128  # rows per step: two blocks of 64
# Copies need few registers and threads; unpacking rows needs many threads.
PLAIN = dict(RIGHT_REGS=216, GATHER_REGS=72, GATHER_WARPS=4, RESIDENT=False)
RESIDENT = dict(RIGHT_REGS=216, GATHER_REGS=64, GATHER_WARPS=4, RESIDENT=True, REG_STORE=True)
PACKED = dict(RIGHT_REGS=192, GATHER_REGS=64, GATHER_WARPS=8, RESIDENT=False, PDL_LAUNCH=True)


class Cost(NamedTuple):
    """Microseconds on an H200, as measured: in total, per CTA, per block or step of a CTA."""

    start: float
    cta: float
    step: float

    def of(self, ctas: int, steps: int) -> float:
        return self.start + self.cta * ctas + self.step * steps


# With few work tiles, latency counts. Options of v4_decode_swap_ab and its cost, with packed rows, with plain
# ones, and with packed rows of two formats, for each of which a kernel has its own loop.
OF_16 = dict(HEADS=DECODE_HEADS, KEYS=DECODE_KEYS, num_warps=8, maxnreg=128, PDL_LAUNCH=True)
OF_32 = dict(HEADS=32, KEYS=DECODE_KEYS, num_warps=4, PDL_LAUNCH=True)
OF_32_LONG = dict(HEADS=32, KEYS=128, num_warps=8, PDL_LAUNCH=True)
SWAP_AB = (
    ((OF_16, Cost(9.3, 0.006, 3.1)), (OF_32, Cost(12.8, 0, 3.7)), (OF_32_LONG, Cost(13.1, 0, 6.5))),
    ((OF_16, Cost(9.3, 0.03, 2.2)), (OF_32_LONG, Cost(10.7, 0.025, 3.8))),
    ((OF_16, Cost(8.5, 0.006, 3.3)), (OF_32_LONG, Cost(10.3, 0.02, 5.6))),
)
# Costs and limits of both decode kernels were measured while L1 had 28 KB; with its present size (runtime/driver.py)
# they are faster, and would pay for more problems.
# With few heads, the speed at which rows become bf16 counts. Options of v4_decode_swap_ab_ws, the most blocks of a
# CTA for which it was faster, with splits and for all heads and rows of a query in one CTA, and its cost. In several
# waves of CTAs costs do not add up like that: with 16 heads it was 7 % faster than v4_sparse in two and in four
# waves.
SWAP_AB_WS_ROUNDS = 4
SWAP_AB_WS_SPLIT = 5  # the most blocks where more than 64 heads are split: v4_sparse gathers their rows twice
WS_OF_16 = dict(HEADS=16, GATHER_REGS=152, num_warps=4, PDL_LAUNCH=True)
WS_OF_32 = dict(HEADS=32, GATHER_REGS=144, num_warps=4, PDL_LAUNCH=True)
WS_PACKED = (WS_OF_16, (18, 18), Cost(10.2, 0.008, 2.2)), (WS_OF_32, (3, 10), Cost(12.9, 0.008, 2.25))
WS_MIXED = (WS_OF_16, (18, 18), Cost(10.5, 0.008, 1.7)), (WS_OF_32, (5, 10), Cost(11.3, 0.008, 2.0))
SWAP_AB_WS: tuple[tuple[tuple[dict, tuple[int, int], Cost], ...], ...] = (WS_PACKED, (), WS_MIXED)
# More than MERGED splits of rows of two formats needed 1 us more for up to 264 heads of all queries, 2 to 3 for more,
# probably because of a second wave of CTAs of combine, which has one per head.
MERGED, MERGED_HEADS = 8, 2  # splits; heads per SM
STAGED_FROM = 6  # blocks of a CTA with 16 heads: then rows of two formats are staged, which is 6 % faster with 10
SECOND = dict(AFTER=True, launch_pdl=True)  # options of a launch that begins before the one before it ends
# Of a second launch: blocks that it must save in v4_decode_swap_ab_ws, steps that it takes in v4_sparse.
WORTH_BLOCKS, SECOND_STEPS = 6, 1
SPARSE = Cost(15.0, 0.035, 3.8), Cost(14.6, 0.05, 2.2), Cost(15.4, 0.06, 3.8)  # costs of v4_sparse
L2_ROWS = 32 << 10  # rows of 1 KB that stay in the L2
# Tensors of a problem with a line for every query.
OF_LISTS = "window_indices", "window_lengths", "compressed_indices", "compressed_lengths"
OF_QUERIES = "q", "out", "lse", "positions", *OF_LISTS


def supports(p: V4Problem) -> str | None:
    """Return None, or why these kernels cannot run the problem."""
    return shared.supports(p) or lacks(p, "unpack")


def prepare(p: V4Problem, target: Target, program: Program) -> None:
    if unpack_pools.pays(p):
        p = unpack_pools.unpacked(p, program)
        options = (RESIDENT if resident(p) else PLAIN) | dict(REG_STORE=True, PDL_WAIT=True, launch_pdl=True)
        prepare_sparse(p, target, program, v4_sparse, STEP, options, can_be_uneven=True)
        return
    small = decode_kernel(p, target)
    if small is not None:
        kernel, options, splits = small
        whole, splits = whole_waves(p, target, options, splits)
        if whole > 0:
            prepare_sparse(queries_of(p, 0, whole), target, program, kernel, DECODE_KEYS, options, 1)
            p, options = queries_of(p, whole, p.batch), options | SECOND
        prepare_sparse(p, target, program, kernel, DECODE_KEYS, options, splits)
        return
    more: dict[str, Any] = dict(can_be_uneven=True, fp16_partials=True)
    if not is_packed(p):
        options = RESIDENT if resident(p) else PLAIN | dict(REG_STORE=many(p, target))
        prepare_sparse(p, target, program, v4_sparse, STEP, options, **more, can_be_whole=True)
        return
    # Triton 3.6 makes the gathering warps wait for each other seven times a block, three times with slots in two parts,
    # which is 1 to 2 % faster with 128 heads and 48 queries or more. Triton 3.9 does so twice, with whole slots.
    options = dict(MAY_SPLIT_SLOTS=target.compiler < (3, 9)) | PACKED
    if p.block_table is None:
        prepare_sparse(p, target, program, v4_sparse, STEP, options, **more, can_be_whole=True)
        return
    whole, splits = whole_by_table(p, target)
    if whole > 0:
        prepare_sparse(queries_of(p, 0, whole, splits=1), target, program, v4_sparse, STEP, options, **more)
        p, options = queries_of(p, whole, p.batch, splits), options | SECOND
    first = whole if p.request_starts is not None else 0
    prepare_sparse(p, target, program, v4_sparse, STEP, options, **more, first=first)


def whole_waves(p: V4Problem, target: Target, options: dict, splits: int) -> tuple[int, int]:
    """Return (queries whose rows are not split, splits of the others), or (0, splits), for v4_decode_swap_ab_ws.

    With more CTAs than SMs, those that fill all SMs process whole queries; the rows of the queries that are left over
    are split, by a second launch, which begins while the last of the first still run.
    """
    each = -(-p.q_heads // options["HEADS"])
    rounds, whole = whole_rounds(p.batch, each, target.num_sms)
    rest = p.batch - whole
    if splits > 1 or rounds == 0 or rest == 0 or not can_be_two(p):
        return 0, splits
    blocks = _blocks(p, DECODE_KEYS)
    longest = -(-blocks // max(1, min(blocks, target.num_sms // (rest * each))))
    return (whole, -(-blocks // longest)) if blocks - longest >= WORTH_BLOCKS else (0, splits)


def whole_by_table(p: V4Problem, target: Target) -> tuple[int, int]:
    """Return the same for v4_sparse with packed rows by block table, where a kernel that does both would lack
    registers: two values reloaded in the loop cost 9 %."""
    if not can_be_two(p):
        return 0, 0
    head_tiles, steps = -(-p.q_heads // 64), -(-p.max_seqlen_k // STEP)
    splits = choose_splits(p.batch * head_tiles, target.num_sms, p.max_seqlen_k)
    return whole_first(p.batch, head_tiles, target.num_sms, steps, splits, SECOND_STEPS)


def can_be_two(p: V4Problem) -> bool:
    """Return whether a second launch may have its own splits, and reads only what was there before the first: it does
    not wait for copies."""
    lists = (getattr(p, name) for name in (*OF_LISTS, "positions", "block_table", "request_starts"))
    lie_well = all(x is None or x.stride(-1) == 1 or x.shape[-1] <= 1 for x in lists)
    plain = [x for x in (p.window, p.compressed) if x is not None and not isinstance(x, PackedRows)]
    lie_well = lie_well and all(is_aligned(x if x.ndim == 3 else x.unsqueeze(1)) for x in (p.q, p.out, *plain))
    return lie_well and not p.deterministic and p.num_splits == 0 and not is_partial(p)


def queries_of(p: V4Problem, begin: int, end: int, splits: int = 0) -> V4Problem:
    """Return the problem of some queries, with this number of splits, 0 = to be chosen. A block table stays whole where
    requests have several queries."""
    names = OF_QUERIES if p.request_starts is not None else (*OF_QUERIES, "block_table")
    some = {name: getattr(p, name)[begin:end] for name in names if getattr(p, name) is not None}
    return replace(p, **some, num_splits=splits)


def many(p: V4Problem, target: Target) -> bool:
    """Return whether CTAs have several work tiles each, with all rows of a query: O is stored from registers
    (REG_STORE), which is less work than through shared memory, and more code."""
    whole = not p.deterministic and p.num_splits <= 1 and not is_partial(p)
    return whole and p.batch * -(-p.q_heads // 64) >= WHOLE * target.num_sms


def decode_kernel(p: V4Problem, target: Target) -> tuple[Any, dict, int] | None:
    """Return (a decode kernel, its options, splits) if, by shapes alone, it is faster than v4_sparse: for few rows, or
    packed rows of few heads."""
    pools = (p.window,) if p.compressed is None else (p.window, p.compressed)
    formats = {format_of(pool) for pool in pools}
    if p.deterministic or len(formats) > 1 and PLAIN_ROWS in formats or p.q.dtype != torch.bfloat16:
        return None
    kind = 2 if len(formats) > 1 else int(formats == {PLAIN_ROWS})
    places = target.num_sms
    tiles, steps = p.batch * -(-p.q_heads // 64), -(-_blocks(p, DECODE_KEYS) * DECODE_KEYS // STEP)
    splits = p.num_splits or choose_splits(tiles, places, steps * STEP)
    rounds = -(-tiles * splits // places)
    best = SPARSE[kind].of(min(tiles * splits, places), rounds * -(-steps // splits))
    found = None
    for options, cost in SWAP_AB[kind]:
        blocks, tiles = _blocks(p, options["KEYS"]), p.batch * -(-p.q_heads // options["HEADS"])
        splits = _room(p, decode_splits(tiles, places, blocks))
        if splits == 0:
            continue
        longest = max(1, -(-blocks // splits))
        splits = max(1, -(-blocks // longest))  # no more than the blocks need
        us = cost.of(tiles * splits, longest)
        if us < best:
            found, best = (v4_decode_swap_ab, options, splits), us
    blocks = _blocks(p, DECODE_KEYS)
    for options, most, cost in SWAP_AB_WS[kind]:
        tiles = p.batch * -(-p.q_heads // options["HEADS"])
        again = places < tiles <= SWAP_AB_WS_ROUNDS * places and p.q_heads <= max(16, options["HEADS"])
        if tiles > places and not again or p.block_table is not None:  # block tables prefetch no rows into L2
            continue
        splits = _room(p, max(1, min(blocks, places // tiles)))
        longest = max(1, -(-blocks // splits))
        splits = max(1, -(-blocks // longest))
        us = cost.of(tiles * splits, longest)
        if kind == 2 and splits > MERGED:
            us += -(-p.batch * p.q_heads // (MERGED_HEADS * places))
        alone = splits == 1 if kind == 2 else tiles * splits == p.batch
        limit = max(most[0], SWAP_AB_WS_SPLIT) if p.q_heads > 64 else most[alone]
        if longest <= limit and (us < best or again and options["HEADS"] == 16):
            if kind == 2 and options["HEADS"] == 16 and longest >= STAGED_FROM:
                options = options | dict(STAGED=True)
            found, best = (v4_decode_swap_ab_ws, options, splits), us
    return found


def _room(p: V4Problem, splits: int) -> int:
    """Return the splits, but no more than a plan has room for, or than are wanted."""
    if p.scratch is not None:  # a plan's, which has room for the most heads per tile
        return min(splits, max(1, p.scratch.numel() // (p.batch * p.q_heads * (p.head_dim + 1))))
    return min(splits, p.num_splits) if p.num_splits > 0 else splits


def _blocks(p: V4Problem, keys: int) -> int:
    """Return the blocks of `keys` rows in the two lists of a query."""
    return -(-p.window_indices.shape[1] // keys) + -(-p.compressed_capacity // keys)


def resident(p: V4Problem) -> bool:
    """Return whether, by shapes alone, plain rows stay in L2: it has room for them, and they are listed often.
    Deterministic: the other order rounds P differently, and the number of queries is not a property of a query."""
    rows = sum(caches.pool_size(pool) for pool in (p.window, p.compressed) if pool is not None)
    return not p.deterministic and rows <= L2_ROWS and p.batch * p.max_seqlen_k >= 8 * rows
