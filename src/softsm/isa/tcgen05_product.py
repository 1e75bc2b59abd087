"""Computes tcgen05.mma: reads, expands and scales the operands of one CTA or of a pair, and accumulates into D.

Scale factors of block scaling are in tensor memory: row i in lane i % 32 of column i / 32, copied to all four lane
quarters. Metadata of a sparse MMA (isa/sparsity.py) are in tensor memory too, in the lanes of D. Kinds f16 and tf32 use
one column: lane 16i + j (j < 8) has the first four chunks of lanes 16i + j and 16i + 8 + j in its halves, and lane
16i + 8 + j the others. The other kinds use two columns, with eight chunks each, and each lane has its own. If D is
folded, each part has its own copy of the metadata, and of A in tensor memory.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from softsm import formats
from softsm.engine import program as pg
from softsm.errors import Fault
from softsm.isa import sparsity, tensor_core
from softsm.isa.instruction_descriptor import InstructionDescriptor
from softsm.isa.tensor_product import address, multiply_add, multiply_into
from softsm.memory import swizzle
from softsm.memory import tensor_memory as tm
from softsm.memory.swizzle import Descriptor

FP4 = ("mxf4", "mxf4nvf4")
A_COLUMNS = 8  # A in tensor memory has 32 bytes along k in each lane, for every type
IDENTITY = np.arange(128)


class Product(NamedTuple):
    """One tcgen05.mma with all its operands decoded."""

    shape: InstructionDescriptor
    ws: bool
    pair: bool
    lane: int  # lane of D, and of A in tensor memory: 0, or 16 for the upper half of M = 64
    column: int  # column of D
    a: Descriptor | None
    a_column: int  # column of A in tensor memory, if `a` is None
    b: Descriptor
    add: bool
    scale_exponent: int = 0  # D * 2^-s
    skipped: tuple[int, ...] = ()  # disable-output-lane, 32 lanes in each
    scale_columns: tuple[int, int] = (0, 0)  # columns of the scale factors of A and B
    blocks: int = 0  # scale factors in a row
    zero_mask: int = 0  # zero-column mask descriptor of .ws
    metadata: int = 0  # column of the metadata of a sparse A

    @property
    def folded(self) -> bool:
        """Whether columns of D share lanes because there are fewer than 128 rows."""
        return self.ws or (self.pair and not self.shape.sparse)


def rows_of(p: Product) -> int:
    """Returns the number of rows of A and D in each CTA."""
    return p.shape.m // 2 if p.pair else p.shape.m


def zero_columns(mask: int, m: int, n: int) -> tuple[np.ndarray, int]:
    """Decodes the zero-column mask of .ws: (bool [n]: columns of B replaced by 0, shift of B's columns)."""
    shift = mask >> 56 & 63
    zero = np.zeros(n, bool)
    if not mask >> 39 & 1:
        return zero, shift
    ones, zeros = (mask >> 40 & 255) + 1, (mask >> 48 & 255) + 1
    parts = 128 // m
    for i in range(parts):
        start, first = mask >> 8 * i & 255, mask >> (32 + i) & 1
        position = np.arange(n // parts) + start + (0 if first else ones)
        zero[i * (n // parts) : (i + 1) * (n // parts)] = position % (ones + zeros) < ones
    return zero, shift


def scale_factors(
    cells: np.ndarray, column: int, rows: int, first: int, count: int, name: str, what: str
) -> np.ndarray:
    """Returns float32 [rows, count] from the bytes `first`.. of each row's cell. The four lane quarters must be
    equal."""
    block = cells[column : column + -(-rows // 32)]  # [columns, 128]
    data = block.reshape(len(block), 4, 32, 1).view(np.uint8)[..., first : first + count]  # [columns, 4, 32, count]
    if not (data == data[:, :1]).all():
        c, quarter, lane, _ = (int(x) for x in np.argwhere(data != data[:, :1])[0])
        raise Fault(
            "scale-copies",
            f"scale factors of {what}: column {column + c}, lane {lane} differs from its copy in lane "
            f"{lane + 32 * quarter}; all four lane quarters must hold them (tcgen05.cp.32x128b.warpx4 writes all)",
        )
    return formats.decode(data[:, 0].reshape(-1, count)[:rows], name)


def operand_b(p: Product, ctas: list) -> np.ndarray:
    """Returns B as float32 [n, k], from all CTAs of the pair."""
    s = p.shape
    own = s.n // len(ctas)
    zero, shift = zero_columns(p.zero_mask, s.m, s.n) if p.zero_mask else (None, 0)
    what = "operand B of tcgen05.mma"
    parts = []
    for cta in ctas:
        if s.kind in FP4:
            parts.append(tensor_core.shared_fp4(cta.shared, pg.SHARED_START, p.b, own, s.k, what))
        else:
            rows = own + shift
            parts.append(tensor_core.shared_rows(cta.shared, pg.SHARED_START, p.b, s.b_k_major, rows, s.k, s.b, what))
    b = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if zero is not None:
        b = b[shift:].copy()
        b[zero] = 0
    return np.negative(b) if s.negate else b


class LanePlan(NamedTuple):
    """The assignment of rows and columns of D to the lanes of one CTA."""

    rows: np.ndarray  # int [128]: the row of A that each lane multiplies, or -1
    lanes: np.ndarray  # int [rows]: the first lane of each row
    copies: bool  # whether several lanes use one row (D is folded)
    quarters: np.ndarray  # int64 [4, 3]: lane mask, first column, columns of each lane quarter


@cache
def lane_plan(m: int, n: int, folded: bool, lane: int) -> LanePlan:
    rows = np.full(128, -1)
    quarters = np.zeros((4, 3), np.int64)
    for x in tm.accumulator_blocks(m, n, folded):
        for i in range(x.rows):
            at = lane + x.lane + i
            rows[at] = x.m + i
            quarters[at // 32, 0] |= 1 << at % 32
            quarters[at // 32, 1:] = x.n, x.columns
    lanes = np.array([int(np.flatnonzero(rows == r)[0]) for r in range(m)])
    return LanePlan(rows, lanes, bool((rows >= 0).sum() > m), quarters)


def metadata_columns(shape: InstructionDescriptor, column: int) -> tuple[int, int]:
    """Returns the columns [first, end) of the metadata. column: the instruction's operand."""
    if shape.kind in ("f16", "tf32"):
        return column + shape.selector, column + shape.selector + 1
    return column, column + 2


def given_columns(p: Product, cta, plan: LanePlan) -> np.ndarray:
    """Returns the column of each stored element of a sparse A: int [128, k/2], by lanes, arbitrary in unused lanes."""
    first, end = metadata_columns(p.shape, p.metadata)
    codes = sparsity.tensor_codes(cta.tmem.cells[first:end])
    kind = sparsity.granularity(p.shape.a, p.shape.kind in FP4)
    used = np.flatnonzero(plan.rows >= 0)
    for part in used.reshape(-1, rows_of(p)):
        sparsity.check(codes[part], kind, sparsity.OF_TCGEN05)
    if len(used) < len(codes):
        codes[plan.rows < 0] = codes[used[0]]
    return sparsity.columns(codes, kind)


def operand_a(p: Product, cta, plan: LanePlan) -> np.ndarray:
    """Returns the logical A of one CTA, by lanes."""
    a = given_a(p, cta, plan)
    if not p.shape.sparse:
        return a
    given = a[:-2].reshape(p.shape.given, 128).T
    dense = sparsity.expand(given, given_columns(p, cta, plan))
    return tensor_core.to_lanes(dense.view(np.float32), IDENTITY, 4)


def given_a(p: Product, cta, plan: LanePlan) -> np.ndarray:
    """Returns the stored elements of A. Tensor memory has them by lanes: each lane multiplies the row that it
    stores."""
    s = p.shape
    if p.a is None:
        return tensor_core.tensor_lanes(cta.tmem.cells[p.a_column : p.a_column + A_COLUMNS], s.a, s.kind in FP4)
    what, rows = "operand A of tcgen05.mma", rows_of(p)
    if s.kind in FP4:
        values = tensor_core.shared_fp4(cta.shared, pg.SHARED_START, p.a, rows, s.given, what)
        a = tensor_core.to_lanes(values, plan.lanes, 4)
    else:
        a = tensor_core.shared_lanes(
            cta.shared, pg.SHARED_START, p.a, s.a_k_major, rows, s.given, s.a, plan.lanes, 4, what
        )
    if plan.copies:
        by_lane = a[:-2].reshape(s.given, 128)
        by_lane[:] = by_lane[:, plan.lanes[plan.rows]]
    return a


class Plan(NamedTuple):
    """The plan of a common MMA: f32 sums of elements of at least 8 bits, without scale factors."""

    a: tensor_core.Tile | None  # None: in tensor memory
    b: tensor_core.Tile
    lanes: LanePlan
    quarters: np.ndarray  # quarters of the lanes whose output is enabled: [CTAs * 4, 3]
    keep: float
    whole: bool  # whether A uses all lanes
    adds: bool  # whether it adds to an unscaled D and reads no part of D as an operand
    tiles: tuple[bytes, bytes] | None  # tiles of A and B for `gather_tiles`, or None if it does not support A
    at: int  # address of `quarters`


def plan_of(p: Product) -> Plan | None:
    """Returns the plan of a common MMA, or None."""
    s = p.shape
    if s.d != "f32" or s.scale or s.sparse or p.zero_mask or s.negate or min(formats.BITS[s.a], formats.BITS[s.b]) < 8:
        return None
    lanes_of = lane_plan(rows_of(p), s.n, p.folded, p.lane)
    members = 2 if p.pair else 1
    quarters = np.tile(lanes_of.quarters, (members, 1))
    if any(p.skipped):
        quarters[:, 0] &= ~np.array(p.skipped, np.int64)
    a = None
    if p.a is not None:
        a = tensor_core.tile(p.a, s.a_k_major, rows_of(p), s.k, s.a, lanes_of.lanes, True)
    b = tensor_core.tile(p.b, s.b_k_major, s.n // members, s.k, s.b, np.arange(s.k), False)
    whole = bool((lanes_of.rows >= 0).all())
    columns = p.column, p.column + int(lanes_of.quarters[:, 2].max())
    apart = a is not None or p.a_column >= columns[1] or p.a_column + A_COLUMNS <= columns[0]
    keep = 2.0**-p.scale_exponent if p.add else 0.0
    tiles = None
    if a is not None and not lanes_of.copies:
        tiles = a.numbers(), b.numbers()
    elif a is None and s.a in ("f16", "bf16"):
        tiles = tensor_core.tensor_numbers(p.a_column, s.a), b.numbers()
    return Plan(a, b, lanes_of, quarters, keep, whole, apart and keep == 1, tiles, address(quarters))


def check_tiles(p: Product, cta) -> None:
    """Checks that the operands lie within the CTA's shared memory."""
    s = p.shape
    for name, descriptor, k_major, rows, element in (
        ("B", p.b, s.b_k_major, s.n // (2 if p.pair else 1), s.b),
        ("A", p.a, s.a_k_major, rows_of(p), s.a),
    ):
        if descriptor is not None:
            what, per = f"operand {name} of tcgen05.mma", tensor_core.chunk_elements(element)
            size = (rows, s.k // per) if k_major else (s.k, -(-rows // per))
            swizzle.locate(cta.shared, pg.SHARED_START, descriptor, k_major, *size, what)


def multiply(p: Product, plan: Plan, ctas: list) -> None:
    """Computes the MMA by its plan. Its operands have been checked to lie in shared memory."""
    s = p.shape
    own = s.n // len(ctas)
    b = np.empty((-(-own // 16) * 16 * len(ctas), s.k), np.uint32)  # MN-major chunks may reach past the last row
    for i, cta in enumerate(ctas):
        plan.b.read(cta.shared, b[own * i :])
    for i, cta in enumerate(ctas):
        tmem = cta.tmem
        if plan.a is None:
            a = tensor_core.tensor_lanes(tmem.cells[p.a_column : p.a_column + A_COLUMNS], s.a)
        else:
            a = (np.empty if plan.whole else np.zeros)((s.k, 128), np.uint32)
            plan.a.read(cta.shared, a)
            if plan.lanes.copies:
                a[:] = a[:, plan.lanes.lanes[plan.lanes.rows]]
        multiply_into(tmem.address, 4 * p.column, plan.quarters[4 * i : 4 * i + 4], a, b, plan.keep)


def perform(p: Product, ctas: list) -> None:
    """Computes the whole MMA: reads the operands, multiplies, and updates D in every CTA."""
    s = p.shape
    plan = plan_of(p)
    if plan is not None:
        for cta in ctas:
            check_tiles(p, cta)
        multiply(p, plan, ctas)
        return
    b_all = operand_b(p, ctas)
    own = lane_plan(rows_of(p), s.n, p.folded, p.lane)
    for index, cta in enumerate(ctas):
        cells = cta.tmem.cells
        a, b = operand_a(p, cta, own), b_all
        quarters = own.quarters
        if any(p.skipped):
            quarters = quarters.copy()
            quarters[:, 0] &= ~np.array(p.skipped[4 * index : 4 * index + 4], np.int64)
        if not s.scale:
            multiply_plainly(p, cta, cells, a, b, own, quarters)
            continue
        a_scales, b_scales = both_scales(p, cells, own)
        wide = tensor_core.wide_rows(b_scales)[:, None] | tensor_core.wide_rows(a_scales)
        exact = cells.copy() if wide.any() else None
        values = a[:-2].reshape(s.k, 128).view(np.float32).T
        narrow = tensor_core.to_lanes(tensor_core.scaled(values, a_scales), IDENTITY, 4)
        multiply_plainly(p, cta, cells, narrow, tensor_core.scaled(b, b_scales), own, quarters)
        if exact is not None:
            # This changes only sums of wide rows.
            left = tensor_core.scaled(values, a_scales, np.float64).T
            multiply_plainly(p, cta, exact, left, tensor_core.scaled(b, b_scales, np.float64), own, quarters)
            for q, (_, n, count) in enumerate(quarters.tolist()):
                part = slice(p.column, p.column + count), slice(32 * q, 32 * q + 32)
                np.copyto(cells[part], exact[part], where=wide[n : n + count, 32 * q : 32 * q + 32])


def multiply_plainly(p: Product, cta, cells: np.ndarray, a: np.ndarray, b: np.ndarray, own: LanePlan, quarters) -> None:
    """Computes D += A B in one CTA with scaled operands: A by lanes, or float64 [k, 128] and [n, k]."""
    s = p.shape
    aside = None
    if s.sparse and not np.isfinite(b).all():
        left = a if b.dtype == np.float64 else a[:-2].reshape(s.k, 128).view(np.float32)
        b = b.copy()
        aside = sparsity.set_aside(left.T, given_columns(p, cta, own), b)
    if b.dtype == np.float64:
        update(cells, b @ a, p, quarters)
    elif s.d == "f32":
        keep = 2.0**-p.scale_exponent if p.add else 0.0
        multiply_add(cells.reshape(-1, 32), 4 * p.column, quarters, a, b, keep)
    else:
        product = np.empty((s.n * 4, 32), np.uint32)
        multiply_add(product, 0, np.array([[pg.ALL, 0, s.n]] * 4), a, b, 0.0)
        update(cells, product.view(np.float32).reshape(s.n, 128), p, quarters)
    if aside is not None:
        update(cells, aside, p._replace(add=True, scale_exponent=0), quarters)


def both_scales(p: Product, cells: np.ndarray, plan: LanePlan) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scale factors of A by lanes [128, blocks], and of B [n, blocks]."""
    s = p.shape
    b_scales = scale_factors(cells, p.scale_columns[1], s.n, s.b_scale_id, p.blocks, s.scale, "B")
    a_scales = scale_factors(cells, p.scale_columns[0], rows_of(p), s.a_scale_id, p.blocks, s.scale, "A")
    return np.where(plan.rows[:, None] < 0, np.float32(1), a_scales[plan.rows]), b_scales


def update(cells: np.ndarray, product: np.ndarray, p: Product, quarters: np.ndarray) -> None:
    """Adds product [n, 128 lanes] to D in the cases without a fused kernel: f16 and s32, or float64 products."""
    s = p.shape
    for q, (mask, n, count) in enumerate(quarters.tolist()):
        d = cells[p.column : p.column + count, 32 * q : 32 * q + 32]
        fresh = product[n : n + count, 32 * q : 32 * q + 32]
        fresh = tensor_core.accumulate(d, fresh, s.d, p.add, p.scale_exponent, s.saturate)
        np.copyto(d, fresh, where=np.array([mask >> i & 1 for i in range(32)], bool))
