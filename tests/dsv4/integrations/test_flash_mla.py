"""FlashMLA's calls: its bytes, shapes, LSE and sink conventions, written down here from its documentation."""

import inspect
import math

import pytest
import torch
from agreement import assert_lse, assert_same

import dsv4
from dsv4 import reference
from dsv4.integrations.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from dsv4.suites.calls import FEATURES, judge

INF = float("inf")
SCALE = 512**-0.5


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pages(blocks, rows, seed=0, pad=0, dtype=torch.uint8):
    """(cache [blocks, rows, 1, 584], its values fp32 [blocks * rows, 512]), byte by byte, without dsv4.

    A block: rows of 448 e4m3 and 64 bf16, then rows of 7 e8m0 scales (2 ** (byte - 127)) and a byte of padding.
    """
    values = torch.empty(blocks, rows, 512)
    raw = torch.full((blocks, rows * 584 + pad), 0xFF, dtype=torch.uint8)
    for block in range(blocks):
        nope = normal(rows, 448, seed=seed + 2 * block).to(torch.float8_e4m3fn)
        rope = normal(rows, 64, seed=seed + 2 * block + 1).bfloat16()
        exponent = torch.arange(rows * 7).view(rows, 7) % 4 + 125
        for row in range(rows):
            data = raw[block, row * 576 : (row + 1) * 576]
            data[:448], data[448:] = nope[row].view(torch.uint8), rope[row].view(torch.uint8)
            raw[block, rows * 576 + row * 8 :][:7] = exponent[row].to(torch.uint8)
        factor = (2.0 ** (exponent - 127)).repeat_interleave(64, 1)
        values[block] = torch.cat([nope.float() * factor, rope.float()], 1)
    cache = raw.as_strided((blocks, rows, 1, 584), (rows * 584 + pad, 584, 584, 1))
    return cache.view(dtype), values.flatten(0, 1)


def lists(b, s_q, topk, rows, seed, absent=0.3):
    generator = torch.Generator().manual_seed(seed)
    listed = torch.randint(0, rows, (b, s_q, topk), generator=generator)
    return torch.where(torch.rand(b, s_q, topk, generator=generator) < absent, -1, listed).int()


def oracle(q, values, indices, sink=None, scale=SCALE, **options):
    """fp64 over the listed rows of each query: (out, lse, max_logits), [n, h, 512], [n, h], [n, h]."""
    outs, lses, tops = [], [], []
    for n in range(q.shape[0]):
        kv = torch.cat([pool[listed[n]] for pool, listed in zip(values, indices)]).double()
        seen = torch.ones(1, len(kv), dtype=torch.bool)
        out, lse = reference.attend(q[n][:, None], kv[None], kv[None], seen, sink, scale, torch.float64, **options)
        scores = q[n].double() @ kv.T * scale
        tops.append(scores.amax(-1) if len(kv) else torch.full_like(lse[:, 0], -INF))
        outs.append(out[:, 0])
        lses.append(lse[:, 0])
    return torch.stack(outs), torch.stack(lses), torch.stack(tops)


def present(indices, lengths, s_q):
    """The row numbers that count, for each query."""
    result = []
    for n, line in enumerate(indices.flatten(0, 1)):
        line = line if lengths is None else line[: int(lengths[n // s_q])]
        result.append(line[line >= 0].long())
    return result


def check(got, got_lse, want, want_lse, low):
    for result in judge(got, want, low, FEATURES):
        assert result.ok, str(result)
    empty = want_lse == -INF
    assert torch.equal(got_lse == INF, empty) and not got[empty].any()
    assert_lse(torch.where(empty, -INF, got_lse), want_lse)


@pytest.mark.parametrize("heads, s_q, rows, pad", [(64, 1, 64, 64), (16, 2, 2, 560), (3, 3, 5, 0)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_sparse_decode_reads_two_caches_byte_for_byte(heads, s_q, rows, pad, dtype):
    b = 3
    q = normal(b, s_q, heads, 512, seed=1, dtype=torch.bfloat16)
    window, window_values = pages(4, rows, 2, pad, dtype)
    extra, extra_values = pages(6, 2 * rows, 30, pad, dtype)
    indices, more = lists(b, s_q, 20, 4 * rows, 3), lists(b, s_q, 12, 12 * rows, 4)
    length, more_length = torch.tensor([20, 7, 0]).int(), torch.tensor([5, 12, 0]).int()
    indices[1, :, 7:] = 1 << 30  # past the length: anything
    sink = torch.linspace(-2, 2, heads)
    sink[0], sink[1] = -INF, INF
    before = window.clone()
    out, lse = flash_mla_with_kvcache(
        q, window, None, None, 512, get_mla_metadata()[0], is_fp8_kvcache=True, indices=indices, topk_length=length,
        attn_sink=sink, extra_k_cache=extra, extra_indices_in_kvcache=more, extra_topk_length=more_length,
    )  # fmt: skip
    assert out.shape == (b, s_q, heads, 512) and lse.shape == (b, heads, s_q)
    seen = [present(indices, length, s_q), present(more, more_length, s_q)]
    args = (q.flatten(0, 1), [window_values, extra_values], seen)
    want, want_lse, _ = oracle(*args, sink=sink)
    low = oracle(*args, sink=sink, p_dtype=torch.bfloat16)[0]
    check(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), want, want_lse, low)
    assert not out[:, :, 1].any()  # sink +inf
    assert torch.equal(window.view(torch.uint8), before.view(torch.uint8))
    # the last request sees nothing: 0 and +inf, as FlashMLA has it
    assert not out[2].any() and bool((lse[2] == INF).all())


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def v41_pages(blocks, rows, fp4, interleaved, seed=0, pad=0):
    """(cache [blocks, rows, 1, 528 or 288], its values), byte by byte, without dsv4."""
    width, scale_bytes = (256, 32) if fp4 else (512, 16)
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (blocks, rows, width), generator=g, dtype=torch.uint8)
    if fp4:
        scales = torch.randint(0x28, 0x48, (blocks, rows, 32), generator=g, dtype=torch.uint8)
        code = torch.stack([data & 15, data >> 4], -1).flatten(-2).long()  # the first of two in the low bits
        values = torch.where(code >= 8, -1.0, 1.0) * E2M1[code & 7]
        factors = scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, -1)
    else:
        data = torch.where(data & 127 == 127, 1, data)  # no NaN
        scales = torch.randint(112, 120, (blocks, rows, 16), generator=g, dtype=torch.uint8)
        values = data.view(torch.float8_e4m3fn).float()
        factors = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    size = width + scale_bytes
    raw = torch.full((blocks, rows * size + pad), 0xFF, dtype=torch.uint8)
    used = raw[:, : rows * size]
    used[:] = (
        torch.cat([data, scales], -1).flatten(1) if interleaved else torch.cat([data.flatten(1), scales.flatten(1)], 1)
    )
    return raw.as_strided((blocks, rows, 1, size), (rows * size + pad, size, size, 1)), (values * factors).flatten(0, 1)


@pytest.mark.parametrize("window_fp4, extra_fp4", [(False, True), (False, False)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_of_v41_as_engines_pass_them(window_fp4, extra_fp4, interleaved):
    """vLLM's call: window pages of 32 rows, compressed ones of 64, a page stride that is larger than the rows."""
    q = normal(3, 1, 8, 512, seed=1, dtype=torch.bfloat16) * 0.1
    window, window_values = v41_pages(4, 32, window_fp4, interleaved, 2, pad=512)
    extra, extra_values = v41_pages(2, 64, extra_fp4, interleaved, 3, pad=256)
    indices, more = lists(3, 1, 128, 128, 3), lists(3, 1, 64, 128, 4)
    length, more_length = torch.tensor([128, 70, 1]).int(), torch.tensor([64, 12, 0]).int()
    sink = torch.linspace(-2, 2, 8)
    out = torch.full_like(q, torch.nan)
    given = dict(
        q=q, k_cache=window, block_table=None, cache_seqlens=None, head_dim_v=512, tile_scheduler_metadata=None,
        is_fp8_kvcache=True, indices=indices, topk_length=length, softmax_scale=SCALE, attn_sink=sink,
        extra_k_cache=extra, extra_indices_in_kvcache=more, extra_topk_length=more_length, out=out,
    )  # fmt: skip
    got, lse = flash_mla_with_kvcache(**given, use_legacy=not interleaved)
    assert got is out
    seen = [present(indices, length, 1), present(more, more_length, 1)]
    args = (q.flatten(0, 1), [window_values, extra_values], seen)
    want, want_lse, _ = oracle(*args, sink=sink)
    low = oracle(*args, sink=sink, p_dtype=torch.bfloat16)[0]
    check(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), want, want_lse, low)
    other = flash_mla_with_kvcache(**given | dict(out=None), use_legacy=interleaved)[0]
    assert not torch.equal(other, out)  # the order of the bytes is told by the argument alone


@pytest.mark.parametrize("b, s_q", [(1, 1), (1, 3), (2, 1), (2, 2)])
def test_a_length_belongs_to_every_token_of_its_request(b, s_q):
    """Also of a single request, and where the lengths are a column of something wider."""
    q, (cache, _) = normal(b, s_q, 4, 512, dtype=torch.bfloat16), pages(2, 8)
    indices = lists(b, s_q, 9, 16, 5)
    call = lambda lengths: flash_mla_with_kvcache(  # noqa: E731
        q, cache, None, None, 512, None, is_fp8_kvcache=True, indices=indices, topk_length=lengths
    )
    lengths = torch.tensor([[4, -1], [7, -1]], dtype=torch.int32)[:b, 0]
    cut = indices.clone()
    for request, length in enumerate(lengths.tolist()):
        cut[request, :, length:] = -1
    want = flash_mla_with_kvcache(q, cache, None, None, 512, None, is_fp8_kvcache=True, indices=cut)
    for given in (lengths, lengths.contiguous()):
        assert all(torch.equal(x, y) for x, y in zip(call(given), want))


def test_the_sink_does_not_touch_lse():
    q, (cache, _) = normal(1, 1, 4, 512, dtype=torch.bfloat16), pages(1, 8)
    indices = torch.arange(8).int().view(1, 1, 8)
    call = lambda **more: flash_mla_with_kvcache(  # noqa: E731
        q, cache, None, None, 512, None, is_fp8_kvcache=True, indices=indices, **more
    )
    (out, lse), (drained, same) = call(), call(attn_sink=torch.full((4,), 3.0))
    keep = torch.sigmoid(lse - 3.0).transpose(1, 2)[..., None]
    assert torch.equal(lse, same)
    torch.testing.assert_close(drained.float(), out.float() * keep, rtol=2**-7, atol=0)  # both are rounded to bf16


def test_bf16_rows_and_a_given_output():
    """What FlashMLA has not: a sparse cache that is not quantised."""
    q = normal(2, 1, 8, 512, dtype=torch.bfloat16)
    cache = normal(5, 16, 1, 512, seed=1, dtype=torch.bfloat16)
    indices = lists(2, 1, 40, 80, 5)
    out = torch.full_like(q, float("nan"))
    got, lse = flash_mla_with_kvcache(q, cache, None, None, 512, None, indices=indices, out=out)
    assert got is out
    compiled, again = torch.compile(flash_mla_with_kvcache, backend="eager", fullgraph=True), torch.empty_like(q)
    compiled(q, cache, None, None, 512, None, indices=indices, out=again)
    assert torch.equal(again, out)
    args = (q.flatten(0, 1), [cache.flatten(0, 2)], [present(indices, None, 1)])
    want, want_lse, _ = oracle(*args)
    low = oracle(*args, p_dtype=torch.bfloat16)[0]
    check(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), want, want_lse, low)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page, h_k, s_q", [(64, 1, 2), (16, 2, 3)])
def test_dense_decode_of_512_columns(causal, page, h_k, s_q):
    b, heads = 3, 8
    q = normal(b, s_q, heads, 512, dtype=torch.bfloat16)
    cache = normal(7, page, h_k, 512, seed=1, dtype=torch.bfloat16)
    table = torch.tensor([[0, 3], [6, 1], [2, -1]]).int()
    lengths = torch.tensor([2 * page - 3, page, 0]).int()
    out, lse = flash_mla_with_kvcache(q, cache, table, lengths, 512, None, causal=causal)
    args = (q, cache, cache, table.clamp_min(0), lengths)
    want, want_lse = reference.fmha_paged(*args, causal=causal)
    low = reference.fmha_paged(*args, causal=causal, p_dtype=torch.bfloat16)[0]
    assert lse.shape == (b, heads, s_q)
    check(out, lse.transpose(1, 2), want, want_lse.transpose(1, 2), low)


def test_batch_invariant_bits():
    q, (cache, _) = normal(4, 1, 8, 512, dtype=torch.bfloat16), pages(4, 16)
    indices = lists(4, 1, 32, 64, 6)
    options = dict(is_fp8_kvcache=True, enable_batch_invariant=True)
    out, _ = flash_mla_with_kvcache(q, cache, None, None, 512, None, indices=indices, **options)
    one, _ = flash_mla_with_kvcache(q[2:3], cache, None, None, 512, None, indices=indices[2:3], **options)
    assert torch.equal(out[2:3], one)


@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("heads", [64, 5])
def test_sparse_prefill(heads, with_lengths):
    s_q, s_kv, topk = 9, 50, 24
    q, kv = normal(s_q, heads, 512, dtype=torch.bfloat16), normal(s_kv, 1, 512, seed=1, dtype=torch.bfloat16)
    kv[0] = float("nan")  # no query lists it, but it stands in for what is absent
    indices = lists(1, s_q, topk, s_kv - 1, 2)[0]
    indices = torch.where(indices >= 0, indices + 1, -1)[:, None]
    indices[:, 0, 3], indices[:, 0, 4] = s_kv, -7  # both: nothing there
    indices[5] = -1
    lengths = torch.tensor([24, 0, 1, 5, 24, 24, 8, 9, 10]).int() if with_lengths else None
    sink = normal(heads, seed=3)
    out, largest, lse = flash_mla_sparse_fwd(
        q, kv, indices, 0.03, attn_sink=sink, topk_length=lengths, return_max_logits=True
    )
    there = torch.where(indices[:, 0] < s_kv, indices[:, 0], -1)[:, None]
    seen = [present(there, lengths, 1)]
    options = dict(sink=sink, scale=0.03)
    want, want_lse, want_largest = oracle(q, [kv[:, 0]], seen, **options)
    low = oracle(q, [kv[:, 0]], seen, **options, p_dtype=torch.bfloat16)[0]
    check(out, lse, want, want_lse, low)
    assert largest.shape == (s_q, heads) and largest.dtype == torch.float32
    # a sum of 512 products in fp32: their roundings are a random walk, of 23 steps of 2^-24 of its largest value
    bound = 2 * 23 * 2.0**-24 * want_largest[want_largest > -INF].abs().max().item()
    torch.testing.assert_close(largest.double(), want_largest, rtol=0, atol=bound)
    assert flash_mla_sparse_fwd(q, kv, indices, 0.03)[1] is None


def grads(loss, *tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    return torch.autograd.grad(loss(*leaves), leaves)


def loss_of(out, lse):
    """A loss of both outputs. The query that sees nothing has a gradient of the LSE that must be ignored."""
    return (out * normal(*out.shape, seed=20)).sum() + torch.where(lse < INF, lse, 0).square().sum()


def test_gradients_of_sparse_prefill_are_those_of_v4_attention():
    q, kv, sink = normal(5, 3, 512), normal(20, 1, 512, seed=1), normal(3, seed=2)
    indices = lists(1, 5, 8, 20, 3)[0][:, None]
    indices[2] = -1

    def prefill(q, kv, sink):
        out, largest, lse = flash_mla_sparse_fwd(q, kv, indices, 0.05, attn_sink=sink, return_max_logits=True)
        assert not largest.requires_grad
        return loss_of(out, lse)

    def attention(q, kv, sink):
        out, lse = dsv4.v4_attention(q, kv[:, 0], indices[:, 0], sink=sink, softmax_scale=0.05, return_lse=True)
        return loss_of(out, lse.masked_fill(lse == -INF, INF))

    for got, want in zip(grads(prefill, q, kv, sink), grads(attention, q, kv, sink)):
        assert want.any() and torch.equal(got, want)


@pytest.mark.parametrize("fp8", [False, True])
def test_gradients_of_sparse_decode_are_those_of_v4_attention(fp8):
    q, sink = normal(2, 2, 3, 512), normal(3, seed=2)
    cache = pages(2, 8)[0] if fp8 else normal(2, 8, 1, 512, seed=1)
    indices = lists(2, 2, 8, 16, 3)
    indices[1, 0] = -1

    def decode(q, sink, cache=cache):
        out, lse = flash_mla_with_kvcache(
            q, cache, None, None, 512, is_fp8_kvcache=fp8, indices=indices, attn_sink=sink
        )
        return loss_of(out, lse)

    def attention(q, sink, cache=cache):
        rows = dsv4.Fp8Cache.from_pages(cache) if fp8 else cache[:, :, 0]
        out, lse = dsv4.v4_attention(q.flatten(0, 1), rows, indices.flatten(0, 1), sink=sink, return_lse=True)
        lse = lse.masked_fill(lse == -INF, INF).view(2, 2, 3).transpose(1, 2)
        return loss_of(out.view_as(q), lse)

    tensors = (q, sink) if fp8 else (q, sink, cache)
    for got, want in zip(grads(decode, *tensors), grads(attention, *tensors)):
        assert want.any() and torch.equal(got, want)


def test_signatures_are_those_of_flash_mla():
    """Names and order, of which callers use both."""
    assert list(inspect.signature(flash_mla_with_kvcache).parameters)[:16] == [
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits",
        "softmax_scale", "causal", "is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache",
        "extra_indices_in_kvcache", "topk_length", "extra_topk_length",
    ]  # fmt: skip
    assert list(inspect.signature(flash_mla_sparse_fwd).parameters)[:7] == [
        "q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length",
    ]  # fmt: skip
    # what vLLM and SGLang pass by name for DeepSeek-V4
    inspect.signature(flash_mla_with_kvcache).bind(**dict.fromkeys([
        "q", "k_cache", "block_table", "head_dim_v", "tile_scheduler_metadata", "cache_seqlens", "is_fp8_kvcache",
        "indices", "topk_length", "softmax_scale", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache",
        "extra_topk_length", "out",
    ]))  # fmt: skip
    inspect.signature(flash_mla_sparse_fwd).bind(
        **dict.fromkeys(["q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length", "out"])
    )
    metadata, splits = get_mla_metadata(torch.ones(3), 128, num_heads_k=1)
    assert metadata is not None and splits is None


def test_what_it_cannot_do_it_says():
    q, (cache, _) = normal(2, 1, 4, 512, dtype=torch.bfloat16), pages(2, 8)
    indices = torch.zeros(2, 1, 4, dtype=torch.int32)
    good = dict(
        q=q, k_cache=cache, block_table=None, cache_seqlens=None, head_dim_v=512, tile_scheduler_metadata=None,
        is_fp8_kvcache=True, indices=indices,
    )  # fmt: skip
    flash_mla_with_kvcache(**good)
    bad = {
        "q: got head dim 576": dict(q=normal(2, 1, 4, 576, dtype=torch.bfloat16)),
        "q: got head dim 128": dict(q=q[..., :128]),
        "head_dim_v: ": dict(head_dim_v=128),
        "num_splits: ": dict(num_splits=torch.zeros(3)),
        "causal: ": dict(causal=True),
        "k_cache: got rows of 656 bytes .DeepSeek-V3.2": dict(k_cache=torch.zeros(2, 8, 1, 656, dtype=torch.uint8)),
        "k_cache: got rows of 584 bytes with use_legacy=False": dict(use_legacy=False),
        "kv_format: got str 'V32_NO_ROPE'": dict(kv_format="V32_NO_ROPE"),
        "k_cache: got shape .*584": dict(k_cache=torch.zeros(2, 8, 1, 600, dtype=torch.uint8)),
        "k_cache: got bfloat16": dict(k_cache=normal(2, 8, 1, 512, dtype=torch.bfloat16)),
        "k_cache: .*is_fp8_kvcache=True": dict(is_fp8_kvcache=False),
        "indices: got values from 16 to 16": dict(indices=indices + 16),
        "indices: got dtype int64": dict(indices=indices.long()),
        "indices: got layout torch.sparse_coo": dict(indices=indices.to_sparse()),
        "indices: got shape .1, 1, 4.": dict(indices=indices[:1]),
        "topk_length: got values from 5 to 5": dict(topk_length=torch.full((2,), 5).int()),
        "topk_length: got shape .1.": dict(topk_length=torch.zeros(1).int()),
        "topk_length: got layout torch.sparse_coo": dict(topk_length=torch.ones(2).int().to_sparse()),
        "k_cache: got layout torch.sparse_coo": dict(k_cache=cache.to_sparse()),
        "k_cache: got layout torch.sparse_coo; ": dict(
            k_cache=normal(2, 8, 1, 512, dtype=torch.bfloat16).to_sparse(), is_fp8_kvcache=False
        ),
        "attn_sink: ": dict(attn_sink=torch.zeros(3)),
        "extra_indices_in_kvcache: got NoneType None": dict(extra_k_cache=cache),
        "extra_indices_in_kvcache: .*without extra_k_cache": dict(extra_indices_in_kvcache=indices),
        "extra_indices_in_kvcache: got values": dict(extra_k_cache=cache, extra_indices_in_kvcache=indices + 99),
        "extra_k_cache: ": dict(extra_k_cache=cache[..., :8], extra_indices_in_kvcache=indices),
        "out: ": dict(out=q[:1]),
        "block_table: ": dict(indices=None, is_fp8_kvcache=False),
        "is_fp8_kvcache: ": dict(indices=None),
        "topk_length: .*indices is None": dict(indices=None, topk_length=torch.zeros(2).int()),
        "cache_seqlens: got values": dict(
            indices=None,
            is_fp8_kvcache=False,
            k_cache=normal(2, 8, 1, 512, dtype=torch.bfloat16),
            block_table=torch.zeros(2, 1).int(),
            cache_seqlens=torch.full((2,), 9).int(),
        ),
        "backend: ": dict(backend="gpu"),
    }
    for text, change in bad.items():
        with pytest.raises(ValueError, match=f"^{text}"):
            flash_mla_with_kvcache(**good | change)
    prefill = dict(q=q[:, 0], kv=cache_rows(), indices=indices, sm_scale=SCALE)
    flash_mla_sparse_fwd(**prefill)
    bad = {
        "d_v: ": dict(d_v=256),
        "kv: ": dict(kv=cache_rows()[:, 0]),
        "kv: got dtype": dict(kv=cache_rows().float()),
        "sm_scale: ": dict(sm_scale=None),
        "sm_scale: got float inf": dict(sm_scale=math.inf),
        "topk_length: ": dict(topk_length=torch.zeros(3).int()),
        "indices: ": dict(indices=indices[:, 0]),
        "q: got head dim 576": dict(q=normal(2, 4, 576, dtype=torch.bfloat16)),
    }
    for text, change in bad.items():
        with pytest.raises(ValueError, match=f"^{text}"):
            flash_mla_sparse_fwd(**prefill | change)


def cache_rows():
    return normal(16, 1, 512, dtype=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_kernels_give_what_the_cpu_gives(arch):
    import softsm

    q = normal(2, 1, 16, 512, dtype=torch.bfloat16)
    (window, _), (extra, _) = pages(2, 8), pages(3, 2, 50)
    options = dict(
        is_fp8_kvcache=True,
        indices=lists(2, 1, 12, 16, 3),
        topk_length=torch.tensor([12, 0]).int(),
        extra_k_cache=extra,
        extra_indices_in_kvcache=lists(2, 1, 6, 6, 4),
        attn_sink=normal(16, seed=5),
        extra_topk_length=torch.tensor([6, 0]).int(),
    )
    want, want_lse = flash_mla_with_kvcache(q, window, None, None, 512, None, **options)
    with softsm.use(arch):
        out, lse = flash_mla_with_kvcache(q, window, None, None, 512, None, backend="softsm", **options)
    assert_same(out, want)
    assert_lse(lse[:1], want_lse[:1])
    assert not out[1].any() and bool((lse[1] == INF).all())
