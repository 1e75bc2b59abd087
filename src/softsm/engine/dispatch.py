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
    lane_operation, cold, S, pc0, mask0, stop, quantum, multi, results = function.args
    block = function.append_basic_block
    with building(ir.IRBuilder(block("entry"))) as b:
        code, R, Q_, P = (field(S, k) for k in (pg.S_CODE, pg.S_R, pg.S_Q, pg.S_P))
        files = {"R": R, "Q": Q_, "P": P}
        # Steps are pc - begin + jumps, so only jumps are counted. At `limit` the quantum ends or a fragment waits.
        pc_, mask_, jumps_, limit_ = b.alloca(_I64), b.alloca(_I32), b.alloca(_I64), b.alloca(_I64)
        b.store(pc0, pc_)
        b.store(b.trunc(mask0, _I32), mask_)
        b.store(_I64(0), jumps_)
        b.store(_least(b, stop, b.add(pc0, quantum)), limit_)
        loop, fetch, over = block("loop"), block("fetch"), block("over")
        b.branch(loop)
        b.position_at_end(loop)
        pc, mask = b.load(pc_), b.load(mask_)
        b.cbranch(b.icmp_signed("<", pc, b.load(limit_)), fetch, over)

        def leave(status: ir.Value, at: ir.Value, lanes: ir.Value, next_pc: ir.Value) -> None:
            steps = b.add(b.sub(next_pc, pc0), b.load(jumps_))
            for k, value in enumerate((at, b.zext(b.load(mask_), _I64), b.zext(lanes, _I64), steps)):
                b.store(value, b.inttoptr(b.add(results, _I64(8 * k)), _I64.as_pointer()))
            b.ret(status)

        b.position_at_end(over)
        met = b.icmp_signed(">=", pc, stop)
        leave(b.select(met, _I64(pg.MERGE), _I64(pg.QUANTUM)), pc, mask, pc)

        b.position_at_end(fetch)
        in_code, decode = b.add(code, b.shl(pc, _I64(5))), block("decode")
        b.branch(decode)
        b.position_at_end(decode)
        at = b.phi(_I64)
        at.add_incoming(in_code, fetch)
        op, rd, ra, rb, rc, rx, guard, flip = (
            b.load(b.inttoptr(b.add(at, _I64(4 * k)), _I32.as_pointer())) for k in range(8)
        )
        m = b.and_(mask, b.xor(load_predicate(P, guard).value, flip))
        following = b.add(pc, _I64(1))
        b.store(following, pc_)
        others = block("others")
        cases = b.switch(op, others)

        def case(number: int):
            target = block(f"op{number}")
            cases.add_case(_I32(number), target)
            b.position_at_end(target)

        for number, micro in hot:
            case(number)
            emit(micro, rd, (ra, rb, rc, rx), Bits(m), files)
            b.branch(loop)

        case(pg.OP_BLOCK)  # rd: the block's length, ra: its number
        end, row = b.add(pc, b.zext(rd, _I64)), b.add(field(S, pg.S_BLOCKS), b.shl(b.zext(ra, _I64), _I64(6)))
        fits = b.and_(b.icmp_unsigned("==", mask, _I32(FULL)), b.icmp_signed("<=", end, b.load(limit_)))
        with b.if_then(fits):
            address, executed, turn = (b.inttoptr(b.add(row, _I64(8 * k)), _I64.as_pointer()) for k in range(3))
            native_block = b.load(address)
            with b.if_then(b.icmp_unsigned("!=", native_block, _I64(0))):
                per_turn = b.load(turn)
                most = b.add(b.udiv(b.sub(b.load(limit_), end), per_turn), _I64(1))
                turns = b.call(b.inttoptr(native_block, BLOCK.as_pointer()), [R, Q_, P, S, most])
                with b.if_then(b.icmp_unsigned("!=", turns, _I64(0)), likely=True):  # 0: some load is not plain
                    jumps = b.add(b.load(jumps_), b.mul(b.sub(turns, _I64(1)), per_turn))
                    b.store(jumps, jumps_)
                    b.store(_least(b, stop, b.sub(b.add(pc0, quantum), jumps)), limit_)
                    b.store(end, pc_)
                    b.branch(loop)
            count = b.add(b.load(executed), _I64(1))
            b.store(count, executed)
            with b.if_then(b.icmp_unsigned("==", count, _I64(HOT))):
                leave(_I64(pg.HOT), pc, mask, pc)
        at.add_incoming(b.add(row, _I64(32)), b.block)  # the record that the block replaced
        b.branch(decode)

        case(pg.OP_BRA)
        with b.if_then(b.icmp_unsigned("==", m, mask)):
            target = b.zext(rx, _I64)
            jumps = b.add(b.load(jumps_), b.sub(following, target))
            b.store(jumps, jumps_)
            b.store(target, pc_)
            with b.if_then(b.icmp_unsigned("!=", multi, _I64(0))):
                with b.if_then(b.icmp_unsigned("==", multi, _I64(1))):
                    leave(_I64(pg.MERGE), target, mask, target)
                trail = b.inttoptr(multi, _I64.as_pointer())
                noted = b.load(trail)
                b.store(pc, b.inttoptr(noted, _I64.as_pointer()))
                b.store(target, b.inttoptr(b.add(noted, _I64(8)), _I64.as_pointer()))
                b.store(b.add(noted, _I64(16)), trail)
            b.store(_least(b, stop, b.sub(b.add(pc0, quantum), jumps)), limit_)
            b.branch(loop)
        with b.if_then(b.icmp_unsigned("!=", m, _I32(0))):
            leave(_I64(pg.DIVERGED), pc, m, following)
        b.branch(loop)

        case(pg.OP_EXIT)
        left = b.and_(mask, b.not_(m))
        b.store(left, mask_)
        with b.if_then(b.icmp_unsigned("==", left, _I32(0))):
            leave(_I64(pg.EXITED), pc, m, following)
        with b.if_then(b.icmp_unsigned("!=", m, _I32(0))):
            leave(_I64(pg.MERGE), following, m, following)
        b.branch(loop)

        # mbarrier.try_wait and test_wait by parity: rd the predicate, rb the address, rc the parity. If all lanes wait
        # for the same phase and it is complete by Cta.phases, the wait succeeds here, else in a macro-operation.
        case(pg.OP_WAIT)
        asking = block("asking")
        with b.if_then(b.icmp_unsigned("==", m, _I32(0))):
            b.branch(loop)
        phases = field(S, pg.S_PHASES)
        with b.if_then(b.icmp_unsigned("!=", phases, _I64(0))):
            count_zeros = _declare(b, "llvm.cttz.i32", _I32, [_I32, ir.IntType(1)])
            lane = b.zext(b.call(count_zeros, [m, ir.IntType(1)(1)]), _I64)
            chosen = [
                b.load(
                    b.inttoptr(
                        b.add(R, b.shl(b.add(b.shl(b.zext(row, _I64), _I64(5)), lane), _I64(2))), _I32.as_pointer()
                    )
                )
                for row in (rb, rc)
            ]
            differ = [load_row(R, row, U) != Vector(_splat(b, x, U.count), U) for row, x in zip((rb, rc), chosen)]
            others_differ = b.and_(tomask(differ[0] | differ[1]).value, m)
            offset = b.sub(b.zext(chosen[0], _I64), field(S, pg.S_SHARED_BASE))
            inside = b.and_(
                b.icmp_unsigned("<", offset, field(S, pg.S_SHARED_SIZE)),
                b.icmp_unsigned("==", b.and_(offset, _I64(7)), _I64(0)),
            )
            with b.if_then(b.and_(b.icmp_unsigned("==", others_differ, _I32(0)), inside)):
                at_phase = b.inttoptr(b.add(phases, b.lshr(offset, _I64(3))), ir.IntType(8).as_pointer())
                phase = b.zext(b.load(at_phase), _I32)
                # 0: no barrier; else 1 + the parity of the current phase
                over = b.icmp_unsigned("==", b.and_(phase, _I32(1)), b.and_(chosen[1], _I32(1)))
                with b.if_then(b.and_(b.icmp_unsigned("!=", phase, _I32(0)), over)):
                    store_predicate(P, rd, Bits(m), Bits(_I32(FULL)))
                    b.branch(loop)
        b.branch(asking)
        b.position_at_end(asking)
        leave(_I64(pg.MACRO), pc, m, following)

        # tcgen05.ld and st: rd the index of the registers in the pool, rb the address, rc the number of registers.
        for number, access in tensor.items():
            case(number)
            with b.if_then(b.icmp_unsigned("==", m, _I32(FULL)), likely=True):
                done = b.call(access, [S, rd, rb, rc])
                with b.if_then(b.icmp_unsigned("!=", done, _I32(0)), likely=True):
                    b.branch(loop)
            with b.if_then(b.icmp_unsigned("==", m, _I32(0))):
                b.branch(loop)
            leave(_I64(pg.MACRO), pc, m, following)

        # The same with the race checker. rx >> pg.DISTANCE: the number of records until the result is needed.
        for number in (pg.OP_CHECKED_LD, pg.OP_CHECKED_ST):
            case(number)
            due = b.add(pc, b.zext(b.lshr(rx, _I32(pg.DISTANCE)), _I64))
            with b.if_then(b.and_(b.icmp_unsigned("==", m, _I32(FULL)), b.icmp_signed("<", due, b.load(limit_)))):
                status = b.call(b.inttoptr(lane_operation, OPERATION.as_pointer()), [op, rd, ra, rb, rc, rx, m, S, pc])
                with b.if_then(b.icmp_unsigned("==", status, _I64(0)), likely=True):
                    b.branch(loop)
            with b.if_then(b.icmp_unsigned("==", m, _I32(0))):
                b.branch(loop)
            leave(_I64(pg.MACRO), pc, m, following)

        case(pg.OP_MACRO)  # rd: 1 if the macro-operation only waits for operations in flight
        with b.if_then(b.icmp_unsigned("==", m, _I32(0))):
            b.branch(loop)
        whole = b.icmp_unsigned("==", b.zext(m, _I64), field(S, pg.S_ALIVE))
        idle = b.icmp_unsigned("!=", b.and_(b.zext(rd, _I64), field(S, pg.S_IDLE)), _I64(0))
        with b.if_then(b.and_(whole, idle)):
            b.branch(loop)
        leave(_I64(pg.MACRO), pc, m, following)

        b.position_at_end(others)
        with b.if_then(b.icmp_unsigned(">=", op, _I32(pg.FIRST_MICRO + len(hot)))):
            entry = b.add(cold, b.shl(b.zext(b.sub(op, _I32(pg.FIRST_MICRO + len(hot))), _I64), _I64(3)))
            address = b.load(b.inttoptr(entry, _I64.as_pointer()))
            b.call(b.inttoptr(address, COLD.as_pointer()), [rd, ra, rb, rc, rx, m, R, Q_, P])
            b.branch(loop)
        about_lanes = (b.icmp_unsigned("==", op, _I32(x)) for x in (pg.OP_CONVERGE, pg.OP_SOURCES))
        idle = b.or_(
            b.icmp_unsigned("==", m, _I32(0)), b.and_(b.or_(*about_lanes), b.icmp_unsigned("==", m, _I32(FULL)))
        )
        with b.if_then(idle):  # no lane is active, or all are
            b.branch(loop)
        status = b.call(b.inttoptr(lane_operation, OPERATION.as_pointer()), [op, rd, ra, rb, rc, rx, m, S, pc])
        with b.if_then(b.icmp_unsigned("==", status, _I64(0)), likely=True):
            b.branch(loop)
        about = b.trunc(b.lshr(status, _I64(8)), _I32)
        about = b.select(b.icmp_unsigned("==", about, _I32(0)), m, about)
        leave(b.and_(status, _I64(255)), pc, about, following)


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
