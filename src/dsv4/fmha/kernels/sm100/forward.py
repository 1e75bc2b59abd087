"""FMHA forward on sm_100a, head dims 64 to 512.

One CTA processes TILES tiles of BM packed query rows of one (sequence, KV head), and its keys in tiles of BN. The
product for the next keys is issued before P V of these. With two tiles (two_tiles.py) the softmax of one overlaps with
the products of the other; with one (one_tile.py) S has two stages. Role chart (two tiles; S0 = scores of tile 0)::

    load        | K0 | K1   V0   K2   V1   ...
    mma         | S0 . S1 . | S0' PV0 | S1' PV1 | S0" PV0' | ...            one warp, all tensor-core work
    softmax 0   | load Q | read S0, P0 ..... | read S0', P0' ... | O / l -> out, lse     4 warps, a row per thread
    softmax 1   | load Q |     read S1, P1 ..... | read S1', P1' ...                     4 warps (two tiles only)
    correction  | O *= alpha | ... | O / l -> out, lse                      4 warps (one tile only)

head dim   BM x TILES   BN    tensor memory (columns)                       shared memory (KiB), P in shared memory
64         128 x 2      128   S 128, P 2x64, O 2x64        = 384            Q 32  ring 4 x 16
128        128 x 2      128   S 128, P 2x64, O 2x128       = 512            Q 64  ring 4 x 32
256        128 x 1      64    S 2x64, O 256                = 384            Q 64  ring 4 x 32   P 32
512        64  x 1      64    S 2x64, O 256 (*)            = 384            Q 64  ring 4 x 32   P 16
(*) 64 rows use half of the 128 lanes; the two halves of O lie side by side in the lanes, 256 columns each.

P is stored in tensor memory (P_TMEM) or, with one tile, in shared memory. With one tile, P in tensor memory overwrites
S. With two it has columns of its own, and S is free as soon as the softmax has it in registers: the tiles use one S
alternately. At 512 an A operand of 64 rows cannot be in tensor memory, so P is in shared memory.
A ring slot holds BN keys of min(D, 256) columns: at 512 a K or V tile is two slots. With one query tile and k the same
tensor as v (latents), a tile is loaded once and stays in its slots for both products.

barrier          arrives                    waits            means
q_ready[i]       softmax                    mma, load        Q of tile i is in shared memory, visible to the tensor core
ready[r]         TMA bytes, or load warp    mma              K or V is in ring slot r
free[r]          commit of mma              load             the products that read slot r are complete (k is v: both)
s_ready[s]       commit of mma              softmax          S is complete; one tile: also every product issued before
                                                             it, so P's buffer of the same stage may be overwritten
s_read[i]        softmax                    mma              two tiles: S of tile i is in registers
p_ready[s]       softmax                    mma              P is stored, S is read, and two tiles: O is rescaled
pv_done[i]       commit of mma              softmax,         P V is complete: O of tile i may be touched; two tiles: P
                                            correction       may be overwritten
stat_ready       softmax                    correction       one tile: alpha (in the end maximum and sum) is in stat
stat_free        correction                 softmax          one tile: stat is read
o_rescaled       correction                 mma              one tile: O is rescaled for the next P V
landed           TMA bytes                  load             a tile with rows of others is there, to be zeroed in part
"""

from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory

from dsv4.fmha.kernels import loads
from dsv4.fmha.kernels.arguments import RowTensors, Source, Tiles, WorkTile, kv_rows, problem_of
from dsv4.fmha.kernels.sm100 import one_tile, two_tiles
from dsv4.fmha.kernels.sm100.load_role import load_role
from dsv4.fmha.kernels.tiles import Pages, first_key, key_tiles, sequence
from dsv4.kernels.compat import Value, aggregate, gl, gluon
from dsv4.kernels.ring import Barriers, Ring, init_barriers, new_barriers, new_ring


@aggregate
class Memory:
    """Tensor memory, shared memory and barriers."""

    s: Value
    o: Value
    q: Value
    ring: Ring  # slots of K and V
    p: Value
    stat: Value  # one tile: alpha of its rows, in the end maxima and sums
    q_ready: Barriers
    s_ready: Barriers
    s_read: Barriers
    p_ready: Barriers
    stat_ready: Barriers
    stat_free: Barriers
    o_rescaled: Barriers
    pv_done: Barriers
    landed: Barriers


@gluon.jit
def make_memory(
    DTYPE: gl.constexpr,
    D: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    TILES: gl.constexpr,
    SLOTS: gl.constexpr,
    P_TMEM: gl.constexpr,
):
    DS: gl.constexpr = min(D, 256)
    STAGES: gl.constexpr = 2  # stages of S and P: one per tile, or two of the one tile
    P_ROWS: gl.constexpr = 8 if P_TMEM else BM
    QL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, DS], DTYPE)
    KL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, DS], DTYPE)
    PL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([P_ROWS, BN], DTYPE)
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(DTYPE, [TILES * (D // DS), BM, DS], QL)
    slots = gl.allocate_shared_memory(DTYPE, [SLOTS, BN, DS], KL)
    stat = gl.allocate_shared_memory(gl.float32, [2, BM], ROW)
    COLUMNS: gl.constexpr = TensorMemoryLayout([BM, BN], col_stride=1)
    # Two tiles share one S: at head dim 128 there is no room for more, and at 64 this keeps the groups from computing
    # their exponentials at the same time.
    s = allocate_tensor_memory(gl.float32, [3 - TILES, BM, BN], COLUMNS)
    if TILES == 2:
        p = allocate_tensor_memory(DTYPE, [TILES, BM, BN], COLUMNS)
    else:
        p = gl.allocate_shared_memory(DTYPE, [STAGES, P_ROWS, BN], PL)
    o = allocate_tensor_memory(gl.float32, [TILES, BM, D], TensorMemoryLayout([BM, DS], col_stride=1))
    q_ready = new_barriers(TILES)
    ring = new_ring(slots)
    s_ready = new_barriers(STAGES)
    s_read = new_barriers(STAGES)
    p_ready = new_barriers(STAGES)
    stat_ready = new_barriers(1)
    stat_free = new_barriers(1)
    o_rescaled = new_barriers(1)
    pv_done = new_barriers(TILES)
    landed = new_barriers(1)
    init_barriers(
        (landed, ring.ready, ring.free, s_ready, s_read, p_ready, q_ready, pv_done, stat_ready, stat_free, o_rescaled)
    )
    stat_free.arrive(0)  # nothing to read yet
    return Memory(
        s, o, q, ring, p, stat, q_ready, s_ready, s_read, p_ready, stat_ready, stat_free, o_rescaled, pv_done, landed
    )


# There is one variant per head dim, dtype, P path and way of reading keys; nothing else may make Triton compile again.
@gluon.jit
def fmha_forward(
    tensors,
    k_desc,
    v_desc,
    sizes,
    strides,
    opts,
    D: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    TILES: gl.constexpr,
    SLOTS: gl.constexpr,
    P_TMEM: gl.constexpr,
    KV_LOAD: gl.constexpr,
    SOFTMAX_REGS: gl.constexpr,
    WARP_REGS: gl.constexpr,
    LOAD_WARPS: gl.constexpr = 1,
    LOAD_REGS: gl.constexpr = None,
):
    seq = gl.program_id(2)
    head = gl.program_id(1) % sizes.kv_heads
    split = gl.program_id(1) // sizes.kv_heads
    varlen = sizes.tokens == 0  # the host passes 0 tokens for varlen batches
    q_start, tokens, k_start, keys = sequence(seq, varlen, tensors, sizes, KV_LOAD)
    tile_row = (gl.num_programs(0) - 1 - gl.program_id(0)) * (BM * TILES)  # causal: the longest tiles start first
    if tile_row < tokens * sizes.group.number:
        first, tile_begin, tile_end = key_tiles(
            tile_row, tokens, keys, split, sizes, opts, loads.box_rows(k_desc), BM * TILES, BN, KV_LOAD
        )
        n = tile_end - tile_begin

        memory = make_memory(tensors.q_ptr.dtype.element_ty, D, BM, BN, TILES, SLOTS, P_TMEM)

        # The tensors of this sequence. Offsets have 64 bits: a batch may be larger than 2^31 elements.
        here = RowTensors(
            tensors.q_ptr + (seq.to(gl.int64) * strides.q_batch + q_start.to(gl.int64) * strides.q_token) * 8,
            tensors.out_ptr + (seq.to(gl.int64) * strides.out_batch + q_start.to(gl.int64) * strides.out_token) * 8,
            tensors.lse_ptr + seq.to(gl.int64) * strides.lse_batch + q_start.to(gl.int64) * strides.lse_token,
            tensors.sink_ptr,
            tensors.part_ptr,
            tensors.part_lse_ptr,
        )
        table_ptr = tensors.table_ptr + seq.to(gl.int64) * sizes.table_stride
        # The row of the partial results: split-major, then in the order of q's rows (token, head).
        part_row = split.to(gl.int64) * sizes.total_q + gl.where(varlen, q_start, seq * tokens)
        is_split = (tensors.part_ptr.to(gl.int64) != 0).to(gl.int32)  # no memory for partial results: there are none
        outer = gl.where(varlen, 0, seq)
        # TMA fills what lies past a dense tensor with zeros; elsewhere other rows follow the last key.
        landed_end = keys
        if KV_LOAD == loads.ROWS:
            landed_end = gl.where(varlen, keys, 0x7FFFFFFF)
        tiles = Tiles(first, tile_begin, tile_end, part_row)
        pages = Pages(table_ptr, sizes.page_size, sizes.total_k)
        work_tile = WorkTile(here, strides, problem_of(head, tokens, keys, sizes, opts), tiles, pages)
        visible_first = first_key(0, tokens, keys, opts.left)
        where = loads.Where(outer, head, k_start, keys, visible_first, landed_end, table_ptr, sizes.page_size)
        k_rows, v_rows = kv_rows(tensors, sizes, strides)
        source = Source(k_desc, v_desc, k_rows, v_rows, where)
        sign, k_is_v = opts.sign, opts.k_is_v
        # With cp.async, the two slots of a tile would deadlock: a slot is announced only after the next is free.
        if TILES == 2 or KV_LOAD == loads.CP_ASYNC:
            k_is_v = 0
        if TILES == 2:
            gl.warp_specialize(
                [
                    (two_tiles.softmax_role, (memory, work_tile, tile_row, sign, is_split, 0, D, KV_LOAD)),
                    (two_tiles.softmax_role, (memory, work_tile, tile_row + BM, sign, is_split, 1, D, KV_LOAD)),
                    (two_tiles.mma_role, (memory, n)),
                    (load_role, (source, memory, tiles, k_is_v, D, KV_LOAD)),
                ],
                [4, 1, LOAD_WARPS],
                [SOFTMAX_REGS, WARP_REGS, LOAD_REGS or WARP_REGS],
            )
        else:
            gl.warp_specialize(
                [
                    (one_tile.correction_role, (memory, work_tile, tile_row, n, is_split, D)),
                    (one_tile.softmax_role, (memory, work_tile, tile_row, sign, D, P_TMEM, KV_LOAD)),
                    (one_tile.mma_role, (memory, n, k_is_v, D, P_TMEM)),
                    (load_role, (source, memory, tiles, k_is_v, D, KV_LOAD)),
                ],
                [4, 1, LOAD_WARPS],
                [SOFTMAX_REGS, WARP_REGS, LOAD_REGS or WARP_REGS],
            )
