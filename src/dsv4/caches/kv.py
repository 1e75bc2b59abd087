"""KV rows of DeepSeek-V4 as bytes: the 584-byte FP8 row, its pages, and how to write and read them.

One row of 512 values; the last 64 have RoPE applied:

    448 x e4m3   values / scale, one scale for every 64 of them        448 B  \\ data row, 576 B
     64 x bf16   the RoPE part, not quantised                          128 B  /
      7 x ue8m0  scale = 2 ** ceil(log2(max(amax / 448, 1e-4)))          7 B  \\ scale row, 8 B
      1 x 0      padding                                                 1 B  /

A page of R rows is split, not interleaved: R data rows, then R scale rows, then padding up to the page stride
(by default the next multiple of 576 B, which the tensor maps of the Blackwell kernels need).

    page p starts at byte p * page_stride:  [ R x 576 B | R x 8 B | padding ]
    row r is row r % R of page r // R
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dsv4.caches.pages import FLOATS, ROW_NUMBERS, SplitPages, define_write
from dsv4.runtime import checks, dispatch

HEAD_DIM = 512
NOPE = 448  # values stored as e4m3
ROPE = HEAD_DIM - NOPE  # values stored as bf16
TILE = 64  # e4m3 values that share a scale
TILES = NOPE // TILE
DATA_BYTES = NOPE + 2 * ROPE  # 576
SCALE_BYTES = 8  # 7 scales and one byte of padding
ROW_BYTES = DATA_BYTES + SCALE_BYTES  # 584
STRIDE_UNIT = 576
E4M3_MAX = 448.0
MIN_SCALE = 1e-4  # an all-zero tile still gets a scale


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [n, 512] of any float dtype to (data uint8 [n, 576], scales uint8 [n, 8]).

    A tile that holds a NaN or an infinity gets the ue8m0 NaN (255) as its scale and reads back as NaN.
    """
    n = rows.shape[0]
    tiles = rows[:, :NOPE].float().reshape(n, TILES, TILE)  # [n, 7, 64]
    target = (tiles.abs().amax(-1) / E4M3_MAX).clamp_min(MIN_SCALE)  # [n, 7]
    # ceil(log2(x)) from the bits: log2 in floating point rounds, and next to a power of two it rounds wrongly.
    mantissa, exponent = torch.frexp(target)  # target = mantissa * 2**exponent, mantissa in [0.5, 1)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    finite = torch.isfinite(target)
    scale_bytes = torch.where(finite, exponent + 127, 255).to(torch.uint8)
    scale = scale_bytes.view(torch.float8_e8m0fnu).float()
    nope = (tiles / scale[..., None]).to(torch.float8_e4m3fn)  # |value| <= 448: never out of range
    rope = rows[:, NOPE:].to(torch.bfloat16).contiguous()
    data = torch.cat([nope.view(torch.uint8).reshape(n, NOPE), rope.view(torch.uint8)], dim=1)
    scales = torch.cat([scale_bytes, scale_bytes.new_zeros(n, SCALE_BYTES - TILES)], dim=1)
    return data, scales


def dequantize_rows(data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """(data uint8 [n, 576], scales uint8 [n, 8]) to rows [n, 512]. e4m3 times a power of two is exact in bf16."""
    n = data.shape[0]
    rows = torch.empty(n, HEAD_DIM, dtype=dtype, device=data.device)
    nope = data[:, :NOPE].contiguous().view(torch.float8_e4m3fn).to(dtype).view(n, TILES, TILE)
    scale = scales[:, :TILES].contiguous().view(torch.float8_e8m0fnu).to(dtype)
    torch.mul(nope, scale[..., None], out=rows[:, :NOPE].view(n, TILES, TILE))
    # a copy also of a single row, which is contiguous as it is: it may lie at an odd address
    rows[:, NOPE:] = data[:, NOPE:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
    return rows


@dataclass(frozen=True, eq=False)
class Fp8Cache(SplitPages):
    """Pages of 584-byte rows in one flat uint8 tensor. It is a view: the tensor owns the memory.

    storage        uint8 [bytes], contiguous; page p starts at byte p * page_stride
    rows_per_page  rows in one page: 64 for CSA, 2 for HCA, 64 or 256 for the window
    page_stride    bytes from page to page; default: rows_per_page * 584 rounded up to 576

    >>> cache = Fp8Cache.pack(rows, rows_per_page=64)       # rows [n, 512], bf16 or fp32
    >>> cache.unpack()[: len(rows)]                         # bf16, as the kernels see them
    """

    WIDTH: ClassVar[int] = HEAD_DIM
    DATA_BYTES: ClassVar[int] = DATA_BYTES  # 448 e4m3 and 64 bf16
    SCALE_BYTES: ClassVar[int] = SCALE_BYTES  # 7 ue8m0 and a byte of padding
    STRIDE_UNIT: ClassVar[int] = STRIDE_UNIT
    WRITE: ClassVar[str] = "write_fp8_cache"
    quantize = staticmethod(quantize_rows)

    def write_on_gpu(self, slots: torch.Tensor, rows: torch.Tensor) -> bool:
        kernels = dispatch.module_here("compress", self.device)
        if kernels is not None:
            kernels.write(self, slots, rows)
        return kernels is not None

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows, HEAD_DIM)

    def gather(self, indices: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Rows [..., 512] of the given row numbers [...]; -1 gives a row of zeros. Only these rows are read."""
        checks.dtype("dtype", dtype, FLOATS)
        shape = tuple(indices.shape) if checks.is_tensor(indices) else ("...",)
        checks.tensor("indices", indices, shape, ROW_NUMBERS, like=("storage", self.storage), unit_last=False)
        if checks.values_checked(indices):
            checks.in_range("indices", indices, -1, self.rows - 1)
        if self.rows == 0:
            return torch.zeros(*indices.shape, HEAD_DIM, dtype=dtype, device=self.device)
        flat = indices.reshape(-1).long()
        absent = (flat < 0) | (flat >= self.rows)
        rows = gather_rows(self, torch.where(absent, 0, flat), dtype)
        # Row 0 stands in for an absent one and may hold anything, NaN included: overwrite, do not multiply by zero.
        rows.masked_fill_(absent[:, None], 0)
        return rows.view(*indices.shape, HEAD_DIM)

    def unpack(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """All rows, [rows, 512]."""
        checks.dtype("dtype", dtype, FLOATS)
        data, scales = self.data_view().reshape(-1, DATA_BYTES), self.scale_view().reshape(-1, SCALE_BYTES)
        return dequantize_rows(data, scales, dtype)


define_write(Fp8Cache)

# A pool of rows is a tensor [rows, D], a tensor [pages, rows per page, D], or an Fp8Cache. Row number r is row
# r % page of page r // page; a plain [rows, D] has pages of one row.


def pool_page(pool: Any) -> int:
    """Rows per page."""
    if hasattr(pool, "rows_per_page"):  # an Fp8Cache or an IndexCache; a program's slot is like a tensor
        return pool.rows_per_page
    return pool.shape[1] if pool.ndim == 3 else 1


def pool_size(pool: Any) -> int:
    """Rows in all."""
    if hasattr(pool, "rows_per_page"):
        return pool.rows
    return pool.shape[0] * pool.shape[1] if pool.ndim == 3 else pool.shape[0]


def gather_rows(pool: torch.Tensor | Fp8Cache, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [n, D] of the row numbers rows int64 [n], which the caller has checked."""
    if isinstance(pool, torch.Tensor) and pool.ndim == 2:
        return pool.index_select(0, rows).to(dtype)
    page, place = rows // pool_page(pool), rows % pool_page(pool)
    if isinstance(pool, torch.Tensor):
        return pool[page, place].to(dtype)
    data = _gather_bytes(pool, pool.data_view(), 0, page, place)
    scales = _gather_bytes(pool, pool.scale_view(), pool.rows_per_page * DATA_BYTES, page, place)
    return dequantize_rows(data, scales, dtype)


def write_rows(pool: torch.Tensor | Fp8Cache, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Rows [n, D] to the row numbers slots [n]; a number out of range drops its row."""
    if not isinstance(pool, torch.Tensor):
        pool.write(slots, rows)
        return
    there = (slots >= 0) & (slots < pool_size(pool))
    kept = slots[there].long()
    where = (kept,) if pool.ndim == 2 else (kept // pool_page(pool), kept % pool_page(pool))
    pool[where] = rows[there].to(pool.dtype)


def _gather_bytes(
    cache: Fp8Cache, view: torch.Tensor, start: int, page: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """view[page, place], uint8 [n, width]; start is where the view begins in a page."""
    width = view.shape[2]
    if cache.page_stride % width or start % width:
        return view[page, place]
    # The usual strides are whole rows: index_select then copies rows at once, which is several times faster.
    lines = cache.storage[: cache.storage.numel() // width * width].view(-1, width)
    return lines.index_select(0, page * (cache.page_stride // width) + start // width + place)
