"""The replay: machine instructions of resident warps on the schedulers, pipes and engines of a multiprocessor.

Time is in cycles. Warps issue in order, one instruction per scheduler and cycle; an instruction waits for its code, for
the scoreboards that ptxas named, and for its pipe. Engines (tensor core, shared memory, TMA, the way to L2) are queues:
each operation takes its slot and completes after a latency. mbarriers count arrivals and bytes as the program set
them up. The warp with the earliest time goes first, so everything that another warp may have to wait for is known when
it asks.

Numba compiles it as one function over arrays of one dimension: parts in functions of their own, arrays of two
dimensions or a tuple of arrays take two to three times as long to compile.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

INF = 1e18
# Kinds of machine instructions.
PLAIN, SHARED, READ, WRITE, PRODUCT, PRODUCT_WAIT, TENSOR_READ, TENSOR_WRITE, TAKEN, MEMBAR = range(10)
# Reasons to wait.
REASONS = ("registers", "pipe", "issue", "barrier", "products", "copies", "bar.sync", "shared memory", "code")
DEPENDS, PIPE, ISSUE, BARRIER, PRODUCTS, COPIES, NAMED, PORT, CODE = range(9)
REASON_COUNT = len(REASONS)
# Entries of the log beside waits.
LOG_PRODUCT, LOG_COPY = 20, 21
# Parameters, by their place in the array.
NAMES = (
    "product_tail",
    "product_depth",
    "try_wait",
    "arrive",
    "wake",
    "bar_sync",
    "bar_arrival",
    "tma_issue",
    "tma_interval",
    "mma_issue",
    "mma_tail",
    "tmem_rate",
    "tmem_latency",
    "cta_gap",
    "tma_port",
    "l1_latency",
    "store_cycle",
    "cluster_barrier",
    "commit",
    "branch",
    "remote",
    "lsu_queue",
    "cold",
    "fma_delay",
    "sm_byte",
    "product_wait",
    "product_wide",
    "gather_interval",
    "lds_beside",
    "operands",
    "jump_near",
    "jump_far",
    "cp_line",
    "load_line",
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
    TMA_PORT,
    L1_LATENCY,
    STORE_CYCLE,
    CLUSTER_BARRIER,
    COMMIT,
    BRANCH,
    REMOTE,
    LSU_QUEUE,
    COLD,
    FMA_DELAY,
    SM_BYTE,
    PRODUCT_WAITED,
    PRODUCT_WIDE,
    GATHER_INTERVAL,
    LDS_BESIDE,
    OPERANDS,
    JUMP_NEAR,
    JUMP_FAR,
    CP_LINE,
    LOAD_LINE,
) = range(len(NAMES))
P = {name: i for i, name in enumerate(NAMES)}
NEAR, FAR = 96, 480  # instructions that the measured jumps went over
RING = 64  # products of a warpgroup
# Columns of the machine instructions (clock/costs.py): whole numbers, and others.
KIND, PIPE_OF, STALL, SETS, HOLDS, WAITS, TENSOR = range(7)
INTERVAL, LATENCY, UNITS, EXTRA, BESIDE, HEAVY, PORT_CYCLES, LINES = range(8)
# Of a multiprocessor.
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
# What is added up: the pipes first.
BUSY_PORT, BUSY_MEMORY, BUSY_WRITE, BUSY_TENSOR, BUSY_TMEM, BUSY_ISSUE = 16, 17, 18, 19, 20, 31
# Tags of warps that wait for something without a time.
ON_BARRIER, ON_PRODUCTS, ON_CLUSTER, ON_NAMED = 1_000_000_000, 2_000_000_000, 3_000_000_000, 4_000_000_000


class State(NamedTuple):
    """What a replay reads and changes; the arguments of `simulate`."""

    kind: np.ndarray  # machine instructions, by the columns above
    pipe: np.ndarray
    stall: np.ndarray
    sets: np.ndarray
    holds: np.ndarray
    waits: np.ndarray
    tensor: np.ndarray
    interval: np.ndarray
    latency: np.ndarray
    units: np.ndarray
    extra: np.ndarray
    beside: np.ndarray
    heavy: np.ndarray
    port: np.ndarray
    lines: np.ndarray
    fetched: np.ndarray  # when their code is there, or -1
    issued: np.ndarray
    asked: np.ndarray  # bytes that loads have still to fetch
    stalls: np.ndarray  # reasons of each, one after the other
    s_ins: np.ndarray  # streams: machine instruction, first event, events
    s_ev: np.ndarray
    s_cnt: np.ndarray
    e_kind: np.ndarray  # events
    e_a: np.ndarray
    e_b: np.ndarray
    e_c: np.ndarray
    w_pos: np.ndarray  # warps
    w_end: np.ndarray
    w_sm: np.ndarray
    w_sched: np.ndarray
    w_inst: np.ndarray
    w_group: np.ndarray
    w_time: np.ndarray
    w_since: np.ndarray
    w_tag: np.ndarray
    w_count: np.ndarray  # products, their groups, groups of cp.async, of bulk copies, arrivals at the cluster's barrier
    w_last: np.ndarray  # cp.async, bulk written, bulk read, at a named barrier since, loads there
    board: np.ndarray  # when each of 8 scoreboards is down again
    w_groups: np.ndarray  # 32 of products, as numbers
    w_ends: np.ndarray  # 32 of cp.async, 16 of bulk written, 16 of bulk read
    i_first: np.ndarray  # instances: warps, the one that follows, warps left
    i_after: np.ndarray
    i_next: np.ndarray
    i_left: np.ndarray
    i_start: np.ndarray
    i_end: np.ndarray
    c_count: np.ndarray  # the cluster's barrier: arrived, turns
    c_time: np.ndarray  # latest, 8 turns
    b_count: np.ndarray  # mbarriers: pending, expected, bytes, phases done, last cause, 16 causes
    b_time: np.ndarray  # latest, 16 completions
    named: np.ndarray  # 256 of each instance: arrived, latest
    g_count: np.ndarray  # products of a warpgroup that have arrived, RING of each
    g_done: np.ndarray
    g_begin: np.ndarray
    g_made: np.ndarray
    engines: np.ndarray  # eleven of a multiprocessor
    pipes: np.ndarray  # 17 of a scheduler: free at; the last is the issue slot
    memory: np.ndarray  # tensors: cycles a byte, latencies of loads, of TMA, of a queue, L2_FREE or DEVICE_FREE
    p: np.ndarray
    busy: np.ndarray
    log: np.ndarray
    count: np.ndarray  # rows of the log, mbarriers of an instance


def state(ints, values, s_ins, s_ev, s_cnt, events, rows, spans, nexts, begins, groups: int, barriers: int, sms: int,
          memory, p, log: int) -> State:  # fmt: skip
    """rows: of each warp, in the order of State; spans: the warps of each instance; nexts: the instance that follows
    each; begins: their times, or -1; log: rows that are kept."""
    n, warps, instances = len(ints), len(rows), len(spans)

    def whole(size: int) -> np.ndarray:
        return np.zeros(size, np.int64)

    b_count = np.zeros((instances * barriers, 21), np.int64)
    b_count[:, :2], b_count[:, 4:] = 1, -1
    table = np.ascontiguousarray(events.T.astype(np.int64))
    return State(
        *np.ascontiguousarray(ints.T), *np.ascontiguousarray(values.T), np.full(n, -1.0), whole(n), np.zeros(n),
        np.zeros(n * REASON_COUNT), s_ins.astype(np.int32), s_ev.astype(np.int32), s_cnt.astype(np.int32), *table,
        *np.ascontiguousarray(rows.T.astype(np.int64)), np.full(warps, INF), np.full(warps, -1.0),
        np.full(warps, -1), whole(5 * warps), np.zeros(5 * warps), np.zeros(8 * warps), whole(32 * warps),
        np.zeros(64 * warps), *np.ascontiguousarray(spans.T.astype(np.int64)), nexts.astype(np.int64),
        spans[:, 1] - spans[:, 0], begins.astype(np.float64), np.full(instances, -1.0), whole(2 * instances),
        np.zeros(9 * instances), b_count.ravel(), np.zeros(17 * instances * barriers), np.zeros(512 * instances),
        whole(groups * RING), np.zeros(groups * RING), np.zeros(groups * RING), whole(groups), np.zeros(11 * sms),
        np.zeros(17 * 4 * sms), memory.ravel(), p, np.zeros(32), np.empty(6 * log), np.array([0, barriers]),
    )  # fmt: skip


def _simulate(
    kind, pipe, stall, sets, holds, waits, tensor, interval, latency, units, extra, beside, heavy, port, lines,
    fetched, issued, asked, stalls, s_ins, s_ev, s_cnt, e_kind, e_a, e_b, e_c, w_pos, w_end, w_sm, w_sched, w_inst,
    w_group, w_time, w_since, w_tag, w_count, w_last, board, w_groups, w_ends, i_first, i_after, i_next, i_left,
    i_start, i_end, c_count, c_time, b_count, b_time, named, g_count, g_done, g_begin, g_made, engines, pipes, memory,
    p, busy, log, count,
):  # fmt: skip
    """-> 0, or 1 if all warps that are left wait for each other."""
    n_inst = len(i_first)
    nb = count[1]
    room = len(log) // 6
    n_log = 0
    active = np.zeros(len(w_pos), np.int64)
    n_active = 0
    finished = 0
    for inst in range(n_inst):
        if i_start[inst] >= 0:
            for w in range(i_first[inst], i_after[inst]):
                w_time[w] = i_start[inst]
                active[n_active] = w
                n_active += 1
    while finished < n_inst:
        w = -1
        t = INF
        second = INF
        for k in range(n_active):
            x = w_time[active[k]]
            if x < t:
                second = t
                t = x
                w = active[k]
            elif x < second:
                second = x
        if w < 0:
            count[0] = n_log
            return 1
        inst = w_inst[w]
        sm = w_sm[w]
        pos = w_pos[w]
        en = 11 * sm  # of its engines
        if pos >= w_end[w]:
            w_time[w] = INF
            for k in range(n_active):
                if active[k] == w:
                    n_active -= 1
                    active[k] = active[n_active]
                    break
            i_left[inst] -= 1
            if i_left[inst] == 0:
                i_end[inst] = max(t, engines[en + WRITE_FREE])
                finished += 1
                n = i_next[inst]
                if n >= 0:
                    i_start[n] = t + p[CTA_GAP]
                    for v in range(i_first[n], i_after[n]):
                        w_time[v] = i_start[n]
                        active[n_active] = v
                        n_active += 1
            continue
        i = s_ins[pos]
        k = kind[i]
        # ---- code, scoreboards, pipe, slot ----
        x = fetched[i]
        if x < 0:  # nobody has run it: what follows comes fast, what a jump leads to does not
            x = t + p[COLD]
            over = abs(i - s_ins[pos - 1] - 1) if pos > 0 else FAR
            if over >= NEAR:
                x = t + p[JUMP_NEAR] + (p[JUMP_FAR] - p[JUMP_NEAR]) * min(1.0, (over - NEAR) / (FAR - NEAR))
            elif over > 0:
                x = t + p[JUMP_NEAR] * over / NEAR
            fetched[i] = x
        te = t
        reason = 0
        if x > te:
            te = x
            reason = CODE
        mask = waits[i]
        if mask != 0:
            for r in range(6):
                if mask >> r & 1:
                    x = board[8 * w + r]
                    if x > te:
                        te = x
                        reason = DEPENDS
        slot = 17 * w_sched[w]
        x = pipes[slot + pipe[i]]
        if x > te:
            te = x
            reason = PIPE
        x = pipes[slot + 16]
        if x > te:
            te = x
            reason = ISSUE
        if k == SHARED or k == READ:
            x = engines[en + LSU_FREE] - p[LSU_QUEUE]
            if x > te:
                te = x
                reason = PORT
        if te > t:
            stalls[REASON_COUNT * i + reason] += te - t
            if te > second:
                w_time[w] = te
                continue
            t = te
        # ---- waits that need more than time ----
        e0 = s_ev[pos]
        e1 = e0
        if e0 >= 0:
            e1 = e0 + s_cnt[pos]
        te = t
        blocked = -1
        why = BARRIER
        g = w_group[w]
        if k == PRODUCT:  # room in the queue?
            n = w_count[5 * w] - np.int64(p[PRODUCT_DEPTH])
            if n >= 0:
                if n < g_made[g]:
                    te = max(te, g_begin[g * RING + n % RING])
                else:
                    blocked = ON_PRODUCTS + g
                why = PRODUCTS
        elif k == PRODUCT_WAIT:
            n = w_count[5 * w + 1] - 1 - np.int64(extra[i])
            if n >= 0:
                n = w_groups[32 * w + n % 32]
                if n < g_made[g]:
                    te = max(te, g_done[g * RING + n % RING])
                else:
                    blocked = ON_PRODUCTS + g
                why = PRODUCTS
        for e in range(e0, e1):
            ek = e_kind[e]
            if ek == 2:
                b = inst * nb + e_a[e]
                n = e_b[e]
                if n >= 0:
                    if n < b_count[21 * b + 3]:
                        x = b_time[17 * b + 1 + n % 16]
                        if x > te:
                            te = x + p[WAKE]
                    else:
                        blocked = ON_BARRIER + b
                why = BARRIER
            elif ek == 10:
                n = w_count[5 * w + 2] - 1 - e_a[e]
                if n >= 0:
                    te = max(te, w_ends[64 * w + n % 32])
                why = COPIES
            elif ek == 6:
                n = w_count[5 * w + 3] - 1 - e_a[e]
                if n >= 0:
                    te = max(te, w_ends[64 * w + 32 + 16 * e_b[e] + n % 16])
                why = COPIES
            elif ek == 15:
                n = w_count[5 * w + 4] - 1
                if n >= 0:
                    if n < c_count[2 * inst + 1]:
                        te = max(te, c_time[9 * inst + 1 + n % 8])
                    else:
                        blocked = ON_CLUSTER + inst
                why = NAMED
        if blocked >= 0 or te > t:
            if w_since[w] < 0:
                w_since[w] = t
            w_tag[w] = blocked
            w_time[w] = INF if blocked >= 0 else te
            continue
        if w_since[w] >= 0:
            x = t - w_since[w]
            stalls[REASON_COUNT * i + why] += x
            if n_log < room and x > 4:
                cause = -1
                for e in range(e0, e1):
                    if e_kind[e] == 2 and e_b[e] >= 0:
                        cause = b_count[21 * (inst * nb + e_a[e]) + 5 + e_b[e] % 16]
                n = 6 * n_log
                log[n], log[n + 1], log[n + 2], log[n + 3], log[n + 4], log[n + 5] = w, pos, w_since[w], t, why, cause
                n_log += 1
            w_since[w] = -1.0
        # ---- issue ----
        hold = interval[i]
        busy[pipe[i]] += hold
        busy[BUSY_ISSUE] += 1
        if engines[en + TENSOR_FREE] > t:  # a product under way takes register ports
            hold *= beside[i]
            if heavy[i] > 0:
                engines[en + TENSOR_FREE] += p[FMA_DELAY]
        pipes[slot + pipe[i]] = t + hold
        pipes[slot + 16] = t + 1
        issued[i] += 1
        done = t + latency[i]
        read = t
        after = t + stall[i]
        u = units[i]
        if k == SHARED:
            read = max(t, engines[en + LSU_FREE])
            engines[en + LSU_FREE] = read + u
            x = max(read, engines[en + PORT_FREE])
            busy[BUSY_PORT] += u
            share = engines[en + PORT_SHARE]
            if share > 0.0 and engines[en + TENSOR_FREE] > x:
                # Products come first: threads get what they leave, or wait for their end.
                y = u / max(1.0 - share, 0.028)
                if extra[i] > 0:
                    y *= p[LDS_BESIDE]
                u = min(y, engines[en + TENSOR_FREE] - x + u)
            engines[en + PORT_FREE] = x + u
            done = x + u + latency[i]
            w_last[5 * w + 4] = max(w_last[5 * w + 4], done)
        elif k == READ:
            read = max(t, engines[en + LSU_FREE]) + max(1.0, u / 128.0, lines[i] * p[LOAD_LINE])
            engines[en + LSU_FREE] = read
            done = t + p[L1_LATENCY]
            asked[i] += u  # where most lanes hit L1, every so many loads fetch a sector
            if asked[i] >= 31.9:
                u = asked[i]
                asked[i] = 0.0
                c = 5 * tensor[i]
                q = en + np.int64(memory[c + 4])
                x = max(t, engines[q]) + u * memory[c]
                engines[q] = x
                busy[BUSY_MEMORY] += u
                done = max(t + memory[c + 1] + u * p[SM_BYTE], x + memory[c + 3])
            w_last[5 * w + 4] = max(w_last[5 * w + 4], done)
        elif k == WRITE:
            read = max(t, engines[en + LSU_FREE]) + max(1.0, u / 128.0)
            engines[en + LSU_FREE] = read
            engines[en + WRITE_FREE] = max(t, engines[en + WRITE_FREE]) + u * p[STORE_CYCLE]
            busy[BUSY_WRITE] += u
        elif k == PRODUCT:
            n = w_count[5 * w]
            w_count[5 * w] = n + 1
            if extra[i] > 0:
                w_groups[32 * w + w_count[5 * w + 1] % 32] = n
                w_count[5 * w + 1] += 1
            r = g * RING + n % RING
            g_count[r] += 1
            if g_count[r] == 4:  # all warps of the warpgroup
                g_count[r] = 0
                x = max(t, engines[en + TENSOR_FREE])
                y = x + max(u, port[i])
                engines[en + TENSOR_FREE] = y
                engines[en + PORT_SHARE] = port[i] / max(u, port[i])
                busy[BUSY_PORT] += port[i]
                busy[BUSY_TENSOR] += u
                g_begin[r] = x
                g_done[r] = y + p[PRODUCT_TAIL]
                if u > 64.0:
                    g_done[r] += p[PRODUCT_WIDE]
                g_made[g] = n + 1
                if n_log < room:
                    n = 6 * n_log
                    log[n], log[n + 1], log[n + 2], log[n + 3], log[n + 4], log[n + 5] = w, pos, x, y, LOG_PRODUCT, -1
                    n_log += 1
                for v in range(i_first[inst], i_after[inst]):
                    if w_tag[v] == ON_PRODUCTS + g:
                        w_tag[v] = -1
                        w_time[v] = t
        elif k == TENSOR_READ or k == TENSOR_WRITE:
            x = max(t, engines[en + TM_FREE]) + u / p[TMEM_RATE]
            engines[en + TM_FREE] = x
            busy[BUSY_TMEM] += u / p[TMEM_RATE]
            done = x + p[TMEM_LATENCY]
        elif k == PRODUCT_WAIT:
            after = max(after, t + 1.0 + p[PRODUCT_WAITED])
        elif k == TAKEN:
            after = max(after, t + p[BRANCH])
        elif k == MEMBAR:  # waits for the loads of the warp
            done = max(t + interval[i], w_last[5 * w + 4])
            read = done
            after = done
        r = 8 * w + sets[i]
        board[r] = max(board[r], done)
        r = 8 * w + holds[i]
        board[r] = max(board[r], read + p[OPERANDS])
        w_pos[w] = pos + 1
        w_time[w] = after
        # ---- events ----
        for e in range(e0, e1):
            ek = e_kind[e]
            size = e_b[e]
            b = inst * nb + e_a[e]
            eff = -1.0
            if ek == 0:
                b_count[21 * b] = size
                b_count[21 * b + 1] = size
                b_count[21 * b + 2] = 0
                b_count[21 * b + 3] = 0
                b_time[17 * b] = 0.0
            elif ek == 1:
                b_count[21 * b] -= size
                b_count[21 * b + 2] += e_c[e]
                eff = t + p[ARRIVE]
            elif ek == 2:
                if sets[i] == 7:
                    w_time[w] = max(w_time[w], t + p[TRY_WAIT])
            elif ek == 3 or ek == 16:
                c = e_c[e]
                if c == -2:
                    eff = max(engines[en + LAST_LOAD], t + p[REMOTE])
                else:
                    gap = p[TMA_INTERVAL] if ek == 3 else p[GATHER_INTERVAL]
                    x = max(t + p[TMA_ISSUE], engines[en + TMA_FREE]) + gap
                    engines[en + TMA_FREE] = x
                    q = en + np.int64(memory[5 * c + 4])
                    y = max(x, engines[q]) + size * memory[5 * c]
                    engines[q] = y
                    busy[BUSY_MEMORY] += size
                    busy[BUSY_PORT] += size / 128.0 * p[TMA_PORT]
                    eff = max(x + memory[5 * c + 2] + size * p[SM_BYTE], y + memory[5 * c + 3])
                    engines[en + LAST_LOAD] = eff
                    if n_log < room:
                        n = 6 * n_log
                        log[n], log[n + 1], log[n + 2], log[n + 3], log[n + 4], log[n + 5] = (
                            w, pos, t, eff, LOG_COPY, size)  # fmt: skip
                        n_log += 1
                b_count[21 * b + 2] -= size
            elif ek == 4:
                x = t + p[TMA_ISSUE]
                y = max(x, engines[en + WRITE_FREE]) + size * p[STORE_CYCLE]
                engines[en + WRITE_FREE] = y
                busy[BUSY_WRITE] += size
                w_last[5 * w + 1] = max(w_last[5 * w + 1], y + 600.0)
                w_last[5 * w + 2] = max(w_last[5 * w + 2], x + size / 64.0 + 100.0)
            elif ek == 5:
                n = w_count[5 * w + 3] % 16
                w_ends[64 * w + 32 + n] = w_last[5 * w + 1]
                w_ends[64 * w + 48 + n] = w_last[5 * w + 2]
                w_count[5 * w + 3] += 1
            elif ek == 7:
                r = 2 * (inst * 256 + e_a[e])
                named[r] += 1
                named[r + 1] = max(named[r + 1], t)
                tag = ON_NAMED + r
                if e_c[e] > 0:
                    w_tag[w] = tag
                    w_last[5 * w + 3] = t
                    w_time[w] = INF
                if named[r] >= size:
                    x = named[r + 1] + p[BAR_SYNC] + p[BAR_ARRIVAL] * size
                    named[r] = 0
                    named[r + 1] = 0.0
                    for v in range(i_first[inst], i_after[inst]):
                        if w_tag[v] == tag:
                            w_tag[v] = -1
                            stalls[REASON_COUNT * s_ins[w_pos[v] - 1] + NAMED] += x - w_last[5 * v + 3]
                            w_time[v] = x
            elif ek == 8:
                y = max(1.0, size / 128.0)
                if size < 128 * e_c[e]:  # lines of which it takes a part
                    y = max(y, e_c[e] * p[CP_LINE])
                engines[en + LSU_FREE] = max(t, engines[en + LSU_FREE]) + y
                if size > 0:
                    c = 5 * e_a[e]
                    q = en + np.int64(memory[c + 4])
                    x = max(t, engines[q]) + size * memory[c]
                    engines[q] = x
                    busy[BUSY_MEMORY] += size
                    y = max(t + memory[c + 1] + size * p[SM_BYTE], x + memory[c + 3])
                    w_last[5 * w] = max(w_last[5 * w], y)
            elif ek == 9:
                w_ends[64 * w + w_count[5 * w + 2] % 32] = w_last[5 * w]
                w_count[5 * w + 2] += 1
                r = 8 * w + sets[i]
                board[r] = max(board[r], w_last[5 * w])
            elif ek == 11:
                b_count[21 * b] -= size
                eff = max(t, w_last[5 * w]) + p[ARRIVE]
            elif ek == 12:  # tcgen05.mma: rows, columns; a pair of CTAs, A in tensor memory
                pair = e_c[e] & 1
                x = e_b[e] / 2.0
                y = (32.0 * e_b[e] + (0.0 if e_c[e] & 2 else 32.0 * e_a[e])) / 128.0 / (1 + pair)
                if pair and e_a[e] <= 128:
                    x = x / 2.0
                took = max(x, y)
                begin = max(t + p[MMA_ISSUE], engines[en + TENSOR_FREE])
                if pair:
                    begin = max(begin, engines[11 * (sm ^ 1) + TENSOR_FREE])
                    engines[11 * (sm ^ 1) + TENSOR_FREE] = begin + took
                    engines[11 * (sm ^ 1) + PORT_SHARE] = y / took
                engines[en + TENSOR_FREE] = begin + took
                engines[en + PORT_SHARE] = y / took
                busy[BUSY_TENSOR] += x * (1 + pair)
                busy[BUSY_PORT] += y * (1 + pair)
                engines[en + MMA_LAST] = begin + took + p[MMA_TAIL] + 32.0 * pair + (0.0 if e_c[e] & 2 else 24.0)
                if n_log < room:
                    n = 6 * n_log
                    log[n], log[n + 1], log[n + 2], log[n + 3], log[n + 4], log[n + 5] = (
                        w, pos, begin, begin + took, LOG_PRODUCT, -1)  # fmt: skip
                    n_log += 1
            elif ek == 13:
                b_count[21 * b] -= 1
                eff = max(t + p[COMMIT], engines[en + MMA_LAST])
            elif ek == 14:
                w_count[5 * w + 4] += 1
                c_count[2 * inst] += 1
                c_time[9 * inst] = max(c_time[9 * inst], t)
                if c_count[2 * inst] == i_after[inst] - i_first[inst]:
                    c_time[9 * inst + 1 + c_count[2 * inst + 1] % 8] = c_time[9 * inst] + p[CLUSTER_BARRIER]
                    c_count[2 * inst + 1] += 1
                    c_count[2 * inst] = 0
                    c_time[9 * inst] = 0.0
                    for v in range(i_first[inst], i_after[inst]):
                        if w_tag[v] == ON_CLUSTER + inst:
                            w_tag[v] = -1
                            w_time[v] = t
            if eff < 0:
                continue
            # an mbarrier has changed
            if eff >= b_time[17 * b]:
                b_time[17 * b] = eff
                b_count[21 * b + 4] = pos
            if b_count[21 * b] == 0 and b_count[21 * b + 2] == 0:
                n = b_count[21 * b + 3]
                b_time[17 * b + 1 + n % 16] = b_time[17 * b]
                b_count[21 * b + 5 + n % 16] = b_count[21 * b + 4]
                b_count[21 * b + 3] = n + 1
                b_count[21 * b] = b_count[21 * b + 1]
                b_time[17 * b] = 0.0
                for v in range(i_first[inst], i_after[inst]):
                    if w_tag[v] == ON_BARRIER + b:
                        w_tag[v] = -1
                        w_time[v] = t
    count[0] = n_log
    return 0


@functools.cache
def compiled():
    """Compiled at the first use, kept on disk."""
    from numba import njit

    return njit(cache=True, nogil=True, error_model="numpy")(_simulate)
