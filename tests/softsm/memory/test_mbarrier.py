"""The mbarrier state machine, one rule per test."""

import pytest

from softsm.errors import Fault
from softsm.memory.mbarrier import MAX_COUNT, Mbarrier, pending_count


def test_phase_ends_when_all_have_arrived():
    barrier = Mbarrier(3)
    barrier.arrive(2)
    assert barrier.phase == 0
    barrier.arrive()
    assert (barrier.phase, barrier.pending, barrier.expected) == (1, 3, 3)


def test_fresh_barrier_blocks_parity_0_and_passes_parity_1():
    barrier = Mbarrier(1)
    assert not barrier.passed_parity(0)
    assert barrier.passed_parity(1)
    barrier.arrive()
    assert barrier.passed_parity(0)
    assert not barrier.passed_parity(1)


def test_bytes_hold_the_phase_open():
    barrier = Mbarrier(1)
    barrier.arrive_expect_tx(4096)
    assert barrier.phase == 0
    barrier.complete_tx(4096)
    assert barrier.phase == 1


def test_complete_tx_may_come_before_expect_tx():
    barrier = Mbarrier(1)
    barrier.complete_tx(64)
    assert (barrier.phase, barrier.tx) == (0, -64)
    barrier.arrive_expect_tx(64)
    assert (barrier.phase, barrier.tx) == (1, 0)


def test_expect_tx_alone_ends_a_phase_whose_arrivals_are_in():
    barrier = Mbarrier(2)
    barrier.complete_tx(16)
    barrier.arrive(2)
    assert barrier.phase == 0
    barrier.expect_tx(16)
    assert barrier.phase == 1


def test_drop_lowers_the_count_of_the_next_phase_only():
    barrier = Mbarrier(3)
    barrier.arrive(drop=True)
    barrier.arrive(2)
    assert (barrier.phase, barrier.pending) == (1, 2)
    barrier.arrive(2)
    assert (barrier.phase, barrier.pending) == (2, 2)


def test_increment_is_undone_by_one_more_arrival():
    barrier = Mbarrier(1)
    barrier.increment_pending(1)
    barrier.arrive()
    assert barrier.phase == 0
    barrier.arrive()
    assert (barrier.phase, barrier.pending) == (1, 1)


def test_token_names_its_phase_and_the_count_before_the_arrival():
    barrier = Mbarrier(2)
    first = barrier.arrive()
    assert pending_count(first) == 2
    assert not barrier.passed_token(first)
    second = barrier.arrive()
    assert pending_count(second) == 1
    assert barrier.passed_token(first) and barrier.passed_token(second)


def test_token_two_phases_old_is_a_fault():
    barrier = Mbarrier(1)
    token = barrier.arrive()
    barrier.arrive()
    with pytest.raises(Fault, match="barrier-phase"):
        barrier.passed_token(token)


def test_who_waits_is_woken_once_per_phase():
    woken = []

    class Fragment:
        def unblock(self):
            woken.append(self)

    barrier = Mbarrier(2)
    barrier.waiters.append(Fragment())
    barrier.arrive()
    assert not woken
    barrier.arrive()
    barrier.arrive(2)
    assert len(woken) == 1 and not barrier.waiters


@pytest.mark.parametrize("count", [0, -1, MAX_COUNT + 1])
def test_bad_count_is_a_fault(count):
    with pytest.raises(Fault, match="barrier-count"):
        Mbarrier(count)


def test_one_arrival_too_many_says_who():
    barrier = Mbarrier(2, name="k_ready")
    barrier.arrive(1, "warp 3, PTX line 17")
    with pytest.raises(Fault, match="k_ready.*warp 3, PTX line 17"):
        barrier.arrive(2, "warp 4, PTX line 18")


def test_no_complete_must_not_complete():
    barrier = Mbarrier(2)
    barrier.arrive(1, no_complete=True)
    with pytest.raises(Fault, match="noComplete"):
        barrier.arrive(1, no_complete=True)


def test_transaction_count_out_of_range():
    barrier = Mbarrier(1)
    barrier.expect_tx(MAX_COUNT)
    with pytest.raises(Fault, match="barrier-tx"):
        barrier.expect_tx(1)


def test_description_names_what_is_missing():
    barrier = Mbarrier(16384, name="full[0]")
    barrier.arrive_expect_tx(16384, who="warp 0, PTX line 5")
    assert "16383 of 16384 arrival(s) and 16384 byte(s)" in barrier.describe()
    assert "warp 0, PTX line 5" in barrier.describe()
