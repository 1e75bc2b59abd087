"""States of the compressor in pages, as vLLM keeps them, and the rows that they make; for both backends."""

import torch
from compress_inputs import KINDS, inputs

import dsv4
from dsv4 import Fp8Cache, IndexCache

LINES = {"csa": 4, "hca": 8, "indexer": 4}  # of a page


def call(kind, spans):
    """(arguments for tokens begin .. end - 1 of every span, one request each, in one call; the cache; [(slot, row in
    fp64)]). Lines of tokens that are not there hold NaN; between the requests stand tokens that are none."""
    d, m, overlap, _ = KINDS[kind]
    width, lines = d * (1 + overlap), LINES[kind]
    most = -(-max(end for _, end in spans) // lines)
    table = torch.randperm(len(spans) * most + 1)[: len(spans) * most].view(len(spans), most).int()
    states = torch.full((len(spans) * most + 1, 2, lines, 2 * width), float("nan"))[:, 1]  # another layer between them
    tokens, requests, positions, slots, wanted = [], [], [], [], []
    free = iter(torch.randperm(40).tolist())
    shared = inputs(kind, 1)
    for r, (begin, end) in enumerate(spans):
        given = inputs(kind, end, seed=r) | {name: shared[name] for name in ("position_bias", "norm_weight")}
        rows, _ = dsv4.compress(**{name: x if name == "cos_sin" else x.double() for name, x in given.items()})
        for t in range(end):
            line = torch.cat([given["kv"][t], given["gate"][t] + given["position_bias"][t % m]])
            states[table[r, t // lines], t % lines] = line
        for t in range(begin, end):
            slot = next(free) if (t + 1) % m == 0 else -1
            if slot >= 0:
                wanted.append((slot, rows[t // m]))
            tokens.append(int(table[r, t // lines]) * lines + t % lines)
            requests.append(r), positions.append(t), slots.append(slot)
        tokens.append(-1), requests.append(0), positions.append(m - 1), slots.append(next(free))  # fills a graph up
    cache = (IndexCache if kind == "indexer" else Fp8Cache).empty(5, 8)
    long = [torch.tensor(x) for x in (tokens, requests, positions, slots)]
    arguments = dict(
        states=states, tokens=long[0], requests=long[1].int(), positions=long[2], block_table=table, slots=long[3],
        norm_weight=shared["norm_weight"], cos_sin=shared["cos_sin"], out=cache, ratio=m,
    )  # fmt: skip
    return arguments, cache, wanted


def assert_rows(kind, run):
    """Every finished row lies at its place, as near as e4m3 can be, and no other place was written."""
    m = KINDS[kind][1]
    given, cache, wanted = call(kind, [(0, 2 * m + 1), (3 * m - 1, 3 * m), (m + 1, 2 * m - 1), (0, m)])
    run(**given)
    got = cache.unpack(torch.float64)
    assert len(wanted) == 4
    for slot, row in wanted:
        # half a step of e4m3 and half a step of bf16, or half of the smallest number of a scale that is at most
        # twice what the largest value of the row needs
        bound = row.abs() * (2**-4 + 2**-8) + row.abs().max() * 2 / 448 * 2**-10
        assert bool(((got[slot] - row).abs() <= bound).all())
    others = torch.ones(len(got), dtype=torch.bool)
    others[[slot for slot, _ in wanted]] = False
    assert not got[others].any()


def engine_pages(cache):
    """uint8 [pages, rows, bytes of a row], as an engine holds them."""
    bytes_of_a_row = 132 if isinstance(cache, IndexCache) else 584
    shape = (cache.pages, cache.rows_per_page, bytes_of_a_row)
    return cache.storage.as_strided(shape, (cache.page_stride, bytes_of_a_row, 1))
