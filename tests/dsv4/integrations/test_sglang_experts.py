"""Which layers of SGLang get dsv4's method of quantisation. Modules of SGLang are stand-ins here; tests/engines has the
real ones."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from dsv4.integrations.sglang import experts

PACKAGE = "sglang.srt.layers"


class FusedMoE:
    pass


class Unquantized:
    pass


class Exchange(SimpleNamespace):
    def __init__(self, value):
        super().__init__(value=value, is_none=lambda: value == "none")


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    members = {
        "sglang.srt.utils": dict(is_cuda=lambda: True),
        f"{PACKAGE}.moe.utils": dict(get_moe_a2a_backend=lambda: Exchange("none")),
        f"{PACKAGE}.moe.fused_moe_triton.layer": dict(FusedMoE=FusedMoE),
        f"{PACKAGE}.quantization.fp8": dict(
            Fp8MoEMethod=lambda config: SimpleNamespace(), UnquantizedFusedMoEMethod=Unquantized
        ),
    }
    for name, found in members.items():
        parts = name.split(".")
        for n in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:n]), ModuleType("package"))
        module = ModuleType(name)
        vars(module).update(found)
        monkeypatch.setitem(sys.modules, name, module)


def chosen(layer, theirs="theirs", fp4=True, dequantised=False):
    config = SimpleNamespace(is_fp4_experts=fp4, dequant_fp4_to_fp8=dequantised)
    return experts.get_quant_method(lambda *_: theirs, config, layer, "model.layers.0.mlp.experts")


def test_mxfp4_experts_are_dsv4s():
    assert isinstance(chosen(FusedMoE()), experts.Method)


@pytest.mark.parametrize("cuda", [True, False])
def test_the_weights_contain_the_factor_of_the_routed_experts_on_cuda(monkeypatch, cuda):
    """SGLang multiplies by it in its model elsewhere, but on CUDA in the router or in the runner, which dsv4's method
    does not have. SGLang looks the name up."""
    monkeypatch.setattr(sys.modules["sglang.srt.utils"], "is_cuda", lambda: cuda)
    assert getattr(chosen(FusedMoE()), "fuse_routed_scaling_factor_in_topk", None) is cuda


@pytest.mark.parametrize("options", [dict(fp4=False), dict(dequantised=True)])
def test_other_experts_stay_sglangs(options):
    assert chosen(FusedMoE(), **options) == "theirs" and chosen("a linear layer") == "theirs"


def test_experts_that_the_checkpoint_leaves_unquantised_stay_sglangs():
    """Checkpoints name layers that are not converted, such as those of drafts; the configuration is one for all."""
    unquantised = Unquantized()
    assert chosen(FusedMoE(), unquantised) is unquantised


@pytest.mark.parametrize("exchange", ["none", "deepep", "megamoe"])
def test_another_exchange_between_ranks_is_refused_by_name(monkeypatch, exchange):
    """Its outputs have other fields, and a fused kernel would go around dsv4's method."""
    monkeypatch.setattr(sys.modules[f"{PACKAGE}.moe.utils"], "get_moe_a2a_backend", lambda: Exchange(exchange))
    method, config = chosen(FusedMoE()), SimpleNamespace(swiglu_limit=10.0)
    if exchange == "none":
        method.create_moe_runner(None, config)
    else:
        with pytest.raises(ValueError, match=f"--moe-a2a-backend: got {exchange}; accepted: none"):
            method.create_moe_runner(None, config)
