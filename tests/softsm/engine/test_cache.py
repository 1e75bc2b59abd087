"""The cache of native code: what decides the name of a file, and where it lies."""

import functools
import os
import subprocess
import sys
import types
from dataclasses import dataclass

import numpy as np
import pytest

from softsm.engine import cache

SOURCE = """
import numpy as np
import constants
from softsm.engine.native import native

STEP = 1

def twice(x):
    return 2 * x

@native("i8(i8)")
def inner(x):
    return x + STEP

@native("i8(i8)", python=True)
def f(x):  # a comment
    return inner(x) + constants.OFFSET

def build(module):
    return [twice(k) for k in range(3)]
"""


def meanings(source: str = SOURCE, offset: int = 5, other: int = 1) -> tuple[str, str]:
    """The keys of `f` and `build`."""
    constants = types.ModuleType("constants")
    constants.OFFSET, constants.OTHER = offset, other
    made: dict = {"__name__": "made", "constants": constants}
    exec(source.replace("import constants\n", ""), made)
    return cache.key(made["f"]), cache.key(made["build"])


@pytest.mark.parametrize(
    "old, new, changed",
    [
        ("# a comment", "# another one", ""),
        ("STEP = 1", "\n\nSTEP = 1", ""),
        ("STEP = 1", "STEP = 2", "f"),
        ("x + STEP", "x - STEP", "f"),
        ('"i8(i8)", python', '"i4(i8)", python', "f"),
        ('"i8(i8)")', '"i8(i4)")', "f"),
        ("2 * x", "3 * x", "build"),
        ("twice(k) for", "k for", "build"),
    ],
)
def test_a_key_follows_all_that_a_function_reaches(old, new, changed):
    assert old in SOURCE
    before, after = meanings(), meanings(SOURCE.replace(old, new))
    assert [x != y for x, y in zip(before, after)] == [changed == "f", changed == "build"]


def test_an_attribute_of_a_module_counts_when_it_is_named():
    assert meanings()[0] != meanings(offset=6)[0]
    assert meanings()[0] == meanings(other=2)[0]


@dataclass(frozen=True)
class Thing:
    value: object


@pytest.mark.parametrize(
    "one, other",
    [
        ((1, 2, 1), (1, 2, 2)),
        (([1], [2, 3]), ([1, 2], [3])),
        ({"a": 1}, {"a": 2}),
        (frozenset({"a", "b"}), frozenset({"a", "c"})),
        (np.array([1, 2], np.int32), np.array([1, 3], np.int32)),
        (np.array([1, 2], np.int32), np.array([1, 2], np.int64)),
        (Thing(1), Thing(2)),
        (functools.partial(max, key=1), functools.partial(max, key=2)),
        (lambda: 1, lambda: 2),
        ((lambda x=1: x), (lambda x=2: x)),
        ((lambda k: lambda: k)(1), (lambda k: lambda: k)(2)),
    ],
)
def test_keys_tell_values_apart(one, other):
    assert cache.key(one) != cache.key(other)
    assert cache.key(one) == cache.key(one)


def test_what_has_no_meaning_is_refused():
    thing = object.__new__(type("Odd", (), {}))
    with pytest.raises(TypeError, match="native code depends on .*Odd"):
        cache.key(lambda: thing)


def test_every_process_finds_the_same_key():
    """Sets of strings, addresses and the order of imports differ from one process to the next."""
    code = (
        "from softsm.engine import assemble, cache, dispatch; assemble.load_chapters(); "
        "from softsm.checks.lane_operation import checked; hot, cold = dispatch.numbered(); "
        "print(cache.key(dispatch.dispatch, hot), cache.key(checked))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert len(runs[0].split()) == 2 and runs[0] == runs[1]


def test_slices_are_values():
    """Constants of code from Python 3.14 on."""
    assert cache.key(slice(1, None)) == cache.key(slice(1, None)) != cache.key(slice(2, None))


def test_the_cache_folder_is_the_users_own(monkeypatch, tmp_path):
    monkeypatch.delenv("SOFTSM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "softsm"


def test_a_cache_folder_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SOFTSM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match=r"^SOFTSM_CACHE: got .*/cache; accepted: a folder to write to \(.*\)$"):
        cache.made_cache_folder()
