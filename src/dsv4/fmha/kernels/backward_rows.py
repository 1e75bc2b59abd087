"""Per query row, once: delta = dO . O and the exponent that the gradient kernels subtract.

The kernels that follow know neither the sink nor the gradient of the LSE: both are in the two numbers of a row. With L
the LSE (sink excluded) and L' = log(e^L + e^sink)::

    P  = 2^(s - lse2),  lse2 = L' / ln 2      +inf where the row sees nothing: P is 0 without a branch
    dS = P (dP - delta),  delta = dO . O - dL e^(L' - L)

The last factor must stay finite, and its product with P, which is e^(s - L) dL, must not depend on the sink. So where
dL is not 0 both stop at L' = L + 60: of a sink that is farther above the LSE, dO's own terms are e^-60 of their size
rather than less.
"""

from dsv4.kernels.compat import gl, gluon
from dsv4.kernels.softmax import LOG2E

FARTHEST = gl.constexpr(60.0)


@gluon.constexpr_function
def row_layout(d):
    """[rows, d] of 16-bit numbers, 16 bytes per thread, four warps."""
    lanes = min(d // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def terms(dot, lse, sink, dlse):
    """dO . O, LSE, sink (-inf: none) and the gradient of the LSE of some rows -> lse2, delta, dO . O or 0 where the row
    sees nothing, and the sink's share of the softmax."""
    empty = lse == -float("inf")
    plain = gl.where(empty, 0.0, dot)
    lse = gl.where(empty, 0.0, lse)
    over = sink - lse
    # L' - L = log(1 + e^over), also where e^over is none
    small = gl.minimum(over, FARTHEST)
    beyond = gl.where(over > FARTHEST, over, gl.log2(1.0 + gl.exp2(small * LOG2E)) / LOG2E)
    near = gl.minimum(beyond, FARTHEST)
    lse2 = gl.where(empty, float("inf"), (lse + gl.where(dlse == 0.0, beyond, near)) * LOG2E)
    delta = plain - gl.where(empty, 0.0, dlse) * gl.exp2(near * LOG2E)
    share = gl.where(empty, 0.0, gl.where(over > FARTHEST, 1.0, gl.exp2((small - beyond) * LOG2E)))
    return lse2, delta, plain, share


@gluon.jit(do_not_specialize=[
    "rows", "tokens", "q_heads", "group", "has_sink", "has_dlse", "stride_ob", "stride_ot", "stride_oh", "stride_gb",
    "stride_gt", "stride_gh", "stride_lb", "stride_lt", "stride_lh", "stride_db", "stride_dt", "stride_dh",
])  # fmt: skip
def backward_rows(out_ptr, dout_ptr, lse_ptr, dlse_ptr, sink_ptr, lse2_ptr, delta_ptr, plain_ptr, rows, tokens, q_heads,
                  group, has_sink, has_dlse, stride_ob, stride_ot, stride_oh, stride_gb, stride_gt, stride_gh,
                  stride_lb, stride_lt, stride_lh, stride_db, stride_dt, stride_dh,
                  D: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """One program: ROWS rows. A row is (sequence, token, head), heads fastest; results lie by (sequence, KV head,
    token, head of the group). Strides of out and dout in units of 8 elements. plain: dO . O, for dsink."""
    L: gl.constexpr = row_layout(D)
    R: gl.constexpr = gl.SliceLayout(1, L)
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=R)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    there = row < rows
    line = row // q_heads  # divided in 32 bits: in 64 it took longer than the reading
    head = row - line * q_heads
    packed = head // group
    member = head - packed * group
    batch = (line // tokens).to(gl.int64)
    token = line - batch * tokens
    head = head.to(gl.int64)
    at_out = (batch * stride_ob + token * stride_ot + head * stride_oh) * 8
    at_dout = (batch * stride_gb + token * stride_gt + head * stride_gh) * 8
    o = gl.load(out_ptr + at_out[:, None] + column[None, :], mask=there[:, None], other=0.0)
    do = gl.load(dout_ptr + at_dout[:, None] + column[None, :], mask=there[:, None], other=0.0)
    delta = gl.sum(o.to(gl.float32) * do.to(gl.float32), 1)
    lse = gl.load(lse_ptr + batch * stride_lb + token * stride_lt + head * stride_lh, mask=there, other=-float("inf"))
    sink = gl.load(sink_ptr + head, mask=there & (has_sink != 0), other=-float("inf"))
    dlse = gl.load(
        dlse_ptr + batch * stride_db + token * stride_dt + head * stride_dh, mask=there & (has_dlse != 0), other=0.0
    )
    lse2, delta, plain, _ = terms(delta, lse, sink, dlse)
    place = ((batch * (q_heads // group) + packed) * tokens + token) * group + member
    gl.store(lse2_ptr + place, lse2, mask=there)
    gl.store(delta_ptr + place, delta, mask=there)
    gl.store(plain_ptr + place, plain, mask=there)
