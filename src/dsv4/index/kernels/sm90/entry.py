"""The indexer on sm_90a: fp4.py, fp4_boxes.py, pages.py and scores.py have the kernels of the scores; the choice uses
the shared kernels."""

from dsv4.index.kernels.prepare import prepare_topk, supports
from dsv4.index.kernels.scores import index_scores
from dsv4.index.kernels.sm90.fp4 import index_scores_fp4_sm90
from dsv4.index.kernels.sm90.fp4_boxes import index_scores_fp4_boxes_sm90
from dsv4.index.kernels.sm90.pages import BOX, DIMS, index_scores_pages_sm90
from dsv4.index.kernels.sm90.scores import index_scores_sm90
from dsv4.index.problem import IndexProblem
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program

__all__ = ["prepare", "supports"]

SHARED_BYTES = 226 << 10  # per SM, less what the system reserves for every CTA


def prepare(p: IndexProblem, target: Target, program: Program) -> None:
    if p.fp4:
        if p.among is not None and p.q_heads <= 32:
            prepare_topk(p, target, program, index_scores_fp4_boxes_sm90, fp4_blocks_tiling)
        elif p.among is None and comes_in_boxes(p):
            prepare_topk(p, target, program, index_scores_fp4_boxes_sm90, fp4_boxes_tiling)
        else:
            prepare_topk(p, target, program, index_scores_fp4_sm90, fp4_tiling)
    elif p.among is not None or p.topk_blocks or p.options.bf16_scores:  # DeepSeek-V4.1 has these with FP4 keys
        prepare_topk(p, target, program, index_scores, plain_tiling)
    elif comes_in_boxes(p):
        prepare_topk(p, target, program, index_scores_pages_sm90, boxes_tiling if p.fp8 else wide_boxes_tiling)
    else:
        prepare_topk(p, target, program, index_scores_sm90, fp8_tiling if p.fp8 else tiling)


def comes_in_boxes(p: IndexProblem) -> bool:
    """Return whether TMA can copy BOX keys at a time: every box must lie within one page."""
    if p.block_table is not None and p.k.shape[-2] % BOX.value != 0:
        return False
    if p.format is not None:
        return True
    positive = all(stride > 0 for size, stride in zip(p.k.shape, p.k.stride()) if size > 1)
    return p.head_dim == DIMS.value and positive


def fp4_tiling(each: int, heads: int, dims: int) -> tuple[int, int, dict]:
    """Return the tiling: queries of a sequence share keys after these are unpacked."""
    together = 4 if each >= 4 and heads <= 64 else 2 if each >= 2 and heads <= 64 else 1
    return together, 4 if together * heads <= 64 else 2, dict(STAGES=3 if together == 1 else 4, num_warps=4)


def fp4_boxes_tiling(each: int, heads: int, dims: int) -> tuple[int, int, dict]:
    """Return the same. Registers are those of eight warps, of which the four compute warps get most."""
    together, residents, options = fp4_tiling(each, heads, dims)
    pieces = 2 if together * heads == 64 else 1  # one piece would need more accumulators than fit
    return together, residents, options | dict(PIECES=pieces, maxnreg=64 if residents == 4 else 128)


def fp4_blocks_tiling(each: int, heads: int, dims: int) -> tuple[int, int, dict]:
    """Return the tiling: one query with its own blocks."""
    return 1, 4, dict(STAGES=4, num_warps=4, PIECES=2, maxnreg=64)


def plain_tiling(each: int, heads: int, dims: int) -> tuple[int, int, dict]:
    """Return the tiling, with one stage: with more, Triton 3.6 puts the proxy fence of tl.dot before the end of
    cp.async, not after it.
    """
    return 1, 2, dict(ROWS=128 if dims <= 128 else 64, num_warps=4, num_stages=1)


def boxes_tiling(each: int, heads: int, dims: int) -> tuple[int, int, dict]:
    """Return the tiling: queries of a sequence share keys."""
    if each >= 4 and heads <= 64:
        return 4, 2, dict(num_warps=4)
    if each >= 2 and heads <= 64:
        return 2, 4, dict(num_warps=4, maxnreg=128)
    return 1, 4, dict(num_warps=4)


def wide_boxes_tiling(each: int, heads: int, dims: int) -> tuple[int, int, dict]:
    """Return the tiling for keys of 16 bits: as many CTAs per SM as shared memory has room for."""
    if heads > 64:
        return 1, 2, dict(num_warps=4)
    together = 4 if each >= 4 else 2 if each >= 2 else 1
    return together, 3 if together == 1 else 2, dict(num_warps=4)


def fp8_tiling(each: int, heads: int, dims: int) -> tuple[int, int, dict]:
    """Return the tiling: half the bytes per tile; three CTAs per SM are faster than two or four
    (benchmarks/NOTES.md).
    """
    if each >= 16 and heads <= 64:
        return 2, 3, dict(ROWS=64, STAGES=4, num_warps=4)
    together = 2 if each >= 2 and heads <= 64 else 1
    return together, 2 if together == 2 else 3, dict(ROWS=128, STAGES=3, num_warps=4)


def tiling(each: int, heads: int, dims: int) -> tuple[int, int, dict]:
    """Return the tiling: queries of a sequence share the keys that a CTA reads. With two CTAs per SM, one loads, or
    sums over the heads, while the other keeps the tensor cores busy."""
    together, rows = (4, 64) if each >= 4 else (2, 128) if each >= 2 else (1, 128)
    if heads * dims > 64 * 128:
        together, rows = 1, 128
    residents, tile = 2, rows * dims * 2
    stages = min((SHARED_BYTES // residents - 1024 - together * heads * dims * 2) // tile, 4)
    if stages < 2:
        residents, stages = 1, 2
    return together, residents, dict(ROWS=rows, STAGES=stages, num_warps=4)
