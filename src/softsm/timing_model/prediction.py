"""The model's results: the prediction of a launch, and the replay behind it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from softsm.timing_model.lower import Lowering, Streams
from softsm.timing_model.parameters import Gpu
from softsm.timing_model.sass import Code
from softsm.timing_model.sources import Source
from softsm.timing_model.trace import ClusterTrace, LaunchTrace


@dataclass
class Prediction:
    kernel: str
    gpu: Gpu
    grid: tuple
    threads: int
    ctas: int
    resident: int  # CTAs on a multiprocessor
    waves: float
    cycles: float
    clock: float  # GHz
    us: float  # the launch alone, between CUDA events around it
    busy: dict[str, float]  # engine -> share of the time
    stalls: list  # (cycles, reason, role, PTX line, instruction, barrier)
    roofline: dict[str, float]  # resource -> the fewest us it needs
    bound: str
    registers: int
    spills: int
    run: Run | None = None
    trace: LaunchTrace | None = None
    sources: list[Source] = field(default_factory=list)
    kept: float | None = None  # share of rows read twice that still hit a cache; None: no row is read twice
    body_us: float = 0.0  # time without the launch
    lets_in_us: float | None = None  # time at which a dependent grid may begin
    waits_us: float | None = None  # time at which a grid that was launched early waits for the grid before it
    incomplete: bool = False  # the CTAs' paths depend on what an earlier launch wrote in part, being timed

    def behind(self, before: Prediction) -> float:
        """Returns the us from the end of the previous launch to the end of this one."""
        g = self.gpu
        if self.waits_us is None or before.lets_in_us is None:
            return g["launch.next"] + self.body_us
        # A grid that is launched early overlaps the previous one up to its wait.
        waits = before.lets_in_us + g["launch.next"] + self.waits_us - before.body_us
        return max(g["launch.dependent"], waits) + self.body_us - self.waits_us

    @property
    def limit(self) -> str:
        return max(self.roofline, key=lambda k: self.roofline[k])


@dataclass
class Run:
    """One replay: what ran, and when."""

    code: Code
    lowering: Lowering
    streams: list[Streams]
    traces: list[ClusterTrace]
    warps: list[tuple[int, int]]  # (instance, warp of its trace) for each warp
    order: list[int]  # trace of each instance
    start: np.ndarray
    end: np.ndarray
    stalls: np.ndarray
    issued: np.ndarray
    log: np.ndarray
    s_ins: np.ndarray
    s_ev: np.ndarray
    events: np.ndarray
    w_event: np.ndarray
    fetched: np.ndarray  # time at which the first warp had the code of each instruction, or -1

    def event(self, warp: int, pos: int) -> np.ndarray | None:
        """Returns the first event at a position of the warp's stream."""
        number = int(self.s_ev[pos])
        return self.events[number + self.w_event[warp]] if number >= 0 else None

    def reached(self, opcode: str) -> float | None:
        """Returns when the first warp reached such an instruction."""
        times = self.fetched[self.code.places.get(opcode, [])].tolist()
        return min((t for t in times if t >= 0), default=None)
