"""FMHA forward for head dims 64, 128 and 256 on sm_90a: prefill (CONSUMERS = 2) and split-KV decode (CONSUMERS = 1).

One CTA takes 64 * CONSUMERS packed query rows of one (sequence, KV head) and walks its keys in tiles of BN::

    TMA warp    | K0 V0 | K1 V1 | K2 V2 | ...
    consumer w  | load Q | S0 | softmax 0 | S1 issued, O += P0 V0 issued | softmax 1 under O's wgmma | rescale O | ...

Each consumer is one warpgroup with its own 64 rows: S = Q K^T [64, BN] and O [64, D] in registers. S of the next tile
is issued before P V of this one, so a tensor-core operation is in flight during every softmax.

Shared memory: q  CONSUMERS x [64, D] (each consumer's rows in, its output rows out)
               k  STAGES x [BN, D],  v  STAGES x [BN, D] (absent when k is v)

barrier            arrives                       waits       means
k_ready[s]         TMA bytes, or the TMA warp    consumers   K tile is in slot s
k_free[s]          each consumer, once           TMA warp    S is computed (k is v: O is updated): refill slot s
v_ready[s]         as k_ready                    consumers   V tile is in slot s
v_free[s]          each consumer, once           TMA warp    O is updated: refill slot s
landed             TMA bytes                     TMA warp    a tile with foreign rows is there, to be zeroed in part
"""

from dsv4.kernels.compat import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from dsv4.kernels.shared import softmax
from dsv4.kernels.shared.tiles import PAGED, end_key, first_key, sequence, split_range
from dsv4.kernels.sm90 import loads


@gluon.jit
def feed(slot, phase, landed_phase, source, ring, landed, work, BN: gl.constexpr, D: gl.constexpr,
         STAGES: gl.constexpr, KIND: gl.constexpr, SAME_KV: gl.constexpr):  # fmt: skip
    """The TMA warp's part of one row tile: its K and V into the ring from ``slot`` on -> where the ring stands."""
    k_desc, v_desc, k_rows, v_rows, where = source
    k, v, k_ready, k_free, v_ready, v_free = ring
    first, tile_begin, tile_end, part_row = work
    for tile in range(tile_begin, tile_end):
        row = first + tile * BN
        mbarrier.wait(k_free.index(slot), phase)
        landed_phase = loads.fill(k_desc, k_rows, k.index(slot), k_ready.index(slot), landed, landed_phase, where, row,
                                  0, BN, D, KIND)  # fmt: skip
        if not SAME_KV:
            mbarrier.wait(v_free.index(slot), phase)
            landed_phase = loads.fill(v_desc, v_rows, v.index(slot), v_ready.index(slot), landed, landed_phase,
                                      where, row, 0, BN, D, KIND)  # fmt: skip
        slot += 1
        if slot == STAGES:
            slot = 0
            phase = phase ^ 1
    return slot, phase, landed_phase


@gluon.jit
def producer(source, ring, landed, work, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
             SAME_KV: gl.constexpr):  # fmt: skip
    # Phase 1: the first wait on an untouched barrier passes.
    feed(gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(0), source, ring, landed, work, BN, D, STAGES, KIND, SAME_KV)


@gluon.jit
def attend(slot, phase, q, tile_row, tensors, ring, strides, problem, work, BN: gl.constexpr, D: gl.constexpr,
           STAGES: gl.constexpr, SAME_KV: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """The 64 query rows from tile_row on, their first K tile in ``slot`` -> where the ring stands afterwards.

    The tuples are made in fmha_rows.
    """
    q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr = tensors
    k, v, k_ready, k_free, v_ready, v_free = ring
    stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh = strides
    head, group, q_heads, rows, tokens, keys, left, right, scale, want_lse = problem
    first, tile_begin, tile_end, part_row = work
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LA: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    RS: gl.constexpr = gl.SliceLayout(1, LS)
    RO: gl.constexpr = gl.SliceLayout(1, LO)

    loads.load_rows(q_ptr, q, tile_row, rows, head, group, stride_qt, stride_qh, 0, 64, D)
    fence_async_shared()

    row = tile_row + gl.arange(0, 64, layout=RS)
    row_first = first_key(row // group, tokens, keys, left)
    row_end = end_key(row // group, tokens, keys, right)
    # Keys that all rows of this warpgroup see; tiles inside need no mask.
    token_last = gl.minimum((tile_row + 63) // group, tokens - 1)
    full_first = first_key(token_last, tokens, keys, left)
    full_end = end_key(tile_row // group, tokens, keys, right)

    o = gl.zeros([64, D], gl.float32, LO)
    m = gl.full([64], -float("inf"), gl.float32, RS)
    l = gl.full([64], 0.0, gl.float32, RS)
    if tile_begin < tile_end:
        # S of the first tile
        mbarrier.wait(k_ready.index(slot), phase)
        s = gl.zeros([64, BN], gl.float32, LS)
        s = warpgroup_mma(q, k.index(slot).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        if not SAME_KV:
            mbarrier.arrive(k_free.index(slot), count=1)
        column = first + tile_begin * BN
        if (column < full_first) | (column + BN > full_end):
            s = softmax.see(s, column, row_first, row_end, LS)
        p, m, alpha = softmax.step(s, m, scale)
        l = gl.sum(p, 1)
        pa = gl.convert_layout(p.to(q.dtype), LA)

        for tile in range(tile_begin + 1, tile_end):  # slot: of the tile whose P is in pa
            next_slot = slot + 1
            next_phase = phase
            if next_slot == STAGES:
                next_slot = 0
                next_phase = phase ^ 1
            mbarrier.wait(k_ready.index(next_slot), next_phase)
            s = gl.zeros([64, BN], gl.float32, LS)
            s = warpgroup_mma(q, k.index(next_slot).permute((1, 0)), s, use_acc=False, is_async=True)
            if SAME_KV:
                o = warpgroup_mma(pa, k.index(slot), o, is_async=True)
            else:
                mbarrier.wait(v_ready.index(slot), phase)
                o = warpgroup_mma(pa, v.index(slot), o, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            if not SAME_KV:
                mbarrier.arrive(k_free.index(next_slot), count=1)
            column = first + tile * BN
            if (column < full_first) | (column + BN > full_end):
                s = softmax.see(s, column, row_first, row_end, LS)
            p, m, alpha = softmax.step(s, m, scale)
            l = l * alpha + gl.sum(p, 1)
            o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
            if SAME_KV:
                mbarrier.arrive(k_free.index(slot), count=1)
            else:
                mbarrier.arrive(v_free.index(slot), count=1)
            o = o * gl.convert_layout(alpha, RO)[:, None]
            pa = gl.convert_layout(p.to(q.dtype), LA)
            slot = next_slot
            phase = next_phase

        if SAME_KV:
            o = warpgroup_mma(pa, k.index(slot), o, is_async=True)
        else:
            mbarrier.wait(v_ready.index(slot), phase)
            o = warpgroup_mma(pa, v.index(slot), o, is_async=True)
        o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
        if SAME_KV:
            mbarrier.arrive(k_free.index(slot), count=1)
        else:
            mbarrier.arrive(v_free.index(slot), count=1)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase = phase ^ 1

    q_head = head * group + row % group
    token = row // group
    if SPLIT:  # normalised partial result and its LSE in base 2; the combine kernel applies the sink
        factor, lse = softmax.finish(m, l, gl.full([64], -float("inf"), gl.float32, RS))
        part = (part_row + token.to(gl.int64)) * q_heads + q_head
        gl.store(part_lse_ptr + part, lse, mask=row < rows)
        if tile_begin < tile_end:
            o = o * gl.convert_layout(factor, RO)[:, None]
            column = gl.arange(0, D, layout=gl.SliceLayout(0, LO))
            part_o = gl.convert_layout(part, RO)
            gl.store(part_ptr + part_o[:, None] * D + column[None, :], o,
                     mask=gl.convert_layout(row < rows, RO)[:, None])  # fmt: skip
    else:
        sink = gl.load(sink_ptr + q_head, mask=row < rows, other=-float("inf"))
        factor, lse = softmax.finish(m, l, sink)
        gl.store(lse_ptr + token.to(gl.int64) * stride_lt + q_head.to(gl.int64) * stride_lh, lse * softmax.LN2,
                 mask=(row < rows) & (want_lse != 0))  # fmt: skip
        o = o * gl.convert_layout(factor, RO)[:, None]
        q.store(o.to(q.dtype))
        loads.store_rows(out_ptr, q, tile_row, rows, head, group, stride_ot, stride_oh, 0, 64, D)
    return slot, phase


@gluon.jit
def consumer(q, tile_row, tensors, ring, strides, problem, work, BN: gl.constexpr, D: gl.constexpr,
             STAGES: gl.constexpr, SAME_KV: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    attend(gl.to_tensor(0), gl.to_tensor(0), q, tile_row, tensors, ring, strides, problem, work, BN, D, STAGES, SAME_KV,
           SPLIT)  # fmt: skip


@gluon.jit(do_not_specialize=[
    "want_lse", "total_q", "total_k", "tokens", "keys", "kv_heads", "group", "page_size", "table_stride", "left",
    "right", "num_splits", "tiles_per_split", "stride_qb", "stride_qt", "stride_qh", "stride_ob", "stride_ot",
    "stride_oh", "stride_lb", "stride_lt", "stride_lh", "stride_kp", "stride_kr", "stride_kh", "stride_vp", "stride_vr",
    "stride_vh",
])  # fmt: skip
def fmha_rows(q_ptr, k_desc, v_desc, out_ptr, lse_ptr, sink_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, table_ptr, part_ptr,
              part_lse_ptr, k_ptr, v_ptr, scale, want_lse, total_q, total_k, tokens, keys, kv_heads, group, page_size,
              table_stride, left, right, num_splits, tiles_per_split, stride_qb, stride_qt, stride_qh,
              stride_ob, stride_ot, stride_oh, stride_lb, stride_lt, stride_lh, stride_kp, stride_kr, stride_kh,
              stride_vp, stride_vr, stride_vh,
              D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, KIND: gl.constexpr,
              SAME_KV: gl.constexpr, SPLIT: gl.constexpr, CONSUMER_REGS: gl.constexpr,
              PRODUCER_REGS: gl.constexpr):  # fmt: skip
    M: gl.constexpr = 64 * CONSUMERS
    seq = gl.program_id(2)
    head = gl.program_id(1) % kv_heads
    split = gl.program_id(1) // kv_heads
    q_start, tokens, k_start, keys = sequence(seq, tokens, keys, total_q, total_k, cu_q_ptr, cu_k_ptr, lengths_ptr,
                                              KIND)  # fmt: skip
    rows = tokens * group
    tile_row = (gl.num_programs(0) - 1 - gl.program_id(0)) * M  # causal: the longest tiles start first
    if tile_row < rows:
        token_first = tile_row // group
        token_last = gl.minimum((tile_row + M - 1) // group, tokens - 1)
        first = first_key(token_first, tokens, keys, left)
        end = end_key(token_last, tokens, keys, right)
        if KIND == PAGED:
            first = first // k_desc.block_shape[1] * k_desc.block_shape[1]  # a TMA box stays within one page
        tiles = (gl.maximum(end - first, 0) + BN - 1) // BN
        tile_begin, tile_end = split_range(tiles, split, num_splits, tiles_per_split)
        seen_first = first_key(0, tokens, keys, left)

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

        # The tensors of this sequence. 64-bit: a batch may be larger than 2^31 elements.
        q_ptr += (seq.to(gl.int64) * stride_qb + q_start.to(gl.int64) * stride_qt) * 8
        out_ptr += (seq.to(gl.int64) * stride_ob + q_start.to(gl.int64) * stride_ot) * 8
        lse_ptr += seq.to(gl.int64) * stride_lb + q_start.to(gl.int64) * stride_lt
        table_ptr += seq.to(gl.int64) * table_stride
        q_heads = kv_heads * group
        k_rows = (k_ptr, total_k, stride_kp, stride_kr, stride_kh)
        v_rows = (v_ptr, total_k, stride_vp, stride_vr, stride_vh)
        # Row of the partial results: split-major, then as the rows of q (token, head).
        part_row = split.to(gl.int64) * total_q + q_start
        if KIND != 1:
            part_row += seq.to(gl.int64) * tokens
        tensors = (q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr)
        ring = (k, v, k_ready, k_free, v_ready, v_free)
        strides = (stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh)
        problem = (head, group, q_heads, rows, tokens, keys, left, right, scale, want_lse)
        work = (first, tile_begin, tile_end, part_row)
        where = (seq, head, k_start, keys, seen_first, table_ptr, page_size)
        source = (k_desc, v_desc, k_rows, v_rows, where)
        if CONSUMERS == 1:
            gl.warp_specialize([
                (consumer, (q.index(0), tile_row, tensors, ring, strides, problem, work, BN, D, STAGES, SAME_KV,
                            SPLIT)),
                (producer, (source, ring, landed, work, BN, D, STAGES, KIND, SAME_KV)),
            ], [1], [PRODUCER_REGS])  # fmt: skip
        elif CONSUMERS == 2:
            gl.warp_specialize([
                (consumer, (q.index(0), tile_row, tensors, ring, strides, problem, work, BN, D, STAGES, SAME_KV,
                            SPLIT)),
                (consumer, (q.index(1), tile_row + 64, tensors, ring, strides, problem, work, BN, D, STAGES, SAME_KV,
                            SPLIT)),
                (producer, (source, ring, landed, work, BN, D, STAGES, KIND, SAME_KV)),
            ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
        else:
            gl.warp_specialize([
                (consumer, (q.index(0), tile_row, tensors, ring, strides, problem, work, BN, D, STAGES, SAME_KV,
                            SPLIT)),
                (consumer, (q.index(1), tile_row + 64, tensors, ring, strides, problem, work, BN, D, STAGES, SAME_KV,
                            SPLIT)),
                (consumer, (q.index(2), tile_row + 128, tensors, ring, strides, problem, work, BN, D, STAGES, SAME_KV,
                            SPLIT)),
                (producer, (source, ring, landed, work, BN, D, STAGES, KIND, SAME_KV)),
            ], [4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
