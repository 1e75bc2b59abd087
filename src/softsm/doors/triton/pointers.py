"""Storages whose `data_ptr()` was taken while softsm is in use: a kernel may reach them through arrays of pointers.

They stay known until they are freed. The C++ storage is watched by a weak reference, so tracking keeps nothing alive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from softsm.memory.global_memory import GlobalMemory

_known: dict[int, StorageWeakRef] = {}


def tracking(original: Callable) -> Callable:
    """Returns a `Tensor.data_ptr` that remembers the storage."""

    def data_ptr(self) -> int:
        address = original(self)
        if address:
            storage = self.untyped_storage()
            if storage.device.type == "cpu" and storage._cdata not in _known:
                _known[storage._cdata] = StorageWeakRef(storage)
        return address

    return data_ptr


def add_known(memory: GlobalMemory) -> None:
    """Make every storage that is still alive accessible; forget the others."""
    for key, reference in list(_known.items()):
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        if storage is None:
            del _known[key]
        else:
            memory.add(storage.data_ptr(), storage.nbytes(), "a tensor whose data_ptr() was taken", storage)
