"""What the plug-in replaces in vLLM, in one place: how DeepSeek-V4's layers choose the classes of their attention and
their indexer, and one backend name. Every replacement asks the configuration of the model that is being built
(choice.py), and leaves vLLM's own class where that does not ask for dsv4."""

import copyreg
import functools
import os
from collections.abc import Callable
from typing import Any

from dsv4.integrations.vllm import (
    BACKEND,
    DENSE,
    PLUGIN,
    SWITCH,
    choice,
    contract,
    parts,
    plugin_allowed,
    refuse,
    switch,
)
from dsv4.integrations.wrapping import wrap

asked = False  # whether a configuration that another process sent requests dsv4
ready = False  # vLLM has called register() in this process
on = False


def everything() -> None:
    """Install everything. A second call does nothing."""
    global on
    if on:
        return
    contract.check_version()
    contract.check()
    parts()
    from vllm.platforms import current_platform

    backend_name()
    the_indexer()
    the_experts()
    if current_platform.is_cpu():
        on_a_cpu()
    elif current_platform.is_cuda():
        on_cuda()
    else:
        got = current_platform.device_name or "an unknown platform"
        refuse("the platform", got, "CUDA or a CPU")
    on = True


def configurations() -> None:
    """Let every new configuration of this process install what it needs, check it, and report it in the log."""
    from vllm.config import VllmConfig

    def checking(made: Callable[[Any], None]) -> Callable[[Any], None]:
        def post_init(self: Any) -> None:
            if choice.asks(self):
                everything()
            choice.check(self)
            made(self)
            choice.report(self)

        return post_init

    wrap(VllmConfig, "__post_init__", checking)


def by_configuration() -> None:
    """Register a name, and do nothing else until vLLM is asked for it: in a configuration that is made in this process,
    or in one that another process sends."""
    global ready
    ready = True
    backend_name()
    configurations()
    if asked:
        everything()


def backend_name() -> None:
    """Register the backend for dense models as --attention-backend DSV4_GLUON."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if BACKEND not in AttentionBackendEnum.__members__:
        register_backend(BACKEND, DENSE)
    # vLLM sends its configuration to processes that have not loaded any plug-in yet, and do not know the name.
    copyreg.pickle(AttentionBackendEnum, _pickled)  # type: ignore[arg-type]


def _pickled(member: Any) -> tuple[Any, tuple[Any, ...]]:
    return (backend_member, ()) if member.name == BACKEND else (type(member), (member.value,))


def backend_member() -> Any:
    """Return the name, in a process that another one sends it to."""
    global asked
    # In either case vLLM's own attention would run under dsv4's name.
    if switch() is False:
        refuse(SWITCH, f"0 in a process with --attention-backend {BACKEND}", "1 or unset in every process")
    if not plugin_allowed():
        got = f"{os.environ['VLLM_PLUGINS']!r} in a process with --attention-backend {BACKEND}"
        refuse("VLLM_PLUGINS", got, f"a list with {PLUGIN}, or unset, in every process")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend_name()
    asked = True
    if ready:
        everything()
    return AttentionBackendEnum[BACKEND]


def the_indexer() -> None:
    """Replace the class of DeepSeek-V4's indexer where its layer looks it up; for V4.1 see v41.py."""
    from vllm.config import get_current_vllm_config
    from vllm.models.deepseek_v4 import attention

    from dsv4.integrations.vllm.indexer import Indexer

    def choosing(theirs: type) -> Callable[..., Any]:
        def indexer(*arguments: Any, **options: Any) -> Any:
            ours = "indexer" in parts() and choice.v4_is_ours(get_current_vllm_config())
            return (Indexer if ours else theirs)(*arguments, **options)

        return indexer

    wrap(attention, "SparseAttnIndexer", choosing)


def the_experts() -> None:
    """Replace the class that loads and runs MXFP4 experts where the quantisation of DeepSeek-V4 looks it up."""
    from vllm.config import get_current_vllm_config
    from vllm.models.deepseek_v4 import quant_config

    def choosing(theirs: type) -> Callable[..., Any]:
        def method(*arguments: Any, **options: Any) -> Any:
            from dsv4.integrations.vllm.experts import Method

            ours = "experts" in parts() and choice.v4_is_ours(get_current_vllm_config())
            return (Method if ours else theirs)(*arguments, **options)

        return method

    wrap(quant_config, "Mxfp4MoEMethod", choosing)


def on_cuda() -> None:
    """Wrap the functions that choose the attention class of a layer where the layer looks them up."""
    from vllm.models.deepseek_v4.nvidia import model
    from vllm.models.deepseek_v41 import attention as attention_v41
    from vllm.models.deepseek_v41.nvidia import dspark as dspark_v41
    from vllm.models.deepseek_v41.nvidia import model as model_v41

    from dsv4.integrations.vllm import v4, v41

    def choosing(ours: Callable[[], type], theirs: Callable[[Any], type]) -> Callable[[Any], type]:
        def select(vllm_config: Any) -> type:
            choice.check(vllm_config)
            return ours() if choice.v4_is_ours(vllm_config) else theirs(vllm_config)

        return select

    wrap(model, "_select_dsv4_attn_cls", functools.partial(choosing, v4.cuda_class))
    wrap(model_v41, "_select_dsv4_attn_cls", functools.partial(choosing, v41.cuda_class))
    wrap(attention_v41, "_use_v41_mxfp8_kv_record", v41.record_rule)
    wrap(attention_v41, "_indexer_k_cache_head_dim", v41.key_width)
    wrap(dspark_v41, "_insert_context_kv", v41.context_rows)


def on_a_cpu() -> None:
    """Replace the one V4 class and the one dense backend of the CPU build, which looks at no name."""
    from vllm.models.deepseek_v4.cpu import model
    from vllm.platforms.cpu import CpuPlatform

    from dsv4.integrations.vllm import v4

    def choosing(theirs: type) -> Callable[..., Any]:
        def attention(vllm_config: Any, *arguments: Any, **options: Any) -> Any:
            choice.check(vllm_config)
            ours = v4.cpu_class() if choice.v4_is_ours(vllm_config) else theirs
            return ours(vllm_config, *arguments, **options)

        return attention

    def naming(theirs: Callable[..., str]) -> Callable[..., str]:
        def get_attn_backend_cls(selected_backend: Any, attn_selector_config: Any, **options: Any) -> str:
            if getattr(selected_backend, "name", None) != BACKEND:
                return theirs(selected_backend, attn_selector_config, **options)
            if attn_selector_config.use_mla or attn_selector_config.use_sparse:
                refuse("--attention-backend", f"{BACKEND} for MLA layers", "dense models and DeepSeek-V4")
            return DENSE

        return get_attn_backend_cls

    wrap(model, "DeepseekV4CPUAttention", choosing)
    wrap(CpuPlatform, "get_attn_backend_cls", naming)
