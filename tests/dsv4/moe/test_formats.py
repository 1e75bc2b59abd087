import ml_dtypes
import numpy as np
import pytest
import torch

from dsv4.moe import formats


def test_every_code_of_fp4():
    codes = torch.arange(256, dtype=torch.uint8)
    pairs = np.stack([np.arange(256) & 15, np.arange(256) >> 4], -1).astype(np.uint8)
    want = pairs.view(ml_dtypes.float4_e2m1fn).astype(np.float32).reshape(-1)
    assert torch.equal(formats.fp4_values(codes), torch.from_numpy(want))


def test_every_scale():
    bytes_ = torch.arange(255, dtype=torch.uint8)
    want = bytes_.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    assert np.array_equal(formats.scale_values(bytes_, torch.float64).numpy(), want)


@pytest.mark.parametrize("exponent", [-9, -1, 0, 5])
def test_the_scale_changes_right_above_448_times_a_power_of_two(exponent):
    """The model's rule takes the bits of the fp32 product with 1 / 448, which is not exact."""
    edge = np.float32(448 * 2.0**exponent)
    for amax in (np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(np.inf))):
        product = np.float32(amax) * np.float32(1 / 448)
        want = 2.0 ** np.ceil(np.log2(np.float64(product)))
        assert float(formats.fp8_scale(torch.tensor([amax]))) == want


def test_zeros_and_one_huge_value_are_quantised():
    x = torch.zeros(2, 256)
    x[1, 5] = 3e38
    x[1, 200] = -1e-3
    codes, scales = formats.quantize(x)
    assert not codes[0].float().any() and torch.equal(scales[0], torch.full((2,), 2.0**-22))
    back = codes.float().unflatten(-1, (2, 128)) * scales[..., None]
    assert abs(float(back.flatten(1)[1, 5]) / 3e38 - 1) <= 1 / 16
    assert abs(float(back.flatten(1)[1, 200]) / -1e-3 - 1) <= 1 / 16 and codes.float().isfinite().all()


def test_nvfp4_against_ml_dtypes():
    """There are ties: multiples of an eighth next to a greatest value of 6, whose scale is 1."""
    x = torch.cat([torch.arange(-48, 48) / 8, torch.randn(32) * 40, torch.zeros(16), torch.full((16,), 1e4)])[None]
    x[0, :96:16] = 6
    codes, scales = formats.quantize_nvfp4(x)
    groups = x.numpy().reshape(-1, 16)
    want = np.clip(np.abs(groups).max(1) / np.float32(6), 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(scales[0].float().numpy(), want.astype(np.float32))
    small = np.clip(groups / want.astype(np.float32)[:, None], -6, 6).astype(ml_dtypes.float4_e2m1fn)
    assert np.array_equal(formats.fp4_values(codes)[0].numpy(), small.astype(np.float32).flatten())


def test_positions_are_a_permutation_that_keeps_a_thread_in_one_group():
    """Thread t of wgmma m64k32 has columns 4t..4t+3 and 16+4t..16+4t+3 of each 32."""
    assert sorted(formats.POSITIONS) == list(range(128))
    for p, column in enumerate(formats.POSITIONS):
        assert column // 32 == p % 16 // 4


@pytest.mark.parametrize("layout", formats.LAYOUTS)
def test_tiles_and_back(layout):
    codes = torch.randint(0, 256, (2, 512, 128), dtype=torch.uint8)
    tiles = formats.to_tiles(codes, layout)
    assert tiles.shape == (2, 2, 2, 256, 64) and torch.equal(formats.from_tiles(tiles, layout), codes)
    for each in (4, 8):
        scales = torch.randint(0, 256, (2, 512, 2 * each), dtype=torch.uint8)
        tiles = formats.scales_to_tiles(scales, each, layout)
        assert tiles.shape == (2, 2, 2, 256, each) and torch.equal(formats.scales_from_tiles(tiles, layout), scales)


def test_scales_lie_in_atoms_for_tcgen05():
    """Row i of 128, four bytes: at 16 (i % 32) + 4 (i / 32) of 512; rows of 8 bytes have two atoms."""
    scales = torch.randint(0, 256, (256, 16), dtype=torch.uint8)
    for each in (4, 8):
        atoms = formats.scales_to_tiles(scales, each, "sm100").reshape(1, 16 // each, 2, each // 4, 512)
        for row, column in ((0, 0), (37, 5), (127, 15), (128, 2), (200, 9)):
            step, byte = column // each, column % each
            place = 16 * (row % 32) + 4 * (row % 128 // 32) + byte % 4
            assert atoms[0, step, row // 128, byte // 4, place] == scales[row, column]


def test_signs_of_a_word_lie_where_prmt_does_not_look():
    """Magnitudes in bits 4i to 4i + 2; signs of values 0 to 3 in the top bits of bytes, of 4 to 7 four bits below."""
    for value in range(8):
        codes = torch.zeros(256, 64, dtype=torch.uint8)
        codes[0, value // 2] = 0xD << 4 * (value % 2)  # -3
        word = int(formats.to_tiles(codes, "sm90").view(torch.int32)[0, 0, 0, 0]) & 0xFFFFFFFF
        sign = 8 * value + 7 if value < 4 else 8 * (value - 4) + 3
        assert word == 5 << 4 * value | 1 << sign


@pytest.mark.parametrize("spread", [0, 11, 12, 15])
def test_factors_of_rows_and_their_spread(spread):
    codes = torch.full((3, 32), 0x33, dtype=torch.uint8)
    scales = torch.tensor([[120, 120 - spread], [120, 120], [3, 0]], dtype=torch.uint8)
    codes[1, 16:] = 0x80  # a group of zeros: its scale means nothing
    scales[1, 1] = 0
    factors, got = formats.row_factors(codes, scales)
    assert got.tolist() == [spread, 0, 3]
    assert factors.tolist() == [2.0 ** (120 - 133), 2.0 ** (120 - 133), 2.0 ** (7 - 133)]
