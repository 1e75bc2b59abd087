"""FMHA forward at head dim 512 on sm_100a by pairs of CTAs: 128 packed query rows, 64 of them in each CTA.

Role chart, memory maps and barriers are those of pair_roles.py. A work tile is 128 rows of one (sequence, KV head), and
K and V of a block are 128 consecutive keys. TMA loads them, K split by rows and V by columns over the pair. The kernel
accepts only dense tensors, where TMA's bounds end a sequence.
"""

from dsv4.fmha.kernels import loads
from dsv4.fmha.kernels.scores import capped, head_scale, of_values
from dsv4.fmha.kernels.sm100.pair_roles import (
    KEYS,
    PIECE,
    SLOT_BYTES,
    OutputRows,
    begin,
    by_halves,
    hand_over,
    last_scores,
    last_slots,
    last_values,
    make_memory,
    place_of_k,
    place_of_v,
    scores_role,
    softmax_block,
    take_over,
    tell,
    values_role,
    write,
)
from dsv4.fmha.kernels.tiles import end_key, first_key, token_and_head
from dsv4.kernels import softmax
from dsv4.kernels.compat import Value, aggregate, fence_async_shared, gl, gluon, mbarrier, reinterpret, tma_load
from dsv4.kernels.division import divide

ROWS = gl.constexpr(128)


@aggregate
class Arguments:
    """The kernel's arguments, for its roles."""

    tensors: Value
    sizes: Value
    strides: Value
    opts: Value


@gluon.jit
def tile_coord(tile_id, arguments):
    """Return (sequence, KV head, first row, first key, number of blocks) of a work tile. The tiles of a head are
    neighbours, so that they share keys in L2; those with the most keys are first."""
    sizes, opts = arguments.sizes, arguments.opts
    tokens, keys, kv_heads, group = sizes.tokens, sizes.keys, sizes.kv_heads, sizes.group
    tiles = (tokens * group.number + ROWS - 1) // ROWS
    rest = tile_id // tiles
    seq = rest // kv_heads
    row = (tiles - 1 - (tile_id - rest * tiles)) * ROWS
    token_last = gl.minimum(divide(row + ROWS - 1, group), tokens - 1)
    first = first_key(divide(row, group), tokens, keys, opts.left)
    end = end_key(token_last, tokens, keys, opts.right)
    return seq, rest - seq * kv_heads, row, first, (gl.maximum(end - first, 0) + KEYS - 1) // KEYS


@gluon.jit
def load_role(arguments, k_desc, v_desc, memory, num_tiles):
    """Load, for each work tile of this pair, the number of blocks, Q, then K and V as places become free."""
    kv, k_ready, v_ready = memory.kv, memory.k_ready, memory.v_ready
    tensors, sizes, strides = arguments.tensors, arguments.sizes, arguments.strides
    group = sizes.group
    at = 0  # blocks so far
    full = 0  # work tiles so far that have blocks
    turn = 0
    for tile_id in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        seq, head, row, first, n = tile_coord(tile_id, arguments)
        tell((n,), turn, memory)
        if n > 0:
            memory.q_free.wait(0, (full + 1) % 2)
            q_ptr = tensors.q_ptr + seq.to(gl.int64) * strides.q_batch * 8
            rows = loads.HeadRows(q_ptr, sizes.tokens * group.number, head, group, strides.q_token, strides.q_head)
            for h in gl.static_range(2):
                loads.load_rows(rows, memory.q.index(h), row, h * 256, ROWS, 256, 64, 1)
            fence_async_shared()  # generic stores -> tensor-core reads
            memory.q_ready.arrive(0)
            full += 1
        for i in range(0, gl.where(n > 0, n + 1, 0)):
            if i < n:
                place, use = place_of_k(i)
                for h in gl.static_range(2):
                    slot = 2 * place + h
                    memory.free.wait(slot, (at + use + 1) % 2)
                    mbarrier.expect(k_ready.at(slot), SLOT_BYTES)
                    tma_load(
                        k_desc,
                        [seq, first + i * KEYS, head, h * 256],
                        k_ready.at(slot),
                        reinterpret(kv.index(slot), [1, KEYS, 1, 256], k_desc.layout),
                    )
            if i > 0:
                place, use = place_of_v(i - 1, n)
                for h in gl.static_range(2):
                    slot = 2 * place + h
                    memory.free.wait(slot, (at + use + 1) % 2)
                    mbarrier.expect(v_ready.at(slot), SLOT_BYTES)
                    tma_load(
                        v_desc,
                        [seq, first + (i - 1) * KEYS, head, h * 256],
                        v_ready.at(slot),
                        reinterpret(kv.index(slot), [1, KEYS, 1, 256], v_desc.layout),
                    )
        at += n
        turn += 1
    last_scores(full, memory)
    last_slots(at, memory)


@gluon.jit
def softmax_role(arguments, memory, num_tiles):
    """Compute P = exp2(S - m) block by block."""
    s, sizes, opts = memory.s, arguments.sizes, arguments.opts
    tokens, keys, group, left, right = sizes.tokens, sizes.keys, sizes.group, opts.left, opts.right
    LS: gl.constexpr = s.index(0).get_reg_layout()
    RS: gl.constexpr = gl.SliceLayout(1, LS)
    HALF: gl.constexpr = gl.SliceLayout(2, by_halves(gl.zeros([ROWS, KEYS], gl.float32, LS)).type.layout)
    at = 0
    turn = 0
    for tile_id in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _seq, head, first_row, first, _n = tile_coord(tile_id, arguments)
        own = head_scale(opts, head)
        scale = own.factor * opts.sign.to(gl.float32)
        n = begin(turn, memory)
        row = first_row + gl.arange(0, ROWS, layout=RS)
        token = divide(row, group)
        row_first = first_key(token, tokens, keys, left)
        row_end = end_key(token, tokens, keys, right)
        # All rows see these keys, so no mask is needed there.
        token_last = gl.minimum(divide(first_row + ROWS - 1, group), tokens - 1)
        full_first = first_key(token_last, tokens, keys, left)
        full_end = end_key(divide(first_row, group), tokens, keys, right)
        m = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, HALF))
        l = gl.full([ROWS, 2], 0.0, gl.float32, HALF)
        for j in range(at, at + n):
            column = first + (j - at) * KEYS
            memory.s_ready.wait(j % 2, (j // 2) % 2)
            x = capped(s.index(j % 2).load(), own) * scale
            if (column < full_first) | (column + KEYS > full_end):
                x = softmax.apply_mask(x, column, row_first, row_end, LS)
            m, l = softmax_block(by_halves(x), m, l, j, at, memory)
        hand_over(m, l, turn, memory)
        at += n
        turn += 1
    last_values(at, memory)


@gluon.jit
def store_role(arguments, memory, num_tiles):
    """Store O / l and the LSE of each work tile."""
    LO: gl.constexpr = memory.o.index(0).reinterpret(gl.float32, [4, 128, 64], PIECE).index(0).get_reg_layout()
    tensors, strides = arguments.tensors, arguments.strides
    tokens, group = arguments.sizes.tokens, arguments.sizes.group
    at = 0
    turn = 0
    for tile_id in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        seq, head, first_row, _first, _n = tile_coord(tile_id, arguments)
        row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LO))
        token, q_head = token_and_head(row, head, group)
        count = tokens * group.number
        here = row < count
        sink = softmax.sink_of(tensors.sink_ptr, q_head, here)
        n = begin(turn, memory)
        m, l = take_over(turn, memory)
        factor, lse = softmax.finish(m, l, sink)
        factor = of_values(factor, head_scale(arguments.opts, head))
        lse_row = seq.to(gl.int64) * strides.lse_batch + token.to(gl.int64) * strides.lse_token
        lse_row = lse_row + q_head.to(gl.int64) * strides.lse_head
        gl.store(tensors.lse_ptr + lse_row, lse * softmax.LN2, mask=here & (arguments.opts.want_lse != 0))
        at += n
        turn += 1
        if n > 0:
            memory.pv_done.wait((at - 1) % 2, ((at - 1) // 2) % 2)
        rows = loads.HeadRows(tensors.out_ptr, count, head, group, strides.out_token, strides.out_head)
        offset = loads.row_offsets(row, rows)
        out = OutputRows(tensors.out_ptr + seq.to(gl.int64) * strides.out_batch * 8, offset, here)
        nowhere = OutputRows(tensors.lse_ptr, row, row < 0)
        write(factor, n, out, nowhere, memory, (tensors.lse_ptr, 0), 0, False)


@gluon.jit
def fmha_forward_pair(
    tensors,
    k_desc,
    v_desc,
    sizes,
    strides,
    opts,
    LOAD_REGS: gl.constexpr,
    STORE_REGS: gl.constexpr,
    WARP_REGS: gl.constexpr,
):
    arguments = Arguments(tensors, sizes, strides, opts)
    tiles = (sizes.tokens * sizes.group.number + ROWS - 1) // ROWS
    num_tiles = tiles * sizes.kv_heads * (sizes.total_q // gl.maximum(sizes.tokens, 1))
    memory = make_memory(k_desc.dtype, 1, 4, False)
    gl.warp_specialize(
        [
            (softmax_role, (arguments, memory, num_tiles)),
            (load_role, (arguments, k_desc, v_desc, memory, num_tiles)),
            (store_role, (arguments, memory, num_tiles)),
            (scores_role, (memory, num_tiles)),
            (values_role, (memory, num_tiles)),
        ],
        [4, 4, 1, 1],
        [LOAD_REGS, STORE_REGS, WARP_REGS, WARP_REGS],
    )
