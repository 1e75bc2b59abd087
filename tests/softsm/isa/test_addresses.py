"""Addresses of other CTAs of the cluster: mapa, getctarank."""

import numpy as np
import pytest
from launching import ptx, run, store, words

from softsm.engine.launch import load
from softsm.errors import Fault

LANES = np.arange(32)
DATA = ".shared .align 16 .b8 data[2048];"


def test_a_rank_that_the_cluster_does_not_have_is_a_mistake_where_it_is_used():
    """Kernels compute an address of rank = lane in all lanes, and use it in those that are below the cluster's size."""
    body = """mov.u32 %r2, data;
mov.u32 %r10, %cluster_ctarank;
st.shared.u32 [%r2], %r10;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mapa.shared::cluster.u32 %r5, %r2, %r1;
mov.u32 %r6, 7;
setp.lt.u32 %p2, %r1, 2;
@%p2 ld.shared::cluster.u32 %r6, [%r5];
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
""" + store("%r6")
    text = ptx(body, shared=DATA)
    np.testing.assert_array_equal(run(text, [words(32)], grid=2, cluster=2), [0, 1] + [7] * 30)
    with pytest.raises(Fault, match="names CTA rank 2; the cluster has 2") as caught:
        load(text.replace("%r1, 2;\n@", "%r1, 3;\n@")).launch(2, 32, [words(32)], cluster=2)
    assert caught.value.code == "cluster-rank"


def test_addresses_of_peers():
    """mapa: the same place in another CTA; loads and stores reach it; getctarank returns whose it is."""
    body = """mov.u32 %r2, data;
mov.u32 %r10, %cluster_ctarank;
mad.lo.u32 %r3, %r1, 4, %r2;
mad.lo.u32 %r4, %r10, 100, %r1;
st.shared.u32 [%r3], %r4;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
add.u32 %r11, %r10, 1;
and.b32 %r11, %r11, 3;
mapa.shared::cluster.u32 %r5, %r3, %r11;
ld.shared::cluster.u32 %r6, [%r5];
st.shared::cluster.u32 [%r5+128], %r4;
getctarank.shared::cluster.u32 %r7, %r5;
cvt.u64.u32 %rd4, %r3;
cvta.shared.u64 %rd4, %rd4;
mapa.u64 %rd5, %rd4, %r11;
ld.u32 %r8, [%rd5];
getctarank.u64 %r9, %rd5;
isspacep.shared::cta %p2, %rd5;
isspacep.shared::cluster %p3, %rd5;
selp.u32 %r12, 1, 0, %p2;
selp.u32 %r13, 2, 0, %p3;
or.b32 %r12, %r12, %r13;
mad.lo.u32 %r9, %r12, 16, %r9;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
ld.shared.u32 %r14, [%r3+128];
mad.lo.u32 %r15, %r10, 32, %r1;
mul.lo.u32 %r15, %r15, 5;
"""
    for i, r in enumerate((6, 7, 8, 9, 14)):
        body += f"add.u32 %r16, %r15, {i};\n" + store(f"%r{r}", "%r16")
    got = run(ptx(body, shared=DATA), [words(640)], grid=4, cluster=4).reshape(4, 32, 5)
    for rank in range(4):
        peer, before = (rank + 1) % 4, (rank - 1) % 4
        wanted = [100 * peer + LANES, peer + 0 * LANES, 100 * peer + LANES, peer + 32 + 0 * LANES, 100 * before + LANES]
        np.testing.assert_array_equal(got[rank], np.stack(wanted, 1))


def test_atomics_at_peers():
    """atom and red on another CTA's shared memory, by an address of the cluster and by a generic one."""
    body = """mov.u32 %r2, data;
mov.u32 %r10, %cluster_ctarank;
st.shared.u64 [%r2], 0;
st.shared.u64 [%r2+8], 7;
st.shared.u64 [%r2+16], 0;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
xor.b32 %r11, %r10, 1;
mapa.shared::cluster.u32 %r5, %r2, %r11;
cvt.u64.u32 %rd4, %r2;
cvta.shared.u64 %rd4, %rd4;
mapa.u64 %rd5, %rd4, %r11;
cvt.u64.u32 %rd6, %r1;
atom.shared::cluster.add.u32 %r6, [%r5], %r1;
red.add.u32 [%rd5], 2;
atom.inc.u32 %r7, [%rd5+4], 5;
atom.max.s64 %rd7, [%rd5+8], %rd6;
red.shared::cluster.add.f32 [%r5+16], 0f3F000000;
atom.cas.b32 %r8, [%rd5+20], %r1, 30;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
setp.eq.u32 %p2, %r1, 31;
ld.shared.u32 %r12, [%r2];
ld.shared.u32 %r13, [%r2+4];
ld.shared.u32 %r14, [%r2+8];
ld.shared.u32 %r15, [%r2+16];
ld.shared.u32 %r16, [%r2+20];
mad.lo.u32 %r17, %r10, 5, 0;
"""
    for i in range(5):
        body += f"add.u32 %r18, %r17, {i};\n" + store(f"%r{12 + i}", "%r18")
    got = run(ptx(body, shared=DATA), [words(10)], grid=2, cluster=2).reshape(2, 5)
    half = int(np.float32(16).view(np.uint32))
    np.testing.assert_array_equal(got, [[sum(range(32)) + 64, 32 % 6, 31, half, 30]] * 2)


@pytest.mark.parametrize("cluster", [1, 2])
def test_an_address_before_shared_memory_is_out_of_bounds(cluster):
    """tile[-600]: the address wraps around. Only an instruction of shared::cluster can mean a peer."""
    body = "mov.u32 %r2, data;\nld.shared{}.u32 %r5, [%r2+-2400];\n" + store("%r5")
    for space, code in (("", "out-of-bounds"), ("::cluster", "cluster-rank")):
        with pytest.raises(Fault) as caught:
            load(ptx(body.format(space), shared=DATA)).launch(2, 32, [words(32)], cluster=cluster)
        assert caught.value.code == code
