"""Epilogue of a tile on sm_90a: it writes the sums as e4m3 hidden values, or as outputs of slots."""

from dsv4.kernels.compat import gl, gluon
from dsv4.moe.kernels.schedule import scale_of, swiglu
from dsv4.moe.kernels.sm90.sums import ROWS

BF16_PAIR = gl.constexpr("""{ .reg .b32 p;
cvt.rn.bf16x2.f32 p, $3, $2; shl.b32 $0, p, 16; and.b32 $1, p, 0xFFFF0000; }""")
TO_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")


@gluon.constexpr_function
def numbers_layout(warps):
    """Return the layout of int32 [8], with all of them in every thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [4]],
        lane_bases=[[0]] * 5,
        warp_bases=[[0]] * (warps.bit_length() - 1),
        block_bases=[],
        shape=[8],
    )


@gluon.jit
def number(x, i):
    n = gl.arange(0, 8, layout=numbers_layout(gl.num_warps()))
    return gl.sum(gl.where(n == i, x, 0), 0)


@gluon.jit
def rounded(x):
    """Round fp32 to bf16, as fp32. Two at a time: conversions of single numbers have a sixteenth of the rate."""
    return gl.inline_asm_elementwise(BF16_PAIR, "=r,=r,f,f", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def row_pairs(x):
    """Split x [64, N] into rows r and r + 8 of every 16, which one thread has: two [32, N], of neighbouring channels
    (formats.FRAGMENT). So a warp writes whole sectors of 32 bytes without an exchange between threads."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    low, high = gl.split(x.reshape((M // 16, 2, 8, N)).permute((0, 2, 3, 1)))
    return low.reshape((M // 2, N)), high.reshape((M // 2, N))


@gluon.jit
def hidden_values(gate, up, weight, out):
    """Compute SwiGLU times the weight of the slot, rounded as the model does."""
    return rounded(swiglu(rounded(gate), rounded(up), weight, out.limit))


@gluon.jit
def write_hidden(h, amax, block, rows, place, scale_place, out, G: gl.constexpr):
    """Store `rows` rows of h as e4m3 with one scale per row of activations, at their places. amax: the greatest of
    128 values of each row."""
    LN: gl.constexpr = gl.SliceLayout(0, h.type.layout)
    M: gl.constexpr = h.shape[0]
    N: gl.constexpr = h.shape[1]
    exponent = scale_of(amax)
    inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    if G == 0:
        row = gl.arange(0, N, layout=LN)
        scale = (exponent << 23).to(gl.float32, bitcast=True)
        gl.store(out.scale_ptr + block * out.scale_line + scale_place + row, scale, mask=row < rows)
    low, high = row_pairs((h * inverse[None, :]).to(gl.float8e4nv).to(gl.uint8, bitcast=True))
    pair = low.to(gl.uint16) | (high.to(gl.uint16) << 8)
    L: gl.constexpr = pair.type.layout
    channels = block * M + G * (M // 2) + gl.arange(0, M // 2, layout=gl.SliceLayout(1, L))  # two at a time
    row = gl.arange(0, N, layout=gl.SliceLayout(0, L))
    at = ((place + row).to(gl.int64) * (out.width // 2))[None, :] + channels[:, None]
    gl.store(out.ptr.to(gl.pointer_type(gl.uint16), bitcast=True) + at, pair, mask=(row < rows)[None, :])


@gluon.jit
def write_slots(sums, columns, channel, first, stop, out):
    """Write 64 channels of the outputs of slots, whose numbers are in `columns`."""
    M: gl.constexpr = sums.shape[0]
    N: gl.constexpr = sums.shape[1]
    low, high = row_pairs(sums)
    pair = gl.inline_asm_elementwise(TO_BF16, "=r,f,f", [low, high], dtype=gl.uint32, is_pure=True, pack=1)
    L: gl.constexpr = pair.type.layout
    row = first + gl.arange(0, N, layout=gl.SliceLayout(0, L))
    slot = columns.load(gl.SliceLayout(0, L))
    columns = channel // 2 + gl.arange(0, M // 2, layout=gl.SliceLayout(1, L))  # two at a time
    at = (slot.to(gl.int64) * (out.width // 2))[None, :] + columns[:, None]
    gl.store(out.ptr.to(gl.pointer_type(gl.uint32), bitcast=True) + at, pair, mask=(row < stop)[None, :])


@gluon.jit
def with_factors(sums, factors, PLACE: gl.constexpr):
    """Multiply sums by the factors of their rows of weights."""
    M: gl.constexpr = sums.shape[0]
    factor = factors.slice(PLACE * M, M).load(gl.SliceLayout(1, sums.type.layout))
    return sums * factor.to(gl.float32, bitcast=True)[:, None]


@gluon.jit
def write_sums(sums, x, factors, columns, turn, amax, told, out, G: gl.constexpr, FIRST: gl.constexpr):
    """Write the sums of a tile: those of 64 of its rows 0-127 by parts, then of 64 of rows 128-255. x: its
    numbers."""
    M: gl.constexpr = sums[0].shape[0]
    W: gl.constexpr = sums[0].shape[1]
    USED: gl.constexpr = len(sums) // 2
    block, first, stop = number(x, 1), number(x, 2), number(x, 3)
    if FIRST:
        hidden = ()
        for part in gl.static_range(USED):
            part0 = with_factors(sums[part], factors, G)
            part1 = with_factors(sums[USED + part], factors, 2 + G)
            weight = columns.slice(W * part, part0.shape[1]).load(gl.SliceLayout(0, part0.type.layout))
            h = hidden_values(part0, part1, weight.to(gl.float32, bitcast=True)[None, :], out)
            amax.index(turn * 2 + G).slice(W * part, h.shape[1]).store(gl.max(gl.abs(h), 0))
            hidden = hidden + (h,)
        told.arrive(0)
        told.wait(0, turn)
        for part in gl.static_range(USED):
            h = hidden[part]
            other = amax.index(turn * 2 + 1 - G).slice(W * part, h.shape[1]).load(gl.SliceLayout(0, h.type.layout))
            largest = gl.maximum(gl.max(gl.abs(h), 0), other)
            place, scale_place = number(x, 4) + W * part, number(x, 6) + W * part
            write_hidden(h, largest, block, stop - first - W * part, place, scale_place, out, G)
    else:
        for part in gl.static_range(USED):
            row, channel, slots = first + W * part, block * ROWS + G * M, columns.slice(W * part, sums[part].shape[1])
            write_slots(with_factors(sums[part], factors, G), slots, channel, row, stop, out)
            write_slots(with_factors(sums[USED + part], factors, 2 + G), slots, channel + 2 * M, row, stop, out)
