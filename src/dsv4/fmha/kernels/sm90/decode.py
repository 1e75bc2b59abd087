"""FMHA decode for head dims 64, 128 and 256 on sm_90a: up to 16 packed query rows, operands swapped.

Few rows would be padded to the 64 of a wgmma, and the softmax of all 64 computed. Here keys are the rows of S^T = K Q^T
and of P^T, dimensions those of O^T = V^T P^T; the query rows of a (sequence, KV head) are their ROWS columns. What is
left to do for a tile of keys is to bring it, which is work where K and V are e4m3: four warps convert it on its way. A
CTA takes one split of the keys, and three or so share a multiprocessor::

    load     4 warps   | K1 -> registers, V0 -> registers | K0 -> ring | K2 .. | V0 -> ring | ...
    attend   4 warps   | load Q | S^T of K0 | softmax over keys -> P^T | O^T += V0^T P^T | S^T of K1 ...

shared memory   bytes (16-bit elements)     holds
q               ROWS x D x 2                the query rows; in the end the output rows
k, v            STAGES x BN x D x 2 each    the ring of K tiles and of V tiles (v is k when k is v)
p               BN x ROWS x 2               P^T
row_max         BN / 4 x ROWS               fp32 per 16 keys and row: the maximum of their scores
barriers        8 each

barrier       arrives                       count       waits     means
k_ready[s]    load: itself, or TMA bytes    1 + bytes   attend    the K tile is in slot s
k_free[s]     attend                        CONSUMERS   load      S^T is computed (k is v: O^T updated): refill slot s
v_ready[s]    as k_ready                    1 + bytes   attend    the V tile is in slot s
v_free[s]     attend                        CONSUMERS   load      O^T is updated: refill slot s
landed        load: TMA bytes               1 + bytes   load      a tile with foreign rows is to be zeroed in part

CONSUMERS is 1. P^T is overwritten after the exchange of maxima, before which every warp has waited for O^T += V^T P^T.
"""

from dsv4.fmha.kernels import loads
from dsv4.fmha.kernels.e4m3_rows import in_codes
from dsv4.fmha.kernels.scores import capped, of_values
from dsv4.fmha.kernels.sm90 import work
from dsv4.fmha.kernels.sm90.forward import load_role, make_memory
from dsv4.fmha.kernels.tiles import PAGES, mask_bounds
from dsv4.kernels import softmax
from dsv4.kernels.compat import (
    Value,
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.ring import consumer_stage
from dsv4.kernels.softmax_over_keys import output_layout, partial_sums, scores_layout, softmax_over_keys


@aggregate
class Exchange:
    """What the warps of the attend role hand each other."""

    q: Value
    p: Value
    row_max: Value


@gluon.jit
def make_exchange(q, BN: gl.constexpr):
    ROWS: gl.constexpr = q.shape[0]
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, ROWS], q.dtype)
    p = gl.allocate_shared_memory(q.dtype, [BN, ROWS], P)
    row_max = gl.allocate_shared_memory(gl.float32, [BN // 16, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    return Exchange(q, p, row_max)


@gluon.jit
def finish_scores(s, column, bounds, KV_LOAD: gl.constexpr):
    """work.finish_scores with keys as rows: products k . q [BN, ROWS] of keys from ``column`` on."""
    key = column + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, s.type.layout))
    s = capped(s, bounds.scale)
    if (column < bounds.full_first) | (column + s.shape[0] > bounds.full_end):
        visible = (key[:, None] >= bounds.row_first[None, :]) & (key[:, None] < bounds.row_end[None, :])
        s = gl.where(visible, s, -float("inf"))
    if KV_LOAD >= PAGES:
        if bounds.bad:
            pages = bounds.pages
            page = gl.load(pages.table_ptr + key // pages.page_size, mask=key < bounds.keys, other=0)
            s = gl.where(((page >= 0) & (page < pages.count))[:, None], s, -float("inf"))
    return s


@gluon.jit
def write(o, m, l, q, tile_row, work_tile, SPLIT: gl.constexpr):
    """Normalise O^T [D, ROWS] and write it and the LSE."""
    tensors, strides, tiles, problem = work_tile.tensors, work_tile.strides, work_tile.tiles, work_tile.problem
    D: gl.constexpr = o.shape[0]
    ROWS: gl.constexpr = o.shape[1]
    RS: gl.constexpr = m.type.layout
    LO: gl.constexpr = o.type.layout
    RO: gl.constexpr = gl.SliceLayout(0, LO)
    row = tile_row + gl.arange(0, ROWS, layout=RS)
    token = row // problem.group
    q_head = problem.head * problem.group + row - token * problem.group
    if SPLIT:  # normalised partial result and its LSE in base 2; the combine kernel applies the sink
        factor, lse = softmax.finish(m, l, gl.full([ROWS], -float("inf"), gl.float32, RS))
        part = (tiles.part_row + token.to(gl.int64)) * problem.q_heads + q_head
        gl.store(tensors.part_lse_ptr + part, lse, mask=row < problem.rows)
        if tiles.begin < tiles.end:
            o = o * gl.convert_layout(of_values(factor, problem.score_scale), RO)[None, :]
            column = gl.arange(0, D, layout=gl.SliceLayout(1, LO))
            gl.store(tensors.part_ptr + gl.convert_layout(part, RO)[None, :] * D + column[:, None], o,
                     mask=gl.convert_layout(row < problem.rows, RO)[None, :])  # fmt: skip
    else:
        sink = softmax.sink_of(tensors.sink_ptr, q_head, row < problem.rows)
        factor, lse = softmax.finish(m, l, sink)
        loads.store_lse(
            lse * softmax.LN2, tensors.lse_ptr, token, q_head, strides, (row < problem.rows) & (problem.want_lse != 0)
        )
        o = o * gl.convert_layout(of_values(factor, problem.score_scale), RO)[None, :]
        q.permute((1, 0)).store(o.to(q.dtype))
        loads.store_rows(tensors.out_ptr, q, tile_row, problem.rows, problem.head, problem.group, strides.out_token,
                         strides.out_head, 0, ROWS, D)  # fmt: skip


@gluon.jit
def attend_role(
    exchange, tile_row, kv, work_tile, SAME_KV: gl.constexpr, SPLIT: gl.constexpr, KV_LOAD: gl.constexpr,
    SIGN: gl.constexpr, CODES: gl.constexpr
):  # fmt: skip
    tensors, strides, problem, tiles = work_tile.tensors, work_tile.strides, work_tile.problem, work_tile.tiles
    q, p, k, v = exchange.q, exchange.p, kv.k, kv.v
    ROWS: gl.constexpr = q.shape[0]
    BN: gl.constexpr = k.slots.shape[1]
    D: gl.constexpr = k.slots.shape[2]
    LS: gl.constexpr = scores_layout(4, ROWS, BN)
    LO: gl.constexpr = output_layout(4, ROWS)
    RS: gl.constexpr = gl.SliceLayout(0, LS)
    LP: gl.constexpr = partial_sums(gl.zeros([BN, ROWS], gl.float32, LS)).type.layout
    loads.load_rows(tensors.q_ptr, q, tile_row, problem.rows, problem.head, problem.group, strides.q_token,
                    strides.q_head, 0, ROWS, D, D, SIGN)  # fmt: skip
    fence_async_shared()
    barrier()
    bounds = mask_bounds(tile_row, work_tile, ROWS, BN, KV_LOAD, RS)
    o = gl.zeros([D, ROWS], gl.float32, LO)
    m = gl.full([ROWS], -float("inf"), gl.float32, RS)
    l = gl.zeros([BN // 16, 8, ROWS], gl.float32, LP)
    stage = consumer_stage()
    for tile in range(tiles.begin, tiles.end):
        k.wait(stage)
        if CODES:
            fence_async_shared()  # stores of the load role -> tensor-core reads
        s = gl.zeros([BN, ROWS], gl.float32, LS)
        s = warpgroup_mma(k.slot(stage), q.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        if not SAME_KV:
            k.release(stage)
        s = finish_scores(s, tiles.first + tile * BN, bounds, KV_LOAD)
        x, m, factor = softmax_over_keys(s, m, problem.scale, exchange.row_max)
        l = l * gl.convert_layout(factor, gl.SliceLayout(0, gl.SliceLayout(1, LP)))[None, None, :] + partial_sums(x)
        p.store(x.to(p.dtype))
        o = o * gl.convert_layout(factor, gl.SliceLayout(0, LO))[None, :]
        if not SAME_KV:
            v.wait(stage)
        fence_async_shared()
        barrier()
        o = warpgroup_mma(v.slot(stage).permute((1, 0)), p, o, is_async=True)
        o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
        v.release(stage)
        stage = k.next(stage)
    l = gl.convert_layout(gl.sum(gl.sum(l, 0), 0), RS)
    write(o, m, l, q, tile_row, work_tile, SPLIT)


@gluon.jit
def fmha_decode(
    tensors,
    k_desc,
    v_desc,
    sizes,
    strides,
    opts,
    D: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    KV_LOAD: gl.constexpr,
    SIGN: gl.constexpr,
    SAME_KV: gl.constexpr,
    SPLIT: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    LOAD_WARPS: gl.constexpr,
):
    coord = work.block_coord(tensors, sizes, opts, loads.box_rows(k_desc), ROWS, BN, KV_LOAD)
    tile_row = coord.tile_row
    CODES: gl.constexpr = in_codes(tensors.k_ptr.dtype)
    if tile_row < coord.rows:
        DTYPE: gl.constexpr = tensors.q_ptr.dtype.element_ty
        q, kv, landed = make_memory(DTYPE, D, BN, STAGES, 1, SAME_KV, KV_LOAD, CODES, ROWS)
        exchange = make_exchange(q.index(0), BN)
        work_tile, source = work.make_work_tile(coord, tensors, sizes, strides, opts, k_desc, v_desc, KV_LOAD)
        gl.warp_specialize([
            (attend_role, (exchange, tile_row, kv, work_tile, SAME_KV, SPLIT, KV_LOAD, SIGN, CODES)),
            (load_role, (source, kv, landed, work_tile.tiles, SAME_KV, KV_LOAD)),
        ], [LOAD_WARPS], [PRODUCER_REGS])  # fmt: skip
