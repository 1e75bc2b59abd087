"""FMHA forward for head dims 64, 128 and 256 on sm_90a: prefill (CONSUMERS = 2) and split-KV decode (CONSUMERS = 1).

One CTA takes 64 * CONSUMERS packed query rows of one (sequence, KV head) and walks its keys in tiles of BN::

    load      1 warp    | K0 V0 | K1 V1 | K2 V2 | ...
    attend w  4 warps   | load Q | S0 | softmax 0 | issue S1, O += P0 V0 | softmax 1 under O's wgmma | rescale O | ...

Each attend role is one warpgroup with its own 64 rows: S = Q K^T [64, BN] and O [64, D] in registers. S of the next
tile is issued before P V of this one, so a tensor-core operation is in flight during every softmax.

shared memory   bytes (16-bit elements)            holds
q               CONSUMERS x 64 x D x 2             each attend role's query rows; in the end its output rows
k, v            STAGES x BN x D x 2 each           the ring of K tiles and of V tiles (v is k when k is v)
barriers        8 each

barrier       arrives                       count       waits     means
k_ready[s]    load: TMA bytes, or itself    1 + bytes   attend    the K tile is in slot s
k_free[s]     each attend, once             CONSUMERS   load      S is computed (k is v: O is updated): refill slot s
v_ready[s]    as k_ready                    1 + bytes   attend    the V tile is in slot s
v_free[s]     each attend, once             CONSUMERS   load      O is updated: refill slot s
landed        load: TMA bytes               1 + bytes   load      a tile with foreign rows is to be zeroed in part

Three attend roles are for rows_loop.py, which uses the parts of this file.
"""

from dsv4.fmha.kernels import loads
from dsv4.fmha.kernels.arguments import Lists, Sizes, Strides, Tensors
from dsv4.fmha.kernels.sm90 import work
from dsv4.fmha.kernels.tiles import PAGES, ROWS, sight
from dsv4.kernels import softmax
from dsv4.kernels.compat import (
    Value,
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@aggregate
class Ring:
    """Tiles of K and V, and their barriers; those of V are K's when k is v."""

    k: Value
    v: Value
    k_ready: Value
    k_free: Value
    v_ready: Value
    v_free: Value


@gluon.jit
def make_ring(DTYPE: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
              SAME_KV: gl.constexpr, HOW: gl.constexpr):  # fmt: skip
    """-> q, ring, landed, barriers initialised.

    A barrier that nobody uses is not made: the compiler gives its place to others, and nothing orders its
    initialisation before what they write there.
    """
    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], DTYPE)
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], DTYPE)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(DTYPE, [4 if CONSUMERS == 3 else CONSUMERS, 64, D], Q)
    k = gl.allocate_shared_memory(DTYPE, [STAGES, BN, D], KV)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v, v_ready, v_free, landed = k, k_ready, k_free, k_ready.index(0)
    if not SAME_KV:
        v = gl.allocate_shared_memory(DTYPE, [STAGES, BN, D], KV)
        v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    if HOW == ROWS or HOW == PAGES:
        landed = gl.allocate_shared_memory(gl.int64, [1], BAR)
        mbarrier.init(landed, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=CONSUMERS)
        if not SAME_KV:
            mbarrier.init(v_ready.index(i), count=1)
            mbarrier.init(v_free.index(i), count=CONSUMERS)
    return q, Ring(k, v, k_ready, k_free, v_ready, v_free), landed


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    slot += 1
    if slot == STAGES:
        slot = 0
        phase = phase ^ 1
    return slot, phase


@gluon.jit
def load_tiles(slot, phase, landed_phase, source, ring, landed, tiles, SAME_KV: gl.constexpr, HOW: gl.constexpr):
    """The load role's part of one row tile: its K and V into the ring from ``slot`` on -> where the ring stands."""
    k, v, where = ring.k, ring.v, source.where
    STAGES: gl.constexpr = k.shape[0]
    BN: gl.constexpr = k.shape[1]
    D: gl.constexpr = k.shape[2]
    for tile in range(tiles.begin, tiles.end):
        row = tiles.first + tile * BN
        mbarrier.wait(ring.k_free.index(slot), phase)
        landed_phase = loads.fill_any(source.k_desc, source.k_cells, k.index(slot), ring.k_ready.index(slot), landed,
                                      landed_phase, where, row, 0, BN, D, HOW)  # fmt: skip
        if not SAME_KV:
            mbarrier.wait(ring.v_free.index(slot), phase)
            landed_phase = loads.fill_any(source.v_desc, source.v_cells, v.index(slot), ring.v_ready.index(slot),
                                          landed, landed_phase, where, row, 0, BN, D, HOW)  # fmt: skip
        slot, phase = next_slot(slot, phase, STAGES)
    return slot, phase, landed_phase


@gluon.jit
def load_role(source, ring, landed, tiles, SAME_KV: gl.constexpr, HOW: gl.constexpr):
    # Phase 1: the first wait on an untouched barrier passes.
    load_tiles(gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(0), source, ring, landed, tiles, SAME_KV, HOW)


@gluon.jit
def scores(q, ring, slot, phase):
    """S [64, BN] of the K tile in ``slot``: issued, not waited for."""
    BN: gl.constexpr = ring.k.shape[1]
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    mbarrier.wait(ring.k_ready.index(slot), phase)
    s = gl.zeros([64, BN], gl.float32, LS)
    return warpgroup_mma(q, ring.k.index(slot).permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def add_values(o, pa, ring, slot, phase, SAME_KV: gl.constexpr):
    """O += P V with the V tile in ``slot``: issued, not waited for."""
    if not SAME_KV:
        mbarrier.wait(ring.v_ready.index(slot), phase)
    return warpgroup_mma(pa, ring.v.index(slot), o, is_async=True)


@gluon.jit
def attend(slot, phase, q, tile_row, ring, share, SAME_KV: gl.constexpr, SPLIT: gl.constexpr, HOW: gl.constexpr,
           SIGN: gl.constexpr):  # fmt: skip
    """The 64 query rows from tile_row on, their first K tile in ``slot`` -> where the ring stands afterwards."""
    tensors, strides, problem, tiles = share.tensors, share.strides, share.problem, share.tiles
    k_free, v_free, scale = ring.k_free, ring.v_free, problem.scale
    STAGES: gl.constexpr = ring.k.shape[0]
    BN: gl.constexpr = ring.k.shape[1]
    D: gl.constexpr = ring.k.shape[2]
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LA: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    RS: gl.constexpr = gl.SliceLayout(1, LS)
    RO: gl.constexpr = gl.SliceLayout(1, LO)

    loads.load_rows(
        tensors.q_ptr, q, tile_row, problem.rows, problem.head, problem.group, strides.qt, strides.qh, 0, 64, D, D, SIGN
    )
    fence_async_shared()
    seen = sight(tile_row, share, 64, BN, HOW, RS)

    o = gl.zeros([64, D], gl.float32, LO)
    m = gl.full([64], -float("inf"), gl.float32, RS)
    l = gl.full([64], 0.0, gl.float32, RS)
    if tiles.begin < tiles.end:
        # S of the first tile
        s = scores(q, ring, slot, phase)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        if not SAME_KV:
            mbarrier.arrive(k_free.index(slot), count=1)
        s = work.mask(s, tiles.first + tiles.begin * BN, seen, HOW)
        p, m, alpha = softmax.step(s, m, scale)
        l = gl.sum(p, 1)
        pa = gl.convert_layout(p.to(q.dtype), LA)

        for tile in range(tiles.begin + 1, tiles.end):  # slot: of the tile whose P is in pa
            after, after_phase = next_slot(slot, phase, STAGES)
            s = scores(q, ring, after, after_phase)
            o = add_values(o, pa, ring, slot, phase, SAME_KV)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            if not SAME_KV:
                mbarrier.arrive(k_free.index(after), count=1)
            s = work.mask(s, tiles.first + tile * BN, seen, HOW)
            p, m, alpha = softmax.step(s, m, scale)
            l = l * alpha + gl.sum(p, 1)
            o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
            mbarrier.arrive(v_free.index(slot), count=1)
            o = o * gl.convert_layout(alpha, RO)[:, None]
            pa = gl.convert_layout(p.to(q.dtype), LA)
            slot = after
            phase = after_phase

        o = add_values(o, pa, ring, slot, phase, SAME_KV)
        o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
        mbarrier.arrive(v_free.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    work.write(o, m, l, q, tile_row, share, 0, D, SPLIT)
    return slot, phase


@gluon.jit
def attend_role(
    q, tile_row, ring, share, SAME_KV: gl.constexpr, SPLIT: gl.constexpr, HOW: gl.constexpr, SIGN: gl.constexpr
):
    attend(gl.to_tensor(0), gl.to_tensor(0), q, tile_row, ring, share, SAME_KV, SPLIT, HOW, SIGN)


@gluon.jit(do_not_specialize=work.NOT_SPECIALIZED)
def fmha_rows(q_ptr, k_desc, v_desc, out_ptr, lse_ptr, sink_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, table_ptr, part_ptr,
              part_lse_ptr, k_ptr, v_ptr, scale, want_lse, total_q, total_k, tokens, keys, kv_heads, group, page_size,
              table_stride, left, right, num_splits, tiles_per_split, stride_qb, stride_qt, stride_qh,
              stride_ob, stride_ot, stride_oh, stride_lb, stride_lt, stride_lh, stride_kp, stride_kr, stride_kh,
              stride_vp, stride_vr, stride_vh,
              D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, HOW: gl.constexpr,
              SIGN: gl.constexpr, SAME_KV: gl.constexpr, SPLIT: gl.constexpr, CONSUMER_REGS: gl.constexpr,
              PRODUCER_REGS: gl.constexpr):  # fmt: skip
    tensors = Tensors(q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr)
    lists = Lists(cu_q_ptr, cu_k_ptr, lengths_ptr, table_ptr)
    sizes = Sizes(total_q, total_k, tokens, keys, kv_heads, group, page_size, table_stride, left, right,
                  num_splits, tiles_per_split)  # fmt: skip
    strides = Strides(stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh, stride_qb, stride_ob, stride_lb)
    k_cells = loads.Cells(k_ptr, total_k, stride_kp, stride_kr, stride_kh)
    v_cells = loads.Cells(v_ptr, total_k, stride_vp, stride_vr, stride_vh)
    place = work.place_of(lists, sizes, k_desc.block_shape[1], 64 * CONSUMERS, BN, HOW)
    tile_row = place.tile_row
    if tile_row < place.rows:
        q, ring, landed = make_ring(k_desc.dtype, D, BN, STAGES, CONSUMERS, SAME_KV, HOW)
        share, source = work.share_of(
            place, tensors, lists, sizes, strides, scale, want_lse, k_desc, v_desc, k_cells, v_cells, HOW
        )
        if CONSUMERS == 1:
            gl.warp_specialize([
                (attend_role, (q.index(0), tile_row, ring, share, SAME_KV, SPLIT, HOW, SIGN)),
                (load_role, (source, ring, landed, share.tiles, SAME_KV, HOW)),
            ], [1], [PRODUCER_REGS])  # fmt: skip
        else:
            gl.static_assert(CONSUMERS == 2)
            gl.warp_specialize([
                (attend_role, (q.index(0), tile_row, ring, share, SAME_KV, SPLIT, HOW, SIGN)),
                (attend_role, (q.index(1), tile_row + 64, ring, share, SAME_KV, SPLIT, HOW, SIGN)),
                (load_role, (source, ring, landed, share.tiles, SAME_KV, HOW)),
            ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
