"""`dsv4 compile`: cubins and metadata for machines without a compiler, made on a machine without a GPU."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dsv4 import problem
from dsv4.problem import FmhaProblem

from . import show

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = ("dense", "varlen", "paged")
PHASES = ("prefill", "large", "decode", "split")  # many rows; so many that blocks loop; one row per head; keys split


def compile(  # noqa: A001 - the command's name
    out: Annotated[Path, typer.Option("--out", "-o", help="directory to write to")],
    arch: Annotated[str, typer.Option(help="sm_90a")] = "sm_90a",
    head_dim: Annotated[list[int] | None, typer.Option(help="64, 128, 256, 512; default all")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp16; default bf16")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="dense, varlen, paged; default all")] = None,
    page_size: Annotated[int, typer.Option(help="rows per page of the paged kernels")] = 64,
    jobs: Annotated[int, typer.Option(help="processes")] = os.cpu_count() or 1,
) -> None:
    """Compile the kernels ahead of time into a directory; DSV4_AOT=DIR then launches from there, without a compiler."""
    if arch != "sm_90a":
        raise typer.BadParameter(f"{arch}: accepted: sm_90a")
    wanted = list(itertools.product(head_dim or (64, 128, 256, 512), dtype or ("bf16",), kind or KINDS, PHASES))
    console = show.console()
    written: set[str] = set()
    with ProcessPoolExecutor(jobs) as pool:
        for paths in pool.map(_compile_one, wanted, itertools.repeat(page_size), itertools.repeat(out)):
            for path in paths:
                if path.name not in written:
                    console.print(f"{path.name}  {path.with_suffix('.cubin').stat().st_size} bytes")
                written.add(path.name)
    console.print(f"{len(written)} kernels in {out}")


def _compile_one(wanted: tuple[int, str, str, str], page_size: int, out: Path) -> list[Path]:
    from dsv4.kernels import aot
    from dsv4.kernels.sm90 import fmha

    paths = []
    for p in problems(*wanted, page_size):
        with aot.collecting() as launches:
            fmha.forward(p)
        paths += [aot.write(out, *launch) for launch in launches]
    return paths


def problems(head_dim: int, dtype: str, kind: str, phase: str, page_size: int = 64) -> Iterator[FmhaProblem]:
    """Problems (tensors unset, never read) that need the variants of this description."""
    options: dict[str, Any] = dict(dtype=DTYPES[dtype])
    if phase == "large" and (kind != "dense" or head_dim == 512):
        return  # only dense problems have a kernel of their own for this
    batch, queries, heads = {"prefill": (1, 256, 1), "large": (1, 68000, 1)}.get(phase, (1, 1, 8))
    keys = 4096
    for same_kv in (False, True) if head_dim == 512 else (False,):
        if kind == "varlen":
            q = torch.empty(batch * queries, heads, head_dim, **options)
            k = torch.empty(keys, 1, head_dim, **options)
            v = k if same_kv else torch.empty_like(k)
            cu = torch.zeros(batch + 1, dtype=torch.int32)
            p = problem.varlen(q, k, v, cu, cu.clone(), max_seqlen_q=queries)
        elif kind == "paged":
            q = torch.empty(batch, queries, heads, head_dim, **options)
            k = torch.empty(2, page_size, 1, head_dim, **options)
            v = k if same_kv else torch.empty_like(k)
            table = torch.zeros(batch, keys // page_size, dtype=torch.int32)
            p = problem.paged(q, k, v, table, torch.zeros(batch, dtype=torch.int32))
        else:
            q = torch.empty(batch, queries, heads, head_dim, **options)
            k = torch.empty(batch, keys, 1, head_dim, **options)
            p = problem.dense(q, k, k if same_kv else torch.empty_like(k))
        out, lse = torch.empty_like(p.q), torch.empty(p.lse_shape)
        for splits in (16, 128) if phase == "split" else (1,):  # few and many splits are merged by two variants
            yield replace(p, out=out, lse=lse, num_splits=splits)
