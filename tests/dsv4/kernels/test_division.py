"""Division by a number that the host knows."""

from hypothesis import given
from hypothesis import strategies as st

from dsv4.kernels.division import inverse_of


@given(number=st.integers(0, 2**31 - 1), divisor=st.integers(1, 2**31 - 1))
def test_a_product_and_a_shift_divide(number, divisor):
    inverse, shift = inverse_of(divisor)
    assert -(2**31) <= inverse < 2**31  # an int32 argument of a kernel, of which the kernel takes all 32 bits
    assert number * (inverse % 2**32) >> shift == number // divisor
