"""The keys that a tile of query rows sees: device functions and layouts that the kernels of every architecture share.

The query heads of one KV head are packed into rows: row r of (sequence, KV head) is query token ``r // group`` and
query head ``kv_head * group + r % group``, so the rows of a tile span few tokens and one K tile serves them all.
"""

from typing import NamedTuple

from dsv4.kernels.compat import Value, aggregate, gl, gluon
from dsv4.kernels.division import divide

NO_BOUND = 1 << 30  # what the host passes for a window side of -1
# The ways in which a tile of keys is read; loads.py explains each.
DENSE, ROWS, PAGES, CP_ASYNC = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)


@aggregate
class Pages:
    """The pages of a sequence."""

    table_ptr: Value  # row of the block table
    page_size: Value
    count: Value  # pages there are in all


@gluon.jit
def sequence(seq, varlen, tensors, sizes, KV_LOAD: gl.constexpr):
    """Return (first query row, queries T, first key row, keys S) of a sequence, clamped to the bounds of the tensors.

    varlen: known at compile time or not.
    """
    q_start = 0
    k_start = 0
    tokens, keys, total_q, total_k = sizes.tokens, sizes.keys, sizes.total_q, sizes.total_k
    if KV_LOAD >= PAGES:
        keys = gl.minimum(gl.maximum(gl.load(tensors.lengths_ptr + seq), 0), keys)
    elif varlen:
        q_start, tokens, k_start, keys = packed_sequence(seq, tensors.cu_q_ptr, tensors.cu_k_ptr, total_q, total_k)
    return q_start, tokens, k_start, keys


@gluon.jit
def packed_sequence(seq, cu_q_ptr, cu_k_ptr, total_q, total_k):
    """Return the same for contiguous sequences."""
    q_start = gl.minimum(gl.maximum(gl.load(cu_q_ptr + seq), 0), total_q)
    q_end = gl.minimum(gl.maximum(gl.load(cu_q_ptr + seq + 1), q_start), total_q)
    k_start = gl.minimum(gl.maximum(gl.load(cu_k_ptr + seq), 0), total_k)
    k_end = gl.minimum(gl.maximum(gl.load(cu_k_ptr + seq + 1), k_start), total_k)
    return q_start, q_end - q_start, k_start, k_end - k_start


class PackedSequences(NamedTuple):
    """A varlen batch, for kernels that process all of its sequences."""

    any_alignment = ("cu_q_ptr", "cu_k_ptr")

    cu_q_ptr: Value
    cu_k_ptr: Value
    count: Value
    total_q: Value
    total_k: Value


@gluon.jit
def packed(i, sequences):
    """Return packed_sequence of number i (a scalar or a tensor)."""
    return packed_sequence(i, sequences.cu_q_ptr, sequences.cu_k_ptr, sequences.total_q, sequences.total_k)


@gluon.jit
def token_and_head(row, head, group):
    """Return the query tokens and query heads of packed rows of a KV head."""
    token = divide(row, group)
    return token, head * group.number + (row - token * group.number)


@gluon.jit
def first_key(token, tokens, keys, left):
    """Return the first key that a token sees (a scalar or a tensor of tokens); it may lie past the last one."""
    return gl.maximum(token + (keys - tokens - left), 0)


@gluon.jit
def end_key(token, tokens, keys, right):
    """Return one past the last key that a token sees; it may be <= 0."""
    return gl.minimum(token + (keys - tokens + right + 1), keys)


@gluon.jit
def needs_mask(row, key, sizes, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """Return whether scores need a mask: some of ROWS packed rows does not see some of KEYS keys."""
    last = gl.minimum((row + ROWS - 1) // sizes.group, sizes.tokens - 1)
    first = first_key(last, sizes.tokens, sizes.keys, sizes.left)
    end = end_key(row // sizes.group, sizes.tokens, sizes.keys, sizes.right)
    return (key < first) | (key + KEYS > end)


@gluon.jit
def split_range(tiles, split, num_splits, tiles_per_split):
    """Return the tiles [first, end) of one split.

    A tiles_per_split > 0 makes the split independent of the batch: splits are longer only if num_splits, then the
    maximum, would not be enough.
    """
    chunk = gl.maximum((tiles + num_splits - 1) // num_splits, tiles_per_split)
    first = gl.minimum(split * chunk, tiles)
    return first, gl.minimum(first + chunk, tiles)


@gluon.jit
def key_tiles(
    tile_row,
    tokens,
    keys,
    split,
    sizes,
    opts,
    BOX_ROWS: gl.constexpr,
    M: gl.constexpr,
    BN: gl.constexpr,
    KV_LOAD: gl.constexpr,
):
    """Return (first key of tile 0, begin, end) of a split's tiles of BN keys that some of the M rows from tile_row on
    see."""
    token_last = gl.minimum(divide(tile_row + M - 1, sizes.group), tokens - 1)
    first = first_key(divide(tile_row, sizes.group), tokens, keys, opts.left)
    end = end_key(token_last, tokens, keys, opts.right)
    if KV_LOAD == PAGES:
        first = first // BOX_ROWS * BOX_ROWS  # a TMA box stays within one page
    tiles = (gl.maximum(end - first, 0) + BN - 1) // BN
    tile_begin, tile_end = split_range(tiles, split, sizes.num_splits, sizes.tiles_per_split)
    return first, tile_begin, tile_end


@gluon.jit
def bad_pages(pages, begin, end):
    """Return whether the block table names a page that does not exist for any of the keys [begin, end); for four
    warps."""
    page_size = pages.page_size
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])  # every warp has all 128 entries: no exchange between warps
    last = (end + page_size - 1) // page_size
    bad = gl.zeros([128], gl.int32, L)
    for start in range(begin // page_size, last, 128):
        entry = start + gl.arange(0, 128, layout=L)
        page = gl.load(pages.table_ptr + entry, mask=entry < last, other=0)
        bad = bad | ((page < 0) | (page >= pages.count)).to(gl.int32)
    return gl.max(bad, 0) != 0


@aggregate
class MaskBounds:
    """The keys [first, end) that each query row sees; those that all rows see, which need no mask; the keys of the
    sequence; its pages, and whether some entries of the block table name no page, so that no row sees their keys."""

    row_first: Value
    row_end: Value
    full_first: Value
    full_end: Value
    keys: Value
    pages: Pages
    bad: Value
    scale: Value  # ScoreScale


@gluon.jit
def mask_bounds(tile_row, work_tile, M: gl.constexpr, BN: gl.constexpr, KV_LOAD: gl.constexpr, RS: gl.constexpr):
    """Return the MaskBounds of the M rows from tile_row on in the CTA's tiles of BN keys. RS: layout of the rows."""
    problem, tiles = work_tile.problem, work_tile.tiles
    group, tokens, keys, left, right = problem.group, problem.tokens, problem.keys, problem.left, problem.right
    row = tile_row + gl.arange(0, M, layout=RS)
    token = divide(row, group)
    row_first = first_key(token, tokens, keys, left)
    row_end = end_key(token, tokens, keys, right)
    token_last = gl.minimum(divide(tile_row + M - 1, group), tokens - 1)
    full_first = first_key(token_last, tokens, keys, left)
    full_end = end_key(divide(tile_row, group), tokens, keys, right)
    bad = False
    if KV_LOAD >= PAGES:
        bad = bad_pages(work_tile.pages, tiles.first + tiles.begin * BN, gl.minimum(tiles.first + tiles.end * BN, keys))
    return MaskBounds(row_first, row_end, full_first, full_end, keys, work_tile.pages, bad, problem.score_scale)


@gluon.jit
def mask_pages(s, first_column, keys, pages, L: gl.constexpr):
    """Set scores of keys in pages that do not exist to -inf. s: [rows, keys] of keys from first_column on."""
    key = first_column + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, L))
    page = gl.load(pages.table_ptr + key // pages.page_size, mask=key < keys, other=0)
    return gl.where(((page >= 0) & (page < pages.count))[None, :], s, -float("inf"))


@gluon.jit
def page_bits(first_column, keys, pages):
    """Return one bit for each of 32 keys from first_column on: whether its page exists; for four warps."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])  # every warp has all 32: no exchange between warps
    # This is gl.arange(0, 32), but computed here, so that it is not kept in a register through the main loop
    lane = gl.inline_asm_elementwise(
        "mov.u32 $0, %laneid; // $1", "=r,r", [gl.zeros([32], gl.int32, L)], dtype=gl.int32, is_pure=False, pack=1
    )
    page = gl.load(pages.table_ptr + (first_column + lane) // pages.page_size, mask=first_column + lane < keys, other=0)
    return gl.sum(((page >= 0) & (page < pages.count)).to(gl.int32) << lane, 0)


@gluon.jit
def mask_pages_by_bits(s, first_column, keys, pages, L: gl.constexpr):
    """Do what mask_pages does if a thread has whole rows of 32, 64 or 128 keys: page numbers would not fit in
    registers."""
    column = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, L))
    bits = page_bits(first_column, keys, pages)
    for c in gl.static_range(1, s.shape[1] // 32):
        bits = gl.where(column < 32 * c, bits, page_bits(first_column + 32 * c, keys, pages))
    return gl.where((((bits >> (column % 32)) & 1) != 0)[None, :], s, -float("inf"))
