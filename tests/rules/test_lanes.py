"""Order between the lanes of one warp: that they run in step orders no memory; bar.warp.sync does."""

import numpy as np
import pytest
from ruling import findings, holds

from softsm.museum import text as t

SHARED = ".shared .align 16 .b8 a[512]; .shared .align 8 .b64 bar;"
ARGS = [np.zeros(64, np.uint32), np.zeros(64, np.uint32)]
OWN = "mov.u32 %r39, a;\nshl.b32 %r41, %r0, 2;\nadd.u32 %r40, %r39, %r41;\n"
OTHER = "mov.u32 %r39, a;\nxor.b32 %r41, %r0, 1;\nshl.b32 %r41, %r41, 2;\nadd.u32 %r40, %r39, %r41;\n"
WRITE = OWN + "st.shared.u32 [%r40], %r0;\n"
READ = "ld.shared.u32 %r42, [%r40];\n"
SYNC = "bar.warp.sync 0xffffffff;\n"


def one_warp(body):
    return t.kernel(body, "x out", shared=SHARED, target="sm_90a", version="8.6")


def lanes_hold(make, **more):
    """The rule holds at both levels, and both lanes are named."""
    for strict in (True, False):
        report = holds(make, args=ARGS, block=32, strict=strict, **more)
        assert "lane" in report.diagnostics[0].parties[1].who, str(report)
        assert "bar.warp.sync" in report.diagnostics[0].fix
    return report


def when(keep, text):
    return text if keep else ""


def test_reading_what_another_lane_wrote_requires_a_warp_barrier():
    report = lanes_hold(lambda keep: one_warp(WRITE + when(keep, SYNC) + OTHER + READ + t.out("%r42", "%rd2")))
    assert "lane 0," in str(report.diagnostics[0].parties[0]) and "lane 1," in str(report.diagnostics[0].parties[1])


def test_overwriting_what_another_lane_read_requires_a_warp_barrier():
    body = WRITE + SYNC + OTHER + READ
    lanes_hold(lambda keep: one_warp(body + when(keep, SYNC) + OWN + "st.shared.u32 [%r40], 9;\n"))


def test_overwriting_what_another_lane_wrote_requires_a_warp_barrier():
    lanes_hold(lambda keep: one_warp(WRITE + when(keep, SYNC) + OTHER + "st.shared.u32 [%r40], 99;\n"))


def test_a_lane_needs_no_barrier_to_itself():
    """Nor does it matter that in a launch before it other lanes read the same words."""
    again = "st.shared.u32 [%r40], 9;\n" + READ
    for before in ("", WRITE + OTHER + READ):
        if before:
            assert findings(one_warp(before), ARGS, block=32)
        report = findings(one_warp(WRITE + READ + again + READ), ARGS, block=32)
        assert not report, str(report)


def test_a_word_written_by_two_lanes_is_not_read_whole_without_a_warp_barrier():
    """Lane 2i writes the lower half of a word, lane 2i + 1 the upper one; then both read the whole word."""

    def make(keep):
        half = "mov.u32 %r39, a;\nshl.b32 %r41, %r0, 1;\nadd.u32 %r40, %r39, %r41;\nst.shared.u16 [%r40], %h0;\n"
        whole = "and.b32 %r40, %r40, 0xfffffffc;\n" + READ
        return one_warp("mov.u16 %h0, 7;\n" + half + when(keep, SYNC) + whole)

    lanes_hold(make)


def test_halves_of_a_word_are_told_apart():
    """Each half is read by the lane that wrote it; older halves may have been written by anybody."""
    half = "mov.u32 %r39, a;\nshl.b32 %r41, %r0, 1;\nadd.u32 %r40, %r39, %r41;\nst.shared.u16 [%r40], %h0;\n"
    own = "mov.u16 %h0, 7;\n" + half + "ld.shared.u16 %h1, [%r40];\n"
    even = "and.b32 %r43, %r0, 1;\nsetp.eq.u32 %p4, %r43, 0;\n"
    older = SYNC + even + "@%p4 st.shared.u16 [%r40], %h0;\n@!%p4 ld.shared.u16 %h1, [%r40];\n"
    across = "xor.b32 %r41, %r0, 1;\nshl.b32 %r41, %r41, 1;\nadd.u32 %r44, %r39, %r41;\n"
    report = findings(one_warp(own + older + across + "@%p4 ld.shared.u16 %h1, [%r44];\n"), ARGS, block=32)
    assert not report, str(report)


def test_a_lane_may_overwrite_the_half_that_it_read():
    """The other half of the word is another lane's, as in Triton's sums of bf16."""

    def make(keep):
        half = "mov.u32 %r39, a;\nshl.b32 %r41, %r0, 1;\nadd.u32 %r40, %r39, %r41;\n"
        body = half + "mov.u16 %h0, 7;\nst.shared.u16 [%r40], %h0;\n" + SYNC + "ld.shared.u16 %h1, [%r40];\n"
        over = "st.shared.u16 [%r40], %h1;\n" if keep else "st.shared.u32 [%r39], 9;\n"
        return one_warp(body + "add.u16 %h1, %h1, 1;\nsetp.eq.u32 %p4, %r0, 0;\n@%p4 " + over)

    lanes_hold(make)


@pytest.mark.parametrize("kind", ["ldmatrix", "stmatrix"])
def test_matrix_moves_are_of_all_lanes(kind):
    rows = "mov.u32 %r39, a;\nshl.b32 %r41, %r0, 4;\nadd.u32 %r43, %r39, %r41;\n"

    def make(keep):
        if kind == "ldmatrix":
            move = rows + "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r44}, [%r43];\n"
            return one_warp(WRITE + when(keep, SYNC) + move)
        move = "mov.u32 %r44, 5;\n" + rows + "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r43], {%r44};\n"
        return one_warp(move + when(keep, SYNC) + OWN + READ)

    for strict in (True, False):
        holds(make, args=ARGS, block=32, strict=strict)


def test_a_copy_of_what_other_lanes_wrote_requires_a_warp_barrier():
    """The proxy fence of every lane covers its own stores; the copy is one lane's."""
    copy = "cp.async.bulk.global.shared::cta.bulk_group [%rd2], [a], 128;\ncp.async.bulk.commit_group;\n"
    copy += "cp.async.bulk.wait_group 0;\n"

    def make(keep):
        return one_warp(WRITE + "fence.proxy.async;\n" + when(keep, SYNC) + t.only("%p0", copy))

    for strict in (True, False):
        holds(make, args=ARGS, block=32, strict=strict)


def test_a_copy_over_what_other_lanes_read_requires_a_warp_barrier():
    """elect.sync chooses a lane and orders no memory."""
    copy = (
        t.expect("bar", 128)
        + "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [a], [%rd1], 128, [bar];\n"
    )

    def make(keep, read=OWN + READ):
        chosen = "elect.sync _|%p4, 0xffffffff;\n" + t.only("%p4", copy) + t.wait("bar", 0)
        return one_warp(t.init("bar") + WRITE + SYNC + read + when(keep, SYNC) + chosen)

    for strict in (True, False):
        holds(make, args=ARGS, block=32, strict=strict)
    alone = t.only("%p0", OWN + READ)  # the lane that copies is the one that read
    assert not findings(make(False, alone), ARGS, block=32)


def test_lanes_also_meet_in_global_memory():
    def make(keep):
        near = "xor.b32 %r45, %r0, 1;\nmul.wide.u32 %rd12, %r45, 4;\nadd.s64 %rd12, %rd2, %rd12;\n"
        return one_warp(t.out("%r0", "%rd2") + when(keep, SYNC) + near + "ld.global.u32 %r46, [%rd12];\n")

    lanes_hold(make)


def test_an_mbarrier_orders_lanes_too():
    def make(keep):
        start = t.init(("bar", 32)) + WRITE
        return one_warp(start + when(keep, t.arrive("bar") + t.wait("bar", 0)) + OTHER + READ)

    lanes_hold(make)


@pytest.mark.parametrize(
    "what",
    ["shfl.sync.bfly.b32 %r44, %r0, 1, 31, MASK;", "vote.sync.ballot.b32 %r44, %p0, MASK;", "bar.warp.sync MASK;"],
)
def test_a_membermask_names_every_lane_that_comes(what):
    def make(keep):
        return one_warp(what.replace("MASK", "0xffffffff" if keep else "0x0000ffff") + "\n")

    for strict in (True, False):
        holds(make, args=ARGS, block=32, code="divergent", strict=strict)


WHOLE = {
    "ldmatrix": "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r44}, [%r43];",
    "stmatrix": "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r43], {%r0};",
    "movmatrix": "movmatrix.sync.aligned.m8n8.trans.b16 %r44, %r0;",
    "mma": "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r0}, {%r0}, "
    "{%f0, %f1, %f2, %f3};",
}


@pytest.mark.parametrize("what", WHOLE)
def test_matrix_instructions_need_lanes_that_have_not_returned(what):
    """PTX: undefined if any thread of the warp has exited. bar.warp.sync and shuffles wait for those that are left."""
    rows = "mov.u32 %r39, a;\nshl.b32 %r41, %r0, 4;\nadd.u32 %r43, %r39, %r41;\nst.shared.u32 [%r43], %r0;\n"
    rows += "".join(f"st.shared.u32 [%r43+{4 * i}], %r0;\nmov.f32 %f{i}, 0f00000000;\n" for i in range(1, 4))
    rows += "mov.f32 %f0, 0f00000000;\n"

    def make(keep):
        leave = "setp.ge.u32 %p5, %r0, 20;\n@%p5 ret;\n"
        return one_warp(rows + when(not keep, leave) + SYNC + WHOLE[what] + when(keep, leave) + SYNC)

    for strict in (True, False):
        holds(make, args=ARGS, block=32, code="divergent", strict=strict)


def test_lanes_of_one_store_do_not_write_different_values_to_one_place_of_global_memory():
    """Which value stays is undefined. One value, one lane, bytes of a word and strong accesses do not matter, nor does
    shared memory, where Triton has all lanes of a reduction store sums that may differ in the last bit."""
    step = "cvt.u64.u32 %rd8, %r0;\nadd.s64 %rd9, %rd9, %rd8;\n"

    def store(kind, value, before="", guard="", at="%rd9"):
        text = one_warp(f"mov.u64 %rd9, %rd2;\nmov.u32 %r40, a;\n{before}{guard} st{kind} [{at}], {value};\n")
        return findings(text, ARGS, block=32, strict=False)

    report = store(".global.u32", "%r0")
    assert report.codes() == ["race"], str(report)
    first, second = report.diagnostics[0].parties
    assert "lane 31" in first.who and "lane 0" in second.who and "undefined" in report.diagnostics[0].fix
    assert not store(".global.u32", "7")
    assert not store(".global.u32", "%r0", "setp.eq.u32 %p4, %r0, 5;\n", "@%p4")
    assert not store(".global.u8", "%r0", step)
    assert not store(".volatile.global.u32", "%r0")
    assert not store(".shared.u32", "%r0", at="%r40")


@pytest.mark.parametrize(
    "take", ["bfly.b32 %r42, %r0, 16, 31", "down.b32 %r42, %r0, 4, 31", "idx.b32 %r42, %r0, 31, 31"]
)
def test_a_shuffle_takes_nothing_from_a_lane_of_its_membermask_that_has_exited(take):
    """A reduction may read lanes that the membermask leaves out, and ignore what it gets."""
    leave = "setp.ge.u32 %p5, %r0, 20;\n@%p5 exit;\n"
    code = {"code": "divergent", "args": ARGS, "block": 32}
    for strict in (True, False):
        holds(
            lambda keep: one_warp(
                when(not keep, leave) + f"shfl.sync.{take}, 0xffffffff;\n" + when(keep, leave) + t.out("%r42", "%rd2")
            ),
            strict=strict,
            **code,
        )
        report = findings(one_warp(leave + f"shfl.sync.{take}, 0xfffff;\n" + t.out("%r42", "%rd2")), ARGS, block=32)
        assert not report, str(report)
