"""tcgen05: allocation, loads and stores of tensor memory, copies into it, commit and the waits.

All `tcgen05.*` instructions come through `lower` here; the matrix product itself is in isa/tcgen05.py.

Loads, stores, copies, shifts and products are asynchronous and unordered, except for the pairs PTX 9.4 calls pipelined,
within one warp: products on the same accumulator; a product that reads A after the copy or shift that made it, and a
product, copy or shift that overwrites what an earlier product reads; st -> ld, st -> st, ld -> st.
`issue` turns those pairs into the `after` of an operation; everything else is the program's own duty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from softsm import formats
from softsm.engine import program as pg
from softsm.engine.asynchrony import AsyncOp, Blocked
from softsm.errors import Fault
from softsm.isa.mbarriers import (
    Issuer,
    barrier_at,
    lanes,
    located,
    shared_address,
    shared_bytes,
    shared_operand,
)
from softsm.isa.registry import lowers
from softsm.memory import swizzle
from softsm.memory import tensor_memory as tm
from softsm.ptx.ast import Imm

FORMS: dict[str, Callable] = {}  # first modifier -> lowering


@lowers("tcgen05")
def lower(asm, ins) -> None:
    target = asm.module.target
    if not target.startswith(("sm_100", "sm_101", "sm_103", "sm_110")):
        asm.refuse(ins, f"tensor memory needs .target sm_100a, the module says {target}")
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
    """Remove and return the one modifier among `choices`; refuse when it is missing."""
    for choice in choices:
        if choice in modifiers:
            modifiers.remove(choice)
            return choice
    if not optional:
        asm.refuse(ins, f"expected one of .{', .'.join(choices)}")
    return ""


def take_group(asm, ins, modifiers: list[str]) -> int:
    return int(take(asm, ins, modifiers, "cta_group::1", "cta_group::2")[-1])


def finish(asm, ins, modifiers: list[str], *, collective: bool = False) -> None:
    """Every modifier must have been understood by now."""
    if collective:
        for name in ("sync", "aligned"):
            take(asm, ins, modifiers, name)
    if modifiers:
        asm.refuse(ins, f"modifier .{modifiers[0]} is not understood")


def settle(asm) -> None:
    """A register that a tcgen05.ld is still to deliver is used here: deliver it first."""
    if asm.touched & asm.tmem_pending:
        asm.flush_tensor_loads(len(asm.records))


def rows_index(rows: list[int]) -> slice | np.ndarray:
    """Consecutive rows as a slice (a plain copy), others as an index."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return np.array(rows)


# ---- helpers at run time ------------------------------------------------------------------------------------------


def first_lane(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def group_ctas(w, group: int) -> list:
    """The CTAs whose tensor memory an instruction of this cta_group works on, even rank first."""
    cta = w.cta
    located(w, cta.tmem.check_group, cta, group)
    if group == 1:
        return [cta]
    if len(cta.cluster) < 2:
        raise w.fault("tmem-cta-group", "cta_group::2 needs a cluster of at least two CTAs")
    even = cta.rank & ~1
    return [cta.cluster[even], cta.cluster[even + 1]]


def same_address(w, mask: int, row: int, what: str) -> int:
    """The one tensor-memory address of a collective instruction."""
    values = w.R[row]
    address = int(values[first_lane(mask)])
    if mask == pg.ALL and not (values == address).all():
        raise w.fault(
            "tmem-address", f"{what}: the threads of the warp give different tensor-memory addresses"
        )
    return address


class Footprint(NamedTuple):
    """What an asynchronous tcgen05 operation does to tensor memory, as far as its order to others depends on it."""

    what: str  # 'mma', 'cp', 'cp.4x256b', 'shift'
    accumulator: tuple  # mma: address and shape
    reads: tuple[tuple[int, int], ...]  # column ranges of A and scale factors
    writes: tuple[tuple[int, int], ...]


def overlap(a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...]) -> bool:
    return any(x < v and u < y for x, y in a for u, v in b)


def pipelined(old: Footprint, new: Footprint) -> bool:
    """PTX 9.4: is `new` performed after `old` when one warp issues them in this order?"""
    if new.what == "mma":
        if old.what == "mma":
            return old.accumulator == new.accumulator or bool(old.reads)
        return old.what in ("shift", "cp.4x256b") or overlap(old.writes, new.reads)
    if old.what == "mma":
        return bool(old.reads)
    return old.what == "shift" and new.what == "cp.4x256b"


def issue(
    w, lane: int, kind: str, footprint: Footprint, effects: Callable[[], None], reads=(), writes=()
) -> None:
    """Start an asynchronous operation of one thread."""
    machine = w.machine
    pending = [entry for entry in w.__dict__.setdefault("tensor_ops", []) if not entry[0].done]
    after = tuple(op for op, _, other in pending if pipelined(other, footprint))
    op = AsyncOp(kind, w, lane, w.line(), effects, after, reads=reads, writes=writes, footprint=footprint)
    machine.issue(op)
    if not op.done:
        pending.append((op, lane, footprint))
    w.tensor_ops = pending


# ---- alloc, dealloc, relinquish -----------------------------------------------------------------------------------


@form("alloc")
def lower_alloc(asm, ins, modifiers) -> None:
    group = take_group(asm, ins, modifiers)
    shared = take(asm, ins, modifiers, "shared::cta", optional=True)
    take(asm, ins, modifiers, "b32")
    finish(asm, ins, modifiers, collective=True)
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
        column = located(w, cta.tmem.allocate, cta, columns, w.line())
    else:
        column = located(w, allocate_pair, w, pair, columns)
    if column is None:
        return Blocked(cta.tmem, f"{columns} columns of tensor memory ({taken(cta.tmem)})")
    owner, offset = shared_bytes(
        w, shared_address(w, o.address, lane), 4, "tcgen05.alloc writes its result", 4
    )
    if w.machine.checker is not None:
        w.machine.checker.access(w, owner, offset, offset + 4, True)
    owner.shared[offset : offset + 4] = np.frombuffer(np.uint32(column).tobytes(), np.uint8)
    w.machine.writes += 1
    return None


def leaked(cta) -> None:
    """At the end of a CTA."""
    cta.tmem.at_exit(cta)


def taken(tmem) -> str:
    held = [f"{a.column}..{a.column + a.columns - 1} by {a.owner}" for a in tmem.allocations.values()]
    return "held: " + ", ".join(held) if held else "the peer CTA has not asked yet"


def allocate_pair(w, pair: list, columns: int) -> int | None:
    """cta_group::2: both CTAs ask, both get the same columns; the first one waits for the other."""
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
        member.tmem.take(member, column, columns, w.line())
        del member.tmem.pair_requests[id(member)]
    peer.tmem.pair_grants[id(peer)] = column
    peer.tmem.wake()
    return column


@form("dealloc")
def lower_dealloc(asm, ins, modifiers) -> None:
    group = take_group(asm, ins, modifiers)
    take(asm, ins, modifiers, "b32")
    finish(asm, ins, modifiers, collective=True)
    address, columns = ins.operands
    asm.macro(do_dealloc, ins, group=group, address=asm.src(address, "u"), columns=asm.src(columns, "u"))


def do_dealloc(w, mask, o):
    lane = first_lane(mask)
    group_ctas(w, o.group)
    address = int(w.R[o.address, lane])
    if address >> 16:
        raise w.fault(
            "tmem-dealloc", f"address {address:#x} names lane {address >> 16}; tcgen05.alloc returned lane 0"
        )
    located(w, w.cta.tmem.deallocate, w.cta, address & 0xFFFF, int(w.R[o.columns, lane]))


@form("relinquish_alloc_permit")
def lower_relinquish(asm, ins, modifiers) -> None:
    group = take_group(asm, ins, modifiers)
    finish(asm, ins, modifiers, collective=True)
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
    finish(asm, ins, modifiers, collective=True)
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
    return int(extra[0].value)


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
    settle(asm)
    asm.macro(do_ld, ins, address=row, rows=rows_index(rows), split=split, **access)
    asm.tmem_flush = flush_tmem_loads
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
    settle(asm)
    asm.macro(do_st, ins, address=row, rows=rows_index(rows), split=split, **access)


def locate(w, mask: int, o, what: str) -> tuple[int, int, tuple]:
    """(lane, column, regions) of an access, after all its checks."""
    address = same_address(w, mask, o.address, what)
    lane, column = address >> 16, address & 0xFFFF
    width = located(w, check_access, w, o, lane, column, what)
    regions = [("tmem", w.cta, column, column + width, lane_groups(lane, 32 if o.shape == "32x32b" else 16))]
    if o.shape == "16x32bx2":
        second, at = lane + (o.split >> 16), column + (o.split & 0xFFFF)
        regions.append(("tmem", w.cta, at, at + width, lane_groups(second, 16)))
    return lane, column, tuple(regions)


def lane_groups(lane: int, count: int) -> int:
    """Lanes as a mask of groups of 16."""
    return ((1 << count // 16) - 1) << lane // 16


def check_access(w, o, lane: int, column: int, what: str) -> int:
    """Columns the access covers, after its checks."""
    tmem = w.cta.tmem
    tm.check_lanes(w.index, lane, o.shape, what)
    if column % tm.ALIGNMENT[o.shape]:
        raise Fault(
            "tmem-alignment",
            f"{what} at column {column}: .{o.shape} accesses start at a multiple of {tm.ALIGNMENT[o.shape]} columns "
            "(one column is 32 bits)",
        )
    width = tm.span(o.shape, o.repeat, o.packed)
    tmem.check(w.cta, column, width, what)
    if o.shape == "16x32bx2":
        tmem.check(w.cta, column + (o.split & 0xFFFF), width, what)
    return width


def do_ld(w, mask, o):
    lane, column, regions = locate(w, mask, o, "tcgen05.ld")
    cells, registers = w.cta.tmem.cells, w.R

    def effects() -> None:
        registers[o.rows] = tm.load(cells, o.shape, o.repeat, o.packed, lane, column, o.split)

    stores = w.__dict__.setdefault("pending_tmem_stores", [])
    op = w.machine.issue(AsyncOp("tcgen05.ld", w, 0, w.line(), effects, tuple(stores), reads=regions))
    if w.machine.checker is not None:
        w.__dict__.setdefault("unwaited_loads", []).append(op)
    if not op.done:
        w.pending_tmem_loads.append(op)


def do_st(w, mask, o):
    lane, column, regions = locate(w, mask, o, "tcgen05.st")
    cells = w.cta.tmem.cells
    values = w.R[o.rows].copy()  # registers are read when the instruction is issued

    def effects() -> None:
        tm.store(cells, values, o.shape, o.repeat, o.packed, lane, column, o.split)

    stores = w.__dict__.setdefault("pending_tmem_stores", [])
    after = (*stores, *w.pending_tmem_loads)
    op = w.machine.issue(AsyncOp("tcgen05.st", w, 0, w.line(), effects, after, writes=regions))
    if w.machine.checker is not None:
        w.__dict__.setdefault("unwaited_stores", []).append(op)
    if not op.done:
        stores.append(op)


def flush_tmem_loads(w, mask=0, o=None):
    """Deliver the registers of this warp's tcgen05.ld: at their first use, or at wait::ld."""
    for op in w.pending_tmem_loads:
        w.machine.require(op)
    w.pending_tmem_loads.clear()


def do_wait_ld(w, mask, o):
    flush_tmem_loads(w)
    waited(w, "unwaited_loads")


def waited(w, name: str) -> None:
    """The race checker learns that these operations of the warp are complete."""
    if w.machine.checker is not None:
        for op in w.__dict__.get(name, ()):
            w.machine.checker.observe(w, op)
        w.__dict__[name] = []


def do_wait_st(w, mask, o):
    waited(w, "unwaited_stores")
    stores = w.__dict__.setdefault("pending_tmem_stores", [])
    for op in stores:
        w.machine.require(op)
    stores.clear()


@form("wait::ld")
def lower_wait_ld(asm, ins, modifiers) -> None:
    finish(asm, ins, modifiers, collective=True)
    asm.tmem_pending.clear()
    asm.macro(do_wait_ld, ins)


@form("wait::st")
def lower_wait_st(asm, ins, modifiers) -> None:
    finish(asm, ins, modifiers, collective=True)
    asm.macro(do_wait_st, ins)


@form("fence::before_thread_sync")
@form("fence::after_thread_sync")
def lower_fence(asm, ins, modifiers) -> None:
    """Orders tcgen05 operations against thread synchronisation; it has no effect of its own."""
    finish(asm, ins, modifiers)


# ---- cp, shift, commit --------------------------------------------------------------------------------------------


@form("cp")
def lower_cp(asm, ins, modifiers) -> None:
    group = take_group(asm, ins, modifiers)
    shape = take(asm, ins, modifiers, *tm.COPY_SHAPES)
    needed = {"64x128b": ("warpx2::02_13", "warpx2::01_23"), "32x128b": ("warpx4",)}.get(shape)
    multicast = take(asm, ins, modifiers, *needed) if needed else ""
    source = ""
    if take(asm, ins, modifiers, "b8x16", optional=True):
        source = take(asm, ins, modifiers, "b6x16_p32", "b4x16_p64")
    finish(asm, ins, modifiers)
    address, descriptor = ins.operands
    row = asm.address_row(address, "u")
    asm.macro(do_cp, ins, group=group, shape=shape, multicast=multicast, source=source, address=row,
              descriptor=asm.src(descriptor, "q"))  # fmt: skip


def do_cp(w, mask, o):
    ctas = group_ctas(w, o.group)
    rows, chunks = tm.COPY_SHAPES[o.shape]
    for thread in lanes(mask):
        address = int(w.R[o.address, thread])
        lane, column = address >> 16, address & 0xFFFF
        if lane and (o.shape != "4x256b" or lane >= 32):
            raise w.fault(
                "tmem-lane", f"tcgen05.cp.{o.shape} at lane {lane}; it covers all lane quarters from lane 0"
            )
        descriptor = located(w, swizzle.decode, int(w.Q[o.descriptor, thread]), True)
        for cta in ctas:
            located(w, cta.tmem.check, cta, column, 4 * chunks, "tcgen05.cp")
            located(
                w, swizzle.locate, cta.shared, pg.SHARED_START, descriptor, True, rows, chunks, "tcgen05.cp"
            )
        low, high = swizzle.footprint(descriptor, True, rows, chunks)

        def effects(lane=lane, column=column, descriptor=descriptor) -> None:
            for cta in ctas:
                data = swizzle.read(cta.shared, pg.SHARED_START, descriptor, True, rows, chunks, "tcgen05.cp")
                if o.source == "b4x16_p64":
                    data = formats.unpack_padded(data, "e2m1") << 2
                elif o.source == "b6x16_p32":
                    data = formats.unpack_padded(data, "e3m2")
                tm.copy_in(cta.tmem.cells, data, o.shape, o.multicast, lane, column)

        columns = ((column, column + 4 * chunks),)
        what = "cp.4x256b" if o.shape == "4x256b" else "cp"
        issue(w, thread, "tcgen05.cp", Footprint(what, (), (), columns), effects,
              reads=tuple(("shared", cta, low, high) for cta in ctas),
              writes=tuple(("tmem", cta, column, column + 4 * chunks) for cta in ctas))  # fmt: skip


@form("shift")
def lower_shift(asm, ins, modifiers) -> None:
    group = take_group(asm, ins, modifiers)
    take(asm, ins, modifiers, "down")
    finish(asm, ins, modifiers)
    asm.macro(do_shift, ins, group=group, address=asm.address_row(ins.operands[0], "u"))


def do_shift(w, mask, o):
    ctas = group_ctas(w, o.group)
    for thread in lanes(mask):
        address = int(w.R[o.address, thread])
        lane, column = address >> 16, address & 0xFFFF
        if lane % 32 or lane >= tm.LANES:
            raise w.fault("tmem-lane", f"tcgen05.shift at lane {lane}; accepted are multiples of 32")
        for cta in ctas:
            located(w, cta.tmem.check, cta, column, 8, "tcgen05.shift")

        def effects(lane=lane, column=column) -> None:
            for cta in ctas:
                tm.shift_down(cta.tmem.cells, lane, column)

        regions = tuple(("tmem", cta, column, column + 8) for cta in ctas)
        footprint = Footprint("shift", (), (), ((column, column + 8),))
        issue(w, thread, "tcgen05.shift", footprint, effects, reads=regions, writes=regions)


@form("commit")
def lower_commit(asm, ins, modifiers) -> None:
    group = take_group(asm, ins, modifiers)
    take(asm, ins, modifiers, "mbarrier::arrive::one")
    shared = take(asm, ins, modifiers, "shared::cluster", optional=True)
    multicast = take(asm, ins, modifiers, "multicast::cluster", optional=True)
    take(asm, ins, modifiers, "b64")
    finish(asm, ins, modifiers)
    place = shared_operand(asm, ins.operands[0], shared or None)
    ctas = asm.src(ins.operands[1], "u") if multicast else None
    asm.macro(do_commit, ins, group=group, address=place, ctas=ctas)


def commit_address(w, place: tuple[int, bool], lane: int) -> int:
    """Triton 3.6 puts a 32-bit shared address into the generic form's 64-bit register, and such kernels work on the
    device: an address below 4 GB counts as a shared one here."""
    row, generic = place
    if generic and int(w.Q[row, lane]) < 1 << 32:
        return int(w.Q[row, lane])
    return shared_address(w, place, lane)


def do_commit(w, mask, o):
    """One arrival on the mbarrier when all earlier products, copies and shifts of this thread are complete."""
    group_ctas(w, o.group)
    for thread in lanes(mask):
        address = commit_address(w, o.address, thread)
        addresses = [address]
        if o.ctas is not None:  # the barrier at the same offset in each CTA of the mask
            members = int(w.R[o.ctas, thread]) & 0xFFFF
            if members >> len(w.cta.cluster):
                raise w.fault("out-of-bounds", f"multicast mask {members:#x} names CTAs outside the cluster")
            offset = address & ((1 << pg.RANK_SHIFT) - 1)
            addresses = [
                cta.rank << pg.RANK_SHIFT | offset for cta in w.cta.cluster if members >> cta.rank & 1
            ]
        barriers = [barrier_at(w, x) for x in addresses]
        who = Issuer(w, "tcgen05.commit")

        def effects(barriers=barriers, who=who) -> None:
            for barrier in barriers:
                barrier.arrive(1, who)

        pending = w.__dict__.setdefault("tensor_ops", [])
        after = tuple(op for op, lane, _ in pending if lane == thread and not op.done)
        op = AsyncOp("tcgen05.commit", w, thread, w.line(), effects, after, signals=tuple(barriers))
        w.machine.issue(op)
