"""index_topk of FP8 keys on a GPU: exact where the sums are, close to the CPU elsewhere, the same bits every time."""

import index_cases
import pytest
import torch

import dsv4
from dsv4.caches.index_keys import IndexCache, quantize_queries, unpacked

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


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


def bounds(q, w, values, scales):
    """(scores, how far Hopper's may be from them) of one query, fp64 [rows].

    A tensor core adds 32 products of e4m3 and the sum so far, all cut off at 14 bits from the top of the largest one. A
    product has two bits before its point, so what is left are multiples of at most 2^-12 of the largest one's power of
    two. Each addend that is not such a multiple loses less than one; the products of one step that lose are counted
    here. The sum over the heads is one of fp32."""
    total, bound = [], []
    for some, scale in zip(values.split(1024), scales.split(1024)):
        products = q[:, None] * some[None]  # [H, rows, 128]
        so_far = torch.zeros_like(products[..., 0])
        lost = torch.zeros_like(so_far)
        for step in products.split(32, -1):
            largest = torch.maximum(step.abs().amax(-1), so_far.abs() + lost)
            unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest.clamp_min(2.0**-40)).exponent - 13)
            lost = lost + unit * (1 + (step % unit[..., None] != 0).sum(-1))
            so_far = so_far + step.sum(-1)
        each = w[:, None] * so_far.relu()
        total.append(each.sum(0) * scale)
        rounding = (len(w) + 3) * 2.0**-24
        bound.append((w.abs() @ (lost + rounding * (so_far.relu() + lost))) * scale)
    return torch.cat(total), torch.cat(bound)


@pytest.mark.parametrize("requests, each, keys, topk", [(3, 1, 16384, 512), (2, 4, 20000, 1024), (1, 300, 9000, 512)])
def test_lists_hold_the_best_rows_but_for_the_rounding_of_products(requests, each, keys, topk):
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
        rows = values.double().flatten(0, 1)[: lengths[i]]
        full, bound = bounds(q[i].double(), w[i].double(), rows, scales.double().flatten()[: lengths[i]])
        chosen = lists[i].long()
        assert len(chosen.unique()) == topk and int(chosen.max()) < int(lengths[i])
        assert ((scores[i].double() - full[chosen]).abs() <= bound[chosen]).all()
        rest = torch.ones(len(full), dtype=torch.bool, device="cuda").index_fill_(0, chosen, False)
        assert (full - bound)[rest].max() <= (full + bound)[chosen].min()  # no row left out is surely better


def test_a_query_has_the_same_list_whatever_is_asked_beside_it():
    """Alone, with others, and with others of its request, which share the keys that a block of the kernel reads."""
    arguments = on_gpu(index_cases.fp8_random(n=6, rows=3000, heads=64, topk=512, lengths=(3000,) * 6, requests=1))
    together = dsv4.index_topk(**arguments, return_scores=True)
    arguments["block_table"] = arguments["block_table"].expand(6, -1).contiguous()
    del arguments["request_starts"]
    apart = dsv4.index_topk(**arguments, return_scores=True)
    one = {name: arguments[name][2:3] for name in ("q", "weights", "lengths", "block_table")}
    alone = dsv4.index_topk(**(arguments | one), return_scores=True)
    for a, b, c in zip(together, apart, alone):
        assert torch.equal(a, b) and torch.equal(a[2:3], c)


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
