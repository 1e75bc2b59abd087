"""Metadata and what they make of A, without a machine."""

import numpy as np
import pytest
from sparse_matrices import drawn, register_words

from softsm.errors import Fault
from softsm.isa import sparsity


@pytest.mark.parametrize(("name", "k", "selector"), [
    ("f16", 16, 3), ("bf16", 32, 1), ("tf32", 8, 2), ("tf32", 16, 0), ("s8", 32, 1), ("e4m3", 64, 0), ("u4", 64, 1),
    ("s4", 128, 0),
])  # fmt: skip
def test_elements_return_to_their_columns(name, k, selector):
    rng = np.random.default_rng(k)
    given, codes, dense = drawn(rng, 16, k, name, shuffled=name != "tf32")
    assert sparsity.chunks_of(name, k) == codes.shape[1]
    found = sparsity.register_codes(register_words(codes, selector, name, rng), selector, codes.shape[1], name)
    np.testing.assert_array_equal(found, codes)
    kind = sparsity.granularity(name)
    sparsity.check(found, kind)
    np.testing.assert_array_equal(sparsity.expand(given, sparsity.columns(found, kind)), dense)


@pytest.mark.parametrize(("code", "kind", "accepted", "words"), [
    (0b1010, sparsity.TWO_OF_FOUR, sparsity.DIFFERENT, "columns 4 to 7: the positions are 2 and 2"),
    (0b0110, sparsity.TWO_OF_FOUR, sparsity.ASCENDING, "columns 4 to 7: the positions are 2 and 1"),
    (0b0001, sparsity.PAIRS_OF_EIGHT, sparsity.OF_TCGEN05, "columns 8 to 15: the positions are 1 and 0"),
    (0b1000, sparsity.ONE_OF_TWO, sparsity.DIFFERENT,
     "columns 2 to 3: the code is 0b1000; accepted: 0b0100 and 0b1110"),
])  # fmt: skip
def test_codes_without_a_meaning(code, kind, accepted, words):
    codes = np.full((16, 4), 0b0100, np.uint8)
    sparsity.check(codes, kind, accepted)
    codes[5, 1] = code
    with pytest.raises(Fault, match=f"row 5, {words}"):
        sparsity.check(codes, kind, accepted)


def test_infinities_that_meet_no_element_do_not_take_part():
    a = np.array([[1, 0, 0, 2], [0, 3, 4, 0]], np.float32)
    where = np.array([[0, 3], [1, 2]])
    b = np.array([[1, np.inf, 1, 1], [np.nan, 1, 1, -np.inf], [1, 1, 1, 1]], np.float32)
    aside = sparsity.set_aside(a, where, b)
    np.testing.assert_array_equal(aside, np.array([[0, np.inf], [np.nan, 0], [0, 0]], np.float32))
    assert np.isfinite(b).all() and b[0, 1] == 0
    assert sparsity.set_aside(a, where, b) is None
