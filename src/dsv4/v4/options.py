"""The options of v4_attention: all arguments but tensors. A new option is a field here, and its check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dsv4.runtime import checks


class V4Options(NamedTuple):
    """A pool is given as a tensor, rows per page, page stride and the name of its format; "": the tensor holds rows."""

    window_rows_per_page: int = 0
    window_page_stride: int = 0
    window_format: str = ""
    compressed_rows_per_page: int = 0
    compressed_page_stride: int = 0
    compressed_format: str = ""
    softmax_scale: float | None = None
    deterministic: bool = False

    @classmethod
    def checked(cls, window: Sequence, compressed: Sequence, softmax_scale: Any, deterministic: Any) -> V4Options:
        """Convert numbers and flags to their types. window, compressed: the paging of these pools."""
        numbers = (checks.scale(softmax_scale), checks.flag("deterministic", deterministic))
        return tuple.__new__(cls, (*window, *compressed, *numbers))  # same result as cls(...), in half the time

    @property
    def window_pages(self) -> tuple[int, int, str]:
        return self[:3]

    @property
    def compressed_pages(self) -> tuple[int, int, str]:
        return self[3:6]

    def resolved(self, head_dim: int) -> V4Options:
        """Return the options with every default filled in, as backends read them. ValueError if a value is wrong."""
        return self._replace(softmax_scale=checks.softmax_scale(self.softmax_scale, head_dim))
