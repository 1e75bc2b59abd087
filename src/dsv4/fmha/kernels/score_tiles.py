"""Tiles of P and dS that the gradient chain writes to memory: which are needed, and how operands are loaded.

A tile has 128 query rows and 128 keys; the backward_scores kernels of every architecture loop over the tiles.
"""

from typing import NamedTuple

from dsv4.fmha.kernels.backward_sequences import tile_of
from dsv4.fmha.kernels.product_tiles import is_read
from dsv4.fmha.kernels.ragged import place_of
from dsv4.fmha.kernels.slabs import Part, in_slab, part_of
from dsv4.fmha.kernels.tiles import end_key, first_key, needs_mask
from dsv4.kernels.compat import Value, aggregate, gl, gluon, mbarrier, reinterpret, tma_load
from dsv4.kernels.ring import Ring, producer_stage


@aggregate
class Chunks:
    """A ring of chunks of 64 columns of Q or dO, and for each slot the same columns of K or V."""

    ring: Ring
    b: Value


class SlabTerms(NamedTuple):
    """Terms of all pairs of the slab: the exponent to subtract and delta (backward_rows.py), `all` of them per
    pair."""

    lse2_ptr: Value
    delta_ptr: Value
    all: Value


@aggregate
class ScoreSlab:
    """The slab, in which roles look up their tiles."""

    whole: Value  # SlabSizes
    sequences: Value  # SlabSequences
    row_tiles: Value  # row tiles of a pair
    key_tiles: Value
    count: Value  # number of tiles


@aggregate
class ScoreTile:
    part: Part
    pair: Value  # pair of the slab
    row: Value  # first row, in the part
    key: Value
    some: Value  # whether its products are wanted
    read: Value  # whether it is read at all


class ScoreScales(NamedTuple):
    """Factors of S before 2^S is computed, and of P and dS (at ds_ptr) before they are rounded, fp16 only."""

    s: Value
    p: Value
    ds_ptr: Value


@gluon.jit
def slab_of(whole, sequences, VARLEN: gl.constexpr):
    """Return the ScoreSlab."""
    row_tiles, key_tiles = (whole.rows + 127) // 128, (whole.keys + 127) // 128
    if VARLEN:
        row_tiles, key_tiles = sequences.row_tiles, sequences.key_tiles
    return ScoreSlab(whole, sequences, row_tiles, key_tiles, row_tiles * key_tiles * whole.pairs)


@gluon.jit
def score_tile(tile_id, slab, M: gl.constexpr, VARLEN: gl.constexpr):
    """Return a ScoreTile. M: rows of the tiles of products."""
    line = tile_id // slab.key_tiles
    pair = line // slab.row_tiles
    row = (line - pair * slab.row_tiles) * 128
    # Each line of tiles begins at another CTA: a CTA that stayed on one diagonal would see all of its tiles, or none.
    key = (tile_id + 5 * line) % slab.key_tiles * 128
    whole, sequences = slab.whole, slab.sequences
    if VARLEN:
        number = sequences.first + row // 128
        seq, row = tile_of(number, sequences.cu_q_ptr, sequences.count, whole.group)
        part = part_of(pair, seq, whole, sequences, True)
        inside = in_slab(seq, whole, sequences) & (row < part.rows)
        some, read = needed(row, key, part, M)
        return ScoreTile(part, pair, row, key, some & inside, read & inside)
    else:
        part = part_of(pair, 0, whole, sequences, False)
        some, read = needed(row, key, part, M)
        return ScoreTile(part, pair, row, key, some, read)


@gluon.jit
def needed(row, key, part, M: gl.constexpr):
    """Return (whether the tile's products are needed, whether it is read at all). M: rows of the tiles of products."""
    token = (part.row_begin + row) // part.group
    token_last = gl.minimum((part.row_begin + row + 127) // part.group, part.tokens - 1)
    first = first_key(token, part.tokens, part.keys, part.left)
    end = end_key(token_last, part.tokens, part.keys, part.right)
    return (key < end) & (key + 128 > first), is_read(row, key, part, M)


@gluon.jit
def row_terms(terms, tile, row):
    """Load (lse2, delta) of rows of a tile; +inf and 0 past the end."""
    part = tile.part
    at = tile.pair.to(gl.int64) * terms.all + part.first_row + part.row_begin + row
    lse2 = gl.load(terms.lse2_ptr + at, mask=row < part.rows, other=float("inf"))
    return lse2, gl.load(terms.delta_ptr + at, mask=row < part.rows, other=0.0)


@gluon.jit
def visible(p, row, key, part):
    """Return P of rows of the part from `row` on and keys from `key` on, with 0 where the row does not see the key."""
    L: gl.constexpr = p.type.layout
    ROWS: gl.constexpr = p.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    token = (part.row_begin + (row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)))) // part.group
    if needs_mask(part.row_begin + row, key, part, ROWS, KEYS):
        column = key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, L))[None, :]
        inside = (column >= first_key(token, part.tokens, part.keys, part.left)[:, None]) & (
            column < end_key(token, part.tokens, part.keys, part.right)[:, None]
        )
        p = gl.where(inside, p, 0.0)
    return p


@gluon.jit
def load_role(operands, ragged, chunks, slab, CHUNKS: gl.constexpr, M: gl.constexpr, VARLEN: gl.constexpr):
    BOX: gl.constexpr = operands.q_desc.layout
    ring, stage = chunks.ring, producer_stage()
    for tile_id in range(gl.program_id(0), slab.count, gl.num_programs(0)):
        tile = score_tile(tile_id, slab, M, VARLEN)
        part = tile.part
        batch, head, first_row, first_key = part.batch, part.head, part.first_row, part.first_key
        q = place_of(operands.q_desc, ragged.q, batch, head, first_row, part.rows, VARLEN)
        dout = place_of(operands.dout_desc, ragged.dout, batch, head, first_row, part.rows, VARLEN)
        k = place_of(operands.k_desc, ragged.k, batch, part.kv_head, first_key, part.keys, VARLEN)
        v = place_of(operands.v_desc, ragged.v, batch, part.kv_head, first_key, part.keys, VARLEN)
        row = part.row_begin + tile.row
        if tile.some:
            for chunk in range(0, 2 * CHUNKS):
                ring.acquire(stage)
                ready = ring.ready_at(stage)
                mbarrier.expect(ready, 2 * 128 * 64 * 2)
                rows_here = reinterpret(ring.slot(stage), [1, 1, 128, 64], BOX)
                keys_here = reinterpret(chunks.b.index(stage.index), [1, 1, 128, 64], BOX)
                if chunk < CHUNKS:
                    column = chunk * 64
                    tma_load(operands.q_desc, [q.outer, q.offset, q.begin + row, column], ready, rows_here)
                    tma_load(operands.k_desc, [k.outer, k.offset, k.begin + tile.key, column], ready, keys_here)
                else:
                    column = (chunk - CHUNKS) * 64
                    tma_load(operands.dout_desc, [dout.outer, dout.offset, dout.begin + row, column], ready, rows_here)
                    tma_load(operands.v_desc, [v.outer, v.offset, v.begin + tile.key, column], ready, keys_here)
                stage = ring.next(stage)
