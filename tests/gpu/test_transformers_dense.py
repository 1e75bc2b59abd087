"""Tiny decoders of transformers on the GPU: as near to fp32 as their own eager attention is in bf16."""

import pytest
import torch

from dsv4 import suites

transformers = pytest.importorskip("transformers")

from tiny_dense import KINDS, build  # noqa: E402

import dsv4.integrations.transformers_dense as integration  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(suites.gpu_arch() is None, reason="needs a GPU that dsv4 has kernels for"),
]


def relative(a, b):
    return ((a.float().cpu() - b).norm() / b.norm()).item()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [False, True])
def test_logits(kind, padded):
    try:
        exact, model = build(kind), build(kind).to("cuda", torch.bfloat16)
    except (ImportError, AttributeError) as missing:
        pytest.skip(f"these transformers ({transformers.__version__}) do not have it: {missing}")
    exact.load_state_dict({name: x.float() for name, x in model.state_dict().items()})
    integration.register()
    ids = torch.randint(1, 128, (2, 60), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :17] = 0
    kept = mask.bool()
    want = exact(ids, attention_mask=mask, use_cache=False).logits[kept]
    errors = {}
    for implementation in ("eager", "dsv4_dense"):
        model.set_attn_implementation(implementation)
        cache, logits = transformers.DynamicCache(config=model.config), []
        for begin, end in ((0, 40), (40, 41), (41, 42), (42, 60)):
            out = model(
                ids[:, begin:end].cuda(), attention_mask=mask[:, :end].cuda(), past_key_values=cache, use_cache=True
            )
            logits.append(out.logits.cpu())
        errors[implementation] = relative(torch.cat(logits, 1)[kept], want)
    assert errors["dsv4_dense"] <= 1.5 * errors["eager"], errors
