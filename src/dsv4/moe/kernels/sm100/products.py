"""Both products of the experts on sm_100a: FP4 weights times FP8 or FP4 activations, block-scaled by tcgen05.

A tile is 256 rows of weights of one expert and N rows of activations; its products are sums over all columns, 128 per
step. Weights are operand A: two halves of 128 rows, each with an accumulator [128, N] in tensor memory, whose lanes are
rows of weights and whose columns are rows of activations. CTAs are persistent (schedule.py)::

    load       1 warp    tile 0, step 0 | step 1 | ... | tile 1, step 0 ...     TMA, as far ahead as the ring is
    multiply   1 warp    scales to tensor memory, both halves | the next step ...
    write      4 warps                                        tile 0: SwiGLU, rounding, stores | tile 1 ...

In product 1 the first half is the gate of 128 channels, the second is up of the same channels. So a thread has gate and
up of a channel, and the CTA has a whole group of 128 hidden values, which it rounds. In product 2 a tile is 256 output
channels. With two accumulators per half (N up to 64) a tile is written while the next one is multiplied.

Recipes (formats.py). MXFP4 weights, an E8M0 byte for 32 columns, times e4m3 with one for 32 or for 128, stored four
times: kind mxf8f6f4. NVFP4 times NVFP4, an E4M3 byte for 16 columns: kind mxf4nvf4; the scale of a tensor multiplies
what is written. Scales lie in memory as tcgen05 reads them: 128 rows and 4 bytes are an atom of 512 bytes, row i at
16 (i % 32) + 4 (i / 32); a step has WORDS of them, 1 or 2. Rows of activations of a tile begin an atom, whatever N is.
A scale in tensor memory is overwritten when the products of its stage are complete, as the stage itself.

tensor memory   columns      holds
acc             2 A N        fp32 [128, N]: half h of a tile at 2 (tile % A) + h; A is 2 for N up to 64, else 1
scales          12 W STAGES  bytes [128, 4 W] of stage s: activations (N rows) at 3 s, half h of weights at 3 s + 1 + h
                             (W: WORDS)

shared memory   bytes of a stage    holds
w               32768 / W           E2M1 [256, 128]; with e4m3 x, TMA stores 16 of them as 8 bytes and a gap of 8
w_scales        1024 W              atoms of both halves
x               128 N / W           [N, 128]
x_scales        512 W               atoms
ends            4 EXPERTS in all    int32: tiles of rows of activations up to each expert's last

barrier         arrives             count   waits       means
ready[s]        TMA                 1       multiply    stage s is filled: load expects the bytes of its four copies
free[s]         commit of multiply  1       load        the products of stage s are complete
acc_ready[a]    commit of multiply  1       write       the accumulators of a tile are complete
acc_free[a]     write               1       multiply    they have been read
"""

from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory

from dsv4.kernels.compat import gl, gluon
from dsv4.kernels.dependent import launch_dependents, wait_on_prior_grid
from dsv4.kernels.ring import consumer_stage, init_barriers, new_barriers, next_stage, producer_stage
from dsv4.moe.kernels.rows import words_of
from dsv4.moe.kernels.schedule import tile_at, write_schedule
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
    write_hidden,
    write_slots,
    written_layout,
)


@gluon.jit
def atom_of(first, begin, expert, N: gl.constexpr):
    """Return where the scales of a tile's rows are. Experts before this one have at most begin // N + expert tiles."""
    return begin // N + expert + (first - begin) // N


@gluon.jit
def load_role(operands, stages, ends, tiles, rows, weights, WORDS: gl.constexpr):
    N: gl.constexpr = stages.x.shape[1]
    stage = producer_stage()
    for tile in range(gl.program_id(0), tiles * weights.blocks, gl.num_programs(0)):
        expert, block, first, begin, _stop = tile_at(tile, ends, rows, weights.blocks, N)
        place = (expert * weights.blocks + block) * weights.steps
        atom = atom_of(first, begin, expert, N)
        stage = load_tile(operands, stages, stage, place, first, atom, weights.steps, rows.atoms, WORDS)


@gluon.jit
def multiply_role(stages, accs, tiles, weights, WORDS: gl.constexpr):
    stage = consumer_stage()
    turn = consumer_stage()
    for _ in range(gl.program_id(0), tiles * weights.blocks, gl.num_programs(0)):
        stage = multiply_tile(stages, stage, accs, turn, weights.steps, WORDS)
        turn = next_stage(turn, accs.acc.shape[0] // 2)


@gluon.jit
def write_role(accs, ends, tiles, rows, weights, out, FIRST: gl.constexpr, RECIPE: gl.constexpr):
    N: gl.constexpr = accs.acc.shape[2]
    turn = consumer_stage()
    for tile in range(gl.program_id(0), tiles * weights.blocks, gl.num_programs(0)):
        expert, block, first, begin, stop = tile_at(tile, ends, rows, weights.blocks, N)
        low, high = halves_of_tile(accs, turn, weights, expert, block, RECIPE)
        if FIRST:
            write_hidden(low, high, block, first, stop, atom_of(first, begin, expert, N), rows, out, RECIPE)
        else:
            row = first + gl.arange(0, N, layout=gl.SliceLayout(0, written_layout()))
            slot = gl.load(rows.slot_ptr + row, mask=row < stop, other=0)
            line = slot.to(gl.int64) * (out.width // 8)
            write_slots(low, block * 2 * HALF, line, row < stop, out)
            write_slots(high, block * 2 * HALF + HALF, line, row < stop, out)
        turn = next_stage(turn, accs.acc.shape[0] // 2)


@gluon.jit
def moe_product_sm100(
    w_desc,
    w_scales_desc,
    x_desc,
    x_scales_desc,
    rows,
    weights,
    out,
    FIRST: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    EXPERTS: gl.constexpr,
    RECIPE: gl.constexpr,
    WARP_REGS: gl.constexpr = 64,
):
    """Compute one product. EXPERTS: a power of two, at least as many as there are and 32."""
    launch_dependents()
    A: gl.constexpr = 2 if N <= 64 else 1
    WORDS: gl.constexpr = words_of(RECIPE)
    w = gl.allocate_shared_memory(gl.uint8, [STAGES, 2 * HALF, STEP // 2], w_desc.layout)
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, N, STEP // WORDS], x_desc.layout)
    w_scales = gl.allocate_shared_memory(gl.uint8, [STAGES, 4 * WORDS, 256], w_scales_desc.layout)
    x_scales = gl.allocate_shared_memory(gl.uint8, [STAGES, 2 * WORDS, 256], x_scales_desc.layout)
    ends = gl.allocate_shared_memory(gl.int32, [EXPERTS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    acc = allocate_tensor_memory(gl.float32, [2 * A, HALF, N], TensorMemoryLayout([HALF, N], col_stride=1))
    # An atom has four columns; Gluon has no type for scales of several stages.
    COLUMNS: gl.constexpr = TensorMemoryLayout([ATOM, 4 * WORDS], col_stride=1)
    scales = allocate_tensor_memory(gl.int32, [3 * STAGES, ATOM, 4 * WORDS], COLUMNS)
    ready = new_barriers(STAGES)
    free = new_barriers(STAGES)
    acc_ready = new_barriers(A)
    acc_free = new_barriers(A)
    init_barriers((ready, free, acc_ready, acc_free))
    stages = Stages(w, w_scales, x, x_scales, ready, free)
    accs = Accumulators(acc, scales, acc_ready, acc_free)
    operands = Operands(w_desc, w_scales_desc, x_desc, x_scales_desc)
    wait_on_prior_grid()
    tiles = write_schedule(ends, rows, N)
    gl.warp_specialize(
        [
            (write_role, (accs, ends, tiles, rows, weights, out, FIRST, RECIPE)),
            (load_role, (operands, stages, ends, tiles, rows, weights, WORDS)),
            (multiply_role, (stages, accs, tiles, weights, WORDS)),
        ],
        [1, 1],
        [WARP_REGS, WARP_REGS],
    )
