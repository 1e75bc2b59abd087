"""tcgen05: allocation, loads and stores of tensor memory, and their waits.

`lower` here handles all `tcgen05.*` instructions; copies, shifts and commit are in isa/tensor_copy.py, the matrix
product in isa/tcgen05.py. Loads and stores are asynchronous; within one warp only st -> ld, st -> st and ld -> st keep
their order (PTX 9.4). A load delivers its registers at their first use, or at wait::ld; at the default level of the
race checker it is complete then (engine/tensor_loads.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from softsm.engine import program as pg
from softsm.engine.emitter import Emitter
from softsm.engine.in_flight import AsyncOp
from softsm.engine.program import Blocked
from softsm.errors import Fault
from softsm.isa.operands import agreed, located, shared_address, shared_bytes, shared_operand
from softsm.isa.registry import lowers
from softsm.memory import tensor_memory as tm
from softsm.ptx.ast import Imm, Instruction

FORMS: dict[str, Callable] = {}  # first modifier -> lowering


@lowers("tcgen05")
def lower(asm: Emitter, ins: Instruction) -> None:
    target = asm.module.target
    if not target.startswith(("sm_100", "sm_101", "sm_103", "sm_110")):
        asm.refuse(ins, f"tensor memory needs .target sm_100a, the module has {target}")
    form = FORMS.get(ins.modifiers[0]) if ins.modifiers else None
    if form is None:
        asm.refuse(ins, "no such tcgen05 operation")
    form(asm, ins, list(ins.modifiers[1:]))


def form(name: str) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        FORMS[name] = function
        return function

    return register


def take(asm, ins, modifiers: list[str], *choices: str, optional: bool = False) -> str:
    """Removes and returns the one modifier among `choices`; rejects the instruction when it is missing."""
    for choice in choices:
        if choice in modifiers:
            modifiers.remove(choice)
            return choice
    if not optional:
        asm.refuse(ins, f"expected one of .{', .'.join(choices)}")
    return ""


def take_group(asm, ins, modifiers: list[str]) -> int:
    return int(take(asm, ins, modifiers, "cta_group::1", "cta_group::2")[-1])


def finish(asm, ins, modifiers: list[str], operands: range, *, collective: bool = False) -> None:
    """Rejects the instruction if a modifier remains or the number of operands is wrong."""
    if collective:
        for name in ("sync", "aligned"):
            take(asm, ins, modifiers, name)
    if modifiers:
        asm.refuse(ins, f"modifier .{modifiers[0]} is not understood")
    if len(ins.operands) not in operands:
        raise asm.error(f"expected {' or '.join(map(str, operands))} operands, got {len(ins.operands)}")


def exactly(count: int) -> range:
    return range(count, count + 1)


def rows_index(rows: list[int]) -> slice | np.ndarray:
    """Returns consecutive rows as a slice (a plain copy), others as an index."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return np.array(rows)


# ---- helpers at run time ------------------------------------------------------------------------------------------


def first_lane(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def group_ctas(w, group: int) -> list:
    """Returns the CTAs whose tensor memory an instruction of this cta_group uses, even rank first."""
    cta = w.cta
    if cta.tmem.groups.get(id(cta)) != group:
        located(w, cta.tmem.check_group, cta, group)
    if group == 1:
        return [cta]
    if len(cta.cluster) < 2:
        raise w.fault("tmem-cta-group", "cta_group::2 needs a cluster of at least two CTAs")
    even = cta.rank & ~1
    return [cta.cluster[even], cta.cluster[even + 1]]


def same_address(w, mask: int, row: int, what: str) -> int:
    """Returns the one tensor-memory address of a collective instruction."""
    if mask != pg.ALL:
        return w.R.item(row, first_lane(mask))
    address = agreed(w, row)
    if address is None:
        raise w.fault("tmem-address", f"{what}: the threads of the warp give different tensor-memory addresses")
    return address


# ---- alloc, dealloc, relinquish -----------------------------------------------------------------------------------


@form("alloc")
def lower_alloc(asm, ins, modifiers) -> None:
    group = take_group(asm, ins, modifiers)
    shared = take(asm, ins, modifiers, "shared::cta", optional=True)
    take(asm, ins, modifiers, "b32")
    finish(asm, ins, modifiers, exactly(2), collective=True)
    address, columns = ins.operands
    place = shared_operand(asm, address, shared or None)
    asm.macro(do_alloc, ins, group=group, address=place, columns=asm.src(columns, "u"))


def do_alloc(w, mask, o):
    cta = w.cta
    lane = first_lane(mask)
    columns = int(w.R[o.columns, lane])
    pair = group_ctas(w, o.group)
    if leaked not in w.machine.cta_exit_hooks:
        w.machine.cta_exit_hooks.append(leaked)
    if o.group == 1:
        column = located(w, cta.tmem.allocate, cta, columns, w.place())
    else:
        if w.machine.observer is not None:
            w.machine.observer.pair_allocates(w)
        column = located(w, allocate_pair, w, pair, columns)
    if column is None:
        return Blocked(cta.tmem, f"{columns} columns of tensor memory ({taken(cta.tmem)})")
    cta.columns[:] = column, column + columns
    owner, offset = shared_bytes(w, shared_address(w, o.address, lane), 4, "tcgen05.alloc writes its result", 4)
    if w.machine.observer is not None:
        w.machine.observer.accessed_shared(w, owner, offset, offset + 4, True)
        w.machine.observer.tensor_allocated(cta, column, columns)
    owner.shared[offset : offset + 4] = np.frombuffer(np.uint32(column).tobytes(), np.uint8)
    w.machine.writes += 1
    return None


def leaked(cta) -> None:
    """Reports the tensor memory that a CTA has not freed at its end."""
    cta.tmem.at_exit(cta)


def taken(tmem) -> str:
    held = [f"{a.column}..{a.column + a.columns - 1} by {a.owner}" for a in tmem.allocations.values()]
    return "held: " + ", ".join(held) if held else "the peer CTA has not asked yet"


def allocate_pair(w, pair: list, columns: int) -> int | None:
    """Allocates for cta_group::2: both CTAs request and get the same columns; the first one waits for the other."""
    cta = w.cta
    peer = pair[1 - cta.rank % 2]
    cta.tmem.check_alloc(cta, columns)
    granted = cta.tmem.pair_grants.pop(id(cta), None)
    if granted is not None:
        return granted
    cta.tmem.pair_requests[id(cta)] = columns
    asked = peer.tmem.pair_requests.get(id(peer))
    if asked is None:
        return None
    if asked != columns:
        raise w.fault("tmem-cta-group", f"the CTAs of a pair ask for {columns} and {asked} columns")
    column = cta.tmem.free_column(columns, peer.tmem)
    if column is None:
        return None
    for member in pair:
        member.tmem.take(member, column, columns, w.place())
        del member.tmem.pair_requests[id(member)]
    peer.tmem.pair_grants[id(peer)] = column
    peer.tmem.wake()
    return column


@form("dealloc")
def lower_dealloc(asm, ins, modifiers) -> None:
    group = take_group(asm, ins, modifiers)
    take(asm, ins, modifiers, "b32")
    finish(asm, ins, modifiers, exactly(2), collective=True)
    address, columns = ins.operands
    asm.macro(do_dealloc, ins, group=group, address=asm.src(address, "u"), columns=asm.src(columns, "u"))


def do_dealloc(w, mask, o):
    lane = first_lane(mask)
    group_ctas(w, o.group)
    address = int(w.R[o.address, lane])
    if address >> 16:
        raise w.fault("tmem-dealloc", f"address {address:#x} names lane {address >> 16}; tcgen05.alloc returned lane 0")
    if w.machine.observer is not None:
        w.machine.observer.tensor_freed(w, address & 0xFFFF, int(w.R[o.columns, lane]))
    located(w, w.cta.tmem.deallocate, w.cta, address & 0xFFFF, int(w.R[o.columns, lane]))
    w.cta.columns[:] = 0


@form("relinquish_alloc_permit")
def lower_relinquish(asm, ins, modifiers) -> None:
    group = take_group(asm, ins, modifiers)
    finish(asm, ins, modifiers, exactly(0), collective=True)
    asm.macro(do_relinquish, ins, group=group)


def do_relinquish(w, mask, o):
    group_ctas(w, o.group)
    w.cta.tmem.relinquish(w.cta)


# ---- ld, st and their waits ---------------------------------------------------------------------------------------


def access_form(asm, ins, modifiers, packing: str) -> dict:
    shape = take(asm, ins, modifiers, *tm.REGISTERS)
    repeat = int(take(asm, ins, modifiers, *(f"x{1 << i}" for i in range(8)))[1:])
    packed = bool(take(asm, ins, modifiers, packing, optional=True))
    take(asm, ins, modifiers, "b32")
    finish(asm, ins, modifiers, range(2, 4), collective=True)
    registers = tm.REGISTERS[shape] * repeat
    if registers > 128:
        asm.refuse(ins, f".{shape}.x{repeat} would move {registers} registers; at most 128 exist")
    return {"shape": shape, "repeat": repeat, "packed": packed}


def half_split(asm, ins, shape: str, extra: tuple) -> int:
    if (shape == "16x32bx2") != bool(extra):
        asm.refuse(ins, "the half-split offset belongs to .16x32bx2, and is required there")
    if not extra:
        return 0
    if not isinstance(extra[0], Imm):
        asm.refuse(ins, "the half-split offset must be an immediate")
    value = extra[0].value
    if not isinstance(value, int) or not 0 <= value < 1 << 23:
        raise asm.error(f"half-split offset {value} is not a tensor-memory distance")
    return value


@form("ld")
def lower_ld(asm, ins, modifiers) -> None:
    if "red" in modifiers:
        asm.refuse(ins, "tcgen05.ld.red is not part of sm_100a")
    access = access_form(asm, ins, modifiers, "pack::16b")
    registers, address, *extra = ins.operands
    split = half_split(asm, ins, access["shape"], tuple(extra))
    row = asm.address_row(address, "u")
    rows = asm.vector_rows(registers, "u", write=True)
    expected = tm.REGISTERS[access["shape"]] * access["repeat"]
    if len(rows) != expected:
        raise asm.error(f"expected {expected} destination registers, got {len(rows)}")
    asm.settle_tensor_loads(len(asm.records))
    asm.macro(do_ld, ins, address=row, rows=rows_index(rows), split=split, note="", **access)
    in_loop(asm, pg.OP_CHECKED_LD if asm.checking else pg.OP_TENSOR_LD, row, rows, access)
    asm.tmem_pending.update(("R", r) for r in rows)


@form("st")
def lower_st(asm, ins, modifiers) -> None:
    access = access_form(asm, ins, modifiers, "unpack::16b")
    address, *extra, registers = ins.operands
    split = half_split(asm, ins, access["shape"], tuple(extra))
    row = asm.address_row(address, "u")
    rows = asm.vector_rows(registers, "u")
    expected = tm.REGISTERS[access["shape"]] * access["repeat"]
    if len(rows) != expected:
        raise asm.error(f"expected {expected} source registers, got {len(rows)}")
    asm.settle_tensor_loads(len(asm.records))
    kinds = {asm.produced.get(("R", r), "") for r in rows} if asm.checking else set()
    note = "f32" if kinds == {"f32"} else "packed" if kinds and all(k.endswith(("x2", "x4")) for k in kinds) else ""
    asm.macro(do_st, ins, address=row, rows=rows_index(rows), split=split, note=note, **access)
    kind = tm.STORED.get(note, tm.UNKNOWN)
    in_loop(asm, pg.OP_CHECKED_ST if asm.checking else pg.OP_TENSOR_ST, row, rows, access, kind)


def in_loop(asm, op: int, row: int, rows: list[int], access: dict, kind: int = 0) -> None:
    """Lets the compiled loop do it where a register is a column and nothing is in flight (engine/vec_tensor.py) and,
    when races are checked, where nothing else may happen before the result is due (checks/tmem_shadow.py)."""
    if access["shape"] == "32x32b" and not access["packed"]:
        _, _, number, _, _, _, *guard = asm.records[-1]
        asm.records[-1] = [op, asm.pooled(rows), number, row, len(rows), kind, *guard]


def locate(w, mask: int, o, what: str) -> tuple[int, int, tuple]:
    """Returns (lane, column, regions) of an access, after all its checks."""
    address = same_address(w, mask, o.address, what)
    lane, column = address >> 16, address & 0xFFFF
    if lane < 32 and not strict(w):  # hardware ignores the bits that name the warp's quarter, and kernels omit them
        lane += 32 * (w.index % 4)
    width = located(w, check_access, w, o, lane, column, what)
    first = ("tmem", w.cta, column, column + width, lane_groups(lane, 32 if o.shape == "32x32b" else 16), o.note)
    if o.shape != "16x32bx2":
        return lane, column, (first,)
    second, at = lane + (o.split >> 16), column + (o.split & 0xFFFF)
    return lane, column, (first, ("tmem", w.cta, at, at + width, lane_groups(second, 16), o.note))


def strict(w) -> bool:
    return w.machine.observer is not None and w.machine.observer.strict


def lane_groups(lane: int, count: int) -> int:
    """Returns lanes as a mask of groups of 16."""
    return ((1 << count // 16) - 1) << lane // 16


def check_access(w, o, lane: int, column: int, what: str) -> int:
    """Checks the access and returns the number of columns it covers."""
    tmem = w.cta.tmem
    if lane != 32 * (w.index % 4):
        tm.check_lanes(w.index, lane, o.shape, what)
    if column % tm.ALIGNMENT[o.shape]:
        raise Fault(
            "misaligned",
            f"{what} at column {column}: .{o.shape} accesses start at a multiple of {tm.ALIGNMENT[o.shape]} columns "
            "(one column is 32 bits; .32x32b starts at any column)",
        )
    width = tm.span(o.shape, o.repeat, o.packed)
    tmem.check(w.cta, column, width, what)
    if o.shape == "16x32bx2":
        tmem.check(w.cta, column + (o.split & 0xFFFF), width, what)
        tm.check_lanes(w.index, lane + (o.split >> 16), o.shape, f"{what} (second half)")
    return width


def do_ld(w, mask, o):
    lane, column, regions = locate(w, mask, o, "tcgen05.ld")
    cells, registers, machine, in_flight = w.cta.tmem.cells, w.R, w.cta.machine, w.in_flight

    def effects() -> None:
        registers[o.rows] = tm.load(cells, o.shape, o.repeat, o.packed, lane, column, o.split)

    line = w.cta.program.instructions[w.pc].line
    op = machine.issue(AsyncOp("tcgen05.ld", w, 0, line, effects, tuple(in_flight.tensor_stores), (), regions))
    if not op.done:
        in_flight.tensor_loads.append(op)


def do_st(w, mask, o):
    lane, column, regions = locate(w, mask, o, "tcgen05.st")
    cells, machine = w.cta.tmem.cells, w.cta.machine
    values = w.R[o.rows].copy()  # registers are read when the instruction is issued

    def effects() -> None:
        tm.store(cells, values, o.shape, o.repeat, o.packed, lane, column, o.split)

    stores = w.in_flight.tensor_stores
    after = (*stores, *w.in_flight.tensor_loads)
    line = w.cta.program.instructions[w.pc].line
    op = machine.issue(AsyncOp("tcgen05.st", w, 0, line, effects, after, (), (), regions))
    if not op.done:
        stores.append(op)


def flush_tmem_loads(w, mask=0, o=None):
    """Delivers the registers of this warp's tcgen05.ld, at their first use or at wait::ld."""
    machine = w.cta.machine
    if machine.observer is not None and o is not None and o.uses is not None:
        machine.observer.tensor_loads_used(w, o.uses)
    loads = w.in_flight.tensor_loads
    for op in loads:
        machine.require(op)
    loads.clear()


def do_wait_ld(w, mask, o):
    flush_tmem_loads(w)
    if w.machine.observer is not None:
        w.machine.observer.tensor_loads_waited(w)


def do_wait_st(w, mask, o):
    if w.machine.observer is not None:
        w.machine.observer.tensor_stores_waited(w)
    stores = w.in_flight.tensor_stores
    for op in stores:
        w.cta.machine.require(op)
    stores.clear()


@form("wait::ld")
def lower_wait_ld(asm, ins, modifiers) -> None:
    finish(asm, ins, modifiers, exactly(0), collective=True)
    asm.tmem_pending.clear()
    asm.macro(do_wait_ld, ins, waits=True)
    if asm.checking:
        asm.answered(pg.OP_TENSOR_WAIT, rc=pg.WAIT_LOADS)


@form("wait::st")
def lower_wait_st(asm, ins, modifiers) -> None:
    finish(asm, ins, modifiers, exactly(0), collective=True)
    asm.macro(do_wait_st, ins, waits=True)
    if asm.checking:
        asm.answered(pg.OP_TENSOR_WAIT, rc=pg.WAIT_STORES)


@form("fence::before_thread_sync")
@form("fence::after_thread_sync")
def lower_fence(asm, ins, modifiers) -> None:
    """Lowers the fence that orders tcgen05 operations against thread synchronisation; it changes no value."""
    finish(asm, ins, modifiers, exactly(0))
    if asm.checking:
        asm.macro(do_fence, ins, before="fence::before_thread_sync" in ins.modifiers)


def do_fence(w, mask, o):
    w.machine.observer.fenced_tensor(w, o.before)
