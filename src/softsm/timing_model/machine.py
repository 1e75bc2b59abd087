"""The state of a replay (replay.py): the kinds and columns of machine instructions, the parameters by their place in
an array, and the arrays themselves, all one-dimensional.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

INF = 1e18
LOW = 0xFFFFFFFF  # a mask that tells LLVM an index is not negative, so that it drops Python's wraparound code
# Kinds of machine instructions.
PLAIN, SHARED, READ, WRITE, PRODUCT, PRODUCT_WAIT, TENSOR_READ, TENSOR_WRITE, TAKEN, MEMBAR, ATOMIC = range(11)
# Reasons to wait.
REASONS = ("registers", "pipe", "issue", "barrier", "products", "copies", "bar.sync", "shared memory", "code")
DEPENDS, PIPE, ISSUE, BARRIER, PRODUCTS, COPIES, NAMED, PORT, CODE = range(9)
REASON_COUNT = len(REASONS)
# Log entries other than waits.
LOG_PRODUCT, LOG_COPY = 20, 21
# Parameters (parameters.py), by their place in the array; None: set by the model.
PARAMETERS = (
    "product.tail",
    "product.depth",
    "mbarrier.try",
    "mbarrier.arrive",
    "mbarrier.wake",
    "bar.sync",
    "bar.arrival",
    "tma.issue",
    "tma.interval",
    "mma.issue",
    "mma.tail",
    "tmem.rate",
    "tmem.latency",
    "cta.gap",
    "load.l1",
    None,
    "cluster.barrier",
    "commit",
    "branch",
    "remote",
    "lsu.queue",
    "code.cold",
    "product.delay",
    None,
    "product.wait",
    "product.wide",
    "tma.gather",
    "beside.lds",
    "operands",
    "code.near",
    "code.far",
    "copy.line",
    "atomic.latency",
    "issue",
)
(
    PRODUCT_TAIL,
    PRODUCT_DEPTH,
    TRY_WAIT,
    ARRIVE,
    WAKE,
    BAR_SYNC,
    BAR_ARRIVAL,
    TMA_ISSUE,
    TMA_INTERVAL,
    MMA_ISSUE,
    MMA_TAIL,
    TMEM_RATE,
    TMEM_LATENCY,
    CTA_GAP,
    L1_LATENCY,
    STORE_CYCLE,
    CLUSTER_BARRIER,
    COMMIT,
    BRANCH,
    REMOTE,
    LSU_QUEUE,
    COLD,
    PRODUCT_DELAY,
    SM_BYTE,
    PRODUCT_WAITED,
    PRODUCT_WIDE,
    GATHER_INTERVAL,
    LDS_BESIDE,
    OPERANDS,
    JUMP_NEAR,
    JUMP_FAR,
    CP_LINE,
    ATOMIC_LATENCY,
    ISSUE_CYCLES,
) = range(len(PARAMETERS))
# Events (trace.py), by their kind; ARRIVE and COMMIT are parameters.
(
    INIT,
    ARRIVAL,
    WAIT,
    LOAD,
    BULK_STORE,
    BULK_COMMIT,
    BULK_WAIT,
    BAR,
    CP_ASYNC,
    CP_COMMIT,
    CP_WAIT,
    CP_ARRIVE,
    MMA,
    MMA_COMMIT,
    CLUSTER_ARRIVE,
    CLUSTER_WAIT,
    GATHER,
) = range(17)
# Columns of an mbarrier, with the causes of 16 phases; its times are the latest arrival and the ends of 16 phases.
B_PENDING, B_EXPECTED, B_BYTES, B_PHASES, B_CAUSE, B_CAUSES = range(6)
B_COLUMNS, B_TIMES = 21, 17
LOG_ROWS, N_BARRIERS, N_ENDING, N_INSTANCES, N_WARPS, N_GROUPS, LOG_ROOM, LATER_ROWS = range(8)  # places in State.sizes
LOG_COLUMNS = 6
PIPES, ISSUE_SLOT = 17, 16  # pipes of a scheduler; the last is the issue slot
ENGINES = 11  # engines of a multiprocessor
NEAR, FAR = 96, 480  # instructions that the measured jumps skipped
RING = 64  # products of a warpgroup
# Columns of the machine instructions (costs.py): whole numbers, and others.
KIND, PIPE_OF, STALL, SETS, HOLDS, WAITS, TENSOR, QUIET = range(8)  # QUIET: affects only its warp and pipe
INTERVAL, LATENCY, UNITS, EXTRA, BESIDE, COMPUTES, PORT_CYCLES, LSU_CYCLES = range(8)
LATER = PORT_CYCLES  # for loads: the share that fetches from lines already requested from device memory
FIRST = LATENCY  # for loads: the first of the instructions that ptxas made from one, as in an unrolled loop
# Engines of a multiprocessor.
(
    TENSOR_FREE,
    PORT_FREE,
    PORT_SHARE,
    LSU_FREE,
    L2_FREE,
    DEVICE_FREE,
    WRITE_FREE,
    TMA_FREE,
    TM_FREE,
    MMA_LAST,
    LAST_LOAD,
) = range(11)
ANY = -2  # State.i_next: whichever instance has not begun
# Tags of warps that wait for something whose time is unknown.
ON_BARRIER, ON_PRODUCTS, ON_CLUSTER, ON_NAMED = 1_000_000_000, 2_000_000_000, 3_000_000_000, 4_000_000_000


class State(NamedTuple):
    """All arrays that the replay reads and changes."""

    ints: np.ndarray  # machine instructions, eight columns each, as above
    values: np.ndarray
    fetched: np.ndarray  # time when their code was cached, or -1
    issued: np.ndarray
    asked: np.ndarray  # by load (FIRST) and warp: if below the share of such loads that fetch, the next one fetches
    later: np.ndarray  # ... and the sum of LATER of those that fetched: where it reaches 1, the next line is on its way
    stalls: np.ndarray  # cycles by instruction and reason
    s_ins: np.ndarray  # paths: machine instruction; first event, counted from the warp's first, or -1; number of events
    s_ev: np.ndarray
    s_cnt: np.ndarray
    e_kind: np.ndarray  # events
    e_a: np.ndarray
    e_b: np.ndarray
    e_c: np.ndarray
    w_pos: np.ndarray  # warps
    w_end: np.ndarray
    w_event: np.ndarray
    w_sm: np.ndarray
    w_sched: np.ndarray
    w_inst: np.ndarray
    w_group: np.ndarray
    w_alone: np.ndarray  # whether the warp is alone on its scheduler and the kernel has no products
    w_time: np.ndarray
    w_since: np.ndarray
    w_tag: np.ndarray
    w_count: np.ndarray  # products, their groups, groups of cp.async, of bulk copies, arrivals at the cluster's barrier
    w_last: np.ndarray  # cp.async, bulk written, bulk read, at a named barrier since, loads there
    board: np.ndarray  # times when each of 8 scoreboards is released
    w_groups: np.ndarray  # 32 of products, as numbers
    w_ends: np.ndarray  # 32 of cp.async, 16 of bulk written, 16 of bulk read
    i_first: np.ndarray  # instances: warps, the one that follows (-1: none, or ANY), warps left
    i_after: np.ndarray
    i_next: np.ndarray
    i_left: np.ndarray
    i_start: np.ndarray
    i_end: np.ndarray
    c_count: np.ndarray  # the cluster's barrier: arrived, turns
    c_time: np.ndarray  # latest, 8 turns
    b_count: np.ndarray  # mbarriers: pending, expected, bytes, phases done, last cause (warp and position), 16 causes
    b_time: np.ndarray  # latest, 16 completions
    named: np.ndarray  # 256 of each instance: arrived, latest
    g_count: np.ndarray  # products of a warpgroup that have arrived, RING of each
    g_done: np.ndarray
    g_begin: np.ndarray
    g_made: np.ndarray  # products that have begun
    g_asked: np.ndarray  # products that all four warps have issued
    g_at: np.ndarray  # ... when, RING of each
    g_pos: np.ndarray  # ... and where
    g_home: np.ndarray  # multiprocessor and instance of each
    g_warp: np.ndarray  # the warp that issued last
    turn: np.ndarray  # per multiprocessor: the warpgroup whose product began last
    queued: np.ndarray  # ... and the cycles of waiting products
    engines: np.ndarray  # eleven per multiprocessor
    pipes: np.ndarray  # 17 per scheduler: free at; the last is the issue slot
    memory: np.ndarray  # tensors: cycles per byte, latencies of loads and of TMA, L2_FREE or DEVICE_FREE
    p: np.ndarray
    log: np.ndarray
    sizes: (
        np.ndarray
    )  # rows of the log, mbarriers per instance, instances that must end, lengths of these arrays, LATER_ROWS


def filled(size: int, value: float, dtype: type = np.float64) -> np.ndarray:
    """Like np.full, but five times as fast for small arrays."""
    out: np.ndarray = np.empty(size, dtype)
    out.fill(value)
    return out


def state(ints, values, s_ins, s_ev, s_cnt, events, rows, spans, nexts, begins, groups: int, barriers: int, sms: int,
          memory, p, log: int, ending: int) -> State:  # fmt: skip
    """Builds the state. rows: one per warp, in the order of State; spans: the warps of each instance; nexts: the
    successor of each instance; begins: their start times, or -1; log: rows of the log;
    ending: instances that must end, all or those with a successor."""
    n, warps, instances = len(ints), len(rows), len(spans)

    def whole(size: int, value: int = 0) -> np.ndarray:
        return filled(size, value, np.int64)

    b_count = np.zeros((instances * barriers, B_COLUMNS), np.int64)
    b_count[:, :B_BYTES], b_count[:, B_CAUSE:] = 1, -1
    table = events.T.astype(np.int64, "C")
    return State._make((
        ints.ravel(), values.ravel(), filled(n, -1.0), whole(n), np.zeros(n * warps), np.zeros(n * warps),
        np.zeros(n * REASON_COUNT), s_ins, s_ev, s_cnt, *table,
        *rows.T.astype(np.int64, "C"), filled(warps, INF), filled(warps, -1.0),
        whole(warps, -1), whole(5 * warps), np.zeros(5 * warps), np.zeros(8 * warps), whole(32 * warps),
        np.zeros(64 * warps), *spans.T.astype(np.int64, "C"), nexts.astype(np.int64),
        spans[:, 1] - spans[:, 0], begins.astype(np.float64), filled(instances, -1.0), whole(2 * instances),
        np.zeros(9 * instances), b_count.ravel(), np.zeros(B_TIMES * instances * barriers), np.zeros(512 * instances),
        whole(groups * RING), np.zeros(groups * RING), np.zeros(groups * RING), whole(groups), whole(groups),
        np.zeros(groups * RING), whole(groups * RING), whole(2 * groups), whole(groups), whole(sms), np.zeros(sms),
        np.zeros(ENGINES * sms),
        np.zeros(PIPES * 4 * sms), memory.ravel(), p, np.empty(LOG_COLUMNS * log),
        np.array([0, barriers, ending, instances, warps, groups, log, memory.size // 2]),
    ))  # fmt: skip
