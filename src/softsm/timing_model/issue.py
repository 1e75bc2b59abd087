"""Parts of a replay (replay.py): what an instruction waits for, the slots it occupies, when its results are ready."""

from __future__ import annotations

# isort: off
from softsm.timing_model.machine import (
    ATOMIC, ATOMIC_LATENCY,
    BARRIER, BESIDE, BRANCH, BULK_WAIT, B_CAUSES, B_COLUMNS, B_PHASES, B_TIMES, CLUSTER_WAIT, CODE, COMPUTES, COPIES,
    CP_WAIT, DEPENDS, ENGINES, EXTRA, FIRST, HOLDS, INF, INTERVAL, ISSUE, ISSUE_SLOT, KIND, L1_LATENCY, LATENCY,
    ISSUE_CYCLES, LATER, LATER_ROWS, LDS_BESIDE,
    LOW, LSU_CYCLES, LSU_FREE, LSU_QUEUE, MEMBAR, NAMED, N_GROUPS, N_WARPS, ON_BARRIER, ON_CLUSTER, ON_PRODUCTS,
    OPERANDS, PIPE, PIPE_OF, PORT, PORT_CYCLES, PORT_FREE, PORT_SHARE, PRODUCT, PRODUCTS, PRODUCT_DELAY,
    PRODUCT_DEPTH, PRODUCT_TAIL, PRODUCT_WAIT, PRODUCT_WAITED, PRODUCT_WIDE, QUIET, READ, REASON_COUNT, RING, SETS,
    SHARED, SM_BYTE, STALL, STORE_CYCLE, TAKEN, TENSOR, TENSOR_FREE, TENSOR_READ, TENSOR_WRITE, TMEM_LATENCY,
    TMEM_RATE, TM_FREE, UNITS, WAIT, WAITS, WAKE, WRITE, WRITE_FREE,
)  # fmt: skip

# isort: on
from softsm.timing_model.parts import fetch, held, note, part


@part
def run_alone(s, w, t, pos, end, slot):
    """Runs a warp that is alone on its scheduler through instructions that no other warp can observe; the order
    relative to other warps does not matter. -> where the warp goes on, and when"""
    while pos < end and s.s_ev[pos] < 0:
        i = s.s_ins[pos] & LOW
        m = 8 * i
        te = s.fetched[i]
        if te < 0.0 or s.ints[m + QUIET] == 0:
            break
        reason = CODE
        if te < t:
            te = t
        mask = s.ints[m + WAITS]
        if mask != 0:
            x = held(s, 8 * w, mask)
            if x > te:
                te = x
                reason = DEPENDS
        k = slot + (s.ints[m + PIPE_OF] & LOW)
        x = s.pipes[k]
        if x > te:
            te = x
            reason = PIPE
        x = s.pipes[slot + ISSUE_SLOT]
        if x > te:
            te = x
            reason = ISSUE
        if te > t:
            s.stalls[REASON_COUNT * i + (reason & 15)] += te - t
        s.pipes[k] = te + s.values[m + INTERVAL]
        s.pipes[slot + ISSUE_SLOT] = te + s.p[ISSUE_CYCLES]
        s.issued[i] += 1
        r = 8 * w + (s.ints[m + SETS] & 7)
        s.board[r] = max(s.board[r], te + s.values[m + LATENCY])
        r = 8 * w + (s.ints[m + HOLDS] & 7)
        s.board[r] = max(s.board[r], te + s.p[OPERANDS])
        t = te + s.ints[m + STALL]
        if s.ints[m + KIND] == TAKEN:
            t = max(t, te + s.p[BRANCH])
        pos += 1
    return pos, t


@part
def stalled(s, w, t, pos, i, k, slot, en):
    """Checks an instruction's code, scoreboards, pipe and issue slot. -> when it can issue"""
    m = 8 * i
    x = s.fetched[i]
    if x < 0.0:
        x = t + fetch(s, s.s_ins[pos - 1] if pos > 0 else -1, i)
        s.fetched[i] = x
    te = t
    reason = 0
    if x > te:
        te = x
        reason = CODE
    mask = s.ints[m + WAITS]
    if mask != 0:
        x = held(s, 8 * w, mask)
        if x > te:
            te = x
            reason = DEPENDS
    x = s.pipes[slot + (s.ints[m + PIPE_OF] & LOW)]
    if x > te:
        te = x
        reason = PIPE
    x = s.pipes[slot + ISSUE_SLOT]
    if x > te:
        te = x
        reason = ISSUE
    if k == SHARED or k == READ or k == ATOMIC:
        x = s.engines[en + LSU_FREE] - s.p[LSU_QUEUE]
        if x > te:
            te = x
            reason = PORT
    if te > t:
        s.stalls[REASON_COUNT * i + (reason & 15)] += te - t
    return te


@part
def awaited(s, w, t, k, m, e0, e1, inst, nb, g):
    """Checks waits for products, mbarriers, groups of copies and the cluster's barrier, whose end may be unknown.
    -> when they end, the tag of what has no time yet or -1, and the reason"""
    te = t
    blocked = -1
    why = BARRIER
    if k == PRODUCT:  # room in the queue?
        n = s.w_count[5 * w] - int(s.p[PRODUCT_DEPTH])
        if n >= 0:
            if n < s.g_made[g]:
                te = max(te, s.g_begin[g * RING + n % RING])
            else:
                blocked = ON_PRODUCTS + g
            why = PRODUCTS
    elif k == PRODUCT_WAIT:
        n = s.w_count[5 * w + 1] - 1 - int(s.values[m + EXTRA])
        if n >= 0:
            n = s.w_groups[32 * w + n % 32]
            if n < s.g_made[g]:
                te = max(te, s.g_done[g * RING + n % RING])
            else:
                blocked = ON_PRODUCTS + g
            why = PRODUCTS
    for e in range(e0, e1):
        kind = s.e_kind[e]
        if kind == WAIT:
            b = inst * nb + s.e_a[e]
            n = s.e_b[e]
            if n >= 0:
                if n < s.b_count[B_COLUMNS * b + B_PHASES]:
                    x = s.b_time[B_TIMES * b + 1 + n % 16]
                    if x > te:
                        te = x + s.p[WAKE]
                else:
                    blocked = ON_BARRIER + b
            why = BARRIER
        elif kind == CP_WAIT:
            n = s.w_count[5 * w + 2] - 1 - s.e_a[e]
            if n >= 0:
                te = max(te, s.w_ends[64 * w + n % 32])
            why = COPIES
        elif kind == BULK_WAIT:
            n = s.w_count[5 * w + 3] - 1 - s.e_a[e]
            if n >= 0:
                te = max(te, s.w_ends[64 * w + 32 + 16 * s.e_b[e] + n % 16])
            why = COPIES
        elif kind == CLUSTER_WAIT:
            n = s.w_count[5 * w + 4] - 1
            if n >= 0:
                if n < s.c_count[2 * inst + 1]:
                    te = max(te, s.c_time[9 * inst + 1 + n % 8])
                else:
                    blocked = ON_CLUSTER + inst
            why = NAMED
    return te, blocked, why


@part
def account_wait(s, w, t, pos, i, why, e0, e1, inst, nb):
    """Ends a wait: counts its cycles as stalls, and logs it if it is long."""
    x = t - s.w_since[w]
    s.stalls[REASON_COUNT * i + why] += x
    if x > 4:
        cause = -1
        for e in range(e0, e1):
            if s.e_kind[e] == WAIT and s.e_b[e] >= 0:
                cause = s.b_count[B_COLUMNS * (inst * nb + s.e_a[e]) + B_CAUSES + s.e_b[e] % 16]
        note(s, w, pos, s.w_since[w], t, why, cause)
    s.w_since[w] = -1.0


@part
def claim(s, t, m, slot, en):
    """Occupies the instruction's pipe and the issue slot."""
    hold = s.values[m + INTERVAL]
    if s.engines[en + TENSOR_FREE] > t:  # a running product uses register ports
        hold *= s.values[m + BESIDE]
        if (
            s.values[m + COMPUTES] > 0 and s.pipes[slot + ISSUE_SLOT] > t - 1.0
        ):  # less than two cycles after the previous instruction
            s.engines[en + TENSOR_FREE] += s.p[PRODUCT_DELAY]
    s.pipes[slot + (s.ints[m + PIPE_OF] & LOW)] = t + hold
    s.pipes[slot + ISSUE_SLOT] = t + s.p[ISSUE_CYCLES]


@part
def results(s, w, t, i, k, m, sm, en):
    """-> when the results are ready, when the operands have been read, and when the warp goes on"""
    done = t + s.values[m + LATENCY]
    read = t
    after = t + s.ints[m + STALL]
    u = s.values[m + UNITS]
    if k == SHARED:
        read = max(t, s.engines[en + LSU_FREE])
        s.engines[en + LSU_FREE] = read + u
        x = max(read, s.engines[en + PORT_FREE])
        share = s.engines[en + PORT_SHARE]
        last = s.engines[en + TENSOR_FREE] + s.queued[sm]
        if share > 0.0 and last > x:
            # Products have priority: threads get the remaining bandwidth, or wait until the products end.
            y = u / max(1.0 - share, 0.028)
            if s.values[m + EXTRA] > 0:
                y *= s.p[LDS_BESIDE]
            u = min(y, last - x + u)
        s.engines[en + PORT_FREE] = x + u
        done = x + u + s.values[m + LATENCY]
        s.w_last[5 * w + 4] = max(s.w_last[5 * w + 4], done)
    elif k == READ:
        read = max(t, s.engines[en + LSU_FREE]) + max(1.0, s.values[m + LSU_CYCLES])
        s.engines[en + LSU_FREE] = read
        done = read - 1.0 + s.p[L1_LATENCY]
        # One in every few loads of a warp fetches something, starting with the first; the others hit L1.
        a = int(s.values[m + FIRST]) * s.sizes[N_WARPS] + w
        x = s.values[m + EXTRA]
        fetches = s.asked[a] < 0.999 * x
        s.asked[a] += 1.0 - x if fetches else -x
        if fetches and u > 0.0:
            c = 4 * s.ints[m + TENSOR]
            s.later[a] += s.values[m + LATER]
            if s.later[a] > 0.999:
                s.later[a] -= 1.0
                c += s.sizes[LATER_ROWS]
            q = en + int(s.memory[c + 3])
            half = 0.5 * s.memory[c + 1]
            x = max(t + half, s.engines[q]) + u * s.memory[c]
            s.engines[q] = x
            done = max(t + s.memory[c + 1] + u * s.p[SM_BYTE], x + half)
        s.w_last[5 * w + 4] = max(s.w_last[5 * w + 4], done)
    elif k == WRITE:
        read = max(t, s.engines[en + LSU_FREE]) + max(1.0, u / 128.0)
        x = max(t, s.engines[en + WRITE_FREE]) + u * s.p[STORE_CYCLE]
        s.engines[en + WRITE_FREE] = x
        if s.values[m + EXTRA] > 0:  # parts of lines: the next access waits until L2 has accepted them
            read = max(read, x)
        s.engines[en + LSU_FREE] = read
    elif k == ATOMIC:
        read = max(t, s.engines[en + LSU_FREE]) + max(1.0, s.values[m + LSU_CYCLES])
        s.engines[en + LSU_FREE] = read
        x = max(t, s.engines[en + WRITE_FREE]) + u * s.p[STORE_CYCLE]
        s.engines[en + WRITE_FREE] = x
        done = x + s.p[ATOMIC_LATENCY]
        s.w_last[5 * w + 4] = max(s.w_last[5 * w + 4], done)
    elif k == TENSOR_READ or k == TENSOR_WRITE:
        x = max(t, s.engines[en + TM_FREE]) + u / s.p[TMEM_RATE]
        s.engines[en + TM_FREE] = x
        done = x + s.p[TMEM_LATENCY]
    elif k == PRODUCT_WAIT:
        after = max(after, t + 1.0 + s.p[PRODUCT_WAITED])
    elif k == TAKEN:
        after = max(after, t + s.p[BRANCH])
    elif k == MEMBAR:  # waits for the loads of the warp
        done = max(t + max(s.values[m + INTERVAL], s.values[m + LATENCY]), s.w_last[5 * w + 4])
        read = done
        after = done
    return done, read, after


@part
def score(s, w, m, done, read):
    """Sets the instruction's scoreboards, for its results and its operands."""
    r = 8 * w + (s.ints[m + SETS] & 7)
    s.board[r] = max(s.board[r], done)
    r = 8 * w + (s.ints[m + HOLDS] & 7)
    s.board[r] = max(s.board[r], read + s.p[OPERANDS])


# ---- wgmma -----------------------------------------------------------------------------------------------------------


@part
def queue_product(s, w, t, pos, m, g, sm, inst):
    """Issues a product from one of a warpgroup's four warps. -> whether that warp is the last"""
    n = s.w_count[5 * w]
    s.w_count[5 * w] = n + 1
    if s.values[m + EXTRA] > 0:
        s.w_groups[32 * w + s.w_count[5 * w + 1] % 32] = n
        s.w_count[5 * w + 1] += 1
    r = g * RING + n % RING
    s.g_count[r] += 1
    if s.g_count[r] < 4:
        return False
    s.g_count[r] = 0
    s.g_asked[g] = n + 1
    s.g_at[r], s.g_pos[r] = t, pos
    s.g_home[2 * g], s.g_home[2 * g + 1], s.g_warp[g] = sm, inst, w
    return True


@part
def next_product(s):
    """-> when the first waiting product begins, and on which multiprocessor"""
    soon = INF
    sm = 0
    for g in range(s.sizes[N_GROUPS]):
        if s.g_made[g] < s.g_asked[g]:
            x = max(s.g_at[g * RING + s.g_made[g] % RING], s.engines[ENGINES * s.g_home[2 * g] + TENSOR_FREE])
            if x < soon:
                soon = x
                sm = s.g_home[2 * g]
    return soon, sm


@part
def begin_product(s, soon, sm):
    """Begins a product. A warpgroup keeps the tensor core while it has products, then the next one gets it.
    -> the warpgroup, the product's place in the rings, and when the tensor core is free again"""
    g = s.turn[sm]
    r = g * RING + s.g_made[g] % RING
    while s.g_home[2 * g] != sm or s.g_made[g] >= s.g_asked[g] or s.g_at[r] > soon:
        g = (g + 1) % s.sizes[N_GROUPS]
        r = g * RING + s.g_made[g] % RING
    s.turn[sm] = g
    m = 8 * s.s_ins[s.g_pos[r]]
    en = ENGINES * sm
    u = max(s.values[m + UNITS], s.values[m + PORT_CYCLES])
    y = soon + u
    s.queued[sm] -= u
    s.engines[en + TENSOR_FREE] = y
    s.engines[en + PORT_SHARE] = s.values[m + PORT_CYCLES] / u
    s.g_begin[r] = soon
    s.g_done[r] = y + s.p[PRODUCT_TAIL]
    if s.values[m + UNITS] > 64.0:
        s.g_done[r] += s.p[PRODUCT_WIDE]
    s.g_made[g] += 1
    return g, r, y
