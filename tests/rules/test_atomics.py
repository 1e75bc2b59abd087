"""Atomics together with ordinary accesses."""

import numpy as np
import pytest
from ruling import findings, holds

from softsm.museum import text as t

X = np.zeros(64, np.uint64)
SPACES = {"global": "[%rd1]", "shared": "[a]"}


def maximum(space, behind):
    """Each thread raises a value to its own number: it reads the value, and replaces it."""
    at = SPACES[space]
    clear = "@%p0 st.shared.u64 [a], 0;\nbar.sync 0;\n" if space == "shared" else ""
    body = clear + f"cvt.u64.u32 %rd3, %r0;\nld.{space}.u64 %rd4, {at};\n" + behind.format(space=space, at=at)
    return t.kernel(body, "x", shared=".shared .align 8 .b64 a;", target="sm_90a")


LOOP = """AGAIN:
max.u64 %rd6, %rd5, %rd3;
atom.{space}.cas.b64 %rd7, {at}, %rd5, %rd6;
setp.ne.u64 %p7, %rd7, %rd5;
mov.b64 %rd5, %rd7;
@%p7 bra AGAIN;
"""
BEHIND = {
    True: "mov.b64 %rd5, %rd4;\n" + LOOP,
    "exchange": "max.u64 %rd6, %rd4, %rd3;\natom.{space}.exch.b64 %rd7, {at}, %rd6;\n",
    "another value is compared": "add.u64 %rd5, %rd4, 1;\n" + LOOP,
    "at another place": "mov.b64 %rd5, %rd4;\n"
    + LOOP.replace("{at}, %rd5", "[%rd1+8], %rd5")
    + "st.{space}.u64 {at}, %rd3;\n",
}


SMALL_LOCK = """AGAIN:
@%p0 atom.{acquire}.gpu.global.cas.b16 %h1, [%rd2], 0, 1;
setp.ne.and.u16 %p7, %h1, 0, %p0;
@%p7 bra AGAIN;
@%p0 ld.global.u32 %r60, [%rd1];
@%p0 st.global.u32 [%rd1], %r60;
@%p0 st.release.gpu.global.u16 [%rd2], 0;
"""


def test_a_lock_of_16_bits_acquires():
    def make(keep):
        body = "mov.u16 %h1, 0;\n" + SMALL_LOCK.format(acquire="acquire" if keep else "relaxed")
        return t.kernel(body, "x out", target="sm_90a")

    holds(make, args=[X, X], strict=False, grid=3, block=32)


def test_a_lock_of_16_bits_that_nobody_releases_is_a_deadlock():
    text = t.kernel("mov.u16 %h1, 0;\n" + SMALL_LOCK.format(acquire="acquire"), "x out", target="sm_90a")
    held = np.ones(64, np.uint64)
    assert findings(text, [X, held], strict=False, block=32).codes() == ["deadlock"]


@pytest.mark.parametrize("what", ["atom.shared.add.u32 %r60, [a], 1;", "red.shared.max.u32 [a], %r0;"])
def test_shared_memory_is_written_before_an_atomic_changes_it(what):
    """A histogram whose counts nobody set to 0."""

    def make(keep):
        clear = "@%p0 st.shared.u32 [a], 0;\nbar.sync 0;\n" if keep else ""
        return t.kernel(clear + what, "x", shared=".shared .align 8 .b64 a;", target="sm_90a")

    holds(make, args=[X], code="uninitialised", strict=False)
    exchange = make(False).replace(what, "atom.shared.exch.b32 %r60, [a], 1;")
    assert not findings(exchange, [X], strict=False)


@pytest.mark.parametrize(
    ("space", "without"),
    [(s, x) for s in SPACES for x in BEHIND if x is not True and (s, x) != ("shared", "at another place")],
)
def test_a_value_that_is_compared_before_it_is_replaced_may_be_read_by_an_ordinary_load(space, without):
    """The first load of a loop of compare-and-swap, as in the CUDA guide: an old value is noticed and read again."""
    holds(lambda keep: maximum(space, BEHIND[keep or without]), args=[X], strict=False, grid=2, block=64)
    assert findings(maximum(space, BEHIND[True]), [X], grid=2, block=64).codes() == ["race"]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("load", ["ld", "ld.relaxed.cta"])
@pytest.mark.parametrize("warp", range(4))
def test_an_atomic_after_the_ordinary_read_of_another_warp(strict, load, warp):
    """A warp reads a counter, and the others add to it: behind a barrier, or without one. Strong reads need none."""

    def make(keep):
        read = f"{load}.shared"
        body = t.only("%p0", "st.shared.u32 [w], 0;\n") + "bar.sync 0;\n"
        body += t.only(f"warp {warp}", f"{read}.u32 %r60, [w];\n") + ("bar.sync 0;\n" if keep else "")
        body += "red.shared.add.u32 [w], 1;\n"
        return t.kernel(body, "out", shared=".shared .align 4 .b32 w;", target="sm_90a")

    if load == "ld":
        holds(make, args=[np.zeros(4, np.uint32)], strict=strict)
    else:
        assert not findings(make(False), [np.zeros(4, np.uint32)], strict=strict)
