"""What stands around the products, for every architecture, in Triton itself: slots sorted by expert, rows of
activations in that order as e4m3, the sum over the slots of a token.

Nothing here depends on the order in which programs run: an expert's rows are in the order of tokens and slots. Every
kernel waits for the one before it and lets the next one begin (kernels/dependent.py).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

COLUMNS = tl.constexpr(1024)  # of a token to a program
GROUP = tl.constexpr(128)


@triton.jit
def wait_on_prior_grid():
    gdc_wait()
    tl.debug_barrier()  # which the compiler moves no load across, as it might across the line above


@triton.jit
def scale_place(row, begin, expert):
    """Where the scales of a row are: those of every expert begin at a multiple of 4, as TMA wants it."""
    return row - begin + (begin + 3) // 4 * 4 + 4 * expert


@triton.jit
def sort_expert(choice, to, expert, PIECE: tl.constexpr):
    """How many slots lie before those of an expert, then its own in their order, PIECE at a time."""
    piece = tl.arange(0, PIECE)
    before = tl.zeros([PIECE], tl.int32)
    for at in range(0, choice.slots, PIECE):
        slot = at + piece
        id = tl.load(choice.ids_ptr + slot, mask=slot < choice.slots, other=-1).to(tl.int32)
        before += ((id >= 0) & (id < expert)).to(tl.int32)
    begin = tl.sum(before, 0)
    tl.store(to.starts_ptr + expert, begin)
    first = begin
    for at in range(0, choice.slots, PIECE):
        slot = at + piece
        inside = slot < choice.slots
        id = tl.load(choice.ids_ptr + slot, mask=inside, other=-1).to(tl.int32)
        mine = (id == expert) & inside
        count = tl.sum(mine.to(tl.int32), 0)
        if count > 0:
            row = first + tl.cumsum(mine.to(tl.int32), 0) - 1
            tl.store(to.slot_ptr + row, slot, mask=mine)
            tl.store(to.row_ptr + slot, row, mask=mine)
            tl.store(to.place_ptr + slot, scale_place(row, begin, expert), mask=mine)
            weight = tl.load(choice.weights_ptr + slot, mask=mine, other=0.0)
            tl.store(to.weight_ptr + row, weight, mask=mine)
        nowhere = ((id < 0) | (id >= choice.experts)) & inside
        tl.store(to.row_ptr + slot, -1, mask=nowhere & (expert == 0))
        first += count
    tl.store(to.starts_ptr + choice.experts, first, mask=expert == choice.experts - 1)


@triton.jit
def moe_sort(choice, to, PIECE: tl.constexpr):
    """One program for each expert."""
    gdc_launch_dependents()
    wait_on_prior_grid()
    sort_expert(choice, to, tl.program_id(0), PIECE)


@triton.jit
def quantized(x, token, part):
    """COLUMNS of a token as (e4m3, in the order of formats.POSITIONS by groups, scales of the groups)."""
    p = tl.arange(0, COLUMNS) % GROUP
    column = p % 16 // 4 * 32 + p // 32 * 8 + p % 32 // 16 * 4 + p % 4
    column += part * COLUMNS + tl.arange(0, COLUMNS) // GROUP * GROUP
    values = tl.load(x.ptr + token.to(tl.int64) * x.line + column, mask=column < x.width, other=0.0).to(tl.float32)
    groups = tl.reshape(values, [COLUMNS // GROUP, GROUP])
    bits = (tl.maximum(tl.max(tl.abs(groups), 1), 1e-4) * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    codes = tl.reshape((groups * inverse[:, None]).to(tl.float8e4nv), [COLUMNS])
    return codes, (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def write_rows(x, codes, scale, part, row, place):
    """To one row."""
    if row >= 0:
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        group = part * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)
        tl.store(x.to_ptr + row.to(tl.int64) * x.width + column, codes, mask=column < x.width)
        tl.store(x.scale_ptr + group * x.scale_line + place, scale, mask=group * GROUP < x.width)


@triton.jit
def moe_rows(x, TOPK: tl.constexpr):
    """One program: COLUMNS of a token, to the row of each of its slots."""
    gdc_launch_dependents()
    token, part = tl.program_id(0), tl.program_id(1)
    codes, scale = quantized(x, token, part)
    wait_on_prior_grid()
    rows = ()
    places = ()
    for j in tl.static_range(TOPK):  # all numbers are asked for before the first is needed
        rows = rows + (tl.load(x.row_ptr + token * TOPK + j),)
        places = places + (tl.load(x.place_ptr + token * TOPK + j),)
    for j in tl.static_range(TOPK):
        write_rows(x, codes, scale, part, rows[j], places[j])


@triton.jit
def moe_sort_rows(choice, to, x, parts, TOPK: tl.constexpr, PIECE: tl.constexpr):
    """Both in one launch, for at most PIECE slots: a program of a token counts for itself which rows are its own."""
    gdc_launch_dependents()
    n = tl.program_id(0) - choice.experts
    if n < 0:
        wait_on_prior_grid()
        sort_expert(choice, to, tl.program_id(0), PIECE)
    else:
        token, part = n // parts, n % parts
        codes, scale = quantized(x, token, part)
        wait_on_prior_grid()
        slot = tl.arange(0, PIECE)
        ids = tl.load(choice.ids_ptr + slot, mask=slot < choice.slots, other=-1).to(tl.int32)
        there = (ids >= 0) & (ids < choice.experts)
        for j in tl.static_range(TOPK):
            mine = token * TOPK + j
            id = tl.load(choice.ids_ptr + mine).to(tl.int32)
            begin = tl.sum((there & (ids < id)).to(tl.int32), 0)
            row = begin + tl.sum((there & (ids == id) & (slot < mine)).to(tl.int32), 0)
            row = tl.where((id >= 0) & (id < choice.experts), row, -1)
            write_rows(x, codes, scale, part, row, scale_place(row, begin, id))


@triton.jit
def moe_sum(sums, TOPK: tl.constexpr, SHARED: tl.constexpr):
    """One program: COLUMNS of a token, its slots in their order."""
    gdc_launch_dependents()
    wait_on_prior_grid()
    token, part = tl.program_id(0), tl.program_id(1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    there = column < sums.width
    values = ()
    for j in tl.static_range(TOPK):
        slot = token * TOPK + j
        chosen = tl.load(sums.row_ptr + slot) >= 0
        y = tl.load(sums.slots_ptr + slot.to(tl.int64) * sums.width + column, mask=there & chosen, other=0.0)
        values = values + (y,)
    total = tl.zeros([COLUMNS], tl.float32)
    for j in tl.static_range(TOPK):
        total += values[j].to(tl.float32)
    if SHARED:
        y = tl.load(sums.shared_ptr + token.to(tl.int64) * sums.width + column, mask=there, other=0.0)
        total += y.to(tl.float32)
    out = sums.out_ptr + token.to(tl.int64) * sums.out_line + column
    tl.store(out, total.to(sums.out_ptr.dtype.element_ty), mask=there)
