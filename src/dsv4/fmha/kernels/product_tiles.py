"""The tiles of dQ, dK and dV that are products of P and dS in memory: what each multiplies, and how it is loaded.

    dV = P^T dO    dK = dS^T Q    dQ = dS K

A tile has M keys (dV, dK) or M packed query rows (dQ) and 256 columns; the kernels backward_products of every
architecture loop over them. A step multiplies 64 rows, or keys.

slot            bytes            holds
a               M / 64 x 8192    panels [64, 64] of P or dS: [64 rows, M keys] of dV and dK, [M rows, 64 keys] of dQ
b               32768            four panels [64, 64] of dO, Q or K

A tile multiplies what some of its rows see, or what sees some of its keys: is_read() tells backward_scores what it has
to write. TMA fills what lies past the end of a tensor with zeros.
"""

from typing import NamedTuple

from dsv4.fmha.kernels.tiles import end_key, first_key
from dsv4.kernels.compat import Value, aggregate, gl, gluon, mbarrier, reinterpret, tma_load
from dsv4.kernels.ring import Ring, producer_stage

DV, DK, DQ = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
B_BYTES = gl.constexpr(64 * 256 * 2)


class ProductOptions(NamedTuple):
    """Which gradients are wanted, and the order of the work."""

    dv: Value
    dk: Value
    dq: Value
    at_once: Value  # pairs of sequence and KV head whose tiles go together, the longest first
    add: Value  # dK and dV: to the sums of the slabs before
    keep: Value  # dK and dV: sums for the slabs to come


@aggregate
class ProductOperands:
    """TMA descriptors, boxes of 64 x 64."""

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
    kind: Value  # DV, DK or DQ
    pair: Value  # of the slab
    batch: Value
    head: Value
    own: Value  # first key, or first row of the slab
    column: Value
    begin: Value  # rows, or keys, that it multiplies: [begin, end)
    end: Value
    wanted: Value


@gluon.jit
def count_tiles(sizes, M: gl.constexpr, D: gl.constexpr):
    return (2 * ((sizes.keys + M - 1) // M) + (sizes.rows + M - 1) // M) * sizes.pairs * (D // 256)


@gluon.jit
def tile_of_turn(turn):
    """A CTA goes back and forth: tiles come from the longest to the shortest, and their number is seldom a multiple of
    the CTAs."""
    cta, ctas = gl.program_id(0), gl.num_programs(0)
    return turn * ctas + gl.where(turn % 2 == 0, cta, ctas - 1 - cta)


@gluon.jit
def rows_that_see(first, last, sizes):
    """[begin, end) of the slab's rows that see some of the keys first .. last; begin is a multiple of 64."""
    offset = sizes.keys - sizes.tokens
    begin = gl.maximum(first - offset - sizes.right, 0) * sizes.group - sizes.row_begin
    end = gl.minimum(last + 1 - offset + sizes.left, sizes.tokens) * sizes.group - sizes.row_begin
    return gl.maximum(begin, 0) // 64 * 64, gl.minimum(end, sizes.rows)


@gluon.jit
def keys_seen(first, last, sizes):
    """[begin, end) of the keys that some of the slab's rows first .. last see; begin is a multiple of 64."""
    token = (sizes.row_begin + first) // sizes.group
    token_last = gl.minimum((sizes.row_begin + last) // sizes.group, sizes.tokens - 1)
    begin = first_key(token, sizes.tokens, sizes.keys, sizes.left)
    return begin // 64 * 64, end_key(token_last, sizes.tokens, sizes.keys, sizes.right)


@gluon.jit
def is_read(row, key, sizes, M: gl.constexpr):
    """Whether some tile of dQ, dK or dV reads P and dS of 128 rows and 128 keys."""
    key_begin, key_end = keys_seen(row // M * M, (row + 127) // M * M + M - 1, sizes)
    row_begin, row_end = rows_that_see(key // M * M, (key + 127) // M * M + M - 1, sizes)
    by_rows = (key < key_end) & (key + 128 > key_begin)
    return by_rows | ((row < row_end) & (row + 128 > row_begin))


@gluon.jit
def product_tile(tile_id, sizes, opts, M: gl.constexpr, D: gl.constexpr):
    """The tiles of `at_once` pairs together: first dV and dK from the first keys on, then dQ from the last rows on, so
    that under a causal mask the longest come first."""
    of_keys = (sizes.keys + M - 1) // M
    of_rows = (sizes.rows + M - 1) // M
    together = (2 * of_keys + of_rows) * (D // 256) * opts.at_once
    first_pair = tile_id // together * opts.at_once
    rest = tile_id % together
    column = rest % (D // 256) * 256
    rest = rest // (D // 256)
    pairs = gl.minimum(opts.at_once, sizes.pairs - first_pair)
    pair = first_pair + rest % pairs
    number = rest // pairs
    batch = (sizes.pair_begin + pair) // sizes.heads
    head = (sizes.pair_begin + pair) % sizes.heads
    kind = gl.where(number < 2 * of_keys, number % 2, DQ)
    own = gl.where(kind == DQ, 2 * of_keys + of_rows - 1 - number, number // 2) * M
    wanted = gl.where(kind == DQ, opts.dq, gl.where(kind == DK, opts.dk, opts.dv)) != 0
    row_begin, row_end = rows_that_see(own, own + M - 1, sizes)
    key_begin, key_end = keys_seen(own, own + M - 1, sizes)
    begin = gl.where(kind == DQ, key_begin, row_begin)
    end = gl.where(kind == DQ, key_end, row_end)
    return ProductTile(kind, pair, batch, head, own, column, begin, end, wanted)


@gluon.jit
def load_a(desc, slots, stage, pair, row, key, MORE_ROWS: gl.constexpr, MORE_KEYS: gl.constexpr):
    """Panels from (row, key) on, each MORE_ROWS and MORE_KEYS further."""
    BOX: gl.constexpr = desc.layout
    PANELS: gl.constexpr = rows_of_tile(slots) // 64
    for n in gl.static_range(PANELS):
        panel = reinterpret(slots.panels.index(stage.index * PANELS + n), [1, 64, 64], BOX)
        tma_load(desc, [pair, row + n * MORE_ROWS, key + n * MORE_KEYS], slots.ring.ready_at(stage), panel)


@gluon.jit
def load_b(desc, slots, stage, tile, row):
    BOX: gl.constexpr = desc.layout
    panels = reinterpret(slots.ring.slot(stage), [4, 1, 1, 64, 64], BOX)
    for n in gl.static_range(4):
        place = [tile.batch, tile.head, row, tile.column + n * 64]
        tma_load(desc, place, slots.ring.ready_at(stage), panels.index(n))


@gluon.jit
def load_role(operands, slots, sizes, opts, D: gl.constexpr):
    ring, stage = slots.ring, producer_stage()
    M: gl.constexpr = rows_of_tile(slots)
    count = count_tiles(sizes, M, D)
    for turn in range(0, (count + gl.num_programs(0) - 1) // gl.num_programs(0)):
        tile_id = tile_of_turn(turn)
        tile = product_tile(tile_id, sizes, opts, M, D)
        if (tile_id < count) & tile.wanted:
            for at in range(tile.begin, tile.end, 64):
                ring.acquire(stage)
                mbarrier.expect(ring.ready_at(stage), M * 64 * 2 + B_BYTES)
                if tile.kind == DQ:
                    load_a(operands.ds_desc, slots, stage, tile.pair, tile.own, at, 64, 0)
                    load_b(operands.k_desc, slots, stage, tile, at)
                elif tile.kind == DK:
                    load_a(operands.ds_desc, slots, stage, tile.pair, at, tile.own, 0, 64)
                    load_b(operands.q_desc, slots, stage, tile, sizes.row_begin + at)
                else:
                    load_a(operands.p_desc, slots, stage, tile.pair, at, tile.own, 0, 64)
                    load_b(operands.dout_desc, slots, stage, tile, sizes.row_begin + at)
                stage = ring.next(stage)


@gluon.jit
def result_scale(tile, scales, SCALED: gl.constexpr):
    """What a product is multiplied by: P and dS were scaled before they were rounded (SCALED, fp16)."""
    of_p = 1.0
    of_ds = scales.gradient
    if SCALED:
        of_p = 1.0 / scales.p
        of_ds = scales.gradient / gl.load(scales.ds_ptr)
    return gl.where(tile.kind == DV, of_p, of_ds)
