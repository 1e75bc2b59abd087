"""Shared memory of other CTAs of the cluster, as CUDA C++ uses it: atomics on it, and flags in it."""

import numpy as np
import pytest
from ruling import holds

from softsm.museum import text as t

OUT = np.zeros(256, np.uint32)
SYNC = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
TWO = dict(grid=2, cluster=2)
START = (
    "mov.u32 %r50, %cluster_ctarank;\nmov.u32 %r40, a;\nst.shared.u32 [%r40], 0;\nst.shared.u32 [%r40+4], 0;\n" + SYNC
)
# Addresses of CTA 0's memory, in the window of the cluster, in CTA 0 too: %r52 and, generic, %rd22.
FIRST = (
    "mapa.shared::cluster.u32 %r52, %r40, 0;\ncvt.u64.u32 %rd21, %r40;\ncvta.shared.u64 %rd21, %rd21;\n"
    "mapa.u64 %rd22, %rd21, 0;\nsetp.eq.u32 %p5, %r50, 0;\nsetp.ne.u32 %p6, %r50, 0;\n"
)
HOW = {"own": ("shared::cta", "%r40"), "cluster": ("shared::cluster", "%r52"), "generic": ("", "%rd22")}


def kernel(body):
    return t.kernel(START + FIRST + body + SYNC, "out", shared=".shared .align 16 .b8 a[16];", target="sm_90a")


def access(how, opcode, rest):
    """`opcode` has a {} for the space."""
    space, address = HOW[how]
    return opcode.format(f".{space}" if space else "") + f" {rest.format(address)};\n"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("how", ["cluster", "generic"])
def test_atomics_of_two_ctas_need_no_order(how, strict):
    """Both add to one word of each; in place of the additions of CTA 0, stores. Even lanes of a warp name CTA 0, odd
    ones CTA 1."""

    def make(keep):
        rank = "and.b32 %r54, %r0, 1;\nmapa.shared::cluster.u32 %r52, %r40, %r54;\nmapa.u64 %rd22, %rd21, %r54;\n"
        add = access(how, "red.relaxed.cluster{}.add.u32", "[{}], 1")
        here = add if keep else access(how, "st{}.u32", "[{}], %r54")
        return kernel(rank + t.only("%p5", here) + t.only("%p6", add))

    holds(make, args=[OUT], strict=strict, **TWO)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("polled", HOW)
def test_a_flag_that_a_peer_raises_requires_the_scope_of_the_cluster(polled, strict):
    """CTA 1 writes data and a flag into CTA 0's shared memory; CTA 0 polls the flag."""

    def make(keep):
        scope = "cluster" if keep else "cta"
        there = "st.shared::cluster.u32 [%r52+4], 7;\n" + access("cluster", f"st.release.{scope}{{}}.u32", "[{}], 1")
        poll = "POLL:\n" + access(polled, "ld.acquire.cluster{}.u32", "%r60, [{}]")
        poll += "setp.eq.u32 %p7, %r60, 0;\n@%p7 bra POLL;\nld.shared.u32 %r61, [%r40+4];\n"
        return kernel(t.only("%p5", t.only("%p0", poll)) + t.only("%p6", t.only("%p0", there)))

    holds(make, args=[OUT], strict=strict, **TWO)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("there", ["cluster", "generic"])
@pytest.mark.parametrize("raised", HOW)
def test_a_flag_that_a_peer_polls_requires_the_scope_of_the_cluster(raised, there, strict):
    """CTA 0 raises a flag in its own shared memory; CTA 1 polls it, and reads the data behind it."""

    def make(keep):
        scope = "cluster" if keep else "cta"
        here = "st.shared.u32 [%r40+4], 7;\n" + access(raised, f"st.release.{scope}{{}}.u32", "[{}], 1")
        poll = "POLL:\n" + access(there, "ld.acquire.cluster{}.u32", "%r60, [{}]")
        poll += "setp.eq.u32 %p7, %r60, 0;\n@%p7 bra POLL;\nld.shared::cluster.u32 %r61, [%r52+4];\n"
        return kernel(t.only("%p5", t.only("%p0", here)) + t.only("%p6", t.only("%p0", poll)))

    holds(make, args=[OUT], strict=strict, **TWO)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("how", ["cluster", "generic"])
def test_bytes_of_a_word_have_writers_of_their_own(how, strict):
    """Each warp stores to its own byte of a word of both CTAs; or all of a CTA to the same, each another value."""

    def make(keep):
        rank = "and.b32 %r54, %r0, 1;\nmapa.shared::cluster.u32 %r52, %r40, %r54;\nmapa.u64 %rd22, %rd21, %r54;\n"
        byte = f"mad.lo.u32 %r55, %r50, 4, {'%r1' if keep else '0'};\n"
        byte += "cvt.u64.u32 %rd23, %r55;\nadd.s64 %rd22, %rd22, %rd23;\nadd.u32 %r52, %r52, %r55;\n"
        return kernel(rank + byte + "add.u32 %r56, %r1, 1;\n" + access(how, "st{}.u8", "[{}], %r56"))

    holds(make, args=[OUT], strict=strict, **TWO)


RED = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r52], %r0, [%r53];\n"
COPY = RED.replace("red.async.relaxed.cluster", "st.async.weak").replace(".add", "")
BULK_RED = "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 "
BULK_RED += "[%r52], [%r54], 16, [%r53];\n"
ZERO = "st.shared.v4.u32 [%r54], {%r0, %r0, %r0, %r0};\n"  # to the source of a copy
ZEROS = ZERO + ZERO.replace("%r54", "%r40")
BULK_COPY = BULK_RED.replace("reduce.", "").replace(".add.u32", "")


def sum_in_each(operation, size, start=ZEROS, wait=True):
    """Both CTAs add to the words of both."""
    fill = start + "fence.proxy.async;\n"
    body = t.init("bar") + "mov.u32 %r40, a;\nmov.u32 %r54, b;\n"
    body += t.only("%p0", t.expect("bar", 2 * size) + fill) + SYNC
    for rank in range(2):
        there = f"mapa.shared::cluster.u32 %r52, %r40, {rank};\nmov.u32 %r53, bar;\n"
        body += t.only("%p0", there + f"mapa.shared::cluster.u32 %r53, %r53, {rank};\n" + operation)
    body += t.wait("bar", 0, ".acquire.cluster") if wait else ""
    body += "ld.shared.u32 %r60, [%r40];\n" + ("" if wait else t.wait("bar", 0, ".acquire.cluster"))
    shared = ".shared .align 16 .b8 a[16]; .shared .align 16 .b8 b[16]; .shared .align 8 .b64 bar;"
    return t.kernel(body + SYNC, "out", shared=shared, target="sm_90a")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("add", "copy", "size"), [(RED, COPY, 4), (BULK_RED, BULK_COPY, 16)], ids=["red", "bulk"])
def test_asynchronous_reductions_of_two_ctas_need_no_order(add, copy, size, strict):
    """Each reduction is atomic; copies to one place are not. Both must be over before the sum is read, and a sum has
    to begin with a value."""
    launch = dict(args=[OUT], strict=strict, **TWO)
    holds(lambda keep: sum_in_each(add if keep else copy, size), **launch)
    holds(lambda keep: sum_in_each(add, size, wait=keep), **launch)
    holds(lambda keep: sum_in_each(add, size, start=ZEROS if keep else ZERO), code="uninitialised", **launch)
