"""tests/conftest.py: what a test draws depends on the test, and in a test of Hypothesis on the example alone."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def test_what_an_example_draws_is_a_function_of_the_example() -> None:
    drawn: dict[int, set] = {}

    @settings(max_examples=10, database=None)
    @given(st.integers(0, 3))
    def example(n: int) -> None:
        drawn.setdefault(n, set()).add(tuple(torch.randn(2).tolist()))

    example(), torch.randn(3), example()
    assert all(len(x) == 1 for x in drawn.values())
