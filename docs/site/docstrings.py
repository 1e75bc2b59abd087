"""For mkdocstrings: docstrings and signatures as they are at run time (fmha's get their rules and keywords there), with
aliases of types spelled out."""

import inspect
import re
import sys
import typing
from types import ModuleType
from typing import Any

import griffe

import dsv4
import dsv4.distributed
from dsv4.runtime import checks


def markdown(text: str) -> str:
    """Sphinx's roles and literal blocks as Markdown writes them."""
    text = re.sub(r":(?:class|func|meth):`~?([^`]+)`", r"`\1`", text)
    text = re.sub(r"^(\s*)::$", r"\1", text, flags=re.M)
    return re.sub(r"::$", ":", text, flags=re.M)


def spelled(annotation: Any, module: ModuleType) -> str:
    """The annotation, with the members of aliases (``Both``, ``Backend``) in their place and without module names."""

    def members(name: re.Match) -> str:
        alias = getattr(module, name[0], getattr(checks, name[0], None))
        return inspect.formatannotation(alias) if typing.get_origin(alias) else name[0]

    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", re.sub(r"\b[A-Z]\w*\b", members, text))


def parameter(x: inspect.Parameter, module: ModuleType) -> griffe.Parameter:
    default = None if x.default is x.empty else repr(x.default)
    kind = griffe.ParameterKind(x.kind.description)
    return griffe.Parameter(x.name, annotation=spelled(x.annotation, module), kind=kind, default=default)


def exported() -> dict[str, Any]:
    """The functions that dsv4 exports, by the path where they are defined."""
    found = (getattr(package, name) for package in (dsv4, dsv4.distributed) for name in package.__all__)
    return {f"{x.__module__}.{x.__name__}": x for x in found if inspect.isfunction(x)}


EXPORTED = exported()


class RuntimeDocstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        if function := EXPORTED.get(obj.path):
            module = sys.modules[function.__module__]
            if hasattr(function, "__signature__"):
                obj.docstring.value = inspect.cleandoc(function.__doc__)
                found = inspect.signature(function).parameters.values()
                obj.parameters = griffe.Parameters(*(parameter(x, module) for x in found))
                obj.overloads = None
            for x in obj.parameters:
                if x.annotation is not None and (text := spelled(str(x.annotation), module)) != str(x.annotation):
                    x.annotation = text
            if obj.returns is not None and (text := spelled(str(obj.returns), module)) != str(obj.returns):
                obj.returns = text
        obj.docstring.value = markdown(obj.docstring.value)
