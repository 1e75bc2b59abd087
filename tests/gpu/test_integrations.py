"""The calls of FlashMLA and flash-attn on the GPU: the results of the CPU, also from a captured CUDA graph."""

import pytest
import torch

import dsv4
from dsv4 import suites
from dsv4.integrations import flash_attn, flash_mla
from dsv4.suites.calls import LSE_BOUND

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(suites.gpu_arch() not in suites.ARCHS, reason="needs a GPU that dsv4 has kernels for"),
]
INF = float("inf")


def close(got, want):
    """Both round P and the output to bf16: twice the epsilon of the largest value holds both errors."""
    assert got.is_cuda and got.shape == want.shape and got.dtype == want.dtype
    assert (got.cpu().float() - want.float()).abs().max() <= 2 * 2.0**-7 * want.float().abs().max()


def lse_close(got, want):
    """Both may be off by the bound of `dsv4 verify`; infinite in the same places."""
    got, finite = got.cpu(), want.isfinite()
    assert torch.equal(got[~finite], want[~finite])
    assert (got - want)[finite].abs().max() <= 2 * LSE_BOUND * max(1.0, float(want[finite].abs().max()))


def moved(arguments, device="cuda"):
    return {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in arguments.items()}


def replayed(call):
    """call() from a CUDA graph, its second replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    return result


@pytest.mark.parametrize("heads, s_q", [(64, 1), (16, 2)])
def test_flash_mla_decode(heads, s_q):
    b = 3
    window, extra = (torch.zeros(n, rows, 1, 584, dtype=torch.uint8) for n, rows in ((6, 64), (40, 2)))
    for cache in (window, extra):
        pool = dsv4.Fp8Cache.from_pages(cache)
        pool.write(torch.arange(pool.rows), torch.randn(pool.rows, 512))
    arguments = dict(
        q=torch.randn(b, s_q, heads, 512).bfloat16(), k_cache=window, block_table=None, cache_seqlens=None,
        head_dim_v=512, tile_scheduler_metadata=None, is_fp8_kvcache=True,
        indices=torch.randint(-1, 384, (b, s_q, 128)).int(), topk_length=torch.tensor([128, 30, 0]).int(),
        attn_sink=torch.randn(heads), extra_k_cache=extra,
        extra_indices_in_kvcache=torch.randint(-1, 80, (b, s_q, 48)).int(),
        extra_topk_length=torch.tensor([48, 0, 0]).int(),
    )  # fmt: skip
    want, want_lse = flash_mla.flash_mla_with_kvcache(**arguments)
    there = moved(arguments)
    for call in (lambda f: f(), replayed):
        out, lse = call(lambda: flash_mla.flash_mla_with_kvcache(**there))
        close(out, want)
        lse_close(lse, want_lse)
        assert not out[2].any() and bool((lse[2] == INF).all())


def test_flash_mla_prefill_with_indices_out_of_range():
    arguments = dict(
        q=torch.randn(20, 64, 512).bfloat16(),
        kv=torch.randn(300, 1, 512).bfloat16(),
        sm_scale=0.04,
        indices=torch.randint(-3, 340, (20, 1, 128)).int(),
        attn_sink=torch.randn(64),
    )
    want = flash_mla.flash_mla_sparse_fwd(**arguments, return_max_logits=True)
    got = flash_mla.flash_mla_sparse_fwd(**moved(arguments), return_max_logits=True)
    close(got[0], want[0])
    lse_close(got[1], want[1])
    lse_close(got[2], want[2])


@pytest.mark.parametrize("rows", [64, 100])
def test_flash_attn_cache_grows(rows):
    """Paged and unpaged; the captured graph writes where the lengths say when it is replayed."""
    b, h, d = 3, 2, 128
    q, k, v = (torch.randn(b, 2, n, d).bfloat16() for n in (8, h, h))
    caches = [torch.randn(12, rows, h, d).bfloat16() for _ in "kv"]
    angles = torch.arange(4 * rows)[:, None] * torch.linspace(1, 0.1, 16)
    lengths = torch.tensor([rows + 5, 0, 2 * rows - 2]).int()
    table = torch.arange(12).view(3, 4).flip(1).int()
    for paged in (True, False):
        more = dict(block_table=table) if paged else dict(cache_batch_idx=torch.tensor([7, 2, 5]).int())
        arguments = dict(
            q=q, k_cache=caches[0], v_cache=caches[1], k=k, v=v, rotary_cos=angles.cos(), rotary_sin=angles.sin(),
            cache_seqlens=lengths if paged else lengths % (rows - 1), causal=True, return_softmax_lse=True, **more,
        )  # fmt: skip
        there = moved(arguments)
        want, want_lse = flash_attn.flash_attn_with_kvcache(**moved(arguments, "cpu"))
        for call in (lambda f: f(), replayed):
            out, lse = call(lambda there=there: flash_attn.flash_attn_with_kvcache(**there))
            close(out, want)
            lse_close(lse, want_lse)
        # Rotated in fp32, rounded once: one step of bf16; where a pair cancels, 4 roundings of fp32 of the largest.
        fp32 = 4 * torch.finfo(torch.float32).eps * float(caches[0].abs().max())
        torch.testing.assert_close(there["k_cache"].cpu(), caches[0], rtol=torch.finfo(torch.bfloat16).eps, atol=fp32)
        assert torch.equal(there["v_cache"].cpu(), caches[1])


def test_flash_attn_varlen():
    counts, lengths = torch.tensor([5, 1, 0, 40]), torch.tensor([90, 64, 3, 40])
    cu_q, cu_k = (torch.cat([torch.zeros(1), x.cumsum(0)]).int() for x in (counts, lengths))
    q = torch.randn(50, 8, 128).bfloat16()  # four rows of no sequence
    k, v = (torch.randn(int(cu_k[-1]), 2, 128).bfloat16() for _ in "kv")
    pages = [torch.randn(16, 32, 2, 128).bfloat16() for _ in "kv"]
    table = torch.randperm(16).view(4, 4).int()
    for tensors, more in (((k, v), {}), (pages, dict(block_table=table))):
        arguments = dict(q=q, k=tensors[0], v=tensors[1], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=40,
                         max_seqlen_k=90, causal=True, return_attn_probs=True, **more)  # fmt: skip
        want, want_lse, _ = flash_attn.flash_attn_varlen_func(**arguments)
        there = moved(arguments)
        out, lse, _ = replayed(lambda there=there: flash_attn.flash_attn_varlen_func(**there))
        close(out, want)
        lse_close(lse, want_lse)


@pytest.mark.parametrize("d, d_v", [(80, 80), (192, 128)])
def test_flash_attn_padded_head_dims(d, d_v):
    q, k, v = (torch.randn(2, 70, h, n).bfloat16() for h, n in ((4, d), (2, d), (2, d_v)))
    want = flash_attn.flash_attn_func(q, k, v, causal=True)
    close(flash_attn.flash_attn_func(q.cuda(), k.cuda(), v.cuda(), causal=True), want)
