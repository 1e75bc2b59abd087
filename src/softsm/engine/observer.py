"""One interface for everything that follows a launch: race checker, recorder, tracer of the timing model, counters.

A `Session` (engine/options.py) belongs to a `with` block (`softsm.checking`, `recording`, `timing`, `counting`) and
makes an `Observer` for each launch inside it. The machine and the instructions call the observer's methods when
something happens; a method does nothing unless a class overrides it. Without an observer, `machine.observer` is None,
and an event costs one comparison.

Python sees only what the compiled loop does not handle itself. The loop handles least for an observer that `follows`.
In a program that is assembled for the race checker (`Kernel.checking`), it does the checker's work too.

An observer may store its data in the objects of the engine: in `Cta.view`, `Warp.view`, `Waitable.clock`, and in the
fields of `AsyncOp` and `Mbarrier` that are marked for observers. The engine never reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from softsm.engine.in_flight import AsyncOp
from softsm.engine.program import MacroCall
from softsm.engine.warps import Cta, Fragment, Warp
from softsm.memory.mbarrier import Mbarrier
from softsm.memory.waitable import Waitable


class Observer:
    """The events of one launch, as methods to override."""

    follows: bool = False  # Gets all events, also those marked (f); the launch stays in one process.
    divisible: bool = True  # CTAs may continue in several processes, see the last section.
    strict: bool = False  # It follows PTX literally.
    operands: bool = False  # It reads the operands of matrix products.
    notes: np.ndarray | None = None  # Compiled code that left notes sets its first word (`take_notes`).

    # ---- the launch --------------------------------------------------------------------------------------------

    def launched(self, machine: Any) -> None:
        """The machine is ready and nothing has started. The observer may still reduce what runs."""

    def cta_began(self, cta: Cta) -> None: ...

    def cta_ended(self, cta: Cta) -> None:
        """All warps of its cluster have exited."""

    def ended(self, failure: BaseException | None) -> None:
        """The launch is over, or it failed; its state still exists."""

    def closed(self) -> None:
        """The state of the launch has been freed."""

    # ---- warps -------------------------------------------------------------------------------------------------

    def turn_began(self, warp: Warp) -> None:
        """(f) The scheduler has chosen the warp."""

    def turn_ended(self, warp: Warp) -> None:
        """(f) It blocks, has used up its quantum, or has exited."""

    def executing(self, warp: Warp, fragment: Fragment, call: MacroCall, lanes: int) -> None:
        """(f) A macro-operation begins: an instruction that the compiled loop does not execute."""

    def executed(self, warp: Warp, fragment: Fragment, call: MacroCall, lanes: int) -> None:
        """(f) It is over; `fragment.blocked` tells whether it must be tried again."""

    def woken(self, warp: Warp) -> None:
        """(f) The warp can run again, or it is new."""

    def take_notes(self, warp: Warp) -> None:
        """Compiled code has run and left something in `notes`."""

    def warp_ended(self, warp: Warp) -> None:
        """All its lanes have exited; its registers are still there."""

    # ---- asynchronous operations -------------------------------------------------------------------------------

    def issued(self, op: AsyncOp) -> None: ...

    def performing(self, op: AsyncOp) -> None:
        """Its effects follow; during them, `engine.performing` is the operation."""

    def performed(self, op: AsyncOp) -> None: ...

    def waited(self, warp: Warp, op: AsyncOp) -> None:
        """The warp has waited for the operation, through its group or by tcgen05.wait."""

    # ---- mbarriers ---------------------------------------------------------------------------------------------

    def barrier_initialised(self, warp: Warp, barrier: Mbarrier, old: Mbarrier | None, cta: Cta, offset: int) -> None:
        """An mbarrier is initialised. old: the mbarrier that was at this address."""

    def barrier_invalidated(self, cta: Cta, offset: int) -> None: ...

    def barrier_used(self, warp: Warp, barrier: Mbarrier, asynchronous: bool = False) -> None:
        """An instruction names the mbarrier; asynchronous: for a copy that will signal it."""

    def arrived(self, barrier: Mbarrier, what: str, amount: int, relaxed: bool = False, scope: str = "") -> None:
        """The operation that is being performed, or else the running warp, arrives. what: 'arrive', 'drop',
        'expect_tx', 'complete_tx' or 'increment'."""

    def phase_ended(self, barrier: Mbarrier) -> None:
        """The last arrival and the last byte have arrived; `barrier.phase` is still the phase that ends."""

    def passed(self, warp: Warp, barrier: Mbarrier, relaxed: bool, scope: str) -> None:
        """A wait of the warp succeeds, because its phase is over."""

    # ---- other barriers, fences --------------------------------------------------------------------------------

    def bar_created(self, barrier: Waitable) -> None:
        """A named barrier is used for the first time."""

    def bar_arrived(self, warp: Warp, barrier: Waitable, count: int | None, waits: bool, stays: bool) -> None:
        """A warp arrives at a named barrier. count: of threads, if the instruction has one. waits: the warp continues
        when the barrier completes; stays: the whole warp waits, and does nothing before."""

    def bar_completed(self, barrier: Waitable) -> None: ...

    def cluster_arrived(self, warp: Warp, barrier: Waitable, relaxed: bool) -> None: ...

    def cluster_completed(self, barrier: Waitable) -> None: ...

    def cluster_passed(self, warp: Warp, barrier: Waitable) -> None: ...

    def acquired(self, warp: Warp, what: Waitable) -> None:
        """The warp continues after a named barrier, or after what has woken it."""

    def warp_synced(self, warp: Warp) -> None:
        """bar.warp.sync"""

    def fenced(self, warp: Warp, release: bool, acquire: bool, scope: str) -> None: ...

    def fenced_proxy(self, warp: Warp, wide: bool) -> None:
        """fence.proxy.async; wide: of all state spaces, or of the cluster's shared memory."""

    def fenced_init(self, warp: Warp) -> None:
        """fence.mbarrier_init"""

    def fenced_map(self, warp: Warp, address: int | None) -> None:
        """fence.proxy.tensormap, as an acquire of the map at an address, or as a release."""

    def fenced_tensor(self, warp: Warp, before: bool) -> None:
        """tcgen05.fence::before_thread_sync, or ::after_thread_sync."""

    def read_only(self, warp: Warp, lanes: list[int], addresses: np.ndarray) -> None:
        """ld.global.nc"""

    def grid_waited(self, warp: Warp) -> None:
        """griddepcontrol.wait"""

    # ---- accesses ----------------------------------------------------------------------------------------------

    def accessed_shared(
        self,
        warp: Warp,
        cta: Cta,
        low: int,
        high: int,
        write: bool,
        strong: bool = False,
        lane: int = -1,
        unchanged: bool = False,
    ) -> None:
        """A macro-operation reads or writes bytes [low, high) of shared memory; unchanged: it stores the same value."""

    def accessed_global(
        self, warp: Warp, low: int, high: int, write: bool, strong: bool, lane: int, unchanged: bool
    ) -> None: ...

    def discarded(self, warp: Warp, low: int, high: int, lane: int) -> None:
        """discard.L2 of global memory."""

    def accessed_rows(self, warp: Warp, cta: Cta, offsets: np.ndarray, write: bool, unchanged: bool = False) -> None:
        """ldmatrix and stmatrix: rows of 16 bytes."""

    def accessed_peer(self, warp: Warp, cta: Cta) -> None:
        """The warp changes an mbarrier of another CTA of its cluster."""

    def synchronised(
        self, warp: Warp, address: int, cta: Cta | None, order: str, scope: str, *, read: bool, write: bool
    ) -> None:
        """An atomic, volatile or otherwise strong access of global memory (cta is None) or of shared memory."""

    def map_written(self, warp: Warp, address: int, released: bool) -> None:
        """A tensor map in global memory is written."""

    def map_used(self, warp: Warp, address: int) -> None: ...

    def box_loaded(self, warp: Warp, box: Any) -> None:
        """A TMA load is issued."""

    def misused(self, warp: Warp, code: str, message: str, what: str, lane: int = -1) -> None:
        """An instruction of a checked program has found a mistake. what: words for what the warp does."""

    # ---- tensor memory and matrix products ---------------------------------------------------------------------

    def doubtful(self, warp: Warp, code: str, message: str, what: str) -> None:
        """PTX forbids it, and published kernels do it."""

    def tensor_allocated(self, cta: Cta, column: int, columns: int) -> None: ...

    def pair_allocates(self, warp: Warp) -> None:
        """The warp allocates columns in both CTAs of its pair."""

    def tensor_freed(self, warp: Warp, column: int, columns: int) -> None: ...

    def tensor_loads_used(self, warp: Warp, loads: frozenset[int]) -> None:
        """An instruction uses registers of a tcgen05.ld that the warp may not have waited for. loads: the ids of the
        instructions whose registers it uses; empty if it copies them."""

    def tensor_loads_waited(self, warp: Warp) -> None: ...

    def tensor_stores_waited(self, warp: Warp) -> None: ...

    def product_joined(self, warp: Warp, lane: int, work: Any, ctas: list[Cta]) -> None:
        """A tcgen05.mma joins the chain of the one before it (isa/product_chain.py)."""

    def products_joinable(self, together: Any, warp: Warp, lane: int, work: Any, ctas: list[Cta]) -> Any:
        """Products may join the chain of this one. Returns the object in which compiled code records them, or None."""
        return None

    def tensor_product(self, warp: Warp, product: Any, ctas: list[Cta], effects: Callable[[], None]) -> None:
        """effects() performs a tcgen05.mma."""
        effects()

    def warpgroup_committed(self, warp: Warp, batch: Any) -> None:
        """wgmma.commit_group by one of the four warps"""

    def warpgroup_product(self, warp: Warp, chain: list, results: list) -> None:
        """Products of a warpgroup have been performed."""

    def warp_product(self, warp: Warp, a: np.ndarray, b: np.ndarray, d: np.ndarray, add: bool, rows: tuple) -> None:
        """mma.sync"""

    # ---- several processes (engine/processes.py) ---------------------------------------------------------------

    def uneventful(self) -> bool:
        """Returns whether nothing has happened that must be reported, or that copies of the process might see
        differently.
        """
        return True

    def checkpoint(self) -> Any:
        """Returns the state that `since` needs, when the launch is divided."""

    def since(self, checkpoint: Any) -> Any:
        """Returns what happened in this copy of the process, in a form that can be sent to the others."""

    def conflict(self, results: list[Any]) -> bool:
        """Returns whether one copy accessed what another one wrote. results: of `since`."""
        return False

    def adopt(self, result: Any) -> None:
        """Adopts what a copy did."""

    def cta_moved(self, cta: Cta) -> None:
        """The CTA continues in another process."""


EVENTS = tuple(name for name, value in vars(Observer).items() if callable(value))


class Observers(Observer):
    """Combines several observers: each event goes to those that override its method, in order."""

    def __init__(self, several: list[Observer]):
        self.follows = any(x.follows for x in several)
        self.strict = any(x.strict for x in several)
        self.operands = any(x.operands for x in several)
        self.divisible = all(x.divisible for x in several)
        self.notes = next((x.notes for x in several if x.notes is not None), None)
        for name in EVENTS:
            told = [getattr(x, name) for x in several if overrides(x, name)]
            if told:
                setattr(self, name, told[0] if len(told) == 1 else _each(told))


def overrides(observer: Observer, name: str) -> bool:
    return name in vars(observer) or getattr(type(observer), name) is not getattr(Observer, name)


def _each(told: list[Callable]) -> Callable[..., None]:
    def event(*arguments: Any, **more: Any) -> None:
        for method in told:
            method(*arguments, **more)

    return event
