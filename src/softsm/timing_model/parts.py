"""Parts of a replay (replay.py) that need little of its state: the choice of the next warp, the cost of code that is
not cached, the warps that an arrival wakes, the log.

The times of active warps are the leaves of a tree. Each node holds the earlier time of its two children, so the root
holds the earliest, and a warp's new time changes only the nodes on its path to the root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit, types
from numba.core import cgutils

from softsm.engine.native import intrinsic

# isort: off
from softsm.timing_model.machine import (
    COLD, FAR, INF, JUMP_FAR, JUMP_NEAR, LOG_COLUMNS, LOG_ROOM, LOG_ROWS, LOW, NEAR, ON_PRODUCTS,
)  # fmt: skip

# isort: on

# Not `native`: the disk cache keeps it as a part of its callers.
options: dict = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
part: Callable[[Callable], Any] = njit(forceinline=True, **options)


@intrinsic
def pointers(typingctx, state):
    """Turns a named tuple of arrays into one of pointers to their first elements: a pointer is one number, an array
    seven, and Numba counts references to an array."""

    def codegen(context, builder, signature, args):
        arrays = zip(state.types, cgutils.unpack_tuple(builder, args[0]))
        found = [context.make_array(kind)(context, builder, value).data for kind, value in arrays]
        return context.make_tuple(builder, signature.return_type, found)

    made = types.NamedTuple([types.CPointer(array.dtype) for array in state.types], state.instance_class)
    return made(state), codegen


@part
def start(s, inst, time, active, n_active):
    """Starts the warps of a CTA. -> how many are active"""
    for v in range(s.i_first[inst], s.i_after[inst]):
        s.w_time[v] = time
        active[n_active] = v
        n_active += 1
    return n_active


@part
def plant(s, tree, leaves, active, n_active):
    """Rebuilds all nodes."""
    for k in range(leaves):
        tree[leaves + k] = s.w_time[active[k]] if k < n_active else INF
    for k in range(leaves - 1, 0, -1):
        tree[k] = min(tree[2 * k], tree[2 * k + 1])


@part
def change(tree, k, time):
    """Updates one leaf and the nodes above it."""
    tree[k] = time
    while k > 1:
        time = min(time, tree[k ^ 1])
        k >>= 1
        tree[k] = time


@part
def earliest(tree, leaves):
    """Finds the earliest warp. -> (its place among the active warps, the earliest time of the others)"""
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


@part
def fetch(s, before, i):
    """Returns the cycles to fetch an instruction that no warp has run yet: fast if it follows the one before,
    slow if it is the target of a jump."""
    over = abs(i - before - 1) if before >= 0 else FAR
    if over >= NEAR:
        return s.p[JUMP_NEAR] + (s.p[JUMP_FAR] - s.p[JUMP_NEAR]) * min(1.0, (over - NEAR) / (FAR - NEAR))
    return s.p[JUMP_NEAR] * over / NEAR if over > 0 else s.p[COLD]


@part
def held(s, first, mask):
    """Returns when the scoreboards of the mask are released; `first`: the warp's first scoreboard."""
    time = 0.0
    for r in range(6):
        if mask >> r & 1 and s.board[first + r] > time:
            time = s.board[first + r]
    return time


@part
def wake(s, tag, t, first, after):
    """Resumes the warps from first to after that wait for the tag. -> whether there is one"""
    found = False
    for v in range(first, after):
        if s.w_tag[v] == tag:
            s.w_tag[v] = -1
            s.w_time[v] = t
            found = True
    return found


@part
def wake_for_product(s, g, soon, inst):
    """Resumes the warps that wait for products of a warpgroup."""
    found = False
    for v in range(s.i_first[inst], s.i_after[inst]):
        if s.w_tag[v] == ON_PRODUCTS + g:
            s.w_tag[v] = -1
            s.w_time[v] = max(soon, s.w_since[v])
            found = True
    return found


@part
def note(s, w, pos, begin, end, kind, more):
    """Adds a row to the log, if there is room."""
    n = s.sizes[LOG_ROWS]
    if n < s.sizes[LOG_ROOM]:
        s.sizes[LOG_ROWS] = n + 1
        k = LOG_COLUMNS * n
        s.log[k], s.log[k + 1], s.log[k + 2] = w, pos, begin
        s.log[k + 3], s.log[k + 4], s.log[k + 5] = end, kind, more
