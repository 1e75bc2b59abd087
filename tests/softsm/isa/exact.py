"""Exact float arithmetic on bit patterns, by rational numbers: what the instruction tests compare with.

Slow and plain on purpose, and independent of the engine: a value is a Fraction, rounding is integer division.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import isqrt


@dataclass(frozen=True)
class Format:
    exponent: int  # bits
    mantissa: int  # explicit bits
    nan: int  # the NaN the device produces

    @property
    def width(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def inf(self) -> int:
        return ((1 << self.exponent) - 1) << self.mantissa

    @property
    def sign(self) -> int:
        return 1 << (self.width - 1)


F16 = Format(5, 10, 0x7FFF)
BF16 = Format(8, 7, 0x7FFF)
F32 = Format(8, 23, 0x7FFFFFFF)
F64 = Format(11, 52, 0xFFF8000000000000)
FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}


def is_nan(f: Format, bits: int) -> bool:
    return bits & ~f.sign > f.inf


def is_inf(f: Format, bits: int) -> bool:
    return bits & ~f.sign == f.inf


def value(f: Format, bits: int) -> Fraction:
    """The value of a finite number."""
    m = bits & ((1 << f.mantissa) - 1)
    e = bits >> f.mantissa & ((1 << f.exponent) - 1)
    if e:
        m |= 1 << f.mantissa
    scale = max(e, 1) - f.bias - f.mantissa
    v = Fraction(m) * (Fraction(2) ** scale)
    return -v if bits & f.sign else v


def flush(f: Format, bits: int) -> int:
    """.ftz: a subnormal becomes a zero of its sign."""
    return bits & f.sign if bits & f.inf == 0 else bits


def divide(n: int, d: int, mode: str, negative: bool) -> int:
    """n / d rounded to an integer; modes rn rz rm rp and rna (ties away)."""
    q, r = divmod(n, d)
    if r == 0:
        return q
    if mode == "rn":
        up = 2 * r > d or 2 * r == d and q & 1
    elif mode == "rna":
        up = 2 * r >= d
    else:
        up = {"rz": False, "rm": negative, "rp": not negative}[mode]
    return q + bool(up)


def rounded(f: Format, v: Fraction, mode: str = "rn", zero_negative: bool = False) -> int:
    """A rational number as bits of the format."""
    if v == 0:
        return f.sign if zero_negative else 0
    negative, v = v < 0, abs(v)
    sign = f.sign if negative else 0
    e = v.numerator.bit_length() - v.denominator.bit_length()
    if Fraction(2) ** e > v:
        e -= 1
    e = max(e, 1 - f.bias)  # subnormals share the smallest exponent
    scale = e - f.mantissa
    n, d = v.numerator, v.denominator
    m = divide(n << -scale, d, mode, negative) if scale < 0 else divide(n, d << scale, mode, negative)
    if m >> (f.mantissa + 1):
        m, e = m >> 1, e + 1
    if e > f.bias:  # overflow
        away = mode in ("rn", "rna") or mode == "rm" and negative or mode == "rp" and not negative
        return sign | (f.inf if away else f.inf - 1)
    if m >> f.mantissa == 0:
        return sign | m
    return sign | (e + f.bias) << f.mantissa | m & ((1 << f.mantissa) - 1)


def add(f: Format, a: int, b: int, mode: str = "rn") -> int:
    return fma(f, a, rounded(f, Fraction(1)), b, mode)


def sub(f: Format, a: int, b: int, mode: str = "rn") -> int:
    return add(f, a, b ^ f.sign, mode) if not is_nan(f, b) else f.nan


def mul(f: Format, a: int, b: int, mode: str = "rn") -> int:
    sign = (a ^ b) & f.sign
    if is_nan(f, a) or is_nan(f, b):
        return f.nan
    if is_inf(f, a) or is_inf(f, b):
        return f.nan if 0 in (a & ~f.sign, b & ~f.sign) else sign | f.inf
    return rounded(f, value(f, a) * value(f, b), mode, bool(sign))


def fma(f: Format, a: int, b: int, c: int, mode: str = "rn") -> int:
    if is_nan(f, a) or is_nan(f, b) or is_nan(f, c):
        return f.nan
    sign = (a ^ b) & f.sign
    if is_inf(f, a) or is_inf(f, b):
        if 0 in (a & ~f.sign, b & ~f.sign) or is_inf(f, c) and (c & f.sign) != sign:
            return f.nan
        return sign | f.inf
    if is_inf(f, c):
        return c
    product, addend = value(f, a) * value(f, b), value(f, c)
    if product + addend == 0:  # an exact zero: the sign of both, else + (or - when rounding down)
        if product == 0 and addend == 0 and sign == c & f.sign:
            return sign
        return f.sign if mode == "rm" else 0
    return rounded(f, product + addend, mode)


def div(f: Format, a: int, b: int, mode: str = "rn") -> int:
    if is_nan(f, a) or is_nan(f, b):
        return f.nan
    sign = (a ^ b) & f.sign
    if is_inf(f, a):
        return f.nan if is_inf(f, b) else sign | f.inf
    if is_inf(f, b):
        return sign
    if b & ~f.sign == 0:
        return f.nan if a & ~f.sign == 0 else sign | f.inf
    return rounded(f, value(f, a) / value(f, b), mode, bool(sign))


def sqrt(f: Format, a: int, mode: str = "rn") -> int:
    if is_nan(f, a) or a & f.sign and a != f.sign:
        return f.nan
    if a in (0, f.sign, f.inf):
        return a
    v = value(f, a)
    # A root with 2 * mantissa + 8 bits and a sticky bit rounds as the true one.
    shift = 2 * (f.mantissa + 4) + (f.bias + f.mantissa) * 2
    n = (v.numerator << shift) // v.denominator
    root = isqrt(n)
    exact = root * root == n and (v.numerator << shift) % v.denominator == 0
    return rounded(f, Fraction(2 * root + (not exact), 2) / (1 << shift // 2), mode)


def convert(source: Format, target: Format, bits: int, mode: str = "rn") -> int:
    if is_nan(source, bits):
        return target.nan
    sign = target.sign if bits & source.sign else 0
    if is_inf(source, bits):
        return sign | target.inf
    return rounded(target, value(source, bits), mode, bool(sign))


def integral(f: Format, bits: int, mode: str) -> int:
    """Return x rounded to an integral value of the same format: rni rzi rmi rpi."""
    if is_nan(f, bits):
        return f.nan
    if is_inf(f, bits):
        return bits
    n = to_integer(f, bits, mode)
    return rounded(f, Fraction(n), "rn", bool(bits & f.sign))


def to_integer(f: Format, bits: int, mode: str) -> int:
    v = value(f, bits)
    n = divide(abs(v.numerator), v.denominator, mode.removesuffix("i"), v < 0)
    return -n if v < 0 else n
