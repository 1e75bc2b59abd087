"""The published kernels for sm_90a on a Hopper GPU, by nvcc, beside softsm's results of the same programs.

    python tools/field_gpu.py run SOURCES OUT [PART] # on a machine with a GPU and nvcc: outputs, one folder each
    FIELD_OUT=OUT2 python tools/field.py SOURCES     # anywhere: softsm's outputs
    python tools/field_gpu.py compare OUT OUT2       # the largest difference of each

SOURCES holds checkouts as for tools/field.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from array import array
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from field_kernels import KERNELS, Kernel, folder_of

ROOT = Path(__file__).parents[1]
FLAGS = (
    *("-std=c++20", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr"),
    *("--expt-extended-lambda", "-w", "-lcuda"),
)
STUBS = "-L/usr/local/cuda/lib64/stubs"


def one(kernel: Kernel, sources: Path, out: Path) -> str:
    """Compile and run; what it said, on one line."""
    place = out / folder_of(kernel)
    place.mkdir(parents=True, exist_ok=True)
    program, wrapper, began = place / "program", place / "program.cu", time.monotonic()
    flags = kernel.flags_at(sources)
    defined = [flag[2:].partition("=") for flag in flags if flag.startswith("-D")]  # nvcc would split them at commas
    lines = [f"#define {name} {value or 1}" for name, _, value in defined]
    wrapper.write_text("\n".join([*lines, f'#include "{kernel.source(sources).resolve()}"', ""]))
    places = [flag for flag in flags if not flag.startswith("-D")]
    made = subprocess.run(
        ["nvcc", *FLAGS, STUBS, *places, wrapper, "-o", program], capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - began
    if made.returncode:
        return f"{kernel.name}: nvcc {seconds:.0f} s: {made.stderr[-1500:]}"
    command, where = [program, *kernel.arguments_at(sources)], {**os.environ, "FIELD_OUT": str(place)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30, env=where)
        said = f"status {done.returncode}: {' '.join(done.stdout.split())} {done.stderr[-300:]}"
    except subprocess.TimeoutExpired:
        said = "does not end"
    program.unlink()
    return f"{kernel.name}: nvcc {seconds:.0f} s, {said}"


def run(sources: Path, out: Path, *parts: Path) -> None:
    """Those with one of the parts in their names, or all."""
    kernels = [k for k in KERNELS if k.arch == "sm_90a" and k.file.endswith(".cu")]
    kernels = [k for k in kernels if not parts or any(str(part) in k.name for part in parts)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in as_completed([pool.submit(one, kernel, sources, out) for kernel in kernels]):
            print(done.result(), flush=True)


def compare(first: Path, second: Path) -> None:
    for file in sorted(first.glob("*/*.f32")):
        other = second / file.relative_to(first)
        if not other.is_file():
            continue
        a, b = (array("f", path.read_bytes()) for path in (file, other))
        size = max(map(abs, b))
        worst = max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0)
        equal = sum(x == y for x, y in zip(a, b, strict=True))
        name = f"{file.parent.name} {file.stem}"
        print(f"{name}: {equal} of {len(a)} equal, largest difference {worst / size:.2g} of {size:.3g}")


if __name__ == "__main__":
    verb, *places = sys.argv[1:]
    {"run": run, "compare": compare}[verb](*map(Path, places))
