"""FMHA forward for head dim 512 on sm_90a, dense, k is not v: two CTAs of a cluster share K and V. Triton 3.9 or newer.

The CTAs of a cluster take neighbouring tiles of 64 packed query rows of one KV head. The leader, CTA 0, asks for each
half block of K and V once, and TMA multicast writes it into the shared memory of both. What a CTA does otherwise is
wide_kv.py's: its roles, its order of K and V, its shared memory and barriers, which stand in each CTA but for
``free``. Role chart::

    leader   load   1 warp   | K1 | K0' | V1 | V0' ...           each written to both CTAs
    other    load   1 warp   | (passes every wait, asks for nothing)
    both     left   4 warps  | O_L += P0 V0_L | S0' = Q K0'^T | O_L += P1 V1_L, softmax 0' -> P0'
    both     right  4 warps  | O_R += P0 V0_R | S1 = Q K1^T | softmax 1 -> P1 | O_R += P1 V1_R

shared memory   of each CTA
q, p, stat      its own 64 rows
kv              the same bytes in both

barrier         in          arrives                          count       waits
ready[i]        each CTA    the leader's load, in both;      1 + bytes   the users of slot i in that CTA
                            the bytes written to that CTA
free[i]         the leader  who used slot i, in both CTAs    2           the leader's load
all others      each CTA    as in wide_kv.py, for that CTA

A slot is filled again when both CTAs have freed it, so neither can be overtaken by more than one filling, and what
wide_kv.py says about waits holds in each of them. The leader may not end before the other CTA's last arrival at
``free``, nor the other before the last bytes have come: it waits for them, and Triton ends a cluster with a barrier of
all its threads.

Where it is taken, and why not by default: entry.py.
"""

from dsv4.fmha.kernels import loads
from dsv4.fmha.kernels.arguments import Lists, Sizes, Strides, Tensors
from dsv4.fmha.kernels.sm90 import work
from dsv4.fmha.kernels.sm90.halves import make_room
from dsv4.fmha.kernels.sm90.wide_kv import half_role, load_role
from dsv4.kernels.compat import gl, gluon


@gluon.jit(do_not_specialize=work.NOT_SPECIALIZED)
def fmha_pair(q_ptr, k_desc, v_desc, out_ptr, lse_ptr, sink_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, table_ptr, part_ptr,
              part_lse_ptr, k_ptr, v_ptr, scale, want_lse, total_q, total_k, tokens, keys, kv_heads, group, page_size,
              table_stride, left, right, num_splits, tiles_per_split, stride_qb, stride_qt, stride_qh,
              stride_ob, stride_ot, stride_oh, stride_lb, stride_lt, stride_lh, stride_kp, stride_kr, stride_kh,
              stride_vp, stride_vr, stride_vh,
              HOW: gl.constexpr, SIGN: gl.constexpr, SPLIT: gl.constexpr, RIGHT_REGS: gl.constexpr,
              PRODUCER_REGS: gl.constexpr):  # fmt: skip
    gl.static_assert(gl.num_ctas() == 2)
    tensors = Tensors(q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr)
    lists = Lists(cu_q_ptr, cu_k_ptr, lengths_ptr, table_ptr)
    sizes = Sizes(total_q, total_k, tokens, keys, kv_heads, group, page_size, table_stride, left, right,
                  num_splits, tiles_per_split)  # fmt: skip
    strides = Strides(stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh, stride_qb, stride_ob, stride_lb)
    k_cells = loads.Cells(k_ptr, total_k, stride_kp, stride_kr, stride_kh)
    v_cells = loads.Cells(v_ptr, total_k, stride_vp, stride_vr, stride_vh)
    place = work.place_of(lists, sizes, k_desc.block_shape[1], 128, 128, HOW)
    tile_row = place.tile_row
    if tile_row < place.rows:
        room, ring, landed = make_room(k_desc.dtype, HOW)
        share, source = work.share_of(
            place, tensors, lists, sizes, strides, scale, want_lse, k_desc, v_desc, k_cells, v_cells, HOW
        )
        gl.warp_specialize([
            (half_role, (room, tile_row, ring, share, 0, SPLIT, HOW, SIGN)),
            (half_role, (room, tile_row, ring, share, 1, SPLIT, HOW, SIGN)),
            (load_role, (source, ring, landed, room.q_asked, share.tiles, HOW)),
        ], [4, 1], [RIGHT_REGS, PRODUCER_REGS])  # fmt: skip
