"""The wheel dsv4-cubins: found where it is installed, used if it fits, and what its compiler changes."""

import dataclasses
import importlib.util
import json
import sys
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dsv4
from dsv4.commands import doctor
from dsv4.runtime import aot, calls, cubins, dispatch
from dsv4.runtime.settings import settings
from dsv4.v4 import problem

ROOT = Path(__file__).parents[3]
HOPPER = (9, 0)


def forget():
    cubins.folder.cache_clear()
    cubins.compiler_of.cache_clear()
    dispatch._cuda_target.cache_clear()
    importlib.invalidate_caches()


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """An installed one, with the record of one kernel for Hopper by Triton 3.6."""
    package = tmp_path / cubins.PACKAGE
    (package / "sm_90a").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / cubins.SOURCES).write_text(aot.source_hash() + "\n")
    (package / "sm_90a" / "backward_keys-0.json").write_text(json.dumps({"triton": "3.6.0"}))
    (package / "sm_90a" / "backward_keys-0.cubin").touch()
    monkeypatch.syspath_prepend(tmp_path)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)
    forget()
    yield package
    forget()


def target():
    return dispatch.cuda_target(torch.device("cuda", 0))


def test_kernels_are_taken_from_it_where_no_directory_is_named(wheel, monkeypatch, tmp_path):
    assert target().aot == wheel / "sm_90a" and not target().aot_only
    assert cubins.folder("sm_100a") is None
    monkeypatch.setattr(settings, "aot", tmp_path)
    assert target().aot == tmp_path


def test_without_it_nothing_changes(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    forget()
    assert cubins.folder("sm_90a") is None
    forget()


def test_it_can_be_switched_off(wheel, monkeypatch):
    monkeypatch.setattr(settings, "cubins", False)
    assert target().aot is None


def test_kernels_of_other_sources_are_not_used_and_this_is_said(wheel):
    (wheel / cubins.SOURCES).write_text("0" * 64)
    with pytest.warns(UserWarning, match="compiled from other sources.*DSV4_CUBINS=0"):
        assert target().aot is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert target().aot is None


def test_a_wheel_without_a_record_of_its_sources_is_not_used(wheel):
    (wheel / cubins.SOURCES).unlink()
    with pytest.warns(UserWarning, match="dsv4_cubins: its kernels were compiled from other sources"):
        assert target().aot is None


def test_doctor_says_whether_it_is_used(wheel, monkeypatch, tmp_path):
    finding = doctor.wheel()
    assert finding.ok and finding.why == "used: compiled kernels, 1 for sm_90a"
    monkeypatch.setattr(settings, "aot", tmp_path)
    assert doctor.wheel().ok is None and "DSV4_AOT" in doctor.wheel().why
    monkeypatch.setattr(settings, "cubins", False)
    assert doctor.wheel().ok is None and "DSV4_CUBINS=0" in doctor.wheel().why
    monkeypatch.undo()
    monkeypatch.setattr(cubins, "installed", lambda: wheel)
    (wheel / cubins.SOURCES).write_text("0" * 64)
    assert doctor.wheel().ok is False and str(wheel) in doctor.wheel().why


def test_doctor_names_a_kernel_without_its_machine_code(wheel):
    (wheel / "sm_90a" / "backward_keys-0.cubin").unlink()
    finding = doctor.wheel()
    assert finding.ok is False and finding.why.startswith(f"{wheel / 'sm_90a' / 'backward_keys-0.json'}: has no .cubin")


@pytest.mark.parametrize(
    "capability, triton, says", [((9, 0), (3, 9), True), ((9, 0), (3, 6), False), ((10, 0), (3, 9), False)]
)
def test_doctor_recommends_it_where_it_is_faster(monkeypatch, capability, triton, says):
    monkeypatch.setattr(cubins, "installed", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(dispatch, "triton_version", lambda: triton)
    finding = doctor.wheel()
    assert finding.ok is None and finding.found == "not installed"
    assert ("make cubins" in finding.why) is says


def test_an_old_triton_launches_its_kernels(wheel, monkeypatch):
    monkeypatch.setattr(dispatch, "triton_version", lambda: (3, 5))
    for backward in (False, True):
        assert dispatch.kernel_module("fmha", HOPPER, backward).__name__.startswith("dsv4.fmha.kernels.sm90.")
    assert dispatch.has_kernels(torch.device("cuda", 0))
    (wheel / "sm_90a" / "backward_keys-0.json").unlink()
    with pytest.raises(RuntimeError, match="need triton >= 3.6.*or the wheel dsv4-cubins"):
        dispatch.kernel_module("fmha", HOPPER, backward=True)


@pytest.mark.parametrize("written, in_parts", [("3.6.0", True), ("3.9.0", False)])
def test_options_are_those_of_the_triton_that_compiled(wheel, written, in_parts, monkeypatch):
    """Triton 3.6 gathers FP8 rows faster with slots in two parts: whichever is installed, a call asks for the kernel
    that the directory has."""
    monkeypatch.setattr(dispatch, "triton_version", lambda: (3, 9))
    (wheel / "sm_90a" / "backward_keys-0.json").write_text(json.dumps({"triton": written}))
    pool = dsv4.Fp8Cache(torch.empty(4000 * 576 * 65, dtype=torch.uint8), 64)
    lists = torch.zeros(400, 512, dtype=torch.int32)
    p = problem.build(torch.empty(400, 128, 512, dtype=torch.bfloat16), pool, lists)
    p = dataclasses.replace(p, out=torch.empty_like(p.q))
    launch, *_ = calls.launches_of(p, target())
    assert launch.kernel.__name__ == "v4_sparse" and launch.constants["MAY_SPLIT_SLOTS"] is in_parts
    assert dispatch.compile_target("sm_90a").compiler == (3, 9)


@pytest.fixture
def tool():
    """The command that builds the wheel."""
    spec = importlib.util.spec_from_file_location("build_cubins", ROOT / "tools" / "cubins.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_a_folder_in_the_current_one_is_not_a_name_for_pip(tool, tmp_path, monkeypatch):
    """`--tree tree` must not make pip look for a package called tree."""
    run = []
    monkeypatch.setattr(tool.subprocess, "run", lambda command, **_: run.append(command))
    monkeypatch.setattr(sys, "argv", ["cubins.py", "--arch", "sm_90a", "--tree", "tree", "--out", "dist"])
    monkeypatch.chdir(tmp_path)
    tool.main()
    assert run[-1][-1] == str(tmp_path / "tree")


@pytest.mark.slow  # compiles and builds
@pytest.mark.timeout(600)
def test_one_command_builds_it(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cubins.py", "--arch", "sm_90a", "--out", str(tmp_path / "dist"),
                                      "--tree", str(tmp_path / "tree"), "--", "--kind", "dense", "--head-dim", "64",
                                      "--jobs", "1"])  # fmt: skip
    tool.main()
    (wheel,) = (tmp_path / "dist").iterdir()
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    forget()
    found = cubins.folder("sm_90a")
    assert found == tmp_path / "site" / "dsv4_cubins" / "sm_90a"
    records = [aot.read(path) for path in found.glob("*.json")]
    assert {"fmha_forward", "fmha_forward_persistent", "combine"} <= {x["kernel"] for x in records}
    if tool.OLDEST.exists():
        assert {x["triton"] for x in records} == {"3.6.0"}
    forget()
