"""V4 attention on the GPU: the suite, and shapes that only a GPU has time for."""

import os

import pytest
import torch
from agreement import assert_agrees

import dsv4
from dsv4 import reference, suites

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(suites.gpu_arch() not in suites.ARCHS, reason="needs a GPU that dsv4 has kernels for"),
]
SEED = int(os.environ.get("DSV4_SEED", "0"))


@pytest.mark.parametrize("case", suites.v4(), ids=str)
def test_suite(case):
    result = suites.run_case(case, suites.Where("cuda").resolve(), SEED)
    assert result.ok, f"seed {SEED}: {result.why()}"


@pytest.mark.parametrize("store", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("queries, heads", [(1, 64), (300, 64), (300, 128)])
def test_model_shapes(queries, heads, store):
    """128 window rows and 512 compressed ones per query, as a CSA layer has; twice the same bits."""
    generator = torch.Generator("cuda").manual_seed(SEED)
    dtype = torch.float16 if store == "fp16" else torch.bfloat16
    rows = torch.randn(20_000, 512, device="cuda", generator=generator).to(dtype)
    pool = dsv4.Fp8Cache.pack(rows) if store == "fp8" else rows
    plain = pool.unpack()[: len(rows)] if store == "fp8" else rows
    q = torch.randn(queries, heads, 512, device="cuda", generator=generator).to(dtype)
    window = torch.randint(-1, 20_000, (queries, 128), device="cuda", generator=generator).int()
    picked = torch.randint(-1, 20_000, (queries, 512), device="cuda", generator=generator).int()
    sink = torch.randn(heads, device="cuda", generator=generator)
    out, lse = dsv4.v4_attention(q, pool, window, pool, picked, sink=sink, return_lse=True)
    again = dsv4.v4_attention(q, pool, window, pool, picked, sink=sink)
    assert torch.equal(out, again)
    some = torch.arange(0, queries, 37)
    few = q[some], plain, window[some], plain, picked[some]
    assert_agrees((out[some], lse[some]), reference.v4_attention, *few, sink=sink)


def test_a_warmed_up_plan_has_room_for_deterministic_calls():
    plan = dsv4.warmup(dsv4.v4_attention, batch=3, q_heads=64, kv_heads=1, head_dim=512, max_seqlen_k=640, fp8=False)
    q = torch.randn(3, 64, 512, device="cuda").bfloat16()
    rows = torch.randn(1000, 512, device="cuda").bfloat16()
    window, listed = (torch.randint(0, 1000, (3, n), device="cuda").int() for n in (128, 512))
    want = dsv4.v4_attention(q, rows, window, rows, listed, deterministic=True)
    assert torch.equal(dsv4.v4_attention(q, rows, window, rows, listed, deterministic=True, plan=plan), want)
