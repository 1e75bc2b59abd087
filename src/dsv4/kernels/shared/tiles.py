"""Which keys a tile of query rows sees. Device functions and the layouts that the kernels of every architecture share.

The query heads of one KV head are packed into rows: row r of (sequence, KV head) is query token ``r // group`` and
query head ``kv_head * group + r % group``, so the rows of a tile span few tokens and one K tile serves them all.
"""

from dsv4.kernels.compat import gl, gluon

NO_BOUND = 1 << 30  # what the host passes for a window side of -1
DENSE, VARLEN, PAGED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
SMALL_PAGES = gl.constexpr(3)  # paged, with pages that no TMA box of 8 or more rows tiles: rows are read one by one
KINDS = {"dense": 0, "varlen": 1, "paged": 2, "small pages": 3}


@gluon.jit
def sequence(seq, tokens, keys, total_q, total_k, cu_q_ptr, cu_k_ptr, lengths_ptr, KIND: gl.constexpr):
    """(first query row, queries T, first key row, keys S) of a sequence, clamped so that nothing is out of bounds."""
    q_start = 0
    k_start = 0
    if KIND == VARLEN:
        q_start = gl.minimum(gl.maximum(gl.load(cu_q_ptr + seq), 0), total_q)
        q_end = gl.minimum(gl.maximum(gl.load(cu_q_ptr + seq + 1), q_start), total_q)
        k_start = gl.minimum(gl.maximum(gl.load(cu_k_ptr + seq), 0), total_k)
        k_end = gl.minimum(gl.maximum(gl.load(cu_k_ptr + seq + 1), k_start), total_k)
        tokens = q_end - q_start
        keys = k_end - k_start
    elif KIND >= PAGED:
        keys = gl.minimum(gl.maximum(gl.load(lengths_ptr + seq), 0), keys)
    return q_start, tokens, k_start, keys


@gluon.jit
def first_key(token, tokens, keys, left):
    """The first key that a token sees (a scalar or a tensor of tokens); may lie past the last one."""
    return gl.maximum(token + (keys - tokens - left), 0)


@gluon.jit
def end_key(token, tokens, keys, right):
    """One past the last key that a token sees; may be <= 0."""
    return gl.minimum(token + (keys - tokens + right + 1), keys)


@gluon.jit
def split_range(tiles, split, num_splits, tiles_per_split):
    """The tiles [first, end) of one split. A fixed tiles_per_split > 0 makes the cut independent of the batch."""
    chunk = gl.where(tiles_per_split > 0, tiles_per_split, (tiles + num_splits - 1) // num_splits)
    first = gl.minimum(split * chunk, tiles)
    return first, gl.minimum(first + chunk, tiles)
