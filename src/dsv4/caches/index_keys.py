"""Keys of the lightning indexer as bytes, and its queries.

Queries of FP8 keys are e4m3, as the keys are; :func:`quantize_queries` folds their scales into the weights of the
heads. Queries of FP4 keys are the same, or FP4 with their own scales: :func:`quantize_queries_fp4`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dsv4.caches.formats import INDEX_132, Fp8Keys, RowFormat
from dsv4.caches.mxfp4_keys import INDEX_68, Mxfp4Keys
from dsv4.caches.pages import FLOATS, PackedRows
from dsv4.runtime import checks


def quantize_queries(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise (q [..., H, 128], weights [..., H]) -> (e4m3 q, fp32 weights times the scales of the queries).

    Together they give weights * relu(q . k): a scale is positive, so it can be moved out of the ReLU.
    """
    if not checks.is_tensor(q) or q.ndim < 2:
        checks.fail("q", checks.describe(q), f"a tensor [..., H, {INDEX_132.values}]")
    checks.tensor("q", q, (*q.shape[:-1], INDEX_132.values), FLOATS, unit_last=False)
    checks.tensor("weights", weights, tuple(q.shape[:-1]), FLOATS, like=("q", q), unit_last=False)
    small, scale = INDEX_132.codes(q)
    return small, weights.float() * scale


def quantize_queries_fp4(q: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise q [..., H, 128] -> (uint8 [..., H, 64], two e2m1 per byte, int32 [..., H], 4 ue8m0 each, first lowest).

    The bytes are those of an FP4 key. Pass them to index_topk as q and q_scales.
    """
    if not checks.is_tensor(q) or q.ndim < 2:
        checks.fail("q", checks.describe(q), f"a tensor [..., H, {INDEX_68.values}]")
    checks.tensor("q", q, (*q.shape[:-1], INDEX_68.values), FLOATS, unit_last=False)
    codes, scales = INDEX_68.quantize(q)
    return codes, scales.contiguous().view(torch.int32)[..., 0]


@dataclass(frozen=True, eq=False)
class IndexCache(PackedRows):
    """Pages of index keys in one flat uint8 tensor. It is a view: the tensor owns the memory.

    storage        uint8 [bytes], contiguous; page p starts at byte p * page_stride
    rows_per_page  rows in one page: 64 in engines
    page_stride    bytes from page to page; default: the bytes of the keys rounded up to 16
    format_name    "index_132", FP8 keys; or "index_68", the FP4 keys of DeepSeek-V4.1

    A page is planar, as those of vLLM and DeepGEMM: [ R x 128 B (or 64 B) data | R x 4 B scales | padding ].
    :class:`dsv4.caches.formats.Fp8Keys` and :class:`dsv4.caches.mxfp4_keys.Mxfp4Keys` define the bytes of a key.

    >>> cache = IndexCache.pack(keys, rows_per_page=64)                       # keys [n, 128], bf16 or fp32
    >>> q8, w = quantize_queries(q, weights)                                  # q [N, H, 128]
    >>> dsv4.index_topk(q8, cache, w, 512, lengths=lengths, block_table=table)
    >>> cache = IndexCache.pack(keys, format=INDEX_68)                        # of dsv4.caches.mxfp4_keys
    >>> q4, scales = quantize_queries_fp4(q)
    >>> dsv4.index_topk(q4, cache, weights, 512, q_scales=scales, lengths=lengths, block_table=table)
    """

    format_name: str = INDEX_132.name
    kind: ClassVar[tuple[type[RowFormat], ...]] = (Fp8Keys, Mxfp4Keys)


def unpacked(pages: Tensor) -> tuple[Tensor, Tensor]:
    """Return (e4m3 [pages, rows, 128], scales fp32 [pages, rows]) of pages uint8 [pages, rows, 132]; copies."""
    cache = IndexCache.from_pages(pages)
    codes = cache.data_view().contiguous().view(torch.float8_e4m3fn)
    return codes, cache.scale_view().contiguous().view(torch.float32)[..., 0]
