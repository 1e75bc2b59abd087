"""TMA boxes against a loop over elements that uses nothing but the definition."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from softsm.memory import box_copy
from softsm.memory.tensor_map import DataType, Fill, Swizzle
from softsm.memory.tensor_map_image import encode_im2col, encode_tiled, from_image

BASE = 0x10000
SHARED = 1 << 16


def global_memory(nbytes, seed=0):
    memory = np.random.default_rng(seed).integers(1, 256, nbytes, dtype=np.uint8)

    def view(address, n):
        start = address - BASE
        assert 0 <= start and start + n <= nbytes, (start, n, nbytes)
        return memory[start : start + n]

    return memory, view


def swizzle_by_hand(address, swizzle):
    """Chunk numbers as the PTX tables show them: chunk ^ row, row = 128-byte line of shared memory."""
    line, byte = divmod(address, 128)
    if swizzle is Swizzle.B32:  # 16-byte chunk within 32 bytes, by line
        return address ^ ((line % 2) * 16)
    if swizzle is Swizzle.B64:
        return address ^ ((line % 4) * 16)
    if swizzle is Swizzle.B128:
        return line * 128 + (byte // 16 ^ line % 8) * 16 + byte % 16
    if swizzle is Swizzle.B128_ATOM_32B:
        return line * 128 + (byte // 32 ^ line % 4) * 32 + byte % 32
    if swizzle is Swizzle.B128_ATOM_32B_FLIP_8B:
        return line * 128 + (byte // 32 ^ line % 4) * 32 + (byte % 32 ^ (line % 2) * 8)
    if swizzle is Swizzle.B128_ATOM_64B:
        return line * 128 + (byte // 64 ^ line % 2) * 64 + byte % 64
    return address


def positions(m, coords):
    """(element index in the box, coordinates in the tensor or None) in image order."""
    for index in itertools.product(*(range(n) for n in reversed(m.counts))):
        index = tuple(reversed(index))
        where = [c + k * (s if d else 1) for d, (c, k, s) in enumerate(zip(coords, index, m.element_strides))]
        inside = all(0 <= w < dim for w, dim in zip(where, m.dims))
        yield index, where if inside else None


def image_address(m, index, offset, size):
    pitch = max(m.counts[0] * size, m.swizzle.span)
    row = 0
    for d in range(m.rank - 1, 0, -1):
        row = row * m.counts[d] + index[d]
    return offset + row * pitch + index[0] * size


def load_by_hand(m, coords, memory, shared, offset):
    size, filled = m.data_type.bits // 8, 0
    for index, where in positions(m, coords):
        value = np.zeros(size, np.uint8)
        if where is None:
            filled += 1
            if m.oob_fill is Fill.NAN:
                value = np.array([0xF7, 0x7F] * (size // 2), np.uint8)
        else:
            at = m.base - BASE + where[0] * size + sum(w * s for w, s in zip(where[1:], m.strides))
            value = memory[at : at + size]
        start = image_address(m, index, offset, size)
        for byte in range(size):
            shared[swizzle_by_hand(start + byte, m.swizzle)] = value[byte]
    return filled


def tensor(kind, dims, box, *, pad=0, steps=None, swizzle=Swizzle.NONE, fill=Fill.ZERO):
    size = kind.bits // 8
    strides, row = [], dims[0] * size
    for dim in dims[1:]:
        row = -(-row // 16) * 16 + pad
        strides.append(row)
        row *= dim
    image = encode_tiled(kind, len(dims), BASE, dims, strides, box, steps, swizzle=swizzle, oob_fill=fill)
    return from_image(image), row + 64


CASES = [
    # kind, dims, box, coords, options
    (DataType.UINT8, (300,), (64,), (10,), {}),
    (DataType.UINT8, (300,), (64,), (280,), {}),
    (DataType.FLOAT32, (40, 9), (16, 4), (3, 2), {}),
    (DataType.BFLOAT16, (72, 20), (64, 8), (0, 5), dict(swizzle=Swizzle.B128)),
    (DataType.BFLOAT16, (72, 20, 6), (64, 4, 4), (8, 5, 1), dict(swizzle=Swizzle.B128, steps=(1, 2, 1))),
    (DataType.BFLOAT16, (72, 20), (64, 8), (-7, -3), dict(swizzle=Swizzle.B128)),
    (DataType.BFLOAT16, (72, 20), (64, 8), (40, 15), dict(swizzle=Swizzle.B128, fill=Fill.NAN)),
    (DataType.BFLOAT16, (72, 20), (64, 8), (72, 0), dict(swizzle=Swizzle.B128)),
    (DataType.BFLOAT16, (72, 20), (64, 8), (0, -8), {}),
    (DataType.FLOAT16, (50, 33), (32, 16), (1, 17), dict(swizzle=Swizzle.B64)),
    (DataType.FLOAT16, (50, 33), (16, 16), (8, 18), dict(swizzle=Swizzle.B32)),
    (DataType.FLOAT16, (50, 33), (16, 16), (8, 18), dict(swizzle=Swizzle.B128)),  # row shorter than the span
    (DataType.FLOAT16, (50, 33), (8, 5), (8, 18), dict(swizzle=Swizzle.B64)),
    (DataType.FLOAT32, (32, 12), (32, 9), (0, 1), dict(swizzle=Swizzle.B128_ATOM_32B)),
    (DataType.FLOAT32, (32, 12), (32, 9), (0, 1), dict(swizzle=Swizzle.B128_ATOM_32B_FLIP_8B)),
    (DataType.FLOAT32, (32, 12), (32, 9), (4, 6), dict(swizzle=Swizzle.B128_ATOM_64B)),
    (DataType.INT64, (10, 7, 5), (4, 3, 2), (2, 5, 4), dict(pad=16)),
    (DataType.UINT16, (24, 5, 4, 3), (8, 2, 3, 2), (9, 4, -1, 2), dict(pad=32)),
    (DataType.UINT16, (24, 5, 4, 3, 2), (8, 2, 2, 2, 2), (16, 1, 3, 2, 1), {}),
    (DataType.UINT16, (40, 30), (16, 12), (3, -4), dict(steps=(1, 3))),
    (DataType.UINT16, (40, 30), (16, 11), (3, 7), dict(steps=(5, 2))),  # the stride of dimension 0 is ignored
    (DataType.UINT16, (40, 30, 6), (16, 7, 4), (30, 25, 2), dict(steps=(1, 4, 2), swizzle=Swizzle.B32)),
]


@pytest.mark.parametrize("kind, dims, box, coords, options", CASES)
@pytest.mark.parametrize("offset", [2048, 2048 + 128 * 3])
def test_load_and_store_equal_the_definition(kind, dims, box, coords, options, offset):
    m, nbytes = tensor(kind, dims, box, **options)
    memory, view = global_memory(nbytes)
    wanted, got = np.full(SHARED, 0xEE, np.uint8), np.full(SHARED, 0xEE, np.uint8)
    filled = load_by_hand(m, coords, memory, wanted, offset)
    assert box_copy.load_tile(m, coords, view, got, offset) == filled
    np.testing.assert_array_equal(got, wanted)

    # storing what was loaded from other bytes restores exactly the elements inside
    other, other_view = global_memory(nbytes, seed=1)
    before = other.copy()
    assert box_copy.store_tile(m, coords, other_view, box_copy.take_tile(m, got, offset)) == filled
    expected = before.copy()
    size = kind.bits // 8
    for _, where in positions(m, coords):
        if where is not None:
            at = where[0] * size + sum(w * s for w, s in zip(where[1:], m.strides))
            expected[at : at + size] = memory[at : at + size]
    np.testing.assert_array_equal(other, expected)


@st.composite
def boxes(draw):
    """A tensor map of 1 to 4 dimensions, small enough for the walk over elements, and coordinates around it."""
    kind = draw(st.sampled_from([DataType.UINT8, DataType.UINT16, DataType.FLOAT32, DataType.UINT64]))
    swizzle = draw(st.sampled_from(list(Swizzle)))
    size = kind.bits // 8
    row = draw(st.integers(1, (swizzle.span or 128) // 16)) * 16 // size
    rank = draw(st.integers(1, 4))
    dims = [draw(st.integers(1, 40))] + [draw(st.integers(1, 6)) for _ in range(rank - 1)]
    box = [max(row, 1)] + [draw(st.integers(1, 4)) for _ in range(rank - 1)]
    steps = [draw(st.integers(1, 3)) for _ in range(rank)]
    fill = draw(st.sampled_from(list(Fill))) if kind.is_float else Fill.ZERO
    coords = [draw(st.integers(-box[0] - 1, dims[0] + 1))] + [draw(st.integers(-3, d + 1)) for d in dims[1:]]
    options = dict(pad=16 * draw(st.integers(0, 2)), steps=steps, swizzle=swizzle, fill=fill)
    return kind, tuple(dims), tuple(box), tuple(coords), options, 128 * draw(st.integers(8, 24))


@settings(max_examples=80, deadline=None)
@given(boxes())
def test_any_box_equals_the_definition(case):
    kind, dims, box, coords, options, offset = case
    m, nbytes = tensor(kind, dims, box, **options)
    memory, view = global_memory(nbytes)
    wanted, got = np.full(SHARED, 0xEE, np.uint8), np.full(SHARED, 0xEE, np.uint8)
    filled = load_by_hand(m, coords, memory, wanted, offset)
    assert box_copy.load_tile(m, coords, view, got, offset) == filled
    np.testing.assert_array_equal(got, wanted)
    again = memory.copy()
    back = lambda address, n: again[address - BASE : address - BASE + n]  # noqa: E731
    box_copy.store_tile(m, coords, back, box_copy.take_tile(m, got, offset))
    np.testing.assert_array_equal(again, memory)


def test_footprint_counts_the_padding_of_short_rows():
    m, _ = tensor(DataType.FLOAT16, (50, 33), (16, 16), swizzle=Swizzle.B128)
    assert box_copy.footprint(16, 32, m) == 16 * 128
    assert m.box_bytes == 16 * 32  # but only the elements are counted on the barrier


def test_addresses_wrap_at_64_bits():
    """Ragged tensors (triton.tools.ragged_tma): rows of a slice are counted from its end, which is the tensor's; two
    outer dimensions bring the address back, by way of 2^64."""
    rows, pitch, slice_at, length, billion = 40, 32, 7, 20, 1 << 30
    m = from_image(encode_tiled(
        DataType.FLOAT16, 4, BASE, [16, billion, 0x7FFF0000, 0x7FFF0000], [pitch, pitch, 2 * (1 << 34) - pitch],
        [16, 8, 1, 1]))  # fmt: skip
    memory, view = global_memory(rows * pitch)
    for first, inside in ((0, 8), (16, 4)):  # rows behind the slice are outside the tensor
        coords = (0, billion - length + first, slice_at + length, billion)
        want = memory[(slice_at + first) * pitch :][: inside * pitch]
        shared = np.full(SHARED, 0xEE, np.uint8)
        assert box_copy.load_tile(m, coords, view, shared, 1024) == (8 - inside) * 16
        np.testing.assert_array_equal(shared[1024:][: inside * pitch], want)
        other, other_view = global_memory(rows * pitch, seed=1)
        box_copy.store_tile(m, coords, other_view, box_copy.take_tile(m, shared, 1024))
        np.testing.assert_array_equal(other[(slice_at + first) * pitch :][: inside * pitch], want)


def test_gather_and_scatter_of_rows():
    m, nbytes = tensor(DataType.BFLOAT16, (80, 40), (64, 1), swizzle=Swizzle.B128)
    memory, view = global_memory(nbytes)
    rows = box_copy.gather_rows(m, (5, 39, 40, 0))
    shared = np.full(SHARED, 0xEE, np.uint8)
    filled = box_copy.load_rows(m, 32, rows, view, shared, 1024)
    assert filled == 64 + 3 * 16  # row 40 is outside, columns 80..95 too
    for i, row in enumerate((5, 39, None, 0)):
        for byte in range(128):
            inside = row is not None and 64 + byte < 160
            value = memory[row * m.strides[0] + 64 + byte] if inside else 0
            assert shared[swizzle_by_hand(1024 + i * 128 + byte, Swizzle.B128)] == value
    other, other_view = global_memory(nbytes, seed=1)
    before = other.copy()
    box_copy.store_rows(m, 32, rows, other_view, box_copy.take_rows(m, 4, shared, 1024))
    for row in (5, 39, 0):
        at = row * m.strides[0]
        before[at + 64 : at + 160] = memory[at + 64 : at + 160]
    np.testing.assert_array_equal(other, before)


def test_im2col_walks_the_pixel_box_and_goes_on_with_the_next_image():
    c, w, h, n = 8, 5, 4, 2
    values = np.arange(n * h * w * c, dtype=np.uint16)
    memory = values.view(np.uint8)
    m = from_image(
        encode_im2col(
            DataType.UINT16, 4, BASE, (c, w, h, n), (c * 2, w * c * 2, h * w * c * 2),
            (-1, -1), (-1, -1), 8, 16, (1, 2, 1, 1),
        )
    )  # fmt: skip
    shared = np.zeros(SHARED, np.uint8)
    rows = box_copy.im2col_rows(m, (0, 1, 2, 0), (0, 1))
    filled = box_copy.load_rows(m, 0, rows, lambda a, k: memory[a - BASE : a - BASE + k], shared, 1024)
    got = shared[1024 : 1024 + 16 * 16].view(np.uint16).reshape(16, 8)
    x, y, image, outside = 1, 2, 0, 0
    for pixel in range(16):
        px, py = x, y + 1
        if 0 <= px < w and 0 <= py < h and image < n:
            np.testing.assert_array_equal(got[pixel], values.reshape(n, h, w, c)[image, py, px])
        else:
            assert not got[pixel].any()
            outside += 8
        x += 2
        if x >= w - 1:
            x, y = -1, y + 1
        if y >= h - 1:
            y, image = -1, image + 1
    assert filled == outside


def test_packed_fp4_leaves_gaps():
    m = from_image(encode_tiled(DataType.U4_ALIGN16B, 2, BASE, (256, 6), (128,), (128, 4), swizzle=Swizzle.B128))
    memory, view = global_memory(128 * 6)
    shared = np.full(SHARED, 0xEE, np.uint8)
    box_copy.load_tile(m, (128, 2), view, shared, 1024)
    for row in range(4):
        for chunk in range(8):
            for byte in range(16):
                at = swizzle_by_hand(1024 + row * 128 + chunk * 16 + byte, Swizzle.B128)
                wanted = memory[(2 + row) * 128 + 64 + chunk * 8 + byte] if byte < 8 else 0xEE
                assert shared[at] == wanted
    assert m.box_bytes == 4 * 64


@pytest.mark.parametrize(
    "kind, dtype, op, reference",
    [
        (DataType.FLOAT32, np.float32, "add", lambda a, b: a + b),
        (DataType.FLOAT16, np.float16, "add", lambda a, b: a + b),
        (DataType.BFLOAT16, ml_dtypes.bfloat16, "add", lambda a, b: a + b),
        (DataType.BFLOAT16, ml_dtypes.bfloat16, "max", np.maximum),
        (DataType.FLOAT16, np.float16, "min", np.minimum),
        (DataType.INT32, np.int32, "min", np.minimum),
        (DataType.UINT32, np.uint32, "max", np.maximum),
        (DataType.UINT64, np.uint64, "add", lambda a, b: a + b),
        (DataType.UINT32, np.uint32, "xor", np.bitwise_xor),
        (DataType.UINT32, np.uint32, "inc", lambda a, b: np.where(a >= b, 0, a + 1)),
        (DataType.UINT32, np.uint32, "dec", lambda a, b: np.where((a == 0) | (a > b), b, a - 1)),
    ],
)
def test_reductions(kind, dtype, op, reference):
    size = np.dtype(dtype).itemsize
    rng = np.random.default_rng(2)
    source = (rng.standard_normal((4, 16)) * 50).astype(dtype) if kind.is_float else rng.integers(0, 9, (4, 16), dtype)
    old = (rng.standard_normal((8, 32)) * 50).astype(dtype) if kind.is_float else rng.integers(0, 9, (8, 32), dtype)
    memory = old.copy().view(np.uint8).reshape(-1)
    m = from_image(encode_tiled(kind, 2, BASE, (32, 8), (32 * size,), (16, 4)))
    shared = np.zeros(SHARED, np.uint8)
    shared[1024 : 1024 + source.nbytes] = source.view(np.uint8).reshape(-1)
    box = box_copy.take_tile(m, shared, 1024)
    box_copy.store_tile(m, (4, 6), lambda a, n: memory[a - BASE : a - BASE + n], box, op)
    wanted = old.copy()
    wanted[6:8, 4:20] = reference(old[6:8, 4:20], source[:2])
    np.testing.assert_array_equal(memory, wanted.view(np.uint8).reshape(-1))


def test_reduction_without_meaning_is_refused():
    m, nbytes = tensor(DataType.FLOAT32, (16, 4), (16, 4))
    _, view = global_memory(nbytes)
    with pytest.raises(ValueError, match="min: no such reduction"):
        box_copy.store_tile(m, (0, 0), view, np.zeros((4, 64), np.uint8), "min")


def test_tf32_loads_round_the_mantissa():
    values = np.array([1 + 2**-11, 1 + 2**-11 - 2**-23, -1 - 2**-10, np.inf] * 4, np.float32)
    memory = values.view(np.uint8)
    m = from_image(encode_tiled(DataType.TFLOAT32, 1, BASE, (16,), (), (16,)))
    shared = np.zeros(SHARED, np.uint8)
    box_copy.load_tile(m, (0,), lambda a, n: memory[a - BASE : a - BASE + n], shared, 1024)
    got = shared[1024:1088].view(np.float32)[:4]
    np.testing.assert_array_equal(got, np.array([1, 1, -1 - 2**-10, np.inf], np.float32))  # ties to even
