"""The kernel of forward.py for large dense and varlen problems: one CTA per SM, which loops over row tiles.

The load warp runs ahead into the next row tile while the attend roles write their output. Role chart::

    load      1 warp    | K, V of tile a ...          | K, V of tile b ...
    attend w  4 warps   | Q | S, softmax, O += P V ...| write O | Q | S (K already there) ...

With EARLY, cp.async copies the next Q as soon as the last S is computed or, with SOON, before the first S: at head dim
128 this row tile's Q is in registers then, at head dim 64 q has two places. O is written from registers, because q is
in use::

    attend w  4 warps   | ask for Q | S, softmax, O += P V ... | write O | wait for Q | S (K already there) ...

With EVEN a row tile processes its keys from the last tile on, and no other tile needs a mask: calls without a window
that have no mask, or a diagonal that meets tiles of keys at their corners. With OWN_END each attend role begins at the
last tile that its own 64 rows see, and releases unread the tiles that only later rows see: a diagonal then crosses one
tile of keys in 64 rows, not in all rows of the work tile. So the loop needs no mask. With MASKS (head dim 64) the
diagonal meets tiles of keys anywhere, and the loop asks about each. ptxas schedules the instructions, and has two bad
habits: it keeps the numbers that a mask compares with in 32 registers through the loop (hence
`apply_mask_by_register`), and it moves the softmax after the wait for O += P V (hence `softmax.pin`). Each thread adds
up its own part of the row sums, and a warp rescales O only if the maximum of one of its rows grew by more than 8; so do
the roles of forward.py. At head dim 128 there are registers for Q. At other head dims than 128 and 256 (AT_ONCE) a warp
that rescales O waits for O += P V itself, before the others, and one barrier of warps releases both slots: 1 % faster,
but 2 % slower at head dim 128.

There are two or three attend roles. Shared memory and barriers are those of forward.py; the ring's slot and phase carry
over from tile to tile. tile_scheduler.py decides which work tiles a CTA processes, and has the barriers by which its
roles agree about them in a varlen batch. Every work tile has a tile of keys, even if none of its rows sees it.
"""

from dsv4.fmha.kernels import loads
from dsv4.fmha.kernels.arguments import RowTensors, Source, Tiles, WorkTile, kv_rows, problem_of, query_rows
from dsv4.fmha.kernels.sm90 import columns, forward, work
from dsv4.fmha.kernels.sm90.tile_scheduler import (
    TileScheduler,
    course,
    hand_out,
    locate,
    new_tickets,
    take_ticket,
    tile_id_at,
)
from dsv4.fmha.kernels.sm90.varlen_order import next_ticket
from dsv4.fmha.kernels.tiles import DENSE, ROWS, Pages, end_key, first_key, mask_bounds
from dsv4.kernels import dependent, softmax
from dsv4.kernels.combine import clear_rows, end_of_sequences
from dsv4.kernels.compat import (
    Value,
    aggregate,
    async_copy,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    to_operand,
    warpgroup_mma_wait,
)
from dsv4.kernels.division import divide
from dsv4.kernels.ring import consumer_stage, producer_stage


@aggregate
class Arguments:
    """The arguments of an attend role for all work tiles."""

    tensors: Value
    strides: Value
    opts: Value
    scheduler: TileScheduler
    pages: Pages
    columns: Value  # columns of q and k
    v_columns: Value  # columns of v and out
    kv_load: Value
    tile_rows: Value  # rows of a work tile
    same_kv: Value
    sign: Value
    even: Value
    masks: Value
    own_end: Value


@aggregate
class Keys:
    """The source of K and V of all sequences."""

    k_desc: Value
    v_desc: Value
    k_rows: loads.GlobalRows
    v_rows: loads.GlobalRows
    pages: Pages
    columns: Value  # columns of k
    v_columns: Value
    kv_load: Value
    tile_rows: Value
    same_kv: Value
    even: Value


@gluon.jit
def whole(first, tiles, BN: gl.constexpr, EVEN: gl.constexpr):
    """Return all tiles of keys of a work tile, with EVEN from the last one on."""
    return Tiles(first + (tiles - 1) * BN if EVEN else first, gl.to_tensor(0), tiles, gl.to_tensor(-1))


@gluon.jit
def load_work_tile(stage, landed_phase, tile_id, source, kv, landed, scheduler):
    """Load K and V of a work tile; return the next stage of the ring and phase of landed."""
    BN: gl.constexpr = kv.k.slots.shape[1]
    place = locate(tile_id, scheduler, BN, source.tile_rows, source.kv_load)
    visible, pages = 0, source.pages
    if source.kv_load == ROWS:
        visible = first_key(0, place.tokens, place.keys, scheduler.opts.left)
    seq, head, start, keys = place.seq, place.head, place.k_start, place.keys
    where = loads.Where(seq, head, start, keys, visible, keys, pages.table_ptr, pages.page_size)
    here = Source(source.k_desc, source.v_desc, source.k_rows, source.v_rows, where)
    return forward.load_tiles(
        stage,
        landed_phase,
        here,
        kv,
        landed,
        whole(place.first, place.tiles, BN, source.even),
        source.same_kv,
        source.kv_load,
        source.even,
        columns.loaded(source.columns),
        columns.loaded(source.v_columns),
    )


@gluon.jit
def load_role(source, kv, landed, scheduler, tickets):
    stage = producer_stage()
    landed_phase = gl.to_tensor(0)
    if source.kv_load == ROWS:
        ticket = producer_stage()
        tile_id = gl.program_id(0)
        while tile_id < scheduler.num_tiles:
            after = next_ticket(scheduler.order, tile_id == gl.program_id(0))
            ticket = hand_out(tickets, ticket, after)
            stage, landed_phase = load_work_tile(stage, landed_phase, tile_id, source, kv, landed, scheduler)
            tile_id = after
    else:
        begin, end, step = course(scheduler, source.tile_rows)
        for at in range(begin, end, step):
            tile_id = tile_id_at(at, source.tile_rows)
            stage, landed_phase = load_work_tile(stage, landed_phase, tile_id, source, kv, landed, scheduler)


@gluon.jit
def rows_of(tile_id, arguments, BN: gl.constexpr, W: gl.constexpr):
    """Return, for rows 64 W to 64 W + 63 of a work tile, (the first of them; their WorkTile; with own_end the number of
    last tiles of keys that they do not see, and that their WorkTile leaves out)."""
    tensors, strides, scheduler = arguments.tensors, arguments.strides, arguments.scheduler
    sizes = scheduler.sizes
    place = locate(tile_id, scheduler, BN, arguments.tile_rows, arguments.kv_load)
    tile_row, first, tiles = place.tile_row + 64 * W, place.first, place.tiles
    unseen = 0
    if arguments.own_end:
        token = gl.minimum(divide(tile_row + 63, sizes.group), place.tokens - 1)
        end = end_key(token, place.tokens, place.keys, arguments.opts.right)
        unseen = tiles - gl.maximum(end - first + BN - 1, BN) // BN
    q_ptr, out_ptr, lse_ptr = tensors.q_ptr, tensors.out_ptr, tensors.lse_ptr
    if arguments.kv_load == ROWS:
        n = place.q_start.to(gl.int64)
        q_ptr += n * strides.q_token * 8
        out_ptr += n * strides.out_token * 8
        lse_ptr += n * strides.lse_token
    else:
        n = place.seq.to(gl.int64)
        q_ptr += n * strides.q_batch * 8
        out_ptr += n * strides.out_batch * 8
        lse_ptr += n * strides.lse_batch
    here = RowTensors(q_ptr, out_ptr, lse_ptr, tensors.sink_ptr, tensors.part_ptr, tensors.part_lse_ptr)
    problem = problem_of(place.head, place.tokens, place.keys, sizes, arguments.opts)
    work_tile = WorkTile(here, strides, problem, whole(first, tiles - unseen, BN, arguments.even), arguments.pages)
    return tile_row, work_tile, unseen


@gluon.jit
def ask(q, tile_row, work_tile, arguments):
    """Start copying the query rows from tile_row on into q."""
    D: gl.constexpr = q.shape[1]
    if arguments.sign == 1:
        loads.copy_rows(query_rows(work_tile), q, tile_row, 64, D, arguments.columns)
    else:
        loads.load_rows(query_rows(work_tile), q, tile_row, 0, 64, D, D, arguments.sign, columns=arguments.columns)


@gluon.jit
def arrived(SIGN: gl.constexpr):
    """Wait until the tensor cores may read what ask() copies."""
    if SIGN == 1:
        async_copy.wait_group(0)
    fence_async_shared()
    barrier()


@gluon.jit
def place_of(q, at, W: gl.constexpr):
    """Return the query rows of role W: at head dim 64, with three roles, in two places alternately."""
    if q.shape[2] == 64:
        return q.index(2 * W + at % 2)
    else:
        return q.index(W)


@gluon.jit
def ask_for_next(q, at, next_tile, arguments, BN: gl.constexpr, W: gl.constexpr):
    """Start copying the query rows of the next row tile, if there is one. next_tile: in a varlen batch, its number."""
    if arguments.kv_load == ROWS:
        if next_tile < arguments.scheduler.num_tiles:
            ask_for(q, at + 1, next_tile, arguments, BN, W)
    else:
        first, end, step = course(arguments.scheduler, arguments.tile_rows)
        if at + step < end:
            ask_for(q, at + step, tile_id_at(at + step, arguments.tile_rows), arguments, BN, W)


@gluon.jit
def ask_for(q, at, tile_id, arguments, BN: gl.constexpr, W: gl.constexpr):
    tile_row, work_tile, _ = rows_of(tile_id, arguments, BN, W)
    if q.shape[2] > 64:
        barrier()  # every warp has read the last of q
    ask(place_of(q, at, W), tile_row, work_tile, arguments)


@gluon.jit
def release(kv, k_stage, v_stage, AT_ONCE: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """Release a slot of K, of V, or both. AT_ONCE: behind one barrier of warps, and without those of the compiler."""
    if AT_ONCE:
        barrier()
    if K:
        if AT_ONCE:
            kv.k.free.arrive_once(k_stage.index)
        else:
            kv.k.release(k_stage)
    if V:
        if AT_ONCE:
            kv.v.free.arrive_once(v_stage.index)
        else:
            kv.v.release(v_stage)


@gluon.jit
def attend_tile(stage, q, at, tile_id, next_tile, arguments, kv, W: gl.constexpr):
    """Process one row tile, whose Q has been loaded; load Q of the next one. The steps are those of forward.attend."""
    EVEN: gl.constexpr = arguments.even
    SAME_KV: gl.constexpr = arguments.same_kv
    SOON: gl.constexpr = EVEN and q.shape[2] < 256
    k, v = kv.k, kv.v
    BN: gl.constexpr = v.slots.shape[1]
    D: gl.constexpr = v.slots.shape[2]
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LA: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    RS: gl.constexpr = gl.SliceLayout(1, LS)
    C: gl.constexpr = arguments.columns
    CV: gl.constexpr = arguments.v_columns
    AT_ONCE: gl.constexpr = columns.at_once(CV, D)
    tile_row, work_tile, unseen = rows_of(tile_id, arguments, BN, W)
    tiles, scale = work_tile.tiles, work_tile.problem.scale
    bounds = mask_bounds(tile_row, work_tile, 64, BN, DENSE, RS)
    if arguments.own_end:
        for _ in range(unseen):  # wait for these too: a release must not count for the previous fill
            k.wait(stage)
            if not SAME_KV:
                k.release(stage)
                v.wait(stage)
            v.release(stage)
            stage = k.next(stage)
    rows_q = columns.operand(place_of(q, at, W), C, LS)
    if SOON:
        ask_for_next(q, at, next_tile, arguments, BN, W)
    s = columns.scores(rows_q, k, stage, C)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    release(kv, stage, stage, AT_ONCE, not SAME_KV, False)
    s = work.finish_scores(s, tiles.first, bounds, DENSE, True)
    m = gl.full([64], softmax.LOWEST, gl.float32, RS)
    p, m, alpha = work.step(s, m, scale, D)
    l = softmax.partial_sums(p)
    pa = gl.convert_layout(to_operand(p, q), LA)
    o = columns.zeros(CV, D)
    for tile in range(tiles.begin + 1, tiles.end):  # stage: of the tile whose P is in pa
        after = k.next(stage)
        s = columns.scores(rows_q, k, after, C)
        o = columns.add_values(o, pa, v, stage, CV, SAME_KV)
        s = warpgroup_mma_wait(num_outstanding=columns.value_pieces(CV, D), deps=(s,))
        if not AT_ONCE:
            release(kv, after, stage, False, not SAME_KV, False)
        s = work.finish_scores(
            s, tiles.first + (-tile if EVEN else tile) * BN, bounds, DENSE, True, EVEN and not arguments.masks
        )
        p, m, alpha = work.step(s, m, scale, D)
        if AT_ONCE:
            l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None] + softmax.partial_sums(p)
            o = columns.wait(columns.rescale_in_flight(columns.running(o, CV, D), alpha, l))
            release(kv, after, stage, True, not SAME_KV, True)
        else:
            l = work.add_sums(l, alpha, p)
            o = columns.wait(o)
            release(kv, after, stage, False, False, True)
            o = columns.rescale(o, alpha)
        pa = gl.convert_layout(to_operand(p, q), LA)
        stage = after
    if not SOON:
        ask_for_next(q, at, next_tile, arguments, BN, W)
    o = columns.add_values(o, pa, v, stage, CV, SAME_KV)
    o = columns.wait(o)
    v.release(stage)
    stage = k.next(stage)
    l = gl.convert_layout(gl.sum(l, 1), RS)
    work.write_at_once(o, m, l, tile_row, work_tile, CV, D)
    arrived(arguments.sign)
    return stage


@gluon.jit
def attend_early(q, arguments, kv, tickets, W: gl.constexpr):
    """Run attend_role with EARLY."""
    BN: gl.constexpr = kv.k.slots.shape[1]
    stage = consumer_stage()
    if arguments.kv_load == ROWS:
        ticket, at, tile_id = consumer_stage(), gl.to_tensor(0), gl.program_id(0)
        num_tiles = arguments.scheduler.num_tiles
        if tile_id < num_tiles:
            first_row, first_work_tile, _ = rows_of(tile_id, arguments, BN, W)
            ask(place_of(q, at, W), first_row, first_work_tile, arguments)
        arrived(arguments.sign)
        while tile_id < num_tiles:
            after, ticket = take_ticket(tickets, ticket)
            stage = attend_tile(stage, q, at, tile_id, after, arguments, kv, W)
            at += 1
            tile_id = after
    else:
        attend_turns(q, stage, arguments, kv, W)


@gluon.jit
def attend_turns(q, stage, arguments, kv, W: gl.constexpr):
    """Do the same for a dense batch."""
    BN: gl.constexpr = kv.k.slots.shape[1]
    M: gl.constexpr = arguments.tile_rows
    first, end, step = course(arguments.scheduler, M)
    first_row, first_work_tile, _ = rows_of(tile_id_at(first, M), arguments, BN, W)
    ask(place_of(q, first, W), first_row, first_work_tile, arguments)
    arrived(arguments.sign)
    for at in range(first, end, step):
        stage = attend_tile(stage, q, at, tile_id_at(at, M), 0, arguments, kv, W)


@gluon.jit
def attend_role(q, arguments, kv, tickets, W: gl.constexpr, EARLY: gl.constexpr):
    """Process rows 64 W to 64 W + 63 of each work tile."""
    BN: gl.constexpr = kv.k.slots.shape[1]
    SAME_KV: gl.constexpr = arguments.same_kv
    SIGN: gl.constexpr = arguments.sign
    if EARLY:
        attend_early(q, arguments, kv, tickets, W)
    elif arguments.kv_load == ROWS:
        stage, ticket, tile_id = consumer_stage(), consumer_stage(), gl.program_id(0)
        while tile_id < arguments.scheduler.num_tiles:
            after, ticket = take_ticket(tickets, ticket)
            tile_row, work_tile, _ = rows_of(tile_id, arguments, BN, W)
            stage = forward.attend(stage, q.index(W), tile_row, kv, work_tile, SAME_KV, False, DENSE, SIGN)
            tile_id = after
    else:
        stage = consumer_stage()
        for tile_id in range(gl.program_id(0), arguments.scheduler.num_tiles, gl.num_programs(0)):
            tile_row, work_tile, _ = rows_of(tile_id, arguments, BN, W)
            stage = forward.attend(stage, q.index(W), tile_row, kv, work_tile, SAME_KV, False, DENSE, SIGN)


@gluon.jit
def fmha_forward_persistent(tensors, k_desc, v_desc, sizes, strides, opts, order, D: gl.constexpr,
                   COLUMNS: gl.constexpr, V_COLUMNS: gl.constexpr,
                   BN: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, KV_LOAD: gl.constexpr,
                   SIGN: gl.constexpr, SAME_KV: gl.constexpr, SPLIT: gl.constexpr, CONSUMER_REGS: gl.constexpr,
                   PRODUCER_REGS: gl.constexpr, EARLY: gl.constexpr, EVEN: gl.constexpr,
                   MASKS: gl.constexpr, OWN_END: gl.constexpr):  # fmt: skip
    gl.static_assert((KV_LOAD == DENSE or KV_LOAD == ROWS) and not SPLIT)
    M: gl.constexpr = 64 * CONSUMERS
    pages = Pages(tensors.table_ptr, sizes.page_size, sizes.total_k)
    k_rows, v_rows = kv_rows(tensors, sizes, strides)
    source = Keys(k_desc, v_desc, k_rows, v_rows, pages, COLUMNS, V_COLUMNS, KV_LOAD, M, SAME_KV, EVEN)
    PLACES: gl.constexpr = 2 * CONSUMERS if CONSUMERS == 3 else CONSUMERS
    q, kv, landed = forward.make_memory(k_desc.dtype, D, BN, STAGES, CONSUMERS, SAME_KV, KV_LOAD, PLACES)
    tickets = kv.k  # unused
    if KV_LOAD == ROWS:
        tickets = new_tickets(CONSUMERS)
    if KV_LOAD == ROWS:
        begin = end_of_sequences(tensors.cu_q_ptr, order.sequences, sizes.total_q) + gl.program_id(0)
        heads = sizes.kv_heads * sizes.group.number
        clear_rows(tensors, strides, begin, sizes.total_q, gl.num_programs(0), 0, heads, opts.want_lse, D, V_COLUMNS)
        dependent.wait_on_prior_grid()  # that grid makes the list
    num_tiles = order.num_tiles if KV_LOAD == DENSE else gl.load(order.entries_ptr)
    scheduler = TileScheduler(order, num_tiles, sizes, opts)
    arguments = Arguments(
        tensors, strides, opts, scheduler, pages, COLUMNS, V_COLUMNS, KV_LOAD, M, SAME_KV, SIGN, EVEN, MASKS, OWN_END
    )
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (attend_role, (q, arguments, kv, tickets, 0, EARLY)),
                (attend_role, (q, arguments, kv, tickets, 1, EARLY)),
                (load_role, (source, kv, landed, scheduler, tickets)),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (attend_role, (q, arguments, kv, tickets, 0, EARLY)),
                (attend_role, (q, arguments, kv, tickets, 1, EARLY)),
                (attend_role, (q, arguments, kv, tickets, 2, EARLY)),
                (load_role, (source, kv, landed, scheduler, tickets)),
            ],
            [4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )
