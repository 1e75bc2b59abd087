"""tcgen05.cp, shift and commit, and the order of tcgen05 operations.

Copies, shifts and products are asynchronous and unordered, except for the pairs PTX 9.4 calls pipelined, within one
warp: products on the same accumulator; a product that uses the result of a copy or shift; and a product, copy
or shift that overwrites what an earlier product reads. `issue` turns those pairs into the `after` of an operation;
the program must order everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from softsm import formats
from softsm.engine import program as pg
from softsm.engine.in_flight import AsyncOp
from softsm.isa.mbarriers import barrier_at
from softsm.isa.operands import Issuer, lanes, located, shared_address, shared_operand
from softsm.isa.tensor_memory import exactly, finish, form, group_ctas, strict, take, take_group
from softsm.memory import swizzle
from softsm.memory import tensor_memory as tm


class Footprint(NamedTuple):
    """The accesses of an asynchronous tcgen05 operation to tensor memory that decide its order with others."""

    what: str  # 'mma', 'cp', 'cp.4x256b', 'shift'
    accumulator: tuple  # mma: address and shape
    reads: tuple[tuple[int, int], ...]  # column ranges of A and scale factors
    writes: tuple[tuple[int, int], ...]


def overlap(a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...]) -> bool:
    return any(x < v and u < y for x, y in a for u, v in b)


def pipelined(old: Footprint, new: Footprint) -> bool:
    """Returns whether PTX 9.4 performs `new` after `old` when one warp issues them in this order."""
    if new.what == "mma":
        if old.what == "mma":
            return old.accumulator == new.accumulator or bool(old.reads)
        # PTX 9.4 orders copies of A and of scale factors; Triton relies on the order for the accumulator too
        return old.what in ("shift", "cp.4x256b") or overlap(old.writes, new.reads + new.writes)
    if old.what == "mma":
        return bool(old.reads)
    return old.what == "shift" and new.what == "cp.4x256b"


def latest_before(pending: list, footprint: Footprint, products: int) -> tuple[AsyncOp, ...]:
    """Returns the operations in flight (`products` of them are products) that a new one must follow, except those that
    one of the returned ones already follows."""
    last, _, before = pending[-1]
    if before.what == footprint.what == "mma" and before.accumulator == footprint.accumulator:
        # `last` precedes the new product, and already follows the same products.
        if products == len(pending):
            return (last,)
        return (*[op for op, _, old in pending if old.what != "mma" and pipelined(old, footprint)], last)
    after, covered = [], set()
    for op, _, other in reversed(pending):
        if op in covered:
            covered.update(op.after)
        elif pipelined(other, footprint):
            after.append(op)
            covered.update(op.after)
    return tuple(after[::-1])


def issue(
    w, lane: int, kind: str, footprint: Footprint, effects: Callable[[], None], reads=(), writes=(), product=None
) -> AsyncOp:
    """Starts an asynchronous operation of one thread. product: see AsyncOp."""
    machine, in_flight = w.cta.machine, w.in_flight
    after: tuple[AsyncOp, ...] = ()
    pending = in_flight.tensor_ops
    if pending and pending[0][0].done:
        pending = in_flight.tensor_ops = [entry for entry in pending if not entry[0].done]
        in_flight.products = sum([old.what == "mma" for _, _, old in pending])
    if pending:
        after = latest_before(pending, footprint, in_flight.products)
    op = AsyncOp(kind, w, lane, w.line(), effects, after, (), reads, writes, footprint, product=product)
    machine.issue(op)
    if not op.done:
        pending.append((op, lane, footprint))
        in_flight.products += footprint.what == "mma"
    return op


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
    finish(asm, ins, modifiers, exactly(2))
    address, descriptor = ins.operands
    row = asm.address_row(address, "u")
    asm.macro(
        do_cp,
        ins,
        group=group,
        shape=shape,
        multicast=multicast,
        source=source,
        address=row,
        descriptor=asm.src(descriptor, "q"),
    )


def do_cp(w, mask, o):
    ctas = group_ctas(w, o.group)
    rows, chunks = tm.COPY_SHAPES[o.shape]
    for thread in lanes(mask):
        address = int(w.R[o.address, thread])
        lane, column = address >> 16, address & 0xFFFF
        if lane and (o.shape != "4x256b" or lane >= 32):
            raise w.fault("tmem-lane", f"tcgen05.cp.{o.shape} at lane {lane}; it covers all lane quarters from lane 0")
        descriptor = located(w, swizzle.decode, int(w.Q[o.descriptor, thread]), True)
        for cta in ctas:
            located(w, cta.tmem.check, cta, column, 4 * chunks, "tcgen05.cp")
            located(w, swizzle.locate, cta.shared, pg.SHARED_START, descriptor, True, rows, chunks, "tcgen05.cp")
        used = {"b4x16_p64": 8, "b6x16_p32": 12}.get(o.source, 16)  # bytes before the padding
        covered = swizzle.spans(descriptor, True, rows, chunks, used)

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
        issue(
            w,
            thread,
            "tcgen05.cp",
            Footprint(what, (), (), columns),
            effects,
            reads=tuple(("spans", cta, covered) for cta in ctas),
            writes=tuple(("tmem", cta, column, column + 4 * chunks, tm.ALL_GROUPS, "") for cta in ctas),
        )


@form("shift")
def lower_shift(asm, ins, modifiers) -> None:
    group = take_group(asm, ins, modifiers)
    take(asm, ins, modifiers, "down")
    finish(asm, ins, modifiers, exactly(1))
    asm.macro(do_shift, ins, group=group, address=asm.address_row(ins.operands[0], "u"))


def do_shift(w, mask, o):
    ctas = group_ctas(w, o.group)
    for thread in lanes(mask):
        address = int(w.R[o.address, thread])
        lane, column = address >> 16, address & 0xFFFF
        if lane % 32 or lane >= tm.LANES:
            raise w.fault("tmem-lane", f"tcgen05.shift at lane {lane}; accepted: multiples of 32")
        for cta in ctas:
            located(w, cta.tmem.check, cta, column, 8, "tcgen05.shift")
        start_shift(w, thread, ctas, (lane,), column)


def start_shift(w, thread: int, ctas: list, quarters: tuple[int, ...], column: int) -> None:
    """Shifts the rows of eight columns down within each lane quarter; `quarters` are their first lanes."""

    def effects() -> None:
        for cta in ctas:
            for lane in quarters:
                tm.shift_down(cta.tmem.cells, lane, column)

    regions = tuple(("tmem", cta, column, column + 8, tm.ALL_GROUPS, "") for cta in ctas)
    footprint = Footprint("shift", (), (), ((column, column + 8),))
    issue(w, thread, "tcgen05.shift", footprint, effects, reads=regions, writes=regions)


@form("commit")
def lower_commit(asm, ins, modifiers) -> None:
    group = take_group(asm, ins, modifiers)
    take(asm, ins, modifiers, "mbarrier::arrive::one")
    shared = take(asm, ins, modifiers, "shared::cluster", optional=True)
    multicast = take(asm, ins, modifiers, "multicast::cluster", optional=True)
    take(asm, ins, modifiers, "b64")
    finish(asm, ins, modifiers, exactly(2 if multicast else 1))
    place = shared_operand(asm, ins.operands[0], shared or None)
    ctas = asm.src(ins.operands[1], "u") if multicast else None
    asm.macro(do_commit, ins, group=group, address=place, ctas=ctas)


def commit_address(w, place: tuple[int, bool], lane: int) -> int:
    """Treats an address below 4 GB as a shared one: Triton 3.6 puts a 32-bit shared address into the generic form's
    64-bit register, and such kernels work on the device."""
    row, generic = place
    if generic and int(w.Q[row, lane]) < 1 << 32:
        return int(w.Q[row, lane])
    return shared_address(w, place, lane)


def do_commit(w, mask, o):
    """Arrives once on the mbarrier when all earlier products, copies and shifts of this thread are complete.

    PTX does not order the arrivals of two commits; DeepGEMM relies on the order in which they were issued."""
    group_ctas(w, o.group)
    for thread in lanes(mask):
        address = commit_address(w, o.address, thread)
        addresses = [address]
        if o.ctas is not None:  # the barrier at the same offset in each CTA of the mask
            members = int(w.R[o.ctas, thread]) & 0xFFFF
            if members >> len(w.cta.cluster):
                raise w.fault("out-of-bounds", f"multicast mask {members:#x} names CTAs outside the cluster")
            offset = address & ((1 << pg.RANK_SHIFT) - 1)
            addresses = [cta.rank << pg.RANK_SHIFT | offset for cta in w.cta.cluster if members >> cta.rank & 1]
        barriers = [barrier_at(w, x) for x in addresses]
        who = Issuer(w, "tcgen05.commit")

        def effects(barriers=barriers, who=who) -> None:
            for barrier in barriers:
                barrier.arrive(1, who)

        pending = w.in_flight.tensor_ops
        after = tuple([op for op, lane, _ in pending if lane == thread and not op.done])
        last = w.in_flight.commits.get(thread)
        if last is not None and not last.done and not strict(w):
            after = (*after, last)
        op = AsyncOp("tcgen05.commit", w, thread, w.line(), effects, after, signals=tuple(barriers))
        w.machine.issue(op)
        if not op.done:
            w.in_flight.commits[thread] = op
