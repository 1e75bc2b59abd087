"""Turns traces into a time, from occupancy, data sources, the replay of one multiprocessor and the grid's schedule."""

from __future__ import annotations

import functools
import math

import numpy as np

from softsm.timing_model import costs as cs
from softsm.timing_model import machine
from softsm.timing_model.atomics import Atomics, slices_of
from softsm.timing_model.exchanges import held_up_ns
from softsm.timing_model.follow import CannotFollow, refuse_work_by_atomics
from softsm.timing_model.grid import beside_longest, durations, makespan, over_grid, queues_of, unevenness
from softsm.timing_model.lower import LONG_CODE, Path, kinds_of, lowering_of
from softsm.timing_model.machine import CP_ASYNC, GATHER, LOAD
from softsm.timing_model.parameters import Gpu
from softsm.timing_model.prediction import Prediction, Run
from softsm.timing_model.replay import simulate
from softsm.timing_model.sass import code_of
from softsm.timing_model.sources import Source, absent_from_l1, gone, shares_of, slowest, sources_of, tiles_of, within
from softsm.timing_model.trace import LaunchTrace
from softsm.timing_model.work import (
    ENGINES,
    OF_SCHEDULERS,
    beside,
    crowd,
    executed,
    fetched_again,
    issue_cycles,
    occupancy,
    spill_room,
    spilled_bytes,
    work_of,
)

SM_L1 = 256 << 10  # bytes, shared memory included
BATCH = 16  # the fewest rows that a warp waits for together
TURNS = 6  # rounds of CTAs per slot of a multiprocessor that the replay covers; the first starts with cold caches
CROWD = 0.5  # exponent of L2 utilisation: how much of the other multiprocessors' traffic delays a request
MERGED = 16  # multiprocessors that request one line together; more gain nothing (benchmarks/microbench, copies)


class Model:
    def __init__(self, trace: LaunchTrace, gpu: Gpu, recent: dict[str, float] | None = None):
        self.trace, self.gpu = trace, gpu
        if trace.total > len(trace.clusters):
            refuse_work_by_atomics(trace.name, trace.source, trace.lines(), f"{len(trace.clusters)} of {trace.total}")
        self.code = code_of(trace.source, trace.arch)
        self.lowering = lowering_of(self.code, trace.blocks)
        self.streams = [self.lowering.streams(c) for c in trace.clusters]
        self.occupancy = occupancy(trace, self.code)
        self.cluster = trace.cluster[0] * trace.cluster[1] * trace.cluster[2]
        self.turns = tiles_of(trace)
        self.sms = int(gpu["sms"])
        self.sources = sources_of(trace, gpu, recent or {}, self.slots)
        self.slowest = slowest(trace)
        changing = [gpu["hbm.write"] / (32 * gpu["atomic.slice"] * slices_of(s)) for s in self.sources]
        running = min(self.trace.total, self.slots) * self.cluster
        self.exchange = held_up_ns(trace, self.sources, gpu, running)
        self.atomics = Atomics(trace, self.sources, gpu, self.slots * self.cluster)
        room = max(1.0, SM_L1 - self.resident * trace.shared)
        absent = [absent_from_l1(s, room, self.sms) for s in self.sources]
        for s, share in zip(self.sources, absent):
            s.asked, s.lines, s.device = s.asked * share, s.lines * share, min(1.0, s.device / share)
        local = max(spilled_bytes(streams, self.code) for streams in self.streams) / self.cluster * self.resident
        spilled = 1 - within(local / spill_room(trace.shared, room), 0.6, 1.1)
        came = np.sum([executed(streams, len(self.code.instructions) + 1) for streams in self.streams], 0)
        self.costs = cs.costs_of(self.code, gpu, trace.access, self.l1_share(), changing, absent, spilled, came)
        stores = [n for op, where in self.code.places.items() if op.startswith("STL") for n in where]
        self.spilled = float((came[stores] * self.costs.values[stores, machine.UNITS]).sum()) * self.typical
        self.spilled *= trace.total / len(trace.clusters)  # bytes, whole grid
        self.fetched_again = fetched_again(came, sum(len(c.warps) for c in trace.clusters))
        self._unknown_tensors()
        self.kinds = kinds_of(self.streams)
        # Utilisation of device memory and of L2: their latency grows with it.
        self.device_use = self.l2_use = 0.0
        self.crowded = self.crowded_device = 1.0  # how much of the other multiprocessors' traffic delays a request
        again = (1 - self.l1_share()) * trace.total * self.typical / max(1, len(trace.clusters))
        found = self.l2_finds_again()
        twice = any(a.space == "load" and 4 * a.distant > a.units for a in trace.access.values())
        self.kept = min(1.0, self.l1_share() + found) if twice else None
        for a in trace.access.values():
            if a.space == "load" and a.tensors:
                tensor = max(a.tensors, key=lambda n: a.tensors[n])
                if 0 <= tensor < len(self.sources):
                    s, more = self.sources[tensor], 32 * a.distant * a.times * again * absent[tensor]
                    device = s.device * s.asked + (1 - found) * more
                    s.lines *= 1 + more / max(s.asked, 1.0)
                    s.asked += more
                    s.again += more
                    s.device = device / max(s.asked, 1.0)

    def _unknown_tensors(self) -> None:
        """Gives loads from an unknown tensor the number after the last tensor."""
        tensors = len(self.sources)
        for events in (x.table for x in self.streams if len(x.table)):
            loads = (events[:, 0] == LOAD) | (events[:, 0] == GATHER)
            events[loads & (events[:, 3] != -2) & ((events[:, 3] < 0) | (events[:, 3] >= tensors)), 3] = tensors
            copies = events[:, 0] == CP_ASYNC
            events[copies & ((events[:, 1] < 0) | (events[:, 1] >= tensors)), 1] = tensors
        known = self.costs.ints[:, machine.TENSOR]
        known[(known < 0) | (known >= tensors)] = tensors

    @functools.cached_property
    def _twice(self) -> dict[int, float]:
        """Bytes of each tensor that a CTA loads, and loads again after many other loads."""
        bytes_of: dict[int, list[float]] = {}
        for a in self.trace.access.values():
            if a.space == "load" and a.tensors:
                both = bytes_of.setdefault(max(a.tensors, key=lambda n: a.tensors[n]), [0.0, 0.0])
                both[0] += 32 * a.missed * a.times
                both[1] += 32 * a.distant * a.times
        return {n: min(both) * self.typical / len(self.trace.clusters) for n, both in bytes_of.items()}

    @functools.cached_property
    def typical(self) -> float:
        """Mean work of all clusters of the grid, relative to the mean of the sampled ones."""
        lengths = self.trace.lengths
        return 1.0 if lengths is None else float(lengths.mean() / lengths[self.trace.samples].mean())

    def l1_share(self) -> float:
        """Returns the share of re-requested sectors that still hit L1, whose size is what shared memory leaves. L1
        evicts the least recently used line, so rows that are read twice hit entirely or not at all."""
        room = max(1.0, SM_L1 - self.resident * self.trace.shared)
        return within(sum(self._twice.values()) * self.resident / room, 0.6, 1.1)

    def l2_finds_again(self) -> float:
        """Returns the same for L2 and L1's misses. All resident CTAs fill L2, with at most the size of each tensor."""
        written = sum(s.written for s in self.sources) / self.trace.total / self.cluster
        ctas = min(self.trace.total * self.cluster, self.sms * self.occupancy)
        read = sum(min(ctas * n, self.sources[t].size) for t, n in self._twice.items() if 0 <= t < len(self.sources))
        return within((read + ctas * written) / self.gpu["l2.bytes"], 0.6, 1.2)

    def memory(self, clock: float, active: int) -> tuple[np.ndarray, float]:
        """Returns (cycles per byte and latencies of each tensor on one multiprocessor, cycles per byte written)."""
        g = self.gpu
        slow = g["hbm.busy"] * self.device_use**3 + g["hbm.slowest"] * self.slowest
        slow += self.exchange
        idle = 1 - (1 - g["load.idle"]) * self.alone
        slow_l2 = g["l2.busy"] * self.l2_use**3 + self.exchange

        def row(s: Source) -> list[float]:
            alone = 1 / g["sm.rate"]
            per = alone + max(0.0, clock * s.granules / self.l2_share(s, active) - alone) * self.crowded
            if s.device:
                full = s.device * active * clock * self.device_cost(s) / g["hbm.rate"]
                per = max(per, alone + max(0.0, full - alone) * self.crowded_device)
            # Multiprocessors that request a line together all wait for device memory if it is not in L2 yet.
            together = self.together(s, active)
            far = min(1.0, max(s.device * together, gone(s, self.sources, together, g["l2.held"])))
            if s.random:  # a warp waits for many rows, so the slowest counts
                far = 1 - (1 - s.device) ** BATCH
            # L2 hits overtake misses, so there are two queues.
            queue = machine.DEVICE_FREE if far > 0.5 else machine.L2_FREE
            delays = (
                clock * ((g[f"{way}.l2"] * idle + late) * (1 - far) + (g[f"{way}.hbm"] * idle + slow) * far)
                for way, late in (("load", slow_l2), ("tma", 0.0))
            )
            return [per, *delays, queue]

        none = row(Source("none", 0))
        rows = [*(row(s) if s.asked else none for s in self.sources), none]
        rows += [[per, *none[1:]] for per, *_ in rows]  # loads of lines already requested from device memory
        write = active * clock / g["hbm.write"]
        return np.array(rows), max(write, 1 / g["sm.write"])

    def device_cost(self, s: Source) -> float:
        """Returns the cost of a byte from device memory relative to streaming; partial lines cost more."""
        return max(1.0, self.gpu["hbm.piece"] / s.block) if s.random or s.scattered else 1 / s.filled

    @functools.cached_property
    def alone(self) -> float:
        """Share of the longest CTA's time during which it runs after all others have ended."""
        lengths = self.trace.lengths
        return 0.0 if lengths is None or self.waves else float(1 - lengths.mean() / lengths.max())

    def drained_ns(self) -> float:
        """Returns the time of device memory for write-backs during the kernel. L2 keeps the last bytes written."""
        g, changed = self.gpu, sum(s.changed for s in self.sources)
        took = sum(s.changed / g[s.way_written] for s in self.sources)
        took *= max(0.0, 1 - g["l2.dirty"] / max(changed, 1.0))
        if not self.spilled:
            return took
        # The next CTAs spill to the same addresses, which stay in L2 if everything that these CTAs move fits there.
        moved = self.spilled + changed + sum(s.asked * s.device for s in self.sources)
        kept = within(moved * min(1.0, self.slots / self.trace.total) / g["l2.bytes"], 0.6, 1.2)
        return took + self.spilled * (1 - kept) / g["hbm.mixed"]

    def together(self, s: Source, active: int) -> float:
        """Returns how many multiprocessors request the same lines at the same time, since neighbours in the grid run
        together. The tensor that they share is unknown, so the model assumes that concurrent tiles form a square part
        of all waves and, in a one-dimensional grid, of the iterations of CTAs that loop over tiles."""
        if s.random or not s.size:
            return 1.0
        sharers = (s.asked - s.again) / s.size
        slots = self.sms // self.cluster * self.resident
        turns = self.turns if self.trace.grid[1] == self.trace.grid[2] == 1 else 1
        sharers /= math.sqrt(max(1.0, self.trace.total / slots) * turns)
        return max(1.0, min(sharers, active))

    def l2_share(self, s: Source, active: int) -> float:
        """Returns bytes/ns into one multiprocessor. L2 reads a line once for all requests that meet it in flight.
        Multiprocessors in lockstep (benchmarks/microbench) are the upper bound, and more than 16 gain nothing; for 64
        that are not in lockstep, L2 answers one request in 1.5."""
        g = self.gpu
        alone = g["l2.rate"] / active
        whole = (s.piece / 128) ** 3  # parts of a line are requested at different times
        close = g["l2.coincide.tma" if s.boxes else "l2.coincide"]  # TMA requests a box at once
        served = 1 + (min(self.together(s, active), MERGED) - 1) * close * whole
        return max(alone, min(g["l2.merged"], served * alone))

    def replay(
        self,
        queues: list[list[int]],
        clock: float,
        active: int,
        log: int = 0,
        whole: bool = True,
        rest: list[int] | None = None,
    ) -> Run:
        """Replays one multiprocessor. queues: for each of its slots, the traces that run there in sequence. If not
        whole, the last trace of each slot must start but need not end. With `rest`, each slot has one trace, and the
        rest start one after another wherever a slot becomes free."""
        trace = self.trace
        memory, write = self.memory(clock, active)
        p = np.array([self.gpu[name] if name else 0.0 for name in machine.PARAMETERS])
        p[machine.STORE_CYCLE], p[machine.SM_BYTE] = write, 1 / self.gpu["sm.rate"]
        each = -(-trace.threads // 32)
        # Other kernels run between two launches of this one, and do not evict all of a short one.
        short = self.gpu["code.kept"]
        cold = min(1.0, max(0.0, (len(self.code.instructions) - short) / (LONG_CODE - short)))
        p[machine.COLD], p[machine.JUMP_NEAR] = cold * p[machine.COLD], cold * p[machine.JUMP_NEAR]
        p[machine.JUMP_FAR] = cold * p[machine.JUMP_FAR] + (1 - cold) * self.gpu["code.first"]
        p[machine.ISSUE_CYCLES] = issue_cycles(self.gpu["issue"], self.fetched_again, len(queues) * each)
        order = [n for q in queues for n in q]
        places = [place for place, q in enumerate(queues) for _ in q]
        if rest is not None:
            order += rest
            places += [n % len(queues) for n in range(len(rest))]
        ways: list[Path] = []
        tables, placed, events_of = [], {}, {}
        at, events_at = 0, 0
        for n in sorted(set(order)):
            for path in self.streams[n].paths:
                if id(path) not in placed:
                    ways.append(path)
                    placed[id(path)] = (at, at + len(path.instructions))
                    at += len(path.instructions)
            tables.append(self.streams[n].table)
            events_of[n] = events_at
            events_at += len(tables[-1])
        warps: list[tuple[int, int]] = []
        rows: list[tuple] = []  # one per warp: the fields w_pos to w_alone of machine.State
        alone = len(queues) * each <= 4 and not self.costs.products
        spans_of: list[tuple[int, int]] = []
        groups = 0
        for inst, n in enumerate(order):
            first, top = len(rows), 0
            streams = self.streams[n]
            for k, (w, path, event) in enumerate(zip(trace.clusters[n].warps, streams.paths, streams.firsts)):
                group = (w.cta * 64 + w.index) // 4
                scheduler = 4 * w.cta + (places[inst] * each + w.index) % 4  # small CTAs share the schedulers
                rows.append((*placed[id(path)], events_of[n] + event, w.cta, scheduler, inst, groups + group, alone))
                top = max(top, group + 1)
                warps.append((inst, k))
            groups += top
            spans_of.append((first, len(rows)))
        nexts: list[int] = []
        begins: list[float] = []
        later = clock * self.sms / self.gpu["cta.rate"]  # each multiprocessor gets one CTA before any gets its next
        for place, q in enumerate(queues):
            base = len(nexts)
            nexts += [base + k + 1 if k + 1 < len(q) else -1 for k in range(len(q))]
            begins += [place * later if k == 0 else -1.0 for k in range(len(q))]
        if rest is not None:
            nexts, begins = [machine.ANY] * len(order), begins + [-1.0] * len(rest)
        events = np.concatenate(tables) if tables else np.zeros((0, 4))
        ints = self.costs.ints
        s_ins, s_ev, s_cnt = (np.concatenate(x) for x in zip(*((y.instructions, y.events, y.counts) for y in ways)))
        barriers = max(1, max(len(trace.clusters[n].barriers) for n in order))
        state = machine.state(ints, self.costs.values, s_ins, s_ev, s_cnt, events, np.array(rows), np.array(spans_of),
                             np.array(nexts), np.array(begins), groups, barriers, self.cluster, memory, p,
                             log, len(order) - (0 if whole else len(queues)))  # fmt: skip
        if simulate(state):
            raise CannotFollow(self._stuck(state, warps))
        stalls = state.stalls.reshape(-1, machine.REASON_COUNT)
        logged = state.log.reshape(-1, 6)[: state.sizes[machine.LOG_ROWS]]
        return Run(self.code, self.lowering, self.streams, trace.clusters, warps, order, state.i_start, state.i_end,
                   stalls, state.issued, logged, state.s_ins, state.s_ev, events,
                   state.w_event, state.fetched)  # fmt: skip

    def _stuck(self, state: machine.State, warps: list[tuple[int, int]]) -> str:
        places = []
        for w, (pos, end) in enumerate(zip(state.w_pos.tolist(), state.w_end.tolist())):
            if pos < end:
                i = int(state.s_ins[pos])
                line = self.code.instructions[i].line if i < len(self.code.instructions) else 0
                opcode = self.code.instructions[i].opcode if i < len(self.code.instructions) else "an event"
                places.append(f"warp {warps[w][1]} at PTX line {line} ({opcode})")
        why = "the replay stalled, so there is no prediction for this kernel"
        return f"{self.trace.name}: {why}: " + "; ".join(places[:6])

    @functools.cached_property
    def work(self) -> np.ndarray:
        """Cycles of each engine (work.py) for the whole grid."""
        works = {n: work_of(self.streams[n], self.costs, self.gpu) for n in set(self.kinds)}
        if len(works) == 1:
            return works[0] * self.trace.total
        numbers = [c.number for c in self.trace.clusters]
        return sum(
            over_grid(self.trace, [(m, float(m == n)) for m in numbers]).sum() * works[k]
            for n, k in zip(numbers, self.kinds)
        )

    @functools.cached_property
    def uneven(self) -> float:
        """Returns the work of the busiest engine on the multiprocessor that ends last, or on the schedulers that do,
        relative to the mean of all."""
        if self.trace.lengths is None or self.cluster > 1 or self._alike():
            return 1.0
        engine = int(self.work.argmax())
        works = [work_of(self.streams[n], self.costs, self.gpu)[engine] for n in self.kinds]
        every = over_grid(self.trace, [(c.number, w) for c, w in zip(self.trace.clusters, works)])
        alone, schedulers = min(1.0, self.trace.threads / 128), 1  # two warps use two of four schedulers
        if self.waves and ENGINES[engine] in OF_SCHEDULERS:
            heavy = self._heaviest()  # alone, it is no faster than its chain of instructions
            alone = min(alone, works[heavy] / float(self.replay([[heavy]], self.gpu.clock, self.sms).end.max()))
            schedulers = max(1, 128 // self.trace.threads)
        return unevenness(every, self.sms, self.occupancy, alone, schedulers)

    # ---- the grid -------------------------------------------------------------------------------------------------

    def predict(self, clock: float | None = None) -> Prediction:
        """Predicts at the highest clock with idle memories, then again with the resulting utilisation and clock."""
        first = f = clock or self.gpu.clock
        result = self._at(f, whole=not self.waves)
        use, l2_use = (min(1.0, float(result.busy[name])) for name in ("device memory", "L2"))
        if clock is None:
            f = self._clock(result)
        if abs(f - first) > 0.005 or max(use, l2_use) > 0.1:
            self.device_use, self.l2_use = use, l2_use
            written = 1e-3 * self.drained_ns() / result.roofline["device memory"]
            self.crowded, self.crowded_device = l2_use**CROWD, crowd(use, written)
            return self._at(f)
        return self._at(first) if self.waves else result

    def _clock(self, r: Prediction) -> float:
        """Returns the clock in GHz: busy tensor cores lower it within microseconds."""
        top, low = self.gpu.clock, self.gpu["clock.loaded"]
        return top - (top - low) * min(1.0, r.busy["tensor core"] / self.gpu["clock.full"])

    def _heaviest(self) -> int:
        return max(range(len(self.streams)), key=lambda n: sum(len(x.instructions) for x in self.streams[n].paths))

    @property
    def slots(self) -> int:
        """Number of clusters that run concurrently."""
        return self.sms // self.cluster * self.resident

    @property
    def resident(self) -> int:
        """Number of clusters on one multiprocessor: as many as fit, or as many as there are."""
        return min(self.occupancy, -(-self.trace.total // (self.sms // self.cluster)))

    @property
    def waves(self) -> bool:
        """Whether some clusters start only after others have ended."""
        return self.trace.total > self.slots

    def _at(self, f: float, whole: bool = True) -> Prediction:
        """Predicts at clock f. If not whole, only the time of the result is valid."""
        total, slots = self.trace.total, self.slots
        log = 60_000 if whole else 0
        if not self.waves:
            each = -(-total // (self.sms // self.cluster))
            run = self.replay(
                [[n] for n in beside_longest(self.trace, each, self.sms // self.cluster, self._heaviest())],
                f,
                min(total * self.cluster, self.sms),
                log,
            )
            cycles = float(run.end.max())
            resident = each
        else:
            resident = self.occupancy
            if self._alike():
                return self._in_waves(f, log, whole)
            shares = None if self.trace.lengths is None else shares_of(self.trace)
            queues = queues_of(self.kinds, shares, resident, -(-total // slots))
            rest = [q[k] for k in range(1, len(queues[0])) for q in queues]
            run = self.replay([q[:1] for q in queues], f, self.sms, log, True, rest)
            cycles = self._schedule(run, resident, slots)
        return self._prediction(run, cycles, f, resident, total / slots)

    def _alike(self) -> bool:
        """Returns whether one trace represents the grid: all do as much work, except perhaps the last, at the edge."""
        kinds = set(self.kinds if len(self.kinds) < 3 or self.trace.lengths is not None else self.kinds[:-1])
        sizes = [sum(len(x.instructions) for x in self.streams[n].paths) for n in kinds]
        return max(sizes) <= 1.02 * min(sizes)

    def _in_waves(self, f: float, log: int, whole: bool) -> Prediction:
        """Predicts a grid of equal CTAs: each free slot gets the next one. Extrapolates the rate at which CTAs start
        in a few rounds, and the last round, to all CTAs of a multiprocessor. Single CTAs' durations would mislead,
        because some get ahead of the others that share their pipes."""
        resident, slots = self.occupancy, self.sms // self.cluster
        many = -(-self.trace.total // slots)
        looked = min(many, TURNS * resident + many % resident) if whole else min(many, TURNS * resident)
        ended = looked if whole else looked - resident
        one = self.kinds[len(self.kinds) // 2]
        run = self.replay([[one]] * resident, f, self.sms, log, whole, [one] * (looked - resident))
        begun = np.sort(run.start)
        cycles = float(run.end.max() if whole else begun[-1])
        left = many - looked if whole else many - ended
        if left > 0:
            last = min(len(begun), TURNS * resident) - 1
            early = max(0, min(2 * resident - 1, last - resident))
            cycles += left * float(begun[last] - begun[early]) / (last - early)
        return self._prediction(run, cycles, f, resident, self.trace.total / self.slots)

    def _schedule(self, run: Run, resident: int, slots: int) -> float:
        """Schedules all clusters in order, each into the slot that becomes free first."""
        gap = self.gpu["cta.gap"]
        took, more = durations(run.start, run.end, np.array(run.order), resident)
        known = [(c.number, took[n]) for c, n in zip(self.trace.clusters, self.kinds) if n in took]
        return makespan(over_grid(self.trace, known) + gap, slots, more) - gap

    def _prediction(self, run: Run, cycles: float, f: float, resident: int, waves: float) -> Prediction:
        trace, g = self.trace, self.gpu
        us, sms = 1e-3 / f, self.sms
        needs = dict(zip(ENGINES, (self.work / sms * us).tolist()))
        read = sum(s.asked * s.granules / self.l2_share(s, sms) / sms for s in self.sources)
        written = (sum(s.sent for s in self.sources) + self.spilled) / g["hbm.write"]
        changed, drained = sum(self.atomics.ns), self.drained_ns()
        device = sum(s.asked * s.device * self.device_cost(s) + min(s.atomic, s.size) for s in self.sources)
        sums = max(0.0, sum(min(s.atomic, s.size) for s in self.sources) - g["l2.held"])
        drained += sums * max(0.0, 1 / g["atomic.device"] - 1 / g["hbm.rate"] - 1 / g["hbm.mixed"])
        roofline = {name: needs[name] for name in ("tensor core", "exp", "issue", "shared memory")} | {
            "L2": max(read + changed, written) * 1e-3,  # read data and stores use separate paths
            "atomics": changed * 1e-3,
            "device memory": max(device / g["hbm.rate"] + drained, 1e-9) * 1e-3,
            "CTA launches": trace.total * self.cluster / g["cta.rate"] * 1e-3,
        }
        # No kernel is faster than its busiest engine, and no memory is busy before the first request reaches it.
        first = {"L2": g["load.l2"] * 1e-3, "device memory": g["load.hbm"] * 1e-3}
        least = max(max(needs.values()) * self.uneven, *(t + first.get(name, 0.0) for name, t in roofline.items()))
        memory = roofline["device memory"]
        taken = max(least, beside(cycles * us, memory + first["device memory"], drained * 1e-3 / memory))
        body = g["cta.start"] + taken + self.atomics.held_up_us() * min(1.0, memory / taken) ** 3
        busy = {name: took / body for name, took in (needs | roofline).items()}
        top = max(roofline, key=lambda k: roofline[k])
        bound = f"{top} {busy[top]:.0%}" if busy[top] >= 0.6 else f"chain ({top} {busy[top]:.0%})"
        return Prediction(
            trace.name,
            g,
            trace.grid,
            trace.threads,
            trace.total * self.cluster,
            resident,
            waves,
            cycles,
            f,
            body + g["launch"],
            busy,
            [],
            roofline,
            bound,
            self.code.registers,
            self.code.spills,
            run,
            trace,
            self.sources,
            self.kept,
            body,
            self._us_of(run.reached("PREEXIT"), f),
            self._us_of(run.reached("ACQBULK"), f) if trace.dependent else None,
        )

    def _us_of(self, cycles: float | None, clock: float) -> float | None:
        return None if cycles is None else cycles * 1e-3 / clock + self.gpu["cta.start"]
