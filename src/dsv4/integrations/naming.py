"""Errors in the words of the caller: dsv4 names its own arguments, an integration has other names for them."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def named(**names: str) -> Iterator[None]:
    """A ValueError about the argument ``key`` inside becomes one about the argument ``names[key]``."""
    try:
        yield
    except ValueError as error:
        argument, colon, rest = str(error).partition(": ")
        if argument not in names:
            raise
        raise ValueError(f"{names[argument]}{colon}{rest}") from None
