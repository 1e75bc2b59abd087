"""Which products become one, and what a product reads."""

import numpy as np

from softsm.isa.wgmma_product import Part, Shape, chains_of, tiles
from softsm.memory import swizzle

DENSE = Shape(16, 16, "f32", "bf16", "bf16", False, False, True, True)
SPARSE = DENSE._replace(k=32, sparse=True)


def part(shape, start, *, add=True, d=0):
    a, b = (
        swizzle.decode(swizzle.encode(x, 0, 1024, swizzle.SWIZZLE128, blackwell=False), False)
        for x in (start, start + 8192)
    )
    return Part(None, 1, shape, np.arange(d, d + 8), a, b, add, 0, 0)


def test_products_of_one_accumulator_are_one_chain():
    parts = [part(DENSE, 1024, add=False), part(SPARSE, 1056), part(DENSE, 1088, d=8), part(DENSE, 1024, add=False)]
    chains = chains_of(parts)
    assert [(c.first, c.end, c.k) for c in chains] == [(0, 2, 48), (2, 3, 16), (3, 4, 16)]


def test_a_sparse_product_reads_half_of_a_and_all_of_b():
    """64 rows of 32 bytes, 16 rows of 64 bytes."""
    (_, _, rows, chunks, _), (_, _, n, b_chunks, _) = tiles(part(SPARSE, 1024))
    assert (rows, chunks, n, b_chunks) == (64, 2, 16, 4)
    spans = chains_of([part(SPARSE, 1024)])[0].spans
    assert int((spans[:, 1] - spans[:, 0]).sum()) == 64 * 32 + 16 * 64
