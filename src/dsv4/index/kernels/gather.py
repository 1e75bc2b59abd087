"""Choose the best rows, and the best blocks, of few queries exactly, with several CTAs per query and two launches.

gather   finds a cut in the greatest scores of units; a unit is EACH groups, or 16 EACH rows. As many units as items are
         wanted, or up to an eighth more, are not below the cut, so at least as many items are not. Every CTA of a query
         computes this cut itself. Each CTA then reads every SHARES-th unit and appends the keys of the items that are
         not below the cut, little more than are wanted, to the list of the query.
rank     counts, for some keys of the list, how many keys are greater (for blocks: how many numbers are lower). That
         count is the key's place. A list that is too long, because scores are equal or close, is cut once more.

No CTA waits for another: what the second launch reads is complete. choose.py and blocks.py use one CTA per query, which
is better for many queries. Items are rows, or blocks where program_id(2) is 1. Keys have 64 bits and all differ, so the
order in which they are appended does not matter.
"""

from dsv4.index.kernels.ranking import (
    ABSENT,
    LOWEST,
    cut_of,
    ends_of,
    items_layout,
    key_of,
    named_rows,
    ordered_of,
    places_of,
    so_far,
    store_rows,
    write_nothing,
)
from dsv4.index.kernels.scores import BLOCK, FOREVER, GROUP, owner, visible_columns, visible_rows
from dsv4.kernels.compat import Value, aggregate, barrier, gl, gluon
from dsv4.kernels.dependent import launch_dependents, wait_on_prior_grid

NO_KEY = gl.constexpr(-(2**63))
PIECE = gl.constexpr(1024)  # keys of a list that are read at a time
LOOK = gl.constexpr(128)  # groups whose rows a share reads at a time
MOST_MINE = gl.constexpr(64)  # keys that a share ranks at a time; more do not fit into the registers


@gluon.constexpr_function
def units_layout(each, warps):
    """Return the layout of [lines, units, EACH groups], with at least 16 bytes per thread."""
    return gl.BlockedLayout([1, max(4 // each, 1), each], [1, 32, 1], [1, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def items_of_units(wide, warps):
    """Return the layout of [parts of units, `wide` items], with 16 bytes per thread if there are that many."""
    each = min(wide, 4)
    return gl.BlockedLayout([1, each], [32 * each // wide, wide // each], [warps, 1], [1, 0])


@gluon.jit
def units_cut(maxima_ptr, visible, wanted, UNITS: gl.constexpr, EACH: gl.constexpr, ROWS: gl.constexpr):
    """Return (a cut, the highest unit whose items equal to the cut count), from EACH maxima of ROWS rows per unit."""
    L: gl.constexpr = units_layout(EACH, gl.num_warps())
    FOUR: gl.constexpr = max(4 // EACH, 1)  # units in 16 bytes
    WIDE: gl.constexpr = gl.num_warps() * 32 * FOUR
    SIZE: gl.constexpr = EACH * ROWS
    last = (visible + SIZE - 1) // SIZE - 1
    line = gl.arange(0, max(UNITS // WIDE, 1), layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    unit = line[:, None] * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :]
    # Loads have no masks: lanes past the end read the first unit. Maxima past the last row have no meaning.
    at = gl.where(unit // FOUR < last // FOUR + FOUR // 4, unit // FOUR, 0) * FOUR + unit % FOUR
    at = gl.max_contiguous(gl.multiple_of(at, [1, FOUR]), [1, FOUR])[:, :, None] * EACH
    at = at + gl.arange(0, EACH, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    greatest = ordered_of(gl.max(gl.load(maxima_ptr + at), 2))
    number = last * EACH + gl.arange(0, EACH, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    there = (number >= 0) & (number * ROWS < visible)
    end = ordered_of(gl.max(gl.load(maxima_ptr + number, mask=there, other=-float("inf")), 0))
    ordered = gl.where(unit < last, greatest, gl.where(unit == last, end, ABSENT))
    low = gl.to_tensor(ABSENT + 1)
    high = gl.to_tensor(FOREVER)
    if last + 1 >= wanted:
        low, high = ends_of(ordered)
    low, highest, _ = cut_of(ordered, unit, wanted, wanted + wanted // 8, low, high, last + 1)
    return low, highest


@gluon.jit
def append(ordered, number, taken, list_ptr, count_ptr):
    """Append the keys of the taken items [parts, items] to the list that all CTAs of the query share."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    one = taken.to(gl.int32)
    part = gl.convert_layout(gl.sum(one, 1), LINE)
    first = gl.atomic_add(count_ptr, gl.sum(part, 0), sem="relaxed", scope="gpu")
    before = gl.convert_layout(so_far(part) - part, gl.SliceLayout(1, ordered.type.layout))
    place = first + before[:, None] + gl.associative_scan(one, 1, plus) - 1
    gl.store(list_ptr + place, key_of(ordered, number), mask=taken)


@gluon.jit
def plus(a, b):
    return a + b


@aggregate
class SharedRows:
    """Scores of a query's rows, a cut, and the list of the rows that are not below it."""

    scores_ptr: Value
    visible: Value
    low: Value
    highest: Value  # the highest row among those equal to the cut
    list_ptr: Value
    count_ptr: Value

    @gluon.jit
    def append(self, group, there):
        """Append the rows of some groups that are not below the cut."""
        L: gl.constexpr = group.type.layout.parent
        row = group[:, None] * GROUP + gl.arange(0, GROUP, layout=gl.SliceLayout(0, L))[None, :]
        at = gl.where(there, group, 0)[:, None] * GROUP + gl.arange(0, GROUP, layout=gl.SliceLayout(0, L))[None, :]
        ordered = ordered_of(gl.load(self.scores_ptr + at))
        equal = (ordered == self.low) & (row <= self.highest)
        taken = ((ordered > self.low) | equal) & there[:, None] & (row < self.visible)
        append(ordered, row, taken, self.list_ptr, self.count_ptr)


@gluon.jit
def index_gather(
    source,
    lists,
    owners,
    OWNER: gl.constexpr,
    AMONG: gl.constexpr,
    UNITS: gl.constexpr,
    EACH: gl.constexpr,
    BLOCK_UNITS: gl.constexpr,
    BLOCK_EACH: gl.constexpr,
    SHARES: gl.constexpr,
    AT_ONCE: gl.constexpr,
    KEPT: gl.constexpr,
    SINGLE: gl.constexpr,
):
    """Gather one share of query first + n, AT_ONCE groups at a time. SINGLE: there are so few groups that rows are the
    units of the cut. BLOCK_UNITS: units of the programs with program_id(2) = 1, whose items are blocks."""
    query = lists.first + gl.program_id(0)
    n = gl.program_id(0).to(gl.int64)
    share = gl.program_id(1)
    sequence, end = owner(query, owners, OWNER)
    visible = visible_columns(visible_rows(query, owners, sequence < owners.requests), owners, AMONG)
    wait_on_prior_grid()  # the scores are complete
    launch_dependents()
    # Each line begins at a multiple of 16 bytes.
    maxima_ptr = source.maxima_ptr + n * (source.maxima_line // 4) * 4
    if gl.program_id(2) == 0:
        scores_ptr = source.ptr + n * (source.line // 4) * 4
        wanted = gl.minimum(visible, lists.topk)
        if SINGLE:
            low, highest = units_cut(scores_ptr, visible, wanted, UNITS * EACH * GROUP, 1, 1)
        else:
            low, highest = units_cut(maxima_ptr, visible, wanted, UNITS, EACH, GROUP)
            highest = gl.minimum(highest, FOREVER // (EACH * GROUP) - 1) * EACH * GROUP + (EACH * GROUP - 1)
        OWN: gl.constexpr = min(max(UNITS // SHARES, 1) * EACH, AT_ONCE)
        LISTED: gl.constexpr = OWN > LOOK
        LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        L: gl.constexpr = LINE if LISTED else gl.SliceLayout(1, items_of_units(GROUP, gl.num_warps()))
        rows = SharedRows(
            scores_ptr, visible, low, highest, lists.rows_ptr + n * lists.rows_line, lists.counts_ptr + n * 2
        )
        groups_ptr = (lists.keep_ptr + (n * SHARES + share) * KEPT).to(gl.pointer_type(gl.int32), bitcast=True)
        own = gl.arange(0, OWN, layout=L)
        for begin in range(share, (visible + EACH * GROUP - 1) // (EACH * GROUP), OWN // EACH * SHARES):
            group = (begin + own // EACH * SHARES) * EACH + own % EACH
            there = group * GROUP < visible
            greatest = ordered_of(gl.load(maxima_ptr + gl.where(there, group, 0)))
            there = there & (greatest >= low)
            if LISTED:
                one = there.to(gl.int32)
                gl.store(groups_ptr + so_far(one) - 1, group, mask=there)
                held = gl.sum(one, 0)
                barrier()  # the same CTA reads what it wrote
                for first in range(0, held, LOOK):
                    place = first + gl.arange(0, LOOK, layout=gl.SliceLayout(1, items_of_units(GROUP, gl.num_warps())))
                    rows.append(gl.load(groups_ptr + gl.where(place < held, place, 0)), place < held)
                barrier()  # all threads have read it before it is written again
            else:
                rows.append(group, there)
    elif BLOCK_UNITS > 0:
        most = (visible + BLOCK - 1) // BLOCK
        low, highest = units_cut(maxima_ptr, visible, gl.minimum(most, lists.most), BLOCK_UNITS, BLOCK_EACH, GROUP)
        WIDE: gl.constexpr = BLOCK_EACH * (GROUP // BLOCK)
        K: gl.constexpr = items_of_units(WIDE, gl.num_warps())
        UNITS_AT_ONCE: gl.constexpr = min(max(BLOCK_UNITS // SHARES, 1), AT_ONCE // BLOCK_EACH)
        item = gl.arange(0, WIDE, layout=gl.SliceLayout(0, K))[None, :]
        own_unit = gl.arange(0, UNITS_AT_ONCE, layout=gl.SliceLayout(1, K)) * SHARES
        for begin in range(share, (most + WIDE - 1) // WIDE, UNITS_AT_ONCE * SHARES):
            unit = begin + own_unit
            block = unit[:, None] * WIDE + item
            there = block < most
            ordered = ordered_of(gl.load(source.blocks_ptr + n * source.blocks_line + gl.where(there, block, 0)))
            taken = (ordered > low) | ((ordered == low) & (unit <= highest)[:, None])
            taken = taken & (ordered > LOWEST) & (block < most - 1)  # the newest block is always kept
            append(ordered, block, taken, lists.blocks_ptr + n * lists.blocks_line, lists.counts_ptr + n * 2 + 1)


@gluon.jit
def keys_of(list_ptr, first, found, SIZE: gl.constexpr, L: gl.constexpr):
    """Load SIZE keys of the list from `first` on, NO_KEY past its end."""
    place = first + gl.arange(0, SIZE, layout=L)
    return gl.load(list_ptr + place, mask=place < found, other=NO_KEY)


@gluon.jit
def cut_of_keys(key, found, wanted, most):
    """Return a key that `wanted` to `most` of the `found` keys [HIGH, 2 * THREADS] are not less than."""
    ordered = (key >> 32).to(gl.int32)
    low, high = ends_of(ordered)
    low, highest, _ = cut_of(ordered, FOREVER - key.to(gl.int32), wanted, most, low, high, found)
    return key_of(low, highest)


@gluon.jit
def places_in(HELD: gl.constexpr):
    """Return the places [HIGH, 2 * THREADS] of HELD keys."""
    L: gl.constexpr = items_layout(gl.num_warps(), 2)
    WIDE: gl.constexpr = gl.num_warps() * 64
    line = gl.arange(0, HELD // WIDE, layout=gl.SliceLayout(1, L))[:, None] * WIDE
    return line + gl.arange(0, WIDE, layout=gl.SliceLayout(0, L))[None, :]


@gluon.jit
def keep_best(list_ptr, found, wanted, keep_ptr, HELD: gl.constexpr):
    """Store the `wanted` best keys of a list that is longer than HELD. Each round cuts the keys kept so far, together
    with as many others as there is room for."""
    place = places_in(HELD)
    kept = gl.to_tensor(0)
    begin = gl.to_tensor(0)
    while begin < found:
        count = gl.minimum(kept + found - begin, HELD)
        key_ptr = gl.where(place < kept, keep_ptr + place, list_ptr + begin + place - kept)
        key = gl.load(key_ptr, mask=place < count, other=NO_KEY)
        begin += HELD - kept
        low = cut_of_keys(key, count, gl.minimum(wanted, count), gl.minimum(wanted, count))
        to = places_of(key >= low, 2)
        barrier()  # all keys are in registers
        gl.store(keep_ptr + to, key, mask=key >= low)
        barrier()  # the same CTA reads what it wrote
        kept = gl.minimum(wanted, count)
    return kept


@gluon.constexpr_function
def pairs_layout(mine, warps):
    """Return the layout of [mine, all]: four warps on each side, so that few keys are read often; 16 bytes of `all` per
    thread.
    """
    return gl.BlockedLayout([max(mine // 4, 1), 2], [1, 32], [4, warps // 4], [1, 0])


@gluon.jit
def ranks_of(mine, list_ptr, found, low, BLOCKS: gl.constexpr):
    """Count, for each key of `mine`, the greater keys of the list; for blocks, the keys from `low` on with lower
    numbers."""
    LINE: gl.constexpr = mine.type.layout
    L: gl.constexpr = pairs_layout(mine.shape[0], gl.num_warps())
    mine = gl.convert_layout(mine, gl.SliceLayout(1, L))
    rank = gl.full(mine.shape, 0, gl.int32, gl.SliceLayout(1, L))
    for first in range(0, found, PIECE):
        key = keys_of(list_ptr, first, found, PIECE, gl.SliceLayout(0, L))
        if BLOCKS:  # a lower number makes a greater lower half of the key
            number = gl.where(key >= low, key.to(gl.int32), -1)
            rank += gl.sum((number[None, :] > mine.to(gl.int32)[:, None]).to(gl.int32), 1)
        else:
            rank += gl.sum((key[None, :] > mine[:, None]).to(gl.int32), 1)
    return gl.convert_layout(rank, LINE)


@gluon.jit
def shortened(list_ptr, found, wanted, most, keep_ptr, HELD: gl.constexpr):
    """Return (the list, or a shorter one; how many keys it has; a key that at least `wanted` and at most `most` keys
    are not less than)."""
    low = gl.to_tensor(NO_KEY + 1)
    if found > HELD:
        found = keep_best(list_ptr, found, wanted, keep_ptr, HELD)
        list_ptr = keep_ptr
    elif found > most:
        place = places_in(HELD)
        key = gl.load(list_ptr + place, mask=place < found, other=NO_KEY)
        low = cut_of_keys(key, found, wanted, most)
    return list_ptr, found, low


@gluon.jit
def index_rank(
    lists,
    owners,
    to,
    to_blocks,
    OWNER: gl.constexpr,
    POOL: gl.constexpr,
    AMONG: gl.constexpr,
    KEPT: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCKS_KEPT: gl.constexpr,
    BLOCKS_WIDTH: gl.constexpr,
    SHARES: gl.constexpr,
    HELD: gl.constexpr,
):
    """Rank a share of the keys that index_gather appended, and store them in the lists of query first + n."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    query = lists.first + gl.program_id(0)
    n = gl.program_id(0).to(gl.int64)
    share = gl.program_id(1)
    own = n * SHARES + share
    sequence, end = owner(query, owners, OWNER)
    visible = visible_columns(visible_rows(query, owners, sequence < owners.requests), owners, AMONG)
    wait_on_prior_grid()
    if gl.program_id(2) == 0:
        wanted = gl.minimum(visible, to.topk)
        found = gl.load(lists.counts_ptr + n * 2)
        list_ptr = lists.rows_ptr + n * lists.rows_line
        keep_ptr = lists.keep_ptr + own * KEPT
        list_ptr, found, low = shortened(list_ptr, found, wanted, KEPT, keep_ptr, max(KEPT, HELD))
        MINE: gl.constexpr = min(KEPT // SHARES, MOST_MINE)
        for first in range(share * MINE, found, SHARES * MINE):
            key = keys_of(list_ptr, first, found, MINE, LINE)
            row = named_rows(key, key >= low, query, sequence, owners, to, OWNER, POOL, AMONG)  # overlaps the ranking
            place = ranks_of(key, list_ptr, found, low, False)
            store_rows(place, row, key, (place < wanted) & (key >= low), query, to)
        if (share == 0) & (wanted < to.topk):
            rest = gl.arange(0, WIDTH, layout=LINE)
            write_nothing(rest, (rest >= wanted) & (rest < to.topk), query, to)
    elif BLOCKS_KEPT > 0:
        found = gl.load(lists.counts_ptr + n * 2 + 1)
        wanted = gl.minimum(found, to_blocks.most - 1)
        list_ptr = lists.blocks_ptr + n * lists.blocks_line
        keep_ptr = lists.keep_blocks_ptr + own * BLOCKS_KEPT
        list_ptr, found, low = shortened(list_ptr, found, wanted, wanted, keep_ptr, max(BLOCKS_KEPT, HELD))
        blocks_ptr = to_blocks.ptr + query.to(gl.int64) * to_blocks.line
        MINE_OF_BLOCKS: gl.constexpr = min(BLOCKS_KEPT // SHARES, MOST_MINE)
        for first in range(share * MINE_OF_BLOCKS, found, SHARES * MINE_OF_BLOCKS):
            key = keys_of(list_ptr, first, found, MINE_OF_BLOCKS, LINE)
            place = ranks_of(key, list_ptr, found, low, True)
            gl.store(blocks_ptr + place, FOREVER - key.to(gl.int32), mask=(key >= low) & (wanted > 0))
        if share == 0:  # the newest block, then -1
            rest = gl.arange(0, BLOCKS_WIDTH, layout=LINE)
            newest = gl.where(rest == wanted, (visible + BLOCK - 1) // BLOCK - 1, -1)
            gl.store(blocks_ptr + rest, newest, mask=(rest >= wanted) & (rest < to_blocks.most))
