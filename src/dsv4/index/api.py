"""The lightning indexer of CSA layers: which compressed rows a query attends to."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from dsv4.caches.index_keys import IndexCache
from dsv4.index import plan as plans
from dsv4.index import problem
from dsv4.index.options import IndexOptions
from dsv4.runtime import checks, operators
from dsv4.runtime.calls import Operation, Shapes
from dsv4.runtime.checks import Backend
from dsv4.runtime.plan import Plan

Both = tuple[Tensor, Tensor]  # rows, scores


class Keywords(TypedDict, total=False):
    """For type checkers: the return type depends on return_scores alone."""

    positions: Tensor | None
    ratio: int
    lengths: Tensor | None
    block_table: Tensor | None
    request_starts: Tensor | None
    scale: float | None
    request_rows: bool
    out: Tensor | None
    plan: Plan | None
    backend: Backend


@overload
def index_topk(
    q: Tensor, k: Tensor | IndexCache, weights: Tensor, topk: int,
    *, return_scores: Literal[False] = ..., **_: Unpack[Keywords],
) -> Tensor: ...  # fmt: skip
@overload
def index_topk(
    q: Tensor, k: Tensor | IndexCache, weights: Tensor, topk: int,
    *, return_scores: Literal[True], **_: Unpack[Keywords],
) -> Both: ...  # fmt: skip
@overload
def index_topk(
    q: Tensor, k: Tensor | IndexCache, weights: Tensor, topk: int, *, return_scores: bool, **_: Unpack[Keywords]
) -> Tensor | Both: ...
def index_topk(
    q: Tensor,
    k: Tensor | IndexCache,
    weights: Tensor,
    topk: int,
    *,
    positions: Tensor | None = None,
    ratio: int = 4,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    request_starts: Tensor | None = None,
    scale: float | None = None,
    request_rows: bool = False,
    return_scores: bool = False,
    out: Tensor | None = None,
    plan: Plan | None = None,
    backend: Backend = "auto",
) -> Tensor | Both:
    """The topk compressed rows with the highest index scores, for each query -> int32 [N, topk], -1 = nothing there.

    ::

        score(n, s) = scale * sum_h weights[n, h] * relu(q[n, h] . k[s])      s < visible(n)
        visible(n)  = floor((positions[n] + 1) / ratio)                       row s ends with token ratio * (s + 1) - 1

    With FP8 keys, q[n, h] . k[s] is the product of the e4m3 values, the sum is multiplied by the scale of key s, and
    the scales of the queries are folded into the weights.

    Each list is sorted by descending score. For equal scores (ReLU makes exact zeros) the lower row comes first, and is
    chosen if there is room for only one. A query that sees fewer than topk rows gets all of them, then -1.

    Args:
        q: [N, H, D] with k [M, D] and weights [N, H]: one sequence; or [B, T, H, D] with [B, M, D] and [B, T, H]: a
            batch, which gives [B, T, topk]. RoPE is already applied. weights may be negative.
            Or q e4m3 [N, H, 128] with k an :class:`dsv4.IndexCache`, block_table, and weights that include the scales
            of q: ``dsv4.caches.index_keys.quantize_queries`` makes both.
        topk: width of the lists (512 for V4-Flash, 1024 for V4-Pro).
        positions: int32 or int64 [N] (or [B, T]), the token position of each query. Or
        lengths: int32 or int64 [N] (or [B, T]), the number of rows that each query sees, instead of positions.
        block_table: int32 [R, pages], with q [N, H, D] and k [pages, page, D]: row j of request r is row ``j % page``
            of page ``block_table[r, j // page]``. The lists then contain rows of the pool, as v4_attention expects
            them: ``page number * page + row in the page``; for equal scores the row that is earlier in the request
            comes first. Entries past the visible rows are not read.
        request_starts: int32 [R + 1], as in v4_attention: queries starts[r] .. starts[r+1] - 1 belong to request r.
            Queries past the last one see nothing. Default: every query is its own request.
        scale: default D ** -0.5 * H ** -0.5, as in the model. Any positive scale gives the same choice; 0 makes all
            scores equal, and a negative scale chooses the lowest.
        request_rows: with a block table, the lists contain rows of the request (j above), as engines store them.
        return_scores: also return the scores of the chosen rows, fp32 [N, topk], -inf where the index is -1.
        out: write the lists here (int32; the last stride is 1) and return it.
        plan: a :class:`dsv4.Plan` from :func:`dsv4.plan`, with preallocated buffers (CUDA graphs).
        backend: "auto" (kernels if they can run the problem, else torch), "cuda" and "softsm" (the kernels), "cpu".

    Rows of k that no query sees may contain NaN or inf. Scores are computed in fp32 (fp64 for fp64 q, on a CPU); scores
    that differ by less than their rounding may come in either order. Only one block of queries is in memory at a time.
    The kernels accept bf16 and fp16 (the same for q and k), up to 128 heads, head dims up to 256 that are multiples of
    8, and topk up to 4096; FP8 keys if pages begin at multiples of 16 bytes. Hopper's tensor cores sum e4m3 products
    with about 14 bits, the CPU in fp32.
    """
    if isinstance(k, IndexCache):
        k = k.page_view()
    checks.flag("return_scores", return_scores)
    tensors = (q, k, weights, positions, lengths, block_table, request_starts)
    options = IndexOptions.checked(topk, ratio, scale, request_rows)
    return operators.call(INDEX_TOPK, tensors, options, return_scores, out, plan, checks.backend(backend))


def _outputs(arguments: dict[str, Any]) -> Shapes:
    shape = (*arguments["q"].shape[:-2], arguments["topk"])
    return (shape, torch.int32), (shape, torch.float32)


INDEX_TOPK = Operation(
    "index_topk",
    "index",
    ("q", "k", "weights", "positions", "lengths", "block_table", "request_starts"),
    3,
    IndexOptions,
    ("out", "scores"),
    _outputs,
    problem.build,
    problem.check_values,
    (3, 4),
    plan=plans.reserved,
    warmup=plans.warmup_calls,
    falls_back=True,
    positional=("topk",),
)
operators.define_operation(INDEX_TOPK)
