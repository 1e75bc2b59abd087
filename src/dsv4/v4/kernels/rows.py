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
def _wide(x):
    """x >= 0 as uint64, with zeros above 32 bits: a product of two is one instruction."""
    if x.dtype == gl.int32:
        x = x.to(gl.uint32, bitcast=True)
    return x.to(gl.uint64)


@gluon.jit
def fp8_addresses(pool, number, spare, UNIT: gl.constexpr):
    """Where the rows of an Fp8Cache are: (addresses, that of `spare` for a row that is not there, those of their
    scales, whether they are there)."""
    page = page_of(number, pool)
    place = _wide(number - page * pool.page_rows)
    start = pool.ptr.to(gl.uint64) + _wide(page) * _wide(pool.page_stride) * UNIT
    there = (number >= 0) & (number < pool.rows)
    at = start + _wide(pool.page_rows) * 576 + place * 8
    return gl.where(there, start + place * 576, spare.to(gl.uint64)), at, there


@gluon.constexpr_function
def _loads(first, panels):
    """16 bytes of each of some panels of 64 bytes, from `first` on."""
    to = [", ".join(f"${4 * panel + word}" for word in range(4)) for panel in range(panels)]
    return " ".join(
        f"ld.global.L2::256B.v4.b32 {{{to[panel]}}}, [${4 * panels}+{64 * (first + panel)}];" for panel in range(panels)
    )


@gluon.constexpr_function
def _loaded(panels):
    return ",".join(["=&r"] * (4 * panels) + ["l"])


@gluon.jit
def _in_a_row(a, b, c, d):
    """The words of a thread, four tensors [rows, 4] -> [rows, 16]."""
    return gl.join(gl.join(a, c), gl.join(b, d)).reshape([a.shape[0], 16])


@gluon.jit
def fp8_load_all(row, FIRST: gl.constexpr, PANELS: gl.constexpr):
    """As fp8_load, for one or two panels of rows that all can be read, at addresses that are multiples of 16: without
    masks no register is set to 0 first. What follows in 256 bytes, most of the row, comes into the L2 with it."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [gl.num_warps(), 1], [1, 0])
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, L)).to(gl.uint64)
    row = gl.convert_layout(row, gl.SliceLayout(1, L))[:, None] + (lane * 16)[None, :]
    if PANELS == 1:
        a, b, c, d = gl.inline_asm_elementwise(
            _loads(FIRST, 1), _loaded(1), [row], dtype=(gl.int32,) * 4, is_pure=False, pack=1
        )
        x = _in_a_row(a, b, c, d).reshape([row.shape[0], 1, 16])
    else:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            _loads(FIRST, 2), _loaded(2), [row], dtype=(gl.int32,) * 8, is_pure=False, pack=1
        )
        x = gl.join(_in_a_row(a, b, c, d), _in_a_row(e, f, g, h)).permute((0, 2, 1))
    return gl.convert_layout(x, pieces(gl.num_warps(), PANELS))


# The four bytes of a word, each S EEEE MMM, as S 0000EEEE MMM0000: low and high bytes made apart, then interleaved; or
# two bytes at a time, shifted and masked below eight copies of their signs, which is one instruction less.
APART = """
    shl.b32 low, $2, 4;
    and.b32 low, low, 0xf0f0f0f0;
    shr.u32 high, $2, 4;
    and.b32 high, high, 0x07070707;
    lop3.b32 high, $2, 0x80808080, high, 0xea;
    prmt.b32 $0, low, high, 0x5140;
    prmt.b32 $1, low, high, 0x7362;
"""
SIGNED = """
    prmt.b32 low, $2, 0, 0x9180;
    prmt.b32 high, $2, 0, 0xb3a2;
    shl.b32 low, low, 4;
    shl.b32 high, high, 4;
    and.b32 $0, low, 0x87f087f0;
    and.b32 $1, high, 0x87f087f0;
"""
TIMES = """
    mov.b32 factor, 0x7b807b80;
    mul.rn.bf16x2 $0, $0, factor;
    mul.rn.bf16x2 $1, $1, factor;
    mul.rn.bf16x2 $0, $0, $3;
    mul.rn.bf16x2 $1, $1, $3;
"""


@gluon.constexpr_function
def _conversion(quick):
    return "{ .reg .b32 low, high, factor;" + (SIGNED if quick else APART) + TIMES + "}"


@gluon.jit
def scale_bytes(x, scales, FIRST: gl.constexpr):
    """The scale byte of each row and panel of x, panels from FIRST on: int32 [rows, panels, 1]. scales: an integer per
    row, of such bytes."""
    L: gl.constexpr = x.type.layout
    panel = FIRST + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    scales = gl.convert_layout(scales, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    return (scales >> (8 * panel.to(scales.dtype))[None, :, None]).to(gl.int32) & 255


@gluon.jit
def fp8_to_bf16(x, scales, FIRST: gl.constexpr, QUICK: gl.constexpr = False, SIGNS: gl.constexpr = False):
    """e4m3 values [rows, panels, 16 x 4] times one scale per row and panel -> bf16 in pairs, int32 [rows, panels, 32].

    Bytes that mean NaN do not occur in rows that count; QUICK: a scale that means NaN makes inf, and there are fewer
    instructions. SIGNS: fewer instructions, too, without that. Not everywhere: other loops would be ordered differently
    by the assembler.
    """
    # 2^(s - 127) in bf16 is s in the exponent's place; 0 is a subnormal, 255 is NaN. Twice, for pairs.
    s = scale_bytes(x, scales, FIRST)
    if QUICK:
        s = gl.maximum(s << 7, 0x40) * 0x10001
    else:
        s = gl.where(s == 0, 0x40, gl.where(s == 255, 0x7FC0, s << 7)) * 0x10001
    return fp8_times(x, s, QUICK or SIGNS)


@gluon.jit
def fp8_times(x, s, QUICK: gl.constexpr):
    """e4m3 values times factors, [rows, panels, 1] of twice the same bf16 -> bf16 in pairs.

    S EEEE MMM becomes S 0000EEEE MMM0000, which as bf16 is the value times 2^-120, subnormals too; a product by 2^120
    corrects that. The scale is applied by itself: 2^120 times a scale may not fit.
    """
    x, s = gl.broadcast(x, s)
    a, b = gl.inline_asm_elementwise(
        _conversion(QUICK), "=&r,=&r,r,r", [x, s], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(a, b).reshape([x.shape[0], x.shape[1], 32])
