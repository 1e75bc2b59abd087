"""The caches, the indexer, the attention and the experts of DeepSeek-V4.1 by dsv4's operations.

Rows are bytes: 528 in the window, 288 compressed, 68 for an index key. The methods are those of
:class:`dsv4.integrations.deepseek_v41.eager.Eager`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import dsv4
from dsv4.caches.formats import RowFormat
from dsv4.caches.index_keys import IndexCache, quantize_queries_fp4
from dsv4.caches.mxfp4_keys import INDEX_68
from dsv4.index.sizes import BLOCK
from dsv4.runtime import checks

from .configuration import DeepseekV41Config
from .eager import Eager

WINDOW_PAGE, PAGE = 32, 64


class Rows:
    """Packed rows of B sequences of one length. Sequence b has the pages b * pages .. (b + 1) * pages - 1."""

    def __init__(self, cls: type, batch: int, page: int, device: torch.device, format: RowFormat | None = None) -> None:
        self.pool = cls.empty(batch, page, device=device, format=format)  # type: ignore[attr-defined]
        self.batch, self.page, self.length = batch, page, 0

    @property
    def pages(self) -> int:
        """The number of pages of a sequence."""
        return self.pool.pages // self.batch

    def append(self, rows: Tensor) -> None:
        """Append rows [B, n, values]."""
        length = self.length + rows.shape[1]
        if length > self.pages * self.page:
            old = self.pool.storage.view(self.batch, -1)
            more = max(self.pages, -(-length // self.page) - self.pages) * self.pool.page_stride
            self.pool = self.pool.with_storage(torch.nn.functional.pad(old, (0, more)).flatten())
        if rows.shape[1]:
            slots = self.numbers(torch.arange(self.length, length, device=rows.device).expand(self.batch, -1))
            self.pool.write(slots.flatten(), rows.flatten(0, 1))
        self.length = length

    def numbers(self, places: Tensor) -> Tensor:
        """Convert places [B, ...] in the sequences to row numbers of the pool, int32; less than 0 becomes -1."""
        first = torch.arange(self.batch, device=places.device) * (self.pages * self.page)
        return torch.where(places >= 0, places + first.view(-1, *(1,) * (places.ndim - 1)), -1).int()

    def table(self) -> Tensor:
        """Return the pages of every sequence, int32 [B, pages]."""
        return torch.arange(self.pool.pages, dtype=torch.int32, device=self.pool.device).view(self.batch, -1)


class Packed(Eager):
    """window, rows, keys: :class:`Rows` by layer; chosen: row numbers [B * T, k]; kept: blocks [B * T, blocks]; open:
    states of dsv4.compress."""

    def __init__(self, config: DeepseekV41Config, batch: int, device: torch.device) -> None:
        super().__init__(config, batch, device)
        if config.head_dim != 512 or config.index_head_dim != 128:
            checks.fail("head_dim, index_head_dim", (config.head_dim, config.index_head_dim), "512, 128")
        if config.candidate_source_layer_id >= 0 and config.candidate_block_size != BLOCK:
            checks.fail("candidate_block_size", config.candidate_block_size, f"{BLOCK} with attn_implementation='dsv4'")

    def add_window(self, layer: int, rows: Tensor) -> None:
        if layer not in self.window:
            self.window[layer] = Rows(dsv4.Mxfp8Cache, self.batch, WINDOW_PAGE, self.device)
        self.window[layer].append(rows)

    def compress(self, layer: int, kv: Tensor, gate: Tensor | None, norm: Any, dtype: torch.dtype) -> Tensor:
        ratio = self.config.compress_ratios[layer]
        rows, self.open[layer] = dsv4.compress(
            kv, gate, None, norm.weight, ratio=ratio, state=self.open.get(layer), eps=norm.eps, dtype=dtype
        )
        return rows

    def add_rows(self, layer: int, rows: Tensor, keys: Tensor) -> None:
        if layer not in self.rows:
            self.rows[layer] = Rows(dsv4.Nvfp4Cache, self.batch, PAGE, self.device)
            self.keys[layer] = Rows(IndexCache, self.batch, PAGE, self.device, INDEX_68)
        self.rows[layer].append(rows)
        self.keys[layer].append(keys)

    def choose(self, layer: int, q: Tensor, weights: Tensor) -> None:
        c, t = self.config, q.shape[1]
        keys = self.keys[c.source_of(layer)]
        codes, scales = quantize_queries_fp4(q.flatten(0, 1))
        given: dict[str, Any] = dict(
            q_scales=scales,
            lengths=self.seen(layer, t).repeat(self.batch).int(),
            block_table=keys.table(),
            request_starts=torch.arange(self.batch + 1, device=self.device, dtype=torch.int32) * t,
            scale=1.0,
            bf16_scores=q.dtype == torch.bfloat16,
        )
        call = codes, keys.pool, weights.flatten(0, 1), c.index_topk
        if layer == c.candidate_source_layer_id:
            self.chosen, self.kept = dsv4.index_blocks(*call, c.candidate_topk_blocks, **given)
            return
        blocks = self.kept if 0 <= c.candidate_source_layer_id < layer else None
        self.chosen = dsv4.index_topk(*call, blocks=blocks, **given)

    def attend(self, layer: int, q: Tensor, sink: Tensor) -> Tensor:
        window, t = self.window[layer], q.shape[1]
        last = torch.arange(self.tokens, self.tokens + t, device=self.device)[:, None]
        places = last - torch.arange(self.config.sliding_window, device=self.device)
        lists = window.numbers(places.expand(self.batch, -1, -1)).flatten(0, 1)
        more: tuple[Any, ...] = ()
        if self.config.compress_ratios[layer]:
            more = self.rows[self.config.source_of(layer)].pool, self.chosen
        return dsv4.v4_attention(q.flatten(0, 1), window.pool, lists, *more, sink=sink.float()).view_as(q)

    @staticmethod
    def experts(ffn: Any, x: Tensor) -> Tensor:
        c = ffn.config
        ids, weights = dsv4.moe_route(
            x, ffn.gate.weight, bias=ffn.gate.bias.float(), topk=c.num_experts_per_tok, scale=c.routed_scaling_factor
        )
        shared = ffn.shared_experts
        gate_up = torch.cat([shared.w1.numbers(x.dtype), shared.w3.numbers(x.dtype)])
        return dsv4.moe(
            x,
            ffn.packed(),
            ids,
            weights,
            activations="fp8_32",
            limit=c.swiglu_limit,
            shared=(gate_up, shared.w2.numbers(x.dtype)),
        )
