"""Many rows of an expert: the kernel by halves of a tile gives the bits of the one for few rows."""

from functools import partial

import moe_cases
import planted
import pytest
import torch

import dsv4
import softsm
from dsv4.moe import plan
from dsv4.moe.kernels.sm90 import entry, wide
from dsv4.runtime import calls, dispatch

kernel = partial(moe_cases.kernel, "sm_90a")


def use(monkeypatch, *tiling):
    monkeypatch.setattr(entry, "TILINGS", ((float("inf"), entry.Tiling(*tiling)),))
    calls.forget()


def layer_with_many_rows(tokens):
    """Two of three experts take nearly all rows."""
    experts, given = moe_cases.layer(e=3, h=512, i=256).experts, moe_cases.tokens(tokens, h=512, e=3, k=2)
    given["ids"][5:, 0] = 2
    given["ids"][5:, 1] = 0
    given["ids"][7, 1] = -1
    return experts, given


@pytest.mark.slow
@pytest.mark.parametrize("tokens, order", [(40, "random"), (180, "eager"), (300, "latest")])
@pytest.mark.parametrize("tiling", [(64, 4, True), (128, 2, True)])
def test_the_bits_of_narrow_tiles(tiling, tokens, order, monkeypatch):
    """Half of a tile's rows, three quarters, all of them and a second tile."""
    experts, given = layer_with_many_rows(tokens)
    use(monkeypatch, 8)
    want = kernel(experts, given, return_slots=True)
    moe_cases.assert_right(*want, experts, given)
    use(monkeypatch, *tiling)
    got = kernel(experts, given, order=order, return_slots=True)
    calls.forget()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


BUGS = {
    "no fence": ("        fence_async()\n", ""),
    "hidden values not waited for": ("first, shift, blocks, N, N) > 0", "first, shift, blocks, N, N) > 1000"),
    "a stage freed before its products": ("            if part + 1 == COUNT:\n", "            if part == 0:\n"),
    "maxima not waited for": ("        told.wait(0, turn)\n", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("line, instead", BUGS.values(), ids=BUGS.keys())
def test_races_are_named(line, instead, monkeypatch, tmp_path):
    planted.plant(monkeypatch, tmp_path, wide, "moe_wide_products_sm90", (line, instead))
    monkeypatch.setattr(entry, "moe_wide_products_sm90", wide.moe_wide_products_sm90)
    use(monkeypatch, 64, 4, True)
    experts, given = layer_with_many_rows(40)
    with softsm.use("sm_90a", sms=3), softsm.checking(order="random") as report:
        dsv4.moe(**given, experts=experts, backend="softsm")
    calls.forget()
    assert "race" in report.codes(), str(report)


@pytest.mark.parametrize("tiling, name", [((64,), "moe_products_sm90"), ((64, 4, True), "moe_wide_products_sm90")])
def test_which_kernel_a_tiling_takes(tiling, name, monkeypatch):
    use(monkeypatch, *tiling)
    p = plan.without_memory((700, 1, 4, 256, 128), "sm90", ("mxfp4", "fp8_128"), False, False)
    found = calls.launches_of(p, dispatch.compile_target("sm_90a"))
    assert [x.kernel.__name__ for x in found if "products" in x.kernel.__name__] == [name]
    assert all(not isinstance(x, (int, float)) for launch in found for x in launch.arguments)
