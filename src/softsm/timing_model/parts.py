"""Parts of a replay (replay.py) that need little of its state: which warp goes next, what code that is not in a
cache costs, whom an arrival wakes, the log. Numba compiles them into it; what needs many arrays is written out there,
since a call with fifteen of them takes as long as six instructions.

Times of active warps are the leaves of a tree, whose nodes have the earlier time of their two: the earliest is at the
top, and a warp's new time changes the nodes on its way there.
"""

from __future__ import annotations

from softsm.engine.native import native
from softsm.timing_model.machine import COLD, FAR, INF, JUMP_FAR, JUMP_NEAR, LOW, NEAR


@native(None)
def plant(tree, leaves, w_time, active, n_active):
    """All nodes anew."""
    for k in range(leaves):
        tree[leaves + k] = w_time[active[k]] if k < n_active else INF
    for k in range(leaves - 1, 0, -1):
        tree[k] = min(tree[2 * k], tree[2 * k + 1])


@native(None)
def change(tree, k, time):
    """One leaf, and what is above it."""
    tree[k] = time
    while k > 1:
        time = min(time, tree[k ^ 1])
        k >>= 1
        tree[k] = time


@native(None)
def earliest(tree, leaves):
    """-> (its place among the active warps, the earliest time of the others)"""
    second = INF
    k = 1
    while k < leaves:
        k = 2 * k & LOW
        x = tree[k + 1]
        if x < tree[k]:
            x = tree[k]
            k += 1
        if x < second:
            second = x
    return k - leaves, second


@native(None)
def fetch(before, i, p):
    """Cycles until the code of an instruction is there that nobody has run: what follows the one before comes fast,
    what a jump leads to does not."""
    over = abs(i - before - 1) if before >= 0 else FAR
    if over >= NEAR:
        return p[JUMP_NEAR] + (p[JUMP_FAR] - p[JUMP_NEAR]) * min(1.0, (over - NEAR) / (FAR - NEAR))
    return p[JUMP_NEAR] * over / NEAR if over > 0 else p[COLD]


@native(None)
def held(board, first, mask):
    """When the scoreboards of the mask are down; `first`: of the warp."""
    time = 0.0
    for r in range(6):
        if mask >> r & 1 and board[first + r] > time:
            time = board[first + r]
    return time


@native(None)
def wake(tag, t, w_tag, w_time, first, after):
    """Warps from first to after that wait for what the tag names go on. -> whether there is one"""
    found = False
    for v in range(first, after):
        if w_tag[v] == tag:
            w_tag[v] = -1
            w_time[v] = t
            found = True
    return found


@native(None)
def note(log, n, w, pos, begin, end, kind, more):
    """A row of the log, if there is room. -> rows"""
    if 6 * n >= len(log):
        return n
    k = 6 * n
    log[k], log[k + 1], log[k + 2], log[k + 3], log[k + 4], log[k + 5] = w, pos, begin, end, kind, more
    return n + 1
