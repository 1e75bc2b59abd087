"""The caches, the indexer, the attention and the experts of DeepSeek-V4.1 in plain torch: the oracle.

Rows are tensors that hold rounded values, and every query is compared with every row; masks hide the others. Nothing
here calls an operation of dsv4 or knows its formats. :class:`dsv4.integrations.deepseek_v41.packed.Packed` has the same
methods.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from .configuration import DeepseekV41Config
from .weights import fp4_16, fp4_32, fp8_32, product, wide


class Eager:
    """What the layers keep of the tokens so far, of sequences of one length: B of them, T tokens in a call.

    tokens     before this call
    window     by layer: rows [B, tokens, 512]
    open       by source layer: (kv, gate) [B, n, 512] of the tokens that no row holds yet
    rows, keys by source layer: compressed rows [B, m, 512] and index keys [B, m, 128]
    chosen     by the last layer that chose: bool [B, T, m]
    kept       by the candidate source: bool [B, T, m]
    ids        of all tokens, if there are n-grams: [B, tokens]
    """

    def __init__(self, config: DeepseekV41Config, batch: int, device: torch.device) -> None:
        self.config, self.batch, self.device = config, batch, device
        self.tokens = 0
        self.window: dict[int, Any] = {}
        self.open: dict[int, Any] = {}
        self.rows: dict[int, Any] = {}
        self.keys: dict[int, Any] = {}
        self.chosen: Tensor
        self.kept: Tensor
        self.ids = torch.empty(batch, 0, dtype=torch.int64, device=device)

    def get_seq_length(self) -> int:
        """Return the number of tokens, under the name that transformers uses."""
        return self.tokens

    def add_window(self, layer: int, rows: Tensor) -> None:
        """Add rows [B, T, 512] of the tokens, RoPE applied."""
        _append(self.window, layer, fp8_32(rows))

    def compress(self, layer: int, kv: Tensor, gate: Tensor | None, norm: Any, dtype: torch.dtype) -> Tensor:
        """Return the rows [B, n, 512] that the tokens finish, normed, without RoPE."""
        ratio = self.config.compress_ratios[layer]
        if gate is None:
            return norm(kv)
        if layer in self.open:
            kv, gate = (torch.cat([old, new], 1) for old, new in zip(self.open[layer], (kv, gate)))
        n = kv.shape[1] // ratio * ratio
        self.open[layer] = kv[:, n:], gate[:, n:]
        kv, gate = (x[:, :n].unflatten(1, (-1, ratio)) for x in (kv, gate))
        return norm((kv * gate.softmax(2)).sum(2).to(dtype))

    def add_rows(self, layer: int, rows: Tensor, keys: Tensor) -> None:
        """Add compressed rows [B, n, 512] and index keys [B, n, 128], RoPE applied."""
        _append(self.rows, layer, fp4_16(rows))
        _append(self.keys, layer, fp4_32(keys))

    def seen(self, layer: int, t: int) -> Tensor:
        """Return the number of compressed rows that each of T tokens sees, [T]."""
        return (torch.arange(self.tokens, self.tokens + t, device=self.device) + 1) // self.config.compress_ratios[
            layer
        ]

    def choose(self, layer: int, q: Tensor, weights: Tensor) -> None:
        """Choose the rows with the best scores. q: [B, T, H, 128] after RoPE; weights: [B, T, H]."""
        c = self.config
        keys = self.keys[c.source_of(layer)]
        score = torch.einsum("bthd,bmd->bthm", fp4_32(q).to(wide(q.dtype)), keys.to(wide(q.dtype))).to(q.dtype)
        score = (score.relu() * weights[..., None]).sum(2)  # [B, T, m]
        seen = self.seen(layer, q.shape[1])[:, None]  # [T, 1]
        hidden = torch.arange(keys.shape[1], device=self.device) >= seen
        score = score.masked_fill(hidden, -torch.inf)
        if layer == c.candidate_source_layer_id:
            self.kept = self._blocks(score, seen)
        elif 0 <= c.candidate_source_layer_id < layer:
            score = score.masked_fill(~self.kept, -torch.inf)
        self.chosen = _best(score, c.index_topk)

    def _blocks(self, score: Tensor, seen: Tensor) -> Tensor:
        """Return which rows [B, T, m] are in the best blocks; the block of the newest row is always among them."""
        size, m = self.config.candidate_block_size, score.shape[-1]
        best = pad(score, (0, -m % size), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
        newest = torch.arange(best.shape[-1], device=self.device) == (seen - 1).div(size, rounding_mode="floor")
        kept = _best(best.masked_fill(newest, torch.inf), self.config.candidate_topk_blocks)
        return kept.repeat_interleave(size, -1)[..., :m]

    def attend(self, layer: int, q: Tensor, sink: Tensor) -> Tensor:
        """Attend from queries [B, T, H, 512] -> the same shape, before the inverse RoPE."""
        rows, t = self.window[layer], q.shape[1]
        distance = torch.arange(self.tokens, self.tokens + t, device=self.device)[:, None]
        distance = distance - torch.arange(rows.shape[1], device=self.device)
        mask = ((distance >= 0) & (distance < self.config.sliding_window)).expand(self.batch, -1, -1)
        if self.config.compress_ratios[layer]:
            rows = torch.cat([rows, self.rows[self.config.source_of(layer)]], 1)
            mask = torch.cat([mask, self.chosen], 2)
        rows = rows.to(wide(q.dtype))
        score = torch.einsum("bthd,bnd->bthn", q.to(rows.dtype), rows) * self.config.head_dim**-0.5
        score = score.masked_fill(~mask[:, :, None], -torch.inf)
        sink = sink.to(score.dtype).expand(*score.shape[:3]).unsqueeze(-1)
        p = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
        return torch.einsum("bthn,bnd->bthd", p, rows).to(q.dtype)

    @staticmethod
    def experts(ffn: Any, x: Tensor) -> Tensor:
        """Return the experts [N, D] of a layer, with its shared expert."""
        c = ffn.config
        score = softplus(product(x.to(wide(x.dtype)), ffn.gate.weight)).sqrt()
        ids = (score + ffn.gate.bias).sort(dim=-1, descending=True, stable=True).indices[:, : c.num_experts_per_tok]
        weights = score.gather(1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        out = _expert(ffn.shared_experts, x, torch.ones_like(weights[:, :1]), c.swiglu_limit).to(weights.dtype)
        for e in ids.unique().tolist():
            token, slot = (ids == e).nonzero(as_tuple=True)
            made = _expert(ffn.experts[e], x[token], weights[token, slot, None], c.swiglu_limit)
            out.index_add_(0, token, made.to(out.dtype))
        return out.to(x.dtype)


def _expert(expert: Any, x: Tensor, weight: Tensor, limit: float) -> Tensor:
    gate = expert.w1(x).to(weight.dtype).clamp(max=limit)
    up = expert.w3(x).to(weight.dtype).clamp(-limit, limit)
    return expert.w2((silu(gate) * up * weight).to(x.dtype))


def _append(to: dict[int, Any], layer: int, more: Tensor) -> None:
    to[layer] = torch.cat([to[layer], more], 1) if layer in to else more


def _best(score: Tensor, count: int) -> Tensor:
    """Return the places of the greatest scores, of equal ones the first; never where the score is -inf."""
    order = score.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, order, True) & (score > -torch.inf)
