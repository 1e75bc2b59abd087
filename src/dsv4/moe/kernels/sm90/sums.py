"""FP4 weights times FP8 activations on sm_90a: the ring that feeds both, decoding, and the sums of a tile.

Weights are operand A of wgmma, decoded from FP4 to e4m3 in registers; activations are operand B. Rows of activations
form one part or two, with a product each: 96 rows are 64 and 32. One of two compute roles does, per step of 128
columns::

    tensor core            meanwhile
                           a = FP4 -> e4m3 of 64 rows
    a x first part         b = FP4 -> e4m3 of 64 more rows
    a x rest               sums of the product before
    b x first part         sums of the product before
    b x rest               sums of the product before
                           sums of b x rest; the stage is free

    sums += products * scale of the row of activations (fp32; the tensor core keeps about 14 bits)

At most two products hold registers at a time: each wait names the sums of the product before, or the compiler would
defer all of them to the end of the step, and spill.

Four e4m3 bytes of {0, .5, 1, 1.5} and of {2, 3, 4, 6}, times the group's power of two, are two words, `low` and `high`;
`prmt` picks one byte per value by its three bits of magnitude, and signs are or-ed in. Weights lie so (formats.py) that
a thread reads 16 bytes of one row and one group of 32 columns, and needs two such words for it. Columns of weights and
activations lie in the order of formats.POSITIONS.
"""

from dsv4.kernels.compat import Value, aggregate, gl, gluon, reinterpret_as, warpgroup_mma, warpgroup_mma_wait
from dsv4.kernels.ring import Barriers, next_stage

ROWS = gl.constexpr(256)  # rows of weights per tile
STEP = gl.constexpr(128)  # columns
DECODE = gl.constexpr("""{ .reg .b32 sel, up, w4, p0, p1;
and.b32 sel, $2, 0x77777777; prmt.b32 p0, $3, $4, sel; shr.u32 up, sel, 16;
prmt.b32 p1, $3, $4, up; lop3.b32 $0, $2, 0x80808080, p0, 0xEA;
shl.b32 w4, $2, 4; lop3.b32 $1, w4, 0x80808080, p1, 0xEA; }""")
AS_BYTES = gl.constexpr("mov.b32 $0, $1;")


@aggregate
class Stages:
    """The ring, with five buffers per stage."""

    values: Value
    offsets: Value
    x: Value
    rest: Value
    x_scales: Value
    ready: Barriers
    free: Barriers
    MIDDLE: gl.constexpr  # tiles that the first part of the rows of activations is enough for leave out the rest


@gluon.constexpr_function
def operand_layout(warps):
    """Return the layout of e4m3 [16 warps, 4 groups, 4 words of FP4, 2 halves, 4 bytes]: 16 bytes of FP4 of two rows
    per thread, as operand A of wgmma needs them."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0],
                   [8, 0, 0, 0, 0]],
        lane_bases=[[0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]],
        warp_bases=[[16 << i, 0, 0, 0, 0] for i in range(warps.bit_length() - 1)], block_bases=[],
        shape=[16 * warps, 4, 4, 2, 4],
    )  # fmt: skip


@gluon.constexpr_function
def words_layout(warps, rows):
    """Return the layout of the words of FP4 [rows, 4 groups, 4 words], with 16 rows per warp, or 8."""
    if rows == 16 * warps:
        return gl.SliceLayout(3, gl.SliceLayout(4, operand_layout(warps)))
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[8 << i, 0, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[rows, 4, 4],
    )


@gluon.constexpr_function
def product_layout(warps, n):
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, n, 32])


@gluon.jit
def fetched(stages, at, PLACE: gl.constexpr, M: gl.constexpr):
    """Load rows M PLACE to M PLACE + M - 1 of a stage: words of codes [M, 4, 4], bytes of scales [M, 4]."""
    L: gl.constexpr = words_layout(gl.num_warps(), M)
    PLAIN3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    PLAIN2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    values = reinterpret_as(stages.values.index(at), gl.int32, [ROWS // M, M, 4, 4], PLAIN3)
    offsets = reinterpret_as(stages.offsets.index(at), gl.uint8, [ROWS // M, M, 4], PLAIN2)
    return values.index(PLACE).load(L), offsets.index(PLACE).load(gl.SliceLayout(2, L)).to(gl.int32)


@gluon.jit
def decoded(rows, base):
    """Decode fetched rows to words of e4m3 [M, 4, 4], of values 0 to 3 and of values 4 to 7 of each word of codes.
    base: the byte of offset 0, for each row."""
    w, o = rows
    L: gl.constexpr = w.type.layout
    o = gl.maximum(o - base[:, None], 1)  # groups of zeros may have any byte
    zeros = gl.zeros(w.shape, gl.int32, L)
    low = (o * 0x08080800 + 0x0C080000)[:, :, None] + zeros
    high = (o * 0x08080808 + 0x1C181410)[:, :, None] + zeros
    return gl.inline_asm_elementwise(
        DECODE, "=&r,=&r,r,r,r", [w, low, high], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def as_e4m3(x):
    """View decoded words [64, 4, 4, 2] as e4m3 [64, 128], without an instruction."""
    WARPS: gl.constexpr = gl.num_warps()
    M: gl.constexpr = 16 * WARPS
    L: gl.constexpr = operand_layout(WARPS)
    x = gl.convert_layout(x, gl.SliceLayout(4, L), assert_trivial=True)
    x = x[:, :, :, :, None] + gl.zeros([M, 4, 4, 2, 4], gl.int32, L)
    x = gl.inline_asm_elementwise(AS_BYTES, "=r,r,r,r,r", [x], dtype=gl.float8e4nv, is_pure=True, pack=4)
    return x.permute((0, 2, 3, 1, 4)).reshape((M, 128))


@gluon.jit
def operand(words, W: gl.constexpr):
    """Return decoded words as operand A."""
    LA: gl.constexpr = gl.DotOperandLayout(0, product_layout(gl.num_warps(), W), 4)
    return gl.convert_layout(as_e4m3(gl.join(words[0], words[1])), LA, assert_trivial=True)


@gluon.jit
def zeros(N: gl.constexpr):
    return gl.zeros([16 * gl.num_warps(), N], gl.float32, product_layout(gl.num_warps(), N))


@gluon.jit
def multiply(a, stages, at, PART: gl.constexpr, N: gl.constexpr, REST: gl.constexpr):
    """Issue the product with N rows of activations of the first part, or REST of the second, without a wait. a: decoded
    words."""
    if PART == 0:
        x = stages.x.index(at).slice(0, N).permute((1, 0))
        return warpgroup_mma(operand(a, N), x, zeros(N), use_acc=False, is_async=True)
    else:
        x = stages.rest.index(at).slice(0, REST).permute((1, 0))
        return warpgroup_mma(operand(a, REST), x, zeros(REST), use_acc=False, is_async=True)


@gluon.jit
def scale_of_part(stages, at, PART: gl.constexpr, N: gl.constexpr, REST: gl.constexpr):
    """Load the scales of the rows of activations of a part."""
    scales = stages.x_scales.index(at).reshape([stages.x_scales.shape[2]])
    if PART == 0:
        return scales.slice(0, N).load(gl.SliceLayout(0, product_layout(gl.num_warps(), N)))
    else:
        W: gl.constexpr = stages.x.shape[1]
        return scales.slice(W, REST).load(gl.SliceLayout(0, product_layout(gl.num_warps(), REST)))


@gluon.jit
def tile_sums(stages, stage, steps, base0, base1, G: gl.constexpr, N: gl.constexpr, REST: gl.constexpr):
    """Return (sums of 64 of rows 0-127 by parts, then of 64 of rows 128-255; stage after the tile). N rows of
    activations of the first part are used, and REST of the second. Loads from shared memory are slow compared with
    products, so all precede them."""
    USED: gl.constexpr = 2 if REST > 0 else 1
    sums = ()
    for unit in gl.static_range(2 * USED):
        sums = sums + (zeros(N if unit % USED == 0 else REST),)
    for _ in range(steps):
        at = stage.index
        stages.ready.wait(at, stage.phase)
        rows0, rows1 = fetched(stages, at, G, 64), fetched(stages, at, 2 + G, 64)
        kept = ()
        for part in gl.static_range(USED):
            kept = kept + (scale_of_part(stages, at, part, N, REST),)
        a = decoded(rows0, base0)
        pending = multiply(a, stages, at, 0, N, REST)
        b = decoded(rows1, base1)
        new = ()
        for unit in gl.static_range(2 * USED):
            if unit == 0:
                product = warpgroup_mma_wait(num_outstanding=0, deps=(pending,))
            else:
                product, done = warpgroup_mma_wait(num_outstanding=0, deps=(pending, new[unit - 1]))
                new = new[: unit - 1] + (done,)
            if unit + 1 == 2 * USED:
                stages.free.arrive(at)
            if unit + 1 < 2 * USED:
                pending = multiply(a if unit + 1 < USED else b, stages, at, (unit + 1) % USED, N, REST)
            new = new + (sums[unit] + product * kept[unit % USED][None, :],)
        sums = new
        stage = next_stage(stage, stages.values.shape[0])
    return sums, stage


@gluon.jit
def bases(factors, PLACE: gl.constexpr, M: gl.constexpr):
    """Return the byte of offset 0 for M rows of a tile. A factor is 2^(base - 133); byte `base` has offset 12."""
    LB: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, words_layout(gl.num_warps(), M)))
    return (factors.slice(PLACE * M, M).load(LB) >> 23) - 6
