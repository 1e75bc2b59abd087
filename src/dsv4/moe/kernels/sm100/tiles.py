"""Work of a CTA on one tile of a product of the experts on sm_100a: loads, products, stores. products.py has the
charts; its kernel and the one in mega.py determine which tiles and when."""

from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryScalesLayout,
    tcgen05_copy,
    tcgen05_mma_scaled,
)

from dsv4.kernels.compat import Value, aggregate, gl, gluon, mbarrier, reinterpret, tma_load
from dsv4.kernels.ring import Barriers, next_stage
from dsv4.moe.kernels.rows import words_of
from dsv4.moe.kernels.schedule import scale_of, swiglu

HALF = gl.constexpr(128)  # rows of weights per accumulator
STEP = gl.constexpr(128)  # columns
ATOM = gl.constexpr(128)  # rows whose scales lie together
E2M1 = gl.constexpr("{ .reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, $2, $1; cvt.u32.u8 $0, pair; }")
E2M1_TYPES = gl.constexpr("=r,f,f")


@aggregate
class Stages:
    """The ring, with four buffers per stage."""

    w: Value
    w_scales: Value
    x: Value
    x_scales: Value
    ready: Barriers
    free: Barriers


@aggregate
class Accumulators:
    """Accumulators and scales in tensor memory."""

    acc: Value
    scales: Value
    ready: Barriers
    free: Barriers


@aggregate
class Operands:
    """Descriptors of one product: weights and activations, and the scales of each."""

    w: Value
    w_scales: Value
    x: Value
    x_scales: Value


@gluon.jit
def load_tile(operands, stages, stage, place, first, atom, steps, atoms, WORDS: gl.constexpr):
    """Load all columns of the weights at ``place`` and of N rows of activations from ``first`` on, whose scales are in
    ``atom`` of ``atoms`` -> the next stage."""
    N: gl.constexpr = stages.x.shape[1]
    BYTES: gl.constexpr = 2 * HALF * STEP // 2 + N * STEP // WORDS + 3 * 512 * WORDS  # weights count without gaps
    for step in range(steps):
        stages.free.wait(stage.index, stage.phase)
        ready = stages.ready.at(stage.index)
        mbarrier.expect(ready, BYTES)
        tma_load(operands.w, [(place + step) * 2 * HALF, 0], ready, stages.w.index(stage.index))
        tma_load(operands.x, [first, step * (STEP // WORDS)], ready, stages.x.index(stage.index))
        tma_load(operands.w_scales, [(place + step) * 4 * WORDS, 0], ready, stages.w_scales.index(stage.index))
        line = (step * atoms + atom) * 2 * WORDS
        tma_load(operands.x_scales, [line, 0], ready, stages.x_scales.index(stage.index))
        stage = next_stage(stage, stages.w.shape[0])
    return stage


@gluon.jit
def as_rows(atoms, WORDS: gl.constexpr):
    """View atoms [2 WORDS, 256 bytes] as scales [128 rows, 4 WORDS]."""
    return atoms.reshape((WORDS, 32, 4, 4)).permute((2, 1, 0, 3)).reshape((128, 4 * WORDS))


@gluon.jit
def multiply_tile(stages, stage, accs, turn, steps, WORDS: gl.constexpr):
    """Multiply all steps of a tile -> the next stage."""
    SCALES: gl.constexpr = TensorMemoryScalesLayout()
    SCALE: gl.constexpr = gl.float8e4nv if WORDS == 2 else gl.uint8
    X: gl.constexpr = "e2m1" if WORDS == 2 else "e4m3"
    WIDTH: gl.constexpr = 4 * WORDS
    accs.free.wait(turn.index, turn.phase ^ 1)
    for step in range(steps):
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
    return stage


@gluon.jit
def halves_of_tile(accs, turn, weights, expert, block, RECIPE: gl.constexpr):
    """Return the accumulators of a tile as bf16; the accumulators may then be overwritten."""
    accs.ready.wait(turn.index, turn.phase)
    low = accs.acc.index(2 * turn.index).load()
    high = accs.acc.index(2 * turn.index + 1).load()
    accs.free.arrive(turn.index)
    if RECIPE == "nvfp4":  # the scale of the tensor
        LM: gl.constexpr = gl.SliceLayout(1, low.type.layout)
        factors = weights.factor_ptr + (expert * weights.blocks + block) * 2 * HALF + gl.arange(0, HALF, layout=LM)
        low *= gl.load(factors)[:, None]
        high *= gl.load(factors + HALF)[:, None]
    return low.to(gl.bfloat16), high.to(gl.bfloat16)


@gluon.constexpr_function
def written_layout():
    """Return the layout of [128 channels, tokens], with 16 neighbouring channels per thread."""
    return gl.BlockedLayout([16, 1], [8, 4], [1, 4], [0, 1])


@gluon.jit
def in_words(bytes, WORDS: gl.constexpr):
    """Pack int32 [4 WORDS, N], four bytes to a word, the first lowest."""
    N: gl.constexpr = bytes.shape[1]
    four = bytes.reshape((WORDS, 4, N))
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, four.type.layout)))
    return gl.sum(four << (8 * j)[None, :, None], 1)


@gluon.jit
def quantized(h, RECIPE: gl.constexpr):
    """Quantize fp32 [128 channels, N] -> (codes [128 or 64 bytes, N], scales as int32 words [1 or 2, N])."""
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
def write_hidden(gate, up, block, first, stop, atom, rows, out, RECIPE: gl.constexpr):
    """Write SwiGLU of bf16 [128, N] as codes with scales, for the rows up to ``stop``."""
    L: gl.constexpr = written_layout()
    N: gl.constexpr = gate.shape[1]
    row = first + gl.arange(0, N, layout=gl.SliceLayout(0, L))
    weight = gl.load(rows.weight_ptr + row, mask=row < stop, other=0.0)
    gate = gl.convert_layout(gate, L).to(gl.float32)
    up = gl.convert_layout(up, L).to(gl.float32)
    h = swiglu(gate, up, weight[None, :], out.limit).to(gl.bfloat16).to(gl.float32)
    WORDS: gl.constexpr = words_of(RECIPE)
    codes, words = quantized(h, RECIPE)
    BYTES: gl.constexpr = codes.shape[0]
    LC: gl.constexpr = codes.type.layout
    row = first + gl.arange(0, N, layout=gl.SliceLayout(0, LC))
    byte = block * BYTES + gl.arange(0, BYTES, layout=gl.SliceLayout(1, LC))
    line = out.width // (WORDS * 64) * 64  # a multiple, so that the compiler can write 16 bytes at once
    at = (row.to(gl.int64) * line)[None, :] + byte[:, None]
    gl.store(out.ptr + at, codes, mask=(row < stop)[None, :])
    LW: gl.constexpr = words.type.layout
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(1, LW))
    column = gl.arange(0, N, layout=gl.SliceLayout(0, LW))
    line = (block * rows.atoms + atom) * WORDS + word
    place = line[:, None] * ATOM + (column % 32 * 4 + column // 32)[None, :]
    gl.store(out.scale_ptr + place, words, mask=(first + column < stop)[None, :])


@gluon.jit
def write_slots(y, channel, line, there, out):
    """Write 128 channels of slot outputs, bf16 [128, N], each to its line, counted in eights, as 16-byte stores."""
    L: gl.constexpr = written_layout()
    column = channel + gl.arange(0, HALF, layout=gl.SliceLayout(1, L))
    gl.store(out.ptr + (line * 8)[None, :] + column[:, None], gl.convert_layout(y, L), mask=there[None, :])
