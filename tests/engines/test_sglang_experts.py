"""SGLang's experts by its source, which is read: the functions that dsv4's method stands in for, and what it is given.
And a whole engine with MXFP4 experts on a CPU."""

import ast
import inspect

import pytest
from engines_here import needs
from test_sglang_contract import function, source
from tiny_checkpoints import prompt

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
    layer = text("sglang.srt.layers.moe.fused_moe_triton.layer")
    assert "class FusedMoE(" in layer and "UnquantizedFusedMoEMethod" in fp8
    assert 'getattr(quant_method, "fuse_routed_scaling_factor_in_topk", False)' in layer
    utils = text("sglang.srt.layers.moe.utils")
    assert "def get_moe_a2a_backend()" in utils and "def is_none(self)" in utils
    assert "not _is_cuda and (not _is_musa)" in text("sglang.srt.models.deepseek_v2")


def test_the_part_is_off_by_default(monkeypatch):
    monkeypatch.delenv("DSV4_SGLANG_PARTS", raising=False)
    assert install.EXPERTS not in install.wrapped()
    monkeypatch.setenv("DSV4_SGLANG_PARTS", "experts")
    assert install.wrapped() == {install.EXPERTS: experts.get_quant_method}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_whole_engine(fp4_checkpoint, serve_sglang):
    """Three layers, a prompt in two chunks, then two steps. compared_experts.py compares what was loaded with the
    checkpoint and every call with the oracle."""
    engine = dict(
        dtype="bfloat16",
        chunked_prefill_size=256,
        dsa_topk_backend="torch",
        swa_full_tokens_ratio=0.9,
        disable_radix_cache=True,
    )
    requests = dict(engine=engine, batches=[dict(prompts=[prompt(300, seed=300)], tokens=3)])
    got = serve_sglang(fp4_checkpoint, requests, plugin=True, parts="experts", v4=True, fp4=True)
    assert got["batches"][0]["calls"] == {"experts": 12, "prefill": 6, "decode": 6}
    assert "the dsv4 plug-in is on: DeepSeek-V4's and V4.1's attention, experts" in got["log"]
