"""The order in which the looping kernel's CTAs take row tiles."""

import pytest
import torch

import softsm
from dsv4.fmha.kernels.arguments import Options, Sizes
from dsv4.fmha.kernels.sm90 import forward_persistent
from dsv4.fmha.kernels.tiles import NO_BOUND
from dsv4.kernels.compat import gl, gluon

CTAS = 132
NO = gl.constexpr(NO_BOUND)


@gluon.jit(do_not_specialize=["sequences", "kv_heads", "group", "tokens", "right"])
def taken(out_ptr, sequences, kv_heads, group, tokens, right, M: gl.constexpr):
    """What each CTA takes, tile by tile: (CTA, sequence x head, row tile, tiles of 128 keys)."""
    sizes = Sizes(sequences * tokens, 0, tokens, tokens, kv_heads, group, 1, 0, 1, 0)
    scheduler = forward_persistent.tile_scheduler(sizes, Options(1.0, 1, NO, right, 0, 0, None), M)
    for tile_id in range(gl.program_id(0), scheduler.num_tiles, gl.num_programs(0)):
        seq, head, tile_row, _, tiles = forward_persistent.locate(tile_id, scheduler, 128, M)
        gl.store(out_ptr + 4 * tile_id, gl.program_id(0))
        gl.store(out_ptr + 4 * tile_id + 1, seq * kv_heads + head)
        gl.store(out_ptr + 4 * tile_id + 2, tile_row // M)
        gl.store(out_ptr + 4 * tile_id + 3, tiles)


def num_tiles(sequences, kv_heads, group, tokens, right, rows):
    count = -(-tokens * group // rows) * sequences * kv_heads
    out = torch.full((count, 4), -1, dtype=torch.int32)
    with softsm.use("sm_90a"):
        taken[(min(CTAS, count),)](out, sequences, kv_heads, group, tokens, right, M=rows, num_warps=1)
    return out


@pytest.mark.parametrize(
    "sequences, kv_heads, group, tokens, rows, most",
    [
        (4, 16, 1, 4096, 128, 1.01),
        (1, 16, 1, 16384, 128, 1.01),
        (2, 4, 8, 8192, 128, 1.01),
        (2, 4, 8, 8192, 192, 1.02),
        (3, 5, 3, 700, 128, 2.0),  # fewer tiles than CTAs, an odd number of heads
    ],
)
def test_causal_work_is_even_and_every_tile_is_taken_once(sequences, kv_heads, group, tokens, rows, most):
    """A tile costs its keys and about as much as 1.5 tiles of them for its beginning and end."""
    found = num_tiles(sequences, kv_heads, group, tokens, 0, rows)
    tiles = -(-tokens * group // rows)
    assert sorted(map(tuple, found[:, 1:3].tolist())) == [
        (pair, tile) for pair in range(sequences * kv_heads) for tile in range(tiles)
    ]
    work = torch.zeros(int(found[:, 0].max()) + 1).index_add_(0, found[:, 0].long(), found[:, 3] + 1.5)
    assert float(work.max() / work.mean()) <= most


def test_few_heads_are_read_at_one_time():
    """Causal: a round of 132 tiles lies in two blocks of four heads at most, of 64 heads in all."""
    found = num_tiles(4, 16, 1, 4096, 0, 128)
    for first in range(0, len(found), CTAS):
        assert len(found[first : first + CTAS, 1].unique()) <= 8


@pytest.mark.parametrize("rows", [128, 192])
def test_without_a_mask_heads_come_one_after_the_other(rows):
    found = num_tiles(4, 16, 1, 4096, NO_BOUND, rows)
    tiles = -(-4096 // rows)
    assert found[:, 1].tolist() == [tile_id // tiles for tile_id in range(64 * tiles)]
