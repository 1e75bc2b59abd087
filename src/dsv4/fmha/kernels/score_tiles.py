"""The tiles of P and dS that the chain of gradients writes to memory: which are needed, and how operands are loaded.

Tiles of 128 query rows times 128 keys; the kernels backward_scores of every architecture loop over them.
"""

from typing import NamedTuple

from dsv4.fmha.kernels.product_tiles import is_read
from dsv4.fmha.kernels.tiles import end_key, first_key, needs_mask
from dsv4.kernels.compat import Value, aggregate, gl, gluon, mbarrier, reinterpret, tma_load
from dsv4.kernels.ring import Ring, producer_stage


@aggregate
class Chunks:
    """Chunks of 64 columns: a ring of those of Q or dO, and for each slot the same columns of K or V."""

    ring: Ring
    b: Value


class SlabTerms(NamedTuple):
    """The terms of all pairs of the slab: the exponent to subtract and delta (backward_rows.py), `all` of them for a
    pair."""

    lse2_ptr: Value
    delta_ptr: Value
    all: Value


class SlabSizes(NamedTuple):
    """The sizes of one pair of sequence and KV head, its rows as far as the slab has them."""

    rows: Value
    row_begin: Value  # the slab's first
    tokens: Value
    keys: Value
    group: Value
    left: Value
    right: Value
    pairs: Value  # of the slab
    pair_begin: Value
    heads: Value


@aggregate
class Tiles:
    """The tiles of the slab: of a pair's rows, of its keys, of all pairs."""

    of_rows: Value
    of_keys: Value
    count: Value


class ScoreScales(NamedTuple):
    """What S is multiplied by before 2^S is taken; P and dS (at ds_ptr) before they are rounded, fp16 only."""

    s: Value
    p: Value
    ds_ptr: Value


@gluon.jit
def needed(row, key, sizes, M: gl.constexpr):
    """(whether the tile's products are wanted, whether it is read at all). M: rows of the tiles of products."""
    token = (sizes.row_begin + row) // sizes.group
    token_last = gl.minimum((sizes.row_begin + row + 127) // sizes.group, sizes.tokens - 1)
    first = first_key(token, sizes.tokens, sizes.keys, sizes.left)
    end = end_key(token_last, sizes.tokens, sizes.keys, sizes.right)
    return (key < end) & (key + 128 > first), is_read(row, key, sizes, M)


@gluon.jit
def locate(tile_id, tiles):
    """(pair of sequence and KV head, first row, first key) of a work tile."""
    line = tile_id // tiles.of_keys
    pair = line // tiles.of_rows
    # Each line of tiles begins elsewhere: a CTA that kept to one diagonal would have all of its tiles seen, or none.
    return pair, (line - pair * tiles.of_rows) * 128, (tile_id + 5 * line) % tiles.of_keys * 128


@gluon.jit
def tiles_of(sizes):
    row_tiles = (sizes.rows + 127) // 128
    key_tiles = (sizes.keys + 127) // 128
    return Tiles(row_tiles, key_tiles, row_tiles * key_tiles * sizes.pairs)


@gluon.jit
def row_terms(terms, pair, row, sizes):
    """(lse2, delta) of rows of a pair; +inf and 0 past the slab's end."""
    at = pair.to(gl.int64) * terms.all + sizes.row_begin + row
    lse2 = gl.load(terms.lse2_ptr + at, mask=row < sizes.rows, other=float("inf"))
    return lse2, gl.load(terms.delta_ptr + at, mask=row < sizes.rows, other=0.0)


@gluon.jit
def visible(p, row, key, sizes):
    """P of rows of the slab from `row` and of keys from `key` on, with 0 where the row does not see the key."""
    L: gl.constexpr = p.type.layout
    ROWS: gl.constexpr = p.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    token = (sizes.row_begin + (row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)))) // sizes.group
    if needs_mask(sizes.row_begin + row, key, sizes, ROWS, KEYS):
        column = key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, L))[None, :]
        inside = (column >= first_key(token, sizes.tokens, sizes.keys, sizes.left)[:, None]) & (
            column < end_key(token, sizes.tokens, sizes.keys, sizes.right)[:, None]
        )
        p = gl.where(inside, p, 0.0)
    return p


@gluon.jit
def load_role(operands, chunks, sizes, tiles, CHUNKS: gl.constexpr, M: gl.constexpr):
    BOX: gl.constexpr = operands.q_desc.layout
    ring, stage = chunks.ring, producer_stage()
    for tile_id in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        pair, row, key = locate(tile_id, tiles)
        some, read = needed(row, key, sizes, M)
        batch = (sizes.pair_begin + pair) // sizes.heads
        head = (sizes.pair_begin + pair) % sizes.heads
        row = sizes.row_begin + row
        if some:
            for chunk in range(0, 2 * CHUNKS):
                ring.acquire(stage)
                ready = ring.ready_at(stage)
                mbarrier.expect(ready, 2 * 128 * 64 * 2)
                rows_here = reinterpret(ring.slot(stage), [1, 1, 128, 64], BOX)
                keys_here = reinterpret(chunks.b.index(stage.index), [1, 1, 128, 64], BOX)
                if chunk < CHUNKS:
                    tma_load(operands.q_desc, [batch, head, row, chunk * 64], ready, rows_here)
                    tma_load(operands.k_desc, [batch, head, key, chunk * 64], ready, keys_here)
                else:
                    column = (chunk - CHUNKS) * 64
                    tma_load(operands.dout_desc, [batch, head, row, column], ready, rows_here)
                    tma_load(operands.v_desc, [batch, head, key, column], ready, keys_here)
                stage = ring.next(stage)
