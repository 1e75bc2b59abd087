"""SGLang's experts by its source, which is read and not run: the functions that dsv4's method stands in for, and what
it is given."""

import ast
import inspect

import pytest
from engines_here import needs
from test_sglang_contract import function, source

from dsv4.integrations.sglang import experts, install

pytestmark = needs("sglang")
HUMMING = "sglang.srt.layers.quantization.mxfp4_humming_moe"


@pytest.mark.parametrize("name", ["create_weights", "process_weights_after_loading", "apply", "create_moe_runner"])
def test_parameters_are_those_of_a_method_of_sglang(name):
    theirs = [a.arg for a in function(HUMMING, name).args.args]
    ours = inspect.signature(getattr(experts.Method, name)).parameters.values()
    assert [x.name for x in ours if x.kind != x.VAR_KEYWORD] == theirs


def text(module):
    return ast.unparse(source(module)).replace("'", '"')


def test_what_is_hooked_and_read_is_there():
    module, _, name = install.EXPERTS.rpartition(".Fp8Config.")
    fp8 = text(module)
    for wanted in (f"def {name}(", "is_fp4_experts", "dequant_fp4_to_fp8", *(f'"{x}"' for x in experts.PARAMETERS)):
        assert wanted in fp8, wanted
    standard = text("sglang.srt.layers.moe.token_dispatcher.standard")
    assert "class StandardCombineInput(NamedTuple)" in standard and "topk_output: TopKOutput" in standard
    assert "class FusedMoE(" in text("sglang.srt.layers.moe.fused_moe_triton.layer")


def test_the_part_is_off_by_default(monkeypatch):
    monkeypatch.delenv("DSV4_SGLANG_PARTS", raising=False)
    assert install.EXPERTS not in install.wrapped()
    monkeypatch.setenv("DSV4_SGLANG_PARTS", "experts")
    assert install.wrapped() == {install.EXPERTS: experts.get_quant_method}
