"""The experts' kernels for Blackwell on a CPU, through softsm."""

from functools import partial

import moe_cases
import pytest
import torch

import dsv4
import softsm
from dsv4.kernels.compat import TRITON_VERSION
from dsv4.moe.kernels import prepare
from dsv4.moe.kernels.sm100 import entry

pytestmark = pytest.mark.skipif(TRITON_VERSION < (3, 9), reason="the Blackwell kernels need triton >= 3.9")
kernel = partial(moe_cases.kernel, "sm_100a")


@pytest.mark.slow
def test_experts_with_many_rows_with_few_and_with_none():
    """Two tiles of rows of one expert, a row without a token, an expert without a row, exponents that spread as
    far as they can; each token has its bits in another batch, where other tiles are written in another order."""
    experts = moe_cases.layer(low=90, high=126, layout="sm100").experts
    moe_cases.check_many_rows_few_and_none(kernel, experts, moe_cases.tokens(18, k=2), some=[17, 4])


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows, recipe",
    [(16, "fp8_128"), (32, "fp8_32"), (64, "fp8_128"), (128, "fp8_32"), (16, "nvfp4"), (64, "nvfp4"), (128, "nvfp4")],
)
def test_every_tile_in_every_order(rows, recipe, monkeypatch):
    """Several tiles to a CTA, the last of an expert partly filled; slots sorted in pieces."""
    monkeypatch.setattr(entry, "TILES", ((float("inf"), rows),))
    monkeypatch.setattr(prepare, "SORTED_AT_ONCE", 0)
    experts = moe_cases.layer(e=3, h=512, i=256, nvfp4=recipe == "nvfp4", layout="sm100").experts
    given = moe_cases.tokens(140, h=512, e=3, k=2)
    given["ids"][5:] = torch.tensor([2, 0])
    out, slots = kernel(experts, given, return_slots=True, sms=2, activations=recipe)
    moe_cases.assert_right(out, slots, experts, given, recipe=recipe)
    for order in ("eager", "latest"):
        assert torch.equal(kernel(experts, given, order=order, sms=2, activations=recipe), out)


def test_what_the_kernels_do_not_take():
    given = moe_cases.tokens(3)
    for experts, options, says in (
        (moe_cases.layer().experts, {}, "weights in the layout 'sm90'"),
        (moe_cases.layer(nvfp4=True, layout="sm100").experts, {}, "activations 'fp8_128' with weights in nvfp4"),
        (moe_cases.layer(layout="sm100").experts, dict(activations="bf16"), "activations 'bf16'"),
    ):
        with (
            softsm.use("sm_100a"),
            pytest.raises(ValueError, match=f"^backend: 'softsm' cannot run this moe problem: .*{says}"),
        ):
            dsv4.moe(**given, experts=experts, backend="softsm", **options)
