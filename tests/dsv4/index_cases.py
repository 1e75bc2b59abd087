"""Problems for the index_topk kernels, and what their lists must be; shared by the tests of all architectures."""

import launches
import torch

import dsv4
from dsv4.caches.index_keys import IndexCache, quantize_queries, unpacked
from dsv4.index import cpu as cpu_index

NAN = float("nan")


def whole_numbers(*shape, size=1, seed=0):
    """Draw small integers: they and their sums are exact in bf16, and many scores are equal."""
    g = torch.Generator().manual_seed(seed + len(shape))
    return torch.randint(-size, size + 1, shape, generator=g).bfloat16()


def kernel(arch, order="latest", **arguments):
    """The lists and scores of the kernels, races checked; the outputs were NaN (-2) before."""
    shape = (*arguments["q"].shape[:-2], arguments["topk"])
    out = torch.full(shape, -2, dtype=torch.int32)
    with launches.race_free(arch, order=order):
        got = dsv4.index_topk(**arguments, out=out, return_scores=True, backend="softsm")
    assert got[0] is out
    return got


def assert_exact(got, **arguments):
    """Scores of whole numbers are exact, so the lists are too, ties included."""
    lists, scores = dsv4.index_topk(**arguments, return_scores=True, backend="cpu")
    assert torch.equal(got[0], lists)
    assert torch.equal(got[1], scores)


def assert_best(got, *, q, k, weights, topk, lengths, names=None):
    """In one sequence of random numbers, every list has the best rows, up to scores that fp32 cannot distinguish.

    A score has heads * (dims + 2) roundings of 2^-24. They add up like a random walk, to the square root of their
    number; twice that, of the largest score.
    """
    lists, scores = got
    heads, d = q.shape[1:]
    dots = torch.relu(torch.einsum("nhd,sd->nhs", q.double(), k.double()))
    full = torch.einsum("nhs,nh->ns", dots, weights.double()) * d**-0.5 * heads**-0.5
    bound = 2 * (heads * (d + 2)) ** 0.5 * 2.0**-24 * full.abs().max()
    for n, seen in enumerate(lengths.tolist()):
        count = min(topk, seen)
        chosen, rest = lists[n, :count].long(), lists[n, count:]
        assert (rest == -1).all() and (scores[n, count:] == -torch.inf).all()
        assert len(chosen.unique()) == count and (chosen < seen).all() and (chosen >= 0).all()
        if count:
            assert (scores[n, :count].double() - full[n, chosen]).abs().max() <= bound
            assert (scores[n, 1:count] <= scores[n, : count - 1]).all()
            assert (full[n, chosen] >= full[n, :seen].topk(count).values[-1] - bound).all()


def ragged():
    """Three requests of 3, 0 and 5 queries in pages of 24 rows; the last query belongs to none. Ties everywhere; what
    no query sees is NaN; page numbers past what is seen mean nothing."""
    pages, page = 40, 24
    k = torch.full((pages, page, 40), NAN).bfloat16()[..., :32]
    table = torch.full((3, 12), 99, dtype=torch.int32)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).int()
    lengths = torch.tensor([0, 200, 7, 25, 260, 24, 1, 90, 50], dtype=torch.int32)
    for r, (rows, begin) in enumerate(((200, 0), (0, 10), (260, 10))):
        count = -(-rows // page)
        table[r, :count] = order[begin : begin + count]
        for j in range(rows):
            k[order[begin + j // page], j % page] = whole_numbers(32, seed=r * 1000 + j)
    return dict(q=whole_numbers(9, 12, 32), k=k, weights=whole_numbers(9, 12, size=2).float(), topk=20, scale=1.0,
                lengths=lengths, block_table=table,
                request_starts=torch.tensor([0, 3, 3, 8], dtype=torch.int32))  # fmt: skip


def one_sequence(n=2, rows=300, heads=64, d=128, topk=64, lengths=(300, 100), seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(n, heads, d, generator=g).bfloat16(), torch.randn(rows, d, generator=g).bfloat16()
    k[max(lengths) :] = NAN
    weights = torch.randn(n, heads, generator=g)
    return dict(q=q, k=k, weights=weights, topk=topk, lengths=torch.tensor(lengths))


def assert_select(arch, ordered_scores, topk):
    """Test only the choice among given scores: with one head of one dim, keys are the scores (bf16)."""
    k = torch.zeros(len(ordered_scores), 8).bfloat16()
    k[:, 0] = ordered_scores.clamp_min(0)
    k[:, 1] = (-ordered_scores).clamp_min(0)
    q = torch.zeros(1, 2, 8).bfloat16()
    q[0, 0, 0] = q[0, 1, 1] = 1
    arguments = dict(
        q=q, k=k, weights=torch.tensor([[1.0, -1.0]]), topk=topk, scale=1.0, lengths=torch.tensor([len(k)])
    )
    got = kernel(arch, "eager", **arguments)
    want, columns = cpu_index.lowest_index_topk(ordered_scores.float()[None], min(topk, len(k)))[::-1]
    assert torch.equal(got[0][0, : len(k)].long(), columns[0]), (got[0], columns)
    assert torch.equal(got[1][0, : len(k)], want[0])


def fp8_ragged():
    """`ragged` with FP8 keys; rows that no query sees are e4m3's NaN with a NaN as their scale."""
    plain, page = ragged(), 24
    g = torch.Generator().manual_seed(7)
    keys = torch.randint(-1, 2, (40 * page, 128), generator=g).float()
    cache = IndexCache.pack(keys, rows_per_page=page)
    unseen = torch.ones(40, page, dtype=torch.bool)
    for r, rows in ((0, 200), (2, 260)):
        for j in range(rows):
            unseen[plain["block_table"][r, j // page], j % page] = False
    cache.data_view()[unseen], cache.scale_view()[unseen] = 0x7F, 0xFF
    q, w = quantize_queries(
        torch.randint(-1, 2, (9, 12, 128), generator=g).float(), torch.randint(-2, 3, (9, 12), generator=g).float()
    )
    return plain | dict(q=q, k=cache, weights=w)


def fp8_random(n, rows, heads, topk, lengths, requests=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    requests = n if requests is None else requests
    pages = -(-rows // 64)
    cache = IndexCache.pack(torch.randn(requests * pages * 64, 128, generator=g))
    q, w = quantize_queries(torch.randn(n, heads, 128, generator=g), torch.randn(n, heads, generator=g))
    table = torch.randperm(requests * pages, generator=g).int().view(requests, pages)
    arguments = dict(q=q, k=cache, weights=w, topk=topk, lengths=torch.tensor(lengths), block_table=table)
    if requests != n:
        arguments["request_starts"] = torch.tensor([0, n], dtype=torch.int32)
    return arguments


def assert_fp8_best(got, *, q, k, weights, topk, lengths, block_table, request_starts=None):
    """Every list has the best rows, up to scores that fp32 cannot tell apart: see assert_best."""
    lists, scores = got
    values, scales = unpacked(k.page_view())
    for n, seen in enumerate(lengths.tolist()):
        line = block_table[0 if request_starts is not None else n].long()
        keys, scale = values[line].flatten(0, 1).double()[:seen], scales[line].flatten().double()[:seen]
        full = (weights[n].double() @ torch.relu(q[n].double() @ keys.T)) * scale * 128**-0.5 * q.shape[1] ** -0.5
        count = min(topk, seen)
        assert (lists[n, count:] == -1).all() and (scores[n, count:] == -torch.inf).all()
        if count:
            page, place = lists[n, :count].long() // 64, lists[n, :count].long() % 64
            rows = (line[None] == page[:, None]).int().argmax(1) * 64 + place
            bound = 2 * (q.shape[1] * (128 + 2)) ** 0.5 * 2.0**-24 * full.abs().max()
            assert len(rows.unique()) == count and (rows < seen).all()
            assert (scores[n, :count].double() - full[rows]).abs().max() <= bound
            assert (scores[n, 1:count] <= scores[n, : count - 1]).all()
            assert (full[rows] >= full.topk(count).values[-1] - bound).all()


def assert_fp8_select(arch, wanted, topk):
    """Test only the choice among given scores, which are the scales of keys whose product with the queries is 1 or
    -1."""
    keys = torch.zeros(len(wanted), 128)
    keys[:, 0], keys[:, 1] = (wanted >= 0).float(), (wanted < 0).float()
    cache = IndexCache.pack(keys)
    scales = torch.zeros(cache.rows)
    scales[: len(wanted)] = wanted.abs()
    cache.scale_view().copy_(scales.view(cache.pages, 64, 1).view(torch.uint8))
    value = float(unpacked(cache.page_view())[0].float().max())  # what 1 was stored as
    q = torch.zeros(1, 2, 128)
    q[0, 0, 0] = q[0, 1, 1] = 1
    arguments = dict(q=q.to(torch.float8_e4m3fn), k=cache, weights=torch.tensor([[1 / value, -1 / value]]), topk=topk,
                     scale=1.0, lengths=torch.tensor([len(wanted)]),
                     block_table=torch.arange(cache.pages, dtype=torch.int32)[None])  # fmt: skip
    got = kernel(arch, "eager", **arguments)
    columns, values = cpu_index.lowest_index_topk(wanted[None] + 0.0, min(topk, len(wanted)))
    assert torch.equal(got[0][0, : len(wanted)].long(), columns[0]), (got[0], columns)
    assert torch.equal(got[1][0, : len(wanted)], values[0])
