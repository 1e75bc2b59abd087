"""Merging the partial results of split keys, and the rows of a varlen batch that belong to no sequence.

A split writes its normalised partial O in fp32 and its LSE in base 2 (-inf where it saw no key, and then O unwritten).
The splits of a row are added in their order, so the result does not depend on which finished first.
"""

from dsv4.kernels.compat import gl, gluon
from dsv4.kernels.shared import softmax
from dsv4.kernels.shared.softmax import LN2, LOG2E


@gluon.jit(do_not_specialize=[
    "num_splits", "total_rows", "tokens", "q_heads", "last_sequence", "want_lse", "stride_ob", "stride_ot", "stride_oh",
    "stride_lb", "stride_lt", "stride_lh",
])  # fmt: skip
def combine(part_ptr, part_lse_ptr, out_ptr, lse_ptr, sink_ptr, cu_q_ptr, num_splits, total_rows, tokens, q_heads,
            last_sequence, want_lse, stride_ob, stride_ot, stride_oh, stride_lb, stride_lt, stride_lh,
            D: gl.constexpr, SPLITS: gl.constexpr, VARLEN: gl.constexpr, COLUMNS: gl.constexpr = 64):  # fmt: skip
    """One program: one row (token, head) and COLUMNS of its columns. part: [num_splits, total_rows, D].

    SPLITS are added at a time, in an order that depends on SPLITS alone.
    """
    if COLUMNS <= 128:
        L: gl.constexpr = gl.BlockedLayout([1, 4], [128 // COLUMNS, COLUMNS // 4], [4, 1], [1, 0])
    else:  # every thread has all splits of its columns
        L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])
    R: gl.constexpr = gl.SliceLayout(1, L)
    row = gl.program_id(0)
    column = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    token = row // q_heads
    head = row - token * q_heads
    belongs = True
    if VARLEN:
        belongs = token < gl.load(cu_q_ptr + last_sequence)  # rows past the last sequence have no partial results

    m = gl.full([SPLITS], -float("inf"), gl.float32, R)
    weights = gl.zeros([SPLITS], gl.float32, R)
    acc = gl.zeros([SPLITS, COLUMNS], gl.float32, L)
    for start in range(0, num_splits, SPLITS):
        split = start + gl.arange(0, SPLITS, layout=R)
        there = (split < num_splits) & belongs
        part = split.to(gl.int64) * total_rows + row
        lse = gl.load(part_lse_ptr + part, mask=there, other=-float("inf"))
        # Read before the LSE is known, so the two do not wait for each other; what no split wrote is dropped here.
        o = gl.load(part_ptr + part[:, None] * D + column[None, :], mask=there[:, None], other=0.0)
        o = gl.where((lse == -float("inf"))[:, None], 0.0, o)
        m_new = gl.maximum(m, lse)
        safe = gl.where(m_new == -float("inf"), 0.0, m_new)
        before, weight = gl.exp2(m - safe), gl.exp2(lse - safe)
        weights = weights * before + weight
        acc = acc * before[:, None] + o * weight[:, None]
        m = m_new
    top = gl.max(m, 0)
    safe = gl.where(top == -float("inf"), 0.0, top)
    scale = gl.exp2(m - safe)
    weights = weights * scale
    acc = acc * scale[:, None]
    total = gl.sum(weights, 0)
    sink = softmax.sink_of(sink_ptr, head, head < q_heads)
    with_sink = total + gl.exp2(sink * LOG2E - safe)
    nothing = total == 0.0
    factor = gl.where(nothing, 0.0, 1.0 / gl.where(nothing, 1.0, with_sink))
    out = gl.sum(acc, 0) * factor

    batch = 0
    if not VARLEN:
        batch = token // tokens
        token = token - batch * tokens
    offset = batch.to(gl.int64) * stride_ob + token.to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
    gl.store(out_ptr + offset * 8 + column, out.to(out_ptr.dtype.element_ty))
    if (want_lse != 0) & (gl.program_id(1) == 0):
        lse = gl.where(nothing, -float("inf"), top + gl.log2(gl.where(nothing, 1.0, total))) * LN2
        offset = batch.to(gl.int64) * stride_lb + token.to(gl.int64) * stride_lt + head.to(gl.int64) * stride_lh
        gl.store(lse_ptr + offset, lse)


@gluon.jit(do_not_specialize=["total_q", "q_heads", "last_sequence", "want_lse", "stride_ot", "stride_oh", "stride_lt",
                              "stride_lh"])  # fmt: skip
def clear_rest(out_ptr, lse_ptr, cu_q_ptr, total_q, q_heads, last_sequence, want_lse, stride_ot, stride_oh, stride_lt,
               stride_lh, D: gl.constexpr):  # fmt: skip
    """Rows of a varlen batch past its last sequence: out 0, lse -inf. One program per head, all such tokens."""
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    head = gl.program_id(0)
    column = gl.arange(0, D, layout=L)
    begin = gl.minimum(gl.maximum(gl.load(cu_q_ptr + last_sequence), 0), total_q)
    for token in range(begin + gl.program_id(1), total_q, gl.num_programs(1)):
        offset = token.to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
        gl.store(out_ptr + offset * 8 + column, gl.zeros([D], out_ptr.dtype.element_ty, L))
        if want_lse != 0:
            gl.store(lse_ptr + token.to(gl.int64) * stride_lt + head.to(gl.int64) * stride_lh, -float("inf"))
