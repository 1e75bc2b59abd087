"""Operand tiles laid out in shared memory one element at a time, straight from the address table of the PTX ISA."""

import math

import numpy as np

NONE, ATOM32, SW128, SW64, SW32 = 0, 1, 2, 4, 6  # descriptor bits 61-63
WIDTH = {ATOM32: 128, SW128: 128, SW64: 64, SW32: 32}
CHOICES = np.array([-2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2], np.float32)  # exact in every format

SMALL = {"e4m3": (4, 3), "e5m2": (5, 2), "e2m3": (2, 3), "e3m2": (3, 2), "e2m1": (2, 1)}  # exponent and mantissa bits
BYTES = {"bf16": 2, "f16": 2, "tf32": 4}


INTEGERS = {"s8": (-128, 128), "u8": (0, 128), "s4": (-8, 8), "u4": (0, 16)}


def values(rng, shape, name):
    if name in INTEGERS:
        return rng.integers(*INTEGERS[name], shape).astype(np.float32)
    return rng.choice(CHOICES, shape)


def small_float(x, exponent_bits, mantissa_bits):
    """Code of a value the format can represent."""
    sign = int(np.signbit(x)) << exponent_bits + mantissa_bits
    if x == 0:
        return sign
    bias = (1 << exponent_bits - 1) - 1
    e = max(math.frexp(x)[1] - 1, 1 - bias)  # a log2 of the CPU may be off at powers of two
    fraction = abs(x) / 2.0**e * (1 << mantissa_bits)
    assert fraction == int(fraction), f"{x} does not fit"
    field = int(fraction) + ((e + bias - 1) << mantissa_bits)  # the hidden bit carries into the exponent
    return sign | field


def bits(array, name):
    """Little-endian bytes of each element, uint8 [..., bytes]; sub-byte codes in the low bits of one byte."""
    if name in SMALL:
        codes = {float(x): small_float(x, *SMALL[name]) for x in np.unique(array)}
        raw = np.vectorize(lambda x: codes[float(x)], otypes=[np.uint8])(array)
    elif name == "bf16":
        raw = (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        raw = array.astype({"f16": np.float16, "tf32": np.float32, "s8": np.int8, "u8": np.uint8}[name])
    return np.ascontiguousarray(raw).view(np.uint8).reshape(*array.shape, -1)


def element_address(mode, k_major, start, lbo, sbo, mn, k, e):
    t = 16 // e
    if mode == NONE:
        if k_major:
            return start + (mn % 8) * 16 + (mn // 8) * sbo + (k // t) * lbo + (k % t) * e
        return start + (mn % t) * e + (mn // t) * sbo + (k % 8) * 16 + (k // 8) * lbo
    w = WIDTH[mode]
    if k_major:
        a = start + (mn % 8) * w + (mn // 8) * sbo + k * e
    else:
        group = 4 if mode == ATOM32 else 8
        per = w // e
        a = start + (mn % per) * e + (mn // per) * lbo + (k % group) * w + (k // group) * sbo
    if mode == ATOM32:
        return a ^ ((a >> 7) & 3) << 5
    return a ^ ((a >> 7) & (w // 16 - 1)) << 4


def strides(mode, k_major, rows, k, e):
    """(LBO, SBO) of a dense tile in that layout."""
    if mode == NONE:
        if k_major:  # core matrices of one k chunk follow each other
            return rows * 16, 128
        return rows * e // 16 * 128, 128
    w = WIDTH[mode]
    if k_major:
        return 0, 8 * w
    group = 4 if mode == ATOM32 else 8
    return -(-k // group) * group * w, group * w


def place(shared, tile, name, mode, k_major, start):
    """Write tile [rows, k] into shared memory; returns (LBO, SBO)."""
    rows, k = tile.shape
    e = BYTES.get(name, 1)
    lbo, sbo = strides(mode, k_major, rows, k, e)
    code = bits(tile, name)
    small = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(name)
    for r in range(rows):
        for i in range(k):
            a = element_address(mode, k_major, start, lbo, sbo, r, i, e)
            if small is None:
                shared[a : a + e] = code[r, i]
            else:  # 16 codes packed at the low end of their 16 bytes
                bit = (a % 16) * small
                word = (int(code[r, i, 0]) & ((1 << small) - 1)) << bit % 8
                at = a - a % 16 + bit // 8
                shared[at] |= word & 0xFF
                if word >> 8:
                    shared[at + 1] |= word >> 8
    return lbo, sbo


def descriptor(start, lbo, sbo, mode, blackwell):
    return start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | (1 << 46 if blackwell else 0) | mode << 61
