"""The tiles of P and dS that the chain of gradients writes to memory: which are needed, and how operands are loaded.

Tiles of 128 query rows times 128 keys; the kernels backward_scores of every architecture loop over them.
"""

from dsv4.kernels.compat import gl, gluon, mbarrier, reinterpret, tma_load
from dsv4.kernels.shared.fmha.tiles import end_key, first_key


@gluon.jit
def needed(row, key, sizes):
    """(whether the tile's products are wanted, whether it is read at all).

    chain.py multiplies pieces: `row_piece` rows with the keys that some of them see, `key_piece` keys with the rows
    that see some of them.
    """
    rows, row_begin, tokens, keys, group, left, right, row_piece, key_piece = sizes
    token = (row_begin + row) // group
    token_last = gl.minimum((row_begin + row + 127) // group, tokens - 1)
    first = first_key(token, tokens, keys, left)
    end = end_key(token_last, tokens, keys, right)
    some = (key < end) & (key + 128 > first)
    piece = (row_begin + row // row_piece * row_piece) // group
    piece_last = gl.minimum((row_begin + row // row_piece * row_piece + row_piece - 1) // group, tokens - 1)
    in_row_piece = (key < end_key(piece_last, tokens, keys, right)) & (
        key + 128 > first_key(piece, tokens, keys, left))  # fmt: skip
    key_first = key // key_piece * key_piece
    key_last = gl.minimum(key_first + key_piece, keys) - 1
    in_key_piece = (key_last >= first) & (key_first < end)
    return some, some | in_row_piece | in_key_piece


@gluon.jit
def locate(item, sizes, tiles):
    """(pair of sequence and KV head, first row, first key) of an item."""
    row_tiles, key_tiles, items = tiles
    line = item // key_tiles
    pair = line // row_tiles
    # Each line of tiles begins elsewhere: a CTA that kept to one diagonal would have all of its tiles seen, or none.
    return pair, (line - pair * row_tiles) * 128, (item + 5 * line) % key_tiles * 128


@gluon.jit
def advance(slot, phase, SLOTS: gl.constexpr):
    slot = slot + 1
    phase = gl.where(slot == SLOTS, phase ^ 1, phase)
    return gl.where(slot == SLOTS, 0, slot), phase


@gluon.jit
def load_role(descriptors, ring, sizes, tiles, pair_begin, kv_heads, CHUNKS: gl.constexpr, SLOTS: gl.constexpr):
    q_desc, k_desc, dout_desc, v_desc = descriptors
    a, b, ready, free = ring
    BOX: gl.constexpr = q_desc.layout
    row_begin = sizes[1]
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # the first wait on an untouched barrier passes
    for item in range(gl.program_id(0), tiles[2], gl.num_programs(0)):
        pair, row, key = locate(item, sizes, tiles)
        some, read = needed(row, key, sizes)
        batch = (pair_begin + pair) // kv_heads
        head = (pair_begin + pair) % kv_heads
        if some:
            for chunk in range(0, 2 * CHUNKS):
                mbarrier.wait(free.index(slot), phase)
                mbarrier.expect(ready.index(slot), 2 * 128 * 64 * 2)
                rows_here = reinterpret(a.index(slot), [1, 1, 128, 64], BOX)
                keys_here = reinterpret(b.index(slot), [1, 1, 128, 64], BOX)
                if chunk < CHUNKS:
                    tma_load(q_desc, [batch, head, row_begin + row, chunk * 64], ready.index(slot), rows_here)
                    tma_load(k_desc, [batch, head, key, chunk * 64], ready.index(slot), keys_here)
                else:
                    column = (chunk - CHUNKS) * 64
                    tma_load(dout_desc, [batch, head, row_begin + row, column], ready.index(slot), rows_here)
                    tma_load(v_desc, [batch, head, key, column], ready.index(slot), keys_here)
                slot, phase = advance(slot, phase, SLOTS)
