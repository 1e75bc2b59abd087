"""Keys of the lightning indexer as bytes: the 132-byte FP8 row, its pages, and the way in and out.

One key of 128 values:

    128 x e4m3   values / scale                                          128 B   data row
      1 x fp32   scale = 2 ** ceil(log2(max(amax, 1e-4) / 448))            4 B   scale

A page of R rows is split, not interleaved: R data rows, then R scales, then padding up to the page stride. These are
the pages of vLLM and DeepGEMM. Readers take any positive scale, not only powers of two.

    page p starts at byte p * page_stride:  [ R x 128 B | R x 4 B | padding ]
    row r lives in page r // R, place r % R

Queries are e4m3 too. Their scales are folded into the weights of the heads: :func:`quantize_queries`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.caches import E4M3_MAX, FLOATS, ROW_NUMBERS
from dsv4.runtime import checks

DIMS = 128
SCALE_BYTES = 4
ROW_BYTES = DIMS + SCALE_BYTES  # 132
STRIDE_UNIT = 16  # bytes that a copy takes at once
LEAST = 1e-4  # a key of zeros still gets a scale


def page_stride_for(rows_per_page: int) -> int:
    """Bytes from one page to the next when nothing else is asked for."""
    return -(-rows_per_page * ROW_BYTES // STRIDE_UNIT) * STRIDE_UNIT


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
    checks.tensor("q", q, (*q.shape[:-1], DIMS), FLOATS, unit_last=False)
    checks.tensor("weights", weights, tuple(q.shape[:-1]), FLOATS, like=("q", q), unit_last=False)
    small, scale = quantize_keys(q)
    return small, weights.float() * scale


@dataclass(frozen=True, eq=False)
class IndexCache:
    """Pages of 132-byte index keys in one flat uint8 tensor; a view, it owns nothing that the tensor does not.

    storage        uint8 [bytes], contiguous; page p starts at byte p * page_stride
    rows_per_page  rows in one page: 64 in engines
    page_stride    bytes from page to page; default: rows_per_page * 132 rounded up to 16

    >>> cache = IndexCache.pack(keys, rows_per_page=64)                       # keys [n, 128], bf16 or fp32
    >>> q8, w = quantize_queries(q, weights)                                  # q [N, H, 128]
    >>> dsv4.index_topk(q8, cache, w, 512, lengths=lengths, block_table=table)
    """

    storage: Tensor
    rows_per_page: int
    page_stride: int = -1

    def __post_init__(self) -> None:
        checks.tensor("storage", self.storage, ("bytes",), (torch.uint8,))
        rows = checks.at_least(1, "rows_per_page", self.rows_per_page)
        used = rows * ROW_BYTES
        stride = page_stride_for(rows) if checks.whole(self.page_stride) == -1 else self.page_stride
        accepted = f"an int >= rows_per_page * {ROW_BYTES} = {used}"
        object.__setattr__(self, "rows_per_page", rows)
        object.__setattr__(self, "page_stride", checks.at_least(used, "page_stride", stride, accepted))

    @classmethod
    def empty(
        cls, pages: int, rows_per_page: int, *, page_stride: int | None = None, device: torch.device | str = "cpu"
    ) -> IndexCache:
        """Zeroed pages. Zero bytes read back as keys of zeros."""
        pages = checks.at_least(0, "pages", pages)
        stride = -1 if page_stride is None else page_stride
        none = cls(torch.zeros(0, dtype=torch.uint8, device=checks.device("device", device)), rows_per_page, stride)
        return replace(none, storage=none.storage.new_zeros(pages * none.page_stride))

    @classmethod
    def pack(cls, rows: Tensor, *, rows_per_page: int = 64, page_stride: int | None = None) -> IndexCache:
        """Quantise keys [n, 128] into fresh pages; key i gets row number i, the last page is filled up with zeros."""
        checks.tensor("rows", rows, ("n", DIMS), FLOATS, unit_last=False)
        pages = -(-rows.shape[0] // checks.at_least(1, "rows_per_page", rows_per_page))
        cache = cls.empty(pages, rows_per_page, page_stride=page_stride, device=rows.device)
        cache.write(torch.arange(rows.shape[0], device=rows.device), rows)
        return cache

    @classmethod
    def from_pages(cls, pages: Tensor) -> IndexCache:
        """The caches of serving engines, [pages, rows, 132] or [pages, rows, 1, 132], without a copy.

        Any one-byte dtype. Their shape says 132 bytes a row; the bytes inside a page are split as described above all
        the same. The stride of dim 0 is the page stride.
        """
        accepted = "one-byte elements [pages, rows, 132] or [pages, rows, 1, 132], contiguous inside a page"
        if not checks.is_tensor(pages) or pages.element_size() != 1:
            checks.fail("pages", checks.describe(pages), accepted)
        if pages.ndim == 4 and pages.shape[2] == 1:
            pages = pages[:, :, 0]
        if pages.ndim != 3 or pages.shape[2] != ROW_BYTES or pages.stride()[1:] != (ROW_BYTES, 1):
            checks.fail("pages", f"shape {list(pages.shape)}, strides {list(pages.stride())}", accepted)
        count, rows, _ = pages.shape
        stride = pages.stride(0) if count > 1 else max(pages.stride(0), rows * ROW_BYTES)
        span = (count - 1) * stride + rows * ROW_BYTES if count else 0
        flat = pages.view(torch.uint8).as_strided((span,), (1,), pages.storage_offset())
        return cls(flat, rows, stride)

    @property
    def pages(self) -> int:
        # The last page need not be padded up to the stride.
        used = self.rows_per_page * ROW_BYTES
        return 0 if self.storage.numel() < used else (self.storage.numel() - used) // self.page_stride + 1

    @property
    def rows(self) -> int:
        """Row numbers run from 0 to rows - 1."""
        return self.pages * self.rows_per_page

    @property
    def device(self) -> torch.device:
        return self.storage.device

    def page_view(self) -> Tensor:
        """uint8 [pages, rows_per_page, 132], as engines hold them; a page is split, whatever its shape says."""
        size = (self.pages, self.rows_per_page, ROW_BYTES)
        return self.storage.as_strided(size, (self.page_stride, ROW_BYTES, 1), self.storage.storage_offset())

    def data_view(self) -> Tensor:
        """uint8 [pages, rows_per_page, 128], a view of the storage: the e4m3 bytes of every key."""
        return data_of(self.page_view())

    def scale_view(self) -> Tensor:
        """uint8 [pages, rows_per_page, 4], a view of the storage: the bytes of the scale of every key."""
        return scales_of(self.page_view())

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Quantise keys [n, 128] into the row numbers slots [n]; slot -1 drops its key."""
        like = ("storage", self.storage)
        checks.tensor("rows", rows, ("n", DIMS), FLOATS, like=like, unit_last=False)
        checks.tensor("slots", slots, (rows.shape[0],), ROW_NUMBERS, like=like, unit_last=False)
        checks.forward_only(rows=rows)
        if checks.values_checked(slots):
            checks.in_range("slots", slots, -1, self.rows - 1)
        if self.storage.is_cuda and rows.dtype != torch.float64 and not torch.compiler.is_compiling():
            from dsv4.kernels.shared.index.keys import write_keys

            with torch.cuda.device(self.device):
                write_keys(self, slots, rows)
            return
        data, scales = quantize_keys(rows)
        keep = (slots >= 0) & (slots < self.rows)
        slots = slots[keep].long()
        page, place = slots // self.rows_per_page, slots % self.rows_per_page
        self.data_view()[page, place] = data[keep].view(torch.uint8)
        self.scale_view()[page, place] = scales[keep].contiguous().view(torch.uint8).view(-1, SCALE_BYTES)

    def unpack(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """All keys, [rows, 128]."""
        checks.dtype("dtype", dtype, FLOATS)
        values, scales = unpacked(self.page_view())
        return (values.float() * scales[..., None]).to(dtype).view(-1, DIMS)


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
