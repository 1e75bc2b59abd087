"""FlashMLA's functions on dsv4: for servers that call them by name, on every device and head count that dsv4 supports.

    from dsv4.integrations.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

Names, argument positions, shapes and results are those of FlashMLA as of 2026 (DeepSeek-V4, ``d_qk = d_v = 512``):

* ``k_cache`` uint8, int8 or float8_e4m3fn [blocks, rows, 1, 584]: the pages of :class:`dsv4.Fp8Cache`, byte for byte,
  any block size, any stride between blocks. An index is ``block * rows + offset``. Rows of 528 and 288 bytes are those
  of DeepSeek-V4.1 (:class:`dsv4.Mxfp8Cache`, :class:`dsv4.Nvfp4Cache`), as FlashMLA reads them: planar, or interleaved
  with ``use_legacy=False``; both caches may have different ones.
* lse is fp32, natural log, without the sink. **A query that sees no key has lse +inf here**, and out 0; everywhere
  else in dsv4 it is -inf, which is what :func:`dsv4.merge_states` needs.
* the sink is in the denominator only: -inf = none, +inf = out 0.

Beyond FlashMLA: 1 to 128 query heads and lists of any length, without padding; any block size; bf16 rows instead of
FP8 ([blocks, rows, 1, 512] with ``is_fp8_kvcache=False``); CPUs. Indices that name no row are rejected where dsv4
checks values (always on a CPU) and count as -1 elsewhere.

Not supported, and rejected by name: ``d_qk = 576`` (DeepSeek-V3: keys of 576 and values of 512 columns, 656-byte rows)
and rows that ``kv_format`` names: V3.2's without RoPE have 528 bytes, too. There is no schedule to compute:
:func:`get_mla_metadata` returns an empty object, nothing is stored in it, and lengths may change from call to call.

Gradients: those of :func:`dsv4.v4_attention`, first order, through out and lse: with respect to q, attn_sink and rows
of q's dtype (rows in FP8 have none). Dense decode, max_logits and ``out=`` have no gradient.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.caches.formats import FP8_584, MXFP8_528, MXFP8_528_INTERLEAVED, NVFP4_288, NVFP4_288_INTERLEAVED
from dsv4.caches.kv import Fp8Cache, Mxfp8Cache, Nvfp4Cache, Pool
from dsv4.fmha.api import fmha_paged
from dsv4.integrations.naming import named
from dsv4.runtime import checks
from dsv4.runtime.checks import Backend
from dsv4.v4.api import v4_attention

FP8_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
# names of arguments, here and in dsv4.v4_attention
NAMES = {
    "window_indices": "indices",
    "window_lengths": "topk_length",
    "compressed": "extra_k_cache",
    "compressed_indices": "extra_indices_in_kvcache",
    "compressed_lengths": "extra_topk_length",
    "sink": "attn_sink",
}
# by bytes of a row: the class of a cache, its rows, and its interleaved rows
CACHES: dict[int, tuple[Any, Any, Any]] = {
    FP8_584.row_bytes: (Fp8Cache, FP8_584, None),
    MXFP8_528.row_bytes: (Mxfp8Cache, MXFP8_528, MXFP8_528_INTERLEAVED),
    NVFP4_288.row_bytes: (Nvfp4Cache, NVFP4_288, NVFP4_288_INTERLEAVED),
}
OTHER_ROWS = {656: "DeepSeek-V3.2"}
BLOCK_BYTES = 24 << 20  # rows (fp32) gathered at once for max_logits


@dataclass
class FlashMLASchedMeta:
    """Empty: dsv4 plans from the shapes, in every call."""


def get_mla_metadata(*_: Any, **__: Any) -> tuple[FlashMLASchedMeta, None]:
    """Return (an empty object, None), whatever the arguments are."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    *,
    kv_format: None = None,
    use_legacy: bool = True,
    enable_batch_invariant: bool = False,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Decode -> (out [b, s_q, h_q, 512], lse fp32 [b, h_q, s_q]).

    With ``indices``: q [b, s_q, h_q, 512] attends, in one softmax, to the rows of k_cache that indices int32 [b, s_q,
    topk] lists and to those of extra_k_cache in extra_indices_in_kvcache; -1 = nothing there. topk_length and
    extra_topk_length int32 [b]: only this many entries from the left are used. block_table and cache_seqlens are
    ignored. This is :func:`dsv4.v4_attention`.

    Without: dense, all ``cache_seqlens[n]`` rows of k_cache [blocks, rows, h_k, 512] (bf16 or fp16; both key and
    value) that block_table int32 [b, blocks] names; causal counts from the bottom right. This is
    :func:`dsv4.fmha_paged`, and accepts attn_sink too.

    use_legacy: False = each row's scales follow its data, in rows of 528 or 288 bytes. kv_format: must be None.
    tile_scheduler_metadata is ignored. enable_batch_invariant: a query gives the same bits in every batch.
    out, backend: as in dsv4.
    """
    checks.tensor("q", q, ("b", "s_q", "h_q", "d"), checks.FLOATS)
    b, s_q, heads, d = q.shape
    _width("q", d)
    if checks.whole(head_dim_v) != FP8_584.values:
        checks.fail("head_dim_v", checks.describe(head_dim_v), f"{FP8_584.values}")
    if num_splits is not None:
        checks.fail("num_splits", checks.describe(num_splits), "None, as get_mla_metadata gives it")
    for name, x in (
        ("causal", causal),
        ("is_fp8_kvcache", is_fp8_kvcache),
        ("enable_batch_invariant", enable_batch_invariant),
        ("use_legacy", use_legacy),
    ):
        checks.flag(name, x)
    if kv_format is not None:
        checks.fail("kv_format", checks.describe(kv_format), "None: rows of DeepSeek-V4 or V4.1")
    if out is not None:
        checks.output("out", out, q.shape, (q.dtype,), {"q": q})
    more: dict[str, Any] = dict(
        sink=attn_sink, softmax_scale=softmax_scale, deterministic=enable_batch_invariant, backend=backend
    )
    if indices is None:
        _absent(
            "None when indices is None",
            extra_k_cache=extra_k_cache,
            topk_length=topk_length,
            extra_indices_in_kvcache=extra_indices_in_kvcache,
            extra_topk_length=extra_topk_length,
        )
        if is_fp8_kvcache:
            checks.fail("is_fp8_kvcache", True, "False when indices is None: dense decode reads rows of q's dtype")
        return _dense(q, k_cache, block_table, cache_seqlens, causal=causal, out=out, **more)
    if causal:
        checks.fail("causal", True, "False with indices, which list what is seen")
    window = _pool("k_cache", k_cache, is_fp8_kvcache, use_legacy)
    lists = _lists("indices", indices, b, s_q)
    more["window_lengths"] = _lengths("topk_length", topk_length, b, s_q)
    if extra_k_cache is None:
        _absent(
            "None without extra_k_cache",
            extra_indices_in_kvcache=extra_indices_in_kvcache,
            extra_topk_length=extra_topk_length,
        )
    else:
        more["compressed"] = _pool("extra_k_cache", extra_k_cache, is_fp8_kvcache, use_legacy)
        more["compressed_indices"] = _lists("extra_indices_in_kvcache", extra_indices_in_kvcache, b, s_q)
        more["compressed_lengths"] = _lengths("extra_topk_length", extra_topk_length, b, s_q)
    flat = None if out is None else _one_query_per_row(out)
    with named(window="k_cache", **NAMES):
        result, lse = v4_attention(q.flatten(0, 1), window, lists, out=flat, return_lse=True, **more)
    return _decoded(result, lse, q, out)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = FP8_584.values,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    *,
    return_max_logits: bool = False,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute prefill -> (out [s_q, h_q, 512], max_logits fp32 [s_q, h_q] or None, lse fp32 [s_q, h_q]).

    q [s_q, h_q, 512], kv [s_kv, 1, 512]; indices int32 [s_q, 1, topk], where a number below 0, or s_kv and above, lists
    nothing; topk_length int32 [s_q].

    max_logits, the largest score of each query, is not a by-product here; on a CPU it costs about as much as the
    attention. It is None unless return_max_logits is set. A query that sees no key: out 0, max_logits -inf, lse +inf.
    """
    checks.tensor("q", q, ("s_q", "h_q", "d"), checks.FLOATS)
    s_q, heads, d = q.shape
    like = ("q", q)
    _width("q", d)
    if checks.whole(d_v) != FP8_584.values:
        checks.fail("d_v", checks.describe(d_v), f"{FP8_584.values}")
    checks.tensor("kv", kv, ("s_kv", 1, d), checks.FLOATS, like=like)
    checks.int32("indices", indices, (s_q, 1, "topk"), like)
    checks.flag("return_max_logits", return_max_logits)
    scale = checks.number("sm_scale", sm_scale)
    rows, lists = kv[:, 0], indices[:, 0]
    if checks.values_checked(lists):  # elsewhere the kernels do it
        lists = torch.where((lists >= 0) & (lists < rows.shape[0]), lists, -1)
    with named(window="kv", **NAMES):
        result, lse = v4_attention(
            q,
            rows,
            lists,
            window_lengths=topk_length,
            sink=attn_sink,
            softmax_scale=scale,
            return_lse=True,
            out=out,
            backend=backend,
        )
    largest = _max_logits(q, rows, lists, topk_length, scale) if return_max_logits else None
    return result, largest, _plus_inf(lse)


def _dense(
    q: Tensor, cache: Tensor, table: Tensor | None, lengths: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attend to all rows of each sequence."""
    if table is None or lengths is None:
        missing = "block_table" if table is None else "cache_seqlens"
        checks.fail(missing, None, "an int32 tensor when indices is None")
    with named(sink="attn_sink", k_pages="k_cache", v_pages="k_cache", lengths="cache_seqlens"):
        result, lse = fmha_paged(q, cache, cache, table, lengths, return_lse=True, **options)
    return result, _plus_inf(lse)


def _absent(accepted: str, **arguments: Any) -> None:
    for name, x in arguments.items():
        if x is not None:
            checks.fail(name, checks.describe(x), accepted)


def _width(name: str, d: int) -> None:
    if d == 576:
        checks.fail(
            name, "head dim 576 (DeepSeek-V3: keys of 576 columns, values of 512)", f"head dim {FP8_584.values}"
        )
    if d != FP8_584.values:
        checks.fail(name, f"head dim {d}", f"head dim {FP8_584.values}")


def _pool(name: str, x: Any, fp8: bool, planar: bool) -> Pool:
    if checks.is_tensor(x) and x.layout != torch.strided:
        checks.fail(name, f"layout {x.layout}", "a dense strided tensor")
    if not fp8:
        accepted = f"a tensor [blocks, rows, 1, {FP8_584.values}] of q's dtype, or is_fp8_kvcache=True"
        if not checks.is_tensor(x) or x.ndim != 4 or x.shape[2] != 1 or x.shape[3] != FP8_584.values:
            checks.fail(name, checks.describe(x), accepted)
        return x[:, :, 0]
    accepted = (
        f"one-byte elements [blocks, rows, 1, {FP8_584.row_bytes}] (DeepSeek-V4), {MXFP8_528.row_bytes} or "
        f"{NVFP4_288.row_bytes} (DeepSeek-V4.1), contiguous inside a block"
    )
    if not checks.is_tensor(x) or x.ndim != 4 or x.shape[2] != 1 or x.dtype not in FP8_DTYPES:
        checks.fail(name, checks.describe(x), accepted)
    if x.shape[3] in OTHER_ROWS:
        checks.fail(name, f"rows of {x.shape[3]} bytes ({OTHER_ROWS[x.shape[3]]})", accepted)
    cache, rows, interleaved = CACHES.get(x.shape[3], CACHES[FP8_584.row_bytes])
    if not planar and interleaved is None:
        checks.fail(name, f"rows of {x.shape[3]} bytes with use_legacy=False", "rows of 528 or 288 bytes there")
    with named(pages=name):
        return cache.from_pages(x, format=rows if planar else interleaved)


def _lists(name: str, x: Any, b: int, s_q: int) -> Tensor:
    """Reshape lists [b, s_q, topk] to [b * s_q, topk]; v4_attention checks the rest."""
    return checks.tensor(name, x, (b, s_q, "topk"), (torch.int32,), unit_last=False).flatten(0, 1)


def _lengths(name: str, x: Any, b: int, s_q: int) -> Tensor | None:
    """Repeat the length of each request for its queries."""
    if x is None:
        return None
    lengths = checks.tensor(name, x, (b,), (torch.int32,), unit_last=False)
    return lengths.repeat_interleave(s_q, output_size=b * s_q)


def _one_query_per_row(x: Tensor) -> Tensor:
    b, s_q = x.shape[:2]
    if x.numel() and b > 1 and s_q > 1 and x.stride(0) != s_q * x.stride(1):
        checks.fail("out", f"strides {list(x.stride())}", "a tensor whose first two dimensions can be viewed as one")
    return x.flatten(0, 1)


def _decoded(result: Tensor, lse: Tensor, q: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return results of v4_attention in FlashMLA's shapes."""
    b, s_q, heads, d = q.shape
    return result.view(b, s_q, heads, d) if out is None else out, _plus_inf(lse).view(b, s_q, heads).transpose(1, 2)


def _plus_inf(lse: Tensor) -> Tensor:
    """Replace -inf by +inf, in one kernel, in place unless autograd has saved the tensor. NaN stays NaN."""
    change = torch.nan_to_num if lse.requires_grad else torch.nan_to_num_
    return change(lse, nan=math.nan, posinf=math.inf, neginf=math.inf)


def _max_logits(q: Tensor, rows: Tensor, lists: Tensor, lengths: Tensor | None, scale: float) -> Tensor:
    """Return the largest score of each query and head; -inf where it sees nothing. It has no gradient."""
    q, rows = q.detach(), rows.detach()
    result = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    topk, count = lists.shape[1], rows.shape[0]
    if topk == 0 or count == 0:
        return result
    step = max(1, BLOCK_BYTES // (4 * topk * (q.shape[1] + q.shape[2])))
    for begin in range(0, q.shape[0], step):
        some = slice(begin, begin + step)
        listed = lists[some]
        visible = (listed >= 0) & (listed < count)
        if lengths is not None:
            visible &= torch.arange(topk, device=q.device) < lengths[some, None]
        keys = rows[torch.where(visible, listed, 0).long()].float()  # [n, topk, 512]
        scores = torch.bmm(q[some].float(), keys.mT) * scale
        result[some] = scores.masked_fill(~visible[:, None], float("-inf")).amax(-1)
    return result
