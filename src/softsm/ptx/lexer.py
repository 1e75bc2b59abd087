"""Prepares PTX text for the parser: blanks comments and debug sections, and reads positions and literals.

Spaces of equal length replace what is removed, so an offset into `Source.clean` is an offset into the original text.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from difflib import get_close_matches

from softsm.errors import PtxError
from softsm.ptx.ast import Imm

SPACE = re.compile(r"\s*")
NAME = re.compile(r"[A-Za-z_$%][\w$]*", re.ASCII)
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:[^"\\\n]|\\.)*("?)', re.S)
SECTION = re.compile(r"^[ \t]*\.section\s+([.\w$]+)\s*\{([^{}]*)\}", re.M)
FILE = re.compile(r"^[ \t]*\.file\s+(\d{1,9})\s+(\"(?:[^\"\\\n]|\\.)*\")[^\n]*", re.M)
STRING_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:|\.b8\s+([\d\s,]+)", re.ASCII)
# LLVM counts lines inside inline assembly on from the line of its call, so such a .loc names a line too far down.
INLINE = re.compile(r"// begin inline asm\n(.*?)// end inline asm", re.S)
LOC_LINE = re.compile(r"^[ \t]*\.loc\b[^\n]*", re.M)
NUMBER = re.compile(
    r"0[fF][0-9a-fA-F]{8}(?!\w)|0[dD][0-9a-fA-F]{16}(?!\w)|0[xX][0-9a-fA-F]+U?(?!\w)|0[bB][01]+U?(?!\w)"
    r"|(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?(?!\w)|\d+[eE][+-]?\d+(?!\w)|\d+U?(?!\w)",
    re.ASCII,
)
MAX_DIGITS = 100  # longer literals are not numbers


def _blank(text: str) -> str:
    """Returns spaces of the same length; newlines stay, to keep line numbers."""
    return re.sub(r"[^\n]", " ", text)


class Source:
    """The text, its cleaned form, and the mapping from an offset to line and column."""

    def __init__(self, text: str):
        self.text = text
        self._starts = [0, *(m.end() for m in re.finditer("\n", text))]
        self.clean = COMMENT_OR_STRING.sub(self._drop_comment, text)
        self.has_inlined = "@[ " in text and ".py:" not in text  # C++: comments with the places of inlined lines
        self.files: dict[int, str] = {}
        self.strings: dict[str, str] = {}  # .debug_str labels: names of inlined functions
        if ".section" in self.clean:
            self.clean = SECTION.sub(self._drop_section, self.clean)
        self.clean = FILE.sub(self._note_file, self.clean)
        if "// begin inline asm" in text:
            self._drop_inner_locs()

    def _drop_comment(self, match: re.Match) -> str:
        found = match.group()
        if found[0] == '"':
            if not match.group(1):
                raise self.error('this string has no closing "', match.start())
            return found
        if found.startswith("/*") and (len(found) < 4 or not found.endswith("*/")):
            raise self.error("this comment has no closing */", match.start())
        return _blank(found) if "\n" in found else " " * len(found)

    def _drop_inner_locs(self) -> None:
        pieces, at = [], 0
        for found in INLINE.finditer(self.text):
            start, end = found.span(1)
            pieces += [self.clean[at:start], LOC_LINE.sub(lambda m: " " * len(m.group()), self.clean[start:end])]
            at = end
        self.clean = "".join([*pieces, self.clean[at:]])

    def _drop_section(self, match: re.Match) -> str:
        if match.group(1) == ".debug_str":
            label, content = "", bytearray()
            for piece in STRING_LABEL.finditer(match.group(2)):
                if piece.group(1):
                    label, content = piece.group(1), bytearray()
                else:
                    content.extend(int(b[:4]) & 255 for b in piece.group(2).replace(",", " ").split())
                    self.strings[label] = content.split(b"\0")[0].decode("utf-8", "replace")
        return _blank(match.group())

    def _note_file(self, match: re.Match) -> str:
        self.files[int(match.group(1))] = unescape(match.group(2))
        return _blank(match.group())

    def position(self, offset: int) -> tuple[int, int]:
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def error(self, message: str, offset: int) -> PtxError:
        return PtxError(message, *self.position(min(offset, len(self.text))))

    def found(self, offset: int) -> str:
        """Returns the word or character at an offset, quoted, for messages."""
        rest = self.clean[offset : offset + 40].lstrip()
        if not rest:
            return "the end of the text"
        match = re.match(r"[\w$%.@]+(?:::\w+)*|.", rest, re.S)
        assert match is not None
        return f"'{match.group()}'"


class Cursor:
    """A position in a Source, with the basic steps that every part of the parser uses."""

    def __init__(self, source: Source, at: int = 0):
        self.source, self.clean, self.at = source, source.clean, at

    def skip(self) -> int:
        self.at = SPACE.match(self.clean, self.at).end()  # type: ignore[union-attr]
        return self.at

    def sees(self, text: str) -> bool:
        return self.clean.startswith(text, self.skip())

    def takes(self, text: str) -> bool:
        if self.sees(text):
            self.at += len(text)
            return True
        return False

    def match(self, pattern: re.Pattern) -> re.Match | None:
        match = pattern.match(self.clean, self.skip())
        if match:
            self.at = match.end()
        return match

    def expect(self, text: str, where: str) -> None:
        if not self.takes(text):
            raise self.expected(f"'{text}' {where}")

    def name(self, what: str) -> str:
        match = self.match(NAME)
        if match is None:
            raise self.expected(what)
        return match.group()

    def expected(self, what: str) -> PtxError:
        at = self.skip()
        return self.source.error(f"expected {what}, found {self.source.found(at)}", at)


def literal(text: str) -> Imm:
    """Converts a literal that NUMBER matched."""
    if len(text) > MAX_DIGITS:
        raise ValueError("a literal of more than 100 characters")
    kind = text[1:2].lower() if text[0] == "0" else ""
    if kind == "f":
        bits = int(text[2:], 16)
        return Imm(struct.unpack("<f", bits.to_bytes(4, "little"))[0], "f32", bits)
    if kind == "d":
        bits = int(text[2:], 16)
        return Imm(struct.unpack("<d", bits.to_bytes(8, "little"))[0], "f64", bits)
    if kind == "x":
        return _integer(int(text[2:].rstrip("U"), 16))
    if kind == "b":
        return _integer(int(text[2:].rstrip("U"), 2))
    if "." in text or "e" in text or "E" in text:
        value = float(text)
        return Imm(value, "float", int.from_bytes(struct.pack("<d", value), "little"))
    digits = text.rstrip("U")
    if len(digits) > 1 and digits[0] == "0":
        return _integer(int(digits, 8))  # raises ValueError for 8 and 9, as ptxas does
    return _integer(int(digits))


def _integer(value: int) -> Imm:
    if value >= 1 << 64:
        raise ValueError("an integer literal beyond 64 bits")
    return Imm(value)


def negated(imm: Imm) -> Imm:
    """Returns the literal with a minus sign applied."""
    if imm.kind == "int":
        return Imm(-imm.value)
    return Imm(-imm.value, imm.kind, imm.bits ^ (1 << (31 if imm.kind == "f32" else 63)))


def unescape(quoted: str) -> str:
    """Returns the content of a quoted string with C escapes (only those that PTX writers use)."""
    plain = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}
    return re.sub(r"\\(.)", lambda m: plain.get(m.group(1), m.group(1)), quoted[1:-1], flags=re.S)


def suggestion(name: str, known: object) -> str:
    """Returns ' (did you mean ...?)' for a name that resembles a known one, else ''."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.7)  # type: ignore[call-overload]
    return f" (did you mean '{close[0]}'?)" if close else ""
