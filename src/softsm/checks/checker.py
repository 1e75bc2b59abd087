"""The checker of one launch. It is an observer (engine/observer.py) with these parts:

order        happens-before order: vector clocks, which barriers, fences and waits merge
operations   asynchronous operations, which must be complete before their CTA ends
memory       accesses of shared and global memory, compared with their shadow
tensor       accesses of tensor memory
growing      MMAs that later ones may join
barriers     mbarriers and the cluster barrier
boxes        TMA boxes outside their tensor
maps         tensor maps that the kernel writes itself
grids        the previous grid, under programmatic dependent launch
ranks        earlier launches of other GPUs, or None
beside       work of other streams
findings     diagnostics with both parties, made from the compiled code's findings
products     operands of matrix products, or None
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from softsm.checks import clocks, registers
from softsm.checks.accesses import MemoryAccesses
from softsm.checks.barriers import BarrierChecks
from softsm.checks.beside import BesideChecks, of_launch
from softsm.checks.boxes import BoxChecks
from softsm.checks.clocks import WORDS
from softsm.checks.findings import Findings, add_failure
from softsm.checks.grids import GridChecks
from softsm.checks.lane_operation import lane_operation
from softsm.checks.maps import MapChecks
from softsm.checks.messages import Messages, relaxed_in
from softsm.checks.operations import Operations
from softsm.checks.order import Order, address_of
from softsm.checks.products import Expectation, Products
from softsm.checks.ranks import RankChecks
from softsm.checks.scopes import ScopeChecks, narrow
from softsm.checks.stream import Stream
from softsm.checks.tensor import TensorChecks
from softsm.checks.views import CtaView, WarpView, shadows
from softsm.engine import dispatch
from softsm.engine import program as pg
from softsm.engine.mma_chains import Growing
from softsm.engine.observer import Observer
from softsm.engine.warps import Warp
from softsm.isa import product_chain
from softsm.memory.global_memory import PARAMETERS
from softsm.ptx.roles import place_of
from softsm.report.diagnostics import Diagnostic, Party, Report


class ProcessResult(NamedTuple):
    """The findings of a forked process (engine/processes.py)."""

    touched: np.ndarray  # result of `MemoryAccesses.touched_since`
    warnings: list[Diagnostic]
    waited: bool  # whether a thread waited for the grid before


class Checker(Observer):
    def __init__(self, machine, report: Report, strict: bool, expectations: list[Expectation], stream: Stream):
        self.machine, self.report, self.strict = machine, report, strict
        self.divisible = report.tap is None
        machine.run_code = dispatch.runner(lane_operation())
        self.warps = -(-(machine.block[0] * machine.block[1] * machine.block[2]) // 32)  # per CTA
        ctas = max(len(machine.sms) * machine.per_sm, machine.cluster_size)
        self.free = [k * self.warps for k in range(ctas)][::-1]  # first slots of CTAs that may start
        self.agents: dict[int, Warp] = {}  # 1 + slot -> the last warp in that slot

        self.order = Order(machine, strict, ctas * self.warps, clocks)
        self.findings = Findings(self)
        self.operations = Operations(self)
        self.memory = MemoryAccesses(self)
        self.operations.races = self.memory.races
        self.tensor = TensorChecks(self)
        self.growing = Growing(self.order, machine.kernel.products, product_chain.LONGEST)
        self.barriers = BarrierChecks(self)
        self.boxes = BoxChecks(self)
        self.maps = MapChecks(self)
        self.ranks: RankChecks | None = None
        if machine.gpus > 1 and not machine.options.dependent:
            self.ranks = RankChecks(self.order, self.operations, self.memory, stream, machine)
        self.grids = GridChecks(self.order, self.operations, self.memory, stream, machine)
        self.stream, self.beside = stream, BesideChecks(self.order, self.operations, self.memory, stream.beside)
        self.memory.inherited = self.order.newest.item(0) - 1
        self.products: Products | None = None
        if strict or expectations or report.tap is not None:
            self.products = Products(self, report.tap, expectations, strict)
            self.operands = True
        self.notes = self.memory.races
        self.listen()
        if strict:
            self.undefined_registers()
        self.found = report.additions

    def listen(self) -> None:
        """Connects each event directly with the part that handles it: some events occur millions of times."""
        order, operations, memory, barriers = self.order, self.operations, self.memory, self.barriers
        events: dict[str, Callable] = {
            "take_notes": self.findings.collect,
            "warp_ended": self.findings.ended,
            "misused": self.findings.misused,
            "doubtful": self.findings.doubtful,
            "issued": operations.issued,
            "performed": operations.performed,
            "waited": order.observe,
            "barrier_initialised": barriers.initialised,
            "barrier_invalidated": barriers.invalidated,
            "barrier_used": barriers.uses_barrier,
            "arrived": barriers.arrived,
            "phase_ended": barriers.phase_over,
            "passed": barriers.passed,
            "bar_created": order.clock_of,
            "bar_arrived": barriers.bar_arrived,
            "bar_completed": barriers.bar_completed,
            "cluster_arrived": barriers.cluster_arrival,
            "cluster_completed": barriers.cluster_completed,
            "cluster_passed": barriers.cluster_passed,
            "acquired": order.acquire,
            "warp_synced": order.tick,
            "fenced": order.fence,
            "fenced_proxy": order.fence_async,
            "fenced_init": barriers.fence_init,
            "fenced_map": self.maps.fence,
            "fenced_tensor": order.fence_tensor,
            "grid_waited": self.grids.over,
            "read_only": memory.read_only,
            "accessed_shared": memory.access,
            "accessed_global": memory.global_access,
            "discarded": memory.discard,
            "accessed_rows": memory.lines,
            "accessed_peer": operations.touches_peer,
            "synchronised": order.strong,
            "map_written": self.maps.written,
            "map_used": self.maps.used,
            "box_loaded": self.boxes.filled,
            "tensor_allocated": self.tensor.allocated,
            "pair_allocates": self.tensor.pair_allocates,
            "tensor_freed": self.tensor.deallocated,
            "tensor_loads_used": self.tensor.loads_used,
            "tensor_loads_waited": self.tensor.loads_waited,
            "tensor_stores_waited": self.tensor.stores_waited,
            "product_joined": operations.product_joined,
            "products_joinable": operations.products_joinable,
        }
        if not self.strict:
            events["warpgroup_committed"] = operations.warpgroup_committed
        if self.machine.gpus > 1 or narrow(self.machine.kernel.program.instructions):
            events["synchronised"] = ScopeChecks(self).strong
        if self.beside.work:
            events["synchronised"] = self.beside.strong
        relaxed = relaxed_in(self.machine.kernel)
        if relaxed.loads:
            events["synchronised"] = Messages(self, events["synchronised"], relaxed).strong
        if self.products is not None:
            events["tensor_product"] = self.products.perform
            events["warpgroup_product"] = self.products.warpgroup
            events["warp_product"] = self.products.warp
        for name, method in events.items():
            setattr(self, name, method)

    def undefined_registers(self) -> None:
        kernels = [x for x in dict.fromkeys(self.machine.kernels) if x is not None]
        for ins, name in [x for kernel in kernels for x in registers.undefined_in(kernel)[:16]]:
            loc = place_of(ins)
            source = f"{loc.file}:{loc.line}" if loc else ""
            self.report.add(
                Diagnostic(
                    "uninitialised",
                    f"register {name} is read, but nothing before it writes it",
                    (Party("every warp that gets here", ins.line, ins.text, source, f"reads {name}"),),
                )
            )

    def cta_began(self, cta) -> None:
        """Gives a new CTA its slots, its clocks and the shadow of its shared memory."""
        order = self.order
        words = (len(cta.shared) + 3) // 4
        shadow, slot0 = shadows.take(words, self.warps), self.free.pop()
        site = np.array([shadow.address, shadow.reads_address, words, self.warps, slot0], np.int64)
        waits = np.zeros(len(cta.phases), np.int64)
        cta.view = CtaView(slot0, shadow, address_of(site), site, waits)
        if self.machine.follower is None:
            cta.phases_address = address_of(cta.view.waits)
        self.memory.clusters[cta.view.slot0 : cta.view.slot0 + self.warps] = 1 + self.cluster_number(cta)
        for w in cta.warps:
            slot = cta.view.slot0 + w.index
            view = w.view = WarpView(
                slot, *order.new_clock(), np.zeros(WORDS, np.uint32), np.zeros(order.slots, np.uint32)
            )
            before = self.agents.get(slot + 1)
            view.clock[slot] = before.view.clock[slot] if before is not None else 1
            order.tick(w)
            if self.ranks is not None:
                self.ranks.began(w)
            self.agents[slot + 1] = w
            S, clock = w.S, view.at
            S[pg.S_RACES : pg.S_WARPS + 1] = (
                self.memory.races_address, shadow.address, self.memory.global_table_address, clock,
                clock + 8 * order.slots, order.newest_address, slot, cta.view.slot0, w.index, self.warps,
            )  # fmt: skip
            S[pg.S_PHASES], S[pg.S_READS] = cta.phases_address, shadow.reads_address
            S[pg.S_LOADS] = S[pg.S_STORES] = S[pg.S_OWED] = 0
            if cta.tmem is not None:
                S[pg.S_CELLS], S[pg.S_ISSUER] = self.tensor.shadow_of(cta).address, self.operations.enter(w)
                cta.view.issuers.append(self.operations.entered)
        cta.view.began = np.array([w.view.clock[w.view.slot] for w in cta.warps], np.uint32)

    def cluster_number(self, cta) -> int:
        (x, y, z), (nx, ny, _) = (
            [a // b for a, b in zip(v, self.machine.cluster_shape)] for v in (cta.ctaid, self.machine.grid)
        )
        return x + nx * (y + ny * z)

    def cta_ended(self, cta) -> None:
        if cta.view.issuers:
            self.operations.leave(cta.view.issuers)
        self.operations.unfinished(cta)
        self.operations.left_by_peers(cta)
        self.barriers.left(cta)
        self.cta_moved(cta)

    def cta_moved(self, cta) -> None:
        if self.ranks is not None:
            self.ranks.left(cta)
        self.free.append(cta.view.slot0)
        shadows.give_back(cta.view.shadow)
        cta.view.shadow = None  # reports about its operations still refer to the CTA
        things = [*cta.barriers.values(), *cta.named_barriers.values()]
        gone = [x for t in things if t.clock is not None for x in t.clock.parts()]
        gone += [clock.at for place in cta.view.locations.values() for clock in place.clocks.values()]
        self.order.drop([*gone, *(w.view.at for w in cta.warps)])
        for w in cta.warps:
            w.view.forget()

    # ---- several processes -------------------------------------------------------------------------------------

    def uneventful(self) -> bool:
        """Returns whether nothing has been found, and no cluster wrote a word that another one accessed."""
        return self.report.additions == self.found and not self.memory.contended()

    def checkpoint(self) -> list[np.ndarray]:
        return self.memory.touched.owners()

    def since(self, checkpoint: list[np.ndarray]) -> ProcessResult:
        return ProcessResult(self.memory.touched_since(checkpoint), self.report.warnings, self.grids.earlier is None)

    def conflict(self, results: list[ProcessResult]) -> bool:
        return self.memory.touched.meet([result.touched for result in results])

    def adopt(self, result: ProcessResult) -> None:
        self.memory.touched.elsewhere.append(result.touched)
        if result.waited:
            self.grids.waited()
        for warning in result.warnings:
            self.report.warn(warning)

    # ---- the end -----------------------------------------------------------------------------------------------

    def ended(self, failure: BaseException | None) -> None:
        add_failure(self.report, self.machine, failure)
        for w in [w for cta in self.machine.live for w in cta.warps]:
            w.view.forget()
        if self.ranks is not None and failure is None:
            self.ranks.ended()
        if self.stream.keeps:
            own = [x.name != PARAMETERS for x in self.machine.global_memory.allocations]
            self.stream.left = of_launch(self.memory.touched, self.memory.inherited, own)

    def closed(self) -> None:
        """Frees the parts. They refer to each other, so their large arrays would wait for the garbage collector. A
        dependent launch needs only the global memory that this one accessed (checks/stream.py)."""
        self.order.close()
        vars(self).clear()
