"""Work tiles of V4 attention: which tile a CTA has, and how many rows it names by number."""

from dsv4.kernels.compat import gl, gluon
from dsv4.v4.kernels.arguments import Lists

NONE, LIST, TABLE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # how compressed rows are named
CP_ASYNC, TMA = gl.constexpr(0), gl.constexpr(2)  # how the rows of a plain pool are read


@gluon.jit
def tile_coord(tile_id, queries, heads, TILE: gl.constexpr = 64):
    """Return (query, first head, split) of a work tile; the head tiles of a query are neighbours, so one finds in L2
    what the other read."""
    head_tiles = (heads + TILE - 1) // TILE
    rest = tile_id // head_tiles
    split = rest // queries
    return rest - split * queries, (tile_id - rest * head_tiles) * TILE, split


@gluon.jit
def whole_first_coord(tile_id, whole, queries, heads):
    """Return (query, first head, split) of a work tile of 64 heads. The rows of the first `whole` queries are not
    split: -1. queries: those whose rows are."""
    head_tiles = (heads + 63) // 64
    line = tile_id // head_tiles
    split = gl.where(line < whole, -1, (line - whole) // queries)
    return line - gl.maximum(split, 0) * queries, (tile_id - line * head_tiles) * 64, split


@gluon.jit
def request_of(query, requests):
    """Return the request of a query: the last one that starts at or before it; their count if there is none."""
    given = requests.given != 0
    low = gl.where(given, 0, query + 1)
    high = gl.where(given, requests.count + 1, query + 1)
    while low < high:
        middle = (low + high) // 2
        if gl.load(requests.starts_ptr + middle) <= query:
            low = middle + 1
        else:
            high = middle
    return gl.where(low == 0, requests.count, low - 1)


@gluon.jit
def named_rows(query, window, compressed, requests, KV_INDEX: gl.constexpr, first=0):
    """Return (window rows, compressed rows, its line of the compressed list or of the block table) of a query.

    window, compressed: Names. first: the number of query 0, as the starts of requests count it.
    """
    count = gl.load(window.lengths_ptr + query, mask=window.given != 0, other=window.width)
    window_count = gl.minimum(gl.maximum(count, 0), window.width)
    compressed_count = 0
    line = query.to(gl.int64)
    if KV_INDEX != NONE:
        count = gl.load(compressed.lengths_ptr + query, mask=compressed.given != 0, other=compressed.width)
        compressed_count = gl.minimum(gl.maximum(count, 0), compressed.width)
    if KV_INDEX == TABLE:
        request = request_of(query + first, requests)
        compressed_count = gl.where(request < requests.count, compressed_count, 0)  # none past the last request
        line = gl.minimum(request, requests.count - 1).to(gl.int64)
    return window_count, compressed_count, line


@gluon.jit
def index_lists(query, window, compressed, requests, KV_INDEX: gl.constexpr, KEYS: gl.constexpr = 64, first=0):
    """Return the lists of a query. KEYS: entries of a block."""
    count, more, line = named_rows(query, window, compressed, requests, KV_INDEX, first)
    window_ptr = window.list_ptr + query.to(gl.int64) * window.line
    blocks = (count + KEYS - 1) // KEYS
    return Lists(window_ptr, count, blocks, compressed.list_ptr + line * compressed.line, more)
