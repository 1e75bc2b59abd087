"""The command `softsm`."""

from __future__ import annotations

import atexit
import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from softsm import accepted
from softsm.accepted import ORDERS

app = typer.Typer(
    help="A streaming multiprocessor in software: runs PTX, and Triton or Gluon programs, on a CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


# Shared by `run`, `check` and `trace`. Options may come before or after the file; options unknown to softsm, and
# everything after --, go to the program.
OPTIONS = {"ignore_unknown_options": True}
File = Annotated[Path, typer.Argument(help="a .ptx file, or a Python program with Triton kernels")]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        help="for PTX, the kernel's arguments: f32[1024]=random u32=7 x.npy; for Python, its command line (after -- "
        "where softsm has an option of the same name)"
    ),
]
Arch = Annotated[str, typer.Option(help="target of a Python program; default: SOFTSM, else sm_100a")]
Entry = Annotated[str | None, typer.Option(help="which kernel of the PTX file")]
Sides = Annotated[str, typer.Option(help="x,y,z")]
Block = Annotated[str, typer.Option(help="x,y,z; default: the kernel's .reqntid, else 32")]
Shared = Annotated[int, typer.Option(help="bytes of dynamic shared memory")]
Sms = Annotated[int, typer.Option(help="SMs to emulate")]
Order = Annotated[str, typer.Option(help="completion of asynchronous operations: eager, latest, random")]
Seed = Annotated[int, typer.Option(help="seed of random order and random arguments")]
Strict = Annotated[bool, typer.Option(help="follow PTX 9.4 literally")]


def _show_version(asked: bool) -> None:
    if asked:
        from softsm import __version__

        typer.echo(f"softsm {__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Holds the options of `softsm` itself."""


@app.command(context_settings=OPTIONS)
def run(
    file: File,
    arguments: Arguments = None,
    arch: Arch = "",
    entry: Entry = None,
    grid: Sides = "1",
    block: Block = "",
    cluster: Sides = "1",
    shared: Shared = 0,
    sms: Sms = 4,
    order: Order = "eager",
    seed: Seed = 0,
    save: Annotated[
        list[str] | None, typer.Option(help="N=file.npy: write array argument N after the run; may be repeated")
    ] = None,
) -> None:
    """Run a kernel from PTX on arrays made here, or a whole Python program. Nothing is checked: see `softsm check`."""
    _accept(file, arguments, arch, sms, order, ORDERS, seed)
    if file.suffix == ".py":
        with _program_errors(file):
            _program(file, arguments or [], arch, sms, order, seed)
    else:
        with _kernel_errors(file):
            _kernel(file, arguments or [], entry, grid, block, cluster, shared, sms, order, seed, save or [])
    typer.echo(f"nothing was checked; `softsm check {file}` looks for races and misuse", err=True)


@app.command(context_settings=OPTIONS)
def check(
    file: File,
    arguments: Arguments = None,
    arch: Arch = "",
    entry: Entry = None,
    grid: Sides = "1",
    block: Block = "",
    cluster: Sides = "1",
    shared: Shared = 0,
    sms: Sms = 4,
    order: Annotated[
        str, typer.Option(help="completion of asynchronous operations: all, eager, latest, random")
    ] = "all",
    seed: Seed = 0,
    strict: Strict = False,
) -> None:
    """Run with all checks, once for each order of completion, and print each finding once.

    Exit status 1 if there is a finding, or if the program itself fails."""
    from softsm.commands.check import Summary

    _accept(file, arguments, arch, sms, order, (*ORDERS, "all"), seed)
    summary = Summary(seed, strict)
    for chosen, number in summary.runs(order):
        with summary.run(chosen, number, frames_of=str(file)):
            if file.suffix == ".py":
                _program(file, arguments or [], arch, sms, chosen, number)
            else:
                _kernel(file, arguments or [], entry, grid, block, cluster, shared, sms, chosen, seed, [])
    typer.echo(str(summary))
    if summary.failed:
        raise typer.Exit(1)


@app.command()
def explain(
    topic: Annotated[
        str, typer.Argument(help="a diagnostic code, an instruction such as tcgen05.ld.16x256b, descriptor, idesc")
    ] = "",
    value: Annotated[str, typer.Argument(help="of the descriptor: 0x...")] = "",
    arch: Annotated[str, typer.Option(help="sm_100a or sm_90a")] = "sm_100a",
    dtype: Annotated[str, typer.Option(help="element type of the tile: bf16, e4m3, tf32, ...")] = "bf16",
    major: Annotated[str, typer.Option(help="k or mn: the dimension that is contiguous")] = "k",
    rows: Annotated[int, typer.Option(help="of the tile (M or N)")] = 16,
    k: Annotated[int, typer.Option(help="of the tile, in elements")] = 64,
    kind: Annotated[str, typer.Option(help="of the instruction descriptor: f16, f8f6f4, mxf4, ...")] = "f16",
) -> None:
    """What a diagnostic means and how to fix it; or a picture of a layout. Without a topic: a list of both."""
    from softsm.report.explain import Tile, show

    try:
        show(topic, value, Tile(arch, dtype, major, rows, k, kind))
    except ValueError as problem:
        _stop(str(problem))


@app.command(context_settings=OPTIONS)
def trace(
    file: File,
    arguments: Arguments = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for report.html and the timeline")] = Path(
        "softsm-trace"
    ),
    arch: Arch = "",
    entry: Entry = None,
    grid: Sides = "1",
    block: Block = "",
    cluster: Sides = "1",
    shared: Shared = 0,
    sms: Sms = 4,
    order: Order = "latest",
    seed: Seed = 0,
    strict: Strict = False,
    check: Annotated[bool, typer.Option(help="look for races and misuse as well")] = True,
) -> None:
    """Run as `softsm run` does, and write what happened: an HTML report, and a timeline for ui.perfetto.dev."""
    from softsm.commands.trace import tracing
    from softsm.errors import SoftsmError

    _accept(file, arguments, arch, sms, order, ORDERS, seed)
    _writable(output)
    made = tracing(output, title=file.name, order=order, seed=seed, strict=strict, check=check)
    made_by = None
    try:
        with _program_errors(file, but=(SoftsmError,)), made as made_by:
            if file.suffix == ".py":
                _program(file, arguments or [], arch, sms, order, seed)
            else:
                _kernel(file, arguments or [], entry, grid, block, cluster, shared, sms, order, seed, [])
    except SoftsmError as problem:
        if made_by is None or not any(d.raised for d in made_by.report):
            typer.echo(str(problem), err=True)
    finally:
        if made_by is not None:
            _traced(made_by)
    if made_by.report or made_by.failure:
        raise typer.Exit(1)


def _traced(made) -> None:
    if made.report or made.report.warnings:
        typer.echo(str(made.report))
    found = len(made.report) + (bool(made.failure) and not any(d.raised for d in made.report))
    launches = made.recorder.launches
    from softsm.report.diagnostics import launches as counted

    said = "1 finding" if found == 1 else f"{found} findings"
    typer.echo(f"{counted(len(launches))}, {sum(x.steps for x in launches)} warp instructions, {said}")
    for path in made.files:
        typer.echo(f"wrote {path}")
    if len(made.files) == 1:
        typer.echo("no timeline: the package perfetto is missing (pip install softsm[trace])")


@app.command(context_settings=OPTIONS)
def time(
    file: Annotated[Path, typer.Argument(help="a Python program with Triton or Gluon kernels")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="its command line (after -- where softsm has an option of the same name)")
    ] = None,
    arch: Annotated[str, typer.Option(help="sm_90a, sm_100a or sm_103a; default: SOFTSM, else the GPU's")] = "",
    gpu: Annotated[str, typer.Option(help="h200 or b200; default: the architecture's")] = "",
    clock: Annotated[
        float | None, typer.Option(help="GHz of the multiprocessors; default: what the model expects")
    ] = None,
    compare: Annotated[Path | None, typer.Option(help="another program, timed and compared with the first")] = None,
    compare_arguments: Annotated[
        str | None, typer.Option(help="command line of the other program, in one string; default: that of the first")
    ] = None,
    values: Annotated[bool, typer.Option(help="compute products, for kernels whose path depends on them")] = False,
    json: Annotated[bool, typer.Option(help="print JSON")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="folder for a timeline of each launch")] = None,
) -> None:
    """Predict how long each launch takes on a GPU, and say what it waits for.

    Only some CTAs of each grid run, and products are not computed: results of the program are wrong.
    `softsm.checking()` inside it is off."""
    from softsm.commands import time as command

    for given in (file, compare):
        if given is not None and not given.is_file():
            _stop(f"there is no file {given}")
        if given is not None and given.suffix == ".ptx":
            _stop(f"file: got {given}, accepted are Python programs, which launch the kernels to be timed")
    try:
        target, device = command.target(arch, gpu)
        if clock is not None:
            accepted.positive("clock", clock)
    except ValueError as problem:
        _stop(str(problem))
    if output is not None:
        _writable(output)
    if compare_arguments is not None and compare is None:
        _stop(f"compare_arguments: got {compare_arguments!r}, accepted only with --compare")
    lines = [arguments or [], (arguments or []) if compare_arguments is None else shlex.split(compare_arguments)]
    timers, ends = [], []
    for given, line in zip((file, compare), lines):
        if given is not None:
            aside = redirect_stdout(sys.stderr) if json else nullcontext()  # what the program prints is no JSON
            with command.timed(device, clock, values) as timer, command.ending(given) as end, aside:
                _program(given, line, target, int(device["sms"]), "eager", 0)
            timers.append(timer)
            ends.append(end)
    typer.echo(command.shown(timers, json))
    if output is not None:
        for path in command.timelines(timers[0], output):
            typer.echo(f"wrote {path}", err=json)
    for end in ends:
        if end.words:
            typer.echo(end.words, err=True)
    if any(end.failed for end in ends):
        raise typer.Exit(1)


@app.command()
def museum(
    numbers: Annotated[list[int] | None, typer.Argument(help="exhibits to run; default: all")] = None,
    full: Annotated[bool, typer.Option(help="print the whole diagnostic of each bug")] = False,
) -> None:
    """Run the museum: softsm must name each bug, and find nothing in its corrected twin.

    The third column says at which level: default, strict, or only by values that differ from a reference."""
    from softsm.museum.judge import gather, judge

    everything = gather()
    unknown = [n for n in numbers or () if n not in everything]
    if unknown:
        _stop(f"numbers: got {unknown[0]}, there are exhibits {min(everything)} to {max(everything)}")
    failed = 0
    for number in numbers or everything:
        verdict = judge(everything[number])
        failed += not verdict.passed
        found = " ".join(dict.fromkeys(d.code for d in verdict.shown)) or "-"
        state = "ok" if verdict.passed else "FAILED"
        typer.echo(f"{number:2d}  {state:6s}  {verdict.level:7s}  {found:22s}  {verdict.exhibit.title}")
        if not verdict.passed:
            typer.echo(f"    {verdict.problem}")
        elif full:
            for diagnostic in verdict.shown:
                typer.echo("    " + str(diagnostic).replace("\n", "\n    "))
    typer.echo(f"{len(numbers or everything) - failed} passed, {failed} failed")
    if failed:
        raise typer.Exit(1)


def _accept(
    file: Path, arguments: list[str] | None, arch: str, sms: int, order: str, orders: tuple[str, ...], seed: int
) -> None:
    """Refuse what cannot be meant, in one line."""
    from softsm.doors.triton.in_use import ARCHITECTURES

    if not file.is_file():
        _stop(f"there is no file {file}")
    try:
        accepted.one_of("order", order, orders)
        accepted.whole("sms", sms, 1, accepted.MOST_SMS)
        accepted.whole("seed", seed, 0)
        if arch:
            accepted.one_of("arch", arch, tuple(ARCHITECTURES))
    except ValueError as problem:
        _stop(str(problem))
    unknown = [x for x in arguments or () if file.suffix != ".py" and x.startswith("-")]
    if unknown:
        _stop(f"{unknown[0]}: there is no such option, and a kernel in PTX has no command line")


def _writable(folder: Path) -> None:
    """Made before the program runs, which may take long."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        _stop(f"output: got {folder}, accepted is a folder to write to ({problem.strerror})")


def _program(file: Path, arguments: list[str], arch: str, sms: int, order: str, seed: int) -> None:
    """Runs as `python file arguments` would, with softsm under Triton and device="cuda" meaning CPU tensors."""
    import runpy

    if "torch" not in sys.modules:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # this process does not use the GPU, if there is one
    from softsm.doors.triton.install import use
    from softsm.engine.launch import options

    try:
        softsm = use(arch or os.environ.get("SOFTSM") or "sm_100a", cuda_shim=True, sms=sms)
    except ValueError as problem:
        _stop(str(problem))
    sys.argv = [str(file), *arguments]
    sys.path.insert(0, str(file.resolve().parent))
    with softsm, options(order=order, seed=seed):
        runpy.run_path(str(file), run_name="__main__")


@contextmanager
def _program_errors(file: Path, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """An exception of the program is shown as `python file` would: without the frames that led to it."""
    try:
        yield
    except (typer.Exit, *but):
        raise
    except Exception as problem:
        frames = problem.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != str(file):
            frames = frames.tb_next
        traceback.print_exception(problem.with_traceback(frames))
        raise typer.Exit(1) from None


@contextmanager
def _kernel_errors(file: Path) -> Iterator[None]:
    from softsm.errors import SoftsmError

    try:
        yield
    except (SoftsmError, ValueError) as problem:
        _stop(f"{file}: {problem}")


def _kernel(file, arguments, entry, grid, block, cluster, shared, sms, order, seed, save) -> None:
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from softsm.arguments import parse_argument
    from softsm.engine.launch import load

    values = [parse_argument(text, seed + i) for i, text in enumerate(arguments)]
    targets = dict(_target(text, len(values)) for text in save)
    kernel = load(file.read_text(), entry)
    required = accepted.sides("reqntid", kernel.function.directives.get("reqntid", 32))
    before = [v.copy() if isinstance(v, np.ndarray) else v for v in values]
    kernel.launch(
        _dims(grid, "grid"), _dims(block, "block") if block else required, values, shared=shared,
        cluster=_dims(cluster, "cluster"), sms=sms, order=order, seed=seed)  # fmt: skip
    table = Table("parameter", "argument", "changed", "first values")
    for p, text, old, new in zip(kernel.function.params, arguments, before, values):
        changed = str(int((_bits(old) != _bits(new)).sum())) if isinstance(new, np.ndarray) else ""
        shown = ", ".join(f"{float(v):g}" for v in np.asarray(new).reshape(-1)[:8])
        table.add_row(p.name, text, changed, shown)
    Console().print(table)
    for index, path in targets.items():
        try:
            np.save(path, values[index])
        except OSError as problem:
            raise ValueError(f"save: got {path}, accepted is a file to write to ({problem.strerror})") from None


def _bits(array):
    """One row of bytes per element: compares NaNs too."""
    import numpy as np

    return np.ascontiguousarray(array).reshape(-1).view(f"V{array.dtype.itemsize}")


def _dims(text: str, name: str) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in text.replace("x", ",").split(","))
    except ValueError:
        raise ValueError(f"{name}: got {text!r}, accepted are up to three numbers such as 4,1,1") from None


def _target(text: str, count: int) -> tuple[int, str]:
    index, equals, path = text.partition("=")
    if not equals or not index.isdigit() or int(index) >= count:
        raise ValueError(f"save: got {text!r}, accepted is N=file.npy with N below {count}")
    return int(index), path


def _stop(message: str) -> None:
    typer.echo(message, err=True)
    raise typer.Exit(1)


def main() -> None:
    status = 0
    try:
        app(prog_name="softsm")
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else int(done.code is not None)
    if "triton._C.libtriton" not in sys.modules:
        sys.exit(status)
    # Triton's bindings end a program that compiled a Gluon kernel with a page about leaked functions, unless the
    # interpreter is not torn down.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
