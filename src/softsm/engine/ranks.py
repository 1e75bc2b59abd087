"""Runs several ranks in one process, each with its own GPU: `softsm.ranks(2, program)` calls program(0), program(1).

    def program(rank):
        kernel[grid](buffers[rank], pointers_of_all, rank)

    softsm.ranks(2, program)

Each rank has a thread, but only one runs at a time, in order of rank, so that nothing depends on timing. A rank runs
until it launches a kernel, enters a collective (doors/triton/distributed.py) or ends. When all have stopped, their
launches run together: the CTAs of all GPUs run concurrently, each GPU has its own SMs, and all can access the memory of
all. If only some ranks launch, their launches run without the others. A kernel may be compiled for each rank (if the
rank is a constant), but all ranks launch the same kernel, with the same grid and block.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from softsm import accepted
from softsm.engine.launch import Kernel
from softsm.engine.options import current_options, options

MOST = 8
Result = TypeVar("Result")


@dataclass
class Launch:
    kernel: Kernel
    shape: tuple  # grid, block, shared memory, cluster and options, equal for all ranks
    args: object
    memory: Any
    ordered: bool = False  # an event orders the launch after other GPUs

    def run(self) -> None:
        """Launches on this GPU alone, or as a rank."""
        grid, block, shared, cluster, changes = self.shape
        self.kernel.launch(grid, block, self.args, shared=shared, cluster=cluster, memory=self.memory, **dict(changes))

    def __str__(self) -> str:
        grid, block, shared, cluster, _ = self.shape
        name = self.kernel.name
        return f"launches {name} with grid {grid}, block {block}, cluster {cluster}, {shared} bytes of shared memory"


@dataclass
class Exchange:
    """A collective: every rank contributes a value and gets the values of all."""

    name: str
    value: object

    def __str__(self) -> str:
        return f"waits in {self.name}"


@dataclass
class End:
    value: object
    error: BaseException | None = None

    def __str__(self) -> str:
        return "has ended"


class Aborted(BaseException):
    """Raised in a rank when another rank, or a launch, has failed."""


class Meeting:
    """The ranks of one `softsm.ranks` and their states."""

    def __init__(self, count: int, turn: Callable[[int], None] | None = None):
        self.count, self.sessions = count, current_options().sessions
        self.turn = turn  # called before a rank continues
        self.rank = 0  # the rank that runs now
        self.met = True  # the ranks met in a collective since the last launches
        self.stops: list[Any] = [None] * count  # Launch, Exchange or End
        self.answers: list[Any] = [None] * count
        self.over = False
        self.turns = [threading.Semaphore(0) for _ in range(count)]
        self.back = threading.Semaphore(0)

    # ---- called by the program of a rank -----------------------------------------------------------------------

    def stop(self, what: Launch | Exchange) -> Any:
        """Waits for the other ranks and returns the answer."""
        rank = self.rank
        self.stops[rank] = what
        self.back.release()
        self.turns[rank].acquire()
        if self.over:
            raise Aborted
        return self.answers[rank]

    def launch(self, kernel: Kernel, grid, block, args, shared: int, cluster, memory, changes: dict) -> None:
        if current_options().sessions != self.sessions:
            raise ValueError("ranks: launches run outside of the ranks' programs; open softsm.checking() around ranks")
        shape = grid, block, shared, cluster, tuple(sorted(changes.items()))
        self.stop(Launch(kernel, shape, args, memory))

    def exchange(self, name: str, value: object) -> list:
        return self.stop(Exchange(name, value))

    # ---- called by `ranks` -------------------------------------------------------------------------------------

    def run(self, program: Callable[[int], Any]) -> list:
        with options(meeting=self):
            contexts = [contextvars.copy_context() for _ in range(self.count)]
        threads = [
            threading.Thread(target=context.run, args=(self.body, rank, program), daemon=True, name=f"rank {rank}")
            for rank, context in enumerate(contexts)
        ]
        for thread in threads:
            thread.start()
        try:
            while not all(isinstance(x, End) for x in self.stops):
                for rank in [r for r, x in enumerate(self.stops) if x is None]:
                    self.resume(rank)
                self.act()
            return [x.value for x in self.stops]
        finally:
            self.over = True
            for rank, thread in enumerate(threads):
                if self.stops[rank] is not None:  # otherwise the rank runs, and this thread was interrupted
                    self.turns[rank].release()
                    thread.join()

    def body(self, rank: int, program: Callable[[int], Any]) -> None:
        self.turns[rank].acquire()
        try:
            if not self.over:
                self.stops[rank] = End(program(rank))
        except Aborted:
            self.stops[rank] = End(None)
        except BaseException as error:  # SystemExit too: it ends a program as usual, but in the caller's thread
            self.stops[rank] = End(None, error)
        self.back.release()

    def resume(self, rank: int) -> None:
        """Lets a rank run until it stops."""
        self.rank = rank
        if self.turn is not None:
            self.turn(rank)
        self.turns[rank].release()
        self.back.acquire()
        stop = self.stops[rank]
        if isinstance(stop, End) and stop.error is not None:
            raise stop.error

    def act(self) -> None:
        """Does what the ranks wait for, when all have stopped."""
        launching = [rank for rank, x in enumerate(self.stops) if isinstance(x, Launch)]
        waiting = [rank for rank, x in enumerate(self.stops) if isinstance(x, Exchange)]
        if launching:
            together([x if isinstance(x, Launch) else None for x in self.stops], follows=not self.met)
            self.met = False
            self.go_on(launching, [None] * self.count)
        elif waiting:
            if len(waiting) < self.count or len({x.name for x in self.stops}) > 1:
                raise ValueError(f"ranks: they wait for different collectives: {self.where()}")
            values = [x.value for x in self.stops]
            self.met = True
            self.go_on(waiting, [values] * self.count)

    def go_on(self, ranks: list[int], answers: list) -> None:
        self.answers = answers
        for rank in ranks:
            self.stops[rank] = None

    def where(self) -> str:
        return "; ".join(f"rank {rank} {stop}" for rank, stop in enumerate(self.stops))


def together(launches: list[Launch | None], follows: bool = False) -> None:
    """Runs the launches of all ranks concurrently; None stands for a rank without one. follows: the host has not waited
    since their launches before."""
    rank, first = next((i, x) for i, x in enumerate(launches) if x is not None)
    for i, launch in enumerate(launches):
        if launch is not None and (launch.kernel.name, launch.shape) != (first.kernel.name, first.shape):
            raise ValueError(f"ranks: they launch different kernels: rank {rank} {first}; rank {i} {launch}")
    grid, block, shared, cluster, changes = first.shape
    first.kernel.launch_together(
        [None if x is None else x.kernel for x in launches],
        grid,
        block,
        [x and x.args for x in launches],
        [x and x.memory for x in launches],
        shared,
        cluster,
        {**dict(changes), "follows": follows},
    )


def ranks(count: int, program: Callable[[int], Result], *, turn: Callable[[int], None] | None = None) -> list[Result]:
    """Runs program(rank) for `count` ranks, each with its own GPU, and returns what the programs returned.

    Launches of all ranks run concurrently and can access each other's memory. In `softsm.checking()`, a flag between
    ranks orders only accesses that are released and acquired at .sys scope. `turn(rank)` is called whenever a rank
    continues.
    """
    accepted.whole("count", count, 1, MOST)
    if not callable(program):
        accepted.refuse("program", program, "a function of a rank")
    now = current_options()
    if now.meeting is not None:
        raise ValueError("ranks: they cannot be nested")
    if any(x.one_gpu for x in now.sessions):
        raise ValueError("ranks: softsm trace and softsm time follow launches of one GPU")
    return Meeting(count, turn).run(program)
