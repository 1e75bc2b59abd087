"""The plug-in for vLLM: DeepSeek-V4's sparse attention, and dense models with head dims to 512, on dsv4.

    pip install 'dsv4[vllm]'
    DSV4_VLLM=1 vllm serve deepseek-ai/DeepSeek-V4-Flash --attention-backend DSV4 ...

vLLM finds it through the entry point ``vllm.general_plugins`` and calls :func:`register` in every process. Without
``DSV4_VLLM=1`` that does nothing but say so in the log. With it:

* DeepSeek-V4 (decode and prefill, MTP layers too) runs on :func:`dsv4.v4_attention`, whatever heads a rank has.
  ``DSV4_VLLM_PARTS`` names what else is replaced, separated by commas: ``indexer`` (:func:`dsv4.index_topk`),
  ``compressor`` (:func:`dsv4.compress.pages.compress_pages`) and ``insertion`` (RoPE of queries and rows, rows into the
  pages), the last two not measured yet. The default is the indexer;
* ``--attention-backend DSV4`` is accepted, and puts dense models on :func:`dsv4.fmha_paged`. A dense model without it
  keeps vLLM's choice.

Nothing falls back silently. An untested version of vLLM, a changed signature, a GPU without kernels or another
``--attention-backend`` for DeepSeek-V4 raise, and say how to switch the plug-in off. The name DSV4 is unknown to vLLM
where the plug-in is off, so asking for it there is an error of vLLM's.
"""

import logging
import os
from collections import Counter

SWITCH = "DSV4_VLLM"
PARTS_SWITCH = "DSV4_VLLM_PARTS"
PARTS = ("indexer", "compressor", "insertion")  # that may be replaced besides the attention; the first is the default
BACKEND = "DSV4"
DENSE = "dsv4.integrations.vllm.dense.Backend"

# "decode", "prefill", "index decode", "index prefill", "compress", "insert", "dense decode", "dense prefill": of this
# process
calls: Counter[str] = Counter()

# vLLM configures the loggers below its own name only, and perhaps after plug-ins are loaded: warnings are seen anyway.
logger = logging.getLogger("vllm.dsv4")


def switched_on() -> bool:
    """Whether DSV4_VLLM asks for the plug-in; ValueError where it is neither 0 nor 1."""
    said = os.environ.get(SWITCH) or "0"
    if said not in ("0", "1"):
        raise ValueError(f"{SWITCH}: got {said!r}; accepted: 1 (on), 0 or unset (off)")
    return said == "1"


def parts() -> list[str]:
    """What DSV4_VLLM_PARTS names; ValueError where there is no such part."""
    named = [part.strip() for part in os.environ.get(PARTS_SWITCH, PARTS[0]).split(",") if part.strip()]
    if unknown := [part for part in named if part not in PARTS]:
        raise ValueError(f"{PARTS_SWITCH}: got {', '.join(unknown)}; accepted: any of {', '.join(PARTS)}, or nothing")
    return named


def register() -> None:
    """What vLLM calls in each of its processes. Twice is once. Imports that may fail are in here: vLLM swallows
    errors of the entry point's import, but not of this call."""
    if not switched_on():
        logger.warning("dsv4 is installed and off; %s=1 switches its attention on", SWITCH)
        return
    from dsv4.integrations.vllm import contract, install

    contract.check_version()
    install.everything()
    what = ", ".join(["attention", *parts()])
    logger.warning("dsv4 is on: DeepSeek-V4's %s; --attention-backend %s for dense models", what, BACKEND)


def refuse(what: str, got: object, accepted: str) -> None:
    """A ValueError that also says how to get vLLM's own attention."""
    raise ValueError(f"{what}: got {got}; accepted: {accepted}. {SWITCH}=0 gives vLLM's own attention")
