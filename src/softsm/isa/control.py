"""Control flow: bra, brx.idx, call, ret, exit, trap, setmaxnreg, and instructions that only matter to timing."""

from __future__ import annotations

import functools
import math
import re
import struct
import sys
from collections.abc import Callable, Iterator

from softsm.engine import program as pg
from softsm.engine.emitter import Emitter
from softsm.engine.program import POLLED, Blocked
from softsm.engine.warps import Fragment
from softsm.errors import Fault
from softsm.isa.operands import uniform
from softsm.isa.registry import lowers
from softsm.memory.waitable import Waitable
from softsm.ptx.ast import Call, Imm, Instruction, Reg, Symbol

MOVE = {"R": "mov.b32", "Q": "mov.b64", "P": "mov.pred"}
KIND = {"R": "u", "Q": "q", "P": "p"}


@lowers("bra")
def bra(asm, ins):
    if set(ins.modifiers) - {"uni"}:
        asm.refuse(ins, "bra accepts only .uni")
    record = asm.record(pg.OP_BRA, ins=ins)
    asm.branch_target(record, ins.operands[0].name, ins)


@lowers("brx")
def brx(asm, ins):
    if ins.modifiers[:1] != ("idx",) or set(ins.modifiers) - {"idx", "uni"}:
        asm.refuse(ins, "only brx.idx{.uni} exists")
    name = ins.operands[1].name
    targets = asm.current_function.branch_targets.get(name)
    if targets is None:
        raise asm.error(f"{name} is not the label of a .branchtargets list")
    asm.macro(do_brx, ins, index=asm.src(ins.operands[0], "u"), table=asm.table(targets))


def do_brx(w, mask, o):
    """Jumps to table[index]; lanes with different indices diverge."""
    f, program = w.fragment, w.cta.program
    table = program.branch_tables[o.table]
    index = uniform(w.R[o.index])
    if index is not None and mask == f.mask and index < len(table):
        return table[index]
    parts: dict[int, int] = {}
    for lane in range(32):
        if mask >> lane & 1:
            index = int(w.R[o.index, lane])
            if index >= len(table):
                raise w.fault("branch-index", f"brx.idx index {index} in lane {lane}; there are {len(table)} targets")
            parts[index] = parts.get(index, 0) | 1 << lane
    if mask != f.mask:  # lanes whose guard is false fall through
        w.fragments.append(Fragment(w, w.pc + 1, f.mask & ~mask, f.returns))
    (first, lanes), *others = sorted(parts.items())
    for index, part in others:
        w.fragments.append(Fragment(w, table[index], part, f.returns))
    f.mask = lanes
    return table[first]


@lowers("ret", "exit")
def ret(asm, ins):
    if set(ins.modifiers) - {"uni"}:
        asm.refuse(ins, f"{ins.opcode} accepts only .uni")
    if ins.opcode == "exit" or asm.current_function.entry:
        asm.record(pg.OP_EXIT, ins=ins)
    else:
        asm.macro(do_return, ins)


@lowers("call")
def call(asm: Emitter, ins: Instruction):
    if set(ins.modifiers) - {"uni"}:
        asm.refuse(ins, "call accepts only .uni")
    c: Call = ins.operands[0]
    if not isinstance(c.callee, Symbol):
        asm.refuse(ins, "calls through a register are not supported")
    name = c.callee.name
    target = asm.module.functions.get(name)
    if name in HOST_CALLS:
        asm.macro(
            HOST_CALLS[name],
            ins,
            arguments=[asm.local_variables[a.name] for a in c.arguments],
            returns=[asm.local_variables[r] for r in c.returns],
        )
        return
    if target is None or not target.body:
        asm.refuse(ins, f"function {name} has no body in this module")
    # Parameters are variables of the caller, and the callee has its own copies: copy in, call, copy out.
    for a, p in zip(c.arguments, target.params):
        if p.space == "reg":
            bank, row = asm.passed[p.name]
            asm.emit(MOVE[bank], row, asm.src(a, KIND[bank]))
        else:
            copy_local(asm, ins, a, p)
    asm.macro(do_call, ins, callee=name, entry=None)
    for r, p in zip(c.returns, target.returns):
        if p.space == "reg":
            bank, row = asm.passed[p.name]
            asm.emit(MOVE[bank], asm.dst(Reg(r), KIND[bank]), row)
        elif r in asm.local_variables:
            asm.macro(do_copy, ins, source=asm.local_variables[p.name], target=asm.local_variables[r], size=p.size)
        else:
            kind = "q" if p.size == 8 else "u"
            asm.macro(
                do_fetch_register,
                ins,
                row=asm.dst(Reg(r), kind),
                wide=kind == "q",
                source=asm.local_variables[p.name],
                size=p.size,
            )


def copy_local(asm, ins, argument, parameter):
    target = asm.local_variables[parameter.name]
    if isinstance(argument, Symbol) and argument.name in asm.local_variables:
        asm.macro(do_copy, ins, source=asm.local_variables[argument.name], target=target, size=parameter.size)
    elif isinstance(argument, Imm):
        asm.macro(do_copy_value, ins, value=int(argument.value), target=target, size=parameter.size)
    else:
        kind = "q" if parameter.size == 8 else "u"
        asm.macro(
            do_copy_register, ins, row=asm.src(argument, kind), wide=kind == "q", target=target, size=parameter.size
        )


def do_copy(w, mask, o):
    w.local[lanes(mask), o.target : o.target + o.size] = w.local[lanes(mask), o.source : o.source + o.size]


def do_copy_value(w, mask, o):
    raw = (o.value & (1 << 8 * o.size) - 1).to_bytes(o.size, "little")
    w.local[lanes(mask), o.target : o.target + o.size] = list(raw)


def do_copy_register(w, mask, o):
    rows = (w.Q if o.wide else w.R)[o.row]
    w.local[lanes(mask), o.target : o.target + o.size] = rows.view("u1").reshape(32, -1)[lanes(mask), : o.size]


def do_fetch_register(w, mask, o):
    bank = w.Q if o.wide else w.R
    for lane in lanes(mask):
        bank[o.row, lane] = int.from_bytes(w.local[lane, o.source : o.source + o.size].tobytes(), "little")


def do_call(w, mask, o):
    f = w.fragment
    if mask != f.mask:
        w.fragments.append(Fragment(w, w.pc + 1, f.mask & ~mask, f.returns))
        f.mask = mask
    if len(f.returns) > 64 or (o.entry, w.pc + 1) in f.returns:
        raise w.fault("recursion", f"recursive call of {o.callee}; device functions have static frames here")
    f.returns = (*f.returns, (o.entry, w.pc + 1))
    return o.entry


def do_return(w, mask, o):
    f = w.fragment
    if mask != f.mask:
        w.fragments.append(Fragment(w, w.pc + 1, f.mask & ~mask, f.returns))
        f.mask = mask
    *rest, (_, pc) = f.returns
    f.returns = tuple(rest)
    return pc


def lanes(mask: int) -> list[int]:
    return [lane for lane in range(32) if mask >> lane & 1]


# ---- functions the host provides ----------------------------------------------------------------------------------


def text_at(w, address: int) -> str:
    a = w.machine.global_memory.find(address, 1)
    if a is None:
        return f"<{address:#x}>"
    raw = a.bytes[address - a.start :]
    end = (raw == 0).nonzero()[0]
    return raw[: end[0] if len(end) else len(raw)].tobytes().decode(errors="replace")


def argument(w, lane: int, offset: int, size: int) -> int:
    return int.from_bytes(w.local[lane, offset : offset + size].tobytes(), "little")


def generic_bytes(w, lane: int, address: int, size: int) -> bytes:
    if address >= pg.LOCAL_WINDOW:
        at = address - pg.LOCAL_WINDOW
        return w.local[lane, at : at + size].tobytes()
    return w.machine.global_memory.view(address, size, "vprintf").tobytes()


def printf_argument(w, lane: int, start: int, offset: int, size: int) -> bytes:
    return generic_bytes(w, lane, start + offset, size)


def do_vprintf(w, mask, o):
    """Executes vprintf(format, arguments): C's printf, one line per lane, arguments packed at natural alignment."""
    for lane in lanes(mask):
        form = text_at(w, argument(w, lane, o.arguments[0], 8))
        at = argument(w, lane, o.arguments[1], 8)
        read = functools.partial(printf_argument, w, lane, at)
        w.machine.kernel.print(w.machine, c_format(form, read, functools.partial(text_at, w)))
        for r in o.returns:
            w.local[lane, r : r + 4] = 0


def hex_float(x: float) -> str:
    """Formats as C's %a, with no more digits than the number needs."""
    if not math.isfinite(x):
        return f"{x:f}"
    digits, exponent = x.hex().split("p")
    return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits}p{exponent}"


def c_format(form: str, read, text: Callable[[int], str]) -> str:
    """Formats as C's printf. read(offset, size) gives bytes of the arguments, text(address) the string there."""
    out, last, pos = [], 0, 0
    for m in re.finditer(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+))?(hh|h|ll|l|z|j|t)?([diuxXoeEfFgGaAcsp%])", form):
        out.append(form[last : m.start()])
        last = m.end()
        flags, width, precision, length, conv = m.groups()
        if conv == "%":
            out.append("%")
            continue

        def take(size: int) -> bytes:
            nonlocal pos
            pos = -(-pos // size) * size
            raw = read(pos, size)
            pos += size
            return raw

        if width == "*":
            width = str(struct.unpack("<i", take(4))[0])
        if precision == "*":
            precision = str(struct.unpack("<i", take(4))[0])
        spec = "%" + flags + (width or "") + (f".{precision}" if precision else "")
        if conv in "eEfFgG":
            out.append((spec + conv) % struct.unpack("<d", take(8))[0])
        elif conv in "aA":
            digits = hex_float(struct.unpack("<d", take(8))[0])
            out.append(f"%{flags.replace('0', '')}{width or ''}s" % (digits.upper() if conv == "A" else digits))
        elif conv == "p":
            out.append(f"{struct.unpack('<Q', take(8))[0]:#x}")
        elif conv == "s":
            out.append(f"{spec}s" % text(struct.unpack("<Q", take(8))[0]))
        else:
            size = 8 if length in ("l", "ll", "z", "j", "t") else 4
            code = {8: "q", 4: "i"}[size] if conv in "dic" else {8: "Q", 4: "I"}[size]
            value = struct.unpack("<" + code, take(size))[0]
            out.append(chr(value & 255) if conv == "c" else (spec + {"u": "d", "i": "d"}.get(conv, conv)) % value)
    out.append(form[last:])
    return "".join(out)


def do_assertfail(w, mask, o):
    """Prints the CUDA runtime's line to standard error, where programs look for it, and fails the launch."""
    lane = lanes(mask)[0]
    message, file, line, function = (argument(w, lane, a, n) for a, n in zip(o.arguments, (8, 8, 4, 8)))
    place, said = f"{text_at(w, file)}:{line}: {text_at(w, function)}", text_at(w, message)
    thread, (x, y, _) = w.index * 32 + lane, w.machine.block
    block, own = ([*w.cta.ctaid], [thread % x, thread // x % y, thread // (x * y)])
    print(f"{place}: block: {block}, thread: {own} Assertion `{said}` failed.", file=sys.stderr, flush=True)
    raise Fault(
        "assert",
        f"device-side assert triggered: {place}: assertion failed: {said}; thread {thread} of CTA {w.cta.ctaid}",
    )


HOST_CALLS = {"vprintf": do_vprintf, "__assertfail": do_assertfail}


@lowers("trap", "brkpt")
def trap(asm, ins):
    asm.macro(do_trap, ins)


def do_trap(w, mask, o):
    w.machine.watch.given_up()
    raise w.fault("trap", f"{w.instruction().opcode} executed by lanes {mask:#010x}")


@lowers("nanosleep", "pragma", "applypriority", "prefetch", "prefetchu", "pmevent")
def timing_only(asm, ins):
    """Lowers hints, which change no value. Their operands must still exist."""
    for operand in ins.operands:
        if isinstance(operand, Reg):
            asm.type_of(operand)


# -- registers of a CTA ------------------------------------------------------------------------------------------------


class RegisterPool(Waitable):
    """The registers that the warps of a CTA have released, how many a thread of each warp has, and what each has asked
    for."""

    __slots__ = ("asked", "free", "gone", "of")

    def __init__(self, cta, count: int | None):
        super().__init__()
        self.free, self.of = 0, dict.fromkeys(range(len(cta.warps)), count or 0)
        self.asked: list[list[str]] = [[] for _ in cta.warps]
        self.gone = {x.index for x in cta.warps if not x.alive}
        cta.exit_hooks.append(self.exited)

    def exited(self, w) -> None:
        self.gone.add(w.index)
        self.give(w, 0)
        self.complete(w)

    def ask(self, w, what: str) -> None:
        """Checks setmaxnreg. PTX: all threads of the warpgroup execute the same setmaxnreg. CUTLASS's example 77
        runs on B200 with numbers that differ, so these are told apart from warps that execute none."""
        mine = self.asked[w.index]
        mine.append(what)
        n = len(mine)
        for index, theirs in self.warpgroup(w):
            if n <= len(theirs) and theirs[n - 1] != what and w.machine.observer is not None:
                which = f"warp {w.index} executes {what}, warp {index} {theirs[n - 1]}"
                text = f"setmaxnreg needs all four warps of a warpgroup, with one number: {which}"
                w.machine.observer.doubtful(w, "warpgroup", text, "asks for another number")
        self.complete(w)

    def complete(self, w) -> None:
        mine = self.asked[w.index]
        for index, theirs in self.warpgroup(w):
            fewer = index if len(theirs) < len(mine) else w.index
            if fewer in self.gone and len(theirs) != len(mine):
                told = [" and ".join(x) if x else "none" for x in (mine, theirs)]
                which = f"warp {w.index} has executed {told[0]}, warp {index} {told[1]}"
                raise w.fault("warpgroup", f"setmaxnreg needs all four warps of a warpgroup: {which}")

    def warpgroup(self, w) -> Iterator[tuple[int, list[str]]]:
        first = w.index & ~3
        return enumerate(self.asked[first : first + 4], first)

    def give(self, w, count: int) -> None:
        self.free += 32 * (self.of[w.index] - count)
        self.of[w.index] = count
        self.wake()


def registers_at_entry(directives: dict[str, tuple]) -> int | None:
    """Returns registers per thread; None if ptxas chooses them. Then setmaxnreg may have no effect (PTX)."""
    if "maxnreg" in directives:
        return directives["maxnreg"][0]
    threads = math.prod(directives.get("reqntid") or directives.get("maxntid") or (0,))
    most = 65536 // (directives.get("minnctapersm", (0,))[0] * -(-threads // 32) * 32 or 1) // 8 * 8
    return most if most < 255 else None


@lowers("setmaxnreg")
def setmaxnreg(asm, ins):
    if ins.modifiers[:1] not in (("inc",), ("dec",)):
        asm.refuse(ins, "expected setmaxnreg.inc or .dec")
    count = ins.operands[0].value
    if not (24 <= count <= 256 and count % 8 == 0):
        raise asm.error(f"setmaxnreg accepts 24 to 256 in steps of 8, got {count}")
    entry = registers_at_entry(asm.function.directives)
    asm.macro(do_setmaxnreg, ins, count=count, entry=entry, what=f".{ins.modifiers[0]} {count}")


def do_setmaxnreg(w, mask, o):
    """Executes setmaxnreg. A warp that needs more waits until the others have released as many (PTX: pool of a CTA)."""
    cta = w.cta
    if cta.registers is None:
        cta.registers = RegisterPool(cta, o.entry)
    pool = cta.registers
    if o.entry is None:
        pool.ask(w, o.what)
        return None
    more = 32 * (o.count - pool.of[w.index])
    if more > pool.free:
        text = f"{more} registers for setmaxnreg.inc to {o.count}; the warps of the CTA have given back {pool.free}"
        return Blocked(pool, text)
    pool.give(w, o.count)
    pool.ask(w, o.what)
    return POLLED if more < 0 else None  # others run first: they may take the registers that this warp requests again
