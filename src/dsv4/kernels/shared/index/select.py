"""The topk best of a query's scores, exactly, for every architecture.

A CTA has a piece of the scores in registers and looks for the least one that is chosen, by halving the interval where
it can be; then it keeps what is above. A line longer than one piece is selected in rounds: the best of every piece,
then the best of those. Of equal scores the lower row wins in every round, so in the end. The last round sorts.

Scores are compared as ordered bits, int32: -0 counts as 0, NaN as -inf, ABSENT is below all.
"""

import triton
import triton.language as tl

from dsv4.kernels.compat import barrier, gl, gluon
from dsv4.kernels.shared.index.scores import FOREVER, OWN, STARTS, owner, rows_seen

ABSENT = tl.constexpr(-(2**31))


@triton.jit
def value_of(ordered):
    """The score whose ordered bits these are."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def ordered_of(value):
    """Bits that compare as the scores do; -0 must not come."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def count_of(x):
    return tl.sum(tl.sum(x.to(tl.int32), 0), 0)


@triton.jit
def threshold(ordered, wanted, present):
    """The least value that is chosen, of more than `wanted` values; of those equal to it there may be too many."""
    low = tl.min(tl.min(tl.where(ordered == ABSENT, FOREVER, ordered), 0), 0)
    high = tl.max(tl.max(ordered, 0), 0) + 1
    low, at_least = threshold_between(ordered, wanted, low, high, present)
    return low


@triton.jit
def threshold_between(ordered, wanted, low, high, at_least):
    """(the same, how many values are not less), where at_least >= wanted values are >= low, and fewer are >= high.

    By cutting the interval of the values into three, at first as numbers, which ends sooner for what scores are like,
    then as bits, which ends for all. Both cuts are counted in one sum: a piece has less than 2^16 items. Every eighth
    time the ends move to values that there are. It is over as soon as a cut parts exactly `wanted` from the rest.
    """
    step = 0
    while (at_least != wanted) & (low + 1 != high):
        if step % 8 == 7:
            low = tl.min(tl.min(tl.where(ordered >= low, ordered, FOREVER), 0), 0)
            high = tl.max(tl.max(tl.where(ordered < high, ordered, ABSENT), 0), 0) + 1
        apart = high.to(tl.int64) - low
        a, b = value_of(low), value_of(high)
        first = tl.where(step < 8, ordered_of(a * 0.6666667 + b * 0.3333333), (low + apart // 3).to(tl.int32))
        second = tl.where(step < 8, ordered_of(a * 0.3333333 + b * 0.6666667), (high - apart // 3).to(tl.int32))
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        second = tl.minimum(tl.maximum(second, first), high - 1)
        counts = tl.sum(tl.sum((ordered >= first).to(tl.int32) + ((ordered >= second).to(tl.int32) << 16), 0), 0)
        above, between = counts >> 16, counts & 0xFFFF
        high = tl.where(above >= wanted, high, tl.where(between >= wanted, second, first))
        low = tl.where(above >= wanted, second, tl.where(between >= wanted, first, low))
        at_least = tl.where(above >= wanted, above, tl.where(between >= wanted, between, at_least))
        step += 1
    return low, at_least


@triton.jit
def first_ones(equal, number, room):
    """The number up to which `room` of those that are `equal` are found; there are more."""
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


@triton.jit
def so_far(x):
    return tl.cumsum(x, 0)


@gluon.jit
def falling(key, length, SIZE: gl.constexpr, L: gl.constexpr):
    """key [SIZE] sorted, the greatest first: a bitonic network. length = SIZE, but not known to the compiler, which
    would unroll it all: code that is not in the cache takes longer to arrive than to run."""
    place = gl.arange(0, SIZE, layout=L)
    size = length * 0 + 2
    while size <= length:
        apart = size // 2
        while apart > 0:
            other = gl.gather(key, place ^ apart, 0)
            first = ((place & apart) == 0) == ((place & size) == 0)
            key = gl.where(first == (key > other), key, other)
            apart = apart // 2
        size *= 2
    return key


@gluon.jit(do_not_specialize=[
    "first_query", "items", "topk", "capacity", "ratio", "tokens", "requests", "pages", "page_rows", "table_line",
    "source_line", "out_line", "scores_line", "want_scores", "kept_size",
])  # fmt: skip
def index_select(source_ptr, numbers_ptr, count_ptr, kept_ptr, kept_numbers_ptr, out_ptr, scores_ptr, table_ptr,
                 starts_ptr, first_query, items, topk, capacity, ratio, tokens, requests, pages, page_rows, table_line,
                 source_line, out_line, scores_line, want_scores, kept_size, HOW: gl.constexpr, POOL: gl.constexpr,
                 FIRST: gl.constexpr, LAST: gl.constexpr, SIZE: gl.constexpr, KEPT: gl.constexpr,
                 WIDTH: gl.constexpr):  # fmt: skip
    """One program: the best of SIZE items of a query.

    source  FIRST: fp32 scores [queries, source_line], an item's number is its place. Else: ordered scores with
            numbers beside them; ABSENT = nothing there.
    kept    [queries, pieces, KEPT]: ordered scores and numbers of the chosen ones, in any order; then ABSENT.
    out     LAST: [queries, topk], falling; row numbers of the pool where there is a block table.
    """
    # A column of items is one thread's: sums and scans along it cost no exchange, neighbours read neighbours.
    COLUMNS: gl.constexpr = 32 * gl.num_warps()
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    n = gl.program_id(0)
    piece = gl.program_id(1)
    query = first_query + n
    sequence, end = owner(query, starts_ptr, requests, tokens, HOW)
    row_of = gl.arange(0, SIZE // COLUMNS, layout=gl.SliceLayout(1, L))
    item = piece * SIZE + row_of[:, None] * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))[None, :]
    source = n.to(gl.int64) * source_line
    if FIRST:
        seen = rows_seen(query, count_ptr, ratio, capacity, sequence < requests)
        x = gl.load(source_ptr + source + item, mask=item < seen, other=0.0)
        x = gl.where(x == x, x, -float("inf")) + 0.0
        ordered = gl.where(item < seen, ordered_of(x), ABSENT)
        number = item
    else:
        ordered = gl.load(source_ptr + source + item, mask=item < items, other=ABSENT)
        number = gl.load(numbers_ptr + source + item, mask=item < items, other=0)
    present = count_of(ordered != ABSENT)
    wanted = gl.minimum(present, topk)
    low = gl.to_tensor(ABSENT + 1)  # all that are there
    if present > wanted:
        low = threshold(ordered, wanted, present)
    greater = ordered > low
    equal = ordered == low
    room = wanted - count_of(greater)
    highest = gl.to_tensor(FOREVER)  # of those equal to the threshold the first ones, as many as there is room for
    if count_of(equal) > room:
        highest = first_ones(equal, number, room)
    taken = greater | (equal & (number <= highest))
    # Where they are kept is no matter: they are sorted in the end, and rounds go by their numbers.
    one = taken.to(gl.int32)
    column = gl.convert_layout(gl.sum(one, 0), LINE)
    before = gl.convert_layout(so_far(column) - column, gl.SliceLayout(0, L))
    keep = (n.to(gl.int64) * gl.num_programs(1) + piece) * KEPT
    to = before[None, :] + so_far(one) - 1
    gl.store(kept_ptr + keep + to, ordered, mask=taken)
    gl.store(kept_numbers_ptr + keep + to, number, mask=taken)
    place = gl.arange(0, KEPT, layout=LINE)
    if not LAST:
        gl.store(kept_ptr + keep + place, place * 0 + ABSENT, mask=place >= wanted)
    else:
        barrier()  # the same CTA reads what it wrote
        chosen = place < wanted
        kept = gl.load(kept_ptr + keep + place, mask=chosen, other=ABSENT)
        number = gl.load(kept_numbers_ptr + keep + place, mask=chosen, other=0)
        key = falling((kept.to(gl.int64) << 32) | (FOREVER - number).to(gl.int64), kept_size, KEPT, LINE)
        kept = (key >> 32).to(gl.int32)
        row = FOREVER - (key & 0x7FFFFFFF).to(gl.int32)
        if HOW == OWN or HOW == STARTS:
            line = gl.minimum(sequence, requests - 1).to(gl.int64) * table_line
            page = gl.load(table_ptr + line + row // page_rows, mask=chosen, other=-1)
            if POOL:
                row = page * page_rows + row % page_rows
            row = gl.where((page >= 0) & (page < pages), row, -1)
        row = gl.where(chosen, row, -1)
        list_ptr = out_ptr + query.to(gl.int64) * out_line
        score_ptr = scores_ptr + query.to(gl.int64) * scores_line
        gl.store(list_ptr + place, row, mask=place < topk)
        score = gl.where(row >= 0, value_of(kept), -float("inf"))
        gl.store(score_ptr + place, score, mask=(place < topk) & (want_scores != 0))
        if WIDTH > KEPT:  # lists wider than there are rows
            rest = KEPT + gl.arange(0, WIDTH, layout=LINE)
            gl.store(list_ptr + rest, rest * 0 - 1, mask=rest < topk)
            none = gl.full([WIDTH], -float("inf"), gl.float32, LINE)
            gl.store(score_ptr + rest, none, mask=(rest < topk) & (want_scores != 0))
