"""Tensor maps: the driver's rules by field, the image, tensormap.replace."""

import dataclasses
import struct

import numpy as np
import pytest

from softsm.memory.tensor_map import PTX_ELEMTYPE, DataType, Fill, Swizzle, TensorMapWarning, Wide
from softsm.memory.tensor_map_image import (
    NBYTES,
    encode_im2col,
    encode_im2col_wide,
    encode_tiled,
    from_image,
    replace_field,
)

BF16 = DataType.BFLOAT16
GOOD = dict(
    data_type=BF16,
    rank=2,
    global_address=0x4000,
    global_dim=(512, 1000),
    global_strides=(1024,),
    box_dim=(64, 128),
    element_strides=(1, 1),
    swizzle=Swizzle.B128,
)


def test_image_is_128_bytes_and_reads_back():
    image = encode_tiled(**GOOD)
    assert len(image) == NBYTES
    made = from_image(image)
    assert (made.data_type, made.base, made.dims, made.strides) == (BF16, 0x4000, (512, 1000), (1024,))
    assert (made.box, made.element_strides, made.swizzle) == ((64, 128), (1, 1), Swizzle.B128)
    assert made.box_bytes == 128 * 128


def test_five_dimensions_with_every_field():
    image = encode_tiled(
        DataType.FLOAT32,
        5,
        1 << 40,
        (64, 7, 6, 5, 1 << 32),
        (256, 1792, 10752, 53760),
        (32, 8, 4, 2, 1),
        (1, 2, 3, 1, 8),
        swizzle=Swizzle.B128_ATOM_64B,
        l2_promotion=2,
        oob_fill=Fill.NAN,
    )
    made = from_image(image)
    assert made.dims == (64, 7, 6, 5, 1 << 32)
    assert made.counts == (32, 4, 2, 2, 1)  # ceil(box / traversal stride), but for dimension 0
    assert (made.swizzle, made.oob_fill, made.l2_promotion) == (Swizzle.B128_ATOM_64B, Fill.NAN, 2)


@pytest.mark.parametrize(
    "field, change",
    [
        ("data_type", dict(data_type=16)),
        ("rank", dict(rank=0)),
        ("rank", dict(rank=6)),
        ("global_address", dict(global_address=0x4008)),
        (r"global_dim\[1\]", dict(global_dim=(512, 0))),
        (r"global_dim\[0\]", dict(global_dim=((1 << 32) + 1, 4))),
        ("global_dim", dict(global_dim=(512,))),
        (r"global_strides\[0\]", dict(global_strides=(1000,))),
        (r"global_strides\[0\]", dict(global_strides=(1 << 40,))),
        (r"global_strides\[0\]", dict(global_strides=(-1024,))),
        (r"box_dim\[1\]", dict(box_dim=(64, 257))),
        (r"box_dim\[1\]", dict(box_dim=(64, 0))),
        (r"box_dim\[0\].*multiple of 16", dict(box_dim=(4, 8))),
        (r"box_dim\[0\].*at most 128", dict(box_dim=(128, 8))),
        (r"box_dim\[0\].*at most 64", dict(box_dim=(64, 8), swizzle=Swizzle.B64)),
        (r"box_dim\[0\].*at most 32", dict(box_dim=(32, 8), swizzle=Swizzle.B32)),
        (r"element_strides\[1\]", dict(element_strides=(1, 9))),
        (r"element_strides\[0\]", dict(element_strides=(0, 1))),
        ("interleave", dict(interleave=3)),
        ("rank.*interleaved", dict(interleave=1)),
        ("swizzle", dict(swizzle=7)),
        ("l2_promotion", dict(l2_promotion=4)),
        ("oob_fill", dict(oob_fill=2)),
        ("oob_fill.*floating", dict(oob_fill=1, data_type=DataType.UINT16)),
        (r"global_dim\[0\].*multiple of 128", dict(data_type=DataType.U4_ALIGN16B, global_dim=(100, 4))),
        (r"box_dim\[0\].*needs 128", dict(data_type=DataType.U4_ALIGN16B)),
        ("swizzle", dict(data_type=DataType.U4_ALIGN16B, box_dim=(128, 8), swizzle=Swizzle.B64)),
        ("global_address.*32", dict(data_type=DataType.U4_ALIGN16B, box_dim=(128, 8), global_address=0x4010)),
    ],
)
def test_each_rule_names_its_field(field, change):
    with pytest.raises(ValueError, match=f"^{field}"):
        encode_tiled(**{**GOOD, **change})


def test_strides_in_elements_are_pointed_out():
    with pytest.warns(TensorMapWarning, match=r"global_strides\[0\].*bytes, not elements"):
        encode_tiled(**{**GOOD, "global_strides": (512,)})


def test_im2col_rules_and_image():
    good = dict(
        data_type=DataType.FLOAT16,
        rank=4,
        global_address=0x1000,
        global_dim=(64, 16, 16, 2),
        global_strides=(128, 2048, 32768),
        pixel_box_lower_corner=(-1, -1),
        pixel_box_upper_corner=(-1, -1),
        channels_per_pixel=64,
        pixels_per_column=128,
        swizzle=Swizzle.B128,
    )
    made = from_image(encode_im2col(**good))
    assert made.im2col is not None
    assert (made.im2col.lower, made.im2col.upper, made.im2col.pixels) == ((-1, -1), (-1, -1), 128)
    for field, change in [
        ("rank", dict(rank=2)),
        (r"pixel_box_lower_corner\[1\]", dict(pixel_box_lower_corner=(0, -129))),
        (r"pixel_box_upper_corner\[0\].*no pixel", dict(pixel_box_upper_corner=(-17, 0))),
        ("channels_per_pixel", dict(channels_per_pixel=300)),
        ("pixels_per_column", dict(pixels_per_column=1025)),
    ]:
        with pytest.raises(ValueError, match=f"^{field}"):
            encode_im2col(**{**good, **change})


def test_interleaved_rules_and_image():
    """Dimensions W, H, C, N: the unit of W is a slice of channels, and a box has one slice of each pixel."""
    good = dict(
        data_type=DataType.FLOAT16,
        rank=4,
        global_address=0x1020,
        global_dim=(24, 6, 5, 3),
        global_strides=(1024, 8192, 65536),
        box_dim=(16, 3, 16, 2),
        element_strides=(2, 1, 1, 1),
        interleave=2,
        swizzle=Swizzle.B32,
    )
    made = from_image(encode_tiled(**good))
    assert (made.interleave, made.counts, made.box_bytes) == (2, (8, 3, 1, 2), 8 * 3 * 2 * 32)
    for field, change in [
        ("global_address.*32", dict(global_address=0x1010)),
        (r"global_strides\[0\].*32", dict(global_strides=(1040, 8192, 65536))),
        (r"box_dim\[0\].*multiple of 16", dict(box_dim=(4, 3, 16, 2))),
        ("interleave: U4_ALIGN16B", dict(data_type=DataType.U4_ALIGN16B)),
    ]:
        with pytest.raises(ValueError, match=f"^{field}"):
            encode_tiled(**{**good, **change})
    with pytest.warns(TensorMapWarning, match="documents B32 alone"):
        encode_tiled(**{**good, "swizzle": Swizzle.NONE})


def test_im2col_wide_rules_and_image():
    good = dict(
        data_type=DataType.FLOAT16,
        rank=5,
        global_address=0x1000,
        global_dim=(64, 16, 16, 4, 2),
        global_strides=(128, 2048, 32768, 131072),
        pixel_box_lower_corner_width=-300,
        pixel_box_upper_corner_width=1,
        channels_per_pixel=64,
        pixels_per_column=100,
        mode=1,
        swizzle=Swizzle.B128,
    )
    made = from_image(encode_im2col_wide(**good)).im2col
    assert (made.lower, made.upper, made.channels, made.pixels, made.wide) == ((-300,), (1,), 64, 100, Wide.W128)
    for field, change in [
        ("mode", dict(mode=2)),
        ("swizzle: NONE with im2col::w", dict(swizzle=Swizzle.NONE)),
        ("swizzle: B128_ATOM_64B with im2col::w", dict(swizzle=Swizzle.B128_ATOM_64B)),
        ("interleave: im2col::w", dict(interleave=1)),
        (r"pixel_box_lower_corner\[0\]", dict(pixel_box_lower_corner_width=-32769)),
        (r"pixel_box_upper_corner\[0\].*no pixel", dict(pixel_box_upper_corner_width=-316)),
    ]:
        with pytest.raises(ValueError, match=f"^{field}"):
            encode_im2col_wide(**{**good, **change})


def test_replace_builds_a_map_from_zeros():
    image = np.zeros(NBYTES, np.uint8)
    for field, ordinal, value in [
        ("global_address", 0, 0x4000),
        ("rank", 0, 1),  # rank - 1
        ("box_dim", 0, 64),
        ("box_dim", 1, 128),
        ("global_dim", 0, 512),
        ("global_dim", 1, 1000),
        ("global_stride", 0, 1024),
        ("element_stride", 0, 1),
        ("element_stride", 1, 1),
        ("elemtype", 0, 10),  # .bf16 in tensormap.replace, 9 for the driver
        ("interleave_layout", 0, 0),
        ("swizzle_mode", 0, 3),
        ("fill_mode", 0, 0),
    ]:
        replace_field(image, field, ordinal, value)
    assert image.tobytes() == encode_tiled(**GOOD)


def test_replace_elemtype_numbers():
    assert [kind.name for kind in PTX_ELEMTYPE[6:13]] == [
        "FLOAT16", "FLOAT32", "FLOAT32_FTZ", "FLOAT64", "BFLOAT16", "TFLOAT32", "TFLOAT32_FTZ",
    ]  # fmt: skip


def test_replace_swizzle_mode_and_atomicity_together():
    image = np.frombuffer(encode_tiled(**GOOD), np.uint8).copy()
    replace_field(image, "swizzle_atomicity", 0, 1)
    assert from_image(image.tobytes()).swizzle is Swizzle.B128_ATOM_32B
    replace_field(image, "swizzle_mode", 0, 2)
    with pytest.raises(ValueError, match="swizzle_atomicity"):
        from_image(image.tobytes())


@pytest.mark.parametrize(
    "field, ordinal, value", [("box_dim", 5, 1), ("box_dim", 0, 257), ("rank", 0, 5), ("swizzle_mode", 0, 4)]
)
def test_replace_refuses_by_field(field, ordinal, value):
    image = np.frombuffer(encode_tiled(**GOOD), np.uint8).copy()
    with pytest.raises(ValueError, match=f"^{field}"):
        replace_field(image, field, ordinal, value)


def test_foreign_bytes_are_refused():
    junk = np.arange(NBYTES, dtype=np.uint8)
    with pytest.raises(ValueError, match="not a tensor map"):
        from_image(junk.tobytes())
    with pytest.raises(ValueError, match="neither a tensor map"):
        replace_field(junk, "rank", 0, 1)


def hardware_form(rank=2, kind=10, swizzle=(3, 0), base=0x7F00_0000_4000):
    """bf16 [1000 rows of 512], boxes of 128 x 64, as a host program packs it; the second half is what was there."""
    mode, atomicity = swizzle
    about = 2 | rank - 1 << 4 | kind << 7 | mode << 13 | 2 << 17 | atomicity << 19
    words = base & 0xFFFFFFFF, base >> 32, about, 1024 >> 4, *[0] * 4, 511, 999, *[0] * 6
    image = bytearray(struct.pack("<16I", *words) + b"\xa5" * 64)
    image[55:57] = 63, 127
    return bytes(image)


def test_a_map_in_the_form_of_the_hardware():
    wanted = from_image(encode_tiled(**{**GOOD, "global_address": 0x7F00_0000_4000, "l2_promotion": 2}))
    assert from_image(hardware_form()) == wanted
    assert from_image(hardware_form(kind=6, swizzle=(3, 1))).swizzle is Swizzle.B128_ATOM_32B
    assert from_image(hardware_form(kind=1, swizzle=(0, 0))).data_type.name == "UINT16"
    image = np.frombuffer(hardware_form(), np.uint8).copy()
    replace_field(image, "global_address", 0, 0x8000)
    replace_field(image, "global_dim", 1, 77)
    assert from_image(image.tobytes()) == dataclasses.replace(wanted, base=0x8000, dims=(512, 77))


@pytest.mark.parametrize("change", [dict(rank=6), dict(kind=3), dict(kind=15), dict(swizzle=(2, 1))])
def test_what_no_program_packs_is_no_map(change):
    with pytest.raises(ValueError, match="are not a tensor map"):
        from_image(hardware_form(**change))


def test_a_map_in_the_form_of_the_hardware_obeys_the_rules():
    with pytest.raises(ValueError, match="global_address"):
        from_image(hardware_form(base=0x4008))
