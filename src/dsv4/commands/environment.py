"""Every environment variable that dsv4, softsm and what they build on read. `dsv4 doctor` shows their values;
docs/environment.md is the same list for readers, and tests/dsv4/commands/test_environment.py compares both with the
sources."""

from __future__ import annotations

from typing import NamedTuple


class Variable(NamedTuple):
    name: str
    default: str
    effect: str


DSV4 = (
    Variable("DSV4_CHECK", "0", "1: calls on a GPU check values of indices, lengths and starts too, and synchronize"),
    Variable("DSV4_AOT", "", "directory that `dsv4 compile` wrote: kernels found there are not compiled"),
    Variable("DSV4_CUBINS", "1", "0: kernels of the wheel dsv4-cubins are not used where it is installed"),
    Variable("DSV4_VLLM", "", "1: vLLM's attention is dsv4's; 0: it is not; unset: --attention-backend decides"),
    Variable("DSV4_VLLM_PARTS", "indexer", "further parts to replace in vLLM: indexer, compressor, insertion, experts"),
    Variable("DSV4_VLLM_ROWS", "", "v41: DeepSeek-V4.1 keeps its own rows in vLLM, 528 and 288 bytes, on Hopper too"),
    Variable("DSV4_SGLANG", "0", "1: switches the SGLang plug-in on"),
    Variable("DSV4_SGLANG_PARTS", "", "further parts to replace in SGLang: indexer, compressor, insertion, experts"),
)
SOFTSM = (
    Variable("SOFTSM", "", "sm_90a, sm_100a or sm_103a: Triton programs of this process run in softsm"),
    Variable("SOFTSM_CACHE", "~/.cache/softsm", "directory for softsm's own compiled code"),
    Variable("SOFTSM_PROCESSES", "CPU cores", "processes that one launch in softsm may use"),
    Variable("SOFTSM_CLANG", "newest on PATH", "the clang++ that compiles CUDA C++ programs for softsm"),
    Variable("SOFTSM_BUDGET", "20000000000", "warp instructions after which a launch in softsm ends with an error"),
    Variable("SOFTSM_SERVE", "1", "0: a resident process (softsm serve) is not used"),
)
OTHERS = (
    Variable("VLLM_PLUGINS", "all", "vLLM: the plug-ins it loads; must include dsv4 if set"),
    Variable("SGLANG_PLUGINS", "all", "SGLang: the plug-ins it loads; must include dsv4 if set"),
    Variable("TRITON_CACHE_DIR", "~/.triton/cache", "Triton: directory for compiled kernels"),
    Variable("TRITON_INTERPRET", "0", "Triton: its interpreter, which does not run Gluon kernels"),
    Variable("CUDA_VISIBLE_DEVICES", "all", "CUDA: the GPUs that torch sees"),
    Variable("CUDA_HOME", "", "CUDA toolkit whose headers softsm gives to clang; without it softsm has its own"),
    Variable("CUDA_PATH", "", "the same, if CUDA_HOME is not set"),
    Variable("XDG_CACHE_HOME", "~/.cache", "parent of softsm's cache, if SOFTSM_CACHE is not set"),
)
EVERY = (*DSV4, *SOFTSM, *OTHERS)
