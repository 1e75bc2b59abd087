"""Number formats of the experts: FP4 codes, their scales, FP8 activations, and the order in which kernels read them.

E2M1 codes 0 to 7 are 0, .5, 1, 1.5, 2, 3, 4, 6, codes 8 to 15 the negatives; of two codes in a byte the low one is
first. MXFP4 has one E8M0 scale per 32 codes, 2^(byte - 127). NVFP4 has one E4M3 scale per 16 codes, and an fp32 scale
per tensor.

FP8 activations are e4m3 with one power of two per 128 columns (or per 32, or per row): the least that clips
none, 2^ceil(log2(max(amax, 1e-4) / 448)), from the bits of the fp32 product amax * (1 / 448). NVFP4 activations are
E2M1 with one E4M3 scale per 16 columns: amax / 6, between 2^-9 and 448. They have no tensor scale.

Tiles. Kernels read weights in tiles of 256 rows and 128 columns; a tile of gate and up has 128 rows of each, of the
same channels. A row of a tile has 64 bytes, in one of two layouts.

"sm100": the bytes of the checkpoint, rows and columns in order. Scales lie as tcgen05 reads them: 128 rows and 4
bytes of each are an atom of 512 bytes, row i at 16 (i % 32) + 4 (i / 32); rows of 8 bytes (NVFP4) have two atoms.

"sm90": 4 groups of 32 columns, 16 bytes each, except for the sign bits of each word of 8 codes (SIGNS): those of values
0 to 3 are bits 7, 15, 23, 31, those of values 4 to 7 are bits 3, 11, 19, 27. So `prmt` and one mask decode four values
at once. Every 16 rows of a tile are in the order of FRAGMENT; before that, gate and up rows are in that of POSITIONS.
Tensor cores read the columns of activations in the order of POSITIONS, so that a thread has one group of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.caches.formats import encode_e2m1

LAYOUTS = ("sm90", "sm100")  # layouts of tiles, named after the kernels that read them
GROUP = 128  # columns of activations with one scale
TILE_ROWS, TILE_COLUMNS = 256, 128
E4M3_MAX = 448.0
LEAST = 1e-4  # amax of zeros
MAX_SPREAD = 11  # spread of a row's exponents that e4m3 holds exactly, as normal numbers with one factor
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# (bit in a checkpoint, bit in a tile) of the signs of 8 values
SIGNS = tuple((4 * i + 3, 8 * i + 7 if i < 4 else 8 * (i - 4) + 3) for i in range(8))

# POSITIONS[p]: the column of a group of 128 that lies at p.
POSITIONS = tuple(32 * (p % 16 // 4) + 8 * (p // 32) + 4 * (p % 32 // 16) + p % 4 for p in range(GROUP))


# FRAGMENT[r]: the row of a block of 16 that lies at r. A thread of wgmma has rows r and r + 8, which are neighbours.
FRAGMENT = (*range(0, 16, 2), *range(1, 16, 2))


def positions(device: torch.device | None = None) -> Tensor:
    return torch.tensor(POSITIONS, device=device)


def fp4_values(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode bytes [..., n] of two codes -> values [..., 2 n]."""
    table = torch.tensor((*FP4_VALUES, *(-x for x in FP4_VALUES)), dtype=dtype, device=codes.device)
    codes = codes.view(torch.uint8)
    return table[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]


def scale_values(scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert E8M0 bytes (uint8 or float8_e8m0fnu) or E4M3 to numbers; fp64 holds all exactly."""
    if scales.dtype == torch.float8_e4m3fn:
        return scales.to(dtype)
    return scales.view(torch.float8_e8m0fnu).to(dtype)


def fp8_scale(amax: Tensor) -> Tensor:
    """Return the scale of FP8 activations, fp32, a power of two."""
    target = amax.float().clamp_min(LEAST) * (1 / E4M3_MAX)  # the number as fp32, and no copy to a GPU
    bits = target.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponent << 23).view(torch.float32)


def columns(activations: str, width: int) -> int:
    """Return the columns per scale, for rows of this width."""
    return {"fp8_128": GROUP, "fp8_32": 32, "nvfp4": 16}.get(activations, width)


def quantize(x: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Quantize x [..., k] -> (e4m3 [..., k], fp32 [..., k / group])."""
    x = x.float().unflatten(-1, (-1, group))
    scale = fp8_scale(x.abs().amax(-1))
    return (x / scale[..., None]).to(torch.float8_e4m3fn).flatten(-2), scale


def quantize_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [..., k] -> (uint8 [..., k / 2], e4m3 [..., k / 16])."""
    groups = x.float().unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1) / 6).clamp(2.0**-9, E4M3_MAX).to(torch.float8_e4m3fn)
    return encode_e2m1((groups / scale.float()[..., None]).flatten(-2)), scale


def _moved(words: Tensor, moves: list[tuple[int, int]]) -> Tensor:
    moved = words & 0x77777777
    for source, to in moves:
        moved |= (words >> source & 1) << to
    return moved


def to_tiles(rows: Tensor, layout: str) -> Tensor:
    """Tile codes in checkpoint order, uint8 [..., R, K / 2], -> uint8 [..., R / 256, K / 128, 256, 64]."""
    tiles = rows.unflatten(-1, (-1, TILE_COLUMNS // 2)).unflatten(-3, (-1, TILE_ROWS)).transpose(-3, -2).contiguous()
    return tiles if layout == "sm100" else _moved(tiles.view(torch.int32), list(SIGNS)).view(torch.uint8)


def from_tiles(tiles: Tensor, layout: str) -> Tensor:
    """Return the inverse of to_tiles."""
    if layout == "sm90":
        tiles = _moved(tiles.contiguous().view(torch.int32), [(to, source) for source, to in SIGNS]).view(torch.uint8)
    return tiles.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def scales_to_tiles(scales: Tensor, each: int, layout: str) -> Tensor:
    """Tile scales, uint8 [..., R, K / 128 * each] -> [..., R / 256, K / 128, 256, each]."""
    tiles = scales.unflatten(-1, (-1, each)).unflatten(-3, (-1, TILE_ROWS)).transpose(-3, -2)
    if layout == "sm100":
        atoms = tiles.unflatten(-1, (-1, 4)).unflatten(-3, (2, 4, 32))  # [..., half, i / 32, i % 32, atom, 4]
        tiles = atoms.transpose(-4, -2).reshape(tiles.shape)
    return tiles.contiguous()


def scales_from_tiles(tiles: Tensor, layout: str) -> Tensor:
    """Return the inverse of scales_to_tiles."""
    if layout == "sm100":
        atoms = tiles.contiguous().view(*tiles.shape[:-2], 2, tiles.shape[-1] // 4, 32, 4, 4)
        tiles = atoms.transpose(-4, -2).reshape(tiles.shape)
    return tiles.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def dequantize(tiles: Tensor, scales: Tensor, factors: Tensor, dtype: torch.dtype, layout: str) -> Tensor:
    """Return the rows of tiles [..., R, K] as numbers. factors: not used for E8M0 scales, from which they follow."""
    values = fp4_values(from_tiles(tiles, layout), dtype)
    numbers = scale_values(scales_from_tiles(scales.view(torch.uint8), layout).contiguous().view(scales.dtype), dtype)
    values *= numbers.repeat_interleave(values.shape[-1] // numbers.shape[-1], -1)
    return values if scales.dtype == torch.uint8 else values.mul_(factors.to(dtype)[..., None])


def _order(layout: str, both: bool, device: torch.device) -> Tensor:
    """Return which row of 128 lies at each place."""
    rows = torch.arange(GROUP, device=device)
    if layout == "sm100":
        return rows
    fragments = torch.tensor(FRAGMENT, device=device) + rows[::16, None]
    return (positions(device) if both else rows)[fragments.flatten()]


def down(x: Tensor, layout: str, back: bool = False) -> Tensor:
    """Put rows [..., H, n] of the down matrix into the order of tiles, or back."""
    order = _order(layout, False, x.device)
    return x.unflatten(-2, (-1, GROUP))[..., order.argsort() if back else order, :].flatten(-3, -2)


def interleaved(a: Tensor, b: Tensor, layout: str) -> Tensor:
    """Put rows [..., I, n] of gate and up into the order of tiles -> [..., 2 I, n]."""
    order = _order(layout, True, a.device)
    blocks = [x.unflatten(-2, (-1, GROUP))[..., order, :] for x in (a, b)]
    return torch.cat(blocks, -2).flatten(-3, -2)


def apart(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Return the inverse of interleaved."""
    order = _order(layout, True, x.device).argsort()
    gate, up = x.unflatten(-2, (-1, 2, GROUP))[..., order, :].unbind(-3)
    return gate.flatten(-3, -2), up.flatten(-3, -2)


def row_factors(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Compute factors of MXFP4 rows, codes [..., R, K / 2] and scale bytes [..., R, K / 32] -> (fp32 [..., R],
    spread int32 [..., R]).

    The factor is 2^(base - 133), base the greatest byte of the row's groups that are not all zeros, but at least 7;
    e4m3 holds a group's codes times 2^(byte - base + 6). spread: how far the least byte of these groups is below the
    greatest.
    """
    used = ((codes.unflatten(-1, (-1, 16)) & 0x77) != 0).any(-1)
    byte = scales.int()
    greatest = torch.where(used, byte, 0).amax(-1)
    least = torch.where(used, byte, 255).amin(-1)
    spread = (greatest - least).clamp_min(0)
    return (greatest.clamp_min(7) - 6 << 23).view(torch.float32), spread
