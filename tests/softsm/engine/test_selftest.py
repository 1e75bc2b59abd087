"""The self-test of generated code: silent here, loud about a wrong operation."""

from functools import partial

import numpy as np
import pytest

from softsm.engine import selftest, vec_ops, vec_round
from softsm.engine.vec_types import D, F, Q, U


def test_this_machine_compiles_the_vocabulary_right():
    assert selftest.wrong() == []


def test_minimum_and_maximum_by_selection_agree_with_the_rule():
    trials = [
        selftest.Trial(
            f"{least}.{k.name}",
            partial(vec_ops.extreme, least=least),
            partial(selftest._smaller, least=least),
            (k, k),
            k,
        )
        for k in (F, D)
        for least in (True, False)
    ]
    assert selftest.wrong(trials) == []


@pytest.mark.parametrize("source", [U, Q], ids=lambda kind: kind.name)
@pytest.mark.parametrize("target", [F, D], ids=lambda kind: kind.name)
def test_zero_has_no_sign_in_any_rounding_mode(source, target):
    """AVX2 has no conversion of unsigned integers: LLVM subtracts and adds, and rounding down the difference of two
    equal numbers is -0."""
    convert = vec_round.rounded_tof if target is F else vec_round.rounded_tod
    modes = (vec_round.TO_ZERO, vec_round.TO_NEAREST, vec_round.UP, vec_round.DOWN)
    trials = [
        selftest.Trial(
            f"0 in mode {mode}",
            lambda x, mode=mode: convert(mode, x & 0),
            lambda x: np.zeros(32, selftest.TYPES[target]),
            (source,),
            target,
        )
        for mode in modes
    ]
    assert selftest.wrong(trials) == []


@pytest.mark.parametrize(
    "name, mistaken",
    [
        ("min.F", lambda x, y: vec_ops.sel(x < y, x, y)),  # a NaN operand wins, or a zero has the wrong sign
        ("fma.F", lambda x, y, z: x * y + z),
        ("rint.F", lambda x: vec_ops.vfloor(x + 0.5)),
        ("float to int", lambda x: vec_ops.toi(vec_ops.vrint(x))),
    ],
)
def test_a_wrong_operation_is_named(monkeypatch, name, mistaken):
    (right,) = (t for t in selftest.TRIALS if t.name == name)
    broken = selftest.Trial(name, mistaken, right.expected, right.kinds, right.result)
    monkeypatch.setattr(selftest, "wrong", lambda run=selftest.wrong: run([broken]))
    with pytest.raises(RuntimeError, match=rf"llvmlite .* its code is wrong: {name}\("):
        selftest.check()
