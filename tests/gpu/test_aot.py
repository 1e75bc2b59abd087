"""Kernels compiled ahead of time, launched through the CUDA driver: the bits of those that Triton launches."""

import pytest
import torch

import dsv4
from dsv4 import suites
from dsv4.commands.variants import problems
from dsv4.runtime import aot, calls, dispatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(suites.gpu_arch() != "sm_90a", reason="needs a Hopper GPU")]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What head dims 128 and 512 need for paged decode, with split keys."""
    directory = tmp_path_factory.mktemp("aot")
    for head_dim in (128, 512):
        for p in problems(head_dim, "bf16", "paged", "split"):
            for launch in calls.launches_of(p, dispatch.compile_target("sm_90a")):
                aot.write(directory, launch.kernel, launch.arguments, launch.constants)
    return directory


@pytest.mark.parametrize("head_dim", [128, 512])
def test_the_same_bits_as_launched_by_triton(compiled, head_dim):
    k = torch.randn(40, 64, 1, head_dim, device="cuda", dtype=torch.bfloat16)
    v = k if head_dim == 512 else torch.randn_like(k)
    q = torch.randn(2, 1, 8, head_dim, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(40, device="cuda").to(torch.int32).view(2, 20)
    lengths = torch.tensor([1280, 777], dtype=torch.int32, device="cuda")
    plan = dsv4.plan(dsv4.fmha_paged, batch=2, q_heads=8, kv_heads=1, head_dim=head_dim, max_seqlen_k=1280)
    want = dsv4.fmha_paged(q, k, v, table, lengths, plan=plan)
    dispatch.use_aot(compiled, only=True)
    try:
        got = dsv4.fmha_paged(q, k, v, table, lengths, plan=plan)
    finally:
        dispatch.use_aot(None)
    assert torch.equal(got, want)
