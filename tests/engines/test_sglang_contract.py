"""SGLang's calls against dsv4's functions, by its source, which is read and not run: `pip install --no-deps sglang` is
enough. Its indexer runs on a CPU, in torch, and is compared with dsv4's. Whole models in SGLang on a CPU are in
test_sglang_deepseek_v4.py and test_sglang_dense.py."""

import ast
import functools
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from agreement import assert_same
from engines_here import needs

import dsv4
from dsv4.caches.formats import MXFP8_528, MXFP8_528_INTERLEAVED, NVFP4_288, NVFP4_288_INTERLEAVED
from dsv4.integrations import flash_mla, sglang
from dsv4.integrations.sglang import indexer, install, rows, v4

installed = needs("sglang")


def source(module: str) -> ast.Module:
    """The source of a module of SGLang, which is not imported."""
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    return ast.parse((root.parent / module.replace(".", "/")).with_suffix(".py").read_text())


def function(module: str, name: str) -> ast.FunctionDef:
    found = [x for x in ast.walk(source(module)) if isinstance(x, ast.FunctionDef) and x.name == name]
    assert len(found) == 1, f"{module} has {len(found)} functions {name}"
    return found[0]


@installed
@pytest.mark.parametrize("name", ["flash_mla_with_kvcache", "flash_mla_sparse_fwd"])
def test_parameters_are_those_of_the_function_that_is_replaced(name):
    theirs = function(install.INTERFACE, name).args
    ours = inspect.signature(getattr(v4, name)).parameters
    assert list(ours) == [a.arg for a in theirs.args + theirs.kwonlyargs]
    assert [n for n, p in ours.items() if p.kind is p.KEYWORD_ONLY] == [a.arg for a in theirs.kwonlyargs]


@installed
@pytest.mark.parametrize("target", [*install.REPLACED, *install.BYPASSES])
def test_every_hooked_function_exists(target):
    module, _, name = target.rpartition(".")
    function(module, name)


@installed
def test_the_backend_takes_the_functions_from_the_module_that_is_hooked():
    backend = ast.unparse(source("sglang.srt.layers.attention.deepseek_v4_backend"))
    assert "flash_mla_interface.flash_mla_with_kvcache, use_legacy=" in backend
    assert f"from {install.INTERFACE} import flash_mla_sparse_fwd" in backend


@installed
def test_the_backend_whose_start_checks_the_hooks_exists():
    module, cls, name = install.V4_BACKEND.rsplit(".", 2)
    (found,) = [x for x in ast.walk(source(module)) if isinstance(x, ast.ClassDef) and x.name == cls]
    (start,) = [x for x in found.body if isinstance(x, ast.FunctionDef) and x.name == name]
    assert [a.arg for a in start.args.args[:2]] == ["self", "model_runner"]
    assert "hf_text_config" in ast.unparse(start) and "'deepseek_v41'" in ast.unparse(start)


@installed
def test_the_names_that_the_dense_backend_is_added_to_exist():
    choices = ast.unparse(source("sglang.srt.arg_groups.choices"))
    assert "add_attention_backend_choices = ATTENTION_BACKEND_CHOICES.extend" in choices
    for model in ("Gemma4", "GptOssForCausalLM"):  # lists that name backends, where dsv4_gluon passes as triton
        assert model in ast.unparse(source("sglang.srt.arg_groups.model_hook"))
    assert "attention_backends_of(resolved_view(server_args))" in ast.unparse(
        source("sglang.srt.arg_groups.model_hook")
    )


@pytest.fixture
def hooked(monkeypatch):
    """register() with a SGLang of stubs that only note -> what was noted."""
    noted: dict = {}

    def stub(name: str, **contents) -> None:
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)

    names: list[str] = ["triton"]
    stub(
        "sglang.srt.plugins.hook_registry",
        HookRegistry=types.SimpleNamespace(register=lambda t, f, kind: noted.update({t: f}), _patched=set()),
        HookType=types.SimpleNamespace(REPLACE="replace", BEFORE="before", AROUND="around"),
    )
    stub(
        "sglang.srt.arg_groups",
        choices=types.SimpleNamespace(ATTENTION_BACKEND_CHOICES=names, add_attention_backend_choices=names.extend),
        model_hook=types.SimpleNamespace(attention_backends_of=lambda x: (x, x)),
    )
    stub(
        "sglang.srt.layers.attention.attention_registry",
        register_attention_backend=lambda name: lambda f: noted.update({name: f}),
    )

    def register(version: str = sglang.TESTED) -> dict:
        monkeypatch.setattr(sglang.metadata, "version", lambda name: version)
        sglang.register()
        return noted

    return register


def test_off_it_hooks_nothing(monkeypatch, hooked):
    monkeypatch.delenv("DSV4_SGLANG", raising=False)
    assert hooked() == {}


def test_on_it_replaces_two_functions_and_refuses_the_bypasses(monkeypatch, hooked):
    monkeypatch.setenv("DSV4_SGLANG", "1")
    noted = hooked()
    assert noted[f"{install.INTERFACE}.flash_mla_with_kvcache"] is v4.flash_mla_with_kvcache
    assert noted[f"{install.INTERFACE}.flash_mla_sparse_fwd"] is v4.flash_mla_sparse_fwd
    for target in install.BYPASSES:
        with pytest.raises(RuntimeError, match="DSV4_SGLANG=1, but SGLang uses a kernel of its own"):
            noted[target]()


def test_a_hook_that_sglang_did_not_apply_stops_a_v4_backend(monkeypatch, hooked):
    """SGLang logs a target that it cannot import, and continues."""
    monkeypatch.setenv("DSV4_SGLANG", "1")
    check = hooked()[install.V4_BACKEND]
    patched = sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry._patched
    patched |= {*install.REPLACED, *install.BYPASSES}
    check(None, runner())
    patched.remove(f"{install.INTERFACE}.flash_mla_sparse_fwd")
    with pytest.raises(RuntimeError, match="did not apply the hooks on .*flash_mla_sparse_fwd; its log says why"):
        check(None, runner())


def runner(model: str = "deepseek_v4"):
    """SGLang's runner of a model, as far as the plug-in looks at it when a DeepSeek-V4 backend starts."""
    config = types.SimpleNamespace(hf_text_config=types.SimpleNamespace(model_type=model))
    return types.SimpleNamespace(model_config=config)


def test_parts_that_deepseek_v4_1_does_not_have_are_refused_by_name(monkeypatch, hooked):
    """It has the backend of DeepSeek-V4; the hooks of these parts are on functions that it does not call."""
    monkeypatch.setenv("DSV4_SGLANG", "1")
    check = hooked()[install.V4_BACKEND]
    patched = sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry._patched
    for parts in ("", "indexer,insertion", "compressor", "indexer,experts"):
        monkeypatch.setenv("DSV4_SGLANG_PARTS", parts)
        patched |= {*install.replaced(), *install.wrapped(), *install.BYPASSES}
        check(None, runner())
        if not {"compressor", "experts"} & set(parts.split(",")):
            check(None, runner("deepseek_v41"))
            continue
        why = r"got (compressor|experts) for DeepSeek-V4\.1; accepted: indexer, insertion. DSV4_SGLANG=0 gives"
        with pytest.raises(ValueError, match=f"DSV4_SGLANG_PARTS: {why}"):
            check(None, runner("deepseek_v41"))


@installed
@pytest.mark.parametrize("target", install.INDEXERS_V41)
def test_methods_of_the_indexer_of_v4_1_are_those_that_are_replaced(target):
    module, _, name = target.rsplit(".", 2)
    ours = inspect.signature(install.INDEXERS_V41[target]).parameters
    assert list(ours) == [a.arg for a in function(module, name).args.args]
    types_ = ast.unparse(source(f"{install.INDEXER_V41}.types"))
    for field in (
        "indexer", "layer_id", "compress_ratio", "freqs_cis", "q_lora", "positions", "req_rows", "paged_metadata",
        "out_page_indices",
    ):  # fmt: skip
        assert f"    {field}: " in types_
    blocks = ast.unparse(source(f"{install.INDEXER_V41}.dense_blocks"))
    assert "self.topk_blocks = " in blocks and "self.block_size = " in blocks and "    blocks: torch.Tensor" in blocks


def test_off_it_says_whose_name_dsv4_is(monkeypatch):
    monkeypatch.delenv("DSV4_SGLANG", raising=False)
    said = []
    monkeypatch.setattr(sglang.logger, "filters", [lambda record: said.append(record.getMessage())])
    sglang.register()
    assert "DSV4_SGLANG=1 switches it on (--attention-backend dsv4 is SGLang's own)" in said[0]


def test_the_dense_name_is_known_and_passes_lists_where_triton_passes(monkeypatch, hooked):
    monkeypatch.setenv("DSV4_SGLANG", "1")
    assert sglang.BACKEND in hooked()
    there = sys.modules["sglang.srt.arg_groups"]
    assert there.choices.ATTENTION_BACKEND_CHOICES == ["triton", sglang.BACKEND]
    hooked()  # twice is once
    assert there.choices.ATTENTION_BACKEND_CHOICES == ["triton", sglang.BACKEND]
    assert there.model_hook.attention_backends_of(sglang.BACKEND) == ("triton", "triton")
    assert there.model_hook.attention_backends_of("fa3") == ("fa3", "fa3")


def test_an_error_ends_the_process(monkeypatch, hooked):
    monkeypatch.setenv("DSV4_SGLANG", "1")
    monkeypatch.delitem(sys.modules, "sglang.srt.arg_groups")
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups", None)  # an ImportError
    with pytest.raises(SystemExit, match="DSV4_SGLANG=0 gives SGLang's own attention"):
        hooked()


def test_another_version_ends_the_process(monkeypatch, hooked):
    """SGLang swallows exceptions of a plug-in, and SystemExit is none."""
    monkeypatch.setenv("DSV4_SGLANG", "1")
    with pytest.raises(SystemExit, match="got SGLang 0.6.0; accepted: 0.5.23"):
        hooked("0.6.0")


@installed
@pytest.mark.slow
def test_sglangs_own_loader_ends_with_the_reason():
    code = "import sglang_run; from sglang.srt.plugins import load_plugins; load_plugins(); print('went on')"
    environment = os.environ | {"DSV4_SGLANG": "yes", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "went on" not in done.stdout
    assert "DSV4_SGLANG: got 'yes'; accepted: 1 (on), 0 or unset (off)" in done.stderr, done.stderr[-3000:]


@pytest.mark.parametrize(
    "options, name", [(dict(use_legacy=False), "use_legacy"), (dict(kv_format="V41"), "kv_format")]
)
def test_rows_of_other_models_are_refused_by_name(options, name):
    q, pages = torch.zeros(1, 1, 2, 512, dtype=torch.bfloat16), torch.zeros(1, 64, 1, 584, dtype=torch.uint8)
    indices = torch.zeros(1, 1, 64, dtype=torch.int32)
    with pytest.raises(ValueError, match=name):
        v4.flash_mla_with_kvcache(q, pages, None, None, 512, None, is_fp8_kvcache=True, indices=indices, **options)


def test_rows_of_v41_as_sglang_lays_them_out():
    """Its layouts v41 and v41_new hold the same values: planar, and with use_legacy=False interleaved."""
    q = torch.randn(1, 1, 2, 512, dtype=torch.bfloat16)
    lists = torch.arange(64, dtype=torch.int32).view(1, 1, 64)
    found = []
    for window, compressed in ((MXFP8_528, NVFP4_288), (MXFP8_528_INTERLEAVED, NVFP4_288_INTERLEAVED)):
        rows = torch.linspace(-2, 2, 256 * 512).view(256, 512)
        pages = [
            cls.pack(rows, rows_per_page=256, format=format).page_view()[:, :, None]
            for cls, format in ((dsv4.Mxfp8Cache, window), (dsv4.Nvfp4Cache, compressed))
        ]
        out, _ = v4.flash_mla_with_kvcache(
            q, pages[0], None, None, 512, None, is_fp8_kvcache=True, indices=lists, extra_k_cache=pages[1],
            extra_indices_in_kvcache=lists + 100, use_legacy=not window.interleaved,
        )  # fmt: skip
        found.append(out)
    assert torch.equal(*found) and found[0].any()


def test_a_decode_and_a_prefill_as_sglang_calls_them():
    """Lists padded to 64, lengths at least 1 with index -1, a flat workspace of bf16 rows."""
    torch.manual_seed(0)
    q = torch.randn(3, 1, 8, 512, dtype=torch.bfloat16)
    pages = torch.zeros(2, 256, 1, 584, dtype=torch.uint8)
    dsv4.Fp8Cache.from_pages(pages).write(torch.arange(512), torch.randn(512, 512))
    indices = torch.full((3, 1, 64), -1, dtype=torch.int32)
    indices[0, 0, :40], indices[1, 0, :1] = torch.arange(40, dtype=torch.int32), 300
    lengths, sink = torch.tensor([40, 1, 1], dtype=torch.int32), torch.zeros(8)
    sglang.calls.clear()
    out = v4.flash_mla_with_kvcache(
        q=q, k_cache=pages, head_dim_v=512, block_table=None, cache_seqlens=None, tile_scheduler_metadata=object(),
        softmax_scale=512**-0.5, is_fp8_kvcache=True, indices=indices, topk_length=lengths, attn_sink=sink,
        extra_k_cache=None, extra_indices_in_kvcache=None, extra_topk_length=None,
    )[0]  # fmt: skip
    assert not out[2].any()  # its one entry is -1
    kv = dsv4.Fp8Cache.from_pages(pages).unpack().bfloat16().view(-1, 1, 512)
    again = v4.flash_mla_sparse_fwd(
        q=q[:, 0], kv=kv, indices=indices, sm_scale=512**-0.5, d_v=512, attn_sink=sink, topk_length=lengths
    )[0]
    wanted = flash_mla.flash_mla_sparse_fwd(q[:, 0], kv, indices, 512**-0.5, 512, sink, lengths)[0]
    assert torch.equal(again, wanted)
    assert_same(again, out[:, 0])
    assert sglang.calls == {"decode": 1, "prefill": 1}


@installed
def test_parameters_of_the_indexer_are_those_of_the_method_that_is_replaced():
    module, _, name = install.INDEXER.rsplit(".", 2)
    theirs = function(module, name).args
    assert list(inspect.signature(indexer.forward_c4_indexer).parameters) == [a.arg for a in theirs.args]


@installed
@pytest.mark.parametrize(
    "target, ours", [(install.INSERTION, rows.insert), (install.COMPRESSOR, functools.partial(rows.compressed, None))]
)
def test_parameters_of_rows_are_those_of_what_is_hooked(target, ours):
    """The compressor's function is looked up in the module that is hooked, and defined in another."""
    name = target.rpartition(".")[2]
    pool = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
    compress = "sglang.kernels.ops.attention.dsv4.compress"
    theirs = function(pool if target == install.INSERTION else compress, name).args
    parameters = inspect.signature(ours).parameters
    assert [*parameters][: len(theirs.args)] == [a.arg for a in theirs.args]
    assert {*parameters} == {a.arg for a in theirs.args + theirs.kwonlyargs}
    user = ast.unparse(source(pool if target == install.INSERTION else target.rpartition(".")[0]))
    assert f"{name}(" in user


def test_compressor_and_insertion_are_hooked_where_they_are_asked_for(monkeypatch, hooked):
    monkeypatch.setenv("DSV4_SGLANG", "1")
    monkeypatch.delenv("DSV4_SGLANG_PARTS", raising=False)
    assert not {install.COMPRESSOR, install.INSERTION} & hooked().keys()
    monkeypatch.setenv("DSV4_SGLANG_PARTS", "compressor,insertion")
    noted = hooked()
    assert noted[install.COMPRESSOR] is rows.compressed and noted[install.INSERTION] is rows.insert
    with pytest.raises(RuntimeError, match="did not apply the hooks on .*fused_norm_rope, .*compress_norm_rope_store"):
        noted[install.V4_BACKEND](None, runner())


def test_the_indexer_is_replaced_where_it_is_asked_for(monkeypatch, hooked):
    monkeypatch.setenv("DSV4_SGLANG", "1")
    monkeypatch.delenv("DSV4_SGLANG_PARTS", raising=False)
    assert install.INDEXER not in hooked()
    monkeypatch.setenv("DSV4_SGLANG_PARTS", "indexer")
    assert hooked()[install.INDEXER] is indexer.forward_c4_indexer
    with pytest.raises(RuntimeError, match="did not apply the hooks on .*forward_c4_indexer"):
        hooked()[install.V4_BACKEND](None, runner())
    monkeypatch.setenv("DSV4_SGLANG_PARTS", "indexer,sampler")
    with pytest.raises(SystemExit, match="DSV4_SGLANG_PARTS: got sampler; accepted: any of indexer"):
        hooked()


@installed
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_indexer_chooses_what_sglangs_own_chooses(tmp_path):
    """Decode and prefill, lists that have to choose and lists that take all; scores are exact, so the sets differ at
    most among equal scores."""
    folder = Path(__file__).parent
    result = tmp_path / "result.json"
    done = subprocess.run([sys.executable, folder / "sglang_index.py", result], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(result.read_text())
    assert found["calls"] == {"index": 2}
    for mode in ("DECODE", "EXTEND"):
        one = found[mode]
        assert one["ours"] == one["theirs"] and one["chosen"] > one["queries"]
        assert one["ours twice"] == one["ours hidden"] == 0
    assert found["EXTEND"]["ours rows agree"] and found["EXTEND"]["theirs rows agree"]


@installed
@pytest.mark.slow
def test_the_dense_backend_with_windows_sinks_and_shared_keys():
    folder = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder.parent / "dsv4"), *sys.path])}
    done = subprocess.run(
        [sys.executable, folder / "sglang_dense_calls.py"], env=environment, capture_output=True, text=True
    )
    assert done.stdout.endswith("all agree\n"), done.stderr[-4000:]


@installed
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_indexer_of_v4_1_chooses_what_sglangs_own_chooses(tmp_path):
    """Layers that look at all rows, the one that keeps blocks, and those that choose among these; scores are exact, so
    the sets differ at most among equal ones."""
    result = tmp_path / "result.json"
    script = Path(__file__).with_name("sglang_v41_index.py")
    done = subprocess.run([sys.executable, script, result], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(result.read_text())
    assert found.pop("calls") == {"index": 8}
    assert {name.split()[0] for name in found} == {"all", "source", "consumer", "blocks"} and len(found) == 8
    for theirs, ours in found.values():
        assert theirs == ours
    assert found["consumer 1"][0] != found["source 1"][0]  # the blocks leave something out
