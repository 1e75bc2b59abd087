"""Index keys into pages of 132-byte FP8 rows (caches/index_keys.py), as one kernel. In Triton itself, for every GPU."""

import triton
import triton.language as tl
from torch import Tensor

from dsv4.caches import index_keys as index_cache
from dsv4.caches import kv as caches
from dsv4.runtime import launch

DIMS, SCALE_BYTES = tl.constexpr(index_cache.DIMS), tl.constexpr(index_cache.SCALE_BYTES)
E4M3_MAX, LEAST = tl.constexpr(caches.E4M3_MAX), tl.constexpr(index_cache.LEAST)
ROWS = 8  # of a program


@triton.jit
def store_keys(out_ptr, y, slot, rows, page_rows, page_stride, column):
    """Keys y fp32 [n, 128] as the bytes of caches.index_keys.quantize_keys, to the row numbers slot int64 [n]; a number
    that is none drops its key. Byte by byte: pages may lie at any address."""
    # A key with a NaN or an infinity gets a NaN as its scale.
    largest = tl.max(tl.where(y == y, tl.abs(y), float("inf")), 1)
    target = tl.div_rn(tl.maximum(largest, LEAST), E4M3_MAX)
    bits = target.to(tl.int32, bitcast=True)
    exponent = tl.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 255)  # 2 ** ceil(log2(target))
    scale = tl.where(exponent == 255, 0x7FC00000, exponent << 23)
    inverse = tl.where(exponent == 255, float("nan"), ((254 - exponent) << 23).to(tl.float32, bitcast=True))
    packed = (y * inverse[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    kept = ((slot >= 0) & (slot < rows))[:, None]
    page = slot // page_rows
    place = slot - page * page_rows
    begin = out_ptr + page * page_stride
    tl.store((begin + place * DIMS)[:, None] + column[None, :], packed, mask=kept)
    byte = tl.arange(0, SCALE_BYTES)[None, :]
    at = (begin + page_rows * DIMS + place * SCALE_BYTES)[:, None] + byte
    tl.store(at, ((scale[:, None] >> (byte * 8)) & 255).to(tl.uint8), mask=kept)


@triton.jit(do_not_specialize=["count", "line", "rows", "page_rows", "page_stride"])
def index_keys(x_ptr, slots_ptr, out_ptr, count, line, rows, page_rows, page_stride, ROWS: tl.constexpr):
    """One program: ROWS of the keys x [count, 128], `line` elements apart."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIMS)
    x = tl.load(x_ptr + n.to(tl.int64)[:, None] * line + column[None, :], mask=(n < count)[:, None], other=0.0)
    slot = tl.load(slots_ptr + n, mask=n < count, other=-1).to(tl.int64)
    store_keys(out_ptr, x.to(tl.float32), slot, rows, page_rows, page_stride, column)


def write_keys(cache: index_cache.IndexCache, slots: Tensor, keys: Tensor) -> None:
    """Quantise keys [n, 128] into the row numbers slots [n]."""
    if len(keys):
        keys = keys if keys.stride(1) == 1 else keys.contiguous()
        launch.now(
            index_keys, (triton.cdiv(len(keys), ROWS),), keys, slots.contiguous(), cache.storage, len(keys),
            keys.stride(0), cache.rows, cache.rows_per_page, cache.page_stride, ROWS=ROWS, num_warps=4,
        )  # fmt: skip
