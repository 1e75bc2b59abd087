"""For mkdocstrings: docstrings and signatures as they are at run time (fmha's get their rules and keywords there)."""

import inspect
import re
from importlib import import_module
from typing import Any

import griffe


def markdown(text: str) -> str:
    """Sphinx's roles and literal blocks as Markdown writes them."""
    text = re.sub(r":(?:class|func|meth):`~?([^`]+)`", r"`\1`", text)
    text = re.sub(r"^(\s*)::$", r"\1", text, flags=re.M)
    return re.sub(r"::$", ":", text, flags=re.M)


def parameter(x: inspect.Parameter) -> griffe.Parameter:
    default = None if x.default is x.empty else repr(x.default)
    annotation = inspect.formatannotation(x.annotation).removeprefix("torch.").strip("'")
    return griffe.Parameter(
        x.name, annotation=annotation, kind=griffe.ParameterKind(x.kind.description), default=default
    )


class RuntimeDocstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        if obj.path in ("dsv4.fmha.api.fmha", "dsv4.fmha.api.fmha_varlen", "dsv4.fmha.api.fmha_paged"):
            function = getattr(import_module("dsv4.fmha.api"), obj.name)
            obj.docstring.value = inspect.cleandoc(function.__doc__)
            obj.parameters = griffe.Parameters(*map(parameter, inspect.signature(function).parameters.values()))
            obj.overloads = None
        obj.docstring.value = markdown(obj.docstring.value)
