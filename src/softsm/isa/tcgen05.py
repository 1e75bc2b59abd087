"""tcgen05.mma: D = A*B (+ D) with D in tensor memory, A in shared or tensor memory, B in shared memory.

One thread starts the product for the whole CTA, or for a pair of CTAs (cta_group::2): each CTA of a pair holds its half
of the rows of A and D and supplies half of the columns of B. With block scaling, scale factors lie in tensor memory,
row i in lane i % 32 of column i / 32, copied to all four lane quarters.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from softsm import formats
from softsm.engine import program as pg
from softsm.errors import Fault
from softsm.isa import tensor_copy, tensor_core
from softsm.isa import tensor_memory as isa
from softsm.isa.instruction_descriptor import BLOCK_SCALED, K_OF_KIND, InstructionDescriptor
from softsm.isa.instruction_descriptor import decode as decode_instruction
from softsm.isa.mbarriers import lanes, located
from softsm.isa.tensor_product import multiply_add, multiply_into
from softsm.memory import swizzle
from softsm.memory import tensor_memory as tm
from softsm.memory.swizzle import Descriptor
from softsm.ptx.ast import Address, Imm, Vector

FP4 = ("mxf4", "mxf4nvf4")
A_COLUMNS = 8  # A in tensor memory is 32 bytes of k in each lane, whatever the type
IDENTITY = np.arange(128)
KNOWN_PRODUCTS = 4096  # decoded operands that one instruction keeps


class Product(NamedTuple):
    """One tcgen05.mma with all its operands decoded."""

    shape: InstructionDescriptor
    ws: bool
    pair: bool
    lane: int  # of D, and of A in tensor memory: 0, or 16 for the upper half of M = 64
    column: int  # of D
    a: Descriptor | None
    a_column: int  # of A in tensor memory, where `a` is None
    b: Descriptor
    add: bool
    scale_exponent: int = 0  # D * 2^-s
    skipped: tuple[int, ...] = ()  # disable-output-lane, 32 lanes in each
    scale_columns: tuple[int, int] = (0, 0)  # of the scale factors of A and B
    blocks: int = 0  # scale factors in a row
    zero_mask: int = 0  # zero-column mask descriptor of .ws


def rows_of(p: Product) -> int:
    """Rows of A and D in each CTA."""
    return p.shape.m // 2 if p.pair else p.shape.m


def zero_columns(mask: int, m: int, n: int) -> tuple[np.ndarray, int]:
    """The zero-column mask of .ws: (bool [n]: use 0 instead of this column of B, how far B's columns are shifted)."""
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
    """float32 [rows, count]: bytes first.. of each row's cell. The four lane quarters must hold the same."""
    block = cells[column : column + -(-rows // 32)]  # [columns, 128]
    data = block.reshape(len(block), 4, 32, 1).view(np.uint8)[
        ..., first : first + count
    ]  # [columns, 4, 32, count]
    if not (data == data[:, :1]).all():
        c, quarter, lane, _ = (int(x) for x in np.argwhere(data != data[:, :1])[0])
        raise Fault(
            "scale-copies",
            f"scale factors of {what}: column {column + c}, lane {lane} differs from its copy in lane "
            f"{lane + 32 * quarter}; all four lane quarters must hold them (tcgen05.cp.32x128b.warpx4 writes all)",
        )
    return formats.decode(data[:, 0].reshape(-1, count)[:rows], name)


def operand_b(p: Product, ctas: list) -> np.ndarray:
    """B as float32 [n, k], gathered from the CTAs that hold it."""
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
            parts.append(
                tensor_core.shared_rows(cta.shared, pg.SHARED_START, p.b, s.b_k_major, rows, s.k, s.b, what)
            )
    b = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if zero is not None:
        b = b[shift:].copy()
        b[zero] = 0
    return np.negative(b) if s.negate else b


class LanePlan(NamedTuple):
    """How the lanes of one CTA share a product."""

    rows: np.ndarray  # int [128]: the row of A each lane multiplies, -1 for none
    lanes: np.ndarray  # int [rows]: the first lane of each row
    copies: bool  # do several lanes use one row (columns of D on top of each other)?
    quarters: np.ndarray  # int64 [4, 3]: lane mask, first column, columns of each lane quarter


@cache
def lane_plan(m: int, n: int, ws: bool, pair: bool, lane: int) -> LanePlan:
    rows = np.full(128, -1)
    quarters = np.zeros((4, 3), np.int64)
    for x in tm.accumulator_blocks(m, n, ws, pair):
        for i in range(x.rows):
            at = lane + x.lane + i
            rows[at] = x.m + i
            quarters[at // 32, 0] |= 1 << at % 32
            quarters[at // 32, 1:] = x.n, x.count
    lanes = np.array([int(np.flatnonzero(rows == r)[0]) for r in range(m)])
    return LanePlan(rows, lanes, bool((rows >= 0).sum() > m), quarters)


def operand_a(p: Product, cta, plan: LanePlan) -> np.ndarray:
    """A of one CTA by lanes. Tensor memory already holds it so: each lane multiplies the row it stores."""
    s = p.shape
    if p.a is None:
        return tensor_core.tensor_lanes(
            cta.tmem.cells[p.a_column : p.a_column + A_COLUMNS], s.a, s.kind in FP4
        )
    what, rows = "operand A of tcgen05.mma", rows_of(p)
    if s.kind in FP4:
        values = tensor_core.shared_fp4(cta.shared, pg.SHARED_START, p.a, rows, s.k, what)
        a = tensor_core.to_lanes(values, plan.lanes, 4)
    else:
        a = tensor_core.shared_lanes(
            cta.shared, pg.SHARED_START, p.a, s.a_k_major, rows, s.k, s.a, plan.lanes, 4, what
        )
    if plan.copies:
        by_lane = a[:-2].reshape(s.k, 128)
        by_lane[:] = by_lane[:, plan.lanes[plan.rows]]
    return a


class Plan(NamedTuple):
    """How the usual product is done: f32 sums of elements of 8 bits and more, without scale factors."""

    a: tensor_core.Tile | None  # None: in tensor memory
    b: tensor_core.Tile
    lanes: LanePlan
    quarters: np.ndarray  # of the lanes, without those whose output is disabled; [CTAs * 4, 3]
    keep: float
    whole: bool  # does A fill all lanes?


def plan_of(p: Product) -> Plan | None:
    """None for the other products."""
    s = p.shape
    if s.d != "f32" or s.scale or p.zero_mask or s.negate or min(formats.BITS[s.a], formats.BITS[s.b]) < 8:
        return None
    lanes_of = lane_plan(rows_of(p), s.n, p.ws, p.pair, p.lane)
    members = 2 if p.pair else 1
    quarters = np.tile(lanes_of.quarters, (members, 1))
    if any(p.skipped):
        quarters[:, 0] &= ~np.array(p.skipped, np.int64)
    a = None
    if p.a is not None:
        a = tensor_core.tile(p.a, s.a_k_major, rows_of(p), s.k, s.a, lanes_of.lanes, True)
    b = tensor_core.tile(p.b, s.b_k_major, s.n // members, s.k, s.b, np.arange(s.k), False)
    whole = bool((lanes_of.rows >= 0).all())
    return Plan(a, b, lanes_of, quarters, 2.0**-p.scale_exponent if p.add else 0.0, whole)


def check_tiles(p: Product, cta) -> None:
    """Do the operands lie within the CTA's shared memory?"""
    s = p.shape
    for name, descriptor, k_major, rows, element in (("B", p.b, s.b_k_major, s.n // (2 if p.pair else 1), s.b),
                                                     ("A", p.a, s.a_k_major, rows_of(p), s.a)):  # fmt: skip
        if descriptor is not None:
            what, per = f"operand {name} of tcgen05.mma", tensor_core.chunk_elements(element)
            size = (rows, s.k // per) if k_major else (s.k, -(-rows // per))
            swizzle.locate(cta.shared, pg.SHARED_START, descriptor, k_major, *size, what)


def multiply(p: Product, plan: Plan, ctas: list) -> None:
    """The product by its plan; its operands have been checked to lie in shared memory."""
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
    """The whole product: read the operands, multiply, update D in every CTA."""
    s = p.shape
    plan = plan_of(p)
    if plan is not None:
        for cta in ctas:
            check_tiles(p, cta)
        multiply(p, plan, ctas)
        return
    b_all = operand_b(p, ctas)
    plan = lane_plan(rows_of(p), s.n, p.ws, p.pair, p.lane)
    for index, cta in enumerate(ctas):
        cells = cta.tmem.cells
        a, b = operand_a(p, cta, plan), b_all
        quarters = plan.quarters
        if any(p.skipped):
            quarters = quarters.copy()
            quarters[:, 0] &= ~np.array(p.skipped[4 * index : 4 * index + 4], np.int64)
        if s.scale:
            a, b = scale_operands(p, cells, a, b, plan)
            if b.dtype == np.float64:
                update(cells, b @ a, p, quarters)
                continue
        if s.d == "f32":
            keep = 2.0**-p.scale_exponent if p.add else 0.0
            multiply_add(cells.reshape(-1, 32), 4 * p.column, quarters, a, b, keep)
        else:
            product = np.empty((s.n * 4, 32), np.uint32)
            multiply_add(product, 0, np.array([[pg.ALL, 0, s.n]] * 4), a, b, 0.0)
            update(cells, product.view(np.float32).reshape(s.n, 128), p, quarters)


def scale_operands(p: Product, cells: np.ndarray, a: np.ndarray, b: np.ndarray, plan: LanePlan):
    """A by lanes and B [n, k] with their scale factors; float64 [k, 128] and [n, k] where float32 could overflow."""
    s = p.shape
    b_scales = scale_factors(cells, p.scale_columns[1], s.n, s.b_scale_id, p.blocks, s.scale, "B")
    a_scales = scale_factors(cells, p.scale_columns[0], rows_of(p), s.a_scale_id, p.blocks, s.scale, "A")
    a_scales = np.where(plan.rows[:, None] < 0, np.float32(1), a_scales[plan.rows])  # [128, blocks]
    values = tensor_core.scaled(a[:-2].reshape(s.k, 128).view(np.float32).T, a_scales)
    b = tensor_core.scaled(b, b_scales)
    if np.float64 in (values.dtype, b.dtype):
        return values.astype(np.float64).T, b.astype(np.float64)
    return tensor_core.to_lanes(values, IDENTITY, 4), b


def update(cells: np.ndarray, product: np.ndarray, p: Product, quarters: np.ndarray) -> None:
    """Put product [n, 128 lanes] into D where the fused kernel does not: f16 and s32, or float64 products."""
    s = p.shape
    for q, (mask, n, count) in enumerate(quarters.tolist()):
        d = cells[p.column : p.column + count, 32 * q : 32 * q + 32]
        fresh = product[n : n + count, 32 * q : 32 * q + 32]
        fresh = tensor_core.accumulate(d, fresh, s.d, p.add, p.scale_exponent, s.saturate)
        np.copyto(d, fresh, where=np.array([mask >> i & 1 for i in range(32)], bool))


# ---- lowering -----------------------------------------------------------------------------------------------------

_SCALE_BLOCKS = {
    ("mxf8f6f4", ""): 1, ("mxf8f6f4", "scale_vec::1X"): 1, ("mxf8f6f4", "block32"): 1,
    ("mxf4", ""): 2, ("mxf4", "scale_vec::2X"): 2, ("mxf4", "block32"): 2,
    ("mxf4nvf4", "scale_vec::2X"): 2, ("mxf4nvf4", "block32"): 2,
    ("mxf4nvf4", "scale_vec::4X"): 4, ("mxf4nvf4", "block16"): 4,
}  # fmt: skip


@isa.form("mma")
def lower_mma(asm, ins, modifiers) -> None:
    if "sp" in modifiers:
        asm.refuse(ins, "sparse products are not implemented")
    if "ashift" in modifiers:
        asm.refuse(ins, "the shifted A of convolutions is not implemented")
    ws = bool(isa.take(asm, ins, modifiers, "ws", optional=True))
    group = isa.take_group(asm, ins, modifiers)
    kind = isa.take(asm, ins, modifiers, *(f"kind::{k}" for k in K_OF_KIND))[6:]
    block = bool(isa.take(asm, ins, modifiers, "block_scale", optional=True))
    if block != (kind in BLOCK_SCALED):
        asm.refuse(ins, f"kind::{kind} {'takes no' if block else 'needs'} .block_scale")
    if ws and (group != 1 or block):
        asm.refuse(ins, ".ws exists for cta_group::1 without block scaling")
    blocks = 0
    if block:
        vector = isa.take(asm, ins, modifiers, "scale_vec::1X", "scale_vec::2X", "scale_vec::4X", "block16", "block32",
                          optional=True)  # fmt: skip
        if (kind, vector) not in _SCALE_BLOCKS:
            asm.refuse(ins, f".{vector or 'scale_vec'} does not go with kind::{kind}")
        blocks = _SCALE_BLOCKS[kind, vector]
    for buffer in (
        ("a",) if not ws else ("b0", "b1", "b2", "b3")
    ):  # reuse of operands: never changes the value
        isa.take(asm, ins, modifiers, *(f"collector::{buffer}::{op}" for op in ("fill", "use", "lastuse", "discard")),
                 optional=True)  # fmt: skip
    isa.finish(asm, ins, modifiers, range(5, 8))
    d, a, b, idesc, *rest = ins.operands
    o = {"kind": kind, "group": group, "ws": ws, "blocks": blocks, "a_tensor": isinstance(a, Address)}
    o["d"] = asm.address_row(d, "u")
    o["a"] = asm.address_row(a, "u") if o["a_tensor"] else asm.src(a, "q")
    o["b"], o["idesc"] = asm.src(b, "q"), asm.src(idesc, "u")
    o["skipped"], o["scales"], o["zero_mask"], o["scale_input"] = [], None, None, None
    if block:
        o["scales"] = asm.address_row(rest.pop(0), "u"), asm.address_row(rest.pop(0), "u")
    elif not ws and rest and isinstance(rest[0], Vector):
        vector = rest.pop(0)
        if len(vector.items) != 4 * group:
            raise asm.error(f"disable-output-lane takes {4 * group} registers, got {len(vector.items)}")
        o["skipped"] = asm.vector_rows(vector, "u")
    if not rest:
        raise asm.error("the predicate enable-input-d is missing")
    o["add"] = asm.src(rest.pop(0), "p")
    if rest:
        extra = rest.pop(0)
        if ws:
            o["zero_mask"] = asm.src(extra, "q")
        elif kind in ("f16", "tf32"):
            if isinstance(extra, Imm) and not 0 <= extra.value <= 15:
                raise asm.error(f"scale-input-d is 0..15, got {extra.value}")
            o["scale_input"] = asm.src(extra, "u")
        else:
            asm.refuse(ins, f"scale-input-d does not go with kind::{kind}")
    if rest:
        raise asm.error("too many operands")
    isa.settle(asm)
    rare = block or ws or o["scale_input"] is not None or bool(o["skipped"])
    asm.macro(do_mma, ins, rare=rare, known={}, **o)


def do_mma(w, mask, o):
    ctas = isa.group_ctas(w, o.group)
    for thread in lanes(mask):
        located(w, start, w, thread, ctas, o)


def start(w, thread: int, ctas: list, o) -> None:
    """Decode and check one thread's operands, and issue the product."""
    r, q = w.R, w.Q
    a = r.item(o.a, thread) if o.a_tensor else q.item(o.a, thread)
    add = w.P.item(o.add) >> thread & 1
    key = r.item(o.idesc, thread), r.item(o.d, thread), a, q.item(o.b, thread), add
    if o.rare:
        key += rare_operands(w, thread, o)
    work = o.known.get(key)
    if work is None:
        if len(o.known) > KNOWN_PRODUCTS:
            o.known.clear()
        work = o.known[key] = prepare(o, *key)
    reads, writes = regions(work, ctas)
    product = work.product
    if work.plan is not None:
        effects = functools.partial(multiply, product, work.plan, ctas)
    else:
        effects = functools.partial(perform, product, ctas)
    checker = w.cta.machine.checker
    if checker is not None:
        reads, writes = checked_regions(work, ctas)
        if checker.products is not None:
            effects = functools.partial(checker.products.perform, w, thread, product, ctas, effects)
    tensor_copy.issue(w, thread, "tcgen05.mma", work.footprint, effects, reads=reads, writes=writes)


def rare_operands(w, thread: int, o) -> tuple:
    """Columns of scale factors, the exponent that scales D, disabled lanes, the zero-column mask."""
    r = w.R
    return (
        tuple(r.item(row, thread) & 0xFFFF for row in o.scales) if o.scales else (0, 0),
        0 if o.scale_input is None else r.item(o.scale_input, thread) & 15,
        tuple(r.item(row, thread) for row in o.skipped),
        0 if o.zero_mask is None else w.Q.item(o.zero_mask, thread),
    )


@dataclass(slots=True)
class Work:
    """A product and what it touches in each CTA."""

    product: Product
    tensor_reads: tuple[tuple[int, int, int], ...]  # columns, and lanes as a mask of groups of 16
    shared_reads: tuple[tuple[int, int, str], ...]  # addresses, and the operand in words
    lanes: int  # of D
    footprint: tensor_copy.Footprint
    plan: Plan | None
    spans: tuple[np.ndarray, ...] | None = None  # see `operand_spans`, when races are checked


def prepare(
    o, idesc: int, d: int, a: int, b: int, add: int, scale_columns: tuple[int, int] = (0, 0), scale_exponent: int = 0,
    skipped: tuple[int, ...] = (), zero_mask: int = 0,
) -> Work:  # fmt: skip
    """Everything about a product that follows from its operands alone; a loop repeats the same few."""
    group, ws, a_tensor = o.group, o.ws, o.a_tensor
    shape = decode_instruction(idesc, o.kind, group, ws)
    lane, column = d >> 16, d & 0xFFFF
    rows = shape.m // group
    half = rows == 64 and group == 1 and not ws  # layout F: the lower or the upper 16 of each 32 lanes
    if lane not in ((0, 16) if half else (0,)):
        accepted = "0 or 16" if half else "0"
        raise Fault("tmem-lane", f"D at lane {lane}; M = {shape.m} accepts lane {accepted}")
    a_desc, a_column = None, 0
    if a_tensor:
        a_column = a & 0xFFFF
        if a >> 16 != lane:
            raise Fault("tmem-lane", f"A at lane {a >> 16} and D at lane {lane}; they must start alike")
        if not shape.a_k_major:
            raise Fault("idesc", "A in tensor memory is K-major: bit 15 of the descriptor must be 0")
    else:
        a_desc = swizzle.decode(a, True)
        check_major(a_desc, shape.a, shape.a_k_major, "A")
    b_desc = swizzle.decode(b, True)
    check_major(b_desc, shape.b, shape.b_k_major, "B")
    p = Product(
        shape, ws, group == 2, lane, column, a_desc, a_column, b_desc, bool(add), scale_exponent, skipped,
        scale_columns, o.blocks, zero_mask,
    )  # fmt: skip
    lanes_of_d = accumulator_lanes(p)
    tensor_reads = [] if a_desc is not None else [(a_column, a_column + A_COLUMNS, lanes_of_d)]
    if shape.scale:
        for first, count in zip(scale_columns, (rows, shape.n)):
            tensor_reads.append((first, first + -(-count // 32), 0xFF))
    shared_reads = [shared_span(b_desc, shape.b_k_major, shape.n // group, shape, "B")]
    if a_desc is not None:
        shared_reads.insert(0, shared_span(a_desc, shape.a_k_major, rows, shape, "A"))
    wide = max(x.count for x in tm.accumulator_blocks(rows, shape.n, ws, group == 2))
    footprint = tensor_copy.Footprint(
        "mma",
        (lane, column, shape.m, shape.n, ws),
        tuple(x[:2] for x in tensor_reads),
        ((column, column + wide),),
    )
    return Work(p, tuple(tensor_reads), tuple(shared_reads), lanes_of_d, footprint, plan_of(p))


def shared_span(
    descriptor: Descriptor, k_major: bool, rows: int, shape: InstructionDescriptor, name: str
) -> tuple[int, int, str]:
    """(first address, end, words) of an operand in shared memory; a row is 32 bytes of k."""
    per = 16 // tensor_core.element_bytes(shape.a if name == "A" else shape.b)
    size = (rows, 2) if k_major else (shape.k, -(-rows // per))
    low, high = swizzle.footprint(descriptor, k_major, *size)
    return (
        low,
        high,
        f"operand {name}, descriptor {descriptor}, {'K' if k_major else 'MN'}-major, {rows} rows",
    )


def regions(work: Work, ctas: list) -> tuple[tuple, tuple]:
    """(reads, writes) of the product in each CTA, after checking that it may touch them."""
    low, high = work.footprint.writes[0]
    reads, writes = [], []
    for cta in ctas:
        tmem, size = cta.tmem, cta.shared.size
        tmem.check(cta, low, high - low, "D of tcgen05.mma")
        writes.append(("tmem", cta, low, high, work.lanes))
        for first, end, lane_groups in work.tensor_reads:
            tmem.check(cta, first, end - first, "tcgen05.mma reads tensor memory and")
            reads.append(("tmem", cta, first, end, lane_groups))
        for first, end, text in work.shared_reads:
            if first < pg.SHARED_START or end > size:
                raise Fault(
                    "descriptor",
                    f"{text}: covers shared addresses {first:#x}..{end - 1:#x}, {cta} has {pg.SHARED_START:#x}.."
                    f"{size - 1:#x}",
                )
            reads.append(("shared", cta, first, end))
    return tuple(reads), tuple(writes)


def checked_regions(work: Work, ctas: list) -> tuple[tuple, tuple]:
    """For the checkers: exactly the bytes of shared memory that are touched, the type A is read as, and whether D is
    read."""
    p = work.product
    if work.spans is None:
        work.spans = operand_spans(p)
    low, high = work.footprint.writes[0]
    note = f"accumulate {p.shape.d}" if p.add else ""
    reads: list[tuple] = []
    for cta in ctas:
        for first, end, groups in work.tensor_reads:
            of_a = p.a is None and first == p.a_column and groups == work.lanes
            reads.append(("tmem", cta, first, end, groups, *((p.shape.a,) if of_a else ())))
    reads += [("spans", cta, table) for cta in ctas for table in work.spans]
    return tuple(reads), tuple(("tmem", cta, low, high, work.lanes, note) for cta in ctas)


def operand_spans(p: Product) -> tuple[np.ndarray, ...]:
    s = p.shape
    out = []
    for descriptor, k_major, rows, element in ((p.a, s.a_k_major, rows_of(p), s.a),
                                               (p.b, s.b_k_major, s.n // (2 if p.pair else 1), s.b)):  # fmt: skip
        if descriptor is not None:
            per = 16 // tensor_core.element_bytes(element)
            size = (rows, 2) if k_major else (s.k, -(-rows // per))
            out.append(swizzle.spans(descriptor, k_major, *size))
    return tuple(out)


def check_major(descriptor: Descriptor, element: str, k_major: bool, name: str) -> None:
    """The 32-byte-atom swizzle belongs to transposed 32-bit operands, and they need it."""
    if not k_major and (element == "tf32") != (descriptor.mode == swizzle.ATOM32):
        raise Fault(
            "descriptor",
            f"MN-major {name} of type {element} with {swizzle.MODE_NAMES[descriptor.mode]}: 32-bit elements require "
            f"the 128B swizzle with 32B atoms, smaller ones forbid it; descriptor {descriptor}",
        )


def accumulator_lanes(p: Product) -> int:
    """Lanes of D (and of A in tensor memory) as a mask of groups of 16."""
    half = rows_of(p) == 64 and not p.ws and not p.pair
    return (0xAA if p.lane == 16 else 0x55) if half else 0xFF
