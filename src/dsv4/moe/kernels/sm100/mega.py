"""A whole layer of experts on sm_100a in one persistent kernel ("mega MoE"): dispatch, both products, the sum.

The products are those of products.py, tile by tile (tiles.py), so their bits are the same. CTAs take work by tickets
(kernels/signals.py), in four rounds; every item waits only for items with earlier tickets::

    count     4 warps   256 slots: a place among the rows of its expert for each, by atomics
    dispatch  4 warps   a token: rounded, to the rows of all its slots                        waits for all counts
    tiles     load      1 warp    tickets, TMA; product 1 waits for all rows, product 2 for the hidden values it reads
              multiply  1 warp    tcgen05
              write     4 warps   product 1: SwiGLU, rounding; product 2: outputs of slots
    sum       4 warps   a token: its slots in their order                                     waits for all outputs

Rows of activations lie in a pool of tiles of N rows, the tiles of an expert one after the other, the last one of an
expert not full. So a tile never reads a row that another one writes. Which row of its expert a slot gets depends on the
run; no result depends on it. Tiles are taken in the order of schedule.py: all of product 1, then all of product 2.

With several ranks (RANKS), each has its own experts. The kernel of each counts and dispatches the tokens of all ranks,
which it reads from their memory, and writes the outputs of slots to the token's rank, which sums them. Ranks meet
twice, by signals at .sys scope that are never reset (a call waits for as many as there have been calls): before the
first read of another rank's memory (THERE), and before the sum (HAS_WRITTEN); the CTA that counts the last tile sends
the latter. Only then a kernel ends, so no rank still accesses its memory. One CTA of every rank must be resident.

Hazard: stores write what TMA reads (rows of x, hidden values). The load role passes a proxy fence (fence_async) between
the counter that it waits for and its copies.

counter          counts                  up to            waits
COUNTED          pieces of the slots     pieces           dispatch, all warps
LANDED           parts of tokens         parts            load, before its first copy
hidden[a]        blocks of tile a        I / 128          load, before a tile of product 2
WRITTEN          tiles of product 2      tiles H / 256    sum, all warps

tensor memory    as in products.py
shared memory    as in products.py, and
tickets          [4, 32] int32: the numbers of the next tiles, each 32 times

barrier           arrives             count   waits             means
ready[s]          TMA                 1       multiply          stage s is filled
free[s]           commit of multiply  1       load              the products of stage s are complete
acc_ready[a]      commit of multiply  1       write             the accumulators of a tile are complete
acc_free[a]       write               1       multiply          they have been read
tickets_ready[i]  load                1       multiply, write   the ticket is there
tickets_free[i]   multiply, write     2       load              both have read it
"""

from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory

from dsv4.kernels.compat import barrier, gl, gluon
from dsv4.kernels.ring import consumer_stage, init_barriers, new_barriers, new_ring, next_stage, producer_stage
from dsv4.kernels.signals import fence_async, signal, take, wait_for
from dsv4.moe.kernels.rows import words_of
from dsv4.moe.kernels.schedule import expert_at, experts_layout, write_ends
from dsv4.moe.kernels.sm100.tiles import (
    ATOM,
    HALF,
    STEP,
    Accumulators,
    Operands,
    Stages,
    halves_of_tile,
    load_tile,
    multiply_tile,
    quantized,
    write_hidden,
    write_slots,
    written_layout,
)

PIECE = gl.constexpr(256)  # slots that are counted at a time
GROUPS = gl.constexpr(16)  # groups of 128 columns that are rounded at a time
COLUMNS = gl.constexpr(1024)  # columns that are summed at a time
# Words of the counters, each in its own line; behind them hidden[a], then the rows of every expert
COUNT_TICKET, COUNTED = gl.constexpr(0), gl.constexpr(32)
ROW_TICKET, LANDED = gl.constexpr(64), gl.constexpr(96)
TILE_TICKET, WRITTEN = gl.constexpr(128), gl.constexpr(160)
SUM_TICKET, COUNTERS = gl.constexpr(192), gl.constexpr(224)
THERE, HAS_WRITTEN = gl.constexpr(0), gl.constexpr(1)  # signals of ranks


@gluon.jit
def distance(peers, rank, RANKS: gl.constexpr):
    """Return the distance from this rank's memory to that of another, in units of 16 bytes."""
    return gl.load(peers.distance_ptr + rank) if RANKS > 1 else 0


@gluon.jit
def ids_of(tokens, slot, first, experts, away):
    """Return the experts of slots, counted from `first`; -1 for those of other ranks. away: distance of their rank."""
    PER: gl.constexpr = 128 // tokens.ids_ptr.dtype.element_ty.primitive_bitwidth  # ids in 16 bytes
    id = gl.load(tokens.ids_ptr + away * PER + slot, mask=slot < tokens.slots, other=-1).to(gl.int32) - first
    return gl.where((id >= 0) & (id < experts), id, -1)


@gluon.jit
def tell(peers, word: gl.constexpr, RANKS: gl.constexpr):
    """Signal to all ranks what this CTA has written or has observed."""
    for rank in gl.static_range(RANKS):
        signal(peers.signals_ptr + distance(peers, rank, RANKS) * 4 + word, "sys")


@gluon.jit
def count(tokens, pool, counters, peers, RANKS: gl.constexpr):
    slots: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    pieces = (tokens.slots + PIECE - 1) // PIECE  # pieces of a rank
    piece = take(counters.ptr + COUNT_TICKET)
    if RANKS > 1:
        if piece == 0:
            tell(peers, THERE, RANKS)
        wait_for(peers.signals_ptr + THERE, RANKS * gl.load(peers.call_ptr), "sys")
    while piece < RANKS * pieces:
        rank = piece // pieces
        slot = piece % pieces * PIECE + gl.arange(0, PIECE, layout=slots)
        id = ids_of(tokens, slot, peers.first, pool.experts, distance(peers, rank, RANKS))
        place = gl.atomic_add(counters.rows_ptr + id, 1, mask=id >= 0, sem="relaxed", scope="gpu")
        gl.store(pool.place_ptr + rank * tokens.slots + slot, place, mask=id >= 0)
        signal(counters.ptr + COUNTED)
        piece = take(counters.ptr + COUNT_TICKET)
    wait_for(counters.ptr + COUNTED, RANKS * pieces)


@gluon.jit
def schedule(ends, pool, counters, N: gl.constexpr):
    """Return the tiles of rows, and fill `ends` as in schedule.py."""
    EXPERTS: gl.constexpr = ends.shape[0]
    expert = gl.arange(0, EXPERTS, layout=experts_layout(EXPERTS, gl.num_warps()))
    return write_ends(ends, gl.load(counters.rows_ptr + expert, mask=expert < pool.experts, other=0), N)


@gluon.jit
def tile_at(tile, ends, counters, blocks, N: gl.constexpr):
    """Return expert, block of weights, tile of the pool, and how many rows it has."""
    expert, before, local = expert_at(tile, ends, blocks)
    rows = gl.load(counters.rows_ptr + expert)
    parts = (rows + N - 1) // N
    block = local // parts
    part = local - block * parts
    return expert, block, before + part, gl.minimum(rows - part * N, N)


@gluon.jit
def dispatch(
    tokens,
    pool,
    counters,
    peers,
    ends,
    out,
    TOPK: gl.constexpr,
    N: gl.constexpr,
    RECIPE: gl.constexpr,
    RANKS: gl.constexpr,
):
    WORDS: gl.constexpr = words_of(RECIPE)
    L: gl.constexpr = written_layout()  # [128 columns, groups]
    LE: gl.constexpr = experts_layout(ends.shape[0], gl.num_warps())
    all_ends = ends.load(LE)
    expert = gl.arange(0, ends.shape[0], layout=LE)
    parts = (tokens.width + GROUPS * 128 - 1) // (GROUPS * 128)
    item = take(counters.ptr + ROW_TICKET)
    items = tokens.slots // TOPK * parts  # items of a rank
    while item < RANKS * items:
        rank = item // items
        token = item % items // parts
        first = item % parts * GROUPS
        away = distance(peers, rank, RANKS)
        column = gl.arange(0, 128, layout=gl.SliceLayout(1, L))
        group = first + gl.arange(0, GROUPS, layout=gl.SliceLayout(0, L))
        at = token.to(gl.int64) * tokens.line * 8 + (group * 128)[None, :] + column[:, None]
        x = gl.load(tokens.ptr + away * 8 + at, mask=(group * 128 < tokens.width)[None, :], other=0.0)
        codes, words = quantized(x.to(gl.float32), RECIPE)
        BYTES: gl.constexpr = codes.shape[0]
        LC: gl.constexpr = codes.type.layout
        LW: gl.constexpr = words.type.layout
        group = first + gl.arange(0, GROUPS, layout=gl.SliceLayout(0, LC))
        byte = (group * BYTES)[None, :] + gl.arange(0, BYTES, layout=gl.SliceLayout(1, LC))[:, None]
        line = first + gl.arange(0, GROUPS, layout=gl.SliceLayout(0, LW))
        word = gl.arange(0, WORDS, layout=gl.SliceLayout(1, LW))
        for j in gl.static_range(TOPK):
            slot = token * TOPK + j
            id = ids_of(tokens, slot, peers.first, pool.experts, away)
            if id >= 0:
                place = gl.load(pool.place_ptr + rank * tokens.slots + slot)
                tile = gl.max(gl.where(expert < id, all_ends, 0), 0) + place // N
                row = tile * N + place % N
                to = tokens.to_ptr + row.to(gl.int64) * (tokens.width // (WORDS * 64) * 64)
                gl.store(to + byte, codes, mask=(group * 128 < tokens.width)[None, :])
                scale = ((line * pool.atoms + tile) * WORDS)[None, :] + word[:, None]
                scale = scale * ATOM + place % N % 32 * 4 + place % N // 32
                gl.store(tokens.scale_ptr + scale, words, mask=(line * 128 < tokens.width)[None, :])
                if first == 0:
                    gl.store(pool.line_ptr + row, slot.to(gl.int64) * (out.width // 8) + away)
                    gl.store(pool.weight_ptr + row, gl.load(tokens.weights_ptr + away * 4 + slot))
        signal(counters.ptr + LANDED)
        item = take(counters.ptr + ROW_TICKET)
    return RANKS * items


@gluon.jit
def put(tickets, turn, ticket):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tickets.acquire(turn)
    tickets.slot(turn).store(gl.full([32], 0, gl.int32, layout=L) + ticket)
    tickets.commit(turn)
    return tickets.next(turn)


@gluon.jit
def get(tickets, turn):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tickets.wait(turn)
    ticket = gl.max(tickets.slot(turn).load(L), 0)
    tickets.release(turn)
    return ticket, tickets.next(turn)


@gluon.jit
def load_role(
    first,
    second,
    stages,
    tickets,
    ends,
    tiles,
    landed,
    pool,
    up,
    down,
    counters,
    peers,
    WORDS: gl.constexpr,
    RANKS: gl.constexpr,
):
    N: gl.constexpr = stages.x.shape[1]
    wait_for(counters.ptr + LANDED, landed)
    fence_async()
    stage = producer_stage()
    turn = producer_stage()
    ticket = take(counters.ptr + TILE_TICKET)
    while ticket < tiles * (up.blocks + down.blocks):
        turn = put(tickets, turn, ticket)
        if ticket < tiles * up.blocks:
            expert, block, atom, _ = tile_at(ticket, ends, counters, up.blocks, N)
            place = (expert * up.blocks + block) * up.steps
            stage = load_tile(first, stages, stage, place, atom * N, atom, up.steps, pool.atoms, WORDS)
        else:
            expert, block, atom, _ = tile_at(ticket - tiles * up.blocks, ends, counters, down.blocks, N)
            wait_for(counters.hidden_ptr + atom, up.blocks)
            fence_async()
            place = (expert * down.blocks + block) * down.steps
            stage = load_tile(second, stages, stage, place, atom * N, atom, down.steps, pool.atoms, WORDS)
        ticket = take(counters.ptr + TILE_TICKET)
    put(tickets, turn, ticket)
    if RANKS > 1:
        if ticket == tiles * (up.blocks + down.blocks):  # the first ticket without a tile: it exists whatever is chosen
            written(counters, peers, tiles * down.blocks, RANKS)


@gluon.jit
def written(counters, peers, tiles, RANKS: gl.constexpr):
    """Count a tile of product 2, or that none are left. The last one signals all ranks."""
    if RANKS == 1:
        signal(counters.ptr + WRITTEN)
    else:
        barrier()
        if gl.atomic_add(counters.ptr + WRITTEN, 1, sem="acq_rel", scope="sys") == tiles:
            tell(peers, HAS_WRITTEN, RANKS)


@gluon.jit
def multiply_role(stages, accs, tickets, tiles, up, down, WORDS: gl.constexpr):
    stage = consumer_stage()
    acc_turn = consumer_stage()
    ticket, turn = get(tickets, consumer_stage())
    while ticket < tiles * (up.blocks + down.blocks):
        steps = gl.where(ticket < tiles * up.blocks, up.steps, down.steps)
        stage = multiply_tile(stages, stage, accs, acc_turn, steps, WORDS)
        acc_turn = next_stage(acc_turn, accs.acc.shape[0] // 2)
        ticket, turn = get(tickets, turn)


@gluon.jit
def write_role(
    accs, tickets, ends, tiles, pool, up, down, hidden, out, counters, peers, RECIPE: gl.constexpr, RANKS: gl.constexpr
):
    N: gl.constexpr = accs.acc.shape[2]
    acc_turn = consumer_stage()
    ticket, turn = get(tickets, consumer_stage())
    while ticket < tiles * (up.blocks + down.blocks):
        if ticket < tiles * up.blocks:
            expert, block, atom, rows = tile_at(ticket, ends, counters, up.blocks, N)
            gate, linear = halves_of_tile(accs, acc_turn, up, expert, block, RECIPE)
            write_hidden(gate, linear, block, atom * N, atom * N + rows, atom, pool, hidden, RECIPE)
            signal(counters.hidden_ptr + atom)
        else:
            expert, block, atom, rows = tile_at(ticket - tiles * up.blocks, ends, counters, down.blocks, N)
            low, high = halves_of_tile(accs, acc_turn, down, expert, block, RECIPE)
            n = gl.arange(0, N, layout=gl.SliceLayout(0, written_layout()))
            line = gl.load(pool.line_ptr + atom * N + n, mask=n < rows, other=0)
            write_slots(low, block * 2 * HALF, line, n < rows, out)
            write_slots(high, block * 2 * HALF + HALF, line, n < rows, out)
            written(counters, peers, tiles * down.blocks, RANKS)
        acc_turn = next_stage(acc_turn, accs.acc.shape[0] // 2)
        ticket, turn = get(tickets, turn)


@gluon.jit
def add_up(tokens, peers, counters, out, sums, TOPK: gl.constexpr, SHARED: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    width = out.width // 256 * 256  # multiples of 16 bytes, for the compiler; as lines in eights are
    parts = (width + COLUMNS - 1) // COLUMNS
    item = take(counters.ptr + SUM_TICKET)
    while item < tokens.slots // TOPK * parts:
        token = item // parts
        column = item % parts * COLUMNS + gl.arange(0, COLUMNS, layout=L)
        there = column < width
        values = ()
        for j in gl.static_range(TOPK):
            slot = token * TOPK + j
            chosen = ids_of(tokens, slot, 0, peers.experts, 0) >= 0
            y = gl.load(out.ptr + slot.to(gl.int64) * width + column, mask=there & chosen, other=0.0)
            values = values + (y,)
        total = gl.zeros([COLUMNS], gl.float32, layout=L)
        for j in gl.static_range(TOPK):
            total += values[j].to(gl.float32)
        if SHARED:
            y = gl.load(sums.shared_ptr + token.to(gl.int64) * width + column, mask=there, other=0.0)
            total += y.to(gl.float32)
        gl.store(sums.out_ptr + token.to(gl.int64) * sums.out_line * 8 + column, total.to(gl.bfloat16), mask=there)
        item = take(counters.ptr + SUM_TICKET)


@gluon.jit
def moe_mega_sm100(
    w13_desc, w13_scales_desc, x_desc, x_scales_desc, w2_desc, w2_scales_desc, h_desc, h_scales_desc, tokens, pool, up,
    down, hidden, out, sums, counters, peers, TOPK: gl.constexpr, SHARED: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, EXPERTS: gl.constexpr, RECIPE: gl.constexpr, RANKS: gl.constexpr = 1,
    WARP_REGS: gl.constexpr = 64,
):  # fmt: skip
    """Run a layer of experts. EXPERTS: a power of two, at least as many as there are and 32."""
    A: gl.constexpr = 2 if N <= 64 else 1
    WORDS: gl.constexpr = words_of(RECIPE)
    w = gl.allocate_shared_memory(gl.uint8, [STAGES, 2 * HALF, STEP // 2], w13_desc.layout)
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, N, STEP // WORDS], x_desc.layout)
    w_scales = gl.allocate_shared_memory(gl.uint8, [STAGES, 4 * WORDS, 256], w13_scales_desc.layout)
    x_scales = gl.allocate_shared_memory(gl.uint8, [STAGES, 2 * WORDS, 256], x_scales_desc.layout)
    ends = gl.allocate_shared_memory(gl.int32, [EXPERTS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    numbers = gl.allocate_shared_memory(gl.int32, [4, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    acc = allocate_tensor_memory(gl.float32, [2 * A, HALF, N], TensorMemoryLayout([HALF, N], col_stride=1))
    COLUMN: gl.constexpr = TensorMemoryLayout([ATOM, 4 * WORDS], col_stride=1)
    scales = allocate_tensor_memory(gl.int32, [3 * STAGES, ATOM, 4 * WORDS], COLUMN)
    ready = new_barriers(STAGES)
    free = new_barriers(STAGES)
    acc_ready = new_barriers(A)
    acc_free = new_barriers(A)
    tickets = new_ring(numbers, 2)
    init_barriers((ready, free, acc_ready, acc_free, tickets.ready, tickets.free))
    stages = Stages(w, w_scales, x, x_scales, ready, free)
    accs = Accumulators(acc, scales, acc_ready, acc_free)
    first = Operands(w13_desc, w13_scales_desc, x_desc, x_scales_desc)
    second = Operands(w2_desc, w2_scales_desc, h_desc, h_scales_desc)
    count(tokens, pool, counters, peers, RANKS)
    tiles = schedule(ends, pool, counters, N)
    landed = dispatch(tokens, pool, counters, peers, ends, out, TOPK, N, RECIPE, RANKS)
    gl.warp_specialize(
        [
            (write_role, (accs, tickets, ends, tiles, pool, up, down, hidden, out, counters, peers, RECIPE, RANKS)),
            (
                load_role,
                (first, second, stages, tickets, ends, tiles, landed, pool, up, down, counters, peers, WORDS, RANKS),
            ),
            (multiply_role, (stages, accs, tickets, tiles, up, down, WORDS)),
        ],
        [1, 1],
        [WARP_REGS, WARP_REGS],
    )
    if RANKS == 1:
        wait_for(counters.ptr + WRITTEN, tiles * down.blocks)
    else:
        wait_for(peers.signals_ptr + HAS_WRITTEN, RANKS * gl.load(peers.call_ptr), "sys")
    add_up(tokens, peers, counters, out, sums, TOPK, SHARED)
