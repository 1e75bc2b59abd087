"""Both products of the experts on sm_90a, in one launch: FP4 weights, FP8 activations with one scale per row and 128
columns.

A tile is 256 rows of weights of one expert and N rows of activations; its products are sums over all columns (sums.py).
Product 1: rows 0-127 are the gate of 128 channels, rows 128-255 are up of the same ones; so a tile has a whole group of
128 hidden values, which are rounded to e4m3 with one scale; each compute role has 64 of them, and tells the other its
maxima (outputs.py). Product 2: 256 channels of the output.

CTAs take tiles by tickets, those of product 1 first, of one expert one after the other; of two tiles with the same
weights the second finds them in L2. A tile of product 2 waits until the tiles of product 1 of its expert are written:
those have lower tickets, so they are complete or in the hands of CTAs that do not wait (kernels/signals.py)::

    load        tile 0, step 0 | step 1 | ... | tile 1, step 0 ...           one warp, TMA, as far ahead as the ring is
    compute 0   rows 0-63 and 128-191 of every tile
    compute 1   the other 128 rows: it decodes while the tensor core works for compute 0

shared memory   bytes of a stage    holds
values          16384               FP4 [256 rows, 4 groups, 16 bytes]
offsets         1024                E8M0 bytes [256 rows, 4 groups]
x               128 W               e4m3 [W, 128], with the 128-byte swizzle: the first W rows of activations
rest            128 REST            the same of the other ones, if there are any; N = W + REST
x_scales        4 max(N, 32)        fp32, N of them used

shared memory   bytes of a tile     holds, for two tiles
numbers         32                  expert (-1: there is no tile more), block, rows, which product
factors         1024                fp32 [256]: of the rows of weights
columns         4 max(N, 32)        of the rows of activations: weights of slots, or numbers of slots

shared memory   bytes in all        holds
amax            16 max(N, 32)       fp32 [2, 2, N]: the greatest hidden value, by even and odd tiles and compute roles
ends            4 EXPERTS           int32: tiles of rows of activations up to each expert's last

barrier         arrives     count   waits       means
ready[s]        TMA         1       compute     stage s is filled: load expects the bytes of all copies
free[s]         compute     2       load        stage s has been read, and its products are complete
known[t]        load, TMA   1       compute     what is known of a tile is there
done[t]         compute     2       load        it has been read
told            compute     2       compute     both have written their maxima of a tile
"""

from dsv4.kernels.compat import Value, aggregate, barrier, gl, gluon, mbarrier, tma_load
from dsv4.kernels.dependent import launch_dependents, wait_on_prior_grid
from dsv4.kernels.ring import Barriers, consumer_stage, init_barriers, new_barriers, next_stage, producer_stage
from dsv4.kernels.signals import GPU, fence_async, read_acquire, signal, take
from dsv4.moe.kernels.schedule import rows_of_experts, tile_at, write_ends
from dsv4.moe.kernels.sm90.outputs import number, numbers_layout, write_sums
from dsv4.moe.kernels.sm90.sums import ROWS, STEP, Stages, bases, tile_sums

FEW = gl.constexpr(32)  # rows of activations: a tile with no more multiplies no more


@gluon.constexpr_function
def scales_width(n):
    """Scales that a copy brings, a power of two: 128 bytes at least, as copies begin at multiples of that in shared
    memory."""
    return max(1 << (n - 1).bit_length(), 32)


@aggregate
class Tiles:
    """What is known of two tiles. Loads from global memory would hold up whoever computes: the warp that loads is ahead
    of them."""

    numbers: Value
    factors: Value
    columns: Value
    known: Barriers
    done: Barriers


@gluon.jit
def scale_shift(begin, expert):
    """TMA reads 16 bytes at multiples of 16: the scales of every expert begin at a multiple of 4."""
    return (begin + 3) // 4 * 4 + 4 * expert - begin


@aggregate
class Operands:
    """Weights and activations of one product, and how the tiles of an expert are counted."""

    values_desc: Value
    offsets_desc: Value
    factors_desc: Value
    x_desc: Value
    x_scales_desc: Value
    blocks: Value
    steps: Value


@gluon.jit
def write_tile(tiles, at, expert, block, first, stop, shift, rows, FIRST: gl.constexpr):
    """What the computing warps have to know of a tile, but for its factors."""
    n = gl.arange(0, 8, layout=numbers_layout(gl.num_warps()))
    x = gl.where(n == 0, expert, gl.where(n == 1, block, gl.where(n == 2, first, gl.where(n == 3, stop, shift))))
    tiles.numbers.index(at).store(gl.where(n == 5, 1 if FIRST else 0, x))
    COLUMNS: gl.constexpr = tiles.columns.shape[1]
    row = first + gl.arange(0, COLUMNS, layout=gl.BlockedLayout([COLUMNS // 32], [32], [gl.num_warps()], [0]))
    if FIRST:
        column = gl.load(rows.weight_ptr + row, mask=row < stop, other=0.0).to(gl.int32, bitcast=True)
    else:
        column = gl.load(rows.slot_ptr + row, mask=row < stop, other=0)
    tiles.columns.index(at).store(column)


@gluon.jit
def hidden_missing(signals, rows, expert, first, shift, blocks, N: gl.constexpr, SCALES: gl.constexpr):
    """> 0 unless the hidden values of N rows and as many scales as are read with them are there, also those of the next
    experts, which no output is made of. All lanes look, at 32 experts at a time, which have 128 scales or more; both
    compute roles signal every tile."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    missing, begin = gl.to_tensor(0), first
    while begin < first + N:
        there = expert + lane < rows.experts
        one = gl.where(there, expert + lane, 0)
        begins = gl.load(rows.starts_ptr + one)
        ends = gl.load(rows.starts_ptr + one + 1)
        read = (begins < first + N) | (begins + scale_shift(begins, one) < first + shift + SCALES)
        wanted = gl.where(there & read, 2 * blocks * ((ends - begins + N - 1) // N), 0)
        missing = gl.maximum(missing, gl.max(wanted - read_acquire(signals.hidden_ptr + one, GPU), 0))
        expert += 32
        begin = first + N
        if expert < rows.experts:
            begin = gl.load(rows.starts_ptr + expert)
    return missing


@gluon.jit
def load_weights(given, at, stages, stage, BYTES: gl.constexpr):
    """The weights of one step, into a stage that BYTES fill."""
    stages.free.wait(stage.index, stage.phase)
    ready = stages.ready.at(stage.index)
    mbarrier.expect(ready, BYTES)
    tma_load(given.values_desc, [at * 16, 0], ready, stages.values.index(stage.index))
    tma_load(given.offsets_desc, [at, 0], ready, stages.offsets.index(stage.index))


@gluon.jit
def load_tile(
    tile, given, stages, stage, tiles, turn, ends, rows, signals, blocks, REST: gl.constexpr, FIRST: gl.constexpr
):
    """-> the stage after it. blocks: of product 1."""
    W: gl.constexpr = stages.x.shape[1]
    N: gl.constexpr = W + REST
    BOX: gl.constexpr = REST if REST > 0 else W
    BYTES: gl.constexpr = ROWS * 64 + ROWS * 4 + N * STEP + scales_width(N) * 4
    expert, block, first, begin, stop = tile_at(tile, ends, rows, given.blocks, N)
    shift = scale_shift(begin, expert)
    place = expert * given.blocks + block
    tiles.done.wait(turn.index, turn.phase)
    write_tile(tiles, turn.index, expert, block, first, stop, shift, rows, FIRST)
    known = tiles.known.at(turn.index)
    mbarrier.expect(known, ROWS * 4)
    tma_load(given.factors_desc, [place, 0], known, tiles.factors.index(turn.index))
    early = gl.to_tensor(0)
    if not FIRST:
        SCALES: gl.constexpr = scales_width(N)
        if hidden_missing(signals, rows, expert, first, shift, blocks, N, SCALES) > 0:
            early = gl.minimum(stages.values.shape[0], given.steps)  # weights do not wait for hidden values
            to = stage
            for step in range(early):
                load_weights(given, place * given.steps + step, stages, to, BYTES)
                to = next_stage(to, stages.values.shape[0])
            while hidden_missing(signals, rows, expert, first, shift, blocks, N, SCALES) > 0:
                pass
        barrier()  # what lanes have seen, the one that issues copies has
        fence_async()
    for step in range(given.steps):
        if step >= early:
            load_weights(given, place * given.steps + step, stages, stage, BYTES)
        ready = stages.ready.at(stage.index)
        for part in gl.static_range(W // BOX):
            x = stages.x.index(stage.index).slice(BOX * part, BOX)
            tma_load(given.x_desc, [first + BOX * part, step * STEP], ready, x)
        if REST > 0:
            tma_load(given.x_desc, [first + W, step * STEP], ready, stages.rest.index(stage.index))
        tma_load(given.x_scales_desc, [step, first + shift], ready, stages.x_scales.index(stage.index))
        stage = next_stage(stage, stages.values.shape[0])
    return stage


@gluon.jit
def load_role(first, second, stages, tiles, ends, count, ticket, rows, signals, REST: gl.constexpr):
    stage, turn = producer_stage(), producer_stage()
    hidden, every = count * first.blocks, count * (first.blocks + second.blocks)
    while ticket < every:
        if ticket < hidden:
            stage = load_tile(ticket, first, stages, stage, tiles, turn, ends, rows, signals, first.blocks, REST, True)
        else:
            stage = load_tile(
                ticket - hidden, second, stages, stage, tiles, turn, ends, rows, signals, first.blocks, REST, False
            )
        turn = next_stage(turn, 2)
        ticket = take(signals.ticket_ptr)
    tiles.done.wait(turn.index, turn.phase)
    tiles.numbers.index(turn.index).store(gl.full([8], -1, gl.int32, numbers_layout(gl.num_warps())))
    tiles.known.arrive(turn.index)


@gluon.jit
def compute_tile(stages, stage, tiles, x, turn, told_turn, amax, told, steps, out, G: gl.constexpr,
                 FIRST: gl.constexpr, N: gl.constexpr, REST: gl.constexpr):  # fmt: skip
    """One tile, of whose first part of rows of activations N are used, and REST of its second -> the stage after it."""
    factors = tiles.factors.index(turn.index).reshape([ROWS])
    base0, base1 = bases(factors, G), bases(factors, 2 + G)
    sums, stage = tile_sums(stages, stage, steps, base0, base1, G, N, REST)
    write_sums(sums, x, factors, tiles.columns.index(turn.index), told_turn, amax, told, out, G, FIRST)
    return stage


@gluon.jit
def compute_some(stages, stage, tiles, x, turn, told_turn, amax, told, steps, out, G: gl.constexpr,
                 FIRST: gl.constexpr, REST: gl.constexpr):  # fmt: skip
    """The same, with all rows of activations, or with 32."""
    W: gl.constexpr = stages.x.shape[1]
    if W > FEW and number(x, 3) - number(x, 2) <= FEW:
        stage = compute_tile(stages, stage, tiles, x, turn, told_turn, amax, told, steps, out, G, FIRST, FEW, 0)
    else:
        stage = compute_tile(stages, stage, tiles, x, turn, told_turn, amax, told, steps, out, G, FIRST, W, REST)
    return stage


@gluon.jit
def compute_role(stages, tiles, amax, told, sizes, hidden, slots, signals, G: gl.constexpr, REST: gl.constexpr):
    """Rows 64 G to 64 G + 63 of both halves of every tile."""
    stage, turn = consumer_stage(), consumer_stage()
    told_turn = gl.to_tensor(0)
    tiles.known.wait(turn.index, turn.phase)
    x = tiles.numbers.index(turn.index).load(numbers_layout(gl.num_warps()))
    while number(x, 0) >= 0:
        if number(x, 5) != 0:
            stage = compute_some(
                stages, stage, tiles, x, turn, told_turn, amax, told, sizes.steps1, hidden, G, True, REST
            )
            signal(signals.hidden_ptr + number(x, 0))
            told_turn = told_turn ^ 1
        else:
            stage = compute_some(
                stages, stage, tiles, x, turn, told_turn, amax, told, sizes.steps2, slots, G, False, REST
            )
        tiles.done.arrive(turn.index)
        turn = next_stage(turn, 2)
        tiles.known.wait(turn.index, turn.phase)
        x = tiles.numbers.index(turn.index).load(numbers_layout(gl.num_warps()))


@gluon.jit
def moe_products_sm90(
    w13_desc, w13_offsets_desc, w13_factors_desc, x_desc, x_scales_desc, w2_desc, w2_offsets_desc, w2_factors_desc,
    h_desc, h_scales_desc, rows, sizes, hidden, slots, signals, W: gl.constexpr, REST: gl.constexpr,
    STAGES: gl.constexpr, EXPERTS: gl.constexpr, COMPUTE_REGS: gl.constexpr = 232, LOAD_REGS: gl.constexpr = 40,
):  # fmt: skip
    """EXPERTS: a power of two, at least as many as there are and 32."""
    launch_dependents()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    values = gl.allocate_shared_memory(gl.int32, [STAGES, 16, 256], w13_desc.layout)
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, W, STEP], x_desc.layout)
    rest = x
    if REST > 0:
        rest = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, REST, STEP], x_desc.layout)
    offsets = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 256], w13_offsets_desc.layout)
    x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, scales_width(W + REST)], x_scales_desc.layout)
    numbers = gl.allocate_shared_memory(gl.int32, [2, 8], PLAIN)
    factors = gl.allocate_shared_memory(gl.int32, [2, 1, ROWS], w13_factors_desc.layout)
    columns = gl.allocate_shared_memory(gl.int32, [2, scales_width(W + REST)], PLAIN)
    ends = gl.allocate_shared_memory(gl.int32, [EXPERTS], PLAIN)
    amax = gl.allocate_shared_memory(gl.float32, [4, scales_width(W + REST)], PLAIN)
    ready = new_barriers(STAGES)
    free = new_barriers(STAGES, 2)
    known = new_barriers(2)
    done = new_barriers(2, 2)
    told = new_barriers(1, 2)
    init_barriers((ready, free, known, done, told))
    stages = Stages(values, offsets, x, rest, x_scales, ready, free)
    tiles = Tiles(numbers, factors, columns, known, done)
    wait_on_prior_grid()
    counts = rows_of_experts(rows, EXPERTS)
    ticket = take(signals.ticket_ptr)  # while those loads are under way
    count = write_ends(ends, counts, W + REST)
    # Triton 3.6 keeps what roles are given where the ticket was passed on, and orders neither after the other: a warp
    # that reads its ticket late would read, and hand on, the count.
    barrier()
    first = Operands(w13_desc, w13_offsets_desc, w13_factors_desc, x_desc, x_scales_desc, sizes.blocks1, sizes.steps1)
    second = Operands(w2_desc, w2_offsets_desc, w2_factors_desc, h_desc, h_scales_desc, sizes.blocks2, sizes.steps2)
    gl.warp_specialize([
        (compute_role, (stages, tiles, amax, told, sizes, hidden, slots, signals, 0, REST)),
        (compute_role, (stages, tiles, amax, told, sizes, hidden, slots, signals, 1, REST)),
        (load_role, (first, second, stages, tiles, ends, count, ticket, rows, signals, REST)),
    ], [4, 1], [COMPUTE_REGS, LOAD_REGS])  # fmt: skip
