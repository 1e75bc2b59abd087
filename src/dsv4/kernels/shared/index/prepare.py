"""index_topk from a validated problem to launches. Shared by all architectures."""

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4.index.problem import IndexProblem
from dsv4.kernels.shared.fmha.prepare import inverse_of, is_aligned, multiprocessors, unread
from dsv4.kernels.shared.index.scores import BATCH, ONE, OWN, STARTS
from dsv4.kernels.shared.index.select import index_select
from dsv4.runtime import aot
from dsv4.runtime.plan import INDEX_PIECE, MAX_TOPK, choose_splits, index_block, index_words


def supports(p: IndexProblem) -> str | None:
    """None, or why these kernels cannot run the problem."""
    if p.q.dtype not in (torch.bfloat16, torch.float16) or p.k.dtype != p.q.dtype:
        return f"q {p.q.dtype} and k {p.k.dtype}; the GPU kernels take torch.bfloat16 or torch.float16, both alike"
    if p.head_dim > 256 or p.head_dim % 8:
        return f"head dim {p.head_dim}; the GPU kernels take multiples of 8 up to 256"
    if not 0 < p.q_heads <= 128:
        return f"{p.q_heads} heads; the GPU kernels take up to 128"
    if p.topk > MAX_TOPK:
        return f"topk {p.topk}; the GPU kernels take up to {MAX_TOPK}"
    if max(p.max_seqlen_k, p.k.shape[0] * p.k.shape[1]) > 2**31 - 1 - INDEX_PIECE:
        return f"{p.max_seqlen_k} rows; row numbers have 32 bits"
    return None


# (queries of a sequence, heads, dims) -> (queries of one program, programs on a multiprocessor at a time, options)
Tiling = Callable[[int, int, int], tuple[int, int, dict]]


def forward(p: IndexProblem, kernel, tiling: Tiling) -> None:
    """Scores, then the choice, of as many queries at a time as there is room for."""
    assert p.out is not None
    scratch = p.scratch
    words = index_words(p.max_seqlen_k, p.topk)
    if scratch is None or scratch.numel() < words:
        scratch = torch.empty(
            index_block(p.batch, p.max_seqlen_k, p.topk) * words, dtype=torch.float32, device=p.q.device
        )
    step = scratch.numel() // words
    how, names = _how(p)
    for first in range(0, p.batch, step):
        count = min(step, p.batch - first)
        scores = scratch[: count * p.max_seqlen_k]
        _score(p, kernel, tiling, how, names, scores, first, count)
        _select(p, how, names, scores, scratch[count * p.max_seqlen_k :], first, count)


def _how(p: IndexProblem) -> tuple[int, dict]:
    """Whose keys a query reads, and the arguments that say so."""
    nothing = unread(p.q.device)
    if p.block_table is None:
        how, table, starts = (ONE if p.k.shape[0] == 1 else BATCH), nothing, nothing
    else:
        how, table = (OWN if p.request_starts is None else STARTS), p.block_table
        starts = nothing if p.request_starts is None else p.request_starts.contiguous()
    return how.value, dict(
        table_ptr=table, starts_ptr=starts, count_ptr=p.counts.contiguous(), capacity=p.max_seqlen_k, ratio=p.ratio,
        tokens=max(p.tokens, 1), requests=p.sequences, pages=p.k.shape[0], page_rows=p.k.shape[1],
        table_line=table.stride(0) if table.ndim == 2 else 0,
    )  # fmt: skip


def _score(
    p: IndexProblem, kernel, tiling: Tiling, how: int, names: dict, scores: Tensor, first: int, count: int
) -> None:
    q, k = _rows_of_cells(p.q), _rows_of_cells(p.k)
    # Queries of one sequence share the keys that a program reads.
    each = 1 if how == OWN.value else p.batch // max(p.sequences, 1)
    heads, dims = max(16, _power(p.q_heads)), max(64, _power(p.head_dim))
    together, residents, options = tiling(each, heads, dims)
    blocks = -(-count // together)
    splits = choose_splits(blocks, residents * multiprocessors(p.q.device), p.max_seqlen_k)
    inverse, shift = inverse_of(p.k.shape[1])
    arguments = names | dict(
        q_ptr=q, k_ptr=k, weights_ptr=p.weights, scores_ptr=scores, factor=float(p.scale), first_query=first,
        queries=first + count, heads=p.q_heads, dims=p.head_dim, page_stride=_cells(k, 0), row_stride=_cells(k, 1),
        page_inverse=inverse, page_shift=shift, stride_qn=_cells(q, 0), stride_qh=_cells(q, 1),
        stride_wn=p.weights.stride(0), stride_wh=p.weights.stride(1), scores_line=p.max_seqlen_k,
    )  # fmt: skip
    aot.launch(
        kernel, (blocks, splits), _taken(kernel, arguments), HOW=how, QUERIES=together, HEADS=heads, DIMS=dims,
        WHOLE=p.head_dim == dims, **options,
    )  # fmt: skip


def _select(p: IndexProblem, how: int, names: dict, scores: Tensor, rest: Tensor, first: int, count: int) -> None:
    """The best of pieces, until one piece is left."""
    assert p.out is not None
    items, line, source, numbers = p.max_seqlen_k, p.max_seqlen_k, scores, unread(p.q.device)
    kept = _power(min(p.topk, items))
    words = rest.view(torch.int32)
    while True:
        size = max(kept, min(_power(items), INDEX_PIECE), 128)
        pieces = -(-items // size)
        last = pieces == 1
        warps = min(max(size // 2048, 4), 8)
        room = count * pieces * kept
        chosen, chosen_numbers, words = words[:room], words[room : 2 * room], words[2 * room :]
        arguments = names | dict(
            source_ptr=source, numbers_ptr=numbers, kept_ptr=chosen, kept_numbers_ptr=chosen_numbers,
            out_ptr=p.out, scores_ptr=scores if p.scores is None else p.scores, first_query=first, items=items,
            topk=p.topk, source_line=line, out_line=p.out.stride(0),
            scores_line=0 if p.scores is None else p.scores.stride(0), want_scores=int(p.scores is not None),
            kept_size=kept,
        )  # fmt: skip
        aot.launch(
            index_select, (count, pieces), _taken(index_select, arguments), HOW=how, FIRST=source is scores, LAST=last,
            SIZE=size, KEPT=kept, WIDTH=max(kept, _power(p.topk)), num_warps=warps,
        )  # fmt: skip
        if last:
            return
        items = line = pieces * kept
        source, numbers = chosen, chosen_numbers


def _taken(kernel, arguments: dict) -> list:
    return [arguments[name] for name in kernel.arg_names if name in arguments]


def _power(n: int) -> int:
    """The power of two that is not less."""
    return 1 << max(n - 1, 0).bit_length()


def _rows_of_cells(x: Tensor) -> Tensor:
    """Rows that 16-byte loads can read."""
    fit = is_aligned(x) and x.stride(-1) == 1 and all(s >= 0 for s in x.stride())
    return x if fit else x.clone(memory_format=torch.contiguous_format)


def _cells(x: Tensor, dim: int) -> int:
    """A stride in units of 8 elements."""
    return x.stride(dim) // 8 if x.shape[dim] > 1 else 0
