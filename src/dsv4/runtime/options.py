"""Options of an operation: a NamedTuple whose fields are its arguments that are not tensors.

This one object is the part of a call's key with numbers and flags, the arguments of the torch operators (`schema`), and
the part that a problem keeps of them. It is a NamedTuple, because one is made and hashed in every call.
"""

import inspect
from collections.abc import Callable
from typing import Any

# Annotation -> type in the schema of an operator.
KINDS = {
    "bool": "bool",
    "int": "SymInt",
    "float": "float",
    "str": "str",
    "int | None": "SymInt?",
    "float | None": "float?",
    "torch.dtype": "ScalarType",
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
}


def schema(options: Any, defaults: bool = True) -> dict[str, str]:
    """Name -> its part of an operator's schema. options: a class, in a module that does not evaluate annotations."""
    found = {}
    for name, kind in options.__annotations__.items():
        text = f"{KINDS[getattr(kind, '__forward_arg__', kind)]} {name}"
        if defaults and name in options._field_defaults:
            default = options._field_defaults[name]
            text += f"={default!r}"
        found[name] = text
    return found


def reject_unknown(name: str, given: dict[str, Any], keywords: Any) -> None:
    """Raise the TypeError of Python for a keyword argument that a function does not have. keywords: a TypedDict."""
    for unknown in given.keys() - keywords.__annotations__.keys():
        raise TypeError(f"{name}() got an unexpected keyword argument {unknown!r}") from None


def set_signature(function: Any, keywords: Any, *parts: Callable) -> None:
    """Show `help` and `inspect` each keyword argument of a function that accepts them as **keywords and passes them
    to `parts`, which have their defaults. keywords: a TypedDict, for type checkers."""
    own = [x for x in inspect.signature(function).parameters.values() if x.kind is not x.VAR_KEYWORD]
    found = {x.name: x for part in parts for x in inspect.signature(part).parameters.values()}
    kinds = {name: getattr(x, "__forward_arg__", x) for name, x in keywords.__annotations__.items()}
    taken = {x.name for x in own}
    kinds |= {x.name: bool for x in found.values() if x.name.startswith("return_")}
    more = [
        found[name].replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind)
        for name, kind in kinds.items()
        if name not in taken
    ]
    function.__signature__ = inspect.Signature([*own, *more], return_annotation=function.__annotations__["return"])
