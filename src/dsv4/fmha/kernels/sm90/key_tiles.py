"""Which keys and rows the CTAs of backward_keys.py process, one work tile after the other.

A work tile is 128 keys of a pair of sequence and pack of query heads, with the packed rows that see them, or with a
part of these rows. Several pairs are listed together, the longest tiles of all of them first: a single pair would begin
its longest ones when others end. With more pairs, more rows would be in use than the L2 holds. The first work tile of
CTA c is number c; it takes the others by tickets, in the order in which CTAs become ready.
"""

from typing import NamedTuple

from dsv4.fmha.kernels.backward_arguments import GradientTile
from dsv4.fmha.kernels.backward_sequences import sizes_of, tile_of
from dsv4.kernels.compat import Value, aggregate, gl, gluon
from dsv4.kernels.division import Divisor, divide, divisor, quotient


class KeyOrder(NamedTuple):
    """The list of work tiles."""

    count: Value
    pairs: Value  # of sequence and pack of query heads
    tiles: Value  # of 128 keys of a pair; in a varlen batch, the most that there may be
    splits: Divisor  # parts of the rows
    packs: Divisor  # packs of query heads for each KV head
    heads: Divisor  # packs of a sequence
    at_once: Divisor  # pairs that are listed together
    rest: Divisor  # the last ones
    block: Divisor  # work tiles of those that are listed together


def key_order(pairs: int, tiles: int, splits: int, packs: int, heads: int, at_once: int) -> KeyOrder:
    rest = pairs - (pairs - 1) // at_once * at_once
    divisors = (splits, packs, heads, at_once, rest, tiles * splits * at_once)
    return KeyOrder(pairs * tiles * splits, pairs, tiles, *(divisor(x) for x in divisors))


@aggregate
class Problem:
    """The arguments of a role for all work tiles."""

    order: Value  # KeyOrder
    tensors: Value
    whole: Value  # sizes of a dense batch, or of all sequences


@aggregate
class KeyTile:
    """A work tile."""

    place: GradientTile
    sizes: Value
    first: Value  # packed row, the first of a step
    end: Value
    row: Value  # of the sequence and pack among all packed rows, for lse2 and delta
    rows_block: Value  # first blocks of gradient_sums.py: of dQ, and of dK and dV
    keys_block: Value
    part: Value  # number among the parts of dK and dV


@gluon.jit
def rows_of(key, sizes, ROWS: gl.constexpr):
    """Return [first, end) of the tiles of packed rows that see some of 128 keys."""
    offset = sizes.keys - sizes.tokens
    first = gl.maximum(key - offset - sizes.right, 0)
    end = gl.minimum(gl.minimum(key + 128, sizes.keys) - offset + sizes.left, sizes.tokens)
    return first * sizes.group // ROWS * ROWS, end * sizes.group


@gluon.jit
def cut(first, end, split, splits, ROWS: gl.constexpr):
    """Return [first, end) of part `split`, in whole steps of ROWS rows."""
    steps = (gl.maximum(end - first, 0) + ROWS - 1) // ROWS
    begin = divide(steps * split, splits)
    return first + begin * ROWS, gl.minimum(first + divide(steps * (split + 1), splits) * ROWS, end)


@gluon.jit
def locate(number, problem, D: gl.constexpr, ROWS: gl.constexpr, VARLEN: gl.constexpr):
    """Return the KeyTile of a work tile."""
    order, whole, tensors = problem.order, problem.whole, problem.tensors
    block = divide(number, order.block)
    begun = block * order.at_once.number
    last = begun + order.at_once.number >= order.pairs
    inverse = gl.where(last, order.rest.inverse, order.at_once.inverse)
    shift = gl.where(last, order.rest.shift, order.at_once.shift)
    width = gl.where(last, order.rest.number, order.at_once.number)
    at = number - block * order.block.number
    piece = quotient(at, inverse, shift)
    pair = begun + at - piece * width
    tile = divide(piece, order.splits)
    split = piece - tile * order.splits.number
    batch = divide(pair, order.heads)
    head = pair - batch * order.heads.number
    key = tile * 128
    place = GradientTile(batch, head, divide(head, order.packs), key, 0, 0)
    sizes = whole
    rows_block = pair * ((whole.rows + 127) // 128)
    row = pair.to(gl.int64) * whole.rows
    if VARLEN:
        seq, key = tile_of(tile, tensors.cu_k_ptr, whole.sequences, 1)
        first_row, first_key, sizes = sizes_of(seq, key, whole, tensors.cu_q_ptr, tensors.cu_k_ptr, True)
        rows_block = pair * (whole.rows // 128 + whole.sequences) + first_row // 128 + seq
        place = GradientTile(0, pair, divide(pair, order.packs), key, first_row, first_key)
        row += first_row
    first, end = rows_of(key, sizes, ROWS)
    first, end = cut(first, end, split, order.splits, ROWS)
    keys_block = divide(pair, order.packs) * order.tiles + tile
    part = (split * order.pairs + pair) * order.tiles + tile
    return KeyTile(place, sizes, first, end, row, rows_block * (D // 32), keys_block * (D // 32), part)
