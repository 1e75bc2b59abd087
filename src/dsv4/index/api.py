"""The lightning indexer of CSA layers: which compressed rows a query attends to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.index import cpu as cpu_index
from dsv4.index import problem as index_problem
from dsv4.index.problem import IndexProblem
from dsv4.runtime import checks, dispatch
from dsv4.runtime import operators as ops
from dsv4.runtime.plan import Plan


def index_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    *,
    positions: Tensor | None = None,
    ratio: int = 4,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    request_starts: Tensor | None = None,
    scale: float | None = None,
    return_scores: bool = False,
    out: Tensor | None = None,
    plan: Plan | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The topk compressed rows with the highest index scores, for each query -> int32 [N, topk], -1 = nothing there.

    ::

        score(n, s) = scale * sum_h weights[n, h] * relu(q[n, h] . k[s])      s < visible(n)
        visible(n)  = floor((positions[n] + 1) / ratio)                       row s ends with token ratio * (s + 1) - 1

    The entries of a list fall in score; of equal scores (ReLU makes exact zeros) the lower row comes first, and only it
    is taken when there is room for one. A query that sees fewer than topk rows gets them all, then -1.

    Args:
        q: [N, H, D] with k [M, D] and weights [N, H]: one sequence; or [B, T, H, D] with [B, M, D] and [B, T, H]: a
            batch, which gives [B, T, topk]. RoPE is already applied. weights may be negative.
        topk: width of the lists (512 for V4-Flash, 1024 for V4-Pro).
        positions: int32 or int64 [N] (or [B, T]), the token position of each query. Or
        lengths: int32 or int64 [N] (or [B, T]), the number of rows that each query sees, in place of positions.
        block_table: int32 [R, pages], with q [N, H, D] and k [pages, page, D]: row j of request r is row ``j % page``
            of page ``block_table[r, j // page]``. The lists then name rows of the pool, as v4_attention takes them:
            ``page number * page + place``; the lower row is the earlier one of the request. Entries past what is seen
            are not read.
        request_starts: int32 [R + 1], as in v4_attention: queries starts[r] .. starts[r+1] - 1 belong to request r.
            Queries past the last one see nothing. Default: every query is its own request.
        scale: default D ** -0.5 * H ** -0.5, as in the model; it does not change the choice.
        return_scores: also return the scores of the chosen rows, fp32 [N, topk], -inf where the index is -1.
        out: write the lists here (int32; the last stride is 1) and return it.
        plan: a :class:`dsv4.Plan` from :func:`dsv4.plan`, with buffers made beforehand (CUDA graphs).
        backend: "auto" (kernels where they can run the problem, else torch), "cuda" and "softsm" (the kernels), "cpu".

    Rows of k that no query sees may hold NaN or inf. Scores are computed in fp32 (fp64 for fp64 q, on a CPU); scores
    that differ by less than their rounding may come in either order. Memory is that of one block of queries.
    The kernels take bf16 and fp16 (q and k alike), up to 128 heads, head dims to 256 that are multiples of 8, and topk
    up to 4096.
    """
    checks.flag("return_scores", return_scores)
    checks.backend(backend)
    arguments: dict[str, Any] = dict(
        q=q, k=k, weights=weights, topk=topk, positions=positions, ratio=ratio, lengths=lengths,
        block_table=block_table, request_starts=request_starts, scale=scale,
    )  # fmt: skip
    # The dispatcher would answer a wrong type or rank in its own words, so the shapes are checked before it is asked.
    p = index_problem.build(**arguments)
    checks.forward_only(q=q, k=k, weights=weights)
    shape = (*q.shape[:-2], topk)
    if plan is not None:
        if not isinstance(plan, Plan):
            checks.fail("plan", checks.describe(plan), "None or a Plan from dsv4.plan")
        plan.check("index_topk", p)
    if out is None and plan is None:
        lists, scores = torch.ops.dsv4.index_topk(**arguments, return_scores=return_scores, backend=backend)
        return (lists, scores) if return_scores else lists
    if out is None:
        out = torch.empty(shape, dtype=torch.int32, device=q.device)
    checks.output("out", out, shape, torch.int32, {"q": q})
    scores = torch.empty(shape if return_scores else (0,), dtype=torch.float32, device=q.device)
    scratch = None if plan is None else plan.scratch
    torch.ops.dsv4.index_topk_out(**arguments, scratch=scratch, out=out, scores=scores, backend=backend)
    return (out, scores) if return_scores else out


ARGUMENTS = (
    "Tensor q, Tensor k, Tensor weights, SymInt topk, *, Tensor? positions=None, SymInt ratio=4, Tensor? lengths=None, "
    "Tensor? block_table=None, Tensor? request_starts=None, float? scale=None, str backend='auto'"
)


def _run(p: IndexProblem, out: Tensor, scores: Tensor | None, backend: str) -> None:
    """Fill out [..., topk] and scores."""
    if checks.values_checked(p.q):
        index_problem.check_values(p)
    flat = _lines(out)
    flat_scores = None if scores is None else _lines(scores)
    if out.numel():
        dispatch_index(replace(p, out=flat, scores=flat_scores), backend)
    if flat.data_ptr() != out.data_ptr():  # a batch whose lists lie so that they are no lines of one tensor
        out.copy_(flat.view(out.shape))


def _lines(x: Tensor) -> Tensor:
    """[..., topk] as [N, topk]: the same memory where that is possible."""
    return x.flatten(0, 1) if x.ndim == 3 else x


def dispatch_index(p: IndexProblem, backend: str) -> None:
    found = dispatch.resolve(backend, p.q.device)
    empty = p.max_seqlen_k == 0 or p.k.numel() == 0 or p.q_heads == 0
    if found == "cpu" or empty or (backend == "auto" and dispatch.reason(p) is not None):
        cpu_index.forward(p)
    else:
        dispatch.launch(p, found)


def _kernel(*tensors, return_scores=False, backend="auto", **options):
    p = index_problem.build(*tensors, **options)
    out, scores = _allocate(p, tensors, options, return_scores)
    _run(p, out, scores if return_scores else None, backend)
    return out, scores


def _allocate(p: IndexProblem, tensors, options, return_scores: bool) -> tuple[Tensor, Tensor]:
    q = tensors[0] if tensors else options["q"]
    shape = (*q.shape[:-2], p.topk)
    out = torch.empty(shape, dtype=torch.int32, device=q.device)
    return out, torch.empty(shape if return_scores else (0,), dtype=torch.float32, device=q.device)


def _fake(*tensors, return_scores=False, backend="auto", **options):
    return _allocate(index_problem.build(*tensors, **options), tensors, options, return_scores)


def _kernel_out(*tensors, out, scores, scratch=None, backend="auto", **options):
    p, want = _build_out(*tensors, out=out, scores=scores, scratch=scratch, **options)
    named = dict(zip(NAMES, tensors)) | options
    inputs = {name: x for name, x in named.items() if isinstance(x, Tensor)}
    checks.apart("out", out, inputs)
    if want:
        checks.apart("scores", scores, inputs | {"out": out})
    _run(replace(p, scratch=scratch), out, scores if want else None, backend)


def _build_out(*tensors, out, scores, scratch=None, **options) -> tuple[IndexProblem, bool]:
    p = index_problem.build(*tensors, **options)
    q = tensors[0] if tensors else options["q"]
    shape = (*q.shape[:-2], p.topk)
    checks.output("out", out, shape, torch.int32, {"q": q})
    want = scores.shape != (0,) or len(shape) == 1
    if want:
        checks.output("scores", scores, shape, torch.float32, {"q": q})
    if scratch is not None:
        checks.tensor("scratch", scratch, ("n",), (torch.float32,), like=("q", q))
    return p, want


def _fake_out(*tensors, out, scores, scratch=None, backend="auto", **options):
    _build_out(*tensors, out=out, scores=scores, scratch=scratch, **options)


ops.define(f"index_topk({ARGUMENTS}, bool return_scores=False) -> (Tensor, Tensor)", _kernel, _fake)
NAMES = [a.name for a in torch.ops.dsv4.index_topk.default._schema.arguments]
ops.define(
    f"index_topk_out({ARGUMENTS}, Tensor(c!)? scratch=None, Tensor(a!) out, Tensor(b!) scores) -> ()",
    _kernel_out,
    _fake_out,
)
