"""What stands around the products, for every architecture, in Triton itself: slots sorted by expert, rows of
activations in that order as e4m3, the sum over the slots of a token.

Nothing here depends on the order in which programs run: an expert's rows are in the order of tokens and slots.
"""

import triton
import triton.language as tl

PIECE = tl.constexpr(1024)  # ids at a time
COLUMNS = tl.constexpr(1024)  # of a token to a program
GROUP = tl.constexpr(128)


@triton.jit
def moe_sort(choice, to):
    """One program for each expert: how many slots lie before its own, then its own in their order."""
    expert = tl.program_id(0)
    piece = tl.arange(0, PIECE)
    before = tl.zeros([PIECE], tl.int32)
    for at in range(0, choice.slots, PIECE):
        slot = at + piece
        id = tl.load(choice.ids_ptr + slot, mask=slot < choice.slots, other=-1).to(tl.int32)
        before += ((id >= 0) & (id < expert)).to(tl.int32)
        nowhere = (id < 0) | (id >= choice.experts)
        tl.store(to.row_ptr + slot, -1, mask=nowhere & (slot < choice.slots) & (expert == 0))
    first = tl.sum(before, 0)
    tl.store(to.starts_ptr + expert, first)
    for at in range(0, choice.slots, PIECE):
        slot = at + piece
        inside = slot < choice.slots
        id = tl.load(choice.ids_ptr + slot, mask=inside, other=-1).to(tl.int32)
        mine = (id == expert) & inside
        row = first + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(to.slot_ptr + row, slot, mask=mine)
        tl.store(to.row_ptr + slot, row, mask=mine)
        weight = tl.load(choice.weights_ptr + slot, mask=mine, other=0.0)
        tl.store(to.weight_ptr + row, weight, mask=mine)
        first += tl.sum(mine.to(tl.int32), 0)
    tl.store(to.starts_ptr + choice.experts, first, mask=expert == choice.experts - 1)


@triton.jit
def moe_rows(x):
    """One program: COLUMNS of a token as e4m3, to the row of each of its slots. Columns of a group in the order of
    formats.POSITIONS."""
    token, part = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, COLUMNS)
    p = place % GROUP
    column = part * COLUMNS + place // GROUP * GROUP + p % 16 // 4 * 32 + p // 32 * 8 + p % 32 // 16 * 4 + p % 4
    values = tl.load(x.ptr + token.to(tl.int64) * x.line + column, mask=column < x.width, other=0.0).to(tl.float32)
    groups = tl.reshape(values, [COLUMNS // GROUP, GROUP])
    amax = tl.max(tl.abs(groups), 1)
    bits = (tl.maximum(amax, 1e-4) * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    codes = tl.reshape((groups * inverse[:, None]).to(tl.float8e4nv), [COLUMNS])
    group = part * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)
    column = part * COLUMNS + place
    for j in range(x.topk):
        slot = token * x.topk + j
        row = tl.load(x.row_ptr + slot)
        if row >= 0:
            expert = tl.load(x.ids_ptr + slot).to(tl.int32)
            begin = tl.load(x.starts_ptr + expert)
            tl.store(x.to_ptr + row.to(tl.int64) * x.width + column, codes, mask=column < x.width)
            at = row - begin + (begin + 3) // 4 * 4 + 4 * expert  # sm90/products.py, scale_shift
            tl.store(x.scale_ptr + group * x.scale_line + at, scale, mask=group * GROUP < x.width)


@triton.jit
def moe_sum(sums, SHARED: tl.constexpr):
    """One program: COLUMNS of a token, its slots in their order."""
    token, part = tl.program_id(0), tl.program_id(1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    there = column < sums.width
    total = tl.zeros([COLUMNS], tl.float32)
    for j in range(sums.topk):
        slot = token * sums.topk + j
        chosen = tl.load(sums.row_ptr + slot) >= 0
        y = tl.load(sums.slots_ptr + slot.to(tl.int64) * sums.width + column, mask=there & chosen, other=0.0)
        total += y.to(tl.float32)
    if SHARED:
        y = tl.load(sums.shared_ptr + token.to(tl.int64) * sums.width + column, mask=there, other=0.0)
        total += y.to(tl.float32)
    out = sums.out_ptr + token.to(tl.int64) * sums.out_line + column
    tl.store(out, total.to(sums.out_ptr.dtype.element_ty), mask=there)
