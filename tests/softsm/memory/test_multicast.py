"""Multicast addresses: what they stand for, how long, and what may be a member."""

import gc

import numpy as np
import pytest
import torch

import softsm
from softsm.memory import multicast
from softsm.memory.global_memory import GlobalMemory


def test_an_address_is_a_place_in_every_member():
    members = torch.zeros(3, 64)
    made = softsm.multicast(list(members))
    assert made.multicast_ptr % multicast.ALIGNMENT == 0
    assert multicast.find(made.multicast_ptr + 12, 4) is made
    assert made.places(made.multicast_ptr + 12) == [x.data_ptr() + 12 for x in members]
    assert multicast.find(made.multicast_ptr + 252, 8) is None


def test_a_launch_knows_the_members_and_not_the_address():
    members = [torch.zeros(64), torch.zeros(64)]
    made = softsm.multicast(members)
    memory = GlobalMemory()
    multicast.add_members(memory)
    assert all(memory.find(x.data_ptr(), 256) for x in members)
    assert memory.find(made.multicast_ptr, 4) is None


def test_it_lives_as_long_as_the_object():
    address = softsm.multicast([np.zeros(64, np.uint32)]).multicast_ptr
    gc.collect()
    assert multicast.find(address, 4) is None


@pytest.mark.parametrize(
    "members, why",
    [
        ([], r"members: got \[\]"),
        ([np.zeros(4), np.zeros(8)], r"got \[32, 64\] bytes"),
        ([np.zeros((4, 4))[:, ::2]], r"members\[0\].*not contiguous"),
        ([np.zeros(8, np.uint8)[1:]], "multiple of 16"),
        ([torch.zeros(4), 17], r"members\[1\]: got 17"),
        ([torch.zeros(4, device="meta")], "on meta"),
    ],
)
def test_members_that_are_refused(members, why):
    with pytest.raises(ValueError, match=why):
        softsm.multicast(members)
