"""Traces the warps of a few CTAs: the PTX blocks they execute (blocks.py), and the events on the way.

An event is what other warps or engines can observe: an arrival, a wait, a copy, a product, a barrier. replay.py adds
the times.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from softsm.engine import dispatch
from softsm.engine import program as pg
from softsm.engine.in_flight import AsyncOp, nothing
from softsm.engine.observer import Observer
from softsm.engine.scheduler import Machine
from softsm.engine.warps import Cta, Fragment, Warp
from softsm.errors import Deadlock
from softsm.memory.mbarrier import Mbarrier
from softsm.ptx.roles import role_of
from softsm.timing_model import address_trace, sass, scout
from softsm.timing_model.accesses import ALIGNED, ZEROS, Access, shifts
from softsm.timing_model.blocks import Blocks, known_of
from softsm.timing_model.follow import CannotFollow
from softsm.timing_model.looks import Looks

# isort: off
from softsm.timing_model.machine import (
    ARRIVAL, BAR, BULK_COMMIT, BULK_STORE, BULK_WAIT, CLUSTER_ARRIVE, CLUSTER_WAIT, CP_ARRIVE, CP_ASYNC,
    CP_COMMIT, CP_WAIT, GATHER, INIT, LOAD, MMA, MMA_COMMIT, WAIT,
)  # fmt: skip

# isort: on

ATOMIC_BYTES = {"f16": 2, "bf16": 2, "b16": 2, "b128": 16}  # 4 for other types
MANY = 24  # jumps above which arrays are faster than a loop
PRODUCTS = ("wgmma", "wgmma result", "tcgen05.mma")  # values not computed, because time does not depend on them


@dataclass
class WarpTrace:
    cta: int  # rank in the cluster
    index: int
    blocks: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)  # events before each block
    events: list[tuple] = field(default_factory=list)  # (PTX line, kind, a, b, c)
    role: str = ""
    retry: int = -1  # the record that the warp will retry


def _lists() -> dict:
    return defaultdict(list)


@dataclass
class ClusterTrace:
    """The trace of one cluster of CTAs (most often one CTA)."""

    first: tuple[int, int, int]
    number: int  # index of the cluster in the grid
    warps: list[WarpTrace] = field(default_factory=list)
    barriers: dict = field(default_factory=dict)  # (rank, offset) -> number
    names: list[str] = field(default_factory=list)
    # (tensor, 'read', 'write' or 'atomic') -> bytes; 'read lines': of 128, whole or not; 'read blocks': of 64
    traffic: dict = field(default_factory=Counter)
    starts: dict = field(default_factory=_lists)  # tensor -> requested addresses, in order


@dataclass
class LaunchTrace:
    """The data that the model needs about a launch; it can be saved to a file."""

    name: str
    source: str  # PTX
    columns: int  # columns of tensor memory
    arch: str
    grid: tuple
    block: tuple
    cluster: tuple
    shared: int
    threads: int
    blocks: Blocks
    clusters: list[ClusterTrace]
    access: dict[int, Access]
    tensors: list[tuple[str, int]]  # name, bytes
    samples: list[int]
    total: int  # clusters of the grid
    dependent: bool = False  # launched early: it may begin before the previous grid has ended
    lengths: np.ndarray | None = None  # instructions of every cluster, if they depend on data (scout.py)
    starts: Sequence[int] = ()  # addresses of the tensors
    whole: bool = True  # all clusters ran, and all that they write is there

    def lines(self) -> list[int]:
        """Returns the PTX lines that at least one CTA ran."""
        visited = {b for c in self.clusters for w in c.warps for b in w.blocks}
        return [n for n, b in self.blocks.of_line.items() if b in visited]


def lanes_of(register: np.ndarray, active: int, offset: int) -> list[int]:
    """Returns the addresses of the active lanes."""
    values = register.tolist()
    if active == 0xFFFFFFFF:
        return [a + offset for a in values]
    return [a + offset for k, a in enumerate(values) if active >> k & 1]


def ranges(first: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Returns all numbers from each of `first` to its `after`, the ranges concatenated."""
    lengths = after - first
    ends = lengths.cumsum()
    return np.repeat(first - ends + lengths, lengths) + np.arange(ends[-1])


class Tracer(Observer):
    """Runs some clusters of the grid and gives a LaunchTrace to `traced`."""

    follows = True

    def __init__(self, machine: Machine, sms: int, most: int, values: bool, traced: Callable[[LaunchTrace], None]):
        """sms: of the GPU. most: clusters of a large grid that run. values: whether products are computed."""
        self.machine, self.kernel = machine, machine.kernel
        self.sms, self.most, self.values, self.traced = sms, most, values, traced
        self.arrivals: list[tuple[str, Mbarrier, int, AsyncOp | None]] = []  # arrivals of the current instruction
        self.ops: list[AsyncOp] = []
        self.inits: list[Mbarrier] = []
        self.over: Mbarrier | None = None  # the mbarrier whose phase a wait found complete
        known = known_of(machine.kernel)
        self.blocks, self.roles, self.products = known.blocks, known.roles, known.products
        self.stops, self.code = known.stops, known.code
        self.block_from, self.far_from = known.block_from, known.far_from
        self.looks = Looks(known.instructions)
        self.packed: dict[int, Access] = {}  # atomic operations by PTX line
        self.home: dict = {}  # CTA -> ClusterTrace
        self.by_warp: dict = {}
        self.known: dict[Mbarrier, int] = {}  # numbers of mbarriers in the cluster
        self.shape = [-(-g // c) for g, c in zip(machine.grid, machine.cluster_shape)]
        self.total = machine.left
        self.samples = scout.first_samples(self.shape, self.total, sms, most) if self.total else []
        memory = machine.global_memory
        self.tensors = [(a.name, a.size) for a in memory.allocations]
        self.shifts = shifts(memory.starts)
        self.traces: list[ClusterTrace] = []
        self.ctas: list[int] = []  # CTA of each warp, by its number in the notes
        self.owners: list[ClusterTrace] = []  # the trace of each CTA
        self.scouts: scout.Scouts | None = None  # while they run
        self.lengths: np.ndarray | None = None
        self.whole = len(self.samples) == self.total
        self.trail = address_trace.Trail(address_trace.ROOM)
        self.inner = dispatch.runner(address_trace.operation())

    def launched(self, machine: Machine) -> None:
        nx, ny, _ = (-(-g // c) for g, c in zip(machine.grid, machine.cluster_shape))

        def place(i: int) -> tuple[int, int, int]:
            return i % nx, i // nx % ny, i // (nx * ny)

        self.place = place
        if any(c.instruction.name.startswith("clusterlaunchcontrol.try_cancel") for c in self.kernel.program.macros):
            # The resident clusters take over the work of all others, and one represents them all.
            together = max(1, machine.per_sm * self.sms // machine.cluster_size)
            taken = iter(range(together, self.total, together))
            cx, cy, cz = machine.cluster_shape

            def try_cancel(gpu: int) -> tuple[int, int, int] | None:
                at = next(taken, None)
                if at is None:
                    return None
                x, y, z = place(at)
                return x * cx, y * cy, z * cz

            machine.try_cancel = try_cancel  # type: ignore[method-assign]
            self.samples, self.total = [0], min(self.total, together)
        together = machine.per_sm * self.sms // machine.cluster_size
        if self.total > len(self.samples) > 0 and scout.worthwhile(self.kernel, self.shape, together, self.values):
            self.scouts = scout.Scouts(machine, place)
        else:
            self._trace_samples()
        # Accumulators that no product was written to must read as zeros, because branches may depend on them.
        machine.reuses_registers = self.values or not self.products

    def _trace_samples(self) -> None:
        machine = self.machine
        if self.lengths is None and self.samples:
            source = sass.alone(self.kernel.module.source, self.kernel.name)
            self.samples = scout.with_masked(self.samples, self.total, source)
        machine.clusters = map(self.place, self.samples)
        machine.left, machine.steps, machine.run_code = len(self.samples), 0, self._run

    # ---- the path ------------------------------------------------------------------------------------------------

    def cta_began(self, cta: Cta) -> None:
        if self.scouts is not None:
            self.scouts.began(cta)
            return
        if cta.rank == 0:
            self.traces.append(ClusterTrace(cta.ctaid, self.samples[len(self.traces)]))
        trace = self.home[cta] = self.traces[-1]
        for w in cta.warps:
            mine = WarpTrace(cta.rank, w.index)
            trace.warps.append(mine)
            self.by_warp[w] = mine
            w.S[pg.S_NOTES], w.S[pg.S_NOTED] = self.looks.notes.address, self.looks.notes.warp()
            w.S[pg.S_CODE] = self.code.ctypes.data
            self.ctas.append(len(self.owners))
        self.owners.append(trace)

    def cta_ended(self, cta: Cta) -> None:
        if self.scouts is not None and self.scouts.ended():
            self.lengths, self.whole = self.scouts.lengths(), self.scouts.ran_whole()
            if not scout.on_data(
                sass.alone(self.kernel.module.source, self.kernel.name), self.values
            ) and self.scouts.along_axis(self.shape, self.samples):
                self.lengths = None  # the clusters traced anyway stand for all
            if self.lengths is not None:
                self.samples = self.scouts.chosen(self.lengths, self.most)
            self.scouts = None
            self._trace_samples()
        elif self.scouts is None and len(self.traces) >= self.most and self.machine.steps > scout.MASKED_COST:
            self.machine.left = 0

    def warp_ended(self, warp: Warp) -> None:
        warp.S[pg.S_CODE] = self.kernel.blocks.code.ctypes.data

    def _run(self, state, pc, mask, stop, quantum, multi):
        """Replaces the compiled loop and follows the jumps."""
        assert (warp := self.machine.current) is not None
        mine, trail, notes = self.by_warp[warp], self.trail, self.looks.notes
        notes.turn_to(warp.S[pg.S_NOTED])
        used, whole = 0, mask
        fresh = mine.retry != pc
        mine.retry = -1
        while True:
            begin = pc
            # Each of several fragments returns at every jump, branch and block.
            last, jumps = (min(stop, self.stops[pc + 1]), 1) if multi else (stop, trail.address)
            most = min(quantum - used, notes.room())
            status, pc, mask, about, steps = self.inner(state, pc, mask, last, most, jumps)
            used += steps
            self._passed(mine, begin, steps, None if multi else trail.taken(), fresh)
            fresh = True
            if multi or mask != whole or status not in (pg.QUANTUM, pg.MERGE):
                return status, pc, mask, about, used
            if pc >= stop:
                return pg.MERGE, pc, mask, about, used
            if used >= quantum:
                return pg.QUANTUM, pc, mask, about, used

    def _passed(self, mine: WarpTrace, begin: int, steps: int, jumps: np.ndarray | None, fresh: bool) -> None:
        """Adds the blocks that begin within `steps` records from `begin`, along these jumps."""
        block_from, blocks = self.block_from, mine.blocks
        before = len(blocks)
        at = begin
        if jumps is not None and len(jumps) > MANY:
            # Ranges from the target of each jump to the source of the next; the last range follows below.
            first, after = self.far_from[jumps[:-1, 1]], self.far_from[jumps[1:, 0] + 1]
            blocks += range(block_from[begin], block_from[jumps.item(0, 0) + 1])
            blocks += (first if (after - first == 1).all() else ranges(first, after)).tolist()
            left, came = jumps.sum(0).tolist()
            at = jumps.item(-1, 1)
            steps -= left + len(jumps) - begin - came + at
        elif jumps is not None:
            for leave, to in jumps.tolist():
                blocks += range(block_from[at], block_from[leave + 1])
                steps -= leave + 1 - at
                at = to
        blocks += range(block_from[at], block_from[at + steps])
        if not fresh and len(blocks) > before and self.blocks.starts[blocks[before]] == begin:
            del blocks[before]  # the block was added when the record was first tried
        mine.marks += [len(mine.events)] * (len(blocks) - before)

    def _tensor(self, address: int) -> int:
        return bisect.bisect_right(self.machine.global_memory.starts, address) - 1

    # ---- events --------------------------------------------------------------------------------------------------

    def issued(self, op: AsyncOp) -> None:
        self.ops.append(op)

    def performing(self, op: AsyncOp) -> None:
        if op.kind in PRODUCTS and not self.values:
            op.effects = nothing

    def barrier_initialised(self, warp: Warp, barrier: Mbarrier, old: Mbarrier | None, cta: Cta, offset: int) -> None:
        if self.scouts is not None:
            return
        trace = self.home[cta]
        number = trace.barriers.setdefault((cta.rank, offset), len(trace.barriers))
        if number == len(trace.names):
            trace.names.append(barrier.name.removeprefix("mbarrier "))
        self.known[barrier] = number
        self.inits.append(barrier)

    def arrived(self, barrier: Mbarrier, what: str, amount: int, relaxed: bool = False, scope: str = "") -> None:
        self.arrivals.append((what, barrier, amount, self.machine.engine.performing))

    def passed(self, warp: Warp, barrier: Mbarrier, relaxed: bool, scope: str) -> None:
        self.over = barrier

    def executing(self, warp: Warp, fragment: Fragment, call: pg.MacroCall, lanes: int) -> None:
        self.arrivals, self.ops, self.inits, self.over = [], [], [], None

    def executed(self, warp: Warp, fragment: Fragment, call: pg.MacroCall, lanes: int) -> None:
        if self.scouts is not None:
            self.scouts.executed()
            return
        mine, pc, ins = self.by_warp[warp], warp.pc, call.instruction
        if fragment.parked or (fragment.blocked is not None and not fragment.blocked.done):
            mine.retry = pc
            return
        if not mine.role:
            role = self.roles.get(pc)
            if role is None:
                role = self.roles[pc] = role_of(ins)
            mine.role = role
        self._events(warp, mine, call, ins, lanes)

    def _events(self, warp, mine: WarpTrace, call, ins, lanes: int) -> None:
        name, line, o = ins.name, ins.line, call.operands
        trace = self.home[warp.cta]
        add = mine.events.append
        if self.inits:
            for barrier in self.inits:
                add((line, INIT, self.known[barrier], barrier.expected, 0))
            return
        if self.over is not None and name.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
            add((line, WAIT, self.known[self.over], self.over.phase - 1, 0))
            return
        arrived: dict[int, list[int]] = {}
        for what, barrier, amount, by in self.arrivals:
            number = self.known.get(barrier)
            if number is None or by is not None:
                continue
            entry = arrived.setdefault(number, [0, 0])
            if what in ("arrive", "drop"):
                entry[0] += amount
            elif what == "expect_tx":
                entry[1] += amount
        for number, (count, tx) in arrived.items():
            add((line, ARRIVAL, number, count, tx))
        if name.startswith("cp.async.bulk.commit_group"):
            add((line, BULK_COMMIT, 0, 0, 0))
        elif name.startswith("cp.async.bulk.wait_group"):
            add((line, BULK_WAIT, int(o.newest or 0), int(bool(o.read)), 0))
        elif name.startswith("cp.async.commit_group"):
            add((line, CP_COMMIT, 0, 0, 0))
        elif name.startswith(("cp.async.wait_group", "cp.async.wait_all")):
            add((line, CP_WAIT, int(o.newest or 0), 0, 0))
        elif name.startswith("cp.async.mbarrier.arrive"):
            for what, barrier, amount, _ in self.arrivals:
                if what == "arrive" and barrier in self.known:
                    add((line, CP_ARRIVE, self.known[barrier], amount, 0))
        elif ins.opcode in ("bar", "barrier") and not name.startswith("barrier.cluster"):
            self._bar(warp, add, line, name, o, lanes)
        elif ins.opcode in ("atom", "red") and hasattr(o, "sources"):  # otherwise the atomic only orders another one
            self._packed_atomic(warp, trace, ins, o, lanes)
        elif name.startswith("barrier.cluster.arrive"):
            add((line, CLUSTER_ARRIVE, 0, 0, 0))
        elif name.startswith("barrier.cluster.wait"):
            add((line, CLUSTER_WAIT, 0, 0, 0))
        for op in self.ops:
            self._operation(warp, trace, add, line, op, o, lanes)

    def _packed_atomic(self, warp, trace: ClusterTrace, ins, o, lanes: int) -> None:
        """Records an atomic operation on vectors or pairs, which the interpreter neither executes nor records."""
        if any(m.startswith("shared") for m in ins.modifiers):
            return
        first = np.array(lanes_of(warp.Q[o.row], lanes, o.offset))
        size = o.count * ATOMIC_BYTES.get(o.type, 4)
        if first.max() < pg.SHARED_WINDOW:
            tensor, access = self._tensor(first.item(0)), self.packed.setdefault(ins.line, Access(space="atomic"))
            first += -self.machine.global_memory.starts[tensor] % ALIGNED
            sectors = np.unique(np.concatenate([first, first + size - 1]) >> 5)
            access.looks += 1
            access.ran += 1
            access.units += len(sectors)
            access.lines += len(np.unique(sectors >> 2))
            access.bytes += size * len(first)
            access.tensors[tensor] += len(sectors)
            trace.traffic[tensor, "atomic"] += 32 * len(sectors)

    def _bar(self, warp, add, line: int, name: str, o, lanes: int) -> None:
        lane = (lanes & -lanes).bit_length() - 1
        number = int(warp.R[o.number, lane])
        threads = warp.cta.threads if o.count is None else int(warp.R[o.count, lane])
        add((line, BAR, warp.cta.rank * 16 + number, -(-threads // 32), int(".arrive" not in name)))

    def _operation(self, warp, trace: ClusterTrace, add, line: int, op, o, lanes: int) -> None:
        kind = op.kind
        if kind == "cp.async":
            addresses = lanes_of(warp.Q[o.src], lanes, 0)
            if o.used is not None:
                addresses = [a for a, n in zip(addresses, lanes_of(warp.R[o.used], lanes, 0)) if n]
            tensor = self._tensor(addresses[0]) if addresses else -1
            shift = self.shifts.item(tensor)
            lines_asked = len({a + shift >> 7 for a in addresses})
            # Lanes that cover 128 bytes form one request; a sector that other lanes need too is requested again.
            few = 128 // o.size
            groups = (addresses[n : n + few] for n in range(0, len(addresses), few))
            sectors = sum(len({a + shift >> 5 for a in some}) for some in groups)
            if sectors:
                trace.traffic[tensor, "read"] += 32 * sectors
                trace.traffic[tensor, "read lines"] += lines_asked
                if len(trace.starts[tensor]) < 4096:
                    trace.starts[tensor].append(addresses[0])
            zeros = o.size * (lanes.bit_count() - len(addresses)) // 128
            add((line, CP_ASYNC, tensor, 32 * sectors, lines_asked + ZEROS * zeros))
            return
        barriers = [(b, amount) for what, b, amount, by in self.arrivals if by is op and what == "complete_tx"]
        if kind.startswith(("TMA load", "bulk load")):
            tensor, address, gathered, row = self._source(op.reads)
            nbytes = barriers[0][1] if barriers else 0
            trace.traffic[tensor, "read"] += nbytes
            trace.traffic[tensor, "read lines"] += -(-nbytes // min(row, 128))
            if len(trace.starts[tensor]) < 4096:
                trace.starts[tensor].append(address)
            for n, (barrier, amount) in enumerate(barriers):
                if barrier in self.known:
                    add((line, GATHER if gathered else LOAD, self.known[barrier], amount, tensor if n == 0 else -2))
        elif kind.endswith(("to a peer", ".async", "try_cancel")):
            for barrier, amount in barriers:
                if barrier in self.known:
                    add((line, LOAD, self.known[barrier], amount, -2))
        elif kind.startswith(("TMA", "bulk")) and not kind.endswith("(read)"):
            tensor, _, _, row = self._source(op.writes)
            first = next((x for x in self.ops if x.kind == f"{kind} (read)"), None)
            nbytes = sum(r[3] - r[2] for r in first.reads if r[0] == "shared") if first is not None else 0
            trace.traffic[tensor, "write"] += nbytes
            trace.traffic[tensor, "write lines"] += -(-nbytes // min(row, 128))
            add((line, BULK_STORE, tensor, nbytes, 0))
        elif kind == "tcgen05.mma":
            _, _, m, n, *_ = op.footprint.accumulator
            text = warp.instruction().text
            pair = int("cta_group::2" in text)
            add((line, MMA, m, n, pair + 2 * int(bool(getattr(o, "a_tensor", False)))))
        elif kind in ("tcgen05.cp", "tcgen05.shift"):
            add((line, MMA, 64, 32, 0))
        elif kind == "tcgen05.commit":
            for what, barrier, _, by in self.arrivals:
                if by is op and what == "arrive" and barrier in self.known:
                    add((line, MMA_COMMIT, self.known[barrier], 1, 0))

    def _source(self, regions) -> tuple[int, int, bool, int]:
        """Returns (tensor, address, whether rows are gathered, bytes of a row)."""
        for region in regions:
            if region[0] == "tensor":
                box = region[1]
                coords = box.coords
                address = box.map.base
                for c, stride in zip(coords[1:], box.map.strides):
                    address += c * stride
                bits = box.map.data_type.bits
                row = max(1, box.map.box[0] * bits // 8)
                return self._tensor(box.map.base), address + coords[0] * bits // 8, box.rows is not None, row
            if region[0] == "global":
                return self._tensor(region[1]), region[1], False, 128
        return -1, 0, False, 128

    def ended(self, failure: BaseException | None) -> None:
        machine = self.machine
        if isinstance(failure, Deadlock) and len(self.samples) < self.total:
            raise CannotFollow(
                f"{self.kernel.name}: waits for CTAs that a timing run does not execute ({len(self.samples)} of "
                f"{self.total} ran), so there is no prediction for this kernel: {failure}"
            ) from failure
        if failure is not None or not self.total:
            return
        self.traces.sort(key=lambda trace: trace.number)
        self.samples = [trace.number for trace in self.traces]
        source = sass.alone(self.kernel.module.source, self.kernel.name)
        places = sass.code_of(source, machine.arch).loads
        self.traced(
            LaunchTrace(
                self.kernel.name,
                source,
                self.kernel.tmem_columns,
                machine.arch,
                machine.grid,
                machine.block,
                machine.cluster_shape,
                machine.shared_limit,
                machine.block[0] * machine.block[1] * machine.block[2],
                self.blocks,
                self.traces,
                self.looks.accesses(machine.global_memory.starts, self.ctas, self.owners, places) | self.packed,
                self.tensors,
                self.samples,
                self.total,
                machine.options.dependent,
                self.lengths,
                [a.start for a in machine.global_memory.allocations],
                self.whole,
            )
        )
