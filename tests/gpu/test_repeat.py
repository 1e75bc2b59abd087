"""Calls that repeat the launches of an earlier one (dsv4.runtime.repeat), on a GPU: the bits of the long way."""

import pytest
import torch

import dsv4
from dsv4 import suites
from dsv4.integrations.flash_mla import flash_mla_with_kvcache
from dsv4.runtime import operators as ops
from dsv4.runtime import repeat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(suites.gpu_arch() not in suites.ARCHS, reason="needs a GPU that dsv4 has kernels for"),
]


def tensors() -> dict:
    """Calls by name, with tensors of their own."""
    pool = dsv4.Fp8Cache.pack(torch.randn(4096, 512, device="cuda"), rows_per_page=64)
    q = torch.randn(1, 64, 512, device="cuda").bfloat16()
    window, compressed = (torch.randint(0, 4096, (1, n), dtype=torch.int32, device="cuda") for n in (128, 512))
    sink = torch.randn(64, device="cuda")
    pages = pool.storage.as_strided((64, 64, 1, 584), (pool.page_stride, 584, 584, 1))
    k = torch.randn(64, 64, 1, 512, device="cuda").bfloat16()
    table = torch.randperm(64, device="cuda").int()[None]
    lengths = torch.full((1,), 4000, dtype=torch.int32, device="cuda")
    x, y, z = (torch.randn(1, 128, 8, 128, device="cuda").bfloat16() for _ in range(3))
    plan = dsv4.plan(dsv4.v4_attention, batch=1, q_heads=64, kv_heads=1, head_dim=512, max_seqlen_k=640)
    out = torch.empty_like(q)
    listed = (q, pool, window, pool, compressed)
    return {
        "v4": lambda: dsv4.v4_attention(*listed, sink=sink),
        "v4 with out and plan": lambda: dsv4.v4_attention(*listed, sink=sink, out=out, plan=plan),
        "fmha": lambda: dsv4.fmha(x, y, z, causal=True),
        "fmha_paged": lambda: dsv4.fmha_paged(q[:, None], k, k, table, lengths),
        "flash_mla": lambda: flash_mla_with_kvcache(
            q[:, None], pages, None, None, 512, is_fp8_kvcache=True, indices=window[:, None], attn_sink=sink,
            extra_k_cache=pages, extra_indices_in_kvcache=compressed[:, None],
        )[0],
    }  # fmt: skip


def test_the_short_way_gives_the_bits_of_the_long_one(monkeypatch):
    torch.manual_seed(7)
    first, second = tensors(), tensors()
    for name, call in second.items():
        with monkeypatch.context() as patched:
            patched.setattr(repeat, "key_of", lambda *_: None)
            want = call().clone()
        first[name]()
        with monkeypatch.context() as patched:
            patched.setattr(ops, "_call", None)  # the long way goes through here
            assert torch.equal(call(), want), name
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = second["v4"]()
    graph.replay()
    assert torch.equal(out, second["v4"]())
