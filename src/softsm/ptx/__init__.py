"""PTX text -> program: `parse(text)` gives an `ast.Module`, or a PtxError with line, column and what was expected."""

from softsm.ptx.parser import parse

__all__ = ["parse"]
