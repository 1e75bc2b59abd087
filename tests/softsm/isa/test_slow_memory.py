"""Accesses that the interpreter does not do itself: through generic addresses (cvta, isspacep), and wrong ones."""

import numpy as np
import pytest
from launching import ptx, run, store, words

from softsm.errors import Fault

LANES = np.arange(32)
RNG = np.random.default_rng(3)
DATA = ".shared .align 16 .b8 data[2048];"


def test_generic_addresses_of_every_space():
    """A generic address knows its space; cvta.to leads back."""
    body = """mov.u32 %r2, data;
cvt.u64.u32 %rd4, %r2;
cvta.shared.u64 %rd4, %rd4;
mov.u64 %rd5, mine;
cvta.local.u64 %rd5, %rd5;
cvta.global.u64 %rd6, %rd2;
mul.wide.u32 %rd7, %r1, 4;
add.s64 %rd8, %rd4, %rd7;
st.u32 [%rd8], %r1;
ld.shared.u32 %r3, [data];
bar.warp.sync -1;
cvta.to.shared.u64 %rd9, %rd8;
cvt.u32.u64 %r4, %rd9;
ld.shared.u32 %r4, [%r4];
mov.u32 %r9, 40;
st.u32 [%rd5], %r9;
ld.local.u32 %r5, [mine];
add.s64 %rd10, %rd6, %rd7;
ld.u32 %r6, [%rd10];
isspacep.shared %p2, %rd4;
isspacep.local %p3, %rd5;
isspacep.global %p4, %rd6;
isspacep.global %p5, %rd4;
isspacep.shared %p6, %rd6;
isspacep.local %p7, %rd6;
isspacep.shared::cluster %p8, %rd8;
selp.u32 %r7, 1, 0, %p2;
"""
    for i in range(3, 9):
        body += f"selp.u32 %r8, {1 << i - 2}, 0, %p{i};\nor.b32 %r7, %r7, %r8;\n"
    body += "shl.b32 %r10, %r1, 2;\n"
    for i, r in enumerate((4, 5, 6, 7)):
        body += f"add.u32 %r11, %r10, {i};\n" + store(f"%r{r}", "%r11")
    data = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
    shared = DATA + ".local .align 4 .b8 mine[4];"
    got = run(ptx(body, "out src", shared=shared), [words(128), data])[0].reshape(32, 4)
    np.testing.assert_array_equal(got, np.stack([LANES, np.full(32, 40), data, np.full(32, 0b1000111)], 1))


@pytest.mark.parametrize("space", ["global.", ""])
def test_a_misaligned_store_is_a_mistake(space):
    with pytest.raises(Fault, match="4 bytes at address .*: it must be a multiple of 4"):
        run(ptx(f"add.s64 %rd10, %rd1, 2;\nst.{space}u32 [%rd10], %r1;\n"), [words(40)])
