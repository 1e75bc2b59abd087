"""What the plug-in takes for granted in the installed vLLM, and what it does where that does not hold. Its switches and
words, which need no vLLM, are in tests/dsv4/integrations/test_vllm_plugin.py."""

import importlib.metadata
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import vllm_record
from agreement import assert_right
from engines_here import needs

import dsv4.integrations.vllm as plugin
from dsv4 import reference

pytestmark = needs("vllm")


@pytest.fixture
def contract():
    from dsv4.integrations.vllm import contract

    return contract


def test_off_it_says_so_and_replaces_nothing(monkeypatch):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.setenv("DSV4_VLLM", "0")
    names = set(AttentionBackendEnum.__members__)
    logger, said = logging.getLogger("vllm.dsv4"), []
    monkeypatch.setattr(logger, "filters", [lambda record: said.append(record.getMessage())])
    plugin.register()
    assert "off" in said[0] and set(AttentionBackendEnum.__members__) == names


def test_vllm_finds_the_plug_in():
    found = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "dsv4"]
    assert len({e.value for e in found}) == 1
    assert found[0].load() is plugin.register


def test_the_installed_vllm_has_every_parameter_and_field(contract):
    contract.check_version()
    assert contract.differences() == []


def test_the_recording_for_tests_without_vllm_is_of_the_installed_one():
    assert json.loads((Path(__file__).parent / "vllm_recorded.json").read_text()) == vllm_record.record()


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


def test_a_name_that_is_no_longer_looked_up_is_named(contract, monkeypatch):
    name = f"{contract.FLASHMLA}._forward_prefill"
    monkeypatch.setitem(contract.LOOKED_UP, name, "flash_mla_of_tomorrow")
    with pytest.raises(RuntimeError, match="_forward_prefill does not look up flash_mla_of_tomorrow"):
        contract.check()


def test_a_missing_function_is_named(contract, monkeypatch):
    monkeypatch.setitem(contract.PARAMETERS, "vllm.v1.attention.backend.no_such_function", ())
    with pytest.raises(RuntimeError, match="vllm.v1.attention.backend.no_such_function is not there"):
        contract.check()


INSTALLED = "from dsv4.integrations.vllm import install; install.everything()  # a configuration asked for it\n"
IN_A_PROCESS = """
import os
import dsv4.integrations.vllm as plugin
plugin.register()
plugin.register()  # twice is once
from types import SimpleNamespace
from vllm.config import get_current_vllm_config, set_current_vllm_config
from vllm.models.deepseek_v4 import attention
from vllm.models.deepseek_v4.cpu import model as cpu
from vllm.models.deepseek_v4.nvidia import flashmla, model as nvidia
from vllm.models.deepseek_v41.nvidia import flashmla as flashmla_v41, model as nvidia_v41
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from dsv4.integrations.vllm import choice, install, v4, v41
from dsv4.integrations.vllm.indexer import Indexer
def refused(said, f, *arguments, **options):
    try:
        f(*arguments, **options)
    except ValueError as error:
        assert said in str(error), error
    else:
        raise AssertionError(said)
assert AttentionBackendEnum.DSV4_GLUON.get_class().__module__ == "dsv4.integrations.vllm.dense"
layer = AttentionSelectorConfig(64, None, None, None)
assert CpuPlatform.get_attn_backend_cls(AttentionBackendEnum.DSV4_GLUON, attn_selector_config=layer) == plugin.DENSE
assert CpuPlatform.get_attn_backend_cls(None, attn_selector_config=layer, num_heads=1) != plugin.DENSE
mla = layer._replace(use_mla=True)
refused("DSV4_GLUON for MLA layers", CpuPlatform.get_attn_backend_cls, AttentionBackendEnum.DSV4_GLUON, mla)
install.on_cuda()
install.on_cuda()
def config(backend, version="4"):
    hf = SimpleNamespace(architectures=[f"DeepseekV{version}ForCausalLM"], model_type="")
    parts = dict(
        attention_config=dict(backend=backend, backend_per_kind={}), cache_config=dict(cache_dtype="auto"),
        model_config=dict(hf_config=hf), compilation_config=dict(static_forward_context={}),
        parallel_config=dict(prefill_context_parallel_size=1))
    return SimpleNamespace(**{name: SimpleNamespace(**fields) for name, fields in parts.items()})
ours, theirs = v4.cuda_class(), flashmla.DeepseekV4FlashMLAAttention
switched = os.environ["DSV4_VLLM"] == "1"
select = nvidia._select_dsv4_attn_cls
for _ in range(2):
    assert select(config(AttentionBackendEnum.DSV4_GLUON)) is ours
    assert select(config(None)) is (ours if switched else theirs)
if switched:
    refused("FLASHMLA_SPARSE with DSV4_VLLM=1", select, config(AttentionBackendEnum.FLASHMLA_SPARSE))
else:
    assert select(config(AttentionBackendEnum.FLASHMLA_SPARSE)) is theirs
select41, theirs41 = nvidia_v41._select_dsv4_attn_cls, flashmla_v41.DeepseekV4FlashMLAAttention
refused("got DeepSeek-V4.1 on a CPU", select41, config(AttentionBackendEnum.DSV4_GLUON, "41"))
choice._check_v41 = lambda config: None
assert select41(config(AttentionBackendEnum.DSV4_GLUON, "41")) is v41.cuda_class()
assert select41(config(None, "41")) is (v41.cuda_class() if switched else theirs41)
if not switched:
    assert select41(config(AttentionBackendEnum.FLASHMLA_SPARSE, "41")) is theirs41
def taken(make):  # by the replaced names; vLLM's own classes take other arguments
    try:
        return bool(make(get_current_vllm_config(), no_such_option=1))
    except TypeError:
        return False
Indexer.__init__ = lambda *_, **__: None
v4.cpu_class = lambda: lambda *_, **__: "ours"
for backend in (AttentionBackendEnum.DSV4_GLUON, None):
    with set_current_vllm_config(config(backend)):
        asked = switched or backend is not None
        assert taken(cpu.DeepseekV4CPUAttention) is taken(attention.SparseAttnIndexer) is asked
for cls, module in ((theirs, flashmla), (theirs41, flashmla_v41)):
    copy = v4.copied(cls._forward_prefill, flash_mla_sparse_fwd=v4.sparse_fwd)
    assert copy.__globals__["flash_mla_sparse_fwd"] is v4.sparse_fwd
    assert cls._forward_prefill.__globals__["flash_mla_sparse_fwd"] is module.flash_mla_sparse_fwd is not v4.sparse_fwd
assert [ours.get_padded_num_q_heads(n) for n in (1, 8, 16, 128)] == [1, 8, 16, 128]
refused("129 on one rank", ours.get_padded_num_q_heads, 129)
from dsv4.integrations.vllm.dense import Impl
for options, said in ((dict(kv_cache_dtype="fp8_e5m2"), "--kv-cache-dtype: got fp8_e5m2"),
                      (dict(logits_soft_cap=30.0), "logits_soft_cap: got 30.0"),
                      (dict(head_size=96), "head_size: got 96"), (dict(alibi_slopes=[1.0]), "alibi")):
    refused(said, Impl, **(dict(num_heads=4, head_size=64, scale=1.0) | options))
print("all held")
"""


@pytest.mark.parametrize("switch", ["1", ""])
def test_each_configuration_gets_the_classes_it_asks_for(switch):
    """This runs in a separate process, because what is replaced stays replaced."""
    code = IN_A_PROCESS if switch else IN_A_PROCESS.replace("plugin.register()\n", "plugin.register()\n" + INSTALLED, 1)
    environment = os.environ | {"DSV4_VLLM": switch, "DSV4_VLLM_PARTS": "indexer,compressor"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("all held\n"), done.stderr[-3000:]


LLAMA = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=1, num_key_value_heads=1, vocab_size=64, max_position_embeddings=64, torch_dtype="bfloat16",
)  # fmt: skip


def test_the_ways_to_name_the_backend_in_a_configuration(tmp_path):
    """The ways are those of docs/serving.md, without DSV4_VLLM; a configuration that does not name the backend is left
    alone, also after one that does. DSV4_VLLM=0 wins."""
    code = """
import json, sys
from vllm.config import AttentionConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser
import dsv4.integrations.vllm as plugin
from dsv4.integrations.vllm import choice, install
lines = []
plugin.logger.addFilter(lambda record: lines.append(record.getMessage()))
common = dict(model=sys.argv[1], skip_tokenizer_init=True)
def ask(**options):
    return EngineArgs(**common, **options).create_engine_config()
def command_line(*options):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(["--model", sys.argv[1], "--skip-tokenizer-init", *options]))
try:
    ask(attention_config={"backend": "DSV4_GLUON"})  # parsed before vLLM loads its plug-ins
except Exception as error:
    assert "Unknown attention backend" in str(error), error
else:
    raise AssertionError("vLLM knows the name before it loads plug-ins")
load_general_plugins()
assert ask().attention_config.backend is None and not install.on
print("left alone")
for config in (
    ask(attention_backend="DSV4_GLUON"),
    ask(attention_config={"backend": "DSV4_GLUON"}),
    ask(attention_config=AttentionConfig(backend="DSV4_GLUON")),
    command_line("--attention-backend", "DSV4_GLUON").create_engine_config(),
    command_line("--attention-config", json.dumps({"backend": "DSV4_GLUON"})).create_engine_config(),
    command_line("--attention-config.backend", "DSV4_GLUON").create_engine_config(),
):
    assert choice.named(config) and install.on
for config in (
    ask(attention_config={"backend_per_kind": {"full_attention": "DSV4_GLUON"}}),
    command_line("--attention-config.backend_per_kind.full_attention", "DSV4_GLUON").create_engine_config(),
):
    assert choice.kinds(config) == ["full_attention"]
assert not choice.asks(ask())
assert [line.split(";")[0] for line in lines] == [
    "dsv4 is off for LlamaForCausalLM (installed)", "dsv4 is on: dense attention",
    "dsv4 is on: dense attention, of full_attention layers", "dsv4 is off for LlamaForCausalLM (installed)"], lines
print("all held")
"""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    def run(switch: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", code, tmp_path],
            env=os.environ | {"DSV4_VLLM": switch, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )

    done = run("")
    assert done.stdout.endswith("all held\n"), done.stderr[-3000:]
    off = run("0")
    assert "left alone" in off.stdout and "Unknown attention backend" in off.stderr, off.stderr[-3000:]


@pytest.mark.parametrize("d", [64, 128, 256, 512])
@pytest.mark.parametrize("window, with_sinks", [(None, False), (None, True), (7, True)])
def test_the_dense_backend_with_windows_sinks_and_shared_keys(d, window, with_sinks):
    """Two decodes before a prompt with a cached prefix. The rest of the pages is NaN, which must not be read."""
    from dsv4.integrations.vllm.dense import Impl, Metadata

    chance = torch.Generator().manual_seed(0)
    starts, ends = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2, 32], [0, 20, 23, 60]))
    table = torch.tensor([[5, 2, 0], [7, 0, 0], [1, 8, 3]], dtype=torch.int32)
    q, k, v = (torch.randn(n, heads, d, generator=chance) for n, heads in ((32, 4), (60, 2), (60, 2)))
    sinks = torch.randn(4, generator=chance) if with_sinks else None
    lengths = ends.diff()
    slots = torch.cat([table[r, t // 16] * 16 + t % 16 for r in range(3) for t in [torch.arange(int(lengths[r]))]])
    cache, out = torch.full((9, 2, 16, 2 * d), float("nan")), torch.empty(40, 4, d)
    impl = Impl(4, d, d**-0.5, num_kv_heads=2, sliding_window=window, sinks=sinks)
    impl.do_kv_cache_update(None, k, v, cache, slots.long())
    impl.forward(None, q, k, v, cache, Metadata(2, 32, starts, lengths, table, 30, 37), out)
    seen = (-1 if window is None else window - 1, 0)
    assert_right(out[:32], reference.fmha_varlen(q, k, v, starts, ends, causal=True, window=seen, sink=sinks)[0])


def test_vllms_own_loader_ends_with_the_reason():
    code = "from vllm.plugins import load_general_plugins; load_general_plugins(); print('went on')"
    environment = os.environ | {"DSV4_VLLM": "1", "DSV4_VLLM_PARTS": "sampler"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "went on" not in done.stdout
    assert "DSV4_VLLM_PARTS: got sampler; accepted: any of indexer" in done.stderr, done.stderr[-3000:]


def test_the_name_of_the_backend_reaches_processes_that_have_loaded_no_plug_in():
    """vLLM sends its configuration to the engine's process. A process in which the plug-in is off raises an error: it
    would serve with vLLM's own attention."""

    def run(code: str, switch: str, *arguments: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"DSV4_VLLM": switch}
        return subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)

    send = """
import pickle
import dsv4.integrations.vllm as plugin
plugin.register()
from vllm.v1.attention.backends.registry import AttentionBackendEnum
print(pickle.dumps([AttentionBackendEnum.DSV4_GLUON, AttentionBackendEnum.FLASH_ATTN]).hex())
"""
    receive = """
import pickle, sys
print([member.name for member in pickle.loads(bytes.fromhex(sys.argv[1]))])
"""
    sent = run(send, "1").stdout.split()[-1]
    assert run(receive, "1", sent).stdout.endswith("['DSV4_GLUON', 'FLASH_ATTN']\n")
    assert run(receive, "", sent).stdout.endswith("['DSV4_GLUON', 'FLASH_ATTN']\n")
    assert "DSV4_VLLM: got 0 in a process with --attention-backend DSV4_GLUON" in run(receive, "0", sent).stderr
