"""One engine of vLLM on a CPU, in a process of its own: python vllm_run.py CHECKPOINT REQUESTS.json RESULT.json

REQUESTS: {"engine": {options of vllm.LLM}, "batches": [{"prompts": [[token, ..], ..], "tokens": n, "logprobs": bool}]}.
RESULT: {"batches": [{"tokens": [..], "cached": [..], "logprobs": [..]}], "calls": {dsv4's}, "operators": {stand-ins'},
"errors": [of every call of dsv4.v4_attention against the oracle in fp64, relative to the largest value]}.
DSV4_VLLM in the environment says whether the plug-in is on; vLLM finds it through its entry point.
DSV4_RECORD=FILE: shapes and layouts of every call of dsv4.v4_attention, as JSON.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

import torch


def chunked_prefill() -> None:
    """vLLM switches chunked prefill and prefix caching off for DeepSeek-V4 on CPUs without AMX; the stand-ins and dsv4
    need no AMX, so the question is answered "yes" while the configuration is checked."""
    from vllm.platforms import CpuArchEnum
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__
    architecture = CpuPlatform.get_cpu_architecture

    def check_as_with_amx(cls, config):
        said = torch.cpu._is_amx_tile_supported
        torch.cpu._is_amx_tile_supported = lambda: True
        CpuPlatform.get_cpu_architecture = classmethod(lambda cls: CpuArchEnum.X86)
        try:
            return check(cls, config)
        finally:
            torch.cpu._is_amx_tile_supported = said
            CpuPlatform.get_cpu_architecture = architecture

    CpuPlatform.check_and_update_config = classmethod(check_as_with_amx)


def missing_schedule_keys() -> None:
    """vLLM 0.32.0's own CPU class: its builder leaves out two keys that the shared build() reads."""
    from vllm.models.deepseek_v4.cpu import cpu_mla

    builder = cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder
    made = builder.build_tile_scheduler
    builder.build_tile_scheduler = lambda self, n: {"c1a": None, "c2a": None, **made(self, n)}


def record(path: str) -> None:
    import dsv4
    from dsv4 import Fp8Cache

    attention, seen = dsv4.v4_attention, []

    def layout(x):
        if isinstance(x, Fp8Cache):
            return dict(pages=x.pages, rows_per_page=x.rows_per_page, page_stride=x.page_stride)
        if isinstance(x, torch.Tensor):
            few = x.dtype == torch.int32 and x.ndim == 1
            return dict(shape=list(x.shape), stride=list(x.stride()), dtype=str(x.dtype)) | (
                dict(values=x.tolist()) if few else {}
            )
        return x

    def noted(*arguments, **options):
        names = ("q", "window", "window_indices", "compressed", "compressed_indices")
        seen.append({name: layout(x) for name, x in (dict(zip(names, arguments)) | options).items()})
        Path(path).write_text(json.dumps(seen))
        return attention(*arguments, **options)

    dsv4.v4_attention = noted


def compare() -> list[float]:
    """Every call of dsv4.v4_attention also goes to the oracle -> the errors, as they come."""
    import dsv4
    from dsv4 import reference

    attention, errors = dsv4.v4_attention, []

    def compared(*arguments, out, **options):
        result = attention(*arguments, out=out, **options)
        wanted, _ = reference.v4_attention(*arguments, **options)
        errors.append(float((out - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)))
        return result

    dsv4.v4_attention = compared
    return errors


def main(checkpoint: str, requests: str, result: str) -> None:
    import triton.backends

    import softsm

    asked = json.loads(Path(requests).read_text())
    # vLLM's CPU build wants a Triton with a backend "cpu"; softsm plays a Hopper GPU for vLLM's metadata kernels.
    triton.backends.backends["cpu"] = triton.backends.backends["nvidia"]
    with softsm.use("sm_90a", sms=1):
        import vllm_cpu_operators
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform

        import dsv4.integrations.vllm as plugin

        chunked_prefill()
        current_platform.import_kernels()
        counts = vllm_cpu_operators.define()
        missing_schedule_keys()
        errors = compare()
        if os.environ.get("DSV4_RECORD"):
            record(os.environ["DSV4_RECORD"])
        engine = LLM(
            model=str(Path(checkpoint).resolve()), skip_tokenizer_init=True, max_model_len=4096, max_num_seqs=8,
            enforce_eager=True, kv_cache_memory_bytes=1 << 28, **asked["engine"],
        )  # fmt: skip
        batches = []
        for batch in asked["batches"]:
            sampling = SamplingParams(
                temperature=0, ignore_eos=True, detokenize=False, max_tokens=batch["tokens"],
                prompt_logprobs=0 if batch.get("logprobs") else None,
            )  # fmt: skip
            prompts = batch["prompts"]
            outs = engine.generate([{"prompt_token_ids": p} for p in prompts], sampling)
            got = dict(
                tokens=[list(o.outputs[0].token_ids) for o in outs], cached=[o.num_cached_tokens for o in outs]
            )
            if batch.get("logprobs"):
                got["logprobs"] = [
                    [line[t].logprob for line, t in zip(o.prompt_logprobs[1:], p[1:])] for o, p in zip(outs, prompts)
                ]
            batches.append(got)
            done = dict(batches=batches, calls=dict(plugin.calls), operators=dict(counts), errors=errors)
            Path(result).write_text(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
