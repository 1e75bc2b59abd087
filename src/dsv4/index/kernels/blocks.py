"""Choose the best blocks of a query exactly, on every architecture: those with the greatest maxima, and the last one.

A thread holds neighbouring blocks in registers, so the taken blocks can be stored in order. If a query has more blocks
than fit into a CTA, they are chosen in rounds: the best of every piece, then the best of those. Of equal blocks the
lower one wins in every round, and so in the end.
"""

from dsv4.index.kernels.ranking import ABSENT, LOWEST, best_of, count_of, ends_of, ordered_of, so_far
from dsv4.index.kernels.scores import BLOCK, FOREVER, owner, visible_rows
from dsv4.kernels.compat import gl, gluon


@gluon.constexpr_function
def neighbours_layout(each, warps):
    """Return the layout of [each, threads], with one column per thread."""
    return gl.BlockedLayout([min(each, 4), 1], [1, 32], [1, warps], [0, 1])


@gluon.jit
def rising_places(taken):
    """Give the taken items places from 0 on, in their order."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    one = taken.to(gl.int32)
    column = gl.convert_layout(gl.sum(one, 0), LINE)
    before = gl.convert_layout(so_far(column) - column, gl.SliceLayout(0, taken.type.layout))
    return before[None, :] + so_far(one) - 1


@gluon.jit
def index_blocks_kernel(
    source,
    chosen,
    owners,
    lists,
    OWNER: gl.constexpr,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
    SIZE: gl.constexpr,
    KEPT: gl.constexpr,
):
    """Choose the best of SIZE items of a query.

    source  FIRST: fp32 maxima [queries, line], an item's number is its place. Else: ordered scores, and their numbers;
            ABSENT = nothing there.
    kept    [queries, pieces, KEPT]: ordered scores and numbers of the chosen items, rising; then ABSENT and -1.
    lists   LAST: int32 [queries, most], rising, then -1.
    """
    THREADS: gl.constexpr = gl.num_warps() * 32
    EACH: gl.constexpr = SIZE // THREADS
    L: gl.constexpr = neighbours_layout(EACH, gl.num_warps())
    n = gl.program_id(0)
    piece = gl.program_id(1)
    query = chosen.first + n
    sequence, end = owner(query, owners, OWNER)
    visible = visible_rows(query, owners, sequence < owners.requests)
    newest = (visible + BLOCK - 1) // BLOCK - 1
    item = gl.arange(0, EACH, layout=gl.SliceLayout(1, L))[:, None]
    item = piece * SIZE + item + gl.arange(0, THREADS, layout=gl.SliceLayout(0, L))[None, :] * EACH
    # Loads have no masks, so that each reads 16 bytes: groups of four lie within the line of a query.
    at = gl.where(item // 4 < source.items // 4, item // 4, 0) * 4 + item % 4
    at = n.to(gl.int64) * source.line + gl.max_contiguous(gl.multiple_of(at, [min(EACH, 4), 1]), [min(EACH, 4), 1])
    if FIRST:
        ordered = ordered_of(gl.load(source.ptr + at))
        ordered = gl.where((item <= newest) & (ordered > LOWEST), ordered, ABSENT)
        number = item
    else:
        ordered = gl.where(item < source.items, gl.load(source.ptr + at), ABSENT)
        number = gl.where(item < source.items, gl.load(source.numbers_ptr + at), -1)
    pinned = (number == newest) & (newest >= 0)
    ordered = gl.where(pinned, ABSENT, ordered)
    present = count_of(ordered != ABSENT)
    wanted = gl.minimum(present, lists.most - 1)
    low = gl.to_tensor(ABSENT + 1)  # all items that exist
    high = gl.to_tensor(FOREVER)
    if present > wanted:
        low, high = ends_of(ordered)
    taken, present, low = best_of(ordered, number, wanted, wanted, low, high, present)
    taken = (taken & (wanted > 0)) | pinned
    to = rising_places(taken)
    found = count_of(taken)
    rest = gl.arange(0, KEPT, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    if LAST:
        list_ptr = lists.ptr + query.to(gl.int64) * lists.line
        gl.store(list_ptr + to, number, mask=taken)
        gl.store(list_ptr + rest, rest * 0 - 1, mask=(rest >= found) & (rest < lists.most))
    else:
        keep = (n.to(gl.int64) * gl.num_programs(1) + piece) * KEPT
        gl.store(chosen.kept_ptr + keep + to, ordered, mask=taken)
        gl.store(chosen.numbers_ptr + keep + to, number, mask=taken)
        gl.store(chosen.kept_ptr + keep + rest, rest * 0 + ABSENT, mask=rest >= found)
        gl.store(chosen.numbers_ptr + keep + rest, rest * 0 - 1, mask=rest >= found)
