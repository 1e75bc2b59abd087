"""For mkdocstrings: docstrings as they are at run time (fmha's rules are joined on there), in Markdown."""

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


class RuntimeDocstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        if obj.path in ("dsv4.fmha.api.fmha", "dsv4.fmha.api.fmha_varlen", "dsv4.fmha.api.fmha_paged"):
            obj.docstring.value = inspect.cleandoc(getattr(import_module("dsv4.fmha.api"), obj.name).__doc__)
        obj.docstring.value = markdown(obj.docstring.value)
