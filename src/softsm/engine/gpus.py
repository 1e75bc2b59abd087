"""Kernels on several GPUs that communicate through memory (symmetric memory), in one process.

    with softsm.gpus(2) as gpu:
        for rank in range(2):
            with gpu(rank):
                kernel[grid](buffers[rank], pointers_of_all, rank)

Launches inside the block are only collected. At its end they run: the first of every GPU together, then the second,
and so on. Each GPU has its own multiprocessors and can access the memory of all GPUs. When races are checked, a flag
between GPUs orders only what is released and acquired at .sys scope. All GPUs must run the same compiled kernel: a rank
that is a constant, or that Triton specialises if it is 1, would make several (`@triton.jit(do_not_specialize=["rank"])`
prevents that).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from softsm import accepted
from softsm.engine.launch import Kernel, current_options, options
from softsm.engine.observer import Session

MOST = 8


@dataclass
class Launch:
    kernel: Kernel
    shape: tuple  # grid, block, shared memory, cluster and options: the same for all GPUs
    args: object
    memory: object


class Gathering:
    """The launches of each GPU so far."""

    def __init__(self, count: int, sessions: tuple[Session, ...]):
        self.launches: list[list[Launch]] = [[] for _ in range(count)]
        self.rank: int | None = None
        self.sessions = sessions

    def add(self, kernel: Kernel, grid, block, args, shared: int, cluster, memory, changes: dict) -> None:
        if self.rank is None:
            raise ValueError("gpus: a launch outside of `with gpu(rank):`; each launch belongs to one GPU")
        if current_options().sessions != self.sessions:
            raise ValueError("gpus: it runs launches at its end; open it inside of softsm.checking(), not around it")
        shape = grid, block, shared, cluster, tuple(sorted(changes.items()))
        self.launches[self.rank].append(Launch(kernel, shape, args, memory))

    def run(self) -> None:
        counts = [len(x) for x in self.launches]
        if len(set(counts)) != 1:
            raise ValueError(f"gpus: the GPUs launch different numbers of kernels: {counts}")
        for number, together in enumerate(zip(*self.launches)):
            first = together[0]
            for rank, launch in enumerate(together):
                name = first.kernel.name
                if launch.kernel is not first.kernel and launch.kernel.name == name:
                    raise ValueError(
                        f"gpus: launch {number} of GPU {rank} is another compilation of {name} than that of GPU 0; "
                        "Triton makes one for each constant, and for the number 1: name the rank in "
                        "@triton.jit(do_not_specialize=[...])"
                    )
                if launch.kernel is not first.kernel or launch.shape != first.shape:
                    raise ValueError(
                        f"gpus: launch {number} of GPU {rank} is {launch.kernel.name} with "
                        f"{launch.shape[:4]}, that of GPU 0 {first.kernel.name} with {first.shape[:4]}"
                    )
            grid, block, shared, cluster, changes = first.shape
            first.kernel.launch_together(
                grid, block, [x.args for x in together], [x.memory for x in together], shared, cluster, dict(changes)
            )


@contextlib.contextmanager
def gpus(count: int) -> Iterator[Callable]:
    """Run launches of `count` GPUs at the same time (see above). Yields `gpu`: launches inside `with gpu(rank):` are
    those of that GPU."""
    accepted.whole("count", count, 1, MOST)
    now = current_options()
    if now.gathering is not None:
        raise ValueError("gpus: blocks cannot be nested")
    if any(x.one_gpu for x in now.sessions):
        raise ValueError("gpus: softsm trace and softsm time follow launches of one GPU")
    gathering = Gathering(count, now.sessions)

    @contextlib.contextmanager
    def gpu(rank: int):
        gathering.rank = accepted.whole("rank", rank, 0, count - 1)
        try:
            yield
        finally:
            gathering.rank = None

    with options(gathering=gathering):
        yield gpu
    gathering.run()
