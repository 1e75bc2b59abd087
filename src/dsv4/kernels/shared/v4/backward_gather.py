"""Gradients of V4 attention: a query's Q and dO, and the rows it lists, into shared memory. One role of 4 warps, the
same on every architecture; the kernels' role charts say when it waits.
"""

from dsv4.kernels.compat import async_copy, cp_async, gl, gluon, mbarrier, reinterpret, tma_load

PANEL = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def gather_role(descriptors, smem, barriers, pools, line, query, head, blocks, width, TURNED: gl.constexpr):
    q_desc, dout_desc, turned_desc = descriptors
    q, dout, kv = smem
    q_ready, ready, free = barriers
    window_ptr, window_rows, window_stride, window_blocks, compressed_ptr, compressed_stride = pools
    BOX: gl.constexpr = q_desc.layout
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mbarrier.expect(q_ready, 2 * 64 * 512 * 2)
    for half in gl.static_range(2):
        for panel in gl.static_range(4):
            place = [query, head, half * 256 + panel * 64]
            tma_load(q_desc, place, q_ready, reinterpret(q.index(half), [4, 1, 64, 64], BOX).index(panel))
            panel_of_dout = reinterpret(dout.index(half), [4, 1, 64, 64], BOX).index(panel)
            if half * 4 + panel < 8 - TURNED:
                tma_load(dout_desc, place, q_ready, panel_of_dout)
            else:
                tma_load(turned_desc, [query, head, (half * 4 + panel - 8 + TURNED) * 64], q_ready, panel_of_dout)
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, L))
    entry = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    phase = 1  # the first wait on an untouched barrier passes
    for block in range(0, blocks):
        slot = block * 64 + entry
        number = gl.load(line + slot, mask=slot < width, other=-1)
        there = number >= 0
        in_window = block < window_blocks
        offset = (number - gl.where(in_window, 0, window_rows)).to(gl.int64)
        offset = offset * gl.where(in_window, window_stride, compressed_stride)
        base = gl.where(in_window, window_ptr, compressed_ptr)
        mbarrier.wait(free, phase)
        for half in gl.static_range(2):
            panels = reinterpret(kv.index(half), [4, 64, 64], PANEL)
            for panel in gl.static_range(4):
                here = base + offset[:, None] * 8 + (half * 256 + panel * 64 + column)[None, :]
                cp_async(panels.index(panel), here, mask=there[:, None])
        async_copy.mbarrier_arrive(ready, increment_count=False)
        phase = phase ^ 1


@gluon.jit
def numbers(line, block, width, L: gl.constexpr):
    slot = block * 64 + gl.arange(0, 64, layout=L)
    return gl.load(line + slot, mask=slot < width, other=-1)
