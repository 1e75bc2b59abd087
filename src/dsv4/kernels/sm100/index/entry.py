"""index_topk on sm_100a: the kernels that need no knowledge of the architecture."""

from dsv4.index.problem import IndexProblem
from dsv4.kernels.shared.index import prepare as index_launch
from dsv4.kernels.shared.index.prepare import supports
from dsv4.kernels.shared.index.scores import index_scores

__all__ = ["forward", "supports"]


def forward(p: IndexProblem) -> None:
    index_launch.forward(p, index_scores, tiling)


def tiling(each: int, heads: int, dims: int) -> tuple[int, int, dict]:
    """Queries of a sequence share the keys that a program reads; 256 columns are the widest product."""
    together = 1 if each < 2 else min(2 if each < 4 else 4, 256 // heads)
    stages = 3 if together * heads * dims <= 128 * 128 else 2
    if dims > 128:  # shared memory has no room for more
        together, stages = 1, 1
    return together, 1, dict(ROWS=128, num_warps=4 if together * heads <= 64 else 8, num_stages=stages)
