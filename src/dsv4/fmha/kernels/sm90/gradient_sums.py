"""Gradients as sums in memory, fp32, which one kernel rounds: dQ, to which CTAs that own keys add their share, and the
parts of dK and dV of CTAs that own the same keys and different rows.

A sum lies in blocks of 64 rows and 64 columns, each [128, 32] in the order in which a warpgroup holds its
accumulator: a thread has 16 adjacent bytes, so shared memory is written without bank conflicts, and a block is one
16 KB box for TMA. Element (row, column) of a block, with row = 16 warp + 8 half + r, column = 8 eighth + 2 c + pair, is
number (((warp 8 + eighth) 8 + r) 4 + c) 4 + 2 half + pair.

The blocks of a pair of sequence and KV head follow one another by rows, then columns; a pair has room for whole tiles
of 128 rows. VARLEN: the tiles of a sequence begin where backward_sequences.tile_of says.
"""

from dsv4.fmha.kernels.backward_sequences import sizes_of, tile_of
from dsv4.kernels.compat import Value, aggregate, fence_async_shared, gl, gluon, tma_add

BLOCK = gl.constexpr([128, 32])  # 64 x 64 elements


@aggregate
class DqSum:
    desc: Value  # of [blocks x 128, 32], fp32
    tiles: Value  # shared memory [2, 128, 32]: one of each warpgroup
    first: Value  # block of the pair or sequence


@gluon.jit
def add_block(x, dq_sum, block, W: gl.constexpr):
    """x [64, 64], the accumulator of warpgroup W, to a block. TMA reads its tile while the caller goes on; store_wait
    must be called before the next call."""
    tile = dq_sum.tiles.index(W)
    x = x.reshape([4, 2, 8, 8, 4, 2]).permute([0, 3, 2, 4, 1, 5]).reshape(BLOCK)
    tile.store(x)
    fence_async_shared()
    tma_add(dq_sum.desc, [(dq_sum.first + block) * 128, 0], tile)


@gluon.jit
def store_blocks(x, ptr, D: gl.constexpr):
    """x [64, D], the accumulator of a warpgroup, to the D / 64 blocks at ptr. A warp writes whole lines."""
    x = x.reshape([4, 2, 8, D // 64, 8, 4, 2]).permute([3, 0, 4, 2, 5, 1, 6]).reshape([D // 64 * 128, 32])
    L: gl.constexpr = x.type.layout
    line = gl.arange(0, D // 64 * 128, layout=gl.SliceLayout(1, L)) * 32
    gl.store(ptr + line[:, None] + gl.arange(0, 32, layout=gl.SliceLayout(0, L))[None, :], x)


@gluon.jit
def round_sum(tensors, parts, out, whole, scales, D: gl.constexpr, SCALED: gl.constexpr, VARLEN: gl.constexpr):
    """One program: 128 packed rows of a pair of sequence and KV head, the sum of the parts. For dK and dV the rows are
    keys, and the group is 1."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    group = whole.group
    tiles = (whole.rows + 127) // 128
    if VARLEN:
        tiles = whole.rows // 128 + whole.sequences
    pair = gl.program_id(0) // tiles
    tile = gl.program_id(0) - pair * tiles
    sum_ptr = parts.ptr + gl.program_id(0).to(gl.int64) * (128 * D)
    row, end = tile * 128, whole.rows
    batch, head = pair // whole.kv_heads, pair % whole.kv_heads
    out_ptr = out.ptr + (batch.to(gl.int64) * out.batch + head.to(gl.int64) * out.head)
    if VARLEN:
        seq, row = tile_of(tile, tensors.cu_q_ptr, whole.sequences, group)
        first_row, _, sizes = sizes_of(seq, row, whole, tensors.cu_q_ptr, tensors.cu_k_ptr, False)
        end = sizes.rows
        out_ptr += (first_row // group).to(gl.int64) * out.token
    scale = scales.gradient
    if SCALED:
        scale = scale / gl.load(scales.ds_ptr)
    line = gl.arange(0, 128, layout=gl.SliceLayout(1, LOAD)) * 32
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, LOAD))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, STORE))
    for half in gl.static_range(2):
        here = row + half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
        token = here // group
        place = token.to(gl.int64) * out.token + (here - token * group).to(gl.int64) * out.member
        for panel in gl.static_range(D // 64):
            block_ptr = sum_ptr + (half * (D // 64) + panel) * 4096 + line[:, None] + word[None, :]
            x = gl.load(block_ptr)
            for _ in range(1, parts.count):
                block_ptr += gl.num_programs(0).to(gl.int64) * (128 * D)
                x += gl.load(block_ptr)
            x = x.reshape([4, 8, 8, 4, 2, 2]).permute([0, 4, 2, 1, 3, 5]).reshape([64, 64])
            x = gl.convert_layout((x * scale).to(out_ptr.dtype.element_ty), STORE)
            gl.store(out_ptr + place[:, None] + panel * 64 + column[None, :], x, mask=(here < end)[:, None])
