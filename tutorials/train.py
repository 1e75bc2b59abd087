"""Training with dsv4's attention: two small random models learn a line by heart, compared with transformers' own
attention.

    python tutorials/train.py [STEPS]        20, unless told otherwise

- DeepSeek-V4 with one layer of each kind, `attn_implementation="dsv4"`. Gradients reach the rows of the window, the
  compressed rows (by way of `dsv4.compress`) and the sinks. The indexer's choice of rows has no gradient: a model
  that trains its indexer adds `dsv4.index_loss`.
- Gemma 4 with a window at head dim 64 and full attention at head dim 512, `attn_implementation="dsv4_dense"`.

Nothing else changes: the same model, the same optimizer, `loss.backward()`. On a CPU in fp32 the losses differ by
rounding; on a GPU the same lines run the kernels (`model.to("cuda", torch.bfloat16)`).
"""

import copy
import sys

import torch
from rich.console import Console
from rich.table import Table
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.gemma4 import Gemma4ForCausalLM, Gemma4TextConfig

from dsv4.integrations import transformers as v4
from dsv4.integrations import transformers_dense as dense


def deepseek_v4() -> torch.nn.Module:
    """One layer of each kind."""
    torch.manual_seed(0)
    kinds = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
    config = DeepseekV4Config(
        vocab_size=512, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        head_dim=64, q_lora_rank=32, qk_rope_head_dim=16, num_experts_per_tok=2, n_routed_experts=4,
        max_position_embeddings=4096, layer_types=["sliding_attention", *kinds], compress_rates=kinds,
        sliding_window=16, o_groups=2, o_lora_rank=32, index_n_heads=16, index_head_dim=32, index_topk=8,
        hc_sinkhorn_iters=2, initializer_range=0.08, experts_implementation="eager",
    )  # fmt: skip
    model = DeepseekV4ForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():  # these start as zeros
            if name.endswith(("sinks", "position_bias")):
                p.normal_()
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.random_(0, 4)
    return model


def head_dim_512() -> torch.nn.Module:
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, global_head_dim=512, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=128, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    model = Gemma4ForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, p.shape[-1] ** -0.5)
    return model


# the name of its attention, the model, the shape of what it learns, the learning rate
MODELS = {
    "DeepSeek-V4": ("dsv4", deepseek_v4, (1, 40), 0.005),
    "head dim 512": (dense.NAME, head_dim_512, (2, 40), 0.003),
}


def line(model: torch.nn.Module, shape: tuple[int, int]) -> torch.Tensor:
    return torch.randint(1, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(3))


def train(model: torch.nn.Module, implementation: str, ids: torch.Tensor, rate: float, steps: int) -> list[float]:
    """Return the losses of a copy of the model, step by step."""
    model = copy.deepcopy(model).train()
    model.set_attn_implementation(implementation)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        loss = model(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(steps: int = 20) -> None:
    v4.register()
    dense.register()
    for name, (ours, build, shape, rate) in MODELS.items():
        model = build()
        ids = line(model, shape)
        found = {kind: train(model, kind, ids, rate, steps) for kind in ("eager", ours)}
        table = Table("step", *found, "difference", title=name)
        for step in sorted({0, steps // 2, steps - 1}):
            both = [losses[step] for losses in found.values()]
            table.add_row(str(step + 1), *(f"{x:.6f}" for x in both), f"{both[1] - both[0]:+.1e}")
        Console().print(table)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
