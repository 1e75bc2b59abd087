"""Kernels compiled ahead of time, launched through the CUDA driver: the bits of those that Triton launches."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from agreement import assert_lse, assert_same

import dsv4
from dsv4 import suites
from dsv4.commands.variants import problems
from dsv4.kernels.compat import TRITON_VERSION
from dsv4.runtime import aot, calls, dispatch
from dsv4.runtime.settings import settings

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


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A directory with the kernel of two CTAs, which Triton 3.9 compiles: made here, or carried here."""
    p = next(problems(512, "bf16", "dense", "prefill"))
    launch, *_ = calls.launches_of(p, dispatch.compile_target("sm_90a", pair=True))
    kernel, arguments, constants = launch.kernel, launch.arguments, launch.constants
    if TRITON_VERSION >= (3, 9):
        return aot.write(tmp_path_factory.mktemp("pair"), kernel, arguments, constants).parent
    directory = Path(os.environ.get("DSV4_AOT", ""))
    name = aot.variant(kernel.__name__, [aot.argument_type(x) for x in arguments], constants)
    if not (directory / f"{name}.json").exists():
        pytest.skip("needs Triton 3.9 or newer, or DSV4_AOT with what its `dsv4 compile --head-dim 512` wrote")
    return directory


@pytest.mark.parametrize(
    "tokens, keys, q_heads, kv_heads, causal",
    [(1000, 1500, 4, 2, True), (4096, 4096, 2, 2, False), (65, 20000, 8, 8, True), (129, 77, 1, 1, False)],
)
def test_two_ctas_share_keys_and_values(pair, monkeypatch, tokens, keys, q_heads, kv_heads, causal):
    """Against one CTA, whose tests are many; bitwise equal from run to run."""
    q = torch.randn(2, tokens, q_heads, 512, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, keys, kv_heads, 512, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    plan = dsv4.plan(
        dsv4.fmha, batch=2, q_heads=q_heads, kv_heads=kv_heads, head_dim=512, max_seqlen_q=tokens, max_seqlen_k=keys
    )
    plan = replace(plan, num_splits=1)
    want, want_lse = dsv4.fmha(q, k, v, causal=causal, return_lse=True, plan=plan)
    monkeypatch.setattr(settings, "pair", True)
    dispatch.use_aot(pair, only=True)
    outs = []
    try:
        for _ in range(3):
            out = torch.full_like(q, float("nan"))
            outs.append(dsv4.fmha(q, k, v, causal=causal, return_lse=True, out=out, plan=plan))
    finally:
        dispatch.use_aot(None)
    for out, lse in outs:
        assert torch.equal(out, outs[0][0]) and torch.equal(lse, outs[0][1])
    out, lse = outs[0]
    assert_same(out, want)
    assert_lse(lse, want_lse)
