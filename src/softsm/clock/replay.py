"""The replay: machine instructions of resident warps on the schedulers, pipes and engines of a multiprocessor.

Time is in cycles. Warps issue in order, one instruction per scheduler and cycle; an instruction waits for its registers
and for its pipe. Engines (tensor core, shared memory, TMA, the way to L2) are queues: each operation takes its slot and
completes after a latency. mbarriers count arrivals and bytes as the program set them up. The warp with the earliest
time goes first, so everything that another warp may have to wait for is known when it asks.
"""

from __future__ import annotations

import functools

import numpy as np

INF = 1e18
# Kinds of machine instructions.
PLAIN, SHARED, READ, WRITE, PRODUCT, PRODUCT_WAIT, TENSOR_READ, TENSOR_WRITE, TAKEN = range(9)
# Reasons to wait.
REASONS = ("registers", "pipe", "issue", "barrier", "products", "copies", "bar.sync", "shared memory")
DEPENDS, PIPE, ISSUE, BARRIER, PRODUCTS, COPIES, NAMED, PORT = range(8)
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
    "port_bytes",
    "lds_latency",
    "mma_issue",
    "mma_tail",
    "tmem_rate",
    "tmem_latency",
    "cta_gap",
    "queue",
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
    "cp_port",
    "gather_interval",
    "lds_beside",
)
P = {name: i for i, name in enumerate(NAMES)}
RING = 64
LOG = 400_000


def _simulate(
    kind,
    pipe,
    interval,
    latency,
    read_at,
    read_of,
    write_at,
    write_of,
    units,
    tensor,
    n_tensor,
    extra,
    beside,
    heavy,
    s_ins,
    s_ev,
    s_cnt,
    events,
    w_begin,
    w_end,
    w_sm,
    w_sched,
    w_inst,
    w_group,
    i_first,
    i_last,
    i_next,
    i_start,
    n_barriers,
    cost,
    delay,
    p,
    n_sm,
    log,
):
    """-> (status, start and end of each instance, stalls [instruction, reason], busy cycles, log length)"""
    W, n_inst = len(w_begin), len(i_first)
    n_groups = 0
    for w in range(W):
        n_groups = max(n_groups, w_group[w] + 1)
    ready = np.zeros((W, 336))
    w_t = np.full(W, INF)
    w_pos = w_begin.copy()
    w_since = np.full(W, -1.0)
    w_tag = np.full(W, -1, np.int64)
    w_hg = np.zeros(W, np.int64)
    w_commits = np.zeros(W, np.int64)
    w_commit_at = np.zeros((W, 32), np.int64)
    w_cp_last = np.zeros(W)
    w_cp = np.zeros((W, 32))
    w_cp_n = np.zeros(W, np.int64)
    w_bulk_now = np.zeros((W, 2))
    w_bulk = np.zeros((W, 16, 2))
    w_bulk_n = np.zeros(W, np.int64)
    w_cluster = np.zeros(W, np.int64)
    g_cnt = np.zeros((n_groups, RING), np.int64)
    g_reg = np.zeros(n_groups, np.int64)
    g_comp = np.zeros((n_groups, RING))
    g_start = np.zeros((n_groups, RING))
    nb = n_barriers
    b_pending = np.ones(n_inst * nb, np.int64)
    b_expected = np.ones(n_inst * nb, np.int64)
    b_tx = np.zeros(n_inst * nb, np.int64)
    b_done = np.zeros(n_inst * nb, np.int64)
    b_max = np.zeros(n_inst * nb)
    b_comp = np.zeros((n_inst * nb, 16))
    b_cause = np.full((n_inst * nb, 16), -1, np.int64)  # stream position of what ended the phase
    b_last = np.full(n_inst * nb, -1, np.int64)
    n_cnt = np.zeros(n_inst * 256, np.int64)
    n_max = np.zeros(n_inst * 256)
    c_cnt = np.zeros(n_inst, np.int64)
    c_gen = np.zeros(n_inst, np.int64)
    c_time = np.zeros((n_inst, 8))
    c_max = np.zeros(n_inst)
    sched_free = np.zeros(n_sm * 4)
    pipe_free = np.zeros((n_sm * 4, 16))
    tensor_free = np.zeros(n_sm)
    port_free = np.zeros(n_sm)  # of what threads have asked of shared memory
    port_share = np.zeros(n_sm)  # what the products of tensor memory under way take of its port
    lsu_free = np.zeros(n_sm)
    mem_free = np.zeros(n_sm)
    write_free = np.zeros(n_sm)
    tma_free = np.zeros(n_sm)
    tm_free = np.zeros(n_sm)
    mma_last = np.zeros(n_sm)
    last_load = np.zeros(n_sm)
    busy = np.zeros(32)
    stalls = np.zeros((len(kind), 8))
    issued = np.zeros(len(kind), np.int64)
    start = np.full(n_inst, -1.0)
    end = np.full(n_inst, -1.0)
    left = np.zeros(n_inst, np.int64)
    active = np.zeros(W, np.int64)
    n_active = 0
    done_inst = 0
    n_log = 0
    for i in range(n_inst):
        left[i] = i_last[i] - i_first[i]
        if i_start[i] >= 0:
            start[i] = i_start[i]
            for w in range(i_first[i], i_last[i]):
                w_t[w] = i_start[i]
                active[n_active] = w
                n_active += 1
    while done_inst < n_inst:
        w = -1
        t = INF
        for k in range(n_active):
            if w_t[active[k]] < t:
                w = active[k]
                t = w_t[w]
        if w < 0:
            return -1, start, end, stalls, busy, n_log, issued, w_pos
        inst = w_inst[w]
        sm = w_sm[w]
        pos = w_pos[w]
        if pos >= w_end[w]:
            w_t[w] = INF
            for k in range(n_active):
                if active[k] == w:
                    active[k] = active[n_active - 1]
                    n_active -= 1
                    break
            left[inst] -= 1
            if left[inst] == 0:
                end[inst] = max(t, write_free[sm])
                done_inst += 1
                n = i_next[inst]
                if n >= 0:
                    begin = t + p[15]
                    start[n] = begin
                    for v in range(i_first[n], i_last[n]):
                        w_t[v] = begin
                        active[n_active] = v
                        n_active += 1
            continue
        i = s_ins[pos]
        sched = w_sched[w]
        te = t
        reason = 0
        for r in range(read_at[i], read_at[i + 1]):
            x = ready[w, read_of[r]]
            if x > te:
                te = x
                reason = 0
        pi = pipe[i]
        x = pipe_free[sched, pi]
        if x > te:
            te = x
            reason = 1
        x = sched_free[sched]
        if x > te:
            te = x
            reason = 2
        k = kind[i]
        if k == 1 or k == 2:
            x = lsu_free[sm] - p[24]
            if x > te:
                te = x
                reason = 7
        if te > t:
            stalls[i, reason] += te - t
            w_t[w] = te
            continue
        # ---- waits that need more than time ----
        e0 = s_ev[pos]
        e1 = e0 + s_cnt[pos] if e0 >= 0 else e0
        te = t
        blocked = -1
        why = 3
        if k == 4:  # a product: room in the queue?
            g = w_group[w]
            n = w_hg[w] - np.int64(p[1])
            if n >= 0:
                if n < g_reg[g]:
                    te = max(te, g_start[g, n % RING])
                else:
                    blocked = 2_000_000_000 + g
                why = 4
        elif k == 5:
            g = w_group[w]
            n = w_commits[w] - 1 - np.int64(extra[i])
            if n >= 0:
                product = w_commit_at[w, n % 32]
                if product < g_reg[g]:
                    te = max(te, g_comp[g, product % RING])
                else:
                    blocked = 2_000_000_000 + g
                why = 4
        for e in range(e0, e1):
            ek = np.int64(events[e, 0])
            if ek == 2:
                b = inst * nb + np.int64(events[e, 1])
                phase = np.int64(events[e, 2])
                if phase >= 0:
                    if phase < b_done[b]:
                        x = b_comp[b, phase % 16]
                        if x > te:
                            te = x + p[4]
                    else:
                        blocked = 1_000_000_000 + b
                why = 3
            elif ek == 10:
                n = w_cp_n[w] - 1 - np.int64(events[e, 1])
                if n >= 0:
                    te = max(te, w_cp[w, n % 32])
                why = 5
            elif ek == 6:
                n = w_bulk_n[w] - 1 - np.int64(events[e, 1])
                if n >= 0:
                    te = max(te, w_bulk[w, n % 16, np.int64(events[e, 2])])
                why = 5
            elif ek == 15:
                n = w_cluster[w] - 1
                if n >= 0:
                    if n < c_gen[inst]:
                        te = max(te, c_time[inst, n % 8])
                    else:
                        blocked = 3_000_000_000 + inst
                why = 6
        if blocked >= 0:
            if w_since[w] < 0:
                w_since[w] = t
            w_tag[w] = blocked
            w_t[w] = INF
            continue
        if te > t:
            if w_since[w] < 0:
                w_since[w] = t
            w_t[w] = te
            continue
        if w_since[w] >= 0:
            stalls[i, why] += t - w_since[w]
            if log.shape[0] > n_log and t - w_since[w] > 4:
                cause = -1
                for e in range(e0, e1):
                    if np.int64(events[e, 0]) == 2 and events[e, 2] >= 0:
                        b = inst * nb + np.int64(events[e, 1])
                        cause = b_cause[b, np.int64(events[e, 2]) % 16]
                log[n_log, 0], log[n_log, 1], log[n_log, 2], log[n_log, 3] = w, pos, w_since[w], t
                log[n_log, 4], log[n_log, 5] = why, cause
                n_log += 1
            w_since[w] = -1.0
        # ---- issue ----
        hold = interval[i]
        if tensor_free[sm] > t:  # a product under way takes register ports
            hold *= beside[i]
            if heavy[i] > 0:
                tensor_free[sm] += p[26]
        sched_free[sched] = t + 1
        pipe_free[sched, pi] = t + hold
        busy[pi] += interval[i]
        busy[31] += 1
        done = t + latency[i]
        w_next = t + 1.0
        if issued[i] == 0:
            w_next += p[25]
        issued[i] += 1
        if k == 1:
            u = units[i]
            x = max(t, lsu_free[sm])
            lsu_free[sm] = x + u
            y = max(x, port_free[sm])
            busy[16] += u
            if port_share[sm] > 0.0 and tensor_free[sm] > y:
                # Products come first: threads get what they leave, or wait for their end.
                slow = 1.0 / max(1.0 - port_share[sm], 0.04)
                if write_at[i + 1] > write_at[i]:
                    slow *= p[32]
                u = min(u * slow, tensor_free[sm] - y + u)
            port_free[sm] = y + u
            done = port_free[sm] + latency[i]
        elif k == 2:
            u = units[i]
            lsu_free[sm] = max(t, lsu_free[sm]) + max(1.0, u / 128.0)
            if u > 0:
                c = tensor[i]
                x = max(t, mem_free[sm])
                mem_free[sm] = x + u * cost[c]
                busy[17] += u
                done = max(t + delay[c, 0] + u * p[27], mem_free[sm] + delay[c, 2])
            else:
                done = t + p[18]
        elif k == 3:
            u = units[i]
            lsu_free[sm] = max(t, lsu_free[sm]) + max(1.0, u / 128.0)
            write_free[sm] = max(t, write_free[sm]) + u * p[19]
            busy[18] += u
        elif k == 4:
            g = w_group[w]
            n = w_hg[w]
            w_hg[w] += 1
            if extra[i] > 0:
                w_commit_at[w, w_commits[w] % 32] = n
                w_commits[w] += 1
            g_cnt[g, n % RING] += 1
            if g_cnt[g, n % RING] == 4:
                g_cnt[g, n % RING] = 0
                s0 = max(t, tensor_free[sm])
                g_start[g, n % RING] = s0
                c = units[i]
                m = cost[n_tensor + i]  # cycles of the shared-memory port
                y = max(s0, port_free[sm] - 32.0) + m
                port_free[sm] = max(s0, port_free[sm]) + m
                fin = max(s0 + c, y)
                tensor_free[sm] = fin
                busy[16] += m
                busy[19] += c
                g_comp[g, n % RING] = fin + p[0] + (p[29] if c > 64.0 else 0.0)
                g_reg[g] = n + 1
                if log.shape[0] > n_log:
                    log[n_log, 0], log[n_log, 1], log[n_log, 2], log[n_log, 3] = w, pos, s0, fin
                    log[n_log, 4], log[n_log, 5] = 20, -1
                    n_log += 1
                tag = 2_000_000_000 + g
                for v in range(i_first[inst], i_last[inst]):
                    if w_tag[v] == tag:
                        w_tag[v] = -1
                        w_t[v] = t
        elif k == 6:
            u = units[i]
            tm_free[sm] = max(t, tm_free[sm]) + u / p[13]
            busy[20] += u / p[13]
            done = tm_free[sm] + p[14]
        elif k == 7:
            u = units[i]
            tm_free[sm] = max(t, tm_free[sm]) + u / p[13]
            busy[20] += u / p[13]
        elif k == 5:
            w_next = t + 1.0 + p[28]
        elif k == 8:
            w_next = t + p[22]
        for r in range(write_at[i], write_at[i + 1]):
            ready[w, write_of[r]] = done
        w_pos[w] = pos + 1
        w_t[w] = w_next
        # ---- events ----
        for e in range(e0, e1):
            ek = np.int64(events[e, 0])
            if ek == 0:
                b = inst * nb + np.int64(events[e, 1])
                b_pending[b] = np.int64(events[e, 2])
                b_expected[b] = b_pending[b]
                b_tx[b] = 0
                b_done[b] = 0
                b_max[b] = 0.0
                continue
            if ek == 2:
                w_t[w] = max(w_t[w], t + p[2])
                continue
            b = np.int64(-1)
            eff = t
            if ek == 1:
                b = inst * nb + np.int64(events[e, 1])
                b_pending[b] -= np.int64(events[e, 2])
                b_tx[b] += np.int64(events[e, 3])
                eff = t + p[3]
            elif ek == 3 or ek == 16:
                b = inst * nb + np.int64(events[e, 1])
                size = events[e, 2]
                c = np.int64(events[e, 3])
                if c == -2:
                    eff = max(last_load[sm], t + p[23])
                else:
                    tma_free[sm] = max(t + p[7], tma_free[sm]) + (p[31] if ek == 16 else p[8])
                    x = max(tma_free[sm], mem_free[sm])
                    mem_free[sm] = x + size * cost[c]
                    busy[17] += size
                    if p[17] > 0:
                        busy[16] += size / 128.0 * p[17]
                    eff = max(tma_free[sm] + delay[c, 1] + size * p[27], mem_free[sm] + delay[c, 2])
                    last_load[sm] = eff
                    if log.shape[0] > n_log:
                        log[n_log, 0], log[n_log, 1], log[n_log, 2], log[n_log, 3] = w, pos, t, eff
                        log[n_log, 4], log[n_log, 5] = 21, size
                        n_log += 1
                b_tx[b] -= np.int64(size)
            elif ek == 4:
                size = events[e, 2]
                x = t + p[7] + size / 64.0 + 100.0
                write_free[sm] = max(t + p[7], write_free[sm]) + size * p[19]
                busy[18] += size
                w_bulk_now[w, 1] = max(w_bulk_now[w, 1], x)
                w_bulk_now[w, 0] = max(w_bulk_now[w, 0], write_free[sm] + 600.0)
                continue
            elif ek == 5:
                w_bulk[w, w_bulk_n[w] % 16, 0] = w_bulk_now[w, 0]
                w_bulk[w, w_bulk_n[w] % 16, 1] = w_bulk_now[w, 1]
                w_bulk_n[w] += 1
                continue
            elif ek == 7:
                key = inst * 256 + np.int64(events[e, 1])
                n_cnt[key] += 1
                n_max[key] = max(n_max[key], t)
                tag = 4_000_000_000 + key
                if events[e, 3] > 0:
                    w_tag[w] = tag
                    w_since[w] = -1.0
                    ready[w, 335] = t
                    w_t[w] = INF
                if n_cnt[key] >= np.int64(events[e, 2]):
                    release = n_max[key] + p[5] + p[6] * events[e, 2]
                    n_cnt[key] = 0
                    n_max[key] = 0.0
                    for v in range(i_first[inst], i_last[inst]):
                        if w_tag[v] == tag:
                            w_tag[v] = -1
                            at = ready[v, 335]
                            ready[v, 335] = 0.0
                            stalls[s_ins[w_pos[v] - 1], 6] += release - at
                            w_t[v] = release
                continue
            elif ek == 8:
                c = np.int64(events[e, 1])
                size = events[e, 2]
                lsu_free[sm] = max(t, lsu_free[sm]) + max(1.0, events[e, 3] / 128.0)
                if size > 0:
                    x = max(t, mem_free[sm])
                    mem_free[sm] = x + size * cost[c]
                    busy[17] += size
                    if p[30] > 0:
                        port_free[sm] = max(port_free[sm], t) + size / 128.0 * p[30]
                        busy[16] += size / 128.0 * p[30]
                    w_cp_last[w] = max(w_cp_last[w], max(t + delay[c, 0] + size * p[27], mem_free[sm] + delay[c, 2]))
                continue
            elif ek == 9:
                w_cp[w, w_cp_n[w] % 32] = w_cp_last[w]
                w_cp_n[w] += 1
                continue
            elif ek == 11:
                b = inst * nb + np.int64(events[e, 1])
                b_pending[b] -= np.int64(events[e, 2])
                eff = max(t, w_cp_last[w]) + p[3]
            elif ek == 12:
                m = events[e, 1]
                n2 = events[e, 2]
                flags = np.int64(events[e, 3])
                pair = flags & 1
                in_tensor = flags >> 1 & 1
                tensor_cycles = n2 / 2.0
                rows = m
                columns = n2
                if pair:
                    rows = m / 2.0
                    columns = n2 / 2.0
                    if m <= 128:
                        tensor_cycles = n2 / 4.0
                smem = (32.0 * columns + (0.0 if in_tensor else 32.0 * rows)) / 128.0
                c2 = max(tensor_cycles, smem)
                s0 = max(t + p[11], tensor_free[sm])
                if pair:
                    s0 = max(s0, tensor_free[sm ^ 1])
                fin = s0 + c2
                tensor_free[sm] = fin
                port_share[sm] = smem / c2
                busy[19] += tensor_cycles
                busy[16] += smem
                if pair:
                    tensor_free[sm ^ 1] = fin
                    port_share[sm ^ 1] = smem / c2
                    busy[19] += tensor_cycles
                    busy[16] += smem
                mma_last[sm] = fin + p[12] + (0.0 if in_tensor else 24.0) + (32.0 if pair else 0.0)
                if log.shape[0] > n_log:
                    log[n_log, 0], log[n_log, 1], log[n_log, 2], log[n_log, 3] = w, pos, s0, fin
                    log[n_log, 4], log[n_log, 5] = 20, -1
                    n_log += 1
                continue
            elif ek == 13:
                b = inst * nb + np.int64(events[e, 1])
                b_pending[b] -= 1
                eff = max(t + p[21], mma_last[sm])
            elif ek == 14:
                w_cluster[w] += 1
                c_cnt[inst] += 1
                c_max[inst] = max(c_max[inst], t)
                if c_cnt[inst] == i_last[inst] - i_first[inst]:
                    c_time[inst, c_gen[inst] % 8] = c_max[inst] + p[20]
                    c_gen[inst] += 1
                    c_cnt[inst] = 0
                    c_max[inst] = 0.0
                    tag = 3_000_000_000 + inst
                    for v in range(i_first[inst], i_last[inst]):
                        if w_tag[v] == tag:
                            w_tag[v] = -1
                            w_t[v] = t
                continue
            else:
                continue
            # an mbarrier has changed
            if eff >= b_max[b]:
                b_max[b] = eff
                b_last[b] = pos
            if b_pending[b] == 0 and b_tx[b] == 0:
                slot = b_done[b] % 16
                b_comp[b, slot] = b_max[b]
                b_cause[b, slot] = b_last[b]
                b_done[b] += 1
                b_pending[b] = b_expected[b]
                b_max[b] = 0.0
                tag = 1_000_000_000 + b
                for v in range(i_first[inst], i_last[inst]):
                    if w_tag[v] == tag:
                        w_tag[v] = -1
                        w_t[v] = t
    return 0, start, end, stalls, busy, n_log, issued, w_pos


@functools.cache
def simulate():
    """Compiled at the first use, kept on disk."""
    from numba import njit

    return njit(cache=True, nogil=True, error_model="numpy")(_simulate)
