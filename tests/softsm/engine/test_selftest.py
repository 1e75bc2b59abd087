"""The self-test of generated code: silent here, loud about a wrong operation."""

from functools import partial

import pytest

from softsm.engine import selftest, vec_ops
from softsm.engine.vec_types import D, F


def test_this_machine_compiles_the_vocabulary_right():
    assert selftest.wrong() == []


def test_minimum_and_maximum_by_selection_agree_with_the_rule():
    trials = [selftest.Trial(f"{least}.{k.name}", partial(vec_ops.extreme, least=least),
                             partial(selftest._smaller, least=least), (k, k), k)
              for k in (F, D) for least in (True, False)]
    assert selftest.wrong(trials) == []


@pytest.mark.parametrize("name, mistaken", [
    ("min.F", lambda x, y: vec_ops.sel(x < y, x, y)),  # a NaN operand wins, or a zero has the wrong sign
    ("fma.F", lambda x, y, z: x * y + z),
    ("rint.F", lambda x: vec_ops.vfloor(x + 0.5)),
    ("float to int", lambda x: vec_ops.toi(vec_ops.vrint(x))),
])
def test_a_wrong_operation_is_named(monkeypatch, name, mistaken):
    (right,) = (t for t in selftest.TRIALS if t.name == name)
    broken = selftest.Trial(name, mistaken, right.expected, right.kinds, right.result)
    monkeypatch.setattr(selftest, "wrong", lambda run=selftest.wrong: run([broken]))
    with pytest.raises(RuntimeError, match=rf"llvmlite .* its code is wrong: {name}\("):
        selftest.check()
