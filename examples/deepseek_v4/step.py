"""One step of a model with paged caches: what its layers do for all tokens of all requests at once.

The tokens are laid end to end, request after request. Everything that a layer needs to know about places is computed
once per step, on the device, from a few numbers (paging.Upload): no layer waits for the device, and no shape depends on
a value that only the device knows. A step of one token per request has the same shapes whatever the lengths: it can be
captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4.caches import kv as caches
from dsv4.caches.kv import Pool
from dsv4.compress.forward import pooled
from dsv4.elementwise import Kernels
from dsv4.index.api import index_topk
from dsv4.runtime.plan import Plan
from dsv4.v4.api import v4_attention

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"


def projections(layer: Any) -> list[Any]:
    """Return the linear maps of a layer's input: queries, window row; of the compressor values and gates; of the
    indexer these two and the weights of its heads."""
    found = [layer.q_a_proj, layer.kv_proj]
    if layer.compressor is not None:
        found += [layer.compressor.kv_proj, layer.compressor.gate_proj]
        if layer.layer_type == CSA:
            indexer = layer.compressor.indexer
            found += [indexer.kv_proj, indexer.gate_proj, indexer.scorer.weights_proj]
    return found


class Rows:
    """The rows that the compressors of one kind make in a step, from tokens of the step and of their states.

    The state of a request are its last `ring` tokens, token t at place t % ring of its line.
    """

    def __init__(
        self, step: Step, ratio: int, overlap: bool, owners: Tensor, numbers: Tensor, kept: Tensor | None = None
    ):
        """owners, numbers [W]: the requests of the rows, and which rows of these; kept [K]: the tokens that go into
        the states when the step has succeeded; None = all of them, at once."""
        self.overlap, self.kept = overlap, kept
        ring = ratio * (1 + overlap)
        self.slot = step.positions % ratio  # of each token in its window
        self.visible = ((step.positions + 1) // ratio).int()  # rows that each token sees
        self.places = step.lines[step.owner] * ring + step.positions % ring  # of each token in the states
        # For each row: its number, and of its request the line, the tokens before the step, the first token in it.
        self.numbers, self.lines, self.begins = numbers, step.lines[owners], step.begins[owners]
        self.starts = step.starts[owners].long()
        per_page = step.page_tokens // ratio
        page = step.table[owners, numbers // per_page].long()
        finished = (numbers + 1) * ratio <= step.ends[owners]
        self.targets = torch.where(finished, page * per_page + numbers % per_page, -1)
        self.rope = numbers * ratio
        if step.parts.kernels:
            return
        # Without the kernel, the slots of a row as numbers: in the state, or tokens of the step. Before the first
        # window there is none, and some token has no weight. Unfinished rows go to the page that no request has.
        # tokens: [W, slots]
        tokens = numbers[:, None] * ratio + torch.arange(-ratio if overlap else 0, ratio, device=numbers.device)
        begins = self.begins[:, None]
        self.missing = (tokens < 0)[..., None]
        self.old = (tokens < begins)[..., None] & ~self.missing
        self.in_state = self.lines[:, None] * ring + tokens % ring
        self.in_step = (self.starts[:, None] + tokens - begins).clamp(0, len(step.positions) - 1)
        self.targets = torch.where(finished, self.targets, step.spare_page * per_page)


class Step:
    """The tokens of one step. transformers treats it as its cache, and passes it to every attention layer.

    positions int64 [N]: token numbers in their sequences; starts int32 [R + 1]: first token of each request; lines
    int64 [R]; table, windows int32 [R, ...]: page numbers of the requests.
    made: for each kind of compressor (requests, numbers, kept) as in Rows; None: every request has one token.
    """

    def __init__(
        self, model: Any, positions: Tensor, starts: Tensor, lines: Tensor, table: Tensor, windows: Tensor,
        made: dict[str, tuple[Tensor, Tensor, Tensor]] | None = None, plans: dict[str, Plan] | None = None,
    ):  # fmt: skip
        places, device, n = model.places, positions.device, len(positions)
        self.model, self.parts, self.plans = model, model.parts, plans or {}
        self.positions, self.starts, self.lines, self.table = positions, starts, lines, table
        self.page_tokens, self.spare_page = places.page_tokens, places.spare_page
        if made is None:
            self.owner = torch.arange(n, device=device)
            self.begins, self.ends = positions, positions + 1
        else:
            self.owner = torch.searchsorted(starts, torch.arange(n, device=device, dtype=torch.int32), right=True) - 1
            self.begins = positions[starts[:-1].long()]
            self.ends = positions[starts[1:].long() - 1] + 1
        # Window rows, as numbers of the pool: of each token, and of the window up to it.
        page = places.window_page
        seen = positions[:, None] - torch.arange(places.window, device=device)  # [N, window]
        pages = windows[self.owner[:, None], (seen // page) % windows.shape[1]]
        rows = pages * page + (seen % page).int()
        self.window_rows = torch.where(seen >= 0, rows, -1)
        self.window_slots = rows[:, 0].long()
        self.rows = {}
        for kind, ratio in model.ratios.items():
            which = (self.owner, positions // ratio) if made is None else made[kind]
            self.rows[kind] = Rows(self, ratio, kind == CSA, *which)
        self.late: list[tuple[Tensor, Tensor, Tensor]] = []  # states to be written when the step has succeeded
        streams = model.model.config.hc_mult
        self.dsv4_layer = self._layer if self.parts.kernels and streams & (streams - 1) == 0 else None

    def _layer(self, layer: Any, hidden: Tensor, input_ids: Tensor) -> Tensor:
        """Replace DeepseekV4DecoderLayer.forward: streams [1, N, H, hidden] -> the same, with fewer and larger
        kernels.
        """
        streams, parts = hidden[0], self.parts
        assert isinstance(parts, Kernels)
        weights, x = parts.collapse(streams, layer.attn_hc, layer.input_layernorm)
        y = self.dsv4_attention(layer.self_attn, x[None])
        streams = parts.spread(streams, y[0], weights)
        weights, x = parts.collapse(streams, layer.ffn_hc, layer.post_attention_layernorm)
        y = layer.mlp(x[None], input_ids=input_ids)
        return parts.spread(streams, y[0], weights)[None]

    def dsv4_attention(self, layer: Any, hidden: Tensor) -> Tensor:
        """Replace DeepseekV4Attention.forward: [1, N, hidden] -> [1, N, hidden]."""
        x, pools, parts = hidden[0], self.model.pools[layer.layer_idx], self.parts
        cos_sin = self.model.tables[layer.rope_layer_type]
        n = x.shape[0]
        low, row, *others = (project(x) for project in projections(layer))
        low = parts.norm(low, layer.q_a_norm)
        q = parts.turned(layer.q_b_proj(low).view(n, layer.num_heads, -1), cos_sin, self.positions, layer.q_b_norm.eps)
        parts.store(pools["window"], self.window_slots, row, layer.kv_norm, cos_sin, self.positions)
        options: dict[str, Any] = {}
        if layer.compressor is not None:
            rows = self.rows[layer.layer_type]
            states = pools["compressed states"]
            self._compress(layer.compressor, rows, others[0], others[1], pools["compressed"], states, cos_sin)
            if layer.layer_type == CSA:
                indexer = layer.compressor.indexer
                self._compress(indexer, rows, others[2], others[3], pools["index"], pools["index states"], cos_sin)
                options["compressed_indices"] = self._choose(indexer, low, others[4], pools["index"], cos_sin)
            else:
                options["compressed_block_table"] = self.table
                options["compressed_lengths"] = rows.visible
                options["request_starts"] = self.starts
            options["compressed"] = pools["compressed"]
        out = v4_attention(
            q, pools["window"], self.window_rows, sink=layer.sinks.detach().float(), softmax_scale=layer.scaling,
            inverse_rope=(cos_sin, self.positions), backend=self.model.backend,
            plan=self.plans.get(layer.layer_type), **options,
        )  # fmt: skip
        grouped = layer.o_a_proj(out.reshape(1, n, layer.config.o_groups, -1)).flatten(2)
        return layer.o_b_proj(grouped)

    def _compress(
        self, part: Any, rows: Rows, kv: Tensor, gate: Tensor, pool: Pool, states: tuple[Tensor, Tensor],
        cos_sin: Tensor,
    ) -> None:  # fmt: skip
        """Store the rows that these tokens finish in the pool, and the tokens in the states, when it is time."""
        kept = rows.kept
        if isinstance(self.parts, Kernels):
            self.parts.compress(pool, states, kv, gate, part, cos_sin, rows, self.positions)
            if kept is not None:
                kv, gate = kv[kept].float(), gate[kept].float() + part.position_bias.float()[rows.slot[kept]]
        else:
            kv, gate = kv.float(), gate.float() + part.position_bias.float()[rows.slot]
            value, logit = (
                torch.where(rows.old, state[rows.in_state], new[rows.in_step]) for state, new in zip(states, (kv, gate))
            )  # [W, slots, width]
            logit = logit.masked_fill(rows.missing, float("-inf"))
            if rows.overlap:
                value, logit = (_halves(s) for s in (value, logit))
            made = pooled(value, logit, part.kv_norm.weight, part.kv_norm.variance_epsilon, cos_sin, rows.rope)
            caches.write_rows(pool, rows.targets, made)
            if kept is None:  # a token replaces one that no later row is made of
                for state, new in zip(states, (kv, gate)):
                    state.index_copy_(0, rows.places, new)
            else:
                kv, gate = kv[kept], gate[kept]
        if kept is not None:
            self.late += [(state, rows.places[kept], new) for state, new in zip(states, (kv, gate))]

    def _choose(self, indexer: Any, low: Tensor, weights: Tensor, pool: Tensor, cos_sin: Tensor) -> Tensor:
        """Return the rows of the compressed pool that each token reads, int32 [N, k]."""
        n, rate = low.shape[0], indexer.compress_rate
        q = self.parts.turned(indexer.q_b_proj(low).view(n, indexer.num_heads, -1), cos_sin, self.positions)
        chosen = index_topk(
            q, pool, weights, indexer.index_topk, positions=self.positions, ratio=rate, block_table=self.table,
            request_starts=self.starts, backend=self.model.backend,
        )  # fmt: skip
        assert isinstance(chosen, Tensor)
        return chosen

    def commit(self) -> None:
        """Advance the states after a successful step."""
        for state, places, rows in self.late:
            state.index_copy_(0, places, rows)


def _halves(x: Tensor) -> Tensor:
    """Select halves [W, 2m, 2d] -> [W, 2m, d]: the first of the previous window's m tokens, the second of its own."""
    m, d = x.shape[1] // 2, x.shape[2] // 2
    return torch.cat([x[:, :m, :d], x[:, m:, d:]], 1)
