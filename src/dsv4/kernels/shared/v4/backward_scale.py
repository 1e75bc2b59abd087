"""fp16: by what P and dS of V4's gradients, and contributions to dKV that are stored, are multiplied before they are
rounded.

fp16 has few exponents, and dKV = P^T dO + dS^T Q is one sum, so both have the same factor: a power of two, at most
2^14 since P is at most 1, and such that dS stays below 2^15. It is that of one query and 64 heads, whose results are
divided by it in fp32: what another query's dO is does not matter. query_rows says how large dS may be::

    |dS| = |scale (P (dP - dO . O) + e^(s - L) dL)| <= |scale| (2 |dO| |longest row| + |dL|)

How large a stored contribution is, no such bound says well: every 64 columns have a factor made from their largest.
"""

from dsv4.kernels.compat import gl, gluon

EXPONENT = gl.constexpr(14)  # of the largest factor
BIAS = gl.constexpr(127)  # of the exponent of an fp32
LEAST = gl.constexpr(EXPONENT + 1)  # with the bias: both factors are normal numbers


@gluon.jit
def factors(terms, query):
    """(the factor, what undoes it). Made of the bits of what bounds dS, so that both are exact."""
    L: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    row = query.head + gl.arange(0, 64, layout=L)
    place = query.number.to(gl.int64) * query.heads + row
    most = gl.max(gl.load(terms.most_ptr + place, mask=row < query.heads, other=0.0), 0)
    over = (gl.maximum(most, 1.0).to(gl.int32, bitcast=True) >> 23) - BIAS  # most < 2^(over + 1)
    up = (BIAS + EXPONENT - over) << 23
    down = (BIAS - EXPONENT + over) << 23
    return up.to(gl.float32, bitcast=True), down.to(gl.float32, bitcast=True)


@gluon.jit
def narrowed(x):
    """x [rows, 64] as fp16, every row times a power of two that brings its largest value to 2^14 .. 2^15; and what
    undoes it, [rows]."""
    largest = gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True) >> 23
    over = gl.maximum(largest, LEAST) - BIAS
    up = ((BIAS + EXPONENT - over) << 23).to(gl.float32, bitcast=True)
    down = ((BIAS - EXPONENT + over) << 23).to(gl.float32, bitcast=True)
    return (x * up[:, None]).to(gl.float16), down
