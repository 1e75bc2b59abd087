"""The kernel of forward.py for large dense problems at head dims 64 and 128: one CTA per SM, which loops over work
tiles of two query tiles each.

What a CTA does before its first product and after its last takes 6000 cycles, two to three steps. Here the roles run on
from one work tile into the next: a softmax group requests its next Q as soon as it has stored its last P, and has it in
shared memory before O is complete; the keys are there already; the first scores of the next work tile are computed
while O of this one is normalised and stored::

    load        | ... K V | K0'  K1'   V0'     ...
    mma         | ... PV0 PV1 | S0' | S1' .    | PV0' ...
    softmax 0   | P0 | load Q' | O / l -> out | P0' ...
    softmax 1   |    P1 | load Q' | O / l -> out | P1' ...

Memory, barriers and roles are those of forward.py; phases and the ring's stage carry over from one work tile to the
next. `causal_order` decides which work tiles a CTA processes. Every work tile has a tile of keys, even if none of its
rows sees it, so that all barriers have a phase for it.
"""

from dsv4.fmha.kernels import loads
from dsv4.fmha.kernels.arguments import RowTensors, Source, Tiles, WorkTile, kv_rows, problem_of
from dsv4.fmha.kernels.causal_order import dense_block
from dsv4.fmha.kernels.sm100 import two_tiles
from dsv4.fmha.kernels.sm100.forward import make_memory
from dsv4.fmha.kernels.sm100.load_role import Filling, load_keys
from dsv4.fmha.kernels.sm100.softmax_parts import load_queries, store_rows
from dsv4.fmha.kernels.tiles import DENSE, Pages, end_key, first_key
from dsv4.kernels.compat import Value, aggregate, gl, gluon
from dsv4.kernels.division import divide
from dsv4.kernels.ring import consumer_stage, producer_stage


@aggregate
class Arguments:
    """The arguments of the roles for all work tiles."""

    tensors: Value
    sizes: Value
    strides: Value
    opts: Value
    order: Value  # causal_order.TileOrder


@gluon.jit
def locate(tile_id, arguments, M: gl.constexpr, BN: gl.constexpr):
    """Return (sequence, KV head, first row, first key, tiles of keys) of a work tile."""
    order, sizes, opts = arguments.order, arguments.sizes, arguments.opts
    group, tokens, keys = sizes.group, sizes.tokens, sizes.keys
    row, pair = dense_block(tile_id, order, M)
    seq = divide(pair, order.kv_heads)
    first = first_key(divide(row, group), tokens, keys, opts.left)
    end = end_key(gl.minimum(divide(row + M - 1, group), tokens - 1), tokens, keys, opts.right)
    return seq, pair - seq * order.kv_heads.number, row, first, gl.maximum(end - first + BN - 1, BN) // BN


@gluon.jit
def work_tile_at(tile_id, arguments, M: gl.constexpr, BN: gl.constexpr):
    """Return (first row, WorkTile, sequence) of a work tile."""
    tensors, sizes, strides, opts = arguments.tensors, arguments.sizes, arguments.strides, arguments.opts
    seq, head, tile_row, first, tiles = locate(tile_id, arguments, M, BN)
    # Offsets have 64 bits: a batch may be larger than 2^31 elements.
    here = RowTensors(
        tensors.q_ptr + seq.to(gl.int64) * strides.q_batch * 8,
        tensors.out_ptr + seq.to(gl.int64) * strides.out_batch * 8,
        tensors.lse_ptr + seq.to(gl.int64) * strides.lse_batch,
        tensors.sink_ptr,
        tensors.part_ptr,
        tensors.part_lse_ptr,
    )
    problem = problem_of(head, sizes.tokens, sizes.keys, sizes, opts)
    pages = Pages(tensors.table_ptr, sizes.page_size, sizes.total_k)
    keys = Tiles(first, gl.to_tensor(0), tiles, gl.to_tensor(0))
    return tile_row, WorkTile(here, strides, problem, keys, pages), seq


@gluon.jit
def load_role(arguments, k_desc, v_desc, memory, D: gl.constexpr, M: gl.constexpr):
    BN: gl.constexpr = memory.ring.slots.shape[1]
    sizes = arguments.sizes
    k_rows, v_rows = kv_rows(arguments.tensors, sizes, arguments.strides)
    state = Filling(producer_stage(), gl.to_tensor(0), gl.to_tensor(0))
    begin = gl.program_id(0)
    for tile_id in range(begin, arguments.order.num_tiles, gl.num_programs(0)):
        _row, work_tile, seq = work_tile_at(tile_id, arguments, M, BN)
        where = loads.Where(seq, work_tile.problem.head, 0, sizes.keys, 0, sizes.keys, arguments.tensors.table_ptr, 1)
        source = Source(k_desc, v_desc, k_rows, v_rows, where)
        state = load_keys(state, source, memory, work_tile.tiles, 0, tile_id == begin, D, DENSE)


@gluon.jit
def mma_role(arguments, memory, M: gl.constexpr):
    BN: gl.constexpr = memory.ring.slots.shape[1]
    stage = consumer_stage()
    before, turn = 0, 0
    for tile_id in range(gl.program_id(0), arguments.order.num_tiles, gl.num_programs(0)):
        _seq, _head, _row, _first, n = locate(tile_id, arguments, M, BN)
        stage = two_tiles.multiply(memory, stage, n, before, turn)
        before += n
        turn ^= 1


@gluon.jit
def softmax_role(arguments, memory, TILE: gl.constexpr, D: gl.constexpr, M: gl.constexpr):
    BM: gl.constexpr = memory.q.shape[1]
    BN: gl.constexpr = memory.ring.slots.shape[1]
    sign, num_tiles = arguments.opts.sign, arguments.order.num_tiles
    row, work_tile, _seq = work_tile_at(gl.program_id(0), arguments, M, BN)
    load_queries(memory, work_tile, row + TILE * BM, sign, TILE, D, D)
    before = 0
    for tile_id in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, work_tile, _seq = work_tile_at(tile_id, arguments, M, BN)
        m, l = two_tiles.attend(memory, work_tile, row + TILE * BM, before, TILE, DENSE)
        after = tile_id + gl.num_programs(0)
        if after < num_tiles:  # all products that read Q are complete: the group has seen the last S
            next_row, next_tile, _seq = work_tile_at(after, arguments, M, BN)
            load_queries(memory, next_tile, next_row + TILE * BM, sign, TILE, D, D)
        n = work_tile.tiles.end
        store_rows(work_tile, memory.o.index(TILE), memory.pv_done.at(TILE), m, l, row + TILE * BM, n, before, 0, D, D)
        before += n


@gluon.jit
def fmha_forward_persistent(
    tensors,
    k_desc,
    v_desc,
    sizes,
    strides,
    opts,
    order,
    D: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    SLOTS: gl.constexpr,
    SOFTMAX_REGS: gl.constexpr,
    WARP_REGS: gl.constexpr,
):
    M: gl.constexpr = 2 * BM
    arguments = Arguments(tensors, sizes, strides, opts, order)
    memory = make_memory(tensors.q_ptr.dtype.element_ty, D, BM, BN, 2, SLOTS, True)
    gl.warp_specialize(
        [
            (softmax_role, (arguments, memory, 0, D, M)),
            (softmax_role, (arguments, memory, 1, D, M)),
            (mma_role, (arguments, memory, M)),
            (load_role, (arguments, k_desc, v_desc, memory, D, M)),
        ],
        [4, 1, 1],
        [SOFTMAX_REGS, WARP_REGS, WARP_REGS],
    )
