"""8-, 6- and 4-bit floats on 32-lane values: conversions of f32 to codes, and of codes to f16 or bf16."""

from __future__ import annotations

from softsm.engine.vec_ops import asF, asI, asU, float_to_half, half_to_float, smax, smin, toi, tou, umin, vrint
from softsm.engine.vec_types import sel


def to_mini(x, mantissa, emin, top, random=None, bits=16):
    """Converts |x| to the code of a small float format, saturating at code `top`: to nearest even, or by random bits.

    |x|, in units of the last place at its exponent, is rounded to an integer; a carry increments the exponent without
    further code. Random bits are added to the fraction, and their carry is the rounding."""
    u = smin(asI(x) & 0x7FFFFFFF, 0x7F7FFFFF)  # infinity saturates like the largest number
    e = smax((u >> 23) - 127, emin)
    units = asF(u) * asF((127 + mantissa - e) << 23)
    if random is None:
        whole = toi(vrint(units))
    else:
        whole = (toi(units * float(1 << bits)) + asI(random)) >> bits
    return asU(smin(((e - emin) << mantissa) + whole, top))


def to_e4m3(x, random=None):
    code = sel(x == x, to_mini(x, 3, -6, 0x7E, random), 0x7F)
    return code | sel(x == x, (asU(x) >> 24) & 0x80, 0)


def to_e5m2(x, random=None):
    code = sel(x == x, to_mini(x, 2, -14, 0x7B, random), 0x7F)
    return code | sel(x == x, (asU(x) >> 24) & 0x80, 0)


def to_e2m1(x, random=None):
    return sel(x == x, to_mini(x, 1, 0, 7, random) | ((asU(x) >> 28) & 8), 7)


def to_e2m3(x, random=None):
    return sel(x == x, to_mini(x, 3, 0, 0x1F, random) | ((asU(x) >> 26) & 0x20), 0x1F)


def to_e3m2(x, random=None):
    return sel(x == x, to_mini(x, 2, -2, 0x1F, random) | ((asU(x) >> 26) & 0x20), 0x1F)


def to_f16_random(x, random):
    """Rounds by 13 random bits; what exceeds the largest number becomes infinity."""
    code = to_mini(x, 10, -14, 0x7C00, random & 0x1FFF, 13)
    return sel(x == x, code | ((asU(x) >> 16) & 0x8000), 0x7FFF)


def from_e4m3(code):
    """Converts to f16 bits, exactly. The bits stand at f16's places; the factor corrects the exponent's bias."""
    h = float_to_half(half_to_float((code & 0x7F) << 7) * 256.0)
    return sel((code & 0x7F) == 0x7F, 0x7FFF, h | ((code & 0x80) << 8))


def from_e5m2(code):
    h = (code & 0xFF) << 8
    return sel((h & 0x7FFF) > 0x7C00, 0x7FFF, h)


def from_e2m1(code):
    return float_to_half(half_to_float((code & 7) << 9) * 16384.0) | ((code & 8) << 12)


def from_e2m3(code):
    return float_to_half(half_to_float((code & 0x1F) << 7) * 16384.0) | ((code & 0x20) << 10)


def from_e3m2(code):
    return float_to_half(half_to_float((code & 0x1F) << 8) * 4096.0) | ((code & 0x20) << 10)


def to_ue8m0(x, up, top):
    """Converts |x| to a biased exponent, toward zero or (up = 1) up to a power of two; over `top`: saturates or NaN."""
    u = asU(x) & 0x7FFFFFFF
    e = u >> 23
    rest = u & 0x7FFFFF
    # Exponent 0: subnormals; 2^-127 itself is code 0.
    step = sel(e == 0, sel(rest > 0x400000, tou(1), 0), sel(rest != 0, tou(1), 0)) * tou(up)
    return sel(x == x, umin(e + step, top), 0xFF)


def from_ue8m0(code):
    """Converts to bf16 bits."""
    return sel(code == 0xFF, 0x7FFF, sel(code == 0, tou(0x40), code << 7))
