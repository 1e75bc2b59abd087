"""The plug-in for vLLM: DeepSeek-V4's sparse attention, and dense models with head dims up to 512, on dsv4.

    pip install 'dsv4[vllm]'
    vllm serve deepseek-ai/DeepSeek-V4-Flash --attention-backend DSV4 ...

vLLM finds it through the entry point ``vllm.general_plugins`` and calls :func:`register` in every process. It is off,
and says so in the log, until ``DSV4_VLLM=1`` or ``--attention-backend DSV4`` turns it on (``DSV4_VLLM=0`` keeps it
off). Then:

* DeepSeek-V4 (decode and prefill, MTP layers too) runs on :func:`dsv4.v4_attention`, with any number of heads per rank.
  ``DSV4_VLLM_PARTS`` names what else is replaced, separated by commas: ``indexer`` (:func:`dsv4.index_topk`),
  ``compressor`` (:func:`dsv4.compress.pages.compress_pages`) and ``insertion`` (RoPE of queries and rows, writing rows
  to the pages). The last two were not measured yet. The default is the indexer;
* ``--attention-backend DSV4`` runs dense models on :func:`dsv4.fmha_paged`. A dense model without it keeps vLLM's
  choice.

Nothing falls back silently. An untested version of vLLM, a changed signature, a GPU without kernels or another
``--attention-backend`` for DeepSeek-V4 raise an error that says how to turn the plug-in off. With ``DSV4_VLLM=0``, or a
version of vLLM that was not tested, vLLM does not know the name DSV4 and raises its own error if you use it.
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


def switch() -> bool | None:
    """What DSV4_VLLM says: on, off, or nothing: then the configuration decides. ValueError where it is neither."""
    said = os.environ.get(SWITCH) or None
    if said not in (None, "0", "1"):
        raise ValueError(f"{SWITCH}: got {said!r}; accepted: 1 (on), 0 (off), unset (--attention-backend {BACKEND})")
    return None if said is None else said == "1"


def parts() -> list[str]:
    """What DSV4_VLLM_PARTS names; ValueError where there is no such part."""
    named = [part.strip() for part in os.environ.get(PARTS_SWITCH, PARTS[0]).split(",") if part.strip()]
    if unknown := [part for part in named if part not in PARTS]:
        raise ValueError(f"{PARTS_SWITCH}: got {', '.join(unknown)}; accepted: any of {', '.join(PARTS)}, or nothing")
    return named


def register() -> None:
    """What vLLM calls in each of its processes. Twice is once. Imports that may fail are in here: vLLM swallows
    errors of the entry point's import, but not of this call."""
    on = switch()
    if on is False:
        logger.warning("dsv4 is installed and off; %s=1 switches its attention on", SWITCH)
        return
    from dsv4.integrations.vllm import contract, install

    if on is None and (why := contract.other_version()):
        logger.warning("dsv4 is installed and off, and cannot be switched on: %s", why)
    elif on is None:
        install.by_configuration()
    else:
        install.everything()


def refuse(what: str, got: object, accepted: str) -> None:
    """A ValueError that also says how to get vLLM's own attention."""
    raise ValueError(f"{what}: got {got}; accepted: {accepted}. {SWITCH}=0 gives vLLM's own attention")
