"""Masks of the gradients on sm_100a: which rows of Y a tile of X is multiplied with, and which of them need a mask.

KEYS: X are keys and Y packed rows of queries, otherwise X are rows and Y keys (backward_tiles.py).
"""

from dsv4.fmha.kernels.tiles import end_key, first_key
from dsv4.kernels.compat import gl, gluon

PAST_ALL = gl.constexpr(1 << 30)  # rows


@gluon.jit
def streamed(own, sizes, KEYS: gl.constexpr):
    """Return [first, end) of the rows of Y that are visible to, or see, some of the 128 rows of X from `own` on."""
    offset = sizes.keys - sizes.tokens
    if KEYS:
        last = gl.minimum(own + 127, sizes.keys - 1)
        first = gl.minimum(gl.maximum(own - sizes.right - offset, 0), sizes.tokens)
        end = gl.maximum(gl.minimum(last + sizes.left - offset + 1, sizes.tokens), 0)
        return first * sizes.group, end * sizes.group
    token = own // sizes.group
    token_last = gl.minimum((own + 127) // sizes.group, sizes.tokens - 1)
    return first_key(token, sizes.tokens, sizes.keys, sizes.left), end_key(
        token_last, sizes.tokens, sizes.keys, sizes.right
    )


@gluon.jit
def all_visible(own, sizes, KEYS: gl.constexpr):
    """Return [first, end) of the rows of Y in which no tile needs a mask."""
    offset = sizes.keys - sizes.tokens
    if KEYS:  # rows that see all of the 128 keys
        token = gl.maximum(own + 127 - offset - sizes.right, 0)
        last = own - offset + sizes.left
        first = gl.where(own + 128 > sizes.keys, PAST_ALL, token * sizes.group)
        return first, gl.where(last >= sizes.tokens - 1, PAST_ALL, (last + 1) * sizes.group)
    token_last = gl.minimum((own + 127) // sizes.group, sizes.tokens - 1)
    return first_key(token_last, sizes.tokens, sizes.keys, sizes.left), end_key(
        own // sizes.group, sizes.tokens, sizes.keys, sizes.right
    )


@gluon.jit
def zero_masked(p, own, at, sizes, L: gl.constexpr, KEYS: gl.constexpr):
    """Return p [128, columns], which begins at `own` of X and `at` of Y, with 0 where the row does not see the key."""
    x = (own + gl.arange(0, 128, layout=gl.SliceLayout(1, L)))[:, None]
    y = (at + gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, L)))[None, :]
    if KEYS:
        token = y // sizes.group
        key = x
    else:
        token = x // sizes.group
        key = y
    first = first_key(token, sizes.tokens, sizes.keys, sizes.left)
    end = end_key(token, sizes.tokens, sizes.keys, sizes.right)
    return gl.where((key >= first) & (key < end), p, 0.0)
