"""Both products of the experts on sm_90a: FP4 weights, FP8 activations with one scale per row and 128 columns.

A tile is 256 rows of weights of one expert and N rows of activations, whose products are sums over all columns, 128 at
a step. Weights are operand A of wgmma, decoded from FP4 to e4m3 in registers; activations are operand B. CTAs are
persistent (schedule.py); of two tiles with the same weights the second finds them in L2::

    load        tile 0, step 0 | step 1 | ... | tile 1, step 0 ...           one warp, TMA, as far ahead as the ring is
    compute 0   a = FP4 -> e4m3 of 64 rows      |
                b = FP4 -> e4m3 of 64 more rows | products of a       |
                                                                      | products of b | sums of a
                (128 rows of activations leave no registers for both: b is decoded after the sums of a)
                sums += products * scale of the row of activations (fp32; the tensor core keeps about 14 bits)
    compute 1   the same for the other 128 rows: it decodes while the tensor core works for compute 0

Product 1: rows 0-127 are the gate of 128 channels, rows 128-255 are up of the same ones; so a CTA has a whole group of
128 hidden values, which it rounds to e4m3 with one scale; each compute role has 64 of them, and tells the other its
maxima. Product 2: 256 channels of the output.

Decoding. Four e4m3 bytes of {0, .5, 1, 1.5} and of {2, 3, 4, 6}, times the group's power of two, are two words, `low`
and `high`; `prmt` picks one byte per value by its three bits of magnitude, and signs are or-ed in. Weights lie so
(formats.py) that a thread reads 16 bytes of one row and one group of 32 columns, and needs two such words for it.
Columns lie in the order of formats.POSITIONS, in weights and activations alike.

shared memory   bytes of a stage    holds
values          16384               FP4 [256 rows, 4 groups, 16 bytes]
offsets         1024                E8M0 bytes [256 rows, 4 groups]
x               128 N               e4m3 [N, 128], with the 128-byte swizzle
x_scales        4 max(N, 32)        fp32, N of them used
tile            32                  of the first step of a tile: its expert, block and rows
tops            16 N in all         fp32 [2, 2, N]: of tiles by turns and compute roles, the greatest hidden value
ends            4 EXPERTS in all    int32: tiles of rows of activations up to each expert's last

barrier         arrives     count   waits       means
ready[s]        TMA         1       compute     stage s is filled: load expects the bytes of its four copies
free[s]         compute     2       load        stage s has been read, and its products are complete
told            compute     2       compute     both have written their maxima of a tile
"""

from dsv4.kernels.compat import (
    Value,
    aggregate,
    gl,
    gluon,
    mbarrier,
    reinterpret_as,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.dependent import launch_dependents, wait_on_prior_grid
from dsv4.kernels.ring import Barriers, consumer_stage, init_barriers, new_barriers, next_stage, producer_stage
from dsv4.moe.kernels.schedule import scale_of, swiglu, tile_at, write_schedule

ROWS = gl.constexpr(256)  # of weights to a tile
STEP = gl.constexpr(128)  # columns
DECODE = gl.constexpr("""{ .reg .b32 sel, up, w4, p0, p1;
and.b32 sel, $2, 0x77777777; prmt.b32 p0, $3, $7, sel; shr.u32 up, sel, 16;
prmt.b32 p1, $3, $7, up; lop3.b32 $0, $2, 0x80808080, p0, 0xEA;
shl.b32 w4, $2, 4; lop3.b32 $1, w4, 0x80808080, p1, 0xEA; }""")
BF16_PAIR = gl.constexpr("""{ .reg .b32 p;
cvt.rn.bf16x2.f32 p, $3, $2; shl.b32 $0, p, 16; and.b32 $1, p, 0xFFFF0000; }""")
TO_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")


@gluon.constexpr_function
def scales_width(w, parts):
    """Scales that a copy brings, a power of two: 128 bytes at least, as copies begin at multiples of that in shared
    memory."""
    return max(1 << (w * parts - 1).bit_length(), 32)


@aggregate
class Stages:
    """The ring: five buffers to a stage."""

    values: Value
    offsets: Value
    x: Value
    x_scales: Value
    tile: Value
    ready: Barriers
    free: Barriers


@gluon.jit
def scale_shift(begin, expert):
    """TMA reads 16 bytes at multiples of 16: the scales of every expert begin at a multiple of 4."""
    return (begin + 3) // 4 * 4 + 4 * expert - begin


@gluon.constexpr_function
def numbers_layout(warps):
    """int32 [8]: every thread has all of them."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [4]], lane_bases=[[0]] * 5, warp_bases=[[0]] * (warps.bit_length() - 1), block_bases=[],
        shape=[8],
    )  # fmt: skip


@gluon.jit
def write_tile(to, expert, block, first, stop, shift):
    """What the computing warps have to know of a tile: in the stage of its first step."""
    n = gl.arange(0, 8, layout=numbers_layout(gl.num_warps()))
    x = gl.where(n == 0, expert, gl.where(n == 1, block, gl.where(n == 2, first, gl.where(n == 3, stop, shift))))
    to.store(x)


@gluon.jit
def number(x, i):
    n = gl.arange(0, 8, layout=numbers_layout(gl.num_warps()))
    return gl.sum(gl.where(n == i, x, 0), 0)


@gluon.jit
def load_role(values_desc, offsets_desc, x_desc, x_scales_desc, stages, ends, tiles, rows, weights,
              PARTS: gl.constexpr):  # fmt: skip
    W: gl.constexpr = stages.x.shape[1]
    N: gl.constexpr = W * PARTS
    BYTES: gl.constexpr = ROWS * 64 + ROWS * 4 + N * STEP + scales_width(W, PARTS) * 4
    stage = producer_stage()
    for tile in range(gl.program_id(0), tiles * weights.blocks, gl.num_programs(0)):
        expert, block, first, begin, stop = tile_at(tile, ends, rows, weights.blocks, N)
        shift = scale_shift(begin, expert)
        place = (expert * weights.blocks + block) * weights.steps
        for step in range(weights.steps):
            stages.free.wait(stage.index, stage.phase)
            ready = stages.ready.at(stage.index)
            if step == 0:
                write_tile(stages.tile.index(stage.index), expert, block, first, stop, shift)
            mbarrier.expect(ready, BYTES)
            tma_load(values_desc, [(place + step) * 16, 0], ready, stages.values.index(stage.index))
            for part in gl.static_range(PARTS):
                to = stages.x.index(stage.index * PARTS + part)
                tma_load(x_desc, [first + W * part, step * STEP], ready, to)
            tma_load(offsets_desc, [place + step, 0], ready, stages.offsets.index(stage.index))
            tma_load(x_scales_desc, [step, first + shift], ready, stages.x_scales.index(stage.index))
            stage = next_stage(stage, stages.values.shape[0])


@gluon.constexpr_function
def bytes_layout(warps):
    """uint8 [16 warps, 4 groups, 16 bytes]: 16 bytes of two rows to a thread, as operand A of wgmma needs them."""
    warp_bases = [[16 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [8, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=warp_bases, block_bases=[], shape=[16 * warps, 4, 16],
    )  # fmt: skip


@gluon.constexpr_function
def product_layout(warps, n):
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, n, 32])


@gluon.jit
def fetched(stages, at, PLACE: gl.constexpr):
    """Rows 64 PLACE to 64 PLACE + 63 of a stage: codes [64, 4, 16], bytes of scales [64, 4]."""
    WARPS: gl.constexpr = gl.num_warps()
    M: gl.constexpr = 16 * WARPS
    L: gl.constexpr = bytes_layout(WARPS)
    PLAIN3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    PLAIN2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    values = reinterpret_as(stages.values.index(at), gl.uint8, [4, M, 4, 16], PLAIN3)
    offsets = reinterpret_as(stages.offsets.index(at), gl.uint8, [4, M, 4], PLAIN2)
    return values.index(PLACE).load(L), offsets.index(PLACE).load(gl.SliceLayout(2, L)).to(gl.int32)


@gluon.jit
def decoded(rows, base, W: gl.constexpr):
    """Fetched rows as e4m3, operand A. base: of each row, the byte of offset 0."""
    WARPS: gl.constexpr = gl.num_warps()
    M: gl.constexpr = 16 * WARPS
    L: gl.constexpr = bytes_layout(WARPS)
    w, o = rows
    o = gl.maximum(o - base[:, None], 1)  # groups of zeros may have any byte
    zeros = gl.zeros([M, 4, 16], gl.int32, L)
    low = (o * 0x08080800 + 0x0C080000)[:, :, None] + zeros
    high = (o * 0x08080808 + 0x1C181410)[:, :, None] + zeros
    a, b = gl.inline_asm_elementwise(
        DECODE, "=&r,=&r,r,r,r,r,r,r,r,r,r", [w, low, high], dtype=(gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=4
    )
    # [row, group, word, byte, half] -> [row, word, half, group, byte]
    x = gl.join(a, b).reshape((M, 4, 4, 4, 2)).permute((0, 2, 4, 1, 3)).reshape((M, 128))
    LA: gl.constexpr = gl.DotOperandLayout(0, product_layout(WARPS, W), 4)
    return gl.convert_layout(x, LA, assert_trivial=True)


@gluon.jit
def multiply(a, stages, at, PART: gl.constexpr, PARTS: gl.constexpr):
    """With rows W PART to W PART + W - 1 of activations: issued, not waited for."""
    W: gl.constexpr = stages.x.shape[1]
    zero = gl.zeros([16 * gl.num_warps(), W], gl.float32, product_layout(gl.num_warps(), W))
    x = stages.x.index(at * PARTS + PART).permute((1, 0))
    return warpgroup_mma(a, x, zero, use_acc=False, is_async=True)


@gluon.jit
def tile_sums(stages, stage, steps, base0, base1, G: gl.constexpr, USED: gl.constexpr, PARTS: gl.constexpr,
              EAGER: gl.constexpr):  # fmt: skip
    """(sums of 64 of rows 0-127 by parts, then of 64 of rows 128-255; stage after the tile). USED: the parts that have
    rows. Loads from shared memory are slow beside products, so all come before them, as far as registers allow."""
    EARLY: gl.constexpr = stages.x.shape[1] * USED <= 64
    W: gl.constexpr = stages.x.shape[1]
    LP: gl.constexpr = product_layout(gl.num_warps(), W)
    zero = gl.zeros([16 * gl.num_warps(), W], gl.float32, LP)
    sums = ()
    for _ in gl.static_range(2 * USED):
        sums = sums + (zero,)
    for _ in range(steps):
        at = stage.index
        stages.ready.wait(at, stage.phase)
        scales = stages.x_scales.index(at).reshape([stages.x_scales.shape[2]])
        rows0 = fetched(stages, at, G)
        kept = ()
        if EARLY:
            rows1 = fetched(stages, at, 2 + G)
            for part in gl.static_range(USED):
                kept = kept + (scales.slice(W * part, W).load(gl.SliceLayout(0, LP)),)
        a = decoded(rows0, base0, W)
        pending = multiply(a, stages, at, 0, PARTS)
        new = ()
        for unit in gl.static_range(2 * USED):  # the sums of one while the tensor core makes the next
            if EARLY and unit == USED - 1:
                b = decoded(rows1, base1, W)
            product = warpgroup_mma_wait(num_outstanding=0, deps=(pending,))
            if EAGER and unit + 1 < 2 * USED:
                pending = multiply(a if unit + 1 < USED else b, stages, at, (unit + 1) % USED, PARTS)
            if EARLY:
                scale = kept[unit % USED]
            else:
                scale = scales.slice(W * (unit % USED), W).load(gl.SliceLayout(0, LP))
            if unit + 1 == 2 * USED:
                stages.free.arrive(at)
            new = new + (sums[unit] + product * scale[None, :],)
            if not EARLY and unit == USED - 1:
                b = decoded(fetched(stages, at, 2 + G), base1, W)
            if not EAGER and unit + 1 < 2 * USED:
                pending = multiply(a if unit + 1 < USED else b, stages, at, (unit + 1) % USED, PARTS)
        sums = new
        stage = next_stage(stage, stages.values.shape[0])
    return sums, stage


@gluon.jit
def rounded(x):
    """fp32 -> the nearest bf16 as fp32. Two at a time: conversions of single numbers have a sixteenth of the rate."""
    return gl.inline_asm_elementwise(BF16_PAIR, "=r,=r,f,f", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def row_pairs(x):
    """Rows r and r + 8 of every 16 of x [64, N], which a thread has: two [32, N], of neighbouring channels
    (formats.FRAGMENT). So a warp writes whole sectors of 32 bytes without an exchange between threads."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    low, high = gl.split(x.reshape((M // 16, 2, 8, N)).permute((0, 2, 3, 1)))
    return low.reshape((M // 2, N)), high.reshape((M // 2, N))


@gluon.jit
def hidden_values(gate, up, first, stop, rows, out):
    """SwiGLU times the weight of the slot, rounded as the model rounds it."""
    LN: gl.constexpr = gl.SliceLayout(0, gate.type.layout)
    row = first + gl.arange(0, gate.shape[1], layout=LN)
    weight = gl.load(rows.weight_ptr + row, mask=row < stop, other=0.0)
    return rounded(swiglu(rounded(gate), rounded(up), weight, out.limit))


@gluon.jit
def write_hidden(h, top, block, first, stop, shift, out, G: gl.constexpr):
    """As e4m3 with one scale per row of activations. top: the greatest of 128 values of each."""
    LN: gl.constexpr = gl.SliceLayout(0, h.type.layout)
    M: gl.constexpr = h.shape[0]
    N: gl.constexpr = h.shape[1]
    exponent = scale_of(top)
    inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    if G == 0:
        row = first + gl.arange(0, N, layout=LN)
        scale = (exponent << 23).to(gl.float32, bitcast=True)
        gl.store(out.scale_ptr + block * out.scale_line + row + shift, scale, mask=row < stop)
    low, high = row_pairs((h * inverse[None, :]).to(gl.float8e4nv).to(gl.uint8, bitcast=True))
    pair = low.to(gl.uint16) | (high.to(gl.uint16) << 8)
    L: gl.constexpr = pair.type.layout
    channels = block * M + G * (M // 2) + gl.arange(0, M // 2, layout=gl.SliceLayout(1, L))  # by twos, as places
    row = first + gl.arange(0, N, layout=gl.SliceLayout(0, L))
    at = (row.to(gl.int64) * (out.width // 2))[None, :] + channels[:, None]
    gl.store(out.ptr.to(gl.pointer_type(gl.uint16), bitcast=True) + at, pair, mask=(row < stop)[None, :])


@gluon.jit
def write_slots(sums, channel, first, stop, rows, out):
    """64 channels of the outputs of slots."""
    M: gl.constexpr = sums.shape[0]
    N: gl.constexpr = sums.shape[1]
    low, high = row_pairs(sums)
    pair = gl.inline_asm_elementwise(TO_BF16, "=r,f,f", [low, high], dtype=gl.uint32, is_pure=True, pack=1)
    L: gl.constexpr = pair.type.layout
    row = first + gl.arange(0, N, layout=gl.SliceLayout(0, L))
    slot = gl.load(rows.slot_ptr + row, mask=row < stop, other=0)
    columns = channel // 2 + gl.arange(0, M // 2, layout=gl.SliceLayout(1, L))  # by twos, as places
    at = (slot.to(gl.int64) * (out.width // 2))[None, :] + columns[:, None]
    gl.store(out.ptr.to(gl.pointer_type(gl.uint32), bitcast=True) + at, pair, mask=(row < stop)[None, :])


@gluon.jit
def compute_tile(stages, stage, x, turn, tops, told, rows, weights, out, G: gl.constexpr, FIRST: gl.constexpr,
                 USED: gl.constexpr, PARTS: gl.constexpr, EAGER: gl.constexpr):  # fmt: skip
    """One tile, of whose PARTS parts of rows of activations the first ones are used -> the stage after it."""
    WARPS: gl.constexpr = gl.num_warps()
    M: gl.constexpr = 16 * WARPS
    W: gl.constexpr = stages.x.shape[1]
    LP: gl.constexpr = product_layout(WARPS, W)
    LM: gl.constexpr = gl.SliceLayout(1, LP)
    # The same rows in the layout of bytes.
    LB: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, bytes_layout(WARPS)))
    expert, block, first, stop, shift = number(x, 0), number(x, 1), number(x, 2), number(x, 3), number(x, 4)
    factors = weights.factor_ptr + (expert * weights.blocks + block) * ROWS + G * M
    # A factor is 2^(base - 133); the offset of byte `base` is 12.
    base0 = (gl.load(factors + gl.arange(0, M, layout=LB)).to(gl.int32, bitcast=True) >> 23) - 6
    base1 = (gl.load(factors + 2 * M + gl.arange(0, M, layout=LB)).to(gl.int32, bitcast=True) >> 23) - 6
    sums, stage = tile_sums(stages, stage, weights.steps, base0, base1, G, USED, PARTS, EAGER)
    factor0 = gl.load(factors + gl.arange(0, M, layout=LM))
    factor1 = gl.load(factors + 2 * M + gl.arange(0, M, layout=LM))
    if FIRST:
        hidden = ()
        for part in gl.static_range(USED):
            part0 = sums[part] * factor0[:, None]
            part1 = sums[USED + part] * factor1[:, None]
            h = hidden_values(part0, part1, first + W * part, stop, rows, out)
            tops.index(turn * 2 + G).slice(W * part, W).store(gl.max(gl.abs(h), 0))
            hidden = hidden + (h,)
        told.arrive(0)
        told.wait(0, turn)
        for part in gl.static_range(USED):
            other = tops.index(turn * 2 + 1 - G).slice(W * part, W).load(gl.SliceLayout(0, LP))
            top = gl.maximum(gl.max(gl.abs(hidden[part]), 0), other)
            write_hidden(hidden[part], top, block, first + W * part, stop, shift, out, G)
    else:
        for part in gl.static_range(USED):
            row, channel = first + W * part, block * ROWS + G * M
            write_slots(sums[part] * factor0[:, None], channel, row, stop, rows, out)
            write_slots(sums[USED + part] * factor1[:, None], channel + 2 * M, row, stop, rows, out)
    return stage


@gluon.jit
def compute_role(stages, tops, told, tiles, rows, weights, out, G: gl.constexpr, FIRST: gl.constexpr,
                 PARTS: gl.constexpr, EAGER: gl.constexpr):  # fmt: skip
    """Rows 64 G to 64 G + 63 of both halves of every tile."""
    W: gl.constexpr = stages.x.shape[1]
    stage = consumer_stage()
    turn = gl.to_tensor(0)
    for _ in range(gl.program_id(0), tiles * weights.blocks, gl.num_programs(0)):
        stages.ready.wait(stage.index, stage.phase)
        x = stages.tile.index(stage.index).load(numbers_layout(gl.num_warps()))
        if PARTS == 1:
            stage = compute_tile(stages, stage, x, turn, tops, told, rows, weights, out, G, FIRST, 1, 1, EAGER)
        else:
            if number(x, 3) - number(x, 2) <= W * (PARTS - 1):
                stage = compute_tile(
                    stages, stage, x, turn, tops, told, rows, weights, out, G, FIRST, PARTS - 1, PARTS, EAGER
                )
            else:
                stage = compute_tile(
                    stages, stage, x, turn, tops, told, rows, weights, out, G, FIRST, PARTS, PARTS, EAGER
                )
        turn = turn ^ 1


@gluon.jit
def moe_product_sm90(
    values_desc, offsets_desc, x_desc, x_scales_desc, rows, weights, out, FIRST: gl.constexpr, W: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, EXPERTS: gl.constexpr, COMPUTE_REGS: gl.constexpr = 240,
    LOAD_REGS: gl.constexpr = 24, EAGER: gl.constexpr = True,
):  # fmt: skip
    """EXPERTS: a power of two, at least as many as there are and 32."""
    launch_dependents()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    values = gl.allocate_shared_memory(gl.int32, [STAGES, 16, 256], values_desc.layout)
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * PARTS, W, STEP], x_desc.layout)
    offsets = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 256], offsets_desc.layout)
    x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, scales_width(W, PARTS)], x_scales_desc.layout)
    tile = gl.allocate_shared_memory(gl.int32, [STAGES, 8], PLAIN)
    ends = gl.allocate_shared_memory(gl.int32, [EXPERTS], PLAIN)
    tops = gl.allocate_shared_memory(gl.float32, [4, scales_width(W, PARTS)], PLAIN)
    ready = new_barriers(STAGES)
    free = new_barriers(STAGES, 2)
    if FIRST:
        told = new_barriers(1, 2)
        init_barriers((ready, free, told))
    else:
        told = free
        init_barriers((ready, free))
    stages = Stages(values, offsets, x, x_scales, tile, ready, free)
    wait_on_prior_grid()
    tiles = write_schedule(ends, rows, W * PARTS)
    gl.warp_specialize([
        (compute_role, (stages, tops, told, tiles, rows, weights, out, 0, FIRST, PARTS, EAGER)),
        (compute_role, (stages, tops, told, tiles, rows, weights, out, 1, FIRST, PARTS, EAGER)),
        (load_role, (values_desc, offsets_desc, x_desc, x_scales_desc, stages, ends, tiles, rows, weights, PARTS)),
    ], [4, 1], [COMPUTE_REGS, LOAD_REGS])  # fmt: skip
