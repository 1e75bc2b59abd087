"""wgmma (sm_90a): a warpgroup multiplies a 64-row A, in shared memory or registers, with B in shared memory.

Each of the four warps executes the instruction by itself, but they make one MMA. It is issued as an asynchronous
operation when all four have committed its group, and performed before the wait_group that covers it returns. Until its
own wait a warp may find the old values in its accumulator registers. MMAs of one group on the same accumulator are
computed together, as one with a longer k. A warp reads the metadata of a sparse MMA (isa/sparsity.py) when it executes
the instruction: PTX requires a fence and a wait only for the registers of D and A.

Thread t of a warp, element v of the accumulator: row t/4 + 8*((v/2)%2) of the warp's 16, column 8*(v/4) + 2*(t%4) +
v%2.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from softsm.engine import program as pg
from softsm.engine.emitter import Emitter
from softsm.engine.in_flight import AsyncOp, Batch, GroupSequence, Warpgroup
from softsm.engine.program import Blocked
from softsm.errors import Fault
from softsm.isa import sparsity
from softsm.isa.operands import located
from softsm.isa.registry import lowers
from softsm.isa.tensor_memory import exactly, finish, take
from softsm.isa.wgmma_product import Chain, Part, Shape, chains_of, check_footprints, perform, write_registers
from softsm.memory import swizzle
from softsm.memory.swizzle import Descriptor
from softsm.ptx.ast import Imm, Instruction, Vector

KNOWN_GROUPS = 4096  # the most chains of MMAs that one instruction keeps
FLOATS = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}  # A and B types -> k


# ---- lowering -----------------------------------------------------------------------------------------------------


@lowers("wgmma")
def lower(asm, ins) -> None:
    if asm.module.target != "sm_90a":
        asm.refuse(ins, f"wgmma needs .target sm_90a, the module has {asm.module.target}")
    name, *modifiers = ins.modifiers or ("",)
    if name == "fence":  # orders register accesses, which are never early here
        finish(asm, ins, modifiers, exactly(0), collective=True)
        asm.wgmma_dirty, asm.wgmma_constants = set(), set()
    elif name == "commit_group":
        finish(asm, ins, modifiers, exactly(0), collective=True)
        asm.macro(do_commit, ins, known={})
    elif name == "wait_group":
        finish(asm, ins, modifiers, exactly(1), collective=True)
        if not isinstance(ins.operands[0], Imm) or not isinstance(ins.operands[0].value, int):
            raise asm.error("wgmma.wait_group needs an integer")
        asm.macro(do_wait, ins, keep=max(ins.operands[0].value, 0))
        if int(ins.operands[0].value) == 0:
            asm.wgmma_pending.clear()
            asm.wgmma_busy.clear()
            asm.wgmma_settled.clear()
    elif name == "mma_async":
        lower_mma(asm, ins, modifiers)
    else:
        asm.refuse(ins, "no such wgmma operation")


class Form(NamedTuple):
    """What the modifiers of an mma_async say."""

    n: int
    k: int
    d: str  # type of D, and so on
    a: str
    b: str
    saturate: bool
    sparse: bool

    @property
    def integer(self) -> bool:
        return self.d == "s32"

    @property
    def halves(self) -> bool:
        """The only types that can be transposed."""
        return self.a in ("f16", "bf16")


def mma_form(asm: Emitter, ins: Instruction, modifiers: list[str]) -> Form:
    sparse = modifiers[:1] == ["sp"]
    modifiers = modifiers[sparse:]
    if modifiers[:2] != ["sync", "aligned"] or len(modifiers) < 6:
        asm.refuse(ins, "expected .sync.aligned.m64nNkK and the types of D, A and B")
    if len(ins.operands) < 4 + 2 * sparse:
        raise asm.error(f"expected at least {4 + 2 * sparse} operands, got {len(ins.operands)}")
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", modifiers[2])
    rest = modifiers[3:]
    saturate = bool(take(asm, ins, rest, "satfinite", optional=True))
    bits = rest[-2:] == ["and", "popc"]
    rest = rest[:-2] if bits else rest
    if shape is None or len(rest) != 3:
        asm.refuse(ins, "expected .m64nNkK and the types of D, A and B")
    d, a, b = rest
    form = Form(int(shape[1]), int(shape[2]), d, a, b, saturate, sparse)
    n, k = form.n, form.k
    dense_k = k // 2 if sparse else k
    if form.integer:
        single = bits and a == b == "b1" and k == 256 and not saturate and not sparse
        kinds = single if bits else {a, b} <= {"s8", "u8"} and dense_k == 32
        legal = kinds and n in (8, 16, 24, 32, *range(48, 257, 16))
    else:
        same = a == b if a in ("f16", "bf16", "tf32") else {a, b} <= {"e4m3", "e5m2"}
        legal = d in ("f32", "f16") and same and FLOATS.get(a) == dense_k and n in range(8, 257, 8) and not saturate
        legal = legal and not bits and not (d == "f16" and a in ("bf16", "tf32"))
    if not legal:
        asm.refuse(ins, "no such combination of shape and types")
    return form


def signs_and_transposes(asm: Emitter, form: Form, immediates: list, from_registers: bool) -> tuple[list, list]:
    """Returns scale-a and scale-b, and whether A and B are transposed, of which registers never are."""
    if any(not isinstance(x, Imm) for x in immediates):
        raise asm.error("scale and transpose operands must be immediates")
    numbers = [int(x.value) for x in immediates]
    expected = 0 if form.integer else 2 if not form.halves else 3 if from_registers else 4
    if len(numbers) != expected:
        raise asm.error(f"expected {expected} immediates after scale-d, got {len(numbers)}")
    signs = numbers[:2] or [1, 1]
    if set(signs) - {1, -1}:
        raise asm.error(f"scale-a and scale-b are 1 or -1, got {signs}")
    transposed = ([0] if from_registers else []) + numbers[2:] if form.halves else [0, 0]
    if set(transposed) - {0, 1}:
        raise asm.error(f"transpose operands are 0 or 1, got {transposed}")
    return signs, transposed


def lower_mma(asm: Emitter, ins: Instruction, modifiers: list[str]) -> None:
    form = mma_form(asm, ins, modifiers)
    n, k, d, a, b, saturate, sparse = form
    d_regs, a_operand, b_operand, *others = ins.operands
    metadata, selector = lower_metadata(asm, ins, others[:2], a) if sparse else (-1, 0)
    scale_d, *immediates = others[2 * sparse :]
    from_registers = isinstance(a_operand, Vector)
    signs, transposed = signs_and_transposes(asm, form, immediates, from_registers)
    what = Shape(n, k, d, a, b, saturate, signs[0] != signs[1], not transposed[0], not transposed[1], sparse)
    rows = asm.vector_rows(d_regs, "u", write=True)
    count = n // 4 if d == "f16" else n // 2
    if len(rows) != count:
        raise asm.error(f"D of m64n{n}k{k} in {d} needs {count} registers, got {len(rows)}")
    a_source: np.ndarray | int
    if from_registers:
        a_rows = asm.vector_rows(a_operand, "u")
        if len(a_rows) != 4:
            raise asm.error(f"A needs 4 registers, got {len(a_rows)}")
        a_source = np.array(a_rows)
    else:
        a_source = asm.src(a_operand, "q")
    used = frozenset(("R", r) for r in [*rows, *(a_rows if from_registers else ())])
    asm.wgmma_busy.update(dict.fromkeys(used, used))
    if asm.checking:
        if asm.wgmma_dirty is None or used & asm.wgmma_dirty:
            asm.macro(do_unfenced, ins, constants=False)
        elif used & asm.wgmma_constants:
            asm.macro(do_unfenced, ins, constants=True)
        asm.wgmma_pending.update((x, x[1]) for x in used)
    asm.macro(
        do_mma,
        ins,
        shape=what,
        d=np.array(rows),
        a=a_source,
        b=asm.src(b_operand, "q"),
        add=asm.src(scale_d, "p"),
        d_set=pg.row_set(rows),
        a_set=pg.row_set(a_rows if from_registers else ()),
        line=ins.line,
        metadata=metadata,
        selector=selector,
    )


def lower_metadata(asm, ins, operands, element: str) -> tuple[int, int]:
    """Returns (row of the metadata, sparsity selector)."""
    selector = operands[1]
    choices = 2 if element in ("f16", "bf16", "tf32") else 1
    if not isinstance(selector, Imm) or selector.value not in range(choices):
        asm.refuse(ins, f"the sparsity selector is {'0 or 1' if choices == 2 else '0'} for {element}")
    return asm.src(operands[0], "u"), int(selector.value)


# ---- the warpgroup ------------------------------------------------------------------------------------------------


def state_of(w) -> GroupSequence:
    state = w.in_flight.wgmma
    if state is None:
        cta = w.cta
        groups = cta.warpgroups
        number = w.index // 4
        if number not in groups:
            warps = cta.warps[4 * number : 4 * number + 4]
            if len(warps) < 4 or any(x.alive != pg.ALL for x in warps):
                raise w.fault("warpgroup", f"wgmma needs four whole warps; warpgroup {number} of {cta} is incomplete")
            if not groups:
                cta.exit_hooks.append(at_exit)
            groups[number] = Warpgroup(warps)
        state = w.in_flight.wgmma = GroupSequence(groups[number])
    return state


def at_exit(w) -> None:
    """Completes a warp's MMAs when it exits: another warp will use its registers."""
    state = w.in_flight.wgmma
    if state is not None:
        for batch in state.group.batches.values():
            for op in batch.results.get(w.index, ()):
                w.machine.require(op)


def do_mma(w, mask, o):
    state = state_of(w)
    a = o.a if isinstance(o.a, np.ndarray) else descriptor(w, o.a, "A")
    add = int(w.P[o.add])
    if add not in (0, pg.ALL):
        raise w.fault("wgmma-operands", "scale-d differs between the threads of the warp")
    b = descriptor(w, o.b, "B")
    where = None
    if o.shape.sparse:
        located(w, swizzle.check_row, b, o.shape.b_k_major, 64, "operand B of a sparse wgmma")
        kind = sparsity.granularity(o.shape.a)
        chunks = sparsity.chunks_of(o.shape.a, o.shape.k)
        codes = sparsity.register_codes(w.R[o.metadata], o.selector, chunks, o.shape.a)
        located(w, sparsity.check, codes, kind)
        where = sparsity.columns(codes, kind)
    state.open.append(Part(w, o.line, o.shape, o.d, a, b, bool(add), o.d_set, o.a_set, where))


def do_unfenced(w, mask, o):
    """Reports a missing wgmma.fence between an ordinary use of the registers and the MMA. clang sinks constants below
    the fence that stands behind them in the source, so they are reported only at the strict level."""
    if o.constants and not w.machine.observer.strict:
        return
    what = "registers of this wgmma were used by ordinary instructions, and no wgmma.fence follows"
    w.machine.observer.misused(w, "wgmma-registers", what, "starts")


def do_early_use(w, mask, o):
    """Reports a use of a wgmma's registers before the warp has waited for it. Triton copies them at the end of a loop,
    or splits packed halves, before the wait, which ptxas handles. So copies, and reads of A, are reported only at the
    strict level: Triton 3.6 and FlashMLA store A while the MMA reads it, and no GPU has given another value. Other uses
    of a copy before the wait are always reported."""
    state = w.in_flight.wgmma
    strict = w.machine.observer.strict
    if state is None or o.copy and not strict:
        return
    committed = [b.parts.get(w.index, []) for n, b in state.group.batches.items() if n >= state.waited]
    for part in [*state.open, *(p for parts in committed for p in parts)]:
        a = part.a_set & (o.rows if strict else o.written)
        if a | part.d_set & o.rows:
            name, use = ("A", "overwritten" if a & o.written else "read") if a else ("accumulator", "used")
            what = f"{name} registers of the wgmma at PTX line {part.line} are {use} before its wgmma.wait_group"
            w.machine.observer.misused(w, "wgmma-registers", what, "uses them")
            return


def do_settle(w, mask, o):
    """Handles a use of a wgmma's registers before the wait. PTX does not define the result. ptxas completes the MMAs
    first ("wgmma serialized"), which Triton's partial accumulation (`max_num_imprecise_acc`) relies on, and so does
    order 'eager'. In the other orders only a move gets the result."""
    state = w.in_flight.wgmma
    eager = w.machine.engine.order == "eager"
    if state is None or not (eager or o.move):
        return None
    if eager and uses(state.open, o.rows):
        do_commit(w, mask, o)
    group = state.group
    batches = [b for n, b in group.batches.items() if n >= state.waited and uses(b.parts.get(w.index, ()), o.rows)]
    for batch in batches:  # the checkers do not count this as a wait
        if batch.ops is None:
            return Blocked(group, "the other warps of the warpgroup to commit the same wgmma group")
        for op in batch.results[w.index]:
            w.machine.require(op)
    return None


def uses(parts, rows: int) -> bool:
    return any(rows & (p.d_set | p.a_set) for p in parts)


def descriptor(w, row: int, name: str) -> Descriptor:
    values = w.Q[row].tobytes()
    first = values[:8]
    if values != first * 32:
        raise w.fault("wgmma-operands", f"the threads of the warp give different descriptors for {name}")
    return located(w, swizzle.decode, int.from_bytes(first, "little"), False)


def do_commit(w, mask, o):
    state = state_of(w)
    group = state.group
    batch = group.batches.setdefault(state.committed, Batch())
    batch.parts[w.index] = state.open
    state.open = []
    state.committed += 1
    if w.machine.observer is not None:
        w.machine.observer.warpgroup_committed(w, batch)
    if len(batch.parts) == 4:
        located(w, start, w, group, batch, o.known)
        group.wake()


def do_wait(w, mask, o):
    state = state_of(w)
    last = max(state.committed - o.keep, state.waited)
    for number in range(state.waited, last):
        batch = state.group.batches[number]
        if batch.ops is None:
            return Blocked(state.group, "the other warps of the warpgroup to commit the same wgmma group")
    for number in range(state.waited, last):
        batch = state.group.batches[number]
        for op in batch.ops or ():
            w.machine.require(op)
            if w.machine.observer is not None:
                w.machine.observer.waited(w, op)
        for op in batch.results[w.index]:
            w.machine.require(op)
        batch.waited += 1
        if batch.waited == 4:
            del state.group.batches[number]
    state.waited = last
    return None


def start(w, group: Warpgroup, batch: Batch, known: dict) -> None:
    """Issues the MMAs after all four warps have committed, and checks that the warps agree. known: chains by
    operands."""
    columns = [batch.parts[warp.index] for warp in group.warps]
    key, *others = (tuple([part.key for part in column]) for column in columns)
    if any(other != key for other in others):
        disagree(columns)
    plans = known.get(key)
    if plans is None:
        if len(known) > KNOWN_GROUPS:
            known.clear()
        plans = known[key] = chains_of(columns[0])
    batch.ops = []
    batch.results = {warp.index: [] for warp in group.warps}
    earlier = [op for b in group.batches.values() for ops in b.results.values() for op in ops if not op.done]
    size = w.cta.shared.size
    for plan in plans:
        chain = list(zip(*(column[plan.first : plan.end] for column in columns)))
        if plan.low < pg.SHARED_START or plan.high > size:
            for parts in chain:
                check_footprints(w.cta, parts[0])
        earlier += issue(w, batch, chain, plan, tuple(earlier))


def disagree(columns: list[list[Part]]) -> None:
    if len({len(x) for x in columns}) != 1:
        raise Fault("wgmma-operands", "the warps of the warpgroup committed different numbers of wgmma.mma_async")
    for first, *others in zip(*columns):
        for x in others:
            if x.key != first.key:
                raise Fault(
                    "wgmma-operands",
                    f"warps {first.warp.index} and {x.warp.index} of the warpgroup execute different products (PTX "
                    f"lines {first.line} and {x.line}), or give different descriptors or scale-d",
                )


def issue(w, batch: Batch, chain: list[tuple[Part, ...]], plan: Chain, earlier: tuple[AsyncOp, ...]) -> list[AsyncOp]:
    """Issues one operation that multiplies, and one for each warp that writes its registers. Each warp waits for its
    own, so in order 'latest' a warp finds the old values until it waits itself."""
    results: list = []
    reads: tuple = ()
    if w.machine.kernel.checking:
        reads = (("spans", w.cta, plan.spans, plan.spans_at),)
    line = chain[0][0].line

    def effects() -> None:
        results.extend(perform(chain, plan))
        if w.machine.observer is not None and w.machine.observer.operands:
            w.machine.observer.warpgroup_product(w, chain, results)

    multiply = AsyncOp("wgmma", w, 0, line, effects, earlier, reads=reads)
    multiply.seen = 0 if batch.seen is None else batch.seen.at
    assert batch.ops is not None
    batch.ops.append(w.machine.issue(multiply))
    writes = []
    for i, part in enumerate(chain[0]):

        def deliver(i=i, part=part) -> None:
            if part.warp.R is not None:  # otherwise the warp has ended
                write_registers(part, results[i], 16 * i)

        op = w.machine.issue(AsyncOp("wgmma result", part.warp, 0, line, deliver, (multiply,)))
        batch.results[part.warp.index].append(op)
        writes.append(op)
    return writes
