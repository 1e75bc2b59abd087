"""What the public functions accept: anything else is a ValueError that names the argument, what it got and what is
accepted, before anything runs."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Sequence
from typing import Any, NoReturn

MOST_SMS = 1024  # more than any GPU has
ORDERS = ("eager", "latest", "random")  # orders in which asynchronous operations complete


def refuse(name: str, got: Any, accepted: str) -> NoReturn:
    raise ValueError(f"{name}: got {_described(got)}; accepted: {accepted}")


def _described(value: Any) -> str:
    """Describes a value in a few words; tensors and arrays without their values."""
    if hasattr(value, "dtype") and hasattr(value, "shape") and len(value.shape):
        where = f" on {value.device}" if hasattr(value, "layout") else ""
        kind = "a sparse " if getattr(value, "is_sparse", False) else "a "
        return f"{kind}{type(value).__name__} of {value.dtype} {list(value.shape)}{where}"
    shown = repr(value)
    return shown if len(shown) < 100 else f"a {type(value).__name__}"


def one_of(name: str, value: Any, accepted: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in accepted:
        refuse(name, value, f"{', '.join(accepted)}")
    return value


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    if not _is_whole(value) or not least <= value <= (value if most is None else most):
        refuse(name, value, f"ints from {least} on" if most is None else f"ints from {least} to {most}")
    return int(value)


def positive(name: str, value: Any) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0 < float(value) < math.inf:
        refuse(name, value, "None and positive numbers")
    return float(value)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        refuse(name, value, "True and False")
    return value


def sides(
    name: str, value: Any, most: tuple[int, int, int] = (2**31 - 1, 65535, 65535), least: int = 0
) -> tuple[int, int, int]:
    """Completes one to three sides of a grid, a block or a cluster to three."""
    given = (value,) if isinstance(value, numbers.Integral) else value
    fits = isinstance(given, (tuple, list)) and 1 <= len(given) <= 3
    if not fits or not all(_is_whole(x) and least <= x <= limit for x, limit in zip(given, most)):
        refuse(name, value, f"one to three ints, each {least} or more and at most {most}")
    x, y, z, *_ = (*map(int, given), 1, 1)
    return x, y, z


def number_in(variable: str, otherwise: int) -> int:
    """Reads a number from the environment."""
    text = os.environ.get(variable, "")
    if text and not text.isdecimal():
        refuse(variable, text, "a number")
    return int(text) if text else otherwise


def _is_whole(value: Any) -> bool:
    """Returns whether x is an int, also one of NumPy's, and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
