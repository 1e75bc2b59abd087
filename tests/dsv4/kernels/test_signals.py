"""Tickets and counters of one grid, in a kernel of their own."""

import pytest
import torch

import softsm
from dsv4.kernels.compat import gl, gluon
from dsv4.kernels.signals import signal, take, wait_for
from softsm.errors import Deadlock


@gluon.jit
def doubled_twice(x, half, out, words, ITEMS: gl.constexpr, WAITS: gl.constexpr, TICKETS: gl.constexpr):
    """half = 2 x, line by line; then out = the other end of half, twice. Every CTA takes what comes next."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at = gl.arange(0, 64, layout)
    item = take(words) if TICKETS else gl.program_id(0)
    while item < ITEMS:
        gl.store(half + item * 64 + at, 2 * gl.load(x + item * 64 + at))
        signal(words + 1)
        item = take(words) if TICKETS else item + gl.num_programs(0)
    if WAITS:
        wait_for(words + 1, ITEMS)
    item = take(words + 2)
    while item < ITEMS:
        gl.store(out + item * 64 + at, 2 * gl.load(half + (ITEMS - 1 - item) * 64 + at))
        item = take(words + 2)


def run(waits=True, tickets=True, order="latest"):
    """Run with as many lines as CTAs, of which 32 are resident."""
    x = torch.arange(40 * 64, dtype=torch.int32).view(40, 64)
    half, out, words = torch.zeros_like(x), torch.zeros_like(x), torch.zeros(3, dtype=torch.int32)
    with softsm.use("sm_90a", sms=1), softsm.checking(order=order) as report:
        doubled_twice[(40,)](x, half, out, words, 40, waits, tickets, num_warps=2)
    return torch.equal(out, 4 * x.flip(0)), report


@pytest.mark.compile
def test_a_grid_of_which_some_ctas_are_not_resident():
    for order in ("eager", "latest", "random"):
        right, report = run(order=order)
        assert right and not report, report


def test_a_counter_that_nobody_waits_for_is_a_race():
    assert set(run(waits=False)[1].codes()) == {"race"}


@pytest.mark.compile
def test_without_tickets_all_ctas_have_to_be_resident():
    with pytest.raises(Deadlock, match="have not started"):
        run(tickets=False)
