"""What the plug-in replaces in SGLang, in one place: two functions that the backend of DeepSeek-V4 and V4.1 calls, what
else is asked for of their attention, and one name of a backend for dense models."""

from typing import Any, NoReturn

from dsv4.integrations.sglang import BACKEND, PARTS_SWITCH, SWITCH, experts, indexer, parts, refuse, rows, v4, v41

INTERFACE = "sglang.kernels.ops.attention.flash_mla_interface"
REPLACED = {
    f"{INTERFACE}.flash_mla_with_kvcache": v4.flash_mla_with_kvcache,
    f"{INTERFACE}.flash_mla_sparse_fwd": v4.flash_mla_sparse_fwd,
    # called before flash_mla_with_kvcache, for V4.1 on Blackwell
    "sglang.kernels.ops.attention.dsv4.decode_attention_sm100.can_use_swapab_attention": v4.no_other_kernel,
}
INDEXER = "sglang.srt.layers.attention.dsv4.indexer.C4IndexerBackendMixin.forward_c4_indexer"
INDEXER_V41 = "sglang.srt.layers.attention.dsv4.v41_indexer"
INDEXERS_V41 = {
    f"{INDEXER_V41}.full_topk.FullTopKIndexer.topk_decode": v41.topk_decode,
    f"{INDEXER_V41}.dense_blocks.DenseBlocksBackend.publish_decode": v41.publish_decode,
    f"{INDEXER_V41}.dense_blocks.DenseBlocksBackend.consume_decode": v41.consume_decode,
}
PARTS_V41 = ("indexer", "insertion")  # the others replace what V4.1 does not call
COMPRESSOR = "sglang.srt.layers.attention.dsv4.compressor_v2.compress_norm_rope_store"
INSERTION = (
    "sglang.srt.mem_cache.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool.set_swa_key_buffer_radix_fused_norm_rope"
)
# functions that SGLang may call instead of the two above, with other layouts of queries or results
BYPASSES = {
    f"{INTERFACE}.flash_mla_mega_prefill": "fused norm and RoPE around attention",
    f"{INTERFACE}.flash_mla_mega_decode": "fused norm and RoPE around attention",
    "sglang.kernels.ops.attention.sparse_mla_q8kv8_prefill_sm90.cast_q_fp8_for_q8kv8_prefill": "FP8 queries in prefill",
}
EXPERTS = "sglang.srt.layers.quantization.fp8.Fp8Config.get_quant_method"
V4_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend.__init__"


def replaced() -> dict[str, Any]:
    """Return the replacement of each hooked function."""
    more: dict[str, dict[str, Any]] = {
        "indexer": {INDEXER: indexer.forward_c4_indexer, **INDEXERS_V41},
        "insertion": {INSERTION: rows.insert},
    }
    return REPLACED | {target: ours for part in parts() for target, ours in more.get(part, {}).items()}


def wrapped() -> dict[str, Any]:
    """Return the wrapper of each hooked function."""
    more = {"compressor": (COMPRESSOR, rows.compressed), "experts": (EXPERTS, experts.get_quant_method)}
    return dict(more[part] for part in parts() if part in more)


def everything() -> None:
    """Install everything. A second call does nothing: SGLang calls a plug-in once in each process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, function in replaced().items():
        HookRegistry.register(target, function, HookType.REPLACE)
    for target, function in wrapped().items():
        HookRegistry.register(target, function, HookType.AROUND)
    for target, what in BYPASSES.items():
        HookRegistry.register(target, _refusing(what), HookType.REPLACE)
    HookRegistry.register(V4_BACKEND, check_hooks, HookType.BEFORE)
    dense_name()


def check_hooks(_: Any, model_runner: Any, *__: Any, **___: Any) -> None:
    """Check the hooks before a DeepSeek-V4 backend starts. SGLang logs a hook that it could not apply and
    continues: the backend must not. DeepSeek-V4.1 runs on the same backend."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    others = [part for part in parts() if part not in PARTS_V41]
    if others and getattr(model_runner.model_config.hf_text_config, "model_type", None) == "deepseek_v41":
        refuse(PARTS_SWITCH, f"{', '.join(others)} for DeepSeek-V4.1", ", ".join(PARTS_V41))
    if missing := [target for target in (*replaced(), *wrapped(), *BYPASSES) if target not in HookRegistry._patched]:
        raise RuntimeError(
            f"{SWITCH}=1, but SGLang did not apply the hooks on {', '.join(missing)}; its log says why. "
            f"{SWITCH}=0 gives SGLang's own attention"
        )


def dense_name() -> None:
    """Register the backend for dense models as --attention-backend dsv4_gluon."""
    from sglang.srt.arg_groups import choices, model_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if BACKEND not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([BACKEND])
        model_hook.attention_backends_of = _known_names(model_hook.attention_backends_of)

    def create(runner: Any) -> Any:
        from dsv4.integrations.sglang.dense import Backend

        return Backend(runner)

    register_attention_backend(BACKEND)(create)


def _known_names(backends_of: Any) -> Any:
    """Add our name: Gemma 4 and gpt-oss check the name against lists of SGLang's own, which cannot be extended.
    dsv4 does what the Triton backend does for them (any page size, two head dims, windows, sinks), so it passes
    where that one passes.
    """

    def named(*arguments: Any) -> tuple[Any, ...]:
        return tuple("triton" if name == BACKEND else name for name in backends_of(*arguments))

    return named


def _refusing(what: str) -> Any:
    def bypass(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"{SWITCH}=1, but SGLang uses a kernel of its own with {what}: turn that off, or set {SWITCH}=0"
        )

    return bypass
