"""Matrix descriptors against the address formulas written out element by element."""

import numpy as np
import pytest

from softsm.errors import Fault
from softsm.isa import tensor_core
from softsm.memory import swizzle

MODES = [swizzle.NONE, swizzle.SWIZZLE32, swizzle.SWIZZLE64, swizzle.SWIZZLE128]
WIDTH = {swizzle.SWIZZLE32: 32, swizzle.SWIZZLE64: 64, swizzle.SWIZZLE128: 128, swizzle.ATOM32: 128}


def element_address(mode, k_major, start, lbo, sbo, mn, k, e):
    """Byte address of element (mn, k), straight from the table in the PTX ISA."""
    t = 16 // e
    if mode == swizzle.NONE:
        if k_major:
            return start + (mn % 8) * 16 + (mn // 8) * sbo + (k // t) * lbo + (k % t) * e
        return start + (mn % t) * e + (mn // t) * sbo + (k % 8) * 16 + (k // 8) * lbo
    w = WIDTH[mode]
    if k_major:
        a = start + (mn % 8) * w + (mn // 8) * sbo + k * e
    else:
        group = 4 if mode == swizzle.ATOM32 else 8
        per = w // e
        a = start + (mn % per) * e + (mn // per) * lbo + (k % group) * w + (k // group) * sbo
    if mode == swizzle.ATOM32:
        return a ^ ((a >> 7) & 3) << 5
    return a ^ ((a >> 7) & (w // 16 - 1)) << 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize("start", [1024, 2048 + 32, 3072 + 512])
def test_operand_elements_come_from_the_documented_addresses(mode, k_major, start):
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 256, 65536, dtype=np.uint8)
    lbo, sbo = (1024, 2048) if mode == swizzle.NONE else (4096, 1024)
    descriptor = swizzle.decode(swizzle.encode(start, lbo, sbo, mode, blackwell=True), True)
    got = tensor_core.shared_rows(shared, 1024, descriptor, k_major, 64, 16, "bf16", "test")
    words = np.zeros((64, 16), np.uint32)
    for mn in range(64):
        for k in range(16):
            a = element_address(mode, k_major, start, lbo, sbo, mn, k, 2)
            words[mn, k] = (int(shared[a]) | int(shared[a + 1]) << 8) << 16
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(np.uint32), words)


def test_32_byte_atoms_serve_mn_major_tf32():
    rng = np.random.default_rng(1)
    shared = rng.integers(0, 256, 65536, dtype=np.uint8)
    descriptor = swizzle.decode(swizzle.encode(2048, 8192, 512, swizzle.ATOM32, blackwell=True), True)
    got = tensor_core.shared_rows(shared, 1024, descriptor, False, 64, 8, "tf32", "test")
    for mn in range(64):
        for k in range(8):
            a = element_address(swizzle.ATOM32, False, 2048, 8192, 512, mn, k, 4)
            word = np.frombuffer(shared[a : a + 4].tobytes(), np.uint32) & 0xFFFFE000
            assert np.float32(got[mn, k]).view(np.uint32) == word[0]


def test_stepping_k_inside_a_swizzled_row_is_start_plus_32():
    """The XOR uses absolute address bits, so K step s of a 128-byte row starts 32*s bytes further."""
    tile = np.arange(8 * 64, dtype=np.uint16).reshape(8, 64)  # 8 rows of 128 bytes
    shared = np.zeros(4096, np.uint8)
    for row in range(8):
        for chunk in range(8):
            a = 1024 + row * 128 + ((chunk ^ row) << 4)
            shared[a : a + 16] = tile[row, chunk * 8 : chunk * 8 + 8].view(np.uint8)
    for step in range(4):
        d = swizzle.decode(swizzle.encode(1024 + 32 * step, 0, 1024, swizzle.SWIZZLE128, blackwell=False), False)
        data = swizzle.read(shared, 1024, d, True, 8, 2, "test").view(np.uint16)
        np.testing.assert_array_equal(data, tile[:, 16 * step : 16 * step + 16])


def test_hopper_and_blackwell_share_the_swizzle_bits():
    for mode in MODES:
        raw = swizzle.encode(4096, 16, 1024, mode, blackwell=False)
        assert swizzle.decode(raw, False) == swizzle.decode(raw | 1 << 46, True)._replace(raw=raw)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (swizzle.encode(1024, 0, 1024, 2, blackwell=False), "bits 46-48"),
        (swizzle.encode(1024, 0, 1024, 3, blackwell=True), "swizzle mode 3"),
        (swizzle.encode(1024, 0, 1024, 2, blackwell=True) | 1 << 52, "sm_103"),
    ],
)
def test_bad_descriptors_are_named(raw, words):
    with pytest.raises(Fault, match=words) as error:
        swizzle.decode(raw, True)
    assert error.value.code == "descriptor"


@pytest.mark.parametrize("start", [0, 65536 - 1024])
def test_a_footprint_outside_shared_memory_is_a_fault(start):
    shared = np.zeros(65536, np.uint8)
    d = swizzle.decode(swizzle.encode(start, 0, 1024, swizzle.SWIZZLE128, blackwell=True), True)
    with pytest.raises(Fault, match="outside the CTA's") as error:
        swizzle.read(shared, 1024, d, True, 128, 2, "operand A")
    assert error.value.code == "descriptor"
