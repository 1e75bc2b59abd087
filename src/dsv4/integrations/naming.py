"""Errors in the words of the caller: dsv4 names its own arguments, an integration has other names for them."""

from collections.abc import Mapping
from types import TracebackType


class named:
    """``with named(key="name"):`` a ValueError about the argument key inside becomes one about the argument name."""

    def __init__(self, **names: str):
        self.names: Mapping[str, str] = names

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, ValueError):
            argument, colon, rest = str(error).partition(": ")
            if argument in self.names:
                raise ValueError(f"{self.names[argument]}{colon}{rest}") from None
