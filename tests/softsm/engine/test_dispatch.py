"""Micro-operations: their numbers, and the code that is made of each."""

import numpy as np
import pytest
from llvmlite import ir

from softsm.engine import assemble, dispatch
from softsm.engine import program as pg
from softsm.engine.vec_types import F, U, Vector, building
from softsm.isa.registry import MICROS

assemble.load_chapters()


def test_numbers_agree_with_the_assembler():
    hot, cold = dispatch.numbered()
    assert {m.name: n for n, m in hot + cold} == assemble.micro_numbers()


def test_a_program_loads_only_the_groups_it_uses():
    operations = dispatch.ColdOperations()
    _, cold = dispatch.numbered()
    needed, first = cold[dispatch.GROUP][0], cold[0][0]  # the first of the second group
    code = np.zeros((2, 8), np.uint32)
    code[1, 0] = needed
    operations.prepare(code)
    loaded = operations.table != 0
    assert loaded[needed - first : needed - first + dispatch.GROUP].all()
    assert loaded.sum() == dispatch.GROUP


@pytest.fixture
def vectors():
    """A float and an integer vector in a function that is never run."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), []), "f")
    with building(ir.IRBuilder(function.append_basic_block("entry"))):
        yield Vector(ir.Constant(F.ir, [1.0] * 32), F), Vector(ir.Constant(U.ir, [1] * 32), U)


def test_kinds_do_not_mix(vectors):
    x, n = vectors
    with pytest.raises(TypeError, match="U where F is needed"):
        x + n
    with pytest.raises(TypeError, match="floats"):
        x & 1


def test_an_expression_cannot_branch_on_a_lane(vectors):
    x, _ = vectors
    with pytest.raises(TypeError, match="cannot branch"):
        bool(x < 1.0)


def test_every_micro_operation_gives_what_its_signature_says():
    kinds = {"u": 32, "i": 32, "f": 32, "q": 64, "l": 64, "d": 64}
    for m in MICROS.values():
        function = ir.Function(ir.Module(), dispatch.COLD, "f")
        with building(ir.IRBuilder(function.append_basic_block("entry"))):
            sources: list = []
            for kind in m.srcs:
                if kind == "p":
                    sources.append(dispatch.Bits(ir.Constant(ir.IntType(32), 5)))
                else:
                    k = dispatch.KINDS[kind]
                    sources.append(Vector(ir.Constant(k.ir, ir.Undefined), k))
            value = dispatch.evaluate(m, sources, dispatch.Bits(ir.Constant(ir.IntType(32), pg.ALL)))
            if m.dst == "p":
                assert not isinstance(value, Vector), m
            else:
                assert value.kind.bits * value.kind.per_lane == kinds[m.dst], m
