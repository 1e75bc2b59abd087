"""Arguments of the forward kernels (the NamedTuples, made by prepare.py) and of their roles (the aggregates)."""

from typing import NamedTuple

from dsv4.fmha.kernels.loads import GlobalRows, HeadRows, Where
from dsv4.fmha.kernels.scores import HeadScale, KvScales, ScoreScale, head_scale
from dsv4.fmha.kernels.tiles import Pages
from dsv4.kernels.compat import Value, aggregate, gluon
from dsv4.kernels.division import Divisor


class Tensors(NamedTuple):
    """Pointers to the tensors of all sequences."""

    any_alignment = ("lse_ptr", "sink_ptr", "part_lse_ptr", "cu_q_ptr", "cu_k_ptr", "lengths_ptr", "table_ptr")

    q_ptr: Value
    out_ptr: Value
    lse_ptr: Value
    sink_ptr: Value
    part_ptr: Value  # partial results of a split: normalised rows and their LSE in base 2, in fp32 or fp16 (combine.py)
    part_lse_ptr: Value
    cu_q_ptr: Value  # varlen
    cu_k_ptr: Value
    lengths_ptr: Value  # paged
    table_ptr: Value
    k_ptr: Value
    v_ptr: Value


class Sizes(NamedTuple):
    total_q: Value  # query tokens in all
    total_k: Value  # key rows in all, or pages
    tokens: Value  # tokens of the longest sequence; 0 if sequences differ (varlen)
    keys: Value
    kv_heads: Value
    group: Divisor  # query heads of a KV head
    page_size: Value
    table_stride: Value
    num_splits: Value
    tiles_per_split: Value
    tiles_last: Value  # the grid is (KV heads x splits, sequences, row tiles) and not (row tiles, ..)


class Strides(NamedTuple):
    """The strides of q, out, k and v in units of 16 bytes, so that the compiler can prove 16-byte alignment."""

    q_batch: Value
    q_token: Value
    q_head: Value
    out_batch: Value
    out_token: Value
    out_head: Value
    lse_batch: Value
    lse_token: Value
    lse_head: Value
    k_page: Value  # stride of a page, or of a sequence
    k_row: Value
    k_head: Value
    v_page: Value
    v_row: Value
    v_head: Value


class Options(NamedTuple):
    """Options of a call, `opts` in kernels: Triton has an `options` of its own among their arguments."""

    scale: ScoreScale  # positive
    sign: Value  # the factor of Q: 1, -1 or 0
    left: Value  # left side of the window
    right: Value
    want_lse: Value
    k_is_v: Value
    kv_scales: KvScales | None  # scales of e4m3 keys and values


@aggregate
class RowTensors:
    """The tensors of one sequence."""

    q_ptr: Value
    out_ptr: Value
    lse_ptr: Value
    sink_ptr: Value
    part_ptr: Value
    part_lse_ptr: Value


@aggregate
class Problem:
    """One sequence and KV head."""

    head: Value
    group: Value  # Divisor
    q_heads: Value
    rows: Value
    tokens: Value
    keys: Value
    left: Value
    right: Value
    scale: Value  # the factor of score_scale
    want_lse: Value
    score_scale: HeadScale


@aggregate
class Tiles:
    """The tiles of keys of a CTA: [begin, end), counted from key ``first``; its row of the partial results."""

    first: Value
    begin: Value
    end: Value
    part_row: Value


@aggregate
class WorkTile:
    tensors: RowTensors
    strides: Value
    problem: Problem
    tiles: Tiles
    pages: Pages


@gluon.jit
def query_rows(work_tile):
    problem, strides = work_tile.problem, work_tile.strides
    ptr = work_tile.tensors.q_ptr
    return HeadRows(ptr, problem.rows, problem.head, problem.group, strides.q_token, strides.q_head)


@gluon.jit
def output_rows(work_tile):
    problem, strides = work_tile.problem, work_tile.strides
    ptr = work_tile.tensors.out_ptr
    return HeadRows(ptr, problem.rows, problem.head, problem.group, strides.out_token, strides.out_head)


@aggregate
class Source:
    """The source of K and V: TMA descriptors, and rows in global memory."""

    k_desc: Value
    v_desc: Value
    k_rows: GlobalRows
    v_rows: GlobalRows
    where: Where


@gluon.jit
def kv_rows(tensors, sizes, strides):
    """Return K and V as rows in global memory."""
    k_rows = GlobalRows(tensors.k_ptr, sizes.total_k, strides.k_page, strides.k_row, strides.k_head)
    return k_rows, GlobalRows(tensors.v_ptr, sizes.total_k, strides.v_page, strides.v_row, strides.v_head)


@gluon.jit
def problem_of(head, tokens, keys, sizes, opts):
    scale = head_scale(opts, head)
    group = sizes.group.number
    return Problem(
        head,
        sizes.group,
        sizes.kv_heads * group,
        tokens * group,
        tokens,
        keys,
        opts.left,
        opts.right,
        scale.factor,
        opts.want_lse,
        scale,
    )
