"""tcgen05.ld and st that the compiled loop compares and does, against those that Python does: the same findings, in the
same words, and the same values."""

import numpy as np
import pytest

import softsm
from softsm.checks.checker import Checker
from softsm.engine import scheduler
from softsm.isa import tensor_memory
from softsm.museum import text as t

SHARED = ".shared .align 4 .b32 place;"
START = t.alloc(64) + t.lanes_of_warp("%r4") + "mov.u32 %r10, %r0;\nmov.u32 %r11, 7;\n"
ST, LD = t.store("%r4", 10, 2), t.load("%r4", 20, 2)
AT_8 = "add.u32 %r5, %r4, 8;\n"
OTHER_ST, OTHER_LD = t.store("%r5", 10, 2), t.load("%r5", 20, 2)
FOUR = "setp.ge.u32 %p4, %r1, 4;\n@%p4 bra OTHERS;\n{}OTHERS:\n"  # what the first four warps do
# Whose lanes a warp reaches is fixed, so warps of different quarters cannot race; warps 0 and 4 of one CTA can.
BODIES = {
    "in order": AT_8 + ST + t.WAIT_ST + LD + t.WAIT_LD + t.out("%r20"),
    "nothing wrote them": LD + t.WAIT_LD + t.out("%r20"),
    "half of them": t.store("%r4", 10, 1) + t.WAIT_ST + LD + t.WAIT_LD,
    "a load behind a store": ST + LD + t.WAIT_LD + t.WAIT_ST + t.out("%r20"),
    "used before the wait": ST + t.WAIT_ST + LD + t.out("%r20") + t.WAIT_LD,
    "never waited for": AT_8 + ST + LD + OTHER_ST,
    "many in flight": AT_8 + (ST + OTHER_ST) * 6 + t.WAIT_ST + (LD + OTHER_LD) * 6 + t.WAIT_LD + t.out("%r20"),
    "two warps": FOUR.format(ST + t.WAIT_ST + t.BEFORE) + "bar.sync 0;\n" + t.AFTER + LD + t.WAIT_LD + t.out("%r20"),
    "two warps, no fence": FOUR.format(ST + t.WAIT_ST) + "bar.sync 0;\n" + LD + t.WAIT_LD + t.out("%r20"),
    "two warps, no wait": FOUR.format(ST + t.BEFORE) + "bar.sync 0;\n" + t.AFTER + LD + t.WAIT_LD,
    "two warps, no barrier": FOUR.format(ST + t.WAIT_ST) + LD + t.WAIT_LD,
}
WRONG = ("nothing wrote them", "half of them", "never waited for", "two warps, no wait", "two warps, no barrier")
STRICTLY_WRONG = ("used before the wait", "many in flight", "two warps, no fence")


@pytest.fixture
def python(monkeypatch) -> list[str]:
    """Names of the macro-operations that Python executed."""
    called: list[str] = []

    def watched(name):
        function = getattr(tensor_memory, name)
        monkeypatch.setattr(tensor_memory, name, lambda w, mask, o: called.append(name) or function(w, mask, o))

    for name in ("do_ld", "do_st", "do_wait_ld", "do_wait_st"):
        watched(name)
    return called


def run(name: str, *, order: str, strict: bool, unique: str) -> tuple[list[str], np.ndarray]:
    """(findings as text, what the kernel wrote)"""
    block = 256 if name.startswith("two warps") else 128
    text = t.kernel(START + BODIES[name] + "bar.sync 0;\n" + t.dealloc(64), "out", shared=SHARED)
    out = np.zeros(256, np.uint32)
    with softsm.checking(order=order, strict=strict) as report:
        softsm.load(text + f"// {unique}").launch(1, block, [out])
    return [str(d) for d in report], out


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("order", ["eager", "latest", "random"])
@pytest.mark.parametrize("name", BODIES)
def test_python_and_the_compiled_loop_find_the_same(name, order, strict, monkeypatch):
    compiled = run(name, order=order, strict=strict, unique="loop")
    monkeypatch.setattr(Checker, "follows", True)  # each event is followed: all of it is Python's
    followed = run(name, order=order, strict=strict, unique="followed")
    assert compiled[0] == followed[0]
    if not compiled[0]:
        np.testing.assert_array_equal(compiled[1], followed[1])
    assert bool(compiled[0]) == (name in WRONG or strict and name in STRICTLY_WRONG)


@pytest.mark.parametrize(("order", "left"), [("eager", 0), ("latest", 0), ("random", 16)])
def test_what_completes_before_anybody_can_tell_stays_in_the_loop(order, left, python):
    found, out = run("in order", order=order, strict=False, unique=f"stays, {order}")
    assert not found
    np.testing.assert_array_equal(out[:128], np.arange(128))
    assert len(python) == left


def test_a_store_that_a_barrier_comes_behind_is_python_s(python):
    """The store is performed as late as possible: the other warps must not see it yet."""
    run("two warps, no wait", order="latest", strict=False, unique="python's")
    assert python.count("do_st") == 4


def test_a_turn_that_ends_before_the_wait_leaves_the_access_to_python(python, monkeypatch):
    """Another warp may run then, and must not see it done."""
    monkeypatch.setattr(scheduler, "QUANTUM", 2)
    found, out = run("in order", order="latest", strict=False, unique="short turns")
    assert not found
    np.testing.assert_array_equal(out[:128], np.arange(128))
    assert 0 < len(python) < 16
