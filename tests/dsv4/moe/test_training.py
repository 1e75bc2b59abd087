import moe_cases
import pytest
import torch

import dsv4
from dsv4 import reference


def parameters(e=4, h=64, i=32, s=16):
    sizes = ((e, 2 * i, h), (e, h, i), (2 * s, h), (h, s))
    return [(torch.randn(x) * 0.3).requires_grad_() for x in sizes]


def test_gradients_are_those_of_autograd_on_the_oracle():
    w13, w2, *shared = parameters()
    given = moe_cases.tokens(9, h=64, dtype=torch.float32)
    given["ids"][2, 1] = -1
    x, weights = given["x"].requires_grad_(), given["weights"].requires_grad_()
    options = dict(limit=1.0, shared=tuple(shared))  # both bounds of SwiGLU hold some back
    out = dsv4.moe(**given, experts=(w13, w2), activations="bf16", return_slots=True, **options)
    want = reference.moe(x, w13, w2, given["ids"], weights, **options)
    along = [torch.randn_like(y) for y in out]
    inputs = (x, w13, w2, weights, *shared)
    got = torch.autograd.grad(out, inputs, along)
    exact = torch.autograd.grad(want, inputs, [y.double() for y in along])
    for one, truth in zip(got, exact, strict=True):
        assert moe_cases.relative(one, truth.double()) < 2e-6


def test_fp4_weights_are_frozen_and_tokens_have_gradients():
    experts, given = moe_cases.layer(e=2).experts, moe_cases.tokens(2, e=2, k=1)
    x = given["x"].requires_grad_()
    dsv4.moe(**given, experts=experts, activations="bf16").float().sum().backward()
    other = x.detach().double().requires_grad_()
    w13, w2 = experts.dequantize(torch.float64)
    reference.moe(other, w13, w2, given["ids"], given["weights"])[0].sum().backward()
    assert moe_cases.relative(x.grad, other.grad) < 2**-8


def test_rounded_activations_have_no_gradient():
    given = moe_cases.tokens(5)
    given["x"].requires_grad_()
    with pytest.raises(
        ValueError, match="^activations: got 'fp8_128' with an input that requires grad; accepted: 'bf16'"
    ):
        dsv4.moe(**given, experts=moe_cases.layer().experts)


@pytest.mark.slow
def test_compiled_and_asked_for_one():
    w13, w2, *_ = parameters()
    given = moe_cases.tokens(6, h=64, dtype=torch.float32)

    def loss(w2):
        return dsv4.moe(**given, experts=(w13.detach(), w2), activations="bf16").square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(w2), w2)[0], torch.autograd.grad(loss(w2), w2)[0])
