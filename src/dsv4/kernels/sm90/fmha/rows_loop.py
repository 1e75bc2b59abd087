"""The kernel of rows.py for large dense problems: one CTA per multiprocessor, which loops over row tiles.

The load warp runs ahead into the next row tile while the attend roles write their output. Role chart::

    load      1 warp    | K, V of tile a ...          | K, V of tile b ...
    attend w  4 warps   | Q | S, softmax, O += P V ...| write O | Q | S (K already there) ...

There are two attend roles, or three. Shared memory and barriers are those of rows.py; the ring's slot and phase carry
over from tile to tile. CTA c takes tiles c, c + CTAs, ...; every other (sequence, head) lists its tiles backwards,
which evens out causal work.
"""

from dsv4.kernels.compat import gl, gluon
from dsv4.kernels.shared.fmha.tiles import DENSE, end_key, first_key
from dsv4.kernels.sm90.fmha import rows
from dsv4.kernels.sm90.fmha import work as parts


@gluon.jit
def locate(item, scan, BN: gl.constexpr, M: gl.constexpr):
    """(sequence, KV head, first row, first key, key tiles) of an item."""
    row_tiles, items, kv_heads, group, tokens, keys, left, right = scan
    pair = item // row_tiles
    tile = item - pair * row_tiles
    tile_row = gl.where(pair % 2 == 0, row_tiles - 1 - tile, tile) * M
    first = first_key(tile_row // group, tokens, keys, left)
    end = end_key(gl.minimum((tile_row + M - 1) // group, tokens - 1), tokens, keys, right)
    return pair // kv_heads, pair % kv_heads, tile_row, first, (gl.maximum(end - first, 0) + BN - 1) // BN


@gluon.jit
def load_role(source, ring, landed, scan, M: gl.constexpr, SAME_KV: gl.constexpr):
    k_desc, v_desc, k_rows, v_rows, pages = source
    row_tiles, items, kv_heads, group, tokens, keys, left, right = scan
    BN: gl.constexpr = ring[0].shape[1]
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # the first wait on an untouched barrier passes
    landed_phase = gl.to_tensor(0)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        seq, head, tile_row, first, tiles = locate(item, scan, BN, M)
        here = (k_desc, v_desc, k_rows, v_rows, (seq, head, 0, keys, 0, keys, pages[0], pages[1]))
        slot, phase, landed_phase = rows.load_tiles(slot, phase, landed_phase, here, ring, landed, (first, 0, tiles, 0),
                                                    SAME_KV, DENSE)  # fmt: skip


@gluon.jit
def attend_role(q, tensors, ring, strides, batch_strides, scalars, scan, pages, W: gl.constexpr, M: gl.constexpr,
                SAME_KV: gl.constexpr, SIGN: gl.constexpr):  # fmt: skip
    q_ptr, out_ptr, lse_ptr, sink_ptr = tensors
    stride_qb, stride_ob, stride_lb = batch_strides
    scale, want_lse = scalars
    row_tiles, items, kv_heads, group, tokens, keys, left, right = scan
    BN: gl.constexpr = ring[0].shape[1]
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        seq, head, tile_row, first, tiles = locate(item, scan, BN, M)
        n = seq.to(gl.int64)
        lse = lse_ptr + n * stride_lb
        here = (q_ptr + n * stride_qb * 8, out_ptr + n * stride_ob * 8, lse, sink_ptr, lse, lse)
        problem = (head, group, kv_heads * group, tokens * group, tokens, keys, left, right, scale, want_lse)
        common = (here, strides, problem, (first, 0, tiles, 0), pages)
        slot, phase = rows.attend(slot, phase, q, tile_row + 64 * W, ring, common, SAME_KV, False, DENSE, SIGN)


@gluon.jit(do_not_specialize=parts.NOT_SPECIALIZED)
def fmha_rows_loop(q_ptr, k_desc, v_desc, out_ptr, lse_ptr, sink_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, table_ptr,
                   part_ptr, part_lse_ptr, k_ptr, v_ptr, scale, want_lse, total_q, total_k, tokens, keys, kv_heads,
                   group, page_size, table_stride, left, right, num_splits, tiles_per_split, stride_qb, stride_qt,
                   stride_qh, stride_ob, stride_ot, stride_oh, stride_lb, stride_lt, stride_lh, stride_kp, stride_kr,
                   stride_kh, stride_vp, stride_vr, stride_vh,
                   D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, HOW: gl.constexpr,
                   SIGN: gl.constexpr, SAME_KV: gl.constexpr, SPLIT: gl.constexpr, CONSUMER_REGS: gl.constexpr,
                   PRODUCER_REGS: gl.constexpr):  # fmt: skip
    gl.static_assert(HOW == DENSE and not SPLIT)
    M: gl.constexpr = 64 * CONSUMERS
    q, ring, landed = rows.make_ring(k_desc.dtype, D, BN, STAGES, CONSUMERS, SAME_KV, HOW)
    row_tiles = (tokens * group + M - 1) // M
    items = row_tiles * kv_heads * (total_q // tokens)
    scan = (row_tiles, items, kv_heads, group, tokens, keys, left, right)
    pages = (table_ptr, page_size, total_k)
    k_rows = (k_ptr, total_k, stride_kp, stride_kr, stride_kh)
    v_rows = (v_ptr, total_k, stride_vp, stride_vr, stride_vh)
    source = (k_desc, v_desc, k_rows, v_rows, pages)
    tensors = (q_ptr, out_ptr, lse_ptr, sink_ptr)
    strides = (stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh)
    batch = (stride_qb, stride_ob, stride_lb)
    scalars = (scale, want_lse)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (attend_role, (q.index(0), tensors, ring, strides, batch, scalars, scan, pages, 0, M, SAME_KV, SIGN)),
            (attend_role, (q.index(1), tensors, ring, strides, batch, scalars, scan, pages, 1, M, SAME_KV, SIGN)),
            (load_role, (source, ring, landed, scan, M, SAME_KV)),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize([
            (attend_role, (q.index(0), tensors, ring, strides, batch, scalars, scan, pages, 0, M, SAME_KV, SIGN)),
            (attend_role, (q.index(1), tensors, ring, strides, batch, scalars, scan, pages, 1, M, SAME_KV, SIGN)),
            (attend_role, (q.index(2), tensors, ring, strides, batch, scalars, scan, pages, 2, M, SAME_KV, SIGN)),
            (load_role, (source, ring, landed, scan, M, SAME_KV)),
        ], [4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
