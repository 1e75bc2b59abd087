"""Compute dQ, dK and dV on sm_90a from P and dS in memory, head dims 256 and 512; product_tiles.py defines the tiles.

One CTA per SM loops over tiles of 192 rows, or keys, and 256 columns. With 128 rows it would request 47 bytes per cycle
from the L2, more than that delivers: 603 TFLOP/s. If tiles are fewer than fill the SMs they have 64 rows, or keys, and
each role half of the columns: then a step takes 0.4 of the time. Role chart::

    load    1 warp   | a, b of the steps of tile 1 | of tile 2 ...
    left    4 warps  | steps of tile 1: rows or keys 0-63, and columns 0-127 of 128-191      | out by TMA | tile 2 ...
    right   4 warps  | steps of tile 1: rows or keys 64-127, and columns 128-255 of 128-191  | out by TMA | tile 2 ...

shared memory   bytes              holds
a               SLOTS x 24576      three panels [64, 64] of P or dS, or one
b               SLOTS x 32768      [64, 256] of dO, Q or K
out             2 x 16384          [64, 128], a third of a role's result on its way out
barriers        8 each

barrier         arrives            count       waits          means
ready[slot]     load: TMA bytes    1 + bytes   left, right    a and b are in the slot
free[slot]      left, right        2           load           both have used it

If the rows of a pair are split into several slabs, `sums` keeps dK and dV for the next one: fp32, in the order in which
a warpgroup holds them (gradient_sums.py), one tile of [192, 256] after another.
"""

from dsv4.fmha.kernels.product_tiles import (
    DK,
    DQ,
    Gradients,
    ProductOperands,
    Slots,
    load_role,
    place_of_keys,
    place_of_rows,
    product_slab,
    product_tile,
    result_scale,
    rows_of_tile,
    tile_of_turn,
)
from dsv4.fmha.kernels.sm90.gradient_sums import load_blocks, store_blocks
from dsv4.kernels import dependent
from dsv4.kernels.compat import (
    fence_async_shared,
    gl,
    gluon,
    reinterpret,
    store_wait,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.ring import consumer_stage, init_barriers, new_ring

WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
NARROW = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@gluon.jit
def multiply(wide, narrow, slots, stage, tile, W: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Multiply at every step of the tile: wide [64, 256] += panel W of a times b, narrow [64, 128] += the last panel
    times the columns 128 W .. 128 W + 127 of b."""
    ring = slots.ring
    last = gl.to_tensor(-1)
    for _ in range(0, (gl.maximum(tile.end - tile.begin, 0) + 63) // 64 * tile.heads):
        ring.wait(stage)
        b = ring.slot(stage)
        mine, shared = slots.panels.index(stage.index * 3 + W), slots.panels.index(stage.index * 3 + 2)
        if TRANSPOSED:
            mine, shared = mine.permute((1, 0)), shared.permute((1, 0))
        wide = warpgroup_mma(mine, b, wide, is_async=True)
        narrow = warpgroup_mma(shared, b.slice(128 * W, 128, dim=1), narrow, is_async=True)
        wide, narrow = warpgroup_mma_wait(num_outstanding=2, deps=(wide, narrow))
        ring.free.arrive(gl.maximum(last, 0), last >= 0)
        last = stage.index
        stage = ring.next(stage)
    wide, narrow = warpgroup_mma_wait(num_outstanding=0, deps=(wide, narrow))
    ring.free.arrive(gl.maximum(last, 0), last >= 0)
    return wide, narrow, stage


@gluon.jit
def multiply_small(x, slots, stage, tile, W: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Do the same for a tile of 64 rows, or keys: x [64, 128] += a times the columns 128 W .. 128 W + 127 of b."""
    ring = slots.ring
    last = gl.to_tensor(-1)
    for _ in range(0, (gl.maximum(tile.end - tile.begin, 0) + 63) // 64 * tile.heads):
        ring.wait(stage)
        a = slots.panels.index(stage.index)
        if TRANSPOSED:
            a = a.permute((1, 0))
        x = warpgroup_mma(a, ring.slot(stage).slice(128 * W, 128, dim=1), x, is_async=True)
        x = warpgroup_mma_wait(num_outstanding=1, deps=(x,))
        ring.free.arrive(gl.maximum(last, 0), last >= 0)
        last = stage.index
        stage = ring.next(stage)
    x = warpgroup_mma_wait(num_outstanding=0, deps=(x,))
    ring.free.arrive(gl.maximum(last, 0), last >= 0)
    return x, stage


@gluon.jit
def send(x, out, desc, place, row, column):
    """Store x [64, 128] in memory."""
    BOX: gl.constexpr = desc.layout
    store_wait(0)
    out.store(x.to(out.dtype))
    fence_async_shared()
    panels = reinterpret(out, [2, 1, 1, 64, 64], BOX)
    for n in gl.static_range(2):
        tma_store(desc, [place.outer, place.offset, place.begin + row, column + n * 64], panels.index(n))


@gluon.jit
def send_all(wide, narrow, scale, out, desc, place, tile, W: gl.constexpr):
    """Store the results of role W."""
    halves = wide.reshape([64, 2, 128]).permute([0, 2, 1]).split()
    for n in gl.static_range(2):
        send(halves[n] * scale, out, desc, place, tile.own + 64 * W, tile.column + n * 128)
    send(narrow * scale, out, desc, place, tile.own + 128, tile.column + 128 * W)


@gluon.jit
def product_role(
    slots,
    out,
    gradients,
    ragged,
    sums_ptr,
    slab,
    scales,
    W: gl.constexpr,
    D: gl.constexpr,
    SCALED: gl.constexpr,
    VARLEN: gl.constexpr,
):
    M: gl.constexpr = rows_of_tile(slots)
    stage, opts = consumer_stage(), slab.opts
    for turn in range(0, (slab.count + gl.num_programs(0) - 1) // gl.num_programs(0)):
        tile = product_tile(tile_of_turn(turn), slab, M, D, VARLEN)
        if tile.wanted:
            scale = result_scale(tile, scales, SCALED)
            wide = gl.zeros([64, 256], gl.float32, WIDE)
            narrow = gl.zeros([64, 128], gl.float32, NARROW)
            if tile.kind == DQ:
                wide, narrow, stage = multiply(wide, narrow, slots, stage, tile, W, False)
                place = place_of_rows(gradients.dq_desc, ragged.dq, tile.part, VARLEN)
                send_all(wide, narrow, scale, out, gradients.dq_desc, place, tile, W)
            else:
                number = tile.kind * slab.of_keys + tile.own // M
                wide_ptr = sums_ptr + number.to(gl.int64) * M * D + tile.column * M + W * 64 * 256
                narrow_ptr = wide_ptr + 128 * 256 - W * 64 * 128
                if opts.add != 0:
                    wide = load_blocks(wide, wide_ptr, 256)
                    narrow = load_blocks(narrow, narrow_ptr, 128)
                wide, narrow, stage = multiply(wide, narrow, slots, stage, tile, W, True)
                if opts.keep != 0:
                    store_blocks(wide, wide_ptr, 256)
                    store_blocks(narrow, narrow_ptr, 128)
                elif tile.kind == DK:
                    place = place_of_keys(gradients.dk_desc, ragged.dk, tile.part, VARLEN)
                    send_all(wide, narrow, scale, out, gradients.dk_desc, place, tile, W)
                else:
                    place = place_of_keys(gradients.dv_desc, ragged.dv, tile.part, VARLEN)
                    send_all(wide, narrow, scale, out, gradients.dv_desc, place, tile, W)
    store_wait(0)


@gluon.jit
def small_role(
    slots,
    out,
    gradients,
    ragged,
    slab,
    scales,
    W: gl.constexpr,
    D: gl.constexpr,
    SCALED: gl.constexpr,
    VARLEN: gl.constexpr,
):
    """Run product_role with tiles of 64 rows, or keys; there are no sums."""
    stage = consumer_stage()
    for turn in range(0, (slab.count + gl.num_programs(0) - 1) // gl.num_programs(0)):
        tile = product_tile(tile_of_turn(turn), slab, 64, D, VARLEN)
        if tile.wanted:
            scale = result_scale(tile, scales, SCALED)
            x = gl.zeros([64, 128], gl.float32, NARROW)
            column = tile.column + 128 * W
            if tile.kind == DQ:
                x, stage = multiply_small(x, slots, stage, tile, W, False)
                place = place_of_rows(gradients.dq_desc, ragged.dq, tile.part, VARLEN)
                send(x * scale, out, gradients.dq_desc, place, tile.own, column)
            else:
                x, stage = multiply_small(x, slots, stage, tile, W, True)
                if tile.kind == DK:
                    place = place_of_keys(gradients.dk_desc, ragged.dk, tile.part, VARLEN)
                    send(x * scale, out, gradients.dk_desc, place, tile.own, column)
                else:
                    place = place_of_keys(gradients.dv_desc, ragged.dv, tile.part, VARLEN)
                    send(x * scale, out, gradients.dv_desc, place, tile.own, column)
    store_wait(0)


@gluon.jit
def backward_products(
    p_desc,
    ds_desc,
    q_desc,
    k_desc,
    dout_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    ragged,
    sums_ptr,
    sizes,
    sequences,
    opts,
    scales,
    D: gl.constexpr,
    M: gl.constexpr,
    SLOTS: gl.constexpr,
    SCALED: gl.constexpr,
    VARLEN: gl.constexpr,
    PRODUCT_REGS: gl.constexpr,
    LOAD_REGS: gl.constexpr,
):
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    a = gl.allocate_shared_memory(q_desc.dtype, [SLOTS * (M // 64), 64, 64], MATRIX)
    b = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, 64, 256], MATRIX)
    out = gl.allocate_shared_memory(q_desc.dtype, [2, 64, 128], MATRIX)
    ring = new_ring(b, 2)
    init_barriers((ring.ready, ring.free))
    dependent.wait_on_prior_grid()  # backward_scores
    dependent.launch_dependents()
    slots = Slots(ring, a)
    slab = product_slab(sizes, sequences, opts, rows_of_tile(slots), D, VARLEN)
    operands = ProductOperands(p_desc, ds_desc, q_desc, k_desc, dout_desc)
    gradients = Gradients(dq_desc, dk_desc, dv_desc)
    if M == 64:
        gl.warp_specialize(
            [
                (small_role, (slots, out.index(0), gradients, ragged, slab, scales, 0, D, SCALED, VARLEN)),
                (small_role, (slots, out.index(1), gradients, ragged, slab, scales, 1, D, SCALED, VARLEN)),
                (load_role, (operands, ragged, slots, slab, D, VARLEN)),
            ],
            [4, 1],
            [PRODUCT_REGS, LOAD_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (product_role, (slots, out.index(0), gradients, ragged, sums_ptr, slab, scales, 0, D, SCALED, VARLEN)),
                (product_role, (slots, out.index(1), gradients, ragged, sums_ptr, slab, scales, 1, D, SCALED, VARLEN)),
                (load_role, (operands, ragged, slots, slab, D, VARLEN)),
            ],
            [4, 1],
            [PRODUCT_REGS, LOAD_REGS],
        )
