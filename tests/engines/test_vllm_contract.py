"""What the plug-in takes for granted in the installed vLLM, and what it does where that does not hold."""

import importlib.metadata
import logging
import os
import subprocess
import sys

import pytest
from engines_here import needs

import dsv4.integrations.vllm as plugin

pytestmark = needs("vllm")


@pytest.fixture
def contract():
    from dsv4.integrations.vllm import contract

    return contract


@pytest.mark.parametrize("switch, on", [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_switch_is_off_unless_it_is_1(monkeypatch, switch, on):
    monkeypatch.delenv("DSV4_VLLM", raising=False)
    if switch is not None:
        monkeypatch.setenv("DSV4_VLLM", switch)
    assert plugin.switched_on() is on


def test_a_switch_that_says_neither_is_refused(monkeypatch):
    monkeypatch.setenv("DSV4_VLLM", "yes")
    with pytest.raises(ValueError, match="DSV4_VLLM: got 'yes'; accepted: 1"):
        plugin.register()


def test_off_it_says_so_and_replaces_nothing(monkeypatch, caplog):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.setenv("DSV4_VLLM", "0")
    names = set(AttentionBackendEnum.__members__)
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.INFO, "vllm.dsv4"):
        plugin.register()
    assert "off" in caplog.text and set(AttentionBackendEnum.__members__) == names


def test_vllm_finds_the_plug_in():
    found = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "dsv4"]
    assert len({e.value for e in found}) == 1
    assert found[0].load() is plugin.register


def test_the_installed_vllm_has_every_parameter_and_field(contract):
    contract.check_version()
    assert contract.differences() == []


def test_a_changed_signature_is_named(contract, monkeypatch):
    name = "vllm.v1.attention.backend.AttentionImpl.forward"
    monkeypatch.setitem(contract.PARAMETERS, name, ("self", "query"))
    with pytest.raises(RuntimeError, match=f"{name} takes self, layer, .* in place of self, query"):
        contract.check()


def test_a_missing_field_is_named(contract, monkeypatch):
    name = "vllm.v1.attention.backend.CommonAttentionMetadata"
    monkeypatch.setitem(contract.FIELDS, name, ("seq_lens", "no_such_field"))
    with pytest.raises(RuntimeError, match="has no no_such_field"):
        contract.check()


def test_another_version_is_refused(contract, monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(RuntimeError, match="got vLLM 0.33.0; accepted: 0.32.x"):
        contract.check_version()


IN_A_PROCESS = """
import dsv4.integrations.vllm as plugin
plugin.register()
plugin.register()  # twice is once
from types import SimpleNamespace
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.models.deepseek_v4.cpu import model as cpu
from vllm.models.deepseek_v4.nvidia import model as nvidia
from vllm.platforms.cpu import CpuPlatform
from dsv4.integrations.vllm import install, v4
assert AttentionBackendEnum.DSV4.get_class().__module__ == "dsv4.integrations.vllm.dense"
assert CpuPlatform.get_attn_backend_cls(AttentionBackendEnum.DSV4, None) == plugin.DENSE
assert cpu.DeepseekV4CPUAttention is v4.cpu_class()
install.on_cuda()
install.on_cuda()
def config(backend):
    return SimpleNamespace(attention_config=SimpleNamespace(backend=backend))
assert nvidia._select_dsv4_attn_cls(config(None)) is v4.cuda_class()
assert nvidia._select_dsv4_attn_cls(config(AttentionBackendEnum.DSV4)) is v4.cuda_class()
try:
    nvidia._select_dsv4_attn_cls(config(AttentionBackendEnum.FLASHMLA_SPARSE))
except ValueError as error:
    assert "FLASHMLA_SPARSE with DSV4_VLLM=1" in str(error), error
else:
    raise AssertionError("FlashMLA and dsv4 at once")
assert [v4.cuda_class().get_padded_num_q_heads(n) for n in (1, 8, 16, 128)] == [1, 8, 16, 128]
try:
    v4.cuda_class().get_padded_num_q_heads(129)
except ValueError as error:
    assert "129 on one rank" in str(error), error
else:
    raise AssertionError("129 heads")
from dsv4.integrations.vllm.dense import Impl
for options, said in ((dict(kv_cache_dtype="fp8"), "--kv-cache-dtype: got fp8"),
                      (dict(logits_soft_cap=30.0), "logits_soft_cap: got 30.0"),
                      (dict(head_size=96), "head_size: got 96"), (dict(alibi_slopes=[1.0]), "alibi")):
    try:
        Impl(**(dict(num_heads=4, head_size=64, scale=1.0) | options))
    except ValueError as error:
        assert said in str(error), error
    else:
        raise AssertionError(options)
print("all held")
"""


def test_on_it_replaces_the_v4_class_and_names_a_backend_and_refuses_the_rest():
    """In a process of its own: what it replaces stays replaced."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS], env=os.environ | {"DSV4_VLLM": "1"}, capture_output=True, text=True
    )
    assert done.stdout.endswith("all held\n"), done.stderr[-3000:]
