"""round_sum: convert gradients that CTAs have summed in memory, in fp32, to the gradients themselves: dQ, dK and dV, or
some of them, in one launch.

A sum lies in blocks of 4096 numbers, to which CTAs add by TMA, as [128, 32]. The contents of a block depend on how a
kernel holds an accumulator in its registers::

    BY_ROWS     sm_100a   128 rows x 32 columns, as they are
    else        sm_90a    64 rows x 64 columns, in the order of wgmma's accumulator (sm90/gradient_sums.py)

A tile of 128 rows is D / 32 blocks. The tiles of a pair of sequence and head are consecutive. VARLEN: those of a
sequence begin where backward_sequences.tile_of puts them.
"""

from typing import NamedTuple

from dsv4.fmha.kernels.backward_sequences import tile_of
from dsv4.fmha.kernels.tiles import packed_sequence
from dsv4.kernels import dependent
from dsv4.kernels.compat import Value, gl, gluon

# A thread loads 64 bytes of a block: 8 columns of two rows, which it stores as 16 bytes each. So nothing is exchanged.
LOADED = gl.constexpr(gl.BlockedLayout([1, 16], [16, 2], [4, 1], [1, 0]))
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [32, 0]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [0, 8], [0, 16]],
        warp_bases=[[0, 32], [16, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)


class Summed(NamedTuple):
    """A gradient [batch, head, token, member of the pack, column] and the sums that become it. For dK and dV the
    tokens are keys, and a pack has one member."""

    any_alignment = ("cu_ptr",)

    parts_ptr: Value
    parts: Value  # parts that are added up
    blocks: Value  # blocks of a part; 0: not wanted
    tokens: Value
    group: Value  # members of a pack
    heads: Value
    cu_ptr: Value  # starts of the sequences of a varlen batch
    scale: Value
    ptr: Value
    batch: Value  # strides, in units of 8 elements
    head: Value
    token: Value
    member: Value


@gluon.jit(do_not_specialize=["sequences"])
def round_sum(
    dq, dk, dv, sequences, ds_ptr, D: gl.constexpr, SCALED: gl.constexpr, VARLEN: gl.constexpr, BY_ROWS: gl.constexpr
):
    """Convert a block of dQ, dK or dV. SCALED: the sum of dQ is of dS times the number at ds_ptr."""
    dependent.wait_on_prior_grid()
    number = gl.program_id(0)
    if number < dq.blocks:
        scale = dq.scale
        if SCALED:
            scale = scale / gl.load(ds_ptr)
        _round_block(dq, number, scale, sequences, D, VARLEN, BY_ROWS)
    elif number < dq.blocks + dk.blocks:
        _round_block(dk, number - dq.blocks, dk.scale, sequences, D, VARLEN, BY_ROWS)
    else:
        _round_block(dv, number - dq.blocks - dk.blocks, dv.scale, sequences, D, VARLEN, BY_ROWS)


@gluon.jit
def _round_block(x, number, scale, sequences, D: gl.constexpr, VARLEN: gl.constexpr, BY_ROWS: gl.constexpr):
    """Convert block `number` of a gradient."""
    group = x.group
    end = x.tokens * group
    tiles = (end + 127) // 128
    if VARLEN:
        tiles = end // 128 + sequences
    tile = number // (D // 32)  # number of the tile of 128 rows
    block = number % (D // 32)
    pair = tile // tiles
    tile -= pair * tiles
    row = tile * 128
    batch, head = pair // x.heads, pair % x.heads
    out_ptr = x.ptr + (batch.to(gl.int64) * x.batch + head.to(gl.int64) * x.head) * 8
    if VARLEN:
        seq, row = tile_of(tile, x.cu_ptr, sequences, group)
        start, tokens, _, _ = packed_sequence(seq, x.cu_ptr, x.cu_ptr, x.tokens, x.tokens)
        end = tokens * group
        out_ptr += start.to(gl.int64) * x.token * 8
    line = gl.arange(0, 128, layout=gl.SliceLayout(1, LOADED)) * 32
    block_ptr = x.parts_ptr + number.to(gl.int64) * 4096
    block_ptr += line[:, None] + gl.arange(0, 32, layout=gl.SliceLayout(0, LOADED))[None, :]
    y = gl.load(block_ptr)
    for _ in range(1, x.parts):
        block_ptr += x.blocks.to(gl.int64) * 4096
        y += gl.load(block_ptr)
    if BY_ROWS:
        y = (y * scale).to(out_ptr.dtype.element_ty)
        here = row + gl.arange(0, 128, layout=gl.SliceLayout(1, LOADED))
        column = block * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, LOADED))
    else:
        y = y.reshape([4, 8, 8, 4, 2, 2]).permute([0, 4, 2, 1, 3, 5]).reshape([64, 64])
        y = gl.convert_layout((y * scale).to(out_ptr.dtype.element_ty), STORED)
        here = row + block // (D // 64) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, STORED))
        column = block % (D // 64) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, STORED))
    token = here // group
    place = (token.to(gl.int64) * x.token + (here - token * group).to(gl.int64) * x.member) * 8
    gl.store(out_ptr + place[:, None] + column[None, :], y, mask=(here < end)[:, None])
