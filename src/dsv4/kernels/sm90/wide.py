"""FMHA forward for head dim 512 on sm_90a: 64 packed query rows per CTA, O [64, 512] shared by two warpgroups.

O in fp32 is half of the register file, so each warpgroup owns one half of its columns, left and right. Keys come in
blocks of 64, two per step: left computes the scores of block 0, right those of block 1, and they hand each other P,
the running maximum and the rescaling factor through shared memory::

    TMA warp  | blocks of the next step ...
    left      | S0 = Q K0^T | softmax 0 -> P0 | O_L += P0 V0_L |           wait P1 | O_L += P1 V1_L
    right     | S1 = Q K1^T |        wait P0 | softmax 1 -> P1 | O_R += P0 V0_R    | O_R += P1 V1_R

While one softmaxes, the other keeps the tensor cores busy. When k is v (MQA latents) a block is one slot [64, 512],
read as K and as V: two slots. Otherwise there is one K slot and one V slot, and right updates O with P0 before it
computes S1, so that V0 leaves early.

Shared memory: q     2 x [64, 256], columns 0-255 and 256-511 (the output rows leave through it)
               kv    4 x [64, 256]: k is v: block b, half h at 2b + h; else K halves at 0, 1, V halves at 2, 3
               p     2 x [64, 64], P of block 0 and 1
               stat  6 x [64] fp32: maximum after block 0, after block 1; factor 0, 1; row sums of left, of right

barrier         arrives                     waits          means
q_ready         left, right                 both           both halves of Q are in q
ready[i]        TMA bytes, or the TMA warp  its users      slot i of kv is filled
free[2b + h]    owner of half h             TMA warp       (k is v) O half h has used block b: refill its half h
free[0, 1]      the block's owner           TMA warp       (k, v) S has used this half of K: refill it
free[2 + h]     owner of half h             TMA warp       (k, v) O half h is updated: refill its half of V
p_ready[b]      the block's owner           the other      P, maximum and factor of block b are written
sum_ready[h]    owner of half h             the other      its row sums are written; it no longer reads q
landed          TMA bytes                   TMA warp       a tile with foreign rows is there, to be zeroed in part

(k is v) The owner of half h alone frees it: it updates O after p_ready of that block, that is, after the block's owner
has computed S from both halves. P0 is overwritten in the next step only after right's O_R += P0 V0_R is complete: (k is
v) free[1] says so through ready[1]; (k, v) right waits for it before p_ready[1]. P1 is overwritten after p_ready[0] of
the next step, before which left has waited for O_L += P1 V1_L. ready[0, 1] of (k, v) alternate between left and right,
one phase each: neither can ask for its next phase before the other has seen the one between, since P passes from one to
the other.
"""

from dsv4.kernels.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.shared import softmax
from dsv4.kernels.shared.tiles import PAGED, end_key, first_key, sequence, split_range
from dsv4.kernels.sm90 import loads


@gluon.jit
def producer(source, ring, landed, work, KIND: gl.constexpr, SAME_KV: gl.constexpr):
    k_desc, v_desc, k_rows, v_rows, where = source
    kv, ready, free = ring
    first, step_begin, step_end, part_row = work
    landed_phase = 0
    phase = 1  # the first wait on an untouched barrier passes
    for step in range(step_begin, step_end):
        for b in gl.static_range(2):
            row = first + step * 128 + b * 64
            for h in gl.static_range(2):
                slot = 2 * b + h if SAME_KV else h
                mbarrier.wait(free.index(slot), phase)
                landed_phase = loads.fill(k_desc, k_rows, kv.index(slot), ready.index(slot), landed, landed_phase,
                                          where, row, h * 256, 64, 256, KIND)  # fmt: skip
            if not SAME_KV:
                for h in gl.static_range(2):
                    mbarrier.wait(free.index(2 + h), phase)
                    landed_phase = loads.fill(v_desc, v_rows, kv.index(2 + h), ready.index(2 + h), landed, landed_phase,
                                              where, row, h * 256, 64, 256, KIND)  # fmt: skip
                phase = phase ^ 1
        if SAME_KV:
            phase = phase ^ 1


@gluon.jit
def scores(q, kv, ready, slot, phase, step, LS: gl.constexpr):
    """S [64, 64] of the block in slots slot, slot + 1 (halves of the head dim): two groups issued, not waited for."""
    # 0, but the compiler cannot know: it would keep all 64 wgmma descriptors of a fixed slot in registers, and spill.
    opaque = gl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1)
    s = gl.zeros([64, 64], gl.float32, LS)
    mbarrier.wait(ready.index(slot), phase)
    s = warpgroup_mma(q.index(opaque), kv.index(opaque + slot).permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(ready.index(slot + 1), phase)
    return warpgroup_mma(q.index(opaque + 1), kv.index(opaque + slot + 1).permute((1, 0)), s, is_async=True)


@gluon.jit
def write_half(o, m, l, q, stat, sum_ready, tile_row, tensors, strides, problem, work, HALF: gl.constexpr,
               SPLIT: gl.constexpr):  # fmt: skip
    """Add up the row sums of both warpgroups, normalise this half of O, write it; left also writes the LSE."""
    q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr = tensors
    stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh = strides
    head, group, q_heads, rows, tokens, keys, window_left, window_right, scale, want_lse = problem
    first, step_begin, step_end, part_row = work
    RS: gl.constexpr = m.type.layout
    LO: gl.constexpr = o.type.layout
    RO: gl.constexpr = gl.SliceLayout(1, LO)
    stat.index(4 + HALF).store(l)
    mbarrier.arrive(sum_ready.index(HALF), count=1)
    mbarrier.wait(sum_ready.index(1 - HALF), 0)
    l = l + stat.index(5 - HALF).load(RS)
    row = tile_row + gl.arange(0, 64, layout=RS)
    token = row // group
    q_head = head * group + row % group
    if SPLIT:  # normalised partial result and its LSE in base 2; the combine kernel applies the sink
        factor, lse = softmax.finish(m, l, gl.full([64], -float("inf"), gl.float32, RS))
        part = (part_row + token.to(gl.int64)) * q_heads + q_head
        if HALF == 0:
            gl.store(part_lse_ptr + part, lse, mask=row < rows)
        if step_begin < step_end:
            o = o * gl.convert_layout(factor, RO)[:, None]
            column = HALF * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, LO))
            gl.store(part_ptr + gl.convert_layout(part, RO)[:, None] * 512 + column[None, :], o,
                     mask=gl.convert_layout(row < rows, RO)[:, None])  # fmt: skip
    else:
        sink = gl.load(sink_ptr + q_head, mask=row < rows, other=-float("inf"))
        factor, lse = softmax.finish(m, l, sink)
        if HALF == 0:
            gl.store(lse_ptr + token.to(gl.int64) * stride_lt + q_head.to(gl.int64) * stride_lh, lse * softmax.LN2,
                     mask=(row < rows) & (want_lse != 0))  # fmt: skip
        o = o * gl.convert_layout(factor, RO)[:, None]
        q.index(HALF).store(o.to(q.dtype))
        loads.store_rows(out_ptr, q.index(HALF), tile_row, rows, head, group, stride_ot, stride_oh, HALF * 256, 64, 256)


@gluon.jit
def left(q, p_smem, stat, q_ready, p_ready, sum_ready, tile_row, tensors, ring, strides, problem, work,
         SAME_KV: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """Block 0 of each step and O[:, :256]."""
    kv, ready, free = ring
    q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr = tensors
    stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh = strides
    head, group, q_heads, rows, tokens, keys, window_left, window_right, scale, want_lse = problem
    first, step_begin, step_end, part_row = work
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    LA: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    RS: gl.constexpr = gl.SliceLayout(1, LS)
    RO: gl.constexpr = gl.SliceLayout(1, LO)
    loads.load_rows(q_ptr, q.index(0), tile_row, rows, head, group, stride_qt, stride_qh, 0, 64, 256)
    fence_async_shared()
    mbarrier.arrive(q_ready, count=1)
    row = tile_row + gl.arange(0, 64, layout=RS)
    row_first = first_key(row // group, tokens, keys, window_left)
    row_end = end_key(row // group, tokens, keys, window_right)
    token_last = gl.minimum((tile_row + 63) // group, tokens - 1)
    full_first = first_key(token_last, tokens, keys, window_left)
    full_end = end_key(tile_row // group, tokens, keys, window_right)

    o = gl.zeros([64, 256], gl.float32, LO)
    m = gl.full([64], -float("inf"), gl.float32, RS)
    l = gl.full([64], 0.0, gl.float32, RS)
    mbarrier.wait(q_ready, 0)
    phase = 0
    for step in range(step_begin, step_end):
        s = scores(q, kv, ready, 0, phase if SAME_KV else 0, step, LS)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        if not SAME_KV:
            mbarrier.arrive(free.index(0), count=1)
            mbarrier.arrive(free.index(1), count=1)
        column = first + step * 128
        if (column < full_first) | (column + 64 > full_end):
            s = softmax.see(s, column, row_first, row_end, LS)
        p, m0, a0 = softmax.step(s, m, scale)
        l = l * a0 + gl.sum(p, 1)
        pb = p.to(q.dtype)
        p_smem.index(0).store(pb)
        stat.index(0).store(m0)
        stat.index(2).store(a0)
        fence_async_shared()
        mbarrier.arrive(p_ready.index(0), count=1)
        o = o * gl.convert_layout(a0, RO)[:, None]
        if not SAME_KV:
            mbarrier.wait(ready.index(2), 0)
        o = warpgroup_mma(gl.convert_layout(pb, LA), kv.index(0 if SAME_KV else 2), o, is_async=True)
        mbarrier.wait(p_ready.index(1), phase)
        m = stat.index(1).load(RS)
        a1 = stat.index(3).load(RS)
        l = l * a1
        o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
        mbarrier.arrive(free.index(0 if SAME_KV else 2), count=1)
        mbarrier.wait(ready.index(2), phase if SAME_KV else 1)
        o = o * gl.convert_layout(a1, RO)[:, None]
        o = warpgroup_mma(p_smem.index(1), kv.index(2), o, is_async=True)
        o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
        mbarrier.arrive(free.index(2), count=1)
        phase = phase ^ 1
    write_half(o, m, l, q, stat, sum_ready, tile_row, tensors, strides, problem, work, 0, SPLIT)


@gluon.jit
def right(q, p_smem, stat, q_ready, p_ready, sum_ready, tile_row, tensors, ring, strides, problem, work,
          SAME_KV: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """Block 1 of each step and O[:, 256:]."""
    kv, ready, free = ring
    q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr = tensors
    stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh = strides
    head, group, q_heads, rows, tokens, keys, window_left, window_right, scale, want_lse = problem
    first, step_begin, step_end, part_row = work
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    LA: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    RS: gl.constexpr = gl.SliceLayout(1, LS)
    RO: gl.constexpr = gl.SliceLayout(1, LO)
    loads.load_rows(q_ptr, q.index(1), tile_row, rows, head, group, stride_qt, stride_qh, 256, 64, 256)
    fence_async_shared()
    mbarrier.arrive(q_ready, count=1)
    row = tile_row + gl.arange(0, 64, layout=RS)
    row_first = first_key(row // group, tokens, keys, window_left)
    row_end = end_key(row // group, tokens, keys, window_right)
    token_last = gl.minimum((tile_row + 63) // group, tokens - 1)
    full_first = first_key(token_last, tokens, keys, window_left)
    full_end = end_key(tile_row // group, tokens, keys, window_right)

    o = gl.zeros([64, 256], gl.float32, LO)
    m = gl.full([64], -float("inf"), gl.float32, RS)
    l = gl.full([64], 0.0, gl.float32, RS)
    mbarrier.wait(q_ready, 0)
    phase = 0
    for step in range(step_begin, step_end):
        if SAME_KV:
            s = scores(q, kv, ready, 2, phase, step, LS)
        mbarrier.wait(p_ready.index(0), phase)
        m0 = stat.index(0).load(RS)
        a0 = stat.index(2).load(RS)
        o = o * gl.convert_layout(a0, RO)[:, None]
        mbarrier.wait(ready.index(1 if SAME_KV else 3), phase if SAME_KV else 0)
        o = warpgroup_mma(p_smem.index(0), kv.index(1 if SAME_KV else 3), o, is_async=True)
        if SAME_KV:
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        else:
            s = scores(q, kv, ready, 0, 1, step, LS)
            o = warpgroup_mma_wait(num_outstanding=2, deps=(o,))
            mbarrier.arrive(free.index(3), count=1)
            s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
            mbarrier.arrive(free.index(0), count=1)
            mbarrier.arrive(free.index(1), count=1)
        column = first + step * 128 + 64
        if (column < full_first) | (column + 64 > full_end):
            s = softmax.see(s, column, row_first, row_end, LS)
        p, m, a1 = softmax.step(s, m0, scale)
        l = softmax.pin(l * (a0 * a1) + gl.sum(p, 1))
        pb = p.to(q.dtype)
        p_smem.index(1).store(pb)
        stat.index(1).store(m)
        stat.index(3).store(a1)
        fence_async_shared()
        mbarrier.arrive(p_ready.index(1), count=1)
        if SAME_KV:
            o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
            mbarrier.arrive(free.index(1), count=1)
        else:
            mbarrier.wait(ready.index(3), 1)
        o = o * gl.convert_layout(a1, RO)[:, None]
        o = warpgroup_mma(gl.convert_layout(pb, LA), kv.index(3), o, is_async=True)
        o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
        mbarrier.arrive(free.index(3), count=1)
        phase = phase ^ 1
    write_half(o, m, l, q, stat, sum_ready, tile_row, tensors, strides, problem, work, 1, SPLIT)


@gluon.jit(do_not_specialize=[
    "want_lse", "total_q", "total_k", "tokens", "keys", "kv_heads", "group", "page_size", "table_stride", "window_left",
    "window_right", "num_splits", "tiles_per_split", "stride_qb", "stride_qt", "stride_qh", "stride_ob", "stride_ot",
    "stride_oh", "stride_lb", "stride_lt", "stride_lh", "stride_kp", "stride_kr", "stride_kh", "stride_vp", "stride_vr",
    "stride_vh",
])  # fmt: skip
def fmha_wide(q_ptr, k_desc, v_desc, out_ptr, lse_ptr, sink_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, table_ptr, part_ptr,
              part_lse_ptr, k_ptr, v_ptr, scale, want_lse, total_q, total_k, tokens, keys, kv_heads, group, page_size,
              table_stride, window_left, window_right, num_splits, tiles_per_split, stride_qb, stride_qt, stride_qh,
              stride_ob, stride_ot, stride_oh, stride_lb, stride_lt, stride_lh, stride_kp, stride_kr, stride_kh,
              stride_vp, stride_vr, stride_vh,
              KIND: gl.constexpr, SAME_KV: gl.constexpr, SPLIT: gl.constexpr,
              RIGHT_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr):  # fmt: skip
    seq = gl.program_id(2)
    head = gl.program_id(1) % kv_heads
    split = gl.program_id(1) // kv_heads
    q_start, tokens, k_start, keys = sequence(seq, tokens, keys, total_q, total_k, cu_q_ptr, cu_k_ptr, lengths_ptr,
                                              KIND)  # fmt: skip
    rows = tokens * group
    tile_row = (gl.num_programs(0) - 1 - gl.program_id(0)) * 64  # causal: the longest tiles start first
    if tile_row < rows:
        token_last = gl.minimum((tile_row + 63) // group, tokens - 1)
        first = first_key(tile_row // group, tokens, keys, window_left)
        end = end_key(token_last, tokens, keys, window_right)
        if KIND == PAGED:
            first = first // k_desc.block_shape[1] * k_desc.block_shape[1]  # a TMA box stays within one page
        steps = (gl.maximum(end - first, 0) + 127) // 128
        step_begin, step_end = split_range(steps, split, num_splits, tiles_per_split)
        seen_first = first_key(0, tokens, keys, window_left)

        HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], k_desc.dtype)
        P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], k_desc.dtype)
        q = gl.allocate_shared_memory(k_desc.dtype, [2, 64, 256], HALF)
        kv = gl.allocate_shared_memory(k_desc.dtype, [4, 64, 256], HALF)
        p_smem = gl.allocate_shared_memory(k_desc.dtype, [2, 64, 64], P)
        stat = gl.allocate_shared_memory(gl.float32, [6, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
        p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        sum_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(q_ready, count=2)
        mbarrier.init(landed, count=1)
        for i in gl.static_range(4):
            mbarrier.init(ready.index(i), count=1)
            mbarrier.init(free.index(i), count=1)
        for i in gl.static_range(2):
            mbarrier.init(p_ready.index(i), count=1)
            mbarrier.init(sum_ready.index(i), count=1)

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
        ring = (kv, ready, free)
        strides = (stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh)
        problem = (head, group, q_heads, rows, tokens, keys, window_left, window_right, scale, want_lse)
        work = (first, step_begin, step_end, part_row)
        where = (seq, head, k_start, keys, seen_first, table_ptr, page_size)
        source = (k_desc, v_desc, k_rows, v_rows, where)
        gl.warp_specialize([
            (left, (q, p_smem, stat, q_ready, p_ready, sum_ready, tile_row, tensors, ring, strides, problem, work,
                    SAME_KV, SPLIT)),
            (right, (q, p_smem, stat, q_ready, p_ready, sum_ready, tile_row, tensors, ring, strides, problem, work,
                     SAME_KV, SPLIT)),
            (producer, (source, ring, landed, work, KIND, SAME_KV)),
        ], [4, 1], [RIGHT_REGS, PRODUCER_REGS])  # fmt: skip
