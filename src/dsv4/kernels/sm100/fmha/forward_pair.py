"""FMHA forward at head dim 512 on sm_100a by pairs of CTAs: 128 packed query rows, 64 of them in each CTA.

The roles but for loading and softmax, the memory maps and the barriers are those of listed_pair.py, where rows of keys
are picked by number: here an item is 128 rows of one (sequence, KV head), and K and V of a block are 128 keys in a row,
which TMA brings, K split by rows and V by columns over the pair (gather_pair.py says in which order and where). There
is no bias: a mask takes its place. Dense tensors only, where TMA's own bounds end a sequence.

    load     4 warps  | Q K0 | K1 |       V0 | K2      | V1   V2  | Q K0 of the next item, as Q is free
    scores   1 warp   |      | S0 = Q K0^T   | S1      |      S2  | S0 of the next item
    values   1 warp   |      |               |         | O = P0 V0 | O += P1 V1 | O += P2 V2
    softmax  4 warps  |      |               | P0      | P1        | P2         |            | O / l -> out
"""

from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory

from dsv4.kernels.compat import fence_async_shared, gl, gluon, mbarrier, reinterpret, tma_load
from dsv4.kernels.shared import softmax
from dsv4.kernels.shared.fmha import loads
from dsv4.kernels.shared.fmha.tiles import end_key, first_key
from dsv4.kernels.sm100.v4.gather_pair import KEYS, SLOT_BYTES, SLOT_K, place_of_k, place_of_v
from dsv4.kernels.sm100.v4.listed_pair import (
    HALVES,
    OUT,
    OWN,
    PANEL,
    PIECE,
    begin,
    scores_role,
    softmax_block,
    values_role,
    write,
)

ROWS = gl.constexpr(128)


@gluon.jit
def item_of(item, sizes, left, right):
    """(sequence, KV head, first row, first key, number of blocks) of an item. The tiles of a head are neighbours: one
    finds in L2 what another read; those with the most keys come first."""
    tokens, keys, kv_heads, group = sizes
    tiles = (tokens * group + ROWS - 1) // ROWS
    rest = item // tiles
    seq = rest // kv_heads
    row = (tiles - 1 - (item - rest * tiles)) * ROWS
    token_last = gl.minimum((row + ROWS - 1) // group, tokens - 1)
    first = first_key(row // group, tokens, keys, left)
    end = end_key(token_last, tokens, keys, right)
    return seq, rest - seq * kv_heads, row, first, (gl.maximum(end - first, 0) + KEYS - 1) // KEYS


@gluon.jit
def load_role(q_ptr, k_desc, v_desc, q, job, barriers, ring, items, sizes, window, strides):
    """The items of this pair, one after the other: the number of blocks, Q, then K and V as places become free."""
    job_ready, job_free, q_ready, q_free = barriers
    kv, k_ready, v_ready, free = ring
    tokens, keys, kv_heads, group = sizes
    left, right = window
    stride_qb, stride_qt, stride_qh = strides
    at = 0  # blocks so far
    full = 0  # items so far that have blocks
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        seq, head, row, first, n = item_of(item, sizes, left, right)
        mbarrier.wait(job_free, (turn + 1) % 2)
        job.store(gl.full([1], n, gl.int32, gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[0]])))
        mbarrier.arrive(job_ready, count=1)
        if n > 0:
            mbarrier.wait(q_free, (full + 1) % 2)
            for h in gl.static_range(2):
                loads.load_rows(q_ptr + seq.to(gl.int64) * stride_qb * 8, q.index(h), row, tokens * group, head, group,
                                stride_qt, stride_qh, h * 256, ROWS, 256, 64, 1)  # fmt: skip
            fence_async_shared()  # generic stores -> tensor-core reads
            mbarrier.arrive(q_ready, count=1)
            full += 1
        for i in range(0, gl.where(n > 0, n + 1, 0)):
            if i < n:
                place, use = place_of_k(i)
                for h in gl.static_range(2):
                    slot = 2 * place + h
                    mbarrier.wait(free.index(slot), (at + use + 1) % 2)
                    mbarrier.expect(k_ready.index(slot), SLOT_BYTES)
                    tma_load(k_desc, [seq, first + i * KEYS, head, h * 256], k_ready.index(slot),
                             reinterpret(kv.index(slot), [1, KEYS, 1, 256], k_desc.layout))  # fmt: skip
            if i > 0:
                place, use = place_of_v(i - 1, n)
                for h in gl.static_range(2):
                    slot = 2 * place + h
                    mbarrier.wait(free.index(slot), (at + use + 1) % 2)
                    mbarrier.expect(v_ready.index(slot), SLOT_BYTES)
                    tma_load(v_desc, [seq, first + (i - 1) * KEYS, head, h * 256], v_ready.index(slot),
                             reinterpret(kv.index(slot), [1, KEYS, 1, 256], v_desc.layout))  # fmt: skip
        at += n
        turn += 1
    if full > 0:  # the last commits arrive in both CTAs: neither may be gone before
        mbarrier.wait(q_free, (full - 1) % 2)
        for slot in gl.static_range(4):
            mbarrier.wait(free.index(slot), (at - 1) % 2)


@gluon.jit
def softmax_role(p, s, o, job, stat, barriers, tensors, strides, items, sizes, window, scale, want_lse):
    """P = exp2(S - m) block by block, and in the end of an item O / l -> out, lse."""
    job_ready, job_free, s_ready, p_ready, pv_done = barriers
    out_ptr, lse_ptr, sink_ptr = tensors
    stride_ob, stride_ot, stride_oh, stride_lb, stride_lt, stride_lh = strides
    tokens, keys, kv_heads, group = sizes
    left, right = window
    LS: gl.constexpr = s.index(0).get_reg_layout()
    RS: gl.constexpr = gl.SliceLayout(1, LS)
    LO: gl.constexpr = o.index(0).reinterpret(gl.float32, [4, 128, 64], PIECE).index(0).get_reg_layout()
    at = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        seq, head, first_row, first, _n = item_of(item, sizes, left, right)
        n = begin(job_ready, job_free, job, turn)
        row = first_row + gl.arange(0, ROWS, layout=RS)
        token = row // group
        row_first = first_key(token, tokens, keys, left)
        row_end = end_key(token, tokens, keys, right)
        # Keys that all rows see; inside them no mask is needed.
        token_last = gl.minimum((first_row + ROWS - 1) // group, tokens - 1)
        full_first = first_key(token_last, tokens, keys, left)
        full_end = end_key(first_row // group, tokens, keys, right)
        m = gl.full([ROWS], -float("inf"), gl.float32, RS)
        l = gl.full([ROWS], 0.0, gl.float32, RS)
        for j in range(at, at + n):
            column = first + (j - at) * KEYS
            mbarrier.wait(s_ready.index(j % 2), (j // 2) % 2)
            x = s.index(j % 2).load() * scale
            if (column < full_first) | (column + KEYS > full_end):
                x = softmax.see(x, column, row_first, row_end, LS)
            m, l = softmax_block(x, m, l, j, at, p, o, stat, p_ready, pv_done)
        at += n
        turn += 1

        here = row < tokens * group
        q_head = head * group + row - token * group
        sink = softmax.sink_of(sink_ptr, q_head, here)
        factor, lse = softmax.finish(m, l, sink)
        lse_row = seq.to(gl.int64) * stride_lb + token.to(gl.int64) * stride_lt + q_head.to(gl.int64) * stride_lh
        gl.store(lse_ptr + lse_row, lse * softmax.LN2, mask=here & (want_lse != 0))
        if n > 0:
            mbarrier.wait(pv_done.index((at - 1) % 2), ((at - 1) // 2) % 2)
        row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
        offset = loads.row_offsets(row, head, group, stride_ot, stride_oh)
        out = (out_ptr + seq.to(gl.int64) * stride_ob * 8, offset, row < tokens * group)
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LO))
        write(o, p, factor, n, out, (lse_ptr, row, row < 0), (lse_ptr, 0), 0, False)
    if at > 1:  # a commit that nobody needed to wait for: it arrives in both CTAs, and neither may be gone before
        mbarrier.wait(pv_done.index(at % 2), (at // 2 - 1) % 2)


@gluon.jit(
    do_not_specialize=[
        "want_lse", "total_q", "total_k", "tokens", "keys", "kv_heads", "group", "page_size", "table_stride",
        "left", "right", "num_splits", "tiles_per_split", "stride_qb", "stride_qt", "stride_qh", "stride_ob",
        "stride_ot", "stride_oh", "stride_lb", "stride_lt", "stride_lh", "stride_kb", "stride_kt", "stride_kh",
        "stride_vb", "stride_vt", "stride_vh", "sign",
    ],
    do_not_specialize_on_alignment=[
        "lse_ptr", "sink_ptr", "cu_q_ptr", "cu_k_ptr", "lengths_ptr", "table_ptr", "part_lse_ptr",
    ],
)  # fmt: skip
def fmha_pair(q_ptr, k_desc, v_desc, out_ptr, lse_ptr, sink_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, table_ptr, part_ptr,
              part_lse_ptr, k_ptr, v_ptr, scale, want_lse, total_q, total_k, tokens, keys, kv_heads, group, page_size,
              table_stride, left, right, num_splits, tiles_per_split, stride_qb, stride_qt, stride_qh, stride_ob,
              stride_ot, stride_oh, stride_lb, stride_lt, stride_lh, stride_kb, stride_kt, stride_kh, stride_vb,
              stride_vt, stride_vh, sign, LOAD_REGS: gl.constexpr, WARP_REGS: gl.constexpr):  # fmt: skip
    DTYPE: gl.constexpr = k_desc.dtype
    q = gl.allocate_shared_memory(DTYPE, [2, 128, 256], SLOT_K)
    kv = gl.allocate_shared_memory(DTYPE, [4, 128, 256], SLOT_K)
    p = gl.allocate_shared_memory(DTYPE, [2, 128, 128], PANEL)
    stat = gl.allocate_shared_memory(gl.float32, [128], HALVES)
    job = gl.allocate_shared_memory(gl.int32, [1], OWN)
    job_ready = mbarrier.allocate_mbarrier()
    job_free = mbarrier.allocate_mbarrier()
    q_ready = mbarrier.allocate_mbarrier(two_ctas=True)
    q_free = mbarrier.allocate_mbarrier()
    k_ready = mbarrier.allocate_mbarrier(batch=4, two_ctas=True)
    v_ready = mbarrier.allocate_mbarrier(batch=4, two_ctas=True)
    free = mbarrier.allocate_mbarrier(batch=4)
    s_ready = mbarrier.allocate_mbarrier(batch=2)
    p_ready = mbarrier.allocate_mbarrier(batch=2, two_ctas=True)
    pv_done = mbarrier.allocate_mbarrier(batch=2)
    mbarrier.init(job_ready, count=1)
    mbarrier.init(job_free, count=3)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=1)
    for i in gl.static_range(4):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(s_ready.index(i), count=1)
        mbarrier.init(p_ready.index(i), count=1)
        mbarrier.init(pv_done.index(i), count=1)
    S: gl.constexpr = TensorMemoryLayout([64, 128], col_stride=1, cga_layout=[[1, 0]], two_ctas=True)
    O: gl.constexpr = TensorMemoryLayout([64, 256], col_stride=1, cga_layout=[[1, 0]], two_ctas=True)
    s = allocate_tensor_memory(gl.float32, [2, 128, 128], S)
    o = allocate_tensor_memory(gl.float32, [2, 128, 256], O)

    sizes = (tokens, keys, kv_heads, group)
    items = (tokens * group + ROWS - 1) // ROWS * kv_heads * (total_q // gl.maximum(tokens, 1))
    ring = (kv, k_ready, v_ready, free)
    gl.warp_specialize([
        (softmax_role, (p, s, o, job, stat, (job_ready, job_free, s_ready, p_ready, pv_done),
                        (out_ptr, lse_ptr, sink_ptr),
                        (stride_ob, stride_ot, stride_oh, stride_lb, stride_lt, stride_lh), items, sizes,
                        (left, right), scale * sign.to(gl.float32), want_lse)),
        (load_role, (q_ptr, k_desc, v_desc, q, job, (job_ready, job_free, q_ready, q_free), ring, items, sizes,
                     (left, right), (stride_qb, stride_qt, stride_qh))),
        (scores_role, (q, job, job_ready, job_free, q_ready, q_free, ring, s, s_ready, p_ready, items)),
        (values_role, (p, job, job_ready, job_free, ring, o, p_ready, pv_done, items)),
    ], [4, 1, 1], [LOAD_REGS, WARP_REGS, WARP_REGS])  # fmt: skip
