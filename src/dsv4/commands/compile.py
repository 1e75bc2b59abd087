"""`dsv4 compile` makes cubins and metadata for machines without a compiler. It needs no GPU."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

from dsv4.runtime import checks, dispatch
from dsv4.runtime.program import Launch

from . import show, variants

ARCHS = [entry.name for entry in dispatch.ARCHITECTURES.values()]


def compile(  # noqa: A001 - the command's name
    out: Annotated[Path, typer.Option("--out", "-o", help="directory to write to")],
    arch: Annotated[str, typer.Option(help="sm_90a, sm_100a, sm_103a")] = "sm_90a",
    head_dim: Annotated[list[int] | None, typer.Option(help="64, 128, 256, 512; default all")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp16; default bf16")] = None,
    kind: Annotated[list[str] | None, typer.Option(help=f"{', '.join(variants.KINDS)}; default all")] = None,
    page_size: Annotated[int, typer.Option(min=1, help="rows per page of the paged kernels")] = 64,
    model: Annotated[Path | None, typer.Option(help="config.json of a DeepSeek-V4; default V4-Flash")] = None,
    index_rows: Annotated[int, typer.Option(min=64, help="rows that a block table has room for")] = 65536,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = os.cpu_count() or 1,
) -> None:
    """Compile the kernels ahead of time into a directory; DSV4_AOT=DIR then launches from there, without a compiler."""
    show.chosen("--arch", [arch], ARCHS)
    kinds, dims = show.chosen("--kind", kind, variants.KINDS), show.chosen("--head-dim", head_dim, checks.HEAD_DIMS)
    dtypes = show.chosen("--dtype", dtype or ["bf16"], variants.DTYPES)
    try:
        sizes = variants.Sizes() if model is None else variants.Sizes.read(model)
    except ValueError as why:
        show.refuse(f"--model: {why}")
    sizes = sizes._replace(page_size=page_size, index_rows=index_rows)
    wanted = variants.wanted(kinds, dims, dtypes)
    if not wanted:
        of_v4 = ", ".join(k for k in kinds if k in variants.ONLY_V4)
        accepted = "accepted: with head dim 512 and bf16, v4 and v4-backward also with fp16"
        show.refuse(f"--kind: got {of_v4}; {accepted}")
    out.mkdir(parents=True, exist_ok=True)  # before minutes of compiling
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
    """Gives a new process what its parent found. After a fork this sends nothing."""
    global _work
    _work = work  # type: ignore[assignment]


def _compile_one(name: str) -> Path:
    from dsv4.runtime import aot

    found, out, arch = _work
    launch = found[name]
    return aot.write(out, launch.kernel, launch.arguments, launch.constants, arch)
