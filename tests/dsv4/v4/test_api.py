"""dsv4.v4_attention on the cpu backend against the oracle."""

import pytest
import torch
from agreement import assert_agrees, assert_lse, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4
from dsv4 import Fp8Cache, reference
from dsv4.v4 import cpu as cpu_v4

WINDOW, TOPK = 128, 512
INF = float("inf")


def compare(*args, backend="cpu", **options):
    """Run the op with a poisoned output and hold it against the oracle; return (out, lse)."""
    q = args[0]
    out = torch.full_like(q, float("nan"))
    got, lse = dsv4.v4_attention(*args, **options, out=out, return_lse=True, backend=backend)
    assert got is out and lse.dtype == torch.float32 and lse.shape == q.shape[:2]
    assert_agrees((got, lse), reference.v4_attention, *args, **options)
    plain = dsv4.v4_attention(*args, **options, backend=backend)
    assert torch.equal(plain, got)
    return got, lse


def normal(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def window_list(positions, width=WINDOW):
    """Rows max(0, t - width + 1) .. t of a pool whose row number is the token position; -1 in front."""
    rows = positions[:, None] - torch.arange(width - 1, -1, -1)
    return rows.clamp_min(-1).int()


def layer(kind, positions, heads=3, dtype=torch.float32, seed=0, ratio=None):
    """Arguments of one V4 layer for queries at these positions of one sequence."""
    tokens = int(positions.max()) + 1
    args = [normal(len(positions), heads, 512, seed=seed, dtype=dtype), normal(tokens, 512, seed=seed + 1, dtype=dtype)]
    args.append(window_list(positions))
    options = dict(
        sink=normal(heads, seed=seed + 2),
        inverse_rope=(reference.rope_table(tokens, 64, 160000.0, factor=16.0), positions),
    )
    if kind == "swa":
        return args, options
    ratio = ratio or {"csa": 4, "hca": 128}[kind]
    visible = (positions + 1) // ratio
    rows = max(tokens // ratio, 1)
    pool = normal(rows, 512, seed=seed + 3, dtype=dtype)
    if kind == "csa":
        index_q, index_k, weights = normal(len(positions), 8, 32, seed=5), normal(rows, 32, seed=6), None
        weights = normal(len(positions), 8, seed=7)
        lists = dsv4.index_topk(index_q, index_k, weights, TOPK, lengths=visible)
        return [*args, pool, lists], options | dict(compressed_lengths=visible.clamp_max(TOPK).int())
    table = torch.arange(rows, dtype=torch.int32)[None].flip(1)  # pages of one row, in another order
    starts = torch.tensor([0, len(positions)], dtype=torch.int32)
    more = dict(compressed_block_table=table, compressed_lengths=visible.int(), request_starts=starts)
    return [*args, pool], options | more


# Both sides of: an empty window, the first rows of CSA and HCA, the full window, the full top-k list (4 * 512).
BOUNDARIES = [0, 2, 3, 4, 126, 127, 128, 254, 255, 256, 2046, 2047, 2048, 2051]


@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_at_every_boundary(kind, dtype):
    args, options = layer(kind, torch.tensor(BOUNDARIES), dtype=dtype)
    compare(*args, **options)


@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
@pytest.mark.parametrize("first", [0, 2, 125, 127, 2045])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_steps_of_1_to_4_tokens(kind, first, tokens):
    """Each draft token has its own window and its own count of compressed rows; alone or together, same result."""
    args, options = layer(kind, torch.arange(first, first + tokens), dtype=torch.bfloat16)
    compare(*args, **options)
    together, together_lse = dsv4.v4_attention(*args, **options, return_lse=True, deterministic=True)
    if kind == "hca":
        table = options["compressed_block_table"]
        starts = torch.tensor([0, 1], dtype=torch.int32)
    for n in range(tokens):
        one = [args[0][n : n + 1], args[1], args[2][n : n + 1], *args[3:4], *(x[n : n + 1] for x in args[4:])]
        more = dict(
            sink=options["sink"], inverse_rope=(options["inverse_rope"][0], options["inverse_rope"][1][n : n + 1])
        )
        if kind != "swa":
            more["compressed_lengths"] = options["compressed_lengths"][n : n + 1]
        if kind == "hca":
            more.update(compressed_block_table=table, request_starts=starts)
        alone, alone_lse = dsv4.v4_attention(*one, **more, return_lse=True, deterministic=True)
        assert torch.equal(alone[0], together[n]) and torch.equal(alone_lse[0], together_lse[n])


@pytest.mark.parametrize("heads", [1, 5, 64, 128])
def test_head_counts(heads):
    args, options = layer("csa", torch.tensor([0, 300, 301]), heads=heads, dtype=torch.bfloat16)
    compare(*args, **options)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_other_head_dims(d):
    q, pool = normal(5, 3, d, seed=0), normal(30, d, seed=1)
    rows = torch.randint(-1, 30, (5, 11), dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    compare(q, pool, rows, inverse_rope=(reference.rope_table(9, 32), torch.arange(5)))


POOLS = {
    "rows": lambda x: x,
    "pages": lambda x: x.unflatten(0, (-1, 2)),
    "strided rows": lambda x: torch.cat([x, x.new_full(x.shape, INF)], 1)[:, :512],
    "strided pages": lambda x: torch.cat([x.unflatten(0, (-1, 2)), x.new_full((len(x) // 2, 3, 512), INF)], 1)[:, :2],
    "fp8, 64 rows a page": lambda x: Fp8Cache.pack(x, rows_per_page=64),
    "fp8, 2 rows a page": lambda x: Fp8Cache.pack(x, rows_per_page=2),
    "fp8, odd stride": lambda x: Fp8Cache.pack(x, rows_per_page=2, page_stride=1171),
}


@pytest.mark.parametrize("window", POOLS)
@pytest.mark.parametrize("compressed", POOLS)
def test_pools(window, compressed):
    q = normal(6, 4, 512, seed=0, dtype=torch.bfloat16)
    w, c = (POOLS[p](normal(80, 512, seed=s, dtype=torch.bfloat16)) for p, s in ((window, 1), (compressed, 2)))
    g = torch.Generator().manual_seed(3)
    wi, ci = (torch.randint(-1, 80, (6, k), dtype=torch.int32, generator=g) for k in (13, 40))
    compare(q, w, wi, c, ci, sink=normal(4, seed=4))


@pytest.mark.parametrize("pool", POOLS)
def test_block_tables(pool):
    """Requests of 0 to 4 queries, lengths that end inside a page, garbage in the table past them."""
    starts = torch.tensor([0, 3, 3, 4, 8], dtype=torch.int32)
    q = normal(9, 4, 512, seed=0, dtype=torch.bfloat16)  # the last query belongs to no request
    w = normal(20, 512, seed=1, dtype=torch.bfloat16)
    wi = torch.randint(0, 20, (9, 5), dtype=torch.int32, generator=torch.Generator().manual_seed(5))
    c = POOLS[pool](normal(128, 512, seed=2, dtype=torch.bfloat16))
    page = reference.rows_per_page(c)
    lengths = torch.tensor([0, 1, 2, 3, 4, 4, 5, 5, 77], dtype=torch.int32).clamp_max(5)
    pages = 128 // page
    table = torch.randint(0, pages, (4, 6), dtype=torch.int32, generator=torch.Generator().manual_seed(6))
    table[:, -(-5 // page) :] = 10**6  # never reached
    table[1] = -7  # of no request
    options = dict(compressed_block_table=table, compressed_lengths=lengths, request_starts=starts)
    compare(q, w, wi, c, **options, sink=normal(4, seed=4))
    exact = dict(sink=normal(4, seed=4), deterministic=True)
    got = dsv4.v4_attention(q, w, wi, c, **options, **exact)
    window_only = dsv4.v4_attention(q[8:], w, wi[8:], **exact)
    assert torch.equal(got[8:], window_only)
    # The same rows as a list.
    j = torch.arange(5)
    owner = torch.tensor([0, 0, 0, 2, 3, 3, 3, 3])
    rows = table[owner][:, j // page] * page + j % page
    listed = dsv4.v4_attention(q[:8], w, wi[:8], c, rows.int(), compressed_lengths=lengths[:8], **exact)
    assert torch.equal(got[:8], listed)


def test_block_table_without_request_starts_is_one_line_per_query():
    q, w, c = normal(4, 2, 512, seed=0), normal(9, 512, seed=1), normal(12, 512, seed=2)
    table = torch.arange(12, dtype=torch.int32).view(4, 3)
    lengths = torch.tensor([0, 1, 3, 2], dtype=torch.int32)
    compare(q, w, torch.full((4, 1), -1).int(), c, compressed_block_table=table, compressed_lengths=lengths)


def test_many_blocks_give_what_one_gives(monkeypatch):
    """Row blocks and query blocks far smaller than the lists, borders included."""
    args, options = layer("csa", torch.arange(600, 640), dtype=torch.bfloat16)
    once = dsv4.v4_attention(*args, **options)
    monkeypatch.setattr(cpu_v4, "ROW_BLOCK", 37)
    monkeypatch.setattr(cpu_v4, "BLOCK_BYTES", 7 * 4 * (37 * 512 + 3 * (37 + 1024)))
    got, _ = compare(*args, **options)
    assert_same(got, once)
    args, options = layer("hca", torch.arange(600, 640), dtype=torch.bfloat16, ratio=2)
    compare(*args, **options)


def test_lengths_hide_what_follows_them():
    q, w = normal(3, 2, 512, seed=0), normal(10, 512, seed=1)
    lists = torch.tensor([[1, 2, 99999], [-1, -99999, 5], [7, 8, 9]], dtype=torch.int32)
    lengths = torch.tensor([2, 1, 0], dtype=torch.int32)
    got, lse = compare(q, w, lists, window_lengths=lengths)
    assert (lse[1:] == -INF).all()
    clean = dsv4.v4_attention(q[:1], w, torch.tensor([[1, 2]], dtype=torch.int32))
    assert_same(got[:1], clean)


def test_a_row_listed_twice_counts_twice_and_order_does_not_matter():
    q, w = normal(2, 2, 512, seed=0), normal(5, 512, seed=1)
    got, _ = compare(q, w, torch.tensor([[3, 1, 3], [0, 4, 2]], dtype=torch.int32))
    other = dsv4.v4_attention(q, w, torch.tensor([[3, 3, 1], [2, 0, 4]], dtype=torch.int32))
    assert_same(got, other)


@pytest.mark.parametrize("sink", [-INF, -100.0, 0.0, 60.0, INF])
def test_sinks(sink):
    args, options = layer("csa", torch.tensor([0, 5, 200]), heads=2)
    got, lse = compare(*args, **options | dict(sink=torch.full((2,), sink)))
    none, same_lse = dsv4.v4_attention(*args, **options | dict(sink=None), return_lse=True)
    assert torch.equal(lse, same_lse)  # the LSE does not know the sink
    if sink == -INF:
        assert torch.equal(got, none)
    if sink == INF:
        assert not got.any()


def test_a_query_without_rows_is_zero_whatever_the_sink():
    q, w = normal(2, 3, 512, seed=0), normal(5, 512, seed=1)
    nothing = torch.full((2, 4), -1, dtype=torch.int32)
    for sink in (None, torch.tensor([-INF, 0.0, INF])):
        out, lse = dsv4.v4_attention(q, w, nothing, w, nothing, sink=sink, return_lse=True)
        assert not out.any() and (lse == -INF).all()
        out, lse = dsv4.v4_attention(q, w[:0], nothing[:, :0], sink=sink, return_lse=True)
        assert not out.any() and (lse == -INF).all()


@pytest.mark.parametrize("poison", [float("nan"), INF, -INF])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_nobody_lists_may_hold_anything(poison, packed):
    """This matters for row 0: an absent row must not be read as row 0 times zero."""
    q, w, c = (normal(*s, seed=i, dtype=torch.bfloat16) for i, s in enumerate([(4, 2, 512), (10, 512), (12, 512)]))
    wi = torch.tensor([[1, -1], [2, 3], [-1, -1], [4, -1]], dtype=torch.int32)
    ci = torch.tensor([[5, -1, 6], [7, -1, -1], [-1, -1, -1], [8, 9, 11]], dtype=torch.int32)
    make = (lambda x: Fp8Cache.pack(x, rows_per_page=1)) if packed else (lambda x: x)
    clean = dsv4.v4_attention(q, make(w), wi, make(c), ci)
    w[0], w[5:], c[:5], c[10] = poison, poison, poison, poison
    assert torch.equal(dsv4.v4_attention(q, make(w), wi, make(c), ci), clean)
    table, lengths = (torch.tensor([[5, 6, 0]] * 4, dtype=torch.int32), torch.tensor([1, 2, 0, 2], dtype=torch.int32))
    out = dsv4.v4_attention(q, make(w), wi, make(c), compressed_block_table=table, compressed_lengths=lengths)
    assert out.isfinite().all()


def test_scores_that_overflow_are_nan_and_not_nothing():
    """fp32 has no number for them; a query without rows stays 0 and -inf."""
    q, w = torch.full((3, 2, 512), 1e20), torch.full((9, 512), -1e20)
    lists = torch.tensor([[0, 4], [-1, -1], [-1, 3]], dtype=torch.int32)
    out, lse = dsv4.v4_attention(q, w, lists, return_lse=True)
    assert out[::2].isnan().all() and lse[::2].isnan().all()
    assert not out[1].any() and (lse[1] == -float("inf")).all()


def test_merging_the_two_branches_with_a_deferred_sink():
    args, options = layer("csa", torch.tensor([3, 127, 600]), heads=4)
    sink, lengths = options["sink"], options["compressed_lengths"]
    whole, whole_lse = dsv4.v4_attention(*args, sink=sink, compressed_lengths=lengths, return_lse=True)
    a = dsv4.v4_attention(*args[:3], return_lse=True)
    b = dsv4.v4_attention(args[0], args[3], args[4], window_lengths=lengths, return_lse=True)
    out, lse = dsv4.merge_states([a[0], b[0]], [a[1], b[1]], sink=sink)
    assert_same(out, whole)
    assert_lse(lse, whole_lse)


def test_deterministic_is_the_same_bits_in_any_batch_and_with_any_threads():
    args, options = layer("csa", torch.tensor([0, 5, 200, 2050]), heads=16, dtype=torch.bfloat16)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(dsv4.v4_attention(*args, **options, return_lse=True, deterministic=True))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for out, lse in results:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_strides_are_honoured():
    args, options = layer("csa", torch.tensor([0, 5, 200, 700]), heads=4, dtype=torch.bfloat16)
    want = dsv4.v4_attention(*args, **options)
    q, w, wi, c, ci = args
    strided = [
        torch.cat([q, q], 1)[:, :4],
        torch.cat([w, w], 1)[:, :512],
        torch.cat([wi, wi], 1)[:, :WINDOW],
        torch.cat([c, c], 1)[:, :512],
        torch.cat([ci, ci], 1)[:, :TOPK],
    ]
    assert not any(x.is_contiguous() for x in strided)
    out = torch.full((4, 9, 1024), float("nan"), dtype=torch.bfloat16)[:, 2:6, 512:]
    assert dsv4.v4_attention(*strided, **options, out=out) is out
    assert torch.equal(out, want)


def test_empty_sizes():
    w, none = normal(5, 512, seed=1), torch.zeros(0, 3, dtype=torch.int32)
    assert dsv4.v4_attention(normal(0, 2, 512, seed=0), w, none).shape == (0, 2, 512)
    out, lse = dsv4.v4_attention(normal(2, 0, 512, seed=0), w, torch.zeros(2, 3, dtype=torch.int32), return_lse=True)
    assert out.shape == (2, 0, 512) and lse.shape == (2, 0)
    empty = Fp8Cache.empty(0, 64)
    compare(normal(2, 2, 512, seed=0), w, torch.tensor([[1], [-1]]).int(), empty, torch.full((2, 4), -1).int())


@settings(max_examples=50)
@given(st.data())
def test_any_lists(data):
    n, heads, rows = (data.draw(st.integers(a, b)) for a, b in ((1, 6), (1, 4), (1, 20)))
    seed = data.draw(st.integers(0, 10**6))
    g = torch.Generator().manual_seed(seed)
    q, w, c = (torch.randn(*s, generator=g) for s in ((n, heads, 64), (rows, 64), (rows, 64)))

    def lists():
        width = data.draw(st.integers(0, 9))
        return torch.randint(-1, rows, (n, width), generator=g, dtype=torch.int32)

    def lengths(width):
        return torch.randint(0, width + 1, (n,), generator=g, dtype=torch.int32)

    wi = lists()
    options = dict(window_lengths=lengths(wi.shape[1]) if data.draw(st.booleans()) else None)
    kind = data.draw(st.sampled_from(["none", "list", "table"]))
    args = [q, w, wi]
    if kind == "list":
        ci = lists()
        args += [c, ci]
        options["compressed_lengths"] = lengths(ci.shape[1]) if data.draw(st.booleans()) else None
    elif kind == "table":
        args.append(c)
        cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
        options["request_starts"] = torch.tensor([0, *cuts], dtype=torch.int32)
        options["compressed_block_table"] = torch.randint(0, rows, (len(cuts), 7), generator=g, dtype=torch.int32)
        options["compressed_lengths"] = lengths(7)
    if data.draw(st.booleans()):
        options["sink"] = torch.randn(heads, generator=g)
    compare(*args, **options)
