"""FMHA decode of FP8 caches for head dims 64, 128 and 256 on sm_90a: up to 16 packed query rows, operands swapped.

Otherwise few rows would be padded to the 64 of a wgmma, and the softmax computed for all 64. Here keys are the rows of
S^T = K Q^T and of P^T, and dimensions are the rows of O^T = V^T P^T; the query rows of a (sequence, KV head) are their
ROWS columns. K and V are then the operands that may be in registers: shared memory holds e4m3 as loaded, and threads
convert what they need. A CTA processes one split of the keys, and two CTAs share an SM::

    load     1 warp    | K0 V0 | K1 V1 | K2 V2 | ...
    attend   4 warps   | load Q | K0 -> registers | S^T, V0 -> registers | softmax over keys -> P^T | O^T += V0^T P^T ..

The order of the columns of K in an operand does not matter, as long as Q's are in the same order; nor does the order of
the rows of V^T, if those of O^T are reordered at the end. So threads read whole words without bank conflicts: see
key_layout and value_layout.

shared memory   bytes                       holds
q               ROWS x D x 2                the query rows, columns in the order of key_columns; finally the output
k, v            STAGES x BN x D each        the ring of K tiles and of V tiles, e4m3 (v is k when k is v)
p               BN x ROWS x 2               P^T
row_max         BN / 4 x ROWS               fp32 per 16 keys and row: the maximum of their scores
barriers        8 each

barrier       arrives           count       waits     means
k_ready[s]    load: TMA bytes   1 + bytes   attend    the K tile is in slot s
k_free[s]     attend            1           load      it is in registers (k is v: as V too): refill slot s
v_ready[s]    load: TMA bytes   1 + bytes   attend    the V tile is in slot s
v_free[s]     attend            1           load      it is in registers: refill slot s

P^T is overwritten after the exchange of maxima, before which every warp has waited for O^T += V^T P^T. Invisible
rows need not be zero: every code becomes a finite number (e4m3_rows.py), and its P is 0.
"""

from dsv4.fmha.kernels import loads
from dsv4.fmha.kernels.arguments import output_rows, query_rows
from dsv4.fmha.kernels.e4m3_rows import converted
from dsv4.fmha.kernels.scores import capped, of_values
from dsv4.fmha.kernels.sm90 import work
from dsv4.fmha.kernels.sm90.forward import KeyValues
from dsv4.fmha.kernels.tiles import PAGES, mask_bounds, token_and_head
from dsv4.kernels import softmax
from dsv4.kernels.compat import (
    Value,
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.ring import consumer_stage, init_barriers, new_ring, producer_stage
from dsv4.kernels.softmax_over_keys import output_layout, partial_sums, scores_layout, softmax_over_keys


@aggregate
class Exchange:
    """Shared memory in which the warps of the attend role exchange values."""

    q: Value
    p: Value
    row_max: Value


@gluon.jit
def make_memory(
    DTYPE: gl.constexpr,
    D: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    SAME_KV: gl.constexpr,
):
    """Return (Exchange, rings)."""
    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], DTYPE)
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, ROWS], DTYPE)
    KV: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=min(D, 128), element_bitwidth=8, rank=2)
    q = gl.allocate_shared_memory(DTYPE, [ROWS, D], Q)
    p = gl.allocate_shared_memory(DTYPE, [BN, ROWS], P)
    row_max = gl.allocate_shared_memory(gl.float32, [BN // 16, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    k = new_ring(gl.allocate_shared_memory(gl.uint8, [STAGES, BN, D], KV))
    v = k
    barriers = (k.ready, k.free)
    if not SAME_KV:
        v = new_ring(gl.allocate_shared_memory(gl.uint8, [STAGES, BN, D], KV))
        barriers += (v.ready, v.free)
    init_barriers(barriers)
    return Exchange(q, p, row_max), KeyValues(k, v)


@gluon.constexpr_function
def _bases(first, end):
    """Return the powers of two from ``first`` on, below ``end``."""
    return [1 << i for i in range(first.bit_length() - 1, end.bit_length() - 1)]


@gluon.constexpr_function
def key_layout(keys, d):
    """Return the layout of codes [keys, d] of K: of 128 columns a thread has 32 consecutive ones (of 64: 16), in two of
    16 rows, as in an operand."""
    own = min(d, 128) // 4  # consecutive columns
    return gl.DistributedLinearLayout(
        reg_bases=[*([0, n] for n in _bases(1, own)), *([0, n] for n in _bases(128, max(d, 128))), [8, 0],
                   *([n, 0] for n in _bases(64, keys))],
        lane_bases=[[0, own], [0, 2 * own], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[keys, d],
    )  # fmt: skip


@gluon.jit
def key_columns(x, D: gl.constexpr):
    """Return x [rows, D] with its columns in the order of an operand from key_layout: in every 16, four threads have
    two columns each, then two more."""
    C: gl.constexpr = min(D, 128)
    x = x.reshape([x.shape[0], D // C, 4, C // 16, 2, 2])  # panel, thread, product, half, pair
    return x.permute((0, 1, 3, 4, 2, 5)).reshape([x.shape[0], D])


@gluon.constexpr_function
def value_layout(keys, d):
    """Return the layout of codes [keys, d] of V: a thread has d / 32 consecutive columns of its keys in an operand
    V^T."""
    own = d // 32
    return gl.DistributedLinearLayout(
        reg_bases=[*([0, n] for n in _bases(1, own)), [1, 0], [8, 0], *([n, 0] for n in _bases(16, keys))],
        lane_bases=[[2, 0], [4, 0], [0, own], [0, 2 * own], [0, 4 * own]],
        warp_bases=[[0, 8 * own], [0, 16 * own]],
        block_bases=[],
        shape=[keys, d],
    )


@gluon.jit
def value_rows(x, D: gl.constexpr):
    """Return V [keys, D] as V^T, with its rows in the order of an operand from value_layout."""
    x = x.reshape([x.shape[0], 4, 8, D // 64, 2])  # warp, row of eight, product, upper or lower eight
    return x.permute((3, 1, 4, 2, 0)).reshape([D, x.shape[0]])


@gluon.jit
def load_role(source, kv, tiles, SAME_KV: gl.constexpr, KV_LOAD: gl.constexpr):
    k, v, where = kv.k, kv.v, source.where
    BN: gl.constexpr = k.slots.shape[1]
    D: gl.constexpr = k.slots.shape[2]
    stage = producer_stage()
    for tile in range(tiles.begin, tiles.end):
        row = tiles.first + tile * BN
        k.acquire(stage)
        mbarrier.expect(k.ready_at(stage), BN * D)
        loads.issue(source.k_desc, k.slot(stage), k.ready_at(stage), where, row, 0, BN, D, KV_LOAD)
        if not SAME_KV:
            v.acquire(stage)
            mbarrier.expect(v.ready_at(stage), BN * D)
            loads.issue(source.v_desc, v.slot(stage), v.ready_at(stage), where, row, 0, BN, D, KV_LOAD)
        stage = k.next(stage)


@gluon.jit
def finish_scores(s, column, bounds, KV_LOAD: gl.constexpr):
    """Do what work.finish_scores does, with keys as rows: products k . q [BN, ROWS] of keys from ``column`` on."""
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
    """Normalise O^T [D, ROWS], whose rows are in the order of value_rows, and write it and the LSE."""
    tensors, strides, tiles, problem = work_tile.tensors, work_tile.strides, work_tile.tiles, work_tile.problem
    D: gl.constexpr = o.shape[0]
    ROWS: gl.constexpr = o.shape[1]
    o = o.reshape([D // 64, 4, 2, 8, ROWS]).permute((1, 3, 0, 2, 4)).reshape([D, ROWS])
    RS: gl.constexpr = m.type.layout
    LO: gl.constexpr = o.type.layout
    RO: gl.constexpr = gl.SliceLayout(0, LO)
    row = tile_row + gl.arange(0, ROWS, layout=RS)
    token, q_head = token_and_head(row, problem.head, problem.group)
    m = softmax.true_maximum(m, problem.scale)
    if SPLIT:  # normalised partial result and its LSE in base 2; the combine kernel applies the sink
        factor, lse = softmax.finish(m, l, gl.full([ROWS], -float("inf"), gl.float32, RS))
        part = (tiles.part_row + token.to(gl.int64)) * problem.q_heads + q_head
        gl.store(tensors.part_lse_ptr + part, lse, mask=row < problem.rows)
        if tiles.begin < tiles.end:
            o = o * gl.convert_layout(of_values(factor, problem.score_scale), RO)[None, :]
            column = gl.arange(0, D, layout=gl.SliceLayout(1, LO))
            gl.store(
                tensors.part_ptr + gl.convert_layout(part, RO)[None, :] * D + column[:, None],
                o,
                mask=gl.convert_layout(row < problem.rows, RO)[None, :],
            )
    else:
        sink = softmax.sink_of(tensors.sink_ptr, q_head, row < problem.rows)
        factor, lse = softmax.finish(m, l, sink)
        loads.store_lse(
            lse * softmax.LN2, tensors.lse_ptr, token, q_head, strides, (row < problem.rows) & (problem.want_lse != 0)
        )
        o = o * gl.convert_layout(of_values(factor, problem.score_scale), RO)[None, :]
        q.permute((1, 0)).store(o.to(q.dtype))
        loads.store_rows(output_rows(work_tile), q, tile_row, 0, ROWS, D)


@gluon.jit
def load_queries(q, tile_row, work_tile, SIGN: gl.constexpr):
    """Load the query rows, times SIGN; rows that do not exist become zeros."""
    rows = query_rows(work_tile)
    ROWS: gl.constexpr = q.shape[0]
    D: gl.constexpr = q.shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = tile_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    offset = loads.row_offsets(row, rows)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    x = gl.load(rows.ptr + offset[:, None] + column[None, :], mask=(row < rows.count)[:, None], other=0.0)
    if SIGN <= 0:
        x = x * SIGN
    q.store(key_columns(x, D))
    fence_async_shared()
    barrier()


@gluon.jit
def attend_role(
    exchange,
    tile_row,
    kv,
    work_tile,
    SAME_KV: gl.constexpr,
    SPLIT: gl.constexpr,
    KV_LOAD: gl.constexpr,
    SIGN: gl.constexpr,
):
    problem, tiles = work_tile.problem, work_tile.tiles
    q, p, k, v = exchange.q, exchange.p, kv.k, kv.v
    ROWS: gl.constexpr = q.shape[0]
    BN: gl.constexpr = k.slots.shape[1]
    D: gl.constexpr = k.slots.shape[2]
    LS: gl.constexpr = scores_layout(4, ROWS, BN)
    LO: gl.constexpr = output_layout(4, ROWS)
    RS: gl.constexpr = gl.SliceLayout(0, LS)
    LP: gl.constexpr = partial_sums(gl.zeros([BN, ROWS], gl.float32, LS)).type.layout
    load_queries(q, tile_row, work_tile, SIGN)
    bounds = mask_bounds(tile_row, work_tile, ROWS, BN, KV_LOAD, RS)
    o = gl.zeros([D, ROWS], gl.float32, LO)
    m = gl.full([ROWS], softmax.LOWEST, gl.float32, RS)
    l = gl.zeros([BN // 16, 8, ROWS], gl.float32, LP)
    stage = consumer_stage()
    for tile in range(tiles.begin, tiles.end):
        k.wait(stage)
        x = k.slot(stage).load(key_layout(BN, D))
        if not SAME_KV:
            k.release(stage)
        x = gl.convert_layout(key_columns(converted(x, q), D), gl.DotOperandLayout(0, LS, 2), assert_trivial=True)
        s = gl.zeros([BN, ROWS], gl.float32, LS)
        s = warpgroup_mma(x, q.permute((1, 0)), s, use_acc=False, is_async=True)
        if not SAME_KV:
            v.wait(stage)
        y = v.slot(stage).load(value_layout(BN, D))
        v.release(stage)
        y = gl.convert_layout(value_rows(converted(y, q), D), gl.DotOperandLayout(0, LO, 2), assert_trivial=True)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        s = finish_scores(s, tiles.first + tile * BN, bounds, KV_LOAD)
        e, m, factor = softmax_over_keys(s, m, problem.scale, exchange.row_max)
        l = l * gl.convert_layout(factor, gl.SliceLayout(0, gl.SliceLayout(1, LP)))[None, None, :] + partial_sums(e)
        p.store(e.to(p.dtype))
        o = o * gl.convert_layout(factor, gl.SliceLayout(0, LO))[None, :]
        fence_async_shared()
        barrier()
        o = warpgroup_mma(y, p, o, is_async=True)
        o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
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
):
    work.clear_rest(tensors, sizes, strides, opts, D, KV_LOAD, SPLIT)
    coord = work.block_coord(tensors, sizes, opts, k_desc.block_shape[1], ROWS, BN, KV_LOAD)
    tile_row = coord.tile_row
    if tile_row < coord.rows:
        exchange, kv = make_memory(tensors.q_ptr.dtype.element_ty, D, BN, STAGES, ROWS, SAME_KV)
        work_tile, source = work.make_work_tile(coord, tensors, sizes, strides, opts, k_desc, v_desc, KV_LOAD)
        gl.warp_specialize(
            [
                (attend_role, (exchange, tile_row, kv, work_tile, SAME_KV, SPLIT, KV_LOAD, SIGN)),
                (load_role, (source, kv, work_tile.tiles, SAME_KV, KV_LOAD)),
            ],
            [1],
            [PRODUCER_REGS],
        )
