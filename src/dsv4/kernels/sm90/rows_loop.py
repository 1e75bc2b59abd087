"""The kernel of rows.py for large dense problems: one CTA per multiprocessor, which loops over row tiles.

The TMA warp runs ahead into the next row tile while the consumers write their output::

    TMA warp    | K, V of tile a ...          | K, V of tile b ...
    consumer w  | Q | S, softmax, O += P V ...| write O | Q | S (K already there) ...

Roles, shared memory and barriers are those of rows.py; the ring's slot and phase carry over from tile to tile. CTA c
takes tiles c, c + CTAs, ...; every other (sequence, head) lists its tiles backwards, which evens out causal work.
"""

from dsv4.kernels.compat import gl, gluon, mbarrier
from dsv4.kernels.shared.tiles import end_key, first_key
from dsv4.kernels.sm90 import rows


@gluon.jit
def locate(item, scan, BN: gl.constexpr, M: gl.constexpr):
    """(sequence, KV head, first row, first key, key tiles) of an item."""
    row_tiles, kv_heads, group, tokens, keys, left, right = scan
    pair = item // row_tiles
    tile = item - pair * row_tiles
    tile_row = gl.where(pair % 2 == 0, row_tiles - 1 - tile, tile) * M
    first = first_key(tile_row // group, tokens, keys, left)
    end = end_key(gl.minimum((tile_row + M - 1) // group, tokens - 1), tokens, keys, right)
    return pair // kv_heads, pair % kv_heads, tile_row, first, (gl.maximum(end - first, 0) + BN - 1) // BN


@gluon.jit
def producer(source, ring, landed, items, scan, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
             M: gl.constexpr, SAME_KV: gl.constexpr):  # fmt: skip
    k_desc, v_desc, k_rows, v_rows, table_ptr, page_size = source
    row_tiles, kv_heads, group, tokens, keys, left, right = scan
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # the first wait on an untouched barrier passes
    landed_phase = gl.to_tensor(0)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        seq, head, tile_row, first, tiles = locate(item, scan, BN, M)
        here = (k_desc, v_desc, k_rows, v_rows, (seq, head, 0, keys, 0, table_ptr, page_size))
        slot, phase, landed_phase = rows.feed(slot, phase, landed_phase, here, ring, landed, (first, 0, tiles, 0), BN,
                                              D, STAGES, 0, SAME_KV)  # fmt: skip


@gluon.jit
def consumer(q, tensors, ring, strides, batch_strides, scalars, items, scan, W: gl.constexpr, BN: gl.constexpr,
             D: gl.constexpr, STAGES: gl.constexpr, M: gl.constexpr, SAME_KV: gl.constexpr):  # fmt: skip
    q_ptr, out_ptr, lse_ptr, sink_ptr = tensors
    stride_qb, stride_ob, stride_lb = batch_strides
    scale, want_lse = scalars
    row_tiles, kv_heads, group, tokens, keys, left, right = scan
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        seq, head, tile_row, first, tiles = locate(item, scan, BN, M)
        n = seq.to(gl.int64)
        lse = lse_ptr + n * stride_lb
        here = (q_ptr + n * stride_qb * 8, out_ptr + n * stride_ob * 8, lse, sink_ptr, lse, lse)
        problem = (head, group, kv_heads * group, tokens * group, tokens, keys, left, right, scale, want_lse)
        slot, phase = rows.attend(slot, phase, q, tile_row + 64 * W, here, ring, strides, problem, (first, 0, tiles, 0),
                                  BN, D, STAGES, SAME_KV, False)  # fmt: skip


@gluon.jit(do_not_specialize=[
    "want_lse", "total_q", "total_k", "tokens", "keys", "kv_heads", "group", "page_size", "table_stride", "left",
    "right", "num_splits", "tiles_per_split", "stride_qb", "stride_qt", "stride_qh", "stride_ob", "stride_ot",
    "stride_oh", "stride_lb", "stride_lt", "stride_lh", "stride_kp", "stride_kr", "stride_kh", "stride_vp", "stride_vr",
    "stride_vh",
])  # fmt: skip
def fmha_rows_loop(q_ptr, k_desc, v_desc, out_ptr, lse_ptr, sink_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, table_ptr,
                   part_ptr, part_lse_ptr, k_ptr, v_ptr, scale, want_lse, total_q, total_k, tokens, keys, kv_heads,
                   group, page_size, table_stride, left, right, num_splits, tiles_per_split, stride_qb, stride_qt,
                   stride_qh, stride_ob, stride_ot, stride_oh, stride_lb, stride_lt, stride_lh, stride_kp, stride_kr,
                   stride_kh, stride_vp, stride_vr, stride_vh,
                   D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, KIND: gl.constexpr,
                   SAME_KV: gl.constexpr, SPLIT: gl.constexpr, CONSUMER_REGS: gl.constexpr,
                   PRODUCER_REGS: gl.constexpr):  # fmt: skip
    gl.static_assert(KIND == 0 and not SPLIT)
    M: gl.constexpr = 64 * CONSUMERS
    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], k_desc.dtype)
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], k_desc.dtype)
    q = gl.allocate_shared_memory(k_desc.dtype, [4 if CONSUMERS == 3 else CONSUMERS, 64, D], Q)
    k = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BN, D], KV)
    v = k
    if not SAME_KV:
        v = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BN, D], KV)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=CONSUMERS)
        mbarrier.init(v_free.index(i), count=CONSUMERS)
    mbarrier.init(landed, count=1)

    row_tiles = (tokens * group + M - 1) // M
    items = row_tiles * kv_heads * (total_q // tokens)
    scan = (row_tiles, kv_heads, group, tokens, keys, left, right)
    k_rows = (k_ptr, total_k, stride_kp, stride_kr, stride_kh)
    v_rows = (v_ptr, total_k, stride_vp, stride_vr, stride_vh)
    source = (k_desc, v_desc, k_rows, v_rows, table_ptr, page_size)
    tensors = (q_ptr, out_ptr, lse_ptr, sink_ptr)
    ring = (k, v, k_ready, k_free, v_ready, v_free)
    strides = (stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh)
    batch = (stride_qb, stride_ob, stride_lb)
    scalars = (scale, want_lse)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (q.index(0), tensors, ring, strides, batch, scalars, items, scan, 0, BN, D, STAGES, M, SAME_KV)),
            (consumer, (q.index(1), tensors, ring, strides, batch, scalars, items, scan, 1, BN, D, STAGES, M, SAME_KV)),
            (producer, (source, ring, landed, items, scan, BN, D, STAGES, M, SAME_KV)),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (q.index(0), tensors, ring, strides, batch, scalars, items, scan, 0, BN, D, STAGES, M, SAME_KV)),
            (consumer, (q.index(1), tensors, ring, strides, batch, scalars, items, scan, 1, BN, D, STAGES, M, SAME_KV)),
            (consumer, (q.index(2), tensors, ring, strides, batch, scalars, items, scan, 2, BN, D, STAGES, M, SAME_KV)),
            (producer, (source, ring, landed, items, scan, BN, D, STAGES, M, SAME_KV)),
        ], [4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
