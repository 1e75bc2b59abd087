"""flash-attn's calls: positions, masks, shapes of the LSE, caches that grow; what dsv4 has not is rejected by name."""

import inspect

import pytest
import torch
from agreement import assert_agrees, assert_lse, assert_right, qkv

from dsv4 import reference
from dsv4.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

INF = float("inf")


def seen(t, s, causal, window):
    """The masks of flash-attn's own documentation, counted from the bottom right."""
    mask = torch.zeros(t, s, dtype=torch.bool)
    for i in range(t):
        for j in range(s):
            at = i + s - t
            after = 0 if causal else window[1]
            mask[i, j] = (window[0] < 0 or j >= at - window[0]) and (after < 0 or j <= at + after)
    return mask


def plain(q, k, v, mask, scale, sink=None):
    """fp64 of one sequence: q [T, H, D] -> out [T, H, Dv], lse [H, T]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("thd,shd->hts", q.double(), k) * scale
    s = s.masked_fill(~mask, -INF)
    lse = s.logsumexp(-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.double()[:, None].expand_as(lse))
    p = (s - torch.where(lse == -INF, 0, total)[..., None]).exp()
    return torch.einsum("hts,shd->thd", p, v), lse


@pytest.mark.parametrize("t, s", [(2, 5), (5, 2), (7, 7)])
@pytest.mark.parametrize("causal, window", [(False, (-1, -1)), (True, (-1, -1)), (False, (2, 1)), (True, (1, None))])
def test_masks_and_results(t, s, causal, window):
    q, k, v = qkv(2, t, s, 6, 2, 64)
    sink = torch.linspace(-1, 2, 6)
    out, lse, third = flash_attn_func(
        q, k, v, causal=causal, window_size=window, return_attn_probs=True, learnable_sink=sink
    )
    assert third.numel() == 0 and lse.shape == (2, 6, t) and lse.dtype == torch.float32
    mask = seen(t, s, causal, tuple(-1 if x is None else x for x in window))
    for n in range(2):
        want, want_lse = plain(q[n], k[n], v[n], mask, 64**-0.5, sink)
        assert_right(out[n], want)
        assert_lse(lse[n], want_lse)  # also: -inf where nothing is seen
    assert torch.equal(flash_attn_func(q, k, v, 0.0, None, causal, window, learnable_sink=sink), out)
    if None not in window:
        again = flash_attn_func(q, k, v, causal=causal, window_size=torch.tensor(window), learnable_sink=sink)
        assert torch.equal(again, out)


@pytest.mark.parametrize("d, d_v", [(64, 64), (80, 80), (96, 64), (192, 128), (24, 40), (512, 512)])
def test_head_dims_are_padded_exactly(d, d_v):
    """Zeros change no score and come out as zeros: bit for bit what the caller would get by padding."""
    q, k, _ = qkv(1, 5, 9, 4, 1, d, torch.bfloat16)
    v = qkv(1, 5, 9, 4, 1, d_v, torch.bfloat16, seed=3)[2]
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    want, want_lse = plain(q[0], k[0], v[0], seen(5, 9, True, (-1, -1)), d**-0.5)
    assert out.shape == (1, 5, 4, d_v) and out.dtype == torch.bfloat16
    assert (out[0].double() - want).norm() <= 2.0**-8 * want.norm()
    assert_lse(lse[0], want_lse)


def test_varlen():
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, h, 64, generator=generator) for n, h in ((12, 4), (20, 2), (20, 2)))
    cu_q, cu_k = torch.tensor([0, 3, 3, 10]).int(), torch.tensor([0, 8, 9, 19]).int()  # rows of no sequence behind
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 10, causal=True, return_attn_probs=True)
    assert lse.shape == (4, 12)
    assert_agrees((out, lse.T), reference.fmha_varlen, q, k, v, cu_q, cu_k, causal=True)
    narrow = flash_attn_varlen_func(q[..., :40], k[..., :40], v[..., :24], cu_q, cu_k, 7, 10, softmax_scale=0.2)
    want, _ = plain(q[:3, :, :40], k[:8, :, :40], v[:8, :, :24], torch.ones(3, 8, dtype=torch.bool), 0.2)
    assert narrow.shape == (12, 4, 24)
    assert_right(narrow[:3], want)


@pytest.mark.parametrize("counts, extra", [((3, 1, 0, 5), 2), ((2, 2, 2), 0), ((1,) * 4, 0), ((0,), 3), ((), 2)])
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window_size=(4, 0))])
def test_varlen_queries_and_keys_in_pages(counts, extra, options):
    """The same as varlen with the keys laid end to end, for sequences of different lengths and rows of no sequence."""
    page, heads = 4, 4
    lengths = [7, 12, 3, 9][: len(counts)]
    cu_q = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]).int()
    cu_k = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]).int()
    generator = torch.Generator().manual_seed(2)
    total = int(cu_q[-1]) + extra
    q = torch.randn(total, heads, 64, generator=generator)
    k, v = (torch.randn(16, page, 2, 64, generator=generator) for _ in "kv")
    table = torch.randperm(16, generator=generator)[: 3 * len(counts)].view(len(counts), 3).int()
    rows = [x[table[n].long()].flatten(0, 1)[: lengths[n]] for x in (k, v) for n in range(len(counts))]
    keys, values = (
        torch.cat([x.new_zeros(0, 2, 64), *part]) for x, part in ((k, rows[: len(counts)]), (v, rows[len(counts) :]))
    )
    for n, length in enumerate(lengths):
        if length < 3 * page:  # page rows past the length may hold anything
            for x in (k, v):
                x[int(table[n, length // page]), length % page :] = float("nan")
    sink = torch.zeros(heads)
    more = dict(return_attn_probs=True, learnable_sink=sink, **options)
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max(counts, default=0), max(lengths, default=0), block_table=table, **more
    )
    assert out.shape == q.shape and lse.shape == (heads, total)
    translated = dict(options)
    if "window_size" in translated:
        translated["window"] = translated.pop("window_size")
    assert_agrees((out, lse.T), reference.fmha_varlen, q, keys, values, cu_q, cu_k, sink=sink, **translated)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kind", ["int", "tensor", "none"])
def test_cache(paged, kind):
    b, t, s, page = 3, 2, 12, 4
    q, k, v = qkv(b, t, s, 4, 2, 64)
    lengths = {"int": torch.full((b,), 7), "tensor": torch.tensor([12, 0, 5]), "none": torch.full((b,), s)}[kind].int()
    given = {"int": 7, "tensor": lengths, "none": None}[kind]
    caches, more = (k, v), {}
    table = torch.arange(b * s // page).view(b, -1).int()
    if paged:
        table = table.flip(1)
        caches = tuple(x.unflatten(1, (-1, page)).flip(1).flatten(0, 1).contiguous() for x in (k, v))
        more = dict(block_table=table)
    out, lse = flash_attn_with_kvcache(
        q, *caches, cache_seqlens=given, causal=True, return_softmax_lse=True, num_splits=1, **more
    )
    pages = tuple(x.unflatten(1, (-1, page)).flatten(0, 1) for x in (k, v))
    straight = torch.arange(b * s // page).view(b, -1).int()
    assert_agrees((out, lse), reference.fmha_paged, q, *pages, straight, lengths, causal=True)
    assert torch.equal(flash_attn_with_kvcache(q, *caches, cache_seqlens=given, causal=True, **more), out)


def test_lines_of_a_cache_by_number():
    q, k, v = qkv(5, 2, 9, 2, 2, 64)
    lines = torch.tensor([4, 0, 4]).int()
    out = flash_attn_with_kvcache(q[:3], k, v, cache_seqlens=6, cache_batch_idx=lines)
    want, _ = reference.fmha(q[:3], k[lines.long(), :6], v[lines.long(), :6])
    assert_right(out, want)
    # a cache with more lines than q: the first ones
    few = flash_attn_with_kvcache(q[:2], k, v, cache_seqlens=6)
    assert_right(few, reference.fmha(q[:2], k[:2, :6], v[:2, :6])[0])


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("interleaved", [None, True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_new_keys_are_rotated_written_and_seen(paged, interleaved, causal):
    b, new, s, page, h, d, half = 2, 3, 12, 4, 2, 64, 8
    q, _, _ = qkv(b, new, s, 4, h, d)
    _, k_new, v_new = qkv(b, 1, new, 4, h, d, seed=5)
    _, k, v = qkv(b, 1, s, 4, h, d, seed=6)
    lengths = torch.tensor([5, 9]).int()
    angles = torch.arange(s + 1)[:, None] * torch.linspace(1, 0.1, half)
    rotary = (
        {}
        if interleaved is None
        else dict(rotary_cos=angles.cos(), rotary_sin=angles.sin(), rotary_interleaved=interleaved)
    )

    def turned(x, position):  # [h, d]: complex numbers, not the formula of the code under test
        if interleaved is None:
            return x
        pairs = x[..., : 2 * half].unflatten(-1, (half, 2) if interleaved else (2, half))
        pairs = pairs if interleaved else pairs.transpose(-1, -2)
        turn = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(half), angles[position])
        real = torch.view_as_real(turn)
        real = real if interleaved else real.transpose(-1, -2)
        return torch.cat([real.flatten(-2), x[..., 2 * half :]], -1)

    want_k, want_v, want_q = k.clone(), v.clone(), q.clone()
    for n in range(b):
        for i in range(new):
            at = int(lengths[n]) + i
            want_k[n, at], want_v[n, at] = turned(k_new[n, i], at), v_new[n, i]
            want_q[n, i] = turned(q[n, i], at if causal else int(lengths[n]))
    caches, more = [k.clone(), v.clone()], {}
    if paged:  # pages in reverse order, among pages of others
        table = torch.arange(2 * b * s // page).flip(0)[: b * s // page].view(b, -1).int()
        caches = [torch.full((2 * b * s // page, page, h, d), 9.0) for _ in "kv"]
        for cache, x in zip(caches, (k, v)):
            cache[table.long()] = x.unflatten(1, (-1, page))
        more = dict(block_table=table)
    out = flash_attn_with_kvcache(q, *caches, k_new, v_new, cache_seqlens=lengths, causal=causal, **rotary, **more)
    got = [x[table.long()].flatten(1, 2) if paged else x for x in caches]
    # two products and a sum of values below 8: three roundings of 2^-22
    assert (got[0] - want_k).abs().max() <= 3 * 2.0**-22 and torch.equal(got[1], want_v)
    if paged:
        others = torch.ones(len(caches[0]), dtype=torch.bool).index_fill(0, table.flatten().long(), False)
        assert bool((caches[0][others] == 9).all())
    for n in range(b):
        end = int(lengths[n]) + new
        want, _ = reference.fmha(want_q[n : n + 1], want_k[n : n + 1, :end], want_v[n : n + 1, :end], causal=causal)
        assert_right(out[n : n + 1], want)


def test_the_sink_has_a_second_name():
    """The signature of vLLM's flash-attn 3; transformers 5.17 knows no other in continuous batching."""
    q, sink = torch.randn(2, 5, 3, 64), torch.randn(3)
    starts = torch.tensor([0, 5, 10], dtype=torch.int32)
    lines = (*(q.flatten(0, 1),) * 3, starts, starts, 5, 5)
    for call, given in (
        (flash_attn_func, (q, q, q)),
        (flash_attn_varlen_func, lines),
        (flash_attn_with_kvcache, (q, q, q)),
    ):
        wanted = call(*given, causal=True, learnable_sink=sink)
        assert torch.equal(call(*given, causal=True, s_aux=sink), wanted)
        assert not torch.equal(call(*given, causal=True), wanted)
        with pytest.raises(ValueError, match="s_aux: got .*; accepted: None together with learnable_sink"):
            call(*given, causal=True, s_aux=sink, learnable_sink=sink)


def test_fp8_caches_have_scales():
    """Also where new keys are written, as codes, and where queries lie end to end."""
    q, k, v = qkv(2, 3, 20, 4, 2, 64)
    k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
    scales = dict(k_scale=torch.rand(2) + 0.5, v_scale=torch.tensor(0.4))
    options = dict(causal=True, softmax_scale=0.125)
    want, _ = reference.fmha(q, k, v, **options, **scales)
    assert_right(flash_attn_func(q, k, v, **options, **scales), want)
    caches = [torch.zeros_like(x.view(torch.uint8)).view(x.dtype) for x in (k, v)]
    for cache, x in zip(caches, (k, v)):
        cache.view(torch.uint8)[:, :17] = x.view(torch.uint8)[:, :17]
    out = flash_attn_with_kvcache(q, *caches, k[:, 17:], v[:, 17:], cache_seqlens=17, **options, **scales)
    assert_right(out, want)
    pages = [x.view(torch.uint8).view(10, 4, 2, 64).view(x.dtype) for x in (k, v)]
    table, ends = torch.arange(10).int().view(2, 5), torch.tensor([0, 20, 40]).int()
    starts = torch.tensor([0, 3, 6]).int()
    made = flash_attn_varlen_func(q.flatten(0, 1), *pages, starts, ends, 3, 20, block_table=table, **options, **scales)
    assert_right(made.view(q.shape), want)


def test_signatures_are_those_of_flash_attn():
    common = ["softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic", "return_attn_probs"]
    assert list(inspect.signature(flash_attn_func).parameters)[:11] == ["q", "k", "v", "dropout_p", *common]
    assert list(inspect.signature(flash_attn_varlen_func).parameters)[:16] == [
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p", *common,
        "block_table",
    ]  # fmt: skip
    assert list(inspect.signature(flash_attn_with_kvcache).parameters)[:19] == [
        "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
        "cache_leftpad", "block_table", "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved",
        "alibi_slopes", "num_splits", "return_softmax_lse",
    ]  # fmt: skip


def refused(function, good, bad):
    function(**good)
    for text, change in bad:
        with pytest.raises(ValueError, match=f"^{text}"):
            function(**good | change)


def test_what_it_cannot_do_it_says():
    q, k, v = qkv(2, 3, 8, 4, 2, 64)
    slopes = torch.ones(4)
    everywhere = [
        ("softcap: got float -1.0; accepted: None or a finite number >= 0", dict(softcap=-1.0)),
        ("alibi_slopes: got float32 .4.", dict(alibi_slopes=slopes)),
        ("window_size: ", dict(window_size=(-2, 0))),
        ("window_size: ", dict(window_size=3)),
        ("learnable_sink: ", dict(learnable_sink=torch.zeros(3))),
        ("backend: ", dict(backend="gpu")),
        ("causal: ", dict(causal=1)),
        ("softmax_scale: ", dict(softmax_scale="x")),
    ]
    refused(
        flash_attn_func,
        dict(q=q, k=k, v=v),
        [
            *everywhere,
            ("dropout_p: got float 0.1; accepted: 0.0", dict(dropout_p=0.1)),
            ("q: got head dim 576", dict(q=torch.zeros(2, 3, 4, 576), k=torch.zeros(2, 8, 2, 576))),
            ("k: got head dim 32", dict(k=k[..., :32])),
            ("q: got 3 query heads on 2 KV heads", dict(q=q[:, :, :3])),
            ("k: got shape", dict(k=k[0])),
            ("return_attn_probs: ", dict(return_attn_probs=None)),
        ],
    )
    cu_q, cu_k = torch.tensor([0, 3, 6]).int(), torch.tensor([0, 8, 16]).int()
    good = dict(q=q.flatten(0, 1), k=k.flatten(0, 1), v=v.flatten(0, 1), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
                max_seqlen_q=3, max_seqlen_k=8)  # fmt: skip
    refused(
        flash_attn_varlen_func,
        good,
        [
            *everywhere[:-1],
            ("dropout_p: ", dict(dropout_p=0.1)),
            ("cu_seqlens_k: ", dict(cu_seqlens_k=cu_k.long())),
            ("max_seqlen_q: ", dict(max_seqlen_q=2)),
        ],
    )
    table = torch.tensor([[0], [1]]).int()
    refused(
        flash_attn_varlen_func,
        good | dict(k=k, v=v, block_table=table),
        [
            ("block_table: ", dict(block_table=table + 1)),
            ("block_table: ", dict(block_table=table[:1])),
            ("cu_seqlens_q: ", dict(cu_seqlens_q=cu_q.flip(0))),
            ("cu_seqlens_k: ", dict(cu_seqlens_k=cu_k * 2)),
            ("max_seqlen_q: ", dict(max_seqlen_q=2)),
            ("k: got head dim 32", dict(k=k[..., :32])),
            ("k: got shape", dict(k=k[0])),
        ],
    )


def test_a_cache_is_not_touched_by_a_call_that_is_refused():
    q, k, v = qkv(2, 3, 8, 4, 2, 64)
    new = qkv(2, 1, 2, 4, 2, 64, seed=7)[1]
    caches = k.clone(), v.clone()
    table = torch.tensor([[0], [1]]).int()
    cos = torch.zeros(20, 4)
    eighty = torch.zeros(2, 8, 2, 80)
    refused_first = dict(q=q, k_cache=caches[0], v_cache=caches[1], k=new, v=new, cache_seqlens=4)
    for text, change in [
        ("cache_leftpad: ", dict(cache_leftpad=torch.zeros(2).int())),
        ("softcap: ", dict(softcap=-1.0)),
        ("alibi_slopes: ", dict(alibi_slopes=torch.ones(4))),
        ("num_splits: ", dict(num_splits=-1)),
        ("cache_seqlens: got values from 7 to 7; accepted: values from 0 to 6", dict(cache_seqlens=7)),
        ("cache_seqlens: got None", dict(cache_seqlens=None)),
        ("cache_seqlens: got .*; accepted: None, an int", dict(cache_seqlens="4")),
        ("cache_seqlens: got dtype int64", dict(cache_seqlens=torch.tensor([1, 2]))),
        ("k_cache: got strides .*share memory", dict(k_cache=k[:1].expand(2, -1, -1, -1))),
        ("v_cache: got strides .*share memory", dict(v_cache=v[:, :1].expand(-1, 8, -1, -1))),
        ("v: got", dict(v=None)),
        ("k: got", dict(k=None)),
        ("v: got shape", dict(v=new[:, :1])),
        ("k: got dtype", dict(k=new.bfloat16())),
        ("cache_batch_idx: got values", dict(cache_batch_idx=torch.tensor([0, 2]).int())),
        ("cache_batch_idx: .*None with block_table", dict(cache_batch_idx=table[:, 0], block_table=table)),
        ("block_table: got values from -1", dict(block_table=table - 1)),
        ("k_cache: got 2 lines", dict(q=torch.cat([q, q]), k=torch.cat([new, new]), v=torch.cat([new, new]))),
        ("k_cache: got head dim", dict(q=torch.zeros(2, 3, 4, 128))),
        ("q: got head dim 80", dict(q=eighty, k_cache=eighty, v_cache=eighty, k=None, v=None)),
        ("rotary_sin: ", dict(rotary_cos=cos)),
        ("rotary_cos: got 5 positions", dict(rotary_cos=cos[:5], rotary_sin=cos[:5])),
        ("rotary_cos: got width", dict(rotary_cos=torch.zeros(20, 33), rotary_sin=torch.zeros(20, 33))),
        ("rotary_cos: .*without k and v", dict(k=None, v=None, rotary_cos=cos, rotary_sin=cos)),
        ("v: got a tensor that requires grad", dict(v=new.clone().requires_grad_())),
        ("learnable_sink: ", dict(learnable_sink=torch.zeros(3))),
        ("backend: ", dict(backend="gpu")),
    ]:
        with pytest.raises(ValueError, match=f"^{text}"):
            flash_attn_with_kvcache(**refused_first | change)
        assert torch.equal(caches[0], k) and torch.equal(caches[1], v), text
    flash_attn_with_kvcache(**refused_first)
    assert torch.equal(caches[0][:, 4:6], new) and torch.equal(caches[0][:, :4], k[:, :4])
