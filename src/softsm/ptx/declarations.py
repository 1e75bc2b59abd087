"""Reads declarations: variables with initialisers, registers, parameters, the directives after a function's head."""

from __future__ import annotations

import math
import re

from softsm.errors import PtxError, Unsupported
from softsm.ptx.ast import Symbol, Variable
from softsm.ptx.constants import MAX_NESTING, STARTS_CONSTANT, constant, integer
from softsm.ptx.lexer import Cursor, suggestion, unescape
from softsm.ptx.names import MAX_RANGE, Scope

DIRECTIVE = re.compile(r"\.([a-z_]\w*)", re.ASCII)
COUNT = re.compile(r"\d{1,9}(?!\w)", re.ASCII)  # no expression: the '>' after it would be an operator
STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
LINKAGE = ("extern", "visible", "weak", "common")
SPACES = ("global", "const", "shared", "local", "param")
TYPE_BYTES = {f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)} | {
    "f16": 2, "f16x2": 4, "bf16": 2, "bf16x2": 4, "tf32": 4, "f32": 4, "f64": 8, "b128": 16,
    "e4m3": 1, "e5m2": 1, "e4m3x2": 2, "e5m2x2": 2, "f32x2": 8,
}  # fmt: skip
REGISTER_TYPES = {*TYPE_BYTES, "pred"}
OPAQUE_TYPES = ("texref", "samplerref", "surfref")
# directives after a function's head: how many integers each has (fewest, most)
FUNCTION_DIRECTIVES = {
    "reqntid": (1, 3), "maxntid": (1, 3), "maxnreg": (1, 1), "minnctapersm": (1, 1), "maxnctapersm": (1, 1),
    "reqnctapercluster": (1, 3), "maxclusterrank": (1, 1), "explicitcluster": (0, 0), "blocksareclusters": (0, 0),
    "noreturn": (0, 0), "abi_preserve": (1, 1), "abi_preserve_control": (1, 1), "unified": (0, 0),
}  # fmt: skip
MAX_ELEMENTS = 1 << 26


def directive(cursor: Cursor) -> str | None:
    """Reads the next `.word` and returns it without its dot, or None."""
    match = cursor.match(DIRECTIVE)
    return match.group(1) if match else None


def peek(cursor: Cursor) -> str | None:
    match = DIRECTIVE.match(cursor.clean, cursor.skip())
    return match.group(1) if match else None


def _type(cursor: Cursor, allowed: object, what: str) -> str:
    at = cursor.skip()
    name = directive(cursor)
    if name in OPAQUE_TYPES:
        raise Unsupported(f"softsm has no textures, samplers or surfaces (.{name})", *cursor.source.position(at))
    if name is None or name not in allowed:  # type: ignore[operator]
        cursor.at = at
        raise cursor.expected(f"a type ({what})")
    return name


def _attributes(cursor: Cursor) -> tuple[int, int]:
    """Reads `.align N`, `.v2`/`.v4`/`.v8`, `.attribute(...)` in any order. -> (alignment or 0, elements of a vector)"""
    align, lanes = 0, 1
    while (name := peek(cursor)) in ("align", "attribute", "v2", "v4", "v8"):
        at = cursor.at
        directive(cursor)
        if name == "align":
            align = integer(cursor, "an alignment in bytes")
            if align <= 0 or align & (align - 1) or align > 1 << 20:
                raise cursor.source.error(f"expected a power of two as alignment, found {align}", at)
        elif name == "attribute":
            cursor.expect("(", "after .attribute")
            depth = 1
            while depth:
                found = re.compile(r"[^()]*([()])").match(cursor.clean, cursor.at)
                if found is None:
                    raise cursor.expected("')' after the attributes")
                depth += 1 if found.group(1) == "(" else -1
                cursor.at = found.end()
        else:
            lanes = int(name[1])
    return align, lanes


def variables(cursor: Cursor, space: str, extern: bool, resolve: object) -> list[Variable]:
    """Reads what follows `.shared`, `.global`, ...: `[.align N] [.v4] .b8 name[4] = {..}, name2;`
    `resolve(name, at)` returns the Symbol of a name in an initialiser."""
    align, lanes = _attributes(cursor)
    type_ = _type(cursor, TYPE_BYTES, "such as .b8, .u32 or .f32")
    later_align, later_lanes = _attributes(cursor)
    align, lanes = align or later_align, max(lanes, later_lanes)
    element = TYPE_BYTES[type_] * lanes
    result = []
    while True:
        at = cursor.skip()
        line = cursor.source.position(at)[0]
        name = cursor.name("the name of a variable")
        shape = _dimensions(cursor)
        initial: tuple = ()
        if cursor.takes("="):
            if space in ("shared", "local", "param"):
                raise cursor.source.error(f"a .{space} variable has no initialiser", at)
            initial = _initialiser(cursor, type_, shape if lanes == 1 else [*(shape or []), lanes], resolve)
        if shape and shape[0] == 0:
            inner = math.prod(shape[1:]) * lanes
            count = -(-len(initial) // inner) if inner else 0
            if not initial and not extern and space != "param":
                raise cursor.source.error(f"'{name}' needs a size: only an .extern array may have none", at)
            shape[0] = count
        size = element * math.prod(shape) if shape else element
        if size > 1 << 40:
            raise cursor.source.error(f"'{name}' has {size} bytes; at most 2^40 are allowed", at)
        if initial and len(initial) * TYPE_BYTES[type_] > size:
            raise cursor.source.error(f"'{name}' has {len(initial)} initial values and room for fewer", at)
        natural = 1 << (min(element, 1 << 20) - 1).bit_length() if element > 1 else 1
        result.append(Variable(name, space, type_, align or natural, size, initial, extern, line))
        if not cursor.takes(","):
            return result


def _dimensions(cursor: Cursor) -> list[int] | None:
    """Reads `[4][8]` as [4, 8] and `[]` as 0; returns None without brackets."""
    shape: list[int] | None = None
    while cursor.takes("["):
        at = cursor.skip()
        size = 0
        if not cursor.sees("]"):
            size = integer(cursor, "the size of the array")
            if size < 0 or (size == 0 and shape):
                raise cursor.source.error(f"an array cannot have {size} elements", at)
        elif shape:
            raise cursor.source.error("only the first dimension of an array may be left open", at)
        cursor.expect("]", "after the size of the array")
        shape = [*(shape or []), size]
    return shape


def _initialiser(cursor: Cursor, type_: str, shape: list[int] | None, resolve: object, nesting: int = 0) -> tuple:
    """Returns flat element values; zeros fill what a nested list leaves out."""
    at = cursor.skip()
    if nesting > MAX_NESTING:
        raise cursor.source.error("this initialiser is nested too deeply", at)
    string = cursor.match(STRING)
    if string:
        return tuple(unescape(string.group()).encode("utf-8") + b"\0")
    if not cursor.takes("{"):
        return (_value(cursor, type_, resolve),)
    inner = shape[1:] if shape else []
    size = math.prod(inner) if inner else 1
    if size > MAX_ELEMENTS:
        raise cursor.source.error("this initialiser is too large", at)
    values: list = []
    while not cursor.takes("}"):
        if values:
            cursor.expect(",", "or '}' in an initialiser")
            if cursor.takes("}"):
                break
        if cursor.sees("{"):
            part = _initialiser(cursor, type_, inner, resolve, nesting + 1)
            if len(part) > size:
                raise cursor.source.error(f"{len(part)} values where {size} fit", at)
            values += [*part, *[0] * (size - len(part))]
        else:
            values.append(_value(cursor, type_, resolve))
        if len(values) > MAX_ELEMENTS:
            raise cursor.source.error("this initialiser is too large", at)
    return tuple(values)


def _value(cursor: Cursor, type_: str, resolve: object) -> int | float | Symbol:
    at = cursor.skip()
    if STARTS_CONSTANT.match(cursor.clean, at):
        value = constant(cursor)
        if cursor.sees("("):
            raise Unsupported("softsm does not read masked addresses in initialisers", *cursor.source.position(at))
        if type_ in ("f16", "bf16", "f32", "f64"):
            return float(value.value)
        return value.bits if value.kind != "int" else value.value
    name = cursor.name("a number or the name of a variable")
    if name == "generic" and cursor.takes("("):  # addresses are generic already
        at = cursor.skip()
        name = cursor.name("the name of a variable")
        cursor.expect(")", "after generic(name")
    symbol = resolve(name, at)  # type: ignore[operator]
    if cursor.sees("+") or cursor.sees("-"):
        return Symbol(symbol.name, integer(cursor, "an offset"))
    return symbol


def registers(cursor: Cursor, scope: Scope) -> None:
    """Reads what follows `.reg`: `.b32 %r<69>, %x;`"""
    _, lanes = _attributes(cursor)
    type_ = _type(cursor, REGISTER_TYPES, "such as .pred, .b32 or .f32")
    while True:
        at = cursor.skip()
        name = cursor.name("the name of a register")
        ranged = cursor.takes("<")
        if name in scope.ranges if ranged else scope.declared(name):
            raise cursor.source.error(f"'{name}' is declared twice in one scope", at)
        if ranged:
            digits = cursor.match(COUNT)
            if digits is None:
                raise cursor.expected("the number of registers")
            count = int(digits.group())
            if not 0 <= count <= MAX_RANGE:
                raise cursor.source.error(f"expected 0 to {MAX_RANGE} registers, found {count}", at)
            cursor.expect(">", "after the number of registers")
            scope.ranges[name] = (count, type_)
        elif lanes > 1:
            if lanes > 4:
                raise cursor.source.error("a vector register has 2 or 4 elements", at)
            scope.vectors[name] = lanes
            scope.registers |= {f"{name}.{c}": type_ for c in "xyzw"[:lanes]}
        else:
            scope.registers[name] = type_
        scope.operands.clear()  # an outer name may be hidden now
        if not cursor.takes(","):
            return


def parameters(cursor: Cursor, what: str) -> list[Variable]:
    """Reads `(.param .u64 .ptr .global .align 16 a, .param .align 64 .b8 map[128])`; of a .func also `.reg .b32 x`."""
    cursor.expect("(", f"before the {what}")
    result: list[Variable] = []
    while not cursor.takes(")"):
        if result:
            cursor.expect(",", f"or ')' in the {what}")
        at = cursor.skip()
        space = directive(cursor)
        if space not in ("param", "reg"):
            cursor.at = at
            raise cursor.expected("'.param'")
        align, lanes = _attributes(cursor)
        type_ = _type(cursor, TYPE_BYTES if space == "param" else REGISTER_TYPES, "such as .u32 or .b64")
        while (name := peek(cursor)) in ("ptr", "align", *SPACES):  # what a pointer parameter points to
            directive(cursor)
            if name == "align":
                integer(cursor, "an alignment")
        name = cursor.name("the name of a parameter")
        if name != "_" and any(v.name == name for v in result):
            raise cursor.source.error(f"there are two parameters named '{name}'", at)
        shape = _dimensions(cursor)
        size = TYPE_BYTES.get(type_, 1) * lanes
        natural = size
        if shape:
            size *= math.prod(shape)
        if size > 32764:
            raise cursor.source.error(f"the parameter '{name}' has {size} bytes; at most 32764 are allowed", at)
        result.append(Variable(name, space, type_, align or natural, size, (), False, cursor.source.position(at)[0]))
    return result


def function_directives(cursor: Cursor) -> dict[str, tuple]:
    """Reads `.reqntid 128, 1, 1 .maxnreg 168 ...` between a function's parameters and its body."""
    found: dict[str, tuple] = {}
    while (name := peek(cursor)) is not None:
        at = cursor.at
        directive(cursor)
        if name == "pragma":
            found[name] = (*found.get(name, ()), *strings(cursor))
            cursor.takes(";")
            continue
        if name == "attribute":
            cursor.at = at
            _attributes(cursor)
            continue
        if name not in FUNCTION_DIRECTIVES:
            close = suggestion(name, FUNCTION_DIRECTIVES)
            raise cursor.source.error(f"softsm does not know the directive '.{name}' of a function{close}", at)
        fewest, most = FUNCTION_DIRECTIVES[name]
        values: list[int] = []
        while len(values) < most and (values == [] or cursor.takes(",")):
            if not values and fewest == 0 and not STARTS_CONSTANT.match(cursor.clean, cursor.skip()):
                break
            values.append(integer(cursor, f"a number for .{name}"))
        if any(v < 0 for v in values):
            raise cursor.source.error(f".{name} accepts positive numbers, found {min(values)}", at)
        found[name] = tuple(values)
    return found


def strings(cursor: Cursor) -> list[str]:
    """Reads `"a", "b"`, as in .pragma."""
    result = []
    while True:
        match = cursor.match(STRING)
        if match is None:
            raise cursor.expected("a string")
        result.append(unescape(match.group()))
        if not cursor.takes(","):
            return result


def duplicate(cursor: Cursor, name: str, at: int) -> PtxError:
    return cursor.source.error(f"'{name}' is declared twice in one scope", at)
