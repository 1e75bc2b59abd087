"""FLOPs of every operator, as torch.utils.flop_counter.FlopCounterMode counts them: two for a multiplication and an
addition of a matrix product, nothing else.

A pair of a query and a key that it sees costs 4 D per head forward; backward, the scores again, dP and each gradient
that is asked for cost 2 D. What is seen is read from lengths and lists. Where they have no values (meta and fake
tensors) a count is the most that the shapes allow.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def visible_pairs(t: int, s: int, left: int, right: int) -> int:
    """Count the pairs of t queries and s keys with i+s-t-left <= j <= i+s-t+right; -1 = no bound."""

    def clipped(shift: int) -> int:
        """Sum over i of i + shift, clipped to 0 .. s."""
        first, last = (min(max(x - shift, 0), t) for x in (0, s))
        return (first + last - 1 + 2 * shift) * (last - first) // 2 + (t - last) * s

    return (t * s if right < 0 else clipped(s - t + right + 1)) - (0 if left < 0 else clipped(s - t - left))


def _values(x: Tensor | None) -> Tensor | None:
    """Return x, or None if its values cannot be read."""
    return x if type(x) is Tensor and not x.is_meta else None


def _fmha_pairs(given: dict[str, Any]) -> int:
    """Count the visible pairs over all heads."""
    q = given["q"]
    left, right = given["window_left"], 0 if given["causal"] else given["window_right"]
    if given.get("cu_seqlens_q") is not None:
        cu_q, cu_k = (_values(given[f"cu_seqlens_{x}"]) for x in "qk")
        if cu_q is None or cu_k is None:
            return q.shape[0] * (given["max_seqlen_k"] or given["k"].shape[0]) * q.shape[1]
        sequences = zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True)
        return sum(visible_pairs(t, s, left, right) for t, s in sequences) * q.shape[1]
    t, heads = q.shape[1:3]
    if "k" in given:
        return q.shape[0] * visible_pairs(t, given["k"].shape[1], left, right) * heads
    lengths, most = _values(given["lengths"]), given["block_table"].shape[1] * given["k_pages"].shape[1]
    each = [most] * q.shape[0] if lengths is None else lengths.tolist()
    return sum(visible_pairs(t, s, left, right) for s in each) * heads


def _listed(indices: Tensor, lengths: Tensor | None) -> int:
    """Count the entries of lists that name a row."""
    indices_, lengths_ = _values(indices), _values(lengths)
    if indices_ is None or lengths is not None and lengths_ is None:
        return indices.numel()
    there = indices_ >= 0
    if lengths_ is not None:
        there &= torch.arange(indices.shape[1], device=indices.device) < lengths_[:, None]
    return int(there.sum())


def _v4_rows(given: dict[str, Any]) -> tuple[int, int]:
    """Count the rows of both pools that queries see, over all queries."""
    pool, table = given["compressed"], given["compressed_block_table"]
    window = _listed(given["window_indices"], given["window_lengths"])
    if given["compressed_indices"] is not None:
        return window, _listed(given["compressed_indices"], given["compressed_lengths"])
    if table is None:
        return window, 0
    lengths, starts = _values(given["compressed_lengths"]), _values(given["request_starts"])
    if lengths is None:
        page = given["compressed_rows_per_page"] or (pool.shape[1] if pool.ndim == 3 else 1)
        return window, given["q"].shape[0] * table.shape[1] * page
    return window, int(lengths[: len(table) if starts is None else int(starts[-1])].sum())  # others see nothing


def _index_pairs(given: dict[str, Any]) -> int:
    q, k, table = given["q"], given["k"], given["block_table"]
    most = k.shape[-2] if table is None else table.shape[1] * k.shape[-2]
    positions, lengths = _values(given["positions"]), _values(given["lengths"])
    if positions is not None:
        lengths = (positions + 1) // given["ratio"]
    queries = q.shape[:-2].numel()
    if (blocks := given.get("blocks")) is not None:
        most = min(most, blocks.shape[-1] * 8)
    return (queries * most if lengths is None else int(lengths.clamp(0, most).sum())) * q.shape[-2]


def _fmha_backward(given: dict[str, Any]) -> int:
    q, k, v, _ = given["asked"]
    products = (q or k or v) + (q or k) + q + k + v
    return 2 * products * _fmha_pairs(given) * given["q"].shape[-1]


def _v4_backward(given: dict[str, Any]) -> int:
    (window, compressed), (q, of_window, of_compressed, _) = _v4_rows(given), given["asked"]
    rows = (q or of_window or of_compressed) * 2 * (window + compressed) + q * (window + compressed)
    rows += of_window * 2 * window + of_compressed * 2 * compressed  # a row is key and value
    return 2 * rows * given["q"].shape[1:].numel()


def _index_loss(given: dict[str, Any]) -> int:
    q, attention_q = given["q"], given["attention_q"]
    per_row = q.shape[1] * q.shape[2] + attention_q.shape[1] * attention_q.shape[2]
    return 2 * given["indices"].numel() * per_row


def _mlps(given: dict[str, Any]) -> tuple[int, int]:
    """Count the multiplications of one of an MLP's three matrices: by experts, and by the shared expert."""
    (tokens, hidden), w2 = given["x"].shape, given["w2"]
    inner = w2.shape[2] * (1 if given["format"] == "bf16" else 128)
    shared = 0 if given["shared_w2"] is None else tokens * given["shared_w2"].numel()
    return _listed(given["ids"], None) * hidden * inner, shared


def _moe_backward(given: dict[str, Any]) -> int:
    x, w13, w2, weights, shared_w13, shared_w2 = given["asked"]
    experts, shared = _mlps(given)
    count = experts * (3 + 2 * x + 2 * w13 + w2) if x or w13 or w2 or weights else 0  # gate, up and dh, then gradients
    return 2 * (count + (shared * (3 + 2 * x + 2 * shared_w13 + shared_w2) if x or shared_w13 or shared_w2 else 0))


FORMULAS = {
    ("moe", "moe_out", "moe_training"): lambda given: 6 * sum(_mlps(given)),
    ("moe_backward",): _moe_backward,
    ("moe_route", "moe_route_out"): lambda given: 2 * given["x"].shape[0] * given["gate"].numel(),
    ("fmha", "fmha_out", "fmha_varlen", "fmha_varlen_out", "fmha_paged", "fmha_paged_out", "fmha_training"): (
        lambda given: 4 * _fmha_pairs(given) * given["q"].shape[-1]
    ),
    ("fmha_backward",): _fmha_backward,
    ("v4_attention", "v4_attention_out", "v4_attention_training"): (
        lambda given: 4 * sum(_v4_rows(given)) * given["q"].shape[1:].numel()
    ),
    ("v4_attention_backward",): _v4_backward,
    ("index_topk", "index_topk_out", "index_blocks", "index_blocks_out"): (
        lambda given: 2 * _index_pairs(given) * given["q"].shape[-1] * (1 if given["q_scales"] is None else 2)
    ),
    ("index_loss_training",): _index_loss,
    ("index_loss_backward",): lambda given: 6 * given["indices"].numel() * given["q"].shape[1:].numel(),
    # no matrix products
    (
        "compress_training",
        "compress_backward",
        "merge_states_training",
        "merge_states_backward",
        "quantize_mxfp8",
        "write_rows",
    ): lambda given: 0,
}


def register() -> None:
    """Register the formulas, once all operators exist."""
    for names, count in FORMULAS.items():
        for name in names:
            packet = getattr(torch.ops.dsv4, name)
            defaults = {a.name: a.default_value for a in packet.default._schema.arguments}

            def formula(*args: Any, out_val: Any = None, defaults=defaults, count=count, **kwargs: Any) -> int:
                return count(defaults | dict(zip(defaults, args)) | kwargs)

            register_flop_formula(packet, get_raw=True)(formula)
