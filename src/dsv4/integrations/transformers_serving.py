"""Continuous batching in Hugging Face transformers (generate_batch, ContinuousBatchingManager), running on dsv4.

    import dsv4.integrations.transformers_serving
    dsv4.integrations.transformers_serving.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="dsv4_flash")
    model.generate_batch(...)

Continuous batching only accepts attention whose name contains "flash", and looks for its functions in packages and on
the hub. :func:`register` adds one name, under which the functions of :mod:`dsv4.integrations.flash_attn` are used
instead of flash-attn's. Pages, masks and scheduling stay transformers'. It supports full and sliding layers, GQA, sinks
(gpt-oss) and head dims up to 512, on every device that dsv4 supports, with transformers 5.17 to 5.22.

transformers' continuous batching itself does not support DeepSeek-V4, nor models whose layers have different head dims
(Gemma 4), with any attention. ``transformers serve`` accepts only names from the hub: see ``dsv4 hub``.
"""

import functools
from typing import Any

from dsv4.integrations import flash_attn
from dsv4.integrations.wrapping import wrap
from dsv4.runtime import checks
from dsv4.runtime.checks import Backend

NAME = "dsv4_flash"
# Models with a list of the implementations they were tried with fall back to the first of it for other names.
LISTING = {"gpt_oss": "GptOssPreTrainedModel"}

_answers: dict[str, Backend] = {}  # name -> backend


def register(name: str = NAME, *, backend: Backend = "auto") -> None:
    """Make attn_implementation=name work. It may be called again. backend: as in dsv4.fmha."""
    checks.backend(backend)
    if "flash" not in name or "/" in name or "|" in name:
        checks.fail("name", repr(name), "a name with 'flash' in it and neither '/' nor '|'")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers import modeling_flash_attention_utils as utils
        from transformers.integrations.flash_attention import flash_attention_forward
        from transformers.masking_utils import flash_attention_mask
    except ImportError as missing:
        raise ImportError(f"{__name__} needs transformers 5.17 or newer (pip install 'dsv4[hf]')") from missing
    wrap(utils, "_lazy_imports", _answering)
    _answers[name] = backend
    forwards: dict[str, Any] = {name: flash_attention_forward}
    try:  # transformers before 5.22 has a function of its own for pages, under a name of its own
        from transformers.integrations.flash_paged import paged_attention_forward
    except ImportError:
        pass
    else:
        forwards["paged|" + name] = paged_attention_forward
    for key, forward in forwards.items():
        AttentionInterface.register(key, forward)
        AttentionMaskInterface.register(key, flash_attention_mask)
    for module, cls in LISTING.items():
        _list(module, cls, list(forwards))


def _answering(find: Any) -> Any:
    """Extend transformers' search for the functions of an implementation by ours."""

    def lazy_imports(implementation: str | None, *rest: Any, **options: Any) -> tuple:
        backend = _answers.get((implementation or "").removeprefix("paged|"))
        if backend is None:
            return find(implementation, *rest, **options)
        from transformers.modeling_flash_attention_utils import _pad_input, _unpad_input

        calls = (flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func)
        return (*(functools.partial(f, backend=backend) for f in calls), None, _pad_input, _unpad_input)

    return lazy_imports


def _list(module: str, cls: str, names: list[str]) -> None:
    """Let a model use these implementations."""
    from importlib import import_module

    try:
        model = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), cls)
    except (ImportError, AttributeError):
        return
    listed = model._compatible_flash_implementations or []
    model._compatible_flash_implementations = [*listed, *(n for n in names if n not in listed)]
