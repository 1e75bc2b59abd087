"""`dsv4 compile` makes cubins and metadata for machines without a compiler. It needs no GPU."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from dsv4.runtime import checks, dispatch
from dsv4.runtime.program import Launch
from dsv4_command import usage

from . import show, variants

ARCHS = [entry.name for entry in dispatch.ARCHITECTURES.values()]


def compile(  # noqa: A001 - the command's name
    out: Path,
    arch: str,
    head_dim: list[int] | None,
    dtype: list[str] | None,
    kind: list[str] | None,
    page_size: int,
    model: Path | None,
    index_rows: int,
    jobs: int,
) -> None:
    kinds, dims, dtypes = kind or variants.KINDS, head_dim or checks.HEAD_DIMS, dtype or ["bf16"]
    try:
        sizes = variants.Sizes() if model is None else variants.Sizes.read(model)
    except ValueError as why:
        usage.refuse(f"--model: {why}")
    sizes = sizes._replace(page_size=page_size, index_rows=index_rows)
    wanted = variants.wanted(kinds, dims, dtypes)
    if not wanted:
        of_v4 = ", ".join(k for k in kinds if k in variants.ONLY_V4)
        accepted = "accepted: with head dim 512 and bf16, v4 and v4-backward also with fp16"
        usage.refuse(f"--kind: got {of_v4!r}; {accepted}")
    out.mkdir(parents=True, exist_ok=True)  # fail now, not after minutes of compiling
    if not os.access(out, os.W_OK):
        raise PermissionError(errno.EACCES, "the directory is not writable", str(out))
    console = show.console()
    found = _variants(wanted, sizes, arch)
    with ProcessPoolExecutor(jobs, get_context("fork"), _take, (found, out, arch)) as pool:
        for path in pool.map(_compile_one, found):
            console.print(f"{path.name}  {path.with_suffix('.cubin').stat().st_size} bytes")
    console.print(f"{len(found)} kernels in {out}")


def _variants(wanted: list[tuple], sizes: variants.Sizes, arch: str) -> dict[str, Launch]:
    """Name -> a launch, each variant once: many parts of the work launch the same small kernels."""
    from dsv4.runtime import aot

    found: dict[str, Launch] = {}
    for part in wanted:
        for launch in variants.launches(part, sizes, arch):
            found.setdefault(aot.variant_of(launch, arch), launch)
    return found


_work: tuple[dict[str, Launch], Path, str]


def _take(*work: Any) -> None:
    """Hand a new process what its parent found. After a fork this sends nothing."""
    global _work
    _work = work  # type: ignore[assignment]


def _compile_one(name: str) -> Path:
    from dsv4.runtime import aot

    found, out, arch = _work
    launch = found[name]
    return aot.write(out, launch.kernel, launch.arguments, launch.constants, arch)
