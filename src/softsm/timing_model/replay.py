"""The replay: machine instructions of resident warps on the schedulers, pipes and engines of a multiprocessor.

Time is in cycles. Warps issue in order, one instruction per scheduler and cycle; an instruction waits for its code, for
the scoreboards that ptxas named, and for its pipe. Engines (tensor core, shared memory, TMA, the path to L2) are
queues: each operation occupies its slot and completes after a latency. mbarriers count arrivals and bytes as the
program set them up. The warp with the earliest time goes first, so everything that another warp may have to wait for is
known when that warp needs it.

Numba compiles the replay, with its parts in parts.py, issue.py and events.py. They get the state as a tuple of pointers
(`pointers`): with arrays, compilation would be three times as slow, and a call as slow as the work it does.
"""

from __future__ import annotations

import numpy as np

from softsm.engine.native import native

# isort: off
from softsm.timing_model.machine import (
    ANY, BAR, BULK_COMMIT, BULK_STORE, CLUSTER_ARRIVE, CP_ASYNC, CP_COMMIT, CTA_GAP, ENGINES, GATHER, INF, KIND, LOAD,
    LOG_COPY, LOG_PRODUCT, LOW, MMA, N_BARRIERS, N_ENDING, N_INSTANCES, N_WARPS, ON_CLUSTER, PIPES, PORT_CYCLES,
    PRODUCT, SETS, TENSOR_FREE, TRY_WAIT, UNITS, WAIT, WRITE_FREE,
)  # fmt: skip

# isort: on
from softsm.timing_model.events import (
    arrive_cluster,
    barrier_event,
    changed,
    commit_bulk,
    commit_copies,
    copy_lanes,
    load,
    multiply,
    reach_named,
    store,
)
from softsm.timing_model.issue import (
    account_wait,
    awaited,
    begin_product,
    claim,
    next_product,
    queue_product,
    results,
    run_alone,
    score,
    stalled,
)
from softsm.timing_model.parts import change, earliest, note, part, plant, pointers, start, wake, wake_for_product


@native(None, python=True, effort=3)
def simulate(state):
    """Runs the replay of a machine.State. -> 0, or 1 if all remaining warps wait for each other"""
    return run(pointers(state))


@part
def run(s):
    nb, ending, instances = s.sizes[N_BARRIERS], s.sizes[N_ENDING], s.sizes[N_INSTANCES]
    finished = n_active = place = w = following = 0  # place: index of w among the active warps
    active = np.zeros(s.sizes[N_WARPS], np.int64)
    for inst in range(instances):
        if s.i_start[inst] >= 0:
            n_active = start(s, inst, s.i_start[inst], active, n_active)
            following = inst + 1
    leaves = 1
    while leaves < n_active:
        leaves *= 2
    tree = np.empty(2 * leaves)  # the earlier time of each pair of active warps, of each pair of pairs, ...
    soon = t = second = INF  # no waiting product begins before `soon`; `second`: the earliest of the other warps
    others = True  # whether times of other warps have changed
    while finished < ending:
        # ---- the warp with the earliest time ----
        x = s.w_time[w]
        if others:
            others = False
            plant(s, tree, leaves, active, n_active)
            second = -1.0
        elif x >= second:
            change(tree, leaves + place, x)
        if x < second:
            t = x  # w is still the earliest
        else:
            t = tree[1]
            place, second = earliest(tree, leaves)
            w = active[place] & LOW
        # ---- the tensor core goes first ----
        if soon < t:
            soon, sm = next_product(s)
            if soon < t:
                g, r, y = begin_product(s, soon, sm)
                note(s, s.g_warp[g], s.g_pos[r], soon, y, LOG_PRODUCT, -1)
                inst = s.g_home[2 * g + 1]
                others |= wake_for_product(s, g, soon, inst)
                continue
        if t == INF:
            return 1
        inst = s.w_inst[w] & LOW
        sm = s.w_sm[w] & LOW
        pos = s.w_pos[w] & LOW
        slot = PIPES * (s.w_sched[w] & LOW)
        en = ENGINES * sm
        if s.w_alone[w]:
            after, t = run_alone(s, w, t, pos, s.w_end[w], slot)
            if after > pos:
                s.w_pos[w], s.w_time[w] = after, t
                continue
        # ---- its end, and the end of its CTA ----
        if pos >= s.w_end[w]:
            s.w_time[w] = INF
            n_active -= 1
            active[place] = active[n_active]
            others = True
            s.i_left[inst] -= 1
            if s.i_left[inst] == 0:
                s.i_end[inst] = max(t, s.engines[en + WRITE_FREE])
                n = s.i_next[inst]
                if n == ANY:  # the first that has not begun
                    n = following if following < instances else -1
                    following += 1
                if n >= 0 or ending == instances:
                    finished += 1
                if n >= 0:
                    s.i_start[n] = t + s.p[CTA_GAP]
                    n_active = start(s, n, s.i_start[n], active, n_active)
            continue
        # ---- what its next instruction waits for ----
        i = s.s_ins[pos] & LOW
        m = 8 * i
        k = s.ints[m + KIND]
        te = stalled(s, w, t, pos, i, k, slot, en)
        if te > t:
            if te > second:
                s.w_time[w] = te
                continue
            t = te
        e0 = s.s_ev[pos]
        e1 = e0
        if e0 >= 0:
            e0 += s.w_event[w]
            e1 = e0 + s.s_cnt[pos]
        g = s.w_group[w] & LOW
        te, blocked, why = awaited(s, w, t, k, m, e0, e1, inst, nb, g)
        if blocked >= 0 or te > t:
            if s.w_since[w] < 0:
                s.w_since[w] = t
            s.w_tag[w] = blocked
            s.w_time[w] = INF if blocked >= 0 else te
            continue
        if s.w_since[w] >= 0:
            account_wait(s, w, t, pos, i, why, e0, e1, inst, nb)
        # ---- issue ----
        claim(s, t, m, slot, en)
        s.issued[i] += 1
        if k == PRODUCT:
            if queue_product(s, w, t, pos, m, g, sm, inst):
                s.queued[sm] += max(s.values[m + UNITS], s.values[m + PORT_CYCLES])
                soon = min(soon, max(t, s.engines[en + TENSOR_FREE]))
        done, read, after = results(s, w, t, i, k, m, sm, en)
        score(s, w, m, done, read)
        s.w_pos[w] = pos + 1
        s.w_time[w] = after
        # ---- events ----
        for e in range(e0, e1):
            kind = s.e_kind[e]
            b = inst * nb + s.e_a[e]
            if kind == WAIT:
                if s.ints[m + SETS] == 7:
                    s.w_time[w] = max(s.w_time[w], t + s.p[TRY_WAIT])
                continue
            if kind == BULK_STORE:
                store(s, w, t, s.e_b[e], en)
                continue
            if kind == BULK_COMMIT:
                commit_bulk(s, w)
                continue
            if kind == BAR:
                others |= reach_named(s, w, t, inst, e)
                continue
            if kind == CP_ASYNC:
                copy_lanes(s, w, t, m, e, en)
                continue
            if kind == CP_COMMIT:
                commit_copies(s, w, m)
                continue
            if kind == MMA:
                begin, end = multiply(s, t, e, sm)
                note(s, w, pos, begin, end, LOG_PRODUCT, -1)
                continue
            if kind == CLUSTER_ARRIVE:
                s.w_count[5 * w + 4] += 1
                if arrive_cluster(s, t, inst, s.i_after[inst] - s.i_first[inst]):
                    others |= wake(s, ON_CLUSTER + inst, t, s.i_first[inst], s.i_after[inst])
                continue
            # ---- an mbarrier changes ----
            if kind == LOAD or kind == GATHER:
                eff = load(s, t, e, kind, en)
                if s.e_c[e] != -2:
                    note(s, w, pos, t, eff, LOG_COPY, s.e_b[e])
            else:
                eff = t
            eff = barrier_event(s, w, t, b, e, kind, eff, en)
            if eff >= 0:
                others |= changed(s, w, t, pos, b, eff, s.i_first[inst], s.i_after[inst])
    return 0
