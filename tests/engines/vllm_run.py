"""One engine of vLLM on a CPU, in a process of its own: python vllm_run.py CHECKPOINT REQUESTS.json RESULT.json

REQUESTS: {"engine": {options of vllm.LLM}, "batches": [{"prompts": [[token, ..], ..], "tokens": n, "logprobs": bool,
"preempt": the number of steps after which all running requests begin anew}]}.
RESULT: {"batches": [{"tokens": [..], "cached": [..], "logprobs": [..], "calls": {dsv4's}, "accepted": drafts so far}],
"operators": {stand-ins'},
"errors": [of every call of dsv4.v4_attention against the oracle in fp64],
"choices": [of every call of dsv4.index_topk, see choice_error], "rows": [of every call of compress_pages, see
row_error]}.
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


def compare() -> dict[str, list[float]]:
    """Every call of dsv4.v4_attention, dsv4.index_topk and compress_pages also goes to an oracle -> their errors."""
    import dsv4
    from dsv4.integrations.vllm import compressor
    from dsv4.reference import forward as reference
    from dsv4.suites.calls import relative

    attention, index, compress = dsv4.v4_attention, dsv4.index_topk, compressor.compress_pages
    errors, choices, rows = [], [], []

    def compared(*arguments, out, **options):
        result = attention(*arguments, out=out, **options)
        wanted, _ = reference.v4_attention(*arguments, **options)
        errors.append(relative(out - wanted, wanted))
        return result

    def chosen(q, cache, weights, topk, *, out, **options):
        result = index(q, cache, weights, topk, out=out, **options)
        choices.append(choice_error(q, cache, weights, topk, out, **options))
        return result

    def compressed(*arguments, **options):
        compress(*arguments, **options)
        rows.append(row_error(*arguments, **options))

    dsv4.v4_attention, dsv4.index_topk, compressor.compress_pages = compared, chosen, compressed
    return dict(errors=errors, choices=choices, rows=rows)


def choice_error(q, cache, weights, topk, lists, *, lengths, block_table, request_starts, scale, request_rows) -> float:
    """How far the worst row that was chosen lies below the worst one that should have been, in fp64 and relative to the
    largest sum of magnitudes of the query; infinite where a list is not of `visible` different rows of the request."""
    assert request_rows
    page = cache.rows_per_page
    starts = range(len(q) + 1) if request_starts is None else request_starts.tolist()
    worst = 0.0
    for r in range(len(block_table)):
        some = slice(starts[r], min(starts[r + 1], len(q)))
        seen, listed = lengths[some].long(), lists[some].long().sort(-1, descending=True).values
        count = (listed >= 0).sum(-1)
        twice = (listed[:, 1:] == listed[:, :-1]) & (listed[:, 1:] >= 0)
        if bool((count != seen.clamp_max(topk)).any() | twice.any() | (listed >= seen[:, None]).any()):
            return float("inf")
        m = int(seen.max()) if len(seen) else 0
        if m > topk:
            slots = block_table[r].long().repeat_interleave(page)[:m] * page + torch.arange(m) % page
            parts = (q[some].double() @ rows_of(cache, slots).T).relu() * weights[some, :, None].double()  # [n, H, m]
            hidden = torch.arange(m) >= seen[:, None]
            scores = parts.sum(1).masked_fill(hidden, float("-inf"))
            least = scores.gather(1, listed.clamp_min(0)).masked_fill(listed < 0, float("inf")).amin(-1)
            behind = (scores.sort(-1, descending=True).values[:, topk - 1] - least).masked_fill(seen <= topk, 0.0)
            worst = max(worst, float((behind / parts.abs().sum(1).amax(-1)).max()))
    return worst


def row_error(states, tokens, requests, positions, table, slots, norm, cos_sin, out, *, ratio, eps) -> float:
    """The largest error of (up to eight of) the rows that this call made, in units of what packing may change them by:
    half a step of e4m3 and of bf16, or half of the least number of a scale at most twice what the largest value needs.
    """
    from dsv4.compress.forward import pooled

    d, lines, width, worst = len(norm), states.shape[1], states.shape[2] // 2, 0.0
    last = (((positions + 1) % ratio == 0) & (tokens >= 0) & (slots >= 0)).nonzero()[:, 0].tolist()
    for n in last[:: max(1, len(last) // 8)]:
        position, parts = int(positions[n]), []
        for t in range(max(0, position + 1 - ratio * width // d), position + 1):
            half = d if width > d and t > position - ratio else 0  # of CSA, the second half of its own window
            line = states[table[requests[n], t // lines], t % lines]
            parts.append((line[half : half + d], line[width + half : width + half + d]))
        kv, gate = (torch.stack(x).double() for x in zip(*parts))
        where = torch.tensor([position // ratio * ratio])
        row = pooled(kv[None], gate[None], norm.double(), eps, cos_sin.double(), where)[0]
        bound = row.abs() * (2**-4 + 2**-8) + row.abs().max() * 2 / 448 * 2**-10
        worst = max(worst, float(((rows_of(out, slots[n : n + 1]) - row).abs() / bound).max()))
    return worst


def rows_of(cache, slots):
    """Unpacked rows of an Fp8Cache or an IndexCache, in fp64."""
    at = slots // cache.rows_per_page, slots % cache.rows_per_page
    data, scales = cache.data_view()[at], cache.scale_view()[at]
    if data.shape[-1] == 128:
        return data.view(torch.float8_e4m3fn).double() * scales.view(torch.float32).double()
    return cache.format.dequantize(data, scales, torch.float64)


def generate(engine, prompts: list, sampling, preempt: int | None) -> list:
    """What vLLM answers. Preempted requests lose their pages, and compute prompt and tokens again."""
    given = [{"prompt_token_ids": p} for p in prompts]
    if preempt is None:
        return engine.generate(given, sampling)
    inner, steps, done = engine.llm_engine, 0, {}
    for n, one in enumerate(given):
        inner.add_request(str(n), one, sampling)
    while inner.has_unfinished_requests():
        done |= {o.request_id: o for o in inner.step() if o.finished}
        steps += 1
        if steps == preempt:
            assert inner.has_unfinished_requests(), "preempt: nothing runs any more"
            assert inner.reset_prefix_cache(reset_running_requests=True)
    return [done[str(n)] for n in range(len(given))]


def accepted(engine) -> int:
    """Draft tokens that the model agreed to."""
    return sum(m.value for m in engine.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")


def main(checkpoint: str, requests: str, result: str) -> None:
    import triton.backends

    import softsm

    asked = json.loads(Path(requests).read_text())
    # vLLM's CPU build wants a Triton with a backend "cpu"; softsm plays a Hopper GPU for vLLM's metadata kernels.
    triton.backends.backends["cpu"] = triton.backends.backends["nvidia"]
    with softsm.use("sm_90a", sms=1):
        import compared_experts
        import vllm_cpu_operators
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform
        from vllm.plugins import load_general_plugins

        import dsv4.integrations.vllm as plugin

        chunked_prefill()
        current_platform.import_kernels()
        counts = vllm_cpu_operators.define()
        missing_schedule_keys()
        found = compare()
        if os.environ.get("FP4_CHECKPOINT"):
            compared_experts.prepare()
        if os.environ.get("DSV4_RECORD"):
            record(os.environ["DSV4_RECORD"])
        load_general_plugins()  # LLM reads attention_config before it does that
        engine = LLM(
            model=str(Path(checkpoint).resolve()),
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_seqs=8,
            enforce_eager=True,
            **asked["engine"],
        )
        batches = []
        for batch in asked["batches"]:
            sampling = SamplingParams(
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                max_tokens=batch["tokens"],
                prompt_logprobs=0 if batch.get("logprobs") else None,
            )
            prompts = batch["prompts"]
            outs = generate(engine, prompts, sampling, batch.get("preempt"))
            got = dict(tokens=[list(o.outputs[0].token_ids) for o in outs], cached=[o.num_cached_tokens for o in outs])
            if batch.get("logprobs"):
                got["logprobs"] = [
                    [line[t].logprob for line, t in zip(o.prompt_logprobs[1:], p[1:])] for o, p in zip(outs, prompts)
                ]
            if asked["engine"].get("speculative_config"):
                got["accepted"] = accepted(engine)
            got["calls"] = dict(plugin.calls)
            plugin.calls.clear()
            batches.append(got)
            done = dict(batches=batches, operators=dict(counts), **found)
            Path(result).write_text(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
