"""Compressed rows as one Triton kernel, with one source for every architecture.

One program makes a row from its own slots alone, in an order that depends on nothing else; so the bits do not
depend on how the tokens were divided into calls.
"""

import triton
import triton.language as tl

from dsv4.caches.kernels.pack import store_packed


@triton.jit
def store_plain(row, to, slot, column, width):
    page = slot // to.page_rows
    at = page * to.page_stride + (slot - page * to.page_rows) * to.row_stride
    kept = (column < width) & (slot >= 0) & (slot < to.rows)
    tl.store(to.ptr + at + column, row.to(to.ptr.dtype.element_ty), mask=kept)


@triton.jit
def tokens_at(token, column, there, new, old, tokens, bias_row, kept, width, GATED: tl.constexpr, BIASED: tl.constexpr):
    """Load (kv, gate with its bias) in fp32 of tokens [n, 1], counted from the first kept one; columns [1, D].
    new, old: where kv and gate of this sequence begin."""
    fresh = there & (token >= kept)
    known = there & (token < kept)
    before = token.to(tl.int64) * width + column
    after = (token - kept).to(tl.int64)
    # One of the two is 0. With a select in place of the sums, the compiler would wait for every load in turn.
    old_kv = tl.load(old[0] + before, mask=known, other=0.0)
    kv = tl.load(new[0] + after * tokens.kv_row + column, mask=fresh, other=0.0).to(tl.float32)
    gate = tl.zeros_like(kv)
    if GATED:
        old_gate = tl.load(old[1] + before, mask=known, other=0.0)
        gate = tl.load(new[1] + after * tokens.gate_row + column, mask=fresh, other=0.0).to(tl.float32)
        if BIASED:
            gate += tl.load(tokens.bias_ptr + bias_row * width + column, mask=fresh, other=0.0).to(tl.float32)
        gate += old_gate
    return kv + old_kv, gate


@triton.jit
def pooled(top, total, row, gate, kv):
    """Add tokens [n, D] to the softmax by columns -> (the greatest gate, the sum of the weights, that of the rows)."""
    new_top = tl.maximum(top, tl.max(gate, 0))
    safe = tl.where(new_top == -float("inf"), 0.0, new_top)  # no token yet, or a column past the last
    weight = tl.exp(gate - safe[None, :])
    decay = tl.exp(top - safe)
    total = total * decay + tl.sum(weight, 0)
    row = row * decay + tl.sum(weight * kv, 0)
    return new_top, total, row


@triton.jit
def finished(row, finish, position, line, column, D: tl.constexpr, R: tl.constexpr):
    """Normalise a pooled row [D] and rotate its last R columns; line: the stride of positions in cos_sin."""
    row *= tl.rsqrt(tl.sum(row * row, 0) / D + finish.eps)
    row *= tl.load(finish.norm_ptr + column).to(tl.float32)
    even, odd = tl.split(tl.reshape(row, [D // 2, 2]))
    pair = tl.arange(0, D // 2) - (D - R) // 2
    angle = finish.cos_sin_ptr + position.to(tl.int64) * line + pair
    cos = tl.load(angle, mask=pair >= 0, other=1.0).to(tl.float32)
    sin = tl.load(angle + R // 2, mask=pair >= 0, other=0.0).to(tl.float32)
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), [D])


@triton.jit
def compress_rows(
    tokens,
    old,
    new,
    finish,
    to,
    slots_ptr,
    windows,
    OVERLAP: tl.constexpr,
    ROPE: tl.constexpr,
    FORMAT: tl.constexpr,
    D: tl.constexpr,
    SLOTS: tl.constexpr,
    DTYPE: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Make the row of a finished window of a sequence, or copy a token that the new state keeps.

    The tokens of a sequence are those of the old state and the new ones. The new state has all from `windows.drop` on.
    FORMAT: of the pool that rows go to; None: to lines.
    Not GATED: rows of one token; not BIASED: gates as they are.
    """
    b = tl.program_id(1).to(tl.int64)
    m, d, r, kept, base = windows.m, windows.d, windows.r, windows.kept, windows.base
    width = d * 2 if OVERLAP else d
    given = (tokens.kv_ptr + b * tokens.kv_batch, tokens.gate_ptr + b * tokens.gate_batch)
    before = (old.kv_ptr + b * kept * width, old.gate_ptr + b * kept * width)
    column = tl.arange(0, D)
    if tl.program_id(0) < windows.count:
        window = windows.first + tl.program_id(0)
        slots = m * 2 if OVERLAP else m
        line = column[None, :]
        top = tl.full([D], -float("inf"), tl.float32)
        total = tl.zeros([D], tl.float32)
        row = tl.zeros([D], tl.float32)
        for begin in range(0, slots, SLOTS):
            slot = begin + tl.arange(0, SLOTS)[:, None]
            if OVERLAP:  # the a-half of the previous window, then the b-half of this one
                own = slot >= m
                token = window * m - m + slot - base
                there = (slot < slots) & (line < d) & (own | (window > 0))
                at = tl.where(own, line + d, line)
            else:
                token = window * m + slot - base
                there = (slot < slots) & (line < d)
                at = line + slot * 0
            bias_row = tl.where(slot < m, slot, slot - m)
            kv, gate = tokens_at(token, at, there, given, before, tokens, bias_row, kept, width, GATED, BIASED)
            gate = tl.where(there, gate, -float("inf"))
            top, total, row = pooled(top, total, row, gate, kv)
        row = tl.where(column < d, row / total, 0.0)
        row *= tl.rsqrt(tl.sum(row * row, 0) / d + finish.eps)
        row *= tl.load(finish.norm_ptr + column, mask=column < d, other=0.0).to(tl.float32)
        if ROPE:
            even, odd = tl.split(tl.reshape(row, [D // 2, 2]))
            pair = tl.arange(0, D // 2) - (d - r) // 2
            turned = (pair >= 0) & (pair < r // 2)
            angle = finish.cos_sin_ptr + (window * m).to(tl.int64) * windows.rope_line + pair
            cos = tl.load(angle, mask=turned, other=1.0).to(tl.float32)
            sin = tl.load(angle + r // 2, mask=turned, other=0.0).to(tl.float32)
            row = tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), [D])
        if DTYPE == "bfloat16":  # rounded as a returned row would be, whatever the pool's format
            row = row.to(tl.bfloat16)
        elif DTYPE == "float16":
            row = row.to(tl.float16)
        place = b * windows.count + tl.program_id(0)
        if FORMAT is None:
            tl.store(to.ptr + place * d + column, row, mask=column < d)
        else:
            slot = tl.load(slots_ptr + place).to(tl.int64)
            if FORMAT.coded > 0:
                one = tl.zeros([1], tl.int64) + slot
                packed = tl.reshape(row.to(tl.float32), [1, D])
                store_packed(to, packed, one, column, FORMAT)
            else:
                store_plain(row, to, slot, column, d)
    else:
        number = tl.program_id(0) - windows.count
        token = windows.drop + number
        first = (b * (kept + windows.tokens - windows.drop) + number) * width
        for half in tl.static_range(2 if OVERLAP else 1):
            at = half * d + column
            bias_row = (base + token) % m
            kv, gate = tokens_at(token, at, column < d, given, before, tokens, bias_row, kept, width, GATED, BIASED)
            tl.store(new.kv_ptr + first + at, kv, mask=column < d)
            tl.store(new.gate_ptr + first + at, gate, mask=column < d)
