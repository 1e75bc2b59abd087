"""DeepSeek-V4.1's indexer by definition, on a CPU: FP4 rows, index scores, blocks, selection; and problems for it.

Written from the model's formulas with no code of the package: bytes, masks and lists of the two may be compared.
"""

import torch

from dsv4.caches.index_keys import IndexCache, quantize_queries, quantize_queries_fp4
from dsv4.caches.mxfp4_keys import INDEX_68

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def quantize(x):
    """x [n, 128] -> data uint8 [n, 64], scales uint8 [n, 4]: e2m1, the nearest, ties to the even code, under the least
    power of two that fits."""
    x = x.float().unflatten(-1, (-1, 32))
    mantissa, e = torch.frexp(x.abs().amax(-1).clamp_min(6 * 2.0**-126) / 6)
    e = e - (mantissa == 0.5).int()
    y = (x * torch.exp2(-e.float())[..., None]).flatten(-2)
    a = y.abs().clamp_max(6.0).unsqueeze(-1)
    middle = (E2M1[1:] + E2M1[:-1]) / 2
    code = (a > middle).sum(-1)
    code = code + ((a == middle).any(-1) & (code % 2 == 1)) + 8 * torch.signbit(y)
    code = code.to(torch.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4), (e + 127).to(torch.uint8)


def dequantize(data, scales):
    code = torch.stack([data & 15, data >> 4], -1).flatten(-2).long()
    values = torch.where(code >= 8, -1.0, 1.0) * E2M1[code & 7]
    return (values.unflatten(-1, (-1, 32)) * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)


def scores(q, weights, k, bf16=False):
    """q [t, h, 128], weights [t, h], k [n, 128] -> [t, n]; bf16: rounded where the reference model rounds."""
    products = torch.einsum("thd,nd->thn", q, k)
    if not bf16:
        return (products.relu() * weights[..., None]).sum(1)
    return (products.bfloat16().relu() * weights.bfloat16()[..., None]).sum(1).float()


def candidate_blocks(scores, lens, most, block=8):
    """Return a mask [t, n] of level one: the best blocks by their best position; the newest one is always kept."""
    n = scores.shape[1]
    scores = scores.masked_fill(torch.arange(n) >= lens[:, None], -torch.inf)
    best = torch.nn.functional.pad(scores, (0, -n % block), value=-torch.inf).unflatten(1, (-1, block)).amax(-1)
    best = best.masked_fill(torch.arange(best.shape[1]) == (lens[:, None] - 1) // block, torch.inf)
    top = best.topk(min(most, best.shape[1]), -1)
    return torch.zeros_like(best, dtype=torch.bool).scatter_(1, top.indices, top.values > -torch.inf)


def select(scores, lens, k, mask=None):
    """Positions of the k best, rising, then -1; level two when a mask of positions is given."""
    n = scores.shape[1]
    scores = scores.masked_fill(torch.arange(n) >= lens[:, None], -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    top = scores.topk(min(k, n), -1)
    order = top.indices.masked_fill(top.values == -torch.inf, n).sort(-1).values
    return torch.where(order < n, order, -1)


# ------------------------------------------------------------------------------------------------ problems


def problem(n, rows, heads=32, topk=64, lengths=None, fp4_queries=True, page=64, requests=None, seed=0, whole=False):
    """(arguments of index_topk with scale 1 and rows of the request, q [n, h, 128] and keys [requests, rows, 128] as
    they are read). whole: small integers, whose scores are exact and often equal."""
    g = torch.Generator().manual_seed(seed)
    requests = n if requests is None else requests
    pages = -(-rows // page)

    def drawn(*shape):
        return torch.randint(-2, 3, shape, generator=g).float() if whole else torch.randn(shape, generator=g)

    # groups of different sizes, so that a key has four scales
    sizes = 1.0 if whole else torch.exp2(torch.randint(-3, 4, (requests * pages * page, 4), generator=g))
    keys = (drawn(requests * pages * page, 4, 32) * (sizes if whole else sizes[..., None])).flatten(1)
    cache = IndexCache.pack(keys, rows_per_page=page, format=INDEX_68)
    table = torch.randperm(requests * pages, generator=g).int().view(requests, pages)
    q, weights = drawn(n, heads, 128), drawn(n, heads) if whole else drawn(n, heads) / heads
    arguments = dict(k=cache, topk=topk, scale=1.0, block_table=table, request_rows=True)
    if fp4_queries:
        data, scales = quantize_queries_fp4(q)
        arguments |= dict(q=data, q_scales=scales, weights=weights)
        read = dequantize(*quantize(q.flatten(0, 1))).view(n, heads, 128)
    else:
        small, scaled = quantize_queries(q, weights)
        arguments |= dict(q=small, weights=scaled)
        read, weights = small.float(), scaled
    arguments["lengths"] = torch.tensor([rows] * n if lengths is None else lengths, dtype=torch.int32)
    if requests != n:
        arguments["request_starts"] = torch.tensor([0, n], dtype=torch.int32)
    values = dequantize(*quantize(keys)).view(requests * pages, page, 128)
    return arguments, read, values[table.long()].flatten(1, 2)


def scores_of(arguments, q, keys, bf16=False):
    """[n, rows]"""
    requests = keys.shape[0]
    each = q.shape[0] // requests
    parts = [
        scores(
            q[r * each : (r + 1) * each].double(),
            arguments["weights"][r * each : (r + 1) * each].double(),
            keys[r].double(),
            bf16,
        )
        for r in range(requests)
    ]
    return torch.cat(parts)
