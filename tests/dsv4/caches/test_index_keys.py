"""FP8 index keys: 132 bytes a row, pages split into data and scales, powers of two as scales."""

import math

import launches
import pytest
import torch

import dsv4
from dsv4.caches.formats import FP8_584, INDEX_132
from dsv4.caches.index_keys import IndexCache, quantize_queries, unpacked
from dsv4.caches.kernels.pack import write_rows
from dsv4.caches.mxfp4_keys import INDEX_68


def keys(n, seed=0, scale=1.0):
    return torch.randn(n, 128, generator=torch.Generator().manual_seed(seed)) * scale


def test_a_page_is_data_then_scales():
    cache = IndexCache.pack(keys(3), rows_per_page=2)
    values, scales = INDEX_132.codes(keys(3))
    page = cache.storage[: cache.page_stride]
    assert cache.pages == 2 and cache.rows == 4 and cache.page_stride == 272
    assert torch.equal(page[:256].view(2, 128), values[:2].view(torch.uint8))
    assert torch.equal(page[256:264].view(torch.float32), scales[:2])
    assert not cache.storage[cache.page_stride + 128 : cache.page_stride + 256].any()  # the row that was not written


def test_scales_are_the_least_powers_of_two_that_fit():
    rows = torch.zeros(6, 128)
    rows[:, 5] = torch.tensor([448.0, 448.0 * 1.001, 1.0, 0.0, 1e-6, -3e4])
    values, scales = INDEX_132.codes(rows)
    expected = [2.0 ** math.ceil(math.log2(max(abs(x), 1e-4) / 448)) for x in rows[:, 5].double().tolist()]
    assert scales.tolist() == expected
    assert (values.float() * scales[:, None]).isfinite().all()
    assert values.float()[0, 5] == 448 and values.float()[3].eq(0).all()


def test_rounding_is_that_of_e4m3():
    """4 bits of mantissa: half a unit in the last place is 2^-4 of a value, or of the least normal number."""
    x = keys(500, scale=3.0)
    back = IndexCache.pack(x).unpack(torch.float32)[:500]
    scale = INDEX_132.codes(x)[1]
    bound = torch.maximum(x.abs() * 2.0**-4, scale[:, None] * 2.0**-10)
    assert ((back - x).abs() <= bound).all()


def test_a_row_with_nan_or_infinity_reads_back_as_nan():
    x = keys(3)
    x[1, 7], x[2, 0] = torch.nan, -torch.inf
    back = IndexCache.pack(x).unpack()
    assert back[0].isfinite().all() and back[1].isnan().all() and back[2].isnan().all()


def test_slots_drop_and_overwrite():
    cache = IndexCache.empty(2, 4, page_stride=600)
    x = keys(3)
    cache.write(torch.tensor([7, -1, 0]), x)
    back, want = cache.unpack(torch.float32), IndexCache.pack(x).unpack(torch.float32)
    assert torch.equal(back[[7, 0]], want[[0, 2]]) and not back[1:7].any()


def test_pages_of_engines_are_taken_without_a_copy():
    block = torch.zeros(5, 3, 64 * INDEX_132.row_bytes, dtype=torch.uint8)  # pages of three layers side by side
    pages = block[:, 1].view(5, 64, 1, INDEX_132.row_bytes)
    cache = IndexCache.from_pages(pages)
    assert (cache.pages, cache.rows_per_page, cache.page_stride) == (5, 64, 3 * 64 * INDEX_132.row_bytes)
    x = keys(5 * 64)
    cache.write(torch.arange(len(x)), x)
    assert not block[:, 0].any() and not block[:, 2].any()
    values, scales = unpacked(cache.page_view())
    assert torch.equal(values.view(torch.uint8), cache.data_view())
    assert torch.equal(scales[..., None].contiguous().view(torch.uint8), cache.scale_view())
    assert torch.equal(values.float() * scales[..., None], IndexCache.pack(x).unpack(torch.float32).view(5, 64, 128))


def test_scales_of_queries_go_into_the_weights():
    q, w = torch.randn(3, 5, 128), torch.randn(3, 5)
    small, weights = quantize_queries(q, w)
    k = torch.randn(7, 128)
    got = torch.einsum("nh,nhs->ns", weights, (small.float() @ k.T).relu())
    values, scales = INDEX_132.codes(q)
    want = torch.einsum("nh,nhs->ns", w, ((values.float() * scales[..., None]) @ k.T).relu())
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda: IndexCache(torch.zeros(4), 64), "storage"),
        (lambda: IndexCache.empty(1, 0), "rows_per_page"),
        (lambda: IndexCache.empty(1, 64, page_stride=100), "page_stride.*8448"),
        (lambda: IndexCache.pack(torch.zeros(3, 64)), "rows"),
        (lambda: IndexCache.from_pages(torch.zeros(2, 64, 131, dtype=torch.uint8)), "132"),
        (lambda: IndexCache.empty(1, 4).write(torch.tensor([4]), torch.zeros(1, 128)), "slots"),
        (lambda: quantize_queries([0.0] * 128, torch.zeros(2, 3)), "q"),
        (lambda: quantize_queries(torch.zeros(128), torch.zeros(())), "q"),
        (lambda: quantize_queries(torch.zeros(2, 3, 64), torch.zeros(2, 3)), "q"),
        (lambda: quantize_queries(torch.zeros(2, 3, 128), torch.zeros(2, 4)), "weights"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()


def test_the_kernel_writes_the_same_bytes():
    x = torch.cat([keys(20, scale=2.0), torch.zeros(1, 128), torch.full((1, 128), 448.0), keys(3, 1, 1e-7)])
    x[5, 3] = torch.nan
    x[6, 3] = torch.inf
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(2))[: len(x)].int()
    slots[3] = -1
    want, got = IndexCache.empty(5, 8), IndexCache.empty(5, 8)
    want.write(slots, x)
    with launches.race_free("sm_90a"):
        write_rows(got, slots, x)
    assert torch.equal(got.scale_view(), want.scale_view())
    finite = ~torch.isin(torch.arange(40), slots[5:7].long())  # the values of a row whose scale is NaN do not count
    assert torch.equal(got.data_view().flatten(0, 1)[finite], want.data_view().flatten(0, 1)[finite])


def test_pages_of_one_row_have_any_stride_between_rows():
    """torch gives the single row of a page any stride, as here where it selects no pages."""
    for pages in (torch.zeros(3, 132, 1, dtype=torch.uint8).mT, torch.zeros(3, 1, 132, dtype=torch.uint8)[[]]):
        assert IndexCache.from_pages(pages).rows == len(pages)


@pytest.mark.parametrize("wrong", ["index_132", 0, {}, FP8_584, [INDEX_68]], ids=repr)
def test_a_wrong_format_is_named(wrong):
    words = "^format: got .*; accepted: a format of dsv4.caches: index_132, index_68$"
    for make in (
        lambda: IndexCache.empty(1, 4, format=wrong),
        lambda: IndexCache.pack(keys(3), format=wrong),
        lambda: IndexCache.from_pages(torch.zeros(2, 4, 132, dtype=torch.uint8), format=wrong),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    with pytest.raises(ValueError, match="^format_name: got .*; accepted: index_132, index_68$"):
        IndexCache(torch.zeros(132, dtype=torch.uint8), 1, format_name=wrong if wrong != "index_132" else "fp8_584")


@pytest.mark.parametrize("format", [None, INDEX_68])
def test_queries_that_see_nothing_of_pages_of_one_row(format):
    cache = IndexCache.pack(torch.randn(4, 128), rows_per_page=1, format=format)
    q, weights = torch.randn(2, 4, 128), torch.randn(2, 4)
    small, scaled = quantize_queries(q, weights)
    lengths, table = torch.tensor([0, 3]), torch.tensor([[0, 1, 2], [3, 2, 1]], dtype=torch.int32)
    lists = dsv4.index_topk(small, cache, scaled, 3, lengths=lengths, block_table=table)
    assert lists[0].tolist() == [-1, -1, -1] and sorted(lists[1].tolist()) == [1, 2, 3]
