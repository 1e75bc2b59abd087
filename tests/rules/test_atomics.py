"""Atomics beside ordinary accesses."""

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


@pytest.mark.parametrize(
    ("space", "without"),
    [(s, x) for s in SPACES for x in BEHIND if x is not True and (s, x) != ("shared", "at another place")],
)
def test_a_value_that_is_compared_before_it_is_replaced_may_be_read_by_an_ordinary_load(space, without):
    """As in the CUDA guide: the first load of a loop of compare-and-swap. An old value is noticed and read again."""
    holds(lambda keep: maximum(space, BEHIND[keep or without]), args=[X], strict=False, grid=2, block=64)
    assert findings(maximum(space, BEHIND[True]), [X], grid=2, block=64).codes() == ["race"]
