"""How the gathering warps of sparse.py store rows in a slot of the ring, half a block: which thread has which part of a
row, and which arrivals announce it.

A slot [64, 256] is four panels of 64 columns. cp.async copies rows of plain tensors, and the bf16 part of packed rows;
ordinary stores write unpacked values.
"""

from dsv4.kernels.compat import async_copy, barrier, cp_async, gl, gluon, mbarrier, reinterpret, reinterpret_as
from dsv4.v4.kernels.pool_rows import load_words


@gluon.constexpr_function
def lanes(warps):
    """Return a layout with 16 bytes of bf16 per thread, 8 threads per 64 values of a row."""
    return gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def words(warps):
    """Return a layout with 16 bytes of 32-bit words per thread, 4 threads per 64 bytes of a row."""
    return gl.BlockedLayout([1, 4], [8, 4], [warps, 1], [1, 0])


@gluon.constexpr_function
def arrivals(warps):
    """Return the arrivals on ``ready``: one per gathering thread when its copies land, one for all ordinary stores."""
    return 32 * warps + 1


@gluon.jit
def panels_of(tile):
    """View a tile [64, 256] or [64, 128] as panels of 64 columns."""
    PANEL: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return reinterpret(tile, [tile.shape[1] // 64, 64, 64], PANEL)


@gluon.jit
def copy_rows(ptr, offset, there, tile, COLUMN: gl.constexpr):
    """Copy 256 columns of 64 rows by cp.async to tile; absent rows become zeros. offset: in units of 8."""
    L: gl.constexpr = lanes(gl.num_warps())
    panels = panels_of(tile)
    pointers = ptr + offset[:, None] * 8 + (COLUMN + gl.arange(0, 64, layout=gl.SliceLayout(0, L)))[None, :]
    for panel in gl.static_range(4):
        cp_async(panels.index(panel), pointers + panel * 64, mask=there[:, None])


@gluon.jit
def panels_in(tile, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """View panels of a half block, or of half of one, as bf16 in pairs: [64, COUNT, 32]."""
    PANEL: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)
    panels = reinterpret_as(tile, gl.int32, [tile.shape[1] // 64 // COUNT, COUNT, 64, 32], PANEL)
    return panels.index(FIRST // COUNT).permute((1, 0, 2))


@gluon.jit
def copy_plain(rows, there, tile, ready, FORMAT: gl.constexpr):
    """Copy the last 64 values of each row, which are bf16, by cp.async; make all arrivals on ``ready`` but one."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])  # the rows of words()
    rows = gl.convert_layout(rows, gl.SliceLayout(1, L))
    there = gl.convert_layout(there, gl.SliceLayout(1, L))
    column = FORMAT.code_bytes // 2 + gl.arange(0, 64, layout=gl.SliceLayout(0, L))
    cp_async(panels_of(tile).index(tile.shape[1] // 64 - 1), rows[:, None] + column[None, :], mask=there[:, None])
    async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def plain_panel(ptr, data, there, tile, ready, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    """Do copy_plain for rows at any multiple of UNIT bytes."""
    if UNIT >= 16:
        copy_plain(ptr.to(gl.pointer_type(gl.bfloat16), bitcast=True) + data // 2, there, tile, ready, FORMAT)
    else:
        PANEL: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
        last = reinterpret_as(tile, gl.int32, [4, 64, 32], PANEL).index(3)
        last.store(load_words(ptr, data, there, FORMAT.code_bytes // 4, 32, UNIT))
        mbarrier.arrive(ready, count=32 * gl.num_warps())


@gluon.jit
def announce_once(ready):
    """Announce, with one arrival, that all stores are done. Before Triton 3.9 an `arrive` counts as access to all of
    shared memory, and the compiler puts a barrier of warps before and after it; not with `expect`."""
    barrier()
    mbarrier.expect(ready, 0)


@gluon.jit
def write_bias(bias, there):
    """Write the bias of a block's scores. Its reader has read the last one: it then freed half 0 or half 1."""
    bias.store(gl.where(there, 0.0, -float("inf")))
