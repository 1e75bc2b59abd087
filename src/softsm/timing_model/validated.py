"""The model's measured errors, and what makes a prediction less certain than others. The bands come from kernels drawn
at random and measured on an H200 (benchmarks/timing.py), never from a wish."""

from __future__ import annotations

from typing import NamedTuple

from softsm.timing_model.follow import branch_on_value
from softsm.timing_model.lower import LONG_CODE, kinds_of
from softsm.timing_model.parameters import Gpu

# From docs/timing.md: the last seed that was predicted before it was measured.
MEAN, WORST, CASES, DATE = 0.059, 0.26, 184, "2026-11-19"
USUAL = 0.2  # nine of ten kernels without a reason for doubt were off by at most this
SHORT = 10.0  # us


class Doubt(NamedTuple):
    width: float  # nine of ten such kernels were off by at most this
    words: str


def depends_on_data(p) -> tuple[int, int] | None:
    """Returns the PTX lines of a load or a comparison and of a branch on it, if the sampled CTAs' paths differ: so may
    the others'."""
    run, trace = p.run, p.trace
    if run is None or trace is None or trace.total <= len(trace.clusters) or len(set(kinds_of(run.streams))) == 1:
        return None
    return branch_on_value(trace.source, trace.lines())


def doubts(p) -> list[Doubt]:
    """Returns the reasons to trust a prediction less, the gravest first."""
    out = []
    busy = {name: took / max(p.body_us, 1e-9) for name, took in p.roofline.items()}
    opcodes = [ins.opcode for ins in p.run.code.instructions] if p.run is not None else []
    if any(op.startswith(("ATOMG", "ATOM.", "RED.", "REDG")) for op in opcodes):
        fenced = any(op.startswith("MEMBAR") and ".GPU" in op for op in opcodes)
        width, order = (0.45, " with a fence around each") if fenced else (0.35, "")
        out.append(Doubt(width, f"atomic operations{order}: how many of them meet at a line is not known"))
    if p.incomplete:
        words = "how long a CTA runs depends on what an earlier launch writes, of which only some CTAs ran: time this"
        out.append(Doubt(1.0, f"{words} launch alone, with inputs of its own"))
    elif depends_on_data(p) is not None and p.trace.lengths is not None:
        out.append(
            Doubt(0.3, "how long a CTA runs depends on data, and which others share its multiprocessor is not known")
        )
    elif depends_on_data(p) is not None:
        out.append(
            Doubt(0.6, "how long a CTA runs depends on data, and only few were counted: the longest is not known")
        )
    read = sum(s.asked for s in p.sources)
    if sum(s.asked for s in p.sources if s.random and s.piece < 64) > 0.2 * read > 0:
        out.append(Doubt(0.3, "scattered words are read: the speed of device memory depends on where they are"))
    if p.spills:
        out.append(Doubt(0.3, f"{p.spills} bytes are spilled to local memory"))
    if p.kept is not None and 0.0 < p.kept < 1.0:
        out.append(Doubt(0.3, "rows are read twice, and the caches hold some of them: which is not known"))
    if len(opcodes) > LONG_CODE:
        out.append(Doubt(0.4, f"{len(opcodes)} machine instructions: more than the first instruction cache holds"))
    if busy.get("L2", 0.0) > 0.6 and any(s.asked > 2 * s.size > 0 for s in p.sources):
        out.append(
            Doubt(0.3, "L2 is busy with tiles that CTAs share: how many request one at the same time is not known")
        )
    if busy.get("issue", 0.0) > 0.6 and busy.get("tensor core", 0.0) > 0.1:  # windows of keys, seeds 202 to 909
        out.append(
            Doubt(0.6, "much is computed during products: such kernels were up to 1.6 times slower than predicted")
        )
    if p.bound.startswith("chain"):
        out.append(Doubt(0.27, "no unit is busy: the time is a chain of waits, whose latencies add up"))
    if p.us < SHORT:
        out.append(Doubt(0.22, "a short kernel: most of its time is the launch and the first loads"))
    if p.gpu.arch.startswith("sm_10"):
        out.append(
            Doubt(0.3, "the rates are from others' microbenchmarks and tutorials, and the clock was not measured")
        )
    return sorted(out, key=lambda d: -d.width)


def band(p) -> tuple[float, float]:
    """Returns the lower and upper factor of the band around a prediction."""
    wide = max([USUAL, *(d.width for d in doubts(p))])
    return 1 / (1 + wide), 1 + wide


def statement(gpu: Gpu) -> str:
    checked = (
        f"checked with kernels drawn at random, H200: mean error {MEAN:.0%}, worst {WORST:.0%}, {CASES} kernels, {DATE}"
    )
    if gpu.arch.startswith("sm_10"):
        return f"predicted, never run on a {gpu.name}; rates from published microbenchmarks and tutorials; {checked}"
    return checked
