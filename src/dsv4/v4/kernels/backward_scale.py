"""fp16: factors of P and dS of V4's gradients, and of stored contributions to dKV, before they are
rounded.

fp16 has few exponents, and dKV = P^T dO + dS^T Q is one sum, so both have the same factor: a power of two, at most
2^14 since P is at most 1, and such that dS stays below 2^15. It is that of one query and 64 heads, whose results are
divided by it in fp32, so another query's dO does not matter. query_rows finds a bound of dS::

    |dS| = |scale (P (dP - dO . O) + e^(s - L) dL)| <= |scale| (2 |dO| |longest row| + |dL|)

Stored contributions, which are summed later, have a factor per query and 64 heads too. query_rows finds a bound of
what one head adds to a row in any column, |P dO + dS Q| <= |dO| + most |dS| * most |Q|; the factor brings the sum over
the heads to at most 2^15. fp16 has 11 bits of everything down to 2^-29 of it.
"""

from dsv4.kernels.compat import gl, gluon

EXPONENT = gl.constexpr(14)  # exponent of the largest factor
BIAS = gl.constexpr(127)  # bias of an fp32 exponent
LEAST = gl.constexpr(2.0**-96)  # least divisor: its factors are normal numbers, and so is a product of two


@gluon.jit
def powers(bound):
    """Return (the factor that brings numbers below the bound below 2^15, its inverse), exact, from the bound's bits."""
    over = (bound.to(gl.int32, bitcast=True) >> 23) - BIAS  # bound < 2^(over + 1)
    up = (BIAS + EXPONENT - over) << 23
    down = (BIAS - EXPONENT + over) << 23
    return up.to(gl.float32, bitcast=True), down.to(gl.float32, bitcast=True)


@gluon.jit
def of_heads(ptr, query):
    """Load from [N, H] the values of this CTA's heads; 0 for absent heads."""
    L: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    row = query.head + gl.arange(0, 64, layout=L)
    place = query.number.to(gl.int64) * query.heads + row
    return gl.load(ptr + place, mask=row < query.heads, other=0.0)


@gluon.jit
def factors(terms, query):
    """Return (the factor of P and dS, its inverse)."""
    return powers(gl.maximum(gl.max(of_heads(terms.most_ptr, query), 0), 1.0))


@gluon.jit
def dkv_factors(terms, query, down, ATOMIC: gl.constexpr):
    """Return (the factor of dKV before it is added or stored, the inverse of that of stored ones). down: the inverse of
    the factor of P and dS."""
    undo = 1.0
    if not ATOMIC:
        up, undo = powers(gl.maximum(gl.sum(of_heads(terms.sizes_ptr, query), 0), LEAST))
        down = down * up
    return down, undo


@gluon.jit
def keep_undo(target, query, undo):
    """Store the inverse factor of the contributions, once per block: fold_rows finds it without a division."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for first in range(0, query.blocks, 32 * gl.num_warps()):
        block = first + gl.arange(0, 32 * gl.num_warps(), layout=L)
        gl.store(target.undo_ptr + block, undo, mask=block < query.blocks)
