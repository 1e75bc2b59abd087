"""Functions and classes of other libraries, replaced by ours around them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

MARK = "_dsv4_wrapped"


def wrap(where: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace where.name by make(its old value). A second call does nothing. A class method reaches make bound to its
    class."""
    theirs = getattr(where, name)
    if hasattr(theirs, MARK):
        return
    ours = functools.wraps(theirs, updated=())(make(theirs))
    setattr(ours, MARK, True)
    setattr(where, name, staticmethod(ours) if inspect.ismethod(theirs) else ours)
