"""What the plug-in replaces in vLLM, in one place: the class of DeepSeek-V4's attention, the function that its prefill
calls, the class of its indexer, the last step of its compressor, and one backend name."""

import copyreg
import functools
from typing import Any

from dsv4.integrations.vllm import BACKEND, DENSE, SWITCH, contract, logger, parts, refuse, switch

MARK = "_dsv4_wrapped"


asked = False  # by a configuration that another process sent
ready = False  # vLLM has called register() in this process
on = False


def everything() -> None:
    """Twice is once."""
    global on
    if on:
        return
    contract.check_version()
    contract.check()
    from vllm.platforms import current_platform

    backend_name()
    prefill_and_parts()
    if current_platform.is_cpu():
        on_a_cpu()
    elif current_platform.is_cuda():
        on_cuda()
    else:
        refuse(SWITCH, f"1 on {current_platform.device_name or 'an unknown platform'}", "CUDA or a CPU")
    on = True
    what = ", ".join(["attention", *parts()])
    logger.warning("dsv4 is on: DeepSeek-V4's %s; --attention-backend %s for dense models", what, BACKEND)


def by_configuration() -> None:
    """A name that vLLM may be asked for, and nothing else until it is: in a configuration that is made in this process,
    or in one that another process sends."""
    global ready
    from vllm.config import VllmConfig

    ready = True
    backend_name()
    made = VllmConfig.__post_init__
    if not hasattr(made, MARK):

        @functools.wraps(made)
        def post_init(self: Any) -> None:
            if getattr(self.attention_config.backend, "name", None) == BACKEND:
                everything()
            made(self)

        setattr(post_init, MARK, True)
        VllmConfig.__post_init__ = post_init
    if asked:
        everything()
    else:
        how = f"{SWITCH}=1 or --attention-backend {BACKEND}"
        logger.warning("dsv4 is installed and off; %s switches its attention on", how)


def backend_name() -> None:
    """--attention-backend DSV4 names the backend for dense models."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if BACKEND not in AttentionBackendEnum.__members__:
        register_backend(BACKEND, DENSE)
    # vLLM sends its configuration to processes that have not loaded any plug-in yet, and do not know the name.
    copyreg.pickle(AttentionBackendEnum, _pickled)  # type: ignore[arg-type]


def _pickled(member: Any) -> tuple[Any, tuple[Any, ...]]:
    return (backend_member, ()) if member.name == BACKEND else (type(member), (member.value,))


def backend_member() -> Any:
    """The name, in a process that another one sends it to."""
    global asked
    if switch() is False:  # or vLLM's own attention would serve under the name
        refuse(SWITCH, f"0 in a process with --attention-backend {BACKEND}", "1 or unset in every process")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend_name()
    asked = True
    if ready:
        everything()
    return AttentionBackendEnum[BACKEND]


def prefill_and_parts() -> None:
    """Names where DeepSeek-V4's modules look them up; DeepSeek-V3.2 and others have their own."""
    from vllm.models.deepseek_v4 import attention, compressor
    from vllm.models.deepseek_v4.nvidia import flashmla
    from vllm.platforms import current_platform

    from dsv4.integrations.vllm import indexer, v4
    from dsv4.integrations.vllm.compressor import store

    flashmla.flash_mla_sparse_fwd = v4.sparse_fwd
    if "indexer" in parts():
        attention.SparseAttnIndexer = indexer.Indexer
    if "compressor" in parts():
        compressor.compress_norm_rope_store_triton = store
        if current_platform.is_cuda():
            from vllm.models.deepseek_v4.nvidia.ops import sparse_attn_compress_cutedsl

            sparse_attn_compress_cutedsl._SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL = store


def on_cuda() -> None:
    """The function that chooses the attention class of a DeepSeek-V4 layer is wrapped where the layer looks it up."""
    from vllm.models.deepseek_v4.nvidia import model

    chosen = model._select_dsv4_attn_cls
    if hasattr(chosen, MARK):
        return

    @functools.wraps(chosen)
    def select(vllm_config: Any) -> type:
        from dsv4.integrations.vllm import v4

        check_choice(vllm_config)
        return v4.cuda_class()

    setattr(select, MARK, True)
    model._select_dsv4_attn_cls = select


def on_a_cpu() -> None:
    """The CPU build has one V4 class and one dense backend, and looks at no name: both are replaced."""
    from vllm.models.deepseek_v4.cpu import model
    from vllm.platforms.cpu import CpuPlatform

    from dsv4.integrations.vllm import v4

    model.DeepseekV4CPUAttention = v4.cpu_class()
    named = CpuPlatform.get_attn_backend_cls.__func__
    if hasattr(named, MARK):
        return

    @functools.wraps(named)
    def get_attn_backend_cls(cls: Any, selected_backend: Any, *rest: Any, **options: Any) -> str:
        if getattr(selected_backend, "name", None) == BACKEND:
            return DENSE
        return named(cls, selected_backend, *rest, **options)

    setattr(get_attn_backend_cls, MARK, True)
    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def check_choice(vllm_config: Any) -> None:
    """Another --attention-backend for DeepSeek-V4 where the plug-in is on: a contradiction, or a second engine in a
    process."""
    asked = vllm_config.attention_config.backend
    if asked is not None and asked.name != BACKEND:
        refuse("--attention-backend", f"{asked.name} in a process where dsv4 is on", f"{BACKEND}, or none")
