"""CUDA C++ through clang: which clang, which headers, what its errors become."""

from pathlib import Path

import pytest

from softsm.doors.cuda import compile as cc


def test_a_machine_without_clang_says_what_is_missing(monkeypatch):
    monkeypatch.setenv("SOFTSM_CLANG", "/nowhere/clang++")
    with pytest.raises(cc.CompileError, match="no clang 20 or newer was found .*nowhere.*apt install clang-22"):
        cc.find_clang()


def test_headers_are_a_toolkits_where_there_is_one(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert "-nocudainc" in cc.headers([])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert "-nocudainc" in cc.headers([])  # a folder without headers
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").write_text("")
    assert cc.headers([])[0] == f"--cuda-path={tmp_path}"
    assert cc.headers(["--cuda-path=/mine"])[0] == "-idirafter"


def test_what_the_runtime_lacks_is_named(monkeypatch):
    script = 'echo "x.o: undefined reference to \\`cudaGraphLaunch\'" >&2; exit 1'
    with pytest.raises(cc.CompileError, match="runtime has no cudaGraphLaunch$"):
        cc.run(["sh", "-c", script])
    with pytest.raises(cc.CompileError, match="^clang failed:\nx.cu:3: error"):
        cc.run(["sh", "-c", "echo 'x.cu:3: error' >&2; exit 1"])


def test_both_halves_of_the_runtime_have_the_same_functions():
    from softsm.doors.cuda.runtime import SERVED

    text = (Path(cc.__file__).parent / "host.cpp").read_text()
    struct = text[text.index("struct Served {") : text.index("static Served served;")]
    members = [line.split("(*")[1].split(")")[0] for line in struct.splitlines() if "(*" in line]
    assert members == list(SERVED)


def test_cluster_dims_are_those_of_the_annotation():
    text = """
@.str = private unnamed_addr constant [15 x i8] c"softsm_cluster\\00", section "llvm.metadata"
@.str1 = private unnamed_addr constant [5 x i8] c"p.cu\\00", section "llvm.metadata"
@.args = private unnamed_addr constant { i32, i64 } { i32 4, i64 2 }, section "llvm.metadata"
@.mine = private unnamed_addr constant [5 x i8] c"mine\\00", section "llvm.metadata"
@llvm.global.annotations = appending global [2 x { ptr, ptr, ptr, i32, ptr }] [{ ptr, ptr, ptr, i32, ptr } \
{ ptr @_Z1kv, ptr @.str, ptr @.str1, i32 4, ptr @.args }, { ptr, ptr, ptr, i32, ptr } \
{ ptr @other, ptr @.mine, ptr @.str1, i32 4, ptr @.args }], section "llvm.metadata"
"""
    assert cc.cluster_dims(text.replace("\\\n", "")) == {"_Z1kv": ["4", "2"]}
    assert cc.cluster_dims("") == {}


@pytest.mark.compile
def test_another_runtime_needs_no_other_program(monkeypatch, tmp_path):
    """What clang made of the program is kept: a function that the runtime lacked costs no second compilation."""
    try:
        cc.find_clang()
    except cc.CompileError as problem:
        pytest.skip(str(problem))
    monkeypatch.setattr(cc, "cache_folder", lambda: tmp_path / "cache")
    (tmp_path / "p.cu").write_text("__global__ void k() {}\nint main() { k<<<1, 1>>>(); }\n")
    first = cc.compiled(tmp_path / "p.cu", "sm_90a")
    commands = []
    run = cc.run
    monkeypatch.setattr(cc, "run", lambda command: commands.append(command) or run(command))
    assert cc.compiled(tmp_path / "p.cu", "sm_90a") == first and len(commands) == 1  # which files it includes
    monkeypatch.setattr(cc, "LINK", (*cc.LINK, "-Wl,-O1"))
    second = cc.compiled(tmp_path / "p.cu", "sm_90a")
    assert second.library != first.library and second.ptx == first.ptx
    assert not any(str(tmp_path / "p.cu") == word for command in commands[2:] for word in command)
