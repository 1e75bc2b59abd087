"""KV rows of DeepSeek-V4 and V4.1 as bytes, and pools of rows, packed or plain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dsv4.caches.formats import FORMATS, FP8_584, MXFP8_528, NVFP4_288, Fp8Rows, Mxfp8Rows, Nvfp4Rows, RowFormat
from dsv4.caches.pages import PackedRows


@dataclass(frozen=True, eq=False)
class Fp8Cache(PackedRows):
    """Pages of 584-byte rows in one flat uint8 tensor. It is a view: the tensor owns the memory.

    storage        uint8 [bytes], contiguous; page p starts at byte p * page_stride
    rows_per_page  rows in one page: 64 for CSA, 2 for HCA, 64 or 256 for the window
    page_stride    bytes from page to page; default: rows_per_page * 584 rounded up to 576

    A page is planar: [ R x 576 B data | R x 8 B scales | padding ]. :class:`dsv4.caches.formats.Fp8Rows` defines the
    bytes of a row.

    >>> cache = Fp8Cache.pack(rows, rows_per_page=64)       # rows [n, 512], bf16 or fp32
    >>> cache.unpack()[: len(rows)]                         # bf16, as the kernels see them
    """

    format_name: str = FP8_584.name
    kind: ClassVar[type[RowFormat]] = Fp8Rows


@dataclass(frozen=True, eq=False)
class Mxfp8Cache(PackedRows):
    """Pages of DeepSeek-V4.1's 528-byte rows in one flat uint8 tensor. It is a view: the tensor owns the memory.

    storage        uint8 [bytes], contiguous; page p starts at byte p * page_stride
    rows_per_page  rows in one page
    page_stride    bytes from page to page; default: rows_per_page * 528 rounded up to 512, interleaved not rounded
    format_name    "mxfp8_528", planar: [ R x 512 B data | R x 16 B scales | padding ]; "mxfp8_528_interleaved": each
                   row's scales follow its data

    :class:`dsv4.caches.formats.Mxfp8Rows` defines the bytes of a row. The class determines their meaning: rows of V3.2
    have 528 bytes, too.

    >>> window = Mxfp8Cache.pack(rows, rows_per_page=32)                          # rows [n, 512], bf16 or fp32
    >>> Mxfp8Cache.from_pages(pages, format=MXFP8_528_INTERLEAVED)                # of dsv4.caches.formats
    """

    format_name: str = MXFP8_528.name
    kind: ClassVar[type[RowFormat]] = Mxfp8Rows


@dataclass(frozen=True, eq=False)
class Nvfp4Cache(PackedRows):
    """Pages of DeepSeek-V4.1's 288-byte rows in one flat uint8 tensor. It is a view: the tensor owns the memory.

    storage        uint8 [bytes], contiguous; page p starts at byte p * page_stride
    rows_per_page  rows in one page
    page_stride    bytes from page to page; default: rows_per_page * 288 rounded up to 256, interleaved not rounded
    format_name    "nvfp4_288", planar: [ R x 256 B data | R x 32 B scales | padding ]; "nvfp4_288_interleaved": each
                   row's scales follow its data

    :class:`dsv4.caches.formats.Nvfp4Rows` defines the bytes of a row.

    >>> compressed = Nvfp4Cache.pack(rows, rows_per_page=64)                      # rows [n, 512], bf16 or fp32
    >>> dsv4.v4_attention(q, window, window_indices, compressed, compressed_indices)
    """

    format_name: str = NVFP4_288.name
    kind: ClassVar[type[RowFormat]] = Nvfp4Rows


CACHES = (Fp8Cache, Mxfp8Cache, Nvfp4Cache)


# A pool of rows is a tensor [rows, D], a tensor [pages, rows per page, D], or packed rows. Row number r is row
# r % page of page r // page; a plain [rows, D] has pages of one row.
Pool = torch.Tensor | PackedRows


# An operator receives a pool as a tensor, rows per page, page stride and the name of the format; without a name the
# tensor holds rows.


def parts_of(pool: Any) -> tuple[Any, int, int, str]:
    if isinstance(pool, PackedRows):
        return pool.storage, pool.rows_per_page, pool.page_stride, pool.format_name
    return pool, 0, 0, ""


def from_parts(storage: Any, rows_per_page: int, page_stride: int, name: str) -> Any:
    if storage is None or not name:
        return storage
    cls = next((cache for cache in CACHES if isinstance(FORMATS[name], cache.kind)), PackedRows)
    return cls(storage, rows_per_page, page_stride, name)


def pool_page(pool: Any) -> int:
    """Return the rows per page."""
    if hasattr(pool, "rows_per_page"):  # packed rows; a program's slot is like a tensor
        return pool.rows_per_page
    return pool.shape[1] if pool.ndim == 3 else 1


def pool_size(pool: Any) -> int:
    """Return the number of rows."""
    if hasattr(pool, "rows_per_page"):
        return pool.rows
    return pool.shape[0] * pool.shape[1] if pool.ndim == 3 else pool.shape[0]


def gather_rows(pool: Tensor | PackedRows, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows [n, D] of the row numbers rows int64 [n], which the caller has checked."""
    if isinstance(pool, PackedRows):
        return pool.gather_rows(rows, dtype)
    if pool.ndim == 2:
        return pool.index_select(0, rows).to(dtype)
    return pool[rows // pool_page(pool), rows % pool_page(pool)].to(dtype)


def write_rows(pool: Tensor | PackedRows, slots: Tensor, rows: Tensor) -> None:
    """Write rows [n, D] to the row numbers slots [n]; a number out of range drops its row."""
    if isinstance(pool, PackedRows):
        pool.write(slots, rows)
        return
    there = (slots >= 0) & (slots < pool_size(pool))
    kept = slots[there].long()
    where = (kept,) if pool.ndim == 2 else (kept // pool_page(pool), kept % pool_page(pool))
    pool[where] = rows[there].to(pool.dtype)
