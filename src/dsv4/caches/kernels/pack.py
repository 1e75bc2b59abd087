"""Triton code for every GPU that writes rows to packed pages: a store function for each format, and a kernel that
writes rows.

The arguments of a store function are (out_ptr, y fp32 [n, values], page int64 [n], place int64 [n], page_rows, column,
kept, FORMAT): `page` is the first byte of each row's page, `place` its number there, `column` arange(values); rows that
are not `kept` are dropped. It writes byte by byte: pages may lie at any address.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dsv4.caches import formats
from dsv4.runtime import calls
from dsv4.runtime.program import Launch, is_pages

E4M3_MAX = tl.constexpr(formats.E4M3_MAX)
E2M1_MAX = tl.constexpr(formats.E2M1_MAX)
MIN_SCALE, LEAST = tl.constexpr(formats.Fp8Rows.MIN_SCALE), tl.constexpr(formats.Fp8Keys.LEAST)
LEAST_MXFP8, LEAST_NVFP4 = tl.constexpr(formats.Mxfp8Rows.LEAST), tl.constexpr(formats.Nvfp4Rows.LEAST)


class PoolRows(NamedTuple):
    """Target of rows: the memory of a pool, its rows, those of a page; strides of pages and of rows, in elements (rows
    of bytes: 0)."""

    ptr: Any
    rows: Any
    page_rows: Any
    page_stride: Any
    row_stride: Any

    @classmethod
    def of(cls, pool: Any) -> "PoolRows":
        """Return the PoolRows of a pool: packed rows, or [pages, rows of a page, values]."""
        if is_pages(pool):
            return cls(pool.storage, pool.rows, pool.rows_per_page, pool.page_stride, 0)
        return cls(pool, pool.shape[0] * pool.shape[1], pool.shape[1], pool.stride(0), pool.stride(1))


@triton.jit
def data_at(page, place, FORMAT: tl.constexpr):
    """Return the first byte of a row's data."""
    return page + place * FORMAT.data_step


@triton.jit
def scales_at(page, place, page_rows, FORMAT: tl.constexpr):
    """Return the first byte of a row's scales."""
    if FORMAT.interleaved:
        return page + FORMAT.data_bytes + place * FORMAT.scale_step
    else:
        return page + page_rows * FORMAT.data_bytes + place * FORMAT.scale_step


@triton.jit
def ue8m0(x):
    """Return the exponent byte of 2 ** ceil(log2(x)), for positive normal fp32; 255, which is NaN, for inf and NaN."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 255)


@triton.jit
def inverse_of(exponent):
    """Return 1 / 2 ** (exponent - 127)."""
    return tl.where(exponent == 255, float("nan"), ((254 - exponent) << 23).to(tl.float32, bitcast=True))


@triton.jit
def store_fp8_row(out_ptr, y, page, place, page_rows, column, kept, FORMAT: tl.constexpr):
    """Store the bytes that formats.Fp8Rows.quantize makes of each row."""
    ROWS: tl.constexpr = y.shape[0]
    WIDE: tl.constexpr = y.shape[1]
    GROUP: tl.constexpr = FORMAT.group
    CODED: tl.constexpr = FORMAT.coded
    data = data_at(page, place, FORMAT)
    scales = scales_at(page, place, page_rows, FORMAT)
    # A group with a NaN or an infinity gets the scale 255, which is NaN.
    size = tl.where(y == y, tl.abs(y), float("inf"))
    largest = tl.max(tl.reshape(size, [ROWS, WIDE // GROUP, GROUP]), 2)  # [ROWS, 8]; the last group is the bf16 part
    scale = ue8m0(tl.maximum(tl.div_rn(largest, E4M3_MAX), MIN_SCALE))
    small = tl.reshape(tl.reshape(y, [ROWS, WIDE // GROUP, GROUP]) * inverse_of(scale)[:, :, None], [ROWS, WIDE])
    packed = small.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    kept = kept[:, None]
    tl.store(out_ptr + data[:, None] + column[None, :], packed, mask=kept & (column < CODED)[None, :])
    plain = y.to(tl.bfloat16).to(tl.uint16, bitcast=True)
    at = out_ptr + data[:, None] + (CODED + (column - CODED) * 2)[None, :]
    tl.store(at, (plain & 255).to(tl.uint8), mask=kept & (column >= CODED)[None, :])
    tl.store(at + 1, (plain >> 8).to(tl.uint8), mask=kept & (column >= CODED)[None, :])
    group = tl.arange(0, WIDE // GROUP)
    scale = tl.where(group[None, :] < CODED // GROUP, scale, 0)
    tl.store(out_ptr + scales[:, None] + group[None, :], scale.to(tl.uint8), mask=kept)


@triton.jit
def largest_of_groups(y, GROUP: tl.constexpr):
    """Return the largest size per group, [n, groups]; infinity for a group with a NaN."""
    size = tl.where(y == y, tl.abs(y), float("inf"))
    return tl.max(tl.reshape(size, [y.shape[0], y.shape[1] // GROUP, GROUP]), 2)


@triton.jit
def store_codes_and_scales(out_ptr, codes, scales, page, place, page_rows, kept, FORMAT: tl.constexpr):
    """Store rows that are only codes: codes uint8 [n, data bytes], scales uint8 [n, scale bytes]."""
    byte = tl.arange(0, FORMAT.data_bytes)[None, :]
    tl.store(out_ptr + data_at(page, place, FORMAT)[:, None] + byte, codes, mask=kept[:, None])
    byte = tl.arange(0, FORMAT.scale_bytes)[None, :]
    tl.store(out_ptr + scales_at(page, place, page_rows, FORMAT)[:, None] + byte, scales, mask=kept[:, None])


@triton.jit
def store_mxfp8_row(out_ptr, y, page, place, page_rows, column, kept, FORMAT: tl.constexpr):
    """Store the bytes that formats.Mxfp8Rows.quantize makes of each row."""
    largest = largest_of_groups(y, FORMAT.group)
    scale = ue8m0(tl.div_rn(tl.maximum(largest, LEAST_MXFP8), E4M3_MAX))
    small = tl.reshape(y, [y.shape[0], FORMAT.groups, FORMAT.group]) * inverse_of(scale)[:, :, None]
    codes = tl.reshape(small, [y.shape[0], FORMAT.values]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    store_codes_and_scales(out_ptr, codes, scale.to(tl.uint8), page, place, page_rows, kept, FORMAT)


@triton.jit
def e2m1(x):
    """Convert fp32 numbers to int32 codes, as formats.encode_e2m1 does."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    return code + (size > 5.0).to(tl.int32) + ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def store_nvfp4_row(out_ptr, y, page, place, page_rows, column, kept, FORMAT: tl.constexpr):
    """Store the bytes that formats.Nvfp4Rows.quantize makes of each row."""
    largest = largest_of_groups(y, FORMAT.group)
    target = tl.minimum(tl.maximum(tl.div_rn(largest, E2M1_MAX), LEAST_NVFP4), E4M3_MAX)
    scale = target.to(tl.float8e4nv)
    value = scale.to(tl.float32)[:, :, None]
    groups = tl.reshape(y, [y.shape[0], FORMAT.groups, FORMAT.group])
    # Divide, because multiplying by a reciprocal would move ties.
    groups, value = tl.broadcast(groups, value)
    codes = tl.reshape(e2m1(tl.div_rn(groups, value)), [y.shape[0], FORMAT.data_bytes, 2])
    low, high = tl.split(codes)
    # A group with a NaN or an infinity gets the scale 127, which is NaN.
    scale = tl.where(largest < float("inf"), scale.to(tl.uint8, bitcast=True), 127).to(tl.uint8)
    store_codes_and_scales(out_ptr, (low | (high << 4)).to(tl.uint8), scale, page, place, page_rows, kept, FORMAT)


@triton.jit
def store_mxfp4_key(out_ptr, y, page, place, page_rows, column, kept, FORMAT: tl.constexpr):
    """Store the bytes that mxfp4_keys.Mxfp4Keys.quantize makes of each key."""
    largest = largest_of_groups(y, FORMAT.group)
    scale = ue8m0(tl.div_rn(tl.maximum(largest, FORMAT.LEAST), E2M1_MAX))
    small = tl.reshape(y, [y.shape[0], FORMAT.groups, FORMAT.group]) * inverse_of(scale)[:, :, None]
    low, high = tl.split(tl.reshape(e2m1(small), [y.shape[0], FORMAT.data_bytes, 2]))
    codes = (low | (high << 4)).to(tl.uint8)
    store_codes_and_scales(out_ptr, codes, scale.to(tl.uint8), page, place, page_rows, kept, FORMAT)


@triton.jit
def store_fp8_key(out_ptr, y, page, place, page_rows, column, kept, FORMAT: tl.constexpr):
    """Store the bytes that formats.Fp8Keys.quantize makes of each key."""
    # A key with a NaN or an infinity gets a NaN as its scale.
    largest = tl.max(tl.where(y == y, tl.abs(y), float("inf")), 1)
    exponent = ue8m0(tl.div_rn(tl.maximum(largest, LEAST), E4M3_MAX))
    scale = tl.where(exponent == 255, 0x7FC00000, exponent << 23)
    packed = (y * inverse_of(exponent)[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    kept = kept[:, None]
    tl.store(out_ptr + data_at(page, place, FORMAT)[:, None] + column[None, :], packed, mask=kept)
    byte = tl.arange(0, FORMAT.scale_bytes)[None, :]
    at = out_ptr + scales_at(page, place, page_rows, FORMAT)[:, None] + byte
    tl.store(at, ((scale[:, None] >> (byte * 8)) & 255).to(tl.uint8), mask=kept)


@triton.jit
def store_packed(to, y, slot, column, FORMAT: tl.constexpr):
    """Store rows y fp32 [n, values] at the row numbers slot int64 [n] of PoolRows; an invalid number drops its row."""
    page = slot // to.page_rows
    place = slot - page * to.page_rows
    kept = (slot >= 0) & (slot < to.rows)
    FORMAT.store(to.ptr, y, page * to.page_stride, place, to.page_rows, column, kept, FORMAT)


@triton.jit(do_not_specialize=["count", "line"])
def pack_rows(x_ptr, slots_ptr, to, count, line, FORMAT: tl.constexpr, ROWS: tl.constexpr):
    """Store ROWS of the rows x [count, values], `line` elements apart."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, FORMAT.values)
    x = tl.load(x_ptr + n.to(tl.int64)[:, None] * line + column[None, :], mask=(n < count)[:, None], other=0.0)
    slot = tl.load(slots_ptr + n, mask=n < count, other=-1).to(tl.int64)
    store_packed(to, x.to(tl.float32), slot, column, FORMAT)


def write_rows(cache: Any, slots: Tensor, rows: Tensor, launch: Callable[[Launch], None] = calls.launch) -> None:
    """Quantise rows [n, values] into the row numbers slots [n] of packed rows (caches/pages.py)."""
    if len(rows):
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        each = max(4, 1024 // cache.format.values)  # rows per program
        arguments = [rows, slots.contiguous(), PoolRows.of(cache), len(rows), rows.stride(0)]
        constants = dict(FORMAT=cache.format, ROWS=each, num_warps=4)
        launch(Launch(pack_rows, (triton.cdiv(len(rows), each),), arguments, constants))
