"""Reads the operands of instructions.

Most operands of a compiled kernel are `%r12`, `[%rd4+8]` and small integers, so a dictionary and one regular expression
read those; anything else, and anything wrong, goes through `Operands.parse`, which knows the columns.
"""

from __future__ import annotations

import re

from softsm.ptx.ast import Address, Call, Imm, Label, Pair, Reg, Sink, Special, Symbol, Vector
from softsm.ptx.constants import STARTS_CONSTANT, constant, integer
from softsm.ptx.lexer import Cursor, literal, suggestion
from softsm.ptx.names import SPECIAL_REGISTERS, Scope

WORD = re.compile(r"[A-Za-z_$%][\w$]*(?:\.\w+)?", re.ASCII)
SIMPLE = re.compile(
    r"(?P<word>[A-Za-z_$%][\w$]*(?:\.[xyzw])?)"
    r"|(?P<integer>-?(?:0[xX][0-9a-fA-F]{1,16}|0|[1-9]\d{0,18}))"
    r"|(?P<float>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16})"
    r"|\[\s*(?P<base>[A-Za-z_$%][\w$]*)\s*(?:(?P<sign>[+-])\s*(?P<offset>-?\d{1,10})\s*)?\]",
    re.ASCII,
)
SPLIT = re.compile(r"[^,\[{]*(?:\[[^\]]*\][^,\[{]*|\{[^}]*\}[^,\[{]*)*")
MAX_OPERANDS = 2048


class NotSimple(Exception):
    """Raised for an operand that the quick path does not read."""


class Operands:
    """Reads the operands of one function; `scope` follows the parser through the braces."""

    def __init__(self, functions: dict, used: dict[str, str], sizes: dict[str, int]):
        self.functions = functions  # functions known so far: their names are symbols too
        self.used = used  # registers that occur: name -> type
        self.sizes = sizes  # variable -> bytes of an element, for name[index]

    # -- the quick way --------------------------------------------------------------------------------------------

    def quick(self, text: str, scope: Scope) -> tuple:
        """Reads operands of plain form; raises NotSimple for all others, right or wrong."""
        cache = scope.operands
        if "[" not in text and "{" not in text:
            pieces = text.split(",")
        else:
            pieces, at, end = [], 0, len(text)
            while True:
                stop = SPLIT.match(text, at).end()  # type: ignore[union-attr]
                pieces.append(text[at:stop])
                if stop >= end:
                    break
                if text[stop] != ",":
                    raise NotSimple
                at = stop + 1
        result = []
        for piece in pieces:
            piece = piece.strip()
            operand = cache.get(piece)
            result.append(self._simple(piece, scope) if operand is None else operand)
        return tuple(result)

    def _simple(self, piece: str, scope: Scope) -> object:
        if piece[:1] == "{" and piece[-1] == "}":
            cache = scope.operands
            items = []
            for item in piece[1:-1].split(","):
                item = item.strip()
                operand = cache.get(item)
                items.append(self._simple(item, scope) if operand is None else operand)
                if not isinstance(items[-1], (Reg, Imm, Special, Sink)):
                    raise NotSimple
            return Vector(tuple(items))
        first, bar, second = piece.partition("|")
        if bar:
            pair = self._simple(first.strip(), scope), self._simple(second.strip(), scope)
            if not all(isinstance(p, (Reg, Sink)) for p in pair):
                raise NotSimple
            return Pair(*pair)
        match = SIMPLE.fullmatch(piece)
        if match is None:
            raise NotSimple
        word, whole, exact, base, sign, offset = match.groups()
        result: object
        if word is not None:
            result = self._named(word, scope)
        elif whole is not None:
            value = int(whole, 0)
            if value >= 1 << 64:
                raise NotSimple
            result = Imm(value)
        elif exact is not None:
            result = literal(exact)
        else:
            where = self._named(base, scope)
            if not isinstance(where, (Reg, Symbol)):
                raise NotSimple
            distance = int(offset) if offset else 0
            if offset and len(offset.lstrip("-")) > 1 and offset.lstrip("-")[0] == "0":
                raise NotSimple  # octal
            result = Address(where, -distance if sign == "-" else distance)
        scope.operands[piece] = result
        return result

    def _named(self, word: str, scope: Scope) -> object:
        if word == "_":
            return Sink()
        found = scope.resolve(word, self.used)
        if found is not None:
            return found
        if word in self.functions:
            return Symbol(word)
        raise NotSimple

    # -- the careful way ------------------------------------------------------------------------------------------

    def parse(self, cursor: Cursor, scope: Scope, opcode: str) -> tuple:
        """Reads the operands up to the ';', which it does not consume."""
        if cursor.sees(";"):
            return ()
        result = [self.operand(cursor, scope, opcode)]
        while cursor.takes(","):
            result.append(self.operand(cursor, scope, opcode))
            if len(result) > MAX_OPERANDS:
                raise cursor.source.error("too many operands", cursor.at)
        if not cursor.sees(";"):
            raise cursor.expected("',' or ';' after an operand")
        return tuple(result)

    def operand(self, cursor: Cursor, scope: Scope, opcode: str = "") -> object:
        at = cursor.skip()
        if cursor.sees("["):
            return self._address(cursor, scope)
        if cursor.sees("{"):
            return self._vector(cursor, scope)
        if cursor.takes("!"):
            register = self.name(cursor, scope)
            if not isinstance(register, Reg):
                raise cursor.source.error("expected a predicate register after '!'", at)
            return Reg(register.name, not register.negated)
        if STARTS_CONSTANT.match(cursor.clean, at):
            return constant(cursor)
        first = self.name(cursor, scope)
        if isinstance(first, Symbol):
            return self._symbol(cursor, first, opcode)
        if cursor.sees("|") and not cursor.sees("||"):
            cursor.takes("|")
            negate = cursor.takes("!")
            second = self.name(cursor, scope)
            if negate and isinstance(second, Reg):
                second = Reg(second.name, True)
            return Pair(first, second)
        return first

    def name(self, cursor: Cursor, scope: Scope) -> object:
        """Reads a register, predefined register, symbol or `_`; an unknown name is an error with a suggestion."""
        at = cursor.skip()
        match = cursor.match(WORD)
        if match is None:
            raise cursor.expected("an operand")
        word = match.group()
        try:
            return self._named(word, scope)
        except NotSimple:
            what = "register" if word[0] == "%" else "name"
            raise cursor.source.error(
                f"the {what} '{word}' is not declared here{self._hint(word, scope)}", at
            ) from None

    def _hint(self, word: str, scope: Scope) -> str:
        declared = scope.range_of(word)
        if declared:
            return f" (declared are {declared})"
        known = [*scope.known(), *self.functions, *(SPECIAL_REGISTERS if word[0] == "%" else ())]
        return suggestion(word, known)

    def _symbol(self, cursor: Cursor, symbol: Symbol, opcode: str) -> object:
        if cursor.sees("["):  # name[index]: an element of an array, by value in ld and st, else its address
            cursor.takes("[")
            offset = integer(cursor, "an index") * self.sizes.get(symbol.name, 1)
            cursor.expect("]", "after the index")
            return Symbol(symbol.name, offset) if opcode in ("mov", "cvta") else Address(symbol, offset)
        if cursor.sees("+") or cursor.sees("-"):
            return Symbol(symbol.name, integer(cursor, "an offset"))
        return symbol

    def _vector(self, cursor: Cursor, scope: Scope) -> Vector:
        cursor.expect("{", "before the elements")
        items = [self._element(cursor, scope)]
        while cursor.takes(","):
            items.append(self._element(cursor, scope))
        cursor.expect("}", "after the elements of a vector")
        return Vector(tuple(items))

    def _element(self, cursor: Cursor, scope: Scope) -> object:
        at = cursor.skip()
        if cursor.sees("{") or cursor.sees("["):
            raise cursor.expected("a register or a literal in a vector")
        item = self.operand(cursor, scope)
        if isinstance(item, (Vector, Pair)):
            raise cursor.source.error("a vector holds registers or literals", at)
        return item

    def _address(self, cursor: Cursor, scope: Scope) -> Address:
        cursor.expect("[", "before an address")
        at = cursor.skip()
        base: object
        offset = 0
        if STARTS_CONSTANT.match(cursor.clean, at):
            base = Imm(integer(cursor, "an address"))
        else:
            base = self.name(cursor, scope)
            if cursor.sees("+") or cursor.sees("-"):
                offset = integer(cursor, "an offset in bytes")
        if not isinstance(base, (Reg, Symbol, Imm)):
            raise cursor.source.error("expected a register, a variable or a number as address", at)
        coords: tuple = ()
        extra: list = []
        while cursor.takes(","):
            item = self._vector(cursor, scope) if cursor.sees("{") else self.operand(cursor, scope)
            if isinstance(item, Vector) and not coords:
                coords = item.items
            else:
                extra.append(item)
        cursor.expect("]", "after an address")
        return Address(base, offset, coords, tuple(extra))

    # -- instructions with special operands -------------------------------------------------------------------------

    def branch(self, cursor: Cursor, scope: Scope, opcode: str) -> tuple:
        """Reads the operands of `bra L` and `brx.idx %r, list`."""
        result: list = []
        if opcode == "brx":
            result.append(self.operand(cursor, scope))
            cursor.expect(",", "between the index and the list of targets")
        at = cursor.skip()
        name = cursor.name("a label")
        unique = scope.target_list(name) if opcode == "brx" else scope.label(name)
        if unique is None:
            known: list[str] = []
            walk: Scope | None = scope
            while walk is not None:
                known += walk.lists if opcode == "brx" else walk.labels
                walk = walk.parent
            what = "list of targets" if opcode == "brx" else "label"
            raise cursor.source.error(f"there is no {what} '{name}' in this scope{suggestion(name, known)}", at)
        result.append(Label(unique))
        if not cursor.sees(";"):
            raise cursor.expected("';' after the label")
        return tuple(result)

    def call(self, cursor: Cursor, scope: Scope) -> tuple:
        """Reads `call (returns), callee, (arguments), prototype`; every part but the callee is optional."""
        returns = self._list(cursor, scope) if cursor.sees("(") else None
        if returns is not None:
            cursor.expect(",", "after the list of return values")
        callee = self.name(cursor, scope)
        arguments: tuple = ()
        prototype = None
        if cursor.takes(","):
            if cursor.sees("("):
                arguments = self._list(cursor, scope)
                if cursor.takes(","):
                    prototype = self._prototype(cursor, scope)
            else:
                prototype = self._prototype(cursor, scope)
        if not cursor.sees(";"):
            raise cursor.expected("';' after the call")
        names = tuple(r.name for r in returns or () if isinstance(r, (Symbol, Reg)))
        return (Call(names, callee, arguments, prototype),)

    def _prototype(self, cursor: Cursor, scope: Scope) -> str:
        at = cursor.skip()
        name = cursor.name("the label of a .callprototype or .calltargets")
        unique = scope.target_list(name)
        if unique is None:
            raise cursor.source.error(f"there is no .callprototype or .calltargets labelled '{name}'", at)
        return unique

    def _list(self, cursor: Cursor, scope: Scope) -> tuple:
        cursor.expect("(", "before a list")
        items: list = []
        while not cursor.takes(")"):
            if items:
                cursor.expect(",", "or ')' in a list")
            items.append(self.operand(cursor, scope))
        return tuple(items)
