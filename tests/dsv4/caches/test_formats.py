"""Formats of rows: what they promise to kernels, and that one is added by a class alone."""

import io

import pytest
import torch
from toy_format import TOY

import dsv4
from dsv4.caches.formats import FORMATS, FP8_584, INDEX_132, PLAIN, Fp8Rows, format_of
from dsv4.caches.pages import PackedRows
from dsv4.runtime import aot


def test_sizes():
    assert (FP8_584.data_bytes, FP8_584.row_bytes, FP8_584.scales_begin(64)) == (576, 584, 64 * 576)
    assert (FP8_584.coded_panels, FP8_584.panel_words, FP8_584.groups) == (7, 16, 7)
    assert (INDEX_132.data_bytes, INDEX_132.row_bytes) == (128, 132)
    assert (TOY.row_bytes, TOY.data_step, TOY.scale_step, TOY.scales_begin(64)) == (528, 528, 528, 512)


def test_a_format_is_one_object():
    with pytest.raises(ValueError, match="name: got 'fp8_584'"):
        Fp8Rows("fp8_584", values=512, coded=512, code_bits=8, group=64, scale_bytes=8, stride_unit=16)
    assert FORMATS["fp8_584"] is FP8_584


def test_saved_caches_keep_their_format():
    cache = dsv4.Fp8Cache.pack(torch.randn(3, 512), rows_per_page=2)
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    back = torch.load(file, weights_only=True)
    assert back.format is FP8_584
    assert torch.equal(back.unpack(), cache.unpack())


def test_pools_have_formats():
    assert format_of(dsv4.Fp8Cache.empty(1, 2)) is FP8_584
    assert format_of(torch.zeros(2, 512)) is PLAIN


def test_variants_are_named_by_the_sizes():
    """A variant that was compiled for one format is not launched for another, nor in another process."""
    names = {aot.variant("kernel", [], dict(FORMAT=x)) for x in (PLAIN, FP8_584, TOY)}
    assert len(names) == 3
    assert "values=512, coded=448" in repr(FP8_584) and " at 0x" not in repr(FP8_584)


def test_compiled_kernels_depend_on_the_functions():
    assert FP8_584.unpack.cache_key in FP8_584.cache_key
    assert FP8_584.store.cache_key in FP8_584.cache_key
    assert TOY.unpack.cache_key in TOY.cache_key


@pytest.mark.parametrize("page_stride", [None, 1059])
def test_rows_of_a_toy_format(page_stride):
    rows = torch.randn(9, 512).bfloat16()
    cache = PackedRows.pack(rows, rows_per_page=2, page_stride=page_stride, format=TOY)
    back = cache.unpack()[: len(rows)]
    assert float((back.float() - rows.float()).abs().max()) <= 0.02
    assert torch.equal(cache.gather(torch.tensor([8, -1, 3])), torch.stack([back[8], back[0] * 0, back[3]]))
    data, scales = TOY.quantize(rows[:1])
    assert torch.equal(cache.storage[:528], torch.cat([data[0], scales[0]]))  # interleaved
    cache.write(torch.tensor([3]), rows[:1])
    assert torch.equal(cache.unpack()[3], back[0])


def test_attention_to_rows_of_a_toy_format():
    """The torch operator accepts the format by its name."""
    q, rows = torch.randn(3, 2, 512).bfloat16(), torch.randn(9, 512).bfloat16()
    listed = torch.randint(-1, 9, (3, 5), dtype=torch.int32)
    cache = PackedRows.pack(rows, rows_per_page=2, format=TOY)
    got = dsv4.v4_attention(q, cache, listed, cache, listed)
    want = dsv4.v4_attention(q, cache.unpack(), listed, cache.unpack(), listed)
    assert torch.equal(got, want)


def test_kernels_refuse_a_format_without_a_function():
    cache = PackedRows.pack(torch.randn(9, 512), rows_per_page=2, format=TOY)
    listed = torch.zeros(1, 5, dtype=torch.int32)
    import softsm

    with softsm.use("sm_100a"), pytest.raises(ValueError, match="format toy; it has no unpack_bytes"):
        dsv4.v4_attention(torch.randn(1, 2, 512).bfloat16(), cache, listed, backend="softsm")
