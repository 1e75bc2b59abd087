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
from dsv4.integrations.vllm import choice, compressor, contract, indexer, install, v4, v41

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
    monkeypatch.setenv("DSV4_VLLM_PARTS", "indexer,routing")
    with pytest.raises(ValueError, match="got routing; accepted: any of indexer, compressor, insertion"):
        plugin.parts()


def test_off_it_says_so_and_looks_at_no_module_of_vllm(monkeypatch, said):
    monkeypatch.setenv("DSV4_VLLM", "0")
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import of it would fail
    plugin.register()
    assert "dsv4 is installed and off; DSV4_VLLM=1" in said()


def test_on_with_another_version_it_raises_and_says_how_to_go_on(monkeypatch, vllm):
    """vLLM passes on what the called function raises, but not what the import of its module does."""
    monkeypatch.setenv("DSV4_VLLM", "1")
    vllm.__version__ = "0.34.0"
    with pytest.raises(RuntimeError, match=r"got vLLM 0.34.0; accepted: 0.32.x and 0.33.x.* DSV4_VLLM=0 gives"):
        plugin.register()


def test_on_with_other_modules_it_raises_and_never_says_that_it_is_on(monkeypatch, vllm, said):
    monkeypatch.setenv("DSV4_VLLM", "1")
    with pytest.raises(RuntimeError, match=f"{contract.FLASHMLA}.forward_mqa is not there .*DSV4_VLLM=0 gives"):
        plugin.register()
    assert "dsv4 is on" not in said()


def test_a_process_that_is_off_refuses_the_name_of_the_backend(monkeypatch):
    """Another process sends the name; without an error vLLM's own attention would serve under it."""
    monkeypatch.setenv("DSV4_VLLM", "0")
    why = "DSV4_VLLM: got 0 in a process with --attention-backend DSV4_GLUON; accepted: 1 or unset"
    with pytest.raises(ValueError, match=why):
        install.backend_member()


def test_not_switched_on_another_version_is_left_alone_and_named(monkeypatch, vllm, said):
    monkeypatch.delenv("DSV4_VLLM", raising=False)
    vllm.__version__ = "0.34.0"  # which has no other attribute here: none is looked at
    plugin.register()
    assert "off, and cannot be switched on: got vLLM 0.34.0; accepted: 0.32.x and 0.33.x" in said()


def configuration(backend=None, kinds=(), model="LlamaForCausalLM", cache_dtype="auto", layers=(), ranks=1, moe="auto"):
    """A configuration of vLLM, as far as the plug-in looks at it; names of backends are what they are there, members
    of an enumeration."""
    hf = SimpleNamespace(architectures=[model], model_type="a type")
    return SimpleNamespace(
        attention_config=SimpleNamespace(
            backend=backend and SimpleNamespace(name=backend),
            backend_per_kind={kind: SimpleNamespace(name="DSV4_GLUON") for kind in kinds},
        ),
        model_config=model and SimpleNamespace(hf_config=hf),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        compilation_config=SimpleNamespace(static_forward_context=dict(enumerate(layers))),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=ranks),
        kernel_config=SimpleNamespace(moe_backend=moe),
    )


V41_METHODS = (
    "_forward_decode",
    "_forward_prefill",
    "get_padded_num_q_heads",
    "_indexer_cls",
    "_fused_qnorm_rope_kv_insert",
    "forward_kv",
)
V4, V41, DENSE = "DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM", "LlamaForCausalLM"


@pytest.fixture
def configured(monkeypatch, vllm):
    """A vLLM of stubs with a configuration and names of backends -> (the class of the configuration, an entry for each
    time that everything was installed)."""

    class VllmConfig:
        def __init__(self, *arguments, **options):
            vars(self).update(vars(configuration(*arguments, **options)))
            self.__post_init__()

        def __post_init__(self):
            self.checked = True

    backend = type("Backends", (), dict(__members__={}))
    modules = {
        "vllm.config": dict(VllmConfig=VllmConfig),
        "vllm.platforms": dict(current_platform=SimpleNamespace(is_cpu=lambda: False)),
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
    monkeypatch.delenv("DSV4_VLLM_PARTS", raising=False)
    monkeypatch.delenv("DSV4_VLLM_ROWS", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(install, "everything", lambda: installed.append(1))
    monkeypatch.setattr(install, "asked", False)
    monkeypatch.setattr(install, "ready", False)
    monkeypatch.setattr(plugin, "_said", "")
    return VllmConfig, installed


def test_the_configuration_switches_it_on_where_it_names_the_backend(configured, said):
    config, installed = configured
    plugin.register()
    plugin.register()  # twice is once
    assert said() == ""  # which configuration comes is not known yet
    assert config(None).checked and config("FLASH_ATTN").checked and not installed
    assert config("DSV4_GLUON").checked and installed == [1]
    assert config(kinds=["full_attention"]).checked and installed == [1, 1]


@pytest.mark.parametrize(
    "switch, options, line",
    [
        (
            "",
            dict(model=V4),
            "dsv4 is installed and off; DSV4_VLLM=1 or --attention-backend DSV4_GLUON switches its attention",
        ),
        ("", dict(model=V4, backend="DSV4_GLUON"), "dsv4 is on: DeepSeek-V4's attention, indexer"),
        ("1", dict(model=V4), "dsv4 is on: DeepSeek-V4's attention, indexer"),
        ("1", dict(model=V41), "dsv4 is on: DeepSeek-V4.1's attention, indexer (DSV4_VLLM_PARTS)\n"),
        (
            "1",
            dict(model=V41, cache_dtype="nvfp4_ds_mla"),
            "dsv4 is on: DeepSeek-V4.1's attention, indexer (DSV4_VLLM_PARTS), rows of V4.1 (DSV4_VLLM_ROWS)\n",
        ),
        ("", dict(model=DENSE), f"dsv4 is off for {DENSE} (installed); --attention-backend DSV4_GLUON switches it on"),
        (
            "1",
            dict(model=DENSE),
            f"dsv4 is off for {DENSE} (DSV4_VLLM=1 is for DeepSeek-V4 and V4.1); --attention-backend DSV4_GLUON",
        ),
        ("1", dict(model=DENSE, backend="DSV4_GLUON"), "dsv4 is on: dense attention\n"),
        ("", dict(model=DENSE, kinds=["sliding_window"]), "dsv4 is on: dense attention, of sliding_window layers"),
    ],
)
def test_the_log_has_one_line_that_says_what_dsv4_does_for_the_model(
    configured, said, monkeypatch, switch, options, line
):
    config, _ = configured
    monkeypatch.setenv("DSV4_VLLM", switch)
    plugin.register()
    config(**options)
    config(**options)
    config(model=None)
    assert said().startswith(line) and said().count("\n") == 1


def test_a_draft_models_configuration_is_not_reported(configured, said):
    config, _ = configured
    plugin.register()
    config(model=V4, layers=["a layer of the target"])
    assert said() == ""


@pytest.mark.parametrize("platform, parts, why", [
    (True, "", r"the model: got DeepSeek-V4\.1 on a CPU; accepted: a GPU"),
    (False, "experts", r"DSV4_VLLM_PARTS: got experts for DeepSeek-V4\.1; accepted: indexer, compressor, insertion"),
])  # fmt: skip
def test_what_deepseek_v4_1_does_not_have_is_refused_by_name(configured, monkeypatch, said, platform, parts, why):
    config, _ = configured
    monkeypatch.setattr(sys.modules["vllm.platforms"].current_platform, "is_cpu", lambda: platform)
    monkeypatch.setenv("DSV4_VLLM_PARTS", parts)
    plugin.register()
    config(model=V41)  # nothing is asked for
    with pytest.raises(ValueError, match=why):
        config("DSV4_GLUON", model=V41)
    assert "is on" not in said()


@pytest.mark.parametrize("parts, moe, refused", [
    ("indexer,experts", "deep_gemm_mega_moe", True), ("indexer,experts", "auto", False),
    ("indexer", "deep_gemm_mega_moe", False),
])  # fmt: skip
def test_experts_beside_a_backend_that_would_not_call_them_are_refused(configured, monkeypatch, parts, moe, refused):
    """vLLM's fused kernels for experts and the exchange between ranks go around its layer of experts."""
    config, _ = configured
    monkeypatch.setitem(sys.modules, "vllm.config.kernel", ModuleType("vllm.config.kernel"))
    sys.modules["vllm.config.kernel"].MEGA_MOE_BACKENDS = frozenset({"deep_gemm_mega_moe"})
    monkeypatch.setenv("DSV4_VLLM_PARTS", parts)
    plugin.register()
    config(model=V4, moe=moe)  # nothing is asked for
    if refused:
        with pytest.raises(ValueError, match="--moe-backend: got deep_gemm_mega_moe with experts in DSV4_VLLM_PARTS"):
            config("DSV4_GLUON", model=V4, moe=moe)
    else:
        config("DSV4_GLUON", model=V4, moe=moe)


def test_context_parallel_prefill_of_deepseek_v4_1_is_refused_by_name(configured):
    """vLLM 0.33 has it, and its layer then writes the rows of all ranks."""
    config, _ = configured
    plugin.register()
    config(model=V41, ranks=2)
    with pytest.raises(ValueError, match="--prefill-context-parallel-size: got 2; accepted: 1"):
        config("DSV4_GLUON", model=V41, ranks=2)


@pytest.mark.parametrize("model, name", [(V4, "DeepSeek-V4"), (V41, "DeepSeek-V4.1")])
def test_a_backend_for_one_kind_of_layers_is_refused_for_deepseek_v4(configured, model, name):
    """Its layers look at --attention-backend alone."""
    config, _ = configured
    plugin.register()
    why = f"backend_per_kind: got DSV4_GLUON for mla_attention of {name}; accepted: dense models; {name} needs"
    with pytest.raises(ValueError, match=why):
        config(model=model, kinds=["mla_attention"])


@pytest.mark.parametrize(
    "model, accepted",
    [(V4, ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla")), (V41, ("auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla"))],
)
@pytest.mark.parametrize("dtype", ["fp8_e5m2", "bfloat16"])
def test_rows_that_vllm_would_not_make_are_refused(configured, dtype, model, accepted):
    """vLLM interprets every fp8 name as V4's rows of e4m3."""
    config, _ = configured
    plugin.register()
    config(model=model, cache_dtype=dtype)  # off
    config("DSV4_GLUON", model=DENSE, cache_dtype=dtype)  # the dense backend rejects for itself
    for one in accepted:
        config("DSV4_GLUON", model=model, cache_dtype=one)
    with pytest.raises(ValueError, match=f"--kv-cache-dtype: got {dtype}; accepted: {', '.join(accepted)}"):
        config("DSV4_GLUON", model=model, cache_dtype=dtype)


def test_rows_of_v4_1_are_asked_for_by_the_variable_or_by_vllms_name_for_them(configured, monkeypatch):
    config, _ = configured
    plugin.register()
    assert not choice.own_rows(configuration(model=V41))
    assert choice.own_rows(configuration(model=V41, cache_dtype="nvfp4_ds_mla"))
    monkeypatch.setenv("DSV4_VLLM_ROWS", "v41")
    assert choice.own_rows(configuration(model=V41)) and choice.own_rows(configuration(cache_dtype="fp8_ds_mla"))
    with pytest.raises(ValueError, match="DSV4_VLLM_ROWS: got v41 for DeepSeek-V4; accepted: nothing"):
        config("DSV4_GLUON", model=V4)
    monkeypatch.setenv("DSV4_VLLM_ROWS", "v5")
    with pytest.raises(ValueError, match="DSV4_VLLM_ROWS: got 'v5'; accepted: v41, or nothing"):
        config("DSV4_GLUON", model=V41)


def test_another_backend_contradicts_the_switch(configured, monkeypatch):
    config, _ = configured
    plugin.register()
    config("FLASHMLA_SPARSE", model=V4)
    monkeypatch.setenv("DSV4_VLLM", "1")
    config("FLASH_ATTN", model=DENSE)
    with pytest.raises(
        ValueError, match="--attention-backend: got FLASHMLA_SPARSE with DSV4_VLLM=1; accepted: DSV4_GLUON"
    ):
        config("FLASHMLA_SPARSE", model=V4)


@pytest.mark.parametrize("switch, ours", [("", False), ("1", True)])
def test_each_configuration_decides_for_itself(monkeypatch, switch, ours):
    """An engine that asks for dsv4 changes nothing for the next one of its process."""
    monkeypatch.setenv("DSV4_VLLM", switch)
    assert choice.v4_is_ours(configuration("DSV4_GLUON", model=V4))
    assert choice.v4_is_ours(configuration(model=V4)) is ours
    assert not choice.v4_is_ours(configuration("FLASHMLA_SPARSE", model=V4))


@pytest.mark.parametrize("named, ours", [("indexer", True), ("compressor", False), ("", False)])
def test_the_indexer_is_chosen_when_a_layer_makes_it(monkeypatch, named, ours):
    """The parts that are named decide, and the configuration of the model that is being built."""
    building = []
    modules = {
        "vllm.config": dict(get_current_vllm_config=lambda: building[-1]),
        "vllm.models.deepseek_v4": dict(attention=SimpleNamespace(SparseAttnIndexer=lambda: "theirs")),
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(indexer, "Indexer", lambda: "ours")
    monkeypatch.setenv("DSV4_VLLM", "")
    monkeypatch.setenv("DSV4_VLLM_PARTS", named)
    install.the_indexer()
    install.the_indexer()  # twice is once
    for backend, wanted in (("DSV4_GLUON", "ours" if ours else "theirs"), (None, "theirs")):
        building.append(configuration(backend, model=V4))
        assert sys.modules["vllm.models.deepseek_v4"].attention.SparseAttnIndexer() == wanted


@pytest.mark.parametrize("layer, ours", [(SimpleNamespace(served_by_dsv4=True), True), (SimpleNamespace(), False)])
def test_draft_layers_follow_those_of_their_target(monkeypatch, layer, ours):
    """vLLM drops --attention-backend from the configuration of a draft model."""
    monkeypatch.delenv("DSV4_VLLM", raising=False)
    assert choice.v4_is_ours(configuration(model=V4, layers=[layer])) is ours
    assert v4.Forward.served_by_dsv4


@pytest.mark.parametrize(
    "switch, way",
    [("", r"\. Drop --attention-backend DSV4_GLUON for"), ("1", r"\. DSV4_VLLM=0 gives .* drop --attention-b")],
)
def test_a_refusal_says_how_to_get_vllms_own_attention(monkeypatch, switch, way):
    """Where the option names the backend, DSV4_VLLM=0 alone would end in an unknown name."""
    monkeypatch.setenv("DSV4_VLLM", switch)
    with pytest.raises(ValueError, match=way):
        plugin.refuse("x", 1, "2")


def test_a_configuration_from_another_process_switches_it_on(configured, monkeypatch):
    """Before vLLM has called register() in this process, or after."""
    _, installed = configured
    monkeypatch.setattr(install, "backend_name", lambda: None)
    sys.modules["vllm.v1.attention.backends.registry"].AttentionBackendEnum = {"DSV4_GLUON": "the member"}
    assert install.backend_member() == "the member" and not installed
    plugin.register()
    assert installed == [1]
    assert install.backend_member() == "the member" and installed == [1, 1]


def test_a_process_that_does_not_load_the_plug_in_refuses_the_name_of_the_backend(configured, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    why = "VLLM_PLUGINS: got 'other' in a process with --attention-backend DSV4_GLUON; accepted: a list with dsv4"
    with pytest.raises(ValueError, match=why):
        install.backend_member()


@pytest.mark.parametrize("listed, allowed", [(None, True), ("other,dsv4", True), ("other", False), ("", False)])
def test_a_list_of_plug_ins_has_to_name_this_one(monkeypatch, listed, allowed):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if listed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", listed)
    assert plugin.plugin_allowed() is allowed


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
        (compressor.forward, f"{contract.COMPRESSOR}.forward"),
        (v4.Forward.forward_mqa, f"{contract.FLASHMLA}.forward_mqa"),
        (v4.Forward.get_padded_num_q_heads, f"{contract.FLASHMLA}.get_padded_num_q_heads"),
        *((getattr(v41.Forward, name), f"{contract.FLASHMLA41}.{name}") for name in V41_METHODS),
        (v41.insert_cache, "vllm.models.deepseek_v41.compressor.DeepseekCompressor.insert_cache"),
        (v41.record_rule(bool), "vllm.models.deepseek_v41.attention._use_v41_mxfp8_kv_record"),
        (v41.key_width(max), "vllm.models.deepseek_v41.attention._indexer_k_cache_head_dim"),
        (v41.context_rows(print), "vllm.models.deepseek_v41.nvidia.dspark._insert_context_kv"),
    ],
)
def test_what_is_replaced_takes_the_same_parameters(ours, theirs):
    assert list(inspect.signature(ours).parameters) == RECORDED["parameters"][theirs]


def compressing(states, tokens, requests, positions, block_table, slots, norm_weight, cos_sin, pages, ratio):
    """(vLLM's compressor, its metadata, positions), as far as the last step looks at them."""
    longer = [torch.cat([x, x.new_full((3,), 9)]) for x in (requests, positions)]  # buffers are
    theirs = SimpleNamespace(
        state_cache=SimpleNamespace(prefix="states", kv_cache=states),
        k_cache_prefix="rows",
        compress_ratio=ratio,
        _static_forward_context=dict(rows=SimpleNamespace(kv_cache=pages)),
        use_fp4_cache=False,
        rms_norm_eps=1e-6,
        head_dim=norm_weight.shape[0],
        norm=SimpleNamespace(weight=norm_weight),
    )
    found = dict(
        states=SimpleNamespace(slot_mapping=tokens, token_to_req_indices=longer[0], block_table=block_table),
        rows=SimpleNamespace(slot_mapping=slots),
    )
    return theirs, found, longer[1]


@pytest.mark.parametrize("kind", ["csa", "hca", "indexer"])
def test_the_compressor_packs_rows_of_states_in_vllms_pages(kind):
    def run(cos_sin, out, **given):
        theirs, found, positions = compressing(**given, cos_sin=cos_sin, pages=paged_states.engine_pages(out))
        compressor.store(theirs, found, positions, cos_sin)

    before = plugin.calls["compress"]
    paged_states.assert_rows(kind, run)
    assert plugin.calls["compress"] == before + 1


@pytest.mark.parametrize(
    "fp4, dtype, name", [(True, torch.uint8, "indexer_kv_dtype"), (False, torch.bfloat16, "--kv-cache-dtype")]
)
def test_other_rows_are_refused_by_name(fp4, dtype, name):
    given, _, _ = paged_states.call("hca", [(0, 1)])
    theirs, found, positions = compressing(
        **{k: x for k, x in given.items() if k != "out"}, pages=torch.zeros(1, 1, 1, dtype=dtype)
    )
    theirs.use_fp4_cache = fp4
    with pytest.raises(ValueError, match=f"{name}: got"):
        compressor.store(theirs, found, positions, given["cos_sin"])


@pytest.mark.parametrize("heads", [0, 129])
def test_heads_of_a_rank_are_counted(heads):
    with pytest.raises(ValueError, match=f"num_attention_heads: got {heads} on one rank; accepted: 1 to 128"):
        v4.Forward.get_padded_num_q_heads(heads)
    assert [v4.Forward.get_padded_num_q_heads(n) for n in (1, 8, 100)] == [1, 8, 100]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prefill_from_a_workspace_looks_at_nothing_behind_the_lengths(dtype):
    """The call is vLLM's of FlashMLA: by keyword, with a bf16 workspace and lists that are only partly filled."""
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
    wanted, low = (
        reference.v4_attention(q, rows[:30, 0].to(dtype), seen, p_dtype=rounded, **common)[0]
        for rounded in (None, dtype)
    )
    assert_right(out, wanted, low)
