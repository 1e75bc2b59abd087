"""Order between threads: bar.sync, named barriers, mbarriers, atomics with their semantics and scope, fences."""

import numpy as np
import pytest
from ruling import findings, holds

import softsm
from softsm.museum import text as t

SHARED = ".shared .align 16 .b8 a[512]; .shared .align 8 .b64 bar; .shared .align 8 .b64 bar2;"
X, OUT = np.zeros(64, np.uint32), np.zeros(1024, np.uint32)
OWN = "mov.u32 %r40, a;\nshl.b32 %r41, %r0, 2;\nadd.u32 %r40, %r40, %r41;\n"
OTHER = "mov.u32 %r40, a;\nxor.b32 %r41, %r0, 96;\nshl.b32 %r41, %r41, 2;\nadd.u32 %r40, %r40, %r41;\n"
WRITE = OWN + "st.shared.u32 [%r40], %r0;\n"
READ = OTHER + "ld.shared.u32 %r42, [%r40];\n" + t.out("%r42", "%rd2")
ARGS = [X, OUT]


def when(keep, text):
    return text if keep else ""


def plain(body):
    return t.kernel(body, "x out", shared=SHARED, target="sm_90a", version="8.6")


def test_reading_what_other_warps_wrote_requires_a_barrier():
    holds(lambda keep: plain(WRITE + when(keep, "bar.sync 0;\n") + READ), args=ARGS, also=("uninitialised",))
    holds(
        lambda keep: plain(WRITE + when(keep, "bar.sync 0;\n") + READ), args=ARGS, also=("uninitialised",), strict=False
    )


def test_overwriting_what_other_warps_read_requires_a_barrier():
    body = WRITE + "bar.sync 0;\n" + READ
    holds(lambda keep: plain(body + when(keep, "bar.sync 0;\n") + WRITE.replace("%r0;", "7;")), args=ARGS)


def test_warps_that_share_words_but_no_bytes_need_no_barrier():
    """Triton packs 16-bit values of two warps into one word and orders each warp by bar.warp.sync alone."""

    def make(keep):
        half = "shr.u32 %r43, %r0, 4;\nand.b32 %r43, %r43, 2;\n" if keep else "mov.u32 %r43, 0;\n"
        body = "mov.u32 %r40, a;\nand.b32 %r41, %r0, 95;\nshl.b32 %r41, %r41, 2;\nadd.u32 %r40, %r40, %r41;\n"
        body += half + "add.u32 %r40, %r40, %r43;\nxor.b32 %r41, %r40, 4;\ncvt.u16.u32 %h1, %r0;\n"
        return plain(body + "st.shared.u16 [%r40], %h1;\nbar.warp.sync -1;\nld.shared.u16 %h2, [%r41];\n")

    holds(make, args=ARGS, strict=False)
    holds(make, args=ARGS)


def test_warps_may_store_one_value_in_one_statement():
    """A compiler may repeat a statement in both ways of a branch. Two statements are a race by the letter though the
    values agree; by default, where the value stays what it was, they are none."""

    def make(keep):
        odd = "and.b32 %r41, %r1, 1;\nsetp.eq.u32 %p5, %r41, 1;\nmov.u32 %r40, a;\n"
        ways = f"@%p5 bra ODD;\n.loc 1 7 3\nst.shared.u32 [%r40], 5;\nbra.uni END;\nODD:\n.loc 1 {7 if keep else 9} 3\n"
        body = odd + ways + "st.shared.u32 [%r40], 5;\nEND:\n" + t.out("5", "%rd2", "0")
        return plain(body).replace(".visible", '.file 1 "kernel.py"\n.visible')

    holds(make, args=ARGS)
    assert not findings(make(False), ARGS, strict=False)
    other = make(False).replace("st.shared.u32 [%r40], 5;\nEND", "st.shared.u32 [%r40], 6;\nEND")
    assert findings(other, ARGS, strict=False).codes() == ["race"]


@pytest.mark.parametrize(("cluster", "advice"), [(1, "two launches"), (2, "barrier.cluster.arrive")])
def test_advice_for_a_race_between_ctas_is_no_barrier(cluster, advice):
    """bar.sync and mbarriers of a CTA order nothing between CTAs."""
    report = findings(plain("mov.u32 %r40, %ctaid.x;\n" + t.out("%r40", "%rd2", "0")), ARGS, grid=2, cluster=cluster)
    between = [d for d in report if "(0, 0, 0)" in str(d) and "(1, 0, 0)" in str(d)]
    assert between and all(advice in d.fix and "put a barrier," not in d.fix for d in between), str(report)


def test_a_race_within_and_between_ctas_is_reported_as_one_between_them():
    """Warps of one CTA conflict first, then those of another at the same line: no barrier of a CTA fixes both."""
    number = "mov.u32 %r40, %ctaid.x;\nshl.b32 %r40, %r40, 8;\nadd.u32 %r40, %r40, %r1;\n"
    kernel = plain(number + t.out("%r40", "%rd2", "0"))
    report = findings(kernel, ARGS, grid=2, strict=False)
    assert report.codes() == ["race"] and "two launches" in next(iter(report)).fix, str(report)


def test_advice_for_warps_in_one_store_is_no_barrier_between_them():
    """Two warps write different values to one address by the same instruction."""
    report = findings(plain("mov.u32 %r40, a;\nst.shared.u32 [%r40], %r1;\n"), ARGS, strict=False)
    assert report.codes() == ["race"]
    assert all("use an atomic" in d.fix and "put a barrier," not in d.fix for d in report), str(report)


def test_a_named_barrier_orders_its_arrivals_before_its_waits():
    """Warps 0 and 1 produce and arrive; warps 2 and 3 wait. Two barriers of 64 threads do not order them."""

    def make(keep):
        count = 128 if keep else 64
        other = 1 if keep else 2
        body = "setp.lt.u32 %p4, %r0, 64;\n"
        first = t.only("%p4", WRITE + f"bar.arrive 1, {count};\n" if keep else WRITE + f"bar.sync 1, {count};\n")
        second = "setp.ge.u32 %p5, %r0, 64;\n" + t.only("%p5", f"bar.sync {other}, {count};\n" + READ)
        return plain(body + first + second)

    holds(make, args=ARGS, also=("uninitialised",))


PAIRS = "shr.u32 %r50, %r1, 1;\nadd.u32 %r50, %r50, 8;\n"  # warps 0 and 1, 2 and 3
PARTNER = OTHER.replace("96", "32") + "ld.shared.u32 %r42, [%r40];\n" + t.out("%r42", "%rd2")


def test_groups_of_warps_have_named_barriers_of_their_own():
    """Four warps mean to meet as pairs; at one barrier, 0 and 2 may meet. In a random order they do."""

    def make(keep):
        return plain((PAIRS if keep else "mov.u32 %r50, 8;\n") + WRITE + "bar.sync %r50, 64;\n" + PARTNER)

    for strict in (True, False):
        holds(make, args=ARGS, code="barrier-groups", strict=strict)
    met = {bool(set(findings(make(False), ARGS, order="random", seed=s).codes()) & {"race"}) for s in range(8)}
    assert met == {True, False}


def test_groups_may_use_a_named_barrier_one_after_the_other():
    first = "setp.lt.u32 %p4, %r0, 64;\n" + t.only("%p4", WRITE + "bar.sync 8, 64;\n" + PARTNER)
    second = "setp.ge.u32 %p5, %r0, 64;\n" + t.only("%p5", WRITE + "bar.sync 8, 64;\n" + PARTNER)
    holds(lambda keep: plain(first + when(keep, "bar.sync 0;\n") + second), args=ARGS, code="barrier-groups")


def test_a_warp_that_does_not_wait_does_not_arrive_twice_in_one_phase():
    """Warp 0 arrives for warp 1, twice; only barrier 2 tells it that warp 1 has come."""

    def make(keep):
        back = when(keep, "bar.sync 2, 64;\n")
        first = t.only("warp 0", "bar.arrive 1, 64;\n" + back + "bar.arrive 1, 64;\n")
        second = t.only("warp 1", "bar.sync 1, 64;\n" + back.replace("sync", "arrive") + "bar.sync 1, 64;\n")
        return plain(second + first)

    report = holds(make, args=ARGS, code="barrier-groups", also=("deadlock",))
    assert "twice in one phase" in str(report)


def test_an_mbarrier_orders_arrivals_before_the_wait():
    def make(keep):
        body = t.init(("bar", 128), "bar2") + WRITE + t.arrive("bar") + when(keep, t.wait("bar", 0)) + READ
        return plain(body + when(not keep, t.wait("bar", 0)))

    holds(make, args=ARGS, also=("uninitialised",))
    holds(make, args=ARGS, also=("uninitialised",), strict=False)


def test_a_relaxed_arrival_orders_nothing():
    def make(keep):
        arrive = t.arrive("bar", "" if keep else ".relaxed.cta")
        return plain(t.init(("bar", 128)) + WRITE + arrive + t.wait("bar", 0) + READ)

    holds(make, args=ARGS)


def test_a_phase_must_be_waited_for_before_the_next_one_ends():
    def make(keep):
        turn = "@%p0 " + t.arrive("bar")
        return plain(t.init("bar") + turn + when(keep, t.wait("bar", 0) + "bar.sync 0;\n") + turn + t.wait("bar", 1))

    holds(make, args=ARGS, code="barrier-phase")


def test_phases_that_nobody_waits_for_again_may_end_unseen():
    """The last slots of a ring are given back, and no thread fills them."""
    turn = "@%p0 " + t.arrive("bar")
    assert not findings(plain(t.init("bar") + turn * 3), ARGS)
    stuck = findings(plain(t.init("bar") + turn * 2 + t.wait("bar", 0)), ARGS)
    assert stuck.codes() == ["barrier-phase", "deadlock"]


def test_the_count_of_an_mbarrier_is_not_a_number_of_bytes():
    def make(keep):
        body = t.init(("bar", 1 if keep else 16384)) + t.only("%p0", t.arrive("bar"))
        return plain(body + when(keep, t.wait("bar", 0)))

    holds(make, args=ARGS, code="barrier-count")


def test_an_mbarrier_is_invalidated_before_it_is_initialised_again():
    def make(keep):
        first = t.init("bar") + "@%p0 " + t.arrive("bar") + t.wait("bar", 0) + "bar.sync 0;\n"
        return plain(first + when(keep, "@%p0 mbarrier.inval.shared::cta.b64 [bar];\n") + t.init("bar"))

    holds(make, args=ARGS, code="barrier-init")
    warns(make, "barrier-init")


def test_an_mbarrier_is_not_used_after_it_is_invalidated():
    def make(keep):
        inval = "@%p0 mbarrier.inval.shared::cta.b64 [bar];\n"
        return plain(t.init("bar") + when(not keep, inval) + "@%p0 " + t.arrive("bar") + when(keep, inval))

    report = holds(make, args=ARGS, code="barrier-inval")
    assert "is used after mbarrier.inval by warp 0" in str(report), str(report)


def warns(make, code):
    """At the default level there is no finding, and a warning without the synchronisation."""
    kept, removed = (findings(make(keep), ARGS, strict=False) for keep in (True, False))
    assert not kept and not kept.warnings and not removed, str(removed)
    assert [w.code for w in removed.warnings] == [code] and f"warning: {code}: " in str(removed)
    assert "without mbarrier.inval" in str(removed)


# -- global memory between CTAs ----------------------------------------------------------------------------------------

RANK = (
    "mov.u32 %r50, %ctaid.x;\nsetp.eq.u32 %p4, %r50, 0;\nand.pred %p4, %p4, %p0;\nsetp.eq.u32 %p5, %r50, 1;\n"
    "and.pred %p5, %p5, %p0;\n"
)
GRID = dict(grid=2, block=32)


def message(store, load, before="", after=""):
    """CTA 0 writes x[1] and sets x[0]; CTA 1 polls x[0] and reads x[1]."""
    send = f"st.global.u32 [%rd1+4], 5;\n{before}{store}\n"
    poll = f"POLL:\n{load}\nsetp.eq.u32 %p6, %r60, 0;\n@%p6 bra POLL;\n"
    poll += f"{after}ld.global.u32 %r61, [%rd1+4];\nst.global.u32 [%rd2], %r61;\n"
    return t.kernel(RANK + t.only("%p4", send) + t.only("%p5", poll), "x out", target="sm_90a", version="8.6")


STORE, LOAD = "st.release.gpu.global.u32 [%rd1], 1;", "ld.acquire.gpu.global.u32 %r60, [%rd1];"
FENCE = "fence.acq_rel.gpu;\n"
RELAXED = ("st.relaxed.gpu.global.u32 [%rd1], 1;", "ld.relaxed.gpu.global.u32 %r60, [%rd1];")


def test_a_flag_requires_release():
    holds(lambda keep: message(STORE if keep else RELAXED[0], LOAD), args=ARGS, **GRID)
    holds(lambda keep: message(STORE if keep else RELAXED[0], LOAD), args=ARGS, strict=False, **GRID)


def test_a_flag_requires_acquire():
    holds(lambda keep: message(STORE, LOAD if keep else RELAXED[1]), args=ARGS, **GRID)


def test_a_relaxed_flag_requires_a_fence_before_it():
    holds(lambda keep: message(*RELAXED, when(keep, FENCE), FENCE), args=ARGS, **GRID)


def test_a_relaxed_flag_requires_a_fence_after_it():
    holds(lambda keep: message(*RELAXED, FENCE, when(keep, FENCE)), args=ARGS, **GRID)


def test_cta_scope_does_not_reach_another_cta():
    narrow = STORE.replace("gpu", "cta")
    holds(lambda keep: message(STORE if keep else narrow, LOAD), args=ARGS, **GRID)


def test_an_atomic_orders_by_its_semantics():
    def make(keep):
        order = "acq_rel" if keep else "relaxed"
        return message(
            f"atom.{order}.gpu.global.add.u32 %r62, [%rd1], 1;", f"atom.{order}.gpu.global.add.u32 %r60, [%rd1], 0;"
        )

    holds(make, args=ARGS, **GRID)


def test_an_ordinary_flag_is_a_race():
    def make(keep):
        return message(STORE if keep else "st.global.u32 [%rd1], 1;", LOAD)

    holds(make, args=ARGS, **GRID)


VOLATILE = ("st.volatile.global.u32 [%rd1], 1;", "ld.volatile.global.u32 %r60, [%rd1];")


@pytest.mark.parametrize("side", (0, 1), ids=["raised", "read"])
def test_a_volatile_flag_requires_fences(side):
    def make(keep):
        fences = [FENCE, FENCE]
        fences[side] = when(keep, FENCE)
        return message(*VOLATILE, *fences)

    holds(make, args=ARGS, strict=False, **GRID)
    holds(make, args=ARGS, **GRID)


@pytest.mark.parametrize("side", (0, 1), ids=["raised", "read"])
def test_a_volatile_flag_reaches_as_far_as_the_fence(side):
    """__threadfence_block() instead of __threadfence()."""

    def make(keep):
        fences = [FENCE, FENCE]
        fences[side] = FENCE if keep else FENCE.replace("gpu", "cta")
        return message(*VOLATILE, *fences)

    for strict in (True, False):
        holds(make, args=ARGS, strict=strict, **GRID)


def test_a_volatile_flag_behind_a_barrier_that_all_come_to_with_a_fence():
    """By the letter the fence of another warp does not count."""

    def make(keep):
        store = t.only("thread 32", "st.global.u32 [%rd1+4], 5;\n") + when(keep, FENCE) + "bar.sync 0;\n"
        poll = f"POLL:\n{VOLATILE[1]}\nsetp.eq.u32 %p6, %r60, 0;\n@%p6 bra POLL;\n" + FENCE
        read = poll + "ld.global.u32 %r61, [%rd1+4];\n" + t.out("%r61", "%rd2")
        body = (
            RANK
            + "setp.eq.u32 %p7, %r50, 0;\n"
            + t.only("%p7", store + t.only("%p0", VOLATILE[0]))
            + t.only("%p5", read)
        )
        return t.kernel(body, "x out", target="sm_90a", version="8.6")

    holds(make, args=ARGS, strict=False, grid=2, block=64)
    assert "race" in findings(make(True), ARGS, grid=2, block=64).codes()


def test_a_fence_reaches_as_far_as_its_scope():
    def make(narrow):
        def text(keep):
            fences = [FENCE, FENCE]
            if not keep:
                fences[narrow] = FENCE.replace("gpu", "cta")
            return message(*RELAXED, *fences)

        return text

    for narrow in (0, 1):
        for strict in (True, False):
            holds(make(narrow), args=ARGS, strict=strict, **GRID)


def test_every_reader_of_a_word_must_be_done_before_it_is_overwritten():
    """CTA 0 and CTA 1 read x[1]; CTA 1, which reads last, then overwrites it."""

    def make(keep):
        flag = "atom.acq_rel.gpu.global.add.u32 %r62, [%rd1], 1;\n"
        first = "ld.global.u32 %r61, [%rd1+4];\n" + flag
        poll = "POLL:\nld.relaxed.gpu.global.u32 %r60, [%rd1];\nsetp.eq.u32 %p6, %r60, 0;\n@%p6 bra POLL;\n"
        second = poll + when(keep, FENCE) + "ld.global.u32 %r61, [%rd1+4];\nst.global.u32 [%rd1+4], 3;\n"
        body = RANK + t.only("%p4", first) + t.only("%p5", second)
        return t.kernel(body, "x out", target="sm_90a", version="8.6")

    for strict in (True, False):
        holds(make, args=ARGS, strict=strict, **GRID)


def test_a_store_whose_lanes_reach_several_tensors_is_followed_in_each():
    """Lane 3 of CTA 0 writes to x, its other lanes to out, in one store; CTA 1 reads x[3]."""

    def make(keep):
        to = "setp.eq.u32 %p6, %r0, 3;\nselp.b64 %rd10, %rd1, %rd2, %p6;\nmul.wide.u32 %rd11, %r0, 4;\n"
        to += "add.u64 %rd10, %rd10, %rd11;\nst.global.u32 [%rd10], 7;\nbar.warp.sync -1;\n"
        flag = "atom.acq_rel.gpu.global.add.u32 %r62, [%rd1], 1;\n"
        poll = f"POLL:\n{LOAD if keep else RELAXED[1]}\nsetp.eq.u32 %p7, %r60, 0;\n@%p7 bra POLL;\n"
        first = "setp.eq.u32 %p8, %r50, 0;\n" + t.only("%p8", to)
        body = RANK + first + t.only("%p4", flag) + t.only("%p5", poll + "ld.global.u32 %r61, [%rd1+12];\n")
        return t.kernel(body, "x out", target="sm_90a", version="8.6")

    holds(make, args=ARGS, **GRID)
    holds(make, args=ARGS, strict=False, **GRID)


READERS = 5


@pytest.mark.parametrize("silent", range(READERS))
def test_no_reader_of_many_is_forgotten(silent):
    """CTAs 0 to 4 read x[4:36] and count up; the last CTA waits for all, or for all but one, and overwrites it. That
    one may have read first."""

    def make(keep):
        mine = "shl.b32 %r40, %r0, 2;\ncvt.u64.u32 %rd10, %r40;\nadd.u64 %rd10, %rd10, %rd1;\n"
        count = t.only("%p0", "red.release.gpu.global.add.u32 [%rd1], 1;\n")
        count = t.only("%p6", count) if not keep else count
        first = "ld.global.u32 %r61, [%rd10+16];\nbar.warp.sync -1;\n" + count
        poll = f"POLL:\n{LOAD}\nsetp.lt.u32 %p7, %r60, {READERS - (not keep)};\n@%p7 bra POLL;\n"
        body = mine + f"mov.u32 %r50, %ctaid.x;\nsetp.ne.u32 %p6, %r50, {silent};\nsetp.lt.u32 %p4, %r50, {READERS};\n"
        body += f"setp.eq.u32 %p5, %r50, {READERS};\n"
        body += t.only("%p4", first) + t.only("%p5", poll + "st.global.u32 [%rd10+16], 3;\n")
        return t.kernel(body, "x out", target="sm_90a", version="8.6")

    holds(make, args=ARGS, grid=READERS + 1, block=32, strict=False)


@pytest.mark.parametrize("how", ["st.release.gpu.global.u32 [%rd1], 1;", "red.release.gpu.global.add.u32 [%rd1], 1;"])
def test_who_acquires_a_flag_may_reset_it(how):
    def make(keep):
        poll = f"POLL:\n{LOAD if keep else RELAXED[1]}\nsetp.eq.u32 %p6, %r60, 0;\n@%p6 bra POLL;\n"
        body = RANK + t.only("%p4", how + "\n") + t.only("%p5", poll + "st.global.u32 [%rd1], 0;\n")
        return t.kernel(body, "x out", target="sm_90a", version="8.6")

    for strict in (True, False):
        holds(make, args=ARGS, strict=strict, **GRID)


@pytest.mark.parametrize("between", ["", "bar.warp.sync 1;\n"], ids=["at once", "later"])
@pytest.mark.parametrize("how", ["st.relaxed.gpu.global.u32 [%rd1], 1;", "red.relaxed.gpu.global.add.u32 [%rd1], 1;"])
def test_who_acquires_a_flag_by_fences_may_reset_it(how, between):
    """What __threadfence, an atomic and a polling load are. The fence behind the load is needed."""

    def make(keep):
        poll = f"POLL:\n{RELAXED[1]}\nsetp.eq.u32 %p6, %r60, 0;\n@%p6 bra POLL;\n{when(keep, FENCE)}"
        poll += "ld.global.u32 %r61, [%rd1];\nst.global.u32 [%rd1], 0;\n"
        body = RANK + t.only("%p4", FENCE + between + how + "\n") + t.only("%p5", poll)
        return t.kernel(body, "x out", target="sm_90a", version="8.6")

    for strict in (True, False):
        holds(make, args=ARGS, strict=strict, **GRID)


def test_a_flag_that_several_lanes_raise_is_not_reset_behind_the_first():
    """The value of one lane is there; another one may still add."""

    def make(keep):
        add = "red.release.gpu.global.add.u32 [%rd1], 1;\n"
        first = f"setp.eq.u32 %p8, %r50, 0;\n{t.only('%p4' if keep else '%p8', add)}"
        poll = f"POLL:\n{LOAD}\nsetp.eq.u32 %p6, %r60, 0;\n@%p6 bra POLL;\n"
        body = RANK + first + t.only("%p5", poll + "st.global.u32 [%rd1], 0;\n")
        return t.kernel(body, "x out", target="sm_90a", version="8.6")

    holds(make, args=ARGS, **GRID)


def test_a_packed_atomic_races_with_an_ordinary_access():
    def make(keep):
        add = "red.relaxed.gpu.global.add.noftz.f16x2 [%rd1+4], %r61;\n"
        first = "mov.u32 %r61, 0;\n" + add
        return t.kernel(
            RANK + t.only("%p4", first) + t.only("%p5", first if keep else "st.global.u32 [%rd1+4], 3;\n"),
            "x out",
            target="sm_90a",
            version="8.6",
        )

    holds(make, args=ARGS, **GRID)


def test_read_only_data_is_not_written_by_the_grid():
    def make(keep):
        store = t.only("thread 32", "st.global.u32 [%rd1+4], 5;\n") + "bar.sync 0;\n"
        return plain(store + f"ld.global.nc.u32 %r42, [%rd1+{8 if keep else 4}];\n" + t.out("%r42", "%rd2"))

    for strict in (True, False):
        holds(make, args=ARGS, code="read-only", strict=strict, block=64)


DISCARD = "discard.global.L2 [%rd3], 128;\n"
THERE = "add.u64 %rd3, %rd1, 127;\nand.b64 %rd3, %rd3, -128;\n"
WIDE_ARGS = [np.zeros(96, np.uint32), np.zeros(64, np.uint32)]


def test_discarded_bytes_are_written_before_they_are_read():
    def make(keep):
        again = "st.global.u32 [%rd3+8], 7;\n" if keep else "st.global.u32 [%rd3+4], 7;\n"
        return plain(THERE + t.only("%p0", DISCARD + again + "ld.global.u32 %r42, [%rd3+8];\n" + t.out("%r42", "%rd2")))

    for strict in (True, False):
        report = holds(make, args=WIDE_ARGS, code="uninitialised", strict=strict, block=32)
        assert "discard.L2 took their values" in str(report)


def test_discarded_bytes_are_not_stored_by_a_copy():
    def make(keep):
        copy = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [a], [%rd3], 16, [bar];\n"
        again = (
            "st.global.v4.u32 [%rd3], {%r0, %r0, %r0, %r0};\nfence.proxy.async;\n" if keep else "fence.proxy.async;\n"
        )
        body = DISCARD + again + t.expect("bar", 16) + copy + t.wait("bar", 0)
        return plain(THERE + t.init(("bar", 1)) + t.only("%p0", body))

    holds(make, args=WIDE_ARGS, code="uninitialised", strict=False, block=32)


@pytest.mark.parametrize("use", ["ld.global.u32 %r42, [%rd3+8];\n", "st.global.u32 [%rd3+8], 7;\n"])
def test_a_discard_is_a_write_of_128_bytes(use):
    def make(keep):
        barrier = "bar.sync 0;\n" if keep else ""
        return plain(THERE + t.only("thread 32", use) + barrier + t.only("%p0", DISCARD))

    holds(make, args=WIDE_ARGS, strict=False, block=64, also=("uninitialised",))


# -- between grids -----------------------------------------------------------------------------------------------------


LAUNCH = "griddepcontrol.launch_dependents;\n"


def after_another_grid(text, dependent=True, writes=True, early=LAUNCH):
    """One grid writes x, or reads it; the next one, made of `text`, may begin before that has ended."""
    body = early + (t.out("%r0", "%rd1") if writes else "ld.global.u32 %r42, [%rd1+4];\n")
    first = softsm.load(t.kernel(body, "x out", target="sm_90a", version="8.6"))
    second = softsm.load(t.kernel(text, "x out", target="sm_90a", version="8.6"))
    x, out = (np.zeros(64, np.uint32) for _ in range(2))
    with softsm.checking(strict=True) as report:
        first.launch(1, 64, [x, out])
        second.launch(1, 64, [x, out], dependent=dependent)
    return report


WAIT = "griddepcontrol.wait;\n"
USES = {"read": "ld.global.u32 %r42, [%rd1+4];\n", "write": "@%p0 st.global.u32 [%rd1+4], 7;\n"}


@pytest.mark.parametrize("use", USES)
def test_a_dependent_grid_waits_for_the_one_before_it(use):
    assert not after_another_grid(WAIT + USES[use])
    report = after_another_grid(USES[use])
    assert report.codes() == ["race"] and "the grid before this one" in str(report), str(report)
    assert "griddepcontrol.wait" in report.diagnostics[0].fix
    assert not after_another_grid(USES[use], dependent=False)
    assert not after_another_grid(USES[use], early="")  # then that grid has ended


def test_a_dependent_grid_waits_before_it_overwrites_what_is_read():
    assert not after_another_grid(USES["read"], writes=False)
    assert after_another_grid(USES["write"], writes=False).codes() == ["race"]


def chain(middle, last, *, early=LAUNCH, dependent=True):
    """A grid writes x. Of two more, which may each begin before the one before has ended, the second reads x."""
    texts = [early + t.out("%r0", "%rd1"), middle, last + USES["read"]]
    kernels = [softsm.load(t.kernel(text, "x out", target="sm_90a", version="8.6")) for text in texts]
    x, out = (np.zeros(64, np.uint32) for _ in range(2))
    with softsm.checking() as report:
        for k, kernel in enumerate(kernels):
            kernel.launch(4, 64, [x, out], dependent=(False, True, dependent)[k])
    return report


@pytest.mark.parametrize("trigger", [LAUNCH, ""])
def test_a_wait_covers_a_grid_further_back_only_if_the_one_between_has_waited(trigger):
    one = "mov.u32 %r50, %ctaid.x;\nsetp.eq.and.u32 %p4, %r50, 3, %p0;\n" + t.only("%p4", WAIT)
    for middle in (WAIT, one):
        assert not chain(trigger + middle, WAIT)
    report = chain(trigger, WAIT)
    assert report.codes() == ["race"] and "did not wait for" in str(report), str(report)
    assert "the grid before this one as well" in report.diagnostics[0].fix
    assert not chain(trigger, WAIT, early="")  # then the first one has ended before the second begins
    assert not chain(trigger, WAIT, dependent=False)


def test_one_warp_may_wait_for_all_behind_a_barrier():
    assert not after_another_grid(t.only("warp 0", WAIT) + "bar.sync 0;\n" + USES["read"])
    assert after_another_grid("bar.sync 0;\n" + t.only("warp 0", WAIT) + USES["read"]).codes() == ["race"]


def test_a_wait_with_a_time_limit_is_asked_again():
    """At least one of a few seeds makes the answer no."""

    def make(keep):
        store = t.only("warp 1", t.wait("bar2", 0) + "st.shared.u32 [a], 7;\n" + t.arrive("bar"))
        wait = t.wait("bar", 0) if keep else "mbarrier.try_wait.parity.shared::cta.b64 %p6, [bar], 0;\n"
        read = t.only("warp 0", t.arrive("bar2") + wait + "ld.shared.u32 %r42, [a];\n" + t.out("%r42", "%rd2"))
        return plain(t.init(("bar", 32), ("bar2", 32)) + read + store)

    def found(keep):
        return [findings(make(keep), ARGS, strict=False, order="random", seed=seed, block=64) for seed in range(5)]

    assert not any(found(True))
    codes = {code for report in found(False) for code in report.codes()}
    assert codes and codes <= {"race", "uninitialised"}, codes


# -- the words of mbarriers --------------------------------------------------------------------------------------------


def test_an_mbarrier_in_use_is_not_overwritten():
    def make(keep):
        over = "a" if keep else "bar"
        store = t.only("thread 32", f"st.shared.u32 [{over}], 7;\n") + "bar.sync 0;\n"
        return plain(t.init("bar") + store + "@%p0 " + t.arrive("bar") + t.wait("bar", 0))

    for strict in (True, False):
        report = holds(make, args=ARGS, code="barrier-overwritten", strict=strict)
        assert "st.shared.u32 [bar], 7" in str(report)


def test_an_mbarrier_is_invalidated_before_its_word_is_used_again():
    """The default level warns, and leaves it at that when the mbarrier is not used any more."""

    def make(keep):
        first = t.init("bar") + "@%p0 " + t.arrive("bar") + t.wait("bar", 0) + "bar.sync 0;\n"
        over = "@%p0 st.shared.u32 [bar], 7;\n"
        return plain(first + when(keep, "@%p0 mbarrier.inval.shared::cta.b64 [bar];\n") + over)

    holds(make, args=ARGS, code="barrier-overwritten")
    warns(make, "barrier-overwritten")


ADDS = {
    "atom": "@%p0 atom.relaxed.gpu.global.add.u32 %r60, [%rd1], 1;\n",
    "red": "@%p0 red.relaxed.gpu.global.add.u32 [%rd1], 1;\n",
    "bulk": "mov.u32 %r41, a;\n@%p0 st.shared.u32 [%r41], 1;\nfence.proxy.async;\nbar.sync 0;\n"
    "@%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [a], 16;\n"
    "@%p0 cp.async.bulk.commit_group;\n@%p0 cp.async.bulk.wait_group 0;\n",
}


@pytest.mark.parametrize("add", ADDS)
def test_one_cta_may_not_clear_what_all_add_to(add):
    """It clears before it adds itself; the others may have added before."""
    first = "mov.u32 %r50, %ctaid.x;\nsetp.eq.u32 %p4, %r50, 0;\nand.pred %p4, %p4, %p0;\n"
    shared = ".shared .align 128 .b8 a[128];"
    fill = t.fill("a", 128, 0)

    def make(keep):
        clear = "@%p4 st.global.u32 [%rd1], 0;\nbar.sync 0;\n"
        return t.kernel(fill + first + when(not keep, clear) + ADDS[add], "x", shared=shared, target="sm_90a",
                        version="8.6")  # fmt: skip

    for strict in (True, False):
        report = holds(make, args=[np.zeros(64, np.uint32)], strict=strict, grid=3, block=64)
        assert any("wrote global bytes" in p.what and "st.global" in p.instruction for d in report for p in d.parties)


def test_all_may_add_behind_a_flag_of_who_has_cleared():
    first = "mov.u32 %r50, %ctaid.x;\nsetp.eq.u32 %p4, %r50, 0;\nand.pred %p4, %p4, %p0;\n"
    clear = "@%p4 st.global.u32 [%rd1], 0;\n@%p4 st.release.gpu.global.u32 [%rd1+4], 1;\n"
    poll = "POLL:\nld.acquire.gpu.global.u32 %r61, [%rd1+4];\nsetp.eq.u32 %p6, %r61, 0;\n@%p6 bra POLL;\n"
    text = t.kernel(first + clear + poll + ADDS["atom"], "x", target="sm_90a", version="8.6")
    for order in ("eager", "latest", "random"):
        assert not findings(text, [np.zeros(64, np.uint32)], order=order, grid=3, block=64)
