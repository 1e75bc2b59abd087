"""Per query row, once: delta = dO . O and the exponent that the gradient kernels subtract.

The kernels that follow know neither the sink nor the gradient of the LSE: both are in the two numbers of a row. With L
the LSE (sink excluded) and L' = log(e^L + e^sink)::

    P  = 2^(s - lse2),  lse2 = L' / ln 2      +inf where the row sees nothing: P is 0 without a branch
    dS = P (dP - delta),  delta = dO . O - dL e^(L' - L)
"""

from dsv4.kernels.compat import gl, gluon
from dsv4.kernels.shared.softmax import LOG2E

# dL e^(L' - L) must stay finite: past this a sink leaves P below e^-60, which is nothing beside dL's own term.
FARTHEST = gl.constexpr(60.0)


@gluon.constexpr_function
def row_layout(d):
    """[rows, d] of 16-bit numbers, 16 bytes per thread, four warps."""
    lanes = min(d // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


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
    row = gl.program_id(0).to(gl.int64) * ROWS + gl.arange(0, ROWS, layout=R)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    there = row < rows
    head = (row % q_heads).to(gl.int64)
    token = (row // q_heads % tokens).to(gl.int64)
    batch = (row // q_heads // tokens).to(gl.int64)
    at_out = (batch * stride_ob + token * stride_ot + head * stride_oh) * 8
    at_dout = (batch * stride_gb + token * stride_gt + head * stride_gh) * 8
    o = gl.load(out_ptr + at_out[:, None] + column[None, :], mask=there[:, None], other=0.0)
    do = gl.load(dout_ptr + at_dout[:, None] + column[None, :], mask=there[:, None], other=0.0)
    delta = gl.sum(o.to(gl.float32) * do.to(gl.float32), 1)
    lse = gl.load(lse_ptr + batch * stride_lb + token * stride_lt + head * stride_lh, mask=there, other=-float("inf"))
    empty = lse == -float("inf")
    plain = gl.where(empty, 0.0, delta)
    lse = gl.where(empty, 0.0, lse)
    beyond = gl.zeros([ROWS], gl.float32, R)  # L' - L
    if has_sink != 0:
        sink = gl.load(sink_ptr + head, mask=there, other=-float("inf"))
        over = sink - lse
        # log(1 + e^over), also where e^over is none
        small = gl.minimum(over, FARTHEST)
        beyond = gl.where(over > FARTHEST, over, gl.log2(1.0 + gl.exp2(small * LOG2E)) / LOG2E)
    delta = plain
    if has_dlse != 0:
        dlse = gl.load(dlse_ptr + batch * stride_db + token * stride_dt + head * stride_dh, mask=there, other=0.0)
        beyond = gl.minimum(beyond, FARTHEST)
        delta = delta - gl.where(empty, 0.0, dlse) * gl.exp2(beyond * LOG2E)
    place = ((batch * (q_heads // group) + head // group) * tokens + token) * group + head % group
    gl.store(lse2_ptr + place, gl.where(empty, float("inf"), (lse + beyond) * LOG2E), mask=there)
    gl.store(delta_ptr + place, gl.where(empty, 0.0, delta), mask=there)
    gl.store(plain_ptr + place, plain, mask=there)
