"""FMHA forward on sm_100a: from a validated problem to a program. The kernels are in forward.py and forward_pair.py."""

from dataclasses import replace

from dsv4.fmha.kernels.causal_order import order_of
from dsv4.fmha.kernels.prepare import (
    Tiling,
    batch_reason,
    converted,
    converts_first,
    is_partial,
    keep_out,
    prepare_split,
    rounds_of_steps,
    splits_keys,
    widened,
)
from dsv4.fmha.kernels.sm100.forward import fmha_forward
from dsv4.fmha.kernels.sm100.forward_persistent import fmha_forward_persistent
from dsv4.fmha.problem import FmhaProblem
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program

MAX_SHARED = 232_448  # bytes per CTA
MAX_COLUMNS = 512  # columns of tensor memory
PAIR = Tiling(128, 128, 128, dict(num_ctas=2, LOAD_REGS=104, STORE_REGS=96, WARP_REGS=88), loop=True, halves=True)
OTHER_SHARED = 3072  # bytes at most for row statistics, barriers and the compiler's own


def tiling(head_dim: int, p_tmem: bool | None = None) -> Tiling:
    """Return the tile sizes of a head dim. p_tmem: P is in tensor memory (the default if it fits) or shared memory."""
    if p_tmem is None:
        p_tmem = head_dim < 512
    if p_tmem and head_dim == 512:
        raise ValueError("p_tmem: got True for head dim 512; its 64-row tiles read P from shared memory only")
    if not p_tmem and head_dim <= 128:
        raise ValueError(f"p_tmem: got False for head dim {head_dim}; its two tiles read P from tensor memory only")
    # rows, keys, tiles, ring slots; registers of a softmax thread, and of the load and mma warps
    rows, keys, tiles, slots, softmax, warp = {
        64: (128, 128, 2, 4, 224, 56),
        128: (128, 128, 2, 4, 224, 56),
        256: (128, 64, 1, 4, 176, 96),
        512: (64, 64, 1, 4, 208, 128),
    }[head_dim]
    check_budget(head_dim, rows, keys, tiles, slots, p_tmem)
    options = dict(
        D=head_dim, BM=rows, BN=keys, TILES=tiles, SLOTS=slots, P_TMEM=p_tmem, SOFTMAX_REGS=softmax, WARP_REGS=warp
    )
    return Tiling(rows * tiles, keys, keys, options, dense_as_rows=True)


def check_budget(head_dim: int, rows: int, keys: int, tiles: int, slots: int, p_tmem: bool) -> None:
    """Raise ValueError if the kernel needs too much memory: the compiler would compile it to an empty body."""
    p_columns = tiles * keys // 2 if tiles == 2 else 0  # otherwise P overwrites S or is in shared memory
    columns = (3 - tiles) * keys + p_columns + tiles * head_dim * rows // 128
    shared = 2 * (tiles * rows * head_dim + slots * keys * min(head_dim, 256) + (0 if p_tmem else 2 * rows * keys))
    if columns > MAX_COLUMNS or shared + OTHER_SHARED > MAX_SHARED:
        raise ValueError(
            f"head dim {head_dim} with {tiles} x {rows} rows, {keys} keys, {slots} slots: {columns} of {MAX_COLUMNS} "
            f"columns of tensor memory, {shared} + up to {OTHER_SHARED} of {MAX_SHARED} bytes of shared memory"
        )


def supports(p: FmhaProblem) -> str | None:
    """Return None, or why this kernel cannot run the problem."""
    return batch_reason(p)


def prepare(p: FmhaProblem, target: Target, program: Program, p_tmem: bool | None = None) -> None:
    p, out = converted(p, program) if converts_first(p) else p, p.out
    p = widened(p, program)
    if p_tmem is None and pairs(p, target):
        # Its layouts need Triton 3.9; code that imports this module only to call `supports` may have another version.
        from dsv4.fmha.kernels.sm100.forward_pair import fmha_forward_pair

        prepare_split(p, target, program, fmha_forward_pair, PAIR)
    elif p_tmem is None and loops(p, target):
        prepare_split(p, target, program, fmha_forward_persistent, looping(p, target))
    else:
        c = tiling(p.head_dim, p_tmem)
        if p.e4m3:
            c = replace(
                c, options=c.options | dict(SOFTMAX_REGS=c.options["SOFTMAX_REGS"] - 40, LOAD_WARPS=4, LOAD_REGS=96)
            )
        prepare_split(p, target, program, fmha_forward, c)
    keep_out(out, p, program)


def loops(p: FmhaProblem, target: Target) -> bool:
    """Return whether CTAs that loop run the problem: dense, with a work tile for every SM, so that no keys are split.
    Deterministic: the kernel must not depend on the batch."""
    if p.head_dim > 128 or p.kind != "dense" or p.e4m3 or p.deterministic or is_partial(p):
        return False
    tiles = -(-p.max_seqlen_q * p.group // tiling(p.head_dim).rows) * p.kv_heads * p.batch
    return tiles >= target.num_sms and not splits_keys(p, target, tiling(p.head_dim))


def looping(p: FmhaProblem, target: Target) -> Tiling:
    """Return the settings for one CTA per SM that loops over the work tiles."""
    c = tiling(p.head_dim)
    order = order_of(p, c.rows, c.keys, target.num_sms).tile_order(p, c.rows)
    options = {name: x for name, x in c.options.items() if name not in ("TILES", "P_TMEM")}
    return replace(c, loop=True, order=order, dense_as_rows=False, options=options)


def pairs(p: FmhaProblem, target: Target) -> bool:
    """Return whether pairs of CTAs run the problem: head dim 512, dense, at least a tile of rows, keys that are better
    not split, and every key visible to some query: other keys may be NaN, and a pair loads its tiles as they are."""
    if p.head_dim != 512 or p.kind != "dense" or p.e4m3 or p.max_seqlen_q * p.group < PAIR.rows:
        return False
    if 0 <= p.left < p.max_seqlen_k - p.max_seqlen_q:
        return False
    alone = tiling(512)
    if not splits_keys(p, target, alone):
        return True
    if p.deterministic or is_partial(p):
        return False
    # A step of one CTA, with 64 rows and 64 keys, lasts as long as one of a pair with 128 and 128. A plan has room for
    # splits, but does not request them.
    return rounds_of_steps(p, target, PAIR) <= rounds_of_steps(p, target, alone)
