"""The kernel of rows.py for large dense problems: one CTA per multiprocessor, which loops over row tiles.

The load warp runs ahead into the next row tile while the attend roles write their output. Role chart::

    load      1 warp    | K, V of tile a ...          | K, V of tile b ...
    attend w  4 warps   | Q | S, softmax, O += P V ...| write O | Q | S (K already there) ...

With EARLY the next Q is copied into its place as soon as the last S is computed, by cp.async, and O is written from
registers meanwhile, since its way through q is taken::

    attend w  4 warps   | S, softmax, O += P V ... | ask for Q, O += P V, write O | wait for Q | S (K already there) ...

With EVEN every row sees every key of every tile, and nothing is masked. The order of instructions is ptxas's, which
has two bad habits: it keeps what a mask compares with in 32 registers through the loop (so `see_apart`), and it puts
the softmax behind the wait for O += P V (so `softmax.pin`). Then each thread adds up its own part of the row sums, O is
rescaled only where a maximum grew by more than 8, and at head dim 128 there are registers for Q.

There are two attend roles, or three. Shared memory and barriers are those of rows.py; the ring's slot and phase carry
over from tile to tile. Every item has a tile of keys, if only one that none of its rows sees.

CTA c takes items c, c + CTAs, ... of this list: blocks of as many (sequence, head) as have about one tile for every
CTA, or of one where nothing is causal and all tiles are alike; within a block, the tiles by their place in the
sequence, those of all heads side by side; every other block backwards, the last one from its longest causal tiles on.
So a CTA gets long and short tiles by turns, those that have one item more than others get the shortest, and the heads
whose keys are read at one time are few.
"""

from dsv4.fmha.kernels import loads
from dsv4.fmha.kernels.arguments import Problem, Share, Source, Strides, Tensors, Tiles
from dsv4.fmha.kernels.sm90 import rows, work
from dsv4.fmha.kernels.tiles import DENSE, NO_BOUND, Pages, end_key, first_key, sight
from dsv4.kernels import softmax
from dsv4.kernels.compat import (
    Value,
    aggregate,
    async_copy,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma_wait,
)

NO = gl.constexpr(NO_BOUND)


@aggregate
class Scan:
    """What is walked over."""

    row_tiles: Value  # of a (sequence, KV head)
    pairs: Value  # (sequence, KV head)
    together: Value  # of these in a block
    items: Value
    kv_heads: Value
    group: Value
    tokens: Value
    keys: Value
    left: Value
    right: Value


@aggregate
class Keys:
    """Where K and V of all sequences come from."""

    k_desc: Value
    v_desc: Value
    k_cells: loads.Cells
    v_cells: loads.Cells
    pages: Pages


@gluon.jit
def scan_of(sequences, kv_heads, group, tokens, keys, left, right, M: gl.constexpr):
    row_tiles = (tokens * group + M - 1) // M
    pairs = sequences * kv_heads
    together = gl.minimum(gl.maximum((gl.num_programs(0) + row_tiles // 2) // row_tiles, 1), pairs)
    together = gl.where(right >= NO, 1, together)  # without a mask on the right all tiles are alike
    return Scan(row_tiles, pairs, together, row_tiles * pairs, kv_heads, group, tokens, keys, left, right)


@gluon.jit
def locate(item, scan, BN: gl.constexpr, M: gl.constexpr):
    """(sequence, KV head, first row, first key, key tiles) of an item."""
    row_tiles, together, group, tokens, keys = scan.row_tiles, scan.together, scan.group, scan.tokens, scan.keys
    block = item // (row_tiles * together)
    width = gl.minimum(together, scan.pairs - block * together)
    inner = item - block * row_tiles * together
    tile = inner // width
    pair = block * together + inner - tile * width
    tile_row = gl.where(((scan.pairs - 1) // together - block) % 2 == 0, row_tiles - 1 - tile, tile) * M
    first = first_key(tile_row // group, tokens, keys, scan.left)
    end = end_key(gl.minimum((tile_row + M - 1) // group, tokens - 1), tokens, keys, scan.right)
    return pair // scan.kv_heads, pair % scan.kv_heads, tile_row, first, gl.maximum(end - first + BN - 1, BN) // BN


@gluon.jit
def course(scan, M: gl.constexpr):
    """(first, end, step) of what the roles count: with three attend roles turns, with two items, since ptxas makes the
    better loops of these. Of the other ones it makes, with three, a softmax that takes the two rows of a thread one
    after the other, 1103 static cycles a step instead of 966; with two, loops that differ in their speed alone."""
    if M == 192:
        return 0, (scan.items - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0), 1
    else:
        return gl.program_id(0), scan.items, gl.num_programs(0)


@gluon.jit
def item_of(at, M: gl.constexpr):
    if M == 192:
        return gl.program_id(0) + at * gl.num_programs(0)
    else:
        return at


@gluon.jit
def whole(first, tiles):
    """All tiles of keys of an item."""
    return Tiles(first, gl.to_tensor(0), tiles, gl.to_tensor(-1))


@gluon.jit
def load_role(source, ring, landed, scan, M: gl.constexpr, SAME_KV: gl.constexpr):
    BN: gl.constexpr = ring.k.shape[1]
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # the first wait on an untouched barrier passes
    landed_phase = gl.to_tensor(0)
    begin, end, step = course(scan, M)
    for at in range(begin, end, step):
        seq, head, tile_row, first, tiles = locate(item_of(at, M), scan, BN, M)
        where = loads.Where(seq, head, 0, scan.keys, 0, scan.keys, source.pages.table_ptr, source.pages.page_size)
        here = Source(source.k_desc, source.v_desc, source.k_cells, source.v_cells, where)
        slot, phase, landed_phase = rows.load_tiles(
            slot, phase, landed_phase, here, ring, landed, whole(first, tiles), SAME_KV, DENSE
        )


@gluon.jit
def rows_of(item, tensors, strides, scale, want_lse, scan, pages, BN: gl.constexpr, W: gl.constexpr, M: gl.constexpr):
    """-> the first of rows 64 W to 64 W + 63 of an item, their Share"""
    group, tokens, keys = scan.group, scan.tokens, scan.keys
    seq, head, tile_row, first, tiles = locate(item, scan, BN, M)
    n = seq.to(gl.int64)
    lse_ptr = tensors.lse_ptr + n * strides.lb
    here = Tensors(tensors.q_ptr + n * strides.qb * 8, tensors.out_ptr + n * strides.ob * 8, lse_ptr, tensors.sink_ptr,
                   tensors.part_ptr, tensors.part_lse_ptr)  # fmt: skip
    problem = Problem(
        head, group, scan.kv_heads * group, tokens * group, tokens, keys, scan.left, scan.right, scale, want_lse
    )
    return tile_row + 64 * W, Share(here, strides, problem, whole(first, tiles), pages)


@gluon.jit
def ask(q, tile_row, share, SIGN: gl.constexpr):
    """The query rows from tile_row on are on their way into q."""
    problem, strides = share.problem, share.strides
    D: gl.constexpr = q.shape[1]
    if SIGN == 1:
        loads.copy_rows(
            share.tensors.q_ptr, q, tile_row, problem.rows, problem.head, problem.group, strides.qt, strides.qh, 64, D
        )
    else:
        loads.load_rows(share.tensors.q_ptr, q, tile_row, problem.rows, problem.head, problem.group, strides.qt,
                        strides.qh, 0, 64, D, D, SIGN)  # fmt: skip


@gluon.jit
def arrived(SIGN: gl.constexpr):
    """What was asked for may be read by the tensor cores."""
    if SIGN == 1:
        async_copy.wait_group(0)
    fence_async_shared()
    barrier()


@gluon.jit
def sums(p, OWN: gl.constexpr):
    """Row sums; OWN: what each thread has of them."""
    if OWN:
        return softmax.partial_sums(p)
    else:
        return gl.sum(p, 1)


@gluon.jit
def add_sums(l, alpha, p, OWN: gl.constexpr):
    added = sums(p, OWN)
    if OWN:
        RP: gl.constexpr = gl.SliceLayout(1, added.type.layout)
        return softmax.pin(l * gl.convert_layout(alpha, RP)[:, None] + added)
    else:
        return l * alpha + added


@gluon.jit
def attend_item(slot, phase, q, tile_row, at, tensors, ring, strides, scale, want_lse, scan, pages, share,
                W: gl.constexpr, M: gl.constexpr, SAME_KV: gl.constexpr, SIGN: gl.constexpr,
                EVEN: gl.constexpr):  # fmt: skip
    """One row tile, whose Q is there, and the Q of the next one asked for. The steps are those of rows.attend."""
    k_free, v_free = ring.k_free, ring.v_free
    STAGES: gl.constexpr = ring.v.shape[0]
    BN: gl.constexpr = ring.v.shape[1]
    D: gl.constexpr = ring.v.shape[2]
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LA: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    RS: gl.constexpr = gl.SliceLayout(1, LS)
    RO: gl.constexpr = gl.SliceLayout(1, LO)
    OWN: gl.constexpr = EVEN or D > 64
    ABOVE: gl.constexpr = softmax.RESCALE_ABOVE if D > 64 else 0
    FINITE: gl.constexpr = D == 128 and not EVEN
    tiles = share.tiles
    first, end, step = course(scan, M)
    more = at + step < end
    seen = sight(tile_row, share, 64, BN, DENSE, RS)
    rows_q = q
    if D == 128:
        rows_q = q.load(gl.DotOperandLayout(0, LS, 2))
    s = rows.scores(rows_q, ring, slot, phase)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    if not SAME_KV:
        mbarrier.arrive(k_free.index(slot), count=1)
    if not EVEN:
        s = work.mask(s, tiles.first + tiles.begin * BN, seen, DENSE, OWN)
    m = gl.full([64], softmax.LOWEST if FINITE else -float("inf"), gl.float32, RS)
    p, m, alpha = softmax.step(s, m, scale, ABOVE, FINITE)
    l = sums(p, OWN)
    pa = gl.convert_layout(p.to(q.dtype), LA)
    o = gl.zeros([64, D], gl.float32, LO)
    for tile in range(tiles.begin + 1, tiles.end):  # slot: of the tile whose P is in pa
        after, after_phase = rows.next_slot(slot, phase, STAGES)
        s = rows.scores(rows_q, ring, after, after_phase)
        o = rows.add_values(o, pa, ring, slot, phase, SAME_KV)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        if not SAME_KV:
            mbarrier.arrive(k_free.index(after), count=1)
        if not EVEN:
            s = work.mask(s, tiles.first + tile * BN, seen, DENSE, OWN)
        p, m, alpha = softmax.step(s, m, scale, ABOVE, FINITE)
        l = add_sums(l, alpha, p, OWN)
        o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
        mbarrier.arrive(v_free.index(slot), count=1)
        if ABOVE > 0:
            o = softmax.rescale(o, alpha)
        else:
            o = o * gl.convert_layout(alpha, RO)[:, None]
        pa = gl.convert_layout(p.to(q.dtype), LA)
        slot = after
        phase = after_phase
    if more:
        next_row, following = rows_of(item_of(at + step, M), tensors, strides, scale, want_lse, scan, pages, BN, W, M)
        barrier()  # every warp has read the last of q
        ask(q, next_row, following, SIGN)
    o = rows.add_values(o, pa, ring, slot, phase, SAME_KV)
    o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
    mbarrier.arrive(v_free.index(slot), count=1)
    slot, phase = rows.next_slot(slot, phase, STAGES)
    if OWN:
        l = gl.convert_layout(gl.sum(l, 1), RS)
    work.write_at_once(o, m, l, tile_row, share, D)
    return slot, phase


@gluon.jit
def attend_early(q, tensors, ring, strides, scale, want_lse, scan, pages, W: gl.constexpr, M: gl.constexpr,
                 SAME_KV: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr):  # fmt: skip
    """What attend_role does with EARLY."""
    BN: gl.constexpr = ring.v.shape[1]
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    first, end, step = course(scan, M)
    first_row, first_share = rows_of(item_of(first, M), tensors, strides, scale, want_lse, scan, pages, BN, W, M)
    ask(q, first_row, first_share, SIGN)
    arrived(SIGN)
    for at in range(first, end, step):
        tile_row, share = rows_of(item_of(at, M), tensors, strides, scale, want_lse, scan, pages, BN, W, M)
        slot, phase = attend_item(slot, phase, q, tile_row, at, tensors, ring, strides, scale, want_lse, scan, pages,
                                  share, W, M, SAME_KV, SIGN, EVEN)  # fmt: skip
        arrived(SIGN)


@gluon.jit
def attend_role(q, tensors, ring, strides, scale, want_lse, scan, pages, W: gl.constexpr, M: gl.constexpr,
                SAME_KV: gl.constexpr, SIGN: gl.constexpr, EARLY: gl.constexpr, EVEN: gl.constexpr):  # fmt: skip
    """Rows 64 W to 64 W + 63 of each tile of M."""
    BN: gl.constexpr = ring.k.shape[1]
    if EARLY:
        attend_early(q, tensors, ring, strides, scale, want_lse, scan, pages, W, M, SAME_KV, SIGN, EVEN)
    else:
        slot = gl.to_tensor(0)
        phase = gl.to_tensor(0)
        for item in range(gl.program_id(0), scan.items, gl.num_programs(0)):
            tile_row, share = rows_of(item, tensors, strides, scale, want_lse, scan, pages, BN, W, M)
            slot, phase = rows.attend(slot, phase, q, tile_row, ring, share, SAME_KV, False, DENSE, SIGN)


@gluon.jit(do_not_specialize=work.NOT_SPECIALIZED)
def fmha_rows_loop(q_ptr, k_desc, v_desc, out_ptr, lse_ptr, sink_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, table_ptr,
                   part_ptr, part_lse_ptr, k_ptr, v_ptr, scale, want_lse, total_q, total_k, tokens, keys, kv_heads,
                   group, page_size, table_stride, left, right, num_splits, tiles_per_split, stride_qb, stride_qt,
                   stride_qh, stride_ob, stride_ot, stride_oh, stride_lb, stride_lt, stride_lh, stride_kp, stride_kr,
                   stride_kh, stride_vp, stride_vr, stride_vh,
                   D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, HOW: gl.constexpr,
                   SIGN: gl.constexpr, SAME_KV: gl.constexpr, SPLIT: gl.constexpr, CONSUMER_REGS: gl.constexpr,
                   PRODUCER_REGS: gl.constexpr, EARLY: gl.constexpr, EVEN: gl.constexpr = False):  # fmt: skip
    gl.static_assert(HOW == DENSE and not SPLIT)
    M: gl.constexpr = 64 * CONSUMERS
    tensors = Tensors(q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr)
    strides = Strides(stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh, stride_qb, stride_ob, stride_lb)
    pages = Pages(table_ptr, page_size, total_k)
    source = Keys(k_desc, v_desc, loads.Cells(k_ptr, total_k, stride_kp, stride_kr, stride_kh),
                  loads.Cells(v_ptr, total_k, stride_vp, stride_vr, stride_vh), pages)  # fmt: skip
    q, ring, landed = rows.make_ring(k_desc.dtype, D, BN, STAGES, CONSUMERS, SAME_KV, HOW)
    scan = scan_of(total_q // tokens, kv_heads, group, tokens, keys, left, right, M)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (attend_role, (q.index(0), tensors, ring, strides, scale, want_lse, scan, pages, 0, M, SAME_KV, SIGN,
                           EARLY, EVEN)),
            (attend_role, (q.index(1), tensors, ring, strides, scale, want_lse, scan, pages, 1, M, SAME_KV, SIGN,
                           EARLY, EVEN)),
            (load_role, (source, ring, landed, scan, M, SAME_KV)),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize([
            (attend_role, (q.index(0), tensors, ring, strides, scale, want_lse, scan, pages, 0, M, SAME_KV, SIGN,
                           EARLY, EVEN)),
            (attend_role, (q.index(1), tensors, ring, strides, scale, want_lse, scan, pages, 1, M, SAME_KV, SIGN,
                           EARLY, EVEN)),
            (attend_role, (q.index(2), tensors, ring, strides, scale, want_lse, scan, pages, 2, M, SAME_KV, SIGN,
                           EARLY, EVEN)),
            (load_role, (source, ring, landed, scan, M, SAME_KV)),
        ], [4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
