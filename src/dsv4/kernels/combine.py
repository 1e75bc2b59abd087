"""Merging the partial results of split keys, and the rows of a varlen batch that belong to no sequence.

A split writes its normalised partial O in fp32 and its LSE in base 2 (-inf where it saw no key, and then O unwritten).
The splits of a row are added in their order, so the result does not depend on which finished first.

fp16 partial results are half as long: O in fp16, every half of a row multiplied by a power of two that brings its
largest value to 2^14 .. 2^15, so that nothing overflows and the rounding is an eighth of that to bf16. What undoes it
lies next to the LSE: (LSE, factor of the left half, of the right half, nothing) in fp32.
"""

from typing import NamedTuple

from dsv4.kernels import dependent, softmax
from dsv4.kernels.compat import Value, aggregate, gl, gluon
from dsv4.kernels.softmax import LN2, LOG2E


class MergeTensors(NamedTuple):
    any_alignment = ("lse_ptr", "sink_ptr", "cu_q_ptr")

    part_ptr: Value  # [num_splits, total_rows, D]
    part_lse_ptr: Value
    out_ptr: Value
    lse_ptr: Value
    sink_ptr: Value
    cu_q_ptr: Value  # varlen


class MergeSizes(NamedTuple):
    num_splits: Value
    total_q: Value  # query tokens in all
    total_rows: Value  # (token, head) in all
    tokens: Value  # tokens of a sequence; 1 if sequences differ (varlen)
    q_heads: Value
    last_sequence: Value  # where the end of the last sequence is in cu_q
    want_lse: Value


class MergeStrides(NamedTuple):
    """The strides of out, in units of 8 elements."""

    out_batch: Value
    out_token: Value
    out_head: Value
    lse_batch: Value
    lse_token: Value
    lse_head: Value


@gluon.constexpr_function
def in_columns(columns, warps):
    """Return the layout of [splits, columns] in which every thread has all splits of its columns."""
    return gl.BlockedLayout([1, min(4, columns // 32)], [1, 32], [1, warps], [1, 0])


@aggregate
class Goal:
    """What does not depend on the partial results, and is loaded with them: where a row goes, and its sink."""

    offset: Value  # offset of the row of out
    lse: Value
    sink: Value  # the sink's logit in base 2


@gluon.jit
def goal_of(row, tensors, sizes, strides, VARLEN: gl.constexpr):
    token = row // sizes.q_heads
    head = row - token * sizes.q_heads
    sink = softmax.sink_of(tensors.sink_ptr, head, head < sizes.q_heads) * LOG2E
    batch = 0
    if not VARLEN:
        batch = token // sizes.tokens
        token = token - batch * sizes.tokens
    n, token, head = batch.to(gl.int64), token.to(gl.int64), head.to(gl.int64)
    offset = n * strides.out_batch + token * strides.out_token + head * strides.out_head
    return Goal(offset * 8, n * strides.lse_batch + token * strides.lse_token + head * strides.lse_head, sink)


@gluon.jit
def finish(sums, top, total, column, goal, tensors, sizes):
    """Write columns of a row whose splits are added up: sums of O and of weights, relative to the largest LSE, top."""
    safe = gl.where(top == -float("inf"), 0.0, top)
    with_sink = total + gl.exp2(goal.sink - safe)
    nothing = total == 0.0
    factor = gl.where(nothing, 0.0, 1.0 / gl.where(nothing, 1.0, with_sink))
    gl.store(tensors.out_ptr + goal.offset + column, (sums * factor).to(tensors.out_ptr.dtype.element_ty))
    if (sizes.want_lse != 0) & (gl.program_id(1) == 0):
        lse = gl.where(nothing, -float("inf"), top + gl.log2(gl.where(nothing, 1.0, total))) * LN2
        gl.store(tensors.lse_ptr + goal.lse, lse)


@gluon.jit
def combine(
    tensors,
    sizes,
    strides,
    D: gl.constexpr,
    SPLITS: gl.constexpr,
    VARLEN: gl.constexpr,
    COLUMNS: gl.constexpr = 64,
    EARLY: gl.constexpr = False,
):
    """Merge COLUMNS columns of one row (token, head) per program. EARLY: launched while the splits are still being
    computed.

    SPLITS are added at a time, in an order that depends on SPLITS alone: up to 16 by one thread, which is the fewest
    instructions where rows are many. More splits belong to few rows, so that many threads take part.
    """
    if SPLITS <= 16:
        L: gl.constexpr = in_columns(COLUMNS, gl.num_warps())
    else:
        L: gl.constexpr = gl.BlockedLayout([1, 4], [128 // COLUMNS, COLUMNS // 4], [4, 1], [1, 0])
    R: gl.constexpr = gl.SliceLayout(1, L)
    row = gl.program_id(0)
    column = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    belongs = True
    if VARLEN:
        # Rows past the last sequence have no partial results.
        belongs = row // sizes.q_heads < gl.load(tensors.cu_q_ptr + sizes.last_sequence)

    if EARLY:
        dependent.wait_on_prior_grid()
    goal = goal_of(row, tensors, sizes, strides, VARLEN)
    m = gl.full([SPLITS], -float("inf"), gl.float32, R)
    weights = gl.zeros([SPLITS], gl.float32, R)
    acc = gl.zeros([SPLITS, COLUMNS], gl.float32, L)
    for start in range(0, sizes.num_splits, SPLITS):
        split = start + gl.arange(0, SPLITS, layout=R)
        there = (split < sizes.num_splits) & belongs
        part = split.to(gl.int64) * sizes.total_rows + row
        lse = gl.load(tensors.part_lse_ptr + part, mask=there, other=-float("inf"))
        # These are read before the LSE is known, so that neither load waits for the other; what no split wrote is
        # dropped here.
        o = gl.load(tensors.part_ptr + part[:, None] * D + column[None, :], mask=there[:, None], other=0.0)
        o = gl.where((lse == -float("inf"))[:, None], 0.0, o)
        m_new = gl.maximum(m, lse)
        safe = gl.where(m_new == -float("inf"), 0.0, m_new)
        before, weight = gl.exp2(m - safe), gl.exp2(lse - safe)
        weights = weights * before + weight
        acc = acc * before[:, None] + o * weight[:, None]
        m = m_new
    top = gl.max(m, 0)
    scale = gl.exp2(m - gl.where(top == -float("inf"), 0.0, top))
    total = gl.sum(weights * scale, 0)
    sums = gl.sum(acc * scale[:, None], 0)
    finish(sums, top, total, column, goal, tensors, sizes)


@gluon.jit
def combine_fp16(tensors, sizes, strides, D: gl.constexpr, SPLITS: gl.constexpr, COLUMNS: gl.constexpr):
    """Merge COLUMNS columns of one row per program from fp16 partial results, all of at most SPLITS splits at once.
    Launched while the last splits are being computed."""
    dependent.wait_on_prior_grid()
    if SPLITS <= 16:
        L: gl.constexpr = in_columns(COLUMNS, gl.num_warps())
    else:
        L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    R: gl.constexpr = gl.SliceLayout(1, L)
    row = gl.program_id(0)
    column = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    half = gl.program_id(1) * COLUMNS // (D // 2)
    goal = goal_of(row, tensors, sizes, strides, False)
    split = gl.arange(0, SPLITS, layout=R)
    there = split < sizes.num_splits
    part = split.to(gl.int64) * sizes.total_rows + row
    lse = gl.load(tensors.part_lse_ptr + part * 4, mask=there, other=-float("inf"))
    factor = gl.load(tensors.part_lse_ptr + part * 4 + 1 + half, mask=there, other=0.0)
    values_ptr = tensors.part_ptr.to(gl.pointer_type(gl.float16), bitcast=True)
    # These are read before the LSE is known, so that neither load waits for the other; what no split wrote is dropped
    # here.
    o = gl.load(values_ptr + part[:, None] * D + column[None, :], mask=there[:, None], other=0.0).to(gl.float32)
    written = lse != -float("inf")
    top = gl.max(lse, 0)
    weight = gl.exp2(lse - gl.where(top == -float("inf"), 0.0, top))
    total = gl.sum(weight, 0)
    share = gl.where(written, weight * factor, 0.0)
    sums = gl.sum(gl.where(written[:, None], o, 0.0) * share[:, None], 0)
    finish(sums, top, total, column, goal, tensors, sizes)


@gluon.constexpr_function
def whole_rows(columns, warps):
    """Return the layout of [rows, splits, columns] in which a thread has 16 bytes of all splits, and a warp 256
    columns.
    """
    across = min(columns // 8, 32)
    return gl.BlockedLayout([1, 1, 8], [32 // across, 1, across], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def combine_rows_fp16(tensors, sizes, strides, D: gl.constexpr, SPLITS: gl.constexpr, ROWS: gl.constexpr):
    """Do what combine_fp16 does, one half of the columns of ROWS rows per program: with a program for every half row
    the launch of the programs takes longer than what they do, 1.66 begin per ns (NOTES.md). Few splits."""
    dependent.wait_on_prior_grid()
    COLUMNS: gl.constexpr = D // 2
    L: gl.constexpr = whole_rows(COLUMNS, gl.num_warps())
    S: gl.constexpr = gl.SliceLayout(2, L)  # [rows, splits]
    O: gl.constexpr = gl.SliceLayout(1, L)  # [rows, columns]
    R: gl.constexpr = gl.SliceLayout(1, S)
    RO: gl.constexpr = gl.SliceLayout(1, O)
    half = gl.program_id(1)
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=R)
    split = gl.arange(0, SPLITS, layout=gl.SliceLayout(0, S))
    column = half * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, O))
    here = row < sizes.total_rows
    safe_row = gl.where(here, row, 0)
    there = (split < sizes.num_splits)[None, :] & here[:, None]
    part = split[None, :].to(gl.int64) * sizes.total_rows + safe_row[:, None]
    lse = gl.load(tensors.part_lse_ptr + part * 4, mask=there, other=-float("inf"))
    factor = gl.load(tensors.part_lse_ptr + part * 4 + 1 + half, mask=there, other=0.0)
    values_ptr = tensors.part_ptr.to(gl.pointer_type(gl.float16), bitcast=True)
    # These are read before the LSE is known, so that neither load waits for the other; what no split wrote is dropped
    # here.
    o = gl.load(values_ptr + part[:, :, None] * D + column[None, None, :], mask=there[:, :, None], other=0.0)
    token = safe_row // sizes.q_heads
    head = safe_row - token * sizes.q_heads
    sink = softmax.sink_of(tensors.sink_ptr, head, head < sizes.q_heads) * LOG2E
    batch = token // sizes.tokens
    token = token - batch * sizes.tokens
    n, token, head = batch.to(gl.int64), token.to(gl.int64), head.to(gl.int64)
    offset = (n * strides.out_batch + token * strides.out_token + head * strides.out_head) * 8
    written = lse != -float("inf")
    top = gl.max(lse, 1)
    safe = gl.where(top == -float("inf"), 0.0, top)
    weight = gl.exp2(lse - safe[:, None])
    total = gl.sum(weight, 1)
    nothing = total == 0.0
    scale = gl.where(nothing, 0.0, 1.0 / gl.where(nothing, 1.0, total + gl.exp2(sink - safe)))
    share = gl.where(written, weight * factor, 0.0) * scale[:, None]
    sums = gl.sum(gl.where(written[:, :, None], o.to(gl.float32), 0.0) * share[:, :, None], 1)
    to = gl.convert_layout(offset, RO)[:, None] + column[None, :]
    result = sums.to(tensors.out_ptr.dtype.element_ty)
    gl.store(tensors.out_ptr + to, result, mask=gl.convert_layout(here, RO)[:, None])
    if (sizes.want_lse != 0) & (half == 0):
        lse_out = gl.where(nothing, -float("inf"), top + gl.log2(gl.where(nothing, 1.0, total))) * LN2
        at = n * strides.lse_batch + token * strides.lse_token + head * strides.lse_head
        gl.store(tensors.lse_ptr + at, lse_out, mask=here)


@gluon.jit
def clear_rows(
    tensors, strides, begin, total_q, step, head, end_head, want_lse, D: gl.constexpr, COLUMNS: gl.constexpr
):
    """Set out to 0 and lse to -inf in tokens begin, begin + step, .. of the heads; for four warps."""
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    column = gl.arange(0, D, layout=L)
    for token in range(begin, total_q, step):
        for h in range(head, end_head):
            offset = token.to(gl.int64) * strides.out_token + h * strides.out_head.to(gl.int64)
            zeros = gl.zeros([D], tensors.out_ptr.dtype.element_ty, L)
            gl.store(tensors.out_ptr + offset * 8 + column, zeros, mask=column < COLUMNS)
            if want_lse != 0:
                offset = token.to(gl.int64) * strides.lse_token + h * strides.lse_head.to(gl.int64)
                gl.store(tensors.lse_ptr + offset, -float("inf"))


@gluon.jit
def end_of_sequences(cu_q_ptr, sequences, total_q):
    """Return the first query token of a varlen batch that no sequence has."""
    return gl.minimum(gl.maximum(gl.load(cu_q_ptr + sequences), 0), total_q)


@gluon.jit
def clear_rest(tensors, sizes, strides, D: gl.constexpr, COLUMNS: gl.constexpr):
    """Clear rows of a varlen batch past its last sequence: out 0, lse -inf. One program per head, all such tokens."""
    head = gl.program_id(0)
    begin = end_of_sequences(tensors.cu_q_ptr, sizes.last_sequence, sizes.total_q) + gl.program_id(1)
    clear_rows(tensors, strides, begin, sizes.total_q, gl.num_programs(1), head, head + 1, sizes.want_lse, D, COLUMNS)
