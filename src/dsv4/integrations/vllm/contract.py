"""What the plug-in assumes about vLLM, as data: a version, parameters and fields. This is checked before anything is
replaced, so that a newer vLLM is rejected with the difference in words, and never called with wrong arguments."""

import importlib
import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields

from dsv4.integrations.vllm import way_off

TESTED = ("0.32", "0.33")

FLASHMLA = "vllm.models.deepseek_v4.nvidia.flashmla.DeepseekV4FlashMLAAttention"
FLASHMLA41 = "vllm.models.deepseek_v41.nvidia.flashmla.DeepseekV4FlashMLAAttention"
INDEXER = "vllm.model_executor.layers.sparse_attn_indexer.SparseAttnIndexer"
INDEXER_LAYER = "vllm.models.deepseek_v4.attention.DeepseekV4Indexer"
COMPRESSOR = "vllm.models.deepseek_v4.compressor.DeepseekCompressor"
EXPERTS = "vllm.model_executor.layers.quantization.mxfp4.Mxfp4MoEMethod"
# qualified name -> the parameters that are passed, or overridden, by name
PARAMETERS = {
    f"{FLASHMLA}.forward_mqa": ("self", "q", "kv", "positions", "output"),
    f"{FLASHMLA}._forward_prefill": (
        "self", "q", "positions", "compressed_k_cache", "swa_k_cache", "output", "attn_metadata", "swa_metadata",
    ),
    f"{FLASHMLA}.get_padded_num_q_heads": ("num_heads",),
    f"{FLASHMLA}._fused_qnorm_rope_kv_insert": ("self", "q", "kv", "positions", "attn_metadata"),
    f"{INDEXER}.__init__": (
        "self", "k_cache", "quant_block_size", "scale_fmt", "topk_tokens", "head_dim", "max_model_len",
        "max_total_seq_len", "topk_indices_buffer", "skip_k_cache_insert", "use_fp4_cache", "compress_ratio",
        "candidate_blocks", "candidate_block_size", "candidate_write",
    ),
    f"{COMPRESSOR}.forward": ("self", "kv_score", "positions", "rotary_emb"),
    f"{EXPERTS}.__init__": ("self", "moe", "activation_key"),
    f"{EXPERTS}.apply": (
        "self", "layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input",
    ),
    f"{EXPERTS}.process_weights_after_loading": ("self", "layer"),
    "vllm.models.deepseek_v4.common.ops.save_partial_states.SavePartialStatesKernel.__call__": (
        "self", "kv", "score", "ape", "positions", "state_cache", "slot_mapping", "block_size", "state_width",
        "compress_ratio", "pdl_kwargs",
    ),
    f"{INDEXER}.forward_cuda": ("self", "hidden_states", "q_quant", "k", "weights"),
    f"{INDEXER}.forward_cpu": ("self", "hidden_states", "q_quant", "k", "weights"),
    "vllm.model_executor.layers.sparse_attn_indexer.PrefillRowShard.from_metadata": (
        "prefill_metadata", "num_decode_tokens",
    ),
    "vllm.model_executor.layers.sparse_attn_indexer.PrefillRowShard.narrow": ("self", "chunk"),
    "vllm.model_executor.layers.sparse_attn_indexer.PrefillRowShard.exchange_topk": ("self", "topk_buffer", "width"),
    "vllm.models.deepseek_v4.nvidia.model._select_dsv4_attn_cls": ("vllm_config",),
    "vllm.models.deepseek_v41.nvidia.model._select_dsv4_attn_cls": ("vllm_config",),
    f"{FLASHMLA41}._forward_decode": (
        "self", "q", "kv_cache", "swa_metadata", "attn_metadata", "swa_only", "output",
    ),
    f"{FLASHMLA41}._forward_prefill": (
        "self", "q", "positions", "compressed_k_cache", "swa_k_cache", "output", "attn_metadata", "swa_metadata",
    ),
    f"{FLASHMLA41}.get_padded_num_q_heads": ("num_heads",),
    f"{FLASHMLA41}._indexer_cls": ("self", "k_cache"),
    f"{FLASHMLA41}._fused_qnorm_rope_kv_insert": ("self", "q", "kv", "positions", "attn_metadata"),
    f"{FLASHMLA41}.forward_kv": ("self", "positions", "hidden_states"),
    f"{FLASHMLA41}._run_parallel_input_projections": ("self", "hidden_states"),
    f"{FLASHMLA41}._split_qkv_and_norm": ("self", "qr_kv"),
    "vllm.models.deepseek_v41.attention._use_v41_mxfp8_kv_record": (),
    "vllm.models.deepseek_v41.attention._indexer_k_cache_head_dim": ("index_head_dim", "use_fp4_kv"),
    "vllm.models.deepseek_v41.attention.DeepseekV4IndexerCache.get_kv_cache_spec": ("self", "vllm_config"),
    "vllm.models.deepseek_v41.attention.DeepseekV4Indexer._produce_k": ("self", "latent", "positions", "rotary_emb"),
    "vllm.models.deepseek_v41.compressor.DeepseekCompressor.forward": ("self", "kv_score", "positions"),
    "vllm.models.deepseek_v41.compressor.DeepseekCompressor.insert_cache": (
        "self", "latent", "positions", "rotary_emb",
    ),
    "vllm.models.deepseek_v41.nvidia.dspark._insert_context_kv": ("attn", "kv", "positions", "slot_mapping"),
    "vllm.models.deepseek_v41.common.ops.compute_global_topk_indices_and_lens": (
        "topk_indices", "token_to_req_indices", "block_table", "block_size", "is_valid_token",
    ),
    "vllm.models.deepseek_v4.common.ops.compute_global_topk_indices_and_lens": (
        "topk_indices", "token_to_req_indices", "block_table", "block_size", "is_valid_token",
    ),
    "vllm.v1.attention.backends.mla.sparse_swa.DeepseekSparseSWAMetadataBuilder.build_tile_scheduler": (
        "self", "num_decode_tokens",
    ),
    "vllm.v1.attention.backend.AttentionImpl.__init__": (
        "self", "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window",
        "kv_cache_dtype", "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name",
    ),
    "vllm.v1.attention.backend.AttentionImpl.forward": (
        "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale",
        "output_block_scale",
    ),
    "vllm.v1.attention.backend.AttentionMetadataBuilder.__init__": (
        "self", "kv_cache_spec", "layer_names", "vllm_config", "device",
    ),
    "vllm.v1.attention.backend.AttentionMetadataBuilder.build": (
        "self", "common_prefix_len", "common_attn_metadata", "fast_build",
    ),
    "vllm.v1.attention.backends.registry.register_backend": ("backend", "class_path", "is_mamba"),
}  # fmt: skip
# dataclass -> the fields that are read; all of them must be there, more may be
FIELDS = {
    "vllm.v1.attention.backends.mla.sparse_swa.DeepseekSparseSWAMetadata": (
        "num_prefills", "num_decodes", "num_decode_tokens", "is_valid_token", "token_to_req_indices",
        "decode_swa_indices", "decode_swa_lens", "slot_mapping",
    ),
    "vllm.models.deepseek_v4.sparse_mla.DeepseekV4FlashMLAMetadata": (
        "block_table", "block_size", "c128a_global_decode_topk_indices", "c128a_decode_topk_lens",
    ),
    "vllm.models.deepseek_v41.sparse_mla.DeepseekV4FlashMLAMetadata": ("block_table", "block_size", "slot_mapping"),
    "vllm.models.deepseek_v4.compressor.CompressorMetadata": (
        "block_table", "slot_mapping", "block_size", "token_to_req_indices", "c128_boundary",
    ),
    "vllm.v1.attention.backends.mla.indexer.DeepseekV32IndexerMetadata": (
        "max_seq_len", "num_decode_tokens", "num_prefills", "decode", "prefill",
    ),
    "vllm.v1.attention.backends.mla.indexer.DeepSeekV32IndexerDecodeMetadata": (
        "block_table", "seq_lens", "decode_lens",
    ),
    "vllm.v1.attention.backends.mla.indexer.DeepseekV32IndexerPrefillMetadata": ("chunks", "row_shard_sizes"),
    "vllm.v1.attention.backends.mla.indexer.DeepseekV32IndexerPrefillChunkMetadata": (
        "block_table", "cu_seqlen_ks", "cu_seqlen_ke", "cu_seq_lens", "token_start", "token_end", "num_reqs",
    ),
    "vllm.v1.attention.backend.CommonAttentionMetadata": (
        "query_start_loc", "seq_lens", "block_table_tensor", "num_actual_tokens", "max_query_len", "max_seq_len",
        "num_reqs", "causal",
    ),
}  # fmt: skip
# function, or another one -> a name that it looks up in its module, which the plug-in replaces there
LOOKED_UP = {
    f"{FLASHMLA}._forward_prefill": "flash_mla_sparse_fwd",
    f"{INDEXER_LAYER}.__init__ or {INDEXER_LAYER}._get_attn_cls": "SparseAttnIndexer",  # 0.33 and newer: the latter
    f"{COMPRESSOR}.forward": "_SAVE_PARTIAL_STATES_KERNEL",
    "vllm.models.deepseek_v4.quant_config.DeepseekV4FP8Config.get_quant_method": "Mxfp4MoEMethod",
    "vllm.models.deepseek_v4.nvidia.model.DeepseekV4DecoderLayer.__init__": "_select_dsv4_attn_cls",
    "vllm.models.deepseek_v41.nvidia.model.DeepseekV4DecoderLayer.__init__": "_select_dsv4_attn_cls",
    f"{FLASHMLA41}._forward_prefill": "flash_mla_sparse_fwd",
    "vllm.models.deepseek_v41.attention.DeepseekV4Attention.__init__": "_use_v41_mxfp8_kv_record",
    "vllm.models.deepseek_v41.attention.DeepseekV4IndexerCache.get_kv_cache_spec": "_use_v41_mxfp8_kv_record",
    "vllm.models.deepseek_v41.attention.DeepseekV4Indexer.__init__": "attn_cls",
    "vllm.models.deepseek_v41.nvidia.dspark.DSparkDeepseekV4Model.precompute_and_store_context_kv": (
        "_insert_context_kv"
    ),
}


def interleaved_rows() -> bool:
    """Return whether the scales of V4.1's rows follow the codes of the row; in vLLM 0.32 they are at the end of a
    page."""
    import vllm

    return vllm.__version__.split(".")[:2] != ["0", "32"]


def other_version() -> str | None:
    """Return the installed version of vLLM if the plug-in was not tested with it; else None."""
    import vllm

    tested = ".".join(vllm.__version__.split(".")[:2]) in TESTED
    accepted = " and ".join(f"{version}.x" for version in TESTED)
    return None if tested else f"got vLLM {vllm.__version__}; accepted: {accepted}, with which the plug-in was tested"


def check_version() -> None:
    """Raise a RuntimeError if vLLM is not a version that the plug-in was tested with."""
    if why := other_version():
        raise RuntimeError(f"dsv4: {why}. {way_off()}")


def check() -> None:
    """Raise a RuntimeError that lists every difference between the installed vLLM and what the plug-in needs."""
    if found := differences():
        import vllm

        raise RuntimeError(
            f"dsv4: vLLM {vllm.__version__} is not what the plug-in needs ({'; '.join(found)}). {way_off()}"
        )


def differences(only: str = "") -> list[str]:
    """Return a sentence for every difference, about names that contain `only`."""
    found: list[str] = []

    def compare(names: Iterable[str], difference: Callable[[str], str | None]) -> None:
        for name in names:
            if only in name:
                try:
                    said = difference(name)
                except (ImportError, AttributeError) as why:
                    said = f"{name} is not there ({why})"
                found.extend([said] if said else [])

    def parameters(name: str) -> str | None:
        there, wanted = tuple(inspect.signature(resolve(name)).parameters), PARAMETERS[name]
        return None if there == wanted else f"{name} takes {', '.join(there)} in place of {', '.join(wanted)}"

    def missing_fields(name: str) -> str | None:
        there = {f.name for f in fields(resolve(name))}
        missing = [f for f in FIELDS[name] if f not in there]
        return f"{name} has no {', '.join(missing)}" if missing else None

    def name_looked_up(name: str) -> str | None:
        return None if looks_up(name, LOOKED_UP[name]) else f"{name} does not look up {LOOKED_UP[name]}"

    compare(PARAMETERS, parameters)
    compare(FIELDS, missing_fields)
    compare(LOOKED_UP, name_looked_up)
    return found


def looks_up(functions: str, name: str) -> bool:
    """Return whether one of the functions, "a or b", looks up the name. The first must be there."""
    first, *others = functions.split(" or ")
    found = [resolve(first)]
    for other in others:
        with suppress(ImportError, AttributeError):
            found.append(resolve(other))
    return any(name in inspect.unwrap(x).__code__.co_names for x in found)


def resolve(name: str):
    """Return the object with a qualified name, in whichever of its prefixes is a module."""
    parts = name.split(".")
    for n in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError as missing:
            if missing.name is None or not ".".join(parts[:n]).startswith(missing.name):
                raise
            continue
        for part in parts[n:]:
            found = getattr(found, part)
        return found
    raise ImportError(f"{name}: no module of that name")
