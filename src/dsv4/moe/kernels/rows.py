"""Triton kernels around the products, for every architecture: they sort slots by expert, write rows of activations in
that order as e4m3, and sum over the slots of a token.

Widths and lines are in groups of 128 and in eights, so that the compiler knows that 16 bytes can be moved at once.
Nothing here depends on the order in which programs run: an expert's rows are in the order of tokens and slots. Every
kernel waits for the one before it and lets the next one begin (kernels/dependent.py).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.caches.kernels.pack import e2m1

PIECE = tl.constexpr(256)  # slots per program that sorts
SOME = tl.constexpr(32)  # slots that are compared with them at a time
GROUP = tl.constexpr(128)
LEAST, E4M3_MAX = tl.constexpr(2.0**-9), tl.constexpr(448.0)  # scales of NVFP4


@triton.jit
def wait_on_prior_grid():
    gdc_wait()
    tl.debug_barrier()  # the compiler moves no load across it, as it might across the line above


@triton.jit
def scale_place(row, begin, expert, TILE: tl.constexpr, WORDS: tl.constexpr):
    """Return where the scales of a row are. Those of every expert begin at a multiple of 4, as TMA needs it; or those
    of every TILE rows of an expert have an atom of 128 words, or WORDS of them (sm100/products.py)."""
    if TILE == 0:
        place = row - begin + (begin + 3) // 4 * 4 + 4 * expert
    else:
        n = (row - begin) % TILE
        place = (begin // TILE + expert + (row - begin) // TILE) * 128 * WORDS + n % 32 * 4 + n // 32
    return place


@triton.jit
def ids_of(choice, slot):
    """Return the experts of slots; -1 for none."""
    id = tl.load(choice.ids_ptr + slot, mask=slot < choice.slots, other=-1)
    return tl.where((id >= 0) & (id < choice.experts), id, -1).to(tl.int32)


@triton.jit
def moe_count(choice, pieces, EXPERTS: tl.constexpr):
    """Count how many of PIECE slots belong to each expert."""
    gdc_launch_dependents()
    id = ids_of(choice, tl.program_id(0) * PIECE + tl.arange(0, PIECE))
    for first in range(0, EXPERTS, SOME):
        expert = first + tl.arange(0, SOME)
        count = tl.sum((id[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(pieces.counts_ptr + tl.program_id(0) * EXPERTS + expert, count)


@triton.jit
def moe_place(choice, pieces, to, EXPERTS: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr):
    """Place PIECE slots in rows, after those of earlier pieces and of lower experts."""
    gdc_launch_dependents()
    wait_on_prior_grid()
    mine = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    earlier = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, tl.num_programs(0), SOME):
        piece = first + tl.arange(0, SOME)
        place = pieces.counts_ptr + piece[:, None] * EXPERTS + expert[None, :]
        count = tl.load(place, mask=(piece < tl.num_programs(0))[:, None], other=0)
        total += tl.sum(count, 0)
        earlier += tl.sum(tl.where((piece < mine)[:, None], count, 0), 0)
    begin = tl.cumsum(total, 0) - total
    if mine == 0:
        tl.store(to.starts_ptr + expert, begin, mask=expert < choice.experts)
        tl.store(to.starts_ptr + choice.experts, tl.sum(total, 0))
        tl.store(to.signals_ptr + expert, 0, mask=expert < choice.experts)
        tl.store(to.signals_ptr + choice.experts, 0)
    bases = pieces.bases_ptr + mine * 2 * EXPERTS
    tl.store(bases + expert, begin + earlier)
    tl.store(bases + EXPERTS + expert, begin)
    slot = mine * PIECE + tl.arange(0, PIECE)
    id = ids_of(choice, slot)
    rank = tl.zeros([PIECE], tl.int32)
    for first in range(0, PIECE, SOME):
        other = mine * PIECE + first + tl.arange(0, SOME)
        same = (id[:, None] == ids_of(choice, other)[None, :]) & (other[None, :] < slot[:, None])
        rank += tl.sum(same.to(tl.int32), 1)
    tl.debug_barrier()  # all threads see the bases
    there = id >= 0
    row = tl.load(bases + id, mask=there, other=0) + rank
    tl.store(to.row_ptr + slot, tl.where(there, row, -1), mask=slot < choice.slots)
    begin = tl.load(bases + EXPERTS + id, mask=there, other=0)
    tl.store(to.place_ptr + slot, scale_place(row, begin, id, TILE, WORDS), mask=there)
    tl.store(to.slot_ptr + row, slot, mask=there)
    tl.store(to.weight_ptr + row, tl.load(choice.weights_ptr + slot, mask=there, other=0.0), mask=there)


@triton.jit
def sort_expert(choice, to, expert, SLOTS: tl.constexpr):
    """Find the rows of one expert, for at most SLOTS slots in all."""
    slot = tl.arange(0, SLOTS)
    id = ids_of(choice, slot)
    begin = tl.sum(((id >= 0) & (id < expert)).to(tl.int32), 0)
    mine = id == expert
    row = begin + tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(to.starts_ptr + expert, begin)
    tl.store(to.signals_ptr + expert, 0)
    last = expert == choice.experts - 1
    tl.store(to.starts_ptr + choice.experts, begin + tl.sum(mine.to(tl.int32), 0), mask=last)
    tl.store(to.signals_ptr + choice.experts, 0, mask=last)
    tl.store(to.slot_ptr + row, slot, mask=mine)
    tl.store(to.weight_ptr + row, tl.load(choice.weights_ptr + slot, mask=mine, other=0.0), mask=mine)
    nowhere = (id < 0) & (slot < choice.slots) & (expert == 0)
    tl.store(to.row_ptr + slot, tl.where(mine, row, -1), mask=mine | nowhere)


@triton.constexpr_function
def words_of(recipe):
    """Return the words of scales of a row per 128 columns."""
    return 2 if recipe == "nvfp4" else 1


@triton.jit
def in_words(bytes, COLUMNS: tl.constexpr, RECIPE: tl.constexpr):
    """Pack four bytes into a word, the first lowest."""
    four = tl.reshape(bytes, [COLUMNS // GROUP * words_of(RECIPE), 4])
    return tl.sum(four << (8 * tl.arange(0, 4))[None, :], 1)


@triton.jit
def quantized(x, token, part, COLUMNS: tl.constexpr, TILE: tl.constexpr, RECIPE: tl.constexpr):
    """Quantize COLUMNS of a token -> (codes, scales of the groups). Without TILE: columns of a group in the order of
    formats.POSITIONS, scales fp32; else columns as they are, scales as bytes, four to a word."""
    n = tl.arange(0, COLUMNS)
    p = n % GROUP
    column = part * COLUMNS + n
    if TILE == 0:
        column += p % 16 // 4 * 32 + p // 32 * 8 + p % 32 // 16 * 4 + p % 4 - p
        column = tl.max_contiguous(tl.multiple_of(column, 4), 4)
    line = x.ptr + token.to(tl.int64) * (x.line * 8)
    values = tl.load(line + column, mask=column < x.groups * GROUP, other=0.0).to(tl.float32)
    if RECIPE == "nvfp4":
        groups = tl.reshape(values, [COLUMNS // 16, 16])
        target = tl.minimum(tl.maximum(tl.div_rn(tl.max(tl.abs(groups), 1), 6.0), LEAST), E4M3_MAX)
        scale = target.to(tl.float8e4nv)
        groups, value = tl.broadcast(groups, scale.to(tl.float32)[:, None])
        low, high = tl.split(tl.reshape(e2m1(tl.div_rn(groups, value)), [COLUMNS // 2, 2]))
        codes = (low | (high << 4)).to(tl.uint8)
        scales = in_words(scale.to(tl.uint8, bitcast=True).to(tl.int32), COLUMNS, RECIPE)
    else:
        ONE: tl.constexpr = 32 if RECIPE == "fp8_32" else GROUP
        groups = tl.reshape(values, [COLUMNS // ONE, ONE])
        bits = (tl.maximum(tl.max(tl.abs(groups), 1), 1e-4) * (1.0 / 448.0)).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        codes = tl.reshape((groups * inverse[:, None]).to(tl.float8e4nv), [COLUMNS])
        if TILE == 0:
            scales = (exponent << 23).to(tl.float32, bitcast=True)
        elif RECIPE == "fp8_32":
            scales = in_words(exponent, COLUMNS, RECIPE)
        else:
            scales = exponent * 0x01010101
    return codes, scales


@triton.jit
def write_rows(x, codes, scale, part, row, place, COLUMNS: tl.constexpr, RECIPE: tl.constexpr):
    """Write one row."""
    WORDS: tl.constexpr = words_of(RECIPE)
    EACH: tl.constexpr = 2 if RECIPE == "nvfp4" else 1  # codes per byte
    if row >= 0:
        n = part * (COLUMNS // EACH) + tl.arange(0, COLUMNS // EACH)
        word = part * (COLUMNS // GROUP * WORDS) + tl.arange(0, COLUMNS // GROUP * WORDS)
        to = x.to_ptr + row.to(tl.int64) * (x.groups * (GROUP // EACH))
        tl.store(to + n, codes, mask=n < x.groups * (GROUP // EACH))
        to = word // WORDS * x.scale_line + word % WORDS * 128 + place
        tl.store(x.scale_ptr + to, scale, mask=word // WORDS < x.groups)


@triton.jit
def moe_rows(x, TOPK: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, RECIPE: tl.constexpr):
    """Write COLUMNS of a token to the row of each of its slots."""
    gdc_launch_dependents()
    token, part = tl.program_id(0), tl.program_id(1)
    codes, scale = quantized(x, token, part, COLUMNS, TILE, RECIPE)
    wait_on_prior_grid()
    rows = ()
    places = ()
    for j in tl.static_range(TOPK):  # all loads are issued before the first result is needed
        rows = rows + (tl.load(x.row_ptr + token * TOPK + j),)
        places = places + (tl.load(x.place_ptr + token * TOPK + j),)
    for j in tl.static_range(TOPK):
        write_rows(x, codes, scale, part, rows[j], places[j], COLUMNS, RECIPE)


@triton.jit
def moe_sort_rows(
    choice,
    to,
    x,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    RECIPE: tl.constexpr,
):
    """Sort and write rows in one launch, for at most SLOTS slots: each program of a token finds its own rows."""
    gdc_launch_dependents()
    n = tl.program_id(0) - choice.experts
    if n < 0:
        wait_on_prior_grid()
        sort_expert(choice, to, tl.program_id(0), SLOTS)
    else:
        token, part = n // x.parts, n % x.parts
        codes, scale = quantized(x, token, part, COLUMNS, TILE, RECIPE)
        wait_on_prior_grid()
        slot = tl.arange(0, SLOTS)
        ids = ids_of(choice, slot)
        for j in tl.static_range(TOPK):
            mine = token * TOPK + j
            id = ids_of(choice, mine)
            begin = tl.sum(((ids >= 0) & (ids < id)).to(tl.int32), 0)
            row = begin + tl.sum(((ids == id) & (slot < mine)).to(tl.int32), 0)
            row = tl.where(id >= 0, row, -1)
            place = scale_place(row, begin, id, TILE, words_of(RECIPE))
            write_rows(x, codes, scale, part, row, place, COLUMNS, RECIPE)


@triton.jit
def moe_sum(sums, choice, TOPK: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum COLUMNS of a token over its slots, in order. The program reads which of them have an expert before the slots
    are complete: the router's choice was complete before the first of these kernels."""
    gdc_launch_dependents()
    token, part = tl.program_id(0), tl.program_id(1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    width = sums.groups * GROUP
    there = column < width
    chosen = ()
    for j in tl.static_range(TOPK):
        chosen = chosen + (ids_of(choice, token * TOPK + j) >= 0,)
    wait_on_prior_grid()
    values = ()
    for j in tl.static_range(TOPK):
        slot = token * TOPK + j
        y = tl.load(sums.slots_ptr + slot.to(tl.int64) * width + column, mask=there & chosen[j], other=0.0)
        values = values + (y,)
    total = tl.zeros([COLUMNS], tl.float32)
    for j in tl.static_range(TOPK):
        total += values[j].to(tl.float32)
    if SHARED:
        y = tl.load(sums.shared_ptr + token.to(tl.int64) * width + column, mask=there, other=0.0)
        total += y.to(tl.float32)
    out = sums.out_ptr + token.to(tl.int64) * (sums.out_line * 8) + column
    tl.store(out, total.to(sums.out_ptr.dtype.element_ty), mask=there)
