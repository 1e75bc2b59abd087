"""FP4 index keys: 68 bytes a row, by definition and by kernel."""

import launches
import torch
import v41_index

from dsv4.caches.index_keys import IndexCache, quantize_queries_fp4
from dsv4.caches.kernels.pack import write_rows
from dsv4.caches.mxfp4_keys import INDEX_68


def test_bytes_are_those_of_the_definition():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 128, generator=g) * torch.exp2(torch.randint(-30, 20, (300, 1), generator=g).float())
    x[3], x[4, :32], x[5] = 0, 0, x[5] * 1e-38
    x[6, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])  # ties
    data, scales = v41_index.quantize(x)
    cache = IndexCache.pack(x, rows_per_page=32, format=INDEX_68)
    assert cache.page_stride == 32 * 68
    assert torch.equal(cache.data_view().flatten(0, 1)[:300], data)
    assert torch.equal(cache.scale_view().flatten(0, 1)[:300], scales)
    assert torch.equal(cache.unpack(torch.float32)[:300], v41_index.dequantize(data, scales))
    codes, words = quantize_queries_fp4(x.view(10, 30, 128))
    assert torch.equal(codes.flatten(0, 1), data)
    assert torch.equal(words[..., None].contiguous().view(torch.uint8).flatten(0, 1), scales)
    x[7, 40], x[8, 127] = torch.nan, -torch.inf
    back = IndexCache.pack(x, format=INDEX_68).unpack()
    assert back[7].isnan().sum() == 32 and back[8].isnan().sum() == 32 and back[9].isfinite().all()


def test_keys_are_written_as_torch_writes_them():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(25, 128, generator=g) * torch.exp2(torch.randint(-20, 20, (25, 1), generator=g).float())
    x[1], x[2, :32], x[3] = 0, 0, x[3] * 1e-38
    x[4, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])  # ties
    x[5, 3], x[6, 99] = torch.nan, torch.inf
    slots = torch.randperm(40, generator=g)[:25].int()
    slots[8] = -1
    want, got = (IndexCache.empty(5, 8, format=INDEX_68) for _ in "ab")
    want.write(slots, x)
    with launches.race_free("sm_90a"):
        write_rows(got, slots, x)
    assert torch.equal(got.scale_view(), want.scale_view())
    a, b = got.unpack(), want.unpack()
    assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
