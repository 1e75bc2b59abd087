"""The experts' kernels on a CPU, through softsm."""

import importlib
from dataclasses import replace
from functools import partial

import launches
import moe_cases
import planted
import pytest
import torch

import dsv4
import softsm
from dsv4.moe import problem
from dsv4.moe.kernels import prepare
from dsv4.moe.kernels.sm90 import entry
from dsv4.runtime import calls, checks, dispatch

kernel = partial(moe_cases.kernel, "sm_90a")


@pytest.mark.compile
def test_experts_with_many_rows_with_few_and_with_none():
    """Two tiles of rows of one expert, a row without a token, an expert without a row; each token has its bits in
    another batch."""
    experts = moe_cases.layer(h=256).experts
    moe_cases.check_many_rows_few_and_none(kernel, experts, moe_cases.tokens(9, k=2), some=[8, 4])


@pytest.mark.compile
@pytest.mark.parametrize("at_once", [True, False])
def test_numbers_out_of_range_count_as_none(at_once, monkeypatch):
    """Where no values are checked, as on a GPU: nothing is read out of bounds, which softsm would name."""
    if not at_once:
        monkeypatch.setattr(prepare, "SORTED_AT_ONCE", 0)
    experts, given = moe_cases.layer().experts, moe_cases.tokens(9, k=2)
    given["ids"] = given["ids"].long()
    given["ids"][[0, 3, 8], [0, 1, 0]] = -1
    want = kernel(experts, given)
    monkeypatch.setattr(checks, "values_checked", lambda *_: False)
    given["ids"][[0, 3, 8], [0, 1, 0]] = torch.tensor([4, -7, (1 << 32) + 1])
    assert torch.equal(kernel(experts, given), want)


@pytest.mark.slow
def test_slots_that_are_sorted_in_pieces(monkeypatch):
    """More than one piece, as for many tokens, gives the same bits as the one launch for few."""
    experts, given = moe_cases.layer().experts, moe_cases.tokens(150, k=2)
    given["ids"][[0, 75, 149], [0, 1, 0]] = -1
    at_once = kernel(experts, given)
    monkeypatch.setattr(prepare, "SORTED_AT_ONCE", 0)
    calls.forget()
    assert torch.equal(kernel(experts, given, order="latest"), at_once)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiling, tokens", [((16,), 40), ((64,), 40), ((16, 8), 40), ((64, 32), 110), ((64, 32, True), 140), ((128,), 90)]
)
def test_wider_tiles(tiling, tokens, monkeypatch):
    """Tiles that are full, with all rows of the first part and some of the rest, and with few."""
    monkeypatch.setattr(entry, "TILINGS", ((float("inf"), entry.Tiling(*tiling)),))
    experts, given = moe_cases.layer(e=3, h=512, i=256).experts, moe_cases.tokens(tokens, h=512, e=3, k=2)
    given["ids"][5:, 0] = 2
    given["ids"][5:, 1] = 0
    shared = (torch.randn(2 * 128, 512) * 0.05).bfloat16(), (torch.randn(512, 128) * 0.1).bfloat16()
    out = kernel(experts, given, order="latest", shared=shared)
    moe_cases.assert_right(out, None, experts, given, shared=shared)
    assert torch.equal(out, kernel(experts, given, shared=shared))


@pytest.mark.slow
@pytest.mark.parametrize("w", [8, 16, 32])
def test_four_roles_and_two(w, monkeypatch):
    """Right in every order, and the same bits."""
    monkeypatch.setattr(entry, "TILINGS", ((float("inf"), entry.Tiling(w)),))
    experts, given = moe_cases.layer(e=3, h=512, i=256).experts, moe_cases.tokens(21, h=512, e=3, k=2)
    given["ids"][5:, 0] = 2
    monkeypatch.setattr(entry, "NARROW_ROWS", 0)
    calls.forget()
    two = kernel(experts, given)
    monkeypatch.setattr(entry, "NARROW_ROWS", w)
    calls.forget()
    for order in ("eager", "latest", "random"):
        assert torch.equal(kernel(experts, given, order=order), two)
    moe_cases.assert_right(two, None, experts, given)


@pytest.mark.slow
@pytest.mark.parametrize("sms", [1, 3])
def test_fewer_ctas_resident_than_launched(sms, monkeypatch):
    """Product 2 waits for hidden values that have lower tickets, so never for a CTA that has no place yet."""
    launches.num_sms(monkeypatch, 7)
    experts, given = moe_cases.layer(h=512, i=256).experts, moe_cases.tokens(9, h=512, k=2)
    moe_cases.assert_right(kernel(experts, given, sms=sms), None, experts, given)


BUGS = {
    "no fence": ("products", "        fence_async()\n", "", "fence.proxy.async"),
    "hidden values not waited for": ("products", "return wanted - ", "return 0 * wanted - ", ""),
    "decoded weights without a fence": ("wide", "        fence_async_shared()\n", "", "fence.proxy.async"),
    "a slot is filled too early": ("wide", "        unused.wait(to.index, to.phase ^ 1)\n", "", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("module, line, instead, fix", BUGS.values(), ids=BUGS.keys())
def test_races_are_named(module, line, instead, fix, monkeypatch, tmp_path):
    wide = module == "wide"
    module = importlib.import_module(f"dsv4.moe.kernels.sm90.{module}")
    kernel, tokens = ("moe_products_wide_sm90", 80) if wide else ("moe_products_sm90", 9)
    planted.plant(monkeypatch, tmp_path, module, kernel, (line, instead))
    monkeypatch.setattr(entry, kernel, getattr(module, kernel))
    if wide:
        monkeypatch.setattr(entry, "TILINGS", ((float("inf"), entry.Tiling(128)),))
    experts, given = moe_cases.layer(h=512, i=256).experts, moe_cases.tokens(tokens, h=512, k=2)
    given["ids"][5:, 0] = 1
    given["ids"][5:, 1] = 2
    calls.forget()
    with softsm.use("sm_90a", sms=3), softsm.checking(order="random") as report:
        dsv4.moe(**given, experts=experts, backend="softsm")
    calls.forget()
    assert any(x.code == "race" and fix in x.fix for x in report), str(report)


def test_no_number_makes_a_variant():
    """Triton compiles a plain argument of 1 in: a kernel for narrow tokens would then be wrong for wide ones. Numbers
    are members of structs, which are compiled with neutral ones."""
    experts, given = moe_cases.layer().experts, moe_cases.tokens(3)
    p = problem.build(
        given["x"], experts.w13, experts.w2, given["ids"], given["weights"], w13_scales=experts.w13_scales,
        w2_scales=experts.w2_scales, w13_factors=experts.w13_factors, w2_factors=experts.w2_factors,
    )  # fmt: skip
    found = calls.launches_of(replace(p, out=torch.empty_like(p.x)), dispatch.compile_target("sm_90a"))
    assert len(found) == 3
    for launch in found:
        assert not any(isinstance(x, (int, float)) for x in launch.arguments), launch.kernel.__name__


def test_what_the_kernels_do_not_take():
    given = moe_cases.tokens(3)
    experts = moe_cases.layer(nvfp4=True).experts
    wide = moe_cases.layer(low=100, high=126).experts
    for one, options, says in (
        (experts, {}, "weights in nvfp4"),
        (wide, {}, "exponents that spread by"),
        (moe_cases.layer().experts, dict(activations="fp8_token"), "activations 'fp8_token'"),
        (moe_cases.layer(layout="sm100").experts, {}, "weights in the layout 'sm100'"),
    ):
        with (
            softsm.use("sm_90a"),
            pytest.raises(ValueError, match=f"^backend: 'softsm' cannot run this moe problem: .*{says}"),
        ):
            dsv4.moe(**given, experts=one, backend="softsm", **options)
