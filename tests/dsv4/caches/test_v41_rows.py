"""DeepSeek-V4.1's rows of 528 and 288 bytes against a writer of bytes that shares no code with the package."""

import io

import launches
import ml_dtypes
import numpy as np
import pytest
import rows_by_hand
import torch

import dsv4
from dsv4.caches import kv
from dsv4.caches.formats import (
    E2M1,
    FORMATS,
    MXFP8_528,
    MXFP8_528_INTERLEAVED,
    NVFP4_288,
    NVFP4_288_INTERLEAVED,
    decode_e2m1,
    encode_e2m1,
)
from dsv4.caches.kernels.pack import write_rows
from dsv4.caches.pages import PackedRows

FOUR = [MXFP8_528, MXFP8_528_INTERLEAVED, NVFP4_288, NVFP4_288_INTERLEAVED]
CLASSES = {MXFP8_528: dsv4.Mxfp8Cache, NVFP4_288: dsv4.Nvfp4Cache}


def planar(format):
    return MXFP8_528 if type(format) is type(MXFP8_528) else NVFP4_288


def rows_of(n, spread=3.0, seed=0):
    """Groups of 16 that differ in size by powers of two; groups of zeros, tiny ones, some past the largest scale."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 512, generator=g) * torch.randn(n, 32, generator=g).mul(spread).exp2().repeat_interleave(16, 1)
    for i in range(min(n, 3)):
        x[i, 32 * i : 32 * i + 32] *= (0.0, 1e-7, 1e4)[i]
        x[i, 64:96] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4) * 2.0**i  # ties of e2m1
    return x.bfloat16()


@pytest.mark.parametrize("format", FOUR, ids=lambda f: f.name)
@pytest.mark.parametrize("rows_per_page, more", [(64, 0), (2, 100), (1, 0), (3, 7)])
def test_pages_are_byte_exact(format, rows_per_page, more):
    rows, name = rows_of(70), planar(format).name
    stride = format.default_stride(rows_per_page) + more
    cache = CLASSES[planar(format)].pack(rows, rows_per_page=rows_per_page, page_stride=stride, format=format)
    want = rows_by_hand.image(rows, name, format.interleaved, rows_per_page, stride)
    assert np.array_equal(cache.storage.numpy(), want)
    values = rows_by_hand.values(want, 70, name, format.interleaved, rows_per_page, stride)
    assert torch.equal(cache.unpack(torch.float32)[:70], values)
    assert torch.equal(cache.unpack()[:70].float(), values)  # exact in bf16
    assert torch.equal(cache.gather(torch.tensor([69, -1, 3]))[[0, 2]].float(), values[[69, 3]])


def test_default_strides():
    """Strides are those of the engines: planar pages at multiples of 512 and 256 bytes, interleaved ones side by
    side."""
    assert [f.default_stride(3) for f in FOUR] == [2048, 3 * 528, 1024, 3 * 288]
    assert [f.row_bytes for f in FOUR] == [528, 528, 288, 288]


@pytest.mark.parametrize("format", FOUR, ids=lambda f: f.name)
def test_what_was_unpacked_packs_to_itself(format):
    cache = PackedRows.pack(rows_of(20, spread=0.5), format=format)
    again = PackedRows.pack(cache.unpack(), format=format)
    assert torch.equal(again.unpack(), cache.unpack())


def test_e2m1_codes():
    """All codes of both nibbles, ties, signs of zero, numbers past the largest."""
    pairs = torch.arange(256, dtype=torch.uint8)
    want = np.stack([pairs.numpy() & 15, pairs.numpy() >> 4], -1).reshape(-1).view(ml_dtypes.float4_e2m1fn)
    assert torch.equal(decode_e2m1(pairs[None])[0], torch.from_numpy(want.astype(np.float32)))
    assert torch.equal(encode_e2m1(decode_e2m1(pairs[None])), pairs[None])
    middles = torch.tensor([(a + b) / 2 for a, b in zip(E2M1, E2M1[1:])])
    x = torch.cat(
        [middles, middles.nextafter(torch.zeros(7)), middles.nextafter(torch.full((7,), 9.0)), torch.tensor([7.0])]
    )
    want = np.clip(x.numpy(), -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert torch.equal(decode_e2m1(encode_e2m1(x)), torch.from_numpy(want))
    assert torch.equal(decode_e2m1(encode_e2m1(-x)), -torch.from_numpy(want))


@pytest.mark.parametrize("format", [MXFP8_528, NVFP4_288], ids=lambda f: f.name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_group_with_a_nan_reads_back_as_nan(format, bad):
    rows = rows_of(1)
    rows[0, 200] = bad
    back = PackedRows.pack(rows, format=format).unpack()[0]
    first = 200 // format.group * format.group
    assert back[first : first + format.group].isnan().all()
    assert back.isnan().sum() == format.group


def test_zeroed_pages_are_rows_of_zeros():
    for format in FOUR:
        assert not PackedRows.empty(1, 4, format=format).unpack().any()


@pytest.mark.parametrize("format", [pytest.param(f, id=f.name, marks=[pytest.mark.slow] * f.interleaved) for f in FOUR])
def test_the_gpu_kernel_writes_the_same_bytes(format):
    rows = torch.cat([rows_of(9), rows_of(2, seed=1)])
    rows[4, 200], rows[5, 100] = float("nan"), float("-inf")
    slots = torch.tensor([3, 0, 11, -1, 5, 6, 7, 14, 15, 99, 2])
    want, got = (PackedRows.empty(4, 4, page_stride=4 * format.row_bytes + 3, format=format) for _ in "ab")
    want.write(slots.where(slots < 16, -1), rows)
    with launches.race_free("sm_90a"):
        write_rows(got, slots, rows)
    written = want.unpack().isnan()  # codes under a NaN mean nothing
    assert torch.equal(got.scale_view(), want.scale_view())
    assert torch.equal(got.unpack().where(~written, 1), want.unpack().where(~written, 1))
    kept = ~written.view(16, -1).any(1)
    assert torch.equal(got.data_view().flatten(0, 1)[kept], want.data_view().flatten(0, 1)[kept])


def test_a_class_takes_its_own_formats():
    """528 bytes alone do not say what they mean: the class does."""
    pages = torch.zeros(2, 4, 1, 528, dtype=torch.uint8)
    assert dsv4.Mxfp8Cache.from_pages(pages).format is MXFP8_528
    assert dsv4.Mxfp8Cache.from_pages(pages, format=MXFP8_528_INTERLEAVED).format is MXFP8_528_INTERLEAVED
    with pytest.raises(ValueError, match="format_name: got 'nvfp4_288'; accepted: mxfp8_528, mxfp8_528_interleaved"):
        dsv4.Mxfp8Cache(torch.zeros(528, dtype=torch.uint8), 1, format_name="nvfp4_288")
    with pytest.raises(ValueError, match=r"pages: got .*accepted: one-byte elements \[pages, rows, 288\]"):
        dsv4.Nvfp4Cache.from_pages(pages)
    with pytest.raises(ValueError, match="page_stride: got int 1000; accepted: an int >= rows_per_page"):
        dsv4.Nvfp4Cache.empty(1, 4, page_stride=1000)
    with pytest.raises(ValueError, match="packed rows of 512 values .*accepted: rows of 64, as q"):
        lists = torch.zeros(1, 1, dtype=torch.int32)
        dsv4.v4_attention(torch.randn(1, 2, 64), dsv4.Nvfp4Cache.empty(1, 4), lists)


@pytest.mark.parametrize("format", FOUR, ids=lambda f: f.name)
def test_classes_survive_operators_and_files(format):
    cache = CLASSES[planar(format)].pack(rows_of(3), rows_per_page=2, format=format)
    assert type(kv.from_parts(*kv.parts_of(cache))) is type(cache)
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    back = torch.load(file, weights_only=True)
    assert back.format is format is FORMATS[format.name]
    assert torch.equal(back.unpack(), cache.unpack())


def plain_attention(q, rows, sink):
    """q [H, 512], rows [n, 512], sink [H], as the model defines it."""
    s = q.double() @ rows.double().T * 512**-0.5
    weights = torch.cat([s, sink.double()[:, None]], 1).softmax(1)[:, :-1]
    return weights @ rows.double(), s.logsumexp(1)


@pytest.mark.parametrize("window, compressed", [(0, 2), (1, 3), (2, 0), (None, 2), (2, None)])
def test_attention_to_rows_by_hand(window, compressed):
    """Pools of two formats, of which one may be V4's; a query that lists nothing in one of them."""
    torch.manual_seed(1)
    pools, plain = [], []
    for format, per_page in ((window, 4), (compressed, 7)):
        rows = torch.randn(50, 512).bfloat16()
        if format is None:
            pools.append(dsv4.Fp8Cache.pack(rows, rows_per_page=per_page))
            plain.append(pools[-1].unpack().float())
            continue
        f = FOUR[format]
        stride = f.default_stride(per_page) + 16
        storage = rows_by_hand.image(rows, planar(f).name, f.interleaved, per_page, stride)
        pools.append(CLASSES[planar(f)](torch.from_numpy(storage), per_page, stride, f.name))
        plain.append(rows_by_hand.values(storage, 50, planar(f).name, f.interleaved, per_page, stride))
    q, sink = torch.randn(3, 4, 512).bfloat16(), torch.randn(4)
    lists = [torch.randint(-1, 50, (3, width), dtype=torch.int32) for width in (9, 13)]
    lengths = torch.tensor([13, 5, 0], dtype=torch.int32)
    out, lse = dsv4.v4_attention(
        q, pools[0], lists[0], pools[1], lists[1], compressed_lengths=lengths, sink=sink, return_lse=True
    )
    for n in range(3):
        seen = [lists[0][n], lists[1][n, : lengths[n]]]
        rows = torch.cat([p[i[i >= 0].long()] for p, i in zip(plain, seen)])
        want, want_lse = plain_attention(q[n], rows, sink)
        assert (out[n].double() - want).norm() / want.norm() < 2**-8
        assert torch.allclose(lse[n].double(), want_lse, atol=1e-5)
