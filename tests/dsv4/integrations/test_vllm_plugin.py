"""The plug-in for vLLM as far as it goes without vLLM: its switches, what it says, and its replacements against
signatures recorded from the tested vLLM. tests/engines holds the recording against an installed one."""

import inspect
import io
import json
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import paged_states
import pytest
import torch
from agreement import assert_right

import dsv4.integrations.vllm as plugin
from dsv4 import reference
from dsv4.integrations.vllm import compressor, contract, indexer, install, v4

RECORDED = json.loads((Path(__file__).parents[2] / "engines" / "vllm_recorded.json").read_text())


@pytest.fixture
def said():
    """What the plug-in logs, as a function."""
    logger, text = logging.getLogger("vllm.dsv4"), io.StringIO()
    handler, level = logging.StreamHandler(text), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield text.getvalue
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture
def vllm(monkeypatch):
    """A module of that name that has a version, and nothing else."""
    fake = ModuleType("vllm")
    fake.__version__ = RECORDED["version"]
    for name in [x for x in sys.modules if x.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    return fake


@pytest.mark.parametrize("said, on", [(None, None), ("", None), ("0", False), ("1", True)])
def test_the_switch_says_on_or_off_or_leaves_it_to_the_configuration(monkeypatch, said, on):
    monkeypatch.delenv("DSV4_VLLM", raising=False)
    if said is not None:
        monkeypatch.setenv("DSV4_VLLM", said)
    assert plugin.switch() is on


def test_a_switch_that_says_neither_is_refused(monkeypatch):
    monkeypatch.setenv("DSV4_VLLM", "yes")
    with pytest.raises(ValueError, match="DSV4_VLLM: got 'yes'; accepted: 1"):
        plugin.register()


@pytest.mark.parametrize(
    "said, named",
    [(None, ["indexer"]), ("", []), ("compressor", ["compressor"]), ("indexer, compressor", ["indexer", "compressor"])],
)
def test_parts_are_replaced_that_are_named_and_by_default_the_indexer(monkeypatch, said, named):
    monkeypatch.delenv("DSV4_VLLM_PARTS", raising=False)
    if said is not None:
        monkeypatch.setenv("DSV4_VLLM_PARTS", said)
    assert plugin.parts() == named


def test_an_unknown_part_is_refused(monkeypatch):
    monkeypatch.setenv("DSV4_VLLM_PARTS", "indexer,experts")
    with pytest.raises(ValueError, match="got experts; accepted: any of indexer, compressor, insertion"):
        plugin.parts()


def test_off_it_says_so_and_looks_at_no_module_of_vllm(monkeypatch, said):
    monkeypatch.setenv("DSV4_VLLM", "0")
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import of it would fail
    plugin.register()
    assert "dsv4 is installed and off; DSV4_VLLM=1" in said()


def test_on_with_another_version_it_raises_and_says_how_to_go_on(monkeypatch, vllm):
    """vLLM passes on what the called function raises, but not what the import of its module does."""
    monkeypatch.setenv("DSV4_VLLM", "1")
    vllm.__version__ = "0.33.0"
    with pytest.raises(RuntimeError, match=r"got vLLM 0.33.0; accepted: 0.32.x.* DSV4_VLLM=0 gives"):
        plugin.register()


def test_on_with_other_modules_it_raises_and_never_says_that_it_is_on(monkeypatch, vllm, said):
    monkeypatch.setenv("DSV4_VLLM", "1")
    with pytest.raises(RuntimeError, match=f"{contract.FLASHMLA}.forward_mqa is not there .*DSV4_VLLM=0 gives"):
        plugin.register()
    assert "dsv4 is on" not in said()


def test_a_process_that_is_off_refuses_the_name_of_the_backend(monkeypatch):
    """That another process sends it: vLLM's own attention would serve under the name."""
    monkeypatch.setenv("DSV4_VLLM", "0")
    why = "DSV4_VLLM: got 0 in a process with --attention-backend DSV4; accepted: 1 or unset"
    with pytest.raises(ValueError, match=why):
        install.backend_member()


def test_not_switched_on_another_version_is_left_alone_and_named(monkeypatch, vllm, said):
    monkeypatch.delenv("DSV4_VLLM", raising=False)
    vllm.__version__ = "0.33.0"  # which has no other attribute here: none is looked at
    plugin.register()
    assert "off, and cannot be switched on: got vLLM 0.33.0; accepted: 0.32.x" in said()


@pytest.fixture
def configured(monkeypatch, vllm):
    """A vLLM of stubs with a configuration and names of backends -> (the class of the configuration, an entry for each
    time that everything was installed)."""

    class VllmConfig:
        def __init__(self, name):
            self.attention_config = SimpleNamespace(backend=name and SimpleNamespace(name=name))
            self.__post_init__()

        def __post_init__(self):
            self.checked = True

    backend = type("Backends", (), dict(__members__={}))
    modules = {
        "vllm.config": dict(VllmConfig=VllmConfig),
        "vllm.v1.attention.backends.registry": dict(
            AttentionBackendEnum=backend, register_backend=lambda name, path: backend.__members__.update({name: path})
        ),
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    installed: list = []
    monkeypatch.delenv("DSV4_VLLM", raising=False)
    monkeypatch.setattr(install, "everything", lambda: installed.append(1))
    monkeypatch.setattr(install, "asked", False)
    monkeypatch.setattr(install, "ready", False)
    return VllmConfig, installed


def test_the_configuration_switches_it_on_where_it_names_the_backend(configured, said):
    config, installed = configured
    plugin.register()
    plugin.register()  # twice is once
    assert "dsv4 is installed and off; DSV4_VLLM=1 or --attention-backend DSV4" in said()
    assert config(None).checked and config("FLASH_ATTN").checked and not installed
    assert config("DSV4").checked and installed == [1]


def test_a_configuration_from_another_process_switches_it_on(configured, monkeypatch):
    """Before vLLM has called register() in this process, or after."""
    _, installed = configured
    monkeypatch.setattr(install, "backend_name", lambda: None)
    sys.modules["vllm.v1.attention.backends.registry"].AttentionBackendEnum = {"DSV4": "the member"}
    assert install.backend_member() == "the member" and not installed
    plugin.register()
    assert installed == [1]
    assert install.backend_member() == "the member" and installed == [1, 1]


def test_the_contract_is_what_was_recorded():
    """Every parameter in order; every field that is read."""
    assert RECORDED["parameters"].keys() == contract.PARAMETERS.keys()
    for name, parameters in contract.PARAMETERS.items():
        assert list(parameters) == RECORDED["parameters"][name], name
    for name, fields in contract.FIELDS.items():
        assert set(fields) <= set(RECORDED["fields"][name]), name
    assert RECORDED["looked_up"] == contract.LOOKED_UP


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (indexer.Indexer.__init__, f"{contract.INDEXER}.__init__"),
        (indexer.Indexer.forward, f"{contract.INDEXER}.forward_cuda"),
        (v4.Forward.forward_mqa, f"{contract.FLASHMLA}.forward_mqa"),
        (v4.Forward.get_padded_num_q_heads, f"{contract.FLASHMLA}.get_padded_num_q_heads"),
    ],
)
def test_what_is_replaced_takes_the_same_parameters(ours, theirs):
    assert list(inspect.signature(ours).parameters) == RECORDED["parameters"][theirs]


def test_the_last_step_of_the_compressor_takes_what_both_kernels_of_vllm_take():
    """CuTe DSL's takes three more, which vLLM passes by name."""
    ours = list(inspect.signature(compressor.store).parameters)
    name = "vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache.compress_norm_rope_store_triton"
    assert ours == [*RECORDED["parameters"][name], "store_full_kv", "store_full_fp8", "fp8_scale"]


@pytest.mark.parametrize("kind", ["csa", "hca", "indexer"])
def test_the_compressor_packs_rows_of_states_in_vllms_pages(kind):
    def run(states, tokens, requests, positions, block_table, slots, norm_weight, cos_sin, out, ratio):
        n = len(tokens)
        longer = [torch.cat([x, x.new_full((3,), 9)]) for x in (requests, positions)]  # buffers are
        compressor.store(
            state_cache=states, num_actual=n, token_to_req_indices=longer[0], positions=longer[1], slot_mapping=tokens,
            block_table=block_table, block_size=states.shape[1], state_width=states.shape[2] // 2,
            cos_sin_cache=cos_sin, kv_cache=paged_states.engine_pages(out), pdl_kwargs=dict(launch_pdl=False),
            k_cache_metadata=SimpleNamespace(slot_mapping=slots), head_dim=norm_weight.shape[0], rope_head_dim=64,
            compress_ratio=ratio, overlap=ratio == 4, use_fp4_cache=False, rms_norm_weight=norm_weight,
            rms_norm_eps=1e-6, quant_block=64, token_stride=576, scale_dim=8, store_full_kv=False,
        )  # fmt: skip

    before = plugin.calls["compress"]
    paged_states.assert_rows(kind, run)
    assert plugin.calls["compress"] == before + 1


@pytest.mark.parametrize("option, name", [("use_fp4_cache", "indexer_kv_dtype"), ("store_full_kv", "--kv-cache-dtype")])
def test_other_rows_are_refused_by_name(option, name):
    nothing = dict.fromkeys(inspect.signature(compressor.store).parameters)
    with pytest.raises(ValueError, match=f"{name}: got"):
        compressor.store(**nothing | {option: True})


@pytest.mark.parametrize("heads", [0, 129])
def test_heads_of_a_rank_are_counted(heads):
    with pytest.raises(ValueError, match=f"num_attention_heads: got {heads} on one rank; accepted: 1 to 128"):
        v4.Forward.get_padded_num_q_heads(heads)
    assert [v4.Forward.get_padded_num_q_heads(n) for n in (1, 8, 100)] == [1, 8, 100]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prefill_from_a_workspace_looks_at_nothing_behind_the_lengths(dtype):
    """As vLLM calls FlashMLA: by keyword, a workspace that is bf16 and not all written, lists not all filled."""
    q, rows = torch.randn(3, 4, 512).to(dtype), torch.randn(40, 1, 512).bfloat16()
    rows[30:] = float("nan")
    lists = torch.full((3, 1, 128), 1 << 30, dtype=torch.int32)
    lengths = torch.tensor([20, 1, 0], dtype=torch.int32)
    for n, count in enumerate(lengths.tolist()):
        lists[n, 0, :count] = torch.randperm(30)[:count]
    sink, out = torch.randn(4), torch.empty_like(q)
    before = plugin.calls["prefill"]
    v4.sparse_fwd(q=q, kv=rows, indices=lists, sm_scale=0.05, attn_sink=sink, topk_length=lengths, out=out)
    assert plugin.calls["prefill"] == before + 1
    seen = torch.where(torch.arange(128) < lengths[:, None], lists[:, 0], -1)
    common = dict(sink=sink, softmax_scale=0.05)
    wanted, low = (reference.v4_attention(q, rows[:30, 0].to(dtype), seen, p_dtype=rounded, **common)[0]
                   for rounded in (None, dtype))  # fmt: skip
    assert_right(out, wanted, low)
