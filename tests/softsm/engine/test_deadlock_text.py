"""The report of a deadlock: who waits, for which phase, what is missing, and the cycle."""

import numpy as np
import pytest

import softsm
from softsm.errors import Deadlock
from softsm.museum import text as t

SHARED = ".shared .align 8 .b64 ping; .shared .align 8 .b64 pong;"


def stuck(body, block=64, shared=SHARED):
    with pytest.raises(Deadlock) as found:
        softsm.load(t.kernel(body, "out", shared=shared, target="sm_90a", version="8.6")).launch(
            1, block, [np.zeros(64, np.uint32)]
        )
    return str(found.value)


def test_the_cycle_of_two_warps_is_named():
    """Warp 0 and warp 1 serve each other once; in the second round both wait first."""
    turn = "setp.eq.u32 %p4, %r2, 0;\n" + t.init("ping", "pong")
    zero = "@%p4 " + t.arrive("ping") + t.wait("pong", 0) + t.wait("pong", 1)
    one = "@%p4 " + t.arrive("pong") + t.wait("ping", 0) + t.wait("ping", 1)
    text = stuck(turn + t.only("warp 0", zero) + t.only("warp 1", one))
    assert "warp 0 of CTA (0, 0, 0) waits for warp 1 of CTA (0, 0, 0) at mbarrier pong" in text
    assert "phase 1 (parity 1)" in text and "missing 1 of 1 arrival(s)" in text
    assert "last: init 1" in text and "arrive 1 by warp 1" in text
    assert "1 CTA is resident\n" in text and "since mbarrier.init" not in text


def test_who_has_never_arrived_is_found_in_the_text():
    """Warp 2 waits for warp 1, which waits for warp 0 and it for warp 1; no warp has arrived anywhere. An idle warp
    that waits for all of them at a barrier is not part of it."""
    shared = SHARED + " .shared .align 8 .b64 done;"
    lead = "setp.eq.u32 %p4, %r2, 0;\n" + t.init("ping", "pong", "done")
    zero = t.wait("ping", 0) + "@%p4 " + t.arrive("pong")
    one = "mov.u32 %r40, pong;\nadd.u32 %r41, %r40, 0;\n" + t.wait("%r41", 0) + "mov.u32 %r42, ping;\n@%p4 "
    one += t.arrive("%r42") + "@%p4 " + t.arrive("done")
    body = lead + t.only("warp 3", "bar.sync 1, 128;\n") + t.only("warp 2", t.wait("done", 0))
    text = stuck(body + t.only("warp 0", zero) + t.only("warp 1", one) + "bar.sync 1, 128;\n", 128, shared)
    ring = text[text.index("they wait for each other") :].splitlines()[1:3]
    assert sorted(line.split(" of ")[0].strip() for line in ring) == ["warp 0", "warp 1"], text
    assert "to arrive in PTX line" in ring[0] and "mbarrier.arrive.shared::cta.b64 _, [%r42]" in text
    assert "arrivals at mbarrier done" in text
    assert "nothing has arrived at mbarrier p" in text and "waits for parity 1 first" in text


def test_bytes_that_never_arrive_are_no_cycle():
    """In a loop, all warps wait for bytes that were announced and never copied: none waits for another."""
    expect = "mov.u32 %r40, ping;\n@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r40], 64;\n"
    loop = "AGAIN:\n" + expect + t.wait("ping", 0) + "bra AGAIN;\n"
    text = stuck("setp.eq.u32 %p1, %r0, 0;\n" + t.init("ping") + loop)
    assert "missing 64 byte(s)" in text and "they wait for each other" not in text


def test_warps_that_wait_alike_are_one_sentence():
    text = stuck(t.init("ping") + t.wait("ping", 0))
    assert "warps 0, 1 of CTA (0, 0, 0) wait at PTX line" in text
    assert "\n      for phase 0 (parity 0) of mbarrier ping" in text


def test_registers_that_are_used_again_and_again_are_not_followed_along_every_way():
    """Two registers that are each other's sum forty times over: 2^40 ways, and pytest's time limit."""
    again = "mov.u32 %r40, 1;\nmov.u32 %r41, 1;\n" + "add.u32 %r40, %r41, %r40;\nadd.u32 %r41, %r40, %r41;\n" * 40
    never = "setp.ne.u32 %p4, %r40, %r40;\n@%p4 " + t.arrive("%r40")
    text = stuck(again + t.init("ping") + never + t.wait("ping", 0))
    assert "missing 1 of 1 arrival(s)" in text and "parity 1 first" in text
    assert "no instruction is known to arrive" not in text  # one may, at an unknown place


def test_a_barrier_at_which_nothing_arrives_is_said():
    text = stuck(t.init("ping") + t.wait("ping", 0))
    assert "no instruction is known to arrive at mbarrier ping" in text.splitlines()[1] and "parity 1 first" not in text
    assert "they wait for each other" not in text


def test_missing_bytes_are_counted():
    body = t.init("ping") + "@%p0 " + t.expect("ping", 64) + t.wait("ping", 0)
    text = stuck(body)
    assert "missing 64 byte(s)" in text and "warps 0, 1 of CTA" in text


def test_an_address_that_is_counted_up_in_many_places_is_read_in_time():
    """Each definition of the register names it again: following them one by one would never end."""
    count = "mov.u32 %r40, pong;\n" + "add.u32 %r40, %r40, 8;\n" * 40
    text = stuck(t.init("ping") + count + t.wait("ping", 0) + t.arrive("%r40"))
    assert "mbarrier ping" in text


def ring(tmp_path, slot):
    """Warp 0 fills two slots and arrives, for the second one at `slot`; warp 1 waits for both and frees them."""
    source = tmp_path / "program.py"
    source.write_text("mbarrier.init(ready.index(i), count=1)\nmbarrier.init(free.index(i), count=1)\n")
    init = "".join(
        f".loc 1 {line} 3\n" + "".join(f"@%p0 mbarrier.init.shared::cta.b64 [{name}+{at}], 1;\n" for at in (0, 8))
        for line, name in ((1, "ready"), (2, "free"))
    )
    fill = "@%p4 " + t.arrive("ready") + t.wait("free", 0) + "@%p4 " + t.arrive(f"ready+{8 * slot}")
    fill += t.wait("free+8", 0)
    take = t.wait("ready", 0) + "@%p4 " + t.arrive("free") + t.wait("ready+8", 0) + "@%p4 " + t.arrive("free+8")
    body = "setp.eq.u32 %p4, %r2, 0;\n" + init + "bar.sync 0;\n" + t.only("warp 0", fill) + t.only("warp 1", take)
    shared = ".shared .align 8 .b64 ready[2]; .shared .align 8 .b64 free[2];"
    text = t.kernel(body, "out", shared=shared, target="sm_90a", version="8.6") + f'\n.file 1 "{source}"\n'
    return softsm.load(text)


def test_an_arrival_at_the_wrong_slot_is_no_wrong_parity(tmp_path):
    with softsm.checking() as report, pytest.raises(Deadlock):
        ring(tmp_path, 0).launch(1, 64, [np.zeros(64, np.uint32)])
    text = str(report)
    assert "waits for parity 1 first" not in text
    assert "nothing has arrived at mbarrier ready.index(1) (0x" in text and "but at mbarrier ready.index(0) (0x" in text
    with softsm.checking() as report:
        ring(tmp_path, 1).launch(1, 64, [np.zeros(64, np.uint32)])
    assert not report, str(report)


def handed_over(count: int, places: int = 1) -> str:
    """Warp 0 arrives, in `places` places, for warp 1, which arrives for it in turn; `count` arrivals are expected."""
    lead = "setp.eq.u32 %p4, %r2, 0;\n" + t.init(("ping", count), "pong")
    body = lead + t.only("warp 0", ("@%p4 " + t.arrive("ping")) * places + t.wait("pong", 0))
    return body + t.only("warp 1", t.wait("ping", 0) + "@%p4 " + t.arrive("pong"))


def test_a_count_that_is_too_large_is_named_first():
    text = stuck(handed_over(2))
    assert "is the count of its mbarrier.init too large" in text.splitlines()[1], text
    assert "mbarrier ping" in text.splitlines()[1] and "misses 1 of 2 arrivals" in text


def test_warps_that_do_not_arrive_are_not_waited_for():
    """Four warps come to the arrival again and again, thread 0 alone arrives, as Gluon has it."""
    lead = t.init(("ping", 2), "pong") + t.only("warp 4", t.wait("ping", 0) + "@%p4 " + t.arrive("pong"))
    text = stuck(lead + "AGAIN:\nbar.sync 1, 128;\n@%p0 " + t.arrive("ping") + t.wait("pong", 0) + "bra AGAIN;\n", 160)
    assert "is the count of its mbarrier.init too large" in text.splitlines()[1], text


@pytest.mark.parametrize("moved", [False, True])
def test_a_slot_that_is_counted_up_in_a_register(moved):
    """LLVM turns an index modulo 3 into an address that grows by 8 in each turn, less 24 times the turn / 3."""
    grow = "add.u32 %r43, %r41, 8;\nmov.u32 %r41, %r43;\n" if moved else "add.s32 %r41, %r41, 8;\n"
    lead = "setp.eq.u32 %p4, %r2, 0;\n" + t.init(("ring", 2), ("ring+8", 2), ("ring+16", 2), "pong")
    slot = "mul.hi.u32 %r44, %r40, -1431655765;\nshr.u32 %r45, %r44, 1;\nmad.lo.s32 %r46, %r45, -24, %r41;\n"
    fill = "mov.u32 %r41, ring;\nmov.u32 %r40, 0;\nTURN:\n" + slot + "@%p4 " + t.arrive("%r46")
    fill += "add.u32 %r40, %r40, 1;\n" + grow + "setp.lt.u32 %p5, %r40, 3;\n@%p5 bra TURN;\n" + t.wait("pong", 0)
    take = t.wait("ring", 0) + "@%p4 " + t.arrive("pong")
    shared = ".shared .align 8 .b64 ring[3]; .shared .align 8 .b64 pong;"
    text = stuck(lead + t.only("warp 0", fill) + t.only("warp 1", take), shared=shared)
    assert "misses 1 of 2 arrivals" in text.splitlines()[1], text


def test_who_touched_a_barrier_is_named_with_the_line_of_the_source():
    source = '\n.file 1 "/kernels/program.py"\n'
    body = "setp.eq.u32 %p4, %r2, 0;\n.loc 1 17 5\n" + t.init(("ping", 2)) + ".loc 1 18 5\n"
    body += t.only("warp 0", "@%p4 " + t.arrive("ping")) + t.wait("ping", 0)
    kernel = t.kernel(body, "out", shared=SHARED, target="sm_90a", version="8.6") + source
    with pytest.raises(Deadlock) as found:
        softsm.load(kernel).launch(1, 64, [np.zeros(64, np.uint32)])
    text = str(found.value)
    assert "last: init 2 by warp 0 of CTA (0, 0, 0), program.py:17, PTX line" in text, text
    assert "arrive 1 by warp 0 of CTA (0, 0, 0), program.py:18, PTX line" in text, text


@pytest.mark.parametrize("count", [1, 2])
def test_a_count_that_is_right(count):
    kernel = t.kernel(handed_over(count, count), "out", shared=SHARED, target="sm_90a", version="8.6")
    with softsm.checking() as report:
        softsm.load(kernel).launch(1, 64, [np.zeros(64, np.uint32)])
    assert not report, str(report)


def test_a_phase_that_nobody_waited_for_is_named_first():
    """The wait for parity 1 of a barrier in phase 0 goes on; where phase 0 is over, it hangs."""
    lead = "setp.eq.u32 %p4, %r2, 0;\n" + t.init("ping", "pong")
    body = lead + t.only("warp 0", "@%p4 " + t.arrive("ping")) + "bar.sync 0;\n"
    for parity in (0, 1):
        hangs = t.only("warp 1", t.wait("ping", parity))
        kernel = t.kernel(body + hangs, "out", shared=SHARED, target="sm_90a", version="8.6")
        with softsm.checking() as report:
            if parity == 0:
                softsm.load(kernel).launch(1, 64, [np.zeros(64, np.uint32)])
                assert not report, str(report)
                continue
            with pytest.raises(Deadlock):
                softsm.load(kernel).launch(1, 64, [np.zeros(64, np.uint32)])
        first = str(report).splitlines()[1]
        assert "phase 0 of mbarrier ping" in first and "the wrong parity?" in first, str(report)
