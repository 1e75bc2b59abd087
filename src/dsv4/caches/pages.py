"""Rows as bytes in pages that are split, not interleaved: what Fp8Cache and IndexCache have in common.

page p starts at byte p * page_stride:  [ R rows of data | R rows of scales | padding ]
row r is row r % R of page r // R
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dsv4.runtime import checks, operators

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ROW_NUMBERS = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class SplitPages:
    """Pages of rows in one flat uint8 tensor; a view, it owns nothing that the tensor does not. A kind of row says how
    long it is and how it is quantised."""

    storage: Tensor
    rows_per_page: int
    page_stride: int = -1

    WIDTH: ClassVar[int]  # values of a row
    DATA_BYTES: ClassVar[int]
    SCALE_BYTES: ClassVar[int]
    STRIDE_UNIT: ClassVar[int]  # pages begin at multiples of it when nothing else is asked for
    WRITE: ClassVar[str]  # the operator of `write`

    @staticmethod
    def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [n, WIDTH] -> uint8 (data [n, DATA_BYTES], scales [n, SCALE_BYTES])."""
        raise NotImplementedError

    def write_on_gpu(self, slots: Tensor, rows: Tensor) -> bool:
        """Write by a kernel; False if there is none here."""
        raise NotImplementedError

    @classmethod
    def row_bytes(cls) -> int:
        return cls.DATA_BYTES + cls.SCALE_BYTES

    @classmethod
    def stride_for(cls, rows_per_page: int) -> int:
        """Bytes from one page to the next when nothing else is asked for."""
        return -(-rows_per_page * cls.row_bytes() // cls.STRIDE_UNIT) * cls.STRIDE_UNIT

    def __post_init__(self) -> None:
        checks.tensor("storage", self.storage, ("bytes",), (torch.uint8,))
        rows = checks.at_least(1, "rows_per_page", self.rows_per_page)
        used = rows * self.row_bytes()
        stride = self.stride_for(rows) if checks.whole(self.page_stride) == -1 else self.page_stride
        accepted = f"an int >= rows_per_page * {self.row_bytes()} = {used}"
        object.__setattr__(self, "rows_per_page", rows)
        object.__setattr__(self, "page_stride", checks.at_least(used, "page_stride", stride, accepted))

    @classmethod
    def empty(
        cls, pages: int, rows_per_page: int, *, page_stride: int | None = None, device: torch.device | str = "cpu"
    ) -> Self:
        """Zeroed pages. Zero bytes read back as rows of zeros."""
        pages = checks.at_least(0, "pages", pages)
        # Without pages first: it checks the sizes, and gives the stride.
        stride = -1 if page_stride is None else page_stride
        none = cls(torch.zeros(0, dtype=torch.uint8, device=checks.device("device", device)), rows_per_page, stride)
        if pages * none.page_stride >= 1 << 63:
            checks.fail("pages", pages, f"at most {((1 << 63) - 1) // none.page_stride} of {none.page_stride} bytes")
        return replace(none, storage=none.storage.new_zeros(pages * none.page_stride))

    @classmethod
    def pack(cls, rows: Tensor, *, rows_per_page: int = 64, page_stride: int | None = None) -> Self:
        """Quantise rows [n, values] into new pages; row i gets number i, and the last page is padded with zeros."""
        checks.tensor("rows", rows, ("n", cls.WIDTH), FLOATS, unit_last=False)
        if rows.is_meta:
            accepted = f"a tensor with values; {cls.__name__}.empty makes pages of any device"
            checks.fail("rows", "a meta tensor", accepted)
        pages = -(-rows.shape[0] // checks.at_least(1, "rows_per_page", rows_per_page))
        cache = cls.empty(pages, rows_per_page, page_stride=page_stride, device=rows.device)
        cache.write(torch.arange(rows.shape[0], device=rows.device), rows)
        return cache

    @classmethod
    def from_pages(cls, pages: Tensor) -> Self:
        """The caches of serving engines, [pages, rows, bytes] or [pages, rows, 1, bytes], without a copy.

        Any one-byte dtype. Their shape speaks of the bytes of a row; those inside a page are split as described above
        all the same. The stride of dim 0 is the page stride.
        """
        width = cls.row_bytes()
        accepted = f"one-byte elements [pages, rows, {width}] or [pages, rows, 1, {width}], contiguous inside a page"
        if not checks.is_tensor(pages) or pages.element_size() != 1:
            checks.fail("pages", checks.describe(pages), accepted)
        if pages.ndim == 4 and pages.shape[2] == 1:
            pages = pages[:, :, 0]
        if pages.ndim != 3 or pages.shape[2] != width or pages.stride()[1:] != (width, 1):
            checks.fail("pages", f"shape {list(pages.shape)}, strides {list(pages.stride())}", accepted)
        count, rows, _ = pages.shape
        stride = pages.stride(0) if count > 1 else max(pages.stride(0), rows * width)
        span = (count - 1) * stride + rows * width if count else 0
        flat = pages.view(torch.uint8).as_strided((span,), (1,), pages.storage_offset())
        return cls(flat, rows, stride)

    def with_storage(self, storage: Any) -> Self:
        """The same pages in other memory, or in what stands for it where no memory is read (program.Slot)."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, storage=storage)
        return other

    @property
    def pages(self) -> int:
        # The last page need not be padded up to the stride.
        used = self.rows_per_page * self.row_bytes()
        return 0 if self.storage.numel() < used else (self.storage.numel() - used) // self.page_stride + 1

    @property
    def rows(self) -> int:
        """Row numbers run from 0 to rows - 1."""
        return self.pages * self.rows_per_page

    @property
    def device(self) -> torch.device:
        return self.storage.device

    def data_view(self) -> Tensor:
        """uint8 [pages, rows_per_page, bytes], a view of the storage: the data of every row."""
        return self._view(self.DATA_BYTES, 0)

    def scale_view(self) -> Tensor:
        """uint8 [pages, rows_per_page, bytes], a view of the storage: the scales of every row."""
        return self._view(self.SCALE_BYTES, self.rows_per_page * self.DATA_BYTES)

    def _view(self, width: int, start: int) -> Tensor:
        size = (self.pages, self.rows_per_page, width)
        return self.storage[start:].as_strided(size, (self.page_stride, width, 1))

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Quantise rows [n, values] into the row numbers slots [n]; slot -1 drops its row."""
        like = ("storage", self.storage)
        checks.tensor("rows", rows, ("n", self.WIDTH), FLOATS, like=like, unit_last=False)
        checks.tensor("slots", slots, (rows.shape[0],), ROW_NUMBERS, like=like, unit_last=False)
        checks.forward_only(rows=rows)
        if operators.observed() or self.storage.is_meta or not operators.all_plain((self.storage, slots, rows)):
            operator = getattr(torch.ops.dsv4, self.WRITE)
            operator(self.storage, slots, rows, self.rows_per_page, self.page_stride)
        else:
            self._write(slots, rows)

    def _write(self, slots: Tensor, rows: Tensor) -> None:
        if checks.values_checked(slots):
            checks.in_range("slots", slots, -1, self.rows - 1)
        if self.storage.is_cuda and rows.dtype != torch.float64:
            with torch.cuda.device(self.device):
                if self.write_on_gpu(slots, rows):
                    return
        data, scales = self.quantize(rows)
        keep = (slots >= 0) & (slots < self.rows)
        slots, data, scales = slots[keep].long(), data[keep], scales[keep]
        page, place = slots // self.rows_per_page, slots % self.rows_per_page
        self.data_view()[page, place] = data
        self.scale_view()[page, place] = scales


def define_write(kind: type[SplitPages]) -> None:
    """Its operator: what a compiler sees of `write`, whose own code picks the rows that are kept by their values."""

    def kernel(storage: Tensor, slots: Tensor, rows: Tensor, rows_per_page: int, page_stride: int) -> None:
        kind(storage, rows_per_page, page_stride)._write(slots, rows)

    def fake(storage: Tensor, slots: Tensor, rows: Tensor, rows_per_page: int, page_stride: int) -> None:
        return None

    arguments = "Tensor(a!) storage, Tensor slots, Tensor rows, SymInt rows_per_page, SymInt page_stride"
    operators.define(f"{kind.WRITE}({arguments}) -> ()", kernel, fake)
