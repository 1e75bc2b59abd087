"""index_topk on FP8 keys: the scores are those of the e4m3 values, the choice is exact, wrong arguments are named."""

import index_cases
import pytest
import torch

import dsv4
from dsv4.caches.index_keys import IndexCache, quantize_queries, unpacked


def test_lists_are_the_best_rows_by_the_formula():
    arguments = index_cases.fp8_random(n=4, rows=500, heads=64, topk=50, lengths=(500, 300, 50, 0))
    index_cases.assert_fp8_best(dsv4.index_topk(**arguments, return_scores=True), **arguments)


def test_ties_take_the_lower_row():
    arguments = index_cases.fp8_ragged()
    lists, scores = dsv4.index_topk(**arguments, return_scores=True)
    values, scales = unpacked(arguments["k"].page_view())
    q, w, table = arguments["q"].double(), arguments["weights"].double(), arguments["block_table"].long()
    owners = (0, 0, 0, 2, 2, 2, 2, 2, None)
    for n, (owner, seen) in enumerate(zip(owners, arguments["lengths"].tolist())):
        count = 0 if owner is None else min(seen, arguments["topk"])
        assert (lists[n, count:] == -1).all() and (scores[n, count:] == -torch.inf).all()
        if count:
            line = table[owner][: -(-seen // 24)]
            keys, scale = values[line].flatten(0, 1)[:seen].double(), scales[line].flatten()[:seen].double()
            full = (w[n] @ torch.relu(q[n] @ keys.T)) * scale
            order = sorted(range(seen), key=lambda row: (-float(full[row]), row))[:count]
            assert lists[n, :count].tolist() == [int(line[row // 24]) * 24 + row % 24 for row in order]
            assert torch.equal(scores[n, :count].double(), full[order])


def test_rows_of_the_request_are_those_of_the_pool_by_the_table():
    arguments = index_cases.fp8_ragged()
    pool = dsv4.index_topk(**arguments)
    local = dsv4.index_topk(**arguments, request_rows=True)
    table = arguments["block_table"].long()
    for n, owner in enumerate((0, 0, 0, 2, 2, 2, 2, 2)):
        there = local[n] >= 0
        assert torch.equal(there, pool[n] >= 0)
        rows = local[n][there].long()
        assert torch.equal(table[owner][rows // 24] * 24 + rows % 24, pool[n][there].long())


def test_bf16_keys_have_request_rows_too():
    arguments = index_cases.ragged()
    pool, local = dsv4.index_topk(**arguments), dsv4.index_topk(**arguments, request_rows=True)
    rows = local[1][local[1] >= 0].long()
    assert torch.equal(arguments["block_table"][0].long()[rows // 24] * 24 + rows % 24, pool[1].long())


def test_scales_that_are_no_powers_of_two():
    arguments = index_cases.fp8_random(n=2, rows=200, heads=8, topk=20, lengths=(200, 77))
    cache = arguments["k"]
    odd = torch.rand(cache.pages, 64, 1, generator=torch.Generator().manual_seed(5)) + 0.5
    cache.scale_view().copy_(odd.view(torch.uint8))
    index_cases.assert_fp8_best(dsv4.index_topk(**arguments, return_scores=True), **arguments)


def test_rows_nobody_sees_may_hold_anything():
    arguments = index_cases.fp8_random(n=2, rows=200, heads=8, topk=20, lengths=(150, 77))
    want = dsv4.index_topk(**arguments)
    values, scales = arguments["k"].data_view(), arguments["k"].scale_view()
    page = arguments["block_table"][:, 2]  # rows 128 to 191 of both
    values[page.long(), 22:], scales[page.long(), 22:] = 0x7F, 0xFF
    assert torch.equal(dsv4.index_topk(**arguments), want)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(q=torch.zeros(4, 8, 128)), "q: .*float32.*float8_e4m3fn"),
        (dict(q=torch.zeros(4, 8, 64, dtype=torch.float8_e4m3fn)), "q: .*128"),
        (dict(block_table=None, request_starts=None), "block_table: .*IndexCache"),
        (dict(k=torch.zeros(4, 64, 131, dtype=torch.uint8)), "k: .*132"),
        (dict(request_rows=1), "request_rows"),
        (dict(weights=torch.zeros(4, 7)), "weights"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, words):
    arguments = index_cases.fp8_random(n=4, rows=500, heads=8, topk=50, lengths=(500, 300, 50, 0))
    with pytest.raises(ValueError, match=words):
        dsv4.index_topk(**(arguments | change))


def test_request_rows_need_a_table():
    with pytest.raises(ValueError, match="request_rows"):
        dsv4.index_topk(
            torch.zeros(1, 2, 8), torch.zeros(4, 8), torch.zeros(1, 2), 2, request_rows=True, lengths=torch.tensor([4])
        )


def test_pages_anywhere_are_taken_on_a_cpu():
    """Strides that the kernels reject are torch's to run."""
    g = torch.Generator().manual_seed(3)
    keys = torch.randn(60, 128, generator=g)
    q, w = quantize_queries(torch.randn(1, 4, 128, generator=g), torch.randn(1, 4, generator=g))
    table, lengths = torch.arange(20, dtype=torch.int32)[None], torch.tensor([60])
    lists = [
        dsv4.index_topk(
            q, IndexCache.pack(keys, rows_per_page=3, page_stride=stride), w, 9, lengths=lengths, block_table=table
        )
        for stride in (396, 401, 999)
    ]
    assert torch.equal(lists[0], lists[1]) and torch.equal(lists[0], lists[2])
