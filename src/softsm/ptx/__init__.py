"""The PTX parser: `parse(text)` returns an `ast.Module` or raises PtxError with line, column and what was expected."""

from softsm.ptx.parser import parse

__all__ = ["parse"]
