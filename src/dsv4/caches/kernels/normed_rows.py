"""One Triton kernel for every GPU that prepares rows for attention: RMSNorm, RoPE, and the store at the row's place.

    y = x / rms(x) * weight        each of the two if requested
    y = RoPE(y)                    the interleaved pairs of the last columns, if requested
    y -> out, line after line; or the row `slot` of a pool, plain or packed (dsv4.caches.formats)

Arithmetic is fp32, rounded once.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from dsv4.caches.formats import format_of
from dsv4.caches.kernels.pack import PoolRows
from dsv4.caches.pages import PackedRows
from dsv4.runtime import calls
from dsv4.runtime.program import Launch

ROWS = 4  # rows per program


@triton.jit(do_not_specialize=["line", "rows", "heads", "positions"])
def normed_rows(
    x_ptr,
    weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    to,
    slots_ptr,
    eps,
    line,
    rows,
    heads,
    positions,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Process ROWS rows of x [rows, D], `line` times UNIT elements apart, of which `heads` neighbours share a position.

    R: columns that are rotated; WIDE: D rounded up to a power of two. A slot outside of the pool drops its row;
    an invalid position counts as the nearest. FORMAT: of the pool; None: rows go to lines.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDE)
    here = row < rows
    inside = here[:, None] & (column < D)[None, :]
    source = x_ptr + row.to(tl.int64)[:, None] * line * UNIT
    x = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
    factor = tl.full([ROWS], 1.0, tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    y = x * factor[:, None]
    if WEIGHT:
        y *= tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    if R > 0:
        # The other element of each pair is read again, from the cache, so lanes exchange no data.
        turned = (column >= D - R) & (column < D)
        other = column ^ 1
        z = tl.load(source + other[None, :], mask=inside & turned[None, :], other=0.0).to(tl.float32) * factor[:, None]
        if WEIGHT:
            z *= tl.load(weight_ptr + other, mask=turned, other=0.0).to(tl.float32)[None, :]
        position = tl.load(positions_ptr + row // heads, mask=here, other=0).to(tl.int64)
        position = tl.minimum(tl.maximum(position, 0), positions - 1)
        angle = cos_sin_ptr + position[:, None] * R + ((column - (D - R)) // 2)[None, :]
        turned = here[:, None] & turned[None, :]
        cos = tl.load(angle, mask=turned, other=1.0)
        sin = tl.load(angle + R // 2, mask=turned, other=0.0)
        y = y * cos + z * tl.where(column % 2 == 0, -1.0, 1.0)[None, :] * sin
    if FORMAT is None:
        at = row.to(tl.int64)[:, None] * D + column[None, :]
        tl.store(to.ptr + at, y.to(to.ptr.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots_ptr + row, mask=here, other=-1).to(tl.int64)
        kept = (slot >= 0) & (slot < to.rows)
        page = (slot // to.page_rows) * to.page_stride
        place = slot % to.page_rows
        if FORMAT.coded == 0:
            at = page + place * to.row_stride
            tl.store(to.ptr + at[:, None] + column[None, :], y.to(to.ptr.dtype.element_ty), mask=inside & kept[:, None])
        else:
            FORMAT.store(to.ptr, y, page, place, to.page_rows, column, kept, FORMAT)


def normed(
    x: Tensor,
    *,
    eps: float | None = None,
    weight: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    to: Tensor | PackedRows | None = None,
    slots: Tensor | None = None,
    launch: Callable[[Launch], None] = calls.launch,
) -> Tensor | None:
    """Norm x [N, D] or contiguous [N, H, D] -> a contiguous tensor, or None: the rows [N, D] are now in pool ``to``.

    eps: of the norm, None = no norm. rope: (cos_sin fp32 [positions, r], positions [N]).
    """
    n, d = x.shape[0], x.shape[-1]
    rows = x.numel() // d if n else 0
    cos_sin, positions = rope if rope is not None else (x, x)
    out = x.new_empty(x.shape) if to is None else None
    pool = PoolRows.of(to) if out is None else PoolRows(out, 0, 1, 0, 0)
    if rows:
        unit = 8 if x.stride(-2) % 8 == 0 else 1  # where the kernel knows it, it loads 16 bytes at once
        arguments = [
            x, x if weight is None else weight, cos_sin, positions, pool, x if slots is None else slots,
            0.0 if eps is None else float(eps), x.stride(-2) // unit, rows, rows // n, cos_sin.shape[0],
        ]  # fmt: skip
        constants = dict(
            D=d,
            WIDE=triton.next_power_of_2(d),
            UNIT=unit,
            R=0 if rope is None else cos_sin.shape[1],
            NORM=eps is not None,
            WEIGHT=weight is not None,
            FORMAT=None if to is None else format_of(to),
            ROWS=ROWS,
            num_warps=4,
        )
        launch(Launch(normed_rows, (triton.cdiv(rows, ROWS),), arguments, constants))
    return out
