"""dsv4.fmha on the cpu backend against the oracle: masks, sinks, heads, dtypes, strides, sizes."""

import re
from dataclasses import replace

import pytest
import torch
from agreement import assert_agrees, assert_lse, qkv
from hypothesis import given
from hypothesis import strategies as st

import dsv4
from dsv4 import reference
from dsv4.fmha import cpu, problem
from dsv4.runtime import checks

INF = float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(q, k, v, merged=False, **options):
    got = dsv4.fmha(q, k, v, return_lse=True, **options)
    assert got[0].dtype == q.dtype and got[0].is_contiguous()
    assert_agrees(got, reference.fmha, q, k, v, merged=merged, sink_last=cpu.sink_last(q.dtype), **options)
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_head_dims_and_dtypes(d, dtype):
    check(*qkv(2, 17, 40, 4, 2, d, dtype), causal=True, sink=torch.randn(4))


@pytest.mark.parametrize("hq, hkv", [(1, 1), (4, 4), (4, 2), (6, 1), (6, 3)])
@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("t", [1, 5])
def test_head_groups(b, t, hq, hkv):
    check(*qkv(b, t, 30, hq, hkv, 64), causal=True, sink=torch.randn(hq))


@given(
    t=st.sampled_from([1, 2, 7, 33, 150]),
    s=st.sampled_from([1, 3, 33, 100, 301]),
    left=st.sampled_from([-1, 0, 1, 5, 40, 500]),
    right=st.sampled_from([-1, 0, 1, 5, 40, 500]),
    causal=st.booleans(),
    sink=st.sampled_from([None, 0.5, -INF, INF, 80.0]),
    block=st.sampled_from([8, 128]),
    mask_limit=st.sampled_from([64, 1 << 20]),
    chunk=st.sampled_from([1 << 10, 32 << 20]),
    dtype=st.sampled_from(DTYPES),
    native=st.booleans(),
)
def test_every_cut_of_the_mask(t, s, left, right, causal, sink, block, mask_limit, chunk, dtype, native):
    """Small limits reach the code that otherwise only long sequences reach. Invisible rows are poisoned.
    native: as on a CPU that multiplies 16-bit matrices; there each part of a row is rounded before it is merged."""
    q, k, v = qkv(2, t, s, 4, 2, 64, dtype, seed=t + s)
    unseen = ~reference.visible(t, s, causal, (left, right)).any(0)
    k[:, unseen], v[:, unseen] = float("nan"), INF
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "QUERY_BLOCK", block)
        patch.setattr(cpu, "MASK_LIMIT", mask_limit)
        patch.setattr(cpu, "BLOCK_BYTES", chunk)
        patch.setattr(cpu, "SPLIT_KEYS", 16)
        patch.setattr(cpu, "native", lambda dtype: native or dtype == torch.float32)
        check(
            q,
            k,
            v,
            causal=causal,
            window=(left, right),
            sink=None if sink is None else torch.full((4,), sink),
            merged=native and dtype != torch.float32,
        )


def test_one_query_on_many_keys_uses_all_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        check(*qkv(1, 1, 9001, 8, 1, 64))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_outer_strides(dtype):
    packed = torch.randn(2, 20, 3, 4, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    q, k, v = packed.unbind(2)
    check(q, k, v, causal=True)
    wide = torch.randn(4, 20, 2, 80).to(dtype)
    check(
        q.transpose(1, 2).contiguous().transpose(1, 2),
        k[::2].expand(2, -1, -1, -1),
        wide[::2, :, :, 8:72][:, :, :1].expand(-1, -1, 4, -1),
    )


@pytest.mark.parametrize("shared", ["q", "k", "v", "kv"])
@pytest.mark.parametrize("t", [1, 3])
def test_heads_that_share_only_some_rows(t, shared):
    """By a stride of 0 over the heads, as .expand() gives it: keys may be shared where values are not."""
    rows = {"q": t, "k": 9, "v": 9}
    given = {name: torch.randn(2, n, 1 if name in shared else 4, 64).expand(-1, -1, 4, -1) for name, n in rows.items()}
    expected = dsv4.fmha(**{name: x.contiguous() for name, x in given.items()})
    torch.testing.assert_close(dsv4.fmha(**given), expected)


def test_out_is_written_and_returned():
    q, k, v = qkv(2, 9, 20, 4, 2, 64)
    want = dsv4.fmha(q, k, v, causal=True)
    storage = torch.full((2, 4, 9, 80), float("nan"))
    out = storage[..., 8:72].transpose(1, 2)  # [2, 9, 4, 64] with strides of its own
    got, lse = dsv4.fmha(q, k, v, causal=True, out=out, return_lse=True)
    assert got is out and torch.equal(out, want)
    assert bool(storage[..., :8].isnan().all()) and bool(storage[..., 72:].isnan().all())
    assert torch.equal(lse, dsv4.fmha(q, k, v, causal=True, return_lse=True)[1])


@pytest.mark.parametrize("b, t, s", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_empty_sizes(b, t, s):
    q, k, v = qkv(b, t, s, 4, 2, 64)
    out, lse = dsv4.fmha(q, k, v, sink=torch.zeros(4), return_lse=True)
    assert out.shape == (b, t, 4, 64) and lse.shape == (b, 4, t)
    assert bool((out == 0).all()) and bool((lse == -INF).all())


def test_scale_and_large_logits():
    q, k, v = qkv(1, 16, 64, 2, 1, 128)
    check(q, k, v, softmax_scale=0.0)
    check(q, k, v, softmax_scale=-0.3)
    out, lse = dsv4.fmha(q * 30, k * 30, v, return_lse=True)  # logits of some thousands
    ref, ref_lse = reference.fmha(q * 30, k * 30, v)
    # 128 roundings of 2^-24 of a logit are a random walk; so far, absolutely, the log of a weight is off.
    assert (out - ref).abs().max() <= 2 * 128**0.5 * 2.0**-24 * ref_lse.abs().max() * v.abs().max()
    assert_lse(lse, ref_lse)


@pytest.mark.parametrize("t, s, hq, hkv", [(1, 5000, 1, 1), (1, 5000, 4, 1), (65, 257, 4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_is_the_same_bits_in_any_batch_and_with_any_threads(t, s, hq, hkv, dtype):
    """There are one token and thousands of keys: without the option, the keys are divided among the threads."""
    q, k, v = qkv(3, t, s, hq, hkv, 64, dtype)
    options = dict(causal=True, return_lse=True, deterministic=True)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            out, lse = dsv4.fmha(q, k, v, **options)
            alone = [dsv4.fmha(*(x[n : n + 1] for x in (q, k, v)), **options) for n in range(3)]
            results += [(out, lse), tuple(torch.cat(x) for x in zip(*alone))]
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for out, lse in results:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
    assert_agrees(results[0], reference.fmha, q, k, v, causal=True)


@pytest.mark.parametrize("scale", [-1.0, 0.0])
def test_a_scale_of_zero_or_less_keeps_the_future_masked(scale):
    """More queries than one masked block, so that the flash kernel's own causality is used."""
    q, k, v = (torch.randn(1, 150, 2, 64) for _ in "qkv")
    check(q, k, v, causal=True, softmax_scale=scale)


def test_scores_that_overflow_are_nan_and_not_nothing():
    """fp32 has no number for them. A row of zeros next to them is right."""
    q, k, v = torch.full((1, 3, 2, 64), 1e20), torch.full((1, 9, 2, 64), -1e20), torch.randn(1, 9, 2, 64)
    q[:, 1] = 0
    for options in ({}, dict(causal=True), dict(window=(2, 0))):
        out, lse = dsv4.fmha(q, k, v, return_lse=True, **options)
        assert out[:, ::2].isnan().all() and lse[..., ::2].isnan().all()
        assert out[:, 1].isfinite().all() and lse[..., 1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_fp32_output_of_16_bit_inputs_is_not_rounded(dtype):
    """Partial results that are merged afterwards are then rounded once."""
    q, k, v = qkv(2, 5, 70, 4, 2, 64, dtype)
    p = problem.dense(q, k, v, causal=True)
    p = replace(p, out=torch.full(q.shape, float("nan")), lse=torch.empty(p.lse_shape))
    cpu.forward(p)
    assert_agrees((p.out, p.lse), reference.fmha, q, k, v, causal=True)


@pytest.mark.parametrize("how", ["dense", "varlen", "paged", "operator"])
def test_each_number_is_checked_once(how, monkeypatch):
    """Its type where it arrives, which for an operator is torch's part; its value where the problem is built."""
    seen = []
    for name in ("two_ints", "window_bounds", "real", "finite", "bound"):
        real = getattr(checks, name)
        monkeypatch.setattr(checks, name, lambda *a, name=name, real=real: seen.append(name) or real(*a))
    q, k, v = qkv(1, 3, 5, 2, 2, 64, torch.float32)
    starts, lengths = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    numbers = dict(causal=True, softmax_scale=0.5)
    values, types = ["finite", "window_bounds"], ["real", "two_ints"]
    if how == "dense":
        dsv4.fmha(q, k, v, window=(4, 3), **numbers)
    elif how == "varlen":
        dsv4.fmha_varlen(q[0], k[0], v[0], starts, lengths, max_seqlen_q=3, max_seqlen_k=5, window=(4, 3), **numbers)
        types = ["bound", "bound", *types]
    elif how == "paged":
        dsv4.fmha_paged(q, k, v, torch.zeros(1, 1, dtype=torch.int32), lengths[1:], window=(4, 3), **numbers)
    else:
        torch.ops.dsv4.fmha(q, k, v, window_left=4, window_right=3, **numbers)
        types = []
    assert sorted(seen) == sorted(types + values)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_is_refused_as_it_was_given(causal):
    q, k, v = qkv(1, 3, 5, 2, 2, 64, torch.float32)
    for window in ((-2, 3), (3, -2), (3, -1 << 70)):
        with pytest.raises(ValueError, match=re.escape(f"window: got tuple {window}")):
            dsv4.fmha(q, k, v, window=window, causal=causal)
        with pytest.raises(ValueError, match=re.escape(f"window: got tuple {window}")):
            dsv4.fmha(q.clone().requires_grad_(), k, v, window=window, causal=causal)
    with pytest.raises(ValueError, match=re.escape("window: got tuple (3, -2)")):
        torch.ops.dsv4.fmha(q, k, v, window_left=3, window_right=-2, causal=causal)
