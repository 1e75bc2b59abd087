"""Fp8Cache, compress and index_topk are plain torch: on a GPU they must give what they give on a CPU."""

import pytest
import torch

import dsv4
from dsv4 import Fp8Cache
from dsv4.reference import rope_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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
    monkeypatch.delenv("DSV4_CHECK", raising=False)
    cache = Fp8Cache.pack(torch.ones(4, 512, device="cuda"), rows_per_page=2)
    got = cache.gather(torch.tensor([1, 99, -5], device="cuda"))
    assert got[0].any() and not got[1:].any()
    monkeypatch.setenv("DSV4_CHECK", "1")
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
    assert (once.cpu() - want).abs().max() < 1e-5


def test_index_topk_breaks_ties_as_on_a_cpu():
    g = torch.Generator().manual_seed(0)
    q, k, w = (torch.randint(-2, 3, s, generator=g).float() for s in ((50, 4, 16), (400, 16), (50, 4)))
    lengths = torch.randint(0, 401, (50,), generator=g)
    want = dsv4.index_topk(q, k, w, 64, lengths=lengths, scale=1.0)
    got = dsv4.index_topk(q.cuda(), k.cuda(), w.cuda(), 64, lengths=lengths.cuda(), scale=1.0)
    assert torch.equal(got.cpu(), want)
