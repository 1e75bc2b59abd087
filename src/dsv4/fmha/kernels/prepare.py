"""Turn a validated problem into a program: descriptors, strides, splits, the combine kernel; for all architectures.

A kernel gets the arguments made here that its parameters name.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from dsv4.fmha.kernels.arguments import Options, Sizes, Strides, Tensors
from dsv4.fmha.kernels.scores import kv_scales, score_scale, sign_and_scale
from dsv4.fmha.kernels.tiles import CP_ASYNC, DENSE, NO_BOUND, PAGES, ROWS
from dsv4.fmha.problem import FmhaProblem
from dsv4.kernels.combine import (
    MergeSizes,
    MergeStrides,
    MergeTensors,
    clear_rest,
    combine,
    combine_fp16,
    combine_rows_fp16,
)
from dsv4.kernels.compat import TensorDescriptor, gl
from dsv4.kernels.division import divisor
from dsv4.runtime import checks
from dsv4.runtime import splits as splitting
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Null, Program, Slot

CONVERTED_FROM = 128  # rows
MERGED_ROWS = 4  # rows whose fp16 partial results one CTA merges, if there are few splits
MAX_GRID = 65535  # blocks in the second and third dimension of a grid
FP16_PARTIALS_FROM = 3 << 20  # values of partial results; fp16 ones are 2 us slower with 2 M, faster with 4 M (H200)


@dataclass(frozen=True)
class Tiling:
    """Compile-time choices of one launch."""

    rows: int  # query rows per CTA, or per cluster of CTAs
    keys: int  # per step
    box: int  # rows of a TMA box at most
    options: dict  # further compile-time arguments of the kernel
    loop: bool = False  # one CTA per SM loops over the row tiles; no splits
    order: Any = None  # the order of that loop (causal_order.py, sm90/varlen_order.py)
    dense_as_rows: bool = False  # dense and varlen problems share a variant
    halves: bool = False  # the CTAs of a pair hold K split by rows and V by columns
    codes_by_tma: bool = False  # TMA copies e4m3 unchanged, not through registers
    fp16_partials: bool = False  # the kernel can write fp16 partial results (combine.py)
    clears_rest: bool = False  # the kernel fills rows of a varlen batch that no sequence has
    tiles_last: bool = False  # CTAs of all sequences and heads begin with their last row tiles

    @property
    def ctas(self) -> int:
        """The CTAs of a cluster."""
        return self.options.get("num_ctas", 1)

    @property
    def shared(self) -> int:
        """The CTAs that share an SM."""
        return 2 if self.options.get("maxnreg") == 128 else 1


def widened(p: FmhaProblem, program: Program) -> FmhaProblem:
    """Return the problem with q, k, v and out as wide as the tiles of the kernels: copies with columns of zeros, which
    the program makes first."""
    if p.q.shape[-1] == p.v.shape[-1] == p.head_dim:
        return p

    def made(x: Slot) -> Slot:
        if x.shape[-1] == p.head_dim:
            return x
        wide = program.workspace(f"wide {x.name}", (*x.shape[:-1], p.head_dim), x.dtype)
        program.fill(wide, 0)
        program.copy(wide[..., : x.shape[-1]], x)
        return wide

    k = made(p.k)
    out = program.workspace("wide out", (*p.q.shape[:-1], p.head_dim), p.out.dtype)
    return replace(p, q=made(p.q), k=k, v=k if p.same_kv else made(p.v), out=out)


def keep_out(out: Slot, p: FmhaProblem, program: Program) -> None:
    """Copy the result of a problem that was widened to out."""
    if p.out is not out:
        program.copy(out, p.out[..., : out.shape[-1]])


def batch_reason(p: FmhaProblem) -> str | None:
    """Return None, or why no kernel of this kind can run the problem."""
    return f"batch {p.batch} is over {MAX_GRID}" if p.batch > MAX_GRID else None


def prepare_split(p: FmhaProblem, target: Target, program: Program, kernel: Any, c: Tiling) -> None:
    """Add the forward kernel, and the combine kernel if the keys are split. The tensors of p are slots."""
    row_tiles = _row_tiles(p, c)
    splits, tiles_per_split = _splits(p, target, c, row_tiles)
    grid: tuple[int, ...] = (row_tiles, p.kv_heads * splits, p.batch)
    if c.loop:
        all_tiles = most_row_tiles(p, c.rows) if p.kind == "varlen" else row_tiles * p.kv_heads * p.batch
        grid = (min(all_tiles, target.num_sms // c.ctas),)
    elif grid[1] > MAX_GRID:
        raise ValueError(f"{p.kv_heads} KV heads x {splits} splits of the keys are over {MAX_GRID} blocks")
    elif c.tiles_last:
        grid = (*grid[1:], row_tiles)
    # Deterministic calls: the combine kernel rounds the sink differently, and how many splits a block table has room
    # for is not a property of a sequence; so paged problems use the combine kernel with one split too.
    split = splits > 1 or tiles_per_split > 0 and p.kind == "paged" or is_partial(p)
    kv_load, box = _kv_load(p, c)
    sign, scale = sign_and_scale(p.softmax_scale)
    q = p.q if is_aligned(p.q) else program.copied(p.q)
    k = _addressable(program, p.k)
    v = k if p.same_kv else _addressable(program, p.v)
    if p.e4m3 and not c.codes_by_tma:
        k_desc = v_desc = None
    elif c.halves:
        k_desc, v_desc = _half(k, c.keys, [[0, 1, 0, 0]]), _half(v, c.keys, [[0, 0, 0, 1]])
    else:
        k_desc = _descriptor(k, box)
        v_desc = k_desc if v is k else _descriptor(v, box)
    out = p.out if is_aligned(p.out) else program.workspace("out", p.out.shape, p.out.dtype)
    varlen, paged = p.kind == "varlen", p.kind == "paged"
    total_q = p.q.shape[0] if varlen else p.batch * p.max_seqlen_q
    part: Any = Null(torch.float32)
    part_lse = part
    fp16_partials = split and c.fp16_partials and not varlen and use_fp16_partials(p, splits * total_q)
    if split:
        part, part_lse = partials(p, program, splits, total_q * p.q_heads, fp16_partials)
    unread = Null(torch.int32)
    tensors = Tensors(
        q_ptr=q,
        out_ptr=Null(p.q.dtype) if is_partial(p) else out,
        lse_ptr=or_null(p.lse, torch.float32),
        sink_ptr=or_null(p.sink, torch.float32),
        part_ptr=part,
        part_lse_ptr=part_lse,
        cu_q_ptr=p.cu_seqlens_q if varlen else unread,
        cu_k_ptr=p.cu_seqlens_k if varlen else unread,
        lengths_ptr=p.lengths if paged else unread,
        table_ptr=p.block_table if paged else unread,
        k_ptr=k,
        v_ptr=v,
    )
    sizes = Sizes(
        total_q=total_q,
        total_k=p.k.shape[0],
        tokens=0 if varlen else p.max_seqlen_q,
        keys=0 if varlen else p.max_seqlen_k,
        kv_heads=p.kv_heads,
        group=divisor(p.group),
        page_size=p.page_size if paged else 1,
        table_stride=p.block_table.stride(0) if paged else 0,
        num_splits=splits,
        tiles_per_split=tiles_per_split,
        tiles_last=int(c.tiles_last),
    )
    lse_strides = _lse_strides(p)
    strides = Strides(*row_strides(q), *row_strides(out), *lse_strides, *row_strides(k), *row_strides(v))
    opts = Options(
        scale=score_scale(p, scale),
        sign=sign,
        left=NO_BOUND if p.left < 0 else p.left,
        right=NO_BOUND if p.right < 0 else p.right,
        want_lse=int(p.lse is not None),
        k_is_v=int(v is k),
        kv_scales=kv_scales(p),
    )
    structs = dict(
        tensors=tensors, k_desc=k_desc, v_desc=v_desc, sizes=sizes, strides=strides, opts=opts, order=c.order
    )
    widths = dict(COLUMNS=p.q.shape[-1], V_COLUMNS=p.v.shape[-1])
    program.launch(kernel, grid, structs, KV_LOAD=kv_load, SIGN=sign, SAME_KV=v is k, **widths,
                   SPLIT=2 if fp16_partials else split, num_warps=4, **c.options)  # fmt: skip
    merge_strides = MergeStrides(*row_strides(out), *lse_strides)
    tokens, cu_q = (1, p.cu_seqlens_q) if varlen else (max(p.max_seqlen_q, 1), None)
    merge = merge_arguments(p, out, part, part_lse, merge_strides, splits, total_q, tokens, cu_q)
    if fp16_partials:
        prepare_fp16_merge(p, program, merge, splits)
    elif split:
        prepare_merge(p, program, merge, splits, varlen=varlen)
    elif varlen and not c.clears_rest:
        program.launch(clear_rest, (p.q_heads, 4), merge, D=p.head_dim, COLUMNS=out.shape[-1], num_warps=4)
    if out is not p.out:
        program.copy(p.out, out)


def merge_arguments(
    p: Any, out: Slot, part: Slot | Null, part_lse: Slot | Null, strides: MergeStrides, splits: int, total_q: int,
    tokens: int = 1, cu_q: Slot | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the arguments of the kernels of combine.py. total_q: query tokens in all; tokens: of a sequence."""
    return dict(
        tensors=MergeTensors(
            part_ptr=part,
            part_lse_ptr=part_lse,
            out_ptr=out,
            lse_ptr=or_null(p.lse, torch.float32),
            sink_ptr=or_null(p.sink, torch.float32),
            cu_q_ptr=or_null(cu_q, torch.int32),
        ),
        sizes=MergeSizes(
            num_splits=splits,
            total_q=total_q,
            total_rows=total_q * p.q_heads,
            tokens=tokens,
            q_heads=p.q_heads,
            last_sequence=p.batch,
            want_lse=int(p.lse is not None),
        ),
        strides=strides,
    )


def or_null(x: Slot | None, dtype: torch.dtype) -> Slot | Null:
    return Null(dtype) if x is None else x


def use_fp16_partials(p: Any, tokens: int) -> bool:
    """Return whether partial results are in fp16: if there are many, for this number of tokens in all. Deterministic:
    the order of additions must not depend on the number of splits. fp16: they would be as exact as the results."""
    # With a plan its capacity counts, so that calls with fewer sequences use the kernel that was warmed up.
    values = tokens * p.q_heads * p.head_dim if p.scratch is None else p.scratch.numel()
    return values >= FP16_PARTIALS_FROM and p.q.dtype == torch.bfloat16 and not p.deterministic and not is_partial(p)


def prepare_fp16_merge(p: Any, program: Program, merge: dict[str, Any], splits: int) -> None:
    """Do what prepare_merge does, for fp16 partial results."""
    at_once = max(1 << (splits - 1).bit_length(), 4)
    if at_once <= 8:
        grid = (-(-merge["sizes"].total_rows // MERGED_ROWS), 2)
        constants = dict(D=p.head_dim, SPLITS=at_once, ROWS=MERGED_ROWS)
        program.launch(combine_rows_fp16, grid, merge, **constants, num_warps=4, launch_pdl=True)
        return
    columns, warps = (p.head_dim // 2, p.head_dim // 256) if at_once <= 16 else (min(128, 8192 // at_once), 4)
    grid = (merge["sizes"].total_rows, p.head_dim // columns)
    constants = dict(D=p.head_dim, SPLITS=at_once, COLUMNS=columns)
    program.launch(combine_fp16, grid, merge, **constants, num_warps=warps, launch_pdl=True)


def prepare_merge(
    p: Any, program: Program, merge: dict[str, Any], splits: int, *, varlen: bool = False, early: bool = False
) -> None:
    """Add the combine kernel, with `merge_arguments`. early: the forward kernel lets it be launched early."""
    # Splits at a time: a fixed number if the order of additions must not depend on how many there are.
    at_a_time = 16 if p.deterministic else 4 if splits <= 4 else 8 if splits <= 8 else 16 if splits <= 16 else 64
    columns, warps = (p.head_dim, max(1, p.head_dim // 128)) if at_a_time <= 16 else (32, 4)
    grid = (merge["sizes"].total_rows, p.head_dim // columns)
    constants = dict(D=p.head_dim, SPLITS=at_a_time, VARLEN=varlen, COLUMNS=columns, EARLY=early)
    program.launch(combine, grid, merge, **constants, num_warps=warps, **dict(launch_pdl=True) if early else {})


def _kv_load(p: FmhaProblem, c: Tiling) -> tuple[int, int]:
    """Return (how tiles of keys are read, rows of a TMA box): see loads.py."""
    if p.kind == "paged" and p.e4m3 and not c.codes_by_tma:
        return CP_ASYNC.value, 1
    if p.kind == "paged":
        box = min(p.page_size & -p.page_size, c.box)  # the largest power of two that divides a page and a tile
        return (PAGES.value, box) if box >= 8 else (CP_ASYNC.value, 8)
    return (DENSE if p.kind == "dense" and not c.dense_as_rows else ROWS).value, c.box


def splits_keys(p: FmhaProblem, target: Target, c: Tiling) -> bool:
    """Return whether a launch would split the keys of the problem."""
    splits, tiles_per_split = _splits(p, target, c, _row_tiles(p, c))
    return splits > 1 or tiles_per_split > 0 or is_partial(p)


def rounds_of_steps(p: FmhaProblem, target: Target, c: Tiling) -> int:
    """Return the consecutive steps of an SM, plus one for each tile and split."""
    tiles = _row_tiles(p, c)
    splits, _ = _splits(p, target, c, tiles)
    rounds = -(-tiles * splits * p.kv_heads * p.batch * c.ctas // target.num_sms)
    return rounds * (-(-_longest(p) // (splits * c.keys)) + 1)


def _row_tiles(p: FmhaProblem, c: Tiling) -> int:
    return -(-p.max_seqlen_q * p.group // c.rows)


def most_row_tiles(p: FmhaProblem, rows: int) -> int:
    """Return the maximum number of row tiles of a varlen batch, of all heads."""
    return (p.q.shape[0] * p.group // rows + p.batch) * p.kv_heads


def _longest(p: FmhaProblem) -> int:
    """Return the maximum number of keys that the queries of one sequence see."""
    return min(p.max_seqlen_k, p.left + p.right + p.max_seqlen_q if min(p.left, p.right) >= 0 else p.max_seqlen_k)


def is_partial(p: Any) -> bool:
    """Return whether the result is wanted in fp32, as the forward kernels write it for the combine kernel."""
    return p.out is not None and p.out.dtype == torch.float32


def _splits(p: FmhaProblem, target: Target, c: Tiling, row_tiles: int) -> tuple[int, int]:
    """Return (number of splits, least tiles per split or 0 = as few as use all splits)."""
    if c.loop:
        return 1, 0
    longest = _longest(p)
    if p.deterministic:
        # Only T, which all sequences share, and a sequence's own keys may matter; varlen batches have no such T.
        splits, each = (0, 0) if p.kind == "varlen" else splitting.deterministic_cut(p.max_seqlen_q * p.group, longest)
        return max(splits, 1), each // c.keys
    if p.num_splits > 0:
        return p.num_splits, 0
    tiles = row_tiles * p.kv_heads * p.batch * c.ctas
    tokens = p.q.shape[0] if p.kind == "varlen" else p.batch * p.max_seqlen_q
    many_rows = tokens * p.q_heads if p.max_seqlen_q * p.group > splitting.ROWS_PER_TILE else 0
    return splitting.fmha_splits(tiles, target.num_sms, longest, c.shared, many_rows), 0


def partials(p: Any, program: Program, splits: int, rows: int, fp16_partials: bool = False) -> tuple[Slot, Slot]:
    """Return fp32 memory for partial O [splits, rows, D] and LSE [splits, rows], or fp16: the plan's, else
    workspace."""
    columns = splits * rows * p.head_dim // (2 if fp16_partials else 1)
    each = 4 if fp16_partials else 1
    size = columns + each * splits * rows
    scratch = p.scratch
    if scratch is not None and scratch.numel() < size:
        if scratch.is_cuda and not is_partial(p):  # a plan has no room for results in fp32
            raise ValueError(
                f"plan: got one with {scratch.numel()} floats of scratch; accepted: {size} or more, as "
                f"dsv4.plan gives with deterministic={p.deterministic}"
            )
        scratch = None
    if scratch is None:
        scratch = program.workspace("scratch", (size,), torch.float32)
    return scratch.view((columns,), (1,)), scratch.view((each * splits * rows,), (1,), columns)


def _unit(x: Any) -> int:
    """Return the number of elements that is the unit of strides."""
    return 16 if x.element_size() == 1 else 8


def is_aligned(x: Any) -> bool:
    """Return whether base and strides allow 16-byte accesses."""
    return x.data_ptr() % 16 == 0 and all(s % _unit(x) == 0 for s, n in zip(x.stride()[:-1], x.shape) if n > 1)


def row_strides(x: Any) -> tuple[int, int, int]:
    """Return (sequence, token, head) strides in units of 16 bytes, or 32 of fp32; varlen has no sequence stride."""
    strides = [s // _unit(x) if n > 1 else 0 for s, n in zip(x.stride()[:-1], x.shape)]
    return (0, *strides) if x.ndim == 3 else tuple(strides)


def _lse_strides(p: FmhaProblem) -> tuple[int, int, int]:
    """Return (sequence, token, head) strides of lse."""
    if p.lse is None:
        return 0, 0, 0
    if p.kind == "varlen":
        return 0, p.lse.stride(0), p.lse.stride(1)
    return p.lse.stride(0), p.lse.stride(2), p.lse.stride(1)


def _addressable(program: Program, x: Slot) -> Slot:
    """Return K or V as [sequence or page, row, head, column]; a copy if neither TMA nor 16-byte copies can address
    it."""
    if not is_aligned(x) or any(s <= 0 for s, n in zip(x.stride(), x.shape) if n > 1):
        x = program.copied(x)
    if x.dtype == checks.E4M3:
        x = x.bytes_as(torch.uint8)
    return x.unsqueeze(0) if x.ndim == 3 else x


def converted(p: FmhaProblem, program: Program) -> FmhaProblem:
    """Return the problem with k and v in e4m3 as tensors of q's dtype, which the program makes first; scales stay."""

    def made(x: Slot) -> Slot:
        plain = program.workspace(f"{x.name} as q", x.shape, p.q.dtype)
        program.copy(plain, x)
        return plain

    k = made(p.k)
    return replace(p, k=k, v=k if p.same_kv else made(p.v))


def converts_first(p: FmhaProblem) -> bool:
    """Return whether e4m3 keys are converted once, before attention, and not by every tile of rows that reads them.
    Pages are not: a call reads few of them."""
    return p.e4m3 and p.kind != "paged" and p.max_seqlen_q * p.group > CONVERTED_FROM


def _descriptor(x: Any, box: int) -> TensorDescriptor:
    return _boxes(x, [1, box, 1, min(x.shape[-1], 128 // x.element_size())], [])


def _half(x: Any, keys: int, split: list) -> TensorDescriptor:
    """Return the descriptor of tiles of 256 columns over a pair of CTAs."""
    return _boxes(x, [1, keys, 1, 256], split)


def _boxes(x: Any, block: list[int], cga_layout: list) -> TensorDescriptor:
    bits = 8 * x.element_size()
    layout = gl.NVMMASharedLayout(min(128, block[3] * bits // 8), bits, rank=4, cga_layout=cga_layout)
    strides = [s if n > 1 else x.shape[-1] for s, n in zip(x.stride()[:-1], x.shape)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout)
