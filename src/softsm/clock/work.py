"""What the CTAs of a grid ask of each engine, whatever the order in which they do it: cycles that nothing can avoid."""

from __future__ import annotations

import numpy as np

from softsm.clock import machine
from softsm.clock.costs import PIPES, Costs
from softsm.clock.lower import Streams
from softsm.clock.parameters import Gpu
from softsm.clock.trace import GATHER, LOAD, MMA

ENGINES = ("tensor core", "exp", "fma", "alu", "issue", "shared memory", "tensor memory")


def mma_cycles(rows: np.ndarray, columns: np.ndarray, flags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(cycles of the tensor core, of the shared-memory port) of tcgen05.mma in each CTA that takes part. Flags: 1 a
    pair of CTAs, 2 A in tensor memory. The law of clock/replay.py."""
    pair, in_tensor_memory = flags & 1, flags & 2 > 0
    port = (32.0 * columns + np.where(in_tensor_memory, 0.0, 32.0 * rows)) / 128 / (1 + pair)
    return columns / 2.0 / np.where((pair > 0) & (rows <= 128), 2, 1), port


def work_of(streams: Streams, costs: Costs, gpu: Gpu) -> np.ndarray:
    """Cycles of each engine that one cluster needs, all its multiprocessors together."""
    r = machine
    ran = np.zeros(len(costs.ints))
    for instructions in streams.instructions:
        ran += np.bincount(instructions, minlength=len(ran))
    kind, units = costs.ints[:, r.KIND], costs.values[:, r.UNITS]
    pipe = np.bincount(costs.ints[:, r.PIPE_OF], ran * costs.values[:, r.INTERVAL], len(PIPES)) / 4  # four schedulers

    def of(kinds: tuple[int, ...], cycles: np.ndarray) -> float:
        return float((ran * cycles)[np.isin(kind, kinds)].sum())

    products = of((r.PRODUCT,), units) / 4  # the four warps of a warpgroup make one
    port = of((r.SHARED,), units) + of((r.PRODUCT,), costs.values[:, r.PORT_CYCLES]) / 4
    table = streams.table.astype(np.int64)
    made = table[table[:, 0] == MMA]
    if len(made):
        tensor, operands = mma_cycles(made[:, 1], made[:, 2], made[:, 3])
        ctas = 1 + (made[:, 3] & 1)
        products += float((tensor * ctas).sum())
        port += float((operands * ctas).sum())
    filled = table[np.isin(table[:, 0], (LOAD, GATHER)) & (table[:, 3] != -2), 2].sum()
    port += float(filled) / 128 * gpu["tma.port"]
    at = PIPES.index
    return np.array([
        products + pipe[at("hmma")], pipe[at("mufu")], pipe[at("fma")], pipe[at("alu")], ran.sum() / 4, port,
        of((r.TENSOR_READ, r.TENSOR_WRITE), units) / gpu["tmem.rate"],
    ])  # fmt: skip
