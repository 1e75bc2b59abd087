"""Rows of a pool by number: their addresses, and the words of packed rows.

A row that is not there (-1, out of range) is marked absent; its loads give zeros. FORMAT: caches/formats.py.
"""

from dsv4.caches.kernels.unpack import load_scales
from dsv4.kernels.compat import Value, aggregate, gl, gluon
from dsv4.kernels.division import quotient


@aggregate
class Pool:
    """Rows by number. Strides are in units of 8 elements, of packed rows in units of UNIT bytes."""

    ptr: Value
    rows: Value
    page_rows: Value
    page_stride: Value
    row_stride: Value
    inverse: Value  # ceil(2^shift / page_rows)
    shift: Value


@gluon.jit
def pool_in_units(sizes, TIMES: gl.constexpr):
    """Convert the page stride to a unit that is TIMES smaller."""
    return Pool(
        sizes.ptr, sizes.rows, sizes.page_rows, sizes.page_stride * TIMES, sizes.row_stride, sizes.inverse, sizes.shift
    )


@gluon.jit
def page_of(number, pool):
    return quotient(number, pool.inverse, pool.shift)


@gluon.jit
def entries(L: gl.constexpr, KEYS: gl.constexpr = 64):
    return gl.arange(0, KEYS, layout=gl.SliceLayout(1, L))


@gluon.jit
def plain_rows(pool, number):
    """Locate rows of a plain tensor: (offset in units of 8 elements, whether they are there)."""
    page = page_of(number, pool)
    offset = page.to(gl.int64) * pool.page_stride + (number - page * pool.page_rows).to(gl.int64) * pool.row_stride
    return offset, (number >= 0) & (number < pool.rows)


@gluon.jit
def scales_begin(page_rows, FORMAT: gl.constexpr):
    """Return the offset of the scales in a page, in bytes."""
    if FORMAT.interleaved:
        return page_rows * 0 + FORMAT.data_bytes
    else:
        return page_rows * FORMAT.data_bytes


@gluon.jit
def row_offsets(pool, number, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    """Locate packed rows: (first byte, whether they are there, first byte of their scales)."""
    page = page_of(number, pool)
    place = (number - page * pool.page_rows).to(gl.int64)
    start = page.to(gl.int64) * pool.page_stride * UNIT
    data = start + place * FORMAT.data_step
    there = (number >= 0) & (number < pool.rows)
    return data, there, start + scales_begin(pool.page_rows.to(gl.int64), FORMAT) + place * FORMAT.scale_step


@gluon.jit
def rows_and_scales(pool, number, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    """Locate packed rows: (first byte, whether they are there, their scales)."""
    data, there, at = row_offsets(pool, number, UNIT, FORMAT)
    return data, there, load_scales(pool.ptr, at, there, 0, 8, UNIT, FORMAT)


@gluon.jit
def load_words(ptr, data, there, FIRST: gl.constexpr, N: gl.constexpr, UNIT: gl.constexpr):
    """Load N words of 4 bytes from word FIRST on of each row: int32 [rows, N], in the layout whose rows data has."""
    column = FIRST + gl.arange(0, N, layout=gl.SliceLayout(0, data.type.layout.parent))
    if UNIT >= 8:
        word_ptr = ptr.to(gl.pointer_type(gl.int32), bitcast=True)
        x = gl.load(word_ptr + (data // 4)[:, None] + column[None, :], mask=there[:, None], other=0)
    else:
        pointers = ptr + data[:, None] + (column * 4)[None, :]
        x = gl.load(pointers, mask=there[:, None], other=0).to(gl.int32)
        for i in gl.static_range(1, 4):
            x = x | (gl.load(pointers + i, mask=there[:, None], other=0).to(gl.int32) << (8 * i))
    return x


@gluon.constexpr_function
def codes_layout(warps, panels, panel_words, words=4):
    """Return the layout of codes: `words` of 32 bits of each of several panels per thread."""
    lanes = panel_words // words  # lanes of a row
    return gl.BlockedLayout([1, panels, words], [32 // lanes, 1, lanes], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def load_codes(
    ptr,
    data,
    there,
    FIRST: gl.constexpr,
    PANELS: gl.constexpr,
    UNIT: gl.constexpr,
    FORMAT: gl.constexpr,
    THREADS: gl.constexpr = 4,
):
    """Load the codes of 64 x PANELS values of each row, by THREADS threads: int32 [rows, PANELS, words of a panel]."""
    N: gl.constexpr = FORMAT.panel_words
    L: gl.constexpr = codes_layout(gl.num_warps(), PANELS, N, N // THREADS)
    R: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    data = gl.convert_layout(data, R)[:, None, None]
    there = gl.convert_layout(there, R)[:, None, None]
    panel = FIRST + gl.arange(0, PANELS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    word = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    column = panel[None, :, None] * N + word[None, None, :]
    if UNIT >= 8:
        word_ptr = ptr.to(gl.pointer_type(gl.int32), bitcast=True)
        x = gl.load(word_ptr + data // 4 + column, mask=there, other=0)
    else:
        pointers = ptr + data + column * 4
        x = gl.load(pointers, mask=there, other=0).to(gl.int32)
        for i in gl.static_range(1, 4):
            x = x | (gl.load(pointers + i, mask=there, other=0).to(gl.int32) << (8 * i))
    return x


@gluon.jit
def _wide(x):
    """Extend x >= 0 to uint64, with zeros above 32 bits: a product of two is one instruction."""
    if x.dtype == gl.int32:
        x = x.to(gl.uint32, bitcast=True)
    return x.to(gl.uint64)


@gluon.jit
def row_addresses(pool, number, spare, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    """Locate packed rows: (addresses, that of `spare` for an absent row, those of their scales, whether they are
    there)."""
    page = page_of(number, pool)
    place = _wide(number - page * pool.page_rows)
    start = pool.ptr.to(gl.uint64) + _wide(page) * _wide(pool.page_stride) * UNIT
    there = (number >= 0) & (number < pool.rows)
    at = start + scales_begin(_wide(pool.page_rows), FORMAT) + place * FORMAT.scale_step
    return gl.where(there, start + place * FORMAT.data_step, spare.to(gl.uint64)), at, there


@gluon.constexpr_function
def _loads(first, panels):
    """Return PTX that loads 16 bytes of each of some panels of 64 bytes, from `first` on."""
    to = [", ".join(f"${4 * panel + word}" for word in range(4)) for panel in range(panels)]
    return " ".join(
        f"ld.global.L2::256B.v4.b32 {{{to[panel]}}}, [${4 * panels}+{64 * (first + panel)}];" for panel in range(panels)
    )


@gluon.constexpr_function
def _loaded(panels):
    return ",".join(["=&r"] * (4 * panels) + ["l"])


@gluon.jit
def _in_a_row(a, b, c, d):
    """Join the words of a thread, four tensors [rows, 4] -> [rows, 16]."""
    return gl.join(gl.join(a, c), gl.join(b, d)).reshape([a.shape[0], 16])


@gluon.jit
def load_codes_unmasked(row, FIRST: gl.constexpr, PANELS: gl.constexpr):
    """Do load_codes for one or two panels of 64 bytes of rows that can all be read, at multiples of 16 bytes: no mask
    sets registers to 0 first. The load prefetches the rest of the 256 bytes, most of the row, into L2."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [gl.num_warps(), 1], [1, 0])
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, L)).to(gl.uint64)
    row = gl.convert_layout(row, gl.SliceLayout(1, L))[:, None] + (lane * 16)[None, :]
    if PANELS == 1:
        a, b, c, d = gl.inline_asm_elementwise(
            _loads(FIRST, 1), _loaded(1), [row], dtype=(gl.int32,) * 4, is_pure=False, pack=1
        )
        x = _in_a_row(a, b, c, d).reshape([row.shape[0], 1, 16])
    else:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            _loads(FIRST, 2), _loaded(2), [row], dtype=(gl.int32,) * 8, is_pure=False, pack=1
        )
        x = gl.join(_in_a_row(a, b, c, d), _in_a_row(e, f, g, h)).permute((0, 2, 1))
    return gl.convert_layout(x, codes_layout(gl.num_warps(), PANELS, 16))
