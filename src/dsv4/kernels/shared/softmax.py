"""Online softmax in base 2 on one score tile, and what happens to a finished row. Pure register code."""

from dsv4.kernels.compat import gl, gluon

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
# O is rescaled only when a row's maximum grew by more than this (base 2): P stays below 2^8, exact enough in 16 bits.
RESCALE_ABOVE = gl.constexpr(8.0)


@gluon.jit
def see(s, first_column, row_first, row_end, L: gl.constexpr):
    """Scores of keys that a row does not see become -inf. s: [rows, keys] of keys from first_column on."""
    column = first_column + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, L))[None, :]
    seen = (column >= row_first[:, None]) & (column < row_end[:, None])
    return gl.where(seen, s, -float("inf"))


@gluon.jit
def step(s, m, scale):
    """Running maximum m (base 2, -inf = nothing seen yet) and scores -> (P, new m, factor for what came before)."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    safe = gl.where(m_new == -float("inf"), 0.0, m_new)  # -inf - -inf would be NaN
    alpha = gl.exp2(m - safe)
    p = gl.exp2(s * scale - safe[:, None])
    return p, m_new, alpha


@gluon.jit
def sink_of(sink_ptr, head, here):
    """The sink's logit of a head or of a tensor of heads, -inf outside ``here``; a null pointer is no sink."""
    return gl.load(sink_ptr + head, mask=here & (sink_ptr.to(gl.int64) != 0), other=-float("inf"))


@gluon.jit
def finish(m, l, sink):
    """(factor that normalises O, base-2 LSE without the sink). sink: natural logit per row, -inf = none."""
    nothing = l == 0.0
    lse = gl.where(nothing, -float("inf"), m + gl.log2(gl.where(nothing, 1.0, l)))
    with_sink = l + gl.exp2(sink * LOG2E - gl.where(nothing, 0.0, m))
    return gl.where(nothing, 0.0, 1.0 / gl.where(nothing, 1.0, with_sink)), lse


@gluon.jit
def turn_back(o, rope, column, D: gl.constexpr, GAP: gl.constexpr = 0):
    """Interleaved pairs of the last ``width`` of D columns turned back by the query's angle; o has those from `column`
    on, GAP of them left out in its middle. Linear, so that it may precede the normalisation and the merge of splits."""
    line_ptr, width = rope
    if column + o.shape[1] + GAP > D - width:
        even, odd = gl.split(o.reshape([o.shape[0], o.shape[1] // 2, 2]))
        pair = gl.arange(0, o.shape[1] // 2, layout=gl.SliceLayout(0, even.type.layout))
        if GAP > 0:
            pair += pair // (o.shape[1] // 4) * (GAP // 2)
        pair += column // 2
        pair = pair - (D - width) // 2
        cos = gl.load(line_ptr + pair, mask=pair >= 0, other=1.0)[None, :]
        sin = gl.load(line_ptr + width // 2 + pair, mask=pair >= 0, other=0.0)[None, :]
        turned = gl.join(even * cos + odd * sin, odd * cos - even * sin)
        o = gl.convert_layout(turned.reshape(o.shape), o.type.layout)
    return o


@gluon.jit
def pin(l):
    """Row sums, unchanged. What they depend on is computed before the waits that follow in program order.

    ptxas moves arithmetic behind a wgmma wait that it does not need. Where another warpgroup waits for the result of
    this softmax, that is too late: a (never taken) branch on the result ends its basic block.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred never; setp.lt.f32 never, $1, 0f00000000; @never nanosleep.u32 1; mov.b32 $0, $1; }",
        "=f,f", [l], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip
