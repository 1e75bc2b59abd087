"""The order in which the looping kernel's CTAs take row tiles."""

from dataclasses import replace

import pytest
import torch

import softsm
from dsv4.fmha import problem
from dsv4.fmha.kernels import causal_order
from dsv4.fmha.kernels.arguments import Options, Sizes
from dsv4.fmha.kernels.sm90 import entry, tile_scheduler
from dsv4.fmha.kernels.tiles import DENSE, NO_BOUND
from dsv4.kernels.compat import gl, gluon
from dsv4.kernels.division import divisor
from dsv4.runtime import dispatch

CTAS = 132
NO = gl.constexpr(NO_BOUND)


@gluon.jit(do_not_specialize=["tokens", "right"])
def taken(out_ptr, order, group, tokens, right, M: gl.constexpr):
    """What each CTA takes, tile by tile: (CTA, sequence x head, row tile, tiles of 128 keys)."""
    sizes = Sizes(0, 0, tokens, tokens, 0, group, 1, 0, 1, 0, 0)
    opts = Options(1.0, 1, NO, right, 0, 0, None)
    scheduler = tile_scheduler.TileScheduler(order, order.num_tiles, sizes, opts)
    for tile_id in range(gl.program_id(0), scheduler.num_tiles, gl.num_programs(0)):
        place = tile_scheduler.locate(tile_id, scheduler, 128, M, DENSE)
        gl.store(out_ptr + 4 * tile_id, gl.program_id(0))
        gl.store(out_ptr + 4 * tile_id + 1, place.seq * order.kv_heads.number + place.head)
        gl.store(out_ptr + 4 * tile_id + 2, place.tile_row // M)
        gl.store(out_ptr + 4 * tile_id + 3, place.tiles)


def ordered(sequences, kv_heads, group, tokens, causal, rows, head_dim=64):
    """-> the problem's order, and what the kernel's CTAs take."""
    q = torch.empty(sequences, tokens, kv_heads * group, head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(sequences, tokens, kv_heads, head_dim, dtype=torch.bfloat16, device="meta")
    p = problem.dense(q, k, k, causal=causal)
    order = causal_order.order_of(p, rows, 128, CTAS)
    count = -(-tokens * group // rows) * sequences * kv_heads
    out = torch.full((count, 4), -1, dtype=torch.int32)
    right = 0 if causal else NO_BOUND
    with softsm.use("sm_90a"):
        taken[(min(CTAS, count),)](out, order.tile_order(p, rows), divisor(group), tokens, right, M=rows, num_warps=1)
    return order, out


@pytest.mark.parametrize(
    "sequences, kv_heads, group, tokens, rows, most",
    [
        (4, 16, 1, 4096, 128, 1.01),
        (1, 16, 1, 16384, 128, 1.01),
        (2, 4, 8, 8192, 192, 1.02),
        (3, 7, 1, 3333, 128, 1.05),  # 1.37 with blocks of about one tile for every CTA
        (2, 16, 1, 2048, 192, 1.08),
        (3, 5, 3, 700, 128, 2.0),  # fewer tiles than CTAs, an odd number of heads
    ],
)
def test_causal_work_is_even_and_every_tile_is_taken_once(sequences, kv_heads, group, tokens, rows, most):
    order, found = ordered(sequences, kv_heads, group, tokens, True, rows)
    tiles = -(-tokens * group // rows)
    assert sorted(map(tuple, found[:, 1:3].tolist())) == [
        (pair, tile) for pair in range(sequences * kv_heads) for tile in range(tiles)
    ]
    costs = found[:, 3] + causal_order.OVERHEAD
    work = torch.zeros(CTAS, dtype=costs.dtype).index_add_(0, found[:, 0].long(), costs)
    assert float(work.max()) == pytest.approx(order.longest)
    assert float(work.max() / work[work > 0].mean()) <= most


def test_few_heads_are_read_at_one_time():
    """Causal: the heads of two blocks, 64 in all, of which a block's fit into the L2 cache or are four."""
    _, found = ordered(4, 16, 1, 4096, True, 128)
    for first in range(0, len(found), CTAS):
        assert len(found[first : first + CTAS, 1].unique()) <= 8
    order, _ = ordered(1, 7, 1, 10230, True, 128, 256)
    assert order.together * 10230 * 256 * 4 <= causal_order.CACHED


@pytest.mark.parametrize("rows", [128, 192])
def test_without_a_mask_heads_come_one_after_the_other(rows):
    _, found = ordered(4, 16, 1, 4096, False, rows)
    tiles = -(-4096 // rows)
    assert found[:, 1].tolist() == [tile_id // tiles for tile_id in range(64 * tiles)]


def test_shapes_drawn_at_random_are_within_a_tenth_of_even():
    """Twelve row tiles for every CTA or more: what is left over is one of them at most."""
    draw = torch.Generator().manual_seed(20261117)

    def number(low, high):
        return int(torch.randint(low, high, (1,), generator=draw))

    for _ in range(12):
        group = 1 << number(0, 4)
        sequences, kv_heads, tokens = number(1, 7), number(4, 17), number(1000, 9000)
        q = torch.empty(sequences, tokens, kv_heads * group, 128, dtype=torch.bfloat16, device="meta")
        k = torch.empty(sequences, tokens, kv_heads, 128, dtype=torch.bfloat16, device="meta")
        p = problem.dense(q, k, k, causal=True)
        if -(-tokens * group // 128) * sequences * kv_heads >= 12 * CTAS:
            lengths = causal_order._lengths(p, 128, 128)
            even = float(lengths.sum()) * sequences * kv_heads / CTAS
            assert causal_order.order_of(p, 128, 128, CTAS).longest <= 1.1 * even


@pytest.mark.parametrize(
    ("d", "causal", "shape", "loops"),
    [
        (256, True, (1, 5, 5, 2560), True),
        (256, False, (30, 2, 2, 256), True),
        (256, False, (1, 1, 1, 4000), False),  # 32 tiles: their keys are split
        (128, True, (15, 1, 1, 506), False),  # short: row tiles of 64
        (128, True, (1, 8, 8, 1900), False),
        (128, False, (1, 4, 4, 4000), True),
        (128, False, (1, 32, 4, 500), False),
        (64, True, (15, 1, 1, 506), False),
    ],
)
def test_who_loops_with_less_than_a_row_tile_for_every_sm(d, causal, shape, loops):
    batch, heads, kv_heads, tokens = shape
    q, k, v = (torch.empty(batch, tokens, h, d, dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads))
    target = dispatch.compile_target("sm_90a")
    assert entry.tiling(problem.dense(q, k, v, causal=causal), target).loop == loops


def test_who_loops_does_not_depend_on_a_plan():
    """(3, 2, 2873) causal with a plan that splits keys took 58 instead of 43 us."""
    q = torch.empty(3, 2873, 2, 128, dtype=torch.bfloat16, device="meta")
    planned = replace(problem.dense(q, q, q, causal=True), num_splits=2)
    assert entry.tiling(planned, dispatch.compile_target("sm_90a")).loop
