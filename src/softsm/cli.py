"""The command `softsm`."""

from __future__ import annotations

import atexit
import inspect
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import typer.core

from softsm import accepted, resident
from softsm.accepted import ORDERS
from softsm.commands.options import RunOptions
from softsm.commands.program import (
    PROGRAMS,
    UsageError,
    accept,
    accept_run,
    exists,
    loading,
    program_errors,
    target_of,
    to_run,
    told,
    usage,
    writable,
)


class Commands(typer.core.TyperGroup):
    """Prints every error as one line, `softsm COMMAND: what is wrong`, and exits with status 2."""

    def main(self, *args: Any, **options: Any) -> Any:
        alone = options.pop("standalone_mode", True)
        try:
            status = super().main(*args, **options | {"standalone_mode": False})
        except UsageError as problem:
            # Without an argument there is no text, and typer has shown the help.
            if text := told(problem):
                typer.echo(f"{self.path(problem, args, options)}: {text}", err=True)
            sys.exit(2)
        except typer.Abort:
            typer.echo("softsm: interrupted", err=True)
            sys.exit(130)
        return sys.exit(status or 0) if alone else status

    def path(self, problem: Any, args: tuple[Any, ...], options: dict[str, Any]) -> str:
        """Returns `softsm COMMAND`. The parser's own errors do not name the command."""
        if problem.ctx:
            return problem.ctx.command_path
        given = (args[0] if args else options.get("args")) or sys.argv[1:]
        return " ".join(["softsm", *[x for x in given if x in self.commands][:1]])


app = typer.Typer(
    cls=Commands,
    help="A streaming multiprocessor in software: runs PTX, and Triton or Gluon programs, on a CPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# Shared by several of `run`, `check`, `trace` and `time`.
Arch = Annotated[
    str, typer.Option(help="GPU to emulate: sm_90a, sm_100a, sm_103a; default: the PTX's .target; SOFTSM, else sm_100a")
]
Sms = Annotated[int, typer.Option(help="SMs to emulate")]
Save = Annotated[
    list[str] | None,
    typer.Option(help="N=file.npy: write the array of argument N, a number or a name, after the run; may be repeated"),
]
Ranks = Annotated[int, typer.Option(help="ranks of a Python program, as torchrun starts it; devices of a .cu program")]
Order = Annotated[str, typer.Option(help="completion of asynchronous operations: eager, latest, random")]
Seed = Annotated[int, typer.Option(help="seed of random order and random arguments")]
Strict = Annotated[bool, typer.Option(help="follow PTX 9.4 literally")]


def command(work: Callable[..., None]) -> None:
    """Makes a subcommand whose first parameter, a RunOptions, is the options of its fields. Options may come before or
    after the file; those unknown to softsm, and everything after --, go to the program."""
    kind, defaults = inspect.Parameter.POSITIONAL_OR_KEYWORD, RunOptions._field_defaults
    parameters = [
        inspect.Parameter(name, kind, annotation=hint, default=defaults.get(name, inspect.Parameter.empty))
        for name, hint in get_type_hints(RunOptions, include_extras=True).items()
    ]
    parameters += list(inspect.signature(work, eval_str=True).parameters.values())[1:]
    options = [f"--{x.name.replace('_', '-')}" for x in parameters if x.name not in ("file", "arguments")]

    def run(**given: Any) -> None:
        program = RunOptions(**{name: given.pop(name) for name in RunOptions._fields})
        accept(program, options)
        work(program, **given)

    run.__doc__ = work.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    settings = {"ignore_unknown_options": True, "help_option_names": ["--help"]}  # -h may be the program's
    app.command(work.__name__, context_settings=settings)(run)


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


@command
def run(
    program: RunOptions,
    arch: Arch = "",
    sms: Sms = 4,
    ranks: Ranks = 1,
    order: Order = "eager",
    seed: Seed = 0,
    save: Save = None,
) -> None:
    """Run a program, or a PTX kernel on arrays made here, without checks; `softsm check` has them."""
    accept_run(arch, sms, order, ORDERS, seed)
    execute = to_run(program, arch, sms, ranks, save)
    with program_errors(program.file):
        execute(order, seed)
    typer.echo(f"nothing was checked; `softsm check {program.file}` looks for races and misuse", err=True)


@command
def check(
    program: RunOptions,
    arch: Arch = "",
    sms: Sms = 4,
    ranks: Ranks = 1,
    order: Annotated[
        str, typer.Option(help="completion of asynchronous operations: all, eager, latest, random")
    ] = "all",
    seed: Seed = 0,
    strict: Strict = False,
    save: Save = None,
    json: Annotated[bool, typer.Option(help="print JSON (docs/reports.md has the schema)")] = False,
    patience: Annotated[
        float,
        typer.Option(
            help="end a launch in which no warp ends and no asynchronous operation completes for so many million "
            "operations; 0: never"
        ),
    ] = 20,
) -> None:
    """Run with all checks, once for each order of completion, and print each finding once.

    Exit status 0: nothing found; 1: a finding, the program itself failed, or no launch; 2: wrong usage."""
    accept_run(arch, sms, order, (*ORDERS, "all"), seed)
    if not 0 <= patience < 1e12:
        usage(f"patience: got {patience:g}; accepted: 0 and positive numbers")
    with loading("numba"):
        from softsm.commands.check import Summary
        from softsm.engine.options import options

    file, execute = program.file, to_run(program, arch, sms, ranks, save)
    summary = Summary(seed, strict)

    def one(chosen: str, number: int) -> None:
        aside = redirect_stdout(sys.stderr) if json else nullcontext()  # what the program prints is not JSON
        with aside, options(patience=round(patience * 1e6)), summary.run(chosen, number, frames_of=str(file)):
            execute(chosen, number if file.suffix in PROGRAMS else seed)

    summary.all(order, one, apart=file.suffix == ".cu")  # torch's threads do not live in a copy of the process
    typer.echo(summary.json(file) if json else str(summary))
    if summary.failed:
        raise typer.Exit(1)


@app.command()
def explain(
    topic: Annotated[
        str, typer.Argument(help="a diagnostic code, an instruction such as tcgen05.ld.16x256b, descriptor, idesc")
    ] = "",
    value: Annotated[str, typer.Argument(help="value of the descriptor: 0x...")] = "",
    arch: Annotated[str, typer.Option(help="sm_100a or sm_90a")] = "sm_100a",
    dtype: Annotated[str, typer.Option(help="element type of the tile: bf16, e4m3, tf32, ...")] = "bf16",
    major: Annotated[str, typer.Option(help="k or mn: the dimension that is contiguous")] = "k",
    rows: Annotated[int, typer.Option(help="rows of the tile (M or N)")] = 16,
    k: Annotated[int, typer.Option(help="columns of the tile, in elements")] = 64,
    kind: Annotated[str, typer.Option(help="kind of the instruction: f16, f8f6f4, mxf4, ...")] = "f16",
) -> None:
    """Explain a diagnostic and how to fix it, or draw a layout. Without a topic, list both."""
    from softsm.report.explain import Tile, show

    try:
        show(topic, value, Tile(arch, dtype, major, rows, k, kind))
    except ValueError as problem:
        usage(str(problem))


@command
def trace(
    program: RunOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for report.html and the timeline")] = Path(
        "softsm-trace"
    ),
    arch: Arch = "",
    sms: Sms = 4,
    order: Order = "latest",
    seed: Seed = 0,
    strict: Strict = False,
    check: Annotated[bool, typer.Option(help="look for races and misuse as well")] = True,
) -> None:
    """Run as `softsm run` does and write a report of what happened, as HTML, and a timeline for ui.perfetto.dev."""
    accept_run(arch, sms, order, ORDERS, seed)
    with loading("numba"):
        from softsm.commands.trace import tracing
        from softsm.errors import SoftsmError

    file, execute = program.file, to_run(program, arch, sms)
    writable(output)
    made = tracing(output, title=file.name, order=order, seed=seed, strict=strict, check=check)
    made_by = None
    try:
        with program_errors(file, but=(SoftsmError,)), made as made_by:
            execute(order, seed)
    except SoftsmError as problem:
        if made_by is None or not any(d.raised for d in made_by.report):
            typer.echo(str(problem), err=True)
    finally:
        if made_by is not None:
            _traced(made_by)
    if made_by is None or made_by.report or made_by.failure:
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


@command
def time(
    program: RunOptions,
    arch: Annotated[
        str, typer.Option(help="sm_90a, sm_100a or sm_103a; default: the PTX's .target; SOFTSM, else the GPU's")
    ] = "",
    gpu: Annotated[str, typer.Option(help="h200, b200 or gb200; default: the architecture's")] = "",
    clock: Annotated[
        float | None, typer.Option(help="GHz of the multiprocessors; default: what the model expects")
    ] = None,
    compare: Annotated[Path | None, typer.Option(help="another program, timed and compared with the first")] = None,
    compare_arguments: Annotated[
        str | None, typer.Option(help="command line of the other program, in one string; default: that of the first")
    ] = None,
    values: Annotated[bool, typer.Option(help="compute products, for kernels whose path depends on them")] = False,
    json: Annotated[bool, typer.Option(help="print JSON (docs/reports.md has the schema)")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="folder for a timeline of each launch")] = None,
) -> None:
    """Predict how long each launch takes on a GPU, and show what it waits for.

    Only some CTAs of each grid run, and products are not computed: results of the program are wrong.
    `softsm.checking()` inside it is off."""
    if compare is not None:
        exists(compare)
    with loading("numba"):
        from softsm.commands import time as prediction

    try:
        target, device = prediction.target(arch or target_of(program.file), gpu)
        if clock is not None:
            accepted.positive("clock", clock)
    except ValueError as problem:
        usage(str(problem))
    if output is not None:
        writable(output)
    if compare_arguments is not None and compare is None:
        usage(f"compare_arguments: got {compare_arguments!r}; accepted: only with --compare")
    programs = [program]
    if compare is not None:
        line = program.arguments if compare_arguments is None else shlex.split(compare_arguments)
        programs.append(program._replace(file=compare, arguments=line))
    timers, ends = [], []
    for given in programs:
        execute = to_run(given, target, int(device["sms"]), quiet=True)
        aside = redirect_stdout(sys.stderr) if json else nullcontext()  # what the program prints is not JSON
        with prediction.timed(device, clock, values) as timer, prediction.ending(given.file) as end, aside:
            execute("eager", 0)
        prediction.expect_launches(timer, end)
        timers.append(timer)
        ends.append(end)
    typer.echo(prediction.shown(timers, ends, json))
    if output is not None:
        for path in prediction.timelines(timers[0], output):
            typer.echo(f"wrote {path}", err=json)
    for end in ends:
        if end.words:
            typer.echo(end.words, err=True)
    if any(end.failed for end in ends) or any(t.left_out for t in timers):
        raise typer.Exit(1)


@app.command()
def museum(
    numbers: Annotated[list[int] | None, typer.Argument(help="exhibits to run; default: all")] = None,
    full: Annotated[bool, typer.Option(help="print the whole diagnostic of each bug")] = False,
) -> None:
    """Run the museum: softsm must name each bug, and find nothing in its corrected twin.

    The third column shows the level that finds it: default, strict, or only values that differ from a reference."""
    with loading("numba"):
        from softsm.museum.judge import gather, judge

    everything = gather()
    unknown = [n for n in numbers or () if n not in everything]
    if unknown:
        usage(f"numbers: got {unknown[0]}; accepted: {min(everything)} to {max(everything)}")
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


@app.command()
def serve(idle: Annotated[float, typer.Option(help="end after this many minutes without a request")] = 60.0) -> None:
    """Stay resident, so that `softsm check`, `run`, `trace` and `time`, and `pytest --softsm`, begin at once.

    Runs in the foreground until you interrupt it. SOFTSM_SERVE=0 keeps a command from using it."""
    from softsm.commands.serve import Server, preload

    if idle <= 0:
        usage(f"idle: got {idle}; accepted: numbers > 0")
    path = resident.socket_path()
    if resident.alive(path):
        typer.echo(f"softsm serve runs already ({path})", err=True)
        raise typer.Exit(1)
    preload()
    try:
        server = Server(path, run_command)
    except (OSError, ValueError) as problem:
        usage(str(problem))
    typer.echo(f"softsm serve: process {os.getpid()}, ends after {idle:g} minutes without a request", err=True)
    try:
        server.run(60 * idle)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def run_command(kind: str, arguments: list[str]) -> int:
    """Runs a command in a copy of the resident process."""
    sys.argv = [kind, *arguments]
    if kind == "pytest":
        import pytest

        # The plug-in is loaded already, so that pytest cannot rewrite its assertions; it has none.
        return int(pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments]))
    main()
    return 0


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in resident.COMMANDS:
        done = resident.hand_over("softsm", sys.argv[1:])
        if done is not None:
            sys.exit(done)
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
