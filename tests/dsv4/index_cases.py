"""Problems for the index_topk kernels, and what their lists must be; shared by the tests of all architectures."""

import torch

import dsv4
import softsm
from dsv4.index import cpu as cpu_index

NAN = float("nan")


def whole_numbers(*shape, size=1, seed=0):
    """Small integers: exact in bf16, exact sums, many equal scores."""
    g = torch.Generator().manual_seed(seed + len(shape))
    return torch.randint(-size, size + 1, shape, generator=g).bfloat16()


def kernel(arch, order="latest", **arguments):
    """The lists and scores of the kernels, races checked; the outputs were NaN (-2) before."""
    shape = (*arguments["q"].shape[:-2], arguments["topk"])
    out = torch.full(shape, -2, dtype=torch.int32)
    with softsm.use(arch), softsm.checking(races=True, order=order) as report:
        got = dsv4.index_topk(**arguments, out=out, return_scores=True, backend="softsm")
    assert not report, str(report)
    assert got[0] is out
    return got


def assert_exact(got, **arguments):
    """Scores of whole numbers are exact, so the lists are too, ties included."""
    lists, scores = dsv4.index_topk(**arguments, return_scores=True, backend="cpu")
    assert torch.equal(got[0], lists)
    assert torch.equal(got[1], scores)


def assert_best(got, *, q, k, weights, topk, lengths, names=None):
    """One sequence, random numbers: every list has the best rows, up to scores that fp32 cannot tell apart.

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
    nobody sees is NaN; page numbers past what is seen mean nothing."""
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
    """The choice alone, of given scores: one head of one dim, keys are the scores (bf16)."""
    k = torch.zeros(len(ordered_scores), 8).bfloat16()
    k[:, 0] = ordered_scores.clamp_min(0)
    k[:, 1] = (-ordered_scores).clamp_min(0)
    q = torch.zeros(1, 2, 8).bfloat16()
    q[0, 0, 0] = q[0, 1, 1] = 1
    arguments = dict(q=q, k=k, weights=torch.tensor([[1.0, -1.0]]), topk=topk, scale=1.0,
                     lengths=torch.tensor([len(k)]))  # fmt: skip
    got = kernel(arch, "eager", **arguments)
    want, columns = cpu_index.lowest_index_topk(ordered_scores.float()[None], min(topk, len(k)))[::-1]
    assert torch.equal(got[0][0, : len(k)].long(), columns[0]), (got[0], columns)
    assert torch.equal(got[1][0, : len(k)], want[0])
