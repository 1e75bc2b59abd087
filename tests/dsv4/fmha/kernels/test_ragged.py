"""TMA that stops at the end of a sequence, in a kernel of its own: boxes of 64 rows from one tensor to another."""

import pytest
import torch

import softsm
from dsv4.fmha.kernels.ragged import place_of, ragged_descriptor
from dsv4.kernels.compat import gl, gluon, mbarrier, store_wait, tma_load, tma_store
from dsv4.runtime.program import Slot


@gluon.jit
def copy_rows(from_desc, to_desc, from_ragged, to_ragged, first, rows, head, row):
    """Rows from `row` on of a sequence of `rows` rows that begins at `first`."""
    RANK: gl.constexpr = len(from_desc.block_shape)
    tile = gl.allocate_shared_memory(from_desc.dtype, from_desc.block_shape, from_desc.layout)
    ready = mbarrier.allocate_mbarrier()
    mbarrier.init(ready, count=1)
    source = place_of(from_desc, from_ragged, 0, head, first, rows, True)
    goal = place_of(to_desc, to_ragged, 0, head, first, rows, True)
    GROUP: gl.constexpr = from_desc.block_shape[3] if RANK == 5 else 1
    at = row // GROUP
    mbarrier.expect(ready, 64 * 64 * 2)
    if RANK == 5:
        tma_load(from_desc, [source.outer, source.offset, source.begin + at, 0, 0], ready, tile)
        mbarrier.wait(ready, 0)
        tma_store(to_desc, [goal.outer, goal.offset, goal.begin + at, 0, 0], tile)
    else:
        tma_load(from_desc, [source.outer, source.offset, source.begin + at, 0], ready, tile)
        mbarrier.wait(ready, 0)
        tma_store(to_desc, [goal.outer, goal.offset, goal.begin + at, 0], tile)
    store_wait(0)


@pytest.mark.compile
@pytest.mark.parametrize("pack", [1, 4])
def test_only_the_rows_of_the_sequence_are_copied(pack):
    """Other sequences lie on both sides, heads next to each other; the target has other strides than the source."""
    tokens, heads = 130, 3
    source = torch.randn(tokens, heads * pack, 64).bfloat16()
    goal = torch.full((tokens, heads * pack + 2, 64), -1.0).bfloat16()
    shape = (heads, pack) if pack > 1 else (heads,)
    views = [x[:, : heads * pack].unflatten(1, shape)[None].transpose(1, 2) for x in (source, goal)]
    block = [1, 1, 64, 64] if pack == 1 else [1, 1, 64 // pack, pack, 64]
    (x_desc, x_ragged), (y_desc, y_ragged) = (ragged_descriptor(x, block) for x in views)
    first, length, head = 20, 50, 1
    with softsm.use("sm_90a"), softsm.checking() as report:
        for row in range(0, length * pack, 64):
            copy_rows[(1,)](x_desc, y_desc, x_ragged, y_ragged, first * pack, length * pack, head, row, num_warps=4)
    assert not report, report
    expected = torch.full_like(goal, -1.0)
    mine = slice(head * pack, (head + 1) * pack)
    expected[first : first + length, mine] = source[first : first + length, mine]
    assert torch.equal(goal, expected)


def test_a_tensor_too_large_for_its_coordinates_is_named():
    x = Slot(0, "q", (1, 2, 1 << 28, 64), (8, 8, 72, 1), torch.bfloat16, torch.device("meta"))
    with pytest.raises(ValueError, match="q: got strides of 72 and 8 elements"):
        ragged_descriptor(x, [1, 1, 64, 64])
