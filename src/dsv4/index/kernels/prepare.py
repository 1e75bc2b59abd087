"""Turn a validated problem of index_topk or index_blocks into a program. All architectures share this file."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dsv4.caches.formats import INDEX_132
from dsv4.caches.mxfp4_keys import INDEX_68
from dsv4.fmha.kernels.prepare import is_aligned
from dsv4.index.kernels.arguments import (
    BlockLists,
    Chosen,
    IndexKeys,
    IndexQueries,
    IndexScores,
    KeyLists,
    Owners,
    ScoreSource,
    TablePages,
    TopKLists,
)
from dsv4.index.kernels.blocks import index_blocks_kernel
from dsv4.index.kernels.choose import index_choose
from dsv4.index.kernels.gather import index_gather, index_rank
from dsv4.index.kernels.scores import BATCH, FP4_BOTH, FP4_KEYS, HIGHEST, ONE, OWN, SAME, STARTS
from dsv4.index.kernels.select import index_select
from dsv4.index.problem import IndexProblem
from dsv4.index.sizes import (
    BLOCK,
    GROUP,
    HELD,
    HELD_KEYS,
    INDEX_PIECE,
    LINE_UNIT,
    MAX_TOPK,
    MAX_TOPK_BY_GROUPS,
    MOST_EACH,
    block_words,
    cut_by_rows,
    index_block,
    index_candidates,
    index_each,
    index_groups,
    index_kept,
    index_line,
    index_list_words,
    index_room,
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
        count = min(step, p.batch - first)
        # The data that the choice of blocks reads and keeps lies behind all others.
        behind = 0
        if p.topk_blocks:
            behind = (scratch.numel() - count * block_words(p.columns, p.topk_blocks)) // 4 * 4
        shares = index_shares(count, target.num_sms, p.columns, p.topk, p.topk_blocks)
        lists = _key_lists(p, scratch, first, count, behind, shares)
        scores = _scores(p, scratch, count, behind, lists)
        _score(p, target, program, kernel, tiling, owner, owners, q, k, scores, first, count)
        if lists is not None:
            _gather(p, program, owner, owners, scores, lists, count, shares)
            continue
        few = index_line(p.columns) // GROUP <= INDEX_PIECE or index_candidates(p.columns, p.topk) > 0
        if p.topk <= MAX_TOPK_BY_GROUPS and few:
            _choose(p, target, program, owner, owners, scratch, first, count)
        else:
            _select(p, program, owner, owners, scratch, first, count)
        if p.topk_blocks:
            _keep_blocks(p, program, owner, owners, scratch, first, count, behind)
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


def _lists(p: IndexProblem) -> TopKLists:
    assert p.out is not None
    return TopKLists(
        ptr=p.out,
        line=p.out.stride(0),
        scores_ptr=Null(torch.float32) if p.scores is None else p.scores,
        scores_line=0 if p.scores is None else p.scores.stride(0),
        want_scores=int(p.scores is not None),
        topk=p.topk,
        pages=TablePages(p.k.shape[0], p.k.shape[1]),
    )


def _score(
    p: IndexProblem,
    target: Target,
    program: Program,
    kernel: Any,
    tiling: Tiling,
    owner: int,
    owners: Owners,
    q: Slot,
    k: Slot,
    scores: IndexScores,
    first: int,
    count: int,
) -> None:
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
        owners=owners,
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
    program.launch(
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


def _maxima(p: IndexProblem, scratch: Slot, count: int) -> Slot:
    """Return the slot of the maxima, which lies behind the scores."""
    line = index_line(p.columns)
    return scratch.words(count * line, count * line // GROUP, torch.float32)


def _block_maxima(p: IndexProblem, scratch: Slot, count: int, behind: int) -> Slot:
    return scratch.words(behind, count * (index_line(p.columns) // BLOCK), torch.float32)


def _scores(p: IndexProblem, scratch: Slot, count: int, behind: int, lists: KeyLists | None) -> IndexScores:
    return IndexScores(
        ptr=scratch,
        line=index_line(p.columns),
        maxima_ptr=_maxima(p, scratch, count),
        maxima_line=index_line(p.columns) // GROUP,
        blocks_ptr=_block_maxima(p, scratch, count, behind) if p.topk_blocks else Null(torch.float32),
        blocks_line=index_line(p.columns) // BLOCK,
        counts_ptr=Null(torch.int32) if lists is None else lists.counts_ptr,
        counted=int(lists is not None),
    )


def _key_lists(p: IndexProblem, scratch: Slot, first: int, count: int, behind: int, shares: int) -> KeyLists | None:
    """Return key lists behind the maxima, if several CTAs choose the rows of a query and there is room."""
    line = index_line(p.columns)
    at = count * (line + line // GROUP)
    words = count * index_list_words(p.columns, shares, p.topk, p.topk_blocks)
    if shares == 1 or at + words > (behind or scratch.numel()) or index_groups(p.columns) > MOST_EACH * INDEX_PIECE:
        return None  # a plan for other problems may have reserved less room
    sizes = [index_room(p.columns, p.topk), shares * index_kept(p.columns, p.topk)]
    if p.topk_blocks:
        sizes += [index_room(p.columns, p.topk_blocks, BLOCK), shares * index_kept(p.columns, p.topk_blocks)]
    counts = scratch.words(at, 2 * count, torch.int32)
    at += 4 * count
    keys: list[Any] = [Null(torch.int64)] * 4
    for i, size in enumerate(sizes):
        keys[i] = scratch.words(at, count * size, torch.int64)
        at += 2 * count * size
    lines = *sizes, 0, 0
    return KeyLists(
        first, counts, rows_ptr=keys[0], rows_line=lines[0], blocks_ptr=keys[2], blocks_line=lines[2],
        keep_ptr=keys[1], keep_blocks_ptr=keys[3], topk=p.topk, most=p.topk_blocks,
    )  # fmt: skip


def _gather(
    p: IndexProblem,
    program: Program,
    owner: int,
    owners: Owners,
    scores: IndexScores,
    lists: KeyLists,
    count: int,
    shares: int,
) -> None:
    """Choose the rows of few queries, and their blocks, in two launches."""
    groups, kept = index_groups(p.columns), index_kept(p.columns, p.topk)
    each, block_each = index_each(p.columns, p.topk), index_each(p.columns, max(p.topk_blocks, 1))
    grid = (count, shares, 2 if p.topk_blocks else 1)
    program.launch(
        index_gather, grid, dict(source=scores, lists=lists, owners=owners), OWNER=owner, AMONG=p.among is not None,
        UNITS=groups // each, EACH=each, BLOCK_UNITS=groups // block_each if p.topk_blocks else 0,
        BLOCK_EACH=block_each, SHARES=shares, AT_ONCE=min(INDEX_PIECE // GROUP, 2 * kept),
        KEPT=kept, SINGLE=cut_by_rows(p.columns, p.topk), num_warps=16, launch_pdl=True,
    )  # fmt: skip
    blocks = BlockLists(Null(torch.int32), 0, 0)
    if p.topk_blocks:
        assert p.blocks is not None
        blocks = BlockLists(p.blocks, p.blocks.stride(0), p.topk_blocks)
    program.launch(
        index_rank, grid, dict(lists=lists, owners=owners, to=_lists(p), to_blocks=blocks), OWNER=owner,
        POOL=not p.options.request_rows, AMONG=p.among is not None, KEPT=kept, WIDTH=max(kept, power_of_two(p.topk)),
        BLOCKS_KEPT=index_kept(p.columns, p.topk_blocks) if p.topk_blocks else 0,
        BLOCKS_WIDTH=power_of_two(p.topk_blocks), SHARES=shares, HELD=HELD_KEYS, num_warps=16, launch_pdl=True,
    )  # fmt: skip


def _choose(
    p: IndexProblem, target: Target, program: Program, owner: int, owners: Owners, scratch: Slot, first: int, count: int
) -> None:
    """Choose the best rows of the groups that have the greatest maxima, in one launch, or in two if there are very many
    groups. The kept rows lie behind the maxima."""
    line = index_line(p.columns)
    kept, candidates = index_kept(p.columns, p.topk), index_candidates(p.columns, p.topk)
    at = count * (line + line // GROUP)
    maxima, numbers = _maxima(p, scratch, count), Null(torch.int32)
    if candidates:
        maxima, numbers = _best_groups(p, program, owner, owners, scratch, first, count, at, candidates)
        at += 2 * count * candidates
    size = count * kept
    found = scratch.words(at, size, torch.int32)
    # With few queries the latency of one matters, with many how many run per SM.
    warps, high = (32 if kept > 2048 else 16, 8) if count <= target.num_sms else (8, 4)
    arguments = dict(
        source=ScoreSource(scratch, line // LINE_UNIT, maxima, candidates, numbers),
        chosen=Chosen(first, found, kept, scratch.words(at + size, size, torch.int32)),
        owners=owners,
        lists=_lists(p),
    )
    # Launched early, the choice waits for the scores. With lists of 1024, or more CTAs than SMs, it would occupy room
    # that they need.
    program.launch(
        index_choose, (count,), arguments, OWNER=owner, POOL=not p.options.request_rows, AMONG=p.among is not None,
        GROUPS=power_of_two(candidates) if candidates else index_groups(p.columns), KEPT=kept,
        WIDTH=max(kept, power_of_two(p.topk)), HIGH=high, HELD=HELD, CANDIDATES=candidates > 0,
        num_warps=warps if kept > 128 else 4, launch_pdl=count <= target.num_sms and kept <= 1024,
    )  # fmt: skip


def _best_groups(
    p: IndexProblem,
    program: Program,
    owner: int,
    owners: Owners,
    scratch: Slot,
    first: int,
    count: int,
    at: int,
    candidates: int,
) -> tuple[Slot, Slot]:
    """Choose the best groups of every piece -> (maxima as ordered bits, numbers of the groups)."""
    groups, size = index_line(p.columns) // GROUP, INDEX_PIECE // 2
    kept, kept_numbers = (scratch.words(at + n * count * candidates, count * candidates, torch.int32) for n in (0, 1))
    each = index_kept(p.columns, p.topk)
    arguments = dict(
        source=ScoreSource(_maxima(p, scratch, count), groups, Null(torch.float32), groups, Null(torch.int32)),
        chosen=Chosen(first, kept, each, kept_numbers),
        owners=owners,
        lists=_lists(p),
    )
    program.launch(
        index_select, (count, candidates // each), arguments, OWNER=owner, POOL=not p.options.request_rows,
        AMONG=p.among is not None, FIRST=True, LAST=False, SIZE=size, KEPT=each, WIDTH=each, ROWS=GROUP,
        num_warps=16 if size >= 4096 else 4,
    )  # fmt: skip
    return kept, kept_numbers


def _select(
    p: IndexProblem, program: Program, owner: int, owners: Owners, scratch: Slot, first: int, count: int
) -> None:
    """Choose the best of pieces, until one piece is left. What each round keeps lies behind the scores."""
    items, line = p.columns, index_line(p.columns)
    source, numbers, at = scratch, Null(torch.int32), count * (line + line // GROUP)
    kept = power_of_two(min(p.topk, items))
    while True:
        size = max(kept, min(power_of_two(items), INDEX_PIECE), 128)
        pieces = -(-items // size)
        last = pieces == 1
        warps = min(max(size // 2048, 4), 8)
        words_needed = count * pieces * kept
        chosen, chosen_numbers = (scratch.words(at + n * words_needed, words_needed, torch.int32) for n in (0, 1))
        at += 2 * words_needed
        arguments = dict(
            source=ScoreSource(source, line, Null(torch.float32), items, numbers),
            chosen=Chosen(first, chosen, kept, chosen_numbers),
            owners=owners,
            lists=_lists(p),
        )
        program.launch(
            index_select, (count, pieces), arguments, OWNER=owner, POOL=not p.options.request_rows,
            AMONG=p.among is not None, FIRST=source is scratch, LAST=last, SIZE=size, KEPT=kept,
            WIDTH=max(kept, power_of_two(p.topk)), ROWS=1, num_warps=warps,
        )  # fmt: skip
        if last:
            return
        items = line = pieces * kept
        source, numbers = chosen, chosen_numbers


def _keep_blocks(
    p: IndexProblem, program: Program, owner: int, owners: Owners, scratch: Slot, first: int, count: int, behind: int
) -> None:
    """Choose the best blocks of pieces, until one is left. What each round keeps lies behind the blocks' maxima."""
    assert p.blocks is not None
    items = line = index_line(p.columns) // BLOCK
    source, numbers, at = _block_maxima(p, scratch, count, behind), Null(torch.int32), behind + count * items
    kept, started = max(power_of_two(min(p.topk_blocks, items)), 4), False
    while True:
        size = max(kept, min(power_of_two(items), INDEX_PIECE), 128)
        pieces = -(-items // size)
        last = pieces == 1
        words = 0 if last else count * pieces * kept
        held, held_numbers = (scratch.words(at + n * words, words, torch.int32) for n in (0, 1))
        at += 2 * words
        arguments = dict(
            source=ScoreSource(source, line, Null(torch.float32), items, numbers),
            chosen=Chosen(first, held, kept, held_numbers),
            owners=owners,
            lists=BlockLists(p.blocks, p.blocks.stride(0), p.topk_blocks),
        )
        program.launch(
            index_blocks_kernel,
            (count, pieces),
            arguments,
            OWNER=owner,
            FIRST=not started,
            LAST=last,
            SIZE=size,
            KEPT=power_of_two(p.topk_blocks) if last else kept,
            num_warps=32 if size > 4096 else 4,
        )
        if last:
            return
        items = line = pieces * kept
        source, numbers, started = held, held_numbers, True


def _aligned_rows(program: Program, x: Slot) -> Slot:
    """Return rows that 16-byte loads can read; copy them if need be."""
    fit = is_aligned(x) and x.stride(-1) == 1 and all(s >= 0 for s in x.stride())
    return x if fit else program.copied(x)


def _stride_16(x: Slot, dim: int) -> int:
    """Return a stride in units of 16 bytes."""
    return x.stride(dim) * x.element_size() // 16 if x.shape[dim] > 1 else 0
