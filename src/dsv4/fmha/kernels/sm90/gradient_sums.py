"""Gradients as fp32 sums in memory, which round_sum rounds: dQ, to which CTAs that own keys add their share, and dK and
dV of CTAs that own the same keys and different rows. These are sums too, or one part per CTA if the order of the
additions must not change.

A sum lies in blocks of 64 rows and 64 columns, each [128, 32] in the order in which a warpgroup holds its
accumulator: a thread has 16 adjacent bytes, so shared memory is written without bank conflicts, and a block is one
16 KB box for TMA. Element (row, column) of a block, with row = 16 warp + 8 half + r, column = 8 eighth + 2 c + pair, is
number (((warp 8 + eighth) 8 + r) 4 + c) 4 + 2 half + pair.

The blocks of a pair of sequence and KV head are ordered by rows, then columns; a pair has room for whole tiles of 128
rows. VARLEN: backward_sequences.tile_of returns where the tiles of a sequence begin.
"""

from dsv4.kernels.compat import Value, aggregate, fence_async_shared, gl, gluon, store_wait, tma_add

BLOCK = gl.constexpr([128, 32])  # 64 x 64 elements


@aggregate
class Sums:
    desc: Value  # TMA descriptor of [blocks x 128, 32], fp32
    tiles: Value  # shared memory [2, 128, 32]: one of each warpgroup
    dq: Value  # first blocks: of the pair or sequence
    dk: Value  # first block of the 128 keys
    dv: Value


@gluon.jit
def add_block(x, sums, block, W: gl.constexpr):
    """Add x [64, 64], the accumulator of warpgroup W, to a block. TMA reads its tile while the caller continues; call
    store_wait before the next call."""
    tile = sums.tiles.index(W)
    x = x.reshape([4, 2, 8, 8, 4, 2]).permute([0, 3, 2, 4, 1, 5]).reshape(BLOCK)
    tile.store(x)
    fence_async_shared()
    tma_add(sums.desc, [block * 128, 0], tile)


@gluon.jit
def add_blocks(x, sums, first, W: gl.constexpr, D: gl.constexpr):
    """Add x [64, D], the accumulator of warpgroup W, to the D / 64 blocks from `first` on."""
    panels = (x,)
    if D == 128:
        panels = x.reshape([64, 2, 64]).permute([0, 2, 1]).split()
    for panel in gl.static_range(D // 64):
        store_wait(0)
        add_block(panels[panel], sums, first + panel, W)


@gluon.jit
def _as_blocks(x, D: gl.constexpr):
    """Return x [64, D], the accumulator of a warpgroup, in the order of D / 64 blocks."""
    x = x.reshape([4, 2, 8, D // 64, 8, 4, 2]).permute([3, 0, 4, 2, 5, 1, 6])
    return x.reshape([D // 64 * 128, 32])


@gluon.jit
def _places(ptr, D: gl.constexpr, L: gl.constexpr):
    line = gl.arange(0, D // 64 * 128, layout=gl.SliceLayout(1, L)) * 32
    return ptr + line[:, None] + gl.arange(0, 32, layout=gl.SliceLayout(0, L))[None, :]


@gluon.jit
def store_blocks(x, ptr, D: gl.constexpr):
    """Store x [64, D], the accumulator of a warpgroup, in the D / 64 blocks at ptr. A warp writes whole lines."""
    x = _as_blocks(x, D)
    L: gl.constexpr = x.type.layout
    gl.store(_places(ptr, D, L), x)


@gluon.jit
def load_blocks(like, ptr, D: gl.constexpr):
    """Return what store_blocks has stored, in the layout of `like`."""
    L: gl.constexpr = _as_blocks(like, D).type.layout
    x = gl.load(_places(ptr, D, L)).reshape([D // 64, 4, 8, 8, 4, 2, 2]).permute([1, 5, 3, 0, 2, 4, 6])
    return gl.convert_layout(x.reshape([64, D]), like.type.layout, assert_trivial=True)
