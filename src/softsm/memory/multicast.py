"""One address for the same offset in the memories of several GPUs, for multimem instructions.

Host memory is reserved for the addresses alone; nothing is ever stored there, and ordinary accesses of them are outside
every known allocation.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from softsm import accepted
from softsm.memory.global_memory import GlobalMemory

ALIGNMENT = 128
_live: weakref.WeakSet[Multicast] = weakref.WeakSet()


class Multicast:
    """Buffers of equal size, one in each GPU, that `multicast_ptr` stands for as long as this object lives."""

    def __init__(self, members: Sequence):
        if not isinstance(members, (list, tuple)) or not members:
            accepted.refuse("members", members, "a list with a tensor or an array for each GPU")
        places = [_place(member, i) for i, member in enumerate(members)]
        sizes = [size for _, size in places]
        if len(set(sizes)) != 1:
            raise ValueError(f"members: got {sizes} bytes; they must have the same size")
        self.members = tuple(members)  # alive as long as this
        self.starts, self.size = tuple(start for start, _ in places), sizes[0]
        self._addresses = np.empty(self.size + ALIGNMENT, np.uint8)
        self.multicast_ptr = -(-self._addresses.ctypes.data // ALIGNMENT) * ALIGNMENT
        _live.add(self)

    def places(self, address: int) -> list[int]:
        """Returns where an address of the range lies in each GPU."""
        return [start + address - self.multicast_ptr for start in self.starts]


def _place(member, i: int) -> tuple[int, int]:
    """Returns (address, bytes) of a tensor or array."""
    if isinstance(member, np.ndarray):
        start, size, dense = member.ctypes.data, member.nbytes, member.flags.c_contiguous
    elif hasattr(member, "untyped_storage"):
        if member.is_sparse or member.untyped_storage().device.type != "cpu":  # a device that cuda_shim does not hide
            accepted.refuse(f"members[{i}]", member, "dense CPU tensors")
        start, size, dense = member.data_ptr(), member.numel() * member.element_size(), member.is_contiguous()
    else:
        accepted.refuse(f"members[{i}]", member, "tensors and arrays")
    if not dense or not size or start % 16:
        raise ValueError(
            f"members[{i}]: got {size} bytes at {start:#x}, {'' if dense else 'not '}contiguous; contiguous ones at a "
            "multiple of 16 bytes are accepted"
        )
    return start, size


def multicast(members: Sequence) -> Multicast:
    """Make one address for the same offset in each of `members`, one buffer per GPU. Pass
    `multicast(buffers).multicast_ptr` to multimem instructions, like `multicast_ptr` of torch's symmetric memory."""
    return Multicast(members)


def find(address: int, size: int) -> Multicast | None:
    """Returns the object whose addresses these bytes are."""
    for x in _live:
        if x.multicast_ptr <= address and address + size <= x.multicast_ptr + x.size:
            return x
    return None


def add_members(memory: GlobalMemory) -> None:
    """Make the buffers known to a launch."""
    for x in _live:
        for i, start in enumerate(x.starts):
            memory.add(start, x.size, f"member {i} of a multicast", x)
