"""Fp8Cache against a byte-by-byte writer in NumPy and ml_dtypes, written from the format's description alone."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4
from dsv4.caches.formats import FP8_584
from dsv4.caches.kv import Fp8Cache


def rows_of(n, seed=0, spread=8.0):
    """bf16 rows whose 64-wide tiles differ in size by powers of two."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 512, generator=g)
    tile = torch.randn(n, 8, generator=g).mul(spread).exp2().repeat_interleave(64, 1)
    return (x * tile).bfloat16()


def packed_by_hand(rows, rows_per_page, stride):
    """The pages as bytes, one row at a time."""
    rows = rows.float().numpy()
    pages = -(-len(rows) // rows_per_page)
    image = np.zeros(pages * stride, np.uint8)
    for i, row in enumerate(rows):
        page, place = divmod(i, rows_per_page)
        data = page * stride + place * 576
        scales = page * stride + rows_per_page * 576 + place * 8
        for t in range(7):
            tile = row[64 * t : 64 * t + 64]
            x = max(np.float32(np.abs(tile).max()) / np.float32(448), np.float32(1e-4))
            e = math.ceil(math.log2(float(x)))  # fp64: exact enough for an fp32 argument
            image[scales + t] = e + 127
            q = (tile / np.float32(2.0**e)).astype(ml_dtypes.float8_e4m3fn)
            image[data + 64 * t : data + 64 * t + 64] = q.view(np.uint8)
        image[data + 448 : data + 576] = row[448:].astype(ml_dtypes.bfloat16).view(np.uint8)
    return image


@pytest.mark.parametrize("rows_per_page, stride", [(64, 37440), (256, 149760), (2, 1728), (1, 1152), (3, 2000)])
@pytest.mark.parametrize("n", [0, 1, 2, 65, 130])
def test_pack_is_byte_exact(rows_per_page, stride, n):
    rows = rows_of(n, seed=n)
    cache = Fp8Cache.pack(rows, rows_per_page=rows_per_page, page_stride=stride)
    assert np.array_equal(cache.storage.numpy(), packed_by_hand(rows, rows_per_page, stride))


@pytest.mark.parametrize("rows_per_page, stride", [(64, 37440), (256, 149760), (2, 1728), (32, 19008)])
def test_page_stride_is_rounded_up_to_576(rows_per_page, stride):
    assert Fp8Cache.stride_for(rows_per_page) == stride == Fp8Cache.empty(3, rows_per_page).page_stride
    assert Fp8Cache.empty(3, rows_per_page).rows == 3 * rows_per_page


def test_unpack_rope_is_exact_and_nope_is_fp8():
    rows = torch.randn(500, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    back = Fp8Cache.pack(rows).unpack()[:500]
    assert torch.equal(back[:, 448:], rows[:, 448:])
    nope, want = back[:, :448].float(), rows[:, :448].float()
    assert 0.02 < (nope - want).norm() / want.norm() < 0.03  # e4m3: 2.6-2.7 % on N(0, 1)
    # Unpacking what was unpacked changes nothing: the values now are on the grid.
    assert torch.equal(Fp8Cache.pack(back).unpack()[:500], back)


def test_every_byte_pair_dequantises_as_ml_dtypes_does():
    """All 256 e4m3 codes under all scales that bf16 can carry exactly, and the ue8m0 NaN."""
    codes = np.arange(448, dtype=np.int64) % 256
    for e in (1, 60, 114, 127, 128, 240, 255):
        data = np.zeros((1, FP8_584.data_bytes), np.uint8)
        data[0, :448] = codes
        scales = np.full((1, 8), e, np.uint8)
        with np.errstate(over="ignore", invalid="ignore"):
            scale = scales[:, :1].view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
            want = data[0, :448].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale[0]
            want = want.astype(ml_dtypes.bfloat16).astype(np.float32)
        got = FP8_584.dequantize(torch.from_numpy(data), torch.from_numpy(scales))[0, :448].float().numpy()
        np.testing.assert_array_equal(got, want)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(-30, 100), st.floats(1.0, 2.0, exclude_max=True, width=32))
def test_scale_is_the_smallest_power_of_two_that_fits(seed, exponent, mantissa):
    """Next to powers of two as well, where log2 in floating point goes wrong."""
    amax = np.float32(448) * np.float32(mantissa) * np.float32(2.0**exponent)
    rows = torch.zeros(1, 512)
    rows[0, seed % 448] = float(amax) * (1 if seed % 2 else -1)
    data, scales = FP8_584.quantize(rows)
    e = int(scales[0, (seed % 448) // 64]) - 127
    least = math.ceil(math.log2(max(float(np.float32(amax / np.float32(448))), float(np.float32(1e-4)))))
    assert e == least
    back = FP8_584.dequantize(data, scales, torch.float32)[0, seed % 448]
    assert abs(float(back) - float(rows[0, seed % 448])) <= float(amax) / 16 + 2.0 ** (e - 10)


def test_gather_reads_only_the_rows_asked_for():
    rows = rows_of(40, spread=2)
    cache = Fp8Cache.pack(rows, rows_per_page=16)
    whole = cache.unpack()
    indices = torch.tensor([[5, -1, 39], [17, 5, -1]], dtype=torch.int32)
    got = cache.gather(indices)
    assert got.shape == (2, 3, 512) and got.dtype == torch.bfloat16
    assert torch.equal(got[0, 0], whole[5]) and torch.equal(got[0, 2], whole[39]) and torch.equal(got[1, 0], whole[17])
    assert not got[0, 1].any() and not got[1, 2].any()
    # Poison everything else, row 0 included: it stands in for -1 and must not show.
    kept = cache.gather(indices)
    clean = cache.storage.clone()
    cache.storage.fill_(0xFF)
    for r in (5, 17, 39):
        page, place = divmod(r, 16)
        for view, was in zip((cache.data_view, cache.scale_view), _views(Fp8Cache(clean, 16))):
            view()[page, place] = was[page, place]
    assert torch.equal(cache.gather(indices), kept)
    assert torch.equal(cache.gather(indices.long(), torch.float32), kept.float())


def _views(cache):
    return cache.data_view(), cache.scale_view()


def test_write_puts_rows_into_slots_and_leaves_the_rest():
    cache = Fp8Cache.empty(3, 4)
    rows = rows_of(4, spread=1)
    cache.write(torch.tensor([7, -1, 0, 11]), rows)
    want = torch.zeros(12, 512, dtype=torch.bfloat16)
    want[[7, 0, 11]] = Fp8Cache.pack(rows).unpack()[[0, 2, 3]]
    assert torch.equal(cache.unpack(), want)


def attend(cache):
    return dsv4.v4_attention(torch.ones(1, 2, 512), cache, torch.arange(12, dtype=torch.int32)[None])


def choose(cache):
    q, table = torch.ones(1, 2, 128).to(torch.float8_e4m3fn), torch.arange(3, dtype=torch.int32)[None]
    lengths = torch.full((1,), 12, dtype=torch.int32)
    return dsv4.index_topk(q, cache, torch.ones(1, 2), 3, lengths=lengths, block_table=table)


@pytest.mark.compile
@pytest.mark.parametrize("kind, read", [(Fp8Cache, attend), (dsv4.IndexCache, choose)])
def test_write_is_an_operator_that_compiles_in_one_graph(kind, read):
    rows, slots = torch.randn(4, kind.empty(0, 1).format.values).bfloat16(), torch.tensor([7, -1, 0, 11])

    def step(storage, slots, rows):
        cache = kind(storage, rows_per_page=4)
        cache.write(slots, rows)
        return read(cache)

    want, got = kind.empty(3, 4), kind.empty(3, 4)
    result = step(want.storage, slots, rows)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(got.storage, slots, rows), result) and torch.equal(got.storage, want.storage)
    given = (got.storage, slots, rows, 4, got.page_stride, kind.format_name)
    torch.library.opcheck(torch.ops.dsv4.write_rows.default, given)
    with pytest.raises(ValueError, match="^slots: got values"):
        compiled(got.storage, slots + 1, rows)
    meta = kind.empty(3, 4, device="meta")
    meta.write(slots.to("meta"), rows.to("meta"))


@pytest.mark.compile
@pytest.mark.parametrize("kind", [Fp8Cache, dsv4.Mxfp8Cache, dsv4.Nvfp4Cache, dsv4.IndexCache])
def test_rows_are_read_in_one_graph(kind):
    cache = kind.pack(torch.randn(9, kind.empty(0, 1).format.values), rows_per_page=4)

    def read(indices):
        return cache.gather(indices), cache.unpack(torch.float32)

    slots = torch.tensor([[7, -1], [0, 8]])
    for got, want in zip(torch.compile(read, fullgraph=True, backend="aot_eager")(slots), read(slots)):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "rows, stride, one", [(64, 37440, True), (2, 1728, False), (256, 149760, True), (4, 2336, False)]
)
def test_from_pages_takes_serving_caches_without_a_copy(rows, stride, one):
    """Engines hold [pages, rows, 1, 584] with a padded page stride; the last page may end without its padding."""
    count = 3
    flat = torch.randint(0, 200, ((count - 1) * stride + rows * FP8_584.row_bytes,), dtype=torch.uint8)
    pages = flat.as_strided((count, rows, FP8_584.row_bytes), (stride, FP8_584.row_bytes, 1))
    cache = Fp8Cache.from_pages(pages[:, :, None] if one else pages.view(torch.int8))
    assert cache.storage.data_ptr() == flat.data_ptr()
    assert (cache.pages, cache.rows, cache.page_stride) == (count, count * rows, stride)
    assert torch.equal(cache.scale_view()[2, 1], flat[2 * stride + rows * 576 + 8 :][:8])
    assert torch.equal(cache.data_view()[1, rows - 1], flat[stride + (rows - 1) * 576 :][:576])


def test_strided_rows_are_packed_by_value():
    rows = rows_of(20, spread=1)
    wide = torch.zeros(20, 1024, dtype=torch.bfloat16)
    wide[:, ::2] = rows
    assert torch.equal(Fp8Cache.pack(wide[:, ::2]).storage, Fp8Cache.pack(rows).storage)


def test_a_tile_with_nan_or_inf_reads_back_as_nan_and_harms_no_other_tile():
    rows = rows_of(3, spread=1)
    clean = Fp8Cache.pack(rows).unpack()[:3]
    rows[1, 70], rows[2, 0] = float("nan"), float("inf")
    back = Fp8Cache.pack(rows).unpack()[:3]
    assert back[1, 64:128].isnan().all() and back[2, :64].isnan().all()
    assert torch.equal(back[0], clean[0]) and torch.equal(back[1, 128:], clean[1, 128:])
    assert torch.equal(back[1, :64], clean[1, :64]) and torch.equal(back[2, 64:], clean[2, 64:])


ROWS = torch.zeros(4, 512)
CACHE = Fp8Cache.pack(ROWS, rows_per_page=2)
BAD = {
    "storage dtype": (lambda: Fp8Cache(torch.zeros(1152, dtype=torch.int8), 1), "storage"),
    "storage rank": (lambda: Fp8Cache(torch.zeros(1, 1152, dtype=torch.uint8), 1), "storage"),
    "storage type": (lambda: Fp8Cache(b"x", 1), "storage"),
    "storage stride": (lambda: Fp8Cache(torch.zeros(2304, dtype=torch.uint8)[::2], 1), "storage"),
    "rows_per_page 0": (lambda: Fp8Cache.empty(1, 0), "rows_per_page"),
    "rows_per_page float": (lambda: Fp8Cache.pack(ROWS, rows_per_page=2.0), "rows_per_page"),
    "page stride too small": (lambda: Fp8Cache.pack(ROWS, rows_per_page=2, page_stride=1167), "page_stride"),
    "pages negative": (lambda: Fp8Cache.empty(-1, 2), "pages"),
    "rows width": (lambda: Fp8Cache.pack(torch.zeros(4, 576)), "rows"),
    "rows rank": (lambda: Fp8Cache.pack(torch.zeros(512)), "rows"),
    "rows dtype": (lambda: Fp8Cache.pack(torch.zeros(4, 512, dtype=torch.int32)), "rows"),
    "slot past the end": (lambda: CACHE.write(torch.tensor([0, 1, 2, 4]), ROWS), "slots"),
    "slot -2": (lambda: CACHE.write(torch.tensor([0, 1, 2, -2]), ROWS), "slots"),
    "slots count": (lambda: CACHE.write(torch.tensor([0, 1, 2]), ROWS), "slots"),
    "slots dtype": (lambda: CACHE.write(torch.zeros(4), ROWS), "slots"),
    "gather past the end": (lambda: CACHE.gather(torch.tensor([4])), "indices"),
    "gather -2": (lambda: CACHE.gather(torch.tensor([-2])), "indices"),
    "gather dtype": (lambda: CACHE.gather(torch.tensor([1.0])), "indices"),
    "gather device": (lambda: CACHE.gather(torch.zeros(1, dtype=torch.int32, device="meta")), "indices"),
    "from_pages dtype": (lambda: Fp8Cache.from_pages(torch.zeros(1, 2, 584)), "pages"),
    "from_pages width": (lambda: Fp8Cache.from_pages(torch.zeros(1, 2, 656, dtype=torch.uint8)), "pages"),
    "from_pages without rows": (lambda: Fp8Cache.from_pages(torch.zeros(2, 0, 584, dtype=torch.uint8)), "pages"),
    "from_pages inner stride": (
        lambda: Fp8Cache.from_pages(torch.zeros(1, 4, 584, dtype=torch.uint8)[:, ::2]),
        "pages",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_name(case):
    call, argument = BAD[case]
    with pytest.raises(ValueError, match=rf"^{argument}: got .*; accepted: "):
        call()


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 700), st.lists(st.integers(-3, 45), max_size=12))
def test_any_list_gives_its_rows_or_a_named_error(rows_per_page, n, extra, wanted):
    rows = rows_of(n, seed=n, spread=1)
    cache = Fp8Cache.pack(rows, rows_per_page=rows_per_page, page_stride=rows_per_page * FP8_584.row_bytes + extra)
    indices = torch.tensor(wanted, dtype=torch.int32)
    if any(not -1 <= i < cache.rows for i in wanted):
        with pytest.raises(ValueError, match="^indices: "):
            cache.gather(indices)
    else:
        whole = torch.cat([cache.unpack(), torch.zeros(1, 512, dtype=torch.bfloat16)])
        assert torch.equal(cache.gather(indices), whole[[i if i >= 0 else cache.rows for i in wanted]])


def test_one_row_at_an_odd_address_is_read():
    """A single row is contiguous where it lies, and bf16 must not be viewed at an odd address."""
    rows = torch.randn(1, 512).bfloat16()
    packed = Fp8Cache.pack(rows, rows_per_page=1)
    for offset in (0, 1, 3):
        storage = torch.zeros(584 + offset, dtype=torch.uint8)
        storage[offset:] = packed.storage[:584]
        assert torch.equal(Fp8Cache(storage[offset:], 1).unpack(), packed.unpack())


def test_what_has_no_values_or_no_place_is_refused_by_name():
    with pytest.raises(ValueError, match="^rows: got a meta tensor"):
        Fp8Cache.pack(torch.zeros(3, 512, device="meta"))
    for call in (lambda: Fp8Cache.empty(1 << 62, 64), lambda: Fp8Cache.empty(3, 64, page_stride=1 << 62)):
        with pytest.raises(ValueError, match="^pages: got .*; accepted: at most"):
            call()


def test_saved_with_weights_only(tmp_path):
    cache = Fp8Cache.pack(torch.randn(5, 512), rows_per_page=2, page_stride=1200)
    made = dsv4.plan(dsv4.fmha, batch=2, q_heads=4, kv_heads=2, head_dim=64, max_seqlen_k=100, device="cpu")
    _, state = dsv4.compress(torch.randn(3, 6), torch.randn(3, 6), torch.randn(4, 6), torch.randn(6))
    torch.save([cache, made, state], tmp_path / "saved.pt")
    again, plan, after = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert (again.rows_per_page, again.page_stride) == (2, 1200) and torch.equal(again.unpack(), cache.unpack())
    assert (plan.operation, plan.batch, plan.max_seqlen_k) == ("fmha", 2, 100)
    assert plan.scratch.shape == made.scratch.shape
    assert after.tokens == 3 and torch.equal(after.kv, state.kv) and torch.equal(after.gate, state.gate)
