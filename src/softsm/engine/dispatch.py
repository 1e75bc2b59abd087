"""The dispatch loop: micro-operations and jumps, warp by warp.

    status, pc, mask, lanes, steps = run(S, pc, mask, stop, quantum, multi)

runs one fragment from `pc` until Python must act, for example at a macro-operation, a divergent branch, an exit, the
pc `stop` where another fragment waits, or the end of the quantum. `multi`: 0 continues at jumps, 1 returns at jumps,
and any other value is the address of a log of jumps, which begins with the address of its next entry (two words: from,
to). S is the address of the state vector of engine/program.py, which holds the addresses of everything else. `lanes`
are the lanes that the status concerns.

Hot micro-operations are cases of the loop's switch. The others are functions, compiled in groups when a program first
needs one of the group. Memory accesses and exchange between lanes call the function at the address `lane_operation`, so
the plain and the checking engine share one loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from llvmlite import ir

from softsm.engine import entry, native, selftest
from softsm.engine import program as pg
from softsm.engine.vec_access import OPERATION, field
from softsm.engine.vec_ops import canonical
from softsm.engine.vec_rows import load_predicate, load_row, store_predicate, store_row
from softsm.engine.vec_tensor import tensor_access
from softsm.engine.vec_types import _I32, _I64, FULL, Bits, D, F, I, L, Q, U, Vector, _declare, _splat, building, tomask
from softsm.isa.registry import MICROS, Micro

GROUP = 40  # cold micro-operations compiled together
KINDS = {"u": U, "i": I, "f": F, "q": Q, "l": L, "d": D}
HOT = 10_000  # executions after which a block is compiled; the compilation costs about as much time as they did
BLOCK = ir.FunctionType(_I64, [_I64] * 5)  # blocks of engine/translation.py: (R, Q, P, S, most turns) -> turns
COLD = ir.FunctionType(ir.VoidType(), [_I32] * 6 + [_I64] * 3)  # rd, ra, rb, rc, rx, m, R, Q, P
RUN = ir.FunctionType(_I64, [_I64] * 9)  # lane operation, cold operations, S, pc, mask, stop, quantum, multi, results


def numbered() -> tuple[list[tuple[int, Micro]], list[tuple[int, Micro]]]:
    """Returns the (hot, cold) micro-operations with their opcode numbers: hot ones first, in order of definition."""
    hot = [m for m in MICROS.values() if m.hot]
    cold = [m for m in MICROS.values() if not m.hot]
    return list(enumerate(hot, pg.FIRST_MICRO)), list(enumerate(cold, pg.FIRST_MICRO + len(hot)))


def emit(m: Micro, rd, sources, mask: Bits, files: dict[str, ir.Value]) -> None:
    """Emits the code of one micro-operation on the rows rd and `sources` under the lane mask."""
    operands: list[Bits | Vector] = []
    for kind, row in zip(m.srcs, sources):
        if kind == "p":
            operands.append(load_predicate(files["P"], row))
        else:
            operands.append(load_row(files["R" if kind in "uif" else "Q"], row, KINDS[kind]))
    value = evaluate(m, operands, mask)
    if m.dst == "p":
        store_predicate(files["P"], rd, mask, value)
    else:
        store_row(files["R" if m.dst in "uif" else "Q"], rd, mask, value)


def evaluate(m: Micro, sources: list, mask: Bits | None):
    """Returns the value of a micro-operation. Only cross-lane operations use the mask."""
    value = m.function(*sources, mask) if m.masked else m.function(*sources)
    return canonical(value) if m.canonical_nan else value


# ---------------------------------------------------------------- cold operations


def cold_group(module: ir.Module, part: list[tuple[int, Micro]]) -> None:
    for n, m in part:
        function = ir.Function(module, COLD, f"op{n}")
        rd, *sources, mask, R, Q_, P = function.args
        with building(ir.IRBuilder(function.append_basic_block("entry"))) as b:
            emit(m, rd, sources, Bits(mask), {"R": R, "Q": Q_, "P": P})
            b.ret_void()


class ColdOperations:
    """The addresses of cold operations. A group is compiled or loaded when a program contains one of its members."""

    def __init__(self):
        hot, cold = numbered()
        self.first = pg.FIRST_MICRO + len(hot)
        self.groups = [cold[k : k + GROUP] for k in range(0, len(cold), GROUP)]
        self.table = np.zeros(max(len(cold), 1), np.int64)
        self.address = self.table.ctypes.data

    def prepare(self, code: np.ndarray) -> None:
        """Compiles or loads the operations that the program needs."""
        used = {(int(op) - self.first) // GROUP for op in np.unique(code[:, 0]) if op >= self.first}
        for g in sorted(used):
            if not self.table[g * GROUP]:
                part = self.groups[g]
                names = {f"op{n}": n for n, _ in part}
                got = native.functions(f"operations{g}", functools.partial(cold_group, part=part), list(names))
                for name, n in reversed(names.items()):  # the first one last: it marks the group as complete
                    self.table[n - self.first] = got[name]


# ---------------------------------------------------------------- the loop


def dispatch(module: ir.Module, hot: list[tuple[int, Micro]]) -> None:
    """Adds the function `run` to the module."""
    tensor = {pg.OP_TENSOR_LD: tensor_access(module, False), pg.OP_TENSOR_ST: tensor_access(module, True)}
    function = ir.Function(module, RUN, "run")
    with building(ir.IRBuilder(function.append_basic_block("entry"))) as b:
        Loop(b, function).fill(hot, tensor)


class Loop:
    """The function `run` while it is built. The values of the instruction that is decoded: `at` (the address of its
    record), its fields, and `m`, the lanes that execute it."""

    def __init__(self, b: ir.IRBuilder, function: ir.Function):
        self.b, self.block = b, function.append_basic_block
        self.lane_operation, self.cold, self.S, self.pc0, self.mask0, *rest = function.args
        self.stop, self.quantum, self.multi, self.results = rest
        self.code, self.R, self.Q, self.P = (field(self.S, k) for k in (pg.S_CODE, pg.S_R, pg.S_Q, pg.S_P))

    def fill(self, hot: list[tuple[int, Micro]], tensor: dict[int, ir.Function]) -> None:
        self.fetch()
        self.decode()
        files = {"R": self.R, "Q": self.Q, "P": self.P}
        for number, micro in hot:
            self.case(number)
            emit(micro, self.rd, (self.ra, self.rb, self.rc, self.rx), Bits(self.m), files)
            self.again()
        self.compiled_block()
        self.jump()
        self.exit()
        self.wait()
        for number, access in tensor.items():
            self.tensor_memory(number, access)
        for number in (pg.OP_CHECKED_LD, pg.OP_CHECKED_ST):
            self.checked_tensor_memory(number)
        self.macro()
        self.others(pg.FIRST_MICRO + len(hot))

    # ---- what the cases share ----

    def case(self, number: int) -> None:
        target = self.block(f"op{number}")
        self.cases.add_case(_I32(number), target)
        self.b.position_at_end(target)

    def again(self) -> None:
        """Continues with the next instruction."""
        self.b.branch(self.loop)

    def leave(self, status: ir.Value, at: ir.Value, lanes: ir.Value, next_pc: ir.Value) -> None:
        """Returns to Python."""
        b = self.b
        steps = b.add(b.sub(next_pc, self.pc0), b.load(self.jumps_))
        for k, value in enumerate((at, b.zext(b.load(self.mask_), _I64), b.zext(lanes, _I64), steps)):
            b.store(value, b.inttoptr(b.add(self.results, _I64(8 * k)), _I64.as_pointer()))
        b.ret(status)

    def to_python(self) -> None:
        """Leaves for the macro-operation."""
        self.leave(_I64(pg.MACRO), self.pc, self.m, self.following)

    def skip_without_lanes(self) -> None:
        """Skips the instruction if no lane executes it."""
        with self.b.if_then(self.b.icmp_unsigned("==", self.m, _I32(0))):
            self.again()

    def call_lane_operation(self) -> ir.Value:
        given = [self.op, self.rd, self.ra, self.rb, self.rc, self.rx, self.m, self.S, self.pc]
        return self.b.call(self.b.inttoptr(self.lane_operation, OPERATION.as_pointer()), given)

    # ---- the instruction ----

    def fetch(self) -> None:
        b, block = self.b, self.block
        # Steps are pc - begin + jumps, so only jumps are counted. At `limit` the quantum ends or a fragment waits.
        self.pc_, self.mask_, self.jumps_, self.limit_ = b.alloca(_I64), b.alloca(_I32), b.alloca(_I64), b.alloca(_I64)
        b.store(self.pc0, self.pc_)
        b.store(b.trunc(self.mask0, _I32), self.mask_)
        b.store(_I64(0), self.jumps_)
        b.store(_least(b, self.stop, b.add(self.pc0, self.quantum)), self.limit_)
        self.loop, fetch, over = block("loop"), block("fetch"), block("over")
        self.again()
        b.position_at_end(self.loop)
        pc, mask = self.pc, self.mask = b.load(self.pc_), b.load(self.mask_)
        b.cbranch(b.icmp_signed("<", pc, b.load(self.limit_)), fetch, over)

        b.position_at_end(over)
        met = b.icmp_signed(">=", pc, self.stop)
        self.leave(b.select(met, _I64(pg.MERGE), _I64(pg.QUANTUM)), pc, mask, pc)

        b.position_at_end(fetch)
        in_code, self.decoding = b.add(self.code, b.shl(pc, _I64(5))), block("decode")
        b.branch(self.decoding)
        b.position_at_end(self.decoding)
        self.at = b.phi(_I64)
        self.at.add_incoming(in_code, fetch)

    def decode(self) -> None:
        b = self.b
        self.op, self.rd, self.ra, self.rb, self.rc, self.rx, guard, flip = (
            b.load(b.inttoptr(b.add(self.at, _I64(4 * k)), _I32.as_pointer())) for k in range(8)
        )
        self.m = b.and_(self.mask, b.xor(load_predicate(self.P, guard).value, flip))
        self.following = b.add(self.pc, _I64(1))
        b.store(self.following, self.pc_)
        self.otherwise = self.block("others")
        self.cases = b.switch(self.op, self.otherwise)

    # ---- the cases ----

    def compiled_block(self) -> None:
        """rd: the block's length, ra: its number."""
        b = self.b
        self.case(pg.OP_BLOCK)
        end = b.add(self.pc, b.zext(self.rd, _I64))
        row = b.add(field(self.S, pg.S_BLOCKS), b.shl(b.zext(self.ra, _I64), _I64(6)))
        fits = b.and_(b.icmp_unsigned("==", self.mask, _I32(FULL)), b.icmp_signed("<=", end, b.load(self.limit_)))
        with b.if_then(fits):
            address, executed, turn = (b.inttoptr(b.add(row, _I64(8 * k)), _I64.as_pointer()) for k in range(3))
            native_block = b.load(address)
            with b.if_then(b.icmp_unsigned("!=", native_block, _I64(0))):
                per_turn = b.load(turn)
                most = b.add(b.udiv(b.sub(b.load(self.limit_), end), per_turn), _I64(1))
                turns = b.call(b.inttoptr(native_block, BLOCK.as_pointer()), [self.R, self.Q, self.P, self.S, most])
                with b.if_then(b.icmp_unsigned("!=", turns, _I64(0)), likely=True):  # 0: some load is not plain
                    jumps = b.add(b.load(self.jumps_), b.mul(b.sub(turns, _I64(1)), per_turn))
                    b.store(jumps, self.jumps_)
                    b.store(_least(b, self.stop, b.sub(b.add(self.pc0, self.quantum), jumps)), self.limit_)
                    b.store(end, self.pc_)
                    self.again()
            count = b.add(b.load(executed), _I64(1))
            b.store(count, executed)
            with b.if_then(b.icmp_unsigned("==", count, _I64(HOT))):
                self.leave(_I64(pg.HOT), self.pc, self.mask, self.pc)
        self.at.add_incoming(b.add(row, _I64(32)), b.block)  # the record that the block replaced
        b.branch(self.decoding)

    def jump(self) -> None:
        b = self.b
        self.case(pg.OP_BRA)
        with b.if_then(b.icmp_unsigned("==", self.m, self.mask)):
            target = b.zext(self.rx, _I64)
            jumps = b.add(b.load(self.jumps_), b.sub(self.following, target))
            b.store(jumps, self.jumps_)
            b.store(target, self.pc_)
            with b.if_then(b.icmp_unsigned("!=", self.multi, _I64(0))):
                with b.if_then(b.icmp_unsigned("==", self.multi, _I64(1))):
                    self.leave(_I64(pg.MERGE), target, self.mask, target)
                trail = b.inttoptr(self.multi, _I64.as_pointer())
                noted = b.load(trail)
                b.store(self.pc, b.inttoptr(noted, _I64.as_pointer()))
                b.store(target, b.inttoptr(b.add(noted, _I64(8)), _I64.as_pointer()))
                b.store(b.add(noted, _I64(16)), trail)
            b.store(_least(b, self.stop, b.sub(b.add(self.pc0, self.quantum), jumps)), self.limit_)
            self.again()
        with b.if_then(b.icmp_unsigned("!=", self.m, _I32(0))):
            self.leave(_I64(pg.DIVERGED), self.pc, self.m, self.following)
        self.again()

    def exit(self) -> None:
        b = self.b
        self.case(pg.OP_EXIT)
        left = b.and_(self.mask, b.not_(self.m))
        b.store(left, self.mask_)
        with b.if_then(b.icmp_unsigned("==", left, _I32(0))):
            self.leave(_I64(pg.EXITED), self.pc, self.m, self.following)
        with b.if_then(b.icmp_unsigned("!=", self.m, _I32(0))):
            self.leave(_I64(pg.MERGE), self.following, self.m, self.following)
        self.again()

    def wait(self) -> None:
        """mbarrier.try_wait and test_wait by parity: rd the predicate, rb the address, rc the parity. If all lanes wait
        for the same phase and it is complete by Cta.phases, the wait succeeds here, else in a macro-operation."""
        b = self.b
        self.case(pg.OP_WAIT)
        asking = self.block("asking")
        self.skip_without_lanes()
        phases = field(self.S, pg.S_PHASES)
        with b.if_then(b.icmp_unsigned("!=", phases, _I64(0))):
            count_zeros = _declare(b, "llvm.cttz.i32", _I32, [_I32, ir.IntType(1)])
            lane = b.zext(b.call(count_zeros, [self.m, ir.IntType(1)(1)]), _I64)
            rows = self.rb, self.rc
            places = (b.add(b.shl(b.zext(row, _I64), _I64(5)), lane) for row in rows)
            chosen = [b.load(b.inttoptr(b.add(self.R, b.shl(x, _I64(2))), _I32.as_pointer())) for x in places]
            differ = [load_row(self.R, row, U) != Vector(_splat(b, x, U.count), U) for row, x in zip(rows, chosen)]
            others_differ = b.and_(tomask(differ[0] | differ[1]).value, self.m)
            offset = b.sub(b.zext(chosen[0], _I64), field(self.S, pg.S_SHARED_BASE))
            inside = b.and_(
                b.icmp_unsigned("<", offset, field(self.S, pg.S_SHARED_SIZE)),
                b.icmp_unsigned("==", b.and_(offset, _I64(7)), _I64(0)),
            )
            with b.if_then(b.and_(b.icmp_unsigned("==", others_differ, _I32(0)), inside)):
                at_phase = b.inttoptr(b.add(phases, b.lshr(offset, _I64(3))), ir.IntType(8).as_pointer())
                phase = b.zext(b.load(at_phase), _I32)
                # 0: no barrier; else 1 + the parity of the current phase
                over = b.icmp_unsigned("==", b.and_(phase, _I32(1)), b.and_(chosen[1], _I32(1)))
                with b.if_then(b.and_(b.icmp_unsigned("!=", phase, _I32(0)), over)):
                    store_predicate(self.P, self.rd, Bits(self.m), Bits(_I32(FULL)))
                    self.again()
        b.branch(asking)
        b.position_at_end(asking)
        self.to_python()

    def tensor_memory(self, number: int, access: ir.Function) -> None:
        """tcgen05.ld and st: rd the index of the registers in the pool, rb the address, rc the number of registers."""
        b = self.b
        self.case(number)
        with b.if_then(b.icmp_unsigned("==", self.m, _I32(FULL)), likely=True):
            done = b.call(access, [self.S, self.rd, self.rb, self.rc])
            with b.if_then(b.icmp_unsigned("!=", done, _I32(0)), likely=True):
                self.again()
        self.skip_without_lanes()
        self.to_python()

    def checked_tensor_memory(self, number: int) -> None:
        """The same with the race checker. rx >> pg.DISTANCE: the number of records until the result is needed."""
        b = self.b
        self.case(number)
        due = b.add(self.pc, b.zext(b.lshr(self.rx, _I32(pg.DISTANCE)), _I64))
        with b.if_then(b.and_(b.icmp_unsigned("==", self.m, _I32(FULL)), b.icmp_signed("<", due, b.load(self.limit_)))):
            status = self.call_lane_operation()
            with b.if_then(b.icmp_unsigned("==", status, _I64(0)), likely=True):
                self.again()
        self.skip_without_lanes()
        self.to_python()

    def macro(self) -> None:
        """rd: 1 if the macro-operation only waits for operations in flight."""
        b = self.b
        self.case(pg.OP_MACRO)
        self.skip_without_lanes()
        whole = b.icmp_unsigned("==", b.zext(self.m, _I64), field(self.S, pg.S_ALIVE))
        idle = b.icmp_unsigned("!=", b.and_(b.zext(self.rd, _I64), field(self.S, pg.S_IDLE)), _I64(0))
        with b.if_then(b.and_(whole, idle)):
            self.again()
        self.to_python()

    def others(self, first_cold: int) -> None:
        """Cold micro-operations, and what is done lane by lane."""
        b = self.b
        b.position_at_end(self.otherwise)
        with b.if_then(b.icmp_unsigned(">=", self.op, _I32(first_cold))):
            entry = b.add(self.cold, b.shl(b.zext(b.sub(self.op, _I32(first_cold)), _I64), _I64(3)))
            address = b.load(b.inttoptr(entry, _I64.as_pointer()))
            given = [self.rd, self.ra, self.rb, self.rc, self.rx, self.m, self.R, self.Q, self.P]
            b.call(b.inttoptr(address, COLD.as_pointer()), given)
            self.again()
        about_lanes = (b.icmp_unsigned("==", self.op, _I32(x)) for x in (pg.OP_CONVERGE, pg.OP_SOURCES))
        idle = b.or_(
            b.icmp_unsigned("==", self.m, _I32(0)),
            b.and_(b.or_(*about_lanes), b.icmp_unsigned("==", self.m, _I32(FULL))),
        )
        with b.if_then(idle):  # no lane is active, or all are
            self.again()
        status = self.call_lane_operation()
        with b.if_then(b.icmp_unsigned("==", status, _I64(0)), likely=True):
            self.again()
        about = b.trunc(b.lshr(status, _I64(8)), _I32)
        about = b.select(b.icmp_unsigned("==", about, _I32(0)), self.m, about)
        self.leave(b.and_(status, _I64(255)), self.pc, about, self.following)


def _least(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.icmp_signed("<", x, y), x, y)


@functools.cache
def cold_operations() -> ColdOperations:
    return ColdOperations()


@functools.cache
def loop_address() -> int:
    hot, _ = numbered()
    return native.functions("interpreter", functools.partial(dispatch, hot=hot), ["run"], selftest.check)["run"]


def runner(lane_operation: int) -> Callable:
    """Returns `run` as described above."""
    native.ready(entry)
    return functools.partial(entry.enter, loop_address(), lane_operation, cold_operations().address)
