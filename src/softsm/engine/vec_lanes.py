"""Exchanges between the lanes of a warp: what shfl and redux compute."""

from __future__ import annotations

from softsm.engine.vec_ops import asF, asI, asU, canonical, maxnum, tou
from softsm.engine.vec_rows import lanes, permute, xor_lanes
from softsm.engine.vec_types import sel

# ---------------------------------------------------------------- shfl: which lane each lane reads, and whether it may


def _last_lane(c):
    """Returns the bound of each lane's segment; c holds the clamp in bits 0-4 and the segment mask in bits 8-12."""
    segment = (c >> 8) & 31
    return (lanes() & segment) | (c & 31 & ~segment)


def _from_below(b):
    return asI(lanes()) - asI(b & 31)


def _from_segment(b, c):
    segment = (c >> 8) & 31
    return (lanes() & segment) | (b & 31 & ~segment)


def up_inside(b, c):
    return _from_below(b) >= asI(_last_lane(c))


def down_inside(b, c):
    return lanes() + (b & 31) <= _last_lane(c)


def bfly_inside(b, c):
    return (lanes() ^ (b & 31)) <= _last_lane(c)


def idx_inside(b, c):
    return _from_segment(b, c) <= _last_lane(c)


def shfl_up(a, b, c):
    return permute(a, sel(up_inside(b, c), asU(_from_below(b)), lanes()))


def shfl_down(a, b, c):
    return permute(a, sel(down_inside(b, c), lanes() + (b & 31), lanes()))


def shfl_bfly(a, b, c):
    return permute(a, sel(bfly_inside(b, c), lanes() ^ (b & 31), lanes()))


def shfl_idx(a, b, c):
    return permute(a, sel(idx_inside(b, c), _from_segment(b, c), lanes()))


# ---------------------------------------------------------------- redux of f32 over the lanes of a mask


def warp_max(x, m):
    """Returns, in all lanes, the maximum of the active lanes. NaN is the neutral element: any number replaces it."""
    x = sel(m, x, asF(tou(0x7FFFFFFF)))
    x = maxnum(x, xor_lanes(x, 1))
    x = maxnum(x, xor_lanes(x, 2))
    x = maxnum(x, xor_lanes(x, 4))
    x = maxnum(x, xor_lanes(x, 8))
    return canonical(maxnum(x, xor_lanes(x, 16)))


def warp_min(x, m):
    return canonical(-warp_max(-x, m))
