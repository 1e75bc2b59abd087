"""One seam for all that follow a launch: the race checker, the recorder, the tracer of the timing model, counters.

A `Session` stands for a `with` block (`softsm.checking`, `recording`, `timing`, `counting`) and makes an `Observer` for
each launch inside. The machine and the instructions call the observer's methods when something happens; a method does
nothing unless a class overrides it. `machine.observer` is None when nothing observes, and then an instruction pays for
that one comparison.

What Python sees depends on what the compiled loop does by itself. It shortcuts least for an observer that `follows`,
and in a program that is assembled for the race checker (`Kernel.checking`) it does the checker's work itself.

An observer may keep what it knows of a thing in the thing: `Cta.view`, `Warp.view`, `Waitable.clock`, and the fields of
`AsyncOp` and `Mbarrier` that are marked so. The engine itself never reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from softsm.engine.asynchrony import AsyncOp
    from softsm.engine.options import Options
    from softsm.engine.program import MacroCall
    from softsm.engine.scheduler import Machine
    from softsm.engine.warps import Cta, Fragment, Warp
    from softsm.memory.mbarrier import Mbarrier
    from softsm.memory.waitable import Waitable


class Observer:
    """What happens during one launch, as methods to override."""

    follows: bool = False  # It is told of everything, the events marked (f) included; the launch stays in one process.
    divisible: bool = True  # CTAs may go on in several processes, see the last section.
    strict: bool = False  # It takes PTX to the letter.
    operands: bool = False  # It looks at the operands of matrix products.
    notes: np.ndarray | None = None  # Its first word is not 0 when compiled code has left notes (`take_notes`).

    # ---- the launch --------------------------------------------------------------------------------------------

    def launched(self, machine: Machine) -> None:
        """The machine is ready and nothing has started. It may still be told to run less."""

    def cta_began(self, cta: Cta) -> None: ...

    def cta_ended(self, cta: Cta) -> None:
        """All warps of its cluster have exited."""

    def ended(self, failure: BaseException | None) -> None:
        """The launch is over, or it failed; what is left of it is still there."""

    def closed(self) -> None:
        """Nothing of the launch is left."""

    # ---- warps -------------------------------------------------------------------------------------------------

    def turn_began(self, warp: Warp) -> None:
        """(f) The scheduler has chosen the warp."""

    def turn_ended(self, warp: Warp) -> None:
        """(f) It blocks, has used up its quantum, or has exited."""

    def executing(self, warp: Warp, fragment: Fragment, call: MacroCall, lanes: int) -> None:
        """(f) A macro-operation begins: an instruction that the compiled loop does not do by itself."""

    def executed(self, warp: Warp, fragment: Fragment, call: MacroCall, lanes: int) -> None:
        """(f) It is over; `fragment.blocked` says whether it has to be tried again."""

    def woken(self, warp: Warp) -> None:
        """(f) The warp can run again, or it is new."""

    def take_notes(self, warp: Warp) -> None:
        """Compiled code has run and left something in `notes`."""

    def warp_ended(self, warp: Warp) -> None:
        """All its lanes have exited; its registers are still there."""

    # ---- asynchronous operations -------------------------------------------------------------------------------

    def issued(self, op: AsyncOp) -> None: ...

    def performing(self, op: AsyncOp) -> None:
        """Its effects come next: `engine.performing` is the operation while they last."""

    def performed(self, op: AsyncOp) -> None: ...

    def waited(self, warp: Warp, op: AsyncOp) -> None:
        """The warp has waited for the operation by its group, or by tcgen05.wait."""

    # ---- mbarriers ---------------------------------------------------------------------------------------------

    def barrier_initialised(self, warp: Warp, barrier: Mbarrier, old: Mbarrier | None, cta: Cta, offset: int) -> None:
        """old: the mbarrier that was there."""

    def barrier_invalidated(self, cta: Cta, offset: int) -> None: ...

    def barrier_used(self, warp: Warp, barrier: Mbarrier, asynchronous: bool = False) -> None:
        """An instruction names the mbarrier; asynchronous: for a copy that will signal it."""

    def arrived(self, barrier: Mbarrier, what: str, amount: int, relaxed: bool = False, scope: str = "") -> None:
        """what: 'arrive', 'drop', 'expect_tx', 'complete_tx' or 'increment'. By the operation that is being performed,
        else by the running warp."""

    def phase_ended(self, barrier: Mbarrier) -> None:
        """The last arrival and the last byte are in; `barrier.phase` is still the phase that ends."""

    def passed(self, warp: Warp, barrier: Mbarrier, relaxed: bool, scope: str) -> None:
        """A wait of the warp finds that its phase is over."""

    # ---- other barriers, fences --------------------------------------------------------------------------------

    def bar_created(self, barrier: Waitable) -> None:
        """A named barrier is used for the first time."""

    def bar_arrived(self, warp: Warp, barrier: Waitable, count: int | None, waits: bool, stays: bool) -> None:
        """count: of threads, where the instruction names one. waits: the warp goes on when the barrier completes;
        stays: the whole warp, which does nothing before."""

    def bar_completed(self, barrier: Waitable) -> None: ...

    def cluster_arrived(self, warp: Warp, barrier: Waitable, relaxed: bool) -> None: ...

    def cluster_completed(self, barrier: Waitable) -> None: ...

    def cluster_passed(self, warp: Warp, barrier: Waitable) -> None: ...

    def acquired(self, warp: Warp, what: Waitable) -> None:
        """The warp goes on behind a named barrier, or behind what has woken it."""

    def warp_synced(self, warp: Warp) -> None:
        """bar.warp.sync"""

    def fenced(self, warp: Warp, release: bool, acquire: bool, scope: str) -> None: ...

    def fenced_proxy(self, warp: Warp, wide: bool) -> None:
        """fence.proxy.async; wide: of all state spaces, or of the cluster's shared memory."""

    def fenced_init(self, warp: Warp) -> None:
        """fence.mbarrier_init"""

    def fenced_map(self, warp: Warp, address: int | None) -> None:
        """fence.proxy.tensormap: acquire of the map at an address, or release."""

    def fenced_tensor(self, warp: Warp, before: bool) -> None:
        """tcgen05.fence::before_thread_sync, or ::after_thread_sync."""

    def read_only(self, warp: Warp, lanes: list[int], addresses: np.ndarray) -> None:
        """ld.global.nc"""

    def grid_waited(self, warp: Warp) -> None:
        """griddepcontrol.wait"""

    # ---- accesses ----------------------------------------------------------------------------------------------

    def accessed_shared(
        self, warp: Warp, cta: Cta, low: int, high: int, write: bool, strong: bool = False, lane: int = -1,
        unchanged: bool = False,
    ) -> None:  # fmt: skip
        """A macro-operation reads or writes bytes [low, high) of shared memory; unchanged: a store of what is there."""

    def accessed_global(
        self, warp: Warp, low: int, high: int, write: bool, strong: bool, lane: int, unchanged: bool
    ) -> None: ...

    def accessed_rows(self, warp: Warp, cta: Cta, offsets: np.ndarray, write: bool, unchanged: bool = False) -> None:
        """ldmatrix and stmatrix: rows of 16 bytes."""

    def accessed_peer(self, warp: Warp, cta: Cta) -> None:
        """The warp changes an mbarrier of another CTA of its cluster."""

    def synchronised(
        self, warp: Warp, address: int, cta: Cta | None, order: str, scope: str, *, read: bool, write: bool
    ) -> None:
        """An atomic, volatile or otherwise strong access of global memory (cta is None) or of shared memory."""

    def map_written(self, warp: Warp, address: int, released: bool) -> None:
        """A tensor map in global memory."""

    def map_used(self, warp: Warp, address: int) -> None: ...

    def box_loaded(self, warp: Warp, box: Any) -> None:
        """A TMA load is issued."""

    def misused(self, warp: Warp, code: str, message: str, what: str, lane: int = -1) -> None:
        """An instruction of a checked program has found a mistake. what: the warp does."""

    # ---- tensor memory and matrix products ---------------------------------------------------------------------

    def tensor_allocated(self, cta: Cta, column: int, columns: int) -> None: ...

    def pair_allocates(self, warp: Warp) -> None:
        """The warp asks for columns in both CTAs of its pair."""

    def tensor_freed(self, warp: Warp, column: int, columns: int) -> None: ...

    def tensor_loads_used(self, warp: Warp, loads: frozenset[int]) -> None:
        """An instruction touches registers of a tcgen05.ld that the warp may not have waited for. loads: the ids of the
        instructions whose registers it uses; none where it copies them."""

    def tensor_loads_waited(self, warp: Warp) -> None: ...

    def tensor_stores_waited(self, warp: Warp) -> None: ...

    def product_joined(self, warp: Warp, lane: int, work: Any, ctas: list[Cta]) -> None:
        """A tcgen05.mma goes with the one before it (isa/product_chain.py)."""

    def products_joinable(self, together: Any, warp: Warp, lane: int, work: Any, ctas: list[Cta]) -> Any:
        """Others may go with this product: the object that compiled code notes them in, or None."""
        return None

    def tensor_product(self, warp: Warp, product: Any, ctas: list[Cta], effects: Callable[[], None]) -> None:
        """A tcgen05.mma is performed, by effects()."""
        effects()

    def warpgroup_committed(self, warp: Warp, batch: Any) -> None:
        """wgmma.commit_group by one of the four warps"""

    def warpgroup_product(self, warp: Warp, chain: list, results: list) -> None:
        """Products of a warpgroup have been performed."""

    def warp_product(self, warp: Warp, a: np.ndarray, b: np.ndarray, d: np.ndarray, add: bool, rows: tuple) -> None:
        """mma.sync"""

    # ---- several processes (engine/processes.py) ---------------------------------------------------------------

    def uneventful(self) -> bool:
        """Has nothing happened that has to be reported, or that copies of the process might see differently?"""
        return True

    def checkpoint(self) -> Any:
        """What `since` needs to know of the state when the launch is divided."""

    def since(self, checkpoint: Any) -> Any:
        """What happened in this copy of the process; it can be sent to the others."""

    def conflict(self, results: list[Any]) -> bool:
        """Did one copy touch what another one wrote? results: of `since`."""
        return False

    def adopt(self, result: Any) -> None:
        """What a copy did counts."""

    def cta_moved(self, cta: Cta) -> None:
        """The CTA goes on in another process."""


EVENTS = tuple(name for name, value in vars(Observer).items() if callable(value))


class Observers(Observer):
    """Several observers as one: each event goes to those that override its method, in their order."""

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


class Session:
    """Follows the launches of a `with` block (`softsm.engine.options.observing`)."""

    races: bool = False  # It needs programs that are assembled for the race checker.
    computes: ClassVar[bool] = True  # False: launches do not compute all values, and sessions that need them wait.
    needs_values: ClassVar[bool] = False
    one_gpu: ClassVar[bool] = False  # It follows launches of one GPU.

    def options(self, chosen: Options) -> Options:
        """How a launch runs that the session follows."""
        return chosen

    def observer(self, machine: Machine) -> Observer | None:
        """The observer of one launch."""
        raise NotImplementedError


def observer_of(machine: Machine, sessions: tuple[Session, ...]) -> Observer | None:
    found = [x for x in (session.observer(machine) for session in sessions) if x is not None]
    return Observers(found) if len(found) > 1 else found[0] if found else None
