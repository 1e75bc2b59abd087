"""V4 attention on sm_100a by pairs of CTAs: 128 heads of one query token at a time, 64 of them in each CTA.

Role chart, memory maps and barriers are those of pair_roles.py. A block is 128 rows picked by number, as K split by
rows over the pair and as V by columns; gather_pair.py describes how it is loaded: its roles gather and plan (one warp)
replace load. In addition there are::

    shared memory   bytes       holds, in each CTA
    bias            3 x 256     bf16 per key: what is added to the scores of block j, at j % 3

    barrier         arrives     count   waits       means
    bias_ready[b]   gather      1       softmax     the bias of a block is there

The bias of block j is overwritten by that of block j + 3: before, gather has filled a slot again whose product followed
p_ready of block j (with V of block j + 1, or, if j is a work tile's last, with K or V of a block behind it).
"""

from dsv4.fmha.kernels.sm100.pair_roles import (
    PIECE,
    OutputRows,
    begin,
    by_halves,
    hand_over,
    last_values,
    make_memory,
    scores_role,
    softmax_block,
    take_over,
    values_role,
    write,
)
from dsv4.kernels.compat import gl, gluon
from dsv4.v4.kernels.sm100.epilogue import angles_of, finish_rows, tile_rows
from dsv4.v4.kernels.sm100.gather import pools_of
from dsv4.v4.kernels.sm100.gather_pair import gather_role, plan_role
from dsv4.v4.kernels.tile_scheduler import tile_coord


@gluon.jit
def softmax_role(memory, num_tiles, scale):
    """Compute P = exp2(S - m) block by block."""
    s = memory.s
    LS: gl.constexpr = s.index(0).get_reg_layout()
    HALF: gl.constexpr = gl.SliceLayout(2, by_halves(gl.zeros([128, 128], gl.float32, LS)).type.layout)
    at = 0
    turn = 0
    for _tile_id in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        n = begin(turn, memory)
        m = gl.full([128], -float("inf"), gl.float32, gl.SliceLayout(1, HALF))
        l = gl.full([128, 2], 0.0, gl.float32, HALF)
        for j in range(at, at + n):
            memory.bias_ready.wait(j % 3, (j // 3) % 2)
            row_bias = memory.bias.index(j % 3).load(gl.SliceLayout(0, LS)).to(gl.float32)
            memory.s_ready.wait(j % 2, (j // 2) % 2)
            x = s.index(j % 2).load() * scale + row_bias[None, :]
            m, l = softmax_block(by_halves(x), m, l, j, at, memory)
        hand_over(m, l, turn, memory)
        at += n
        turn += 1
    last_values(at, memory)


@gluon.jit
def store_role(memory, output, num_tiles, split):
    """Write O / l to out, and lse, for each work tile. Everything but O is read before O is complete."""
    LO: gl.constexpr = memory.o.index(0).reinterpret(gl.float32, [4, 128, 64], PIECE).index(0).get_reg_layout()
    at = 0
    turn = 0
    for tile_id in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        query, first_head, part = tile_coord(tile_id, output.queries, output.heads, 128)
        place = tile_rows(query, first_head, part, output, split, 128, gl.SliceLayout(1, LO))
        angles_ptr = angles_of(query, output.rope)
        n = begin(turn, memory)
        m, l = take_over(turn, memory)
        factor = finish_rows(m, l, place, output, split)
        at += n
        turn += 1
        if n > 0:
            memory.pv_done.wait((at - 1) % 2, ((at - 1) // 2) % 2)
        out = OutputRows(
            output.out_ptr + query.to(gl.int64) * output.stride_on * 8,
            place.head.to(gl.int64) * output.stride_oh * 8,
            place.here,
        )
        partial = OutputRows(output.part_ptr + place.part_row * 512, place.head * 512, place.here)
        write(factor, n, out, partial, memory, (angles_ptr, output.rope.width), split)


@gluon.jit
def v4_sparse_pair(
    q_desc,
    window_desc,
    window,
    window_names,
    compressed_desc,
    compressed,
    compressed_names,
    requests,
    output,
    sizes,
    signed_scale,
    KV_INDEX: gl.constexpr,
    WINDOW_LOAD: gl.constexpr,
    COMPRESSED_LOAD: gl.constexpr,
    WINDOW_UNIT: gl.constexpr,
    COMPRESSED_UNIT: gl.constexpr,
    WINDOW_FORMAT: gl.constexpr,
    COMPRESSED_FORMAT: gl.constexpr,
    GATHER_REGS: gl.constexpr,
    STORE_REGS: gl.constexpr,
    WARP_REGS: gl.constexpr,
):
    pools = pools_of(window, window_desc, compressed, compressed_desc)
    num_tiles = sizes.num_tiles
    memory = make_memory(q_desc.dtype, 4, 5, True)
    gl.warp_specialize([
        (softmax_role, (memory, num_tiles, signed_scale)),
        (gather_role, (window_names, compressed_names, pools, memory, sizes, KV_INDEX,
                       (WINDOW_LOAD, COMPRESSED_LOAD), (WINDOW_UNIT, COMPRESSED_UNIT),
                       (WINDOW_FORMAT, COMPRESSED_FORMAT))),
        (store_role, (memory, output, num_tiles, output.split)),
        (scores_role, (memory, num_tiles)),
        (values_role, (memory, num_tiles)),
        (plan_role, (q_desc, window_names, compressed_names, requests, memory, sizes, KV_INDEX)),
    ], [4, 4, 1, 1, 1], [GATHER_REGS, STORE_REGS, WARP_REGS, WARP_REGS, WARP_REGS])  # fmt: skip
