"""The replay: machine instructions of resident warps on the schedulers, pipes and engines of a multiprocessor.

Time is in cycles. Warps issue in order, one instruction per scheduler and cycle; an instruction waits for its code, for
the scoreboards that ptxas named, and for its pipe. Engines (tensor core, shared memory, TMA, the way to L2) are queues:
each operation takes its slot and completes after a latency. mbarriers count arrivals and bytes as the program set
them up. The warp with the earliest time goes first, so everything that another warp may have to wait for is known when
it asks.

Numba compiles it as one function over arrays of one dimension: arrays of two dimensions, a tuple
of arrays, or functions that take many of them need two to three times as long to compile. Three quarters of that time
are Numba's own, for types and the way to LLVM's language; fewer statements are what makes it shorter. Functions of few
arrays are in parts.py.
"""

from __future__ import annotations

import numpy as np

from softsm.engine.native import native

# isort: off
from softsm.timing_model.machine import (
    ARRIVE, BARRIER, BAR_ARRIVAL, BAR_SYNC, BESIDE, BRANCH, CLUSTER_BARRIER, CODE, COMMIT, COMPUTES, COPIES,
    CP_LINE, CTA_GAP, DEPENDS, EXTRA, GATHER_INTERVAL, HOLDS, INF, INTERVAL, ISSUE, KIND, L1_LATENCY,
    LAST_LOAD, LATENCY, LDS_BESIDE, LINES, LOAD_LINE, LOG_COPY, LOG_PRODUCT, LOW, LSU_FREE, LSU_QUEUE, MEMBAR,
    MMA_ISSUE, MMA_LAST, MMA_TAIL, NAMED, ON_BARRIER, ON_CLUSTER, ON_NAMED, ON_PRODUCTS, OPERANDS, PIPE,
    PIPE_OF, PORT, PORT_CYCLES, PORT_FREE, PORT_SHARE, PRODUCT, PRODUCTS, PRODUCT_DELAY, PRODUCT_DEPTH,
    PRODUCT_TAIL, PRODUCT_WAIT, PRODUCT_WAITED, PRODUCT_WIDE, QUIET, READ, REASON_COUNT, REMOTE, RING, SETS,
    SHARED, SM_BYTE, STALL, STORE_CYCLE, TAKEN, TENSOR, TENSOR_FREE, TENSOR_READ, TENSOR_WRITE, TMA_FREE,
    TMA_INTERVAL, TMA_ISSUE, TMEM_LATENCY, TMEM_RATE, TM_FREE, TRY_WAIT, UNITS, WAITS, WAKE, WRITE,
    WRITE_FREE,
)  # fmt: skip

# isort: on
from softsm.timing_model.parts import change, earliest, fetch, held, note, plant, wake


@native(None, python=True, effort=3)
def simulate(
    ints, values, fetched, issued, asked, stalls, s_ins, s_ev, s_cnt, e_kind, e_a, e_b, e_c, w_pos, w_end, w_event,
    w_sm, w_sched, w_inst, w_group, w_alone, w_time, w_since, w_tag, w_count, w_last, board, w_groups, w_ends, i_first,
    i_after, i_next, i_left, i_start, i_end, c_count, c_time, b_count, b_time, named, g_count, g_done, g_begin, g_made,
    g_asked, g_at, g_pos, g_home, g_warp, turn, queued, engines, pipes, memory, p, log, count,
):  # fmt: skip
    """-> 0, or 1 if all warps that are left wait for each other."""
    n_inst = len(i_first)
    nb, ending = count[1], count[2]
    n_log = 0
    active = np.zeros(len(w_pos), np.int64)
    n_active = 0
    soon = INF  # no product that waits begins before
    finished = 0
    for inst in range(n_inst):
        if i_start[inst] >= 0:
            for w in range(i_first[inst], i_after[inst]):
                w_time[w] = i_start[inst]
                active[n_active] = w
                n_active += 1
    leaves = 1
    while leaves < n_active:
        leaves *= 2
    tree = np.empty(2 * leaves)  # the earlier time of each pair of active warps, of each pair of pairs, ...
    w = 0
    t = second = INF
    place = 0  # of w among the active warps
    others = True  # whether times of other warps have changed
    while finished < ending:
        x = w_time[w]
        if others:
            others = False
            plant(tree, leaves, w_time, active, n_active)
            second = -1.0
        elif x >= second:
            change(tree, leaves + place, x)
        if x < second:
            t = x  # it is the first again
        else:
            t = tree[1]
            place, second = earliest(tree, leaves)
            w = active[place] & LOW
        # ---- the tensor core: a warpgroup goes on as long as it has products, then comes the next ----
        if soon < t:
            soon = INF
            sm = 0
            for g in range(len(g_made)):
                if g_made[g] < g_asked[g]:
                    x = max(g_at[g * RING + g_made[g] % RING], engines[11 * g_home[2 * g] + TENSOR_FREE])
                    if x < soon:
                        soon = x
                        sm = g_home[2 * g]
            if soon < t:
                g = turn[sm]
                r = g * RING + g_made[g] % RING
                while g_home[2 * g] != sm or g_made[g] >= g_asked[g] or g_at[r] > soon:
                    g = (g + 1) % len(g_made)
                    r = g * RING + g_made[g] % RING
                turn[sm] = g
                m = 8 * s_ins[g_pos[r]]
                en = 11 * sm
                u = max(values[m + UNITS], values[m + PORT_CYCLES])
                y = soon + u
                queued[sm] -= u
                engines[en + TENSOR_FREE] = y
                engines[en + PORT_SHARE] = values[m + PORT_CYCLES] / u
                g_begin[r] = soon
                g_done[r] = y + p[PRODUCT_TAIL]
                if values[m + UNITS] > 64.0:
                    g_done[r] += p[PRODUCT_WIDE]
                g_made[g] += 1
                inst = g_home[2 * g + 1]
                n_log = note(log, n_log, g_warp[g], g_pos[r], soon, y, LOG_PRODUCT, -1)
                for v in range(i_first[inst], i_after[inst]):
                    if w_tag[v] == ON_PRODUCTS + g:
                        w_tag[v] = -1
                        w_time[v] = max(soon, w_since[v])
                        others = True
                continue
        if t == INF:
            count[0] = n_log
            return 1
        inst = w_inst[w] & LOW
        sm = w_sm[w] & LOW
        pos = w_pos[w] & LOW
        slot = 17 * (w_sched[w] & LOW)
        first = pos
        while w_alone[w] and pos < w_end[w] and s_ev[pos] < 0:
            # What no other warp notices comes to the same whenever they do what they do.
            i = s_ins[pos] & LOW
            m = 8 * i
            te = fetched[i]
            if te < 0.0 or ints[m + QUIET] == 0:
                break
            reason = CODE
            if te < t:
                te = t
            mask = ints[m + WAITS]
            if mask != 0:
                x = held(board, 8 * w, mask)
                if x > te:
                    te = x
                    reason = DEPENDS
            k = slot + (ints[m + PIPE_OF] & LOW)
            x = pipes[k]
            if x > te:
                te = x
                reason = PIPE
            x = pipes[slot + 16]
            if x > te:
                te = x
                reason = ISSUE
            if te > t:
                stalls[REASON_COUNT * i + (reason & 15)] += te - t
            pipes[k] = te + values[m + INTERVAL]
            pipes[slot + 16] = te + 1
            issued[i] += 1
            r = 8 * w + (ints[m + SETS] & 7)
            board[r] = max(board[r], te + values[m + LATENCY])
            r = 8 * w + (ints[m + HOLDS] & 7)
            board[r] = max(board[r], te + p[OPERANDS])
            t = te + ints[m + STALL]
            if ints[m + KIND] == TAKEN:
                t = max(t, te + p[BRANCH])
            pos += 1
        if pos > first:
            w_pos[w], w_time[w] = pos, t
            continue
        en = 11 * sm  # of its engines
        if pos >= w_end[w]:
            w_time[w] = INF
            n_active -= 1
            active[place] = active[n_active]
            others = True
            i_left[inst] -= 1
            if i_left[inst] == 0:
                i_end[inst] = max(t, engines[en + WRITE_FREE])
                n = i_next[inst]
                if n >= 0 or ending == n_inst:
                    finished += 1
                if n >= 0:
                    i_start[n] = t + p[CTA_GAP]
                    for v in range(i_first[n], i_after[n]):
                        w_time[v] = i_start[n]
                        active[n_active] = v
                        n_active += 1
            continue
        i = s_ins[pos] & LOW
        m = 8 * i
        k = ints[m + KIND]
        # ---- code, scoreboards, pipe, slot ----
        x = fetched[i]
        if x < 0.0:
            x = t + fetch(s_ins[pos - 1] if pos > 0 else -1, i, p)
            fetched[i] = x
        te = t
        reason = 0
        if x > te:
            te = x
            reason = CODE
        mask = ints[m + WAITS]
        if mask != 0:
            x = held(board, 8 * w, mask)
            if x > te:
                te = x
                reason = DEPENDS
        x = pipes[slot + (ints[m + PIPE_OF] & LOW)]
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
            stalls[REASON_COUNT * i + (reason & 15)] += te - t
            if te > second:
                w_time[w] = te
                continue
            t = te
        # ---- waits that need more than time ----
        e0 = s_ev[pos]
        e1 = e0
        if e0 >= 0:
            e0 += w_event[w]
            e1 = e0 + s_cnt[pos]
        te = t
        blocked = -1
        why = BARRIER
        g = w_group[w] & LOW
        if k == PRODUCT:  # room in the queue?
            n = w_count[5 * w] - np.int64(p[PRODUCT_DEPTH])
            if n >= 0:
                if n < g_made[g]:
                    te = max(te, g_begin[g * RING + n % RING])
                else:
                    blocked = ON_PRODUCTS + g
                why = PRODUCTS
        elif k == PRODUCT_WAIT:
            n = w_count[5 * w + 1] - 1 - np.int64(values[m + EXTRA])
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
            if x > 4:
                cause = -1
                for e in range(e0, e1):
                    if e_kind[e] == 2 and e_b[e] >= 0:
                        cause = b_count[21 * (inst * nb + e_a[e]) + 5 + e_b[e] % 16]
                n_log = note(log, n_log, w, pos, w_since[w], t, why, cause)
            w_since[w] = -1.0
        # ---- issue ----
        hold = values[m + INTERVAL]
        if engines[en + TENSOR_FREE] > t:  # a product under way takes register ports
            hold *= values[m + BESIDE]
            if values[m + COMPUTES] > 0 and pipes[slot + 16] > t - 1.0:  # less than two cycles after the one before
                engines[en + TENSOR_FREE] += p[PRODUCT_DELAY]
        pipes[slot + (ints[m + PIPE_OF] & LOW)] = t + hold
        pipes[slot + 16] = t + 1
        issued[i] += 1
        done = t + values[m + LATENCY]
        read = t
        after = t + ints[m + STALL]
        u = values[m + UNITS]
        if k == SHARED:
            read = max(t, engines[en + LSU_FREE])
            engines[en + LSU_FREE] = read + u
            x = max(read, engines[en + PORT_FREE])
            share = engines[en + PORT_SHARE]
            last = engines[en + TENSOR_FREE] + queued[sm]
            if share > 0.0 and last > x:
                # Products come first: threads get what they leave, or wait for their end.
                y = u / max(1.0 - share, 0.028)
                if values[m + EXTRA] > 0:
                    y *= p[LDS_BESIDE]
                u = min(y, last - x + u)
            engines[en + PORT_FREE] = x + u
            done = x + u + values[m + LATENCY]
            w_last[5 * w + 4] = max(w_last[5 * w + 4], done)
        elif k == READ:
            read = max(t, engines[en + LSU_FREE]) + max(1.0, u / 128.0, values[m + LINES] * p[LOAD_LINE])
            engines[en + LSU_FREE] = read
            done = t + p[L1_LATENCY]
            asked[i] += u  # where most lanes hit L1, every so many loads fetch a sector
            if asked[i] >= 31.9:
                u = asked[i]
                asked[i] = 0.0
                c = 5 * ints[m + TENSOR]
                q = en + np.int64(memory[c + 4])
                x = max(t, engines[q]) + u * memory[c]
                engines[q] = x
                done = max(t + memory[c + 1] + u * p[SM_BYTE], x + memory[c + 3])
            w_last[5 * w + 4] = max(w_last[5 * w + 4], done)
        elif k == WRITE:
            read = max(t, engines[en + LSU_FREE]) + max(1.0, u / 128.0)
            engines[en + LSU_FREE] = read
            engines[en + WRITE_FREE] = max(t, engines[en + WRITE_FREE]) + u * p[STORE_CYCLE]
        elif k == PRODUCT:
            n = w_count[5 * w]
            w_count[5 * w] = n + 1
            if values[m + EXTRA] > 0:
                w_groups[32 * w + w_count[5 * w + 1] % 32] = n
                w_count[5 * w + 1] += 1
            r = g * RING + n % RING
            g_count[r] += 1
            if g_count[r] == 4:  # all warps of the warpgroup
                g_count[r] = 0
                g_asked[g] = n + 1
                g_at[r], g_pos[r] = t, pos
                g_home[2 * g], g_home[2 * g + 1], g_warp[g] = sm, inst, w
                queued[sm] += max(u, values[m + PORT_CYCLES])
                soon = min(soon, max(t, engines[en + TENSOR_FREE]))
        elif k == TENSOR_READ or k == TENSOR_WRITE:
            x = max(t, engines[en + TM_FREE]) + u / p[TMEM_RATE]
            engines[en + TM_FREE] = x
            done = x + p[TMEM_LATENCY]
        elif k == PRODUCT_WAIT:
            after = max(after, t + 1.0 + p[PRODUCT_WAITED])
        elif k == TAKEN:
            after = max(after, t + p[BRANCH])
        elif k == MEMBAR:  # waits for the loads of the warp
            done = max(t + values[m + INTERVAL], w_last[5 * w + 4])
            read = done
            after = done
        r = 8 * w + (ints[m + SETS] & 7)
        board[r] = max(board[r], done)
        r = 8 * w + (ints[m + HOLDS] & 7)
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
                b_count[21 * b] = b_count[21 * b + 1] = size
                b_count[21 * b + 2] = b_count[21 * b + 3] = 0
                b_time[17 * b] = 0.0
            elif ek == 1:
                b_count[21 * b] -= size
                b_count[21 * b + 2] += e_c[e]
                eff = t + p[ARRIVE]
            elif ek == 2:
                if ints[m + SETS] == 7:
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
                    eff = max(x + memory[5 * c + 2] + size * p[SM_BYTE], y + memory[5 * c + 3])
                    engines[en + LAST_LOAD] = eff
                    n_log = note(log, n_log, w, pos, t, eff, LOG_COPY, size)
                b_count[21 * b + 2] -= size
            elif ek == 4:
                x = t + p[TMA_ISSUE]
                y = max(x, engines[en + WRITE_FREE]) + size * p[STORE_CYCLE]
                engines[en + WRITE_FREE] = y
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
                            others = True
            elif ek == 8:
                y = max(1.0, size / 128.0)
                if size < 128 * e_c[e]:  # lines of which it takes a part
                    y = max(y, e_c[e] * p[CP_LINE])
                read = max(t, engines[en + LSU_FREE]) + y
                engines[en + LSU_FREE] = read
                r = 8 * w + ints[m + HOLDS]
                board[r] = max(board[r], read + p[OPERANDS])
                if size > 0:
                    c = 5 * e_a[e]
                    q = en + np.int64(memory[c + 4])
                    x = max(t, engines[q]) + size * memory[c]
                    engines[q] = x
                    y = max(t + memory[c + 1] + size * p[SM_BYTE], x + memory[c + 3])
                    w_last[5 * w] = max(w_last[5 * w], y)
            elif ek == 9:
                w_ends[64 * w + w_count[5 * w + 2] % 32] = w_last[5 * w]
                w_count[5 * w + 2] += 1
                r = 8 * w + ints[m + SETS]
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
                engines[en + MMA_LAST] = begin + took + p[MMA_TAIL] + 32.0 * pair + (0.0 if e_c[e] & 2 else 24.0)
                n_log = note(log, n_log, w, pos, begin, begin + took, LOG_PRODUCT, -1)
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
                    others |= wake(ON_CLUSTER + inst, t, w_tag, w_time, i_first[inst], i_after[inst])
            if eff < 0:
                continue
            # an mbarrier has changed
            if eff >= b_time[17 * b]:
                b_time[17 * b] = eff
                b_count[21 * b + 4] = w << 32 | pos
            if b_count[21 * b] == 0 and b_count[21 * b + 2] == 0:
                n = b_count[21 * b + 3]
                b_time[17 * b + 1 + n % 16] = b_time[17 * b]
                b_count[21 * b + 5 + n % 16] = b_count[21 * b + 4]
                b_count[21 * b + 3] = n + 1
                b_count[21 * b] = b_count[21 * b + 1]
                b_time[17 * b] = 0.0
                others |= wake(ON_BARRIER + b, t, w_tag, w_time, i_first[inst], i_after[inst])
    count[0] = n_log
    return 0
