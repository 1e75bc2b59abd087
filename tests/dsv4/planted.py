"""Kernels with a bug: lines of their file are replaced, in a copy of it."""

import importlib.util
from pathlib import Path
from types import ModuleType


def plant(monkeypatch, tmp_path: Path, module: ModuleType, kernel: str, *bugs: tuple[str, str]) -> None:
    """Puts the kernel of the copy, planted.py, in place of the module's."""
    text = Path(module.__file__).read_text()
    for lines, instead in bugs:
        assert text.count(lines) == 1, lines
        text = text.replace(lines, instead)
    file = tmp_path / "planted.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("planted_kernel", file)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    monkeypatch.setattr(module, kernel, getattr(copy, kernel))
