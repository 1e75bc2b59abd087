"""SGLang's calls against dsv4's functions. SGLang has no CPU path for DeepSeek-V4, and its module needs FlashMLA's
binary, so its source is read and not run: `pip install --no-deps sglang` is enough."""

import ast
import importlib.util
import inspect
import types
from pathlib import Path

import pytest
import torch
from engines_here import needs

import dsv4
from dsv4.integrations import flash_mla, sglang

installed = needs("sglang")


def source(module: str) -> ast.Module:
    """Of a module of SGLang, which is not imported."""
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    return ast.parse((root.parent / module.replace(".", "/")).with_suffix(".py").read_text())


def function(module: str, name: str) -> ast.FunctionDef:
    found = [x for x in ast.walk(source(module)) if isinstance(x, ast.FunctionDef) and x.name == name]
    assert len(found) == 1, f"{module} has {len(found)} functions {name}"
    return found[0]


@installed
@pytest.mark.parametrize("name", ["flash_mla_with_kvcache", "flash_mla_sparse_fwd"])
def test_parameters_are_those_of_the_function_that_is_replaced(name):
    theirs = function(sglang.INTERFACE, name).args
    ours = inspect.signature(getattr(sglang, name)).parameters
    assert list(ours) == [a.arg for a in theirs.args + theirs.kwonlyargs]
    assert [n for n, p in ours.items() if p.kind is p.KEYWORD_ONLY] == [a.arg for a in theirs.kwonlyargs]


@installed
@pytest.mark.parametrize("target", sglang.BYPASSES)
def test_every_bypass_exists(target):
    module, _, name = target.rpartition(".")
    function(module, name)


@installed
def test_the_backend_takes_the_functions_from_the_module_that_is_hooked():
    backend = ast.unparse(source("sglang.srt.layers.attention.deepseek_v4_backend"))
    assert "flash_mla_interface.flash_mla_with_kvcache, use_legacy=" in backend
    assert f"from {sglang.INTERFACE} import flash_mla_sparse_fwd" in backend


def hooked(monkeypatch, version: str) -> dict:
    """register() with a registry that only notes."""
    noted: dict = {}
    registry = types.ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry = types.SimpleNamespace(register=lambda target, f, kind: noted.update({target: f}))
    registry.HookType = types.SimpleNamespace(REPLACE="replace")
    monkeypatch.setitem(__import__("sys").modules, "sglang.srt.plugins.hook_registry", registry)
    monkeypatch.setattr(sglang.metadata, "version", lambda name: version)
    sglang.register()
    return noted


def test_off_it_hooks_nothing(monkeypatch):
    monkeypatch.delenv("DSV4_SGLANG", raising=False)
    assert hooked(monkeypatch, sglang.TESTED) == {}


def test_on_it_replaces_two_functions_and_refuses_the_bypasses(monkeypatch):
    monkeypatch.setenv("DSV4_SGLANG", "1")
    noted = hooked(monkeypatch, sglang.TESTED)
    assert noted[f"{sglang.INTERFACE}.flash_mla_with_kvcache"] is sglang.flash_mla_with_kvcache
    assert noted[f"{sglang.INTERFACE}.flash_mla_sparse_fwd"] is sglang.flash_mla_sparse_fwd
    for target in sglang.BYPASSES:
        with pytest.raises(RuntimeError, match="DSV4_SGLANG=1, but SGLang uses a kernel of its own"):
            noted[target]()


def test_another_version_ends_the_process(monkeypatch):
    """SGLang swallows exceptions of a plug-in, and SystemExit is none."""
    monkeypatch.setenv("DSV4_SGLANG", "1")
    with pytest.raises(SystemExit, match="got SGLang 0.6.0; accepted: 0.5.23"):
        hooked(monkeypatch, "0.6.0")


@pytest.mark.parametrize(
    "options, name", [(dict(use_legacy=False), "use_legacy"), (dict(kv_format="V41"), "kv_format")]
)
def test_rows_of_other_models_are_refused_by_name(options, name):
    q, pages = torch.zeros(1, 1, 2, 512, dtype=torch.bfloat16), torch.zeros(1, 64, 1, 584, dtype=torch.uint8)
    with pytest.raises(ValueError, match=name):
        sglang.flash_mla_with_kvcache(q, pages, None, None, 512, None, is_fp8_kvcache=True, **options)


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
    out = sglang.flash_mla_with_kvcache(
        q=q, k_cache=pages, head_dim_v=512, block_table=None, cache_seqlens=None, tile_scheduler_metadata=object(),
        softmax_scale=512**-0.5, is_fp8_kvcache=True, indices=indices, topk_length=lengths, attn_sink=sink,
        extra_k_cache=None, extra_indices_in_kvcache=None, extra_topk_length=None,
    )[0]  # fmt: skip
    assert not out[2].any()  # its one entry is -1
    kv = dsv4.Fp8Cache.from_pages(pages).unpack().bfloat16().view(-1, 1, 512)
    again = sglang.flash_mla_sparse_fwd(
        q=q[:, 0], kv=kv, indices=indices, sm_scale=512**-0.5, d_v=512, attn_sink=sink, topk_length=lengths
    )[0]
    wanted = flash_mla.flash_mla_sparse_fwd(q[:, 0], kv, indices, 512**-0.5, 512, sink, lengths)[0]
    assert torch.equal(again, wanted)
    torch.testing.assert_close(again, out[:, 0], rtol=2**-6, atol=2**-8)
    assert sglang.calls == {"decode": 1, "prefill": 1}
