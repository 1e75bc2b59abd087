"""Which keys and rows the CTAs of backward_keys.py process, one work tile after the other.

A work tile is 128 keys of a pair of sequence and pack of query heads, with the packed rows that see them, or with a
part of these rows. Several pairs are listed together, the longest tiles of all of them first: a single pair would begin
its longest ones when others end. With more pairs, more rows would be in use than the L2 holds. The first work tile of
CTA c is number c; it takes the others by tickets, in the order in which CTAs become ready.

The tiles of a pair in a varlen batch are those of all its sequences. CTAs that loop take the longest sequence first,
from a list that a small kernel makes: the host does not know the lengths, and a pair must not end with a long one.
"""

from typing import Any, NamedTuple

import torch

from dsv4.fmha.kernels.backward_arguments import GradientTile
from dsv4.fmha.kernels.backward_sequences import sizes_of, tile_of
from dsv4.fmha.kernels.tiles import PackedSequences, packed
from dsv4.kernels.compat import Value, aggregate, gl, gluon
from dsv4.kernels.division import Divisor, divide, divisor, quotient
from dsv4.runtime.program import Program, Slot

AT_ONCE = gl.constexpr(128)  # sequences that a program reads together, and entries that it writes


class KeyOrder(NamedTuple):
    """The list of work tiles."""

    list_ptr: Value  # int32 [tiles, 2]: (sequence, tile of the sequence), of CTAs that loop over a varlen batch
    count: Value
    pairs: Value  # pairs of sequence and pack of query heads
    tiles: Value  # tiles of 128 keys of a pair; in a varlen batch, the most that there may be
    splits: Divisor  # parts of the rows
    packs: Divisor  # packs of query heads for each KV head
    heads: Divisor  # packs of a sequence
    at_once: Divisor  # pairs that are listed together
    rest: Divisor  # the last ones
    block: Divisor  # work tiles of those that are listed together


def key_order(listed: Any, pairs: int, tiles: int, splits: int, packs: int, heads: int, at_once: int) -> KeyOrder:
    rest = pairs - (pairs - 1) // at_once * at_once
    divisors = (splits, packs, heads, at_once, rest, tiles * splits * at_once)
    return KeyOrder(listed, pairs * tiles * splits, pairs, tiles, *(divisor(x) for x in divisors))


def list_sequences(program: Program, cu_q: Slot, cu_k: Slot, tokens: int, keys: int, tiles: int) -> Slot:
    """Add the launch that lists the tiles of a pair; return the list."""
    listed = program.workspace("key tiles", (tiles, 2), torch.int32)
    count = cu_q.shape[0] - 1
    sequences = PackedSequences(cu_q, cu_k, count, tokens, keys)
    program.launch(list_key_tiles, (count,), dict(list_ptr=listed, sequences=sequences, tiles=tiles), num_warps=1)
    return listed


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
    row: Value  # first row of the sequence and pack among all packed rows, for lse2 and delta
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


@gluon.jit(do_not_specialize=["tiles"])
def list_key_tiles(list_ptr, sequences, tiles):
    """List the tiles of one sequence, behind those of all sequences with more tokens. Program (sequence,).

    backward_sequences.tile_of numbers them, with numbers between two sequences that no tile has. Those are last."""
    L: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    s = gl.program_id(0)
    _, tokens, k_start, keys = packed(s, sequences)
    longer, before, total = 0, 0, 0  # tiles: of longer sequences, of earlier ones, of all
    for first in range(0, sequences.count, AT_ONCE):
        i = first + gl.arange(0, AT_ONCE, layout=L)
        there = i < sequences.count
        other = packed(gl.where(there, i, 0), sequences)
        others = other[1]
        count = gl.where(there, (other[3] + 127) // 128, 0)
        longer += gl.sum(gl.where((others > tokens) | (others == tokens) & (i < s), count, 0), 0)
        before += gl.sum(gl.where(i < s, count, 0), 0)
        total += gl.sum(count, 0)
    begin = k_start // 128 + s
    end = tiles
    if s + 1 < sequences.count:
        end = (k_start + keys) // 128 + s + 1
    mine = (keys + 127) // 128
    unused = total + begin - before
    for first in range(0, end - begin, AT_ONCE):
        tile = first + gl.arange(0, AT_ONCE, layout=L)
        place = gl.where(tile < mine, longer + tile, unused + tile - mine)
        there = (tile < end - begin) & (place < tiles)  # decreasing starts, which a GPU does not check, would need more
        gl.store(list_ptr + 2 * place, s + gl.zeros_like(tile), mask=there)
        gl.store(list_ptr + 2 * place + 1, tile, mask=there)


@gluon.jit
def locate(number, problem, D: gl.constexpr, ROWS: gl.constexpr, VARLEN: gl.constexpr, LISTED: gl.constexpr):
    """Return the KeyTile of a work tile. LISTED: a varlen batch's are in the list."""
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
        if LISTED:
            seq = gl.load(order.list_ptr + 2 * tile)
            key = gl.load(order.list_ptr + 2 * tile + 1) * 128
            seq = gl.minimum(gl.maximum(seq, 0), whole.sequences - 1)  # a list of decreasing starts has gaps
            tile = gl.load(tensors.cu_k_ptr + seq) // 128 + seq + key // 128
            tile = gl.minimum(gl.maximum(tile, 0), order.tiles - 1)
        else:
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
