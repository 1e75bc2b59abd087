"""One engine of SGLang on a CPU: python sglang_run.py CHECKPOINT REQUESTS.json RESULT.json

REQUESTS: {"engine": {options of sglang.Engine}, "batches": [{"prompts": [[token, ..], ..], "tokens": n}]}.
RESULT: {"batches": [{"tokens": [..], "cached": [..], "logprobs": [of each prompt], "calls": {dsv4's}}],
"kernels": {stand-ins of CUDA kernels: calls}}.
DSV4_SGLANG in the environment says whether the plug-in is on; SGLang finds it through its entry point.

SGLang starts a scheduler and a detokenizer, each in a process that imports this file first. What is outside of main()
happens in all of them: a torchvision without code and two operators in the place of packages that exist for GPUs
only, calls that are counted in a file, and for DeepSeek-V4 (SGLANG_RUN_V4=1) stand-ins of CUDA kernels.
"""

import importlib.machinery
import json
import os
import sys
import types
from collections import Counter
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Names(type):
    """A class that has every attribute; members of enumerations are their own names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Module(types.ModuleType):
    """A module that has every name, as a class of nothing."""

    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return Names(name, (), {})


def no_torchvision() -> None:
    """SGLang imports torchvision whatever the model; PyPI's builds of it do not go with a torch for CPUs."""
    for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
        parent, _, last = f"torchvision{name}".rpartition(".")
        sys.modules[f"torchvision{name}"] = module = Module(f"torchvision{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        if parent:
            setattr(sys.modules[parent], last, module)


def cpu_operators() -> None:
    """SGLang's kernels for CPUs are not on PyPI. On aarch64 it asks for two of them at start, which bind threads and
    set up shared memory between ranks."""
    import torch

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    cpu_operators.library = library  # an operator lives as long as its library
    for schema in ("init_cpu_threads_env(str ids) -> ()", "initialize(int size, int rank) -> ()"):
        name = schema.split("(")[0]
        if not hasattr(torch.ops.sgl_kernel, name):
            library.define(schema)
            library.impl(name, lambda *_: None, "CompositeExplicitAutograd")


class CountedInAFile(Counter):
    suffix = ".calls"

    def __setitem__(self, name: str, n: int) -> None:
        super().__setitem__(name, n)
        Path(os.environ["DSV4_CALLS"]).with_suffix(self.suffix).write_text(json.dumps(self))


class KernelsInAFile(CountedInAFile):
    suffix = ".kernels"


def counted_calls() -> None:
    import dsv4.integrations.sglang as plugin

    plugin.calls = CountedInAFile()


no_torchvision()
cpu_operators()
if os.environ.get("DSV4_CALLS"):
    counted_calls()
if os.environ.get("SGLANG_RUN_V4"):
    import sglang_cuda_kernels

    sglang_cuda_kernels.prepare()
    if os.environ.get("DSV4_CALLS"):
        sglang_cuda_kernels.counts = KernelsInAFile()
if os.environ.get("FP4_CHECKPOINT"):
    import compared_experts

    compared_experts.prepare()


def main(checkpoint: str, requests: str, result: str) -> None:
    asked = json.loads(Path(requests).read_text())
    calls, kernels = (Path(result).with_suffix(suffix) for suffix in (".calls", ".kernels"))
    calls.write_text("{}")
    kernels.write_text("{}")
    os.environ["DSV4_CALLS"] = str(calls)  # for the processes that SGLang starts

    import sglang

    options = dict(
        model_path=checkpoint, device="cpu", dtype="float32", skip_tokenizer_init=True, disable_overlap_schedule=True,
        max_running_requests=8, max_total_tokens=1 << 13, mem_fraction_static=0.3,
    )  # fmt: skip
    engine = sglang.Engine(**options | asked["engine"])
    batches = []
    for batch in asked["batches"]:
        before = Counter(json.loads(calls.read_text()))
        sampling = dict(temperature=0, max_new_tokens=batch["tokens"], ignore_eos=True)
        outs = engine.generate(
            input_ids=batch["prompts"],
            sampling_params=sampling,
            return_logprob=True,
            logprob_start_len=0 if batch.get("logprobs") else -1,
        )
        got = dict(
            tokens=[o["output_ids"] for o in outs],
            cached=[o["meta_info"]["cached_tokens"] for o in outs],
            calls=Counter(json.loads(calls.read_text())) - before,  # written before the token was sent
        )
        if batch.get("logprobs"):
            got["logprobs"] = [[p for p, *_ in o["meta_info"]["input_token_logprobs"][1:]] for o in outs]
        batches.append(got)
        Path(result).write_text(json.dumps(dict(batches=batches, kernels=json.loads(kernels.read_text()))))
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
