import inspect

import moe_cases
import pytest
import torch
import wrong
from torch.library import opcheck

import dsv4
from dsv4 import reference

GATE = dict(topk=3, scale=2.5)


def test_learned_layers_choose_by_bias_and_weigh_by_scores():
    x, gate, bias = torch.randn(20, 64).bfloat16(), torch.randn(16, 64).bfloat16(), torch.randn(16)
    ids, weights = dsv4.moe_route(x, gate, bias=bias, **GATE)
    want_ids, want = reference.moe_route(x, gate, bias, **GATE)
    assert ids.dtype == torch.int32 and torch.equal(ids.long(), want_ids)
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=0)
    assert not torch.equal(ids, dsv4.moe_route(x, gate, **GATE)[0])  # the bias counts


def test_of_equal_experts_the_lower_one_comes_first():
    x, gate = torch.randn(5, 64), torch.randn(1, 64).repeat(9, 1)
    assert dsv4.moe_route(x, gate, topk=4)[0].tolist() == [[0, 1, 2, 3]] * 5


def test_hash_layers_and_images():
    x, gate, table = torch.randn(6, 64), torch.randn(16, 64), torch.randint(0, 16, (50, 3))
    tokens, image = torch.randint(0, 50, (6,)), torch.tensor([0, 1, 0, 0, 1, 1]).bool()
    more = dict(table=table, token_ids=tokens, bias_vl=torch.randn(16) * 3, image=image)
    for given in (dict(table=table, token_ids=tokens), more, more | dict(table=None, token_ids=None)):
        ids, weights = dsv4.moe_route(x, gate, **given, **GATE)
        want_ids, want = reference.moe_route(x, gate, **given, **GATE)
        assert torch.equal(ids.long(), want_ids)
        torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=0)


def test_wrong_arguments_of_the_router():
    x, gate = torch.randn(6, 64), torch.randn(16, 64)
    right = dict(x=x, gate=gate, bias_vl=torch.zeros(16), image=torch.zeros(6).bool(), topk=3, scale=1.0, eps=0.0,
                 table=torch.zeros(9, 3).int(), token_ids=torch.zeros(6).int(), backend="cpu")  # fmt: skip
    wrong.each_in_turn("moe_route", dsv4.moe_route, right)
    with pytest.raises(ValueError, match="^bias: got .*a hash layer has no bias"):
        dsv4.moe_route(**right, bias=torch.zeros(16))
    with pytest.raises(ValueError, match="^table: got values from 0 to 16; accepted: values from 0 to 15"):
        dsv4.moe_route(**right | dict(table=torch.tensor([[0, 1, 16]] * 9)))


@pytest.mark.parametrize("recipe", ["fp8_128", "fp8_32", "fp8_token", "nvfp4", "bf16"])
def test_moe_is_the_oracle_rounded(recipe):
    experts, given = moe_cases.layer(e=3).experts, moe_cases.tokens(5, e=3, k=2)
    given["ids"][3, 1] = given["ids"][4, 0] = -1
    shared = (torch.randn(2 * 128, 256) * 0.05).bfloat16(), (torch.randn(256, 128) * 0.1).bfloat16()
    out, slots = dsv4.moe(**given, experts=experts, activations=recipe, return_slots=True, shared=shared)
    moe_cases.assert_right(out, slots, experts, given, recipe, shared=shared)
    assert not slots[3, 1].any() and not slots[4, 0].any()


def test_nvfp4_and_a_low_limit():
    experts, given = moe_cases.layer(nvfp4=True).experts, moe_cases.tokens(5)
    out = dsv4.moe(**given, experts=experts, limit=0.25)
    moe_cases.assert_right(out, None, experts, given, limit=0.25)
    assert moe_cases.relative(out, dsv4.moe(**given, experts=experts).double()) > 0.1  # the limit counts


def test_tokens_have_their_bits_in_every_batch_and_out_is_written():
    experts, given = moe_cases.layer().experts, moe_cases.tokens(12)
    whole = dsv4.moe(**given, experts=experts, deterministic=True)
    part = {name: x[7:10] for name, x in given.items()}
    out = torch.full((3, 256), float("nan")).bfloat16()
    assert dsv4.moe(**part, experts=experts, deterministic=True, out=out) is out
    assert torch.equal(out, whole[7:10])


def test_no_token_and_no_expert():
    experts = moe_cases.layer().experts
    assert dsv4.moe(**moe_cases.tokens(0), experts=experts).shape == (0, 256)
    given = moe_cases.tokens(2)
    given["ids"][:] = -1
    assert not dsv4.moe(**given, experts=experts).any()


def test_wrong_arguments():
    given = moe_cases.tokens(4, dtype=torch.float32)
    weights = torch.randn(4, 256, 256), torch.randn(4, 256, 128)
    shared = torch.randn(64, 256), torch.randn(256, 32)
    right = dict(experts=weights, activations="bf16", limit=3.0, shared=shared, return_slots=True, deterministic=False,
                 out=torch.zeros(4, 256), backend="cpu", **given)  # fmt: skip
    wrong.each_in_turn("moe", dsv4.moe, right)
    with pytest.raises(ValueError, match="^ids: got values from -2 to"):
        dsv4.moe(**right | dict(ids=given["ids"].index_fill(0, torch.tensor([1]), -2)))
    with pytest.raises(ValueError, match="^experts: got weights for hidden size 512; accepted: 256, as x"):
        dsv4.moe(**right | dict(experts=moe_cases.layer(h=512).experts))
    assert "fp8_128" in str(inspect.signature(dsv4.moe))


def operands():
    named, given = dict(moe_cases.layer().experts.tensors), moe_cases.tokens(4)
    return (given["x"], named.pop("w13"), named.pop("w2"), given["ids"], given["weights"]), named


def test_operators():
    places, named = operands()
    halves = {name: x[::2] if name.startswith("w2") else x[:2] for name, x in named.items()}
    with pytest.raises(ValueError, match="^experts.w2: got strides .*; accepted: a contiguous tensor"):
        torch.ops.dsv4.moe(places[0], places[1][:2], places[2][::2], *places[3:], **halves)
    quick = ("test_schema", "test_faketensor")  # test_compiled has the rest
    opcheck(torch.ops.dsv4.moe.default, places, named, test_utils=quick)
    out = dict(out=torch.empty(4, 256).bfloat16(), slots=torch.empty(4, 3, 256).bfloat16())
    opcheck(torch.ops.dsv4.moe_out.default, places, named | out, test_utils=quick)
    route = torch.ops.dsv4.moe_route.default
    opcheck(route, (torch.randn(4, 64), torch.randn(9, 64)), dict(return_weights=True), test_utils=quick)


@pytest.mark.slow
def test_compiled():
    experts, given = moe_cases.layer().experts, moe_cases.tokens(4)
    compiled = torch.compile(lambda **x: dsv4.moe(experts=experts, **x), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**given), dsv4.moe(experts=experts, **given))
