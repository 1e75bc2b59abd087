"""Both products of the experts on sm_90a, in one launch: FP4 weights, FP8 activations with one scale per row and 128
columns.

A tile is 256 rows of weights of one expert and N rows of activations; its products are sums over all columns (sums.py).
In product 1 rows 0-127 are the gate of 128 channels, rows 128-255 are up of the same channels. So a tile has a whole
group of 128 hidden values, which are rounded to e4m3 with one scale. Each compute role has 64 of them, and shares its
maxima with the other (outputs.py). In product 2 a tile is 256 output channels.

CTAs take tiles by tickets, those of product 1 first, those of one expert one after the other; the second of two tiles
with the same weights finds them in L2. A tile of product 2 waits until the tiles of product 1 of its expert are
written: those have lower tickets, so they are complete or owned by CTAs that do not wait (kernels/signals.py). Every
tile of rows has its own place in the hidden values, so a copy of a whole tile reads none of another expert's, which may
not be complete::

    load        tile 0, step 0 | step 1 | ... | tile 1, step 0 ...           one warp, TMA, as far ahead as the ring is
    compute 0   rows 0-63 and 128-191 of every tile
    compute 1   the other 128 rows: it decodes while the tensor core works for compute 0
    or four roles, with 64 rows each, if tiles have few rows of activations (narrow.py)

shared memory   bytes of a stage    holds
values          16384               FP4 [256 rows, 4 groups, 16 bytes]
offsets         1024                E8M0 bytes [256 rows, 4 groups]
x               128 W               e4m3 [W, 128], with the 128-byte swizzle: the first W rows of activations
rest            128 REST            the same for the other rows, if any; N = W + REST
x_scales        4 max(N, 32)        fp32, N of them used

shared memory   bytes of a tile     holds, for two tiles
numbers         32                  expert (-1: no tile is left), block, rows, which product, places of hidden values
factors         1024                fp32 [256]: of the rows of weights
columns         4 max(N, 32)        of the rows of activations: weights of slots, or numbers of slots

shared memory   bytes in all        holds
amax            8 ROLES max(N, 32)  fp32 [2, ROLES, N]: the greatest hidden value, by even and odd tiles and roles
ends            4 EXPERTS           int32: tiles of rows of activations up to each expert's last

barrier         arrives     count   waits       means
ready[s]        TMA         1       compute     stage s is filled: load expects the bytes of all copies
free[s]         compute     ROLES   load        stage s has been read, and its products are complete
known[t]        load, TMA   1       compute     the description of a tile is complete
done[t]         compute     ROLES   load        it has been read
told            compute     ROLES   compute     all have written their maxima of a tile
"""

from dsv4.kernels.compat import Value, aggregate, barrier, gl, gluon, mbarrier, tma_load
from dsv4.kernels.dependent import launch_dependents, wait_on_prior_grid
from dsv4.kernels.ring import Barriers, consumer_stage, init_barriers, new_barriers, next_stage, producer_stage
from dsv4.kernels.signals import GPU, fence_async, read_acquire, signal, take
from dsv4.moe.kernels.schedule import experts_layout, rows_of_experts, write_ends
from dsv4.moe.kernels.sm90.narrow import NARROW, narrow_sums, write_narrow
from dsv4.moe.kernels.sm90.outputs import number, numbers_layout, write_sums
from dsv4.moe.kernels.sm90.sums import ROWS, STEP, Stages, bases, tile_sums

FEW = gl.constexpr(32)  # rows of activations: a tile with at most this many multiplies only these


@gluon.constexpr_function
def scales_width(n):
    """Return the scales that a copy loads, a power of two: at least 128 bytes, as copies begin at multiples of 128 in
    shared memory."""
    return max(1 << (n - 1).bit_length(), 32)


@aggregate
class Tiles:
    """Descriptions of two tiles. Loads from global memory would stall the compute roles, so the load warp, which runs
    ahead, does them."""

    numbers: Value
    factors: Value
    columns: Value
    known: Barriers
    done: Barriers


@gluon.jit
def scale_shift(begin, expert):
    """Return the shift that puts an expert's scales at a multiple of 4: TMA reads 16 bytes at multiples of 16."""
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
def write_tile(tiles, at, expert, block, first, stop, place, rows, N: gl.constexpr, FIRST: gl.constexpr):
    """Write what the compute warps need to know of a tile, except its factors. place: which tile of rows it is."""
    COLUMNS: gl.constexpr = tiles.columns.shape[1]
    n = gl.arange(0, 8, layout=numbers_layout(gl.num_warps()))
    x = gl.where(n == 0, expert, gl.where(n == 1, block, gl.where(n == 2, first, stop)))
    x = gl.where(n == 4, place * N, gl.where(n == 5, 1 if FIRST else 0, gl.where(n == 6, place * COLUMNS, x)))
    tiles.numbers.index(at).store(x)
    row = first + gl.arange(0, COLUMNS, layout=gl.BlockedLayout([COLUMNS // 32], [32], [gl.num_warps()], [0]))
    if FIRST:
        column = gl.load(rows.weight_ptr + row, mask=row < stop, other=0.0).to(gl.int32, bitcast=True)
    else:
        column = gl.load(rows.slot_ptr + row, mask=row < stop, other=0)
    tiles.columns.index(at).store(column)


@gluon.jit
def missing(word, wanted):
    """Return > 0 until `wanted` signals have arrived. All lanes read, and see the same."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return wanted - gl.min(read_acquire(word + lane * 0, GPU), 0)


@gluon.jit
def load_weights(given, at, stages, stage, few, BYTES: gl.constexpr, LESS: gl.constexpr):
    """Load the weights of one step into a stage that BYTES fill, or LESS if few rows are used."""
    stages.free.wait(stage.index, stage.phase)
    ready = stages.ready.at(stage.index)
    if LESS < BYTES:
        mbarrier.expect(ready, BYTES, pred=few == 0)
        mbarrier.expect(ready, LESS, pred=few != 0)
    else:
        mbarrier.expect(ready, BYTES)
    tma_load(given.values_desc, [at * 16, 0], ready, stages.values.index(stage.index))
    tma_load(given.offsets_desc, [at, 0], ready, stages.offsets.index(stage.index))


@gluon.jit
def row_tile_at(tile, ends, blocks):
    """Return expert, block of weights, the tile of rows among all, among the expert's, and how many the expert has. It
    reads nothing from global memory."""
    all_ends = ends.load(experts_layout(ends.shape[0], gl.num_warps()))
    done = all_ends * blocks <= tile
    before = gl.max(gl.where(done, all_ends, 0), 0)
    parts = gl.min(gl.where(done, 0x7FFFFFFF, all_ends), 0) - before
    local = tile - before * blocks
    block = local // parts
    part = local - block * parts
    return gl.sum(done.to(gl.int32), 0), block, before + part, part, parts


@gluon.jit
def load_tile(
    tile, given, stages, stage, tiles, turn, ends, rows, signals, needed, ahead, REST: gl.constexpr, FIRST: gl.constexpr
):
    """Load a tile -> the stage after it. needed: signals of a tile of rows of product 1. ahead: steps whose weights are
    requested before anything is read."""
    W: gl.constexpr = stages.x.shape[1]
    N: gl.constexpr = W + REST
    BOX: gl.constexpr = REST if REST > 0 else min(W, 64)
    BYTES: gl.constexpr = ROWS * 64 + ROWS * 4 + N * STEP + scales_width(N) * 4
    USED: gl.constexpr = BOX if REST == 0 else W if stages.MIDDLE else N  # rows of activations, if there are few
    LESS: gl.constexpr = BYTES - (N - USED) * STEP
    STAGES: gl.constexpr = stages.values.shape[0]
    expert, block, place, part, parts = row_tile_at(tile, ends, given.blocks)
    begin = gl.load(rows.starts_ptr + expert)
    stop = gl.load(rows.starts_ptr + expert + 1)
    weights = expert * given.blocks + block
    few = (stop - begin - part * N <= USED).to(gl.int32)
    early, to = gl.minimum(ahead, given.steps), stage
    for step in range(early):
        load_weights(given, weights * given.steps + step, stages, to, few, BYTES, LESS)
        to = next_stage(to, STAGES)
    first = begin + part * N
    tiles.done.wait(turn.index, turn.phase)
    write_tile(tiles, turn.index, expert, block, first, stop, place, rows, N, FIRST)
    barrier()  # all lanes have written; one of them arrives
    known = tiles.known.at(turn.index)
    mbarrier.expect(known, ROWS * 4)
    tma_load(given.factors_desc, [weights, 0], known, tiles.factors.index(turn.index))
    row, scale = place * N, place * scales_width(N)
    if FIRST:
        row, scale = first, first + scale_shift(begin, expert)
    else:
        if missing(signals.hidden_ptr + expert, needed * parts) > 0:
            some = gl.minimum(STAGES, given.steps)  # weights do not wait for hidden values
            for step in range(early, some):
                load_weights(given, weights * given.steps + step, stages, to, few, BYTES, LESS)
                to = next_stage(to, STAGES)
            early = some
            while missing(signals.hidden_ptr + expert, needed * parts) > 0:
                pass
        barrier()  # what the lanes have observed, the lane that issues copies has too
        fence_async()
    for step in range(given.steps):
        if step >= early:
            load_weights(given, weights * given.steps + step, stages, stage, few, BYTES, LESS)
        ready = stages.ready.at(stage.index)
        for n in gl.static_range(W // BOX):
            x = stages.x.index(stage.index).slice(BOX * n, BOX)
            used = few == 0 if USED < W and n > 0 else True
            tma_load(given.x_desc, [row + BOX * n, step * STEP], ready, x, pred=used)
        if REST > 0:
            used = few == 0 if USED < N else True
            tma_load(given.x_desc, [row + W, step * STEP], ready, stages.rest.index(stage.index), pred=used)
        tma_load(given.x_scales_desc, [step, scale], ready, stages.x_scales.index(stage.index))
        stage = next_stage(stage, STAGES)
    return stage


@gluon.jit
def load_role(given, REST: gl.constexpr, ROLES: gl.constexpr):
    first, second, stages, tiles, ends, count, ticket, rows, signals = given
    stage, turn = producer_stage(), producer_stage()
    needed, ahead = ROLES * first.blocks, gl.to_tensor(stages.values.shape[0])
    hidden, every = count * first.blocks, count * (first.blocks + second.blocks)
    while ticket < every:
        if ticket < hidden:
            stage = load_tile(ticket, first, stages, stage, tiles, turn, ends, rows, signals, needed, ahead, REST, True)
        else:
            stage = load_tile(
                ticket - hidden, second, stages, stage, tiles, turn, ends, rows, signals, needed, ahead, REST, False
            )
        turn = next_stage(turn, 2)
        ahead = gl.to_tensor(0)
        ticket = take(signals.ticket_ptr)
    tiles.done.wait(turn.index, turn.phase)
    tiles.numbers.index(turn.index).store(gl.full([8], -1, gl.int32, numbers_layout(gl.num_warps())))
    tiles.known.arrive(turn.index)


@gluon.jit
def compute_tile(stages, stage, tiles, turn, told_turn, amax, told, steps, out, G: gl.constexpr,
                 FIRST: gl.constexpr, N: gl.constexpr, REST: gl.constexpr, ROLES: gl.constexpr):  # fmt: skip
    """Compute one tile, with N used rows of activations in its first part and REST in its second -> the next stage."""
    factors = tiles.factors.index(turn.index).reshape([ROWS])
    columns = tiles.columns.index(turn.index)
    if ROLES == NARROW:
        sums, stage = narrow_sums(stages, stage, steps, factors, G, FIRST)
        write_narrow(sums, numbers_of(tiles, turn), factors, columns, told_turn, amax, told, out, G, FIRST)
    else:
        base0, base1 = bases(factors, G, 64), bases(factors, 2 + G, 64)
        sums, stage = tile_sums(stages, stage, steps, base0, base1, G, N, REST)
        write_sums(sums, numbers_of(tiles, turn), factors, columns, told_turn, amax, told, out, G, FIRST)
    return stage


@gluon.jit
def compute_some(stages, stage, tiles, rows, turn, told_turn, amax, told, steps, out, G: gl.constexpr,
                 FIRST: gl.constexpr, REST: gl.constexpr, ROLES: gl.constexpr):  # fmt: skip
    """Compute one tile, with all rows of activations, with 32, or with those of the first part."""
    W: gl.constexpr = stages.x.shape[1]
    if W > FEW and rows <= FEW:
        stage = compute_tile(stages, stage, tiles, turn, told_turn, amax, told, steps, out, G, FIRST, FEW, 0, ROLES)
    elif stages.MIDDLE and rows <= W:
        stage = compute_tile(stages, stage, tiles, turn, told_turn, amax, told, steps, out, G, FIRST, W, 0, ROLES)
    else:
        stage = compute_tile(stages, stage, tiles, turn, told_turn, amax, told, steps, out, G, FIRST, W, REST, ROLES)
    return stage


@gluon.jit
def numbers_of(tiles, turn):
    return tiles.numbers.index(turn.index).load(numbers_layout(gl.num_warps()))


@gluon.jit
def compute_role(given, G: gl.constexpr, REST: gl.constexpr, ROLES: gl.constexpr):
    """Compute, with two roles, rows 64 G to 64 G + 63 of both halves of every tile; with four, see narrow.py. The
    numbers of a tile are read again after its sums, which need the registers."""
    stages, tiles, amax, told, sizes, hidden, slots, signals = given
    stage, turn = consumer_stage(), consumer_stage()
    told_turn = gl.to_tensor(0)
    tiles.known.wait(turn.index, turn.phase)
    x = numbers_of(tiles, turn)
    while number(x, 0) >= 0:
        rows = number(x, 3) - number(x, 2)
        if number(x, 5) != 0:
            stage = compute_some(
                stages, stage, tiles, rows, turn, told_turn, amax, told, sizes.steps1, hidden, G, True, REST, ROLES
            )
            signal(signals.hidden_ptr + number(numbers_of(tiles, turn), 0))
            told_turn = told_turn ^ 1
        else:
            stage = compute_some(
                stages, stage, tiles, rows, turn, told_turn, amax, told, sizes.steps2, slots, G, False, REST, ROLES
            )
        tiles.done.arrive(turn.index)
        turn = next_stage(turn, 2)
        tiles.known.wait(turn.index, turn.phase)
        x = numbers_of(tiles, turn)


@gluon.jit
def moe_products_sm90(
    w13_desc, w13_offsets_desc, w13_factors_desc, x_desc, x_scales_desc, w2_desc, w2_offsets_desc, w2_factors_desc,
    h_desc, h_scales_desc, rows, sizes, hidden, slots, signals, W: gl.constexpr, REST: gl.constexpr,
    MIDDLE: gl.constexpr, STAGES: gl.constexpr, EXPERTS: gl.constexpr, ROLES: gl.constexpr,
    COMPUTE_REGS: gl.constexpr, LOAD_REGS: gl.constexpr,
):  # fmt: skip
    """Compute both products. EXPERTS: a power of two, at least as many as there are and 32."""
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
    amax = gl.allocate_shared_memory(gl.float32, [2 * ROLES, scales_width(W + REST)], PLAIN)
    ready = new_barriers(STAGES)
    free = new_barriers(STAGES, ROLES)
    known = new_barriers(2)
    done = new_barriers(2, ROLES)
    told = new_barriers(1, ROLES)
    init_barriers((ready, free, known, done, told))
    stages = Stages(values, offsets, x, rest, x_scales, ready, free, MIDDLE)
    tiles = Tiles(numbers, factors, columns, known, done)
    wait_on_prior_grid()
    counts = rows_of_experts(rows, EXPERTS)
    ticket = take(signals.ticket_ptr)  # while those loads are in flight
    count = write_ends(ends, counts, W + REST)
    # Triton 3.6 stores the arguments of roles where the ticket was passed on, and does not order the two: a warp
    # that reads its ticket late would read, and hand on, the count.
    barrier()
    first = Operands(w13_desc, w13_offsets_desc, w13_factors_desc, x_desc, x_scales_desc, sizes.blocks1, sizes.steps1)
    second = Operands(w2_desc, w2_offsets_desc, w2_factors_desc, h_desc, h_scales_desc, sizes.blocks2, sizes.steps2)
    given = (stages, tiles, amax, told, sizes, hidden, slots, signals)
    load = (first, second, stages, tiles, ends, count, ticket, rows, signals)
    if ROLES == NARROW:
        gl.warp_specialize(
            [
                (compute_role, (given, 0, REST, ROLES)),
                (compute_role, (given, 1, REST, ROLES)),
                (compute_role, (given, 2, REST, ROLES)),
                (compute_role, (given, 3, REST, ROLES)),
                (load_role, (load, REST, ROLES)),
            ],
            [4, 4, 4, 1],
            [COMPUTE_REGS, COMPUTE_REGS, COMPUTE_REGS, LOAD_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (compute_role, (given, 0, REST, ROLES)),
                (compute_role, (given, 1, REST, ROLES)),
                (load_role, (load, REST, ROLES)),
            ],
            [4, 1],
            [COMPUTE_REGS, LOAD_REGS],
        )
