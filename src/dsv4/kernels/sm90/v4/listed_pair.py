"""V4 attention on sm_90a, FP8 rows: 128 heads of one query at a time by two CTAs of a cluster. Triton 3.9 or newer.

Each CTA has 64 of the heads and does with them what listed.py says: its roles, its steps, its shared memory and
barriers, which stand in each CTA. But the rows are the same for both, and converting e4m3 keeps the gathering warps as
busy as the products keep the others: so each CTA converts half of the rows of a block, and copies them to the other::

    CTA 0    gather   4 warps   rows 0-31 of a block  -> kv of CTA 0, copied to kv of CTA 1
    CTA 1    gather   4 warps   rows 32-63 of a block -> kv of CTA 1, copied to kv of CTA 0
    both     left, right as in listed.py, with their own 64 heads

shared memory   of each CTA
kv, bias, job   the same bytes in both
all others      its own 64 heads

barrier         in          arrives                                      count       waits
ready[i]        each CTA    its 4 gathering warps; the bytes that the    4 + bytes   left, right of that CTA
                            other CTA's copy there
free[i]         each CTA    the 4 warps that own the half, of both CTAs  8           gather of that CTA
all others      each CTA    as in listed.py, for that CTA

A gathering warp stores and copies when ``free`` of its own CTA says that both have used the slot; the other has then
got what was copied from it, too. Bytes for ``ready`` may come before the CTA's own warps have announced them: the count
of bytes goes below zero, and the phase, in which these warps have not arrived, stays open. Bytes of the next filling
cannot come: they wait for ``free``, which this CTA's readers give after ``ready``. A barrier of all threads of the
cluster at the beginning, and Triton's at the end, keep a CTA from writing to one whose barriers are not made yet, or
which has ended.

Copies are of the asynchronous proxy, stored rows and the bias of the generic one: those who wait for a half block put
the fence before the tensor core reads, as in listed.py.
"""

from dsv4.kernels.compat import gl, gluon
from dsv4.kernels.shared import cluster
from dsv4.kernels.shared.v4.arguments import Names, Output, Requests, Rope, Sizes
from dsv4.kernels.shared.v4.items import NONE
from dsv4.kernels.sm90.v4.gather import Pool, Pools, Queries, arrivals
from dsv4.kernels.sm90.v4.gather_pair import WARPS, gather_role
from dsv4.kernels.sm90.v4.listed import half_role, make_barriers, make_memory


@gluon.jit(do_not_specialize=[
    "want_lse", "items", "queries", "heads", "window_rows", "window_page_rows", "window_page_stride", "window_inverse",
    "window_shift", "window_width", "window_line", "compressed_rows", "compressed_page_rows", "compressed_page_stride",
    "compressed_inverse", "compressed_shift", "compressed_width", "compressed_line", "window_lengths",
    "compressed_lengths", "starts", "requests", "rope_positions", "rope_width", "rope_line", "num_splits",
    "tiles_per_split", "stride_qn", "stride_qh", "stride_on", "stride_oh", "stride_ln", "stride_lh",
])  # fmt: skip
def v4_listed_pair(
    q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr, window_ptr, window_list_ptr, window_lengths_ptr,
    compressed_ptr, compressed_list_ptr, compressed_lengths_ptr, starts_ptr, cos_sin_ptr, positions_ptr, scale,
    want_lse, items, queries, heads, window_rows, window_page_rows, window_page_stride, window_inverse, window_shift,
    window_width, window_line, compressed_rows, compressed_page_rows, compressed_page_stride, compressed_inverse,
    compressed_shift, compressed_width, compressed_line, window_lengths, compressed_lengths, starts, requests,
    rope_positions, rope_width, rope_line, num_splits, tiles_per_split, stride_qn, stride_qh, stride_on, stride_oh,
    stride_ln, stride_lh, HOW: gl.constexpr, SIGN: gl.constexpr, WINDOW_UNIT: gl.constexpr,
    COMPRESSED_UNIT: gl.constexpr, SPLIT: gl.constexpr, RIGHT_REGS: gl.constexpr, GATHER_REGS: gl.constexpr,
):  # fmt: skip
    gl.static_assert(gl.num_ctas() == 2)
    # Both pools are read in one way, that of the lesser unit.
    UNIT: gl.constexpr = min(WINDOW_UNIT, COMPRESSED_UNIT)
    window_page_stride *= WINDOW_UNIT // UNIT
    if HOW != NONE:
        compressed_page_stride *= COMPRESSED_UNIT // UNIT
    q = Queries(q_ptr, stride_qn, stride_qh)
    window = Names(window_list_ptr, window_line, window_lengths_ptr, window_lengths, window_width)
    compressed = Names(compressed_list_ptr, compressed_line, compressed_lengths_ptr, compressed_lengths,
                       compressed_width)  # fmt: skip
    pools = Pools(
        Pool(window_ptr, window_rows, window_page_rows, window_page_stride, 0, window_inverse, window_shift),
        Pool(compressed_ptr, compressed_rows, compressed_page_rows, compressed_page_stride, 0, compressed_inverse,
             compressed_shift),
    )  # fmt: skip
    requests = Requests(starts_ptr, starts, requests)
    rope = Rope(cos_sin_ptr, positions_ptr, rope_positions, rope_width, rope_line)
    output = Output(out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr, stride_on, stride_oh, stride_ln, stride_lh,
                    queries, heads, rope, want_lse)  # fmt: skip
    sizes = Sizes(queries, heads, num_splits, tiles_per_split)

    memory = make_memory(q_ptr.dtype.element_ty)
    barriers = make_barriers(arrivals(WARPS), WARPS, 8)
    cluster.all_there()
    gl.warp_specialize([
        (half_role, (memory, barriers, items, scale, output, 0, SPLIT, SIGN, 256, False)),
        (half_role, (memory, barriers, items, scale, output, 1, SPLIT, SIGN, 256, False)),
        (gather_role, (q, window, compressed, requests, pools, memory, barriers, items, sizes, HOW, UNIT)),
    ], [4, WARPS], [RIGHT_REGS, GATHER_REGS])  # fmt: skip
