"""Choose the topk best scores of a query exactly, on every architecture.

A CTA holds a piece of the scores in registers. It narrows the interval that contains the least chosen score, then keeps
what is above. A line longer than one piece is selected in rounds: the best of every piece, then the best of those. Of
equal scores the lower row wins in every round, and so in the end. The last round sorts.

Scores are fp32 without NaN and -0.
"""

from dsv4.index.kernels.ranking import (
    ABSENT,
    best_of,
    count_of,
    ends_of,
    falling,
    items_layout,
    key_of,
    ordered_of,
    places_of,
    sorting_layout,
    write_list,
)
from dsv4.index.kernels.scores import FOREVER, owner, visible_columns, visible_rows
from dsv4.kernels.compat import barrier, gl, gluon


@gluon.jit
def index_select(
    source,
    chosen,
    owners,
    lists,
    OWNER: gl.constexpr,
    POOL: gl.constexpr,
    AMONG: gl.constexpr,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
    SIZE: gl.constexpr,
    KEPT: gl.constexpr,
    WIDTH: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Choose the best of SIZE items of a query.

    source  FIRST: fp32 scores [queries, line], an item's number is its place; or maxima of ROWS scores each. Else:
            ordered scores, and their numbers; ABSENT = nothing there.
    kept    [queries, pieces, KEPT]: ordered scores and numbers of the chosen items, in any order; then ABSENT.
    out     LAST: [queries, topk], falling; row numbers of the pool where there is a block table.
    """
    COLUMNS: gl.constexpr = 32 * gl.num_warps()
    L: gl.constexpr = items_layout(gl.num_warps(), 1)
    LINE: gl.constexpr = sorting_layout(KEPT, gl.num_warps())
    n = gl.program_id(0)
    piece = gl.program_id(1)
    query = chosen.first + n
    sequence, end = owner(query, owners, OWNER)
    row_of = gl.arange(0, SIZE // COLUMNS, layout=gl.SliceLayout(1, L))
    item = piece * SIZE + row_of[:, None] * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))[None, :]
    line = n.to(gl.int64) * source.line
    if FIRST:
        visible = visible_columns(visible_rows(query, owners, sequence < owners.requests), owners, AMONG)
        visible = (visible + ROWS - 1) // ROWS
        x = gl.load(source.ptr + line + item, mask=item < visible, other=0.0)
        ordered = gl.where(item < visible, ordered_of(x), ABSENT)
        number = item
    else:
        ordered = gl.load(source.ptr + line + item, mask=item < source.items, other=ABSENT)
        number = gl.load(source.numbers_ptr + line + item, mask=item < source.items, other=0)
    present = count_of(ordered != ABSENT)
    wanted = gl.minimum(present, lists.topk)
    low = gl.to_tensor(ABSENT + 1)  # all items that exist
    high = gl.to_tensor(FOREVER)
    if present > wanted:
        low, high = ends_of(ordered)
    # A round before the last may keep a few more items, so it finds its cut sooner.
    most = wanted if LAST else gl.minimum(wanted + wanted // 8, KEPT)
    taken, present, low = best_of(ordered, number, wanted, most, low, high, present)
    # The order of the kept items does not matter: rounds compare their numbers, and the last round sorts them.
    keep = (n.to(gl.int64) * gl.num_programs(1) + piece) * KEPT
    to = places_of(taken, 1)
    gl.store(chosen.kept_ptr + keep + to, ordered, mask=taken)
    gl.store(chosen.numbers_ptr + keep + to, number, mask=taken)
    place = gl.arange(0, KEPT, layout=LINE)
    if not LAST:
        gl.store(chosen.kept_ptr + keep + place, place * 0 + ABSENT, mask=place >= present)
    else:
        barrier()  # the same CTA reads what it wrote
        kept = gl.load(chosen.kept_ptr + keep + place, mask=place < wanted, other=ABSENT)
        number = gl.load(chosen.numbers_ptr + keep + place, mask=place < wanted, other=0)
        key = falling(key_of(kept, number), chosen.kept_size, KEPT)
        write_list(key, wanted, query, sequence, owners, lists, OWNER, POOL, AMONG, WIDTH)
