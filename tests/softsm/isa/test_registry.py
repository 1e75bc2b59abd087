"""The registries: nothing is defined twice, and every expression speaks the vocabulary of the engine."""

import ast

import pytest

from softsm.engine import vec
from softsm.engine.assemble import load_chapters
from softsm.isa import registry

load_chapters()


def test_a_name_has_one_meaning():
    name = next(iter(registry.MICROS))
    with pytest.raises(AssertionError, match="defined twice"):
        registry.micro(name, "u=u", "a")
    with pytest.raises(AssertionError, match="two lowerings"):
        registry.lowers("cp")(lambda asm, ins: None)


def test_expressions_use_their_sources_and_the_vocabulary():
    assert len(registry.MICROS) > 300
    for micro in registry.MICROS.values():
        assert micro.dst in "uifqldp" and set(micro.srcs) <= set("uifqldp") and len(micro.srcs) <= 4, micro
        names = {n.id for n in ast.walk(ast.parse(micro.expression)) if isinstance(n, ast.Name)}
        sources = set("abcd"[: len(micro.srcs)])
        assert names & set("abcd") <= sources, micro
        assert all(hasattr(vec, name) for name in names - sources - {"m", "np"}), micro


def test_the_dispatch_function_stays_small():
    assert sum(m.hot for m in registry.MICROS.values()) <= 200
