"""Turn a validated problem of index_topk or index_blocks into a program. All architectures share this file."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dsv4.caches.formats import INDEX_132
from dsv4.caches.mxfp4_keys import INDEX_68
from dsv4.fmha.kernels.prepare import is_aligned
from dsv4.index.kernels.arguments import IndexKeys, IndexQueries, IndexScores, Owners
from dsv4.index.kernels.choice import Part
from dsv4.index.kernels.scores import BATCH, FP4_BOTH, FP4_KEYS, HIGHEST, ONE, OWN, SAME, STARTS
from dsv4.index.problem import IndexProblem
from dsv4.index.sizes import (
    BLOCK,
    INDEX_PIECE,
    MAX_TOPK,
    block_words,
    index_block,
    index_list_words,
    index_shares,
    index_splits,
    index_words,
    power_of_two,
)
from dsv4.kernels.compat import TensorDescriptor, gl
from dsv4.kernels.division import inverse_of
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Null, Program, Slot
from dsv4.runtime.splits import choose_splits


def supports(p: IndexProblem) -> str | None:
    """Return None, or why these kernels cannot run the problem."""
    if p.format is not None:
        if p.k.stride(0) % 16 and p.k.shape[0] > 1 or p.k.data_ptr() % 16:
            return f"FP8 pages {p.k.stride(0)} bytes apart; the GPU kernels accept pages at multiples of 16 bytes"
        if p.fp4 and p.k.shape[1] % BLOCK:
            return f"FP4 pages of {p.k.shape[1]} rows; the GPU kernels accept multiples of {BLOCK}"
    elif p.q.dtype not in (torch.bfloat16, torch.float16) or p.k.dtype != p.q.dtype:
        return f"q {p.q.dtype} and k {p.k.dtype}; the GPU kernels accept torch.bfloat16 or torch.float16, both alike"
    if p.head_dim > 256 or p.head_dim % 8:
        return f"head dim {p.head_dim}; the GPU kernels accept multiples of 8 up to 256"
    if not 0 < p.q_heads <= 128:
        return f"{p.q_heads} heads; the GPU kernels accept up to 128"
    for name, size in (("topk", p.topk), ("topk_blocks", p.topk_blocks)):
        if size > MAX_TOPK:
            return f"{name} {size}; the GPU kernels accept up to {MAX_TOPK}"
    if p.among is not None and p.among.shape[1] > MAX_TOPK:
        return f"{p.among.shape[1]} blocks; the GPU kernels accept up to {MAX_TOPK}"
    if max(p.max_seqlen_k, p.k.numel() // p.k.shape[-1]) > 2**31 - 1 - INDEX_PIECE:
        return f"{p.max_seqlen_k} rows; row numbers have 32 bits"
    return None


# (queries of a sequence, heads, dims) -> (queries of one program, concurrent programs per SM, options)
Tiling = Callable[[int, int, int], tuple[int, int, dict]]


def prepare_topk(p: IndexProblem, target: Target, program: Program, kernel: Any, tiling: Tiling) -> None:
    """Add the launches for scores and choice, for as many queries at a time as fit. The tensors of p are slots."""
    given = (p.out, p.scores)
    p = _in_lines(p, program)
    words = index_words(p.columns, p.topk)
    if p.topk_blocks:
        words += block_words(p.columns, p.topk_blocks)
    scratch: Any = p.scratch
    if scratch is None or scratch.numel() < words:
        words_needed = index_block(p.batch, p.columns, p.topk) * words
        shares = index_shares(p.batch, target.num_sms, p.columns, p.topk, p.topk_blocks)
        words_needed += p.batch * index_list_words(p.columns, shares, p.topk, p.topk_blocks) if shares > 1 else 0
        scratch = program.workspace("scratch", (words_needed,), torch.float32)
    step = -(-p.batch // -(-p.batch // (scratch.numel() // words)))  # blocks of one size
    owner, owners = _owners(p, program)
    q, k = _aligned_rows(program, p.q), _aligned_rows(program, p.k) if p.format is None else p.k
    for first in range(0, p.batch, step):
        part = Part(p, target, program, owner, owners, scratch, first, min(step, p.batch - first))
        lists = part.key_lists()
        scores = part.scores(lists)
        _score(part, kernel, tiling, q, k, scores)
        part.choose(scores, lists)
    for asked, written in zip(given, (p.out, p.scores), strict=True):
        if written is not None and written.index != asked.index:
            program.copy(asked, written)


def _in_lines(p: IndexProblem, program: Program) -> IndexProblem:
    """Flatten the queries of a batch to one dimension; k becomes [sequences or pages, rows, D]."""
    changes: dict[str, Any] = {} if p.k.ndim == 3 else {"k": p.k.unsqueeze(0)}
    if p.q.ndim == 4:
        # Copy before merging dimensions: a copy is one of a whole tensor.
        q, counts = _aligned_rows(program, p.q), p.counts if p.counts.is_contiguous() else program.copied(p.counts)
        changes |= {"q": program.flattened(q), "weights": program.flattened(p.weights)}
        changes |= {"counts": program.flattened(counts)}
        for name in ("out", "scores"):
            x = getattr(p, name)
            if x is not None:
                whole = x.shape[0] <= 1 or x.shape[1] <= 1 or x.stride(0) == x.shape[1] * x.stride(1)
                changes[name] = program.flattened(x if whole else program.workspace(name, x.shape, x.dtype))
    return replace(p, **changes)


def _owners(p: IndexProblem, program: Program) -> tuple[int, Owners]:
    """Return whose keys a query reads, and the kernel arguments for it."""

    def contiguous(x: Any) -> Any:
        return x if x.is_contiguous() else program.copied(x)

    table: Any = Null(torch.int32)
    starts: Any = table
    if p.block_table is None:
        owner = ONE if p.k.shape[0] == 1 else BATCH
    else:
        owner, table = (OWN if p.request_starts is None else STARTS), p.block_table
        if p.request_starts is not None:
            starts = contiguous(p.request_starts)
    among: Any = p.among
    if among is not None and among.stride(-1) != 1 and among.shape[-1] > 1:
        among = program.copied(among)
    return owner.value, Owners(
        starts_ptr=starts,
        count_ptr=contiguous(p.counts),
        table_ptr=table,
        table_line=0 if p.block_table is None else p.block_table.stride(0),
        requests=p.sequences,
        tokens=max(p.tokens, 1),
        capacity=p.max_seqlen_k,
        ratio=p.ratio,
        among_ptr=Null(torch.int32) if among is None else among,
        among_line=0 if among is None else among.stride(0),
        among=0 if p.among is None else p.among.shape[1],
    )


def _score(part: Part, kernel: Any, tiling: Tiling, q: Slot, k: Slot, scores: IndexScores) -> None:
    p, target, owner, first, count = part.p, part.target, part.owner, part.first, part.count
    # Queries of one sequence share the keys that a program reads, unless each has its own blocks.
    each = 1 if owner == OWN.value or p.among is not None else p.batch // max(p.sequences, 1)
    heads, dims = max(16, power_of_two(p.q_heads)), max(64, power_of_two(p.head_dim))
    together, residents, options = tiling(each, heads, dims)
    blocks = -(-count // together)
    if "ALONE" in kernel.arg_names or p.fp4 and "STAGES" in options:
        spare = p.fp8 and together == 1
        splits = index_splits(blocks, target.num_sms, residents, p.columns, 128 if p.fp4 else 64, spare)
    else:
        splits = choose_splits(blocks, residents * target.num_sms, p.columns, merged=False)
    arguments: dict[str, Any] = dict(
        queries=IndexQueries(
            ptr=q,
            weights_ptr=p.weights,
            scales_ptr=Null(torch.int32) if p.q_scales is None else p.q_scales,
            first=first,
            end=first + count,
            heads=p.q_heads,
            dims=p.head_dim,
            stride_qn=_stride_16(q, 0),
            stride_qh=_stride_16(q, 1),
            stride_wn=p.weights.stride(0),
            stride_wh=p.weights.stride(1),
            stride_sn=0 if p.q_scales is None else p.q_scales.stride(0),
            stride_sh=0 if p.q_scales is None else p.q_scales.stride(1),
            # Spread tiles begin earlier, but each lasts a little longer.
            spread=int(blocks * splits <= residents * target.num_sms and p.columns <= 32 * 128 * splits),
        ),
        keys=IndexKeys(
            k,
            *p.k.shape[:2],
            _stride_16(k, 0),
            _stride_16(k, 1) if p.format is None else p.format.data_step // 16,
            *inverse_of(p.k.shape[1]),
        ),
        owners=part.owners,
        scores=scores,
        # FP4 keys were multiplied by a power of two.
        factor=float(p.scale) * (2.0**-HIGHEST.value if p.fp4 else 1.0),
    )
    if "scales_desc" in kernel.arg_names:
        sizes = (64, 64) if p.among is None else (BLOCK, 32)
        arguments["keys_desc"], arguments["scales_desc"] = _fp4_boxes(k, *sizes)
    elif "keys_desc" in kernel.arg_names:
        arguments["keys_desc"] = _boxes(k, p.fp8)
    fp4 = SAME if not p.fp4 else FP4_KEYS if p.q_scales is None else FP4_BOTH
    constants = dict(
        WHOLE=p.head_dim == dims,
        ALONE=p.k.shape[1] == 64,
        FP4=fp4.value,
        AMONG=p.among is not None,
        BLOCKS=p.topk_blocks > 0,
        BF16=p.options.bf16_scores,
    )
    part.program.launch(
        kernel,
        (blocks, splits),
        arguments,
        OWNER=owner,
        QUERIES=together,
        HEADS=heads,
        DIMS=dims,
        **constants,
        **options,
    )


def _boxes(k: Slot, fp8: bool) -> TensorDescriptor:
    """Return the TMA descriptor of pages, with boxes of 64 keys."""
    pages, rows, _ = k.shape
    if fp8:
        strides = [k.stride(0) if pages > 1 else INDEX_132.default_stride(rows), INDEX_132.data_step, 1]
    else:
        row = k.stride(1) if rows > 1 else 128
        strides = [k.stride(0) if pages > 1 else max(rows, 1) * row, row, 1]
    layout = gl.NVMMASharedLayout(128, 8 * k.element_size(), rank=3)
    return TensorDescriptor(k, [pages, rows, 128], strides, [1, 64, 128], layout)


def _fp4_boxes(k: Slot, keys: int, scales_of: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return descriptors of FP4 pages, as words: boxes of `keys` keys, and of the scales of `scales_of` keys."""
    pages, rows, _ = k.shape
    apart = (k.stride(0) if pages > 1 else INDEX_68.default_stride(rows)) // 4
    words = replace(k.view((pages, rows, 16), (apart, 16, 1)), dtype=torch.int32)
    scales = replace(k.view((pages, rows), (apart, 1), rows * INDEX_68.data_bytes), dtype=torch.int32)
    return (
        TensorDescriptor(words, [pages, rows, 16], [apart, 16, 1], [1, keys, 16], gl.NVMMASharedLayout(64, 32, rank=3)),
        TensorDescriptor(scales, [pages, rows], [apart, 1], [1, scales_of], gl.NVMMASharedLayout(0, 32, rank=2)),
    )


def _aligned_rows(program: Program, x: Slot) -> Slot:
    """Return rows that 16-byte loads can read; copy them if need be."""
    fit = is_aligned(x) and x.stride(-1) == 1 and all(s >= 0 for s in x.stride())
    return x if fit else program.copied(x)


def _stride_16(x: Slot, dim: int) -> int:
    """Return a stride in units of 16 bytes."""
    return x.stride(dim) * x.element_size() // 16 if x.shape[dim] > 1 else 0
