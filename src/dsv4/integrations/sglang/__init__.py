"""The plug-in for SGLang: the sparse attention of DeepSeek-V4 and V4.1, and dense models, on dsv4.

    pip install 'dsv4[sglang]'
    DSV4_SGLANG=1 python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V4-Flash --tp 8
    DSV4_SGLANG=1 python -m sglang.launch_server --model-path google/gemma-4-31b-it --attention-backend dsv4_gluon

SGLang finds it through the entry point ``sglang.srt.plugins`` and calls :func:`register` in every process. Without
``DSV4_SGLANG=1`` it only logs that it is off. With it:

* SGLang's two FlashMLA functions are replaced by those of :mod:`dsv4.integrations.sglang.v4`; caches, lists and
  schedule stay SGLang's. ``DSV4_SGLANG_PARTS`` names what else is replaced, separated by commas: ``indexer``
  (:func:`dsv4.index_topk`), ``compressor`` (its last step), ``insertion`` (writing new rows to the pages) and
  ``experts`` (MXFP4 experts on :func:`dsv4.moe`). They have run in a whole engine on a CPU, not on a GPU, and are off
  by default;
* ``--attention-backend dsv4_gluon`` runs dense models on :func:`dsv4.fmha_paged` (the name ``dsv4`` is SGLang's own,
  for its DeepSeek-V4 backend). A dense model without it keeps SGLang's choice.

SGLang logs errors of a plug-in and continues without it. An error in this plug-in therefore ends the process, with the
reason. Hooks that SGLang could not apply, and SGLang kernels that would bypass dsv4 (fused "mega" attention, FP8
queries in prefill), raise an error when a DeepSeek-V4 or V4.1 model reaches them. V4.1 calls the same two functions, on
whatever rows SGLang keeps (``SGLANG_DSV4_KV_LAYOUT``; on Hopper SGLang accepts V4's alone). Of the parts it has
``indexer`` (decode alone) and ``insertion`` (V4's rows alone). It has run in no engine yet.
"""

import logging
import os
from collections import Counter
from importlib import metadata
from typing import NoReturn

from dsv4.integrations.engines import named_parts

SWITCH = "DSV4_SGLANG"
PARTS_SWITCH = "DSV4_SGLANG_PARTS"
PARTS = ("indexer", "compressor", "insertion", "experts")  # parts that may be replaced besides the attention
TESTED = "0.5.23"
BACKEND = "dsv4_gluon"

# counts of this process: "decode", "prefill", "index", "compress", "insert", "experts", "dense decode", "dense prefill"
calls: Counter[str] = Counter()
logger = logging.getLogger("sglang.dsv4")


def register() -> None:
    """Install the plug-in. SGLang calls this in each of its processes."""
    said = os.environ.get(SWITCH) or "0"
    if said not in ("0", "1"):
        raise SystemExit(f"{SWITCH}: got {said!r}; accepted: 1 (on), 0 or unset (off)")
    if said != "1":
        logger.warning(
            "the dsv4 plug-in is installed and off; %s=1 switches it on (--attention-backend dsv4 is SGLang's own)",
            SWITCH,
        )
        return
    if (found := metadata.version("sglang")) != TESTED:
        raise SystemExit(
            f"dsv4: got SGLang {found}; accepted: {TESTED}, whose calls the plug-in knows. "
            f"{SWITCH}=0 gives SGLang's own attention"
        )
    try:
        from dsv4.integrations.sglang import install

        install.everything()
    except Exception as why:
        raise SystemExit(f"dsv4: {why!r}. {SWITCH}=0 gives SGLang's own attention") from why
    what = ", ".join(["attention", *parts()])
    logger.warning(
        "the dsv4 plug-in is on: DeepSeek-V4's and V4.1's %s; --attention-backend %s for dense", what, BACKEND
    )


def parts() -> list[str]:
    """Return the parts that DSV4_SGLANG_PARTS names; a ValueError names unknown ones."""
    return named_parts(PARTS_SWITCH, PARTS)


def refuse(what: str, got: object, accepted: str, instead: str = f"{SWITCH}=0") -> NoReturn:
    """Raise a ValueError that also explains how to get SGLang's own attention."""
    raise ValueError(f"{what}: got {got}; accepted: {accepted}. {instead} gives SGLang's own attention")
