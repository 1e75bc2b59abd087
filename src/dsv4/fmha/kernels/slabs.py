"""The work of a launch of the gradient chain, and the sequence and head that each of its tiles belongs to.

A slab has pairs of sequence and KV head. P and dS of a dense pair are a matrix [rows, keys] in memory. The sequences of
a varlen batch share one matrix per KV head, [row tiles x 128, keys of the longest]: a sequence has the rows of its
own row tiles (backward_sequences.tile_of), so that it overwrites no other. If the matrix does not fit, a slab has
the sequences whose first row tile has a number in [first, end), and room for the rows of one more.
"""

from typing import NamedTuple

from dsv4.fmha.kernels.tiles import packed_sequence
from dsv4.kernels.compat import Value, aggregate, gl, gluon


class SlabSizes(NamedTuple):
    """Sizes of one pair, with the rows that are in the slab; or of all sequences (varlen)."""

    rows: Value
    row_begin: Value  # first row of the slab
    tokens: Value
    keys: Value
    group: Value
    left: Value
    right: Value
    pairs: Value  # pairs of the slab
    pair_begin: Value
    heads: Value
    share: Value  # neighbouring pairs that share K and V, if query heads are not packed: all of a KV head


class SlabSequences(NamedTuple):
    """The sequences of a varlen batch; not read for a dense batch."""

    any_alignment = ("cu_q_ptr", "cu_k_ptr")

    cu_q_ptr: Value
    cu_k_ptr: Value
    count: Value
    first: Value  # first row tile of the slab
    end: Value
    row_tiles: Value  # row tiles, of 128 rows, of P and dS
    key_tiles: Value


@aggregate
class Part:
    """The part of a pair whose rows are in the slab: its sizes and its place."""

    rows: Value
    row_begin: Value
    tokens: Value
    keys: Value
    group: Value
    left: Value
    right: Value
    batch: Value
    head: Value
    kv_head: Value
    first_row: Value  # first packed row of Q and dO
    first_key: Value
    slab_row: Value  # first row of P and dS in the slab


@gluon.jit
def part_of(pair, seq, whole, sequences, VARLEN: gl.constexpr):
    """Return the Part. seq: the sequence (varlen). Keys that no query sees do not belong to it: they may hold NaN."""
    number = whole.pair_begin + pair
    batch, head = number // whole.heads, number % whole.heads
    if VARLEN:
        q_start, tokens, k_start, keys = packed_sequence(
            seq, sequences.cu_q_ptr, sequences.cu_k_ptr, whole.tokens, whole.keys
        )
        unseen = gl.minimum(gl.maximum(keys - tokens - whole.left, 0), keys)
        slab_row = (first_tile(seq, whole, sequences) - sequences.first) * 128
        return Part(
            tokens * whole.group,
            gl.to_tensor(0),
            tokens,
            keys - unseen,
            whole.group,
            whole.left,
            whole.right,
            batch,
            head,
            head // whole.share,
            q_start * whole.group,
            k_start + unseen,
            slab_row,
        )
    else:
        nothing = gl.to_tensor(0)
        return Part(
            whole.rows,
            whole.row_begin,
            whole.tokens,
            whole.keys,
            whole.group,
            whole.left,
            whole.right,
            batch,
            head,
            head // whole.share,
            nothing,
            nothing,
            nothing,
        )


@gluon.jit
def first_tile(seq, whole, sequences):
    """Return the number of the first row tile of a sequence."""
    return gl.load(sequences.cu_q_ptr + seq) * whole.group // 128 + seq


@gluon.jit
def in_slab(seq, whole, sequences):
    """Return whether the sequence is in the slab."""
    number = first_tile(seq, whole, sequences)
    return (number >= sequences.first) & (number < sequences.end)
