"""Tiles of dQ, dK and dV as products of P and dS in memory: what each multiplies, and how it is loaded.

    dV = P^T dO    dK = dS^T Q    dQ = dS K

A tile has M keys (dV, dK) or M packed query rows (dQ) and 256 columns; the kernels backward_products of every
architecture loop over them. A step multiplies 64 rows, or keys.

slot            bytes            holds
a               M / 64 x 8192    panels [64, 64] of P or dS: [64 rows, M keys] of dV and dK, [M rows, 64 keys] of dQ
b               32768            four panels [64, 64] of dO, Q or K

A tile multiplies the keys that some of its rows see, or the rows that see some of its keys: is_read() tells
backward_scores what it has to write. TMA fills zeros past the end of a tensor.
"""

from typing import NamedTuple

from dsv4.fmha.kernels.backward_sequences import tile_of
from dsv4.fmha.kernels.ragged import RowCoord, place_of
from dsv4.fmha.kernels.slabs import Part, in_slab, part_of
from dsv4.fmha.kernels.tiles import end_key, first_key
from dsv4.kernels.compat import Value, aggregate, gl, gluon, mbarrier, reinterpret, tma_load
from dsv4.kernels.ring import Ring, producer_stage

DV, DK, DQ = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
B_BYTES = gl.constexpr(64 * 256 * 2)


class ProductOptions(NamedTuple):
    """The wanted gradients, and the order of the work."""

    dv: Value
    dk: Value
    dq: Value
    at_once: Value  # pairs of sequence and KV head whose tiles are scheduled together, the longest first
    add: Value  # dK and dV: add to the sums of earlier slabs
    keep: Value  # dK and dV: keep sums for later slabs


@aggregate
class ProductOperands:
    """TMA descriptors, with boxes of 64 x 64."""

    p_desc: Value
    ds_desc: Value
    q_desc: Value
    k_desc: Value
    dout_desc: Value


@aggregate
class Gradients:
    """TMA descriptors of the results."""

    dq_desc: Value
    dk_desc: Value
    dv_desc: Value


@aggregate
class Slots:
    """A ring of b, and for each slot of it M / 64 panels of a."""

    ring: Ring
    panels: Value  # [slots x M / 64, 64, 64]


@gluon.constexpr_function
def rows_of_tile(slots):
    return slots.panels.shape[0] // slots.ring.slots.shape[0] * 64


@aggregate
class ProductTile:
    part: Part
    kind: Value  # DV, DK or DQ
    pair: Value  # pair of the slab
    own: Value  # first key, or first row of the slab
    column: Value
    begin: Value  # the tile multiplies rows, or keys, [begin, end)
    end: Value
    wanted: Value
    heads: Value  # pairs whose products it adds, from `pair` on


@aggregate
class ProductSlab:
    """The slab, in which roles look up their tiles."""

    whole: Value  # SlabSizes
    sequences: Value  # SlabSequences
    opts: Value  # ProductOptions
    of_keys: Value  # tiles of a pair
    of_rows: Value
    count: Value  # number of tiles


@gluon.jit
def product_slab(whole, sequences, opts, M: gl.constexpr, D: gl.constexpr, VARLEN: gl.constexpr):
    """Return a ProductSlab; for a varlen batch, with the most tiles that there may be."""
    of_keys, of_rows = (whole.keys + M - 1) // M, (whole.rows + M - 1) // M
    if VARLEN:
        of_keys, of_rows = whole.keys // M + sequences.count, whole.rows // M + sequences.count
    count = (2 * of_keys + whole.share * of_rows) * (whole.pairs // whole.share) * (D // 256)
    return ProductSlab(whole, sequences, opts, of_keys, of_rows, count)


@gluon.jit
def tile_of_turn(turn):
    """Return the tile of a turn. A CTA goes back and forth: tiles are ordered from the longest to the shortest, and
    their number is seldom a multiple of the number of CTAs."""
    cta, ctas = gl.program_id(0), gl.num_programs(0)
    return turn * ctas + gl.where(turn % 2 == 0, cta, ctas - 1 - cta)


@gluon.jit
def attending_rows(first, last, part):
    """Return [begin, end) of the part's rows that see some of the keys first .. last; begin is a multiple of 64."""
    offset = part.keys - part.tokens
    begin = gl.maximum(first - offset - part.right, 0) * part.group - part.row_begin
    end = gl.minimum(last + 1 - offset + part.left, part.tokens) * part.group - part.row_begin
    return gl.maximum(begin, 0) // 64 * 64, gl.minimum(end, part.rows)


@gluon.jit
def visible_keys(first, last, part):
    """Return [begin, end) of the keys that some of the part's rows first .. last see; begin is a multiple of 64."""
    token = (part.row_begin + first) // part.group
    token_last = gl.minimum((part.row_begin + last) // part.group, part.tokens - 1)
    begin = first_key(token, part.tokens, part.keys, part.left)
    return begin // 64 * 64, end_key(token_last, part.tokens, part.keys, part.right)


@gluon.jit
def is_read(row, key, part, M: gl.constexpr):
    """Return whether some tile of dQ, dK or dV reads P and dS of 128 rows and 128 keys."""
    key_begin, key_end = visible_keys(row // M * M, (row + 127) // M * M + M - 1, part)
    row_begin, row_end = attending_rows(key // M * M, (key + 127) // M * M + M - 1, part)
    by_rows = (key < key_end) & (key + 128 > key_begin)
    return by_rows | ((row < row_end) & (row + 128 > row_begin))


@gluon.jit
def product_tile(tile_id, slab, M: gl.constexpr, D: gl.constexpr, VARLEN: gl.constexpr):
    """Return a tile. `at_once` pairs are scheduled together: first dV and dK from the first keys on, then dQ from the
    last rows on, so that under a causal mask the longest are first. A varlen batch goes sequence by sequence: with the
    longest of all first, operands leave L2, and 64 x 100 to 2000 tokens take 2042 instead of 1789 us."""
    whole, sequences, opts, of_keys, of_rows = slab.whole, slab.sequences, slab.opts, slab.of_keys, slab.of_rows
    share = whole.share
    together = (2 * of_keys + share * of_rows) * (D // 256) * opts.at_once
    first_pair = tile_id // together * opts.at_once
    rest = tile_id % together
    column = rest % (D // 256) * 256
    rest = rest // (D // 256)
    pairs = gl.minimum(opts.at_once, whole.pairs // share - first_pair)
    pair = (first_pair + rest % pairs) * share  # the first of those that share K and V
    number = rest // pairs
    kind = gl.where(number < 2 * of_keys, number % 2, DQ)
    of_dq = gl.maximum(number - 2 * of_keys, 0)
    pair += gl.where(kind == DQ, of_dq % share, 0)
    number = gl.where(kind == DQ, of_rows - 1 - of_dq // share, number // 2)
    wanted = (tile_id < slab.count) & (gl.where(kind == DQ, opts.dq, gl.where(kind == DK, opts.dk, opts.dv)) != 0)
    if VARLEN:
        seq, own = gl.to_tensor(0), gl.to_tensor(0)
        if kind == DQ:
            seq, own = tile_of(number, sequences.cu_q_ptr, sequences.count, whole.group, M)
        else:
            seq, own = tile_of(number, sequences.cu_k_ptr, sequences.count, 1, M)
        part = part_of(pair, seq, whole, sequences, True)
        inside = in_slab(seq, whole, sequences) & (own < gl.where(kind == DQ, part.rows, part.keys))
        return _product_tile(part, kind, pair, own, column, wanted & inside, share, M)
    else:
        part = part_of(pair, 0, whole, sequences, False)
        return _product_tile(part, kind, pair, number * M, column, wanted, share, M)


@gluon.jit
def _product_tile(part, kind, pair, own, column, wanted, share, M: gl.constexpr):
    row_begin, row_end = attending_rows(own, own + M - 1, part)
    key_begin, key_end = visible_keys(own, own + M - 1, part)
    begin = gl.where(kind == DQ, key_begin, row_begin)
    end = gl.where(kind == DQ, key_end, row_end)
    return ProductTile(part, kind, pair, own, column, begin, end, wanted, gl.where(kind == DQ, 1, share))


@gluon.jit
def place_of_rows(desc, ragged, part, VARLEN: gl.constexpr, further=0):
    """Return the place of the slab's rows of Q, dO or dQ, `further` heads on."""
    place = place_of(desc, ragged, part.batch, part.head + further, part.first_row, part.rows, VARLEN)
    return RowCoord(place.outer, place.offset, place.begin + part.row_begin)


@gluon.jit
def place_of_keys(desc, ragged, part, VARLEN: gl.constexpr):
    return place_of(desc, ragged, part.batch, part.kv_head, part.first_key, part.keys, VARLEN)


@gluon.jit
def load_a(desc, slots, stage, pair, row, key, MORE_ROWS: gl.constexpr, MORE_KEYS: gl.constexpr):
    """Load panels from (row, key) on, each MORE_ROWS and MORE_KEYS further."""
    BOX: gl.constexpr = desc.layout
    PANELS: gl.constexpr = rows_of_tile(slots) // 64
    for n in gl.static_range(PANELS):
        panel = reinterpret(slots.panels.index(stage.index * PANELS + n), [1, 64, 64], BOX)
        tma_load(desc, [pair, row + n * MORE_ROWS, key + n * MORE_KEYS], slots.ring.ready_at(stage), panel)


@gluon.jit
def load_b(desc, slots, stage, place, row, column):
    BOX: gl.constexpr = desc.layout
    panels = reinterpret(slots.ring.slot(stage), [4, 1, 1, 64, 64], BOX)
    for n in gl.static_range(4):
        at = [place.outer, place.offset, place.begin + row, column + n * 64]
        tma_load(desc, at, slots.ring.ready_at(stage), panels.index(n))


@gluon.jit
def load_role(operands, ragged, slots, slab, D: gl.constexpr, VARLEN: gl.constexpr):
    ring, stage = slots.ring, producer_stage()
    M: gl.constexpr = rows_of_tile(slots)
    for turn in range(0, (slab.count + gl.num_programs(0) - 1) // gl.num_programs(0)):
        tile = product_tile(tile_of_turn(turn), slab, M, D, VARLEN)
        part = tile.part
        k = place_of_keys(operands.k_desc, ragged.k, part, VARLEN)
        if tile.wanted:
            for further in range(0, tile.heads):
                pair = tile.pair + further
                q = place_of_rows(operands.q_desc, ragged.q, part, VARLEN, further)
                dout = place_of_rows(operands.dout_desc, ragged.dout, part, VARLEN, further)
                for at in range(tile.begin, tile.end, 64):
                    ring.acquire(stage)
                    mbarrier.expect(ring.ready_at(stage), M * 64 * 2 + B_BYTES)
                    if tile.kind == DQ:
                        load_a(operands.ds_desc, slots, stage, pair, part.slab_row + tile.own, at, 64, 0)
                        load_b(operands.k_desc, slots, stage, k, at, tile.column)
                    elif tile.kind == DK:
                        load_a(operands.ds_desc, slots, stage, pair, part.slab_row + at, tile.own, 0, 64)
                        load_b(operands.q_desc, slots, stage, q, at, tile.column)
                    else:
                        load_a(operands.p_desc, slots, stage, pair, part.slab_row + at, tile.own, 0, 64)
                        load_b(operands.dout_desc, slots, stage, dout, at, tile.column)
                    stage = ring.next(stage)


@gluon.jit
def result_scale(tile, scales, SCALED: gl.constexpr):
    """Return the factor of a product: P and dS were scaled before they were rounded (SCALED, fp16)."""
    of_p = 1.0
    of_ds = scales.gradient
    if SCALED:
        of_p = 1.0 / scales.p
        of_ds = scales.gradient / gl.load(scales.ds_ptr)
    return gl.where(tile.kind == DV, of_p, of_ds)
