"""A layer of experts on a GPU: right, and a token's bits depend neither on its batch nor on how tiles are cut."""

import functools

import moe_cases
import pytest
import torch

import dsv4
from dsv4 import suites
from dsv4.runtime import calls, dispatch

LAYOUT = "sm90" if suites.gpu_arch() == "sm_90a" else "sm100"
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def layer():
    """Long sums and many experts, so that CTAs have several tiles."""
    torch.manual_seed(0)
    experts = moe_cases.layer(48, 2048, 1024, low=114, high=120, layout=LAYOUT).experts.to("cuda")
    return experts, {name: x.cuda() for name, x in moe_cases.tokens(300, 2048, 48, 6).items()}


def some(given, rows):
    return {name: x[rows].contiguous() for name, x in given.items()}


def test_against_the_oracle(layer):
    experts, given = layer
    given = some(given, slice(40, 52))
    given["ids"][3, 1] = -1
    out, slots = dsv4.moe(**given, experts=experts, return_slots=True, backend="cuda")
    on_cpu = {name: x.cpu() for name, x in given.items()}
    moe_cases.assert_right(out.cpu(), slots.cpu(), experts.to("cpu"), on_cpu)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(17, 25), slice(100, 300)])
def test_bits_in_every_batch(layer, rows):
    experts, given = layer
    whole = dsv4.moe(**given, experts=experts, backend="cuda")
    assert torch.equal(dsv4.moe(**some(given, rows), experts=experts, backend="cuda"), whole[rows])


@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x55])
@pytest.mark.parametrize("tokens", [1, 8, 120, 300])
def test_memory_may_hold_anything(layer, tokens, byte, monkeypatch):
    """What a call allocates, the memory of a plan, and the output, in calls and replays of graphs: the same bits."""
    experts, given = layer
    given = some(given, slice(0, tokens))
    given["ids"][-1, 2] = -1
    want = dsv4.moe(**given, experts=experts, return_slots=True, backend="cuda")
    moe_cases.poison(monkeypatch, byte)
    got = dsv4.moe(**given, experts=experts, return_slots=True, backend="cuda")
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    out = torch.empty_like(given["x"])
    plan = dsv4.plan(dsv4.moe, batch=tokens, q_heads=6, kv_heads=48, head_dim=2048, max_seqlen_k=1024)
    for options in ({}, dict(deterministic=True), dict(plan=plan)):
        call = functools.partial(dsv4.moe, **given, experts=experts, out=out, backend="cuda", **options)
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        for run in (call, graph.replay, graph.replay):
            moe_cases.filled(out, byte), moe_cases.filled(plan.scratch, byte)
            run()
            assert torch.equal(out, want[0])


@pytest.mark.skipif(LAYOUT != "sm90", reason="these are tilings of the Hopper kernel")
@pytest.mark.parametrize("tokens", [1, 8, 32, 300])
@pytest.mark.parametrize("most_stages", [3, 5, 10])
@pytest.mark.parametrize("tiling", [(8,), (32,), (64,), (64, 32), (64, 32, True), (128,)])
def test_bits_with_every_tiling(layer, tokens, most_stages, tiling, monkeypatch):
    experts, given = layer
    given = some(given, slice(0, tokens))
    want = dsv4.moe(**given, experts=experts, return_slots=True, backend="cuda")
    entry = dispatch.kernel_module("moe", (9, 0))
    monkeypatch.setattr(entry, "TILINGS", ((float("inf"), entry.Tiling(*tiling)),))
    monkeypatch.setattr(entry, "MOST_STAGES", most_stages)
    calls.forget()
    got = dsv4.moe(**given, experts=experts, return_slots=True, backend="cuda")
    calls.forget()
    assert torch.equal(got[1], want[1]) and torch.equal(got[0], want[0])


def test_the_router_has_its_bits_in_every_batch():
    x, gate = torch.randn(1000, 4096, device="cuda").bfloat16(), torch.randn(256, 4096, device="cuda").bfloat16() * 0.02
    bias = torch.randn(256, device="cuda") * 0.05
    whole = dsv4.moe_route(x, gate, bias=bias, backend="cuda")
    for rows in (slice(0, 1), slice(5, 133), slice(0, 129)):
        part = dsv4.moe_route(x[rows], gate, bias=bias, backend="cuda")
        assert torch.equal(part[0], whole[0][rows]) and torch.equal(part[1], whole[1][rows])


@pytest.mark.parametrize("shared", [False, True])
def test_in_a_graph(layer, shared):
    experts, given = layer
    mlp = (torch.randn(256, 2048) * 0.02).bfloat16().cuda(), (torch.randn(2048, 128) * 0.1).bfloat16().cuda()
    options = dict(experts=experts, shared=mlp if shared else None, backend="cuda")
    want, out = dsv4.moe(**given, **options), torch.empty_like(given["x"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dsv4.moe(**given, **options, out=out)
    graph.replay()
    assert torch.equal(out, want)


def test_the_shared_expert_against_the_oracle(layer):
    experts, given = layer
    given = some(given, slice(40, 52))
    shared = (torch.randn(256, 2048) * 0.02).bfloat16(), (torch.randn(2048, 128) * 0.1).bfloat16()
    out = dsv4.moe(**given, experts=experts, shared=tuple(x.cuda() for x in shared), backend="cuda")
    on_cpu = {name: x.cpu() for name, x in given.items()}
    moe_cases.assert_right(out.cpu(), None, experts.to("cpu"), on_cpu, shared=shared)


@pytest.mark.parametrize("tokens", [9, 300])
def test_numbers_out_of_range_in_a_graph(layer, tokens):
    """They count as none, whatever the replay finds: a capture makes numbers that have no values yet."""
    experts, given = layer
    given = some(given, slice(0, tokens))
    ids, given["ids"] = given["ids"].long(), torch.empty_like(given["ids"]).long()
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(given["x"])
    given["ids"].copy_(ids)
    plan = dsv4.plan(dsv4.moe, batch=300, q_heads=6, kv_heads=48, head_dim=2048, max_seqlen_k=1024)
    dsv4.moe(**given, experts=experts, out=out, plan=plan, backend="cuda")
    with torch.cuda.graph(graph):
        dsv4.moe(**given, experts=experts, out=out, plan=plan, backend="cuda")
    wrong = torch.rand(tokens, 6, device="cuda") < 0.3
    for number in (48, -7, 1 << 40, (1 << 32) + 1):
        given["ids"].copy_(ids.masked_fill(wrong, number))
        graph.replay()
        assert torch.equal(out, dsv4.moe(**given | dict(ids=ids.masked_fill(wrong, -1)), experts=experts))
