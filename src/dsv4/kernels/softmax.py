"""Online softmax in base 2 on one score tile, and what happens to a finished row. Pure register code."""

from dsv4.kernels.compat import TRITON_VERSION, gl, gluon

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
# O is rescaled only when a row's maximum grew by more than this (base 2): P stays below 2^8, exact enough in 16 bits.
RESCALE_ABOVE = gl.constexpr(8.0)
LARGE = gl.constexpr(28)  # scores of 2^28 or more in base 2 have a power of two as their scale: row_scale
IN_TREES = gl.constexpr(TRITON_VERSION >= (3, 8))  # how Triton reduces what a thread holds of a row; before: in a chain
LOWEST = gl.constexpr(-3.0e38)  # a running maximum to begin with: -inf - -inf would be NaN


@gluon.jit
def apply_mask(s, first_column, row_first, row_end, L: gl.constexpr):
    """Set scores of keys that a row does not see to -inf. s: [rows, keys] of keys from first_column on."""
    column = first_column + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, L))[None, :]
    visible = (column >= row_first[:, None]) & (column < row_end[:, None])
    return gl.where(visible, s, -float("inf"))


@gluon.jit
def apply_mask_by_register(s, first_column, row_first, row_end, L: gl.constexpr):
    """Do what ``apply_mask`` does, for an accumulator. Its columns are 8 j + 2 t + e, t of the thread: what the
    thread adds is taken from the bounds, the rest is a constant of each register. ``apply_mask`` would hold columns
    in registers through a loop."""
    M: gl.constexpr = s.shape[0]
    N: gl.constexpr = s.shape[1]
    x = s.reshape([M, N // 8, 4, 2])
    LX: gl.constexpr = x.type.layout
    MT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LX))
    JE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LX))
    column = (first_column + 2 * gl.arange(0, 4, layout=gl.SliceLayout(0, MT)))[None, :]
    low = gl.convert_layout(row_first, gl.SliceLayout(1, MT))[:, None] - column
    high = gl.convert_layout(row_end, gl.SliceLayout(1, MT))[:, None] - column
    rest = 8 * gl.arange(0, N // 8, layout=gl.SliceLayout(1, JE))[:, None]
    rest = (rest + gl.arange(0, 2, layout=gl.SliceLayout(0, JE))[None, :])[None, :, :][:, :, None, :]
    visible = (rest >= low[:, None, :][:, :, :, None]) & (rest < high[:, None, :][:, :, :, None])
    return gl.convert_layout(gl.where(visible, x, -float("inf")).reshape([M, N]), L)


@gluon.jit
def biased(s, bias, SIGN: gl.constexpr):
    """Set scores of absent rows, whose bias is -inf, to -inf. SIGN: of the softmax scale."""
    if SIGN == 0:
        s = gl.zeros_like(s)
    elif SIGN < 0:
        s = -s
    return s + bias


@gluon.jit
def power_above(scale):
    """Return the least power of two that is not below a scale."""
    return ((scale.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def row_scale(top, scale):
    """Return the scale of a row with maximum score `top`: `scale`, or power_above(scale) if the maximum is 2^LARGE or
    more.

    s scale - m is one FMA, and m is rounded: by up to 8 at 2^28, by 128 at 2^32. A product with a power of two is
    exact, so the FMA gives 0 at the maximum. fp32 scores of that size lie so far apart that P of any other score is at
    most 2^-16. So a row may have one scale in a tile and the other one in the next."""
    power = power_above(scale)
    return gl.where(gl.abs(top) < large_from(power).to(gl.float32, bitcast=True), scale, power)


@gluon.jit
def large_from(power):
    """Return the bits of 2^LARGE / power, at most those of infinity."""
    return gl.minimum(2 * 127 + LARGE - (power.to(gl.int32, bitcast=True) >> 23), 255) << 23


@gluon.jit
def is_large(top, scale):
    """Return whether a row's maximum is finite and has another row_scale than `scale`."""
    least = large_from(power_above(scale))
    bits = top.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    return (bits - least).to(gl.uint32, bitcast=True) < (0x7F800000 - least).to(gl.uint32, bitcast=True)


@gluon.jit
def true_maximum(m, scale):
    """Return a row's maximum times `scale`, from the maximum times row_scale, which `step` returns."""
    power = power_above(scale).to(gl.int32, bitcast=True)
    ratio = scale * ((254 << 23) - power).to(gl.float32, bitcast=True)
    return gl.where((gl.abs(m) < (1 << LARGE)) | (m <= LOWEST), m, m * ratio)


@gluon.jit
def row_max(s):
    """Return the maxima of the rows of an accumulator [M, N].

    Triton 3.8 and newer compare the values of a thread in a tree, row after row. At head dim 64 ptxas then does not
    mix the arithmetic of a thread's two rows: 1927 -> 2148 us for 8 x 8 x 8192 on an H200. Four chains side by side
    are what Triton 3.6 makes of gl.max, or better."""
    if IN_TREES and s.shape[1] >= 16:
        four = chain_max(s.reshape([s.shape[0], s.shape[1] // 8, 8]), 0, True)
        return gl.convert_layout(gl.max(four, 1), gl.SliceLayout(1, s.type.layout))
    else:
        return gl.max(s, 1)


@gluon.jit
def chain_max(x, m, FIRST: gl.constexpr):
    """Return the maximum of x [M, J, 8] over J, from the first to the last, and unless FIRST of m [M, 8]."""
    M: gl.constexpr = x.shape[0]
    J: gl.constexpr = x.shape[1]
    if J == 1:
        x = x.reshape([M, 8])
        if FIRST:
            return x
        else:
            return gl.maximum(gl.convert_layout(x, m.type.layout), m)
    else:
        low, high = gl.split(x.reshape([M, 2, J // 2, 8]).permute((0, 2, 3, 1)))
        return chain_max(high, chain_max(low, m, FIRST), False)


@gluon.jit
def step(s, m, scale, ABOVE: gl.constexpr = 0):
    """Process scores with running maximum m (base 2, LOWEST = nothing seen yet) -> (P, new m, factor for earlier
    results).

    m is scores times row_scale. ABOVE: the maximum stays where it grows by no more than that; the factor is then
    exactly 1."""
    top = row_max(s)
    factor = row_scale(top, scale)
    m_new = gl.maximum(m, top * factor)
    if ABOVE > 0:
        m_new = gl.where(m_new - m > ABOVE, m_new, m)
    return gl.exp2(s * factor[:, None] - m_new[:, None]), m_new, gl.exp2(m - m_new)


@gluon.jit
def step_below_limit(s, m, scale, ABOVE: gl.constexpr):
    """Do what ``step`` does for scores below 2^30, 2^27 in fp16: m is scores times scale."""
    m_new = gl.maximum(m, row_max(s) * scale)
    m_new = gl.where(m_new - m > ABOVE, m_new, m)
    return gl.exp2(s * scale - m_new[:, None]), m_new, gl.exp2(m - m_new)


@gluon.jit
def partial_sums(p):
    """Return each thread's share of the row sums: an accumulator [M, N] -> [M, 4], no exchange between lanes."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


def _scaling(count: int, in_flight: bool = False) -> str:
    """Return PTX: `count` values from $0 on, two of each row alternately, times factors from $2 count on, unless
    all are 1.
    in_flight: after a wait for the products; depends on row sums, from $3 count on, which are never negative."""
    sums = [f"setp.lt.or.f32 some, ${3 * count + i}, 0f00000000, some" for i in (0, 2)]
    lines = [
        ".reg .pred some, any",
        f"setp.neu.f32 some, ${2 * count}, 0f3F800000",
        f"setp.neu.or.f32 some, ${2 * count + 2}, 0f3F800000, some",
        *(sums if in_flight else []),
        "vote.sync.any.pred any, some, 0xffffffff",
        "@!any bra.uni done" if in_flight else "@!any bra done",
        *(["wgmma.wait_group.sync.aligned 0"] if in_flight else []),
        *(f"mul.f32 ${i}, ${i}, ${2 * count + i}" for i in range(count)),
    ]
    return "{ " + "; ".join(lines) + "; done: }"


# The values stay in their registers: copies would cost as much as the products.
SCALING_64, SCALING_32, SCALING_16 = (gl.constexpr(_scaling(n)) for n in (64, 32, 16))
SCALED_64, SCALED_32, SCALED_16 = (
    gl.constexpr(",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)) for n in (64, 32, 16)
)


@gluon.jit
def rescale(o, alpha):
    """Multiply O, an accumulator [M, N], by the factors of its rows; a warp whose factors are all 1 skips it."""
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))[:, None].broadcast_to(o.shape)
    AT_ONCE: gl.constexpr = 64 if o.shape[1] >= 128 else o.shape[1] // 2
    TEXT: gl.constexpr = SCALING_64 if AT_ONCE == 64 else SCALING_32 if AT_ONCE == 32 else SCALING_16
    REGISTERS: gl.constexpr = SCALED_64 if AT_ONCE == 64 else SCALED_32 if AT_ONCE == 32 else SCALED_16
    return gl.inline_asm_elementwise(TEXT, REGISTERS, [o, alpha], dtype=gl.float32, is_pure=True, pack=AT_ONCE)


FLYING_64, FLYING_32, FLYING_16 = (gl.constexpr(_scaling(n, True)) for n in (64, 32, 16))
FLOWN_64, FLOWN_32, FLOWN_16 = (
    gl.constexpr(",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * 2 * n)) for n in (64, 32, 16)
)


@gluon.jit
def rescale_in_flight(o, alpha, l):
    """Do what ``rescale`` does for an O whose products (wgmma) may still run: a warp that does not jump waits for
    them. l: row sums by thread [M, 4]; what they depend on is computed before, as with `pin`."""
    M: gl.constexpr = o.shape[0]
    N: gl.constexpr = o.shape[1]
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))[:, None].broadcast_to(o.shape)
    l = l.reshape([M, 1, 4, 1]).broadcast_to([M, N // 8, 4, 2]).reshape([M, N])
    l = gl.convert_layout(l, o.type.layout)
    AT_ONCE: gl.constexpr = 64 if N >= 128 else N // 2
    TEXT: gl.constexpr = FLYING_64 if AT_ONCE == 64 else FLYING_32 if AT_ONCE == 32 else FLYING_16
    REGISTERS: gl.constexpr = FLOWN_64 if AT_ONCE == 64 else FLOWN_32 if AT_ONCE == 32 else FLOWN_16
    return gl.inline_asm_elementwise(TEXT, REGISTERS, [o, alpha, l], dtype=gl.float32, is_pure=False, pack=AT_ONCE)


@gluon.jit
def sink_of(sink_ptr, head, here):
    """Return the sink's logit of a head or of a tensor of heads, -inf outside ``here``; a null pointer means none."""
    return gl.load(sink_ptr + head, mask=here & (sink_ptr.to(gl.int64) != 0), other=-float("inf"))


@gluon.jit
def finish(m, l, sink):
    """Return (factor that normalises O, base-2 LSE without the sink). sink: natural logit per row, -inf = none.

    A row that saw keys, but whose P are all 0, had scores beyond the limit (DESIGN.md, Rules of the operations). Its
    LSE is NaN, and so is its output, as 0 times 1 / 0, unless a sink far above the scores makes it 0."""
    nothing = m <= LOWEST
    lse = gl.where(nothing, -float("inf"), m + gl.log2(gl.where(l > 0.0, l, -1.0)))
    with_sink = l + gl.exp2(sink * LOG2E - gl.where(nothing, 0.0, m))
    return gl.where(nothing, 0.0, 1.0 / gl.where(nothing, 1.0, with_sink)), lse


@gluon.jit
def inverse_rope(o, rope, column, D: gl.constexpr, GAP: gl.constexpr = 0):
    """Rotate interleaved pairs of the last ``width`` of D columns back by the query's angle; o has those from `column`
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
    """Return row sums unchanged. What they depend on is computed before the waits that follow in program order.

    ptxas moves arithmetic behind a wgmma wait that it does not need. Where another warpgroup waits for the result of
    this softmax, that is too late: a (never taken) branch on the result ends its basic block.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred never; setp.lt.f32 never, $1, 0f00000000; @never nanosleep.u32 1; mov.b32 $0, $1; }",
        "=f,f",
        [l],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )
