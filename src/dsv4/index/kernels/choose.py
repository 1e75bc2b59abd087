"""Choose the topk best scores of a query exactly, by the greatest score of every GROUP of neighbouring rows.

If `topk` groups have a maximum that is not below a cut, `topk` rows are not below it, and the best rows are among them.
The cut need not be exact: a few more rows do not matter. So one CTA per query

    cut       reads the maxima, one per GROUP rows, and looks for a cut with topk groups or up to an eighth more above
    rows      reads the scores of these groups and keeps what is not below the cut: little more than topk. If scores are
              equal or rows are few, it cuts again
    sorts     the kept rows, and writes the first topk as the list

and reads no other scores. select.py does the same without maxima, for wider lists, and gather.py does it with several
CTAs per query. If there are hardly more groups than rows are wanted, maxima tell little. Then the CTA looks for the cut
among all scores, which are few enough to fit into registers, HELD per thread.
Scores are fp32 without NaN and -0. Past the last visible row, up to a whole group, they are -inf.

Loads have no masks, so that all of them are in flight at once: there are too few predicate registers for one per load.
Lanes past the end read a valid place instead.
"""

from dsv4.index.kernels.ranking import (
    ABSENT,
    LOWEST,
    best_of,
    between,
    count_of,
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
    wider,
    write_list,
)
from dsv4.index.kernels.scores import FOREVER, GROUP, owner, visible_columns, visible_rows
from dsv4.kernels.compat import Value, aggregate, barrier, gl, gluon
from dsv4.kernels.dependent import wait_on_prior_grid


@gluon.jit
def ones_in(bits):
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [bits], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def sum_and_greatest(total, greatest, more, other):
    return total + more, gl.maximum(greatest, other)


@gluon.constexpr_function
def groups_layout(warps):
    """Return the layout of [HIGH, groups, GROUP], with 16 bytes per thread and four threads per group."""
    return gl.BlockedLayout([1, 1, 4], [1, 8, 4], [1, warps, 1], [2, 1, 0])


@aggregate
class GroupRows:
    """Rows of the groups that are searched: the first groups, or those in a list. Each pass reads them again from L1,
    in pieces of HIGH lines, so they need few registers and little code."""

    scores_ptr: Value
    groups_ptr: Value
    held: Value  # groups
    visible: Value
    LISTED: gl.constexpr
    HIGH: gl.constexpr

    @gluon.jit
    def pieces(self):
        each: gl.constexpr = self.HIGH * gl.num_warps() * 8
        return (self.held + each - 1) // each

    @gluon.jit
    def piece(self, number):
        """Return (scores, row numbers, which exist) [HIGH, 4 * THREADS]; groups past the last one read the first."""
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
    def scores(self, number):
        """Return only the scores of `piece`. Groups past the last one read the last, and `there` masks them out: there
        are not enough predicates for one per line."""
        L: gl.constexpr = groups_layout(gl.num_warps())
        WIDE: gl.constexpr = gl.num_warps() * 8
        line = number * self.HIGH + gl.arange(0, self.HIGH, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
        at = line[:, None] * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :]
        group = gl.minimum(at, gl.maximum(self.held - 1, 0))
        if self.LISTED:
            group = gl.load(self.groups_ptr + group)
        place = gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
        x = gl.load(self.scores_ptr + group[:, :, None] * GROUP + place[None, None, :])
        return gl.convert_layout(gl.reshape(x, [self.HIGH, WIDE * GROUP]), items_layout(gl.num_warps(), 4))

    @gluon.jit
    def there(self, number, thread):
        """Return four bits for every line of a piece whose group exists; a thread has a quarter of a group."""
        WIDE: gl.constexpr = gl.num_warps() * 8
        lines = (self.held - number * self.HIGH * WIDE - thread // 4 + WIDE - 1) // WIDE
        lines = gl.minimum(gl.maximum(lines, 0), self.HIGH)
        return gl.where(lines == 8, -1, (1 << (lines * 4 & 31)) - 1)

    @gluon.jit
    def ordered_piece(self, number):
        x, row, there = self.piece(number)
        return gl.where(there & (row < self.visible), ordered_of(x), ABSENT), row

    @gluon.jit
    def columns(self, value):
        return gl.full([gl.num_warps() * 128], value, gl.int32, gl.SliceLayout(0, items_layout(gl.num_warps(), 4)))

    @gluon.jit
    def taken(self, number, cut, highest, TIES: gl.constexpr):
        """Return which rows of a piece are not below a cut. TIES: of visible rows, those equal to it only up to
        `highest`. Otherwise lines past the end may be among them, which the caller masks."""
        if TIES:
            ordered, row = self.ordered_piece(number)
            return (ordered > cut) | ((ordered == cut) & (row <= highest))
        # Rows that the query does not see are -inf: if they are taken at all, they sort last.
        return self.scores(number) >= gl.where(cut == ABSENT + 1, -float("inf"), value_of(cut))

    @gluon.jit
    def above(self, cut, highest):
        """Count the rows of each column that are taken, with ties: int32 [4 * THREADS]."""
        total = self.columns(0)
        for i in range(self.pieces()):
            total += gl.sum(self.taken(i, cut, highest, True).to(gl.int32), 0)
        return total

    @gluon.jit
    def counts(self, first, second):
        """Return rows >= the first cut, plus 2^16 times those >= the second."""
        total = self.columns(0)
        for i in range(self.pieces()):
            ordered, row = self.ordered_piece(i)
            total += gl.sum((ordered >= first).to(gl.int32) + ((ordered >= second).to(gl.int32) << 16), 0)
        return gl.sum(total, 0)

    @gluon.jit
    def ends(self, low, high):
        """Return (the least score >= low, the greatest score below high, plus 1)."""
        least, greatest = self.columns(FOREVER), self.columns(ABSENT)
        for i in range(self.pieces()):
            ordered, row = self.ordered_piece(i)
            least = gl.minimum(least, gl.min(gl.where(ordered >= low, ordered, FOREVER), 0))
            greatest = gl.maximum(greatest, gl.max(gl.where(ordered < high, ordered, ABSENT), 0))
        return gl.min(least, 0), gl.max(greatest, 0) + 1

    @gluon.jit
    def cut(self, wanted, most, low):
        """Return (a cut, the highest row equal to it that counts), so that `wanted` to `most` rows are taken. More than
        `most` rows are >= low."""
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
            highest = self.visible
            lowest = -1
            while lowest + 1 < highest:
                middle = lowest + (highest - lowest) // 2
                enough = gl.sum(self.above(low, middle), 0) >= wanted
                highest = gl.where(enough, middle, highest)
                lowest = gl.where(enough, lowest, middle)
        return low, highest

    @gluon.jit
    def keep(self, keep_ptr, most, cut, highest, TIES: gl.constexpr):
        """Store the numbers of the taken rows, at most the first `most` -> how many there are.
        Each thread packs what it takes of a piece into the bits of a number, then stores one row at a time: few."""
        L: gl.constexpr = items_layout(gl.num_warps(), 4)
        LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        THREADS: gl.constexpr = gl.num_warps() * 32
        line = gl.arange(0, self.HIGH, layout=gl.SliceLayout(1, L))[:, None]
        bit = gl.full([self.HIGH, 4 * THREADS], 1, gl.int32, L)
        bit = bit << (line * 4 + gl.arange(0, 4 * THREADS, layout=gl.SliceLayout(0, L))[None, :] % 4)
        thread = gl.arange(0, THREADS, layout=LINE)
        found = gl.to_tensor(0)
        for i in range(self.pieces()):
            taken = self.taken(i, cut, highest, TIES)
            bits = gl.reshape(gl.sum(gl.where(taken, bit, 0), 0), [THREADS, 4])
            bits = gl.convert_layout(gl.sum(bits, 1), LINE)
            if not TIES:
                bits = bits & self.there(i, thread)
            mine = ones_in(bits)
            place = found + so_far(mine) - mine
            count, rounds = gl.reduce((mine, mine), 0, sum_and_greatest)
            found += count
            for _ in range(rounds):
                first = ones_in(~bits & (bits - 1))  # zero bits below the lowest one
                group = (i * self.HIGH + first // 4) * (THREADS // 4) + thread // 4
                group = gl.where(bits == 0, 0, group)
                if self.LISTED:
                    group = gl.load(self.groups_ptr + group)
                number = group * GROUP + thread % 4 * 4 + first % 4
                gl.store(keep_ptr + place, number, mask=(bits != 0) & (place < most))
                place += 1
                bits = bits & (bits - 1)
        return found


@gluon.jit
def keys_at(place, keep_ptr, line_ptr, found):
    """Return the 64-bit keys of rows in the list; past its end, a key below all others."""
    row = gl.load(keep_ptr + gl.where(place < found, place, 0))
    row = gl.where(place < found, row, 0)
    return gl.where(place < found, key_of(ordered_of(gl.load(line_ptr + row)), row), -(2**63))


@gluon.jit
def bits_of(x):
    """Return how many bits a number has, read as unsigned."""
    zeros = gl.inline_asm_elementwise("clz.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)
    return 32 - zeros


@gluon.jit
def not_falling(key, place, KEPT: gl.constexpr):
    return gl.sum((key < gl.gather(key, gl.minimum(place + 1, KEPT - 1), 0)).to(gl.int32), 0)


@gluon.jit
def neighbours(key, place, partner):
    """Sort pairs of neighbours, the greater key first."""
    other = gl.gather(key, partner, 0)
    return gl.where(partner > place, gl.maximum(key, other), gl.minimum(key, other))


@gluon.jit
def sorted_rows(keep_ptr, line_ptr, found, kept_size, KEPT: gl.constexpr):
    """Return the keys of the rows in the list, the greatest first.

    They are sorted by 32 bits: the score's distance from the least one, as many bits of it as fit next to its place in
    the list. Where that is not enough, neighbours swap; if four rounds do not suffice, all 64 bits are sorted.
    """
    place = gl.arange(0, KEPT, layout=sorting_layout(KEPT, gl.num_warps()))
    ordered = (keys_at(place, keep_ptr, line_ptr, found) >> 32).to(gl.int32)
    least, most = gl.reduce((gl.where(place < found, ordered, FOREVER), ordered), 0, wider)
    shift = gl.maximum(bits_of(most - least) - bits_of(gl.to_tensor(FOREVER // KEPT)), 0)
    above = (ordered - least).to(gl.uint32, bitcast=True) >> shift.to(gl.uint32)
    short = above.to(gl.int32, bitcast=True) * KEPT + (KEPT - 1 - place)
    short = falling(gl.where(place < found, short, -1), kept_size, KEPT)
    key = keys_at(gl.where(place < found, KEPT - 1 - (short & (KEPT - 1)), place), keep_ptr, line_ptr, found)
    wrong = not_falling(key, place, KEPT)
    step = 0
    while (wrong > 0) & (step < 4):
        key = neighbours(key, place, place ^ 1)
        key = neighbours(key, place, gl.minimum(gl.maximum(((place + 1) ^ 1) - 1, 0), KEPT - 1))
        wrong = not_falling(key, place, KEPT)
        step += 1
    if wrong > 0:
        key = falling(key, kept_size, KEPT)
    return key


@gluon.jit
def keep_best(keep_ptr, line_ptr, fours, visible, wanted, SIZE: gl.constexpr, KEPT: gl.constexpr, AMONG: gl.constexpr):
    """Store the numbers of the `wanted` best of SIZE scores, or of up to KEPT -> how many there are."""
    EACH: gl.constexpr = 4
    WIDE: gl.constexpr = EACH * gl.num_warps() * 32
    L: gl.constexpr = items_layout(gl.num_warps(), EACH)
    row = gl.arange(0, max(SIZE // WIDE, 1), layout=gl.SliceLayout(1, L))[:, None] * WIDE
    row = row + gl.arange(0, WIDE, layout=gl.SliceLayout(0, L))[None, :]
    at = gl.where(row // EACH < fours, row // EACH, 0) * EACH + row % EACH
    at = gl.max_contiguous(gl.multiple_of(at, [1, EACH]), [1, EACH])
    ordered = gl.where(row < visible, ordered_of(gl.load(line_ptr + at)), ABSENT)
    if AMONG:  # rows of the last block that no query sees must not be the low end of the search
        ordered = gl.where(ordered > LOWEST, ordered, ABSENT)
        visible = count_of(ordered != ABSENT)
        wanted = gl.minimum(wanted, visible)
    low = gl.to_tensor(ABSENT + 1)
    high = gl.to_tensor(FOREVER)
    if visible > KEPT:
        low, high = ends_of(ordered)
    taken, found, low = best_of(ordered, row, wanted, KEPT, low, high, visible)
    gl.store(keep_ptr + places_of(taken, EACH), row, mask=taken)
    return found


@gluon.jit
def keep_of_groups(
    keep_ptr,
    groups_ptr,
    line_ptr,
    source,
    n,
    visible,
    wanted,
    GROUPS: gl.constexpr,
    KEPT: gl.constexpr,
    HIGH: gl.constexpr,
    CANDIDATES: gl.constexpr,
):
    """Do the same with the groups that have the greatest maxima; their numbers go to groups_ptr."""
    THREADS: gl.constexpr = gl.num_warps() * 32
    LISTED: gl.constexpr = CANDIDATES or GROUPS > KEPT
    low = gl.to_tensor(ABSENT + 1)
    high = gl.to_tensor(FOREVER)
    held = (visible + GROUP - 1) // GROUP
    if 2 * GROUPS > KEPT:  # there may be as many groups as rows are wanted
        EACH: gl.constexpr = min(max(GROUPS // THREADS, 1), 4)
        L: gl.constexpr = items_layout(gl.num_warps(), EACH)
        WIDE: gl.constexpr = EACH * THREADS
        group = gl.arange(0, max(GROUPS // WIDE, 1), layout=gl.SliceLayout(1, L))[:, None] * WIDE
        group = group + gl.arange(0, WIDE, layout=gl.SliceLayout(0, L))[None, :]
        # Groups of four lie within the line of a query.
        fours = source.items // 4 if CANDIDATES else source.line
        four = gl.where(group // 4 < fours, group // 4, 0) * 4 + group % 4
        four = n.to(gl.int64) * fours * 4 + gl.max_contiguous(gl.multiple_of(four, [1, EACH]), [1, EACH])
        if CANDIDATES:
            ordered = gl.where(group < source.items, gl.load(source.maxima_ptr + four), ABSENT)
            group = gl.load(source.numbers_ptr + four)
            held = count_of(ordered != ABSENT)
        else:
            ordered = ordered_of(gl.load(source.maxima_ptr + four))
            ordered = gl.where(group * GROUP < visible, ordered, ABSENT)
        if held >= wanted:
            low, high = ends_of(ordered)
        taken, count, low = best_of(ordered, group, wanted, wanted + wanted // 8, low, high, held)
        if LISTED:
            held = count
            gl.store(groups_ptr + places_of(taken, EACH), group, mask=taken)
            barrier()  # the same CTA reads what it wrote
    rows = GroupRows(line_ptr, groups_ptr, held, visible, LISTED, HIGH)
    found = rows.keep(keep_ptr, KEPT, low, FOREVER, False)
    if found > KEPT:
        low, highest = rows.cut(wanted, KEPT, low)
        found = rows.keep(keep_ptr, KEPT, low, highest, True)
    return found


@gluon.jit
def index_choose(
    source,
    chosen,
    owners,
    lists,
    OWNER: gl.constexpr,
    POOL: gl.constexpr,
    AMONG: gl.constexpr,
    GROUPS: gl.constexpr,
    KEPT: gl.constexpr,
    WIDTH: gl.constexpr,
    HIGH: gl.constexpr,
    HELD: gl.constexpr,
    CANDIDATES: gl.constexpr,
):
    """Write the list of query first + n.

    source   fp32 scores [queries, 64 * line], maxima [queries, 4 * line]; CANDIDATES: those of some groups [queries,
             items] as ordered bits or ABSENT, with the numbers of the groups (select.py)
    numbers  int32 [queries, KEPT], as is `kept`: memory for the numbers of what is found
    GROUPS   a power of two, at least the number of groups of a query
    KEPT     a power of two, = kept_size: twice topk, the most rows that are sorted and groups that are searched
    HIGH     units of 16 bytes that a thread reads at once
    HELD     scores that a thread may have in registers
    """
    THREADS: gl.constexpr = gl.num_warps() * 32
    topk = lists.topk
    n = gl.program_id(0)
    query = chosen.first + n
    sequence, end = owner(query, owners, OWNER)
    visible = visible_rows(query, owners, sequence < owners.requests)
    wanted = gl.minimum(visible, topk)
    visible = visible_columns(visible, owners, AMONG)
    if AMONG:
        wanted = gl.minimum(visible, wanted)
    wait_on_prior_grid()  # the scores are complete
    own = n.to(gl.int64) * KEPT
    keep_ptr = chosen.kept_ptr + own
    groups_ptr = chosen.numbers_ptr + own
    line_ptr = source.ptr + n.to(gl.int64) * source.line * 64
    SIZE: gl.constexpr = min(GROUPS * GROUP, HELD * THREADS)
    if 2 * GROUPS <= KEPT and SIZE == GROUPS * GROUP:
        found = keep_best(keep_ptr, line_ptr, source.line * 16, visible, wanted, SIZE, KEPT, AMONG)
    elif SIZE > 0:
        found = gl.to_tensor(0)
        if (visible <= SIZE) & ((visible + GROUP - 1) // GROUP * 2 < wanted * 3):
            found = keep_best(keep_ptr, line_ptr, source.line * 16, visible, wanted, SIZE, KEPT, AMONG)
        else:
            found = keep_of_groups(
                keep_ptr, groups_ptr, line_ptr, source, n, visible, wanted, GROUPS, KEPT, HIGH, CANDIDATES
            )
    else:
        found = keep_of_groups(
            keep_ptr, groups_ptr, line_ptr, source, n, visible, wanted, GROUPS, KEPT, HIGH, CANDIDATES
        )
    barrier()
    key = sorted_rows(keep_ptr, line_ptr, found, chosen.kept_size, KEPT)
    write_list(key, wanted, query, sequence, owners, lists, OWNER, POOL, AMONG, WIDTH)
