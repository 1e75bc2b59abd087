"""Gradients of all sequences of a varlen batch by one launch: which tile of which sequence a CTA has."""

from dsv4.fmha.kernels.backward_arguments import Sizes
from dsv4.fmha.kernels.tiles import packed_sequence
from dsv4.kernels.compat import gl, gluon

NOWHERE = gl.constexpr(1 << 30)


@gluon.jit
def tile_of(number, cu_ptr, sequences, unit):
    """(sequence, first row of its tile) of tile `number`; for four warps. Rows: `unit` for each token.

    The tiles of sequence i have the numbers from cu[i] * unit // 128 + i on. That is not less than one past the last
    number of the sequence before, so nothing has to be added up; a number without a tile lies past the end of
    its sequence.
    """
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])  # every warp has all 128: no exchange between warps
    begun = 0
    for start in range(0, sequences, 128):
        i = start + gl.arange(0, 128, layout=L)
        begin = gl.load(cu_ptr + i, mask=i < sequences, other=0) * unit // 128 + i
        begun += gl.sum(((begin <= number) & (i < sequences)).to(gl.int32), 0)
    seq = gl.maximum(begun - 1, 0)
    tile = number - (gl.load(cu_ptr + seq) * unit // 128 + seq)
    return seq, gl.where(tile < 0, NOWHERE, tile * 128)


@gluon.jit
def sizes_of(seq, own, whole, cu_q_ptr, cu_k_ptr, KEYS: gl.constexpr):
    """(first packed row, first key, sizes) of a sequence. Where `own`, a key with KEYS and else a row, lies past its
    end, it has nothing to be multiplied with."""
    q_start, tokens, k_start, keys = packed_sequence(seq, cu_q_ptr, cu_k_ptr, whole.tokens, whole.keys)
    rows = tokens * whole.group
    if KEYS:
        tokens = gl.where(own < keys, tokens, 0)
    else:
        keys = gl.where(own < rows, keys, 0)
    return q_start * whole.group, k_start, Sizes(rows, tokens, keys, whole.group, whole.left, whole.right)


@gluon.jit
def first_visible(sizes):
    """The first key of the sequence that some query sees; those before may hold NaN."""
    return gl.minimum(gl.maximum(sizes.keys - sizes.tokens - sizes.left, 0), sizes.keys)
