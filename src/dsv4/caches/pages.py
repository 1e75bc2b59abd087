"""Rows as bytes in pages: the base of Fp8Cache and IndexCache. formats.py defines the bytes of a row.

page p starts at byte p * page_stride; row r is row r % R of page r // R
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dsv4.caches.formats import FORMATS, RowFormat
from dsv4.runtime import checks, dispatch, operators

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ROW_NUMBERS = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Pages of rows in one flat uint8 tensor. It is a view: the tensor owns the memory.

    storage        uint8 [bytes], contiguous
    rows_per_page  rows in one page
    page_stride    bytes from page to page; default: the format's
    format_name    a key of formats.FORMATS, the meaning of the bytes of a row; a class for one format has a default
    """

    storage: Tensor
    rows_per_page: int
    page_stride: int = -1
    format_name: str = ""
    kind: ClassVar[type[RowFormat] | tuple[type[RowFormat], ...]] = RowFormat  # the formats that a class accepts

    def __post_init__(self) -> None:
        checks.tensor("storage", self.storage, ("bytes",), (torch.uint8,))
        if not isinstance(self.format_name, str) or not isinstance(FORMATS.get(self.format_name), self.kind):
            checks.fail("format_name", repr(self.format_name)[:80], self._accepted())
        rows = checks.at_least(1, "rows_per_page", self.rows_per_page)
        used = rows * self.format.row_bytes
        stride = self.format.default_stride(rows) if checks.whole(self.page_stride) == -1 else self.page_stride
        accepted = f"an int >= rows_per_page * {self.format.row_bytes} = {used}"
        object.__setattr__(self, "rows_per_page", rows)
        object.__setattr__(self, "page_stride", checks.at_least(used, "page_stride", stride, accepted))

    @classmethod
    def _accepted(cls) -> str:
        return ", ".join(name for name, format in FORMATS.items() if isinstance(format, cls.kind))

    @classmethod
    def _format(cls, format: RowFormat | None) -> RowFormat:
        """Return the format of the argument `format`; None is that of the class."""
        found = FORMATS.get(cls.format_name) if format is None else format
        if not isinstance(found, cls.kind):
            checks.fail("format", checks.describe(format), f"a format of dsv4.caches: {cls._accepted()}")
        return found  # type: ignore[return-value]

    @property
    def format(self) -> RowFormat:
        return FORMATS[self.format_name]  # the name is kept: torch.compile supports strings, but not our classes

    @classmethod
    def stride_for(cls, rows_per_page: int) -> int:
        """Return the default number of bytes from one page to the next."""
        return FORMATS[cls.format_name].default_stride(rows_per_page)

    @classmethod
    def empty(
        cls,
        pages: int,
        rows_per_page: int,
        *,
        page_stride: int | None = None,
        device: torch.device | str = "cpu",
        format: RowFormat | None = None,
    ) -> Self:
        """Allocate zeroed pages. Zero bytes read back as rows of zeros."""
        pages = checks.at_least(0, "pages", pages)
        # Create the cache without pages first, which checks the sizes and gives the stride.
        stride = -1 if page_stride is None else page_stride
        nothing = torch.zeros(0, dtype=torch.uint8, device=checks.device("device", device))
        none = cls(nothing, rows_per_page, stride, cls._format(format).name)
        if pages * none.page_stride >= 1 << 63:
            checks.fail("pages", pages, f"at most {((1 << 63) - 1) // none.page_stride} of {none.page_stride} bytes")
        return replace(none, storage=none.storage.new_zeros(pages * none.page_stride))

    @classmethod
    def pack(
        cls, rows: Tensor, *, rows_per_page: int = 64, page_stride: int | None = None, format: RowFormat | None = None
    ) -> Self:
        """Quantise rows [n, values] into new pages; row i gets number i, and the last page is padded with zeros."""
        checks.tensor("rows", rows, ("n", cls._format(format).values), FLOATS, unit_last=False)
        if rows.is_meta:
            accepted = f"a tensor with values; {cls.__name__}.empty makes pages of any device"
            checks.fail("rows", "a meta tensor", accepted)
        pages = -(-rows.shape[0] // checks.at_least(1, "rows_per_page", rows_per_page))
        cache = cls.empty(pages, rows_per_page, page_stride=page_stride, device=rows.device, format=format)
        cache.write(torch.arange(rows.shape[0], device=rows.device), rows)
        return cache

    @classmethod
    def from_pages(cls, pages: Tensor, *, format: RowFormat | None = None) -> Self:
        """Wrap a cache of a serving engine, [pages, rows, bytes] or [pages, rows, 1, bytes], without a copy.

        The dtype may be any with one byte. The last size is the bytes of a row, whatever their order inside a page. The
        stride of dim 0 is the page stride.
        """
        found = cls._format(format)
        width = found.row_bytes
        accepted = f"one-byte elements [pages, rows, {width}] or [pages, rows, 1, {width}], contiguous inside a page, "
        accepted += "which has at least one row"
        if not checks.is_tensor(pages) or pages.element_size() != 1:
            checks.fail("pages", checks.describe(pages), accepted)
        if pages.ndim == 4 and pages.shape[2] == 1:
            pages = pages[:, :, 0]
        if pages.ndim != 3 or pages.shape[1] == 0 or pages.shape[2] != width or _apart(pages, width):
            checks.fail("pages", f"shape {list(pages.shape)}, strides {list(pages.stride())}", accepted)
        count, rows, _ = pages.shape
        stride = pages.stride(0) if count > 1 else max(pages.stride(0), rows * width)
        span = (count - 1) * stride + rows * width if count else 0
        flat = pages.view(torch.uint8).as_strided((span,), (1,), pages.storage_offset())
        return cls(flat, rows, stride, found.name)

    def with_storage(self, storage: Any) -> Self:
        """Return the same pages in other memory, or in a stand-in where no memory is read (program.Slot)."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, storage=storage)
        return other

    @property
    def pages(self) -> int:
        # The last page need not be padded up to the stride.
        used = self.rows_per_page * self.format.row_bytes
        return 0 if self.storage.numel() < used else (self.storage.numel() - used) // self.page_stride + 1

    @property
    def rows(self) -> int:
        """The number of rows; row numbers are 0 to rows - 1."""
        return self.pages * self.rows_per_page

    @property
    def device(self) -> torch.device:
        return self.storage.device

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows, self.format.values)

    def data_view(self) -> Tensor:
        """Return uint8 [pages, rows_per_page, bytes], a view of the storage: the data of every row."""
        return self._view(self.format.data_bytes, self.format.data_step, 0)

    def scale_view(self) -> Tensor:
        """Return uint8 [pages, rows_per_page, bytes], a view of the storage: the scales of every row."""
        start = self.format.scales_begin(self.rows_per_page)
        return self._view(self.format.scale_bytes, self.format.scale_step, start)

    def page_view(self) -> Tensor:
        """Return uint8 [pages, rows_per_page, bytes of a row], as engines hold them, whatever the order in a page."""
        return self._view(self.format.row_bytes, self.format.row_bytes, 0)

    def _view(self, width: int, step: int, start: int) -> Tensor:
        size = (self.pages, self.rows_per_page, width)
        return self.storage[start:].as_strided(size, (self.page_stride, step, 1))

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Quantise rows [n, values] into the row numbers slots [n]; slot -1 drops its row."""
        like = ("storage", self.storage)
        checks.tensor("rows", rows, ("n", self.format.values), FLOATS, like=like, unit_last=False)
        checks.tensor("slots", slots, (rows.shape[0],), ROW_NUMBERS, like=like, unit_last=False)
        checks.forward_only(rows=rows)
        if operators.observed() or self.storage.is_meta or not operators.all_plain((self.storage, slots, rows)):
            pages = (self.rows_per_page, self.page_stride, self.format_name)
            torch.ops.dsv4.write_rows(self.storage, slots, rows, *pages)
        else:
            self._write(slots, rows)

    def _write(self, slots: Tensor, rows: Tensor) -> None:
        if checks.values_checked(slots):
            checks.in_range("slots", slots, -1, self.rows - 1)
        if self.storage.is_cuda and rows.dtype != torch.float64:
            if self.format.store is not None and dispatch.has_kernels(self.device):
                from dsv4.caches.kernels.pack import write_rows  # imports Triton, which a CPU does not need

                with torch.cuda.device(self.device):
                    write_rows(self, slots, rows)
                return
        data, scales = self.format.quantize(rows)
        keep = (slots >= 0) & (slots < self.rows)
        slots, data, scales = slots[keep].long(), data[keep], scales[keep]
        page, place = slots // self.rows_per_page, slots % self.rows_per_page
        self.data_view()[page, place] = data
        self.scale_view()[page, place] = scales

    def gather(self, indices: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return rows [..., values] of the row numbers [...]; -1 gives a row of zeros. Only these rows are read."""
        checks.dtype("dtype", dtype, FLOATS)
        shape = tuple(indices.shape) if checks.is_tensor(indices) else ("...",)
        checks.tensor("indices", indices, shape, ROW_NUMBERS, like=("storage", self.storage), unit_last=False)
        if checks.values_checked(indices):
            checks.in_range("indices", indices, -1, self.rows - 1)
        if self.rows == 0:
            return torch.zeros(*indices.shape, self.format.values, dtype=dtype, device=self.device)
        flat = indices.reshape(-1).long()
        absent = (flat < 0) | (flat >= self.rows)
        rows = self.gather_rows(torch.where(absent, 0, flat), dtype)
        # Row 0 stands in for an absent one and may hold anything, NaN included: overwrite, do not multiply by zero.
        rows.masked_fill_(absent[:, None], 0)
        return rows.view(*indices.shape, self.format.values)

    def gather_rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows [n, values] of the row numbers rows int64 [n], which the caller has checked."""
        page, place = rows // self.rows_per_page, rows % self.rows_per_page
        start = self.format.scales_begin(self.rows_per_page)
        data = self._gather_bytes(self.data_view(), 0, page, place)
        return self.format.dequantize(data, self._gather_bytes(self.scale_view(), start, page, place), dtype)

    def _gather_bytes(self, view: Tensor, start: int, page: Tensor, place: Tensor) -> Tensor:
        """Return view[page, place], uint8 [n, width]; start is where the view begins in a page."""
        width = view.shape[2]
        if self.format.interleaved or self.page_stride % width or start % width:
            return view[page, place]
        # The usual strides are whole rows: index_select then copies rows at once, which is several times faster.
        lines = self.storage[: self.storage.numel() // width * width].view(-1, width)
        return lines.index_select(0, page * (self.page_stride // width) + start // width + place)

    def unpack(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return all rows, [rows, values]."""
        checks.dtype("dtype", dtype, FLOATS)
        data = self.data_view().reshape(-1, self.format.data_bytes)
        return self.format.dequantize(data, self.scale_view().reshape(-1, self.format.scale_bytes), dtype)


def _apart(pages: Tensor, width: int) -> bool:
    """Return whether a page has gaps between its bytes or its rows. The stride of a single row means nothing."""
    return pages.stride(2) != 1 or pages.shape[1] > 1 and pages.stride(1) != width


# The operator that a compiler sees of `write`; its own code picks rows by their values, which cannot be traced.


def _write_kernel(
    storage: Tensor, slots: Tensor, rows: Tensor, rows_per_page: int, page_stride: int, format: str
) -> None:
    PackedRows(storage, rows_per_page, page_stride, format)._write(slots, rows)


def _write_fake(*_: Any) -> None:
    return None


ARGUMENTS = "Tensor(a!) storage, Tensor slots, Tensor rows, SymInt rows_per_page, SymInt page_stride, str format"
operators.define(f"write_rows({ARGUMENTS}) -> ()", _write_kernel, _write_fake)
