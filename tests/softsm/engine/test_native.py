"""Native code of both kinds: compiled once, found again by every process."""

import ctypes
import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numba
import pytest
from llvmlite import ir

from softsm.engine import native

I64 = ir.IntType(64)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SOFTSM_CACHE", str(tmp_path))
    return tmp_path


def add(module: ir.Module, constant: int) -> None:
    function = ir.Function(module, ir.FunctionType(I64, [I64]), "f")
    b = ir.IRBuilder(function.append_basic_block("entry"))
    b.ret(b.add(function.args[0], I64(constant)))


def test_llvm_code_is_compiled_once_and_found_again(folder):
    def added(constant: int, x: int) -> int:
        address = native.functions("tiny", functools.partial(add, constant=constant), ["f"], lambda: tests.append(x))
        return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address["f"])(x)

    tests: list[int] = []
    assert [added(1, 2), added(1, 5), added(2, 2)] == [3, 6, 4]
    assert tests == [2, 2]  # before each compilation
    assert len(list(folder.glob("tiny_*.o"))) == 2


SOURCE = """
from softsm.engine.native import native

@native("i8(i8, u4)")
def inner(x, y):
    return x + y

@native("i8(i8, i8)", python=True)
def tiny(x, y):
    return inner(x, y)
"""


def run(folder, source: str, call: str = "tiny(1, 2)") -> tuple[str, str]:
    """Runs the call in a process of its own."""
    (folder / "made.py").write_text(f"{source}\nprint({call})")
    command = [sys.executable, str(folder / "made.py")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


def test_a_function_is_compiled_once_and_found_again(folder):
    """test_cache.py has the keys of other processes."""

    def answer(source: str) -> int:
        """Of functions that this process has not seen: they come from the cache, or from the compiler."""
        module = ModuleType("made")
        (folder / "made.py").write_text(source)
        exec(compile(source, folder / "made.py", "exec"), vars(module))
        return module.tiny(1, 2)

    assert answer(SOURCE) == 3
    made = {path: path.stat().st_mtime_ns for path in folder.glob("*.nbc")}
    assert len(made) == 2
    assert answer("# moved\n" + SOURCE) == 3
    assert made == {path: path.stat().st_mtime_ns for path in folder.glob("*.nbc")}
    assert answer(SOURCE.replace("x + y", "x - y")) == -1
    assert len(list(folder.glob("*.nbc"))) == 4


def test_nothing_is_compiled_before_it_is_used(folder):
    assert run(folder, SOURCE, "tiny.overloads") == ("OrderedDict()", "")
    assert not list(folder.glob("*.nbc"))


def test_the_declared_signature_counts_and_not_the_arguments():
    @native.native("u4(u4)", python=True)
    def wrapped(x):
        return x + numba.uint32(1)

    assert wrapped(0xFFFFFFFF) == 0
    assert len(wrapped.signatures) == 1


def test_threads_that_need_a_function_at_once_wait_for_one_compilation():
    @native.native("i8(i8)", python=True)
    def doubled(x):
        return x + x

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(doubled, range(8))) == list(range(0, 16, 2))


def test_python_cannot_call_a_function_without_a_wrapper():
    """Numba would end the process."""

    @native.native("i8(i8)")
    def inner(x):
        return x + 1

    @native.native("i8(i8)", python=True)
    def outer(x):
        return inner(x)

    assert outer(3) == 4
    with pytest.raises(TypeError, match="inner is called from Python"):
        inner(3)


def test_generated_code_calls_an_address():
    @native.native("i8(i8)", c=True)
    def squared(x):
        return x * x

    assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(squared.address)(7) == 49


def test_a_branch_that_a_constant_rules_out_is_not_compiled():
    """Variants are made by functions around them: what a variant lacks may be None."""

    def variant(extra):
        more = extra is not None

        @native.native("i8(i8)", python=True)
        def function(x):
            if more:
                return extra(x)
            return x

        return function

    one = native.native("i8(i8)")(lambda x: x + 1)
    assert (variant(None)(1), variant(one)(1)) == (1, 2)


def test_effort_is_for_one_function_alone(monkeypatch):
    monkeypatch.setattr(numba.config, "OPT", type(numba.config.OPT)(3))
    with native.optimised(2):
        assert numba.config.OPT == 2
    assert numba.config.OPT == 3
    monkeypatch.setattr(numba.config, "OPT", type(numba.config.OPT)(0))  # somebody looks for a bug
    with native.optimised(2):
        assert numba.config.OPT == 0
