"""cp.async.bulk between global memory, shared memory and peers, cp.reduce.async.bulk, st.async, red.async, st.bulk.

A store is two operations, its read of shared memory and its write of global memory, because `wait_group.read` waits
only for the first. Loads and copies to a peer complete on an mbarrier, by bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from softsm.engine.emitter import Emitter
from softsm.isa.copying import global_view, start, waited
from softsm.isa.mbarriers import barrier_at
from softsm.isa.operands import Issuer, lanes, located, shared_address, shared_bytes, shared_operand
from softsm.isa.typed import needs_target
from softsm.memory.box_copy import combine
from softsm.ptx.ast import Imm, Instruction

COMPLETE_TX = "mbarrier::complete_tx::bytes"
DTYPES = {
    "u32": np.uint32,
    "s32": np.int32,
    "b32": np.uint32,
    "u64": np.uint64,
    "s64": np.int64,
    "b64": np.uint64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
}
BULK_STORE_BYTES = 16_777_216  # the most that one st.bulk writes
INTEGER_OPS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def lower(asm, ins, reduction: bool, mods):
    """Lowers cp.async.bulk and cp.reduce.async.bulk without .tensor; `mods` are the modifiers after .bulk."""
    if mods[:1] == ("prefetch",) and not reduction:
        return _prefetch(asm, ins, mods[1:])
    return _bulk(asm, ins, reduction, mods)


def _prefetch(asm, ins, mods):
    """Executes cp.async.bulk.prefetch.L2.global: changes no value, but the program must still align its operands."""
    if mods[:2] != ("L2", "global") or set(mods[2:]) - {"L2::cache_hint"}:
        asm.refuse(ins, "expected cp.async.bulk.prefetch.L2.global")
    asm.macro(do_prefetch, ins, src=asm.address_row(ins.operands[0], "q"), size=asm.src(ins.operands[1], "u"))


def _bulk(asm, ins, reduction, mods):
    spaces = [m for m in mods if m in ("global", "shared::cta", "shared::cluster")]
    flags = [m for m in mods if m not in spaces]
    pair = tuple(spaces)
    barrier = COMPLETE_TX in flags
    ways = {
        ("shared::cluster", "global"): (True, {"multicast::cluster"}, do_bulk_load),
        ("shared::cta", "global"): (True, set(), do_bulk_load),
        ("shared::cluster", "shared::cta"): (True, set(), do_bulk_peer),
        ("global", "shared::cta"): (False, {"cp_mask"}, do_bulk_store),
    }
    if pair not in ways or (reduction and pair not in (("shared::cluster", "shared::cta"), ("global", "shared::cta"))):
        return asm.refuse(ins, f"no copy from {' to '.join(reversed(spaces)) or 'nowhere'}")
    by_barrier, extra, function = ways[pair]
    if by_barrier != barrier or barrier == ("bulk_group" in flags):
        asm.refuse(ins, f"completes by .{COMPLETE_TX if by_barrier else 'bulk_group'}")
    left = [m for m in flags if m not in (COMPLETE_TX, "bulk_group", "L2::cache_hint")]
    op = dtype = None
    if reduction:
        left, op, dtype = _reduction(asm, ins, left, pair[0] == "global")
    if set(left) - (extra if not reduction else set()):
        asm.refuse(ins, f"unknown modifiers {', '.join(left)}")
    if "cp_mask" in left:
        needs_target(asm, ins, 100)
    operands = list(ins.operands)
    target, source, size = operands[:3]
    operands = operands[3:]
    place = shared_operand(asm, operands.pop(0), "shared") if by_barrier else None
    cta_mask = asm.src(operands.pop(0), "u") if "multicast::cluster" in left else None
    if "L2::cache_hint" in flags:
        asm.src(operands.pop(0), "q")
    byte_mask = asm.src(operands.pop(0), "u") if "cp_mask" in left else None
    if operands:
        asm.refuse(ins, f"{len(ins.operands)} operands")
    return asm.macro(
        function,
        ins,
        dst=asm.address_row(target, "u" if pair[0] != "global" else "q"),
        src=asm.address_row(source, "u" if pair[1] != "global" else "q"),
        size=asm.src(size, "u"),
        barrier=place,
        cta_mask=cta_mask,
        byte_mask=byte_mask,
        op=op,
        dtype=dtype,
    )


def _reduction(asm, ins, flags, to_global: bool):
    """Returns (remaining modifiers, operation, NumPy type)."""
    kinds = [m for m in flags if m in DTYPES]
    ops = [m for m in flags if m in INTEGER_OPS]
    if len(kinds) != 1 or len(ops) != 1:
        asm.refuse(ins, "needs one operation and one type")
    kind, op = kinds[0], ops[0]
    floats = {"f16": ("add", "min", "max"), "bf16": ("add", "min", "max"), "f32": ("add",), "f64": ("add",)}
    bits = ("and", "or", "xor")
    if kind in floats:
        ok = to_global and op in floats[kind] and (("noftz" in flags) == (op == "add" and kind in ("f16", "bf16")))
    elif kind[0] == "b":
        ok = op in bits and (to_global or kind == "b32")
    else:
        ok = (
            op not in bits
            and (op not in ("inc", "dec") or kind == "u32")
            and (kind, op) != ("s64", "add")
            and (to_global or kind in ("u32", "s32") or (kind == "u64" and op == "add"))
        )
    if not ok:
        asm.refuse(ins, f".{op} on .{kind} is not defined here")
    return [m for m in flags if m not in (kind, op, "noftz")], op, DTYPES[kind]


# -- at run time -------------------------------------------------------------------------------------------------------


def do_prefetch(w, mask, o):
    for lane in lanes(mask):
        if int(w.Q[o.src, lane]) % 16 or int(w.R[o.size, lane]) % 16:
            raise w.fault("misaligned", "cp.async.bulk.prefetch: address and size must be multiples of 16 bytes")


def _size(w, o, lane: int) -> int:
    size = int(w.R[o.size, lane])
    if size % 16:
        raise w.fault("copy-size", f"cp.async.bulk: size {size} is not a multiple of 16 bytes")
    return size


def _global(w, address: int, size: int, what: str) -> np.ndarray:
    if address % 16:
        raise w.fault("misaligned", f"{what}: global address {address:#x} is not a multiple of 16 bytes")
    return global_view(w, address, size, what)


def destinations(
    w, address: int, size: int, place, lane: int, cta_mask: int | None, what: str, align: int = 16, pair=False
):
    """Returns [(cta, offset, barrier)] of a copy into shared memory: one entry, or one per CTA of a multicast.

    A copy signals the barrier of its destination CTA. With .cta_group::2 (`pair`) it signals the barrier of the CTA in
    the pair whose parity the barrier operand has."""
    signal = shared_address(w, place, lane)
    if cta_mask is None:
        cta, offset = shared_bytes(w, address, size, what, align)
        home, _ = located(w, w.cta.resolve_shared, signal)
        if home is not cta and not (pair and home.rank ^ cta.rank == 1):
            raise w.fault(
                "barrier-remote", f"{what}: lands in CTA rank {cta.rank}, but its mbarrier is in CTA rank {home.rank}"
            )
        return [(cta, offset, signalled(w, signal))]
    cluster = w.cta.cluster
    if cta_mask == 0 or cta_mask >> len(cluster):
        raise w.fault("multicast", f"{what}: ctaMask {cta_mask:#x}; the cluster has {len(cluster)} CTAs")
    out = []
    low = (1 << 24) - 1
    for rank in lanes(cta_mask):
        cta, offset = shared_bytes(w, rank << 24 | address & low, size, what, align)
        home = rank & ~1 | (signal >> 24) & 1 if pair else rank
        out.append((cta, offset, signalled(w, home << 24 | signal & low)))
    return out


def signalled(w, address: int):
    """Returns the mbarrier that a copy signals; observers check that the copy engine can see it."""
    barrier = barrier_at(w, address)
    if w.machine.observer is not None:
        w.machine.observer.barrier_used(w, barrier, asynchronous=True)
    return barrier


def do_bulk_load(w, mask, o):
    for lane in lanes(mask):
        size, source = _size(w, o, lane), int(w.Q[o.src, lane])
        data = _global(w, source, size, "cp.async.bulk read")
        cta_mask = None if o.cta_mask is None else int(w.R[o.cta_mask, lane]) & 0xFFFF
        targets = destinations(w, int(w.R[o.dst, lane]), size, o.barrier, lane, cta_mask, "cp.async.bulk")
        who = Issuer(w, "cp.async.bulk")

        def effects(data=data, size=size, targets=targets, who=who) -> None:
            for cta, offset, barrier in targets:
                cta.shared[offset : offset + size] = data
                barrier.complete_tx(size, who)

        start(
            w,
            lane,
            "bulk load",
            effects,
            signals=tuple(barrier for _, _, barrier in targets),
            reads=(("global", source, source + size),),
            writes=tuple(("shared", cta, offset, offset + size) for cta, offset, _ in targets),
            nbytes=size,
        )


def needs_cluster(w) -> None:
    """Faults as an H200 does: illegal instruction without a cluster launch, even on the CTA's own shared memory."""
    if not w.machine.explicit_cluster:
        raise w.fault(
            "cluster-launch", f"{w.instruction().name} in a launch without clusters; a GPU does not execute it there"
        )


def do_bulk_peer(w, mask, o):
    """Copies or reduces from shared::cta to shared::cluster."""
    needs_cluster(w)
    for lane in lanes(mask):
        size = _size(w, o, lane)
        home, begin = shared_bytes(w, int(w.R[o.src, lane]), size, "cp.async.bulk read")
        [(cta, offset, barrier)] = destinations(w, int(w.R[o.dst, lane]), size, o.barrier, lane, None, "cp.async.bulk")
        who = Issuer(w, "cp.async.bulk")

        def effects(home=home, begin=begin, cta=cta, offset=offset, barrier=barrier, size=size, who=who) -> None:
            data, target = home.shared[begin : begin + size], cta.shared[offset : offset + size]
            target[:] = data if o.op is None else reduce_bytes(target, data, o.op, o.dtype)
            barrier.complete_tx(size, who)

        start(
            w,
            lane,
            "bulk copy to a peer" if o.op is None else "bulk reduction in a peer",
            effects,
            signals=(barrier,),
            reads=(("shared", home, begin, begin + size),),
            writes=(("shared", cta, offset, offset + size),),
            nbytes=size,
        )


def reduce_bytes(old: np.ndarray, new: np.ndarray, op: str, dtype) -> np.ndarray:
    return combine(old.view(dtype), new.view(dtype), op).view(np.uint8)


def store_in_two(
    w, lane: int, kind: str, read: Callable[[], object], write: Callable[[object], None], reads, writes
) -> None:
    """Issues a bulk store as its read of shared memory and its write of global memory, for the thread's bulk group."""
    held: list = []
    first = start(w, lane, f"{kind} (read)", lambda: held.append(read()), reads=reads)
    second = start(w, lane, kind, lambda: write(held.pop()), after=(first,), writes=writes)
    w.in_flight.bulk.add(1 << lane, first, second)


def do_bulk_store(w, mask, o):
    for lane in lanes(mask):
        size, address = _size(w, o, lane), int(w.Q[o.dst, lane])
        cta, offset = shared_bytes(w, int(w.R[o.src, lane]), size, "cp.async.bulk read")
        target = _global(w, address, size, "cp.async.bulk write")
        keep = None
        if o.byte_mask is not None:
            bits = int(w.R[o.byte_mask, lane])
            keep = np.tile([bool(bits >> i & 1) for i in range(16)], size // 16)

        def read(cta=cta, offset=offset, size=size):
            return cta.shared[offset : offset + size].copy()

        def write(data, target=target, keep=keep):
            if o.op is not None:
                target[:] = reduce_bytes(target, data, o.op, o.dtype)
            elif keep is not None:
                target[keep] = data[keep]
            else:
                target[:] = data

        store_in_two(
            w,
            lane,
            "bulk store" if o.op is None else "bulk reduction",
            read,
            write,
            (("shared", cta, offset, offset + size),),
            (("global", address, address + size),),
        )


def do_bulk_commit(w, mask, o):
    w.in_flight.bulk.commit(mask)


def do_bulk_wait(w, mask, o):
    """Executes wait_group N, or wait_group.read N, which waits only for the reads of shared memory."""
    mine = w.in_flight.bulk
    if not o.read:
        for op in mine.take(mask, o.newest):
            w.machine.require(op)
            waited(w, op)
        return
    before = mine.closed
    for op in mine.take(mask, o.newest):
        if op.kind.endswith("(read)"):
            w.machine.require(op)
            waited(w, op)
    # A later wait_group may wait for the writes, and for a newer group even if its operations have completed.
    newer = {id(ops) for _, ops in mine.closed}
    mine.closed = before
    while mine.closed and id(mine.closed[0][1]) not in newer and all(op.done for op in mine.closed[0][1]):
        mine.closed.pop(0)


# -- st.async, red.async -----------------------------------------------------------------------------------------------


def reduce_async(asm: Emitter, ins: Instruction):
    mods = [m for m in ins.modifiers if m not in ("async", "relaxed", "cluster")]
    op = next((m for m in mods if m in INTEGER_OPS), None)
    if op is None or ins.opcode != "red":
        asm.refuse(ins, "expected red.async.relaxed.cluster with an operation")
    types = {
        "add": {"u32", "s32", "u64", "s64"},
        "inc": {"u32"},
        "dec": {"u32"},
        "min": {"u32", "s32"},
        "max": {"u32", "s32"},
    }
    if not types.get(op, {"b32"}) & set(mods):
        asm.refuse(ins, f".{op} accepts .{', .'.join(sorted(types.get(op, {'b32'})))}")
    store_async(asm, ins, tuple(m for m in mods if m != op), op)


def store_async(asm, ins, mods, op):
    vectors = {"v2": 2, "v4": 4}
    kinds = [m for m in mods if m in DTYPES and m not in ("f16", "bf16")]
    count = next((vectors[m] for m in mods if m in vectors), 1)
    left = set(mods) - set(kinds) - set(vectors) - {COMPLETE_TX, "shared::cluster", "weak"}
    if left or len(kinds) != 1 or COMPLETE_TX not in mods or (op is not None and count > 1):
        asm.refuse(ins, f"expected .shared::cluster.{COMPLETE_TX} and a 32- or 64-bit type")
    dtype = np.dtype(DTYPES[kinds[0]])
    wide = dtype.itemsize == 8
    space = "shared::cluster" if "shared::cluster" in mods else None
    address, value, barrier = ins.operands
    rows = asm.vector_rows(value, "q" if wide else "u")
    if len(rows) != count:
        asm.refuse(ins, f"{len(rows)} values for a vector of {count}")
    asm.macro(
        do_store_async,
        ins,
        dst=shared_operand(asm, address, space),
        rows=rows,
        barrier=shared_operand(asm, barrier, space),
        dtype=dtype,
        op=op,
    )


def do_store_async(w, mask, o):
    needs_cluster(w)
    size = o.dtype.itemsize * len(o.rows)
    bank = w.Q if o.dtype.itemsize == 8 else w.R
    for lane in lanes(mask):
        data = np.ascontiguousarray(bank[o.rows, lane]).view(np.uint8)
        address = shared_address(w, o.dst, lane)
        name = w.instruction().opcode + ".async"
        [(cta, offset, barrier)] = destinations(w, address, size, o.barrier, lane, None, name, size)
        who = Issuer(w, name)

        def effects(data=data, cta=cta, offset=offset, barrier=barrier, who=who) -> None:
            target = cta.shared[offset : offset + size]
            target[:] = data if o.op is None else reduce_bytes(target, data, o.op, o.dtype)
            barrier.complete_tx(size, who)

        written = ("shared", cta, offset, offset + size)
        start(w, lane, name, effects, signals=(barrier,), writes=(written,), nbytes=size)


# -- st.bulk -----------------------------------------------------------------------------------------------------------


def store_bulk(asm, ins, mods) -> None:
    """Lowers st.bulk: a thread writes zeros to a range of shared memory, a weak store in the generic proxy."""
    needs_target(asm, ins, 100)
    if set(mods) - {"weak", "shared::cta"} or len(ins.operands) != 3:
        asm.refuse(ins, "expected st.bulk{.weak}{.shared::cta} [a], size, 0")
    address, size, initial = ins.operands
    if not isinstance(initial, Imm) or initial.value != 0:
        asm.refuse(ins, "the initial value must be the constant 0")
    place = shared_operand(asm, address, "shared::cta" if "shared::cta" in mods else None)
    asm.macro(do_store_bulk, ins, dst=place, size=asm.src(size, "q"))


def do_store_bulk(w, mask, o):
    for lane in lanes(mask):
        size, address = int(w.Q[o.size, lane]), shared_address(w, o.dst, lane)
        if size % 8 or size > BULK_STORE_BYTES:
            raise w.fault(
                "copy-size", f"st.bulk: got {size} bytes; multiples of 8 up to {BULK_STORE_BYTES} are accepted"
            )
        cta, offset = shared_bytes(w, address, size, "st.bulk", 8)
        if w.machine.observer is not None:
            w.machine.observer.accessed_shared(w, cta, offset, offset + size, True, lane=lane)
        cta.shared[offset : offset + size] = 0
    w.machine.writes += 1
