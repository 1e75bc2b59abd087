"""A release is of the lanes that execute it: it passes on what they did, and what all lanes of the warp did before they
last met. Lanes meet at bar.warp.sync and at barriers, not by running in step, electing one or exchanging values."""

import numpy as np
import pytest
from ruling import findings, holds

from softsm.museum import text as t

SHARED = ".shared .align 16 .b8 a[512]; .shared .align 8 .b64 full; .shared .align 8 .b64 empty;"
ARGS = [np.zeros(64, np.uint32), np.zeros(64, np.uint32)]
BLOCK = dict(args=ARGS, block=64)
SYNC = "bar.warp.sync 0xffffffff;\n"
LANE = "mov.u32 %r40, a;\nshl.b32 %r41, %r2, 2;\nadd.u32 %r40, %r40, %r41;\n"  # a[lane]
STORE, LOAD = "st.shared.u32 [%r40], %r0;\n", "ld.shared.u32 %r42, [%r40];\n"
ONE = "setp.eq.u32 %p5, %r2, 0;\n"  # lane 0 of each warp


def when(keep, text):
    return text if keep else ""


def hand_over(produce, consume=LOAD, count=1, shared=SHARED):
    """Warp 0 produces; warp 1 waits for `full` and consumes."""
    first, second = t.only("warp 0", produce), t.only("warp 1", t.wait("full", 0) + consume)
    body = t.init(("full", count), ("empty", 1)) + ONE + LANE + first + second
    return t.kernel(body, "x out", shared=shared, target="sm_90a", version="8.6")


def both_levels(make, **more):
    for strict in (True, False):
        report = holds(make, strict=strict, **BLOCK, **more)
    return report


def test_one_lane_that_arrives_releases_its_own_stores_alone():
    arrive = "@%p5 " + t.arrive("full")
    report = both_levels(lambda keep: hand_over(STORE + when(keep, SYNC) + arrive))
    assert "lane 0 did" in report.diagnostics[0].fix and "bar.warp.sync" in report.diagnostics[0].fix
    assert "lane" in report.diagnostics[0].parties[1].who


def test_every_lane_may_arrive_instead():
    """What cudnn-frontend#426 does: the barrier expects 32 arrivals."""
    for strict in (True, False):
        assert not findings(hand_over(STORE + t.arrive("full"), count=32), strict=strict, **BLOCK)
        one_by_one = "".join(f"setp.eq.u32 %p6, %r2, {lane};\n@%p6 {t.arrive('full')}" for lane in reversed(range(32)))
        assert not findings(hand_over(STORE + one_by_one, count=32), strict=strict, **BLOCK)


def test_a_lane_may_release_what_it_did_itself():
    own = t.only("%p5", STORE + t.arrive("full"))
    elsewhere = "st.shared.u32 [%r40+256], %r0;\n"  # of all lanes, which no other warp reads
    for strict in (True, False):
        assert not findings(hand_over(elsewhere + own, "ld.shared.u32 %r42, [a];\n"), strict=strict, **BLOCK)
        assert findings(hand_over(elsewhere + own, "ld.shared.u32 %r42, [a+260];\n"), strict=strict, **BLOCK)


EXCHANGES = (
    "shfl.sync.bfly.b32 %r44, %r0, 1, 31, -1;",
    "vote.sync.ballot.b32 %r44, %p0, -1;",
    "elect.sync %r44|%p7, -1;",
)


@pytest.mark.parametrize("what", EXCHANGES)
def test_an_exchange_between_lanes_orders_no_memory(what):
    both_levels(lambda keep: hand_over(STORE + (SYNC if keep else what + "\n") + "@%p5 " + t.arrive("full")))


def test_one_lane_that_arrives_releases_its_own_loads_alone():
    """Warp 1 reads and gives the slot back; warp 0 overwrites it."""

    def make(keep):
        again = t.wait("empty", 0) + "st.shared.u32 [%r40], 9;\n"
        give_back = LOAD + when(keep, SYNC) + "@%p5 " + t.arrive("empty")
        return hand_over(STORE + SYNC + "@%p5 " + t.arrive("full") + again, give_back)

    both_levels(make)


def test_halves_of_a_word_by_two_lanes():
    half = "mov.u32 %r39, a;\nshl.b32 %r41, %r2, 1;\nadd.u32 %r43, %r39, %r41;\ncvt.u16.u32 %h1, %r0;\n"
    half += "st.shared.u16 [%r43], %h1;\n"
    read = "and.b32 %r40, %r40, 0xffffffbf;\n" + LOAD  # 16 words
    both_levels(lambda keep: hand_over(half + when(keep, SYNC) + "@%p5 " + t.arrive("full"), read))


def test_a_copy_behind_a_release_by_one_lane():
    """Every lane fences its own stores; the copy is issued by another warp."""
    copy = "cp.async.bulk.global.shared::cta.bulk_group [%rd2], [a], 128;\ncp.async.bulk.commit_group;\n"
    copy += "cp.async.bulk.wait_group 0;\n"

    def make(keep):
        produce = STORE + "fence.proxy.async;\n" + when(keep, SYNC) + "@%p5 " + t.arrive("full")
        return hand_over(produce, t.only("%p5", copy))

    both_levels(make)


def test_a_copy_may_overwrite_what_every_lane_has_read():
    load = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [a], [%rd1], 128, [full];\n"

    def make(keep):
        fill = t.expect("full", 128) + load
        again = t.wait("empty", 0) + fill
        produce = t.only("%p5", fill + again) + t.wait("full", 1)
        return hand_over(produce, LOAD + when(keep, SYNC) + "@%p5 " + t.arrive("empty") + t.wait("full", 1))

    both_levels(make)


# -- global memory -----------------------------------------------------------------------------------------------------

GRID = dict(args=ARGS, grid=2, block=32)
FENCE = "fence.acq_rel.gpu;\n"


def message(send, poll="ld.acquire.gpu.global.u32 %r60, [%rd2];\n", after=""):
    """CTA 0 writes x[lane + 1] and lane 0 sets a flag; CTA 1 polls it and reads x[lane + 1]."""
    rank = "mov.u32 %r50, %ctaid.x;\nsetp.eq.u32 %p4, %r50, 0;\nsetp.ne.u32 %p6, %r50, 0;\n" + ONE
    at = "mul.wide.u32 %rd11, %r2, 4;\nadd.s64 %rd11, %rd1, %rd11;\n"
    wait = f"POLL:\n{poll}setp.eq.u32 %p7, %r60, 0;\n@%p7 bra POLL;\n{after}ld.global.u32 %r61, [%rd11+4];\n"
    body = rank + at + t.only("%p4", "st.global.u32 [%rd11+4], 5;\n" + send) + t.only("%p6", wait)
    return t.kernel(body, "x out", target="sm_90a", version="8.6")


SENDS = {
    "st.release": "@%p5 st.release.gpu.global.u32 [%rd2], 1;\n",
    "atom.acq_rel": "@%p5 atom.acq_rel.gpu.global.add.u32 %r62, [%rd2], 1;\n",
    "red.release": "@%p5 red.release.gpu.global.add.u32 [%rd2], 1;\n",
    "fence and st.relaxed": FENCE + "@%p5 st.relaxed.gpu.global.u32 [%rd2], 1;\n",
}


@pytest.mark.parametrize("how", SENDS)
def test_one_lane_that_sets_a_flag_releases_its_own_stores_alone(how):
    for strict in (True, False):
        holds(lambda keep: message(when(keep, SYNC) + SENDS[how]), strict=strict, **GRID)


def test_a_fence_of_every_lane_is_no_meeting():
    """`__threadfence(); if (lane == 0) flag = 1;` lacks __syncwarp; before the fence of lane 0 it may stand as well."""
    behind = FENCE + SYNC + "@%p5 st.relaxed.gpu.global.u32 [%rd2], 1;\n"
    before = SYNC + "@%p5 " + FENCE + "@%p5 st.relaxed.gpu.global.u32 [%rd2], 1;\n"
    for text in (behind, before):
        for strict in (True, False):
            assert not findings(message(text), strict=strict, **GRID)


TICKET = "@%p0 atom.relaxed.gpu.global.add.u32 %r62, [%rd2], 1;\n"
POLL = "ld.relaxed.gpu.global.u32 %r60, [%rd2];\n"


def ticket(fences: str, order="sc") -> str:
    """Four warps of CTA 0 write; those named fence in front of the barrier, and thread 0 takes a ticket behind it.
    CTA 1 reads what warp 2 wrote."""
    fence = f"fence.{order}.gpu;\n"
    send = "".join(t.only(f"warp {w}", fence) for w in map(int, fences)) + "bar.sync 0;\n" + TICKET
    text = message(send, POLL, fence)
    return text.replace("mul.wide.u32 %rd11, %r2, 4;", "mul.wide.u32 %rd11, %r0, 4;")


@pytest.mark.parametrize("order", ["sc", "acq_rel"])
def test_fences_of_all_threads_before_a_barrier_count_for_one_that_takes_a_ticket(order):
    """The pattern of PyTorch's reductions; PTX orders it by fence.sc, hardware by either."""
    grid = dict(GRID, block=128, args=[np.zeros(256, np.uint32), np.zeros(256, np.uint32)])
    for schedule in ("eager", "latest"):
        assert not findings(ticket("0123", order), strict=False, order=schedule, **grid)
        for missing in ("", "0", "013"):
            assert findings(ticket(missing, order), strict=False, order=schedule, **grid).codes() == ["race"], missing


def test_a_ticket_behind_a_barrier_and_a_fence_of_its_own_thread():
    grid = dict(GRID, block=128, args=[np.zeros(256, np.uint32), np.zeros(256, np.uint32)])
    text = ticket("").replace(TICKET, "@%p0 " + FENCE + TICKET)
    for strict in (True, False):
        assert not findings(text, strict=strict, **grid)


@pytest.mark.parametrize("order", ["sc", "acq_rel"])
def test_a_ticket_that_one_thread_took_counts_behind_a_barrier_for_fences_of_all(order):
    """The other half of it: thread 0 of CTA 1 sees the ticket, and behind a barrier warp 2 reads."""
    arrays = [np.zeros(256, np.uint32), np.zeros(256, np.uint32)]
    poll = "POLL:\n@%p0 ld.relaxed.gpu.global.u32 %r60, [%rd2];\nsetp.eq.and.u32 %p7, %r60, 0, %p0;\n@%p7 bra POLL;\n"

    def make(keep):
        fence = f"fence.{order}.gpu;\n"
        rank = "mov.u32 %r50, %ctaid.x;\nsetp.eq.u32 %p4, %r50, 0;\nsetp.ne.u32 %p6, %r50, 0;\n"
        at = "mul.wide.u32 %rd11, %r0, 4;\nadd.s64 %rd11, %rd1, %rd11;\n"
        send = "st.global.u32 [%rd11], 5;\n" + fence + "bar.sync 0;\n" + TICKET
        take = poll + "bar.sync 0;\n" + when(keep, fence) + "ld.global.u32 %r61, [%rd11];\n"
        body = rank + at + t.only("%p4", send) + t.only("%p6", take)
        return t.kernel(body, "x out", target="sm_90a", version="8.6")

    holds(make, strict=False, args=arrays, grid=2, block=128)


# -- relaxed data ------------------------------------------------------------------------------------------------------

DATA = "st.{how}.global.u32 [%rd1+4], 5;\n"
READ = "ld.{how}.global.u32 %r61, [%rd1+4];\nst.global.u32 [%rd2+8], %r61;\n"
HOW = {"volatile": "volatile", "relaxed": "relaxed.gpu"}


def relaxed(how, *, sends=True, takes=True, read=READ, data=DATA):
    """CTA 0 writes a word and sets a flag, CTA 1 polls the flag and reads the word, all by accesses of one kind."""
    how = HOW[how]
    rank = "mov.u32 %r50, %ctaid.x;\nsetp.eq.and.u32 %p4, %r50, 0, %p0;\nsetp.ne.and.u32 %p6, %r50, 0, %p0;\n"
    send = data + when(sends, FENCE) + "st.{how}.global.u32 [%rd2], 1;\n"
    poll = "POLL:\nld.{how}.global.u32 %r60, [%rd2];\nsetp.eq.u32 %p7, %r60, 0;\n@%p7 bra POLL;\n"
    body = rank + t.only("%p4", send) + t.only("%p6", poll + when(takes, FENCE) + read)
    return t.kernel(body.replace("{how}", how), "x out", target="sm_90a", version="8.6")


@pytest.mark.parametrize("how", HOW)
def test_relaxed_data_before_a_flag_are_fenced(how):
    """No race, but the reader of the flag may still see the old word."""
    for strict in (True, False):
        report = holds(lambda keep: relaxed(how, sends=keep), strict=strict, **GRID)
        assert "between these two writes" in report.diagnostics[0].fix


@pytest.mark.parametrize("how", HOW)
def test_relaxed_data_behind_a_flag_are_fenced_at_the_strict_level(how):
    report = holds(lambda keep: relaxed(how, takes=keep), strict=True, **GRID)
    assert "between the read of the flag" in report.diagnostics[0].fix
    assert not findings(relaxed(how, takes=False), strict=False, **GRID)


@pytest.mark.parametrize("read", ["setp.eq.u32 %p8, %r61, 5;\n", "vote.sync.any.pred %p8, %p7, 1;\n"])
def test_relaxed_data_that_the_reader_looks_at_need_no_fence(read):
    """Each word may be its own flag."""
    for strict in (True, False):
        found = findings(relaxed("relaxed", sends=False, takes=False, read=READ + read), strict=strict, **GRID)
        assert bool(found) == read.startswith("vote")


LOOKS = {
    "atomicAdd(p, 0)": "atom.global.add.u32 {to}, [{at}], 0;\n",
    "atomicOr(p, zero)": "mov.b32 %r70, 0;\natom.relaxed.gpu.global.or.b32 {to}, [{at}], %r70;\n",
    "atomicAnd(p, -1)": "atom.global.and.b32 {to}, [{at}], -1;\n",
    "atomicCAS(p, 0, 0)": "atom.global.cas.b32 {to}, [{at}], 0, 0;\n",
}


@pytest.mark.parametrize("how", LOOKS)
def test_an_atomic_that_changes_nothing_is_a_load_of_the_flag_or_of_the_data(how):
    """A hash map whose flags are polled so: what the poll writes is not the message."""
    flag, word = LOOKS[how].format(to="%r60", at="%rd2"), LOOKS[how].format(to="%r61", at="%rd1+4")
    result = "st.global.u32 [%rd2+8], %r61;\n"

    def make(keep, poll, read):
        text = relaxed("relaxed", sends=keep, read=read)
        return text.replace("ld.relaxed.gpu.global.u32 %r60, [%rd2];\n", poll)

    for poll, read in ((flag, READ), (POLL, word + result), (flag, word + result)):
        report = holds(lambda keep, poll=poll, read=read: make(keep, poll, read), strict=False, **GRID)
        assert "between these two writes" in report.diagnostics[0].fix
    counted = word.replace(", 0;", ", 1;").replace("-1;", "-2;").replace("%r70, 0", "%r70, 1")
    assert not findings(make(False, flag, (counted if "CAS" not in how else "") + result), strict=False, **GRID)


@pytest.mark.parametrize("how", LOOKS)
def test_ordinary_data_behind_a_poll_by_an_atomic_need_its_fence(how):
    send, poll = SYNC + SENDS["fence and st.relaxed"], LOOKS[how].format(to="%r60", at="%rd2")
    for strict in (True, False):
        holds(lambda keep: message(send, poll, when(keep, FENCE)), strict=strict, **GRID)


def test_relaxed_data_in_a_row_are_no_message():
    """Lanes, or turns of a loop, that execute one store each announce themselves."""
    data = "mul.wide.u32 %rd11, %r0, 4;\nadd.s64 %rd11, %rd1, %rd11;\nst.relaxed.gpu.global.u32 [%rd11], 5;\n"
    poll = "POLL:\nld.relaxed.gpu.global.u32 %r60, [%rd1+8];\nsetp.eq.u32 %p7, %r60, 0;\n@%p7 bra POLL;\n"
    rank = "mov.u32 %r50, %ctaid.x;\nsetp.eq.u32 %p4, %r50, 0;\nsetp.ne.and.u32 %p6, %r50, 0, %p0;\n"
    body = rank + t.only("%p4", data) + t.only("%p6", poll + READ.replace("{how}", "relaxed.gpu"))
    assert not findings(t.kernel(body, "x out", target="sm_90a", version="8.6"), strict=True, **GRID)


def test_data_of_a_sequence_lock_are_relaxed():
    """A reader notices that the number has changed, and reads again: but it has raced then. Some order shows it."""

    def make(keep):
        kind = ".relaxed.gpu" if keep else ""
        rank = "mov.u32 %r50, %ctaid.x;\nsetp.eq.and.u32 %p4, %r50, 0, %p0;\nsetp.ne.and.u32 %p6, %r50, 0, %p0;\n"
        write = "".join(
            f"st.relaxed.gpu.global.u32 [%rd2], {n - 1};\n{FENCE}st{kind}.global.u32 [%rd1+4], {n};\n"
            f"st.release.gpu.global.u32 [%rd2], {n};\n"
            for n in (2, 4, 6)
        )
        read = (
            "AGAIN:\nld.acquire.gpu.global.u32 %r60, [%rd2];\nand.b32 %r61, %r60, 1;\nsetp.ne.u32 %p7, %r61, 0;\n"
            f"@%p7 bra AGAIN;\nld{kind}.global.u32 %r62, [%rd1+4];\n{FENCE}ld.relaxed.gpu.global.u32 %r63, [%rd2];\n"
            "setp.ne.u32 %p7, %r60, %r63;\n@%p7 bra AGAIN;\nst.global.u32 [%rd2+8], %r62;\n"
        )
        return t.kernel(rank + t.only("%p4", write) + t.only("%p6", read), "x out", target="sm_90a", version="8.6")

    orders = [("eager", 0), ("latest", 0), ("random", 0), ("random", 1), ("random", 2)]
    found = {
        keep: [findings(make(keep), strict=False, order=order, seed=seed, **GRID).codes() for order, seed in orders]
        for keep in (True, False)
    }
    assert not any(found[True]) and {code for codes in found[False] for code in codes} == {"race"}, found


# -- lanes of one warp -------------------------------------------------------------------------------------------------

COUNT = {"global": ("fence.acq_rel.gpu;\n", "%rd2", "%rd1"), "shared": ("fence.acq_rel.cta;\n", "lock", "count")}


def locked(space, *, acquires=True, releases=True):
    """Each of three threads adds one to a number, by ordinary accesses under a lock."""
    fence, lock, count = COUNT[space]
    start = f"@%p0 st.shared.u32 [lock], 0;\n@%p0 st.shared.u32 [count], 0;\n{SYNC}" if space == "shared" else ""
    body = (
        start + f"AGAIN:\natom.relaxed.gpu.{space}.cas.b32 %r60, [{lock}], 0, 1;\nsetp.ne.u32 %p7, %r60, 0;\n"
        "@%p7 bra AGAIN;\n" + when(acquires, fence) + f"ld.{space}.u32 %r61, [{count}];\nadd.u32 %r61, %r61, 1;\n"
        f"st.{space}.u32 [{count}], %r61;\n" + when(releases, fence)
        + f"atom.relaxed.gpu.{space}.exch.b32 %r62, [{lock}], 0;\n"
    )  # fmt: skip
    shared = ".shared .u32 lock; .shared .u32 count;" if space == "shared" else ""
    return t.kernel(body, "x out", shared=shared, target="sm_90a", version="8.6")


@pytest.mark.parametrize("space", COUNT)
@pytest.mark.parametrize("without", ["acquires", "releases"])
def test_lanes_of_a_warp_may_hand_over_a_lock(space, without):
    """Each thread is a thread of its own: fences beside the lock order them without bar.warp.sync."""
    launch = dict(args=ARGS, grid=1, block=3)
    for strict in (True, False):
        holds(lambda keep: locked(space, **{without: keep}), strict=strict, **launch)
