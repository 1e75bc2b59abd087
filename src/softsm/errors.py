"""The exceptions that softsm raises. Every message names what happened, where and, if known, how to fix it."""

from __future__ import annotations


class SoftsmError(RuntimeError):
    """Base class of everything softsm raises about a program."""

    def __reduce__(self):
        """Keep message and attributes: errors travel between processes."""
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(kind: type[SoftsmError], args: tuple, attributes: dict) -> SoftsmError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class PtxError(SoftsmError):
    """The text is not PTX that softsm can read: line, column and what was expected."""

    def __init__(self, message: str, line: int = 0, column: int = 0):
        self.line, self.column = line, column
        super().__init__(f"PTX line {line}, column {column}: {message}" if line else message)


class Unsupported(PtxError):
    """An instruction or modifier that softsm does not implement; raised when the kernel is loaded."""


class Fault(SoftsmError):
    """The program did something illegal while running. `code` names the diagnostic, e.g. 'out-of-bounds'; `message` is
    the rest of the text; `placed` says that it names the instruction at fault."""

    def __init__(self, code: str, message: str, *, placed: bool = False):
        self.code, self.message, self.placed = code, message, placed
        super().__init__(f"{code}: {message}")


class Deadlock(Fault):
    """No warp can make progress. The message lists what each one waits for."""

    def __init__(self, message: str):
        super().__init__("deadlock", message, placed=True)


class StepBudget(Fault):
    """The launch used up its budget of warp instructions, or its patience."""

    def __init__(self, message: str):
        super().__init__("step-budget", message, placed=True)
