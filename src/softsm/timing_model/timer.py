"""`softsm.timing()` times the launches inside. Only some CTAs of each grid run, so the program's results are wrong.

with softsm.use("sm_90a", sms=132), softsm.timing() as timer:
    kernel[grid](x, y, n)
timer.predictions[0].us
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from softsm import accepted
from softsm.engine.options import Options, Session, observing
from softsm.engine.scheduler import Machine
from softsm.ptx.cplusplus import readable
from softsm.timing_model.follow import CannotFollow, branch_on_value
from softsm.timing_model.model import Model
from softsm.timing_model.parameters import GPUS, gpu_for
from softsm.timing_model.prediction import Prediction
from softsm.timing_model.trace import LaunchTrace, Tracer


class Timer(Session):
    """Times the launches of a `timing` block and holds the predictions."""

    computes, one_gpu = False, True  # products are not computed, and few CTAs run

    def __init__(self, gpu: str | None = None, clock: float | None = None, samples: int = 3, values: bool = False):
        self.gpu_name, self.clock, self.most, self.values = gpu, clock, samples, values
        self.sms = int(GPUS[gpu or "h200"]["sms"])
        self.predictions: list[Prediction] = []
        self.written: dict[str, float] = {}
        self.raises = True  # CannotFollow; else the launch is left out
        self.left_out: list[str] = []
        self.partly: set[tuple[int, int]] = set()  # address and bytes of what timed launches wrote in part

    def options(self, chosen: Options) -> Options:
        return replace(chosen, order="eager", sms=4)  # emulated SMs; the program sees the GPU's number

    def observer(self, machine: Machine) -> Tracer:
        return Tracer(machine, self.sms, self.most, self.values, self.traced)

    def traced(self, trace: LaunchTrace) -> None:
        gpu = gpu_for(self.gpu_name, trace.arch)
        try:
            model = Model(trace, gpu, self.written)
            self.predictions.append(model.predict(self.clock))
        except CannotFollow as problem:
            if self.raises:
                raise
            self.left_out.append(str(problem).replace(trace.name, readable(trace.name)))
            self._note_writes(trace)
            return
        self.predictions[-1].incomplete = self._reads_partly(trace)
        self._note_writes(trace)
        for s in model.sources:
            if s.written:
                self.written[s.name.split(" [")[0]] = s.written

    def _reads_partly(self, trace: LaunchTrace) -> bool:
        """Returns whether what decides the CTAs' paths was written by an earlier launch, of which only some CTAs
        ran.
        """
        decides = branch_on_value(trace.source, trace.lines()) if self.partly and trace.starts else None
        access = trace.access.get(decides[0]) if decides is not None else None
        return access is not None and any(_tensor(trace, n) in self.partly for n in access.tensors)

    def _note_writes(self, trace: LaunchTrace) -> None:
        written = {n for c in trace.clusters for n, how in c.traffic if how in ("write", "atomic")}
        places = {_tensor(trace, n) for n in written if 0 <= n < len(trace.starts)}
        self.partly = self.partly - places if trace.whole else self.partly | places

    @property
    def us(self) -> float:
        """us of all launches in sequence, as one CUDA graph."""
        return self.us_from(0)

    def us_from(self, first: int) -> float:
        """Returns the us of the launches from this one on, in sequence."""
        found = self.predictions[first:]
        if not found:
            return 0.0
        return found[0].gpu["launch"] + found[0].body_us + sum(b.behind(a) for a, b in zip(found, found[1:]))


def _tensor(trace: LaunchTrace, number: int) -> tuple[int, int]:
    return trace.starts[number], trace.tensors[number][1]


@contextlib.contextmanager
def timing(
    gpu: str | None = None, clock: float | None = None, samples: int = 3, values: bool = False
) -> Iterator[Timer]:
    """Time every launch inside.

    Args:
        gpu: "h200", "b200" or "gb200"; default: the one with the program's architecture.
        clock: GHz of the multiprocessors; default: what the model expects.
        samples: how many clusters of a large grid run, up to three.
        values: compute matrix products, for kernels whose control flow depends on them.
    """
    if gpu is not None:
        accepted.one_of("gpu", gpu, tuple(GPUS))
    if clock is not None:
        accepted.positive("clock", clock)
    accepted.whole("samples", samples, 1, 3)
    accepted.flag("values", values)
    timer = Timer(gpu, clock, samples, values)
    with observing(timer):
        yield timer
