"""The gathering role of listed_pair.py: for each item Q, then rows picked by number, for two CTAs that share products.

A product over a pair takes its right operand in halves: of K the rows are split (each CTA holds 64 of 128 keys, all
columns), of V the columns (each CTA holds all 128 keys, half of the columns). So a row comes twice, as K and as V.

A slot is 128 keys of 256 columns, 32 KB in each CTA; two slots make a place, which takes K or V of a block. An item of
n blocks fills the two places in this order::

    place 0     K0 |    V0 |    V1 | ...        V(n-2) |            | K0 of the next item
    place 1        | K1    | K2    | ... K(n-1)        | V(n-1)     |

so that V of its last block and K of the next item's first are there at once. Rows of a plain tensor come by TMA, four
at a time; rows of an Fp8Cache come through registers, where they become bf16. A row that is not there (-1, out of
range, past the length) is filled with zeros, and its bias is -inf: 0 * NaN would be NaN.

Values travel together in tuples: names, lists and pool as in gather.py; ring: slots, and the barriers of K ready, V
ready and slot free.
"""

from triton.experimental.gluon.language.nvidia.blackwell.tma import async_gather

from dsv4.kernels.compat import fence_async_shared, gl, gluon, mbarrier, reinterpret, tma_load
from dsv4.kernels.shared.fmha.tiles import split_range
from dsv4.kernels.shared.v4.items import NONE, TMA, place_of, share
from dsv4.kernels.sm100.v4.gather import fp8_rest, fp8_scales, fp8_store, fp8_values, numbers_at, scale_of

KEYS = gl.constexpr(128)
# Layouts over two CTAs: a basis of zeros gives both the same, a one halves that dimension.
ONE = gl.constexpr(gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0], cga_layout=[[0, 0]]))  # a row per thread
FOURS_K = gl.constexpr(gl.BlockedLayout([4, 1], [1, 32], [4, 1], [0, 1], cga_layout=[[1, 0]]))  # four rows per TMA
FOURS_V = gl.constexpr(gl.BlockedLayout([4, 1], [1, 32], [4, 1], [0, 1], cga_layout=[[0, 1]]))
LANES_K = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0], cga_layout=[[1, 0]]))
LANES_V = gl.constexpr(gl.BlockedLayout([1, 1, 16], [8, 1, 4], [4, 1, 1], [2, 1, 0], cga_layout=[[0, 1, 0]]))
SLOT_K = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2, cga_layout=[[1, 0]]))
SLOT_V = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2, cga_layout=[[0, 1]]))
SLOT_BYTES = gl.constexpr(128 * 256)  # of one CTA


@gluon.jit
def place_of_k(i):
    """(place, how often the item has filled it before) of K of its block i."""
    return gl.minimum(i, 1), gl.maximum(i - 1, 0)


@gluon.jit
def place_of_v(i, n):
    return gl.where(i == n - 1, 1, 0), gl.minimum(i + 1, n - 1)


@gluon.jit
def lines_of(pool, number):
    """Lines of the pool's descriptor; -1, which TMA fills with zeros, where there is no such row."""
    ptr, desc, rows, page_rows, page_stride, row_stride, gap = pool
    there = (number >= 0) & (number < rows)
    line = number
    if gap > 0:
        line += number // page_rows * gap
    return gl.where(there, line, -1)


@gluon.jit
def fetch_k(pool, number, ring, place, use):
    kv, k_ready, v_ready, free = ring
    line = gl.convert_layout(lines_of(pool, number), gl.SliceLayout(1, FOURS_K))
    for h in gl.static_range(2):
        slot = 2 * place + h
        mbarrier.wait(free.index(slot), (use + 1) % 2)
        mbarrier.expect(k_ready.index(slot), SLOT_BYTES)
        async_gather(pool[1], line, h * 256, k_ready.index(slot), kv.index(slot))


@gluon.jit
def fetch_v(pool, number, ring, place, use):
    kv, k_ready, v_ready, free = ring
    line = gl.convert_layout(lines_of(pool, number), gl.SliceLayout(1, FOURS_V))
    for h in gl.static_range(2):
        slot = 2 * place + h
        mbarrier.wait(free.index(slot), (use + 1) % 2)
        mbarrier.expect(v_ready.index(slot), SLOT_BYTES)
        async_gather(pool[1], line, h * 256, v_ready.index(slot), reinterpret(kv.index(slot), [KEYS, 256], SLOT_V))


@gluon.jit
def announce(ready):
    fence_async_shared()  # ordinary stores -> tensor-core reads
    mbarrier.arrive(ready, count=1)


@gluon.jit
def fp8_place(pool, number, UNIT: gl.constexpr):
    """Of rows of an Fp8Cache: whether they are there, where their values begin and where their scales, in bytes."""
    ptr, desc, rows, page_rows, page_stride, row_stride, gap = pool
    there = (number >= 0) & (number < rows)
    page = number // page_rows
    place = (number - page * page_rows).to(gl.int64)
    start = page.to(gl.int64) * page_stride * UNIT
    return there, start + place * 576, start + page_rows.to(gl.int64) * 576 + place * 8


@gluon.jit
def fp8_k(pool, number, ring, place, use, UNIT: gl.constexpr):
    """Half of the rows, all columns. Most is asked for before the first wait, the rest as the first leave registers."""
    kv, k_ready, v_ready, free = ring
    ptr = pool[0]
    there, data, at = fp8_place(pool, gl.convert_layout(number, gl.SliceLayout(1, LANES_K)), UNIT)
    scales = fp8_scales(ptr, at, there, UNIT)
    x0 = fp8_values(ptr, data, there, 0)
    x1 = fp8_values(ptr, data, there, 1)
    x2 = fp8_values(ptr, data, there, 2)
    x3 = fp8_values(ptr, data, there, 3)
    slot = 2 * place
    panels = reinterpret(kv.index(slot), [4, KEYS, 64], SLOT_K)
    mbarrier.wait(free.index(slot), (use + 1) % 2)
    fp8_store(panels.index(0), x0, scales, 0)
    x4 = fp8_values(ptr, data, there, 4)
    fp8_store(panels.index(1), x1, scales, 1)
    x5 = fp8_values(ptr, data, there, 5)
    fp8_store(panels.index(2), x2, scales, 2)
    x6 = fp8_values(ptr, data, there, 6)
    fp8_store(panels.index(3), x3, scales, 3)
    rest = fp8_rest(ptr, data, there, UNIT)
    announce(k_ready.index(slot))
    panels = reinterpret(kv.index(slot + 1), [4, KEYS, 64], SLOT_K)
    mbarrier.wait(free.index(slot + 1), (use + 1) % 2)
    fp8_store(panels.index(0), x4, scales, 4)
    fp8_store(panels.index(1), x5, scales, 5)
    fp8_store(panels.index(2), x6, scales, 6)
    panels.index(3).store(rest)
    announce(k_ready.index(slot + 1))


@gluon.jit
def v_columns(INDEX: gl.constexpr):
    """Columns [1, 2, 64] of the two CTAs' panels INDEX: the second CTA's lie 128 after the first's."""
    second = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, LANES_V)))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, LANES_V)))
    return INDEX * 64 + 128 * second[None, :, None] + column[None, None, :]


@gluon.jit
def v_values(ptr, data, there, INDEX: gl.constexpr):
    """64 e4m3 values of each row and CTA, as bytes; columns from 448 on are none."""
    column = v_columns(INDEX)
    return gl.load(ptr + data[:, :, None] + column, mask=there[:, :, None] & (column < 448), other=0)


@gluon.jit
def v_bf16(x, scales, INDEX: gl.constexpr):
    second = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, LANES_V)))
    s = scale_of((scales >> (8 * INDEX + 16 * second)[None, :]).to(gl.int32) & 255)
    return x.to(gl.float8e4nv, bitcast=True).to(gl.bfloat16) * s[:, :, None]


@gluon.jit
def v_rest(ptr, data, there, UNIT: gl.constexpr):
    """The last panel of the second CTA, which is bf16; nothing for the first."""
    column = v_columns(5) - 448
    mask = there[:, :, None] & (column >= 0)
    if UNIT >= 2:
        rest_ptr = ptr.to(gl.pointer_type(gl.bfloat16))
        return gl.load(rest_ptr + (data // 2)[:, :, None] + 224 + column, mask=mask, other=0.0)
    else:  # at odd addresses, too
        pointers = ptr + data[:, :, None] + 448 + 2 * column
        low = gl.load(pointers, mask=mask, other=0).to(gl.int16)
        high = gl.load(pointers + 1, mask=mask, other=0).to(gl.int16)
        return (low | (high << 8)).to(gl.bfloat16, bitcast=True)


@gluon.jit
def fp8_v(pool, number, ring, place, use, UNIT: gl.constexpr):
    """All rows, half of the columns: of each 256, the first CTA's two panels and the second's."""
    kv, k_ready, v_ready, free = ring
    ptr = pool[0]
    number = gl.convert_layout(number, gl.SliceLayout(1, gl.SliceLayout(2, LANES_V)))[:, None]
    number = number + gl.zeros([KEYS, 2], gl.int32, gl.SliceLayout(2, LANES_V))
    there, data, at = fp8_place(pool, number, UNIT)
    scales = fp8_scales(ptr, at, there, UNIT)
    x0 = v_values(ptr, data, there, 0)
    x1 = v_values(ptr, data, there, 1)
    slot = 2 * place
    panels = reinterpret(kv.index(slot), [2, KEYS, 128], SLOT_V)
    mbarrier.wait(free.index(slot), (use + 1) % 2)
    panels.index(0).store(v_bf16(x0, scales, 0).reshape([KEYS, 128]))
    x4 = v_values(ptr, data, there, 4)
    panels.index(1).store(v_bf16(x1, scales, 1).reshape([KEYS, 128]))
    x5 = v_values(ptr, data, there, 5)
    announce(v_ready.index(slot))
    panels = reinterpret(kv.index(slot + 1), [2, KEYS, 128], SLOT_V)
    mbarrier.wait(free.index(slot + 1), (use + 1) % 2)
    panels.index(0).store(v_bf16(x4, scales, 4).reshape([KEYS, 128]))
    y = v_bf16(x5, scales, 5)
    rest = v_rest(ptr, data, there, UNIT)
    panels.index(1).store(gl.where(v_columns(5) < 448, y, rest).reshape([KEYS, 128]))
    announce(v_ready.index(slot + 1))


@gluon.jit
def gather_k(pool, number, ring, place, use, WAY: gl.constexpr, UNIT: gl.constexpr):
    if WAY == TMA:
        fetch_k(pool, number, ring, place, use)
    else:
        fp8_k(pool, number, ring, place, use, UNIT)


@gluon.jit
def gather_v(pool, number, ring, place, use, WAY: gl.constexpr, UNIT: gl.constexpr):
    if WAY == TMA:
        fetch_v(pool, number, ring, place, use)
    else:
        fp8_v(pool, number, ring, place, use, UNIT)


@gluon.jit
def gather_role(q_desc, names, requests, pools, q, job, bias, barriers, ring, items, sizes, HOW: gl.constexpr,
                WAYS: gl.constexpr, UNITS: gl.constexpr):  # fmt: skip
    """The items of this pair, one after the other: the number of blocks, Q, then K and V as places become free."""
    job_ready, job_free, q_ready, q_free, bias_ready = barriers
    kv, k_ready, v_ready, free = ring
    queries, heads, num_splits, tiles_per_split = sizes
    window, compressed = names
    BOX: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3, cga_layout=[[0, 1, 0]])
    at = 0  # blocks so far
    full = 0  # items so far that have blocks
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        query, first_head, split = place_of(item, queries, heads, 128)
        window_count, compressed_count, line = share(query, window, compressed, requests, HOW)
        window_blocks = (window_count + KEYS - 1) // KEYS
        blocks = window_blocks + (compressed_count + KEYS - 1) // KEYS
        begin, end = split_range(blocks, split, num_splits, tiles_per_split)
        n = end - begin
        lists = (window.list_ptr + query.to(gl.int64) * window.line, window_count, window_blocks,
                 compressed.list_ptr + line * compressed.line, compressed_count)  # fmt: skip
        number = numbers_at(lists, begin, end, pools[1], HOW, KEYS, ONE)
        mbarrier.wait(job_free, (turn + 1) % 2)
        job.store(gl.full([1], n, gl.int32, gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[0]])))
        mbarrier.arrive(job_ready, count=1)
        if n > 0:
            mbarrier.wait(q_free, (full + 1) % 2)
            mbarrier.expect(q_ready, 2 * SLOT_BYTES)
            for h in gl.static_range(2):
                tma_load(q_desc, [query, first_head, h * 256], q_ready, reinterpret(q.index(h), [1, 128, 256], BOX))
            full += 1
        # Numbers of the block before. Not `number` to begin with: Triton would not see that the loop changes it.
        before = gl.full([KEYS], -1, gl.int32, gl.SliceLayout(1, ONE))
        for i in range(0, gl.where(n > 0, n + 1, 0)):
            following = numbers_at(lists, begin + i + 1, end, pools[1], HOW, KEYS, ONE)
            if i < n:
                rows = pools[0][2]
                if HOW != NONE:
                    rows = gl.where(begin + i < window_blocks, rows, pools[1][2])
                there = (number >= 0) & (number < rows)
                bias.index((at + i) % 4).store(gl.where(there, 0.0, -float("inf")).to(gl.bfloat16))
                mbarrier.arrive(bias_ready.index((at + i) % 4), count=1)
                place, use = place_of_k(i)
                if HOW == NONE:
                    gather_k(pools[0], number, ring, place, at + use, WAYS[0], UNITS[0])
                elif begin + i < window_blocks:
                    gather_k(pools[0], number, ring, place, at + use, WAYS[0], UNITS[0])
                else:
                    gather_k(pools[1], number, ring, place, at + use, WAYS[1], UNITS[1])
            if i > 0:
                place, use = place_of_v(i - 1, n)
                if HOW == NONE:
                    gather_v(pools[0], before, ring, place, at + use, WAYS[0], UNITS[0])
                elif begin + i - 1 < window_blocks:
                    gather_v(pools[0], before, ring, place, at + use, WAYS[0], UNITS[0])
                else:
                    gather_v(pools[1], before, ring, place, at + use, WAYS[1], UNITS[1])
            before = number
            number = following
        at += n
        turn += 1
    if full > 0:  # the last commits arrive in both CTAs: neither may be gone before
        mbarrier.wait(q_free, (full - 1) % 2)
        for slot in gl.static_range(4):
            mbarrier.wait(free.index(slot), (at - 1) % 2)
