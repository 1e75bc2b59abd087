"""Rows of a pool by number: where they are, and those of an Fp8Cache as bf16.

A row that is not there (-1, out of range) is said so; what is loaded of it is zeros.
"""

from dsv4.kernels.compat import Value, aggregate, gl, gluon


@aggregate
class Pool:
    """Rows by number. Strides are in units of 8 elements, of an Fp8Cache in units of UNIT bytes."""

    ptr: Value
    rows: Value
    page_rows: Value
    page_stride: Value
    row_stride: Value
    inverse: Value  # ceil(2^shift / page_rows)
    shift: Value


@gluon.jit
def quotient(n, inverse, shift):
    """n // divisor, for 0 <= n < 2^31: what the host knows of the divisor replaces the division."""
    wide = n.to(gl.uint32, bitcast=True).to(gl.uint64) * inverse.to(gl.uint32, bitcast=True).to(gl.uint64)
    return (wide >> shift.to(gl.uint64)).to(gl.int32)


@gluon.jit
def page_of(number, pool):
    return quotient(number, pool.inverse, pool.shift)


@gluon.jit
def entries(L: gl.constexpr, KEYS: gl.constexpr = 64):
    return gl.arange(0, KEYS, layout=gl.SliceLayout(1, L))


@gluon.jit
def plain_rows(pool, number):
    """Where the rows of a plain tensor are: (offset in units of 8 elements, whether they are there)."""
    page = page_of(number, pool)
    offset = page.to(gl.int64) * pool.page_stride + (number - page * pool.page_rows).to(gl.int64) * pool.row_stride
    return offset, (number >= 0) & (number < pool.rows)


@gluon.jit
def fp8_place(pool, number, UNIT: gl.constexpr):
    """Where the rows of an Fp8Cache are: (first byte, whether they are there, first byte of their scales)."""
    page = page_of(number, pool)
    place = (number - page * pool.page_rows).to(gl.int64)
    start = page.to(gl.int64) * pool.page_stride * UNIT
    data = start + place * 576
    there = (number >= 0) & (number < pool.rows)
    return data, there, start + pool.page_rows.to(gl.int64) * 576 + place * 8


@gluon.jit
def fp8_rows(pool, number, UNIT: gl.constexpr):
    """Where the rows of an Fp8Cache are: (first byte, whether they are there, their eight scale bytes)."""
    ptr = pool.ptr
    start, there, at = fp8_place(pool, number, UNIT)
    if UNIT >= 8:
        scales = gl.load((ptr + at).to(gl.pointer_type(gl.int64), bitcast=True), mask=there, other=0)
    else:
        scales = gl.load(ptr + at, mask=there, other=0).to(gl.int64)
        for i in gl.static_range(1, 7):
            scales = scales | (gl.load(ptr + at + i, mask=there, other=0).to(gl.int64) << (8 * i))
    return start, there, scales


@gluon.jit
def scale_word(ptr, at, there, FIRST: gl.constexpr, UNIT: gl.constexpr):
    """Four of the scale bytes of each row, from byte FIRST (0 or 4) on."""
    if UNIT >= 8:
        x = gl.load((ptr + at + FIRST).to(gl.pointer_type(gl.int32), bitcast=True), mask=there, other=0)
    else:
        x = gl.load(ptr + at + FIRST, mask=there, other=0).to(gl.int32)
        for i in gl.static_range(1, 4 if FIRST == 0 else 3):
            x = x | (gl.load(ptr + at + FIRST + i, mask=there, other=0).to(gl.int32) << (8 * i))
    return x


@gluon.jit
def words_of(ptr, data, there, FIRST: gl.constexpr, N: gl.constexpr, UNIT: gl.constexpr):
    """N words of 4 bytes from word FIRST on of each row: int32 [rows, N], in the layout whose rows data has."""
    column = FIRST + gl.arange(0, N, layout=gl.SliceLayout(0, data.type.layout.parent))
    if UNIT >= 8:
        word_ptr = ptr.to(gl.pointer_type(gl.int32), bitcast=True)
        x = gl.load(word_ptr + (data // 4)[:, None] + column[None, :], mask=there[:, None], other=0)
    else:
        pointers = ptr + data[:, None] + (column * 4)[None, :]
        x = gl.load(pointers, mask=there[:, None], other=0).to(gl.int32)
        for i in gl.static_range(1, 4):
            x = x | (gl.load(pointers + i, mask=there[:, None], other=0).to(gl.int32) << (8 * i))
    return x


@gluon.constexpr_function
def pieces(warps, panels, words=4):
    """`words` of 32 bits of each of several panels of 64 bytes per thread."""
    return gl.BlockedLayout([1, panels, words], [2 * words, 1, 16 // words], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def fp8_load(ptr, data, there, FIRST: gl.constexpr, PANELS: gl.constexpr, UNIT: gl.constexpr, WORDS: gl.constexpr = 4):
    """64 x PANELS of the 448 e4m3 values of each row, four to a word, WORDS a thread: int32 [rows, PANELS, 16]."""
    L: gl.constexpr = pieces(gl.num_warps(), PANELS, WORDS)
    R: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    data = gl.convert_layout(data, R)[:, None, None]
    there = gl.convert_layout(there, R)[:, None, None]
    panel = FIRST + gl.arange(0, PANELS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    column = panel[None, :, None] * 16 + word[None, None, :]
    if UNIT >= 8:
        word_ptr = ptr.to(gl.pointer_type(gl.int32), bitcast=True)
        x = gl.load(word_ptr + data // 4 + column, mask=there, other=0)
    else:
        pointers = ptr + data + column * 4
        x = gl.load(pointers, mask=there, other=0).to(gl.int32)
        for i in gl.static_range(1, 4):
            x = x | (gl.load(pointers + i, mask=there, other=0).to(gl.int32) << (8 * i))
    return x


@gluon.jit
def fp8_to_bf16(x, scales, FIRST: gl.constexpr, NANS: gl.constexpr = True):
    """e4m3 values [rows, panels, 16 x 4] times one scale per row and panel -> bf16 in pairs, int32 [rows, panels, 32].

    S EEEE MMM becomes S 0000EEEE MMM0000, which as bf16 is the value times 2^-120, subnormals too; a product by 2^120
    corrects that. Four bytes at a time: their low and high bytes in bf16 are made apart, then interleaved. The scale is
    applied by itself: 2^120 times a scale may not fit. Bytes that mean NaN do not occur in rows that count; without
    NANS a scale that means NaN makes inf, with two comparisons less.
    """
    # 2^(s - 127) in bf16 is s in the exponent's place; 0 is a subnormal, 255 is NaN. Twice, for pairs.
    L: gl.constexpr = x.type.layout
    panel = FIRST + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    scales = gl.convert_layout(scales, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    s = (scales >> (8 * panel.to(scales.dtype))[None, :, None]).to(gl.int32) & 255
    if NANS:
        s = gl.where(s == 0, 0x40, gl.where(s == 255, 0x7FC0, s << 7)) * 0x10001
    else:
        s = gl.maximum(s << 7, 0x40) * 0x10001
    x, s = gl.broadcast(x, s)
    a, b = gl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, factor;
        shl.b32 low, $2, 4;
        and.b32 low, low, 0xf0f0f0f0;
        shr.u32 high, $2, 4;
        and.b32 high, high, 0x07070707;
        lop3.b32 high, $2, 0x80808080, high, 0xea;
        mov.b32 factor, 0x7b807b80;
        prmt.b32 $0, low, high, 0x5140;
        prmt.b32 $1, low, high, 0x7362;
        mul.rn.bf16x2 $0, $0, factor;
        mul.rn.bf16x2 $1, $1, factor;
        mul.rn.bf16x2 $0, $0, $3;
        mul.rn.bf16x2 $1, $1, $3;
        }""",
        "=&r,=&r,r,r", [x, s], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.join(a, b).reshape([x.shape[0], x.shape[1], 32])
