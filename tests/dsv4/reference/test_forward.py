"""The oracle against other statements of the same thing: token loops, torch's SDPA, transformers' tables."""

import math

import pytest
import torch
from agreement import qkv

from dsv4 import reference

INF = float("inf")
FP64 = dict(rtol=1e-12, atol=1e-12)  # thousands of roundings of 2^-53


def token_loop(q, k, v, seen, sink, scale):
    """One query and one head at a time, straight from the formula, in Python's arithmetic order."""
    b, t, hq, d = q.shape
    group = hq // k.shape[2]
    out, lse = (torch.zeros(b, t, hq, d, dtype=torch.float64), torch.full((b, hq, t), -INF, dtype=torch.float64))
    for n in range(b):
        for i in range(t):
            for h in range(hq):
                rows = [j for j in range(k.shape[1]) if seen(i, j)]
                if not rows:
                    continue
                s = [float(q[n, i, h].double() @ k[n, j, h // group].double()) * scale for j in rows]
                weights = [math.exp(x) for x in s]
                total = sum(weights) + (math.exp(sink[h]) if sink is not None else 0.0)
                lse[n, h, i] = math.log(sum(weights))
                out[n, i, h] = sum(w * v[n, j, h // group].double() for w, j in zip(weights, rows)) / total
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (3, -1), (-1, 2), (2, 1), (0, 0)])
@pytest.mark.parametrize("t, s", [(5, 5), (3, 7), (7, 3), (1, 4)])
def test_fmha_is_the_formula(t, s, window, causal):
    q, k, v = qkv(2, t, s, 4, 2, 64, seed=t * 10 + s)
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    left, right = window[0], 0 if causal else window[1]

    def seen(i, j):
        at = i + s - t
        return (left < 0 or j >= at - left) and (right < 0 or j <= at + right)

    got = reference.fmha(q, k, v, causal=causal, window=window, sink=sink, softmax_scale=0.1)
    for a, b in zip(got, token_loop(q, k, v, seen, sink.tolist(), 0.1)):
        torch.testing.assert_close(a, b, **FP64)


@pytest.mark.parametrize("d", [64, 512])
def test_fmha_equals_sdpa(d):
    q, k, v = (x.double() for x in qkv(2, 33, 33, 4, 2, d))
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(reference.fmha(q, k, v, causal=True)[0], want, **FP64)


def test_the_sink_is_a_key_with_value_zero():
    q, k, v = (x.double() for x in qkv(1, 4, 6, 2, 1, 64))
    sink = torch.tensor([0.7, -2.0])
    s = torch.einsum("bthd,bsd->bhts", q, k[:, :, 0]) * 64**-0.5
    p = torch.cat([s, sink.double()[None, :, None, None].expand(1, 2, 4, 1)], -1).softmax(-1)[..., :-1]
    want = torch.einsum("bhts,bsd->bthd", p, v[:, :, 0])
    torch.testing.assert_close(reference.fmha(q, k, v, sink=sink)[0], want, **FP64)


def test_infinite_sinks():
    q, k, v = qkv(1, 4, 6, 2, 1, 64)
    plain, lse = reference.fmha(q, k, v)
    out, lse_sunk = reference.fmha(q, k, v, sink=torch.tensor([-INF, INF]))
    assert torch.equal(out[:, :, 0], plain[:, :, 0]) and bool((out[:, :, 1] == 0).all())
    assert torch.equal(lse, lse_sunk)


@pytest.mark.parametrize("sink", [None, -INF, 0.0, INF])
def test_a_row_that_sees_nothing_is_zero(sink):
    q, k, v = qkv(1, 5, 2, 1, 1, 64)
    out, lse = reference.fmha(q, k, v, causal=True, sink=None if sink is None else torch.tensor([sink]))
    assert bool((out[:, :3] == 0).all()) and bool((lse[..., :3] == -INF).all())
    assert bool(lse[..., 3:].isfinite().all())


def test_unseen_rows_may_hold_anything():
    q, k, v = qkv(1, 3, 9, 1, 1, 64)
    clean = reference.fmha(q, k, v, window=(2, 0))
    k[:, :4], v[:, :4] = float("nan"), INF
    for a, b in zip(clean, reference.fmha(q, k, v, window=(2, 0))):
        assert torch.equal(a, b)


def test_varlen_and_paged_equal_dense():
    q, k, v = qkv(3, 4, 10, 2, 1, 64)
    dense, dense_lse = reference.fmha(q, k, v, causal=True)
    cu_q, cu_k = torch.arange(4) * 4, torch.arange(4) * 10
    out, lse = reference.fmha_varlen(*(x.flatten(0, 1) for x in (q, k, v)), cu_q, cu_k, causal=True)
    assert torch.equal(out, dense.flatten(0, 1)) and torch.equal(lse, dense_lse.transpose(1, 2).flatten(0, 1))
    # pages of 4 rows, three per sequence, the last half full, in shuffled places
    table = torch.tensor([[4, 0, 7], [2, 8, 1], [3, 6, 5]])
    pages = [torch.full((9, 4, 1, 64), float("nan")) for _ in range(2)]
    for n in range(3):
        for j in range(10):
            for page, x in zip(pages, (k, v)):
                page[table[n, j // 4], j % 4] = x[n, j]
    paged = reference.fmha_paged(q, *pages, table, torch.tensor([10, 10, 10]), causal=True)
    assert torch.equal(paged[0], dense) and torch.equal(paged[1], dense_lse)


def test_merge_states_of_parts_is_the_whole():
    q, k, v = qkv(2, 5, 12, 2, 1, 64)
    sink = torch.tensor([0.3, 1.5])
    parts = [reference.fmha(q, k[:, a:b], v[:, a:b]) for a, b in ((0, 3), (3, 3), (3, 12))]
    out, lse = reference.merge_states(*zip(*parts), sink=sink)
    want, want_lse = reference.fmha(q, k, v, sink=sink)
    torch.testing.assert_close(out, want, **FP64)
    torch.testing.assert_close(lse, want_lse, **FP64)


def test_v4_attention_is_one_softmax_over_both_pools():
    generator = torch.Generator().manual_seed(3)
    q, window, compressed = (torch.randn(s, generator=generator) for s in ((3, 2, 512), (7, 512), (5, 512)))
    lists = torch.tensor([[0, -1, 3], [1, 2, 6], [-1, -1, -1]])
    more = torch.tensor([[4, 0], [1, -1], [-1, -1]])
    sink = torch.tensor([0.1, -0.4])
    out, lse = reference.v4_attention(
        q, window, lists, compressed, more, window_lengths=torch.tensor([3, 2, 3]), sink=sink
    )
    rows = [torch.cat([window[[0, 3]], compressed[[4, 0]]]), torch.cat([window[[1, 2]], compressed[[1]]])]
    for n, kv in enumerate(rows):
        want, want_lse = reference.fmha(q[n][None, None], kv[None, :, None], kv[None, :, None], sink=sink)
        torch.testing.assert_close(out[n], want[0, 0], **FP64)
        torch.testing.assert_close(lse[n], want_lse[0, :, 0], **FP64)
    assert bool((out[2] == 0).all()) and bool((lse[2] == -INF).all())


def test_v4_block_table_is_a_list_of_the_first_rows():
    generator = torch.Generator().manual_seed(4)
    q, window, pages = (torch.randn(s, generator=generator) for s in ((3, 2, 512), (4, 512), (4, 2, 512)))
    none = torch.full((3, 1), -1)
    table, starts = torch.tensor([[3, 1], [0, -1]]), torch.tensor([0, 2, 3])
    lengths = torch.tensor([2, 3, 1])
    got = reference.v4_attention(
        q, window, none, pages, compressed_block_table=table, compressed_lengths=lengths, request_starts=starts
    )
    lists = torch.tensor([[6, 7, -1], [6, 7, 2], [0, -1, -1]])
    want = reference.v4_attention(q, window, none, pages, lists)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("theta, factor", [(10000.0, 1.0), (160000.0, 16.0)])
def test_rope_table_equals_transformers(theta, factor):
    transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    config = transformers.DeepseekV4Config(head_dim=512)
    parameters = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 64 / 512}
    if factor != 1.0:
        parameters |= {
            "rope_type": "yarn",
            "factor": factor,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
            "attention_factor": 1.0,
        }
        config.rope_parameters = parameters
        frequencies, attention_factor = rope.ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")
        assert attention_factor == 1.0
    else:
        frequencies = theta ** -(torch.arange(0, 64, 2).double() / 64)
    angle = torch.arange(300).double()[:, None] * frequencies.double()
    want = torch.cat([angle.cos(), angle.sin()], -1)
    got = reference.rope_table(300, 64, theta, factor=factor)
    assert got.dtype == torch.float32 and got.shape == (300, 64)
    # transformers keeps the frequencies in fp32; 300 positions multiply that error
    torch.testing.assert_close(got.double(), want, rtol=0, atol=300 * 2**-23)


def test_rope_turns_interleaved_pairs_and_back():
    table = reference.rope_table(50, 64, 10000.0)
    x = torch.randn(4, 3, 512, generator=torch.Generator().manual_seed(0)).double()
    at = torch.tensor([0, 1, 7, 49])
    y = reference.apply_rope(x, table, at)
    assert torch.equal(y[..., :448], x[..., :448]) and torch.equal(y[0], x[0])
    i, n = 5, 2
    cos, sin = table[7, i].double(), table[7, 32 + i].double()
    even, odd = x[n, :, 448 + 2 * i], x[n, :, 449 + 2 * i]
    torch.testing.assert_close(y[n, :, 448 + 2 * i], even * cos - odd * sin, **FP64)
    torch.testing.assert_close(y[n, :, 449 + 2 * i], odd * cos + even * sin, **FP64)
    back = reference.apply_rope(y, table, at, inverse=True)
    torch.testing.assert_close(back, x, rtol=0, atol=6 * 2.0**-23)  # fp32 cos and sin, |x| < 6
