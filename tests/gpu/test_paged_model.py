"""A tiny DeepSeek-V4 on the GPU with dsv4's caches: as near to fp32 as the model's own eager attention is in bf16."""

import pytest
import torch

from dsv4 import suites

pytest.importorskip("transformers.models.deepseek_v4")

from tiny_v4 import build  # noqa: E402

from deepseek_v4.paged_model import PagedModel  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(suites.gpu_arch() not in suites.ARCHS, reason="needs a GPU that dsv4 has kernels for"),
]
# Every expert and every compressed row takes part: a choice that rounding turns would be no error of the attention.
CERTAIN = dict(head_dim=512, rope=64, num_experts_per_tok=4, index_topk=64, experts_implementation="batched_mm")


def relative(a, b):
    return ((a.float().cpu() - b).norm() / b.norm()).item()


@torch.no_grad()
def served(model, ids, rows, graphs=False):
    """Logits [3, 150, vocabulary] of three requests, in chunks and single tokens side by side."""
    engine = PagedModel(model, tokens=640, requests=4, chunk=200, page_tokens=32, rows=rows, graphs=graphs)
    done, got = [0, 0, 0], [[], [], []]
    for counts in [(100, 7, 0), (1, 90, 40), (24, 1, 1)] + [(1, 1, 1)] * 9 + [(16, 43, 100)]:
        feed = {r: ids[r, done[r] : done[r] + n] for r, n in enumerate(counts) if n}
        for r, logits in engine.step(feed, all_logits=True).items():
            got[r].append(logits)
            done[r] += len(logits)
    assert done == [150, 150, 150]
    assert bool(engine.decoders) == graphs
    return torch.stack([torch.cat(x) for x in got])


@torch.no_grad()
@pytest.mark.parametrize("rows, graphs", [("model", True), ("fp8", True), ("fp8", False)])
def test_requests_side_by_side(rows, graphs, device="cuda", dtype=torch.bfloat16):
    exact, model = build(**CERTAIN), build(**CERTAIN).to(device, dtype)
    exact.load_state_dict({name: x.float() for name, x in model.state_dict().items()})
    ids = torch.randint(0, 512, (3, 150), generator=torch.Generator().manual_seed(1))
    want = exact(ids, use_cache=False).logits
    eager = relative(model(ids.to(device), use_cache=False).logits, want)
    # What the row format costs in exact arithmetic, and what bf16 costs the model's own attention.
    unavoidable = relative(served(exact, ids, rows), want) + eager
    error = relative(served(model, ids, rows, graphs), want)
    assert error <= 1.5 * unavoidable, (error, unavoidable)


@torch.no_grad()
def test_a_graph_follows_weights_that_are_replaced():
    model, other = (build(**CERTAIN, initializer_range=x).to("cuda", torch.bfloat16) for x in (0.08, 0.05))
    options = dict(tokens=640, requests=4, chunk=200, page_tokens=32, graphs=True)
    engine = PagedModel(model, **options)
    engine.step({"a": [1, 2, 3]})
    engine.step({"a": [4]})
    engine.drop("a")
    model.load_state_dict(other.state_dict(), assign=True)
    fresh = PagedModel(other, **options)
    for tokens in ([1, 2, 3], [4], [5]):
        assert torch.equal(engine.step({"a": tokens})["a"], fresh.step({"a": tokens})["a"])
