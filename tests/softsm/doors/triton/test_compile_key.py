"""Triton's key of itself is made once for a set of files."""

import os

import pytest

from softsm.doors.triton import compile_key

triton = pytest.importorskip("triton")


def test_it_is_made_again_when_a_file_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("SOFTSM_CACHE", str(tmp_path / "cache"))
    package = tmp_path / "triton"
    for part in compile_key.PARTS:
        (package / part).mkdir(parents=True)
    (package / "compiler" / "a.py").write_text("1")
    calls = []

    def key():
        calls.append(1)
        return f"key {len(calls)}"

    assert [compile_key.kept(key, package)() for _ in range(2)] == ["key 1", "key 1"]
    os.utime(package / "compiler" / "a.py", (1, 1))
    assert compile_key.kept(key, package)() == "key 2"
    (package / "language" / "b.py").write_text("2")
    assert [compile_key.kept(key, package)() for _ in range(2)] == ["key 3", "key 3"]


def test_it_is_tritons_own(monkeypatch, tmp_path):
    from triton.runtime import cache

    import softsm

    own = cache.triton_key
    with softsm.use("sm_90a"):
        assert cache.triton_key is not own and cache.triton_key() == own()
    assert cache.triton_key is own
