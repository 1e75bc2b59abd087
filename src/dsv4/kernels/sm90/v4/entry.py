"""V4 attention on sm_90a: which kernel takes a problem, listed.py or narrow.py, and what the host tells it."""

from dsv4 import caches
from dsv4.caches import Fp8Cache
from dsv4.kernels.shared.v4.prepare import prepare_listed, supports
from dsv4.kernels.sm90.v4 import unpack
from dsv4.kernels.sm90.v4.listed import v4_listed
from dsv4.kernels.sm90.v4.narrow import v4_narrow
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program
from dsv4.runtime.splits import NARROW_HEADS, NARROW_KEYS, narrow_splits
from dsv4.v4.problem import V4Problem

__all__ = ["prepare", "supports"]

STEP = 128  # rows per step: two blocks of 64
# Copies need few registers and threads, the conversion of FP8 rows many threads.
PLAIN = dict(RIGHT_REGS=216, GATHER_REGS=72, GATHER_WARPS=4, RESIDENT=False)
RESIDENT = dict(RIGHT_REGS=216, GATHER_REGS=64, GATHER_WARPS=4, RESIDENT=True)
FP8 = dict(RIGHT_REGS=192, GATHER_REGS=64, GATHER_WARPS=8, RESIDENT=False)
# Where items are few, latency counts. Options of v4_narrow, and us of a CTA: of its first block of rows, of another.
NARROW = (
    (dict(HEADS=NARROW_HEADS, KEYS=NARROW_KEYS, num_warps=8, maxnreg=128, EARLY=True), 13.5, 3.0),
    (dict(HEADS=32, KEYS=NARROW_KEYS, num_warps=4, EARLY=True), 16.5, 3.7),
    (dict(HEADS=32, KEYS=128, num_warps=8, EARLY=True), 19.6, 6.5),
)
LISTED = 20.5, 0.05  # us of v4_listed: of few CTAs with one step each, and for every CTA
L2_ROWS = 32 << 10  # rows of 1 KB that stay in the L2


def prepare(p: V4Problem, target: Target, program: Program) -> None:
    after: dict = {}
    if unpack.pays(p):
        p = unpack.unpacked(p, program)
        after = dict(AFTER=True, launch_pdl=True)
    few = narrow(p, target)
    if few is not None:
        prepare_listed(p, target, program, v4_narrow, NARROW_KEYS, *few)
        return
    fp8 = isinstance(p.window, Fp8Cache) or isinstance(p.compressed, Fp8Cache)
    prepare_listed(p, target, program, v4_listed, STEP, (FP8 if fp8 else RESIDENT if resident(p) else PLAIN) | after)


def narrow(p: V4Problem, target: Target) -> tuple[dict, int] | None:
    """By shapes alone: (options of v4_narrow, splits) where FP8 rows are so few that it is faster than v4_listed."""
    pools = (p.window,) if p.compressed is None else (p.window, p.compressed)
    if p.deterministic or not all(isinstance(pool, Fp8Cache) for pool in pools):
        return None
    start, each = LISTED
    ctas = p.batch * -(-p.q_heads // 64) * -(-_blocks(p, NARROW_KEYS) * NARROW_KEYS // STEP)
    best = start + each * min(ctas, target.multiprocessors)
    found = None
    for options, start, each in NARROW:
        tiles = p.batch * -(-p.q_heads // options["HEADS"])
        blocks = _blocks(p, options["KEYS"])
        splits = narrow_splits(tiles, target.multiprocessors, blocks)
        if p.scratch is not None:  # a plan's, which has room for the most heads per tile
            splits = min(splits, max(1, p.scratch.numel() // (p.batch * p.q_heads * (p.head_dim + 1))))
        elif p.num_splits > 0:
            splits = min(splits, p.num_splits)
        if splits == 0:
            continue
        longest = max(1, -(-blocks // splits))
        us = start + each * (longest - 1)
        if us < best:
            found, best = (options, max(1, -(-blocks // longest))), us  # no more splits than the blocks need
    return found


def _blocks(p: V4Problem, keys: int) -> int:
    """Blocks of so many rows in the two lists of a query."""
    return -(-p.window_indices.shape[1] // keys) + -(-p.compressed_capacity // keys)


def resident(p: V4Problem) -> bool:
    """By shapes alone: whether plain rows come from the L2, since it has room for them and they are listed often.
    Deterministic: the other order rounds P differently, and how many queries there are is no property of a query."""
    rows = sum(caches.pool_size(pool) for pool in (p.window, p.compressed) if pool is not None)
    return not p.deterministic and rows <= L2_ROWS and p.batch * p.max_seqlen_k >= 8 * rows
