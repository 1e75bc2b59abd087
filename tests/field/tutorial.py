"""Functions of a published Python file, without what it runs and measures when it is executed: tutorials and tests.

    softsm check tests/field/tutorial.py -- FILE 'test_memcpy(64, 500)' ...

Each further argument is an expression in the file's names; it must not be false.
"""

import ast
import sys
import types
from pathlib import Path

import torch

KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.If,
        ast.Try, ast.For)  # fmt: skip


def measures(node: ast.stmt) -> bool:
    words = [getattr(node, "name", ""), *(ast.unparse(x) for x in getattr(node, "decorator_list", ()))]
    return any(part in word for word in words for part in ("bench", "perf_", "_perf"))


def load(file: Path) -> types.ModuleType:
    """Behind the last function, a tutorial only measures."""
    tree = ast.parse(file.read_text())
    body = [x for x in tree.body if isinstance(x, KEPT) and not measures(x)]
    last = max(i for i, x in enumerate(body) if isinstance(x, (ast.FunctionDef, ast.ClassDef)))
    tree.body = body[: last + 1]
    module = types.ModuleType(file.stem)
    module.__file__ = str(file)
    sys.modules[file.stem] = module  # Triton asks for the sources of functions
    sys.path[:0] = [str(file.parent), str(file.parent.parent)]  # a package's tests are next to it
    exec(compile(tree, str(file), "exec"), module.__dict__)
    return module


def close(found: torch.Tensor, right: torch.Tensor, units: int = 1) -> bool:
    """Up to units in the last place of the dtype, of the largest value."""
    error = (found.double() - right.double()).abs().max()
    return bool(error <= units * torch.finfo(found.dtype).eps * right.double().abs().max())


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


if __name__ == "__main__":
    path, *calls = sys.argv[1:]
    torch.manual_seed(0)
    names = {"close": close, "normal": normal, **load(Path(path)).__dict__}
    for call in calls:
        result = eval(call, names)
        assert result is None or result, call
