"""torch.distributed for the ranks of `softsm.use(arch, ranks=N)`: the functions that programs of several GPUs use.

Ranks are threads of one process (engine/ranks.py), so a collective is an exchange of values, and symmetric memory is
ordinary memory whose addresses all ranks know. Outside of a rank's program torch's own functions run.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from softsm import accepted
from softsm.doors.triton.in_use import Patches
from softsm.engine.options import current_options
from softsm.engine.ranks import Meeting
from softsm.memory.multicast import multicast

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SIGNAL_PAD = 2048  # bytes, as torch has them
OPS: dict[Any, Any] = {
    dist.ReduceOp.SUM: torch.sum,
    dist.ReduceOp.AVG: torch.mean,
    dist.ReduceOp.PRODUCT: torch.prod,
    dist.ReduceOp.MAX: torch.amax,
    dist.ReduceOp.MIN: torch.amin,
}


def meeting() -> Meeting | None:
    """Returns the meeting of the rank whose program runs, or None outside of one."""
    return current_options().meeting


class World:
    """The only process group."""

    group_name = "softsm"

    def rank(self) -> int:
        return _here().rank

    def size(self) -> int:
        return _here().count


WORLD = World()


def _here() -> Meeting:
    found = meeting()
    assert found is not None
    return found


def _whole(group: Any) -> None:
    if group is not None and not isinstance(group, World) and group not in (World.group_name, "0"):
        accepted.refuse("group", group, "None: all ranks are one group")


def _exchange(name: str, value: Any, group: Any = None) -> list:
    _whole(group)
    return _here().exchange(f"torch.distributed.{name}", value)


class Done:
    """A collective is complete when it returns."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _reduced(parts: list[torch.Tensor], op: Any) -> torch.Tensor:
    if op not in OPS:
        accepted.refuse("op", op, "SUM, AVG, PRODUCT, MAX and MIN")
    return OPS[op](torch.stack(parts), 0).to(parts[0].dtype)


def _done(async_op: bool) -> Done | None:
    return Done() if async_op else None


def init_process_group(*_: Any, **__: Any) -> None:
    pass


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Done | None:
    _exchange("barrier", None, group)
    return _done(async_op)


def broadcast(tensor, src=None, group=None, async_op=False, group_src=None) -> Done | None:
    parts = _exchange("broadcast", tensor.clone(), group)
    tensor.copy_(parts[src if src is not None else group_src])
    return _done(async_op)


def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False) -> Done | None:
    tensor.copy_(_reduced(_exchange("all_reduce", tensor.clone(), group), op))
    return _done(async_op)


def all_gather(tensor_list, tensor, group=None, async_op=False) -> Done | None:
    for to, part in zip(tensor_list, _exchange("all_gather", tensor.clone(), group)):
        to.copy_(part)
    return _done(async_op)


def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False) -> Done | None:
    parts = _exchange("all_gather_into_tensor", input_tensor.clone(), group)
    output_tensor.copy_(torch.stack(parts).view_as(output_tensor))
    return _done(async_op)


def all_gather_object(object_list, obj, group=None) -> None:
    object_list[:] = _exchange("all_gather_object", obj, group)


def reduce_scatter_tensor(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False) -> Done | None:
    total = _reduced(_exchange("reduce_scatter_tensor", input.clone(), group), op)
    output.copy_(total.reshape(_here().count, *output.shape)[_here().rank])
    return _done(async_op)


def all_to_all_single(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
) -> Done | None:
    count, rank = _here().count, _here().rank
    sizes = input_split_sizes or [len(input) // count] * count
    parts = _exchange("all_to_all_single", input.clone().split(list(sizes)), group)
    output.copy_(torch.cat([part[rank] for part in parts]))
    return _done(async_op)


class Handle:
    """Symmetric memory of one rank, with the names of torch's."""

    def __init__(self, buffers: list[torch.Tensor], pads: list[torch.Tensor]):
        self.rank, self.world_size = _here().rank, _here().count
        self._buffers, self._pads = buffers, pads
        self.buffer_size, self.signal_pad_size = buffers[0].untyped_storage().nbytes(), SIGNAL_PAD
        self.buffer_ptrs, self.signal_pad_ptrs = ([x.data_ptr() for x in each] for each in (buffers, pads))
        self._addresses = torch.tensor([self.buffer_ptrs, self.signal_pad_ptrs], dtype=torch.int64)
        self.buffer_ptrs_dev, self.signal_pad_ptrs_dev = (x.data_ptr() for x in self._addresses)
        self._multicast = multicast([x.reshape(-1) for x in buffers])
        self.multicast_ptr = self._multicast.multicast_ptr

    def get_buffer(self, rank: int, sizes, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        return _view(self._buffers[rank], sizes, dtype, storage_offset)

    def get_signal_pad(self, rank: int, sizes=(), dtype: torch.dtype | None = None, storage_offset: int = 0):
        return _view(self._pads[rank], sizes or (SIGNAL_PAD // 4,), dtype or torch.uint32, storage_offset)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        barrier()


def _view(tensor: torch.Tensor, sizes, dtype: torch.dtype, offset: int) -> torch.Tensor:
    count = torch.Size(sizes).numel()
    return tensor.reshape(-1).view(dtype)[offset : offset + count].view(*sizes)


def empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    return torch.empty(shape, dtype=dtype)


def rendezvous(tensor: torch.Tensor, group: Any = None) -> Handle:
    """Exchanges tensors of one shape: every rank passes one and gets a handle on those of all."""
    pad = torch.zeros(SIGNAL_PAD, dtype=torch.uint8)
    given = _exchange("rendezvous", (tensor, pad), group)
    shapes = [(list(x.shape), x.dtype) for x, _ in given]
    if any(x != shapes[0] for x in shapes) or not tensor.is_contiguous():
        raise ValueError(f"tensor: got {shapes} on the ranks; accepted: contiguous tensors of one shape and dtype")
    return Handle([x for x, _ in given], [x for _, x in given])


ANSWERS: dict[str, Any] = {
    "is_initialized": lambda: True,
    "get_rank": lambda group=None: _here().rank,
    "get_world_size": lambda group=None: _here().count,
    "get_backend": lambda group=None: "softsm",
    "destroy_process_group": init_process_group,
    **{
        f.__name__: f
        for f in (
            init_process_group, barrier, broadcast, all_reduce, all_gather, all_gather_into_tensor, all_gather_object,
            reduce_scatter_tensor, all_to_all_single,
        )
    },
}  # fmt: skip
SYMMETRIC: dict[str, Any] = {
    "empty": empty,
    "rendezvous": rendezvous,
    "enable_symm_mem_for_group": lambda *_: None,
    "is_nvshmem_available": lambda: False,
}


@contextlib.contextmanager
def environment(count: int) -> Iterator[Callable[[int], None]]:
    """Sets the variables that torchrun sets. Yields a function that sets them for the next rank."""
    before = {name: os.environ.get(name) for name in VARIABLES}

    def turn(rank: int) -> None:
        values = (rank, rank, count, count, "localhost", 29500)
        os.environ.update(zip(VARIABLES, map(str, values)))

    try:
        yield turn
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def install(patches: Patches) -> None:
    import torch.distributed._symmetric_memory as symmetric
    import torch.distributed.distributed_c10d as c10d

    for module, answers in ((dist, ANSWERS), (c10d, ANSWERS), (symmetric, SYMMETRIC)):
        for name, answer in answers.items():
            patches.set(module, name, _for_ranks(answer, getattr(module, name)))
    for module in (dist, c10d):
        patches.set(module, "group", SimpleNamespace(WORLD=WORLD))


def _for_ranks(answer: Any, original: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (answer if meeting() is not None else original)(*args, **kwargs)

    return call
