"""round_sum: convert gradients that CTAs have summed in memory, in fp32, to the gradient itself.

A sum lies in blocks of 4096 numbers, to which CTAs add by TMA, as [128, 32]. The contents of a block depend on how a
kernel holds an accumulator in its registers::

    BY_ROWS     sm_100a   128 rows x 32 columns, as they are
    else        sm_90a    64 rows x 64 columns, in the order of wgmma's accumulator (sm90/gradient_sums.py)

A tile of 128 rows is D / 32 blocks. The tiles of a pair of sequence and head are consecutive. VARLEN: those of a
sequence begin where backward_sequences.tile_of puts them.
"""

from dsv4.fmha.kernels.backward_sequences import sizes_of, tile_of
from dsv4.kernels.compat import gl, gluon

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


@gluon.jit
def round_sum(
    tensors,
    parts,
    out,
    whole,
    scales,
    D: gl.constexpr,
    SCALED: gl.constexpr,
    VARLEN: gl.constexpr,
    BY_ROWS: gl.constexpr,
):
    """Convert a block of the packed rows of a pair of sequence and head, the sum of the parts. For dK and dV the
    rows are keys, and the group is 1."""
    group = whole.group
    tiles = (whole.rows + 127) // 128
    if VARLEN:
        tiles = whole.rows // 128 + whole.sequences
    number = gl.program_id(0) // (D // 32)  # number of the tile of 128 rows
    block = gl.program_id(0) % (D // 32)
    pair = number // tiles
    tile = number - pair * tiles
    row, end = tile * 128, whole.rows
    batch, head = pair // whole.heads, pair % whole.heads
    out_ptr = out.ptr + (batch.to(gl.int64) * out.batch + head.to(gl.int64) * out.head) * 8
    if VARLEN:
        seq, row = tile_of(tile, tensors.cu_q_ptr, whole.sequences, group)
        first_row, _, sizes = sizes_of(seq, row, whole, tensors.cu_q_ptr, tensors.cu_k_ptr, False)
        end = sizes.rows
        out_ptr += (first_row // group).to(gl.int64) * out.token * 8
    scale = scales.gradient
    if SCALED:
        scale = scale / gl.load(scales.ds_ptr)
    line = gl.arange(0, 128, layout=gl.SliceLayout(1, LOADED)) * 32
    block_ptr = parts.ptr + gl.program_id(0).to(gl.int64) * 4096
    block_ptr += line[:, None] + gl.arange(0, 32, layout=gl.SliceLayout(0, LOADED))[None, :]
    x = gl.load(block_ptr)
    for _ in range(1, parts.count):
        block_ptr += gl.num_programs(0).to(gl.int64) * 4096
        x += gl.load(block_ptr)
    if BY_ROWS:
        x = (x * scale).to(out_ptr.dtype.element_ty)
        here = row + gl.arange(0, 128, layout=gl.SliceLayout(1, LOADED))
        column = block * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, LOADED))
    else:
        x = x.reshape([4, 8, 8, 4, 2, 2]).permute([0, 4, 2, 1, 3, 5]).reshape([64, 64])
        x = gl.convert_layout((x * scale).to(out_ptr.dtype.element_ty), STORED)
        here = row + block // (D // 64) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, STORED))
        column = block % (D // 64) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, STORED))
    token = here // group
    place = (token.to(gl.int64) * out.token + (here - token * group).to(gl.int64) * out.member) * 8
    gl.store(out_ptr + place[:, None] + column[None, :], x, mask=(here < end)[:, None])
