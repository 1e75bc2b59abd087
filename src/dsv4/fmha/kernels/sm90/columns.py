"""Head dims between the widths of tiles: products over the columns that exist.

A tile in shared memory is D = 128 or 256 columns wide, a power of two. With a head dim of 96 or 192, TMA loads these
columns and fills zeros up to the next multiple of 64. Products have multiples of 32 columns: Q and K are cut into
pieces of 64 columns and perhaps one of 32, and O into one or two accumulators::

    columns   Q, K pieces   O accumulators
    96        64 32         64 32
    128       128           128
    160       64 64 32      128 32
    192       64 64 64      128 64

O is a tuple of accumulators and Q a tuple of pieces; each has one member if the head dim is the width of the tile.
"""

from dsv4.kernels import softmax
from dsv4.kernels.compat import gl, gluon, warpgroup_mma, warpgroup_mma_wait


@gluon.constexpr_function
def _score_pieces(columns, width):
    used = -(-columns // 32) * 32
    if used == width:
        return [(0, width)]
    return [(start, min(64, used - start)) for start in range(0, used, 64)]


@gluon.constexpr_function
def _value_pieces(columns, width):
    used = -(-columns // 32) * 32
    first = 1 << (used.bit_length() - 1)
    rest = 1 << (used - first - 1).bit_length() if used > first else 0
    if first + rest >= width:
        return [(0, width)]
    return [(0, first), (first, rest)] if rest else [(0, first)]


@gluon.constexpr_function
def score_pieces(columns, width):
    """Return how many pieces Q and K have, in a tile of `width` columns."""
    return len(_score_pieces(columns, width))


@gluon.constexpr_function
def score_piece(columns, width, i, end):
    """Return the first column of piece i, or how many it has."""
    return _score_pieces(columns, width)[i][end]


@gluon.constexpr_function
def value_pieces(columns, width):
    """Return how many accumulators O has."""
    return len(_value_pieces(columns, width))


@gluon.constexpr_function
def value_piece(columns, width, i, end):
    """Return the first column of accumulator i, or how many it has."""
    return _value_pieces(columns, width)[i][end]


@gluon.constexpr_function
def at_once(columns, width):
    """Return whether forward_persistent.py rescales O before the wait for it, and releases slots of K and V at once."""
    return -(-columns // 32) * 32 not in (128, 256)


@gluon.constexpr_function
def loaded(columns):
    """Return the columns that TMA loads: whole panels."""
    return -(-columns // 64) * 64


@gluon.jit
def _piece(tile, C: gl.constexpr, I: gl.constexpr):
    """Return piece I of the C columns of a tile [rows, D] of Q or K."""
    D: gl.constexpr = tile.shape[1]
    if score_pieces(C, D) > 1:
        return tile.slice(score_piece(C, D, I, 0), score_piece(C, D, I, 1), dim=1)
    else:
        return tile


@gluon.jit
def operand(q, C: gl.constexpr, LS: gl.constexpr):
    """Return the query rows in q [64, D] as pieces, in registers if D is 128, for which there is room."""
    D: gl.constexpr = q.shape[1]
    found = ()
    for i in gl.static_range(score_pieces(C, D)):
        if D == 128:
            found += (_piece(q, C, i).load(gl.DotOperandLayout(0, LS, 2)),)
        else:
            found += (_piece(q, C, i),)
    return found


@gluon.jit
def scores(q, k, stage, C: gl.constexpr):
    """Return S [64, BN] of a K tile: issued, not waited for."""
    BN: gl.constexpr = k.slots.shape[1]
    D: gl.constexpr = k.slots.shape[2]
    k.wait(stage)
    tile = k.slot(stage)
    s = gl.zeros([64, BN], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16]))
    for i in gl.static_range(score_pieces(C, D)):
        s = warpgroup_mma(q[i], _piece(tile, C, i).permute((1, 0)), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def _zeros(N: gl.constexpr):
    return gl.zeros([64, N], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]))


@gluon.jit
def zeros(C: gl.constexpr, D: gl.constexpr):
    o = ()
    for i in gl.static_range(value_pieces(C, D)):
        o += (_zeros(value_piece(C, D, i, 1)),)
    return o


@gluon.jit
def _add_piece(o, p, tile, FIRST: gl.constexpr):
    N: gl.constexpr = o.shape[1]
    if N < tile.shape[1]:
        tile = tile.slice(FIRST, N, dim=1)
    return warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, o.type.layout, 2)), tile, o, is_async=True)


@gluon.jit
def add_values(o, p, v, stage, C: gl.constexpr, SAME_KV: gl.constexpr):
    """Return O + P V with a V tile: issued, not waited for."""
    D: gl.constexpr = v.slots.shape[2]
    if not SAME_KV:
        v.wait(stage)
    tile = v.slot(stage)
    found = ()
    for i in gl.static_range(value_pieces(C, D)):
        found += (_add_piece(o[i], p, tile, value_piece(C, D, i, 0)),)
    return found


@gluon.jit
def wait(o):
    """Return O when all products are complete."""
    if len(o) == 1:
        return (warpgroup_mma_wait(num_outstanding=0, deps=(o[0],)),)
    else:
        return warpgroup_mma_wait(num_outstanding=0, deps=(o[0], o[1]))


@gluon.jit
def running(o, C: gl.constexpr, D: gl.constexpr):
    """Return O, whose products may still run: a wait for none of them."""
    if len(o) == 1:
        return (warpgroup_mma_wait(num_outstanding=value_pieces(C, D), deps=(o[0],)),)
    else:
        return warpgroup_mma_wait(num_outstanding=value_pieces(C, D), deps=(o[0], o[1]))


@gluon.jit
def rescale_in_flight(o, alpha, l):
    """Do what rescale does to an O whose products may still run. l: row sums by thread, computed before."""
    found = ()
    for i in gl.static_range(len(o)):
        found += (softmax.rescale_in_flight(o[i], alpha, l),)
    return found


@gluon.jit
def rescale(o, alpha):
    """Return O times the factors of its rows. A warp whose factors are all 1 skips it."""
    found = ()
    for i in gl.static_range(len(o)):
        found += (softmax.rescale(o[i], alpha),)
    return found
