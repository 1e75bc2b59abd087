"""Asynchronous copies: cp.async, cp.async.bulk, TMA, st.async; the two proxies; what a wait is good for."""

import numpy as np
import pytest
from ruling import findings, holds

from softsm.memory.tensor_map import DataType
from softsm.memory.tensor_map_image import encode_tiled
from softsm.museum import text as t

SHARED = """.shared .align 1024 .b8 a[4096]; .shared .align 8 .b64 bar; .shared .align 8 .b64 bar2;"""
X, OUT = np.arange(1024, dtype=np.uint32), np.zeros(1024, np.uint32)
FULL = "mov.u32 %r40, a;\nshl.b32 %r41, %r0, 2;\nadd.u32 %r40, %r40, %r41;\n"  # address of the thread's word
READ = FULL + "ld.shared.u32 %r42, [%r40];\n" + t.out("%r42", "%rd2")
WRITE = FULL + "st.shared.u32 [%r40], %r0;\n"


def when(keep, text):
    return text if keep else ""


def tensor(arrays):
    """[32 rows, 32 columns] of u32, boxes of 32 x 32."""
    return encode_tiled(DataType.UINT32, 2, arrays[0].ctypes.data, (32, 32), (128,), (32, 32))


MAPPED = [X, OUT, tensor]


def tma(body):
    return t.kernel(t.init("bar", "bar2") + body, "x out map!", shared=SHARED, target="sm_90a", version="8.6")


def plain(body):
    return t.kernel(t.init("bar", "bar2") + body, "x out", shared=SHARED, target="sm_90a", version="8.6")


LOAD = t.only("%p0", t.expect("bar", 4096) + t.tma_load("a", "%rd3", "0, 0", "bar"))
AGAIN = t.only("%p0", t.expect("bar2", 4096) + t.tma_load("a", "%rd3", "0, 0", "bar2"))
BULK = t.only(
    "%p0",
    t.expect("bar", 4096) + "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [a], [%rd1], 4096, [bar];\n",
)
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd3, {0, 0}], [a];\ncp.async.bulk.commit_group;\n"
BULK_STORE = "cp.async.bulk.global.shared::cta.bulk_group [%rd2], [a], 4096;\ncp.async.bulk.commit_group;\n"
DONE, READ_DONE = "cp.async.bulk.wait_group 0;\n", "cp.async.bulk.wait_group.read 0;\n"


# -- loads -------------------------------------------------------------------------------------------------------------


def test_reading_after_a_tma_load_requires_the_mbarrier_wait():
    def make(keep):
        return tma(LOAD + when(keep, t.wait("bar", 0)) + READ + when(not keep, t.wait("bar", 0)))

    holds(make, args=MAPPED, also=("uninitialised",))
    holds(make, args=MAPPED, strict=False, also=("uninitialised",))


def test_reading_after_a_bulk_load_requires_the_mbarrier_wait():
    def make(keep):
        return plain(BULK + when(keep, t.wait("bar", 0)) + READ + when(not keep, t.wait("bar", 0)))

    holds(make, args=[X, OUT], also=("uninitialised",))


def test_a_relaxed_wait_orders_nothing():
    def make(keep):
        return tma(LOAD + t.wait("bar", 0, "" if keep else ".relaxed.cta") + READ + when(not keep, t.wait("bar", 0)))

    holds(make, args=MAPPED)


def test_a_tma_load_over_bytes_being_read_requires_a_barrier():
    def make(keep):
        body = LOAD + t.wait("bar", 0) + READ + when(keep, "bar.sync 0;\n") + AGAIN + t.wait("bar2", 0)
        return tma(body)

    holds(make, args=MAPPED)
    holds(make, args=MAPPED, strict=False)


def test_two_loads_into_the_same_bytes_are_not_ordered():
    def make(keep):
        body = LOAD + when(keep, t.wait("bar", 0) + "bar.sync 0;\n") + AGAIN + t.wait("bar", 0) + t.wait("bar2", 0)
        return tma(body)

    holds(make, args=MAPPED)


def test_the_kernel_may_not_end_with_a_load_in_flight():
    found = holds(lambda keep: tma(LOAD + when(keep, t.wait("bar", 0))), args=MAPPED, code="in-flight")
    assert "fix: wait for the mbarrier that it signals" in str(found)


def test_copies_that_nobody_announced_are_named_before_the_race_they_make():
    """Two copies of 2048 bytes for one phase, of which one is announced."""
    copy = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [a+{0}], [%rd1+{0}], 2048, [bar];\n"

    def make(size):
        load = t.only("%p0", t.expect("bar", size) + copy.format(2048) + copy.format(0))
        return plain(load + t.wait("bar", 0) + READ)

    for order in ("latest", "eager"):
        assert not findings(make(4096), [X, OUT], strict=False, order=order)
    found = findings(make(2048), [X, OUT], strict=False)
    assert found.codes()[:2] == ["barrier-tx", "race"], str(found)
    assert "copies of 2048 more signal it" in found.diagnostics[0].message
    assert "announced 2048 bytes" in str(found.diagnostics[0].parties[1]), str(found)


def test_expect_tx_is_the_bytes_of_the_box():
    def make(keep):
        size = 4096 if keep else 2048
        copy = t.only("%p0", t.expect("bar", size) + t.tma_load("a", "%rd3", "0, 0", "bar"))
        return tma(copy + t.wait("bar", 0) + READ)

    found = holds(make, args=MAPPED, code=("barrier-tx",), also=("deadlock", "in-flight"))
    announced = found.diagnostics[0].parties[0]
    assert announced.what == "announced 2048 bytes" and announced.who == "warp 0 of CTA (0, 0, 0)", str(found)
    assert "mbarrier.arrive.expect_tx" in announced.instruction


# -- stores ------------------------------------------------------------------------------------------------------------


def test_a_tma_store_after_ordinary_stores_requires_proxy_fence():
    def make(keep):
        body = t.fill("a", 4096, 5) + when(keep, "fence.proxy.async;\n") + "bar.sync 0;\n"
        return tma(body + t.only("%p0", STORE + DONE))

    holds(make, args=MAPPED)
    holds(make, args=MAPPED, strict=False)


def test_a_bulk_store_after_ordinary_stores_requires_proxy_fence():
    def make(keep):
        body = t.fill("a", 4096, 5) + when(keep, "fence.proxy.async;\n") + "bar.sync 0;\n"
        return plain(body + t.only("%p0", BULK_STORE + DONE))

    holds(make, args=[X, OUT])


@pytest.mark.parametrize("forgotten", range(3))
def test_every_copy_out_of_a_buffer_is_over_before_it_is_overwritten(forgotten):
    """Three warps copy the same bytes, to places of their own; one of them does not wait, be it the first."""

    def make(keep):
        copies = ""
        for warp in range(3):
            store = BULK_STORE.replace("[%rd2]", f"[%rd2+{1024 * warp}]").replace("4096", "512")
            wait = READ_DONE if keep or warp != forgotten else ""
            copies += t.only(f"thread {32 * warp}", store + wait)
        fill = t.fill("a", 4096, 5) + "fence.proxy.async;\nbar.sync 0;\n"
        end = "".join(t.only(f"thread {32 * warp}", DONE) for warp in range(3))
        return plain(fill + copies + "bar.sync 0;\n" + t.only("thread 96", "st.shared.u32 [a+4], 7;\n") + end)

    holds(make, args=[X, OUT], strict=False)


def test_the_proxy_fence_comes_behind_the_stores():
    def make(keep):
        fence = "fence.proxy.async;\n"
        body = when(not keep, fence) + WRITE + when(keep, fence) + "bar.sync 0;\n"
        return plain(body + t.only("%p0", BULK_STORE.replace("4096", "512") + DONE))

    for strict in (True, False):
        holds(make, args=[X, OUT], strict=strict)


def test_the_proxy_fence_must_cover_the_stores_of_all_warps():
    """A fence of one warp before the barrier says nothing about the others' stores."""

    def make(keep):
        body = t.fill("a", 4096, 5) + ("fence.proxy.async;\n" if keep else t.only("warp 0", "fence.proxy.async;\n"))
        return tma(body + "bar.sync 0;\n" + t.only("%p0", STORE + DONE))

    holds(make, args=MAPPED)


def test_reusing_the_source_of_a_tma_store_requires_wait_group_read():
    def make(keep):
        body = t.fill("a", 4096, 5) + "fence.proxy.async;\nbar.sync 0;\n"
        body += t.only("%p0", STORE + when(keep, READ_DONE)) + "bar.sync 0;\n" + t.fill("a", 4096, 6)
        return tma(body + t.only("%p0", DONE))

    holds(make, args=MAPPED)
    holds(make, args=MAPPED, strict=False)


def test_reusing_the_source_of_the_newer_of_two_tma_stores_requires_a_wait_for_it():
    """The first wait leaves the newer one alone, though it may be over by then; the second is for it."""

    def make(keep):
        body = t.fill("a", 4096, 5) + "fence.proxy.async;\nbar.sync 0;\n"
        body += t.only("%p0", BULK_STORE + STORE + READ_DONE.replace("0", "1")) + when(keep, t.only("%p0", READ_DONE))
        return tma(body + "bar.sync 0;\n" + t.fill("a", 4096, 6) + t.only("%p0", DONE))

    holds(make, args=MAPPED)


def test_reading_what_a_tma_store_wrote_requires_wait_group():
    def make(keep):
        body = t.fill("a", 4096, 5) + "fence.proxy.async;\nbar.sync 0;\n"
        body += t.only("%p0", STORE + (DONE if keep else READ_DONE)) + "bar.sync 0;\n"
        body += "mul.wide.u32 %rd20, %r0, 4;\nadd.s64 %rd20, %rd1, %rd20;\nld.global.u32 %r42, [%rd20];\n"
        return tma(body + t.out("%r42", "%rd2") + t.only("%p0", DONE))

    holds(make, args=MAPPED)


def test_a_tma_load_of_bytes_written_by_ordinary_stores_requires_proxy_fence():
    def make(keep):
        body = t.out("%r0", "%rd1") + when(keep, "fence.proxy.async;\n") + "bar.sync 0;\n"
        return tma(body + LOAD + t.wait("bar", 0) + READ)

    holds(make, args=MAPPED)


def test_a_kernel_waits_for_its_stores_to_have_read():
    def make(keep):
        body = t.fill("a", 4096, 5) + "fence.proxy.async;\nbar.sync 0;\n"
        return tma(body + t.only("%p0", STORE + when(keep, READ_DONE)))

    holds(make, args=MAPPED, code="in-flight")
    noted = findings(make(False), MAPPED, strict=False)
    assert not noted and [d.code for d in noted.warnings] == ["in-flight"]
    assert "wait_group.read" in str(noted.warnings[0]) and not findings(make(True), MAPPED, strict=False).warnings


def test_lanes_that_store_the_same_box_make_one_copy():
    def make(keep):
        row = "mov.u32 %r50, 0;\n" if keep else "and.b32 %r50, %r2, 1;\n"  # boxes of 32 rows that overlap
        store = STORE.replace("{0, 0}", "{0, %r50}")
        body = t.fill("a", 4096, 5) + "fence.proxy.async;\nbar.sync 0;\n"
        return tma(body + row + t.only("warp 0", store + DONE))

    holds(make, args=MAPPED)
    holds(make, args=MAPPED, strict=False)


def test_bytes_cleared_by_st_bulk_are_read_behind_a_barrier():
    def make(keep):
        clear = t.only("%p0", "st.bulk.weak.shared::cta [a], 4096, 0;\n")
        body = WRITE + "bar.sync 0;\n" + clear + when(keep, "bar.sync 0;\n") + READ
        return t.kernel(body, "x out", shared=SHARED)

    holds(make, args=[X, OUT])
    holds(make, args=[X, OUT], strict=False)


# -- cp.async ----------------------------------------------------------------------------------------------------------

COPY = (
    FULL + "mul.wide.u32 %rd20, %r0, 4;\nadd.s64 %rd20, %rd1, %rd20;\n"
    "cp.async.ca.shared.global [%r40], [%rd20], 4;\ncp.async.commit_group;\n"
)


def test_reading_after_cp_async_requires_wait_group():
    def make(keep):
        return plain(COPY + when(keep, "cp.async.wait_group 0;\n") + READ)

    holds(make, args=[X, OUT], also=("uninitialised",))


def test_reading_the_copies_of_other_warps_requires_a_barrier():
    other = READ.replace("shl.b32 %r41, %r0, 2;", "xor.b32 %r41, %r0, 96;\nshl.b32 %r41, %r41, 2;")

    def make(keep):
        return plain(COPY + "cp.async.wait_group 0;\n" + when(keep, "bar.sync 0;\n") + other)

    holds(make, args=[X, OUT], also=("uninitialised",))


def test_cp_async_arrival_covers_the_copies_before_it():
    def make(keep):
        arrive = "cp.async.mbarrier.arrive.noinc.shared.b64 [bar3];\n" if keep else t.arrive("bar3")
        first = "@%p0 mbarrier.init.shared::cta.b64 [bar3], 128;\n"
        text = t.kernel(
            first + t.init("bar") + COPY + arrive + t.wait("bar3", 0) + READ,
            "x out",
            target="sm_90a",
            shared=SHARED + ".shared .align 8 .b64 bar3;",
            version="8.6",
        )
        return text

    holds(make, args=[X, OUT])


def test_a_bulk_store_of_copied_bytes_requires_proxy_fence():
    def make(keep):
        copies = "".join(
            COPY.replace("[%r40]", f"[%r40+{512 * i}]").replace("[%rd20]", f"[%rd20+{512 * i}]") for i in range(8)
        )
        body = copies + "cp.async.wait_all;\n" + when(keep, "fence.proxy.async;\n") + "bar.sync 0;\n"
        return plain(body + t.only("%p0", BULK_STORE + DONE))

    holds(make, args=[X, OUT])


def test_a_product_of_copied_bytes_requires_proxy_fence_at_the_strict_level():
    """Behind cp.async.mbarrier.arrive, kernels in production (CUTLASS, FlashMLA) have no fence; behind another arrival
    it is missed at both levels."""
    shared = """.shared .align 1024 .b8 a[4096]; .shared .align 1024 .b8 b[256]; .shared .align 8 .b64 bar;
    .shared .align 8 .b64 full; .shared .align 4 .b32 place;"""
    copy = "mov.u32 %r90, b;\nmad.lo.u32 %r91, %r0, 2, %r90;\ncp.async.ca.shared.global [%r91], [%rd20], 4;\n"
    copy = (
        "mul.wide.u32 %rd21, %r0, 2;\nadd.s64 %rd20, %rd1, %rd21;\nand.b32 %r92, %r0, 1;\nsetp.eq.u32 %p5, %r92, 0;\n"
        + (copy.replace("cp.async", "@%p5 cp.async"))
    )

    def make(fence, arrive="cp.async.mbarrier.arrive.noinc.shared.b64 [full];\n"):
        body = t.init("bar") + "@%p0 mbarrier.init.shared::cta.b64 [full], 128;\n" + t.alloc(64) + t.fill("a", 4096)
        body += "fence.proxy.async;\nbar.sync 0;\n" + copy + arrive + t.wait("full", 0)
        body += when(fence, "fence.proxy.async;\n") + t.descriptor("%rd10", "a") + t.descriptor("%rd11", "b")
        body += t.only("thread 0", t.mma("%r3", "%rd10", "%rd11", t.idesc()) + t.commit("bar"))
        return t.kernel(body + t.wait("bar", 0) + t.AFTER + t.dealloc(64), "x", shared=shared)

    x = [np.full(64, 0x3F803F80, np.uint32)]
    holds(make, args=x)
    assert not findings(make(False), x, strict=False)
    waited = "cp.async.wait_all;\n" + t.arrive("full")
    holds(lambda fence: make(fence, waited), args=x, strict=False)


def filled(size=4096):
    """Return a new text each time, because `only` makes labels."""
    return t.only("%p0", t.expect("bar", size) + t.tma_load("a", "%rd3", "0, 0", "bar"))


def test_a_slot_is_not_filled_again_before_its_bytes_are_there():
    """The readers wait for the first load before the second one; without that wait its bytes are still missing."""

    def make(keep):
        read = t.wait("bar", 0) + FULL + "ld.shared.u32 %r42, [%r40];\nbar.sync 1;\n"
        return tma(filled() + when(keep, read) + filled() + t.wait("bar", 1 if keep else 0))

    for order in ("latest", "eager"):
        assert not findings(make(True), MAPPED, strict=False, order=order)
    found = findings(make(False), MAPPED, strict=False)
    assert found.codes() == ["barrier-reuse"] and "waits for 8192 byte(s)" in str(found), str(found)


def test_bytes_that_never_come_are_named_before_the_slot_is_filled_again():
    later = t.only("warp 0", t.wait("bar2", 0) + filled(4100))
    wait = t.only("warp 1", "@%p9 " + t.arrive("bar2") + t.wait("bar", 0))
    body = "setp.eq.u32 %p9, %r2, 0;\n" + filled(4100) + later + wait
    found = findings(tma(body), MAPPED, strict=False, order="eager")
    assert found.codes()[0] == "barrier-tx" and "4 of the bytes" in str(found), str(found)


# -- between CTAs ------------------------------------------------------------------------------------------------------

PEER = "mov.u32 %r50, %cluster_ctarank;\nxor.b32 %r51, %r50, 1;\n"
SYNC = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
TWO = dict(grid=2, cluster=2)


def pair(body):
    return t.kernel(t.init("bar", "bar2") + PEER + body, "x out", shared=SHARED, target="sm_90a", version="8.6")


MINE = PEER + "mapa.shared::cluster.u32 %r52, %r40, %r51;\n"


def test_reading_a_peers_shared_memory_requires_a_cluster_barrier():
    def make(keep):
        body = WRITE + when(keep, SYNC) + MINE + "ld.shared::cluster.u32 %r42, [%r52];\n" + SYNC
        return pair(body)

    holds(make, args=[X, OUT], also=("uninitialised", "peer-start"), **TWO)


def test_a_relaxed_cluster_arrival_orders_nothing():
    def make(keep):
        sync = SYNC if keep else SYNC.replace("arrive.release", "arrive.relaxed")
        return pair(WRITE + sync + MINE + "ld.shared::cluster.u32 %r42, [%r52];\n" + SYNC)

    holds(make, args=[X, OUT], **TWO)


def test_a_proxy_fence_before_a_relaxed_cluster_arrival_is_enough_by_default():
    """Triton's two-CTA products come so; PTX asks for a release. A fence of the own CTA's memory is not enough."""

    def make(space):
        fence = f"fence.proxy.async.shared::{space};\n" + SYNC.replace("arrive.release", "arrive.relaxed")
        return pair(WRITE + fence + MINE + "ld.shared::cluster.u32 %r42, [%r52];\n" + SYNC)

    assert not findings(make("cluster"), [X, OUT], strict=False, **TWO)
    assert "race" in findings(make("cta"), [X, OUT], strict=False, **TWO).codes()
    assert "race" in findings(make("cluster"), [X, OUT], **TWO).codes()


def test_writing_a_peers_shared_memory_requires_an_order_to_its_reads():
    def make(keep):
        body = (
            WRITE + "ld.shared.u32 %r42, [%r40];\n" + when(keep, SYNC) + MINE + "st.shared::cluster.u32 [%r52], %r0;\n"
        )
        return pair(body + SYNC)

    holds(make, args=[X, OUT], also=("peer-start",), **TWO)


PEERS = 4


@pytest.mark.parametrize("silent", range(1, PEERS + 1))
def test_no_peer_that_reads_is_forgotten(silent):
    """CTAs 1 to 4 read the shared memory of CTA 0 and arrive there; CTA 0 waits for all, or for all but one."""

    def make(keep):
        there = "mov.u32 %r53, bar;\nmapa.shared::cluster.u32 %r53, %r53, 0;\nmapa.shared::cluster.u32 %r52, %r40, 0;\n"
        there += "ld.shared::cluster.u32 %r42, [%r52];\nbar.warp.sync -1;\n"
        arrive = "@%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r53];\n"
        there += arrive if keep else t.only("%p7", arrive)
        here = t.wait("bar", 0, ".acquire.cluster") + "st.shared.u32 [%r40], 7;\n"
        ranks = f"setp.eq.u32 %p5, %r50, 0;\nsetp.ne.u32 %p6, %r50, 0;\nsetp.ne.u32 %p7, %r50, {silent};\n"
        body = t.init(("bar", PEERS - (not keep))) + PEER + WRITE + SYNC + ranks
        body += t.only("%p6", there) + t.only("%p5", here) + SYNC
        return t.kernel(body, "x out", shared=SHARED, target="sm_90a", version="8.6")

    holds(make, args=[X, OUT], grid=PEERS + 1, cluster=PEERS + 1, block=32, strict=False)


def test_st_async_to_a_peer_requires_the_wait_on_its_mbarrier():
    def make(keep):
        body = t.only("%p0", t.expect("bar", 512)) + SYNC + FULL + MINE
        body += "mov.u32 %r53, bar;\nmapa.shared::cluster.u32 %r53, %r53, %r51;\n"
        body += "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r52], %r0, [%r53];\n"
        body += when(keep, t.wait("bar", 0)) + READ.replace("%rd2", "%rd2") + when(not keep, t.wait("bar", 0)) + SYNC
        return pair(body)

    one = holds(make, args=[X, OUT], also=("uninitialised",), code=("race", "uninitialised"), **TWO)
    assert "race" in one.codes() or "uninitialised" in one.codes()


PEER_USES = {
    "load": MINE + "ld.shared::cluster.u32 %r42, [%r52];\n",
    "store": MINE + "st.shared::cluster.u32 [%r52], 7;\n",
    "arrival": "mov.u32 %r53, bar;\nmapa.shared::cluster.u32 %r53, %r53, %r51;\n"
    "@%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r53];\n",
}


@pytest.mark.parametrize("use", ["store", "arrival"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_cta_knows_that_its_peer_has_started_before_it_uses_its_shared_memory(use, strict):
    """CTAs of a cluster run at once, but do not begin at once. A relaxed cluster barrier says enough."""
    relaxed = SYNC.replace("arrive.release", "arrive.relaxed").replace("wait.acquire", "wait")
    also = ("barrier-uninitialised", "barrier-init") if use == "arrival" else ()
    for sync in (SYNC, relaxed) if use == "store" else (SYNC,):
        holds(
            lambda keep, sync=sync: pair("mov.u32 %r40, a;\n" + when(keep, sync) + PEER_USES[use] + SYNC),
            args=[X, OUT], code="peer-start", strict=strict, also=also, **TWO,
        )  # fmt: skip


@pytest.mark.parametrize("use", PEER_USES)
@pytest.mark.parametrize("strict", [True, False])
def test_a_cta_lives_until_its_peers_are_done_with_its_shared_memory(use, strict):
    holds(
        lambda keep: pair(WRITE + SYNC + PEER_USES[use] + when(keep, SYNC)),
        args=[X, OUT], code="peer-exit", strict=strict, **TWO,
    )  # fmt: skip


def test_waiting_for_the_peers_last_arrival_is_enough():
    body = WRITE + SYNC + PEER_USES["load"] + "bar.sync 0;\n" + PEER_USES["arrival"]
    assert not findings(pair(body + t.wait("bar", 0, ".acquire.cluster")), [X, OUT], **TWO)
    assert not findings(pair(body + t.wait("bar", 0)), [X, OUT], strict=False, **TWO)


def handed_over(arrive=".release.cluster", wait=".acquire.cluster", before="", after=""):
    """CTA 1 writes into CTA 0's shared memory and arrives there; CTA 0 waits and reads."""
    there = "mov.u32 %r53, bar;\nmapa.shared::cluster.u32 %r53, %r53, 0;\nmapa.shared::cluster.u32 %r52, %r40, 0;\n"
    there += f"st.shared::cluster.u32 [%r52], %r0;\nbar.sync 0;\n{before}"
    there += f"@%p0 mbarrier.arrive{arrive}.shared::cluster.b64 _, [%r53];\n"
    here = t.wait("bar", 0, wait) + after + "ld.shared.u32 %r42, [%r40];\n"
    ranks = "setp.eq.u32 %p5, %r50, 0;\nsetp.ne.u32 %p6, %r50, 0;\n"
    return pair(FULL + SYNC + ranks + t.only("%p6", there) + t.only("%p5", here) + SYNC)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("narrow", ["arrive", "wait"])
def test_an_arrival_from_another_cta_requires_cluster_scope_on_both_sides(narrow, strict):
    order = {"arrive": ".release.cta", "wait": ".acquire.cta"}[narrow]
    holds(lambda keep: handed_over() if keep else handed_over(**{narrow: order}), args=[X, OUT], strict=strict, **TWO)


def test_an_arrival_without_a_scope_reaches_the_cluster_by_default():
    """PTX says that it means .cta; Triton writes it so between CTAs."""
    for narrow in ("arrive", "wait"):
        holds(lambda keep: handed_over() if keep else handed_over(**{narrow: ""}), args=[X, OUT], **TWO)  # noqa: B023
    assert not findings(handed_over(arrive="", wait=""), [X, OUT], strict=False, **TWO)


@pytest.mark.parametrize("strict", [True, False])
def test_fences_of_the_cluster_stand_in_for_a_release_and_an_acquire(strict):
    relaxed = dict(arrive=".relaxed.cluster", wait=".relaxed.cluster")
    fence = "fence.acq_rel.{};\n"
    for narrow in ("before", "after"):

        def make(keep):
            scopes = {"before": "cluster", "after": "cluster"} | ({} if keep else {narrow: "cta"})  # noqa: B023
            return handed_over(**relaxed, **{where: fence.format(scope) for where, scope in scopes.items()})

        holds(make, args=[X, OUT], strict=strict, **TWO)


def test_commits_of_a_thread_arrive_in_order_by_default():
    """The peer waits for the second commit and ends; PTX does not say that the first has arrived by then."""
    commit = "mov.u32 %r53, {};\n@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster"
    commit += ".multicast::cluster.b64 [%r53], %h1;\n"
    start = "mov.u16 %h1, 3;\nor.b32 %r54, %r50, %r0;\nsetp.eq.u32 %p1, %r54, 0;\n" + SYNC

    def make(*waits):
        body = start + commit.format("bar") + commit.format("bar2") + "".join(t.wait(x, 0) for x in waits)
        return pair(body).replace("sm_90a", "sm_100a")

    for strict in (True, False):
        assert not findings(make("bar", "bar2"), [X, OUT], strict=strict, **TWO)
        assert findings(make("bar"), [X, OUT], strict=strict, **TWO).codes() == ["peer-exit"]
    assert not findings(make("bar2"), [X, OUT], strict=False, **TWO)
    assert findings(make("bar2"), [X, OUT], **TWO).codes() == ["peer-exit"]


def test_a_copy_of_what_st_async_brought_requires_proxy_fence_at_the_strict_level():
    """st.async is asynchronous, but of the generic proxy. FlashMLA's decode kernel for sm_90 has products of what it
    brought, without a fence."""

    def make(keep):
        body = t.only("%p0", t.expect("bar", 512)) + SYNC + FULL + MINE
        body += "mov.u32 %r53, bar;\nmapa.shared::cluster.u32 %r53, %r53, %r51;\n"
        body += "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r52], %r0, [%r53];\n"
        store = "cp.async.bulk.global.shared::cta.bulk_group [%rd4], [a], 512;\ncp.async.bulk.commit_group;\n"
        store = "mul.wide.u32 %rd4, %r50, 512;\nadd.s64 %rd4, %rd2, %rd4;\n" + store
        body += t.wait("bar", 0) + when(keep, "fence.proxy.async;\n") + t.only("%p0", store + DONE)
        return pair(body + SYNC)

    holds(make, args=[X, OUT], **TWO)
    assert not findings(make(False), [X, OUT], strict=False, **TWO)


def test_warps_may_store_the_same_value_to_a_peer():
    """Triton does so if a layout repeats an element: one instruction, one value. Different values are a race."""

    def make(keep):
        place = "mov.u32 %r40, a;\nshl.b32 %r41, %r2, 2;\nadd.u32 %r40, %r40, %r41;\n"
        value = "%r2" if keep else "%r0"
        return pair(place + MINE + SYNC + f"st.shared::cluster.u32 [%r52], {value};\n" + SYNC)

    for strict in (True, False):
        holds(make, args=[X, OUT], strict=strict, **TWO)


def test_multicast_is_complete_for_each_cta_at_its_own_mbarrier():
    def make(keep):
        copy = (
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
            "[a], [%rd3, {0, 0}], [bar], %h0;\n"
        )
        first = t.only("%p0", t.expect("bar", 4096)) + SYNC + "mov.b16 %h0, 3;\n"
        lead = "setp.eq.u32 %p5, %r50, 0;\nand.pred %p5, %p5, %p0;\n@%p5 " + copy
        body = t.init("bar", "bar2") + PEER + first + lead + when(keep, t.wait("bar", 0)) + READ
        body += when(not keep, t.wait("bar", 0)) + SYNC
        return t.kernel(body, "x out map!", shared=SHARED, target="sm_90a", version="8.6")

    report = holds(make, args=MAPPED, also=("uninitialised",), **TWO)
    found = [d for d in report if d.code == "race"]
    assert found and all(f"of CTA rank {int('CTA (1' in d.parties[0].who)}" in d.fix for d in found), str(report)


# -- initialising mbarriers --------------------------------------------------------------------------------------------


def test_other_warps_use_an_mbarrier_after_a_barrier():
    def make(keep):
        body = "@%p0 mbarrier.init.shared::cta.b64 [bar], 128;\n" + when(keep, "bar.sync 0;\n")
        body += t.only("warp 0", "fence.proxy.async;\n") + t.arrive("bar") + t.wait("bar", 0)
        return t.kernel(body, "x out", shared=SHARED, target="sm_90a", version="8.6")

    holds(make, args=[X, OUT], code="barrier-init")
    holds(make, args=[X, OUT], code="barrier-init", strict=False)


def test_the_copy_engine_sees_an_mbarrier_after_a_fence():
    def make(keep):
        body = t.init("bar", fence=keep) + LOAD + t.wait("bar", 0) + READ
        return t.kernel(body, "x out map!", shared=SHARED, target="sm_90a", version="8.6")

    holds(make, args=MAPPED, code="barrier-init")
    assert not findings(make(False), MAPPED, strict=False)


def test_an_mbarrier_is_used_for_something_else_behind_a_barrier():
    """A fast thread initialises it again while other warps still wait for the first use."""
    load = (
        t.expect("bar", 512)
        + "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [a], [%rd1], 512, [bar];\n"
    )
    again = "mbarrier.init.shared::cta.b64 [bar], 128;\n"

    def make(keep):
        body = t.init(("bar", 1)) + t.only("%p0", load) + t.wait("bar", 0) + when(keep, "bar.sync 0;\n")
        return t.kernel(
            body + t.only("%p0", again) + "bar.sync 0;\n" + t.arrive("bar") + t.wait("bar", 0), "x out",
            shared=SHARED, target="sm_90a", version="8.6",
        )  # fmt: skip

    report = holds(make, args=[X, OUT], code="barrier-init", also=("deadlock",), strict=False)
    assert "is initialised again" in report.diagnostics[0].message
    assert "between the last wait" in report.diagnostics[0].fix


def test_advice_for_a_read_of_what_the_first_load_brings():
    """The reader was first. It is not told to give back what it has never had."""
    load = (
        t.expect("bar", 512)
        + "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [a], [%rd1], 512, [bar];\n"
    )

    def make(keep):
        behind = when(keep, "bar.sync 0;\n") + "ld.shared.u32 %r42, [a];\n" + t.out("%r42", "%rd2")
        body = t.init(("bar", 1)) + t.only("%p0", load) + t.only("warp 0", t.wait("bar", 0)) + behind
        return t.kernel(body, "x out", shared=SHARED, target="sm_90a", version="8.6")

    report = holds(make, args=[X, OUT], also=("uninitialised",), strict=False)
    assert "what this one brings, let it wait for mbarrier bar" in report.diagnostics[0].fix


def test_an_arrival_of_cp_async_counts_only_with_noinc():
    """Without it the arrival first adds itself to what is pending, so the barrier still waits for all threads."""

    def make(keep):
        arrive = f"cp.async.mbarrier.arrive{'.noinc' if keep else ''}.shared::cta.b64 [bar];\n"
        copy = FULL + "cp.async.ca.shared.global [%r40], [%rd1], 4;\n"
        body = t.init(("bar", 128)) + copy + arrive + t.wait("bar", 0) + "ld.shared.u32 %r42, [%r40];\n"
        return t.kernel(body + t.out("%r42", "%rd2"), "x out", shared=SHARED, target="sm_90a", version="8.6")

    holds(make, args=[X, OUT], code="deadlock", strict=False)


def test_expect_tx_counts_what_a_peer_stores_by_st_async():
    def make(keep):
        body = t.only("%p0", t.expect("bar", 512 if keep else 256)) + SYNC + FULL + MINE
        body += "mov.u32 %r53, bar;\nmapa.shared::cluster.u32 %r53, %r53, %r51;\n"
        body += "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r52], %r0, [%r53];\n"
        return pair(body + t.wait("bar", 0, ".acquire.cluster") + READ + SYNC)

    also = ("race", "uninitialised", "peer-exit", "in-flight")
    report = holds(make, args=[X, OUT], code="barrier-tx", also=also, strict=False, **TWO)
    assert report.codes()[0] == "barrier-tx" and "announced 256 bytes" in str(report)
