"""PTX's composed arithmetic on 32-lane values: functions that need more than one LLVM operation.

Approximate functions are computed well inside the documented bounds (mostly in double precision, then rounded). Their
last bits are not those of the hardware.
"""

from __future__ import annotations

from softsm.engine.vec_ops import (
    asD,
    asF,
    asI,
    asL,
    asQ,
    asU,
    asX,
    asXU,
    canonical,
    float_to_half,
    fma,
    half_to_float,
    tod,
    tof,
    tol,
    toq,
    tou,
    umin,
    vabs,
    vcopysign,
    vrint,
    vsqrt,
)
from softsm.engine.vec_types import loaded, sel, spread

# ---------------------------------------------------------------- shifts: PTX clamps the amount


def shl(a, n):
    """Shifts U or Q left by n (U); amounts of the width and more give 0."""
    return sel(n < 32, a << (n & 31), 0)


def shr(a, n):
    return sel(n < 32, a >> (n & 31), 0)


def sar(a, n):
    """Shifts I right by n (U); large amounts fill with the sign."""
    return a >> asI(umin(n, 31))


def shl64(a, n):
    return sel(n < 64, a << toq(n & 63), 0)


def shr64(a, n):
    return sel(n < 64, a >> toq(n & 63), 0)


def sar64(a, n):
    return a >> asL(toq(umin(n, 63)))


def low_bits(n):
    """Returns a mask of the n lowest bits, n = 0..32 and more (U)."""
    return sel(n < 32, (tou(1) << (n & 31)) - 1, 0xFFFFFFFF)


def low_bits64(n):
    return sel(n < 64, (toq(1) << toq(n & 63)) - 1, 0xFFFFFFFFFFFFFFFF)


def bfe_u32(a, pos, length):
    return shr(a, pos & 255) & low_bits(length & 255)


def bfe_s32(a, pos, length):
    pos = pos & 255
    length = length & 255
    field = sar(a, pos)  # the sign beyond bit 31, as PTX requires
    keep = asI(tou(32) - umin(length, 32))
    return sel(length == 0, 0, sel(length >= 32, field, (field << (keep & 31)) >> (keep & 31)))


# The 64-bit forms are software on the device and use the whole position and length, not modulo 256.


def bfe_u64(a, pos, length):
    return shr64(a, pos) & low_bits64(length)


def bfe_s64(a, pos, length):
    field = sar64(a, pos)
    keep = asL(toq(tou(64) - umin(length, 64)))
    return sel(length == 0, 0, sel(length >= 64, field, (field << (keep & 63)) >> (keep & 63)))


def bfi32(a, b, pos, length):
    mask = shl(low_bits(length & 255), pos & 255)
    return (b & ~mask) | (shl(a, pos & 255) & mask)


def bfi64(a, b, pos, length):
    mask = shl64(low_bits64(length), pos)
    return (b & ~mask) | (shl64(a, pos) & mask)


def _prmt_byte(bytes8, control):
    byte = tou(bytes8 >> toq((control & 7) << 3)) & 255
    return sel((control & 8) == 0, byte, sel(byte > 127, tou(255), tou(0)))


def prmt(a, b, c):
    eight = toq(a) | (toq(b) << 32)
    low = _prmt_byte(eight, c) | (_prmt_byte(eight, c >> 4) << 8)
    return low | (_prmt_byte(eight, c >> 8) << 16) | (_prmt_byte(eight, c >> 12) << 24)


# ---------------------------------------------------------------- flush to zero, saturation, NaN rules


def ftz(x):
    """Flushes a subnormal F to a zero of the same sign."""
    return asF(sel(vabs(x) < 1.1754943508222875e-38, asU(x) & 0x80000000, asU(x)))


def ftz2(x):
    """Does the same for X."""
    return asX(sel(vabs(x) < 1.1754943508222875e-38, asXU(x) & 0x80000000, asXU(x)))


def saturate(x):
    """Clamps to [+0, 1]; NaN -> +0."""
    return sel(x > 0.0, sel(x < 1.0, x, 1.0), 0.0)


def nan64(r, a, b):
    """Applies f64's NaN rule: a NaN operand is returned, made quiet; a new NaN is 0xfff8000000000000."""
    new = sel(a == a, sel(b == b, toq(0xFFF8000000000000), asQ(b) | 0x8000000000000), asQ(a) | 0x8000000000000)
    return asD(sel(r == r, asQ(r), new))


def nan64x3(r, a, b, c):
    new = sel(c == c, toq(0xFFF8000000000000), asQ(c) | 0x8000000000000)
    new = sel(b == b, new, asQ(b) | 0x8000000000000)
    new = sel(a == a, new, asQ(a) | 0x8000000000000)
    return asD(sel(r == r, asQ(r), new))


# ---------------------------------------------------------------- powers, logarithms, circles


def _exp2_polynomial(r):
    """Computes 2^r on [-0.5, 0.5] in f32; minimax, relative error 2^-29 before rounding."""
    p = fma(r, 0.00015345812009201165, 0.0013399931219147392)
    p = fma(p, r, 0.00961848895709268)
    p = fma(p, r, 0.05550328776965389)
    p = fma(p, r, 0.24022646890634305)
    p = fma(p, r, 0.6931472057372676)
    return fma(p, r, 1.0)


def ex2_ftz(x):
    """Computes ex2.approx.ftz.f32; subnormal results are +0."""
    t = sel(x < 128.0, x, 128.0)
    m = t + 12582912.0  # 1.5 * 2^23: the integer part moves into the low mantissa bits
    p = _exp2_polynomial(t - (m - 12582912.0))
    r = asF(asI(p) + (asI(m) << 23))
    return asF(sel(x == x, asU(sel(x < -126.0, 0.0, r)), loaded(0x7FFFFFFF)))


def ex2(x):
    """Computes ex2.approx.f32, with subnormal results."""
    t = sel(x < 129.0, sel(x > -152.0, x, -152.0), 129.0)
    m = t + 12582912.0
    p = _exp2_polynomial(t - (m - 12582912.0))
    i = asI(m) - 0x4B400000
    h = i >> 1
    r = p * asF((h + 127) << 23) * asF((i - h + 127) << 23)
    return asF(sel(x == x, asU(r), loaded(0x7FFFFFFF)))


def exp2_double(y):
    """Computes 2^y for |y| < 1000, with a relative error below 2^-49."""
    n = vrint(y)
    r = y - n
    p = fma(r, 7.063210504393382e-09, 1.020790563469532e-07)
    p = fma(p, r, 1.3215487702433499e-06)
    p = fma(p, r, 1.5252661277225502e-05)
    p = fma(p, r, 0.00015403530374150294)
    p = fma(p, r, 0.001333355822336696)
    p = fma(p, r, 0.009618129107638863)
    p = fma(p, r, 0.05550410866448999)
    p = fma(p, r, 0.2402265069591007)
    p = fma(p, r, 0.6931471805599493)
    p = fma(p, r, 1.0)
    return p * asD((tol(n) + 1023) << 52)


def log2(x):
    """Computes lg2.approx.f32, correct to a little over half an ulp."""
    d = tod(x)
    bits = asL(d)
    e = tod(((bits >> 52) & 0x7FF) - 1023)
    m = asD((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000)
    large = m > 1.4142135623730951
    m = sel(large, m * 0.5, m)
    e = sel(large, e + 1.0, e)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = fma(z, 0.28291685672507677, 0.31989990905390725)
    p = fma(p, z, 0.4122095511540012)
    p = fma(p, z, 0.5770779369873804)
    p = fma(p, z, 0.96179669414783)
    p = fma(p, z, 2.885390081777797)
    r = tof(fma(s, p, e))
    r = sel(x > 3.4028234663852886e38, x, r)
    r = sel(x == 0.0, asF(tou(0xFF800000)), r)
    return canonical(sel(x >= 0.0, r, asF(tou(0x7FFFFFFF))))


def _reduced(x):
    """Returns x - n * pi/2 and n, in double precision."""
    d = tod(x)
    n = vrint(d * 0.6366197723675814)
    r = fma(n, -1.5707963267948966, d)
    return fma(n, -6.123233995736766e-17, r), n


def _circle(x, quadrant):
    """Computes sin(x + quadrant * pi/2)."""
    r, n = _reduced(x)
    z = r * r
    s = fma(z, -2.4756848621617253e-08, 2.755526316123943e-06)
    s = fma(s, z, -0.00019841263159461992)
    s = fma(s, z, 0.008333333323278985)
    s = fma(s, z, -0.16666666666607913)
    s = fma(s * z, r, r)
    c = fma(z, 2.06311398511301e-09, -2.755524148489381e-07)
    c = fma(c, z, 2.4801578519656227e-05)
    c = fma(c, z, -0.0013888888869445877)
    c = fma(c, z, 0.04166666666645026)
    c = fma(c, z, -0.49999999999998956)
    c = fma(c, z, 1.0)
    k = tol(n) + quadrant
    v = sel((k & 1) == 0, s, c)
    v = sel((k & 2) == 0, v, -v)
    return canonical(tof(sel(r == r, v, r)))


def sine(x):
    return sel(x == 0.0, x, _circle(x, 0))


def cosine(x):
    return _circle(x, 1)


def tanh(x):
    """Computes tanh.approx.f32."""
    d = tod(x)
    a = vabs(d)
    e = exp2_double(sel(a < 30.0, a, 30.0) * 2.8853900817779268)
    t = (e - 1.0) / (e + 1.0)
    z = d * d
    small = fma(fma(z, 0.13333333333333333, -0.3333333333333333) * z, a, a)
    r = vcopysign(sel(a < 0.02, small, t), d)
    return canonical(tof(sel(x == x, r, d)))


def rsqrt(x):
    return canonical(tof(1.0 / vsqrt(tod(x))))


def rcp(x):
    return canonical(1.0 / x)


def rcp64_approx(x):
    """Computes rcp.approx.ftz.f64: the upper 32 bits of the reciprocal, subnormals flushed."""
    bits = asQ(x)
    x = asD(sel((bits & 0x7FF0000000000000) == 0, bits & 0x8000000000000000, bits))
    r = asQ(1.0 / x) & 0xFFFFFFFF00000000
    r = sel((r & 0x7FF0000000000000) == 0, r & 0x8000000000000000, r)
    return asD(sel(x == x, r, toq(0x7FFFFFFF00000000)))


def rsqrt64_approx(x):
    """Computes rsqrt.approx.ftz.f64: the upper 32 bits, subnormals flushed."""
    bits = asQ(x)
    x = asD(sel((bits & 0x7FF0000000000000) == 0, bits & 0x8000000000000000, bits))
    r = 1.0 / vsqrt(x)
    return asD(sel(r == r, asQ(r) & 0xFFFFFFFF00000000, toq(0x7FFFFFFF00000000)))


# ---------------------------------------------------------------- one rounding from a double


def add_to_odd(p, c):
    """Computes p + c (D), rounded to odd, so that only a later rounding to fewer bits affects the result."""
    s = p + c
    t = s - p
    e = (p - (s - t)) + (c - t)
    bits = asL(s)
    toward = sel((asL(e) ^ bits) >= 0, bits + 1, bits - 1)
    inexact = ((e < 0.0) | (e > 0.0)) & ((bits & 1) == 0)
    return asD(sel(inexact, toward, bits))


def narrow_to_odd(d):
    """Converts D to F, rounded to odd."""
    t = tof(d)
    back = tod(t)
    bits = asU(t)
    bits = sel(vabs(back) > vabs(d), bits - 1, bits)
    return asF(sel(back != d, bits | 1, bits))


def odd_double(a):
    """Converts L or Q to D, rounded to odd. Beyond 2^53 the low 11 bits go; any set one makes the last kept bit odd."""
    kept = (a >> 11) << 11
    sticky = sel(kept == a, a, kept | 0x800)
    small = sel(a < 0, -a, a) < 0x20000000000000
    return tod(sel(small, a, sticky))


def fma_to_odd(a, b, c):
    """Computes a * b + c for F whose product is exact in double; the result is F, rounded to odd."""
    return narrow_to_odd(add_to_odd(tod(a) * tod(b), tod(c)))


# ---------------------------------------------------------------- bf16, f16, tf32


def bf16_to_float(a):
    """Converts the bf16 in the low half of each lane to F."""
    return asF(a << 16)


def _rounded_to_bf16(x):
    """Rounds to nearest even to a bf16 in the upper half; NaN -> 0x7fff. The lower half holds garbage."""
    u = asU(x)
    up = u + 0x7FFF - spread((u & 0x10000) != 0)  # + 1 where the kept part is odd
    return sel(x == x, up, loaded(0x7FFF0000))


def float_to_bf16(x):
    return _rounded_to_bf16(x) >> 16


def pack_bf16(high, low):
    """Computes cvt.rn.bf16x2.f32."""
    return (_rounded_to_bf16(high) & 0xFFFF0000) | (_rounded_to_bf16(low) >> 16)


def float_to_f16(x):
    """Converts F to f16, rounded to nearest even; NaN -> 0x7fff."""
    return float_to_half(canonical(x))


def float_to_f16_rz(x):
    h = float_to_half(canonical(x))
    return sel(vabs(half_to_float(h)) > vabs(x), h - 1, h)


def float_to_f16_rm(x):
    h = float_to_half(canonical(x))
    return sel(half_to_float(h) > x, sel((h & 0x8000) == 0, h - 1, h + 1), h)


def float_to_f16_rp(x):
    h = float_to_half(canonical(x))
    return sel(half_to_float(h) < x, sel((h & 0x8000) == 0, h + 1, h - 1), h)


def ftz16(a):
    """Flushes subnormal f16 (both halves) to a zero of the same sign."""
    low = sel((a & 0x7C00) == 0, a & 0xFFFF8000, a)
    return sel((low & 0x7C000000) == 0, low & 0x8000FFFF, low)
