"""Gluon's names, found by attribute: a rename in any Triton from 3.6 to 3.9 must not matter."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Gluon comes with Triton")
from dsv4.kernels import compat


@pytest.mark.parametrize(
    "there, found",
    [(["thread_barrier"], "thread_barrier"), (["barrier"], "barrier"), (["barrier", "thread_barrier"], "barrier")],
    ids=["3.6", "3.7 to 3.9", "both"],
)
def test_the_newest_name_that_exists_is_taken(there, found):
    namespace = SimpleNamespace(__name__="gl", **{name: name for name in there})
    assert compat._first(namespace, "barrier", "thread_barrier") == found


def test_a_triton_with_neither_name_is_refused_by_name():
    with pytest.raises(ImportError, match="gl has none of barrier, thread_barrier"):
        compat._first(SimpleNamespace(__name__="gl"), "barrier", "thread_barrier")


def test_the_installed_triton_has_every_name():
    missing = [name for name in compat.__all__ if getattr(compat, name, None) is None]
    assert not missing
