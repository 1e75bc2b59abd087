"""Functions of an example of TileLang, without what they measure.

    softsm check tests/field/tilelang_example.py -- FILE 'main(1, 2, 256, 128, True, "ss")' ...

Each further argument is an expression in the file's names; it must not be false.
"""

import sys
from pathlib import Path

import tilelang
import torch
from tilelang import profiler
from tutorial import close, load, normal


def untimed(*_, **__) -> float:
    """In place of do_bench: milliseconds."""
    return 1.0


if __name__ == "__main__":
    path, *calls = sys.argv[1:]
    tilelang.disable_cache()
    profiler.do_bench = profiler.Profiler.do_bench = untimed
    torch.manual_seed(0)
    names = {"close": close, "normal": normal, **load(Path(path)).__dict__}
    for call in calls:
        result = eval(call, names)
        assert result is None or isinstance(result, (float, tuple)) or result, call
