"""Keys of the lightning indexer as bytes, and its queries.

Queries are e4m3, as the keys are. Their scales are folded into the weights of the heads: :func:`quantize_queries`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.caches.formats import INDEX_132
from dsv4.caches.pages import FLOATS, PackedRows
from dsv4.runtime import checks


def quantize_queries(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(q [..., H, 128], weights [..., H]) -> (e4m3 of the same shape, fp32 weights times the scales of the queries).

    weights * relu(q . k) is what the two give together: a scale is positive, so it may stand outside of the ReLU.
    """
    if not checks.is_tensor(q) or q.ndim < 2:
        checks.fail("q", checks.describe(q), f"a tensor [..., H, {INDEX_132.values}]")
    checks.tensor("q", q, (*q.shape[:-1], INDEX_132.values), FLOATS, unit_last=False)
    checks.tensor("weights", weights, tuple(q.shape[:-1]), FLOATS, like=("q", q), unit_last=False)
    small, scale = INDEX_132.codes(q)
    return small, weights.float() * scale


@dataclass(frozen=True, eq=False)
class IndexCache(PackedRows):
    """Pages of 132-byte index keys in one flat uint8 tensor. It is a view: the tensor owns the memory.

    storage        uint8 [bytes], contiguous; page p starts at byte p * page_stride
    rows_per_page  rows in one page: 64 in engines
    page_stride    bytes from page to page; default: rows_per_page * 132 rounded up to 16

    A page is planar, as those of vLLM and DeepGEMM: [ R x 128 B data | R x 4 B scales | padding ].
    :class:`dsv4.caches.formats.Fp8Keys` defines the bytes of a key.

    >>> cache = IndexCache.pack(keys, rows_per_page=64)                       # keys [n, 128], bf16 or fp32
    >>> q8, w = quantize_queries(q, weights)                                  # q [N, H, 128]
    >>> dsv4.index_topk(q8, cache, w, 512, lengths=lengths, block_table=table)
    """

    format_name: str = INDEX_132.name


def unpacked(pages: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [pages, rows, 128], scales fp32 [pages, rows]) of pages uint8 [pages, rows, 132]; copies."""
    cache = IndexCache.from_pages(pages)
    codes = cache.data_view().contiguous().view(torch.float8_e4m3fn)
    return codes, cache.scale_view().contiguous().view(torch.float32)[..., 0]
