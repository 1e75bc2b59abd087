"""DeepSeek-V4.1's attention layer of vLLM with its attention on dsv4.

vLLM's layer keeps projections, norms and metadata. Four layers own compressed rows, the others read theirs; eight run
an indexer, and the layers after it read its lists. Decode reads the pages, whatever rows they have, for as many heads
as the rank has: drafts are separate queries, and the lists define what each of them sees. Prefill reads the bf16
workspace into which vLLM unpacks pages.

On Hopper vLLM keeps rows of 584 bytes and index keys of 132. The model's own, 528 in the window, 288 compressed and
keys of 68, are an option there: choice.own_rows. vLLM's writers are made for Blackwell, so dsv4 writes these itself.
Queries of the indexer stay FP8.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

import dsv4
from dsv4 import elementwise
from dsv4.caches.mxfp4_keys import INDEX_68
from dsv4.integrations.vllm import calls, choice, logger, parts, say
from dsv4.integrations.vllm.insertion import write
from dsv4.integrations.vllm.v4 import Served, check_device, copied, pool, sparse_fwd, swa_backend

own_rows = False  # while a layer with the model's own rows is built


class Forward(Served):
    """The methods that replace vLLM's, for the class below."""

    is_index_source: bool
    index_source_layer_id: int
    layer_id: int
    listed: tuple[Any, Tensor, Tensor] | None = None  # in a layer with an indexer: (metadata, slots, lengths)
    _static_forward_context: dict[str, Any]

    def _forward_decode(
        self, q: Tensor, kv_cache: Tensor | None, swa_metadata: Any, attn_metadata: Any, swa_only: bool, output: Tensor
    ) -> None:
        """Write the attention of q [n, H, 512] to output [n, H, 512]."""
        listed = None if swa_only else self._slots(swa_metadata, attn_metadata)
        self._attend(q, output, swa_metadata, kv_cache, listed)

    def _forward_prefill(
        self,
        q: Tensor,
        positions: Tensor,
        compressed_k_cache: Tensor | None,
        swa_k_cache: Tensor,
        output: Tensor,
        attn_metadata: Any,
        swa_metadata: Any,
    ) -> None:
        from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention as Theirs

        copied(Theirs._forward_prefill, flash_mla_sparse_fwd=sparse_fwd)(
            self, q, positions, compressed_k_cache, swa_k_cache, output, attn_metadata, swa_metadata
        )

    def _slots(self, swa: Any, attn: Any) -> tuple[Tensor, Tensor]:
        """Return (slots of the page pool [n, K], how many [n]) of the lists of the last indexer, which are in rows of
        the request. The layer with that indexer computes them; later layers, which follow it in every step, reuse them,
        unless another half of the batch has run in between."""
        if not self.is_index_source:
            source = self._static_forward_context.get(self._source())
            found = getattr(source, "listed", None)
            if found is not None and found[0] is attn:
                return found[1], found[2]
        from vllm.models.deepseek_v41.common.ops import compute_global_topk_indices_and_lens

        assert self.topk_indices_buffer is not None
        n = swa.num_decode_tokens
        slots, lengths = compute_global_topk_indices_and_lens(
            self.topk_indices_buffer[:n],
            swa.token_to_req_indices,
            attn.block_table[: swa.num_decodes],
            attn.block_size // self.compress_ratio,
            swa.is_valid_token[:n],
        )
        if self.is_index_source:
            self.listed = attn, slots, lengths
        return slots, lengths

    def _source(self) -> str:
        """Return the layer whose indexer makes this layer's lists."""
        return self.prefix.replace(f".{self.layer_id}.", f".{self.index_source_layer_id}.", 1)

    def _indexer_cls(self, k_cache: Any) -> type:
        theirs: type = super()._indexer_cls(k_cache)  # type: ignore[misc]
        return indexer_class(theirs) if "indexer" in parts() else theirs

    def forward_kv(self, positions: Tensor, hidden_states: Tensor) -> None:
        """Write the rows and keys of tokens that no later layer processes."""
        from vllm.forward_context import get_forward_context

        found = get_forward_context().attn_metadata
        if not self.writes_rows or not isinstance(found, dict):
            super().forward_kv(positions, hidden_states)  # type: ignore[misc]
            return
        both, kv_score, _ = self._run_parallel_input_projections(hidden_states)  # type: ignore[attr-defined]
        _, _, kv = self._split_qkv_and_norm(both)  # type: ignore[attr-defined]
        self.write_window(kv, positions, found[self.swa_cache_layer.prefix].slot_mapping)
        if self.compressor is not None:
            latent = self.compressor(kv_score, positions)
            self.compressor.insert_cache(latent, positions, self.rotary_emb)
            if self.indexer is not None and self.indexer.owns_k:
                self.indexer._produce_k(latent, positions, self.rotary_emb)

    def write_window(self, kv: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Store kv [>= n, 512], normed, in the slots [n] of the window; -1: nowhere."""
        write(kv, positions, pool(self.swa_cache_layer.kv_cache), slots, self.rotary_emb.cos_sin_cache)
        calls["insert"] += 1


def insert_cache(self: Any, latent: Tensor | None, positions: Tensor, rotary_emb: Any) -> None:
    """Replace the method of vLLM's compressor: write the latent [N, 512] of each token that ends a group to the
    compressed pages, rotated at the first token of its group. Other lines of the latent are undefined."""
    if latent is None:
        return
    from vllm.forward_context import get_forward_context

    slots = get_forward_context().attn_metadata[self.k_cache_prefix].slot_mapping
    at = positions[: len(slots)]
    slots = slots.masked_fill((at + 1) % self.compress_ratio != 0, -1)
    pages = self._static_forward_context[self.k_cache_prefix].kv_cache
    write(latent, at - at % self.compress_ratio, pool(pages), slots, rotary_emb.cos_sin_cache)
    calls["compress"] += 1


@functools.cache
def indexer_class(theirs: Any) -> type:
    """Return a subclass of vLLM's indexer that scores by dsv4, and writes FP4 keys if the pages have them."""
    from dsv4.integrations.vllm.indexer import Indexer

    class Dsv4Indexer(theirs):  # type: ignore[misc]
        attn_cls = Indexer

        def _produce_k(self, latent: Tensor | None, positions: Tensor, rotary_emb: Any) -> None:
            from vllm.forward_context import get_forward_context

            found, pages = get_forward_context().attn_metadata, self.k_cache.kv_cache
            if self.use_fp4_kv or latent is None or pages.shape[-1] != INDEX_68.row_bytes:
                super()._produce_k(latent, positions, rotary_emb)
            else:
                slots = found[self.k_cache.prefix].slot_mapping
                write_keys(self, self.wk(latent)[0], positions, slots, pages, rotary_emb.cos_sin_cache)

    return Dsv4Indexer


def write_keys(indexer: Any, keys: Tensor, positions: Tensor, slots: Tensor, pages: Tensor, cos_sin: Tensor) -> None:
    """Write keys [>= n, 128] of tokens that end a group, normed and rotated at its first token, to the slots [n] of
    pages.
    """
    at = positions[: len(slots)]
    slots = slots.masked_fill((at + 1) % indexer.compress_ratio != 0, -1)
    cache = dsv4.IndexCache.from_pages(pages, format=INDEX_68)
    steps = elementwise.choose("auto", keys.device)
    with steps.running():
        steps.store(cache, slots, keys[: len(slots)], indexer.k_norm, cos_sin, at - at % indexer.compress_ratio)
    calls["index keys"] += 1


def key_width(theirs: Callable[[int, bool], int]) -> Callable[[int, bool], int]:
    """Wrap vLLM's function that returns the bytes of an index key: 68 with the model's own rows, if dsv4 reads
    them."""
    return lambda index_head_dim, use_fp4_kv: theirs(index_head_dim, use_fp4_kv or (own_rows and "indexer" in parts()))


def record_rule(theirs: Callable[[], bool]) -> Callable[[], bool]:
    """Wrap vLLM's function that returns whether rows have 528 bytes."""
    return lambda: own_rows or theirs()


def context_rows(theirs: Callable[..., None]) -> Callable[..., None]:
    """Wrap vLLM's function that writes rows of the context into the window of a DSpark layer."""

    def insert_context(attn: Any, kv: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:
        if getattr(attn, "writes_rows", False):
            attn.write_window(kv, positions, slot_mapping)
        else:
            theirs(attn, kv, positions, slot_mapping)

    return insert_context


@contextmanager
def rows_of_v41(on: bool) -> Iterator[None]:
    """Within, make vLLM's page sizes those of rows of 528 bytes."""
    global own_rows
    before, own_rows = own_rows, on
    try:
        yield
    finally:
        own_rows = before


@functools.cache
def cuda_class() -> type:
    """Return the class for the NVIDIA model."""
    from vllm.models.deepseek_v41 import attention
    from vllm.models.deepseek_v41.nvidia import flashmla

    class Dsv4Attention(Forward, flashmla.DeepseekV4FlashMLAAttention):  # type: ignore[misc]
        swa_backend_cls = swa_backend(flashmla)

        @property
        def packed_kv_cache_dtype(self) -> str:
            """The cache dtype that an unspecific --kv-cache-dtype means while the layer is built."""
            return choice.FP4_ROWS if own_rows else super().packed_kv_cache_dtype

        def __init__(self, vllm_config: Any, *rest: Any, **options: Any) -> None:
            check_device()
            ours = choice.own_rows(vllm_config)
            made_for_it = attention._use_v41_mxfp8_kv_record()
            with rows_of_v41(ours):
                super().__init__(vllm_config, *rest, **options)
            self.writes_rows = "insertion" in parts() or (ours and not made_for_it)
            if ours and self.indexer is not None and self.indexer.owns_k:
                keep_alignment(self.indexer.k_cache)
            if self.compressor is not None and ("compressor" in parts() or (ours and not made_for_it)):
                self.compressor.__class__ = inserting(type(self.compressor))  # type: ignore[arg-type]
            say(choice.v4_line(vllm_config))
            logger.info("%s: dsv4, %d heads, %d-byte rows", self.prefix, self.padded_heads, self.swa_bytes_per_token)

    return Dsv4Attention


@functools.cache
def inserting(theirs: type) -> type:
    """Return a subclass of vLLM's compressor whose rows dsv4 writes."""
    return type("Compressor", (theirs,), dict(insert_cache=insert_cache))


def keep_alignment(cache: Any) -> None:
    """Align the pages of index keys like those of rows, with which they share a block: vLLM determines both by the
    function that record_rule is around, and for this one after the layer is built."""
    theirs = cache.get_kv_cache_spec

    def get_kv_cache_spec(vllm_config: Any) -> Any:
        with rows_of_v41(True):
            return theirs(vllm_config)

    cache.get_kv_cache_spec = get_kv_cache_spec
