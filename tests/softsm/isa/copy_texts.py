"""Pieces of PTX that tests of asynchronous copies share."""

import numpy as np
import pytest
from launching import store, wait, words

import softsm.engine.launch as engine
from softsm.errors import Fault

DATA = ".shared .align 16 .b8 bar[16]; .shared .align 128 .b8 data[2048];"
RNG = np.random.default_rng(3)


def source(n=512):
    return RNG.integers(1, 1 << 32, n, dtype=np.uint32)


THREAD = """mov.u32 %r2, data;
mad.lo.u32 %r3, %r1, {size}, %r2;
mul.wide.u32 %rd4, %r1, {size};
add.s64 %rd4, %rd2, %rd4;
"""


def read_back(n):
    """Each thread stores word number tid of the shared array, n/32 times."""
    text = "mad.lo.u32 %r10, %r1, 4, %r2;\n"
    for i in range(n // 32):
        text += f"ld.shared.u32 %r11, [%r10+{128 * i}];\nadd.u32 %r12, %r1, {32 * i};\n" + store("%r11", "%r12")
    return text


LOAD = """mov.u32 %r2, data;
mov.u32 %r20, bar;
@%p1 mbarrier.init.shared::cta.b64 [%r20], 1;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], {size};
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{hint} [%r2], [%rd2], {size}, [%r20]{policy};
"""


def bulk_load(size, hint="", policy=""):
    return LOAD.format(size=size, hint=hint, policy=policy) + wait("%r20", 0, "W")


def fails(text, code, match=None, order="eager"):
    with pytest.raises(Fault, match=match) as caught:
        engine.load(text).launch(1, 32, [words(64), source(64)], order=order)
    assert caught.value.code == code
    assert "PTX line" in str(caught.value)
