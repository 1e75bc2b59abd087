"""DeepSeek-V4.1 in Hugging Face transformers, which has no class for it: a small model, an oracle rather than a server.

    import dsv4.integrations.deepseek_v41
    dsv4.integrations.deepseek_v41.register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="dsv4")

It loads the checkpoint by its own names and keeps its bytes: FP8 weights with a scale for 32 x 32, FP4 experts. With
"eager", the default, everything is plain torch; "dsv4" runs the caches, the indexer, the attention and the experts by
dsv4's operations. Drafts (DSpark) and images are left out.
"""

from __future__ import annotations

import importlib
from typing import Any

from dsv4.integrations import transformers as v4

__all__ = ["DeepseekV41Config", "DeepseekV41ForCausalLM", "register"]
WHERE = {"DeepseekV41Config": "configuration", "DeepseekV41ForCausalLM": "modeling"}


def __getattr__(name: str) -> Any:  # transformers is imported when a class is wanted
    if name in WHERE:
        return getattr(importlib.import_module(f"{__name__}.{WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Make AutoConfig and AutoModelForCausalLM know "deepseek_v41", and attn_implementation="dsv4" work. It may be
    called again."""
    v4.register()  # the name "dsv4", which transformers compares with its list
    from transformers import AutoConfig, AutoModelForCausalLM

    from .configuration import DeepseekV41Config
    from .modeling import DeepseekV41ForCausalLM

    AutoConfig.register(DeepseekV41Config.model_type, DeepseekV41Config, exist_ok=True)
    AutoModelForCausalLM.register(DeepseekV41Config, DeepseekV41ForCausalLM, exist_ok=True)
