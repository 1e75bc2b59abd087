"""What the plug-in for vLLM calls, on a GPU: eagerly and in a CUDA graph, with what vLLM leaves undefined undefined."""

import paged_states
import pytest
import torch
from agreement import assert_right

from dsv4 import Fp8Cache, reference
from dsv4.compress.pages import compress_pages
from dsv4.integrations.vllm import v4
from dsv4.integrations.vllm.insertion import insert

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def captured(call):
    """A graph of the call, which has run before."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", ["csa", "hca", "indexer"])
def test_compressed_rows_from_states_in_pages(kind, graph):
    def run(out, **given):
        moved = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        cache = type(out)(torch.zeros_like(out.storage, device="cuda"), out.rows_per_page, out.page_stride)
        if graph:
            kept = captured(lambda: compress_pages(**moved, out=cache))
            cache.storage.zero_()
            kept.replay()
        else:
            compress_pages(**moved, out=cache)
        out.storage.copy_(cache.storage.cpu())

    paged_states.assert_rows(kind, run)


@pytest.mark.parametrize("heads", [8, 64])
def test_prefill_from_a_workspace_looks_at_nothing_behind_the_lengths(heads):
    n, rows, width = 70, 900, 640
    q, kv = torch.randn(n, heads, 512).bfloat16(), torch.randn(rows, 1, 512).bfloat16()
    kv[-50:] = float("nan")
    lengths = torch.randint(0, width, (n,)).int()
    lists = torch.randint(-(2**31), 2**31, (n, 1, width)).int()
    for m, line in zip(lengths.tolist(), lists[:, 0]):
        line[:m] = torch.randperm(rows - 50)[:m].int()
    sink = torch.randn(heads)
    given = dict(q=q, kv=kv, indices=lists, attn_sink=sink, topk_length=lengths)
    out = torch.empty_like(q, device="cuda")
    moved = {name: x.cuda() for name, x in given.items()}
    graph = captured(lambda: v4.sparse_fwd(**moved, sm_scale=512**-0.5, out=out))
    eager = out.clone()
    out.zero_()
    graph.replay()
    assert torch.equal(out, eager)
    seen = torch.where(torch.arange(width) < lengths[:, None], lists[:, 0], -1)
    want, low = (reference.v4_attention(q, kv[:, 0], seen, sink=sink, p_dtype=x)[0] for x in (None, q.dtype))
    assert_right(out.cpu(), want, low)


@pytest.mark.parametrize("graph", [False, True])
def test_queries_and_rows_on_their_way_to_attention(graph):
    """Results are those of a CPU: queries up to one bf16 step, rows up to one step of e4m3."""
    q, kv = torch.randn(70, 8, 512).bfloat16(), torch.randn(70, 512).bfloat16()
    positions, slots = torch.randint(0, 4096, (70,)), torch.randperm(640)[:64]
    slots[5] = -1
    angles = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    pages = torch.zeros(10, 64, 584, dtype=torch.uint8)
    wanted = insert(q, kv, positions, Fp8Cache.from_pages(pages), slots, cos_sin, 1e-6)

    there = Fp8Cache.from_pages(torch.zeros_like(pages, device="cuda"))
    moved = [x.cuda() for x in (q, kv, positions)], [x.cuda() for x in (slots, cos_sin)]
    results = []

    def call():
        results.append(insert(*moved[0], there, *moved[1], 1e-6))

    if graph:
        kept = captured(call)
        there.storage.zero_()
        results[-1].zero_()
        kept.replay()
    else:
        call()
    # One step of bf16; where a rotated pair cancels, 16 roundings of fp32 of the largest value.
    fp32 = 16 * torch.finfo(torch.float32).eps * float(wanted.abs().max())
    torch.testing.assert_close(results[-1].cpu(), wanted, rtol=torch.finfo(wanted.dtype).eps, atol=fp32)
    rows, expected = there.unpack().cpu().float(), Fp8Cache.from_pages(pages).unpack().float()
    assert ((rows - expected).abs() <= expected.abs() * 2**-3 + expected.abs().max() / 448 * 2**-8).all()
