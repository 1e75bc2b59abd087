"""Structs of kernel arguments: they are flattened and compiled for neutral numbers."""

from typing import Any, NamedTuple

import pytest
import torch

from dsv4.kernels.compat import gl, gluon
from dsv4.runtime import aot, structs
from dsv4.runtime.program import Null, Slot


class Inner(NamedTuple):
    a: Any
    b: Any


class Outer(NamedTuple):
    any_alignment = ("list_ptr",)

    row_ptr: Any
    list_ptr: Any
    inner: Inner


@gluon.jit(do_not_specialize=["n"])
def copy_kernel(tensors, n, sizes, D: gl.constexpr):
    gl.store(tensors.row_ptr + sizes.a, gl.load(tensors.list_ptr + n * tensors.inner.b))


def slot(misaligned=0):
    return Slot(0, "x", (4,), (1,), torch.float32, torch.device("cpu"), misaligned)


def arguments(a=5, b=6, row=0, rows=0, n=7):
    return [Outer(slot(row), slot(rows), Inner(a, b)), n, Inner(a, 1.5)]


def test_nested_undoes_flat():
    given = arguments()
    found = structs.flat(given)
    assert found[2:] == [5, 6, 7, 5, 1.5] and len(found) == 7
    again = structs.nested(iter(found), given)
    assert again == given and [type(x) for x in again] == [Outer, int, Inner]


@pytest.mark.parametrize("number", [0, 1, -1, 16, 5, 2**31 - 1, -(2**31)])
def test_no_member_makes_a_variant(number):
    """Neither a stride of 1 nor of 16, nor where a list begins."""
    plain, other = (
        aot.source_of(copy_kernel, x, dict(D=64))[0] for x in (arguments(), arguments(number, number, rows=4))
    )
    assert plain.signature == other.signature and plain.attrs == other.attrs
    assert plain.constants == other.constants
    assert aot.argument_types(arguments()) == aot.argument_types(arguments(number, number, rows=4))


def test_variants_are_those_of_pointers_and_types():
    variants = [arguments(), arguments(row=4), arguments(a=2**31), arguments(n=1)]
    sources = [aot.source_of(copy_kernel, x, dict(D=64))[0] for x in variants]
    assert len({str((x.signature, x.attrs)) for x in sources}) == 3
    assert sources[2].signature["sizes"] == Inner("i64", "fp32")


def test_a_null_pointer_has_a_type_too():
    one, two = structs.neutral([Outer(Null(torch.float16), Null(torch.int32), Inner(1, 2))])[0][:2]
    assert (one.data_ptr(), two.dtype) == (0, torch.int32) and two.data_ptr() % 2
