"""Generated LLVM code: compiled once, found again, by name of all that goes in."""

import ctypes

import pytest
from llvmlite import ir

from softsm.engine import native

I64 = ir.IntType(64)


def adding(constant: int, calls: list):
    def build(module: ir.Module) -> None:
        calls.append(constant)
        function = ir.Function(module, ir.FunctionType(I64, [I64]), "f")
        b = ir.IRBuilder(function.append_basic_block("entry"))
        b.ret(b.add(function.args[0], I64(constant)))

    return build


def call(address: int, x: int) -> int:
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(x)


def test_code_is_compiled_once_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SOFTSM_CACHE", str(tmp_path))
    calls: list[int] = []
    assert call(native.functions("tiny", "1", adding(1, calls), ["f"])["f"], 2) == 3
    assert call(native.functions("tiny", "1", adding(1, calls), ["f"])["f"], 5) == 6
    assert call(native.functions("tiny", "2", adding(2, calls), ["f"])["f"], 2) == 4
    assert calls == [1, 2]
    assert len(list(tmp_path.glob("tiny_*.o"))) == 2


def test_the_cache_folder_is_the_users_own(monkeypatch, tmp_path):
    monkeypatch.delenv("SOFTSM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.cache_folder() == tmp_path / "softsm"


def test_a_cache_folder_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SOFTSM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match=r"^SOFTSM_CACHE: got .*/cache, accepted is a folder to write to \(.*\)$"):
        native.made_cache_folder()
