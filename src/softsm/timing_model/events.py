"""Parts of a replay (replay.py): the effects of an instruction's events (trace.py) on barriers and engines."""

from __future__ import annotations

# isort: off
from softsm.timing_model.machine import (
    ARRIVAL, ARRIVE, BAR_ARRIVAL, BAR_SYNC, B_BYTES, B_CAUSE, B_CAUSES, B_COLUMNS, B_EXPECTED, B_PENDING, B_PHASES,
    B_TIMES, CLUSTER_BARRIER, COMMIT, CP_ARRIVE, CP_LINE, ENGINES, GATHER, GATHER_INTERVAL, HOLDS, INF, INIT,
    LAST_LOAD, LOAD, LSU_FREE, MMA_COMMIT, MMA_ISSUE, MMA_LAST, MMA_TAIL, NAMED, ON_BARRIER, ON_NAMED, OPERANDS,
    PORT_SHARE, REASON_COUNT, REMOTE, SETS, SM_BYTE, STORE_CYCLE, TENSOR_FREE, TMA_FREE, TMA_INTERVAL, TMA_ISSUE,
    UNITS, WRITE_FREE,
)  # fmt: skip

# isort: on
from softsm.timing_model.parts import part, wake

# ---- mbarriers -------------------------------------------------------------------------------------------------------


@part
def barrier_event(s, w, t, b, e, kind, landed, en):
    """Handles an arrival, or bytes that have `landed`. -> when it takes effect, or -1 if it cannot end a phase"""
    size = s.e_b[e]
    eff = -1.0
    at = B_COLUMNS * b
    if kind == INIT:
        s.b_count[at + B_PENDING] = s.b_count[at + B_EXPECTED] = size
        s.b_count[at + B_BYTES] = s.b_count[at + B_PHASES] = 0
        s.b_time[B_TIMES * b] = 0.0
    elif kind == ARRIVAL:
        s.b_count[at + B_PENDING] -= size
        s.b_count[at + B_BYTES] += s.e_c[e]
        eff = t + s.p[ARRIVE]
    elif kind == LOAD or kind == GATHER:
        s.b_count[at + B_BYTES] -= size
        eff = landed
    elif kind == CP_ARRIVE:
        s.b_count[at + B_PENDING] -= size
        eff = max(t, s.w_last[5 * w]) + s.p[ARRIVE]
    elif kind == MMA_COMMIT:
        s.b_count[at + B_PENDING] -= 1
        eff = max(t + s.p[COMMIT], s.engines[en + MMA_LAST])
    return eff


@part
def changed(s, w, t, pos, b, eff, first, after):
    """Ends a phase if it is complete. -> whether that wakes a warp"""
    at = B_COLUMNS * b
    woken = False
    if eff >= s.b_time[B_TIMES * b]:
        s.b_time[B_TIMES * b] = eff
        s.b_count[at + B_CAUSE] = w << 32 | pos
    if s.b_count[at + B_PENDING] == 0 and s.b_count[at + B_BYTES] == 0:
        n = s.b_count[at + B_PHASES]
        s.b_time[B_TIMES * b + 1 + n % 16] = s.b_time[B_TIMES * b]
        s.b_count[at + B_CAUSES + n % 16] = s.b_count[at + B_CAUSE]
        s.b_count[at + B_PHASES] = n + 1
        s.b_count[at + B_PENDING] = s.b_count[at + B_EXPECTED]
        s.b_time[B_TIMES * b] = 0.0
        woken = wake(s, ON_BARRIER + b, t, first, after)
    return woken


# ---- copies ----------------------------------------------------------------------------------------------------------


@part
def load(s, t, e, kind, en):
    """Issues a TMA load; tensor -2 is the copy into a peer of a load already counted. -> when its bytes arrive"""
    size, c = s.e_b[e], s.e_c[e]
    if c == -2:
        landed = max(s.engines[en + LAST_LOAD], t + s.p[REMOTE])
    else:
        gap = s.p[TMA_INTERVAL] if kind == LOAD else s.p[GATHER_INTERVAL]
        x = max(t + s.p[TMA_ISSUE], s.engines[en + TMA_FREE]) + gap
        s.engines[en + TMA_FREE] = x
        q = en + int(s.memory[4 * c + 3])
        half = 0.5 * s.memory[4 * c + 2]
        y = max(x + half, s.engines[q]) + size * s.memory[4 * c]
        s.engines[q] = y
        landed = max(x + s.memory[4 * c + 2] + size * s.p[SM_BYTE], y + half)
        s.engines[en + LAST_LOAD] = landed
    return landed


@part
def store(s, w, t, size, en):
    """Issues a bulk store."""
    x = t + s.p[TMA_ISSUE]
    y = max(x, s.engines[en + WRITE_FREE]) + size * s.p[STORE_CYCLE]
    s.engines[en + WRITE_FREE] = y
    s.w_last[5 * w + 1] = max(s.w_last[5 * w + 1], y + 600.0)
    s.w_last[5 * w + 2] = max(s.w_last[5 * w + 2], x + size / 64.0 + 100.0)


@part
def commit_bulk(s, w):
    n = s.w_count[5 * w + 3] % 16
    s.w_ends[64 * w + 32 + n] = s.w_last[5 * w + 1]
    s.w_ends[64 * w + 48 + n] = s.w_last[5 * w + 2]
    s.w_count[5 * w + 3] += 1


@part
def copy_lanes(s, w, t, m, e, en):
    """cp.async"""
    size = s.e_b[e]
    y = max(1.0, size / 128.0)
    if size < 128 * s.e_c[e]:  # lines that it copies in part, or fills with zeros
        y = max(y, s.e_c[e] * s.p[CP_LINE])
    read = max(t, s.engines[en + LSU_FREE]) + y + s.values[m + UNITS]
    s.engines[en + LSU_FREE] = read
    r = 8 * w + s.ints[m + HOLDS]
    s.board[r] = max(s.board[r], read + s.p[OPERANDS])
    # Zeros, too, queue behind copies in flight (docs/timing.md, convolutions).
    c = 4 * s.e_a[e]
    q = en + int(s.memory[c + 3])
    half = 0.5 * s.memory[c + 1]
    x = max(t + half, s.engines[q]) + size * s.memory[c]
    s.engines[q] = x
    y = max(t + s.memory[c + 1] + size * s.p[SM_BYTE], x + half)
    s.w_last[5 * w] = max(s.w_last[5 * w], y)


@part
def commit_copies(s, w, m):
    """cp.async.commit_group"""
    s.w_ends[64 * w + s.w_count[5 * w + 2] % 32] = s.w_last[5 * w]
    s.w_count[5 * w + 2] += 1
    r = 8 * w + s.ints[m + SETS]
    s.board[r] = max(s.board[r], s.w_last[5 * w])


# ---- other barriers, tcgen05.mma -------------------------------------------------------------------------------------


@part
def reach_named(s, w, t, inst, e):
    """Handles bar.sync and bar.arrive. -> whether warps go on"""
    size = s.e_b[e]
    r = 2 * (inst * 256 + s.e_a[e])
    s.named[r] += 1
    s.named[r + 1] = max(s.named[r + 1], t)
    tag = ON_NAMED + r
    woken = False
    if s.e_c[e] > 0:
        s.w_tag[w] = tag
        s.w_last[5 * w + 3] = t
        s.w_time[w] = INF
    if s.named[r] >= size:
        x = s.named[r + 1] + s.p[BAR_SYNC] + s.p[BAR_ARRIVAL] * size
        s.named[r] = 0
        s.named[r + 1] = 0.0
        for v in range(s.i_first[inst], s.i_after[inst]):
            if s.w_tag[v] == tag:
                s.w_tag[v] = -1
                s.stalls[REASON_COUNT * s.s_ins[s.w_pos[v] - 1] + NAMED] += x - s.w_last[5 * v + 3]
                s.w_time[v] = x
                woken = True
    return woken


@part
def arrive_cluster(s, t, inst, warps):
    """Handles barrier.cluster.arrive. -> whether all warps have arrived"""
    s.c_count[2 * inst] += 1
    s.c_time[9 * inst] = max(s.c_time[9 * inst], t)
    if s.c_count[2 * inst] < warps:
        return False
    s.c_time[9 * inst + 1 + s.c_count[2 * inst + 1] % 8] = s.c_time[9 * inst] + s.p[CLUSTER_BARRIER]
    s.c_count[2 * inst + 1] += 1
    s.c_count[2 * inst] = 0
    s.c_time[9 * inst] = 0.0
    return True


@part
def multiply(s, t, e, sm):
    """Runs a tcgen05.mma: rows, columns; bits for a pair of CTAs and for A in tensor memory. -> its begin and end"""
    en = ENGINES * sm
    pair = s.e_c[e] & 1
    x = s.e_b[e] / 2.0
    y = (32.0 * s.e_b[e] + (0.0 if s.e_c[e] & 2 else 32.0 * s.e_a[e])) / 128.0 / (1 + pair)
    if pair and s.e_a[e] <= 128:
        x = x / 2.0
    took = max(x, y)
    begin = max(t + s.p[MMA_ISSUE], s.engines[en + TENSOR_FREE])
    if pair:
        other = ENGINES * (sm ^ 1)
        begin = max(begin, s.engines[other + TENSOR_FREE])
        s.engines[other + TENSOR_FREE] = begin + took
        s.engines[other + PORT_SHARE] = y / took
    s.engines[en + TENSOR_FREE] = begin + took
    s.engines[en + PORT_SHARE] = y / took
    s.engines[en + MMA_LAST] = begin + took + s.p[MMA_TAIL] + 32.0 * pair + (0.0 if s.e_c[e] & 2 else 24.0)
    return begin, begin + took
