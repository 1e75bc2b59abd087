"""The options of `run`, `check`, `trace` and `time` that say what they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer


class RunOptions(NamedTuple):
    """A file with its command line. Each field is an option; `softsm.cli.command` adds them to a subcommand."""

    file: Annotated[Path, typer.Argument(help="a Python program with Triton kernels, a .ptx file or a .cu program")]
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="the command line of the program (after -- where softsm has an option of the same name); for PTX the "
            "same as --arg"
        ),
    ] = None
    arg: Annotated[
        list[str] | None,
        typer.Option(
            help="argument of a PTX kernel, in order: f32[1024]:rand, i32=5, bf16[64,128]:x.npy, map[64,64]:arg0"
        ),
    ] = None
    entry: Annotated[str | None, typer.Option(help="which kernel of the PTX file")] = None
    grid: Annotated[str, typer.Option(help="CTAs in the grid: x,y,z")] = "1"
    block: Annotated[str, typer.Option(help="threads in a CTA: x,y,z; default: its .reqntid, else 32")] = ""
    cluster: Annotated[str, typer.Option(help="CTAs in a cluster: x,y,z; default: its .reqnctapercluster, else 1")] = ""
    shared: Annotated[int, typer.Option(help="bytes of dynamic shared memory")] = 0
    clang_flags: Annotated[str, typer.Option(help="flags for clang, for a .cu program: '-I include -DNDEBUG'")] = ""
