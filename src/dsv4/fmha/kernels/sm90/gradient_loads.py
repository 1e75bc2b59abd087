"""What the load roles of backward_keys.py and backward_dq.py copy: the 128 rows or keys that a CTA owns, by halves, and
the steps that it goes through. Both come in pairs of tensors, Q with dO and K with V.

Where a tile reaches into the next sequence of a varlen batch, TMA reports to the barrier `landed` instead of `ready`;
the load role zeroes what is not the sequence's and arrives at `ready` itself.
"""

from dsv4.fmha.kernels.loads import load_packed, zero_invisible
from dsv4.kernels.compat import fence_async_shared, gl, gluon, mbarrier


@gluon.jit
def load_pair(x_desc, y_desc, x, y, ready, batch, head, row, D: gl.constexpr):
    load_packed(x_desc, x, ready, batch, head, row, D)
    load_packed(y_desc, y, ready, batch, head, row, D)


@gluon.jit
def load_halves(x_desc, y_desc, x, y, ready, batch, head, first, D: gl.constexpr):
    mbarrier.expect(ready, 2 * 128 * D * 2)
    for half in gl.static_range(2):
        load_pair(x_desc, y_desc, x.index(half), y.index(half), ready, batch, head, first + half * 64, D)


@gluon.jit
def load_own(x_desc, y_desc, x, y, memory, foreign, work, head, first, begin, end, D: gl.constexpr):
    """The 128 rows of a head from `own` on of the sequence that begins at `first`, by halves; if some are foreign, 0 in
    rows outside of [begin, end) of it -> next phase of landed."""
    landed_phase = gl.to_tensor(0)
    if foreign:
        load_halves(x_desc, y_desc, x, y, memory.landed.at(0), work.batch, head, first + work.own, D)
        memory.landed.wait(0, 0)
        for half in gl.static_range(2):
            zero_invisible(x.index(half), work.own + half * 64, begin, end, 64, D)
            zero_invisible(y.index(half), work.own + half * 64, begin, end, 64, D)
        fence_async_shared()  # generic stores -> tensor-core reads
        memory.own_ready.arrive(0)
        landed_phase = landed_phase ^ 1
    else:
        load_halves(x_desc, y_desc, x, y, memory.own_ready.at(0), work.batch, head, first + work.own, D)
    return landed_phase


@gluon.jit
def load_next(
    x_desc, y_desc, x, y, ready, landed, landed_phase, foreign, work, head, place, row, begin, end, D: gl.constexpr
):
    """Rows from `row` of the sequence on, which are those from `place` on of the tensors; otherwise as load_own."""
    ROWS: gl.constexpr = x.shape[0]
    if foreign:
        mbarrier.expect(landed, 2 * ROWS * D * 2)
        load_pair(x_desc, y_desc, x, y, landed, work.batch, head, place, D)
        mbarrier.wait(landed, landed_phase)
        zero_invisible(x, row, begin, end, ROWS, D)
        zero_invisible(y, row, begin, end, ROWS, D)
        fence_async_shared()  # generic stores -> tensor-core reads
        mbarrier.arrive(ready, count=1)
        landed_phase = landed_phase ^ 1
    else:
        mbarrier.expect(ready, 2 * ROWS * D * 2)
        load_pair(x_desc, y_desc, x, y, ready, work.batch, head, place, D)
    return landed_phase
