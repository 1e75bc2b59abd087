"""SGLang's dense attention on dsv4.fmha_paged: ``--attention-backend dsv4_gluon``.

Head dims 64, 128, 256 and 512, GQA, sliding windows with a pool of their own (Gemma 4), sinks (gpt-oss), any
``--page-size``; on a GPU 64 or more, for keys are copied page by page. Decode steps are captured in CUDA graphs: the
block table is made inside the graph, from SGLang's own tables. FP8 caches are e4m3, with the scales of each layer.
It rejects, by name, an e5m2 or FP4 cache, softcap, encoders, cross attention, speculative decoding, MLA models and
prefill in a full CUDA graph.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

import dsv4
from dsv4.integrations import sglang as plugin
from dsv4.integrations.flash_attn import flash_attn_varlen_func
from dsv4.integrations.sglang import calls, logger
from dsv4.runtime import checks

# DSV4_SGLANG=0 would not help: the backend's name would be unknown.
refuse = functools.partial(plugin.refuse, instead="Another --attention-backend")

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)  # fp32 on a CPU alone


@dataclass
class Metadata:
    lengths: Tensor  # int32 [B], of keys
    table: Tensor  # int32 [B, pages]
    window_table: Tensor  # pages for layers with a window; the same table if they share the pool
    window_slots: Tensor | None  # slots for the new keys of those layers, if these have a separate pool
    starts: Tensor | None = None  # int32 [B + 1] of queries; None: one query for each sequence
    ends: Tensor | None = None  # int32 [B + 1] of keys
    longest_query: int = 1
    longest: int = 0


class Backend(AttentionBackend):
    def __init__(self, runner: Any) -> None:
        super().__init__()
        if runner.use_mla_backend:
            refuse("--attention-backend", "dsv4_gluon for an MLA model", "dense models; DeepSeek-V4 needs no name")
        if runner.model_config.is_encoder_decoder:
            refuse("the model", "an encoder and a decoder", "decoders")
        if runner.server_args.speculative_algorithm is not None:
            refuse("--speculative-algorithm", runner.server_args.speculative_algorithm, "none")
        self.pool = runner.token_to_kv_pool
        if self.pool.dtype not in DTYPES:
            refuse("--kv-cache-dtype", self.pool.dtype, "auto, bfloat16, float16, fp8_e4m3")
        self.fp8 = self.pool.dtype == torch.float8_e4m3fn
        self.places = runner.req_to_token_pool.req_to_token  # int32 [requests, tokens], slots
        self.page = runner.page_size or 1
        self.widest = -(-runner.model_config.context_len // self.page)
        self.two_pools = isinstance(self.pool, SWAKVPool) and self.pool.swa_layer_nums > 0
        logger.info("dense attention: dsv4, pages of %d", self.page)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a step outside of CUDA graphs, where the host knows the lengths."""
        b = forward_batch
        longest = int(b.seq_lens_cpu.max()) if b.batch_size else 0
        m = self._metadata(b, -(-longest // self.page))
        if not b.forward_mode.is_decode_or_idle():
            _refuse_mode(b)
            m.starts, m.ends = (
                torch.nn.functional.pad(n.cumsum(0, dtype=torch.int32), (1, 0)) for n in (b.extend_seq_lens, b.seq_lens)
            )
            m.longest_query, m.longest = max(b.extend_seq_lens_cpu, default=0), longest
        self.forward_metadata = m

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Do nothing: what a graph needs is allocated while it is captured."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        _refuse_mode(forward_batch)
        if not forward_batch.forward_mode.is_decode_or_idle():
            refuse("CUDA graphs of prefill", "full", "breakable, piecewise or none")

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Prepare a step that is recorded: shapes do not depend on lengths."""
        self.forward_metadata = self._metadata(forward_batch, self.widest)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Attend from q [B, Hq D], one token of each sequence -> [B, Hq D]."""
        m, (query, out, pages, table, window) = self._prepare(q, k, v, layer, forward_batch, save_kv_cache, options)
        dsv4.fmha_paged(
            query[:, None],
            *pages,
            table,
            m.lengths,
            causal=True,
            window=window,
            softmax_scale=layer.scaling,
            sink=None if sinks is None else sinks.float(),
            out=out[:, None],
            **self._scales(layer),
        )
        calls["dense decode"] += 1
        return out.flatten(1)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Attend from q [N, Hq D], the new tokens of all sequences end to end; their prefixes are in the pages."""
        m, (query, out, pages, table, window) = self._prepare(q, k, v, layer, forward_batch, save_kv_cache, options)
        assert m.starts is not None and m.ends is not None
        made = flash_attn_varlen_func(
            query,
            *pages,
            m.starts,
            m.ends,
            m.longest_query,
            m.longest,
            softmax_scale=layer.scaling,
            causal=True,
            window_size=window,
            block_table=table,
            learnable_sink=sinks,
            **self._scales(layer),
        )
        assert isinstance(made, Tensor)
        calls["dense prefill"] += 1
        return made.flatten(1)

    def _scales(self, layer: Any) -> dict[str, Any]:
        """Return the scales of an FP8 cache. A layer may have none."""
        if not self.fp8:
            return {}
        found = (getattr(layer, name, None) for name in ("k_scale", "v_scale"))
        k_scale, v_scale = (None if x is None else x.detach().float() for x in found)
        return dict(k_scale=k_scale, v_scale=v_scale)

    def _metadata(self, b: Any, pages: int) -> Metadata:
        slots = self.places[b.req_pool_indices, : pages * self.page : self.page]  # slots of the first row of each page
        table, window_table, window_slots = slots // self.page, None, None
        if self.two_pools:
            # A key that has left the window has no slot any more; it is not read.
            found = self.pool.translate_loc_from_full_to_swa(slots)
            window_table = (found // self.page).clamp_min(0).int()
            window_slots = self.pool.translate_loc_from_full_to_swa(b.out_cache_loc)
        return Metadata(b.seq_lens.int(), table, table if window_table is None else window_table, window_slots)

    def _prepare(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, b: Any, save: bool, options: dict[str, Any]
    ) -> tuple[Metadata, tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor, tuple[int, int]]]:
        """Write new keys and values to the pages; return what both calls need."""
        _refuse_layer(layer, options)
        m = self.forward_metadata
        assert isinstance(m, Metadata)
        if save and k is not None:
            # The pool divides by the scales; it writes keys unchanged to a 16-bit cache.
            self.pool.set_kv_buffer(
                layer, KVWriteLoc(b.out_cache_loc, m.window_slots), k, v, *self._scales(layer).values()
            )
        query = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        found = (f(layer.layer_id) for f in (self.pool.get_key_buffer, self.pool.get_value_buffer))
        keys, values = (x.view(-1, self.page, *x.shape[1:]) for x in found)
        left = layer.sliding_window_size  # SGLang does not count the query itself
        table = m.table if left < 0 else m.window_table
        return m, (query, torch.empty_like(query), (keys, values), table, (left if left >= 0 else -1, 0))


def _refuse_mode(b: Any) -> None:
    mode = b.forward_mode
    if mode.is_target_verify() or b.spec_info is not None:
        refuse("--speculative-algorithm", mode.name, "none")


def _refuse_layer(layer: Any, options: dict[str, Any]) -> None:
    for name, x in options.items():
        if x is not None and x is not False:
            refuse(name, checks.describe(x), "none")
    if layer.head_dim not in checks.HEAD_DIMS or layer.v_head_dim != layer.head_dim:
        got = f"{layer.head_dim} and {layer.v_head_dim} for values"
        refuse("head_dim", got, f"{', '.join(map(str, checks.HEAD_DIMS))}, for values too")
    if layer.logit_cap:
        refuse("logit_cap", layer.logit_cap, "0")
    if layer.is_cross_attention or layer.attn_type is not AttentionType.DECODER:
        refuse("attn_type", layer.attn_type, "decoder")
