"""createpolicy: the words, and that they change no value."""

import numpy as np
import pytest
from launching import ptx, run, store, words

RNG = np.random.default_rng(3)


def at(base, step, to="%rd10"):
    return f"mul.wide.u32 {to}, %r1, {step};\nadd.s64 {to}, {base}, {to};\n"


@pytest.mark.parametrize("priority", ["evict_first", "evict_last", "evict_normal", "evict_unchanged"])
def test_a_cache_policy_changes_no_value(priority):
    data = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
    body = f"createpolicy.range.global.L2::{priority}.b64 %rd4, [%rd2], 128, 128;\n"
    body += f"createpolicy.fractional.L2::{priority}.b64 %rd4, 1.0;\n" + at("%rd2", 4)
    body += "ld.global.L2::cache_hint.u32 %r3, [%rd10], %rd4;\n" + at("%rd1", 4)
    body += "st.global.L2::cache_hint.u32 [%rd10], %r3, %rd4;\n"
    np.testing.assert_array_equal(run(ptx(body, "out src"), [words(32), data])[0], data)


POLICIES = {
    "createpolicy.fractional.L2::evict_first.b64 %rd4, 1.0;": 0x12F0000000000000,
    "createpolicy.fractional.L2::evict_last.b64 %rd4;": 0x14F0000000000000,
    "createpolicy.fractional.L2::evict_normal.b64 %rd4, 1.0;": 0x16F0000000000000,
    "createpolicy.fractional.L2::evict_first.b64 %rd4, 0.5;": 0x1270000000000000,
    "createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 %rd4, 0.25;": 0x1430000000000000,
    "mov.b32 %r3, 0f3E800000;\ncreatepolicy.fractional.L2::evict_last.b64 %rd4, %r3;": 0x1430000000000000,
}


@pytest.mark.parametrize("instruction", POLICIES)
def test_the_words_of_cache_policies(instruction):
    """Opaque by the manual; hosts pass the same constants by hand."""
    got = run(ptx(instruction + "\n" + store("%rd4", kind="u64")), [np.zeros(32, np.uint64)])
    assert {hex(x) for x in got} == {hex(POLICIES[instruction])}
