"""Compute dQ, dK and dV on sm_100a from P and dS in memory, head dims 256 and 512; product_tiles.py defines the tiles.

One CTA per SM loops over tiles of 128 rows, or keys, and 256 columns. Role chart::

    load    1 warp   | a, b of the steps of tile 1 | of tile 2 ...
    mma     1 warp   | steps of tile 1             | of tile 2 ...
    left    4 warps  |                             | tile 1 out by TMA ...      columns 0-127
    right   4 warps  |                             | tile 1 out by TMA ...      columns 128-255

tensor memory   columns        holds
acc             2 x 256        tile j at j % 2, fp32 [128, 256]                                       = 512

shared memory   bytes              holds
a               SLOTS x 16384      [128 rows, 64 keys] or [64 rows, 128 keys] of P or dS
b               SLOTS x 32768      [64, 256] of dO, Q or K
out             2 x 32768          [128, 128] of left and right on their way out
barriers        8 each

barrier         arrives            count       waits          means
ready[slot]     load: TMA bytes    1 + bytes   mma            a and b are in the slot
free[slot]      commit of mma      1           load           the product that reads it is complete
acc_ready[i]    commit of mma      1           left, right    the tile is complete
acc_free[i]     left, right        2           mma            the tile is read

If the rows of a pair are split into several slabs, `sums` keeps dK and dV for the next one: fp32 [2, whole tiles of
keys, D].
"""

from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory, tcgen05_mma

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
    tile_of_turn,
)
from dsv4.kernels.compat import fence_async_shared, gl, gluon, reinterpret, store_wait, tma_store
from dsv4.kernels.ring import Stage, consumer_stage, init_barriers, new_ring


@gluon.jit
def mma_role(slots, a, acc, slab, D: gl.constexpr, VARLEN: gl.constexpr):
    MATRIX: gl.constexpr = a.layout
    ring = slots.ring
    stage = consumer_stage()
    count = gl.to_tensor(0)
    for turn in range(0, (slab.count + gl.num_programs(0) - 1) // gl.num_programs(0)):
        tile = product_tile(tile_of_turn(turn), slab, 128, D, VARLEN)
        if tile.wanted:
            at = Stage(count % 2, (count // 2 + 1) % 2)  # the first wait on an untouched barrier passes
            acc.acquire(at)
            for row in range(tile.begin, tile.end, 64):
                ring.wait(stage)
                rows = a.index(stage.index)
                if tile.kind == DQ:
                    tcgen05_mma(rows, ring.slot(stage), acc.slot(at), use_acc=row > tile.begin)
                else:
                    keys = reinterpret(rows, [64, 128], MATRIX).permute((1, 0))
                    tcgen05_mma(keys, ring.slot(stage), acc.slot(at), use_acc=row > tile.begin)
                ring.release_after_mma(stage)
                stage = ring.next(stage)
            acc.ready.arrive_after_mma(at.index)
            count += 1


@gluon.jit
def send(x, out, desc, place, tile, H: gl.constexpr):
    BOX: gl.constexpr = desc.layout
    store_wait(0)
    out.store(x.to(out.dtype))
    fence_async_shared()
    panels = reinterpret(out, [2, 1, 1, 128, 64], BOX)
    for panel in gl.static_range(2):
        column = tile.column + (2 * H + panel) * 64
        tma_store(desc, [place.outer, place.offset, place.begin + tile.own, column], panels.index(panel))


@gluon.jit
def out_role(
    acc,
    out,
    gradients,
    ragged,
    sums_ptr,
    slab,
    scales,
    H: gl.constexpr,
    D: gl.constexpr,
    SCALED: gl.constexpr,
    VARLEN: gl.constexpr,
):
    """Store columns 128 H .. 128 H + 127 of every tile; a thread has one row."""
    L: gl.constexpr = acc.slots.index(0).slice(0, 128).get_reg_layout()
    row = gl.arange(0, 128, layout=gl.SliceLayout(1, L))
    column = H * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, L))
    count = gl.to_tensor(0)
    for turn in range(0, (slab.count + gl.num_programs(0) - 1) // gl.num_programs(0)):
        tile = product_tile(tile_of_turn(turn), slab, 128, D, VARLEN)
        if tile.wanted:
            at = Stage(count % 2, (count // 2) % 2)
            acc.wait(at)
            x = gl.zeros([128, 128], gl.float32, L)
            if tile.begin < tile.end:
                x = acc.slot(at).slice(H * 128, 128).load()
            acc.release(at)
            scale = result_scale(tile, scales, SCALED)
            if tile.kind == DQ:
                place = place_of_rows(gradients.dq_desc, ragged.dq, tile.part, VARLEN)
                send(x * scale, out, gradients.dq_desc, place, tile, H)
            else:
                first = (tile.kind * (slab.of_keys * 128) + tile.own).to(gl.int64) * D + tile.column
                places = sums_ptr + first + row[:, None] * D + column[None, :]
                if slab.opts.add != 0:
                    x += gl.load(places)
                if slab.opts.keep != 0:
                    gl.store(places, x)
                elif tile.kind == DK:
                    place = place_of_keys(gradients.dk_desc, ragged.dk, tile.part, VARLEN)
                    send(x * scale, out, gradients.dk_desc, place, tile, H)
                else:
                    place = place_of_keys(gradients.dv_desc, ragged.dv, tile.part, VARLEN)
                    send(x * scale, out, gradients.dv_desc, place, tile, H)
            count += 1
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
    SLOTS: gl.constexpr,
    SCALED: gl.constexpr,
    VARLEN: gl.constexpr,
    PRODUCT_REGS: gl.constexpr,
    LOAD_REGS: gl.constexpr,
):
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    TILE: gl.constexpr = TensorMemoryLayout([128, 256], col_stride=1)
    a = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, 128, 64], MATRIX)
    b = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, 64, 256], MATRIX)
    left_out = gl.allocate_shared_memory(q_desc.dtype, [128, 128], MATRIX)
    right_out = gl.allocate_shared_memory(q_desc.dtype, [128, 128], MATRIX)
    ring = new_ring(b)
    acc = new_ring(allocate_tensor_memory(gl.float32, [2, 128, 256], TILE), 2)
    init_barriers((ring.ready, ring.free, acc.ready, acc.free))
    slots = Slots(ring, reinterpret(a, [SLOTS * 2, 64, 64], MATRIX))
    slab = product_slab(sizes, sequences, opts, 128, D, VARLEN)
    operands = ProductOperands(p_desc, ds_desc, q_desc, k_desc, dout_desc)
    gradients = Gradients(dq_desc, dk_desc, dv_desc)
    gl.warp_specialize(
        [
            (out_role, (acc, left_out, gradients, ragged, sums_ptr, slab, scales, 0, D, SCALED, VARLEN)),
            (out_role, (acc, right_out, gradients, ragged, sums_ptr, slab, scales, 1, D, SCALED, VARLEN)),
            (mma_role, (slots, a, acc, slab, D, VARLEN)),
            (load_role, (operands, ragged, slots, slab, D, VARLEN)),
        ],
        [4, 1, 1],
        [PRODUCT_REGS, LOAD_REGS, LOAD_REGS],
    )
