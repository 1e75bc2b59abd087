"""Runs a small kernel under the checkers. `holds` tests both halves of a rule: silent with the synchronisation,
reported without it. `findings` gives the report of one launch."""

import numpy as np

import softsm
from softsm.errors import Fault

ORDERS = ("eager", "latest")


def aligned(array):
    raw = np.empty(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 128
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def findings(text, args=(), *, strict=True, order="latest", seed=0, grid=1, block=128, cluster=1):
    """The report of one launch; what stops the kernel is in it too."""
    kernel = softsm.load(text)
    mine = [aligned(a) if isinstance(a, np.ndarray) else a for a in args]
    given = [a(mine) if callable(a) else a for a in mine]
    with softsm.checking(order=order, seed=seed, strict=strict) as report:
        try:
            kernel.launch(grid, block, given, cluster=cluster)
        except Fault:
            pass
    return report


def holds(make, *, code="race", strict=True, args=(), also=(), **launch):
    """make(True) keeps the synchronisation and is silent; make(False) removes it and is reported, in every order."""
    codes = (code,) if isinstance(code, str) else code
    for order in ORDERS:
        kept = findings(make(True), args, strict=strict, order=order, **launch)
        assert not kept, f"with the synchronisation, {order}:\n{kept}"
        removed = findings(make(False), args, strict=strict, order=order, **launch)
        assert any(c in codes for c in removed.codes()), f"without it, {order}: {removed}"
        assert set(removed.codes()) <= {*codes, *also}, f"without it, {order}:\n{removed}"
    return removed
