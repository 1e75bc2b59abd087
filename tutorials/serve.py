"""Serving DeepSeek-V4: requests that come and go, on a random model that fits into a second of CPU time.

    python tutorials/serve.py

A step of a server is one pass of the model over tokens of many requests. The server chooses the tokens by three rules:

- A request that decodes gives one token per step, and needs every step. So decoding requests go first.
- A prompt may be long; in one piece it would delay decoding. So it is processed in chunks that fill the rest of the
  step (`chunk`).
- Rows live in pages. A window page holds 8 tokens here and is freed when the window (16 tokens) has passed it; a
  token page holds the compressed rows of 32 tokens and stays until the request ends. A prompt is admitted when there
  are token pages for it and for its answer; until then it waits, and no later request overtakes it.

Watch the columns: `c` arrives while `a` decodes, and `a` continues token by token. `d` must wait until `b` and `c`
have freed their pages. In the end all pages are free, and every request has got the answer that it gets alone.
"""

import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from deepseek_v4.paged_model import PagedModel  # noqa: E402
from deepseek_v4.serving import Serving  # noqa: E402

ARRIVALS = {0: {"a": (45, 12), "b": (10, 6)}, 2: {"c": (70, 4)}, 3: {"d": (60, 5)}}  # step: name: (prompt, new tokens)


def tiny() -> DeepseekV4ForCausalLM:
    """One layer of each kind."""
    torch.manual_seed(0)
    kinds = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
    config = DeepseekV4Config(
        vocab_size=512, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        head_dim=64, q_lora_rank=32, qk_rope_head_dim=16, num_experts_per_tok=2, n_routed_experts=4,
        max_position_embeddings=1024, layer_types=["sliding_attention", *kinds], compress_rates=kinds,
        sliding_window=16, o_groups=2, o_lora_rank=32, index_n_heads=16, index_head_dim=32, index_topk=8,
        hc_sinkhorn_iters=2, initializer_range=0.08,
    )  # fmt: skip
    return DeepseekV4ForCausalLM(config).eval()


def engine(model: DeepseekV4ForCausalLM) -> PagedModel:
    return PagedModel(model, tokens=64, requests=4, chunk=24, page_tokens=32, window_page=8)


def serve(model: DeepseekV4ForCausalLM, prompts: dict[str, list[int]], out: Console) -> dict[str, list[int]]:
    """What each request said."""
    served = engine(model)
    serving, jobs, step = Serving(served), {}, 0
    free = len(served.places.pages.free), len(served.places.window_pages.free)
    table = Table("step", "comes", *prompts, "token pages free", "window pages free", title=f"chunk of {served.chunk}")
    while serving or step <= max(ARRIVALS):
        comes = ARRIVALS.get(step, {})
        for name, (_, new_tokens) in comes.items():
            jobs[name] = serving.submit(prompts[name], new_tokens, name=name)
        spoke = {job.name: job for job in serving.step()}
        cells = {name: "waits" for name, job in jobs.items() if not job.done}
        for job, count in serving.fed:
            decodes = len(job.said) > (job.name in spoke)  # had said something before
            cells[job.name] = "1 token" if decodes else f"prompt: {count}"
            if job.name in spoke:
                cells[job.name] += f" -> {job.said[-1]}" + (", over" if job.done else "")
        pages = f"{len(served.places.pages.free)}", f"{len(served.places.window_pages.free)}"
        table.add_row(str(step), " ".join(comes), *(cells.get(name, "") for name in prompts), *pages)
        step += 1
    out.print(table)
    assert not served.requests and free == (len(served.places.pages.free), len(served.places.window_pages.free))
    return {name: job.said for name, job in jobs.items()}


def main() -> None:
    out, model = Console(width=150), tiny()
    g = torch.Generator().manual_seed(1)
    sizes = {name: size for came in ARRIVALS.values() for name, size in came.items()}
    prompts = {name: torch.randint(0, 512, (tokens,), generator=g).tolist() for name, (tokens, _) in sizes.items()}
    said = serve(model, prompts, out)
    for name, (_, new_tokens) in sizes.items():
        (alone,) = engine(model).generate([prompts[name]], new_tokens)
        assert said[name] == alone, (name, said[name], alone)
    out.print("Every answer is the one that the request gets alone; all pages are free.")


if __name__ == "__main__":
    main()
