"""The router's kernels on a CPU, through softsm."""

import launches
import pytest
import torch

import dsv4
import softsm
from dsv4 import reference
from dsv4.kernels.compat import TRITON_VERSION
from dsv4.moe.kernels import prepare
from dsv4.runtime import calls

OPTIONS = dict(topk=4, scale=2.5)


def kernel(x, gate, arch="sm_90a", **given):
    with launches.race_free(arch, order="random"):
        found = dsv4.moe_route(x, gate, **given, **OPTIONS, backend="softsm")
    return found


def assert_right(got, *given, **options):
    ids, weights = reference.moe_route(*given, **options, **OPTIONS)
    assert torch.equal(got[0].long(), ids)
    torch.testing.assert_close(got[1].double(), weights, rtol=1e-5, atol=0)  # fp32, as on a CPU


def inputs(size=0.2):
    """A width and numbers of tokens and experts that fill no tile; logits from large to far below 0."""
    return torch.randn(19, 328).bfloat16(), (torch.randn(45, 328) * size).bfloat16()


def test_learned_choices():
    x, gate = inputs()
    bias = torch.randn(45) * 0.3
    assert_right(kernel(x, gate, bias=bias), x, gate, bias)


@pytest.mark.slow
def test_tokens_have_their_bits_in_every_batch(monkeypatch):
    x, gate = inputs()
    bias = torch.randn(45) * 0.3
    few = kernel(x, gate, bias=bias)
    monkeypatch.setattr(prepare, "FEW_TOKENS", 0)  # as if there were many
    calls.forget()
    many = kernel(x[7:], gate, bias=bias)
    assert all(torch.equal(a, b[7:]) for a, b in zip(many, few))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_hash_layers_images_and_wide_logits(arch):
    if arch == "sm_100a" and TRITON_VERSION < (3, 9):
        pytest.skip("the Blackwell kernels need triton >= 3.9")
    x, gate = inputs(0.5)
    table, tokens = torch.randint(0, 45, (50, 4)), torch.randint(0, 50, (19,))
    given = dict(table=table, token_ids=tokens, bias_vl=torch.randn(45) * 3, image=torch.rand(19) > 0.5)
    assert_right(kernel(x, gate, arch, **given), x, gate, **given)


def test_what_the_kernels_do_not_take():
    with softsm.use("sm_90a"), pytest.raises(ValueError, match="cannot run this moe problem: x torch.float32"):
        dsv4.moe_route(torch.randn(2, 64), torch.randn(9, 64), backend="softsm")
