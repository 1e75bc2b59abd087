"""The registries: nothing is defined twice, and functions accept what their signatures declare."""

import inspect

import pytest

from softsm.engine.assemble import load_chapters
from softsm.engine.launch import load
from softsm.errors import Unsupported
from softsm.isa import registry

load_chapters()


def test_a_name_has_one_meaning():
    name = next(iter(registry.MICROS))
    with pytest.raises(AssertionError, match="defined twice"):
        registry.micro(name, "u=u", lambda a: a)
    with pytest.raises(AssertionError, match="two lowerings"):
        registry.lowers("cp")(lambda asm, ins: None)


def test_signatures_have_known_kinds_and_as_many_sources_as_the_function():
    assert len(registry.MICROS) > 300
    for micro in registry.MICROS.values():
        assert micro.dst in "uifqldp" and set(micro.srcs) <= set("uifqldp") and len(micro.srcs) <= 4, micro
        inspect.signature(micro.function).bind(*micro.srcs, *("m" if micro.masked else ""))
        assert not micro.masked or micro.exchange, micro  # in a block no mask is given
        assert not micro.canonical_nan or micro.dst == "f", micro  # translation.py keeps it as a float


def test_a_definition_may_be_a_decorated_function(monkeypatch):
    monkeypatch.setattr(registry, "MICROS", {})

    @registry.micro("twice", "u=um", hot=True)
    def twice(a, m):
        return a + a

    assert registry.MICROS["twice"] == registry.Micro("twice", "u", "u", twice, True, True, False, False)


def test_the_dispatch_function_stays_small():
    assert sum(m.hot for m in registry.MICROS.values()) <= 200


@pytest.mark.parametrize("opcode", ["tex.1d.v4", "suld.b.1d"])
def test_instructions_that_are_left_out_are_named(opcode):
    text = f".version 8.6\n.target sm_90a\n.address_size 64\n.visible .entry k() {{ {opcode}; ret; }}\n"
    with pytest.raises(Unsupported, match="softsm does not have it: there are no textures"):
        load(text).program  # noqa: B018
