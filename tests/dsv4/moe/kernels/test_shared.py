"""The shared expert's kernels between torch's products: the numbers of the recipe."""

from dataclasses import replace

import launches
import moe_cases
import pytest
import torch

from dsv4.moe import cpu, plan
from dsv4.moe.kernels import prepare
from dsv4.runtime import dispatch
from dsv4.runtime.launch import Ready
from dsv4.runtime.program import Program


@pytest.mark.parametrize("activations", ["fp8_128", "fp8_32"])
def test_numbers_are_those_of_the_torch_code(activations):
    """Alone, from x whose rows lie apart; the memory was NaN before."""
    torch.manual_seed(0)
    t, h, inner = 5, 384, 256
    x = (torch.randn(t, 2 * h) * torch.logspace(-3, 2, t)[:, None]).bfloat16()[:, :h]
    x[2] = 0
    w13, w2 = (torch.randn(2 * inner, h) * 0.1).bfloat16(), (torch.randn(h, inner) * 0.1).bfloat16()
    x[:, 32:64] *= 2**-12  # which a scale for 128 columns makes coarse
    w13[:, 32:64] *= 2**12
    p = plan.without_memory((t, 2, 4, 768, 128), "sm90", ("mxfp4", "fp8_128"), False, False)
    p = replace(p, x=x, shared_w13=w13, shared_w2=w2, options=p.options._replace(activations=activations, limit=3.0))
    got = torch.full((t, h), float("nan"), dtype=torch.bfloat16)
    with launches.race_free("sm_90a"):
        program = Program(dict(x=x, w13=w13, w2=w2, got=got), x.device)
        slots = replace(p, x=program.slots[0], shared_w13=program.slots[1], shared_w2=program.slots[2])
        program.copy(program.slots[3], prepare.prepare_shared(slots, program))
        memory = [x, w13, w2, got]
        Ready(program, dispatch.softsm_target()).run(memory, [y.data_ptr() for y in memory])
    want = cpu.shared(p).double()
    assert not got[2].any()
    assert (got.double() - want).norm() <= 2**-8 * want.norm()
    other_recipe = p.options._replace(activations="fp8_32" if activations == "fp8_128" else "fp8_128")
    other = cpu.shared(replace(p, options=other_recipe)).double()
    assert (other - want).norm() > 2**-7 * want.norm()  # the recipe is seen


@pytest.mark.compile
def test_in_a_layer():
    experts, given = moe_cases.layer().experts, moe_cases.tokens(9)
    shared = (torch.randn(2 * 128, 256) * 0.05).bfloat16(), (torch.randn(256, 128) * 0.1).bfloat16()
    out = moe_cases.kernel("sm_90a", experts, given, shared=shared)
    moe_cases.assert_right(out, None, experts, given, shared=shared)
