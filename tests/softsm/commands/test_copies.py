"""Runs in copies of the process: results in order, however many at a time, and a copy that dies is noticed."""

import os
import time

import pytest

from softsm.commands.copies import in_copies


def later(number):
    time.sleep(0.02 * (3 - number))
    return number, os.getpid()


@pytest.mark.parametrize("most", [1, 2, 8])
def test_results_come_in_order_and_from_other_processes(most):
    found = in_copies([lambda n=n: later(n) for n in range(4)], most)
    assert [number for number, _ in found] == [0, 1, 2, 3]
    assert len({process for _, process in found} | {os.getpid()}) == 5


def test_a_copy_that_dies_gives_nothing():
    assert in_copies([lambda: os._exit(3), lambda: 1 / 0, lambda: "there"], 2) == [None, None, "there"]


def test_an_interrupted_wait_leaves_no_copy(monkeypatch):
    from softsm.commands import copies

    started = []
    start = copies.start
    monkeypatch.setattr(copies, "start", lambda task: started.append(start(task)) or started[-1])
    monkeypatch.setattr(copies, "wait", lambda connections: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        in_copies([lambda: time.sleep(60)], 1)
    with pytest.raises(ChildProcessError):
        os.waitpid(started[0][1], os.WNOHANG)
