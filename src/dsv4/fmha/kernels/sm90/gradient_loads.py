"""What the load roles of backward_keys.py and backward_dq.py copy: the 128 rows or keys that a CTA owns, by halves, and
the steps that it goes through. Both come in pairs of tensors, Q with dO and K with V. TMA fills what lies past the end
with zeros, of a sequence too (fmha/kernels/ragged.py)."""

from dsv4.fmha.kernels.loads import load_packed
from dsv4.kernels.compat import Value, aggregate, gl, gluon, mbarrier


@aggregate
class Pair:
    """Two tensors, and where a sequence and head of them lies."""

    x_desc: Value
    y_desc: Value
    x_place: Value
    y_place: Value


@gluon.jit
def load_rows(pair, x, y, ready, row, D: gl.constexpr):
    load_packed(pair.x_desc, x, ready, pair.x_place.outer, pair.x_place.offset, row, D, pair.x_place.begin)
    load_packed(pair.y_desc, y, ready, pair.y_place.outer, pair.y_place.offset, row, D, pair.y_place.begin)


@gluon.jit
def load_own(pair, x, y, ready, own, D: gl.constexpr):
    """The 128 rows from `own` on, by halves."""
    mbarrier.expect(ready, 2 * 128 * D * 2)
    for half in gl.static_range(2):
        load_rows(pair, x.index(half), y.index(half), ready, own + half * 64, D)


@gluon.jit
def load_next(pair, x, y, ready, row, D: gl.constexpr):
    """The rows of a step."""
    ROWS: gl.constexpr = x.shape[0]
    mbarrier.expect(ready, 2 * ROWS * D * 2)
    load_rows(pair, x, y, ready, row, D)
