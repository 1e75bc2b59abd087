"""Device functions that both choices share: scores as ordered bits, cuts, places of taken items, sorting, lists.

Scores are compared as ordered bits, int32: -0 counts as 0, NaN as -inf, ABSENT is below all. Items are [HIGH, EACH *
THREADS]: a column belongs to one thread, so sums and scans along it need no exchange, and loads coalesce.
"""

import triton
import triton.language as tl

from dsv4.index.kernels.scores import FOREVER, OWN, STARTS, row_of
from dsv4.kernels.compat import gl, gluon

ABSENT = tl.constexpr(-(2**31))
LOWEST = tl.constexpr(-0x7F800000 - 1)  # -inf as ordered bits


@gluon.constexpr_function
def items_layout(warps, each):
    """Return a layout that gives each thread `each` neighbours of a line."""
    return gl.BlockedLayout([1, each], [1, 32], [1, warps], [1, 0])


@triton.jit
def value_of(ordered):
    """Convert ordered bits back to a score."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def ordered_of(value):
    """Convert scores to bits that compare as the scores do; no score may be -0."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def count_of(x):
    return tl.sum(tl.sum(x.to(tl.int32), 0), 0)


@triton.jit
def wider(low, high, other_low, other_high):
    return tl.minimum(low, other_low), tl.maximum(high, other_high)


@triton.jit
def ends_of(ordered):
    """Return (the least score that is not ABSENT, the greatest score + 1)."""
    low, high = tl.reduce((tl.where(ordered == ABSENT, FOREVER, ordered), ordered), 0, wider)
    low, high = tl.reduce((low, high), 0, wider)
    return low, high + 1


@triton.jit
def next_cuts(low, high, step):
    """Return two cuts, low < first <= second < high, that divide the interval into three: at first as numbers, which
    ends sooner for typical scores, then as bits, which ends for all."""
    if step < 8:
        a, b = value_of(low), value_of(high)
        first, second = ordered_of(a * 0.6666667 + b * 0.3333333), ordered_of(a * 0.3333333 + b * 0.6666667)
    else:
        third = ((high.to(tl.int64) - low) // 3).to(tl.int32)
        first, second = low + third, high - third
    first = tl.minimum(tl.maximum(first, low + 1), high - 1)
    return first, tl.minimum(tl.maximum(second, first), high - 1)


@triton.jit
def between(counts, wanted, low, high, first, second, at_least):
    """Return (low, high, how many items are >= low) after two cuts. counts: items >= first + 2^16 * items >= second."""
    above, some = counts >> 16, counts & 0xFFFF
    high = tl.where(above >= wanted, high, tl.where(some >= wanted, second, first))
    low = tl.where(above >= wanted, second, tl.where(some >= wanted, first, low))
    return low, high, tl.where(above >= wanted, above, tl.where(some >= wanted, some, at_least))


@triton.jit
def threshold_between(ordered, wanted, most, low, high, at_least):
    """Return (a cut, how many items are not below it): `wanted` to `most` of them if such a cut exists, else the least
    of the `wanted` best. at_least >= wanted items are >= low, fewer than wanted are >= high; there are fewer than 2^16
    items. Every eighth step moves the ends to values that occur."""
    step = 0
    while (at_least > most) & (low + 1 != high):
        if step % 8 == 7:
            low = tl.min(tl.min(tl.where(ordered >= low, ordered, FOREVER), 0), 0)
            high = tl.max(tl.max(tl.where(ordered < high, ordered, ABSENT), 0), 0) + 1
        first, second = next_cuts(low, high, step)
        counts = tl.sum(tl.sum((ordered >= first).to(tl.int32) + ((ordered >= second).to(tl.int32) << 16), 0), 0)
        low, high, at_least = between(counts, wanted, low, high, first, second, at_least)
        step += 1
    return low, at_least


@triton.jit
def first_ones(equal, number, room):
    """Return the number up to which `room` of the `equal` items are found; there are more than `room`."""
    low = -1
    high = tl.max(tl.max(tl.where(equal, number, -1), 0), 0)
    count = -1
    while (count != room) & (low + 1 < high):
        middle = low + (high - low) // 2
        count = count_of(equal & (number <= middle))
        enough = count >= room
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high


@gluon.jit
def cut_of(ordered, number, wanted, most, low, high, at_least):
    """Return (a cut, the highest number of an item equal to it that counts, how many are taken): at least the `wanted`
    best, at most `most`, lower numbers first among equals. at_least >= wanted items are >= low, none is >= high."""
    if at_least > most:
        low, at_least = threshold_between(ordered, wanted, most, low, high, at_least)
    highest = gl.to_tensor(FOREVER)
    if at_least > most:  # of the items equal to the cut, keep the first ones that fit
        highest = first_ones(ordered == low, number, wanted - count_of(ordered > low))
        at_least = wanted
    return low, highest, at_least


@gluon.jit
def best_of(ordered, number, wanted, most, low, high, at_least):
    """Return (which items are taken, how many, their least score), by the cut of cut_of."""
    low, highest, at_least = cut_of(ordered, number, wanted, most, low, high, at_least)
    return (ordered > low) | ((ordered == low) & (number <= highest)), at_least, low


@triton.jit
def so_far(x):
    return tl.cumsum(x, 0)


@gluon.jit
def places_of(taken, EACH: gl.constexpr):
    """Give the taken items different places from 0 on. Threads exchange one number per column."""
    L: gl.constexpr = items_layout(gl.num_warps(), EACH)
    LINE: gl.constexpr = gl.BlockedLayout([EACH], [32], [gl.num_warps()], [0])
    one = taken.to(gl.int32)
    column = gl.convert_layout(gl.sum(one, 0), LINE)
    before = gl.convert_layout(so_far(column) - column, gl.SliceLayout(0, L))
    return before[None, :] + so_far(one) - 1


@gluon.jit
def key_of(ordered, number):
    """Return an int64 key that falls with the score; of equal scores the lower number has the greater key."""
    return (ordered.to(gl.int64) << 32) | (FOREVER - number).to(gl.int64)


@gluon.constexpr_function
def sorting_layout(size, warps):
    """Return a layout with up to four neighbours per thread, so that most exchanges stay within a warp."""
    return gl.BlockedLayout([min(max(size // (32 * warps), 1), 4)], [32], [warps], [0])


@gluon.jit
def from_lane(key, apart):
    """Return the keys of the lane whose number differs in the bit `apart`."""
    lane = key.to(gl.int32) * 0 + apart
    if key.dtype == gl.int32:
        other = gl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "=r,r,r", [key, lane], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        other = gl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            mov.b64 {low, high}, $1;
            shfl.sync.bfly.b32 low, low, $2, 31, -1;
            shfl.sync.bfly.b32 high, high, $2, 31, -1;
            mov.b64 $0, {low, high};
            }""",
            "=l,l,r",
            [key, lane],
            dtype=gl.int64,
            is_pure=False,
            pack=1,
        )
    return other


@gluon.jit
def exchange(key, other, falls, upper):
    """Do one step of the network: each of two keys becomes the greater or the lesser of both."""
    first = (upper == 0) == falls
    if key.dtype == gl.int32:
        key = gl.where(first, gl.maximum(key, other), gl.minimum(key, other))
    else:  # a 64-bit select is cheaper than a 64-bit maximum
        key = gl.where(first == (key > other), key, other)
    return key


@gluon.jit
def in_thread(key, size, APART: gl.constexpr, SIZE: gl.constexpr, L: gl.constexpr):
    """Do one step of the network between neighbours in a thread."""
    place = gl.arange(0, SIZE, layout=L)
    pairs: gl.constexpr = [SIZE // (2 * APART), 2, APART]
    first, second = gl.split(gl.permute(gl.reshape(key, pairs), (0, 2, 1)))
    at, _ = gl.split(gl.permute(gl.reshape(place, pairs), (0, 2, 1)))
    upper = gl.full(at.shape, 1, gl.int32, at.type.layout)
    falls = (at & size) == 0
    pair = gl.join(exchange(first, second, falls, upper * 0), exchange(second, first, falls, upper))
    key = gl.permute(pair, (0, 2, 1))
    return gl.convert_layout(gl.reshape(key, [SIZE]), L)


@gluon.jit
def falling(key, length, SIZE: gl.constexpr):
    """Sort key [SIZE], in sorting_layout, the greatest first, with a bitonic network. length = SIZE, but the compiler
    does not know it and cannot unroll: fetching uncached code would take longer than running it."""
    L: gl.constexpr = sorting_layout(SIZE, gl.num_warps())
    EACH: gl.constexpr = L.size_per_thread[0]
    place = gl.arange(0, SIZE, layout=L)
    if EACH >= 2:
        key = in_thread(key, 2, 1, SIZE, L)
    if EACH >= 4:
        key = in_thread(key, 4, 2, SIZE, L)
        key = in_thread(key, 4, 1, SIZE, L)
    size = length * 0 + 2 * EACH
    while size <= length:
        falls = (place & size) == 0
        apart = size // 2
        while apart >= 32 * EACH:
            key = exchange(key, gl.gather(key, place ^ apart, 0), falls, place & apart)
            apart = apart // 2
        for i in gl.static_range(5):
            if size > (16 >> i) * EACH:
                key = exchange(key, from_lane(key, 16 >> i), falls, place & ((16 >> i) * EACH))
        if EACH >= 4:
            key = in_thread(key, size, 2, SIZE, L)
        if EACH >= 2:
            key = in_thread(key, size, 1, SIZE, L)
        size *= 2
    return key


@gluon.jit
def named_rows(
    key, chosen, query, sequence, owners, lists, OWNER: gl.constexpr, POOL: gl.constexpr, AMONG: gl.constexpr
):
    """Return the row numbers that a list has for these keys; -1 where a key is not chosen."""
    if AMONG:  # columns that are not rows score -inf, and there may be fewer keys than are wanted
        chosen = chosen & ((key >> 32).to(gl.int32) > LOWEST)
    row = row_of(FOREVER - (key & 0x7FFFFFFF).to(gl.int32), query, owners, chosen, AMONG)
    pages = lists.pages
    if OWNER == OWN or OWNER == STARTS:
        line = gl.minimum(sequence, owners.requests - 1).to(gl.int64) * owners.table_line
        page = gl.load(owners.table_ptr + line + row // pages.rows, mask=chosen, other=-1)
        if POOL:
            row = page * pages.rows + row % pages.rows
        row = gl.where((page >= 0) & (page < pages.count), row, -1)
    return gl.where(chosen, row, -1)


@gluon.jit
def store_rows(place, row, key, written, query, lists):
    """Store rows at their places in the list of a query, and the scores of their keys."""
    gl.store(lists.ptr + query.to(gl.int64) * lists.line + place, row, mask=written)
    score = gl.where(row >= 0, value_of((key >> 32).to(gl.int32)), -float("inf"))
    scores_ptr = lists.scores_ptr + query.to(gl.int64) * lists.scores_line
    gl.store(scores_ptr + place, score, mask=written & (lists.want_scores != 0))


@gluon.jit
def write_nothing(place, written, query, lists):
    gl.store(lists.ptr + query.to(gl.int64) * lists.line + place, place * 0 - 1, mask=written)
    none = gl.full(place.shape, -float("inf"), gl.float32, place.type.layout)
    scores_ptr = lists.scores_ptr + query.to(gl.int64) * lists.scores_line
    gl.store(scores_ptr + place, none, mask=written & (lists.want_scores != 0))


@gluon.jit
def write_list(
    key,
    wanted,
    query,
    sequence,
    owners,
    lists,
    OWNER: gl.constexpr,
    POOL: gl.constexpr,
    AMONG: gl.constexpr,
    WIDTH: gl.constexpr,
):
    """Write the first `wanted` sorted keys as the list of a query, then -1, and their scores."""
    SIZE: gl.constexpr = key.shape[0]
    place = gl.arange(0, SIZE, layout=key.type.layout)
    row = named_rows(key, place < wanted, query, sequence, owners, lists, OWNER, POOL, AMONG)
    store_rows(place, row, key, place < lists.topk, query, lists)
    if WIDTH > SIZE:  # the list is wider than there are rows
        rest = SIZE + gl.arange(0, WIDTH, layout=key.type.layout)
        write_nothing(rest, rest < lists.topk, query, lists)
