"""The topk best of a query's scores, exactly, by the greatest score of every GROUP of neighbouring rows.

If `topk` groups have a maximum that is not below a cut, `topk` rows are not below it: the best ones are among them. The
cut need not be exact, a few rows more are no matter. So one CTA per query

    cut       reads the maxima, one for GROUP rows, and looks for a cut with topk groups or up to an eighth more above
    rows      reads the scores of these groups and keeps what is not below the cut: little more than topk, unless scores
              are equal or rows are few, and then it cuts again
    sorts     these, and writes the first topk as the list

and of the other scores nothing is read. select.py does without maxima what this does with them, for wider lists.
Scores are fp32 without NaN and -0; behind the last row that is seen, up to a whole group, they are -inf.

Loads have no masks, so that all of them are under way at once: a predicate each would be more than there are. What is
not there is read from a place that is.
"""

from dsv4.kernels.compat import Value, aggregate, barrier, gl, gluon
from dsv4.kernels.shared.index.ranking import (
    ABSENT,
    best_of,
    between,
    ends_of,
    falling,
    items_layout,
    key_of,
    next_cuts,
    ordered_of,
    places_of,
    so_far,
    sorting_layout,
    value_of,
    write_list,
)
from dsv4.kernels.shared.index.scores import FOREVER, GROUP, owner, rows_seen


@gluon.constexpr_function
def groups_layout(warps):
    """[HIGH, groups, GROUP]: 16 bytes per thread, four threads for a group."""
    return gl.BlockedLayout([1, 1, 4], [1, 8, 4], [1, warps, 1], [2, 1, 0])


@aggregate
class Rows:
    """Rows of the groups that are looked into: the first ones, or those in a list. In pieces of HIGH lines; they are
    read anew for every pass, from the L1, so they take few registers and little code."""

    scores_ptr: Value
    groups_ptr: Value
    held: Value  # groups
    seen: Value
    LISTED: gl.constexpr
    HIGH: gl.constexpr

    @gluon.jit
    def pieces(self):
        each: gl.constexpr = self.HIGH * gl.num_warps() * 8
        return (self.held + each - 1) // each

    @gluon.jit
    def piece(self, number):
        """(scores, row numbers, which are there) [HIGH, 4 * THREADS]; of groups past the last one the first is read."""
        L: gl.constexpr = groups_layout(gl.num_warps())
        WIDE: gl.constexpr = gl.num_warps() * 8
        SHAPE: gl.constexpr = [self.HIGH, WIDE * GROUP]
        ITEMS: gl.constexpr = items_layout(gl.num_warps(), 4)
        line = number * self.HIGH + gl.arange(0, self.HIGH, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
        at = line[:, None] * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :]
        there = at < self.held
        group = gl.where(there, at, 0)
        if self.LISTED:
            group = gl.load(self.groups_ptr + group)
        place = gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
        row = group[:, :, None] * GROUP + place[None, None, :]
        x = gl.load(self.scores_ptr + row)
        there = there[:, :, None] & (place[None, None, :] >= 0)
        x, row, there = gl.reshape(x, SHAPE), gl.reshape(row, SHAPE), gl.reshape(there, SHAPE)
        return gl.convert_layout(x, ITEMS), gl.convert_layout(row, ITEMS), gl.convert_layout(there, ITEMS)

    @gluon.jit
    def ordered_piece(self, number):
        x, row, there = self.piece(number)
        return gl.where(there & (row < self.seen), ordered_of(x), ABSENT), row

    @gluon.jit
    def columns(self, value):
        return gl.full([gl.num_warps() * 128], value, gl.int32, gl.SliceLayout(0, items_layout(gl.num_warps(), 4)))

    @gluon.jit
    def taken(self, number, cut, highest, TIES: gl.constexpr):
        """(what is not below a cut, row numbers); with ties, those equal to it only up to a row."""
        if TIES:
            ordered, row = self.ordered_piece(number)
            return (ordered > cut) | ((ordered == cut) & (row <= highest)), row
        # Rows that are not seen are -inf: behind all others, if they are taken at all.
        x, row, there = self.piece(number)
        return (x >= gl.where(cut == ABSENT + 1, -float("inf"), value_of(cut))) & there, row

    @gluon.jit
    def above(self, cut, highest, TIES: gl.constexpr):
        """int32 [4 * THREADS]: how many rows of a column are taken."""
        total = self.columns(0)
        for i in range(self.pieces()):
            taken, row = self.taken(i, cut, highest, TIES)
            total += gl.sum(taken.to(gl.int32), 0)
        return total

    @gluon.jit
    def counts(self, first, second):
        """Rows from the first cut on, and 2^16 times those from the second on."""
        total = self.columns(0)
        for i in range(self.pieces()):
            ordered, row = self.ordered_piece(i)
            total += gl.sum((ordered >= first).to(gl.int32) + ((ordered >= second).to(gl.int32) << 16), 0)
        return gl.sum(total, 0)

    @gluon.jit
    def ends(self, low, high):
        """(the least score from low on, the greatest one below high, and 1 more)"""
        least, greatest = self.columns(FOREVER), self.columns(ABSENT)
        for i in range(self.pieces()):
            ordered, row = self.ordered_piece(i)
            least = gl.minimum(least, gl.min(gl.where(ordered >= low, ordered, FOREVER), 0))
            greatest = gl.maximum(greatest, gl.max(gl.where(ordered < high, ordered, ABSENT), 0))
        return gl.min(least, 0), gl.max(greatest, 0) + 1

    @gluon.jit
    def cut(self, wanted, most, low):
        """(a cut, the highest row of those equal to it): `wanted` to `most` rows are taken. More than `most` are not
        below low."""
        low, high = self.ends(low, FOREVER)
        at_least = most + 1
        step = 0
        while (at_least > most) & (low + 1 != high):
            if step % 8 == 7:
                low, high = self.ends(low, high)
            first, second = next_cuts(low, high, step)
            low, high, at_least = between(self.counts(first, second), wanted, low, high, first, second, at_least)
            step += 1
        highest = gl.to_tensor(FOREVER)
        if at_least > most:
            highest = self.seen
            lowest = -1
            while lowest + 1 < highest:
                middle = lowest + (highest - lowest) // 2
                enough = gl.sum(self.above(low, middle, True), 0) >= wanted
                highest = gl.where(enough, middle, highest)
                lowest = gl.where(enough, lowest, middle)
        return low, highest

    @gluon.jit
    def keep(self, keep_ptr, most, cut, highest, TIES: gl.constexpr):
        """Store the numbers of the rows that are taken, unless they are more than there is room for -> how many."""
        LINE: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
        mine = gl.convert_layout(self.above(cut, highest, TIES), LINE)
        found = gl.sum(mine, 0)
        before = gl.convert_layout(so_far(mine) - mine, gl.SliceLayout(0, items_layout(gl.num_warps(), 4)))
        pieces = gl.where(found > most, 0, self.pieces())
        for i in range(pieces):
            taken, row = self.taken(i, cut, highest, TIES)
            one = taken.to(gl.int32)
            gl.store(keep_ptr + (before[None, :] + so_far(one) - 1), row, mask=taken)
            before += gl.sum(one, 0)
        return found


@gluon.jit(do_not_specialize=[
    "first_query", "topk", "capacity", "ratio", "tokens", "requests", "pages", "page_rows", "table_line",
    "source_line", "out_line", "scores_line", "want_scores", "kept_size",
])  # fmt: skip
def index_choose(source_ptr, maxima_ptr, count_ptr, groups_ptr, kept_ptr, out_ptr, scores_ptr, table_ptr, starts_ptr,
                 first_query, topk, capacity, ratio, tokens, requests, pages, page_rows, table_line, source_line,
                 out_line, scores_line, want_scores, kept_size, HOW: gl.constexpr, POOL: gl.constexpr,
                 GROUPS: gl.constexpr, KEPT: gl.constexpr, WIDTH: gl.constexpr, HIGH: gl.constexpr):  # fmt: skip
    """One program: the list of query first_query + n.

    source   fp32 scores [queries, 64 * source_line], maxima [queries, 4 * source_line]
    groups   int32 [queries, KEPT], kept alike: room for the numbers of what is found
    GROUPS   a power of two that is not less than the groups of a query
    KEPT     a power of two, = kept_size: twice topk, the most rows that are sorted and groups that are looked into
    HIGH     a thread reads so many times 16 bytes at once
    """
    THREADS: gl.constexpr = gl.num_warps() * 32
    LISTED: gl.constexpr = GROUPS > KEPT
    n = gl.program_id(0)
    query = first_query + n
    sequence, end = owner(query, starts_ptr, requests, tokens, HOW)
    seen = rows_seen(query, count_ptr, ratio, capacity, sequence < requests)
    wanted = gl.minimum(seen, topk)
    keep_ptr = kept_ptr + n.to(gl.int64) * KEPT
    groups_ptr = groups_ptr + n.to(gl.int64) * KEPT
    low = gl.to_tensor(ABSENT + 1)
    high = gl.to_tensor(FOREVER)
    held = (seen + GROUP - 1) // GROUP
    if 2 * GROUPS > KEPT:  # there may be as many groups as rows are wanted
        EACH: gl.constexpr = min(max(GROUPS // THREADS, 1), 4)
        L: gl.constexpr = items_layout(gl.num_warps(), EACH)
        WIDE: gl.constexpr = EACH * THREADS
        group = gl.arange(0, max(GROUPS // WIDE, 1), layout=gl.SliceLayout(1, L))[:, None] * WIDE
        group = group + gl.arange(0, WIDE, layout=gl.SliceLayout(0, L))[None, :]
        # Fours lie within the line of a query.
        four = gl.where(group // 4 < source_line, group // 4, 0) * 4 + group % 4
        four = gl.max_contiguous(gl.multiple_of(four, [1, EACH]), [1, EACH])
        ordered = ordered_of(gl.load(maxima_ptr + n.to(gl.int64) * source_line * 4 + four))
        ordered = gl.where(group * GROUP < seen, ordered, ABSENT)
        if held >= wanted:
            low, high = ends_of(ordered)
        taken, count, low = best_of(ordered, group, wanted, wanted + wanted // 8, low, high, held)
        if LISTED:
            held = count
            gl.store(groups_ptr + places_of(taken, EACH), group, mask=taken)
            barrier()  # the same CTA reads what it wrote
    line_ptr = source_ptr + n.to(gl.int64) * source_line * 64
    rows = Rows(line_ptr, groups_ptr, held, seen, LISTED, HIGH)
    found = rows.keep(keep_ptr, KEPT, low, FOREVER, False)
    if found > KEPT:
        low, highest = rows.cut(wanted, KEPT, low)
        found = rows.keep(keep_ptr, KEPT, low, highest, True)
    barrier()
    place = gl.arange(0, KEPT, layout=sorting_layout(KEPT, gl.num_warps()))
    row = gl.where(place < found, gl.load(keep_ptr + place), 0)
    key = gl.where(place < found, key_of(ordered_of(gl.load(line_ptr + row)), row), -(2**63))
    key = falling(key, kept_size, KEPT)
    write_list(key, wanted, query, sequence, topk, out_ptr, out_line, scores_ptr, scores_line, want_scores, table_ptr,
               table_line, requests, pages, page_rows, HOW, POOL, WIDTH)  # fmt: skip
