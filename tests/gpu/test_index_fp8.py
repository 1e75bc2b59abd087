"""index_topk of FP8 keys on a GPU: exact where the sums are, close to the CPU elsewhere, the same bits every time."""

import index_cases
import pytest
import torch

import dsv4
from dsv4.index.cache import IndexCache, quantize_queries, unpacked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(arguments):
    moved = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    cache = arguments["k"]
    return moved | dict(k=IndexCache(cache.storage.cuda(), cache.rows_per_page, cache.page_stride))


@pytest.mark.parametrize("request_rows", [False, True])
def test_whole_numbers_give_the_lists_of_the_cpu(request_rows):
    arguments = index_cases.fp8_ragged() | dict(request_rows=request_rows, return_scores=True)
    want = dsv4.index_topk(**arguments)
    got = dsv4.index_topk(**on_gpu(arguments), backend="cuda")
    assert torch.equal(got[0].cpu(), want[0]) and torch.equal(got[1].cpu(), want[1])


@pytest.mark.parametrize("requests, each, keys, topk", [(3, 1, 16384, 512), (2, 4, 20000, 1024), (1, 300, 9000, 512)])
def test_lists_hold_the_best_rows_but_for_the_rounding_of_products(requests, each, keys, topk):
    """Hopper's tensor cores keep 14 bits or so of a sum of e4m3 products: 2^-13 of the largest product of a row with a
    head, 64 of which are added."""
    g = torch.Generator("cuda").manual_seed(0)
    n, pages = requests * each, -(-keys // 64)
    cache = IndexCache.pack(torch.randn(requests * pages * 64, 128, device="cuda", generator=g))
    q, w = quantize_queries(*(torch.randn(s, device="cuda", generator=g) for s in ((n, 64, 128), (n, 64))))
    table = torch.randperm(requests * pages, device="cuda").int().view(requests, pages)
    lengths = torch.randint(keys // 2, keys + 1, (n,), device="cuda", generator=g)
    starts = torch.arange(0, n + 1, each, dtype=torch.int32, device="cuda")
    given = (q, cache, w, topk)
    more = dict(lengths=lengths, block_table=table, request_starts=starts, request_rows=True, scale=1.0)
    lists, scores = dsv4.index_topk(*given, **more, return_scores=True, backend="cuda")
    again, _ = dsv4.index_topk(*given, **more, return_scores=True, backend="cuda")
    assert torch.equal(lists, again)
    for i in range(0, n, max(1, n // 5)):
        values, scales = unpacked(cache.page_view()[table[i // each].long()])
        products = torch.relu(q[i].double() @ values.double().flatten(0, 1).T)
        full = (w[i].double() @ products * scales.flatten())[: lengths[i]]
        bound = 2.0**-13 * (w[i].double().abs() @ products * scales.flatten())[: lengths[i]].max()
        chosen = lists[i].long()
        assert len(chosen.unique()) == topk and int(chosen.max()) < int(lengths[i])
        assert (scores[i].double() - full[chosen]).abs().max() <= bound
        assert (full[chosen] >= full.topk(topk).values[-1] - 2 * bound).all()


def test_keys_are_written_as_on_a_cpu():
    keys = torch.randn(300, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    here, there = IndexCache.pack(keys), IndexCache.pack(keys.cuda())
    assert torch.equal(there.storage.cpu(), here.storage)


def test_a_captured_call_follows_its_lengths():
    arguments = on_gpu(index_cases.fp8_random(n=4, rows=5000, heads=64, topk=512, lengths=(5000, 900, 512, 3)))
    plan = dsv4.plan(dsv4.index_topk, batch=4, q_heads=64, kv_heads=1, head_dim=128, max_seqlen_k=5056)
    out = torch.empty(4, 512, dtype=torch.int32, device="cuda")
    dsv4.index_topk(**arguments, out=out, plan=plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dsv4.index_topk(**arguments, out=out, plan=plan)
    arguments["lengths"].copy_(torch.tensor([700, 4000, 1, 600]))
    graph.replay()
    assert torch.equal(out, dsv4.index_topk(**arguments))
