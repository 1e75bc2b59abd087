"""Evaluates constant expressions (PTX ISA 4.5) while parsing, in 64-bit integers or doubles."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable

from softsm.ptx.ast import Imm
from softsm.ptx.lexer import NUMBER, Cursor, literal, negated

WARP_SIZE = 32
MAX_NESTING = 40  # levels of brackets and unary operators; keeps hostile text from exhausting Python's stack

CAST = re.compile(r"\(\s*\.([su])64\s*\)")
OPERATOR = re.compile(r"<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>&^|?]")
STARTS_CONSTANT = re.compile(r"[-+~(.\d]|WARP_SZ\b")

PRECEDENCE = {"||": 1, "&&": 2, "|": 3, "^": 4, "&": 5, "==": 6, "!=": 6, "<": 7, ">": 7, "<=": 7, ">=": 7,
              "<<": 8, ">>": 8, "+": 9, "-": 9, "*": 10, "/": 10, "%": 10}  # fmt: skip


def _divide(a: int | float, b: int | float) -> int | float:
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    return int(math.copysign(1, a) * math.copysign(1, b)) * (abs(a) // abs(b))  # towards zero, as C


BINARY: dict[str, Callable] = {
    "||": lambda a, b: int(bool(a) or bool(b)), "&&": lambda a, b: int(bool(a) and bool(b)),
    "|": lambda a, b: a | b, "^": lambda a, b: a ^ b, "&": lambda a, b: a & b,
    "==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b), ">": lambda a, b: int(a > b),
    "<=": lambda a, b: int(a <= b), ">=": lambda a, b: int(a >= b),
    "<<": lambda a, b: a << b if b < 64 else 0, ">>": lambda a, b: a >> b if b < 64 else -(a < 0),
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
    "/": _divide, "%": lambda a, b: a - b * _divide(a, b),
}  # fmt: skip


def constant(cursor: Cursor, nesting: int = 0) -> Imm:
    """Reads a whole constant expression. A single literal keeps its bit-exact spelling (0f..., 0d...)."""
    value = _binary(cursor, 1, nesting)
    if cursor.sees("?"):
        cursor.takes("?")
        yes = constant(cursor, nesting + 1)
        cursor.expect(":", "in a conditional constant expression")
        no = constant(cursor, nesting + 1)
        return yes if value.value else no
    return value


def integer(cursor: Cursor, what: str) -> int:
    """Reads a constant expression that must be an integer."""
    at = cursor.skip()
    if not STARTS_CONSTANT.match(cursor.clean, at):
        raise cursor.expected(what)
    value = constant(cursor)
    if value.kind != "int":
        raise cursor.source.error(f"expected {what}, found the floating-point number {value.value}", at)
    assert isinstance(value.value, int)
    return value.value


def _binary(cursor: Cursor, weakest: int, nesting: int) -> Imm:
    left = _unary(cursor, nesting)
    while True:
        match = OPERATOR.match(cursor.clean, cursor.skip())
        strength = PRECEDENCE.get(match.group(), 0) if match else 0
        if match is None or strength < weakest:
            return left
        cursor.at = match.end()
        right = _binary(cursor, strength + 1, nesting)
        try:
            left = _made(BINARY[match.group()](left.value, right.value))
        except (ArithmeticError, TypeError, ValueError) as problem:
            raise cursor.source.error(f"this constant expression has no value: {problem}", match.start()) from None


def _unary(cursor: Cursor, nesting: int) -> Imm:
    at = cursor.skip()
    if nesting > MAX_NESTING:
        raise cursor.source.error("this constant expression is nested too deeply", at)
    cast = cursor.match(CAST)
    if cast:
        value = _whole(cursor, _unary(cursor, nesting + 1), at) & (1 << 64) - 1
        return Imm(value - (1 << 64) if cast.group(1) == "s" and value >> 63 else value)
    if cursor.takes("("):
        inner = constant(cursor, nesting + 1)
        cursor.expect(")", "after a constant expression")
        return inner
    if cursor.takes("-"):
        return negated(_unary(cursor, nesting + 1))
    if cursor.takes("+"):
        return _unary(cursor, nesting + 1)
    if cursor.takes("~"):
        return Imm(~_whole(cursor, _unary(cursor, nesting + 1), at))
    if cursor.sees("!") and not cursor.sees("!="):
        cursor.takes("!")
        return Imm(int(not _unary(cursor, nesting + 1).value))
    if cursor.takes("WARP_SZ"):
        return Imm(WARP_SIZE)
    match = cursor.match(NUMBER)
    if match is None:
        raise cursor.expected("a number")
    try:
        return literal(match.group())
    except ValueError as problem:
        raise cursor.source.error(f"'{match.group()[:40]}' is not a number that PTX can hold: {problem}", at) from None


def _whole(cursor: Cursor, value: Imm, at: int) -> int:
    if not isinstance(value.value, int):
        raise cursor.source.error(f"expected an integer, found the floating-point number {value.value}", at)
    return value.value


def _made(value: int | float) -> Imm:
    if isinstance(value, float):
        return Imm(value, "float", int.from_bytes(struct.pack("<d", value), "little"))
    if not -(1 << 63) <= value < 1 << 64:  # PTX evaluates in 64 bits
        value &= (1 << 64) - 1
    return Imm(value)
