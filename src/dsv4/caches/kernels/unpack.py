"""Gluon functions that convert packed rows to bf16 in registers: scales of rows, and an unpack function per format.

`unpack(x, scales, FIRST, SPEED, FORMAT)` of a format: x has the codes of some panels of 64 values, int32 [rows, panels,
words]; scales is a result of `load_scales`, and FIRST is the first panel of x, counted from the panel where scales
begin. The result is bf16 in pairs, int32 [rows, panels, 32].
"""

from dsv4.kernels.compat import gl, gluon

# SPEED decides which instructions unpack. NaN codes do not occur in rows that count; from QUICK on, a NaN scale
# gives inf. More speed is not better everywhere: the assembler orders other loops differently. SMALLER, for
# formats that allow it (unpacks_smaller): the result is the row times 2^-8, with one multiplication less. e4m3 then
# needs scales below 2^16.
EXACT, FEWER, QUICK, QUICKEST = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
SMALLER = gl.constexpr(4)


@gluon.constexpr_function
def panel_scale_bytes(format):
    """Return the one-byte scales per panel of 64 values."""
    return 64 // format.group


@gluon.jit
def _bytes_as(ptr, there, N: gl.constexpr, dtype: gl.constexpr):
    x = gl.load(ptr, mask=there, other=0).to(dtype)
    for i in gl.static_range(1, N):
        x = x | (gl.load(ptr + i, mask=there, other=0).to(dtype) << (8 * i))
    return x


@gluon.jit
def load_scales(ptr, at, there, FIRST: gl.constexpr, PANELS: gl.constexpr, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    """Load the scale bytes of each row, for PANELS panels from FIRST on: an integer of 32 or 64 bits, or several of 64.
    at: where the scales of a row begin, a multiple of UNIT bytes up to 8."""
    EACH: gl.constexpr = panel_scale_bytes(FORMAT)
    BEGIN: gl.constexpr = FIRST * EACH
    SIZE: gl.constexpr = PANELS * EACH
    USED: gl.constexpr = min(SIZE, FORMAT.groups - BEGIN)
    gl.static_assert(SIZE == 4 or SIZE == 8 or SIZE == 16 or SIZE == 32)
    if SIZE > 8:
        low = load_scales(ptr, at, there, FIRST, PANELS // 2, UNIT, FORMAT)
        high = load_scales(ptr, at, there, FIRST + PANELS // 2, PANELS // 2, UNIT, FORMAT)
        if SIZE == 32:
            return low[0], low[1], high[0], high[1]
        else:
            return low, high
    else:
        dtype: gl.constexpr = gl.int32 if SIZE == 4 else gl.int64
        if UNIT >= 8:
            return gl.load((ptr + at + BEGIN).to(gl.pointer_type(dtype), bitcast=True), mask=there, other=0)
        else:
            return _bytes_as(ptr + at + BEGIN, there, USED, dtype)


@gluon.jit
def half_scales(scales, HALF: gl.constexpr):
    """Return the scales of the first or the last 4 of 8 panels, which are the bytes of a 64-bit integer."""
    if HALF == 0:
        return scales.to(gl.int32)
    else:
        return (scales >> 32).to(gl.int32)


@gluon.jit
def panel_scales(x, scales, FIRST: gl.constexpr, FORMAT: gl.constexpr):
    """Return the scale bytes of each row and panel of x, panels from FIRST on: int32 [rows, panels, 1]. scales: these
    bytes already, or a result of load_scales."""
    EACH: gl.constexpr = panel_scale_bytes(FORMAT)
    L: gl.constexpr = x.type.layout
    panel = FIRST + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    if not isinstance(scales, gl.tuple) and len(scales.shape) == 3:
        return scales
    elif isinstance(scales, gl.tuple):
        # The compiler knows the panel numbers, so it selects one of the integers.
        PER: gl.constexpr = 8 // EACH
        found = _bytes_of_panels(scales[0], panel, EACH, L)
        for i in gl.static_range(1, len(scales)):
            others = _bytes_of_panels(scales[i], panel - i * PER, EACH, L)
            found = gl.where((panel // PER == i)[None, :, None], others, found)
        return found
    else:
        return _bytes_of_panels(scales, panel, EACH, L)


@gluon.jit
def _bytes_of_panels(scales, panel, EACH: gl.constexpr, L: gl.constexpr):
    scales = gl.convert_layout(scales, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    found = (scales >> (8 * EACH * panel.to(scales.dtype))[None, :, None]).to(gl.int32)
    if EACH < 4:
        found = found & ((1 << (8 * EACH)) - 1)
    return found


@gluon.jit
def word_scales(x, scales, FIRST: gl.constexpr, FORMAT: gl.constexpr):
    """Return the scale byte of each word of x: int32 [rows, panels, words], or [rows, panels, 1] if a panel has one."""
    s = panel_scales(x, scales, FIRST, FORMAT)
    if panel_scale_bytes(FORMAT) > 1:
        word = gl.arange(0, x.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(1, x.type.layout)))[None, None, :]
        s = (s >> (word * (32 // FORMAT.code_bits) // FORMAT.group * 8)) & 255
    return s


# Convert the four bytes of a word, each S EEEE MMM, to S 0000EEEE MMM0000: low and high bytes separately, then
# interleaved; or two bytes at a time, shifted and masked below eight copies of their signs, which is one instruction
# less.
INTERLEAVED = """
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
"""
SCALED = """
    mul.rn.bf16x2 $0, $0, $3;
    mul.rn.bf16x2 $1, $1, $3;
"""


@gluon.constexpr_function
def _conversion(speed):
    steps = (INTERLEAVED if speed == EXACT.value else SIGNED) + ("" if speed == SMALLER.value else TIMES) + SCALED
    return "{ .reg .b32 low, high, factor;" + steps + "}"


@gluon.constexpr_function
def has_small_rows(window, compressed):
    """Return whether the rows of both pools are unpacked as SMALLER: both formats must allow it."""
    return window.unpacks_smaller and compressed.unpacks_smaller


@gluon.constexpr_function
def small_factor(window, compressed):
    """Return the factor that compensates SMALLER, in scores and in O."""
    return 256.0 if window.unpacks_smaller and compressed.unpacks_smaller else 1.0


@gluon.jit
def unpack_e4m3(x, scales, FIRST: gl.constexpr, SPEED: gl.constexpr, FORMAT: gl.constexpr):
    """Unpack e4m3 times ue8m0."""
    gl.static_assert(FORMAT.code_bits == 8)
    # 2^(s - 127) in bf16 is s in the exponent's place; 0 is a subnormal, 255 is NaN. It is repeated for pairs.
    s = word_scales(x, scales, FIRST, FORMAT)
    if SPEED == SMALLER:
        s = gl.minimum(s, 143) * 0x800080 + 0x38003800  # 2^(s - 127) times 2^112; beyond, inf
    elif SPEED == QUICKEST:
        s = gl.maximum(s * 0x800080, 0x400040)
    elif SPEED == QUICK:
        s = gl.maximum(s << 7, 0x40) * 0x10001
    else:
        s = gl.where(s == 0, 0x40, gl.where(s == 255, 0x7FC0, s << 7)) * 0x10001
    # S EEEE MMM becomes S 0000EEEE MMM0000, which as bf16 is the value times 2^-120, subnormals too; a product by 2^120
    # corrects that. The scale is applied separately: 2^120 times a scale may overflow.
    x, s = gl.broadcast(x, s)
    a, b = gl.inline_asm_elementwise(
        _conversion(SPEED), "=&r,=&r,r,r", [x, s], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(a, b).reshape([x.shape[0], x.shape[1], 32])


# Convert the eight codes of a word, each S EE M, in pairs to S 000000EE M000000: each byte, and the byte with its low
# code moved up, are put below eight copies of their signs, shifted and masked. As bf16 that is the value times 2^-126,
# subnormals too. 2^126 times a scale may overflow, so the factor is 2^119, and the scale is multiplied by 2^7.
E2M1_PAIRS = """
    shl.b32 up, $4, 4;
    prmt.b32 $0, up, $4, 0xc480;
    prmt.b32 $1, up, $4, 0xd591;
    prmt.b32 $2, up, $4, 0xe6a2;
    prmt.b32 $3, up, $4, 0xf7b3;
    shl.b32 $0, $0, 2;
    shl.b32 $1, $1, 2;
    shl.b32 $2, $2, 2;
    shl.b32 $3, $3, 2;
    and.b32 $0, $0, 0x81c081c0;
    and.b32 $1, $1, 0x81c081c0;
    and.b32 $2, $2, 0x81c081c0;
    and.b32 $3, $3, 0x81c081c0;
"""
E2M1_TIMES = """
    mov.b32 factor, 0x7b007b00;
    mul.rn.bf16x2 $0, $0, factor;
    mul.rn.bf16x2 $1, $1, factor;
    mul.rn.bf16x2 $2, $2, factor;
    mul.rn.bf16x2 $3, $3, factor;
"""
E2M1_SCALED = """
    mul.rn.bf16x2 $0, $0, $5;
    mul.rn.bf16x2 $1, $1, $5;
    mul.rn.bf16x2 $2, $2, $5;
    mul.rn.bf16x2 $3, $3, $5;
"""


@gluon.constexpr_function
def _pairs(speed):
    return "{ .reg .b32 up, factor;" + E2M1_PAIRS + ("" if speed == SMALLER.value else E2M1_TIMES) + E2M1_SCALED + "}"


@gluon.jit
def unpack_e2m1(x, scales, FIRST: gl.constexpr, SPEED: gl.constexpr, FORMAT: gl.constexpr):
    """Unpack e2m1 times one e4m3 per 16, which is not negative."""
    gl.static_assert(FORMAT.code_bits == 4 and FORMAT.group == 16)
    # The bits of an e4m3, read as bf16, are its value times 2^-120: the product with 2^127 is 2^7 times the value.
    byte = word_scales(x, scales, FIRST, FORMAT)
    s = gl.inline_asm_elementwise(
        "{ .reg .b32 factor; mov.b32 factor, 0x7f007f00; mul.rn.bf16x2 $0, $1, factor; }",
        "=r,r",
        [byte * 0x100010],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    if SPEED == EXACT:
        s = gl.where(byte == 127, 0x7FC07FC0, s)
    if SPEED == SMALLER:  # 2^118 times the scale
        s = gl.inline_asm_elementwise(
            "{ .reg .b32 factor; mov.b32 factor, 0x77007700; mul.rn.bf16x2 $0, $1, factor; }",
            "=r,r",
            [s],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
    x, s = gl.broadcast(x, s)
    a, b, c, d = gl.inline_asm_elementwise(
        _pairs(SPEED), "=&r,=&r,=&r,=&r,r,r", [x, s], dtype=(gl.int32,) * 4, is_pure=True, pack=1
    )
    return gl.join(gl.join(a, c), gl.join(b, d)).reshape([x.shape[0], x.shape[1], 32])


@gluon.jit
def e4m3_bytes(x, s, FORMAT: gl.constexpr):
    """Unpack e4m3 as bytes [..., 64], times ue8m0: s int32 [...] has those of a panel."""
    s = _byte_scales(x, s, FORMAT)
    s = gl.where(s == 0, 0x40, gl.where(s == 255, 0x7FC0, s << 7)).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return x.to(gl.float8e4nv, bitcast=True).to(gl.bfloat16) * s


@gluon.jit
def e2m1_bytes(x, s, FORMAT: gl.constexpr):
    """Unpack e2m1 as bytes [rows, 32], two codes each, times e4m3: s int32 [rows] has the four scales of a panel."""
    code = gl.join(x & 15, x >> 4).reshape([x.shape[0], 64]).to(gl.int32)
    # As bf16 this is the value times 2^-126.
    value = (((code & 7) << 6) | ((code & 8) << 12)).to(gl.int16).to(gl.bfloat16, bitcast=True)
    s = _byte_scales(code, s, FORMAT).to(gl.int8).to(gl.float8e4nv, bitcast=True).to(gl.bfloat16)
    return value * 2.0**126 * s


@gluon.jit
def _byte_scales(codes, s, FORMAT: gl.constexpr):
    """Select one byte of the scales s of a panel for each of its codes [..., 64]."""
    s = gl.expand_dims(s, -1)
    if panel_scale_bytes(FORMAT) > 1:
        L: gl.constexpr = codes.type.layout
        gl.static_assert(len(codes.shape) == 2)
        column = gl.arange(0, 64, layout=gl.SliceLayout(0, L))[None, :]
        s = gl.convert_layout(s, L) >> (column // FORMAT.group * 8)
    return s & 255
