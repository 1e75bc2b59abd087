"""Loads of shared memory: the load warp's K and V tiles, and the query rows.

A K or V tile of BN keys and D columns lies in shared memory as D/64 panels of [BN, 64] elements with the 128-byte
swizzle, which the tensor core reads as one [BN, D] operand. TMA boxes are [BOX_ROWS, 64] pieces of a panel; BOX_ROWS is
BN, or less if pages are smaller than a tile. The swizzle atom is [8, 64] elements, 1 KB.

A tile of 16-bit elements is read in one of four ways; e4m3_rows.py has a fifth, for codes of a byte:

========  ================================  ===========================================================================
DENSE     dense tensors                     TMA, whose own bounds end the sequence
ROWS      varlen (and dense) tensors        TMA; what belongs to the next sequence is zeroed after it landed
PAGES     pages of 8, 16, 24, .. rows       TMA, boxes of a power of two of rows that divides a page, zeroed likewise
CP_ASYNC  pages of any other size           cp.async, 16 bytes per lane, invisible rows filled with zeros
========  ================================  ===========================================================================
"""

from dsv4.fmha.kernels import e4m3_rows
from dsv4.fmha.kernels.tiles import CP_ASYNC, DENSE, PAGES, ROWS, token_and_head
from dsv4.kernels.compat import (
    Value,
    aggregate,
    async_copy,
    cp_async,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
)

__all__ = ["CP_ASYNC", "DENSE", "PAGES", "ROWS"]


@aggregate
class GlobalRows:
    """K or V as rows in global memory. Strides are in units of 16 bytes."""

    ptr: Value
    pages: Value
    page_stride: Value
    row_stride: Value
    head_stride: Value


@aggregate
class Where:
    """The place of the keys of one sequence and KV head."""

    outer: Value  # first coordinate of TMA: the sequence, 0 for varlen
    head: Value
    k_start: Value  # first row of the sequence
    keys: Value
    visible_first: Value  # first key that any query sees
    landed_end: Value  # first key whose loaded values must be replaced by zeros
    table_ptr: Value
    page_size: Value


@gluon.jit
def load_packed(desc, tile, ready, batch, head, row, D: gl.constexpr, begin=0):
    """Load 64 or 128 rows from `row` on; if they have two dimensions, tokens and group, TMA packs them. begin: the
    coordinate of row 0."""
    BOX: gl.constexpr = desc.layout
    ROWS: gl.constexpr = tile.shape[0]  # Triton 3.6 accepts no plain int in a list as an argument
    GROUP: gl.constexpr = desc.block_shape[3] if len(desc.block_shape) == 5 else 1
    if len(desc.block_shape) == 5:
        panels = reinterpret(tile, [D // 64, 1, 1, ROWS // GROUP, GROUP, 64], BOX)
        for panel in gl.static_range(D // 64):
            tma_load(desc, [batch, head, begin + row // GROUP, 0, panel * 64], ready, panels.index(panel))
    else:
        panels = reinterpret(tile, [D // 64, 1, 1, ROWS, 64], BOX)
        for panel in gl.static_range(D // 64):
            tma_load(desc, [batch, head, begin + row, panel * 64], ready, panels.index(panel))


@gluon.jit
def zero_invisible(tile, first_row, visible_first, visible_end, BN: gl.constexpr, D: gl.constexpr):
    """Zero the rows of a landed tile outside [visible_first, visible_end): P is 0 there, but 0 * NaN is NaN.

    One warp writes 1 KB per step. tile: one ring slot; its row 0 is key first_row.
    """
    ATOM: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    atoms = reinterpret(tile, [(BN // 8) * (D // 64), 8, 64], ATOM)
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, L))
    for group in range(0, BN // 8):
        first = first_row + group * 8
        if (first < visible_first) | (first + 8 > visible_end):
            keep = (first + row >= visible_first) & (first + row < visible_end)
            for panel in range(0, D // 64):
                atom = atoms.index(panel * (BN // 8) + group)
                x = gl.zeros([8, 64], tile.dtype, L)
                if (first + 8 > visible_first) & (first < visible_end):
                    x = gl.where(keep[:, None], atom.load(L), x)
                atom.store(x)


@gluon.constexpr_function
def box_rows(desc):
    """Return the rows of a TMA box; tiles that are loaded without TMA may begin at any row."""
    return 1 if desc is None else desc.block_shape[1]


@gluon.jit
def issue(desc, tile, ready, where, first_row, column, BN: gl.constexpr, D: gl.constexpr, KV_LOAD: gl.constexpr):
    """Load one tile by TMA: boxes of [BOX_ROWS, 64] into the slot. Boxes past the last key in pages read zeros."""
    outer = where.outer
    BOX_ROWS: gl.constexpr = desc.block_shape[1]
    BOXES: gl.constexpr = BN // BOX_ROWS
    BOX: gl.constexpr = desc.layout
    COLUMNS: gl.constexpr = desc.block_shape[3]  # 64, or 128 codes
    boxes = reinterpret(tile, [BOXES * (tile.shape[1] // COLUMNS), 1, BOX_ROWS, 1, COLUMNS], BOX)
    for i in gl.static_range(BOXES):
        row = first_row + i * BOX_ROWS
        if KV_LOAD == PAGES:
            page = row // where.page_size
            # Table entries past the length are not read; page -1 is out of bounds, which TMA fills with zeros.
            outer = gl.load(where.table_ptr + page, mask=row < where.keys, other=-1)
            row = row - page * where.page_size
        for panel in gl.static_range(D // COLUMNS):
            place = [outer, where.k_start + row, where.head, column + panel * COLUMNS]
            tma_load(desc, place, ready, boxes.index(panel * BOXES + i))


@gluon.jit
def fill(
    desc,
    tile,
    ready,
    landed,
    landed_phase,
    where,
    first_row,
    column,
    BN: gl.constexpr,
    D: gl.constexpr,
    KV_LOAD: gl.constexpr,
):
    """Fill one ring slot [BN, D] by TMA: keys from first_row on, columns from ``column`` on; ``ready`` completes then.

    Rows that belong to another sequence, or to none, are zeroed before ``ready``: such a tile lands on the barrier
    ``landed`` first, whose next phase is returned. In a dense tensor the descriptor's own bounds do this.
    """
    NBYTES: gl.constexpr = BN * D * 2
    foreign: gl.constexpr = False
    if KV_LOAD != DENSE:
        foreign = (first_row < where.visible_first) | (first_row + BN > where.landed_end)
    if foreign:
        mbarrier.expect(landed, NBYTES)
        issue(desc, tile, landed, where, first_row, column, BN, D, KV_LOAD)
        mbarrier.wait(landed, landed_phase)
        zero_invisible(tile, first_row, where.visible_first, where.keys, BN, D)
        fence_async_shared()  # generic stores -> tensor-core reads
        mbarrier.arrive(ready, count=1)
        landed_phase = landed_phase ^ 1
    else:
        mbarrier.expect(ready, NBYTES)
        issue(desc, tile, ready, where, first_row, column, BN, D, KV_LOAD)
    return landed_phase


@gluon.jit
def cp_async_rows(kv_rows, tile, where, first_row, column, BN: gl.constexpr, D: gl.constexpr):
    """Fill one ring slot [BN, D] by cp.async, in one group; rows that no query sees, and of absent pages, are 0."""
    ATOM: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    atoms = reinterpret(tile, [(BN // 8) * (D // 64), 8, 64], ATOM)
    col = column + gl.arange(0, 64, layout=gl.SliceLayout(0, L))
    for group in range(0, BN // 8):
        key = first_row + group * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, L))
        visible = (key >= where.visible_first) & (key < where.keys)
        page = gl.load(where.table_ptr + key // where.page_size, mask=visible, other=-1)
        visible = visible & (page >= 0) & (page < kv_rows.pages)
        offset = page.to(gl.int64) * kv_rows.page_stride + (key % where.page_size).to(gl.int64) * kv_rows.row_stride
        offset = offset + where.head.to(gl.int64) * kv_rows.head_stride
        for panel in range(0, D // 64):
            pointers = kv_rows.ptr + offset[:, None] * 8 + (col + panel * 64)[None, :]
            cp_async(atoms.index(panel * (BN // 8) + group), pointers, mask=visible[:, None])
    async_copy.commit_group()


@gluon.jit
def announce(ready, PENDING: gl.constexpr):
    """Arrive at ``ready`` once all cp.async groups of this warp except the newest PENDING have landed."""
    async_copy.wait_group(PENDING)
    fence_async_shared()  # cp.async writes like ordinary stores -> tensor-core reads
    mbarrier.arrive(ready, count=1)


@gluon.jit
def fill_any(
    desc,
    kv_rows,
    tile,
    ready,
    landed,
    landed_phase,
    where,
    first_row,
    column,
    BN: gl.constexpr,
    D: gl.constexpr,
    KV_LOAD: gl.constexpr,
):
    """Fill one ring slot in any of these ways; with cp.async, wait until the copies have landed."""
    if e4m3_rows.in_codes(kv_rows.ptr.dtype):
        e4m3_rows.fill(kv_rows, tile, ready, where, first_row, column, KV_LOAD >= PAGES)
    elif KV_LOAD == CP_ASYNC:
        cp_async_rows(kv_rows, tile, where, first_row, column, BN, D)
        announce(ready, 0)
    else:
        landed_phase = fill(desc, tile, ready, landed, landed_phase, where, first_row, column, BN, D, KV_LOAD)
    return landed_phase


@aggregate
class HeadRows:
    """Rows of one KV head, packed (tiles.py), in global memory. Strides are in units of 8 elements, so that the
    compiler can prove 16-byte alignment."""

    ptr: Value
    count: Value
    head: Value
    group: Value  # Divisor
    token_stride: Value
    head_stride: Value


@gluon.jit
def row_offsets(row, rows):
    """Return the element offset of row(s) of HeadRows."""
    token, q_head = token_and_head(row, rows.head, rows.group)
    return (token.to(gl.int64) * rows.token_stride + q_head.to(gl.int64) * rows.head_stride) * 8


@gluon.constexpr_function
def pieces_of_rows(ctas):
    """Return the register layout of rows, 16 bytes per thread of four warps; each CTA of a cluster has its own rows."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], [[1 << bit, 0] for bit in range(ctas.bit_length() - 1)])


@gluon.jit
def load_rows(
    rows,
    smem,
    first_row,
    column,
    N: gl.constexpr,
    C: gl.constexpr,
    AT_A_TIME: gl.constexpr,
    sign,
    asked=None,
    columns: gl.constexpr = None,
):
    """Load rows [first_row, first_row + N) of HeadRows, columns [column, column + C), into smem; rows past the end
    are 0.

    AT_A_TIME columns: 64 need few registers, and each warp still reads whole 128-byte pieces of rows. sign: -1, 0 or 1,
    known at compile time or not; the rows are multiplied by it. asked: a barrier to arrive at when all loads are
    issued, before they have landed. columns: how many the rows have, if fewer; the others are 0.
    """
    L: gl.constexpr = pieces_of_rows(gl.num_ctas())
    row = first_row + gl.arange(0, N, layout=gl.SliceLayout(1, L))
    offset = row_offsets(row, rows)
    for c in gl.static_range(C // AT_A_TIME):
        col = column + c * AT_A_TIME + gl.arange(0, AT_A_TIME, layout=gl.SliceLayout(0, L))
        if sign == 0:
            x = gl.zeros([N, AT_A_TIME], smem.dtype, L)
        else:
            x = gl.load(
                rows.ptr + offset[:, None] + col[None, :],
                mask=here(row < rows.count, col, C if columns is None else columns, C),
                other=0.0,
            )
        if asked is not None and c == C // AT_A_TIME - 1:
            mbarrier.arrive(asked, count=1)
        if sign < 0:
            x = -x
        smem.slice(c * AT_A_TIME, AT_A_TIME, dim=1).store(x)


@gluon.jit
def here(row, column, COLUMNS: gl.constexpr, D: gl.constexpr):
    """Return the mask of rows that exist and of COLUMNS columns, in tiles of D."""
    if COLUMNS == D:
        return row[:, None]
    else:
        return row[:, None] & (column < COLUMNS)[None, :]


@gluon.jit
def copy_rows(rows, smem, first_row, N: gl.constexpr, C: gl.constexpr, COLUMNS: gl.constexpr):
    """Copy the rows of load_rows by cp.async, as one group: nothing waits for it here, and no registers are held."""
    L: gl.constexpr = pieces_of_rows(gl.num_ctas())
    row = first_row + gl.arange(0, N, layout=gl.SliceLayout(1, L))
    offset = row_offsets(row, rows)
    col = gl.arange(0, C, layout=gl.SliceLayout(0, L))
    cp_async(smem, rows.ptr + offset[:, None] + col[None, :], mask=here(row < rows.count, col, COLUMNS, C))
    async_copy.commit_group()


@gluon.jit
def store_rows(rows, smem, first_row, column, N: gl.constexpr, C: gl.constexpr):
    """Store smem [N, C] in HeadRows, 16 bytes per thread."""
    L: gl.constexpr = pieces_of_rows(gl.num_ctas())
    row = first_row + gl.arange(0, N, layout=gl.SliceLayout(1, L))
    offset = row_offsets(row, rows)
    col = column + gl.arange(0, C, layout=gl.SliceLayout(0, L))
    gl.store(rows.ptr + offset[:, None] + col[None, :], smem.load(L), mask=(row < rows.count)[:, None])


@gluon.jit
def store_lse(lse, lse_ptr, token, q_head, strides, mask):
    gl.store(lse_ptr + token.to(gl.int64) * strides.lse_token + q_head.to(gl.int64) * strides.lse_head, lse, mask=mask)
