"""Keys of the lightning indexer as bytes: the 132-byte FP8 row, its pages, and how to write and read them.

One key of 128 values:

    128 x e4m3   values / scale                                          128 B   data row
      1 x fp32   scale = 2 ** ceil(log2(max(amax, 1e-4) / 448))            4 B   scale

A page of R rows is split, not interleaved: R data rows, then R scales, then padding up to the page stride. These are
the pages of vLLM and DeepGEMM. Readers take any positive scale, not only powers of two.

    page p starts at byte p * page_stride:  [ R x 128 B | R x 4 B | padding ]
    row r is row r % R of page r // R

Queries are e4m3 too. Their scales are folded into the weights of the heads: :func:`quantize_queries`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dsv4.caches.kv import E4M3_MAX
from dsv4.caches.pages import FLOATS, SplitPages, define_write
from dsv4.runtime import checks

DIMS = 128
SCALE_BYTES = 4
ROW_BYTES = DIMS + SCALE_BYTES  # 132
STRIDE_UNIT = 16  # bytes that a copy takes at once
LEAST = 1e-4  # a key of zeros still gets a scale


def quantize_keys(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., 128] of any float dtype -> (e4m3 [..., 128], scales fp32 [...]), scales that are powers of two.

    A row that holds a NaN or an infinity gets a NaN as its scale and reads back as NaN.
    """
    values = rows.float()
    target = values.abs().amax(-1).clamp_min(LEAST) / E4M3_MAX
    # ceil(log2(x)) from the bits: log2 in floating point rounds, and next to a power of two it rounds wrongly.
    mantissa, exponent = torch.frexp(target)  # target = mantissa * 2**exponent, mantissa in [0.5, 1)
    scale = torch.ldexp(torch.ones_like(target), exponent - (mantissa == 0.5).to(exponent.dtype))
    scale = torch.where(torch.isfinite(target), scale, torch.nan)
    return (values / scale[..., None]).to(torch.float8_e4m3fn), scale


def quantize_queries(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(q [..., H, 128], weights [..., H]) -> (e4m3 of the same shape, fp32 weights times the scales of the queries).

    weights * relu(q . k) is what the two give together: a scale is positive, so it may stand outside of the ReLU.
    """
    if not checks.is_tensor(q) or q.ndim < 2:
        checks.fail("q", checks.describe(q), f"a tensor [..., H, {DIMS}]")
    checks.tensor("q", q, (*q.shape[:-1], DIMS), FLOATS, unit_last=False)
    checks.tensor("weights", weights, tuple(q.shape[:-1]), FLOATS, like=("q", q), unit_last=False)
    small, scale = quantize_keys(q)
    return small, weights.float() * scale


@dataclass(frozen=True, eq=False)
class IndexCache(SplitPages):
    """Pages of 132-byte index keys in one flat uint8 tensor. It is a view: the tensor owns the memory.

    storage        uint8 [bytes], contiguous; page p starts at byte p * page_stride
    rows_per_page  rows in one page: 64 in engines
    page_stride    bytes from page to page; default: rows_per_page * 132 rounded up to 16

    >>> cache = IndexCache.pack(keys, rows_per_page=64)                       # keys [n, 128], bf16 or fp32
    >>> q8, w = quantize_queries(q, weights)                                  # q [N, H, 128]
    >>> dsv4.index_topk(q8, cache, w, 512, lengths=lengths, block_table=table)
    """

    WIDTH: ClassVar[int] = DIMS
    DATA_BYTES: ClassVar[int] = DIMS
    SCALE_BYTES: ClassVar[int] = SCALE_BYTES
    STRIDE_UNIT: ClassVar[int] = STRIDE_UNIT
    WRITE: ClassVar[str] = "write_index_cache"

    @staticmethod
    def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
        data, scales = quantize_keys(rows)
        return data.view(torch.uint8), scales.contiguous().view(torch.uint8).view(-1, SCALE_BYTES)

    def write_on_gpu(self, slots: Tensor, rows: Tensor) -> bool:
        from dsv4.caches.kernels.index_keys import write_keys

        write_keys(self, slots, rows)
        return True

    def page_view(self) -> Tensor:
        """uint8 [pages, rows_per_page, 132], as engines hold them; a page is split, whatever its shape says."""
        size = (self.pages, self.rows_per_page, ROW_BYTES)
        return self.storage.as_strided(size, (self.page_stride, ROW_BYTES, 1))

    def unpack(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """All keys, [rows, 128]."""
        checks.dtype("dtype", dtype, FLOATS)
        values, scales = unpacked(self.page_view())
        return (values.float() * scales[..., None]).to(dtype).view(-1, DIMS)


define_write(IndexCache)


def data_of(pages: Tensor) -> Tensor:
    """uint8 [pages, rows, 128] of pages uint8 [pages, rows, 132]."""
    count, rows, _ = pages.shape
    return pages.as_strided((count, rows, DIMS), (pages.stride(0), DIMS, 1), pages.storage_offset())


def scales_of(pages: Tensor) -> Tensor:
    """uint8 [pages, rows, 4] of pages uint8 [pages, rows, 132]."""
    count, rows, _ = pages.shape
    start = pages.storage_offset() + rows * DIMS
    return pages.as_strided((count, rows, SCALE_BYTES), (pages.stride(0), SCALE_BYTES, 1), start)


def unpacked(pages: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [pages, rows, 128], scales fp32 [pages, rows]) of pages uint8 [pages, rows, 132]; copies."""
    values = data_of(pages).contiguous().view(torch.float8_e4m3fn)
    return values, scales_of(pages).contiguous().view(torch.float32)[..., 0]
