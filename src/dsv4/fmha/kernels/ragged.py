"""Descriptors of tensors with contiguous sequences, with which TMA stops at the end of a sequence.

TMA fills rows past its end with zeros, or does not write them. A descriptor has one bound per dimension, and sequences
end anywhere; but addresses are 64-bit numbers. Two dimensions precede the rows::

    dimension   stride (elements)   coordinate
    outer       2^34 - row          2^30, so that 2^30 * 2^34 elements of two bytes are 0
    offset      step                (end of the sequence * row + head * stride of a head) / step
    rows        row                 2^30 - rows of the sequence + row

The sum is the address of (row, head) of the sequence; the bound of the rows is 2^30. The idea is that of Triton's
ragged_tma, which has a dimension for heads; here the offset includes them, which leaves room for packed query heads.
"""

import math
from typing import NamedTuple

from dsv4.fmha.kernels.loads import load_packed
from dsv4.kernels.compat import TensorDescriptor, Value, aggregate, gl, gluon
from dsv4.runtime.program import Slot

BOUND = gl.constexpr(1 << 30)
MOST = 0x7FFF0000  # greatest coordinate
TURN = 1 << 34


class Ragged(NamedTuple):
    """Weights of a row and of a head in the coordinate `offset` of a tensor."""

    row: Value
    head: Value


class RaggedOperands(NamedTuple):
    """Ragged weights of the tensors of a gradient."""

    q: Ragged
    dout: Ragged
    k: Ragged
    v: Ragged
    dq: Ragged
    dk: Ragged
    dv: Ragged


NOT_RAGGED = RaggedOperands(*[Ragged(0, 0)] * 7)  # dense


@aggregate
class RowCoord:
    """Coordinates of a sequence and head; row r has begin + r."""

    outer: Value
    offset: Value
    begin: Value


@aggregate
class Pair:
    """Two tensors, and the place of a sequence and head in each."""

    x_desc: Value
    y_desc: Value
    x_place: Value
    y_place: Value


@gluon.jit
def load_rows(desc, place, tile, ready, row, D: gl.constexpr):
    """Load packed rows from `row` on."""
    load_packed(desc, tile, ready, place.outer, place.offset, row, D, place.begin)


@gluon.jit
def load_pair(pair, x, y, ready, row, D: gl.constexpr):
    load_rows(pair.x_desc, pair.x_place, x, ready, row, D)
    load_rows(pair.y_desc, pair.y_place, y, ready, row, D)


@gluon.jit
def pair_of(x_desc, y_desc, x_ragged, y_ragged, batch, head, first, rows, VARLEN: gl.constexpr):
    """Return a Pair; see place_of."""
    x_place = place_of(x_desc, x_ragged, batch, head, first, rows, VARLEN)
    y_place = place_of(y_desc, y_ragged, batch, head, first, rows, VARLEN)
    return Pair(x_desc, y_desc, x_place, y_place)


@gluon.jit
def place_of(desc, ragged, batch, head, first, rows, VARLEN: gl.constexpr):
    """Return a RowCoord. VARLEN: of a sequence with `rows` packed rows from `first` on; else of a dense batch."""
    if VARLEN:
        GROUP: gl.constexpr = desc.block_shape[3] if len(desc.block_shape) == 5 else 1
        end = (first + rows) // GROUP
        return RowCoord(gl.to_tensor(BOUND), end * ragged.row + head * ragged.head, BOUND - rows // GROUP)
    else:
        return RowCoord(batch, head, gl.to_tensor(0))


def ragged_descriptor(x: Slot, block: list[int]) -> tuple[TensorDescriptor, Ragged]:
    """Describe an addressable x [1, heads, rows, D] or [1, heads, tokens, pack, D]. block: [1, 1, rows, ..]"""
    heads, rows = x.shape[1:3]
    row = x.stride(2) if rows > 1 else x.shape[-1]
    head = x.stride(1) if heads > 1 else row
    step = math.gcd(row, head)
    if (rows * row + heads * head) // step >= MOST:
        got = f"strides of {row} and {head} elements for {rows} rows and {heads} heads"
        raise ValueError(f"{x.name}: got {got}; accepted: up to 2^31 times their common divisor in all, as in a copy")
    layout = gl.NVMMASharedLayout(block[-1] * 2, 16, rank=len(block))
    shape, strides = [MOST, MOST, BOUND.value, *x.shape[3:]], [TURN - row, step, row, *x.stride()[3:]]
    return TensorDescriptor(x, shape, strides, block, layout), Ragged(row // step, head // step)
