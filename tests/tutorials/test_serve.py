"""tutorials/serve.py does what it says; it compares every request with the same one alone."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("transformers.models.deepseek_v4")


def test_serve(capsys):
    path = Path(__file__).parents[2] / "tutorials" / "serve.py"
    spec = importlib.util.spec_from_file_location("serve", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    said = capsys.readouterr().out
    assert "all pages are free" in said and "waits" in said
