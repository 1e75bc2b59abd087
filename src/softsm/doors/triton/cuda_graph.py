"""torch.cuda.CUDAGraph while softsm emulates the GPU: launches and torch functions are kept and repeated by `replay`.

As on a GPU nothing is computed while a graph is captured: what the recorded calls write is put back at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.utils import _pytree

_recording: list[CUDAGraph] = []


def capturing() -> bool:
    return bool(_recording)


def call(function: Callable, args: tuple, kwargs: dict, *, launch: bool = False):
    """Do a torch function or a launch, and keep it for `replay` if it can change or make a tensor."""
    graph = _recording[-1]
    with torch._C.DisableTorchFunction():
        for value in _pytree.tree_leaves((args, kwargs)):
            graph.keep(getattr(value, "base", value) if launch else value)  # a descriptor's tensor
        result = function(*args, **kwargs)
        outputs = [x for x in _pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        if outputs or result is None:
            graph.add(function, args, kwargs, outputs)
    return result


class CUDAGraph:
    def __init__(self, keep_graph: bool = False):
        self.calls: list[tuple[Callable, tuple, dict, list[torch.Tensor]]] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()

    def capture_begin(self, pool=None, capture_error_mode: str = "global") -> None:
        if _recording:
            raise RuntimeError("CUDAGraph: a graph is being captured already")
        self.reset()
        _recording.append(self)

    def capture_end(self) -> None:
        _recording.remove(self)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for bytes_, copy in self._before.values():
                bytes_.copy_(copy)
        self._before.clear()

    def keep(self, tensor: object) -> None:
        """Copies a tensor before a call that may write it."""
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key and key not in self._before and key not in self._made:
            bytes_ = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._before[key] = bytes_, bytes_.clone()

    def add(self, function: Callable, args: tuple, kwargs: dict, outputs: list[torch.Tensor]) -> None:
        self._made.update({x.untyped_storage().data_ptr() for x in outputs} - self._before.keys())
        self.calls.append((function, args, kwargs, outputs))

    @torch.no_grad()
    def replay(self) -> None:
        if _recording:
            raise RuntimeError("CUDAGraph: replay inside a capture")
        with torch._C.DisableTorchFunction():
            for function, args, kwargs, outputs in self.calls:
                again = _pytree.tree_leaves(function(*args, **kwargs))
                for old, new in zip(outputs, (x for x in again if isinstance(x, torch.Tensor))):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    def reset(self) -> None:
        self.calls.clear()
        self._before.clear()
        self._made.clear()

    def pool(self) -> tuple[int, int]:
        return (0, 0)


@contextlib.contextmanager
def graph(cuda_graph: CUDAGraph, pool=None, stream=None, capture_error_mode: str = "global") -> Iterator[None]:
    """Replaces torch.cuda.graph"""
    cuda_graph.capture_begin(pool, capture_error_mode)
    try:
        yield
    finally:
        cuda_graph.capture_end()
