"""The cycles that the CTAs of a grid need of each engine, whatever their order: a lower bound."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from softsm.engine.launch import ctas_per_sm
from softsm.timing_model import machine
from softsm.timing_model.costs import PIPES, Costs, lane_bytes
from softsm.timing_model.lower import LONG_CODE, Streams
from softsm.timing_model.machine import GATHER, LOAD, MMA
from softsm.timing_model.parameters import Gpu
from softsm.timing_model.sass import Code
from softsm.timing_model.trace import LaunchTrace

SM_REGISTERS = 65_536
# Above MUCH_SHARED bytes, Triton requests the largest shared-memory carve-out (benchmarks/NOTES.md, L1 carve-out).
MUCH_SHARED, L1_LEFT = 48 << 10, 28 << 10
ENGINES = ("tensor core", "exp", "fma", "alu", "issue", "shared memory", "tensor memory", "other pipes")
OF_SCHEDULERS = ("exp", "fma", "alu", "issue", "other pipes")  # each of the four has its own
OTHERS = ("half", "memory", "uniform")
# Cycles per instruction in loops of this length, with 4, 8, 16 and 32 warps (benchmarks/microbench, shared limits).
LONG_LOOPS, LONG_CYCLES = (3072, 4096), ((2.7, 1.5, 1.5, 1.35), (2.7, 2.0, 1.6, 1.4))
REPEATED = 3  # the fewest iterations of a loop
BESIDE = 8  # the power of their norm, from kernels of development seeds 707 to 1111


def occupancy(trace: LaunchTrace, code: Code) -> int:
    """Returns the number of CTAs that fit on a multiprocessor."""
    warps = -(-trace.threads // 32)
    per_warp = -(-code.registers * 32 // 256) * 256
    by_registers = SM_REGISTERS // (per_warp * warps)
    return max(1, min(ctas_per_sm(trace.threads, trace.shared, trace.columns), by_registers))


def beside(chain: float, memory: float, written: float) -> float:
    """Returns the time of a kernel whose CTAs need `chain`, in which reads and writes overlap, and device memory
    `memory`, in which they alternate. written: the share of writes in it. If both are equally long they disturb each
    other: with as many writes as reads the kernel needs 9 % more than either."""
    most = max(chain, memory)
    return most * (1 + 4 * written * (1 - written) * (min(chain, memory) / most) ** BESIDE) ** (1 / BESIDE)


def crowd(use: float, written: float) -> float:
    """Returns how much of the other multiprocessors' traffic delays a read of device memory. They do not stay in step,
    so that a read meets others as often as device memory is busy. Writes are done later, and are always in the way.
    written: their share of the traffic; with as many writes as reads nothing is gained."""
    always = min(1.0, 2 * written)
    return always + (1 - always) * use


def mma_cycles(rows: np.ndarray, columns: np.ndarray, flags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (cycles of the tensor core, of the shared-memory port) of tcgen05.mma in each participating CTA. Flags: 1
    a pair of CTAs, 2 A in tensor memory. replay.py uses the same formula."""
    pair, in_tensor_memory = flags & 1, flags & 2 > 0
    port = (32.0 * columns + np.where(in_tensor_memory, 0.0, 32.0 * rows)) / 128 / (1 + pair)
    return columns / 2.0 / np.where((pair > 0) & (rows <= 128), 2, 1), port


def executed(streams: Streams, count: int) -> np.ndarray:
    """Counts how often the warps of a cluster execute each of `count` instructions."""
    often = Counter(map(id, streams.paths))
    ran = np.zeros(count, np.int64)
    for k, path in {id(path): path for path in streams.paths}.items():
        ran += often[k] * np.bincount(path.instructions, minlength=count)
    return ran


def spill_room(shared: int, left: float) -> float:
    """Returns the bytes of L1 that hold local memory. left: bytes that shared memory would leave."""
    return left if shared <= MUCH_SHARED else L1_LEFT


def spilled_bytes(streams: Streams, code: Code) -> int:
    """Returns the bytes of local memory that the warps of a cluster keep in use: all spilled bytes or, for a warp that
    accesses some of them repeatedly, only those. L1 may evict what it spilled before its loop."""
    local = [n for op, where in code.places.items() if op.startswith(("LDL", "STL")) for n in where]
    often = Counter(map(id, streams.paths))
    total = 0
    for k, path in {id(path): path for path in streams.paths}.items() if code.spills else ():
        ran = np.bincount(path.instructions, minlength=len(code.instructions))
        again: dict[str, int] = {}
        for n in local:
            if ran[n] >= REPEATED:
                ins = code.instructions[n]
                again[re.search(r"\[.*\]", ins.text)[0]] = 32 * lane_bytes(ins.opcode)  # type: ignore[index]
        total += often[k] * (sum(again.values()) or 32 * code.spills)
    return total


def fetched_again(came: np.ndarray, warps: int) -> tuple[float, int]:
    """Returns (share of the issued instructions that the first instruction cache has evicted since the last iteration,
    length of that iteration). An iteration with more code than the cache holds evicts all of it. There are as many such
    iterations as executions of the first instruction that does not fit; shorter loops in between hit. came: how often
    each instruction is executed."""
    often = np.sort(came)[::-1]
    turns = often[LONG_CODE] if len(often) > LONG_CODE else 0
    if turns < REPEATED * warps:
        return 0.0, 0
    return float(np.minimum(often, turns).sum() / often.sum()), int((often >= REPEATED * warps).sum())


def issue_cycles(usual: float, again: tuple[float, int], warps: int) -> float:
    """Returns the cycles of a scheduler per instruction."""
    share, length = again
    long = [usual, *(float(np.interp(np.log2(warps), (2, 3, 4, 5), row)) for row in LONG_CYCLES)]
    return usual + share * (float(np.interp(length, (LONG_CODE, *LONG_LOOPS), long)) - usual)


def work_of(streams: Streams, costs: Costs, gpu: Gpu) -> np.ndarray:
    """Returns the cycles of each engine that one cluster needs, summed over its multiprocessors."""
    r = machine
    ran = executed(streams, len(costs.ints))
    kind = costs.ints[:, r.KIND]
    pipe = np.bincount(costs.ints[:, r.PIPE_OF], ran * costs.values[:, r.INTERVAL], len(PIPES)) / 4  # four schedulers
    units = np.bincount(kind, ran * costs.values[:, r.UNITS], r.MEMBAR + 1)
    products = units[r.PRODUCT] / 4  # four warps issue one product together
    port = units[r.SHARED] + np.bincount(kind, ran * costs.values[:, r.PORT_CYCLES], r.MEMBAR + 1)[r.PRODUCT] / 4
    table = streams.table
    made = table[table[:, 0] == MMA].astype(np.int64)
    if len(made):
        tensor, operands = mma_cycles(made[:, 1], made[:, 2], made[:, 3])
        ctas = 1 + (made[:, 3] & 1)
        products += (tensor * ctas).sum()
        port += (operands * ctas).sum()
    if gpu["tma.port"]:
        filled = ((table[:, 0] == LOAD) | (table[:, 0] == GATHER)) & (table[:, 3] != -2)
        port += table[filled, 2].sum() / 128 * gpu["tma.port"]
    at = PIPES.index
    issue = ran.sum() / 4 * gpu["issue"]
    return np.array([
        products + pipe[at("hmma")], pipe[at("mufu")], pipe[at("fma")], pipe[at("alu")], issue, port,
        (units[r.TENSOR_READ] + units[r.TENSOR_WRITE]) / gpu["tmem.rate"], max(pipe[at(name)] for name in OTHERS),
    ])  # fmt: skip
