"""The machine: the loop that runs the warps of all CTAs (engine/warps.py).

A warp is a list of fragments (pc, lanes), and has one fragment until it diverges. The fragment with the lowest pc runs
first, and fragments with the same pc merge; one that has jumped back to where the others will jump waits for them. If a
part of the warp reaches an `.aligned` or `.sync` instruction, it is parked until the others arrive. Scheduling is
cooperative: a warp runs until it blocks or has used up its quantum.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from softsm.engine import program as pg
from softsm.engine.asynchrony import AsyncEngine
from softsm.engine.deadlock import DeadlockWatch
from softsm.engine.deadlock_text import going_on
from softsm.engine.options import observer_of
from softsm.engine.processes import Processes
from softsm.engine.warps import Cta, Fragment, Sm, Warp
from softsm.errors import StepBudget

QUANTUM = 20_000
TURN = 512
SEEN_COST = 32  # instructions of the quantum, so that a loop that polls with acquire loads yields sooner
NEVER = 1 << 30  # a pc that no program reaches


class Machine:
    def __init__(self, kernels: list, grid, block, shared: int, cluster, memory, parameters, options):
        self.kernels = kernels  # one per GPU (engine/ranks.py), None for an idle GPU
        present = [k for k in kernels if k is not None]
        kernel = present[0]
        self.program: pg.Program = kernel.program
        self.kernel, self.grid, self.block, self.cluster_shape = kernel, grid, block, cluster
        self.options = options
        self.arch: str = options.arch
        self.global_memory = memory
        self.parameters: list[np.ndarray | None] = (
            parameters  # uint8, the parameter buffer of each GPU (engine/ranks.py)
        )
        self.gpus = len(kernels)
        self.shared_dynamic = shared
        self.shared_limit = pg.SHARED_START + max(k.program.shared_static for k in present) + shared
        self.engine = AsyncEngine(options.order, options.seed)
        self.issue, self.require = self.engine.issue, self.engine.require
        self.random = self.engine.random
        self.ready: deque[Warp] = deque()
        self.shuffle = options.order == "random"
        self.steps = 0
        self.entries = 0  # times that compiled code was entered: Python has handled an instruction before each
        self.clock = 0  # the last reading of %clock or %globaltimer
        self.writes = 0  # number of changes of memory and barriers so far
        self.live: list[Cta] = []
        self.output: list[str] = []
        self.current: Warp | None = None
        self.active = pg.ALL  # the lanes that execute the current macro-operation
        self.reuses_registers = True  # otherwise registers of new warps are zero
        self.exits = 0  # warps that have exited
        # When all warps of a CTA compute the same value, Triton lets the first warp store it and all warps load it. In
        # lockstep the others have read before it writes. 'eager' emulates that: the first warp starts last, and stays
        # last at barriers.
        self.in_step = options.order == "eager" and not kernel.checking
        self.watch = DeadlockWatch(self)
        self.cta_exit_hooks: list = []  # called with a CTA whose warps have all exited
        self.allocation_table: np.ndarray  # a table by kernel.launch_rows
        self.launch_rows = [k and k.launch_rows(self, buffer) for k, buffer in zip(kernels, parameters)]
        self.run_code = kernel.interpreter()
        self.sms_per_gpu = max(options.sms, self.cluster_size)
        self.sms = [
            Sm(i, kernel.new_tensor_memory(self), i // self.sms_per_gpu) for i in range(self.gpus * self.sms_per_gpu)
        ]
        nx, ny, nz = (-(-g // c) for g, c in zip(grid, cluster))
        self.clusters: Any = ((x, y, z) for z in range(nz) for y in range(ny) for x in range(nx))
        self.left = nx * ny * nz * len(present)
        if self.gpus > 1:
            self.clusters = [(*where, gpu) for where in self.clusters for gpu, k in enumerate(kernels) if k]
        self.per_sm = min(k.occupancy(self) for k in present)
        self.observer = self.engine.observer = observer_of(self, options.sessions)
        self.follower = self.observer if self.observer is not None and self.observer.follows else None
        self.execute = self.macro if self.follower is None else self.followed_macro
        if self.observer is not None:
            self.observer.launched(self)

    @property
    def unwatched(self) -> bool:
        """Whether the compiled loop may run without reporting events."""
        return self.follower is None and not self.kernel.checking

    @property
    def explicit_cluster(self) -> bool:
        """Whether the launch has clusters, even of one CTA, which distributed shared memory requires."""
        return self.cluster_size > 1 or "reqnctapercluster" in self.kernel.function.directives

    @property
    def cluster_size(self) -> int:
        return self.cluster_shape[0] * self.cluster_shape[1] * self.cluster_shape[2]

    # ---- admission ---------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Starts clusters while the GPU has room for all their CTAs."""
        while self.left:
            if self.gpus == 1:
                where = next(self.clusters) if self.room(0) else None
            else:
                where = next((x for x in self.clusters if self.room(x[3])), None)
            if where is None:
                return
            if self.gpus > 1:
                self.clusters.remove(where)
            self.left -= 1
            self.start_cluster(where)

    def room(self, gpu: int) -> bool:
        """Returns whether the GPU has room for a cluster."""
        return sum(self.per_sm - sm.resident for sm in self.sms if sm.gpu == gpu) >= self.cluster_size

    def start_cluster(self, where: tuple[int, ...]) -> None:
        """Starts a cluster. where: its position in the grid, followed by the GPU if there are several."""
        cx, cy, cz = self.cluster_shape
        gpu = where[3] if self.gpus > 1 else 0
        cluster: list[Cta] = []
        for rank in range(self.cluster_size):
            x, y, z = rank % cx, rank // cx % cy, rank // (cx * cy)
            sm = min((s for s in self.sms if s.gpu == gpu), key=lambda s: s.resident)
            sm.resident += 1
            ctaid = (where[0] * cx + x, where[1] * cy + y, where[2] * cz + z)
            cta = Cta(self, ctaid, rank, cluster, sm)
            cluster.append(cta)
            self.live.append(cta)
            if self.observer is not None:
                self.observer.cta_began(cta)
        for cta in cluster:
            for w in reversed(cta.warps) if self.in_step else cta.warps:
                self.make_ready(w)

    def try_cancel(self, gpu: int) -> tuple[int, int, int] | None:
        """Handles clusterlaunchcontrol.try_cancel: cancels a cluster that has not started; returns its first ctaid."""
        where = None
        if self.gpus > 1:
            where = next((x for x in self.clusters if x[3] == gpu), None)
            if where is not None:
                self.clusters.remove(where)
        elif self.left:
            where = next(self.clusters)
        if where is None:
            return None
        self.left -= 1
        return tuple(w * c for w, c in zip(where, self.cluster_shape))

    def register_files(self, cta: Cta, index: int):
        spare = cta.kernel.spare_files
        files = spare.pop() if spare and self.reuses_registers else cta.kernel.new_files()
        cta.kernel.fill_registers(self, cta, index, *files)
        return files

    # ---- the loop ----------------------------------------------------------------------------------------------

    def make_ready(self, warp: Warp) -> None:
        if self.follower is not None:
            self.follower.woken(warp)
        if not warp.queued and warp.fragments:
            warp.queued = True
            self.ready.append(warp)

    def run(self) -> None:
        self.admit()
        self.processes = Processes(self)
        self.loop()

    def loop(self) -> None:
        ready, engine = self.ready, self.engine
        watch, processes, follower = self.watch, self.processes, self.follower
        while self.live:
            if processes.turns:
                processes.turns -= 1
                if not processes.turns:
                    processes.divide()
                    continue
            watch.turn()
            if not ready:
                if engine.pending:
                    engine.complete_awaited()
                    continue
                watch.time_out()
                continue
            if self.shuffle:
                if engine.pending and self.random.random() < 0.25:
                    engine.complete_random()
                ready.rotate(self.random.randrange(len(ready)))
            warp = ready.popleft()
            warp.queued = False
            if follower is not None:
                follower.turn_began(warp)
            self.run_warp(warp)
            if follower is not None:
                follower.turn_ended(warp)
            if self.steps > self.options.budget:
                used = f"{self.steps} warp instructions used (budget {self.options.budget})"
                raise StepBudget(going_on(self, f"{used}; last at {warp.where()}"))
            if warp.spins > 1:
                watch.spinning()
        engine.drain()

    def run_warp(self, warp: Warp) -> None:
        """Runs until every fragment is blocked, parked or has exited, or the quantum is used up."""
        quantum = QUANTUM
        run_code, p, observer, engine = self.run_code, warp.cta.program, self.observer, self.engine
        notes = observer.notes if observer is not None else None
        self.current = warp
        while True:
            fragments = warp.fragments
            multi = 0 if len(fragments) == 1 else 1
            if multi:
                fragment, stop = self.choose(warp)
                if fragment is None:
                    return
            else:
                fragment, stop = fragments[0], NEVER
                if fragment.blocked is not None or fragment.parked:
                    return
            warp.fragment = fragment
            self.entries += 1
            status, pc, mask, lanes, steps = run_code(warp.state, fragment.pc, fragment.mask, stop, quantum, multi)
            self.steps += steps
            quantum -= steps
            fragment.pc = warp.pc = pc
            if engine.postponed is not None and (status != pg.MACRO or pc != engine.postponed.following):
                engine.settle()
            if notes is not None and observer is not None and notes.item(0):
                observer.take_notes(warp)
            if multi:
                fragment.steps += steps
            if mask != fragment.mask:
                warp.alive &= ~(fragment.mask & ~mask)
                warp.S[pg.S_ALIVE] = warp.alive
                fragment.mask = mask
                self.unpark(warp)
                if warp.alive:
                    for hook in warp.cta.lane_hooks:
                        hook(warp)
            if status == pg.MACRO:
                quantum -= self.execute(warp, fragment, pc, lanes)
            elif status == pg.EXITED:
                warp.fragments.remove(fragment)
                if not warp.fragments:
                    self.warp_exit(warp)
                    return
                self.unpark(warp)
            elif status == pg.DIVERGED:
                taken = Fragment(warp, int(p.code[pc, 5]), lanes, fragment.returns)
                taken.ahead = p.way_back(pc)
                fragment.mask &= ~lanes
                fragment.pc = pc + 1
                warp.fragments.append(taken)
                self.merge(warp)
            elif status == pg.MERGE:
                self.merge(warp)
            elif status == pg.CONVERGE:
                self.park(warp, fragment, lanes)
            elif status == pg.HOT:
                blocks = warp.cta.kernel.blocks
                blocks.compile(int(blocks.code[pc, 2]))
            elif status != pg.QUANTUM:
                warp.cta.kernel.memory_event(self, warp, fragment, status, lanes)
            if quantum <= 0:
                engine.settle()
                self.watch.quantum_used(warp)
                return

    def followed_macro(self, warp: Warp, fragment: Fragment, pc: int, lanes: int) -> int:
        call, follower = warp.cta.kernel.macro_at[pc], self.follower
        assert follower is not None
        follower.executing(warp, fragment, call, lanes)
        cost = self.macro(warp, fragment, pc, lanes)
        follower.executed(warp, fragment, call, lanes)
        return cost

    def macro(self, warp: Warp, fragment: Fragment, pc: int, lanes: int) -> int:
        """Executes a macro-operation and returns its cost in instructions: the whole quantum if it polled in vain."""
        call = warp.cta.kernel.macro_at[pc]
        if call.aligned and lanes != warp.alive:
            missing = warp.alive & ~fragment.mask
            if missing:
                self.park(warp, fragment, warp.alive)
                return 0
            raise warp.fault(
                "divergent",
                "an .aligned instruction is executed by all threads of the warp, but its "
                f"guard holds only for lanes {lanes:#010x} of {warp.alive:#010x}",
            )
        if call.whole and lanes != pg.ALL:
            raise warp.fault(
                "divergent",
                f"{call.instruction.opcode} is undefined if a thread of the warp has exited; only lanes {lanes:#010x} "
                "are left",
            )
        self.active = lanes
        result = call.function(warp, lanes, call.operands)
        if result is None:
            fragment.pc = pc + 1
        elif result is pg.POLLED or result is pg.SEEN:
            fragment.pc = pc + 1
            return QUANTUM if result is pg.POLLED else SEEN_COST
        elif isinstance(result, int):
            fragment.pc = result
            if len(warp.fragments) > 1:
                self.merge(warp)
        else:
            fragment.blocked = result
            result.on.waiters.append(fragment)
        warp.spins = 0
        return 0

    def choose(self, warp: Warp) -> tuple[Fragment | None, int]:
        """Returns the fragment to run next, and the pc at which it meets another one."""
        fragments = warp.fragments
        # The lowest pc runs first, so that fragments meet. A spinning fragment must let the others run.
        able = [f for f in fragments if f.blocked is None and not f.parked]
        for ahead in [f for f in able if f.ahead is not None]:
            first, last = ahead.ahead or (0, 0)
            if any(first < f.pc <= last for f in able):
                able.remove(ahead)
            else:
                ahead.ahead = None
        chosen = min(able, key=lambda f: (f.steps // TURN, f.pc), default=None)
        if chosen is None:
            if any(f.parked for f in fragments) and all(f.parked for f in fragments):
                stuck = fragments[0]
                warp.pc = stuck.pc
                others = "; ".join(
                    f"lanes {f.mask:#010x} at line {warp.cta.program.instructions[f.pc].line}" for f in fragments
                )
                raise warp.fault(
                    "divergent", f"the warp cannot converge for an .aligned or .sync instruction: {others}"
                )
            return None, 0
        stop = min((f.pc for f in fragments if f.pc > chosen.pc), default=NEVER)
        return chosen, stop

    def merge(self, warp: Warp) -> None:
        by_pc: dict[tuple, Fragment] = {}
        kept = []
        for f in warp.fragments:
            other = by_pc.get((f.pc, f.returns)) if f.blocked is None else None
            if other is not None:
                other.mask |= f.mask
                other.ahead = other.ahead and f.ahead
                continue
            if f.blocked is None:
                by_pc[(f.pc, f.returns)] = f
            kept.append(f)
        warp.fragments = kept
        self.unpark(warp)

    def park(self, warp: Warp, fragment: Fragment, needed: int) -> None:
        needed &= warp.alive
        if needed & ~fragment.mask == 0:
            raise warp.fault("divergent", f"the instruction names lanes {needed:#010x}, but its guard excludes some")
        fragment.parked = needed
        self.merge(warp)

    def unpark(self, warp: Warp) -> None:
        for f in warp.fragments:
            if f.parked and f.parked & warp.alive & ~f.mask == 0:
                f.parked = 0

    def warp_exit(self, warp: Warp) -> None:
        cta = warp.cta
        if self.observer is not None:
            self.observer.warp_ended(warp)
        cta.live -= 1
        self.exits += 1
        cta.kernel.spare_files.append((warp.R, warp.Q, warp.P, warp.S, warp.local))
        for hook in cta.exit_hooks:
            hook(warp)
        cta.wake()
        self.writes += 1
        cluster = cta.cluster
        if cta.live == 0 and all(c.live == 0 for c in cluster):
            for c in cluster:
                self.kernel.cta_exit(self, c)
                if self.observer is not None:
                    self.observer.cta_ended(c)
                self.live.remove(c)
                c.sm.resident -= 1
            for c in cluster:
                c.forget()
            self.admit()

    def close(self) -> None:
        """Breaks reference cycles after the launch has ended or failed."""
        for cta in self.live:
            cta.forget()
        self.live, self.current = [], None
        self.watch = self.processes = self.execute = None  # type: ignore[assignment]
        self.ready.clear()
        self.engine.pending.clear()
        self.engine.signalling.clear()
        for sm in self.sms:
            sm.tmem = None
        if self.observer is not None:
            self.observer.closed()
        self.observer = self.engine.observer = self.follower = None
