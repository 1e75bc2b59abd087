"""V4 attention with rows of DeepSeek-V4.1, for tests of kernels: a window of one format, compressed rows of another."""

import torch

from dsv4 import reference
from dsv4.caches.formats import RowFormat
from dsv4.caches.pages import PackedRows


def pool(format: RowFormat | None, count: int, per_page: int, more: int = 0) -> PackedRows | torch.Tensor:
    """Rows at random, groups that differ in size; what no row has is NaN. None: a plain tensor."""
    sizes = torch.randn(count, 32).exp2().repeat_interleave(16, 1)
    rows = (torch.randn(count, 512) * sizes).bfloat16()
    if format is None:
        return rows
    stride = per_page * format.row_bytes + more
    cache = PackedRows.empty(-(-count // per_page) + 1, per_page, page_stride=stride, format=format)
    cache.storage.fill_(255)
    cache.write(torch.arange(count), rows)
    return cache


def numbers(*shape: int, of: int) -> torch.Tensor:
    """Row numbers, repeated ones and -1 among them."""
    return torch.randint(-1, of, shape, dtype=torch.int32)


def problem(window: RowFormat, compressed: RowFormat | None, heads: int, table: bool = False, more: int = 0) -> dict:
    """Three queries: seven blocks of rows, of which two are the window's; none at all; one of each pool."""
    torch.manual_seed(3)
    arguments = dict(
        q=torch.randn(3, heads, 512).bfloat16(),
        window=pool(window, 100, 32, more),
        window_indices=numbers(3, 128, of=100),
        window_lengths=torch.tensor([128, 0, 3], dtype=torch.int32),
        compressed=pool(compressed, 320, 16, more),
        compressed_lengths=torch.tensor([300, 0, 7], dtype=torch.int32),
        sink=torch.randn(heads),
        inverse_rope=(reference.rope_table(50, 64), torch.tensor([3, 49, 1], dtype=torch.int32)),
    )
    if table:
        pages = torch.stack([torch.randperm(20) for _ in range(3)]).int()
        return arguments | dict(compressed_block_table=pages, request_starts=torch.arange(4, dtype=torch.int32))
    return arguments | dict(compressed_indices=numbers(3, 300, of=320))
