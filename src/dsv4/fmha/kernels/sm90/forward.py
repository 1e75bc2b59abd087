"""FMHA forward for head dims 64, 128 and 256 on sm_90a: prefill (CONSUMERS = 2) and split-KV decode (CONSUMERS = 1).

One CTA processes 64 * CONSUMERS packed query rows of one (sequence, KV head), and its keys in tiles of BN::

    load      1 warp    | K0 V0 | K1 V1 | K2 V2 | ...
    attend w  4 warps   | load Q | S0 | softmax 0 | issue S1, O += P0 V0 | softmax 1 during O's wgmma | rescale O | ...

Each attend role is one warpgroup with its own 64 rows: S = Q K^T [64, BN] and O [64, D] in registers. S of the next
tile is issued before P V of this one, so a tensor-core operation is in flight during every softmax. If K and V are
e4m3, the load role has 4 warps and converts them (e4m3_rows.py).

shared memory   bytes (16-bit elements)            holds
q               CONSUMERS x 64 x D x 2             each attend role's query rows; finally its output rows
k, v            STAGES x BN x D x 2 each           the ring of K tiles and of V tiles (v is k when k is v)
barriers        8 each

barrier       arrives                       count       waits     means
k_ready[s]    load: TMA bytes, or itself    1 + bytes   attend    the K tile is in slot s
k_free[s]     each attend, once             CONSUMERS   load      S is computed (k is v: O is updated): refill slot s
v_ready[s]    as k_ready                    1 + bytes   attend    the V tile is in slot s
v_free[s]     each attend, once             CONSUMERS   load      O is updated: refill slot s
landed        load: TMA bytes               1 + bytes   load      a tile with rows of others is to be zeroed in part

Only forward_persistent.py, which uses the parts of this file, has three attend roles.
"""

from dsv4.fmha.kernels import e4m3_rows, loads
from dsv4.fmha.kernels.arguments import query_rows
from dsv4.fmha.kernels.e4m3_rows import in_codes
from dsv4.fmha.kernels.sm90 import work
from dsv4.fmha.kernels.tiles import DENSE, PAGES, ROWS, mask_bounds
from dsv4.kernels import softmax
from dsv4.kernels.compat import aggregate, fence_async_shared, gl, gluon, to_operand, warpgroup_mma, warpgroup_mma_wait
from dsv4.kernels.ring import Ring, consumer_stage, init_barriers, new_barriers, new_ring, producer_stage


@aggregate
class KeyValues:
    """The rings of K and of V tiles, which are always at the same stage; one ring if k is v."""

    k: Ring
    v: Ring


@gluon.jit
def make_memory(
    DTYPE: gl.constexpr,
    D: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    SAME_KV: gl.constexpr,
    KV_LOAD: gl.constexpr,
    PLACES: gl.constexpr,
    CODES: gl.constexpr = False,
):
    """Return (q, rings, landed). PLACES: for 64 query rows each; CODES: K and V are e4m3."""
    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], DTYPE)
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], DTYPE)
    q = gl.allocate_shared_memory(DTYPE, [PLACES, 64, D], Q)
    k = new_ring(gl.allocate_shared_memory(DTYPE, [STAGES, BN, D], KV), CONSUMERS)
    v = k
    barriers = (k.ready, k.free)
    if not SAME_KV:
        v = new_ring(gl.allocate_shared_memory(DTYPE, [STAGES, BN, D], KV), CONSUMERS)
        barriers += (v.ready, v.free)
    landed = k.ready  # unused
    if not CODES and (KV_LOAD == ROWS or KV_LOAD == PAGES):
        landed = new_barriers(1)
        barriers += (landed,)
    init_barriers(barriers)
    return q, KeyValues(k, v), landed


@gluon.jit
def load_tiles(
    stage,
    landed_phase,
    source,
    kv,
    landed,
    tiles,
    SAME_KV: gl.constexpr,
    KV_LOAD: gl.constexpr,
    DOWN: gl.constexpr = False,
    COLUMNS: gl.constexpr = None,
    V_COLUMNS: gl.constexpr = None,
):
    """Load K and V of one row tile into the rings from ``stage`` on; return the next stage and phase of landed. DOWN:
    tile 0 is the last one. COLUMNS, V_COLUMNS: the columns of K and V that are loaded; None is all."""
    k, v, where = kv.k, kv.v, source.where
    BN: gl.constexpr = k.slots.shape[1]
    D: gl.constexpr = k.slots.shape[2]
    CK: gl.constexpr = D if COLUMNS is None else COLUMNS
    CV: gl.constexpr = D if V_COLUMNS is None else V_COLUMNS
    # Keys of another sequence may stay, because their scores are masked. Values may not: 0 * NaN is NaN.
    K_LOAD: gl.constexpr = DENSE if KV_LOAD == ROWS and not SAME_KV else KV_LOAD
    for tile in range(tiles.begin, tiles.end):
        row = tiles.first + (-tile if DOWN else tile) * BN
        k.acquire(stage)
        landed_phase = loads.fill_any(
            source.k_desc,
            source.k_rows,
            k.slot(stage),
            k.ready_at(stage),
            landed.at(0),
            landed_phase,
            where,
            row,
            0,
            BN,
            CK,
            K_LOAD,
        )
        if not SAME_KV:
            v.acquire(stage)
            landed_phase = loads.fill_any(
                source.v_desc,
                source.v_rows,
                v.slot(stage),
                v.ready_at(stage),
                landed.at(0),
                landed_phase,
                where,
                row,
                0,
                BN,
                CV,
                KV_LOAD,
            )
        stage = k.next(stage)
    return stage, landed_phase


@gluon.jit
def load_codes_tiles(source, kv, tiles, SAME_KV: gl.constexpr, PAGED: gl.constexpr):
    """Do the same for e4m3, through registers: K of the next tile and V of this one are in flight while others are
    converted, and page numbers are loaded one tile ahead of them."""
    k, v, where = kv.k, kv.v, source.where
    BN: gl.constexpr = k.slots.shape[1]
    D: gl.constexpr = k.slots.shape[2]
    pages = source.k_rows.pages
    row = tiles.first + tiles.begin * BN
    end = gl.minimum(where.keys, tiles.first + tiles.end * BN)
    here = e4m3_rows.find(where, pages, row, end, BN, PAGED)
    k_codes = e4m3_rows.load_codes(source.k_rows, where.head, here, 0, BN, D)
    stage = producer_stage()
    for _ in range(tiles.begin, tiles.end):
        if not SAME_KV:
            v_codes = e4m3_rows.load_codes(source.v_rows, where.head, here, 0, BN, D)
        row += BN
        here = e4m3_rows.find(where, pages, row, end, BN, PAGED)
        k.acquire(stage)
        e4m3_rows.put(k_codes, k.slot(stage), 0)
        e4m3_rows.announce(k.ready_at(stage))
        k_codes = e4m3_rows.load_codes(source.k_rows, where.head, here, 0, BN, D)
        if not SAME_KV:
            v.acquire(stage)
            e4m3_rows.put(v_codes, v.slot(stage), 0)
            e4m3_rows.announce(v.ready_at(stage))
        stage = k.next(stage)


@gluon.jit
def load_codes_halves(source, kv, tiles, SAME_KV: gl.constexpr, PAGED: gl.constexpr):
    """Do what load_codes_tiles does if a tile has more codes than registers hold twice: half a tile at a time, with the
    next half in flight."""
    k, v, where = kv.k, kv.v, source.where
    BN: gl.constexpr = k.slots.shape[1]
    D: gl.constexpr = k.slots.shape[2]
    HALF: gl.constexpr = BN // 2
    pages = source.k_rows.pages
    row = tiles.first + tiles.begin * BN
    end = gl.minimum(where.keys, tiles.first + tiles.end * BN)
    upper = e4m3_rows.find(where, pages, row, end, HALF, PAGED)
    lower = e4m3_rows.find(where, pages, row + HALF, end, HALF, PAGED)
    x = e4m3_rows.load_codes(source.k_rows, where.head, upper, 0, HALF, D)
    y = e4m3_rows.load_codes(source.k_rows, where.head, lower, 0, HALF, D)
    stage = producer_stage()
    for _ in range(tiles.begin, tiles.end):
        k.acquire(stage)
        slot = k.slot(stage)
        if not SAME_KV:
            e4m3_rows.put(x, slot, 0)
            x = e4m3_rows.load_codes(source.v_rows, where.head, upper, 0, HALF, D)
            e4m3_rows.put(y, slot, HALF)
            e4m3_rows.announce(k.ready_at(stage))
            y = e4m3_rows.load_codes(source.v_rows, where.head, lower, 0, HALF, D)
            v.acquire(stage)
            slot = v.slot(stage)
        row += BN
        upper = e4m3_rows.find(where, pages, row, end, HALF, PAGED)
        lower = e4m3_rows.find(where, pages, row + HALF, end, HALF, PAGED)
        e4m3_rows.put(x, slot, 0)
        x = e4m3_rows.load_codes(source.k_rows, where.head, upper, 0, HALF, D)
        e4m3_rows.put(y, slot, HALF)
        e4m3_rows.announce(v.ready_at(stage))
        y = e4m3_rows.load_codes(source.k_rows, where.head, lower, 0, HALF, D)
        stage = k.next(stage)


@gluon.jit
def load_role(source, kv, landed, tiles, SAME_KV: gl.constexpr, KV_LOAD: gl.constexpr):
    BN: gl.constexpr = kv.k.slots.shape[1]
    if not in_codes(source.k_rows.ptr.dtype):
        load_tiles(producer_stage(), gl.to_tensor(0), source, kv, landed, tiles, SAME_KV, KV_LOAD)
    elif e4m3_rows.keys_at_a_time(BN, kv.k.slots.shape[2], gl.num_warps()) == BN:
        load_codes_tiles(source, kv, tiles, SAME_KV, KV_LOAD >= PAGES)
    else:
        load_codes_halves(source, kv, tiles, SAME_KV, KV_LOAD >= PAGES)


@gluon.jit
def scores(q, k, stage, CODES: gl.constexpr = False):
    """Return S [64, BN] of a K tile: issued, not waited for."""
    BN: gl.constexpr = k.slots.shape[1]
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    k.wait(stage)
    if CODES:
        fence_async_shared()  # stores of the load role -> tensor-core reads
    s = gl.zeros([64, BN], gl.float32, LS)
    return warpgroup_mma(q, k.slot(stage).permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def add_values(o, pa, v, stage, SAME_KV: gl.constexpr, CODES: gl.constexpr = False):
    """Return O + P V with a V tile: issued, not waited for."""
    if not SAME_KV:
        v.wait(stage)
        if CODES:
            fence_async_shared()
    return warpgroup_mma(pa, v.slot(stage), o, is_async=True)


@gluon.jit
def attend(
    stage,
    q,
    tile_row,
    kv,
    work_tile,
    SAME_KV: gl.constexpr,
    SPLIT: gl.constexpr,
    KV_LOAD: gl.constexpr,
    SIGN: gl.constexpr,
    CODES: gl.constexpr = False,
):
    """Process the 64 query rows from tile_row on, whose first K tile is at ``stage``; return the next stage."""
    problem, tiles = work_tile.problem, work_tile.tiles
    k, v, scale = kv.k, kv.v, problem.scale
    BN: gl.constexpr = k.slots.shape[1]
    D: gl.constexpr = k.slots.shape[2]
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LA: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    RS: gl.constexpr = gl.SliceLayout(1, LS)
    OWN: gl.constexpr = not CODES  # with codes there are too few registers for sums and bounds by thread

    loads.load_rows(query_rows(work_tile), q, tile_row, 0, 64, D, D, SIGN)
    fence_async_shared()
    bounds = mask_bounds(tile_row, work_tile, 64, BN, KV_LOAD, RS)

    o = gl.zeros([64, D], gl.float32, LO)
    m = gl.full([64], softmax.LOWEST, gl.float32, RS)
    l = gl.full([64], 0.0, gl.float32, RS)
    if tiles.begin < tiles.end:
        # S of the first tile
        s = scores(q, k, stage, CODES)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        if not SAME_KV:
            k.release(stage)
        s = work.finish_scores(s, tiles.first + tiles.begin * BN, bounds, KV_LOAD, OWN)
        p, m, alpha = work.step(s, m, scale, D)
        own = softmax.partial_sums(p) if OWN else gl.sum(p, 1)
        pa = gl.convert_layout(to_operand(p, q), LA)

        for tile in range(tiles.begin + 1, tiles.end):  # stage: of the tile whose P is in pa
            after = k.next(stage)
            s = scores(q, k, after, CODES)
            o = add_values(o, pa, v, stage, SAME_KV, CODES)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            if not SAME_KV:
                k.release(after)
            s = work.finish_scores(s, tiles.first + tile * BN, bounds, KV_LOAD, OWN)
            p, m, alpha = work.step(s, m, scale, D)
            own = work.add_sums(own, alpha, p) if OWN else own * alpha + gl.sum(p, 1)
            o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
            v.release(stage)
            o = softmax.rescale(o, alpha)
            pa = gl.convert_layout(to_operand(p, q), LA)
            stage = after

        o = add_values(o, pa, v, stage, SAME_KV, CODES)
        o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
        v.release(stage)
        stage = k.next(stage)
        l = gl.convert_layout(gl.sum(own, 1), RS) if OWN else own
    work.write(o, m, l, q, tile_row, work_tile, 0, D, SPLIT)
    return stage


@gluon.jit
def attend_role(
    q,
    tile_row,
    kv,
    work_tile,
    SAME_KV: gl.constexpr,
    SPLIT: gl.constexpr,
    KV_LOAD: gl.constexpr,
    SIGN: gl.constexpr,
    CODES: gl.constexpr,
):
    attend(consumer_stage(), q, tile_row, kv, work_tile, SAME_KV, SPLIT, KV_LOAD, SIGN, CODES)


@gluon.jit
def fmha_forward(
    tensors,
    k_desc,
    v_desc,
    sizes,
    strides,
    opts,
    D: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    KV_LOAD: gl.constexpr,
    SIGN: gl.constexpr,
    SAME_KV: gl.constexpr,
    SPLIT: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    LOAD_WARPS: gl.constexpr = 1,
):
    work.clear_rest(tensors, sizes, strides, opts, D, KV_LOAD, SPLIT)
    coord = work.block_coord(tensors, sizes, opts, loads.box_rows(k_desc), 64 * CONSUMERS, BN, KV_LOAD)
    tile_row = coord.tile_row
    CODES: gl.constexpr = in_codes(tensors.k_ptr.dtype)
    if tile_row < coord.rows:
        q, kv, landed = make_memory(
            tensors.q_ptr.dtype.element_ty, D, BN, STAGES, CONSUMERS, SAME_KV, KV_LOAD, CONSUMERS, CODES
        )
        work_tile, source = work.make_work_tile(coord, tensors, sizes, strides, opts, k_desc, v_desc, KV_LOAD)
        if CONSUMERS == 1:
            gl.warp_specialize(
                [
                    (attend_role, (q.index(0), tile_row, kv, work_tile, SAME_KV, SPLIT, KV_LOAD, SIGN, CODES)),
                    (load_role, (source, kv, landed, work_tile.tiles, SAME_KV, KV_LOAD)),
                ],
                [LOAD_WARPS],
                [PRODUCER_REGS],
            )
        else:
            gl.static_assert(CONSUMERS == 2)
            gl.warp_specialize(
                [
                    (attend_role, (q.index(0), tile_row, kv, work_tile, SAME_KV, SPLIT, KV_LOAD, SIGN, CODES)),
                    (attend_role, (q.index(1), tile_row + 64, kv, work_tile, SAME_KV, SPLIT, KV_LOAD, SIGN, CODES)),
                    (load_role, (source, kv, landed, work_tile.tiles, SAME_KV, KV_LOAD)),
                ],
                [4, LOAD_WARPS],
                [CONSUMER_REGS, PRODUCER_REGS],
            )
