"""Which layers of an engine of vLLM run on dsv4: its model, --attention-backend, backend_per_kind and DSV4_VLLM decide.
They are those of one configuration, because a process may hold several engines.

A configuration that requests dsv4 and would get another attention is rejected here.
"""

from typing import Any

from dsv4.integrations.vllm import (
    BACKEND,
    OWN_ROWS,
    PARTS_SWITCH,
    ROWS_SWITCH,
    SWITCH,
    parts,
    refuse,
    rows,
    say,
    switch,
)

NAMES = {"deepseek_v4": "DeepSeek-V4", "deepseek_v41": "DeepSeek-V4.1"}
FP4_ROWS = "nvfp4_ds_mla"  # vLLM's name for V4.1's own rows
KV_CACHE_DTYPES = {  # vLLM's names of cache dtypes whose rows dsv4 reads
    "deepseek_v4": ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla"),
    "deepseek_v41": ("auto", "fp8", "fp8_ds_mla", FP4_ROWS),
}


def named(config: Any) -> bool:
    """Return whether --attention-backend names DSV4_GLUON."""
    return _is_ours(config.attention_config.backend)


def kinds(config: Any) -> list[str]:
    """Return the kinds of layers that backend_per_kind gives to DSV4_GLUON."""
    return [kind for kind, backend in config.attention_config.backend_per_kind.items() if _is_ours(backend)]


def asks(config: Any) -> bool:
    return named(config) or bool(kinds(config))


def v4_is_ours(config: Any) -> bool:
    """Return whether dsv4 serves a DeepSeek-V4 or V4.1 of this configuration. The configuration of a draft model names
    no backend, whatever that of its target names: draft layers follow the target's layers, which are there already.
    """
    if config.attention_config.backend is not None:
        return named(config)
    return switch() is True or any(getattr(layer, "served_by_dsv4", False) for layer in _layers(config))


def family(config: Any) -> str | None:
    """Return deepseek_v4, deepseek_v41 or dense; None for a configuration without a model."""
    model = config.model_config
    if model is None:
        return None
    names = [getattr(model.hf_config, "model_type", ""), *(getattr(model.hf_config, "architectures", None) or [])]
    plain = [name.lower().replace("_", "") for name in names]
    for found in ("deepseek_v41", "deepseek_v4"):
        if any(name.startswith(found.replace("_", "")) for name in plain):
            return found
    return "dense"


def check(config: Any) -> None:
    """Raise a ValueError if dsv4 is requested and cannot serve the request."""
    model, attention = family(config), config.attention_config
    if model not in NAMES:
        return
    if found := kinds(config):
        got = f"{BACKEND} for {', '.join(found)} of {NAMES[model]}"
        refuse("backend_per_kind", got, f"dense models; {NAMES[model]} needs --attention-backend {BACKEND}")
    if switch() and attention.backend is not None and not named(config):
        refuse("--attention-backend", f"{attention.backend.name} with {SWITCH}=1", f"{BACKEND}, or none")
    if not v4_is_ours(config):
        return
    if config.cache_config.cache_dtype not in KV_CACHE_DTYPES[model]:
        refuse("--kv-cache-dtype", config.cache_config.cache_dtype, ", ".join(KV_CACHE_DTYPES[model]))
    if model == "deepseek_v41":
        _check_v41(config)
        return
    if rows():
        refuse(ROWS_SWITCH, f"{rows()} for DeepSeek-V4", "nothing; V4.1 has other rows")
    if "experts" in parts():
        _check_experts(config)


def _check_v41(config: Any) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        refuse("the model", "DeepSeek-V4.1 on a CPU", "a GPU: vLLM has no other layers of it")
    ranks = config.parallel_config.prefill_context_parallel_size
    if ranks > 1:
        refuse("--prefill-context-parallel-size", ranks, "1")
    if "experts" in parts():
        refuse(PARTS_SWITCH, "experts for DeepSeek-V4.1", "indexer, compressor, insertion")


def _check_experts(config: Any) -> None:
    """Reject the backends that also exchange tokens between ranks: vLLM would not call dsv4's experts there, or not
    exchange."""
    from vllm.config.kernel import MEGA_MOE_BACKENDS

    backend = config.kernel_config.moe_backend
    if backend in MEGA_MOE_BACKENDS:
        refuse("--moe-backend", f"{backend} with experts in {PARTS_SWITCH}", "another one, or none")


def own_rows(config: Any) -> bool:
    """Return whether a DeepSeek-V4.1 of this configuration keeps its own rows on any GPU: 528 bytes in the window, and
    288 compressed unless --kv-cache-dtype is fp8_ds_mla. Elsewhere vLLM decides: 584 bytes on Hopper."""
    return rows() == OWN_ROWS or config.cache_config.cache_dtype == FP4_ROWS


def report(config: Any) -> None:
    """Log in one line what dsv4 does for this configuration, unless it is that of a draft model."""
    model = family(config)
    if model is None or _layers(config):
        return
    if model in NAMES and v4_is_ours(config):
        say(v4_line(config))
    elif asks(config):
        say(dense_line() if named(config) else f"{dense_line()}, of {', '.join(kinds(config))} layers")
    elif model == "dense":
        who = (config.model_config.hf_config.architectures or ["this model"])[0]
        why = f"{SWITCH}=1 is for DeepSeek-V4 and V4.1" if switch() else "installed"
        say(f"dsv4 is off for {who} ({why}); --attention-backend {BACKEND} switches it on")
    else:
        say(f"dsv4 is installed and off; {SWITCH}=1 or --attention-backend {BACKEND} switches its attention on")


def v4_line(config: Any) -> str:
    model = family(config) or "deepseek_v4"
    line = f"dsv4 is on: {NAMES[model]}'s {', '.join(['attention', *parts()])} ({PARTS_SWITCH})"
    return line + f", rows of V4.1 ({ROWS_SWITCH})" if model == "deepseek_v41" and own_rows(config) else line


def dense_line() -> str:
    return "dsv4 is on: dense attention"


def _layers(config: Any) -> list[Any]:
    """Return the attention layers of this configuration's engine that are built so far."""
    return list(config.compilation_config.static_forward_context.values())


def _is_ours(backend: Any) -> bool:
    return getattr(backend, "name", None) == BACKEND
