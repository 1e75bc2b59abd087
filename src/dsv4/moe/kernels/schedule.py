"""Schedule of a product's tiles: persistent CTAs process tiles in turn, those of one expert one after the other.

A tile is a block of weights of one expert times some of its rows of activations. Tiles with the same weights follow
each other.
"""

from dsv4.kernels.compat import gl, gluon

RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")


@gluon.jit
def plus(a, b):
    return a + b


@gluon.constexpr_function
def experts_layout(experts, warps):
    """Return the layout of int32 [experts], with all of them in every warp."""
    return gl.BlockedLayout([experts // 32], [32], [warps], [0])


@gluon.jit
def write_ends(ends, rows, N: gl.constexpr):
    """Store in `ends` the tiles of N rows up to each expert's last -> tiles of all experts. rows: of every expert."""
    sums = gl.associative_scan((rows + N - 1) // N, 0, plus)
    ends.store(sums)
    return gl.max(sums, 0)


@gluon.jit
def rows_of_experts(rows, EXPERTS: gl.constexpr):
    """Return how many rows each expert has; they lie in the order of experts."""
    expert = gl.arange(0, EXPERTS, layout=experts_layout(EXPERTS, gl.num_warps()))
    there = expert < rows.experts
    begin = gl.load(rows.starts_ptr + expert, mask=there, other=0)
    stop = gl.load(rows.starts_ptr + expert + 1, mask=there, other=0)
    return stop - begin


@gluon.jit
def write_schedule(ends, rows, N: gl.constexpr):
    """Call write_ends for rows that lie in the order of experts."""
    return write_ends(ends, rows_of_experts(rows, ends.shape[0]), N)


@gluon.jit
def expert_at(tile, ends, blocks):
    """Return the expert of a tile, the row tiles of the experts before it, and which of its own tiles this is."""
    all_ends = ends.load(experts_layout(ends.shape[0], gl.num_warps()))
    done = all_ends * blocks <= tile
    before = gl.max(gl.where(done, all_ends, 0), 0)
    return gl.sum(done.to(gl.int32), 0), before, tile - before * blocks


@gluon.jit
def tile_at(tile, ends, rows, blocks, N: gl.constexpr):
    """Return expert, block of weights, first row of activations of the tile, of the expert, and its end."""
    expert, _, local = expert_at(tile, ends, blocks)
    begin = gl.load(rows.starts_ptr + expert)
    stop = gl.load(rows.starts_ptr + expert + 1)
    parts = (stop - begin + N - 1) // N
    block = local // parts
    return expert, block, begin + (local - block * parts) * N, begin, stop


@gluon.jit
def scale_of(amax):
    """Return e, where 2^(e - 127) is the least power of two with amax / 448 below it, from the bits of the fp32
    product, as in formats.py."""
    bits = (gl.maximum(amax, 1e-4) * (1.0 / 448.0)).to(gl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(gl.int32)


@gluon.jit
def swiglu(gate, up, weight, limit):
    """Compute SwiGLU of gate and up in fp32, times the weight of the slot; the caller rounds it to bf16."""
    g = gl.minimum(gate, limit)
    u = gl.minimum(gl.maximum(up, -limit), limit)
    e = gl.exp2(g * -1.4426950408889634)
    # A full division also handles numbers that do not occur here, and costs four times as much.
    sigmoid = gl.inline_asm_elementwise(RECIPROCAL, "=f,f", [1.0 + e], dtype=gl.float32, is_pure=True, pack=1)
    return g * sigmoid * u * weight
