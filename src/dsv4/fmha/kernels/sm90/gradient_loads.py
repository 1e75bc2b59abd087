"""The copies of the load roles of backward_keys.py and backward_dq.py: the 128 rows or keys that a CTA owns, by halves,
and the rows of each step. Both are pairs of tensors, Q with dO and K with V. TMA fills what lies past the end of a
tensor or a sequence with zeros (fmha/kernels/ragged.py)."""

from dsv4.fmha.kernels.ragged import load_pair, load_rows
from dsv4.kernels.compat import gl, gluon, mbarrier


@gluon.jit
def load_halves(desc, place, x, ready, own, D: gl.constexpr):
    """Load the 128 rows of one tensor from `own` on."""
    for half in gl.static_range(2):
        load_rows(desc, place, x.index(half), ready, own + half * 64, D)


@gluon.jit
def load_own(pair, x, y, ready, own, D: gl.constexpr):
    """Load the 128 rows of both tensors from `own` on."""
    mbarrier.expect(ready, 2 * 128 * D * 2)
    for half in gl.static_range(2):
        load_pair(pair, x.index(half), y.index(half), ready, own + half * 64, D)


@gluon.jit
def load_next(pair, x, y, ready, row, D: gl.constexpr):
    """Load the rows of a step."""
    ROWS: gl.constexpr = x.shape[0]
    mbarrier.expect(ready, 2 * ROWS * D * 2)
    load_pair(pair, x, y, ready, row, D)
