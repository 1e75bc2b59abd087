"""One training step of a DeepSeek-V4-Flash layer in transformers: attn_implementation="dsv4" beside "eager".

    python benchmarks/train_layer.py [--kind csa|hca|swa] [--tokens N] [--experts N] [--tiny] [--json F]

A step is forward, backward and AdamW, all in the model's dtype. Sizes are those of V4-Flash but for the vocabulary and
the experts: 8 of 256, because they are not what is compared (--experts 256 takes 52 GiB with their AdamW states). Both
sides start from the same weights; their first losses are printed, and must agree. Times: the least and the median of
--repeat steps, one side after the other. Memory: the most that a step has allocated, weights and optimizer included.
--tiny is for a CPU.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4.integrations import transformers as adapter

KINDS = {"swa": "sliding_attention", "csa": "compressed_sparse_attention", "hca": "heavily_compressed_attention"}
TINY = dict(
    hidden_size=128, moe_intermediate_size=64, num_attention_heads=4, head_dim=64, q_lora_rank=32, qk_rope_head_dim=16,
    o_groups=2, o_lora_rank=32, index_n_heads=16, index_head_dim=32, index_topk=8, sliding_window=16,
    n_routed_experts=8, compress_rates={KINDS["csa"]: 4, KINDS["hca"]: 16},
)  # fmt: skip


class Side:
    """One implementation of attention: its model and its optimizer."""

    def __init__(self, implementation: str, config: dict, device: str, dtype: torch.dtype):
        torch.manual_seed(0)
        self.name, self.device = implementation, device
        # Made on a CPU: the same weights on every device.
        model = DeepseekV4ForCausalLM(DeepseekV4Config(**config, attn_implementation=implementation))
        self.model = model.to(device, dtype).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, ids: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        return loss.item()  # waits for the device

    def measured(self, ids: torch.Tensor) -> tuple[float, float]:
        """(seconds of a step, most bytes allocated during it; 0 on a CPU)"""
        cuda = self.device == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        self.step(ids)
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin, torch.cuda.max_memory_allocated() if cuda else 0


def run(a: argparse.Namespace) -> dict:
    adapter.register()
    device = "cuda" if torch.cuda.is_available() and not a.tiny else "cpu"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    config = dict(
        vocab_size=1024,
        num_hidden_layers=1,
        layer_types=[KINDS[a.kind]],
        mlp_layer_types=["moe"],
        n_routed_experts=a.experts,
        experts_implementation="eager",
    ) | (TINY if a.tiny else {})
    ids = torch.randint(0, 1024, (1, a.tokens), generator=torch.Generator().manual_seed(1)).to(device)
    result: dict = dict(kind=a.kind, tokens=a.tokens, device=device, dtype=str(dtype).removeprefix("torch."), sides={})
    for name in ("dsv4", "eager"):  # one after the other: the peak of one must not hold the other's weights
        side = Side(name, config, device, dtype)
        losses = [side.step(ids) for _ in range(3)]  # kernels are compiled, memory is allocated
        found = [side.measured(ids) for _ in range(a.repeat)]
        seconds = [one for one, _ in found]
        result["sides"][name] = dict(
            first_loss=losses[0],
            step_ms=min(seconds) * 1e3,
            step_ms_median=statistics.median(seconds) * 1e3,
            peak_gib=max(peak for _, peak in found) / 2**30,
        )
        del side
        if device == "cuda":
            torch.cuda.empty_cache()
    ours, theirs = result["sides"]["dsv4"], result["sides"]["eager"]
    result["ratio"] = theirs["step_ms"] / ours["step_ms"]  # above 1: dsv4 is faster
    apart = abs(ours["first_loss"] - theirs["first_loss"]) / abs(theirs["first_loss"])
    # The mean over thousands of tokens of what bf16 (fp32) rounds at random: far below one unit of the dtype.
    assert apart < torch.finfo(dtype).eps, f"the first losses differ by {apart:.1e}"
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, default="csa")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    result = run(a)
    text = json.dumps(result, indent=1)
    print(text)
    if a.json is not None:
        a.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
