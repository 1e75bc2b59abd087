"""Packed rows as bf16 in registers: the scales of rows, and an unpack function for each format. Gluon.

`unpack(x, scales, FIRST, SPEED, FORMAT)` of a format: x are the codes of some panels of 64 values, int32 [rows, panels,
words]; scales is what `load_scales` made of scales that begin with those of some panel, and FIRST is the first panel of
x counted from there. The result is bf16 in pairs, int32 [rows, panels, 32].
"""

from dsv4.kernels.compat import gl, gluon

# SPEED: which instructions unpack. Codes that mean NaN do not occur in rows that count; from QUICK on a scale that
# means NaN makes inf. More speed is not better everywhere: the assembler orders other loops differently.
EXACT, FEWER, QUICK, QUICKEST = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)


@gluon.constexpr_function
def panel_scale_bytes(format):
    """Scales of one byte for a panel of 64 values."""
    return 64 // format.group


@gluon.jit
def _bytes_as(ptr, there, N: gl.constexpr, dtype: gl.constexpr):
    x = gl.load(ptr, mask=there, other=0).to(dtype)
    for i in gl.static_range(1, N):
        x = x | (gl.load(ptr + i, mask=there, other=0).to(dtype) << (8 * i))
    return x


@gluon.jit
def load_scales(ptr, at, there, FIRST: gl.constexpr, PANELS: gl.constexpr, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    """Scale bytes of each row, of PANELS panels from FIRST on: an integer of 32 or 64 bits, or two of 64. at: where the
    scales of a row begin, a multiple of UNIT bytes up to 8."""
    EACH: gl.constexpr = panel_scale_bytes(FORMAT)
    BEGIN: gl.constexpr = FIRST * EACH
    SIZE: gl.constexpr = PANELS * EACH
    USED: gl.constexpr = min(SIZE, FORMAT.groups - BEGIN)
    gl.static_assert(SIZE == 4 or SIZE == 8 or SIZE == 16)
    if SIZE == 16:
        return (load_scales(ptr, at, there, FIRST, PANELS // 2, UNIT, FORMAT),
                load_scales(ptr, at, there, FIRST + PANELS // 2, PANELS // 2, UNIT, FORMAT))  # fmt: skip
    else:
        dtype: gl.constexpr = gl.int32 if SIZE == 4 else gl.int64
        if UNIT >= 8:
            return gl.load((ptr + at + BEGIN).to(gl.pointer_type(dtype), bitcast=True), mask=there, other=0)
        else:
            return _bytes_as(ptr + at + BEGIN, there, USED, dtype)


@gluon.jit
def half_scales(scales, HALF: gl.constexpr):
    """Of the scales of 8 panels, those of the first 4 or of the last 4."""
    if isinstance(scales, gl.tuple):
        return scales[HALF]
    elif HALF == 0:
        return scales.to(gl.int32)
    else:
        return (scales >> 32).to(gl.int32)


@gluon.jit
def panel_scales(x, scales, FIRST: gl.constexpr, FORMAT: gl.constexpr):
    """The scale bytes of each row and panel of x, panels from FIRST on: int32 [rows, panels, 1]."""
    EACH: gl.constexpr = panel_scale_bytes(FORMAT)
    L: gl.constexpr = x.type.layout
    if isinstance(scales, gl.tuple):
        return panel_scales(x, scales[FIRST * EACH // 8], FIRST % (8 // EACH), FORMAT)
    else:
        panel = FIRST + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
        scales = gl.convert_layout(scales, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
        return (scales >> (8 * EACH * panel.to(scales.dtype))[None, :, None]).to(gl.int32) & ((1 << (8 * EACH)) - 1)


# The four bytes of a word, each S EEEE MMM, as S 0000EEEE MMM0000: low and high bytes made on their own, then
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
    mul.rn.bf16x2 $0, $0, $3;
    mul.rn.bf16x2 $1, $1, $3;
"""


@gluon.constexpr_function
def _conversion(exact):
    return "{ .reg .b32 low, high, factor;" + (INTERLEAVED if exact else SIGNED) + TIMES + "}"


@gluon.jit
def unpack_e4m3(x, scales, FIRST: gl.constexpr, SPEED: gl.constexpr, FORMAT: gl.constexpr):
    """e4m3 times one ue8m0 for each panel."""
    gl.static_assert(FORMAT.code_bits == 8 and panel_scale_bytes(FORMAT) == 1)
    # 2^(s - 127) in bf16 is s in the exponent's place; 0 is a subnormal, 255 is NaN. Twice, for pairs.
    s = panel_scales(x, scales, FIRST, FORMAT)
    if SPEED == QUICKEST:
        s = gl.maximum(s * 0x800080, 0x400040)
    elif SPEED == QUICK:
        s = gl.maximum(s << 7, 0x40) * 0x10001
    else:
        s = gl.where(s == 0, 0x40, gl.where(s == 255, 0x7FC0, s << 7)) * 0x10001
    # S EEEE MMM becomes S 0000EEEE MMM0000, which as bf16 is the value times 2^-120, subnormals too; a product by 2^120
    # corrects that. The scale is applied by itself: 2^120 times a scale may not fit.
    x, s = gl.broadcast(x, s)
    a, b = gl.inline_asm_elementwise(
        _conversion(SPEED == EXACT), "=&r,=&r,r,r", [x, s], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(a, b).reshape([x.shape[0], x.shape[1], 32])


@gluon.jit
def e4m3_bytes(x, s):
    """e4m3 as bytes [..., 64], times one ue8m0 for each row: s int32 [...]."""
    s = gl.where(s == 0, 0x40, gl.where(s == 255, 0x7FC0, s << 7)).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return x.to(gl.float8e4nv, bitcast=True).to(gl.bfloat16) * gl.expand_dims(s, -1)
