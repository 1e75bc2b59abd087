"""The most bytes that torch's operations have alive at once, without what was there before."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """with LiveBytes() as live: ...; live.peak. Counts storages that results of operations have, not what an operation
    allocates and frees inside."""

    def __init__(self, *held: torch.Tensor):
        super().__init__()
        self.now = self.peak = 0
        self.known = {x.untyped_storage()._cdata for x in held}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = operation(*args, **(kwargs or {}))
        for x in given if isinstance(given, (tuple, list)) else (given,):
            if isinstance(x, torch.Tensor):
                self.count(x.untyped_storage())
        return given

    def count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.known:
            return
        self.known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size
