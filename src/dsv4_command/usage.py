"""Errors of usage: one line on stderr, exit status 2."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

T = TypeVar("T")

if TYPE_CHECKING:
    from click import UsageError
else:
    UsageError = typer.BadParameter.__base__  # class of click, or of the copy of click in newer typers


def refuse(why: str) -> NoReturn:
    """Exit because of wrong usage, or with nothing to work on."""
    raise UsageError(why)


def told(problem: Any) -> str:
    """Return the line of an error. Each begins with the option, argument or command, whoever found the error."""
    text, kind = problem.format_message(), type(problem).__name__
    given = getattr(problem, "param", None)
    name = getattr(problem, "option_name", None) if given is None else given.opts[0]
    if kind == "NoSuchOption":
        return f"{name}: there is no such option{near(problem.option_name, problem.possibilities)}"
    if kind == "BadOptionUsage":
        return f"{name}: " + ("needs a value" if "requires" in text else "has no value")
    if kind == "MissingParameter":
        return f"{name}: is missing"
    if kind == "BadParameter" and text.startswith("Invalid value"):
        return f"{name}: {wrong_value(problem)}"
    if unknown := re.match("No such command '(.*?)'", text):
        return f"{unknown[1]}: there is no such command{near(unknown[1], problem.ctx.command.commands)}"
    if many := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", text):
        return f"{many[1]}: there is no such argument"
    return text


def wrong_value(problem: Any) -> str:
    """Return what was given and what is accepted; the exception that typer wraps has the value."""
    message = problem.message[:1].lower() + problem.message[1:].partition(", unable to")[0]
    errors = getattr(problem.__context__, "errors", None)
    if errors is None:  # an older typer, whose message has the value
        return message
    return f"got {errors()[0]['input']!r}; {message.replace('input should be', 'accepted:')}"


def near(name: str, known: Iterable[str] | None) -> str:
    closest = difflib.get_close_matches(name, known or (), 1, 0.4)
    return f"; did you mean {closest[0]}?" if closest else ""


def chosen(option: str, values: Sequence[T] | None, accepted: Iterable[T]) -> list[T]:
    """Return the values of an option that may be given several times; all that are accepted if it is not given."""
    known = list(accepted)
    for value in values or ():
        if value not in known:
            refuse(f"{option}: got {value!r}; accepted: {', '.join(map(str, known))}")
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
