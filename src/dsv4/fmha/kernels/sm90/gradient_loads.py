"""What the load roles of backward_keys.py and backward_dq.py copy: the 128 rows or keys that a CTA owns, by halves, and
the steps that it goes through. Both come in pairs of tensors, Q with dO and K with V.

Where a tile reaches into the next sequence of a varlen batch, TMA reports to the barrier `landed` instead of `ready`;
the load role zeroes what is not the sequence's and arrives at `ready` itself.
"""

from dsv4.fmha.kernels.loads import zero_invisible
from dsv4.kernels.compat import fence_async_shared, gl, gluon, mbarrier, reinterpret, tma_load


@gluon.jit
def load_tile(desc, tile, ready, batch, head, row, D: gl.constexpr):
    """Rows from `row` on, of 64 or of 128; where they have two dimensions, tokens and group, TMA packs them."""
    BOX: gl.constexpr = desc.layout
    ROWS: gl.constexpr = tile.shape[0]  # Triton 3.6: a plain int in a list is no argument of a function
    GROUP: gl.constexpr = desc.block_shape[3] if len(desc.block_shape) == 5 else 1
    if len(desc.block_shape) == 5:
        panels = reinterpret(tile, [D // 64, 1, 1, ROWS // GROUP, GROUP, 64], BOX)
        for panel in gl.static_range(D // 64):
            tma_load(desc, [batch, head, row // GROUP, 0, panel * 64], ready, panels.index(panel))
    else:
        panels = reinterpret(tile, [D // 64, 1, 1, ROWS, 64], BOX)
        for panel in gl.static_range(D // 64):
            tma_load(desc, [batch, head, row, panel * 64], ready, panels.index(panel))


@gluon.jit
def load_pair(x_desc, y_desc, x, y, ready, batch, head, row, D: gl.constexpr):
    load_tile(x_desc, x, ready, batch, head, row, D)
    load_tile(y_desc, y, ready, batch, head, row, D)


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
