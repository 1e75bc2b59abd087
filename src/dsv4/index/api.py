"""The lightning indexer: which compressed rows a query attends to, and in two levels, for several layers.

In DeepSeek-V4.1 one layer calls :func:`index_blocks`, which also returns the blocks of rows with the best scores. The
layers after it have their own queries and the same keys; they call :func:`index_topk` with these blocks, which scores
no other rows.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from dsv4.caches.index_keys import IndexCache
from dsv4.index import plan as plans
from dsv4.index import problem
from dsv4.index.options import IndexOptions, Keywords, TopkKeywords
from dsv4.runtime import checks, operators
from dsv4.runtime.calls import Operation, Shapes
from dsv4.runtime.options import reject_unknown, set_signature

Both = tuple[Tensor, Tensor]  # rows, scores


@overload
def index_topk(
    q: Tensor,
    k: Tensor | IndexCache,
    weights: Tensor,
    topk: int,
    *,
    return_scores: Literal[False] = ...,
    **_: Unpack[TopkKeywords],
) -> Tensor: ...
@overload
def index_topk(
    q: Tensor,
    k: Tensor | IndexCache,
    weights: Tensor,
    topk: int,
    *,
    return_scores: Literal[True],
    **_: Unpack[TopkKeywords],
) -> Both: ...
@overload
def index_topk(
    q: Tensor, k: Tensor | IndexCache, weights: Tensor, topk: int, *, return_scores: bool, **_: Unpack[TopkKeywords]
) -> Tensor | Both: ...
def index_topk(
    q: Tensor,
    k: Tensor | IndexCache,
    weights: Tensor,
    topk: int,
    *,
    return_scores: bool = False,
    blocks: Tensor | None = None,
    **keywords: Any,
) -> Tensor | Both:
    """Choose the topk compressed rows with the highest index scores for each query -> int32 [N, topk], -1 = nothing.

    ::

        score(n, s) = scale * sum_h weights[n, h] * relu(q[n, h] . k[s])      s < visible(n)
        visible(n)  = floor((positions[n] + 1) / ratio)                       row s ends with token ratio * (s + 1) - 1

    With FP8 keys, q[n, h] . k[s] is the product of the e4m3 values, the sum is multiplied by the scale of key s, and
    the scales of the queries are folded into the weights. With FP4 keys it is the product of the values, scales
    included.

    Each list is sorted by descending score. Among equal scores (ReLU makes exact zeros) the lower row is first, and is
    the one chosen if there is room for only one. A query that sees fewer than topk rows gets all of them, then -1.

    Args:
        q: [N, H, D] with k [M, D] and weights [N, H]: one sequence; or [B, T, H, D] with [B, M, D] and [B, T, H]: a
            batch, which gives [B, T, topk]. RoPE is already applied. weights may be negative.
            Or q e4m3 [N, H, 128] with k an :class:`dsv4.IndexCache`, block_table, and weights that include the scales
            of q: ``dsv4.caches.index_keys.quantize_queries`` makes both. With FP4 keys q may be FP4 too, uint8
            [N, H, 64], with q_scales: ``quantize_queries_fp4`` makes both, and the weights stay as they are.
        topk: width of the lists (512 for V4-Flash, 1024 for V4-Pro).
        positions: int32 or int64 [N] (or [B, T]), the token position of each query. Or
        lengths: int32 or int64 [N] (or [B, T]), the number of rows that each query sees, instead of positions.
        block_table: int32 [R, pages], with q [N, H, D] and k [pages, page, D]: row j of request r is row ``j % page``
            of page ``block_table[r, j // page]``. The lists then contain rows of the pool, as v4_attention expects
            them: ``page number * page + row in the page``; of equal scores the row that is earlier in the request
            is first. Entries past the visible rows are not read.
        request_starts: int32 [R + 1], as in v4_attention: queries starts[r] .. starts[r+1] - 1 belong to request r.
            Queries past the last one see nothing. Default: every query is its own request.
        scale: default D ** -0.5 * H ** -0.5, as in the model. Any positive scale gives the same choice; 0 makes all
            scores equal, and a negative scale chooses the lowest.
        request_rows: with a block table, the lists contain rows of the request (j above), as engines store them.
        q_scales: int32 [N, H], of FP4 queries: four ue8m0, for 32 values each, the first in the lowest byte.
        bf16_scores: round as V4.1's reference does: each q . k, each product with its weight (bf16, too), and their sum
            become bf16. Scores are equal more often then.
        blocks: int32 [N, B], from :func:`index_blocks`: only rows 8 b .. 8 b + 7 of these blocks of the request are
            scored; -1 is nothing, and no block is listed twice. If the numbers rise, the lower of equal rows is
            first, else the one that is earlier in the list. A row whose score is NaN is not listed.
        return_scores: also return the scores of the chosen rows, fp32 [N, topk], -inf where the index is -1.
        out: write the lists here (int32; the last stride is 1) and return it.
        plan: a :class:`dsv4.Plan` from :func:`dsv4.plan`, with preallocated buffers (CUDA graphs).
        backend: "auto" (kernels if they can run the problem, else torch), "cuda" and "softsm" (the kernels), "cpu".

    Rows of k that no query sees may contain NaN or inf. Scores are computed in fp32 (fp64 for fp64 q, on a CPU); scores
    that differ by less than their rounding may be in either order. Only one block of queries is in memory at a time.
    The kernels accept bf16 and fp16 (the same for q and k), up to 128 heads, head dims up to 256 that are multiples of
    8, and topk up to 4096; FP8 and FP4 keys if pages begin at multiples of 16 bytes, FP4 keys in pages of a multiple of
    8 rows. Hopper's tensor cores sum e4m3 products with about 14 bits, the CPU in fp32. The kernels turn an FP4 key, or
    query, into e4m3 under its greatest scale; a group whose scale is less than 2 ** -11 of it becomes zeros.
    """
    checks.flag("return_scores", return_scores)
    return _call(INDEX_TOPK, (q, k, weights), (blocks,), (topk,), return_scores, **keywords)


def index_blocks(
    q: Tensor, k: Tensor | IndexCache, weights: Tensor, topk: int, topk_blocks: int = 2048, **keywords: Unpack[Keywords]
) -> Both:
    """Return the lists of :func:`index_topk` and the best blocks of rows -> (int32 [N, topk], int32 [N, topk_blocks]).

    Block b is rows 8 b .. 8 b + 7 of a sequence or request. Its score is the greatest score of its rows that the query
    sees; the last block that the query sees is always kept. The numbers of the kept blocks rise, then -1 follows. Among
    equal scores the lower block is kept.

    The arguments are those of index_topk, with q [N, H, D]; its last paragraph applies. Plans are made for this
    function.
    """
    for name, count in (("topk", topk), ("topk_blocks", topk_blocks)):
        checks.at_least(1, name, count)
    return _call(INDEX_BLOCKS, (q, k, weights), (), (topk, topk_blocks), True, **keywords)


def _call(
    op: Operation,
    given: tuple,
    more: tuple,
    counts: tuple,
    both: bool,
    /,
    *,
    positions=None,
    lengths=None,
    block_table=None,
    request_starts=None,
    q_scales=None,
    out=None,
    plan=None,
    backend="auto",
    **options: Any,
) -> Any:
    try:
        checked = IndexOptions.checked(*counts, **options)
    except TypeError:
        reject_unknown(op.name, options, Keywords)
        raise
    q, k, weights = given
    if isinstance(k, IndexCache):
        k = k.page_view()
    tensors = (q, k, weights, positions, lengths, block_table, request_starts, q_scales, *more)
    return operators.call(op, tensors, checked, both, out, plan, checks.backend(backend))


for _function in (index_topk, index_blocks):
    set_signature(_function, Keywords, _call, IndexOptions.checked)


def _outputs(arguments: dict[str, Any]) -> Shapes:
    shape = (*arguments["q"].shape[:-2], arguments["topk"])
    return (shape, torch.int32), (shape, torch.float32)


def _block_outputs(arguments: dict[str, Any]) -> Shapes:
    lead = arguments["q"].shape[:-2]
    return ((*lead, arguments["topk"]), torch.int32), ((*lead, arguments["topk_blocks"]), torch.int32)


INDEX_TOPK = Operation(
    "index_topk",
    "index",
    ("q", "k", "weights", "positions", "lengths", "block_table", "request_starts", "q_scales", "blocks"),
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
    without=("topk_blocks",),
)
INDEX_BLOCKS = Operation(
    "index_blocks",
    "index",
    ("q", "k", "weights", "positions", "lengths", "block_table", "request_starts", "q_scales"),
    3,
    IndexOptions,
    ("out", "blocks"),
    _block_outputs,
    problem.build,
    problem.check_values,
    (3,),
    plan=plans.reserved_for_blocks,
    warmup=plans.warmup_calls,
    falls_back=True,
    positional=("topk", "topk_blocks"),
)
operators.define_operation(INDEX_TOPK)
operators.define_operation(INDEX_BLOCKS)
