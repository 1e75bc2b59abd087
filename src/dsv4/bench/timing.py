"""Times of calls on a GPU.

Each call is captured in a CUDA graph and its replays are timed with events. A backward pass, which autograd ties to the
stream of its forward pass, is called instead, in one of two ways:

    queued  behind a kernel that keeps the GPU waiting while the host launches: the time of the GPU, as in training,
            where the host is ahead
    idle    on an idle GPU: what the host needs before and between the launches counts

Calls in a row would measure neither: behind a long call the host is ahead, behind a short one it is not. Before every
replay a buffer larger than the L2 is read, so that nothing is found there (read, not written: writing its lines back
would be timed too). The graphs of all calls alternate, so that a change of the clock or of the temperature affects all
of them. Their order changes from round to round: a call finds the host's caches, the memory and the clock as the call
before it left them, so a fixed order would favour those that follow a similar call. A call whose replays would take
more than a second has fewer, spread over the rounds. After every replay a kernel on the same stream reads the clock of
a multiprocessor against the nanosecond timer.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

PROBE_NS = 40_000  # the timer may move in steps of a microsecond
QUEUE_NS = 1_500_000  # a backward pass of 40 launches takes the host half a millisecond
Mode = Literal["graph", "queued", "idle"]
SECONDS, FEWEST = 1.0, 5  # seconds for all replays of a call; the fewest replays


@dataclass(frozen=True)
class Sample:
    """The times of the replays of one call: the median, the quartiles, the median clock right after them, and how
    many."""

    microseconds: float
    low: float
    high: float
    megahertz: float
    replays: int = 0


def time_call(call: Callable[[], Any], repeats: int = 30) -> float:
    """Return the median microseconds of one CUDA-graph replay of ``call``."""
    return time_turns({"": captured(call).replay}, repeats, clocks=False)[""].microseconds


def time_calls(
    calls: Mapping[str, Callable[[], Any]], repeats: int, mode: Mode = "graph"
) -> tuple[dict[str, Sample], dict[str, str]]:
    """Time calls alternately -> (samples, reasons): a call that cannot be captured has a reason, not a sample."""
    runs, refused = {}, {}
    for name, call in calls.items():
        try:
            runs[name] = captured(call).replay if mode == "graph" else warmed(call)
        except (RuntimeError, torch.OutOfMemoryError) as why:
            refused[name] = in_one_line(why)
    return time_turns(runs, repeats, mode=mode), refused


def warmed(call: Callable[[], Any]) -> Callable[[], Any]:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    return call


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return graph


def time_turns(
    runs: Mapping[str, Callable[[], Any]], repeats: int, clocks: bool = True, mode: Mode = "graph"
) -> dict[str, Sample]:
    from dsv4.bench import clock  # imports Triton, which a machine without a GPU may not have

    flush = _flush_buffer()
    waiting = torch.zeros(4, dtype=torch.int64, device="cuda")

    def timed(run: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        if mode == "idle":
            torch.cuda.synchronize()
        flush.sum()
        if mode == "queued":
            clock.read_clock[(1,)](waiting, QUEUE_NS, num_warps=1)
        return _timed(run)

    first = {name: timed(run) for name, run in runs.items()}
    torch.cuda.synchronize()
    turns = {name: turns_of(begin.elapsed_time(end) * 1e-3, repeats) for name, (begin, end) in first.items()}
    times: dict[str, list] = {name: [] for name in runs}
    stamps = torch.zeros(len(runs), max(repeats, 1), 4, dtype=torch.int64, device="cuda")
    order, shuffle = list(enumerate(runs.items())), random.Random(0).shuffle
    for turn in range(repeats):
        shuffle(order)
        for n, (name, run) in order:
            if turn not in turns[name]:
                continue
            times[name].append(timed(run))
            if clocks:
                clock.read_clock[(1,)](stamps[n, len(times[name]) - 1], PROBE_NS, num_warps=1)
    torch.cuda.synchronize()
    found = {}
    for n, name in enumerate(runs):
        us = sorted(begin.elapsed_time(end) * 1e3 for begin, end in times[name])
        mhz = megahertz(stamps[n, : len(us)]) if clocks else 0.0
        found[name] = Sample(statistics.median(us), us[len(us) // 4], us[3 * len(us) // 4], mhz, len(us))
    return found


def turns_of(seconds: float, repeats: int) -> set[int]:
    """Return the turns, of `repeats`, in which a call of this duration is replayed: all, or fewer, evenly spread."""
    count = min(repeats, max(FEWEST, int(SECONDS / max(seconds, 1e-9))))
    return {turn for turn in range(repeats) if (turn + 1) * count // repeats > turn * count // repeats}


def _timed(run: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Return the events before and after a run."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    return begin, end


def megahertz(stamps: Tensor) -> float:
    """Return the median clock of stamps [n, 4]: (cycles, nanoseconds) twice."""
    cycles, ns = (stamps[:, 2] - stamps[:, 0]).double(), (stamps[:, 3] - stamps[:, 1]).double()
    return float((cycles / ns.clamp_min(1)).median() * 1e3)


def ceilings() -> dict[str, float]:
    """Measure a device copy (TB/s, bytes read + written) and a bf16 matrix product (TFLOP/s) on random data."""
    x = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    # A kernel copies: a plain copy_ would become a memcpy node of the graph, which is slower.
    copy = 2 * x.numel() * 2 / time_call(lambda: torch.neg(x, out=y), 10) / 1e6
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    c = torch.empty_like(a)
    product = 2 * 8192**3 / time_call(lambda: torch.mm(a, b, out=c), 20) / 1e6
    return {"copy_terabytes_per_second": copy, "matmul_tflops": product}


def in_one_line(why: BaseException) -> str:
    return (str(why).splitlines() or [type(why).__name__])[0][:160]


_BUFFERS: dict[int, Tensor] = {}


def _flush_buffer() -> Tensor:
    device = torch.cuda.current_device()
    if device not in _BUFFERS:
        _BUFFERS[device] = torch.zeros(64 << 20, dtype=torch.float32, device="cuda")
    return _BUFFERS[device]
