"""Rows that a query of V4 attention names by number, gathered from their pools into shared memory. 4 warps.

A row that is not there (-1, out of range, past the length) is filled with zeros, and its bias is -inf: 0 * NaN would be
NaN. Rows of plain tensors come by cp.async, rows of an Fp8Cache through registers, where they become bf16.
"""

from dsv4.kernels.compat import cp_async, gl, gluon, reinterpret

NONE, LIST, TABLE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # how compressed rows are named
CELLS, FP8, TMA = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # how the rows of a pool are read
LANES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 bytes of bf16 per thread
LANES8 = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))  # 16 bytes of e4m3 per thread


@gluon.jit
def request_of(query, starts_ptr, requests, given):
    """The request that a query belongs to: the last one that starts at or before it; `requests` if there is none.

    Without starts every query is a request of its own.
    """
    low = gl.where(given, 0, query + 1)
    high = gl.where(given, requests + 1, query + 1)
    while low < high:
        middle = (low + high) // 2
        if gl.load(starts_ptr + middle) <= query:
            low = middle + 1
        else:
            high = middle
    return gl.where(low == 0, requests, low - 1)


@gluon.jit
def share(query, window, compressed, requests, HOW: gl.constexpr):
    """What a query names -> (window rows, compressed rows, its line of the compressed list or of the block table).

    window, compressed: (lengths, whether they are given, width of the list); requests: (starts, whether they are given,
    how many). A length that is not given is the width.
    """
    count = gl.load(window[0] + query, mask=window[1] != 0, other=window[2])
    window_count = gl.minimum(gl.maximum(count, 0), window[2])
    compressed_count = 0
    line = query.to(gl.int64)
    if HOW != NONE:
        count = gl.load(compressed[0] + query, mask=compressed[1] != 0, other=compressed[2])
        compressed_count = gl.minimum(gl.maximum(count, 0), compressed[2])
    if HOW == TABLE:
        request = request_of(query, requests[0], requests[2], requests[1] != 0)
        compressed_count = gl.where(request < requests[2], compressed_count, 0)  # none past the last request
        line = gl.minimum(request, requests[2] - 1).to(gl.int64)
    return window_count, compressed_count, line


@gluon.jit
def numbers_of(names, first, count, pages, HOW: gl.constexpr, L: gl.constexpr):
    """Row numbers of 64 entries from `first` on, -1 past `count`. names: (list or table line, rows per page)."""
    line_ptr, page_rows = names
    place = first + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    if HOW == TABLE:
        page = gl.load(line_ptr + place // page_rows, mask=place < count, other=-1)
        page = gl.where(page < pages, page, -1)  # before the product, which may not fit
        return gl.where(page >= 0, page * page_rows + place % page_rows, -1)
    return gl.load(line_ptr + place, mask=place < count, other=-1)


@gluon.jit
def bias_of(number, rows):
    return gl.where((number >= 0) & (number < rows), 0.0, -float("inf"))


@gluon.jit
def fill_plain(pool, names, first, count, tile, bias, H: gl.constexpr, HOW: gl.constexpr):
    """Half H of 64 rows by cp.async, one group. pool: (pointer, rows, rows per page, page and row stride / 8)."""
    ptr, rows, page_rows, page_stride, row_stride = pool
    number = numbers_of(names, first, count, rows // page_rows, HOW, LANES)
    there = (number >= 0) & (number < rows)
    page = number // page_rows
    offset = page.to(gl.int64) * page_stride + (number - page * page_rows).to(gl.int64) * row_stride
    PANEL: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    panels = reinterpret(tile, [4, 64, 64], PANEL)
    column = H * 256 + gl.arange(0, 64, layout=gl.SliceLayout(0, LANES))
    for panel in gl.static_range(4):
        pointers = ptr + offset[:, None] * 8 + (column + panel * 64)[None, :]
        cp_async(panels.index(panel), pointers, mask=there[:, None])
    bias.store(bias_of(number, rows))


@gluon.jit
def fp8_piece(ptr, data, scales, there, INDEX: gl.constexpr):
    """64 values [64, 64] of each row as bf16: one of the seven pieces with a scale, or the last, which is bf16."""
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LANES8))
    if INDEX == 7:
        rope_ptr = ptr.to(gl.pointer_type(gl.bfloat16))
        piece = gl.load(rope_ptr + (data // 2)[:, None] + (224 + column)[None, :], mask=there[:, None], other=0.0)
    else:
        x = gl.load(ptr + data[:, None] + (INDEX * 64 + column)[None, :], mask=there[:, None], other=0)
        # 2^(s - 127) in bf16 is s in the exponent's place; 0 is a subnormal, 255 is NaN.
        s = gl.load(ptr + scales + INDEX, mask=there, other=127).to(gl.int32)
        s = gl.where(s == 0, 0x40, gl.where(s == 255, 0x7FC0, s << 7)).to(gl.int16).to(gl.bfloat16, bitcast=True)
        piece = x.to(gl.float8e4nv, bitcast=True).to(gl.bfloat16) * s[:, None]
    return piece


@gluon.jit
def fill_fp8(pool, names, first, count, tile, bias, H: gl.constexpr, HOW: gl.constexpr, UNIT: gl.constexpr):
    """Half H of 64 rows of an Fp8Cache, as bf16. pool: (bytes, rows, rows per page, page stride / UNIT, -)."""
    ptr, rows, page_rows, page_stride, _ = pool
    number = numbers_of(names, first, count, rows // page_rows, HOW, LANES8)
    there = (number >= 0) & (number < rows)
    page = number // page_rows
    place = (number - page * page_rows).to(gl.int64)
    start = page.to(gl.int64) * page_stride * UNIT  # bytes
    PANEL: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    panels = reinterpret(tile, [4, 64, 64], PANEL)
    for panel in gl.static_range(4):
        scales = start + page_rows.to(gl.int64) * 576 + place * 8
        panels.index(panel).store(fp8_piece(ptr, start + place * 576, scales, there, H * 4 + panel))
    bias.store(bias_of(number, rows))


@gluon.jit
def fill(pool, names, first, count, tile, bias, H: gl.constexpr, HOW: gl.constexpr, FP8: gl.constexpr,
         UNIT: gl.constexpr):  # fmt: skip
    if FP8:
        fill_fp8(pool, names, first, count, tile, bias, H, HOW, UNIT)
    else:
        fill_plain(pool, names, first, count, tile, bias, H, HOW)
