"""Models of transformers train with dsv4's attention as with their own: steps of SGD on a CPU, in fp32.

The bound on a loss comes from rounding itself: eager attention in fp32 is compared with eager in fp64, step by step,
and ours may be off from eager by three times the largest of those differences.
"""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

import tiny_dense  # noqa: E402
import tiny_v4  # noqa: E402
from in_fp64 import StayDouble  # noqa: E402

import dsv4.integrations.transformers as integration  # noqa: E402
import dsv4.integrations.transformers_dense as dense  # noqa: E402


def losses(model, implementation, ids, rate, steps):
    """Of some steps on one batch, after which the model has learnt some of it."""
    model = copy.deepcopy(model)
    model.set_attn_implementation(implementation)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    found = []
    for _ in range(steps):
        loss = model(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found, dtype=torch.float64)


def in_double(model, ids, rate, steps):
    exact = copy.deepcopy(model).double()
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")
    with StayDouble():
        return losses(exact, "eager", ids, rate, steps)


def same_training(model, ids, name, rate, steps):
    eager, ours = (losses(model, kind, ids, rate, steps) for kind in ("eager", name))
    exact = in_double(model, ids, rate, steps)
    assert eager[-1] < eager[0] - 0.1, "the model learns nothing here"
    allowed = 3 * max(float((eager - exact).abs().max()), 2.0**-22 * float(eager.max()))
    assert float((ours - eager).abs().max()) <= allowed, (ours - eager, allowed)


@pytest.mark.parametrize("steps", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_deepseek_v4(steps):
    """SWA, CSA and HCA layers: gradients of window and compressed rows, and of the sinks."""
    integration.register()
    layers = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    model = tiny_v4.build(num_hidden_layers=3, layer_types=layers)
    ids = torch.randint(0, 512, (1, 40), generator=torch.Generator().manual_seed(3))
    same_training(model, ids, "dsv4", 0.005, steps)


@pytest.mark.slow
def test_head_dim_512():
    """Gemma 4: windows at head dim 64 and full attention at head dim 512."""
    dense.register()
    model = tiny_dense.build("gemma4")
    ids = torch.randint(1, 128, (2, 40), generator=torch.Generator().manual_seed(3))
    same_training(model, ids, dense.NAME, 0.003, 20)
