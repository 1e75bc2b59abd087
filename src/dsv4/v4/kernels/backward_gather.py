"""Gradients of V4 attention: load a query's Q and dO, and the rows it lists, into shared memory; store dQ. All
architectures share this file. Gathering is one role of 4 warps; the kernels' role charts show when it waits.
"""

from dsv4.kernels.compat import async_copy, cp_async, gl, gluon, mbarrier, reinterpret, tma_load, tma_store

PANEL = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def gather_role(operands, memory, pools, query, TURNED: gl.constexpr):
    """Fill q, dout and kv of the kernel's `memory`, with the barriers q_ready, ready and free."""
    q_ready = memory.q_ready.at(0)
    BOX: gl.constexpr = operands.q_desc.layout
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mbarrier.expect(q_ready, 2 * 64 * 512 * 2)
    for half in gl.static_range(2):
        for panel in gl.static_range(4):
            place = [query.number, query.head, half * 256 + panel * 64]
            panel_of_q = reinterpret(memory.q.index(half), [4, 1, 64, 64], BOX).index(panel)
            tma_load(operands.q_desc, place, q_ready, panel_of_q)
            panel_of_dout = reinterpret(memory.dout.index(half), [4, 1, 64, 64], BOX).index(panel)
            if half * 4 + panel < 8 - TURNED:
                tma_load(operands.dout_desc, place, q_ready, panel_of_dout)
            else:
                place = [query.number, query.head, (half * 4 + panel - 8 + TURNED) * 64]
                tma_load(operands.turned_desc, place, q_ready, panel_of_dout)
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, L))
    entry = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    phase = 1  # the first wait on an untouched barrier passes
    for block in range(0, query.blocks):
        slot = block * 64 + entry
        number = gl.load(query.line + slot, mask=slot < query.width, other=-1)
        there = number >= 0
        in_window = block < pools.window_blocks
        offset = (number - gl.where(in_window, 0, pools.window_rows)).to(gl.int64)
        offset = offset * gl.where(in_window, pools.window_stride, pools.compressed_stride)
        base = gl.where(in_window, pools.window_ptr, pools.compressed_ptr)
        memory.free.wait(0, phase)
        for half in gl.static_range(2):
            panels = reinterpret(memory.kv.index(half), [4, 64, 64], PANEL)
            for panel in gl.static_range(4):
                here = base + offset[:, None] * 8 + (half * 256 + panel * 64 + column)[None, :]
                cp_async(panels.index(panel), here, mask=there[:, None])
        async_copy.mbarrier_arrive(memory.ready.at(0), increment_count=False)
        phase = phase ^ 1


@gluon.jit
def numbers(query, block, L: gl.constexpr):
    """Load the row numbers of a block; -1 = nothing there."""
    slot = block * 64 + gl.arange(0, 64, layout=L)
    return gl.load(query.line + slot, mask=slot < query.width, other=-1)


@gluon.jit
def send_half(dq_desc, kv, query, H: gl.constexpr):
    """Start the store of a half of dQ's columns, from its half of kv, without a wait."""
    BOX: gl.constexpr = dq_desc.layout
    panels = reinterpret(kv.index(H), [4, 1, 64, 64], BOX)
    for panel in gl.static_range(4):
        tma_store(dq_desc, [query.number, query.head, H * 256 + panel * 64], panels.index(panel))
