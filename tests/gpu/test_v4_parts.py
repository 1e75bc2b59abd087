"""Fp8Cache, compress and index_topk on a GPU, by kernels or in torch: they must give what they give on a CPU."""

import pytest
import torch
from compress_inputs import BOUND

import dsv4
from dsv4 import Fp8Cache
from dsv4.reference import rope_table
from dsv4.runtime.settings import settings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("rows_per_page", [2, 64])
def test_fp8_cache_has_the_same_bytes(rows_per_page):
    rows = torch.randn(130, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    here, there = (
        Fp8Cache.pack(rows, rows_per_page=rows_per_page),
        Fp8Cache.pack(rows.cuda(), rows_per_page=rows_per_page),
    )
    assert torch.equal(there.storage.cpu(), here.storage) and torch.equal(there.unpack().cpu(), here.unpack())
    some = torch.tensor([[5, -1], [129, 0]], dtype=torch.int32)
    assert torch.equal(there.gather(some.cuda()).cpu(), here.gather(some))


def test_a_bad_row_number_counts_as_nothing_without_value_checks(monkeypatch):
    monkeypatch.setattr(settings, "check_values", False)
    cache = Fp8Cache.pack(torch.ones(4, 512, device="cuda"), rows_per_page=2)
    got = cache.gather(torch.tensor([1, 99, -5], device="cuda"))
    assert got[0].any() and not got[1:].any()
    monkeypatch.setattr(settings, "check_values", True)
    with pytest.raises(ValueError, match="^indices: "):
        cache.gather(torch.tensor([99], device="cuda"))


@pytest.mark.parametrize("d, m, overlap", [(512, 4, True), (512, 128, False)])
def test_compress_gives_the_same_bits_in_any_steps(d, m, overlap):
    width = d * (2 if overlap else 1)
    args = [torch.randn(n, width, device="cuda") for n in (300, 300, m)] + [torch.rand(d, device="cuda")]
    table = rope_table(512).cuda()
    once, _ = dsv4.compress(*args, cos_sin=table)
    state, rows = None, []
    for begin in range(0, 300, 3):
        part = [x[begin : begin + 3] for x in args[:2]]
        more, state = dsv4.compress(*part, *args[2:], cos_sin=table, state=state)
        rows.append(more)
    assert torch.equal(torch.cat(rows), once)
    want, _ = dsv4.compress(*(x.cpu() for x in args), cos_sin=table.cpu())
    assert (once.cpu() - want).abs().max() <= 2 * BOUND  # either may be so far off


def test_compress_into_pages_is_compress_and_write():
    d, m, n = 512, 4, 41
    kv, gate = (torch.randn(2, n, 2 * d, device="cuda").bfloat16() for _ in "kg")
    rest = dict(
        position_bias=torch.randn(m, 2 * d, device="cuda"),
        norm_weight=torch.rand(d, device="cuda"),
        cos_sin=rope_table(64).cuda(),
    )
    rows, state = dsv4.compress(kv, gate, **rest)
    slots = torch.randperm(40, device="cuda")[:20].view(2, 10)
    slots[0, 3] = -1
    packed, by_hand = Fp8Cache.empty(7, 6, device="cuda"), Fp8Cache.empty(7, 6)
    got, its_state = dsv4.compress(kv, gate, **rest, out=packed, slots=slots, backend="cuda")
    by_hand.write(slots.flatten().cpu(), rows.flatten(0, 1).cpu())
    assert got is packed and torch.equal(packed.storage.cpu(), by_hand.storage)
    assert torch.equal(its_state.kv, state.kv) and torch.equal(its_state.gate, state.gate)
    plain, want = (torch.zeros(7, 6, d, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    dsv4.compress(kv, gate, **rest, out=plain, slots=slots)
    keep = slots.flatten() >= 0
    want.view(-1, d)[slots.flatten()[keep]] = rows.flatten(0, 1)[keep]
    assert torch.equal(plain, want)


def small_integers(*shape, size=1):
    return torch.randint(-size, size + 1, shape).bfloat16()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_index_topk_breaks_ties_as_on_a_cpu(dtype):
    q, k, w = (small_integers(*s, size=2).to(dtype) for s in ((50, 4, 16), (400, 16), (50, 4)))
    lengths = torch.randint(0, 401, (50,))
    want = dsv4.index_topk(q, k, w, 64, lengths=lengths)
    got = dsv4.index_topk(q.cuda(), k.cuda(), w.cuda(), 64, lengths=lengths.cuda())
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("topk, pages", [(512, 40), (1024, 700)])
@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 0, 2), (5, 40, 3)])
def test_index_topk_of_pages_as_on_a_cpu(topk, pages, counts):
    """64 heads of 128, one to several rounds of the choice, one or more queries to a block; scores are exact."""
    page, n = 64, sum(counts) + 1
    k = small_integers(3 * pages, page, 128)
    table = torch.randperm(3 * pages).int().view(3, pages)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    lengths = torch.randint(0, pages * page + 1, (n,)).int()
    lengths[0] = pages * page
    arguments = dict(q=small_integers(n, 64, 128), k=k, weights=small_integers(n, 64, size=2), lengths=lengths,
                     block_table=table, request_starts=starts)  # fmt: skip
    want = dsv4.index_topk(**arguments, topk=topk, return_scores=True)
    there = {name: x.cuda() for name, x in arguments.items()}
    got = dsv4.index_topk(**there, topk=topk, return_scores=True, backend="cuda")
    for a, b in zip(got, want):
        assert torch.equal(a.cpu(), b)


def test_index_topk_in_a_graph_follows_its_inputs():
    page, pages, n = 64, 300, 2
    k = small_integers(n * pages, page, 128).cuda()
    arguments = dict(
        q=small_integers(n, 64, 128).cuda(),
        weights=small_integers(n, 64).cuda(),
        lengths=torch.full((n,), 7, dtype=torch.int32, device="cuda"),
        block_table=torch.arange(n * pages, dtype=torch.int32, device="cuda").view(n, pages),
    )
    out = torch.zeros(n, 512, dtype=torch.int32, device="cuda")
    plan = dsv4.plan(dsv4.index_topk, batch=n, q_heads=64, kv_heads=1, head_dim=128, max_seqlen_k=page * pages)
    dsv4.index_topk(**arguments, k=k, topk=512, out=out, plan=plan)
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph):
        dsv4.index_topk(**arguments, k=k, topk=512, out=out, plan=plan)
    assert torch.cuda.memory_allocated() - before < 1 << 16  # it does not allocate scores
    arguments["lengths"].copy_(torch.tensor([page * pages, 600]))
    arguments["block_table"].copy_(arguments["block_table"].flip(1))
    arguments["q"].copy_(small_integers(n, 64, 128))
    graph.replay()
    assert torch.equal(out, dsv4.index_topk(**arguments, k=k, topk=512))
    want = dsv4.index_topk(**{name: x.cpu() for name, x in arguments.items()}, k=k.cpu(), topk=512)
    assert torch.equal(out.cpu(), want)
