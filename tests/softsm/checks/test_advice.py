"""The advice of a race names the wait of the other operation's kind, and what its issuer has done so far."""

import numpy as np
import pytest

import softsm
from softsm.museum import text as t

SHARED = (
    ".shared .align 1024 .b8 a[4096]; .shared .align 1024 .b8 b[4096]; .shared .align 8 .b64 bar; "
    ".shared .align 8 .b64 bar2; .shared .align 4 .b32 place;"
)
ADDRESS = "mul.wide.u32 %rd20, %r0, 4;\nadd.s64 %rd20, %rd1, %rd20;\nshl.b32 %r41, %r0, 2;\nmov.u32 %r40, a;\n"
ADDRESS += "add.u32 %r40, %r40, %r41;\n"
COPY = "cp.async.ca.shared.global [%r40], [%rd20], 4;\n"
READ = "ld.shared.u32 %r42, [%r40];\n" + t.out("%r42", base="%rd2")
FILL = t.fill("a", 4096, 5) + "fence.proxy.async;\nbar.sync 0;\n"
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%rd2], [a], 4096;\n"
STORE_B = "cp.async.bulk.global.shared::cta.bulk_group [%rd2+4096], [b], 4096;\n"
COMMIT, LAST = "cp.async.bulk.commit_group;\n", t.only("%p0", "cp.async.bulk.wait_group 0;\n")


def advice(body: str, target: str = "sm_90a", params: str = "x out") -> list[str]:
    text = t.kernel(body, params, shared=SHARED, target=target, version="8.8" if "100" in target else "8.6")
    arrays = [np.zeros(4096, np.uint32) for _ in params.split()]
    with softsm.checking(order="latest") as report:
        softsm.load(text).launch(1, 128, arrays)
    return [found.fix for found in report if found.code == "race"]


def said(body: str, *words: str, **launch) -> None:
    found = advice(body, **launch)
    assert found and all(word in found[0] for word in words), found


@pytest.mark.parametrize(
    "behind, words",
    [
        ("", "no cp.async.commit_group follows it so far"),
        ("cp.async.commit_group;\n" * 3 + "cp.async.wait_group 3;\n", "cp.async.wait_group 2 or less"),
        ("cp.async.commit_group;\n", "cp.async.wait_group 0 in the thread"),
        ("cp.async.commit_group;\ncp.async.wait_group 0;\n", ""),
    ],
    ids=["not committed", "too many are left", "no wait", "right"],
)
def test_groups_of_cp_async(behind, words):
    body = ADDRESS + COPY + behind + READ
    if words:
        said(body, words)
    else:
        assert not advice(body)


OTHERS = "xor.b32 %r43, %r40, 128;\nld.shared.u32 %r42, [%r43];\n" + t.out("%r42", base="%rd2")


@pytest.mark.parametrize(
    "stages, words", [(1, "put cp.async.wait_group in the threads that copy, and a barrier"), (2, "put a barrier")]
)
def test_a_read_on_the_wrong_side_of_a_cp_async(stages, words):
    """Threads read what those of another warp copy. Without a barrier one may read before anything is there; with two
    stages, after the copy of the next turn has begun."""
    done, barrier = "cp.async.commit_group;\ncp.async.wait_group 0;\n", "bar.sync 0;\n"
    first = ADDRESS + COPY + done
    if stages == 1:
        said(first + OTHERS, "the read came before anything was written", words)
        assert not advice(first + barrier + OTHERS)
    else:
        again = COPY + done + barrier
        said(first + barrier + OTHERS + again, "where this was to read what was there before", words)
        assert not advice(first + barrier + OTHERS + barrier + again)


@pytest.mark.parametrize("commits", ["", "cp.async.commit_group;\n"])
def test_a_cp_async_may_arrive_at_an_mbarrier(commits):
    """The advice says so where the kernel has no groups."""
    arrive = "cp.async.mbarrier.arrive.noinc" in advice(ADDRESS + COPY + READ + commits)[0]
    assert arrive == (not commits)


def test_who_waited_must_be_followed_by_a_barrier():
    """Threads wait for their own copies; those of warp 3 read the copies of warp 0."""
    other = t.only("warp 3", "sub.u32 %r40, %r40, 384;\n" + READ)
    start = ADDRESS + COPY + "cp.async.commit_group;\ncp.async.wait_group 0;\n"
    said(start + other, "not ordered after that wait", "put a barrier")
    assert not advice(start + "bar.sync 0;\n" + other)


def test_an_asynchronous_reader_of_a_cp_async_needs_a_fence():
    """The copy is complete and a barrier lies between; but it wrote in the generic proxy."""
    done = ADDRESS + COPY + "cp.async.commit_group;\ncp.async.wait_group 0;\n"
    store = t.only("%p0", STORE + COMMIT) + LAST
    said(done + "bar.sync 0;\n" + store, "put fence.proxy.async between them")
    assert not advice(done + "fence.proxy.async;\nbar.sync 0;\n" + store)


@pytest.mark.parametrize(
    "store, words",
    [
        (STORE, "no cp.async.bulk.commit_group follows it so far"),
        (STORE + COMMIT + STORE_B + COMMIT + "cp.async.bulk.wait_group.read 2;\n", "wait_group.read 1 or less"),
        (STORE + COMMIT + STORE_B + COMMIT + "cp.async.bulk.wait_group.read 1;\n", ""),
    ],
    ids=["not committed", "too many are left", "right"],
)
def test_groups_of_bulk_stores(store, words):
    body = t.fill("b", 4096, 6) + FILL + t.only("%p0", store) + "bar.sync 0;\n" + t.fill("a", 4096, 7)
    body += t.only("%p0", COMMIT) + LAST
    if words:
        said(body, words)
    else:
        assert not advice(body)


TILES = t.init("bar", "bar2") + t.alloc(64) + t.fill("a", 4096) + t.fill("b", 256) + "fence.proxy.async;\nbar.sync 0;\n"
TILES += t.descriptor("%rd10", "a") + t.descriptor("%rd11", "b")


@pytest.mark.parametrize(
    "behind, words",
    [("", "no tcgen05.commit after it so far"), (t.commit("bar2"), "arrives at mbarrier bar2")],
    ids=["not committed", "committed elsewhere"],
)
def test_products(behind, words):
    product = t.mma("%r3", "%rd10", "%rd11", t.idesc())
    start = TILES + t.only("thread 0", product + behind) + "bar.sync 0;\n"
    end = t.only("thread 0", t.commit("bar")) + t.wait("bar", 0) + t.AFTER
    over = t.fill("a", 4096, 7)
    said(start + over + end + t.dealloc(64), words, target="sm_100a", params="out")
    assert not advice(start + end + over + t.dealloc(64), target="sm_100a", params="out")


FLAGGED = """mov.u32 %r50, %ctaid.x;
setp.eq.u32 %p5, %r50, 0;
"""


@pytest.mark.parametrize("wait, words", [(".read", "wait_group, without .read, is over in the thread"), ("", "")])
def test_a_flag_behind_a_store_that_was_only_read(wait, words):
    """CTA 0 stores in bulk and raises a flag; wait_group.read does not say that the bytes are there."""
    send = STORE + COMMIT + f"cp.async.bulk.wait_group{wait} 0;\nst.release.gpu.global.u32 [%rd1], 1;\n"
    send = FILL + t.only("%p0", send + "cp.async.bulk.wait_group 0;\n")
    poll = "POLL:\nld.acquire.gpu.global.u32 %r60, [%rd1];\nsetp.eq.u32 %p7, %r60, 0;\n@%p7 bra POLL;\n"
    take = poll + "ld.global.u32 %r61, [%rd2];\n"
    text = t.kernel(
        FLAGGED + t.only("%p5", send) + "setp.ne.u32 %p6, %r50, 0;\n" + t.only("%p6", take),
        "x out",
        shared=SHARED,
        target="sm_90a",
        version="8.6",
    )
    with softsm.checking(order="latest") as report:
        softsm.load(text).launch(2, 128, [np.zeros(4096, np.uint32) for _ in "xo"])
    found = [x.fix for x in report]
    assert len(found) == bool(words) and all(words in x and "at .gpu scope" in x for x in found), str(report)


@pytest.mark.parametrize("missing", ["before", "behind"])
def test_a_flag_of_one_thread_needs_barriers_on_both_sides(missing):
    """All threads of CTA 0 store, thread 0 raises a flag; thread 0 of CTA 1 waits for it, and all read."""

    def body(before="bar.sync 0;\n", behind="bar.sync 0;\n"):
        send = "st.global.u32 [%rd20], %r0;\n" + before + t.only("%p0", "st.release.gpu.global.u32 [%rd2], 1;\n")
        poll = "POLL:\nld.acquire.gpu.global.u32 %r60, [%rd2];\nsetp.eq.u32 %p7, %r60, 0;\n@%p7 bra POLL;\n"
        take = t.only("%p0", poll) + behind + "ld.global.u32 %r61, [%rd20];\n"
        return ADDRESS + FLAGGED + t.only("%p5", send) + "setp.ne.u32 %p6, %r50, 0;\n" + t.only("%p6", take)

    def found(text):
        with softsm.checking(order="latest") as report:
            arrays = [np.zeros(128, np.uint32), np.zeros(1, np.uint32)]
            softsm.load(t.kernel(text, "x flag", shared=SHARED, target="sm_90a")).launch(2, 128, arrays)
        return [x.fix for x in report]

    assert not found(body())
    assert ["its CTA" in fix for fix in found(ADDRESS + FLAGGED + "st.global.u32 [%rd20], %r50;\n")] == [False]
    assert ["its CTA needs a barrier before" in fix for fix in found(body(**{missing: ""}))] == [True]
