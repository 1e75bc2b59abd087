"""Online softmax of scores whose rows are keys: S^T = K Q^T [keys, heads] on sm_90a, where few query rows would be
padded to the 64 rows of a wgmma. Keys are spread over warps, 16 each, so a maximum passes through shared memory.
"""

from dsv4.kernels import softmax
from dsv4.kernels.compat import gl, gluon


@gluon.constexpr_function
def scores_layout(warps, heads, keys):
    """Return a layout: warps go down the keys, 16 each, and the remaining warps across the heads."""
    down = min(warps, keys // 16)
    return gl.NVMMADistributedLayout([3, 0], [down, warps // down], [16, heads * down // warps, 16])


@gluon.constexpr_function
def row_max_layout(warps, heads, keys):
    """Return a layout of [keys / 16, heads]: a thread has all rows of those columns that it has of the scores."""
    down = min(warps, keys // 16)
    wide = heads * down // warps  # columns of a warp
    columns = [[0, 8 << i] for i in range((wide // 8).bit_length() - 1)]
    rows = [[1 << i, 0] for i in range((keys // 16).bit_length() - 1)]
    across = [[0, wide << i] for i in range((warps // down).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], *columns, *rows],
        lane_bases=[[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[0, 0]] * (down.bit_length() - 1) + across,
        block_bases=[],
        shape=[keys // 16, heads],
    )


@gluon.constexpr_function
def output_layout(warps, heads):
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, heads, 16])


@gluon.jit
def partial_sums(p):
    """Return each thread's share of the sums over keys: [16 n, HEADS] -> [n, 8, HEADS], no exchange between lanes."""
    return gl.sum(p.reshape([p.shape[0] // 16, 2, 8, p.shape[1]]), 1)


@gluon.jit
def maxima(s, row_max, m):
    """Return the maximum of each column of s, in the layout of m.

    The maxima of 16 keys each, those of a warp, go through row_max, and every thread takes the maximum of its columns:
    one exchange between warps, where a reduction makes two. P waits for it, and shared memory is busy.
    """
    KEYS: gl.constexpr = s.shape[0]
    HEADS: gl.constexpr = s.shape[1]
    row_max.store(gl.max(s.reshape([KEYS // 16, 16, HEADS]), 1))
    return gl.convert_layout(gl.max(row_max.load(row_max_layout(gl.num_warps(), HEADS, KEYS)), 0), m.type.layout)


@gluon.jit
def softmax_over_keys(s, m, scale, row_max):
    """Do what softmax.step does with keys as rows: m per column."""
    top = maxima(s, row_max, m)
    factor = softmax.row_scale(top, scale)
    m_new = gl.maximum(m, top * factor)
    return gl.exp2(s * factor[None, :] - m_new[None, :]), m_new, gl.exp2(m - m_new)
