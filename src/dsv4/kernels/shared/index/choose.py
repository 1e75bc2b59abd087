"""The topk best of a query's scores, exactly, by the greatest score of every GROUP of neighbouring rows.

The topk best rows lie in the topk groups with the greatest maxima (of equal ones the earlier): each of them has a row
that comes before every row of a group outside. So one CTA per query

    groups    reads the maxima, one for GROUP rows, and finds the KEPT greatest, by cutting the interval of their values
    rows      reads the scores of these groups, at most KEPT * GROUP, and finds the topk best of them in the same way
    sorts     these, and writes the list

and of the other scores nothing is read. select.py does without maxima what this does with them, for wider lists.
Scores are fp32 without NaN and -0, compared as ordered bits, int32; ABSENT is below all.
"""


from dsv4.kernels.compat import barrier, gl, gluon
from dsv4.kernels.shared.index.scores import FOREVER, GROUP, OWN, STARTS, owner, rows_seen
from dsv4.kernels.shared.index.select import (
    ABSENT,
    count_of,
    falling,
    first_ones,
    ordered_of,
    so_far,
    threshold_between,
    value_of,
)


@gluon.jit
def best_of(ordered, number, wanted, low, high, at_least):
    """Which of the items are the `wanted` best; of equal ones the lower numbers. at_least >= wanted of them are >= low,
    none is >= high."""
    if at_least > wanted:
        low, at_least = threshold_between(ordered, wanted, low, high, at_least)
    highest = gl.to_tensor(FOREVER)  # of those equal to the threshold the first ones, as many as there is room for
    if at_least > wanted:
        highest = first_ones(ordered == low, number, wanted - count_of(ordered > low))
    return (ordered > low) | ((ordered == low) & (number <= highest)), low


@gluon.jit
def places_of(taken, L: gl.constexpr, LINE: gl.constexpr):
    """Different places from 0 on for the items that are taken. A column of items belongs to one thread, so only one
    number per thread is summed up across threads."""
    one = taken.to(gl.int32)
    column = gl.convert_layout(gl.sum(one, 0), LINE)
    before = gl.convert_layout(so_far(column) - column, gl.SliceLayout(0, L))
    return before[None, :] + so_far(one) - 1


@gluon.jit(do_not_specialize=[
    "first_query", "topk", "capacity", "ratio", "tokens", "requests", "pages", "page_rows", "table_line",
    "source_line", "maxima_line", "out_line", "scores_line", "want_scores", "kept_size",
])  # fmt: skip
def index_choose(source_ptr, maxima_ptr, count_ptr, kept_ptr, kept_numbers_ptr, out_ptr, scores_ptr, table_ptr,
                 starts_ptr, first_query, topk, capacity, ratio, tokens, requests, pages, page_rows, table_line,
                 source_line, maxima_line, out_line, scores_line, want_scores, kept_size, HOW: gl.constexpr,
                 POOL: gl.constexpr, GROUPS: gl.constexpr, KEPT: gl.constexpr, WIDTH: gl.constexpr):  # fmt: skip
    """One program: the list of query first_query + n.

    source   fp32 scores [queries, source_line], maxima [queries, maxima_line]
    kept     int32 [queries, KEPT], kept_numbers alike: room for what is found
    GROUPS   a power of two that is not less than the groups of a query; KEPT: the same of topk, at most GROUPS * GROUP
    """
    THREADS: gl.constexpr = gl.num_warps() * 32
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    TAKEN: gl.constexpr = min(GROUPS, KEPT)  # groups that are looked into
    n = gl.program_id(0)
    query = first_query + n
    sequence, end = owner(query, starts_ptr, requests, tokens, HOW)
    seen = rows_seen(query, count_ptr, ratio, capacity, sequence < requests)
    keep = n.to(gl.int64) * KEPT
    column = gl.arange(0, THREADS, layout=gl.SliceLayout(0, L))[None, :]
    held = (seen + GROUP - 1) // GROUP  # groups that are looked into
    low = gl.to_tensor(ABSENT + 1)
    high = gl.to_tensor(FOREVER)
    if GROUPS > TAKEN:
        HIGH: gl.constexpr = max(GROUPS // THREADS, 1)
        group = gl.arange(0, HIGH, layout=gl.SliceLayout(1, L))[:, None] * THREADS + column
        there = group * GROUP < seen
        greatest = gl.load(maxima_ptr + n.to(gl.int64) * maxima_line + group, mask=there, other=0.0)
        ordered = gl.where(there, ordered_of(greatest), ABSENT)
        least = gl.min(gl.min(gl.where(there, ordered, FOREVER), 0), 0)
        high = gl.max(gl.max(ordered, 0), 0) + 1
        taken, low = best_of(ordered, group, gl.minimum(held, TAKEN), least, high, held)
        held = gl.minimum(held, TAKEN)
        gl.store(kept_numbers_ptr + keep + places_of(taken, L, LINE), group, mask=taken)
        barrier()  # the same CTA reads what it wrote
    # Item (i, t) is row t % GROUP of group i * (THREADS / GROUP) + t / GROUP: a warp reads whole groups.
    EACH: gl.constexpr = max(TAKEN * GROUP // THREADS, 1)
    at = gl.arange(0, EACH, layout=gl.SliceLayout(1, L))[:, None] * (THREADS // GROUP) + column // GROUP
    if GROUPS > TAKEN:
        group = gl.load(kept_numbers_ptr + keep + at, mask=at < held, other=FOREVER // GROUP)
        barrier()  # read before it is overwritten
    else:
        group = at
    row = group * GROUP + column % GROUP
    x = gl.load(source_ptr + n.to(gl.int64) * source_line + row, mask=row < seen, other=0.0)
    ordered = gl.where(row < seen, ordered_of(x), ABSENT)
    wanted = gl.minimum(seen, topk)
    at_least = wanted
    if seen > wanted:
        # Every group that was taken has a row that is not below the least of their maxima.
        at_least = count_of(ordered >= low)
        if (GROUPS <= TAKEN) | (at_least < wanted):  # all groups were, and there may be fewer of them than wanted rows
            low = gl.min(gl.min(gl.where(ordered == ABSENT, FOREVER, ordered), 0), 0)
            high = gl.max(gl.max(ordered, 0), 0) + 1
            at_least = count_of(ordered != ABSENT)
    else:
        low = gl.to_tensor(ABSENT + 1)
    taken, low = best_of(ordered, row, wanted, low, high, at_least)
    to = places_of(taken, L, LINE)
    gl.store(kept_ptr + keep + to, ordered, mask=taken)
    gl.store(kept_numbers_ptr + keep + to, row, mask=taken)
    barrier()
    place = gl.arange(0, KEPT, layout=LINE)
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
