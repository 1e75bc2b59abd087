"""Both products of the experts on sm_90a where experts have many rows: FP4 weights that are decoded once for up to 256
rows of activations.

Tiles, tickets and roles are those of products.py. What differs: a role has 64 rows of weights at a time, so that its
registers hold sums of N = 256 rows of activations; a tile of 256 rows of weights is done in two halves of 128, one
after the other, each over all columns. In product 1 a thread has gate (row r of a fragment) and up (row r + 8) of one
channel; half 0 has the even places of hidden values, half 1 the odd ones, which are written with those of half 0. In
product 2 half 0 has rows 0-127. Descriptors of five dimensions bring rows in that order::

    load        tile 0, half 0, step 0 | step 1 | ... | half 1, step 0 ... | tile 1 ...       one warp, TMA
    compute 0   rows 0-63 of every half: decode | products of 64 rows of activations, 64 more ...
    compute 1   rows 64-127: it decodes while the tensor core works for compute 0

shared memory   bytes of a stage    holds
values          8192                FP4 [128 rows, 4 groups, 16 bytes]
offsets         512                 E8M0 bytes [128 rows, 4 groups]
x               128 N               e4m3 [N / W, W, 128], with the 128-byte swizzle
x_scales        4 N                 fp32

shared memory   bytes of a half     holds, for two halves
numbers         32                  expert (-1: there is no tile more), block, rows, which product, half
factors         512                 fp32 [128]: of the rows of weights
columns         4 N                 of the rows of activations: weights of slots, or numbers of slots

shared memory   bytes in all        holds
kept            128 N               bf16 [2, N / 64, 32, 64]: hidden values of half 0; a thread reads what it wrote
tops            16 N                fp32 [2, 2, N]: of tiles by turns and compute roles, the greatest hidden value
ends            4 EXPERTS           int32: tiles of rows of activations up to each expert's last

The barriers are those of products.py; known and done go by halves.
"""

from dsv4.kernels.compat import barrier, gl, gluon, mbarrier, tma_load, warpgroup_mma_wait
from dsv4.kernels.dependent import launch_dependents, wait_on_prior_grid
from dsv4.kernels.ring import consumer_stage, init_barriers, new_barriers, next_stage, producer_stage
from dsv4.kernels.signals import fence_async, signal, take
from dsv4.moe.kernels.schedule import rows_of_experts, tile_at, write_ends
from dsv4.moe.kernels.sm90.outputs import (
    codes,
    hidden_values,
    number,
    numbers_layout,
    row_pairs,
    write_codes,
    write_scales,
    write_slots,
)
from dsv4.moe.kernels.sm90.products import Operands, Tiles, hidden_missing, scale_shift, write_tile
from dsv4.moe.kernels.sm90.sums import STEP, Stages, bases, decoded, fetched, multiply, product_layout

HALF = gl.constexpr(128)  # rows of weights
PIECE = gl.constexpr(64)  # rows of activations that sums go by


@gluon.jit
def load_half(half, place, given, first, shift, stages, stage, PARTS: gl.constexpr, USED: gl.constexpr):
    """-> the stage after it. USED: parts that have rows."""
    W: gl.constexpr = stages.x.shape[1]
    BYTES: gl.constexpr = HALF * 64 + HALF * 4 + W * (USED * STEP + PARTS * 4)
    for step in range(given.steps):
        stages.free.wait(stage.index, stage.phase)
        ready = stages.ready.at(stage.index)
        mbarrier.expect(ready, BYTES)
        at = place * given.steps + step
        tma_load(given.values_desc, [at, 0, 0, half, 0], ready, stages.values.index(stage.index))
        tma_load(given.offsets_desc, [at, 0, 0, half, 0], ready, stages.offsets.index(stage.index))
        for part in gl.static_range(USED):
            x = stages.x.index(stage.index * PARTS + part)
            tma_load(given.x_desc, [first + W * part, step * STEP], ready, x)
        tma_load(given.x_scales_desc, [step, first + shift], ready, stages.x_scales.index(stage.index))
        stage = next_stage(stage, stages.values.shape[0])
    return stage


@gluon.jit
def load_tile(
    tile, given, stages, stage, tiles, turn, ends, rows, signals, blocks, PARTS: gl.constexpr, FIRST: gl.constexpr
):
    """-> the stage and the turn after it. blocks: of product 1."""
    N: gl.constexpr = stages.x.shape[1] * PARTS
    expert, block, first, begin, stop = tile_at(tile, ends, rows, given.blocks, N)
    shift = scale_shift(begin, expert)
    place = expert * given.blocks + block
    if not FIRST:
        while hidden_missing(signals, rows, expert, first, shift, blocks, N, N) > 0:
            pass
        barrier()  # what lanes have seen, the one that issues copies has
        fence_async()
    for half in range(2):
        tiles.done.wait(turn.index, turn.phase)
        write_tile(tiles, turn.index, expert, block, first, stop, shift, rows, FIRST, half)
        known = tiles.known.at(turn.index)
        mbarrier.expect(known, HALF * 4)
        tma_load(given.factors_desc, [place, 0, 0, half, 0], known, tiles.factors.index(turn.index))
        if stop - first <= N // 2:
            stage = load_half(half, place, given, first, shift, stages, stage, PARTS, PARTS // 2)
        elif stop - first <= N * 3 // 4:
            stage = load_half(half, place, given, first, shift, stages, stage, PARTS, (PARTS * 3 + 3) // 4)
        else:
            stage = load_half(half, place, given, first, shift, stages, stage, PARTS, PARTS)
        turn = next_stage(turn, 2)
    return stage, turn


@gluon.jit
def load_role(first, second, stages, tiles, ends, count, ticket, rows, signals, PARTS: gl.constexpr):
    stage, turn = producer_stage(), producer_stage()
    hidden, every = count * first.blocks, count * (first.blocks + second.blocks)
    while ticket < every:
        if ticket < hidden:
            stage, turn = load_tile(
                ticket, first, stages, stage, tiles, turn, ends, rows, signals, first.blocks, PARTS, True
            )
        else:
            stage, turn = load_tile(
                ticket - hidden, second, stages, stage, tiles, turn, ends, rows, signals, first.blocks, PARTS, False
            )
        ticket = take(signals.ticket_ptr)
    tiles.done.wait(turn.index, turn.phase)
    tiles.numbers.index(turn.index).store(gl.full([8], -1, gl.int32, numbers_layout(gl.num_warps())))
    tiles.known.arrive(turn.index)


@gluon.jit
def no_sums():
    return gl.zeros([16 * gl.num_warps(), PIECE], gl.float32, product_layout(gl.num_warps(), PIECE))


@gluon.jit
def pieces(x):
    """A product as pieces of PIECE rows of activations: no instruction."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    L: gl.constexpr = product_layout(gl.num_warps(), PIECE)
    if N == PIECE:
        return (x,)
    else:
        low, high = gl.split(x.reshape((M, 2, PIECE)).permute((0, 2, 1)))
        return gl.convert_layout(low, L, assert_trivial=True), gl.convert_layout(high, L, assert_trivial=True)


@gluon.jit
def added(sums, product, scales, PLACE: gl.constexpr):
    """A piece of the sums with a product of a step. Scales are loaded piece by piece, as registers allow."""
    scale = scales.slice(PIECE * PLACE, PIECE).load(gl.SliceLayout(0, product_layout(gl.num_warps(), PIECE)))
    return sums + product * scale[None, :]


@gluon.constexpr_function
def widths(n, w):
    """n rows of activations as products of at most w."""
    return tuple([w] * (n // w) + [n % w] * (n % w > 0))


@gluon.jit
def half_sums(stages, stage, steps, base, G: gl.constexpr, PARTS: gl.constexpr, N: gl.constexpr):
    """(sums of 64 rows of weights by pieces of N rows of activations, stage after the half). Of narrow products two are
    under way; of wide ones registers hold one."""
    W: gl.constexpr = stages.x.shape[1]
    WIDTHS: gl.constexpr = widths(N, W)
    COUNT: gl.constexpr = len(WIDTHS)
    AHEAD: gl.constexpr = 1 if W <= PIECE else 0
    sums = ()
    for _ in gl.static_range(N // PIECE):
        sums = sums + (no_sums(),)
    for _ in range(steps):
        at = stage.index
        stages.ready.wait(at, stage.phase)
        scales = stages.x_scales.index(at).reshape([stages.x_scales.shape[2]])
        a = decoded(fetched(stages, at, G, HALF), base)
        pending = multiply(a, stages, at, 0, PARTS, WIDTHS[0])
        new = ()
        for part in gl.static_range(COUNT):
            if AHEAD and part + 1 < COUNT:
                next = multiply(a, stages, at, part + 1, PARTS, WIDTHS[part + 1])
                product, pending = warpgroup_mma_wait(num_outstanding=1, deps=(pending, next))
            else:
                product = warpgroup_mma_wait(num_outstanding=0, deps=(pending,))
            if part + 1 == COUNT:
                stages.free.arrive(at)
            found = pieces(product)
            for i in gl.static_range(len(found)):
                new = new + (added(sums[W // PIECE * part + i], found[i], scales, W // PIECE * part + i),)
            if not AHEAD and part + 1 < COUNT:
                pending = multiply(a, stages, at, part + 1, PARTS, WIDTHS[part + 1])
        sums = new
        stage = next_stage(stage, stages.values.shape[0])
    return sums, stage


@gluon.jit
def scaled(sums, factors, G: gl.constexpr):
    M: gl.constexpr = sums.shape[0]
    factor = factors.slice(G * M, M).load(gl.SliceLayout(1, sums.type.layout))
    return sums * factor.to(gl.float32, bitcast=True)[:, None]


@gluon.jit
def hidden_of(sums, factors, columns, out, G: gl.constexpr):
    """Hidden values [32, rows of activations] of one part."""
    gate, up = row_pairs(scaled(sums, factors, G))
    weight = columns.load(gl.SliceLayout(0, gate.type.layout)).to(gl.float32, bitcast=True)
    return hidden_values(gate, up, weight, out)


@gluon.jit
def greatest(low, high):
    return gl.max(gl.maximum(gl.abs(low), gl.abs(high)), 0)


@gluon.jit
def write_hidden(low, high, others, block, first, stop, shift, out, G: gl.constexpr):
    """Of one part, both halves. others: the greatest values of the other role."""
    other = others.load(gl.SliceLayout(0, low.type.layout))
    inverse = write_scales(gl.maximum(greatest(low, high), other), block, first, stop, shift, out, G)
    write_codes(codes(low, inverse), codes(high, inverse), block, first, stop, out, G)


@gluon.jit
def write_sums(sums, x, factors, columns, kept, turn, tops, told, out, slots, G: gl.constexpr):
    """What becomes of the sums of a half. x: its numbers."""
    block, first, stop, half = number(x, 1), number(x, 2), number(x, 3), number(x, 6)
    PARTS: gl.constexpr = kept.shape[0] // 2
    if number(x, 5) == 0:
        channel = block * (2 * HALF) + half * HALF + G * (HALF // 2)
        for part in gl.static_range(len(sums)):
            places = columns.slice(PIECE * part, PIECE)
            write_slots(scaled(sums[part], factors, G), places, channel, first + PIECE * part, stop, slots)
    elif half == 0:
        for part in gl.static_range(len(sums)):
            h = hidden_of(sums[part], factors, columns.slice(PIECE * part, PIECE), out, G)
            kept.index(G * PARTS + part).store(h.to(gl.bfloat16))
    else:
        lows = ()
        highs = ()
        for part in gl.static_range(len(sums)):
            high = hidden_of(sums[part], factors, columns.slice(PIECE * part, PIECE), out, G)
            place = kept.index(G * PARTS + part)
            low = place.load(high.type.layout).to(gl.float32)
            tops.index(turn * 2 + G).slice(PIECE * part, PIECE).store(greatest(low, high))
            lows = lows + (low,)
            highs = highs + (high,)
        told.arrive(0)
        told.wait(0, turn)
        for part in gl.static_range(len(sums)):
            others = tops.index(turn * 2 + 1 - G).slice(PIECE * part, PIECE)
            write_hidden(lows[part], highs[part], others, block, first + PIECE * part, stop, number(x, 4), out, G)


@gluon.jit
def compute_half(stages, stage, tiles, x, turn, kept, told_turn, tops, told, steps, hidden, slots, G: gl.constexpr,
                 PARTS: gl.constexpr, N: gl.constexpr):  # fmt: skip
    """-> the stage after it. N: rows of activations, at least as many as there are."""
    factors = tiles.factors.index(turn.index).reshape([HALF])
    sums, stage = half_sums(stages, stage, steps, bases(factors, G), G, PARTS, N)
    columns = tiles.columns.index(turn.index)
    write_sums(sums, x, factors, columns, kept, told_turn, tops, told, hidden, slots, G)
    return stage


@gluon.jit
def compute_role(stages, tiles, kept, tops, told, sizes, hidden, slots, signals, G: gl.constexpr,
                 PARTS: gl.constexpr):  # fmt: skip
    """Rows 64 G to 64 G + 63 of every half."""
    N: gl.constexpr = stages.x.shape[1] * PARTS
    stage, turn = consumer_stage(), consumer_stage()
    told_turn = gl.to_tensor(0)
    tiles.known.wait(turn.index, turn.phase)
    x = tiles.numbers.index(turn.index).load(numbers_layout(gl.num_warps()))
    while number(x, 0) >= 0:
        steps = gl.where(number(x, 5) != 0, sizes.steps1, sizes.steps2)
        there = number(x, 3) - number(x, 2)
        if there <= N // 2:
            stage = compute_half(
                stages, stage, tiles, x, turn, kept, told_turn, tops, told, steps, hidden, slots, G, PARTS, N // 2
            )
        elif there <= N * 3 // 4:
            stage = compute_half(
                stages, stage, tiles, x, turn, kept, told_turn, tops, told, steps, hidden, slots, G, PARTS, N * 3 // 4
            )
        else:
            stage = compute_half(
                stages, stage, tiles, x, turn, kept, told_turn, tops, told, steps, hidden, slots, G, PARTS, N
            )
        if number(x, 5) * number(x, 6) != 0:
            signal(signals.hidden_ptr + number(x, 0))
            told_turn = told_turn ^ 1
        tiles.done.arrive(turn.index)
        turn = next_stage(turn, 2)
        tiles.known.wait(turn.index, turn.phase)
        x = tiles.numbers.index(turn.index).load(numbers_layout(gl.num_warps()))


@gluon.jit
def moe_wide_products_sm90(
    w13_desc, w13_offsets_desc, w13_factors_desc, x_desc, x_scales_desc, w2_desc, w2_offsets_desc, w2_factors_desc,
    h_desc, h_scales_desc, rows, sizes, hidden, slots, signals, W: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr, EXPERTS: gl.constexpr, COMPUTE_REGS: gl.constexpr = 232, LOAD_REGS: gl.constexpr = 40,
):  # fmt: skip
    """EXPERTS: a power of two, at least as many as there are and 32."""
    launch_dependents()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    N: gl.constexpr = W * PARTS
    values = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 8, 2, 1, 128], w13_desc.layout)
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * PARTS, W, STEP], x_desc.layout)
    offsets = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 8, 2, 1, 8], w13_offsets_desc.layout)
    x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, N], x_scales_desc.layout)
    numbers = gl.allocate_shared_memory(gl.int32, [2, 8], PLAIN)
    factors = gl.allocate_shared_memory(gl.int32, [2, 1, 8, 2, 1, 8], w13_factors_desc.layout)
    columns = gl.allocate_shared_memory(gl.int32, [2, N], PLAIN)
    ends = gl.allocate_shared_memory(gl.int32, [EXPERTS], PLAIN)
    tops = gl.allocate_shared_memory(gl.float32, [4, N], PLAIN)
    kept = gl.allocate_shared_memory(gl.bfloat16, [2 * N // PIECE, 32, PIECE], PLAIN2)
    ready = new_barriers(STAGES)
    free = new_barriers(STAGES, 2)
    known = new_barriers(2)
    done = new_barriers(2, 2)
    told = new_barriers(1, 2)
    init_barriers((ready, free, known, done, told))
    stages = Stages(values, offsets, x, x_scales, ready, free)
    tiles = Tiles(numbers, factors, columns, known, done)
    wait_on_prior_grid()
    counts = rows_of_experts(rows, EXPERTS)
    ticket = take(signals.ticket_ptr)  # while those loads are under way
    count = write_ends(ends, counts, N)
    first = Operands(w13_desc, w13_offsets_desc, w13_factors_desc, x_desc, x_scales_desc, sizes.blocks1, sizes.steps1)
    second = Operands(w2_desc, w2_offsets_desc, w2_factors_desc, h_desc, h_scales_desc, sizes.blocks2, sizes.steps2)
    gl.warp_specialize([
        (compute_role, (stages, tiles, kept, tops, told, sizes, hidden, slots, signals, 0, PARTS)),
        (compute_role, (stages, tiles, kept, tops, told, sizes, hidden, slots, signals, 1, PARTS)),
        (load_role, (first, second, stages, tiles, ends, count, ticket, rows, signals, PARTS)),
    ], [4, 1], [COMPUTE_REGS, LOAD_REGS])  # fmt: skip
