"""index_topk on sm_100a: the architecture-independent kernels."""

from dsv4.index.kernels.prepare import prepare_topk, supports
from dsv4.index.kernels.scores import index_scores
from dsv4.index.problem import IndexProblem
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program

__all__ = ["prepare", "supports"]


def prepare(p: IndexProblem, target: Target, program: Program) -> None:
    prepare_topk(p, target, program, index_scores, tiling)


def tiling(each: int, heads: int, dims: int) -> tuple[int, int, dict]:
    """Return the tiling: queries of a sequence share the keys that a program reads; 256 columns are the widest
    product.
    """
    together = 1 if each < 2 else min(2 if each < 4 else 4, 256 // heads)
    stages = 3 if together * heads * dims <= 128 * 128 else 2
    if dims > 128:  # shared memory has no room for more
        together, stages = 1, 1
    return together, 1, dict(ROWS=128, num_warps=4 if together * heads <= 64 else 8, num_stages=stages)
