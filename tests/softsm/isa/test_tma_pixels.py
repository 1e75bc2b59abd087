"""Copies of pixels by tensor map: im2col::w, and tensors whose channels are interleaved. Expectations are cut out of a
padded copy of the tensor."""

import numpy as np
import pytest
from launching import Map, aligned, run, wait, words
from tma_kernels import load_kernel, store_kernel, strides, tensor, where

import softsm
import softsm.engine.launch as engine
from softsm.errors import Fault, Unsupported
from softsm.memory.tensor_map import DataType, Fill, Swizzle

LOAD = "cp.async.bulk.tensor.{rank}d.shared::cluster.global.{mode}.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.{rank}d.global.shared::cta.{mode}.bulk_group"
OUTSIDE = 40  # pixels of fill around the padded copy


def placed(rows, swizzle, size, pitch=None):
    """Bytes of shared memory that hold rows [n, bytes], 0xEE elsewhere; without a pitch rows follow each other."""
    out = np.full(size, 0xEE, np.uint8)
    data = rows.view(np.uint8).reshape(len(rows), -1)
    for (row, byte), value in np.ndenumerate(data):
        out[where(row * (pitch or data.shape[1]) + byte, swizzle)] = value
    return out


# -- im2col::w ---------------------------------------------------------------------------------------------------------

SHAPE = (32, 9, 3, 24)  # C W H N, rows of 64 bytes
WIDE = [
    # coordinates of C W H N, corners, pixels, stride along W, wHalo, wOffset
    ((0, 2, 1, 3), (0, 0), 20, 1, 2, 0),
    ((0, 0, 0, 0), (0, -2), 7, 1, 0, 0),  # within one row
    ((0, -3, 2, 5), (-1, 0), 20, 2, 1, 0),  # begins left of the box
    ((0, -1, 2, 5), (-1, 0), 20, 2, 0, 1),
    ((0, -1, 1, 20), (-1, -1), 40, 3, 5, 2),  # more pixels than there are
    ((0, 3, 3, 0), (0, 0), 16, 1, 0, 0),  # a row outside the tensor
]


def row_walk(array, coords, corners, step, count, offset):
    """uint16 [count, C]: pixels of one row, then of the same row of the next image."""
    _, w, h, n = coords
    low, high = corners[0] + offset, array.shape[2] + corners[1] + offset
    places = [(n, x) for x in range(w + offset, high, step)]
    places += [(image, x) for image in range(n + 1, n + 1 + count) for x in range(low, high, step)]
    padded = np.pad(array, [(0, 64), (0, 1), (OUTSIDE, OUTSIDE), (0, 0)])
    return np.stack([padded[image, h, x + OUTSIDE] for image, x in places[:count]])


def wide_kernel(mode, coords, rows, halo, offset, size):
    form = LOAD.format(rank=4, mode=mode)
    text = load_kernel(4, coords, rows * 64, size, form=form, target="sm_100a", version="8.6", more=", {%rs1, %rs2}")
    return text.replace("FILL:", f"mov.b16 %rs1, {halo};\nmov.b16 %rs2, {offset};\nFILL:", 1)


def wide_map(array, corners, pixels, step, mode, swizzle=Swizzle.B64):
    options = dict(lower=corners[:1], upper=corners[1:], pixels=pixels, mode=mode, swizzle=swizzle)
    return Map(2, DataType.UINT16, SHAPE, strides(array), SHAPE[:1], dict(options, element_strides=(1, step, 1, 1)))


@pytest.mark.parametrize("coords, corners, pixels, step, halo, offset", WIDE)
def test_im2col_w(coords, corners, pixels, step, halo, offset):
    array = tensor(DataType.UINT16, SHAPE)
    rows = row_walk(array, coords, corners, step, pixels + halo, offset)
    text = wide_kernel("im2col::w", coords, len(rows), halo, offset, 4096)
    got = run(text, [words(1024), wide_map(array, corners, pixels, step, 0), array])[0]
    np.testing.assert_array_equal(got.view(np.uint8), placed(rows, Swizzle.B64, 4096))


@pytest.mark.parametrize(
    "halo, offset, swizzle", [(0, 0, Swizzle.B64), (2, 1, Swizzle.B128), (3, 0, Swizzle.B128_ATOM_32B)]
)
def test_im2col_w_128(halo, offset, swizzle):
    """After the 128 pixels follow the first pixels of the four halos, then the second ones, ..."""
    array = tensor(DataType.UINT16, SHAPE)
    coords, corners, size = (0, 4, 1, 2), (-1, 0), 20480
    walk = row_walk(array, coords, corners, 1, 128 + halo, offset)
    halos = [walk[32 * (i + 1) : 32 * (i + 1) + halo] for i in range(4)]
    rows = np.concatenate([walk[:128], np.stack(halos, 1).reshape(4 * halo, 32)])
    text = wide_kernel("im2col::w::128", coords, len(rows), halo, offset, size)
    got = run(text, [words(size // 4), wide_map(array, corners, 5, 1, 1, swizzle), array])[0]
    np.testing.assert_array_equal(got.view(np.uint8), placed(rows, swizzle, size, max(64, swizzle.span)))


def launched(text, description, array, **options):
    mine = aligned(array)
    given = description.encode(mine.ctypes.data)
    with softsm.checking(**options) as report:
        engine.load(text).launch(1, 32, [words(1024), given, mine])
    return report


def test_who_reads_before_the_copy_has_arrived_races():
    array = tensor(DataType.UINT16, SHAPE)
    description = wide_map(array, (0, 0), 20, 1, 0)
    text = wide_kernel("im2col::w", (0, 2, 1, 3), 22, 2, 0, 4096)
    assert not launched(text, description, array, order="latest")
    assert "race" in launched(text.replace(wait("%r3", 0, "W"), ""), description, array, order="latest").codes()


@pytest.mark.parametrize(
    "mode, coords, info, made_for, words_of_it",
    [
        ("im2col::w", (0, 0, 0, 0), (512, 0), 0, "wHalo 512"),
        ("im2col::w", (0, 0, 0, 0), (0, 32), 0, "wOffset 32"),
        ("im2col::w::128", (0, 0, 0, 0), (32, 0), 1, "wHalo 32"),
        ("im2col::w", (0, 9, 0, 0), (0, 0), 0, "W = 9; the bounding box ends before 9"),
        ("im2col::w", (0, 0, 0, 0), (0, 0), 1, "with a map made for im2col::w::128"),
    ],
)
def test_wide_operands_that_cannot_be_meant(mode, coords, info, made_for, words_of_it):
    array = tensor(DataType.UINT16, SHAPE)
    with pytest.raises(Fault, match=words_of_it):
        launched(wide_kernel(mode, coords, 16, *info, 4096), wide_map(array, (0, 0), 16, 1, made_for), array)


def test_wide_copies_belong_to_sm_100():
    with pytest.raises(Unsupported, match="needs .target sm_100"):
        engine.load(wide_kernel("im2col::w", (0, 0, 0, 0), 16, 0, 0, 4096).replace("sm_100a", "sm_90a"))


def test_images_of_im2col_have_a_stride():
    array = tensor(DataType.UINT16, SHAPE)
    options = dict(lower=(0, 0), upper=(0, 0), pixels=40, element_strides=(1, 2, 1, 3))
    description = Map(2, DataType.UINT16, SHAPE, strides(array), SHAPE[:1], options)
    form, offsets = LOAD.format(rank=4, mode="im2col"), "mov.b16 %rs1, 0;\nmov.b16 %rs2, 0;\nFILL:"
    text = load_kernel(4, (0, 0, 1, 2), 40 * 64, form=form, more=", {%rs1, %rs2}").replace("FILL:", offsets, 1)
    got = run(text, [words(1024), description, array])[0]
    pixels = np.concatenate([array[2, 1:], *array[5:14:3]])[:, ::2].reshape(-1, 32)
    np.testing.assert_array_equal(got.view(np.uint8), placed(pixels[:40], Swizzle.NONE, 4096))


# -- interleaved channels ----------------------------------------------------------------------------------------------


def slices(dims, slice_bytes, kind=DataType.UINT16, seed=1):
    """Elements [N, C, ([D,] H,)] W, elements of a slice], for dims W, ... C, N."""
    item = kind.bits // 8
    return tensor(kind, (slice_bytes // item, *dims), seed)


def slice_map(array, dims, box, interleave, of=2, **options):
    kind = {1: DataType.UINT8, 2: DataType.UINT16, 4: DataType.FLOAT32}[array.itemsize]
    return Map(of, kind, dims, strides(array)[1:], box, dict(options, interleave=interleave))


def window(array, box, coords, steps, fill=0):
    """Slices [n, elements] of a tiled box: the coordinate of C chooses one, whatever the box says."""
    padded = np.pad(array, [(1, extent) for extent in reversed(box)] + [(0, 0)], constant_values=fill)
    cut = []
    for axis, (x, extent, step) in enumerate(zip(coords, box, steps)):
        extent = 1 if axis == len(coords) - 2 else extent
        cut.insert(0, slice(1 + x, 1 + x + extent, step))
    return padded[tuple(cut)].reshape(-1, array.shape[-1])


INTERLEAVED = [
    # dims W ([H, [D,]]) C N, box, coords, steps, interleave, swizzle
    ((24, 6, 5, 3), (8, 3, 2, 2), (0, 0, 0, 0), (1, 1, 1, 1), 1, Swizzle.NONE),
    ((24, 6, 5, 3), (16, 3, 16, 2), (5, 1, 4, 1), (1, 1, 1, 1), 1, Swizzle.B32),
    ((24, 6, 5, 3), (8, 3, 8, 2), (-1, -1, 2, 2), (1, 1, 1, 1), 2, Swizzle.B32),
    ((24, 6, 5, 3), (16, 4, 8, 1), (20, 4, 3, 0), (1, 2, 1, 1), 2, Swizzle.B32),
    ((24, 5, 3), (8, 8, 2), (17, 4, 1), (1, 1, 1), 1, Swizzle.NONE),
    ((12, 4, 3, 5, 2), (8, 2, 2, 8, 2), (3, 1, 2, 1, 0), (1, 1, 1, 1, 1), 2, Swizzle.B32),
    ((24, 6, 5, 3), (8, 3, 8, 2), (1, 0, 5, 0), (1, 1, 1, 1), 1, Swizzle.NONE),  # outside
    ((24, 6, 5, 3), (8, 3, 8, 3), (2, 1, 1, 0), (3, 2, 5, 2), 1, Swizzle.B64),
    ((24, 6, 5, 3), (8, 5, 8, 1), (2, 1, 1, 0), (2, 1, 1, 1), 1, Swizzle.B128),  # rows of 64 bytes, 320 in all
]


@pytest.mark.parametrize("dims, box, coords, steps, interleave, swizzle", INTERLEAVED)
def test_interleaved_tiles(dims, box, coords, steps, interleave, swizzle):
    array = slices(dims, 16 * interleave)
    rows = window(array, box, coords, steps)
    text = load_kernel(len(dims), coords, rows.nbytes)
    description = slice_map(array, dims, box, interleave, swizzle=swizzle, element_strides=steps)
    got = run(text, [words(1024), description, array])[0]
    np.testing.assert_array_equal(got.view(np.uint8), placed(rows, swizzle, 4096))


def test_interleaved_floats_are_filled_with_nan():
    array = slices((24, 6, 5, 3), 16, DataType.FLOAT32)
    box, coords = (4, 3, 4, 2), (22, 4, 0, 2)
    rows = window(array.view(np.uint32), box, coords, (1, 1, 1, 1), 0x7FF77FF7)
    text = load_kernel(4, coords, rows.nbytes)
    got = run(text, [words(1024), slice_map(array, (24, 6, 5, 3), box, 1, oob_fill=Fill.NAN), array])[0]
    np.testing.assert_array_equal(got.view(np.uint8), placed(rows, Swizzle.NONE, 4096))


@pytest.mark.parametrize("interleave", [1, 2])
def test_interleaved_im2col(interleave):
    """Pixels walk through the box of the image, W first, then H, then N; each brings the slice that the coordinate of C
    names, whatever channels_per_pixel says."""
    dims, pixels = (24, 6, 5, 3), 60
    array = slices(dims, 16 * interleave)
    options = dict(lower=(-1, -1), upper=(-4, -1), pixels=pixels, swizzle=Swizzle(interleave - 1))
    padded = np.pad(array, [(0, 1), (0, 0), (1, 2), (1, 2), (0, 0)])
    pixels_of_box = [(n, y, x) for n in range(4) for y in range(-1, 5) for x in range(-1, 20)]
    first = pixels_of_box.index((1, 2, 17))
    walk = pixels_of_box[first : first + pixels]
    rows = np.stack([padded[n, 3, y + 1 + 1, x + 1 + 2] for n, y, x in walk])
    form, offsets = LOAD.format(rank=4, mode="im2col"), "mov.b16 %rs1, 2;\nmov.b16 %rs2, 1;\nFILL:"
    text = load_kernel(4, (17, 2, 3, 1), rows.nbytes, form=form, more=", {%rs1, %rs2}").replace("FILL:", offsets, 1)
    got = run(text, [words(1024), slice_map(array, dims, (8,), interleave, **options), array])[0]
    np.testing.assert_array_equal(got.view(np.uint8), placed(rows, options["swizzle"], 4096))


@pytest.mark.parametrize(
    "dims, box, coords, steps, interleave, swizzle", [case for case in INTERLEAVED if min(case[2]) >= 0]
)
def test_interleaved_stores(dims, box, coords, steps, interleave, swizzle):
    array = slices(dims, 16 * interleave)
    there = window(np.arange(1, array[..., 0].size + 1).reshape(*array.shape[:-1], 1), box, coords, steps)[:, 0]
    values = slices((len(there),), 16 * interleave, seed=7)
    source = placed(values, swizzle, 4096)
    wanted = array.copy()
    wanted.reshape(-1, array.shape[-1])[there[there > 0] - 1] = values[there > 0]
    text = store_kernel(len(dims), coords, 4096, STORE.format(rank=len(dims), mode="tile"))
    description = slice_map(array, dims, box, interleave, 0, swizzle=swizzle, element_strides=steps)
    got = run(text, [array, description, source])[0]
    np.testing.assert_array_equal(got, wanted)
