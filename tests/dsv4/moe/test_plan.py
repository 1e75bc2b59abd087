"""A plan for moe: what it reserves is what the kernels use, and a call with it allocates nothing between them."""

from dataclasses import replace

import moe_cases
import pytest
import torch

import dsv4
import softsm
from dsv4.moe import plan, problem
from dsv4.runtime import dispatch
from dsv4.runtime.plan import Capacities
from dsv4.runtime.program import Program, tensors_of

SIZES = dict(batch=9, q_heads=3, kv_heads=4, head_dim=256, max_seqlen_k=128)


def planned(arch):
    """A plan as a GPU would get it, filled with NaN."""
    words = plan.words(Capacities(**SIZES, max_seqlen_q=1), dispatch.compile_target(arch))
    return replace(dsv4.plan(dsv4.moe, **SIZES, device="cpu"), scratch=torch.full((words,), float("nan")))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_all_workspace_is_in_the_plan(arch, tokens):
    experts, given = moe_cases.layer(layout=arch[:-1].replace("_", "")).experts, moe_cases.tokens(tokens)
    p = problem.build(given["x"], ids=given["ids"], weights=given["weights"], **experts.tensors, layout=experts.layout)
    target = dispatch.compile_target(arch)
    for scratch, count in ((planned(arch).scratch, 0), (None, None), (torch.empty(64), None)):
        q = replace(p, out=torch.empty_like(p.x), scratch=scratch)
        program = Program(tensors_of(q), p.x.device)
        dispatch.kernel_module("moe", target.capability).prepare(program.slots_of(q), target, program)
        assert len(program.buffers) == count if count is not None else program.buffers
        assert program.taken <= 4 * (0 if scratch is None else scratch.numel())


@pytest.mark.parametrize("experts, topk", [(256, 6), (384, 6), (8, 2)])
def test_a_plan_is_enough_for_fewer_tokens(experts, topk):
    """Also where more tokens have lower tiles."""
    sizes = dict(q_heads=topk, kv_heads=experts, head_dim=512, max_seqlen_k=256, max_seqlen_q=1)
    target = dispatch.compile_target("sm_90a")
    rows = (1, 1.6, 13, 14, 24, 25, 60, 61, 99, 101, 133, 135, 150, 187, 189, 220, 400)
    words = [plan.words(Capacities(batch=int(n * experts / topk), **sizes), target) for n in rows]
    assert words == sorted(words)


@pytest.mark.compile
def test_the_same_bits_with_a_plan():
    experts, given = moe_cases.layer().experts, moe_cases.tokens(9)
    made = planned("sm_90a")
    want = moe_cases.kernel("sm_90a", experts, given)
    for _ in range(2):  # the second finds what the first has left there
        assert torch.equal(moe_cases.kernel("sm_90a", experts, given, plan=made), want)
    with softsm.use("sm_90a"):
        fewer = {name: x[:4] for name, x in given.items()}
        assert torch.equal(dsv4.moe(**fewer, experts=experts, plan=made, backend="softsm"), want[:4])


def test_a_cpu_takes_a_plan():
    experts, given = moe_cases.layer().experts, moe_cases.tokens(9)
    made = dsv4.plan(dsv4.moe, **SIZES, device="cpu")
    assert made.scratch.numel() == 0
    assert torch.equal(dsv4.moe(**given, experts=experts, plan=made), dsv4.moe(**given, experts=experts))


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(batch=8), "batch=8.*at least 9"),
        (dict(q_heads=2), "q_heads=2.*q_heads=3"),
        (dict(kv_heads=5), "kv_heads=5.*kv_heads=4"),
        (dict(max_seqlen_k=64), "max_seqlen_k=64.*at least 128"),
    ],
)
def test_a_plan_that_does_not_fit(change, says):
    experts, given = moe_cases.layer().experts, moe_cases.tokens(9)
    made = dsv4.plan(dsv4.moe, **SIZES | change, device="cpu")
    with softsm.use("sm_90a"), pytest.raises(ValueError, match=f"^plan: .*{says}"):
        dsv4.moe(**given, experts=experts, plan=made, backend="softsm")


def test_there_is_no_warmup():
    """It would need weights."""
    with pytest.raises(ValueError, match=r"^operation: .*moe.*dsv4\.index_topk"):
        dsv4.warmup(dsv4.moe, **SIZES)
