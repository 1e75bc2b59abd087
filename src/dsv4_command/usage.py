"""Errors of usage: one line on stderr, exit status 2."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

T = TypeVar("T")

if TYPE_CHECKING:
    from click import UsageError
else:
    UsageError = typer.BadParameter.__base__  # of click, or of the copy of click in newer typers


def refuse(why: str) -> NoReturn:
    """Exit because of wrong usage, or with nothing to work on."""
    raise UsageError(why)


def told(problem: UsageError) -> str:
    """Return the line of an error. Each begins with the option, whoever found the error."""
    near = getattr(problem, "possibilities", None)
    name = getattr(problem, "option_name", None)
    if near is None or name is None:
        text, given = problem.format_message(), getattr(problem, "param", None)
        if given is not None and text.startswith("Invalid value"):
            return f"{given.opts[0]}: {problem.message[:1].lower()}{problem.message[1:]}"
        return text
    closest = difflib.get_close_matches(name, near, 1, 0.0)
    return f"{name}: there is no such option" + (f"; did you mean {closest[0]}?" if closest else "")


def chosen(option: str, values: Sequence[T] | None, accepted: Iterable[T]) -> list[T]:
    """Return the values of an option that may be given several times; all that are accepted if it is not given."""
    known = list(accepted)
    for value in values or ():
        if value not in known:
            refuse(f"{option}: got {value}; accepted: {', '.join(map(str, known))}")
    return list(values or known)


def one_of(accepted: Iterable[Any]) -> Callable[..., Any]:
    """Return a callback for an option whose values are known; given several times, each is checked."""

    def check(parameter: typer.CallbackParam, value: Any) -> Any:
        if value is not None:
            name = parameter.opts[0] if parameter.param_type_name == "option" else str(parameter.name)
            chosen(name, value if isinstance(value, (list, tuple)) else [value], accepted)
        return value

    return check


def file_to_write(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """Reject a place where nothing can be written now, not after the work."""
    if path is not None and not path.absolute().parent.is_dir():
        refuse(f"{parameter.opts[0]}: got {path}; accepted: a file in a folder that exists")
    return path
