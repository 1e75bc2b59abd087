"""What the plug-in takes for granted in vLLM, as data: a version, parameters and fields. Checked before anything is
replaced, so that a newer vLLM is refused with the difference in words and never served with wrong arguments."""

import importlib
import inspect
from dataclasses import fields

TESTED = "0.32"

FLASHMLA = "vllm.models.deepseek_v4.nvidia.flashmla.DeepseekV4FlashMLAAttention"
# qualified name -> the parameters that are passed, or overridden, by name
PARAMETERS = {
    f"{FLASHMLA}.forward_mqa": ("self", "q", "kv", "positions", "output"),
    f"{FLASHMLA}.get_padded_num_q_heads": ("num_heads",),
    "vllm.models.deepseek_v4.nvidia.model._select_dsv4_attn_cls": ("vllm_config",),
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
        "num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens", "is_valid_token",
        "token_to_req_indices", "decode_swa_indices", "decode_swa_lens", "prefill_swa_indices", "prefill_swa_lens",
    ),
    "vllm.models.deepseek_v4.sparse_mla.DeepseekV4FlashMLAMetadata": (
        "block_table", "block_size", "c128a_global_decode_topk_indices", "c128a_decode_topk_lens",
        "c128a_prefill_topk_indices",
    ),
    "vllm.v1.attention.backend.CommonAttentionMetadata": (
        "query_start_loc", "seq_lens", "block_table_tensor", "num_actual_tokens", "max_query_len", "max_seq_len",
        "num_reqs", "causal",
    ),
}  # fmt: skip


def check_version() -> None:
    """RuntimeError where vLLM is not of the version that the plug-in was tested with."""
    import vllm

    if ".".join(vllm.__version__.split(".")[:2]) != TESTED:
        raise RuntimeError(
            f"dsv4: got vLLM {vllm.__version__}; accepted: {TESTED}.x, with which the plug-in was tested. "
            "DSV4_VLLM=0 gives vLLM's own attention"
        )


def check() -> None:
    """RuntimeError that lists every difference between the installed vLLM and what the plug-in needs."""
    if found := differences():
        import vllm

        raise RuntimeError(
            f"dsv4: vLLM {vllm.__version__} is not what the plug-in needs ({'; '.join(found)}). "
            "DSV4_VLLM=0 gives vLLM's own attention"
        )


def differences(only: str = "") -> list[str]:
    """In words; of the names that contain `only`."""
    found = []
    for name, wanted in PARAMETERS.items():
        if only in name:
            there = tuple(inspect.signature(resolve(name)).parameters)
            if there != wanted:
                found.append(f"{name} takes {', '.join(there)} in place of {', '.join(wanted)}")
    for name, wanted in FIELDS.items():
        if only in name:
            there = tuple(f.name for f in fields(resolve(name)))
            if missing := [f for f in wanted if f not in there]:
                found.append(f"{name} has no {', '.join(missing)}")
    return found


def resolve(name: str):
    """The object with a qualified name, in whichever of its prefixes is a module."""
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
