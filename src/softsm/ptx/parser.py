"""Parses PTX text into an `ast.Module`.

The parser reads a function body in two passes. The first splits it into statements with one regular expression and
records the labels of each scope, because a branch may go forward. The second reads declarations and instructions.
"""

from __future__ import annotations

import re
from dataclasses import replace

from softsm.errors import PtxError
from softsm.ptx.ast import Function, Instruction, Label, Module, Reg, SourceLoc, Symbol, Variable
from softsm.ptx.constants import integer
from softsm.ptx.declarations import (
    LINKAGE,
    SPACES,
    TYPE_BYTES,
    directive,
    duplicate,
    function_directives,
    parameters,
    peek,
    registers,
    strings,
    variables,
)
from softsm.ptx.lexer import Cursor, Source, suggestion
from softsm.ptx.names import Scope
from softsm.ptx.operands import NotSimple, Operands

VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?![\w.])", re.ASCII)
TARGET = re.compile(r"[A-Za-z_]\w*", re.ASCII)
LOC = re.compile(
    r"\.loc\s+(\d{1,9})\s+(\d{1,9})(?:\s+(\d{1,9}))?"
    r"(?:\s*,\s*function_name\s+([\w$]+)(?:\s*\+\s*(\d+))?"
    r"\s*,\s*inlined_at\s+(\d{1,9})\s+(\d{1,9})\s+(\d{1,9}))?[ \t]*",
    re.ASCII,
)
INLINED = re.compile(r"@\[ (.+?):(\d{1,9}):(\d{1,9})")
STATEMENT = re.compile(
    r"\s*(?:"
    r"(?P<brace>[{}])"
    r"|(?P<loc>\.loc\b[^\n;]*;?)"
    r"|(?P<label>[A-Za-z_$%][\w$]*)\s*:(?!:)"
    r"|(?P<guard>@\s*!?\s*[\w$%]+\s+)?(?P<opcode>[a-z][\w.:]*(?:\s+\.[\w.:]+)*)(?P<operands>[^;{}]*(?:\{[^;{}]*\}[^;{}]*)*);"
    r"|(?P<directive>\.[a-z_]\w*)[^;{}\"]*(?:(?:\"(?:[^\"\\\n]|\\.)*\"|\{[^;{}]*\})[^;{}\"]*)*;"
    r")",
    re.ASCII,
)
DWARF_LINE = re.compile(r"@@dwarf[^\n]*", re.I)
BODY_DIRECTIVES = ("reg", *SPACES, "pragma", "loc", "branchtargets", "calltargets", "callprototype")
MAX_SCOPES = 200  # nested braces


def parse(text: str) -> Module:
    """Reads a PTX module. Raises PtxError with line, column and what was expected."""
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str):
        if not isinstance(text, str):
            raise ValueError(f"text: expected PTX as str, got {type(text).__name__}")
        self.source = Source(text)
        self.cursor = Cursor(self.source)
        self.module_ = Module((0, 0), "", [], {}, self.source.files, text)
        self.globals = Scope("", None)
        self.braces = 0  # nested scopes so far
        self.sizes: dict[str, int] = {}
        self.opcodes: dict[str, tuple[str, tuple[str, ...]]] = {}

    # -- module level ---------------------------------------------------------------------------------------------

    def module(self) -> Module:
        cursor = self.cursor
        while cursor.match(DWARF_LINE):
            pass
        if peek(cursor) != "version":
            raise cursor.expected("'.version' at the beginning of a PTX module")
        directive(cursor)
        match = cursor.match(VERSION)
        if match is None:
            raise cursor.expected("a PTX version such as 9.0")
        self.module_.version = int(match.group(1)), int(match.group(2))
        if peek(cursor) != "target":
            raise cursor.expected("'.target' after the PTX version")
        aliases: list[tuple[str, str, int]] = []
        while cursor.skip() < len(cursor.clean):
            if cursor.match(DWARF_LINE) or cursor.takes(";"):
                continue
            at = cursor.at
            word = directive(cursor)
            if word is None:
                raise cursor.expected("a directive such as .entry, .func or .global")
            if word == "target":
                self._target(cursor)
            elif word == "address_size":
                if integer(cursor, "32 or 64") not in (32, 64):
                    raise self.source.error("expected 32 or 64 as .address_size", at)
            elif word == "pragma":
                strings(cursor)
                cursor.expect(";", "after .pragma")
            elif word == "alias":
                new = cursor.name("the name of a function")
                cursor.expect(",", "between the two names of .alias")
                aliases.append((new, cursor.name("the name of a function"), at))
                cursor.expect(";", "after .alias")
            elif word == "section":
                raise self.source.error("expected '.section name { ... }' with nothing but data between the braces", at)
            elif word == "loc":
                cursor.at = at
                if cursor.match(LOC) is None:
                    raise cursor.expected("'.loc file line column'")
            else:
                self._declaration(cursor, word, at)
        for new, old, at in aliases:
            if old not in self.module_.functions:
                close = suggestion(old, self.module_.functions)
                raise self.source.error(f"there is no function '{old}' to be named '{new}' as well{close}", at)
            self.module_.functions[new] = self.module_.functions[old]
        return self.module_

    def _target(self, cursor: Cursor) -> None:
        names = []
        while True:
            match = cursor.match(TARGET)
            if match is None:
                raise cursor.expected("a target such as sm_90a or sm_100a")
            names.append(match.group())
            if not cursor.takes(","):
                break
        if not names[0].startswith("sm_") and not names[0].startswith("compute_"):
            raise self.source.error(f"expected a target such as sm_90a or sm_100a, found '{names[0]}'", cursor.at)
        self.module_.target = names[0]

    def _declaration(self, cursor: Cursor, word: str, at: int) -> None:
        extern = False
        while word in LINKAGE:
            extern = extern or word in ("extern", "common")
            at = cursor.skip()
            following = directive(cursor)
            if following is None:
                raise cursor.expected("'.entry', '.func' or a variable")
            word = following
        if word in ("entry", "func"):
            self._function(cursor, word == "entry", at)
        elif word in SPACES:
            for variable in variables(cursor, word, extern, self._global_symbol):
                self._declare(self.globals, self.module_.variables, variable, at, extern)
            cursor.expect(";", "after the declaration")
        else:
            known = ["entry", "func", "version", "target", "address_size", "alias", "pragma", *LINKAGE, *SPACES]
            raise self.source.error(f"softsm does not know the directive '.{word}'{suggestion(word, known)}", at)

    def _declare(self, scope: Scope, into: list[Variable], variable: Variable, at: int, again: bool = False) -> None:
        if scope.declared(variable.name):
            if again or (variable.name in scope.variables and scope.variables[variable.name].extern):
                into[:] = [v for v in into if v.name != variable.name or not v.extern]
            else:
                raise duplicate(self.cursor, variable.name, at)
        unique = scope.unique(variable.name)
        scope.variables[variable.name] = variable
        scope.operands.clear()
        self.sizes[unique] = TYPE_BYTES.get(variable.type, 1)
        if not any(v.name == unique for v in into if again):
            into.append(variable if unique == variable.name else replace(variable, name=unique))

    def _global_symbol(self, name: str, at: int) -> Symbol:
        if name not in self.globals.variables and name not in self.module_.functions:
            known = [*self.globals.variables, *self.module_.functions]
            raise self.source.error(f"the name '{name}' is not declared here{suggestion(name, known)}", at)
        return Symbol(name)

    # -- functions ------------------------------------------------------------------------------------------------

    def _function(self, cursor: Cursor, entry: bool, at: int) -> None:
        returns: list[Variable] = []
        if peek(cursor) == "attribute":
            function_directives(cursor)
        if not entry and cursor.sees("("):
            returns = parameters(cursor, "return values")
        where = cursor.skip()
        name = cursor.name("the name of the function")
        params = parameters(cursor, "parameters") if cursor.sees("(") else []
        directives = function_directives(cursor)
        line = self.source.position(at)[0]
        function = Function(name, entry, params, returns, {}, [], [], {}, directives, line, defined=False)
        before = self.module_.functions.get(name)
        if cursor.takes(";"):
            if before is None:
                self.module_.functions[name] = function
            return
        if before is not None and before.defined:
            raise self.source.error(f"the function '{name}' is defined twice, first in line {before.line}", where)
        if not cursor.takes("{"):
            raise cursor.expected("'{' before the body of the function, or ';'")
        function.defined = True
        self.module_.functions[name] = function
        _Body(self, function, cursor).read()


class _Body:
    """One function's body; the cursor is after its '{'."""

    def __init__(self, parser: _Parser, function: Function, cursor: Cursor):
        self.parser, self.function, self.cursor, self.source = parser, function, cursor, parser.source
        self.scope = Scope("" if function.entry else f"@{function.name}", parser.globals)
        self.operands = Operands(parser.module_.functions, function.registers, parser.sizes)
        self.here: SourceLoc | None = None
        # the place that a directive names; where that was inlined, and what was known of the caller then
        self.locs: dict[tuple[str, str], tuple[SourceLoc | None, tuple | None, SourceLoc | None]] = {}
        # For chains of inlined_at: the last directive of a place. A function may be inlined at several places, and a
        # compiler names the caller of each again before it names lines of the function.
        self.by_place: dict[tuple, SourceLoc] = {}
        self.pending: list[tuple[str, Scope, list[tuple[str, int]]]] = []
        function.returns = [self._parameter(v) for v in function.returns]
        function.params = [self._parameter(v) for v in function.params]

    def _parameter(self, variable: Variable) -> Variable:
        name, scope = variable.name, self.scope
        unique = scope.unique(name)
        if scope.declared(name):
            raise self.source.error(f"there are two parameters named '{name}'", self.cursor.at - 1)
        if variable.space == "reg":
            scope.registers[name] = variable.type
            self.function.registers[unique] = variable.type
        else:
            scope.variables[name] = variable
            self.parser.sizes[unique] = TYPE_BYTES[variable.type]
        return variable if unique == name else replace(variable, name=unique)

    def read(self) -> None:
        statements = self._cut()
        body, scope = self.function.body, self.scope
        for match, inner in statements:
            kind = match.lastgroup
            if kind == "operands":
                body.append(self._instruction(match, scope))
            elif kind == "loc":
                self._loc(match)
            elif kind == "brace":
                scope = inner
            elif kind == "label":
                name = match.group("label")
                if name not in scope.lists:
                    unique = scope.unique(name)
                    body.append(Label(unique, scope.labels[name]))
            else:
                self._directive(match, scope)
        if all(isinstance(item, Label) for item in body):  # as LLVM leaves of undefined behaviour; its end is a return
            body.append(Instruction("ret", (), (), None, self.function.line, 1, self.here, "ret;"))
        for name, inner, targets in self.pending:
            self._targets(name, inner, targets)

    def _cut(self) -> list[tuple[re.Match, Scope]]:
        """Returns the statements of the body, each with the scope after it, and records labels on the way."""
        clean, at = self.source.clean, self.cursor.at
        opened = at - 1
        statements: list[tuple[re.Match, Scope]] = []
        scope = self.scope
        depth = 0
        while True:
            match = STATEMENT.match(clean, at)
            if match is None:
                raise self._no_statement(at, opened)
            kind = match.lastgroup
            if kind == "brace":
                if match.group("brace") == "{":
                    depth += 1
                    if depth > MAX_SCOPES:
                        raise self.source.error("braces are nested too deeply", match.end() - 1)
                    self.parser.braces += 1
                    scope = Scope(f"@{self.parser.braces}", scope)
                elif depth == 0:
                    self.cursor.at = match.end()
                    return statements
                else:
                    depth -= 1
                    assert scope.parent is not None
                    scope = scope.parent
            elif kind == "label":
                self._note_label(match, scope)
            statements.append((match, scope))
            at = match.end()

    def _note_label(self, match: re.Match, scope: Scope) -> None:
        name, start = match.group("label"), match.start("label")
        line = self.source.position(start)[0]
        first = scope.labels.get(name, scope.lists.get(name))
        if first is not None:
            raise self.source.error(f"the label '{name}' is defined in lines {first} and {line} of one scope", start)
        following = peek(Cursor(self.source, match.end()))
        if following in ("branchtargets", "calltargets", "callprototype"):
            scope.lists[name] = line
        else:
            scope.labels[name] = line

    def _no_statement(self, at: int, opened: int) -> PtxError:
        """Returns the error for text that is not a statement: mostly a missing ';' or '}'."""
        cursor = Cursor(self.source, at)
        start = cursor.skip()
        if start >= len(cursor.clean):
            line = self.source.position(opened)[0]
            return self.source.error(f"expected '}}' to close the body opened in line {line}, found the end", start)
        head = re.compile(r"(?:@\s*!?\s*[\w$%]+\s+)?[a-z][\w.:]*|\.[a-z_]\w*", re.ASCII).match(cursor.clean, start)
        if head is None:
            return cursor.expected("an instruction, a label, a declaration or '}'")
        stop = re.compile(r"[^;{}\n]*").match(cursor.clean, head.end())
        assert stop is not None
        cursor.at = stop.end()
        return cursor.expected(f"';' after '{head.group()}'")

    # -- statements -----------------------------------------------------------------------------------------------

    def _instruction(self, match: re.Match, scope: Scope) -> Instruction:
        guard_text, name, text = match.group("guard", "opcode", "operands")
        start = match.start("opcode") if guard_text is None else match.start("guard")
        line, column = self.source.position(start)
        split = self.parser.opcodes.get(name)
        if split is None:
            parts = "".join(name.split()).split(".")
            if "" in parts or parts[0].find(":") >= 0 or name.endswith(":"):
                raise self.source.error(f"'{name}' is not the name of an instruction", match.start("opcode"))
            split = self.parser.opcodes[name] = parts[0], tuple(parts[1:])
        opcode, modifiers = split
        guard = None if guard_text is None else self._guard(match, scope)
        if opcode in ("bra", "brx"):
            operands = self.operands.branch(Cursor(self.source, match.start("operands")), scope, opcode)
        elif opcode == "call":
            operands = self.operands.call(Cursor(self.source, match.start("operands")), scope)
        elif not text or text.isspace():
            operands = ()
        else:
            try:
                operands = self.operands.quick(text, scope)
            except NotSimple:
                operands = self.operands.parse(Cursor(self.source, match.start("operands")), scope, opcode)
        written = " ".join(self.source.clean[start : match.end()].split())
        return Instruction(opcode, modifiers, operands, guard, line, column, self.here, written)

    def _guard(self, match: re.Match, scope: Scope) -> Reg:
        text = match.group("guard")
        known = scope.operands.get(text)
        if known is None:
            cursor = Cursor(self.source, match.start("guard") + 1)
            negated = cursor.takes("!")
            at = cursor.skip()
            register = self.operands.name(cursor, scope)
            if not isinstance(register, Reg):
                raise self.source.error("expected a predicate register after '@'", at)
            known = scope.operands[text] = Reg(register.name, negated)
        return known

    def _loc(self, match: re.Match) -> None:
        text = match.group("loc")
        inlined = self._inlined(match.start("loc")) if self.source.has_inlined else ""
        here, place, caller = self.locs.get((text, inlined), (None, None, None))
        if here is None or place is not None and self.by_place.get(place) is not caller:
            here, place, caller = self.locs[text, inlined] = self._read_loc(text, match.start("loc"), inlined)
        if here is not None:
            self.by_place[here.file, here.line, here.column] = here
        self.here = here

    def _inlined(self, at: int) -> str:
        """Reads `@[ kernel.cu:3:7 @[ ... ] ]`: clang names the places where a line was inlined only in a comment."""
        line = self.source.text[at : self.source.text.find("\n", at)]
        return line[line.find("@[") :] if "@[" in line else ""

    def _callers(self, inlined: str) -> SourceLoc | None:
        place = None
        for file, line, column in reversed(INLINED.findall(inlined)):
            known = next((name for name in self.source.files.values() if name.endswith(file)), file)
            place = SourceLoc(known, int(line), int(column), self.function.name, place)
        return place

    def _read_loc(self, text: str, at: int, inlined_at: str) -> tuple[SourceLoc | None, tuple | None, SourceLoc | None]:
        found = LOC.fullmatch(text.rstrip(" \t\r;"))
        if found is None:
            raise self.source.error("expected '.loc file line column'", at)
        file, line, column, label, skip, *inlined = found.groups()
        if not int(line):  # code of the compiler itself, without a line of the program
            return None, None, None
        function, caller = self.function.name, self._callers(inlined_at)
        place, known = None, None
        if label is not None:
            function = self.source.strings.get(label, "")[int(skip[:9]) if skip else 0 :]
            place = self._file(int(inlined[0])), int(inlined[1]), int(inlined[2])
            known = self.by_place.get(place)
            caller = known or SourceLoc(*place, self.function.name)
        return SourceLoc(self._file(int(file)), int(line), int(column or 0), function, caller), place, known

    def _file(self, number: int) -> str:
        return self.source.files.get(number, "")

    def _directive(self, match: re.Match, scope: Scope) -> None:
        start = match.start("directive")
        cursor = Cursor(self.source, start)
        word = directive(cursor)
        if word == "reg":
            registers(cursor, scope)
        elif word in SPACES:
            for variable in variables(cursor, word, False, self.parser._global_symbol):
                self.parser._declare(scope, self.function.variables, variable, start)
        elif word == "pragma":
            strings(cursor)
        elif word in ("branchtargets", "calltargets"):
            self._list(cursor, scope, start, word)
        elif word == "callprototype":
            self._prototype(cursor)
        else:
            close = suggestion(str(word), BODY_DIRECTIVES)
            raise self.source.error(f"softsm does not know the directive '.{word}' in a function{close}", start)
        if not cursor.takes(";"):
            raise cursor.expected("',' or ';'")
        if cursor.at != match.end():
            raise self.source.error("expected ';' here", cursor.at)

    def _list(self, cursor: Cursor, scope: Scope, start: int, word: str) -> None:
        """Reads the targets of a `brx.idx`; the label is just before the directive."""
        before = re.compile(r"([A-Za-z_$%][\w$]*)\s*:\s*\Z", re.ASCII).search(cursor.clean, max(0, start - 400), start)
        if before is None or before.group(1) not in scope.lists:
            raise self.source.error(f"expected a label before .{word}", start)
        names = []
        while True:
            at = cursor.skip()
            names.append((cursor.name("a label"), at))
            if not cursor.takes(","):
                break
        if word == "branchtargets":
            self.pending.append((before.group(1), scope, names))

    def _targets(self, name: str, scope: Scope, targets: list[tuple[str, int]]) -> None:
        found = []
        for target, at in targets:
            unique = scope.label(target)
            if unique is None:
                close = suggestion(target, scope.labels)
                raise self.source.error(f"there is no label '{target}' in this scope{close}", at)
            found.append(unique)
        self.function.branch_targets[scope.unique(name)] = tuple(found)

    def _prototype(self, cursor: Cursor) -> None:
        """Skips `.callprototype (.param .b32 _) _ (.param .b64 _) .noreturn`: the call itself has all we need."""
        if cursor.sees("("):
            parameters(cursor, "return values")
        cursor.name("'_'")
        if cursor.sees("("):
            parameters(cursor, "parameters")
        function_directives(cursor)
