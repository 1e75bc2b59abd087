"""`dsv4 compile`: cubins and metadata for machines without a compiler, made on a machine without a GPU."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dsv4.caches import Fp8Cache
from dsv4.fmha import problem
from dsv4.fmha.problem import FmhaProblem
from dsv4.runtime import calls, checks, dispatch
from dsv4.v4 import problem as v4_problem
from dsv4.v4.problem import V4Problem

from . import show

CAPABILITIES = {arch: capability for capability, (_, arch, _) in dispatch.ARCHITECTURES.items()}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = ("dense", "varlen", "paged", "v4")
ROWS = ("bf16", "fp8", "mixed")  # of V4 attention: both pools, or the window FP8 and the compressed rows plain
NAMED = ("window only", "list", "table")  # how compressed rows are named
PHASES = ("prefill", "large", "decode", "split")  # many rows; so many that blocks loop; one row per head; keys split


def compile(  # noqa: A001 - the command's name
    out: Annotated[Path, typer.Option("--out", "-o", help="directory to write to")],
    arch: Annotated[str, typer.Option(help="sm_90a, sm_100a")] = "sm_90a",
    head_dim: Annotated[list[int] | None, typer.Option(help="64, 128, 256, 512; default all")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp16; default bf16")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="dense, varlen, paged, v4; default all")] = None,
    page_size: Annotated[int, typer.Option(min=1, help="rows per page of the paged kernels")] = 64,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = os.cpu_count() or 1,
) -> None:
    """Compile the kernels ahead of time into a directory; DSV4_AOT=DIR then launches from there, without a compiler."""
    show.chosen("--arch", [arch], CAPABILITIES)
    kinds, dims = show.chosen("--kind", kind, KINDS), show.chosen("--head-dim", head_dim, checks.HEAD_DIMS)
    dtypes = show.chosen("--dtype", dtype or ["bf16"], DTYPES)
    wanted: list[tuple] = list(itertools.product(dims, dtypes, [k for k in kinds if k != "v4"], PHASES))
    if "v4" in kinds and 512 in dims and "bf16" in dtypes:
        wanted += [x for x in itertools.product(ROWS, NAMED) if x != ("mixed", "window only")]
    if not wanted:
        raise typer.BadParameter("v4: accepted: with head dim 512 and bf16", param_hint="--kind")
    out.mkdir(parents=True, exist_ok=True)  # before minutes of compiling
    if not os.access(out, os.W_OK):
        raise PermissionError(errno.EACCES, "nothing can be written there", str(out))
    console = show.console()
    written: set[str] = set()
    with ProcessPoolExecutor(jobs) as pool:
        for paths in pool.map(
            _compile_one, wanted, itertools.repeat(page_size), itertools.repeat(out), itertools.repeat(arch)
        ):
            for path in paths:
                if path.name not in written:
                    console.print(f"{path.name}  {path.with_suffix('.cubin').stat().st_size} bytes")
                written.add(path.name)
    console.print(f"{len(written)} kernels in {out}")


def _compile_one(wanted: tuple, page_size: int, out: Path, arch: str) -> list[Path]:
    from dsv4.kernels.compat import TRITON_VERSION
    from dsv4.runtime import aot

    paths: dict[str, Path] = {}
    found = problems(*wanted, page_size) if len(wanted) == 4 else v4_problems(*wanted)
    for p in found:
        launches = calls.launches_of(p, dispatch.compile_target(arch))
        if isinstance(p, FmhaProblem) and arch == "sm_90a" and TRITON_VERSION >= (3, 9):
            launches += calls.launches_of(p, dispatch.compile_target(arch, pair=True))  # taken with DSV4_PAIR=1
        for launch in launches:
            types = [aot.argument_type(x) for x in launch.arguments]
            name = aot.variant(launch.kernel.__name__, types, launch.constants, arch)
            if name not in paths:
                paths[name] = aot.write(out, launch.kernel, launch.arguments, launch.constants, arch)
    return list(paths.values())


def v4_problems(rows: str, named: str) -> Iterator[V4Problem]:
    """Problems of V4 attention (tensors unset, never read) that need the variants of this description."""
    for splits in (1, 16, 128):  # few and many splits are merged by two variants
        yield v4_small(rows, named, splits)
    yield v4_small(rows, named, heads=128)  # on Blackwell a pair of CTAs takes them


def v4_small(rows: str, named: str, splits: int = 1, heads: int = 64) -> V4Problem:
    """rows: of ROWS, or `odd pages`, plain rows that are not equally far apart."""
    q = torch.empty(1, heads, 512, dtype=torch.bfloat16)

    def pool(fp8: bool) -> Any:
        if fp8:
            return Fp8Cache.empty(2, 64)
        wide = torch.empty(4, 8 * 512 + (64 if rows == "odd pages" else 0), dtype=torch.bfloat16)
        return wide[:, : 8 * 512].view(4, 8, 512)

    numbers = torch.zeros(1, 128, dtype=torch.int32)
    more: dict[str, Any] = {}
    if named != "window only":
        more["compressed"] = pool(rows == "fp8")
        more["compressed_lengths"] = torch.zeros(1, dtype=torch.int32)
        more["compressed_block_table" if named == "table" else "compressed_indices"] = numbers
    p = v4_problem.build(q, pool(rows in ("fp8", "mixed")), numbers, **more)
    return replace(p, out=torch.empty_like(q), lse=torch.empty(p.lse_shape), num_splits=splits)


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
        p = replace(p, same_kv=same_kv)
        out, lse = torch.empty_like(p.q), torch.empty(p.lse_shape)
        for splits in (16, 128) if phase == "split" else (1,):  # few and many splits are merged by two variants
            yield replace(p, out=out, lse=lse, num_splits=splits)
