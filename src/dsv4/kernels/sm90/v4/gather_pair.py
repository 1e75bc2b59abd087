"""The gathering warps of listed_pair.py, 4 in each of two CTAs: half of the rows of each block, for both.

A CTA converts 32 of the 64 rows of a block, a warp 8 of them. In shared memory they are 1024 bytes of each panel of 64
columns, which the warp copies to the other CTA when it has stored them (cp.async.bulk: the data pass no registers, and
an arithmetic warp stores what it converts once). Neither stores nor copies are known to the compiler, which puts a
barrier between stores to one tile; warps need none here: each says for itself that its rows are stored, and how many
bytes come from its twin in the other CTA.

Rows are those of gather.py. Registers of a thread lie so that they are pieces of 16 bytes in shared memory, whose
layout is written down here too: panels [64, 64] of 8192 bytes, piece c of row r at 128 r + 16 (c xor r mod 8).

The fence before a copy waits for loads that are under way, so those of the next half come after it.
"""

from dsv4.kernels.compat import async_copy, gl, gluon, mbarrier
from dsv4.kernels.shared import cluster
from dsv4.kernels.shared.fmha.tiles import split_range
from dsv4.kernels.shared.v4.items import lists_of, place_of
from dsv4.kernels.sm90.v4.gather import (
    copy_rows,
    entries,
    fp8_panels,
    fp8_place,
    fp8_to_bf16,
    lanes,
    numbers_of,
    pool_of,
    scale_word,
    words_of,
    write_job,
)

WARPS = gl.constexpr(4)
HALF = gl.constexpr(4096)  # bytes of half a block that a warp converts, and gets from its twin
BIAS = gl.constexpr(32)  # bytes of the bias, likewise
PANEL = gl.constexpr(8192)  # bytes of 64 columns of a block


# Layouts: four threads have a row, a warp 8 rows. The CTAs share the rows of a block.


@gluon.constexpr_function
def threads():
    """One value per thread: [64 rows, 4]."""
    return gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0], cluster.split(2, 2))


@gluon.constexpr_function
def e4m3(panels):
    """Words of e4m3, 4 of each panel per thread: [64 rows, panels, 16]."""
    return gl.BlockedLayout([1, panels, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0], cluster.split(2, 3))


@gluon.constexpr_function
def rest_words():
    """Words of the last 64 values of a row, 8 per thread: [64 rows, 32]."""
    return gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0], cluster.split(2, 2))


@gluon.constexpr_function
def _stores(outputs, inputs):
    """PTX: pieces of 16 bytes, by turns at offset and at offset xor 16; after two of them a panel further."""
    words, tile, offset = inputs
    lines = [f"""{{
    .reg .b32 rank, p0, p1;
    mov.u32 rank, %cluster_ctarank;
    add.s32 p0, {tile[0]}, {offset[0]};
    mapa.shared::cluster.u32 p0, p0, rank;
    xor.b32 p1, p0, 16;"""]
    for piece in range(len(words) // 4):
        four = ", ".join(words[4 * piece : 4 * piece + 4])
        lines.append(f"st.shared.v4.b32 [p{piece % 2}+{piece // 2 * 8192}], {{{four}}};")
    return "\n".join([*lines, "}"])


@gluon.jit
def store(words, tile, offset):
    """Words of bf16 pairs into this CTA's slot. offset: of a thread's first piece."""
    gl.inline_asm(_stores, ("r", "r", "r"), [words, tile, offset], (), False)


COPY = gl.constexpr("""{
    .reg .pred mine;
    .reg .b32 panel, rank, other, here, there, arrived;
    fence.proxy.async.shared::cta;
    bar.warp.sync -1;
    mov.u32 panel, %laneid;
    setp.lt.u32 mine, panel, 4;
    mov.u32 rank, %cluster_ctarank;
    xor.b32 other, rank, 1;
    and.b32 here, $1, -8;
    shl.b32 here, here, 7;
    mad.lo.u32 here, panel, 8192, here;
    add.s32 here, here, $0;
    mapa.shared::cluster.u32 there, here, other;
    mapa.shared::cluster.u32 here, here, rank;
    mapa.shared::cluster.u32 arrived, $2, other;
    @mine cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [here], 1024, [arrived];
}""")


@gluon.jit
def copy_to_other(tile, row, ready):
    """What this warp stored of half a block -> the slot of the other CTA, whose ``ready`` counts the bytes. row: that
    of a thread."""
    gl.inline_asm(COPY, "r,r,r", [tile, row, ready], (), False)


BIAS_IN_BOTH = gl.constexpr("""{
    .reg .pred first;
    .reg .b32 rank, other, here, there, arrived;
    setp.eq.s32 first, $4, 0;
    mov.u32 rank, %cluster_ctarank;
    xor.b32 other, rank, 1;
    mad.lo.u32 here, $2, 4, $1;
    mapa.shared::cluster.u32 there, here, other;
    mapa.shared::cluster.u32 here, here, rank;
    mapa.shared::cluster.u32 arrived, $3, other;
    @first st.shared.f32 [here], $0;
    @first st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], $0, [arrived];
}""")


@gluon.jit
def bias_in_both(there, bias, row, thread, ready):
    """What is added to the scores of a block (see gather.write_bias), by the first thread of a row."""
    value = gl.where(there, 0.0, -float("inf"))[:, None].broadcast_to(row.shape)
    gl.inline_asm(BIAS_IN_BOTH, "f,r,r,r,r", [value, bias, row, ready, thread], (), False)


@gluon.jit
def fp8_blocks(number, lists, pools, memory, barriers, first, end, phase, HOW: gl.constexpr, UNIT: gl.constexpr):
    """Blocks [first, end): this CTA's rows into both. number: of the first block."""
    T: gl.constexpr = threads()
    REST: gl.constexpr = gl.SliceLayout(1, rest_words())
    kv, bias, ready, free = memory.kv, memory.bias, barriers.ready, barriers.free
    entry = gl.arange(0, 64, layout=gl.SliceLayout(1, T))
    row, thread = gl.broadcast(entry[:, None], gl.arange(0, 4, layout=gl.SliceLayout(0, T))[None, :])
    offset = row * 128 + ((2 * thread) ^ (row % 8)) * 16
    pool = pool_of(pools, first < lists.window_blocks)
    ptr = pool.ptr
    data, there, at = fp8_place(pool, number, UNIT)
    low = scale_word(ptr, at, there, 0, UNIT)
    x = fp8_panels(ptr, data, there, 0, 4, UNIT, e4m3(4))
    for block in range(first, end):
        slot = block % 2 * 2
        later = numbers_of(lists, block + 1, block + 1 < end, pools.compressed, entry, HOW)
        mbarrier.wait(free.index(slot), phase)
        store(fp8_to_bf16(x, low, 0), kv.index(slot), offset)
        copy_to_other(kv.index(slot), row, ready.index(slot))
        cluster.arrive_expecting(ready.index(slot), HALF)
        high = scale_word(ptr, at, there, 4, UNIT)
        y = fp8_panels(ptr, data, there, 4, 2, UNIT, e4m3(2))
        z = fp8_panels(ptr, data, there, 6, 1, UNIT, e4m3(1))
        rest = words_of(ptr, gl.convert_layout(data, REST), gl.convert_layout(there, REST), 112, 32, UNIT)

        seen = there
        pool = pool_of(pools, block + 1 < lists.window_blocks)
        ptr = pool.ptr
        data, there, at = fp8_place(pool, later, UNIT)
        mbarrier.wait(free.index(slot + 1), phase)
        tile = kv.index(slot + 1)
        bias_in_both(seen, bias.index(block % 2), row, thread, ready.index(slot + 1))
        store(fp8_to_bf16(y, high, 0), tile, offset)
        store(fp8_to_bf16(z, high, 2), tile, offset + 2 * PANEL)
        store(rest, tile, offset + 3 * PANEL)
        copy_to_other(tile, row, ready.index(slot + 1))
        cluster.arrive_expecting(ready.index(slot + 1), HALF + BIAS)
        low = scale_word(ptr, at, there, 0, UNIT)
        x = fp8_panels(ptr, data, there, 0, 4, UNIT, e4m3(4))
        phase = phase ^ (block % 2)
    return phase


@gluon.jit
def gather_role(q, window, compressed, requests, pools, memory, barriers, items, sizes, HOW: gl.constexpr,
                UNIT: gl.constexpr):  # fmt: skip
    """The items of this pair, as gather.gather_role."""
    LQ: gl.constexpr = lanes(gl.num_warps(), 2)
    phase = 1  # the first wait on an untouched barrier passes
    turn = 1
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        query, first_head, split = place_of(item, sizes.queries, sizes.heads, 128)
        lists = lists_of(query, window, compressed, requests, HOW)
        steps = (lists.window_blocks + (lists.count + 63) // 64 + 1) // 2
        begin, end = split_range(steps, split, sizes.num_splits, sizes.tiles_per_split)
        entry = gl.arange(0, 64, layout=gl.SliceLayout(1, threads()))
        # On its way while Q is asked for.
        number = numbers_of(lists, begin * 2, begin < end, pools.compressed, entry, HOW)
        mbarrier.wait(barriers.q_free, turn)
        head = first_head + entries(LQ, 128)
        offset = query.to(gl.int64) * q.stride_n + head.to(gl.int64) * q.stride_h
        for h in gl.static_range(2):
            copy_rows(q.ptr, offset, head < sizes.heads, memory.q.index(h), h * 256)
        async_copy.mbarrier_arrive(barriers.q_ready, increment_count=False)
        write_job(memory.job, 1 - turn, end - begin, query, first_head, split)
        mbarrier.arrive(barriers.q_ready, count=1)
        turn = turn ^ 1
        phase = fp8_blocks(number, lists, pools, memory, barriers, begin * 2, end * 2, phase, HOW, UNIT)
