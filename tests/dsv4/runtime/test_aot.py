"""Kernels compiled ahead of time, without a GPU: what is written, and what is rejected by name."""

import json
import shutil
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
from dsv4.commands import variants  # noqa: E402
from dsv4.commands.variants import problems  # noqa: E402
from dsv4.runtime import aot, calls, dispatch, driver  # noqa: E402


@pytest.fixture(scope="module")
def launches():
    p, *_ = problems(128, "bf16", "dense", "split")
    return calls.launches_of(p, dispatch.compile_target("sm_90a"))


@pytest.fixture(scope="module")
def written(launches, tmp_path_factory):
    """Compile the combine kernel, the smallest one."""
    launch = launches[1]
    return aot.write(tmp_path_factory.mktemp("aot"), launch.kernel, launch.arguments, launch.constants)


@pytest.fixture
def compiled(written, tmp_path):
    """A copy that may be changed."""
    for file in (written, written.with_suffix(".cubin")):
        shutil.copy(file, tmp_path)
    return tmp_path / written.name


def test_forward_says_what_it_launches(launches):
    assert [launch.kernel.__name__ for launch in launches] == ["fmha_forward", "combine"]


def test_written_files_are_complete_and_named_by_content(compiled, launches):
    record = aot.read(compiled)
    arguments, constants = launches[1].arguments, launches[1].constants
    assert compiled.stem == aot.variant("combine", aot.argument_types(arguments), constants)
    assert record["arch"] == "sm_90a" and record["threads"] == 32 and record["entry"] == "combine"
    assert compiled.with_suffix(".cubin").read_bytes()[:4] == b"\x7fELF"
    assert aot.variant("combine", record["arguments"], {**constants, "D": 64}) != compiled.stem


def test_a_kernel_that_is_specialised_for_a_number_is_not_written(launches, tmp_path):
    """Its file would have the name of the others."""
    params = [SimpleNamespace(name="rows", is_constexpr=False, do_not_specialize=False)]
    with pytest.raises(TypeError, match="round: its argument rows needs do_not_specialize"):
        aot.write(tmp_path, SimpleNamespace(__name__="round", params=params), [3], {})


@pytest.mark.skipif(
    (dispatch.triton_version() or (0, 0)) < (3, 9), reason="compiling for Blackwell needs triton >= 3.9"
)
@pytest.mark.parametrize("kind", ["combine", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dense", "v4"))])
def test_ptx_of_a_b300_is_that_of_a_b200(launches, kind):
    """But for the target, so what is proven of one is proven of the other."""
    some = (
        launches[1:]
        if kind == "combine"
        else variants.launches(variants.wanted([kind], [512], ["bf16"])[0], variants.Sizes(), "sm_100a")[:1]
    )
    for launch in some:
        a, b = (aot.compile_kernel(launch.kernel, launch.arguments, launch.constants, n).asm for n in (100, 103))
        assert b["ptx"].replace("sm_103a", "sm_100a") == a["ptx"] != b["ptx"] and b["cubin"][:4] == b"\x7fELF"


def test_a_tampered_cubin_is_refused(compiled):
    cubin = compiled.with_suffix(".cubin")
    cubin.write_bytes(cubin.read_bytes()[:-1] + b"?")
    with pytest.raises(RuntimeError, match=f"{compiled.name}: it or its cubin was changed"):
        aot.read(compiled)


@pytest.mark.parametrize("field", aot.FIELDS)
def test_a_record_with_any_field_changed_or_missing_is_refused(compiled, field):
    record = json.loads(compiled.read_text())
    value = record[field]
    other = {
        str: lambda: value + "x",
        int: lambda: value + 32,
        bool: lambda: not value,
        list: lambda: [*value, "i32"],
        dict: lambda: value | {"D": 64},
    }[type(value)]()
    without = {name: x for name, x in record.items() if name != field}
    for changed in ({**record, field: other}, {**record, field: None}, without):
        compiled.write_text(json.dumps(changed))
        with pytest.raises(RuntimeError, match=compiled.stem):
            aot.read(compiled)
    compiled.write_text(json.dumps(record))
    assert aot.read(compiled) == record


def test_a_field_too_many_is_refused(compiled):
    record = json.loads(compiled.read_text())
    compiled.write_text(json.dumps(record | {"more": 1}))
    with pytest.raises(RuntimeError, match="unknown or of a wrong type: more"):
        aot.read(compiled)


def test_a_stale_file_is_refused(compiled):
    record = json.loads(compiled.read_text())
    compiled.write_text(json.dumps({**record, "sources": "0" * 64}))
    with pytest.raises(RuntimeError, match=f"{compiled.name}: stale"):
        aot.read(compiled)


def test_a_file_under_another_name_is_refused(compiled):
    other = compiled.with_name("combine-0123456789abcdef.json")
    compiled.rename(other)
    compiled.with_suffix(".cubin").rename(other.with_suffix(".cubin"))
    with pytest.raises(RuntimeError, match=f"{other.name}: its contents belong to {compiled.stem}"):
        aot.read(other)


@pytest.mark.parametrize("text", ["{", "[]", "[1, 2]", "{}", "null", "3", ""])
def test_what_is_no_record_is_refused(tmp_path, text):
    path = tmp_path / "combine-x.json"
    path.write_text(text)
    path.with_suffix(".cubin").write_bytes(b"")
    with pytest.raises(RuntimeError, match="combine-x.json: not a compiled kernel"):
        aot.read(path)


def test_an_architecture_is_part_of_the_name(launches, tmp_path):
    """Both architectures merge splits with the same kernel: their files must not be confused."""
    kernel, arguments, constants = launches[1].kernel, launches[1].arguments, launches[1].constants
    paths = [aot.write(tmp_path, kernel, arguments, constants, arch) for arch in ("sm_90a", "sm_100a")]
    assert paths[0] != paths[1] and [aot.read(path)["arch"] for path in paths] == ["sm_90a", "sm_100a"]


def test_a_kernel_from_a_file_is_launched_as_triton_launches_it(compiled, launches, monkeypatch):
    called = []

    def function(name):
        def noted(*given):
            called.append(name)
            if name == "cuModuleGetFunction":
                given[0]._obj.value = 77
            return 0

        return noted

    names = "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"
    monkeypatch.setattr(driver, "cuda", lambda: SimpleNamespace(**{name: function(name) for name in names}))
    launch = launches[1]
    found = aot.loaded(str(compiled.parent), compiled.stem, 0)
    assert called == list(names) and found.handle == 77

    made = aot.compile_kernel(launch.kernel, launch.arguments, launch.constants)
    by_triton = driver.Function.of(SimpleNamespace(metadata=made.metadata, src=made.src, function=77), 0)
    assert found._replace(types=()) == by_triton._replace(types=())
    fixed = [launch.constants.get(p.name) for p in launch.kernel.params[len(launch.arguments) :]]
    one, other = (
        driver.DriverLaunch(x, (1, 1, 1), arguments)
        for x, arguments in ((found, launch.arguments), (by_triton, [*launch.arguments, *fixed]))
    )
    assert one.parameters == other.parameters and one.places == other.places
