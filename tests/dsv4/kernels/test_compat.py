"""Gluon's names, found by attribute: a rename in any Triton from 3.6 to 3.9 must not matter."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Gluon comes with Triton")
from dsv4.kernels import compat
from dsv4.kernels.compat import Value, aggregate


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


@aggregate
class Pair:
    first: Value
    second: Value


def test_an_aggregate_takes_its_fields_in_order_or_by_name():
    pair = Pair(1, second=2)
    assert (pair.first.value, pair.second.value) == (1, 2)


def test_an_aggregate_refuses_too_many_or_too_few_values():
    with pytest.raises(TypeError, match="Pair: got 3 values; accepted: first, second"):
        Pair(1, 2, 3)
    with pytest.raises(AttributeError, match="second"):
        Pair(1)


def test_an_aggregate_refuses_a_field_it_does_not_have():
    with pytest.raises(AttributeError, match="third"):
        Pair(1, 2, third=3)
