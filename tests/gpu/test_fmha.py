"""The FMHA operations on the GPU: the suites, and what only a GPU shows (graphs, allocation, bits, big shapes)."""

import os
from dataclasses import replace

import pytest
import torch
from agreement import assert_lse, assert_same

import dsv4
from dsv4 import suites

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(suites.gpu_arch() is None, reason="needs a GPU that dsv4 has kernels for"),
]
SEED = int(os.environ.get("DSV4_SEED", "0"))
NAN = float("nan")


def draw(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def plan_with(splits: int, operation, **capacities) -> dsv4.Plan:
    """A plan with a given number of splits and NaN in its buffers."""
    made = dsv4.plan(operation, **capacities)
    scratch = torch.full((splits * made.rows * (made.head_dim + 1),), NAN, device="cuda")
    return replace(made, num_splits=splits, scratch=scratch)


@pytest.mark.parametrize("case", suites.seeds() + suites.fmha(), ids=str)
def test_suites(case):
    result = suites.run_case(case, suites.Where("cuda").resolve(), SEED)
    assert result.ok, f"seed {SEED}: {result.why()}"


@pytest.mark.parametrize(
    "batch, tokens, heads, kv_heads, causal",
    [(2, 1500, 16, 4, True), (3, 1111, 12, 12, False), (1, 100, 8, 2, True), (2, 2048, 10, 2, True)],
)
@pytest.mark.parametrize("d, width", [(96, 96), (192, 128), (192, 192), (160, 160), (72, 88), (112, 64), (256, 64)])
def test_head_dims_between(d, width, batch, tokens, heads, kv_heads, causal):
    """Many rows, which are read as they are, and few, which are copied; a poisoned output that is not contiguous."""
    q, k, v = draw(batch, tokens, heads, d), draw(batch, tokens, kv_heads, d), draw(batch, tokens, kv_heads, width)
    around = torch.full((batch, tokens, heads, width + 16), NAN, device="cuda", dtype=q.dtype)
    out = around[..., 8:-8]
    dsv4.fmha(q, k, v, causal=causal, out=out)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).float() for x in (q, k, v)), is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(out.float(), exact.transpose(1, 2), atol=0.02, rtol=0.02)
    assert around[..., :8].isnan().all() and around[..., -8:].isnan().all()


@pytest.mark.parametrize("tokens, batch", [(22, 1), (22, 40), (2048, 24)])  # by splits, without and with a loop
@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_scores_of_any_size(d, tokens, batch):
    """Rows with scores of +- 2^20 to 2^100, some of which tie. At head dim 64 the kernels of sm_90a have a limit."""
    exponents = [e for e in (20, 25, 27, 28, 29, 30, 31, 33, 40, 60, 100) if d != 64 or e < 30]
    sizes = torch.tensor([sign * 2.0**e for e in exponents for sign in (1, -1)], device="cuda")
    q, k = torch.zeros(batch, tokens, 2, d, device="cuda"), torch.zeros(batch, 900, 1, d, device="cuda")
    q[..., 0] = sizes[torch.arange(tokens, device="cuda") % len(sizes)][:, None]
    kind = torch.randint(0, 4, (batch, 900), device="cuda")
    k[..., 0, 0] = 1.5 + kind / 8
    v = draw(4, d)[kind][:, :, None]
    out, lse = dsv4.fmha(q.bfloat16(), k.bfloat16(), v, softmax_scale=0.3, return_lse=True)
    s = 0.3 * q[..., 0].double().transpose(1, 2)[..., None] * k[:, None, None, :, 0, 0].double()
    exact = (s.softmax(-1) @ v[:, None, :, 0].double()).transpose(1, 2)
    assert out.isfinite().all() and (out - exact).abs().max() <= 2.0**-7 * v.abs().max()
    torch.testing.assert_close(lse.double(), s.logsumexp(-1), rtol=2.0**-22, atol=1e-4)


@pytest.mark.parametrize("splits", [2, 3, 7, 40])
@pytest.mark.parametrize("d, same_kv", [(64, False), (128, False), (256, False), (512, False), (512, True)])
def test_any_number_of_splits(d, same_kv, splits):
    """More splits than tiles leave splits without keys, whose buffers hold NaN."""
    q, k = draw(2, 1, 8, d), draw(2, 1500, 1, d)
    v = k if same_kv else draw(2, 1500, 1, d)
    sink = torch.randn(8, device="cuda")
    plan = plan_with(splits, dsv4.fmha, batch=2, q_heads=8, kv_heads=1, head_dim=d, max_seqlen_k=1500)
    one, one_lse = dsv4.fmha(q, k, v, sink=sink, return_lse=True, deterministic=True)
    many, many_lse = dsv4.fmha(q, k, v, sink=sink, return_lse=True, plan=plan)
    assert_same(many, one)
    assert_lse(many_lse, one_lse)


@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_same_bits_every_run_and_in_every_batch(d):
    """deterministic=True: a sequence gives the same bits alone, in a batch, and with a wider block table."""
    page, batch = 64, 5
    lengths = torch.tensor([5000, 1, 64, 4097, 2300], dtype=torch.int32, device="cuda")
    pages = 80
    table = torch.randperm(batch * pages, device="cuda").to(torch.int32).view(batch, pages)
    k, v, q = draw(batch * pages, page, 2, d), draw(batch * pages, page, 2, d), draw(batch, 1, 8, d)
    runs = [dsv4.fmha_paged(q, k, v, table, lengths, deterministic=True) for _ in range(3)]
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
    wide = torch.cat([table, torch.zeros(batch, 300, dtype=torch.int32, device="cuda")], 1).contiguous()
    for n in range(batch):
        one = slice(n, n + 1)
        assert torch.equal(runs[0][one], dsv4.fmha_paged(q[one], k, v, table[one], lengths[one], deterministic=True))
        assert torch.equal(runs[0][one], dsv4.fmha_paged(q[one], k, v, wide[one], lengths[one], deterministic=True))
    split = [dsv4.fmha_paged(q, k, v, table, lengths) for _ in range(3)]
    assert torch.equal(split[0], split[1]) and torch.equal(split[0], split[2])


@pytest.mark.parametrize("d, kv_heads", [(128, 2), (512, 1)])
def test_a_cuda_graph_follows_changing_lengths(d, kv_heads):
    page, batch, pages, heads = 32, 4, 100, 16
    k = draw(batch * pages, page, kv_heads, d)
    v = k if d == 512 else draw(batch * pages, page, kv_heads, d)
    q, out = draw(batch, 1, heads, d), torch.empty(batch, 1, heads, d, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(batch * pages, device="cuda").to(torch.int32).view(batch, pages)
    lengths = torch.full((batch,), page * pages, dtype=torch.int32, device="cuda")
    plan = dsv4.warmup(
        dsv4.fmha_paged, batch=batch, q_heads=heads, kv_heads=kv_heads, head_dim=d, max_seqlen_k=page * pages
    )

    def run() -> None:
        dsv4.fmha_paged(q, k, v, table, lengths, out=out, plan=plan)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for new in ([1, 2, 3, 3200], [0, 700, 31, 32], [3199, 64, 65, 1000]):
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        q.copy_(draw(*q.shape))
        out.fill_(NAN)
        graph.replay()
        want = dsv4.fmha_paged(q, k, v, table, lengths, deterministic=True)
        assert_same(out, want)
        assert new[0] > 0 or not out[0].any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_run_with_a_plan_allocates_nothing(deterministic):
    q, k, v = draw(2, 1, 16, 128), draw(2, 6000, 2, 128), draw(2, 6000, 2, 128)
    out = torch.empty_like(q)
    plan = dsv4.plan(dsv4.fmha, batch=2, q_heads=16, kv_heads=2, head_dim=128, max_seqlen_k=6000)
    assert plan.num_splits > 1
    dsv4.fmha(q, k, v, out=out, plan=plan, deterministic=deterministic)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for scale in (0.1, -0.1):
        dsv4.fmha(q, k, v, softmax_scale=scale, out=out, plan=plan, deterministic=deterministic)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_large_prefill_against_torch(d, causal):
    """Thousands of thread blocks, GQA rows packed, odd sizes; torch in fp32 is the reference."""
    q, k, v = draw(2, 1111, 8, d), draw(2, 2345, 2, d), draw(2, 2345, 2, d)
    got = torch.full_like(q, NAN)
    dsv4.fmha(q, k, v, causal=causal, out=got)
    qf, kf, vf = (x.float().transpose(1, 2) for x in (q, k, v))
    s = (qf.view(2, 2, 4, 1111, d) @ kf[:, :, None].mT) * d**-0.5
    if causal:
        s.masked_fill_(torch.ones(1111, 2345, dtype=torch.bool, device="cuda").triu(2345 - 1111 + 1), float("-inf"))
    want = (torch.softmax(s, -1) @ vf[:, :, None]).view(2, 8, 1111, d).transpose(1, 2)
    assert_same(got, want.to(got.dtype))


@pytest.mark.parametrize("causal, window", [(False, (-1, -1)), (True, (-1, -1)), (True, (300, 0))])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_one_block_per_multiprocessor(d, causal, window):
    """Enough tiles that each block loops over several; every sequence alone takes the other kernel."""
    q, k, v = draw(6, 1500, 12, d), draw(6, 1100, 12, d), draw(6, 1100, 12, d)
    sink = torch.randn(12, device="cuda")
    out = torch.full_like(q, NAN)
    _, lse = dsv4.fmha(q, k, v, causal=causal, window=window, sink=sink, out=out, return_lse=True)
    for n in (0, 5):
        one = [x[n : n + 1] for x in (q, k, v)]
        want, want_lse = dsv4.fmha(*one, causal=causal, window=window, sink=sink, return_lse=True)
        assert_same(out[n : n + 1], want)
        assert_lse(lse[n : n + 1], want_lse)
    assert torch.isfinite(out).all()


def test_lengths_and_pages_out_of_range_read_nothing_outside():
    """Without DSV4_CHECK lengths are clamped and absent pages are unseen; compute-sanitizer watches this test."""
    k, q = draw(4, 16, 1, 512), draw(2, 1, 8, 512)
    table = torch.tensor([[0, 99], [-5, 3]], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([1 << 30, -7], dtype=torch.int32, device="cuda")
    out, lse = dsv4.fmha_paged(q, k, k, table, lengths, return_lse=True)
    torch.cuda.synchronize()
    assert not out[1].any() and torch.isneginf(lse[1]).all()
    want, want_lse = dsv4.fmha(q[:1], k[:1], k[:1], return_lse=True)  # page 99 has no weight
    assert_same(out[:1], want)
    assert_lse(lse[:1], want_lse)


def test_more_than_two_to_the_31_elements():
    t, heads, d = 280_000, 64, 128
    q, k, v = draw(1, t, heads, d), draw(1, 70, 8, d), draw(1, 70, 8, d)
    assert q.numel() > 1 << 31
    out, lse = dsv4.fmha(q, k, v, return_lse=True)
    want, want_lse = dsv4.fmha(q[:, -100:], k, v, return_lse=True)  # another kernel: the large one loops over row tiles
    assert_same(out[:, -100:], want)
    assert_lse(lse[..., -100:], want_lse)
