"""Both products of the experts on sm_90a for many rows of activations: weights are decoded once, into shared memory.

A tile is 128 rows of activations, operand A of wgmma, and 256 rows of weights of one expert, operand B. Both are in
shared memory, so a product does not stall the warps that issue it: they decode weights of the next step meanwhile.
Tickets, hidden values and the ring are those of products.py, and so are the sums of a token, bit for bit::

    load        tile 0, step 0 | step 1 | ... | tile 1, step 0 ...           one warp, TMA
    compute 0   rows of activations 0-63 of every tile: gate and up of 128 channels, or 256 channels of the output
    compute 1   rows 64-127; if there are none it only decodes

    tensor core, compute role G             meanwhile
    x times rows 128 G to 128 G + 127       the first 64 of these rows of the next step: FP4 -> e4m3
                                            sums; the tensor core works for the other role
    x times the other 128 rows              the other 64
                                            sums

A role begins with the rows that it has decoded itself, so it waits for the other role only in the middle of a step.

shared memory   bytes               holds
stages          34304 a stage       the same as in products.py, W = 128
slots           32768, two of them  e4m3 [256, 128], decoded weights, with the 128-byte swizzle

barrier         arrives     count   waits       means
ready[s]        TMA         1       compute     stage s is filled
free[s]         compute     2       load        stage s has been read
known[t]        load, TMA   1       compute     the description of a tile is complete
done[t]         compute     2       load        it has been read
filled[2 i+g]   compute g   1       the other   slot i has the weights of a step that role g decodes
unused[i]       compute     2       compute     products with slot i are complete
"""

from dsv4.kernels.compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret_as,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.dependent import launch_dependents, wait_on_prior_grid
from dsv4.kernels.ring import consumer_stage, init_barriers, new_barriers, next_stage
from dsv4.kernels.signals import signal, take
from dsv4.moe.kernels.schedule import rows_of_experts, scale_of, write_ends
from dsv4.moe.kernels.sm90.outputs import hidden_values, number
from dsv4.moe.kernels.sm90.products import Operands, Tiles, load_role, numbers_of
from dsv4.moe.kernels.sm90.sums import ROWS, STEP, Stages, bases, decoded, fetched, zeros

WIDTH = gl.constexpr(128)  # rows of activations per tile
HALF = gl.constexpr(128)  # rows of weights per product
M = gl.constexpr(64)  # rows of activations per role
SLOTS = gl.constexpr(2)  # slots of decoded weights
TO_E4M3 = gl.constexpr("""{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }""")
TO_BF16 = gl.constexpr("""{ .reg .b32 low, high; cvt.rn.bf16x2.f32 low, $2, $1; cvt.rn.bf16x2.f32 high, $4, $3;
mov.b64 $0, {low, high}; }""")


@gluon.jit
def decode(rows, slot, base, PLACE: gl.constexpr):
    """Store 64 fetched rows as e4m3 (see sums.py) in their place. base: the byte of offset 0, for each row."""
    to = reinterpret_as(slot, gl.int32, [ROWS, STEP // 4], gl.NVMMASharedLayout(128, 32, rank=2))
    low, high = decoded(rows, base)
    to.slice(64 * PLACE, 64).store(gl.join(low, high).permute((0, 2, 3, 1)).reshape((64, STEP // 4)))


@gluon.jit
def multiply(x, slot, product, PART: gl.constexpr):
    """Issue the product with half of the weights. The wait names the sums of the previous product, so that the compiler
    does not defer those."""
    w = slot.slice(HALF * PART, HALF).permute((1, 0))
    return warpgroup_mma(x, w, product, use_acc=False, is_async=True)


@gluon.jit
def step(given, stage, place, sums, base, G: gl.constexpr, MINE: gl.constexpr, NEXT: gl.constexpr):
    """Multiply the weights of a slot by the activations of a stage, and decode those of the next stage, if there is one
    (NEXT), into the next slot -> the sums of the rows of weights that this role decodes, those of the others, the last
    product."""
    stages, slots, filled, unused = given
    after, to = next_stage(stage, stages.values.shape[0]), next_stage(place, SLOTS)
    own, other, product = sums
    x, slot, next_slot = stages.x.index(stage.index).slice(M * G, M), slots.index(place.index), slots.index(to.index)
    if MINE:
        scales = stages.x_scales.index(stage.index).reshape([WIDTH]).slice(M * G, M)
        scale = scales.load(gl.SliceLayout(1, own.type.layout))[:, None]
    if NEXT:
        stages.ready.wait(after.index, after.phase)
        rows = fetched(stages, after.index, 2 * G, 64)
    if MINE:
        product = multiply(x, slot, product, G)
    if NEXT:
        unused.wait(to.index, to.phase ^ 1)
        decode(rows, next_slot, base[0], 2 * G)
        rows = fetched(stages, after.index, 2 * G + 1, 64)
    if MINE:
        product = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
        own = warpgroup_mma_wait(num_outstanding=0, deps=(own + product * scale,))
    filled.wait(2 * place.index + 1 - G, place.phase)
    if MINE:
        product = multiply(x, slot, product, 1 - G)
    if NEXT:
        decode(rows, next_slot, base[1], 2 * G + 1)
        fence_async_shared()
        filled.arrive(2 * to.index + G)
    if MINE:
        product = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
    barrier()  # all warps have waited; one arrives
    mbarrier.expect(unused.at(place.index), 0)
    mbarrier.expect(stages.free.at(stage.index), 0)
    if MINE:
        other = warpgroup_mma_wait(num_outstanding=0, deps=(other + product * scale,))
    return own, other, product


@gluon.jit
def tile_sums(given, stage, place, steps, factors, G: gl.constexpr, MINE: gl.constexpr):
    """Return (sums of rows of weights 0-127, of rows 128-255; stage and place after the tile). Not MINE: only decode.
    Two steps per iteration, which would save barriers, need 6 % more time, probably because the instructions do not
    stay in a cache."""
    stages, slots, filled, unused = given
    base = bases(factors, 2 * G, 64), bases(factors, 2 * G + 1, 64)
    sums = zeros(HALF), zeros(HALF), zeros(HALF)
    stages.ready.wait(stage.index, stage.phase)
    unused.wait(place.index, place.phase ^ 1)
    for half in gl.static_range(2):
        decode(fetched(stages, stage.index, 2 * G + half, 64), slots.index(place.index), base[half], 2 * G + half)
    fence_async_shared()
    filled.arrive(2 * place.index + G)
    for _ in range(steps - 1):
        sums = step(given, stage, place, sums, base, G, MINE, True)
        stage, place = next_stage(stage, stages.values.shape[0]), next_stage(place, SLOTS)
    sums = step(given, stage, place, sums, base, G, MINE, False)
    return sums[G], sums[1 - G], next_stage(stage, stages.values.shape[0]), next_stage(place, SLOTS)


@gluon.jit
def fours(x):
    """Split x [64, 128], places of 128 rows of weights, into four [64, 32] of neighbouring channels (formats.FRAGMENT),
    which one thread has."""
    y = x.reshape((M, 8, 2, 4, 2)).permute((0, 1, 3, 4, 2))
    even, odd = gl.split(y)
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return a.reshape((M, 32)), b.reshape((M, 32)), c.reshape((M, 32)), d.reshape((M, 32))


@gluon.jit
def with_factors(sums, factors, PLACE: gl.constexpr):
    factor = factors.slice(PLACE * HALF, HALF).load(gl.SliceLayout(0, sums.type.layout))
    return sums * factor.to(gl.float32, bitcast=True)[None, :]


@gluon.jit
def write_hidden(h, block, rows, place, scale_place, out):
    """Store `rows` rows of h [64, 128] as e4m3 with one scale per row, at their places."""
    exponent = scale_of(gl.max(gl.abs(h), 1))
    row = gl.arange(0, M, layout=gl.SliceLayout(1, h.type.layout))
    scale = (exponent << 23).to(gl.float32, bitcast=True)
    gl.store(out.scale_ptr + block * out.scale_line + scale_place + row, scale, mask=row < rows)
    inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    a, b, c, d = fours(h * inverse[:, None])
    word = gl.inline_asm_elementwise(TO_E4M3, "=r,f,f,f,f", [a, b, c, d], dtype=gl.uint32, is_pure=True, pack=1)
    L: gl.constexpr = word.type.layout
    row = gl.arange(0, M, layout=gl.SliceLayout(1, L))
    column = block * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, L))  # columns in fours
    at = ((place + row).to(gl.int64) * (out.width // 4))[:, None] + column[None, :]
    gl.store(out.ptr.to(gl.pointer_type(gl.uint32), bitcast=True) + at, word, mask=(row < rows)[:, None])


@gluon.jit
def write_slots(sums, columns, channel, first, stop, out):
    """Write 128 channels of the outputs of 64 slots, whose numbers are in `columns`."""
    a, b, c, d = fours(sums)
    word = gl.inline_asm_elementwise(TO_BF16, "=l,f,f,f,f", [a, b, c, d], dtype=gl.uint64, is_pure=True, pack=1)
    L: gl.constexpr = word.type.layout
    row = first + gl.arange(0, M, layout=gl.SliceLayout(1, L))
    slot = columns.load(gl.SliceLayout(1, L))
    column = channel // 4 + gl.arange(0, 32, layout=gl.SliceLayout(0, L))  # columns in fours
    at = (slot.to(gl.int64) * (out.width // 4))[:, None] + column[None, :]
    gl.store(out.ptr.to(gl.pointer_type(gl.uint64), bitcast=True) + at, word, mask=(row < stop)[:, None])


@gluon.jit
def write_sums(sums0, sums1, x, factors, columns, out, G: gl.constexpr, FIRST: gl.constexpr):
    """Write the sums of a tile. x: its numbers."""
    block, first, stop = number(x, 1), number(x, 2) + M * G, number(x, 3)
    mine = columns.slice(M * G, M)
    part0, part1 = with_factors(sums0, factors, 0), with_factors(sums1, factors, 1)
    if FIRST:
        weight = mine.load(gl.SliceLayout(1, part0.type.layout)).to(gl.float32, bitcast=True)
        h = hidden_values(part0, part1, weight[:, None], out)
        write_hidden(h, block, stop - first, number(x, 4) + M * G, number(x, 6) + M * G, out)
    else:
        write_slots(part0, mine, block * ROWS, first, stop, out)
        write_slots(part1, mine, block * ROWS + HALF, first, stop, out)


@gluon.jit
def compute_tile(given, stage, place, tiles, turn, steps, out, G: gl.constexpr, FIRST: gl.constexpr):
    """Compute a tile -> stage and place after it."""
    x = numbers_of(tiles, turn)
    factors = tiles.factors.index(turn.index).reshape([ROWS])
    if number(x, 3) - number(x, 2) > M * G:
        sums0, sums1, stage, place = tile_sums(given, stage, place, steps, factors, G, True)
        columns = tiles.columns.index(turn.index)
        write_sums(sums0, sums1, numbers_of(tiles, turn), factors, columns, out, G, FIRST)
    else:
        sums0, sums1, stage, place = tile_sums(given, stage, place, steps, factors, G, False)
    return stage, place


@gluon.jit
def compute_role(given, tiles, sizes, hidden, slots, signals, G: gl.constexpr):
    """Compute rows 64 G to 64 G + 63 of every tile."""
    stage, turn, place = consumer_stage(), consumer_stage(), consumer_stage()
    tiles.known.wait(turn.index, turn.phase)
    x = numbers_of(tiles, turn)
    while number(x, 0) >= 0:
        if number(x, 5) != 0:
            stage, place = compute_tile(given, stage, place, tiles, turn, sizes.steps1, hidden, G, True)
            signal(signals.hidden_ptr + number(numbers_of(tiles, turn), 0))
        else:
            stage, place = compute_tile(given, stage, place, tiles, turn, sizes.steps2, slots, G, False)
        tiles.done.arrive(turn.index)
        turn = next_stage(turn, 2)
        tiles.known.wait(turn.index, turn.phase)
        x = numbers_of(tiles, turn)


@gluon.jit
def moe_products_wide_sm90(
    w13_desc, w13_offsets_desc, w13_factors_desc, x_desc, x_scales_desc, w2_desc, w2_offsets_desc, w2_factors_desc,
    h_desc, h_scales_desc, rows, sizes, hidden, slots, signals, STAGES: gl.constexpr, EXPERTS: gl.constexpr,
    COMPUTE_REGS: gl.constexpr, LOAD_REGS: gl.constexpr,
):  # fmt: skip
    """Compute both products. EXPERTS: a power of two, at least as many as there are and 32."""
    launch_dependents()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    values = gl.allocate_shared_memory(gl.int32, [STAGES, 16, 256], w13_desc.layout)
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, WIDTH, STEP], x_desc.layout)
    weights = gl.allocate_shared_memory(gl.float8e4nv, [SLOTS, ROWS, STEP], x_desc.layout)
    offsets = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 256], w13_offsets_desc.layout)
    x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, WIDTH], x_scales_desc.layout)
    numbers = gl.allocate_shared_memory(gl.int32, [2, 8], PLAIN)
    factors = gl.allocate_shared_memory(gl.int32, [2, 1, ROWS], w13_factors_desc.layout)
    columns = gl.allocate_shared_memory(gl.int32, [2, WIDTH], PLAIN)
    ends = gl.allocate_shared_memory(gl.int32, [EXPERTS], PLAIN)
    ready, free = new_barriers(STAGES), new_barriers(STAGES, 2)
    known, done = new_barriers(2), new_barriers(2, 2)
    filled, unused = new_barriers(2 * SLOTS), new_barriers(SLOTS, 2)
    init_barriers((ready, free, known, done, filled, unused))
    stages = Stages(values, offsets, x, x, x_scales, ready, free, False)
    tiles = Tiles(numbers, factors, columns, known, done)
    wait_on_prior_grid()
    counts = rows_of_experts(rows, EXPERTS)
    ticket = take(signals.ticket_ptr)  # while those loads are in flight
    count = write_ends(ends, counts, WIDTH)
    barrier()  # see products.py
    first = Operands(w13_desc, w13_offsets_desc, w13_factors_desc, x_desc, x_scales_desc, sizes.blocks1, sizes.steps1)
    second = Operands(w2_desc, w2_offsets_desc, w2_factors_desc, h_desc, h_scales_desc, sizes.blocks2, sizes.steps2)
    given = (stages, weights, filled, unused)
    load = (first, second, stages, tiles, ends, count, ticket, rows, signals)
    gl.warp_specialize(
        [
            (compute_role, (given, tiles, sizes, hidden, slots, signals, 0)),
            (compute_role, (given, tiles, sizes, hidden, slots, signals, 1)),
            (load_role, (load, 0, 2)),
        ],
        [4, 1],
        [COMPUTE_REGS, LOAD_REGS],
    )
