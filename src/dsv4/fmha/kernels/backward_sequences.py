"""Gradients of all sequences of a varlen batch in one launch: the tile of a CTA, and the rows that belong to no
sequence."""

from typing import NamedTuple

from dsv4.fmha.kernels.backward_arguments import Sizes
from dsv4.fmha.kernels.backward_rows import row_layout
from dsv4.fmha.kernels.tiles import packed_sequence
from dsv4.kernels.compat import Value, gl, gluon

# A row past all sequences, used only if the starts of sequences decrease. The sum of it and of ragged.BOUND has 31
# bits: a TMA store at a negative coordinate is an illegal instruction on Hopper.
NOWHERE = gl.constexpr(1 << 29)


@gluon.jit
def tile_of(number, cu_ptr, sequences, unit, ROWS: gl.constexpr = 128):
    """Return (sequence, first row of its tile) of tile `number`, of ROWS rows. A token has `unit` rows.

    The tiles of sequence i have the numbers from cu[i] * unit // ROWS + i on. That is at least one past the last
    number of the previous sequence, so no prefix sum is needed; a number without a tile lies past the end of
    its sequence.
    """
    # Every warp holds all 128 entries, so warps exchange nothing.
    L: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    begun = 0
    for start in range(0, sequences, 128):
        i = start + gl.arange(0, 128, layout=L)
        begin = gl.load(cu_ptr + i, mask=i < sequences, other=0) * unit // ROWS + i
        begun += gl.sum(((begin <= number) & (i < sequences)).to(gl.int32), 0)
    seq = gl.maximum(begun - 1, 0)
    tile = number - (gl.load(cu_ptr + seq) * unit // ROWS + seq)
    return seq, gl.where(tile < 0, NOWHERE, tile * ROWS)


@gluon.jit
def sizes_of(seq, own, whole, cu_q_ptr, cu_k_ptr, KEYS: gl.constexpr):
    """Return (first packed row, first key, sizes) of a sequence. If `own`, a key with KEYS and else a row, lies past
    its end, it has nothing to multiply."""
    q_start, tokens, k_start, keys = packed_sequence(seq, cu_q_ptr, cu_k_ptr, whole.tokens, whole.keys)
    rows = tokens * whole.group
    if KEYS:
        tokens = gl.where(own < keys, tokens, 0)
    else:
        keys = gl.where(own < rows, keys, 0)
    return q_start * whole.group, k_start, Sizes(rows, tokens, keys, whole.group, whole.left, whole.right)


@gluon.jit
def first_visible(sizes):
    """Return the first key of the sequence that some query sees; those before may hold NaN."""
    return gl.minimum(gl.maximum(sizes.keys - sizes.tokens - sizes.left, 0), sizes.keys)


class Past(NamedTuple):
    """A gradient [tokens, heads, D] and its strides; its sequences end at cu_ptr[last]."""

    any_alignment = ("ptr", "cu_ptr")

    ptr: Value
    cu_ptr: Value
    last: Value
    tokens: Value
    heads: Value  # 0: not wanted
    token: Value
    head: Value


@gluon.jit
def clear_past(dq, dk, dv, D: gl.constexpr):
    """Zero the rows past the last sequence. Program (head, gradient, some of the rows)."""
    if gl.program_id(1) == 0:
        _clear(dq, D)
    elif gl.program_id(1) == 1:
        _clear(dk, D)
    else:
        _clear(dv, D)


@gluon.jit
def _clear(x, D: gl.constexpr):
    L: gl.constexpr = row_layout(D)
    ROWS: gl.constexpr = 16
    head = gl.program_id(0)
    if head < x.heads:
        first = gl.minimum(gl.maximum(gl.load(x.cu_ptr + x.last), 0), x.tokens)
        column = gl.arange(0, D, layout=gl.SliceLayout(0, L))
        for begin in range(first + gl.program_id(2) * ROWS, x.tokens, gl.num_programs(2) * ROWS):
            token = begin + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
            place = token.to(gl.int64) * x.token + head.to(gl.int64) * x.head
            zeros = gl.zeros([ROWS, D], x.ptr.dtype.element_ty, L)
            gl.store(x.ptr + place[:, None] + column[None, :], zeros, mask=(token < x.tokens)[:, None])
