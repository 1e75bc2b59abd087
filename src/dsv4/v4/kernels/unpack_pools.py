"""Convert packed rows to bf16, for calls whose queries list every row many times.

Attention that reads packed rows converts a row for every query and tile of 64 heads that lists it. If lists are far
longer in sum than the pool, this kernel converts it once, and attention reads plain rows. A program has 32 rows.
"""

from dataclasses import replace
from typing import Any

import torch

from dsv4.caches import kv as caches
from dsv4.caches.kernels.unpack import EXACT
from dsv4.caches.pages import PackedRows
from dsv4.kernels import dependent
from dsv4.kernels.compat import gl, gluon
from dsv4.runtime.program import Program
from dsv4.v4.kernels.pool_rows import entries, load_codes, load_words, rows_and_scales
from dsv4.v4.kernels.prepare import pool_sizes, unit_of
from dsv4.v4.problem import V4Problem

LISTED = 12  # times that a row must be listed for its conversion ahead of time to pay
ROWS = 32  # rows of a program
WARPS = 8
THREADS = 8  # threads that read 64 values of a row


@gluon.jit
def v4_unpack(out_ptr, pool, UNIT: gl.constexpr, FORMAT: gl.constexpr, ROWS: gl.constexpr, THREADS: gl.constexpr):
    """Write out, bf16 [rows, 512], in pairs. The next grid starts next to the last programs when little is left to
    store."""
    # Neighbouring threads write adjacent 16 bytes: otherwise half sectors would be written twice.
    W: gl.constexpr = gl.BlockedLayout([1, 4], [32 // THREADS, THREADS], [gl.num_warps(), 1], [1, 0])
    number = gl.program_id(0) * ROWS + entries(W, ROWS)
    data, there, scales = rows_and_scales(pool, number, UNIT, FORMAT)
    out_ptr = out_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    LAST: gl.constexpr = FORMAT.coded_panels - 6  # panels of codes behind the first six; the rest of the row is bf16
    x = load_codes(pool.ptr, data, there, 0, 4, UNIT, FORMAT, THREADS)
    y = load_codes(pool.ptr, data, there, 4, 2, UNIT, FORMAT, THREADS)
    z = load_codes(pool.ptr, data, there, 6, LAST, UNIT, FORMAT, THREADS)
    if LAST == 1:
        rest = load_words(pool.ptr, data, there, FORMAT.code_bytes // 4, 32, UNIT)
    put(out_ptr, number, there, FORMAT.unpack(x, scales, 0, EXACT, FORMAT), 0)
    put(out_ptr, number, there, FORMAT.unpack(y, scales, 4, EXACT, FORMAT), 4)
    put(out_ptr, number, there, FORMAT.unpack(z, scales, 6, EXACT, FORMAT), 6)
    dependent.launch_dependents()
    if LAST == 1:
        column = FORMAT.coded // 2 + gl.arange(0, 32, layout=gl.SliceLayout(0, W))
        gl.store(
            out_ptr + number.to(gl.int64)[:, None] * 256 + column[None, :],
            rest,
            mask=there[:, None],
            eviction_policy="evict_last",
        )


@gluon.jit
def put(out_ptr, number, there, x, FIRST: gl.constexpr):
    """Store panels of 64 values from FIRST on, in pairs: x [64, panels, 32]."""
    L: gl.constexpr = x.type.layout
    R: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    number = gl.convert_layout(number, R).to(gl.int64)[:, None, None]
    there = gl.convert_layout(there, R)[:, None, None]
    panel = FIRST + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    pair = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    place = out_ptr + number * 256 + panel[None, :, None] * 32 + pair[None, None, :]
    gl.store(place, x, mask=there, eviction_policy="evict_last")  # attention reads it next


def pays(p: V4Problem) -> bool:
    """Return whether, by shapes alone, the packed pools are smaller than q and than what the queries may list."""
    if p.deterministic:  # how many queries there are is not a property of a query
        return False
    rows = sum(caches.pool_size(pool) for pool in _pools(p).values())
    listed = p.batch * p.max_seqlen_k * -(-p.q_heads // 64)
    return 0 < rows <= min(listed // LISTED, p.batch * p.q_heads)


def unpacked(p: V4Problem, program: Program) -> V4Problem:
    """Return the problem with plain rows in place of packed rows, which the program converts first."""
    plain: dict[str, Any] = {name: _unpacked(pool, program) for name, pool in _pools(p).items()}
    if _one_pool(p):
        plain["compressed"] = plain["window"]
    return replace(p, **plain)


def _pools(p: V4Problem) -> dict[str, PackedRows]:
    """Return each pool of packed rows once."""
    names = ("window",) if _one_pool(p) else ("window", "compressed")
    return {name: pool for name in names if isinstance(pool := getattr(p, name), PackedRows)}


def _one_pool(p: V4Problem) -> bool:
    """Return whether window and compressed rows lie in the same pages."""
    a, b = p.window, p.compressed
    return (
        p.same_pools
        and isinstance(a, PackedRows)
        and isinstance(b, PackedRows)
        and (a.rows_per_page, a.page_stride, a.format) == (b.rows_per_page, b.page_stride, b.format)
    )


def _unpacked(cache: PackedRows, program: Program):
    pool = pool_sizes(program, cache)
    shape = (pool.rows // cache.rows_per_page, cache.rows_per_page, 512)
    out = program.workspace("rows in bf16", shape, torch.bfloat16)
    constants = dict(UNIT=unit_of(cache), FORMAT=cache.format, ROWS=ROWS, THREADS=THREADS)
    grid = (-(-pool.rows // ROWS),)
    program.launch(v4_unpack, grid, dict(pool=pool, out_ptr=out), **constants, num_warps=WARPS)
    return out
