"""The syntax tree that the parser builds from PTX text, as plain data.

Names are unique: the parser renames declarations in a nested `{ }` scope to `name@k` (k = number of the scope) and
those of a .func to `name@function`, so that later stages can ignore scopes. An entry's own names stay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_LISTS = re.compile(r"\{\s*([^\s,{}]+),(?:[^,{}]+,){5,}\s*([^\s,{}]+)\s*\}")  # lists of more than six registers


@dataclass(frozen=True, slots=True)
class Reg:
    """A declared register, e.g. `%r5`; its PTX type is `function.registers[name]`. `!%p1` has negated=True."""

    name: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Special:
    """A predefined register such as `%tid.x`, `%laneid`, `%cluster_ctarank`, `WARP_SZ`."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """A literal. Integers: the Python value. Floats (`0f3F800000`, `0d...`, `1.5`): the value as a Python float,
    with `kind` 'f32' or 'f64' for the bit-exact spellings ('float' for decimals) and their bits in `bits`."""

    value: int | float
    kind: str = "int"  # 'int' | 'f32' | 'f64' | 'float'
    bits: int = 0


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable, parameter or function (`global_smem`, `foo_param_0`), or `name + offset`."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`; base is Reg, Symbol or Imm. `coords` for tensor operands `[map, {c0, c1}]`, else ();
    `extra` holds what may follow the coordinates (im2col offsets)."""

    base: Reg | Symbol | Imm
    offset: int = 0
    coords: tuple = ()
    extra: tuple = ()


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b, c}`; items are operands."""

    items: tuple


@dataclass(frozen=True, slots=True)
class Pair:
    """`a|b`, as in `setp.lt.s32 %p1|%p2, ...`, `elect.sync %r1|%p1, ...`, `shfl.sync.idx.b32 %r1|%p1, ...`."""

    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Label:
    name: str
    line: int = 0


@dataclass(frozen=True, slots=True)
class Sink:
    """The operand `_`."""


@dataclass(frozen=True, slots=True)
class Call:
    """Operands of `call`: (returns), callee, (arguments). callee is a Symbol or, for indirect calls, a Reg."""

    returns: tuple[str, ...]
    callee: Any
    arguments: tuple
    prototype: str | None = None


@dataclass(frozen=True, slots=True)
class SourceLoc:
    """The content of a `.loc`: file, line and column in the program that the PTX was compiled from (the innermost
    inlined place). `caller` is the place where it was inlined, if it was; the chain ends in the kernel itself."""

    file: str
    line: int
    column: int
    function: str = ""
    caller: SourceLoc | None = None


@dataclass(frozen=True, slots=True)
class Instruction:
    opcode: str  # 'add', 'cp', 'tcgen05', ...
    modifiers: tuple[str, ...]  # ('rn', 'ftz', 'f32'); '::' stays inside a modifier: 'shared::cta'
    operands: tuple
    guard: Reg | None  # @%p / @!%p (negated=True)
    line: int  # PTX text, 1-based
    column: int
    loc: SourceLoc | None
    text: str  # the statement as written, one line

    @property
    def name(self) -> str:
        return ".".join((self.opcode, *self.modifiers))


@dataclass(frozen=True, slots=True)
class Variable:
    """A declared variable. space: 'global', 'const', 'shared', 'local' or 'param' ('reg' for a parameter of a .func
    that is passed in a register). size 0 = extern, sized at launch."""

    name: str
    space: str
    type: str  # 'b8', 'u32', 'f32', ...
    align: int
    size: int  # total bytes
    initial: tuple = ()  # int, float or Symbol per element of `type`; missing elements at the end are zero
    extern: bool = False
    line: int = 0


@dataclass(slots=True)
class Function:
    name: str
    entry: bool
    params: list[Variable]  # parameters in order; for .func also the return parameters below
    returns: list[Variable]
    registers: dict[str, str]  # registers that occur: name -> type ('b32', 'f32', 'pred', 'b64', 'b16', 'b128', ...)
    variables: list[Variable]  # declared in the body (shared, local, param)
    body: list[Instruction | Label]
    branch_targets: dict[str, tuple[str, ...]]  # .branchtargets label -> target labels (for brx.idx)
    directives: dict[str, tuple]  # 'reqntid': (512,), 'maxnreg': (128,), 'reqnctapercluster': (2, 1, 1), ...
    line: int = 0
    defined: bool = True  # False: only declared (`.extern .func (...) vprintf (...);`)


@dataclass(slots=True)
class Module:
    version: tuple[int, int]
    target: str  # 'sm_100a'
    variables: list[Variable]
    functions: dict[str, Function]
    files: dict[int, str] = field(default_factory=dict)
    source: str = ""


def referenced(module: Module, function: Function) -> set[str]:
    """Returns the names of the functions and variables that a kernel can reach through calls, taken addresses and
    initial values."""
    variables = {v.name: v for v in module.variables}
    names, work = {function.name}, [function.name]
    while work:
        name = work.pop()
        of = function if name == function.name else module.functions.get(name)
        operands: list[Any] = (
            [x for item in of.body if isinstance(item, Instruction) for x in item.operands] if of else []
        )
        operands += variables[name].initial if name in variables else ()
        while operands:
            match operands.pop():
                case Symbol(name=found) if found not in names:
                    names.add(found)
                    work.append(found)
                case Address(base=Symbol() as base):
                    operands.append(base)
                case Vector(items=items):
                    operands += items
                case Call(callee=callee, arguments=arguments):
                    operands += [callee, *arguments]
    return names


def spelled(operand: Any) -> str:
    """Returns an operand as PTX spells it, for messages."""
    match operand:
        case Imm(kind="f32", bits=bits):
            return f"0f{bits:08X}"
        case Imm(kind="f64", bits=bits):
            return f"0d{bits:016X}"
        case Imm(value=value):
            return str(value)
        case Reg(name, negated):
            return ("!" if negated else "") + name.partition("@")[0]
        case Symbol(name, offset):
            return name.partition("@")[0] + (f"+{offset}" if offset else "")
        case Address(base, offset, coords):
            within = spelled(base) + (f"{offset:+}" if offset else "")
            return f"[{within}{f', {spelled(Vector(coords))}' if coords else ''}]"
        case Vector(items):
            return f"{{{', '.join(map(spelled, items))}}}"
        case Pair(first, second):
            return f"{spelled(first)}|{spelled(second)}"
        case Sink():
            return "_"
    return str(getattr(operand, "name", operand)).partition("@")[0]


def brief(instruction: str) -> str:
    """Returns the text of an instruction with long lists of registers shortened."""
    return _LISTS.sub(lambda found: f"{{{found[1]}, ..., {found[2]}}}", instruction)
