"""The plug-in for vLLM: the sparse attention of DeepSeek-V4 and V4.1, and dense models, on dsv4.

    pip install 'dsv4[vllm]'
    vllm serve deepseek-ai/DeepSeek-V4-Flash --attention-backend DSV4_GLUON ...

vLLM finds it through the entry point ``vllm.general_plugins`` and calls :func:`register` in every process. It is off,
and says so in the log, until ``DSV4_VLLM=1`` or ``--attention-backend DSV4_GLUON`` turns it on (``DSV4_VLLM=0`` keeps
it off). Each configuration decides for itself: of two engines in one process, one may run on dsv4 and the other not.
On:

* DeepSeek-V4 (decode and prefill, MTP layers too) runs on :func:`dsv4.v4_attention`, with any number of heads per rank.
  ``DSV4_VLLM_PARTS`` names what else is replaced, separated by commas: ``indexer`` (:func:`dsv4.index_topk`),
  ``compressor`` (:func:`dsv4.compress.pages.compress_pages`), ``insertion`` (RoPE of queries and rows, writing rows
  to the pages) and ``experts`` (MXFP4 experts on :func:`dsv4.moe`). The last three were not measured in an engine. The
  default is the indexer;
* DeepSeek-V4.1 (decode, prefill, DSpark's layers) runs on the same switch, with its two-level indexer, on vLLM's pages:
  rows of 584 bytes on Hopper. ``DSV4_VLLM_ROWS=v41`` or ``--kv-cache-dtype nvfp4_ds_mla`` gives the model's own there,
  528 and 288 bytes and index keys of 68, which dsv4 then writes too. It has run on no GPU yet, and ``experts`` are V4's
  alone;
* ``--attention-backend DSV4_GLUON`` runs dense models on :func:`dsv4.fmha_paged`, and ``backend_per_kind`` runs the
  layers of one kind on it. A dense model without either keeps vLLM's choice.

Nothing falls back silently. An untested version of vLLM, a changed signature, a GPU without kernels or another
``--attention-backend`` for DeepSeek-V4 or V4.1 raise an error that says how to turn the plug-in off. With
``DSV4_VLLM=0``, or a version of vLLM that was not tested, vLLM does not know the name DSV4_GLUON and raises its own
error if you use it.
"""

import logging
import os
from collections import Counter
from typing import NoReturn

from dsv4.integrations.engines import named_parts

SWITCH = "DSV4_VLLM"
PARTS_SWITCH = "DSV4_VLLM_PARTS"
ROWS_SWITCH = "DSV4_VLLM_ROWS"
OWN_ROWS = "v41"
# parts that may be replaced besides the attention; the first is the default
PARTS = ("indexer", "compressor", "insertion", "experts")
BACKEND = "DSV4_GLUON"
DENSE = "dsv4.integrations.vllm.dense.Backend"
PLUGIN = "dsv4"  # the name of the entry point, in VLLM_PLUGINS

# counts of this process: "decode", "prefill", "index decode", "index prefill", "index keys", "compress", "insert",
# "experts", "dense decode", "dense prefill"
calls: Counter[str] = Counter()

# vLLM configures the loggers below its own name only, and perhaps after plug-ins are loaded; warnings appear anyway.
logger = logging.getLogger("vllm.dsv4")
_said = ""  # what say() logged last


def switch() -> bool | None:
    """Return the value of DSV4_VLLM: on, off, or None, which lets the configuration decide; a ValueError otherwise."""
    said = os.environ.get(SWITCH) or None
    if said not in (None, "0", "1"):
        raise ValueError(f"{SWITCH}: got {said!r}; accepted: 1 (on), 0 (off), unset (--attention-backend {BACKEND})")
    return None if said is None else said == "1"


def parts() -> list[str]:
    """Return the parts that DSV4_VLLM_PARTS names; a ValueError names unknown ones."""
    return named_parts(PARTS_SWITCH, PARTS, default=PARTS[0])


def rows() -> str:
    """Return the value of DSV4_VLLM_ROWS: v41, or "", which lets vLLM decide; a ValueError otherwise."""
    said = os.environ.get(ROWS_SWITCH, "")
    if said not in ("", OWN_ROWS):
        raise ValueError(f"{ROWS_SWITCH}: got {said!r}; accepted: {OWN_ROWS}, or nothing for the rows that vLLM keeps")
    return said


def register() -> None:
    """Install the plug-in. vLLM calls this in each of its processes; a second call does nothing. Imports of vLLM,
    which may fail, are in here: vLLM swallows errors of the entry point's import, but not of this call."""
    on = switch()
    if on is False:
        say(f"dsv4 is installed and off; {SWITCH}=1 switches its attention on")
        return
    from dsv4.integrations.vllm import contract, install

    if on is None and (why := contract.other_version()):
        say(f"dsv4 is installed and off, and cannot be switched on: {why}")
    elif on is None:
        install.by_configuration()
    else:
        install.everything()
        install.configurations()


def say(text: str) -> None:
    """Log a line about the plug-in's state, unless it is the line that was logged last."""
    global _said
    if text != _said:
        logger.warning("%s", text)
    _said = text


def plugin_allowed() -> bool:
    """Return whether VLLM_PLUGINS, a list of names, lets vLLM load this plug-in."""
    listed = os.environ.get("VLLM_PLUGINS")
    return listed is None or PLUGIN in listed.split(",")


def way_off() -> str:
    """Return how to get vLLM's own attention. DSV4_VLLM=0 alone is not enough if the option names the backend: vLLM
    does not know the name then."""
    if switch():
        return f"{SWITCH}=0 gives vLLM's own attention; drop --attention-backend {BACKEND} too, if you use it"
    return f"Drop --attention-backend {BACKEND} for vLLM's own attention"


def refuse(what: str, got: object, accepted: str) -> NoReturn:
    """Raise a ValueError that also explains how to get vLLM's own attention."""
    raise ValueError(f"{what}: got {got}; accepted: {accepted}. {way_off()}")
