"""Both products of the experts on sm_100a: FP4 weights times FP8 or FP4 activations, block-scaled by tcgen05.

A tile is 256 rows of weights of one expert and N rows of activations, whose products are sums over all columns, 128 at
a step. Weights are operand A: two halves of 128 rows, each with an accumulator [128, N] in tensor memory; lanes are
rows of weights, columns rows of activations. CTAs are persistent (schedule.py)::

    load       1 warp    tile 0, step 0 | step 1 | ... | tile 1, step 0 ...     TMA, as far ahead as the ring is
    multiply   1 warp    scales to tensor memory, both halves | the next step ...
    write      4 warps                                        tile 0: SwiGLU, rounding, stores | tile 1 ...

Product 1: the first half is the gate of 128 channels, the second is up of the same ones. So a thread has gate and up of
a channel, and the CTA a whole group of 128 hidden values, which it rounds. Product 2: 256 channels of the
output. With two accumulators per half (N up to 64) a tile is written while the next one is multiplied.

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
w               32768 / W           E2M1 [256, 128]; beside e4m3, 16 of them have 8 bytes and a gap of 8, by TMA
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

from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    tcgen05_copy,
    tcgen05_mma_scaled,
)

from dsv4.kernels.compat import Value, aggregate, gl, gluon, mbarrier, reinterpret, tma_load
from dsv4.kernels.dependent import launch_dependents, wait_on_prior_grid
from dsv4.kernels.ring import Barriers, consumer_stage, init_barriers, new_barriers, next_stage, producer_stage
from dsv4.moe.kernels.rows import words_of
from dsv4.moe.kernels.schedule import scale_of, swiglu, tile_at, write_schedule

HALF = gl.constexpr(128)  # rows of weights to an accumulator
STEP = gl.constexpr(128)  # columns
ATOM = gl.constexpr(128)  # rows whose scales lie together
E2M1 = gl.constexpr("{ .reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, $2, $1; cvt.u32.u8 $0, pair; }")
E2M1_TYPES = gl.constexpr("=r,f,f")


@aggregate
class Stages:
    """The ring: four buffers to a stage."""

    w: Value
    w_scales: Value
    x: Value
    x_scales: Value
    ready: Barriers
    free: Barriers


@aggregate
class Accumulators:
    """Tensor memory."""

    acc: Value
    scales: Value
    ready: Barriers
    free: Barriers


@gluon.jit
def atom_of(first, begin, expert, N: gl.constexpr):
    """Where the scales of a tile's rows are: experts before this one have at most so many tiles."""
    return begin // N + expert + (first - begin) // N


@gluon.jit
def load_role(w_desc, w_scales_desc, x_desc, x_scales_desc, stages, ends, tiles, rows, weights, WORDS: gl.constexpr):
    N: gl.constexpr = stages.x.shape[1]
    BYTES: gl.constexpr = 2 * HALF * STEP // 2 + N * STEP // WORDS + 3 * 512 * WORDS  # of weights those without gaps
    stage = producer_stage()
    for tile in range(gl.program_id(0), tiles * weights.blocks, gl.num_programs(0)):
        expert, block, first, begin, _stop = tile_at(tile, ends, rows, weights.blocks, N)
        place = (expert * weights.blocks + block) * weights.steps
        atom = atom_of(first, begin, expert, N)
        for step in range(weights.steps):
            stages.free.wait(stage.index, stage.phase)
            ready = stages.ready.at(stage.index)
            mbarrier.expect(ready, BYTES)
            tma_load(w_desc, [(place + step) * 2 * HALF, 0], ready, stages.w.index(stage.index))
            tma_load(x_desc, [first, step * (STEP // WORDS)], ready, stages.x.index(stage.index))
            tma_load(w_scales_desc, [(place + step) * 4 * WORDS, 0], ready, stages.w_scales.index(stage.index))
            line = (step * rows.atoms + atom) * 2 * WORDS
            tma_load(x_scales_desc, [line, 0], ready, stages.x_scales.index(stage.index))
            stage = next_stage(stage, stages.w.shape[0])


@gluon.jit
def as_rows(atoms, WORDS: gl.constexpr):
    """Atoms [2 WORDS, 256 bytes] seen as scales [128 rows, 4 WORDS]."""
    return atoms.reshape((WORDS, 32, 4, 4)).permute((2, 1, 0, 3)).reshape((128, 4 * WORDS))


@gluon.jit
def multiply_role(stages, accs, tiles, weights, WORDS: gl.constexpr):
    A: gl.constexpr = accs.acc.shape[0] // 2
    SCALES: gl.constexpr = TensorMemoryScalesLayout()
    SCALE: gl.constexpr = gl.float8e4nv if WORDS == 2 else gl.uint8
    X: gl.constexpr = "e2m1" if WORDS == 2 else "e4m3"
    WIDTH: gl.constexpr = 4 * WORDS
    stage = consumer_stage()
    turn = consumer_stage()
    for _ in range(gl.program_id(0), tiles * weights.blocks, gl.num_programs(0)):
        accs.free.wait(turn.index, turn.phase ^ 1)
        for step in range(weights.steps):
            at = stage.index
            stages.ready.wait(at, stage.phase)
            x = stages.x.index(at).permute((1, 0))
            x_scales = accs.scales.index(3 * at).reinterpret(SCALE, [ATOM, WIDTH], SCALES)
            tcgen05_copy(as_rows(stages.x_scales.index(at), WORDS), x_scales)
            both = reinterpret(stages.w_scales.index(at), [2, 2 * WORDS, 256], stages.w_scales.type.layout)
            for half in gl.static_range(2):
                w_scales = accs.scales.index(3 * at + 1 + half).reinterpret(SCALE, [HALF, WIDTH], SCALES)
                tcgen05_copy(as_rows(both.index(half), WORDS), w_scales)
                w = stages.w.index(at).slice(half * HALF, HALF, 0)
                acc = accs.acc.index(2 * turn.index + half)
                tcgen05_mma_scaled(w, x, acc, w_scales, x_scales, "e2m1", X, use_acc=step > 0)
            stages.free.arrive_after_mma(at)
            stage = next_stage(stage, stages.w.shape[0])
        accs.ready.arrive_after_mma(turn.index)
        turn = next_stage(turn, A)


@gluon.constexpr_function
def written_layout():
    """[128 channels, tokens]: 16 neighbouring channels to a thread."""
    return gl.BlockedLayout([16, 1], [8, 4], [1, 4], [0, 1])


@gluon.jit
def in_words(bytes, WORDS: gl.constexpr):
    """int32 [4 WORDS, N], four bytes to a word, the first lowest."""
    N: gl.constexpr = bytes.shape[1]
    four = bytes.reshape((WORDS, 4, N))
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, four.type.layout)))
    return gl.sum(four << (8 * j)[None, :, None], 1)


@gluon.jit
def quantized(h, RECIPE: gl.constexpr):
    """fp32 [128 channels, N] -> (codes [128 or 64 bytes, N], scales as int32 words [1 or 2, N])."""
    N: gl.constexpr = h.shape[1]
    if RECIPE == "nvfp4":
        groups = h.reshape((8, 16, N))
        target = gl.minimum(gl.maximum(gl.div_rn(gl.max(gl.abs(groups), 1), 6.0), 2.0**-9), 448.0)
        scale = target.to(gl.float8e4nv)
        small = gl.div_rn(groups, scale.to(gl.float32)[:, None, :] + gl.zeros_like(groups))
        low, high = gl.split(small.reshape((64, 2, N)).permute((0, 2, 1)))
        codes = gl.inline_asm_elementwise(E2M1, E2M1_TYPES, [low, high], dtype=gl.int32, is_pure=True, pack=1)
        return codes.to(gl.uint8), in_words(scale.to(gl.uint8, bitcast=True).to(gl.int32), 2)
    else:
        GROUPS: gl.constexpr = 4 if RECIPE == "fp8_32" else 1
        groups = h.reshape((GROUPS, 128 // GROUPS, N))
        exponent = scale_of(gl.max(gl.abs(groups), 1))
        inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
        codes = (groups * inverse[:, None, :]).reshape((128, N)).to(gl.float8e4nv)
        words = in_words(exponent, 1) if RECIPE == "fp8_32" else exponent * 0x01010101
        return codes, words


@gluon.jit
def write_hidden(gate, up, expert, block, first, begin, stop, rows, out, RECIPE: gl.constexpr):
    """SwiGLU of bf16 [128, N] as codes with scales."""
    L: gl.constexpr = written_layout()
    N: gl.constexpr = gate.shape[1]
    row = first + gl.arange(0, N, layout=gl.SliceLayout(0, L))
    weight = gl.load(rows.weight_ptr + row, mask=row < stop, other=0.0)
    gate = gl.convert_layout(gate, L).to(gl.float32)
    up = gl.convert_layout(up, L).to(gl.float32)
    h = swiglu(gate, up, weight, out.limit).to(gl.bfloat16).to(gl.float32)
    WORDS: gl.constexpr = words_of(RECIPE)
    codes, words = quantized(h, RECIPE)
    BYTES: gl.constexpr = codes.shape[0]
    LC: gl.constexpr = codes.type.layout
    row = first + gl.arange(0, N, layout=gl.SliceLayout(0, LC))
    byte = block * BYTES + gl.arange(0, BYTES, layout=gl.SliceLayout(1, LC))
    at = (row.to(gl.int64) * (out.width // WORDS))[None, :] + byte[:, None]
    gl.store(out.ptr + at, codes, mask=(row < stop)[None, :])
    LW: gl.constexpr = words.type.layout
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(1, LW))
    column = gl.arange(0, N, layout=gl.SliceLayout(0, LW))
    atom = (block * rows.atoms + atom_of(first, begin, expert, N)) * WORDS + word
    place = atom[:, None] * ATOM + (column % 32 * 4 + column // 32)[None, :]
    gl.store(out.scale_ptr + place, words, mask=(first + column < stop)[None, :])


@gluon.jit
def write_slots(y, channel, first, stop, rows, out):
    """128 channels of the outputs of slots, bf16 [128, N]."""
    L: gl.constexpr = written_layout()
    row = first + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, L))
    slot = gl.load(rows.slot_ptr + row, mask=row < stop, other=0)
    column = channel + gl.arange(0, HALF, layout=gl.SliceLayout(1, L))
    at = (slot.to(gl.int64) * out.width)[None, :] + column[:, None]
    gl.store(out.ptr + at, gl.convert_layout(y, L), mask=(row < stop)[None, :])


@gluon.jit
def write_role(accs, ends, tiles, rows, weights, out, FIRST: gl.constexpr, RECIPE: gl.constexpr):
    A: gl.constexpr = accs.acc.shape[0] // 2
    N: gl.constexpr = accs.acc.shape[2]
    turn = consumer_stage()
    for tile in range(gl.program_id(0), tiles * weights.blocks, gl.num_programs(0)):
        expert, block, first, begin, stop = tile_at(tile, ends, rows, weights.blocks, N)
        accs.ready.wait(turn.index, turn.phase)
        low = accs.acc.index(2 * turn.index).load()
        high = accs.acc.index(2 * turn.index + 1).load()
        accs.free.arrive(turn.index)
        if RECIPE == "nvfp4":  # the scale of the tensor
            LM: gl.constexpr = gl.SliceLayout(1, low.type.layout)
            factors = weights.factor_ptr + (expert * weights.blocks + block) * 2 * HALF + gl.arange(0, HALF, layout=LM)
            low *= gl.load(factors)[:, None]
            high *= gl.load(factors + HALF)[:, None]
        low, high = low.to(gl.bfloat16), high.to(gl.bfloat16)
        if FIRST:
            write_hidden(low, high, expert, block, first, begin, stop, rows, out, RECIPE)
        else:
            write_slots(low, block * 2 * HALF, first, stop, rows, out)
            write_slots(high, block * 2 * HALF + HALF, first, stop, rows, out)
        turn = next_stage(turn, A)


@gluon.jit
def moe_product_sm100(
    w_desc, w_scales_desc, x_desc, x_scales_desc, rows, weights, out, FIRST: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, EXPERTS: gl.constexpr, RECIPE: gl.constexpr, WARP_REGS: gl.constexpr = 64,
):  # fmt: skip
    """EXPERTS: a power of two, at least as many as there are and 32."""
    launch_dependents()
    A: gl.constexpr = 2 if N <= 64 else 1
    WORDS: gl.constexpr = words_of(RECIPE)
    w = gl.allocate_shared_memory(gl.uint8, [STAGES, 2 * HALF, STEP // 2], w_desc.layout)
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, N, STEP // WORDS], x_desc.layout)
    w_scales = gl.allocate_shared_memory(gl.uint8, [STAGES, 4 * WORDS, 256], w_scales_desc.layout)
    x_scales = gl.allocate_shared_memory(gl.uint8, [STAGES, 2 * WORDS, 256], x_scales_desc.layout)
    ends = gl.allocate_shared_memory(gl.int32, [EXPERTS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    acc = allocate_tensor_memory(gl.float32, [2 * A, HALF, N], TensorMemoryLayout([HALF, N], col_stride=1))
    # Four columns to an atom; there is no type for scales of several stages.
    COLUMNS: gl.constexpr = TensorMemoryLayout([ATOM, 4 * WORDS], col_stride=1)
    scales = allocate_tensor_memory(gl.int32, [3 * STAGES, ATOM, 4 * WORDS], COLUMNS)
    ready = new_barriers(STAGES)
    free = new_barriers(STAGES)
    acc_ready = new_barriers(A)
    acc_free = new_barriers(A)
    init_barriers((ready, free, acc_ready, acc_free))
    stages = Stages(w, w_scales, x, x_scales, ready, free)
    accs = Accumulators(acc, scales, acc_ready, acc_free)
    wait_on_prior_grid()
    tiles = write_schedule(ends, rows, N)
    gl.warp_specialize([
        (write_role, (accs, ends, tiles, rows, weights, out, FIRST, RECIPE)),
        (load_role, (w_desc, w_scales_desc, x_desc, x_scales_desc, stages, ends, tiles, rows, weights, WORDS)),
        (multiply_role, (stages, accs, tiles, weights, WORDS)),
    ], [1, 1], [WARP_REGS, WARP_REGS])  # fmt: skip
