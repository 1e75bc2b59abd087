"""Row numbers and pool of a block: 64 entries of a query's window list, or of its compressed rows, which follow."""

from dsv4.kernels.compat import aggregate, gl, gluon
from dsv4.v4.kernels.pool_rows import Pool, page_of
from dsv4.v4.kernels.tile_scheduler import LIST, NONE


@aggregate
class Pools:
    window: Pool
    compressed: Pool


@gluon.jit
def numbers_of(lists, block, wanted, pool, entry, KV_INDEX: gl.constexpr):
    """Return row numbers of the entries of a block, -1 past the end, or everywhere unless it is wanted."""
    KEYS: gl.constexpr = entry.shape[0]
    in_window = block < lists.window_blocks
    place = block * KEYS - gl.where(in_window, 0, lists.window_blocks * KEYS) + entry
    listed = (place < lists.window_count) & in_window & wanted
    if KV_INDEX == NONE:
        number = gl.load(lists.window_ptr + place, mask=listed, other=-1)
    elif KV_INDEX == LIST:
        listed = listed | ((place < lists.count) & (block >= lists.window_blocks) & wanted)
        number = gl.load(gl.where(in_window, lists.window_ptr, lists.line_ptr) + place, mask=listed, other=-1)
    else:
        at = page_of(place, pool)
        further = (place < lists.count) & (block >= lists.window_blocks) & wanted
        page = gl.load(lists.line_ptr + at, mask=further, other=-1)
        page = gl.where(page < pool.rows // pool.page_rows, page, -1)  # clamped before the product, which may overflow
        number = gl.load(lists.window_ptr + place, mask=listed, other=-1)
        number = gl.where(page >= 0, page * pool.page_rows + place - at * pool.page_rows, number)
    return number


@gluon.jit
def pool_of(pools, in_window):
    """Return the pool of a block."""
    a, b = pools.window, pools.compressed
    return Pool(
        gl.where(in_window, a.ptr, b.ptr),
        gl.where(in_window, a.rows, b.rows),
        gl.where(in_window, a.page_rows, b.page_rows),
        gl.where(in_window, a.page_stride, b.page_stride),
        gl.where(in_window, a.row_stride, b.row_stride),
        gl.where(in_window, a.inverse, b.inverse),
        gl.where(in_window, a.shift, b.shift),
    )
