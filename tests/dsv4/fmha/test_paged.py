"""dsv4.fmha_paged on the cpu backend: page sizes, strides, shuffled tables, poisoned rows."""

import pytest
import torch
from agreement import assert_agrees
from hypothesis import given
from hypothesis import strategies as st

import dsv4
from dsv4 import reference
from dsv4.fmha import cpu

NAN = float("nan")


def paged(lengths, t=2, page=4, hq=4, hkv=2, d=64, dtype=torch.float32, spare=3, width=None, pad=0, seed=0):
    """Pages in shuffled places; rows and table entries past the length are poison. pad widens the page stride."""
    generator = torch.Generator().manual_seed(seed)
    need = [-(-n // page) for n in lengths]
    width = max([*need, 1]) if width is None else width
    table = torch.full((len(lengths), width), -7, dtype=torch.int32)
    places = torch.randperm(sum(need) + spare, generator=generator).tolist()
    k, v = (torch.full((len(places), page + pad, hkv, d), NAN, dtype=dtype)[:, :page] for _ in range(2))
    for n, length in enumerate(lengths):
        for p in range(need[n]):
            table[n, p] = place = places.pop()
            rows = min(page, length - p * page)
            for x in (k, v):
                x[place, :rows] = torch.randn(rows, hkv, d, generator=generator).to(dtype)
    q = torch.randn(len(lengths), t, hq, d, generator=generator).to(dtype)
    return q, k, v, table, torch.tensor(lengths, dtype=torch.int32)


def check(*args, **options):
    got = dsv4.fmha_paged(*args, return_lse=True, **options)
    assert_agrees(got, reference.fmha_paged, *args, sink_last=cpu.sink_last(args[0].dtype), **options)
    return got


@given(
    lengths=st.lists(st.integers(0, 70), min_size=0, max_size=4),
    t=st.sampled_from([1, 2, 4, 19]),
    page=st.sampled_from([1, 3, 16, 64]),
    window=st.sampled_from([(-1, -1), (5, 0), (20, -1)]),
    causal=st.booleans(),
    pad=st.sampled_from([0, 5]),
    chunk=st.sampled_from([1 << 12, 32 << 20]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_pages(lengths, t, page, window, causal, pad, chunk, dtype):
    args = paged(lengths, t, page, dtype=dtype, pad=pad)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "BLOCK_BYTES", chunk)
        patch.setattr(cpu, "QUERY_BLOCK", 8)
        check(*args, causal=causal, window=window, sink=torch.randn(4))


def test_rows_before_the_window_may_hold_anything():
    q, k, v, table, lengths = paged([30], t=2, page=8)
    first = 30 - 2 - 5  # the first key that a query sees
    for j in range(first):
        k[table[0, j // 8], j % 8], v[table[0, j // 8], j % 8] = NAN, NAN
    out, _ = check(q, k, v, table, lengths, causal=True, window=(5, 0))
    assert not out.isnan().any()


def test_k_and_v_in_one_pool():
    q, k, v, table, lengths = paged([9, 13], page=4)
    pool = torch.stack([k, v], dim=1)  # [P, 2, page, Hkv, D], as vLLM keeps it
    want = dsv4.fmha_paged(q, k, v, table, lengths)
    assert torch.equal(dsv4.fmha_paged(q, pool[:, 0], pool[:, 1], table, lengths), want)
    assert torch.equal(dsv4.fmha_paged(q, k, v, table.T.contiguous().T.contiguous(), lengths), want)


def test_no_pages_at_all():
    q = torch.randn(2, 3, 4, 64)
    pages = torch.zeros(0, 8, 2, 64)
    for width in (0, 2):
        table = torch.zeros(2, width, dtype=torch.int32)
        out, lse = dsv4.fmha_paged(q, pages, pages, table, torch.zeros(2, dtype=torch.int32), return_lse=True)
        assert bool((out == 0).all()) and bool((lse == -float("inf")).all())


def test_out():
    args = paged([9, 13])
    out = torch.full((2, 2, 4, 64), NAN)
    assert dsv4.fmha_paged(*args, out=out) is out and torch.equal(out, dsv4.fmha_paged(*args))
