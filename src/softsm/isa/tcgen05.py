"""tcgen05.mma: D = A*B (+ D) with D in tensor memory, A in shared or tensor memory, B in shared memory.

One thread issues the MMA for the whole CTA, or for a pair of CTAs (cta_group::2). Each CTA of a pair holds half of the
rows of A and D, and half of the columns of B. This file decodes and issues the MMA and determines its accesses;
isa/tcgen05_product.py computes it. With .ashift a tcgen05.shift of A follows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from softsm import formats
from softsm.engine import program as pg
from softsm.errors import Fault
from softsm.isa import product_chain, tensor_copy, tensor_core
from softsm.isa import tensor_memory as isa
from softsm.isa.instruction_descriptor import BLOCK_SCALED, K_OF_KIND, InstructionDescriptor
from softsm.isa.instruction_descriptor import decode as decode_instruction
from softsm.isa.operands import lanes
from softsm.isa.tcgen05_product import A_COLUMNS, Plan, Product, metadata_columns, perform, plan_of, rows_of
from softsm.memory import swizzle
from softsm.memory import tensor_memory as tm
from softsm.memory.swizzle import Descriptor
from softsm.ptx.ast import Address, Imm, Vector

KNOWN_PRODUCTS = 4096  # the most decoded operands that one instruction keeps

_SCALE_BLOCKS = {
    ("mxf8f6f4", ""): 1, ("mxf8f6f4", "scale_vec::1X"): 1, ("mxf8f6f4", "block32"): 1,
    ("mxf4", ""): 2, ("mxf4", "scale_vec::2X"): 2, ("mxf4", "block32"): 2,
    ("mxf4nvf4", "scale_vec::2X"): 2, ("mxf4nvf4", "block32"): 2,
    ("mxf4nvf4", "scale_vec::4X"): 4, ("mxf4nvf4", "block16"): 4,
}  # fmt: skip


@isa.form("mma")
def lower_mma(asm, ins, modifiers) -> None:
    sparse = bool(isa.take(asm, ins, modifiers, "sp", optional=True))
    ashift = bool(isa.take(asm, ins, modifiers, "ashift", optional=True))
    if ashift and sparse:
        asm.refuse(ins, ".ashift of a sparse A is not implemented: PTX does not say whether metadata are shifted too")
    ws = bool(isa.take(asm, ins, modifiers, "ws", optional=True))
    group = isa.take_group(asm, ins, modifiers)
    kind = isa.take(asm, ins, modifiers, *(f"kind::{k}" for k in K_OF_KIND))[6:]
    block = bool(isa.take(asm, ins, modifiers, "block_scale", optional=True))
    if block != (kind in BLOCK_SCALED):
        asm.refuse(ins, f"kind::{kind} {'accepts no' if block else 'needs'} .block_scale")
    if ws and (group != 1 or block):
        asm.refuse(ins, ".ws exists for cta_group::1 without block scaling")
    blocks = 0
    if block:
        vector = isa.take(
            asm, ins, modifiers, "scale_vec::1X", "scale_vec::2X", "scale_vec::4X", "block16", "block32", optional=True
        )
        if (kind, vector) not in _SCALE_BLOCKS:
            asm.refuse(ins, f".{vector or 'scale_vec'} does not go with kind::{kind}")
        blocks = _SCALE_BLOCKS[kind, vector]
    for buffer in ("a",) if not ws else ("b0", "b1", "b2", "b3"):  # reuse of operands does not change the result
        isa.take(
            asm,
            ins,
            modifiers,
            *(f"collector::{buffer}::{op}" for op in ("fill", "use", "lastuse", "discard")),
            optional=True,
        )
    isa.finish(asm, ins, modifiers, range(5 + sparse, 8 + sparse))
    d, a, b, *rest = ins.operands
    kept = {"collector::a::fill", "collector::a::use"} & {*ins.modifiers}
    if ashift and (ws or block or kept or not isinstance(a, Address)):
        asm.refuse(ins, ".ashift needs A in tensor memory, without .ws, .block_scale, collector::a::fill and ::use")
    metadata = asm.address_row(rest.pop(0), "u") if sparse else None
    idesc = rest.pop(0)
    o: dict[str, Any] = {"kind": kind, "group": group, "ws": ws, "blocks": blocks, "a_tensor": isinstance(a, Address)}
    o["sparse"], o["metadata"], o["ashift"] = sparse, metadata, ashift
    o["d"] = asm.address_row(d, "u")
    o["a"] = asm.address_row(a, "u") if o["a_tensor"] else asm.src(a, "q")
    o["b"], o["idesc"] = asm.src(b, "q"), asm.src(idesc, "u")
    o["skipped"], o["scales"], o["zero_mask"], o["scale_input"] = [], None, None, None
    if block:
        o["scales"] = asm.address_row(rest.pop(0), "u"), asm.address_row(rest.pop(0), "u")
    elif not ws and rest and isinstance(rest[0], Vector):
        vector = rest.pop(0)
        if len(vector.items) != 4 * group:
            raise asm.error(f"disable-output-lane needs {4 * group} registers, got {len(vector.items)}")
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
    rare = block or ws or sparse or o["scale_input"] is not None or bool(o["skipped"])
    asm.macro(do_mma, ins, rare=rare, known={}, following=-1, learned=None, which=0, **o)
    if asm.checking and not (rare or ashift or group > 1):  # compiled code may join it to the MMA before it
        rows = asm.pooled([o["idesc"], o["d"], o["a"], o["b"], o["add"]])
        asm.answered(pg.OP_CHECKED_MMA, rows, 0, int(o["a_tensor"]))


def do_mma(w, mask, o):
    ctas = isa.group_ctas(w, o.group)
    for thread in lanes(mask):
        try:
            start(w, thread, ctas, o)
        except Fault as error:
            raise error if error.placed else w.fault(error.code, error.message) from None


def start(w, thread: int, ctas: list, o) -> None:
    """Decodes and checks one thread's operands, and issues the MMA."""
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
            if o.learned is not None:
                o.learned.forget(o.which)
        work = o.known[key] = prepare(o, *key)
    check_places(work, ctas)
    product, plan = work.product, work.plan
    machine = w.cta.machine
    engine, observer = machine.engine, machine.observer
    if plan is not None and machine.unwatched and engine.order == "eager":
        engine.completed += 1  # issued and performed at once: there is no observer
        product_chain.add(engine, product, plan, ctas)
    elif engine.growing is not None and engine.growing.takes(w, thread, work.footprint, product, plan, ctas):
        if observer is not None:
            observer.product_joined(w, thread, work, ctas)
        engine.growing.add(product, plan)
    else:
        issue(w, thread, work, ctas)
    if o.learned is not None and not work.learned and work.touched is not None and plan is not None and plan.adds:
        o.learned.learn(o.which, key, work)
    if o.ashift:
        engine.settle()
        tensor_copy.start_shift(w, thread, ctas, (0, 32, 64, 96), product.a_column)
    if engine.postponed is not None:
        if o.following < 0 or machine.follower is not None:
            engine.settle()
        else:
            engine.postponed.following = o.following


def issue(w, thread: int, work: Work, ctas: list) -> None:
    """Issues the MMA as an asynchronous operation."""
    product, plan, machine = work.product, work.plan, w.cta.machine
    engine, observer = machine.engine, machine.observer
    tapped = observer is not None and observer.operands
    # The race checker needs regions only if peers may be accessed; an observer that follows each event needs all.
    alone = len(w.cta.cluster) == 1 and machine.follower is None
    together: product_chain.Together | None = None
    effects: Callable[[], None]
    if plan is not None and not tapped:
        if alone and engine.order == "latest":
            effects = together = product_chain.Together(engine, product, plan, ctas)
        else:
            effects = functools.partial(product_chain.add, engine, product, plan, ctas)
    else:
        effects = functools.partial(perform, product, ctas)
    if not machine.kernel.checking:
        reads, writes = regions(work, ctas)
    else:
        reads, writes = ((), ()) if alone else checked_regions(work, ctas)
    if tapped:
        effects = functools.partial(observer.tensor_product, w, product, ctas, effects)
    op = tensor_copy.issue(w, thread, product_chain.KIND, work.footprint, effects, reads, writes, (work, ctas))
    if together is not None:
        together.op, engine.growing = op, together
        if observer is not None and w.in_flight.products == len(w.in_flight.tensor_ops):
            together.compiled = observer.products_joinable(together, w, thread, work, ctas)


def rare_operands(w, thread: int, o) -> tuple:
    """Returns the columns of scale factors, the exponent that scales D, the disabled lanes, the zero-column mask and
    the metadata."""
    r = w.R
    return (
        tuple(r.item(row, thread) & 0xFFFF for row in o.scales) if o.scales else (0, 0),
        0 if o.scale_input is None else r.item(o.scale_input, thread) & 15,
        tuple(r.item(row, thread) for row in o.skipped),
        0 if o.zero_mask is None else w.Q.item(o.zero_mask, thread),
        r.item(o.metadata, thread) if o.sparse else 0,
    )


@dataclass(slots=True, eq=False)
class Work:
    """An MMA and its accesses in each CTA."""

    product: Product
    tensor_reads: tuple[tuple[int, int, int], ...]  # columns, and lanes as a mask of groups of 16
    shared_reads: tuple[tuple[int, int, str], ...]  # addresses, and the operand's name
    lanes: int  # lanes of D
    footprint: tensor_copy.Footprint
    plan: Plan | None
    columns: tuple[int, int]  # first and end column of its accesses to tensor memory
    shared: tuple[int, int]  # the same for shared memory
    spans: tuple[np.ndarray, int] | None = None  # result of `operand_spans`, with the race checker
    touched: tuple[np.ndarray, int] | None = None  # all accesses, for the checker's compiled code
    chain: int = 0  # see engine/mma_chains.py
    learned: bool = False


def prepare(
    o,
    idesc: int,
    d: int,
    a: int,
    b: int,
    add: int,
    scale_columns: tuple[int, int] = (0, 0),
    scale_exponent: int = 0,
    skipped: tuple[int, ...] = (),
    zero_mask: int = 0,
    metadata: int = 0,
) -> Work:
    """Returns all that follows from an MMA's operands. It is cached: loops repeat the same few operands."""
    shape = decode_instruction(idesc, o.kind, o.group, o.ws, o.sparse)
    if o.ashift and shape.m not in (128, 256):
        raise Fault("idesc", f"M = {shape.m} with .ashift; M 128 and 256 are accepted")
    lane, column = d >> 16, d & 0xFFFF
    a_desc, a_column, b_desc = decode_operands(o, shape, lane, a, b)
    if shape.sparse:
        check_metadata(metadata, lane)
        swizzle.check_row(b_desc, shape.b_k_major, 64, "operand B of a sparse tcgen05.mma")
    p = Product(
        shape,
        o.ws,
        o.group == 2,
        lane,
        column,
        a_desc,
        a_column,
        b_desc,
        bool(add),
        scale_exponent,
        skipped,
        scale_columns,
        o.blocks,
        zero_mask,
        metadata & 0xFFFF,
    )
    tensor_reads, shared_reads = reads_of(p)
    wide = max(x.columns for x in tm.accumulator_blocks(rows_of(p), shape.n, p.folded))
    footprint = tensor_copy.Footprint(
        "mma", (lane, column, shape.m, shape.n, o.ws), tuple(x[:2] for x in tensor_reads), ((column, column + wide),)
    )
    return Work(
        p,
        tuple(tensor_reads),
        tuple(shared_reads),
        accumulator_lanes(p),
        footprint,
        plan_of(p),
        bounds([(column, column + wide), *tensor_reads]),
        bounds(shared_reads),
    )


def decode_operands(o, shape, lane: int, a: int, b: int) -> tuple[Descriptor | None, int, Descriptor]:
    """Returns the descriptor of A, or None and its column in tensor memory, and the descriptor of B."""
    # Layouts F and C have half of each 32 lanes.
    half = shape.m // o.group == 64 and not o.ws and (o.group == 1 or o.sparse)
    if lane not in ((0, 16) if half else (0,)):
        accepted = "0 or 16" if half else "0"
        raise Fault("tmem-lane", f"D at lane {lane}; M = {shape.m} accepts lane {accepted}")
    a_desc, a_column = None, 0
    if o.a_tensor:
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
    return a_desc, a_column, b_desc


def reads_of(p: Product) -> tuple[list[tuple], list[tuple]]:
    """Returns what each CTA reads of tensor and of shared memory."""
    shape, lanes, rows, columns = p.shape, accumulator_lanes(p), rows_of(p), p.shape.n // (1 + p.pair)
    tensor_reads = [] if p.a is not None else [(p.a_column, p.a_column + A_COLUMNS, lanes)]
    if shape.scale:
        for first, count in zip(p.scale_columns, (rows, shape.n)):
            tensor_reads.append((first, first + -(-count // 32), 0xFF))
    if shape.sparse:
        tensor_reads.append((*metadata_columns(shape, p.metadata), lanes))
    shared_reads = [shared_span(p.b, shape.b_k_major, columns, shape, "B")]
    if p.a is not None:
        shared_reads.insert(0, shared_span(p.a, shape.a_k_major, rows, shape, "A"))
    return tensor_reads, shared_reads


def bounds(spans: list[tuple]) -> tuple[int, int]:
    """Returns the least start and the greatest end of spans (start, end, ...)."""
    return min(span[0] for span in spans), max(span[1] for span in spans)


def check_metadata(address: int, lane: int) -> None:
    if address >> 16 != lane:
        raise Fault("tmem-lane", f"metadata at lane {address >> 16} and D at lane {lane}; they must start alike")
    if address & 1:
        raise Fault(
            "metadata",
            f"metadata at column {address & 0xFFFF}; it must begin at an even column. With kinds f16 and tf32, bit 0 "
            "of the instruction descriptor chooses between that column and the next",
        )


def table_size(k_major: bool, rows: int, shape: InstructionDescriptor, name: str) -> tuple[int, int]:
    """Returns the rows and 16-byte chunks of an operand in shared memory. K-major rows have 32 bytes, those of B in a
    sparse MMA 64."""
    k, element = (shape.given, shape.a) if name == "A" else (shape.k, shape.b)
    if k_major:
        return rows, 4 if name == "B" and shape.sparse else 2
    return k, -(-rows // (16 // tensor_core.element_bytes(element)))


def shared_span(
    descriptor: Descriptor, k_major: bool, rows: int, shape: InstructionDescriptor, name: str
) -> tuple[int, int, str]:
    """Returns (first address, end, name) of an operand in shared memory."""
    low, high = swizzle.footprint(descriptor, k_major, *table_size(k_major, rows, shape, name))
    return (low, high, f"operand {name}, descriptor {descriptor}, {'K' if k_major else 'MN'}-major, {rows} rows")


def check_places(work: Work, ctas: list) -> None:
    """Checks that the MMA's addresses are valid in each CTA."""
    low, high = work.footprint.writes[0]
    for cta in ctas:
        tmem, size = cta.tmem, cta.shared.size
        begin, end = cta.columns.tolist()
        in_columns = begin <= work.columns[0] and work.columns[1] <= end
        if in_columns and pg.SHARED_START <= work.shared[0] and work.shared[1] <= size:  # the common case
            continue
        tmem.check(cta, low, high - low, "D of tcgen05.mma")
        for first, end, _ in work.tensor_reads:
            tmem.check(cta, first, end - first, "tcgen05.mma reads tensor memory and")
        for first, end, text in work.shared_reads:
            if first < pg.SHARED_START or end > size:
                raise Fault(
                    "descriptor",
                    f"{text}: covers shared addresses {first:#x}..{end - 1:#x}, {cta} has {pg.SHARED_START:#x}.."
                    f"{size - 1:#x}",
                )


def regions(work: Work, ctas: list) -> tuple[tuple, tuple]:
    """Returns the (reads, writes) of the MMA in each CTA."""
    low, high = work.footprint.writes[0]
    reads: list[tuple] = []
    for cta in ctas:
        reads += [("tmem", cta, first, end, lane_groups, "") for first, end, lane_groups in work.tensor_reads]
        reads += [("shared", cta, first, end) for first, end, _ in work.shared_reads]
    return tuple(reads), tuple([("tmem", cta, low, high, work.lanes, "") for cta in ctas])


def checked_regions(work: Work, ctas: list) -> tuple[tuple, tuple]:
    """Returns what the checkers need: the exact bytes of shared memory, the type of A, and whether D is read."""
    p = work.product
    if work.spans is None:
        work.spans = operand_spans(p)
    low, high = work.footprint.writes[0]
    note = f"accumulate {p.shape.d}" if p.add else ""
    reads: list[tuple] = []
    for cta in ctas:
        for first, end, groups in work.tensor_reads:
            of_a = p.a is None and first == p.a_column and groups == work.lanes
            reads.append(("tmem", cta, first, end, groups, p.shape.a if of_a else ""))
    reads += [("spans", cta, *work.spans) for cta in ctas]
    return tuple(reads), tuple([("tmem", cta, low, high, work.lanes, note) for cta in ctas])


def operand_spans(p: Product) -> tuple[np.ndarray, int]:
    """Returns the byte ranges of A and B in shared memory, and the table's address."""
    s = p.shape
    out = []
    for name, element, descriptor, k_major, rows in (
        ("A", s.a, p.a, s.a_k_major, rows_of(p)),
        ("B", s.b, p.b, s.b_k_major, s.n // (2 if p.pair else 1)),
    ):
        if descriptor is not None:
            used = 16 if s.kind.startswith("mxf4") else formats.padded_bytes(element)
            out.append(swizzle.spans(descriptor, k_major, *table_size(k_major, rows, s, name), used))
    table = np.concatenate(out)
    return table, table.ctypes.data


def check_major(descriptor: Descriptor, element: str, k_major: bool, name: str) -> None:
    """Checks that exactly the transposed 32-bit operands use the 32-byte-atom swizzle."""
    if not k_major and (element == "tf32") != (descriptor.mode == swizzle.ATOM32):
        raise Fault(
            "descriptor",
            f"MN-major {name} of type {element} with {swizzle.MODE_NAMES[descriptor.mode]}: 32-bit elements require "
            f"the 128B swizzle with 32B atoms, smaller ones forbid it; descriptor {descriptor}",
        )


def accumulator_lanes(p: Product) -> int:
    """Returns the lanes of D (and of A in tensor memory) as a mask of groups of 16."""
    half = rows_of(p) == 64 and not p.folded
    return (0xAA if p.lane == 16 else 0x55) if half else 0xFF
