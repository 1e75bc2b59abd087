"""The compiled inner loops for the tensor core's operands (gather and decode a tile) and for mma.sync's product.

All data are in lane space: D is rows of 32 lanes (`cells`, uint32 [columns * stride, 32]; tensor memory has
stride 4), A is [k * stride + 2, 32] with the operand row of each lane in its place, then a row of zeros and one of
NaNs, B is [n, k]. Results are written under lane masks, so half-filled layouts and disabled lanes cost nothing extra.
Sums are fused multiply-adds in ascending k, so their bits are the same on every machine. A NaN result is 0x7fffffff,
as on tensor cores.
"""

from __future__ import annotations

import numpy as np

from softsm.engine.lanes import load8, load16, load32, load64, store32
from softsm.engine.native import native


@native("void(u2[::1], i8, i8[:,::1], u4[::1], i8[::1], u4[:,::1], i8)", python=True, effort=3)
def gather16(shared, base, index, table, place, out, swap):
    """Gathers 16-bit elements of the 16-byte chunks index[i, j] (from chunk `base`). table: float32 bits of every f16,
    or empty for bf16. Element (i, e) goes to out[i, place[e]], or with swap to out[e, place[i]]."""
    convert = table.size > 0
    for i in range(index.shape[0]):
        for j in range(index.shape[1]):
            at = (base + index[i, j]) * 8
            for e in range(8):
                bits = np.uint32(shared[at + e])
                value = table[bits] if convert else np.uint32(bits << np.uint32(16))
                if swap:
                    out[j * 8 + e, place[i]] = value
                else:
                    out[i, place[j * 8 + e]] = value


@native("void(u1[::1], i8, i8[:,::1], u4[::1], i8[::1], u4[:,::1], i8)", python=True, effort=3)
def gather8(shared, base, index, table, place, out, swap):
    """Gathers 8-bit elements through a table of 256 values, like gather16."""
    for i in range(index.shape[0]):
        for j in range(index.shape[1]):
            at = (base + index[i, j]) * 16
            for e in range(16):
                value = table[shared[at + e]]
                if swap:
                    out[j * 16 + e, place[i]] = value
                else:
                    out[i, place[j * 16 + e]] = value


@native("void(u4[::1], i8, i8[:,::1], u4[::1], i8[::1], u4[:,::1], i8)", python=True, effort=3)
def gather32(shared, base, index, table, place, out, swap):
    """Gathers tf32 elements, of which the tensor core reads the upper 19 bits, like gather16."""
    for i in range(index.shape[0]):
        for j in range(index.shape[1]):
            at = (base + index[i, j]) * 4
            for e in range(4):
                value = np.uint32(shared[at + e] & np.uint32(0xFFFFE000))
                if swap:
                    out[j * 4 + e, place[i]] = value
                else:
                    out[i, place[j * 4 + e]] = value


@native("void(u4[:,::1], u4[::1], u4[:,::1])", python=True, effort=3)
def halves(cells, table, out):
    """Decodes A of 16-bit elements in tensor memory, [columns, 128 lanes], two per cell, by lanes; `table` as above."""
    convert = table.size > 0
    for c in range(cells.shape[0]):
        for lane in range(128):
            word = cells[c, lane]
            row, at = c * 8 + (lane >> 5), lane & 31
            if convert:
                out[row, at] = table[word & np.uint32(0xFFFF)]
                out[row + 4, at] = table[word >> np.uint32(16)]
            else:
                out[row, at] = word << np.uint32(16)
                out[row + 4, at] = word & np.uint32(0xFFFF0000)


TILE = 8  # numbers that describe a tile for `gather_tiles`


@native("void(i8, i8, i8, i8, i8, i8, i8)", python=True, effort=3)
def gather_tiles(shared, cells, tiles, count, out, width, step):
    """Gathers several tiles, by addresses: tile t starts at out + t * step, with `width` words between rows of `out`.
    tiles, int64 [count, TILE]: bytes of an element, first chunk, address of the chunk numbers, rows and columns of
    these, address of the table or 0, address of the places, swap; as gather16. 0 bytes: 16-bit elements of tensor
    memory from the second number, a column, on; as `halves`."""
    for t in range(count):
        tile, to = tiles + 8 * TILE * t, out + t * step
        size, base, table = np.int64(load64(tile)), np.int64(load64(tile + 8)), np.int64(load64(tile + 40))
        if size == 0:
            for c in range(8):
                for lane in range(128):
                    word = load32(cells + ((base + c) * 128 + lane) * 4)
                    low, high = word << np.uint32(16), word & np.uint32(0xFFFF0000)
                    if table:
                        low = load32(table + 4 * np.int64(word & np.uint32(0xFFFF)))
                        high = load32(table + 4 * np.int64(word >> np.uint32(16)))
                    store32(to + (2 * c * width + lane) * 4, low)
                    store32(to + ((2 * c + 1) * width + lane) * 4, high)
            continue
        index, rows, columns = np.int64(load64(tile + 16)), np.int64(load64(tile + 24)), np.int64(load64(tile + 32))
        place, swap = np.int64(load64(tile + 48)), np.int64(load64(tile + 56))
        per = 16 // size
        for i in range(rows):
            for j in range(columns):
                at = shared + (base + np.int64(load64(index + (i * columns + j) * 8))) * 16
                for e in range(per):
                    if size == 2:
                        code = np.uint32(load16(at + 2 * e))
                        value = load32(table + 4 * np.int64(code)) if table else np.uint32(code << np.uint32(16))
                    elif size == 1:
                        value = load32(table + 4 * np.int64(load8(at + e)))
                    else:
                        value = load32(at + 4 * e) & np.uint32(0xFFFFE000)
                    if swap:
                        store32(to + ((j * per + e) * width + np.int64(load64(place + 8 * i))) * 4, value)
                    else:
                        store32(to + (i * width + np.int64(load64(place + 8 * (j * per + e)))) * 4, value)


@native("void(u4[:,::1], i8, i8, u4[:,::1], i8[::1], i8)", python=True, effort=3)
def fragments(matrix, stride, first, registers, rows, store):
    """Moves an accumulator of 16 rows between the registers `rows` of a warp and `matrix` (uint32 [n*stride, 32], lane
    = row of the product, `first` the lane of row 0). store: from the matrix to the registers.

    Thread t, register v: row t/4 + 8*((v/2)%2), column 8*(v/4) + 2*(t%4) + v%2."""
    block, start = first // 32, first % 32
    for v in range(rows.size):
        r = rows[v]
        column = 8 * (v // 4) + v % 2
        lane = start + 8 * (v // 2 % 2)
        for t in range(32):
            at = (column + 2 * (t & 3)) * stride + block
            if store:
                registers[r, t] = matrix[at, lane + (t >> 2)]
            else:
                matrix[at, lane + (t >> 2)] = registers[r, t]


@native("void(u4[:,::1], i8[::1], i8, u4[::1], u4[:,::1], i8)", python=True, effort=3)
def left(registers, rows, per, table, out, first):
    """Moves A of 16 rows from a warp's registers `rows`, `per` elements in each, to lanes `first`.. of out [k, lanes].
    table: float32 bits of every code, empty for bf16 and tf32. The layout is that of isa/fragments.py."""
    width = 32 // per
    mask = np.uint32(0xFFFFFFFF) >> np.uint32(32 - width)
    for i in range(rows.size):
        r = rows[i]
        for t in range(32):
            word = registers[r, t]
            lane, at = first + (t >> 2) + 8 * (i & 1), 4 * per * (i >> 1) + per * (t & 3)
            for e in range(per):
                code = (word >> np.uint32(width * e)) & mask
                if table.size > 0:
                    out[at + e, lane] = table[code]
                elif per == 1:
                    out[at + e, lane] = code & np.uint32(0xFFFFE000)
                else:
                    out[at + e, lane] = code << np.uint32(16)


@native("void(u4[:,::1], i8[::1], i8, i8, u4[::1], u4[::1])", python=True, effort=3)
def warp_product(registers, rows, a_count, per, a_table, b_table):
    """Computes mma.sync m16n8 with f32 accumulators. rows: registers of A, B, C, D in this order; per: elements in one;
    tables: float32 bits of every code, empty for bf16 and tf32."""
    k = 2 * a_count * per
    values = np.empty((24, k), np.float32)  # 16 rows of A, 8 columns of B
    bits = values.view(np.uint32)
    width = 32 // per
    mask = np.uint32(0xFFFFFFFF) >> np.uint32(32 - width)
    b_count = a_count // 2
    for i in range(a_count + b_count):
        left = i < a_count
        table = a_table if left else b_table
        first = 4 * per * (i // 2) if left else 4 * per * (i - a_count)
        base = 8 * (i % 2) if left else 16
        r = rows[i]
        for t in range(32):
            word = registers[r, t]
            at = first + per * (t & 3)
            for e in range(per):
                code = (word >> np.uint32(width * e)) & mask
                if table.size > 0:
                    value = table[code]
                elif per == 1:
                    value = np.uint32(code & np.uint32(0xFFFFE000))
                else:
                    value = np.uint32(code << np.uint32(16))
                bits[base + (t >> 2), at + e] = value
    c = a_count + b_count
    result = np.empty((4, 32), np.float32)  # D may use C's registers in another order
    for v in range(4):
        old = registers[rows[c + v]].view(np.float32)
        for t in range(32):
            x = values[(t >> 2) + 8 * (v // 2)]
            y = values[16 + 2 * (t & 3) + v % 2]
            total = old[t]
            for i in range(k):
                total += x[i] * y[i]
            result[v, t] = total
    words = result.view(np.uint32)
    for v in range(4):
        r = rows[c + 4 + v]
        for t in range(32):
            registers[r, t] = words[v, t] if result[v, t] == result[v, t] else np.uint32(0x7FFFFFFF)
