"""The command `softsm`."""

from __future__ import annotations

import atexit
import difflib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, NamedTuple, NoReturn

import typer

from softsm import accepted, resident
from softsm.accepted import ORDERS

app = typer.Typer(
    help="A streaming multiprocessor in software: runs PTX, and Triton or Gluon programs, on a CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


# Shared by `run`, `check`, `trace` and `time`. Options may come before or after the file; options unknown to softsm,
# and everything after --, go to the program.
OPTIONS = {"ignore_unknown_options": True}
PROGRAMS = (".py", ".cu")  # with a command line of their own
KNOWN = tuple(
    "--arch --entry --grid --block --cluster --shared --sms --ranks --order --seed --strict --output --json".split()
)
File = Annotated[Path, typer.Argument(help="a Python program with Triton kernels, a .ptx file or a .cu program")]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        help="the command line of the program (after -- where softsm has an option of the same name); for PTX the "
        "same as --arg"
    ),
]
Arg = Annotated[
    list[str] | None,
    typer.Option(help="argument of a PTX kernel, in order: f32[1024]:rand, i32=5, bf16[64,128]:x.npy, map[64,64]:arg0"),
]
Arch = Annotated[
    str, typer.Option(help="GPU to emulate: sm_90a, sm_100a, sm_103a; default: the PTX's .target; SOFTSM, else sm_100a")
]
Clang = Annotated[str, typer.Option(help="flags for clang, of a .cu program: '-I include -DNDEBUG'")]
Entry = Annotated[str | None, typer.Option(help="which kernel of the PTX file")]
Sides = Annotated[str, typer.Option(help="x,y,z")]
Cluster = Annotated[str, typer.Option(help="x,y,z; default: the kernel's .reqnctapercluster, else 1")]
Block = Annotated[str, typer.Option(help="x,y,z; default: the kernel's .reqntid, else 32")]
Shared = Annotated[int, typer.Option(help="bytes of dynamic shared memory")]
Sms = Annotated[int, typer.Option(help="SMs to emulate")]
Save = Annotated[
    list[str] | None,
    typer.Option(help="N=file.npy: write the array of argument N, a number or a name, after the run; may be repeated"),
]
Ranks = Annotated[int, typer.Option(help="ranks of a Python program, as torchrun starts it")]
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
    arg: Arg = None,
    arch: Arch = "",
    entry: Entry = None,
    grid: Sides = "1",
    block: Block = "",
    cluster: Cluster = "",
    shared: Shared = 0,
    clang_flags: Clang = "",
    sms: Sms = 4,
    ranks: Ranks = 1,
    order: Order = "eager",
    seed: Seed = 0,
    save: Save = None,
) -> None:
    """Run a kernel from PTX on arrays made here, or a whole Python program. Nothing is checked: see `softsm check`."""
    _accept(file, arguments, arch, sms, order, ORDERS, seed)
    execute = _program_of(
        file, arguments, arg, arch, sms, PtxOptions(entry, grid, block, cluster, shared, save or []), clang_flags, ranks
    )
    with _program_errors(file):
        execute(order, seed)
    typer.echo(f"nothing was checked; `softsm check {file}` looks for races and misuse", err=True)


@app.command(context_settings=OPTIONS)
def check(
    file: File,
    arguments: Arguments = None,
    arg: Arg = None,
    arch: Arch = "",
    entry: Entry = None,
    grid: Sides = "1",
    block: Block = "",
    cluster: Cluster = "",
    shared: Shared = 0,
    clang_flags: Clang = "",
    sms: Sms = 4,
    ranks: Ranks = 1,
    order: Annotated[
        str, typer.Option(help="completion of asynchronous operations: all, eager, latest, random")
    ] = "all",
    seed: Seed = 0,
    strict: Strict = False,
    save: Save = None,
    json: Annotated[bool, typer.Option(help="print JSON (docs/reports.md has the schema)")] = False,
) -> None:
    """Run with all checks, once for each order of completion, and print each finding once.

    Exit status 0: nothing found; 1: a finding, or the program itself failed; 2: wrong usage."""
    from softsm.commands.check import Summary

    _accept(file, arguments, arch, sms, order, (*ORDERS, "all"), seed)
    execute = _program_of(
        file, arguments, arg, arch, sms, PtxOptions(entry, grid, block, cluster, shared, save or []), clang_flags, ranks
    )
    summary = Summary(seed, strict)
    for chosen, number in summary.runs(order):
        aside = redirect_stdout(sys.stderr) if json else nullcontext()  # what the program prints is no JSON
        with aside, summary.run(chosen, number, frames_of=str(file)):
            execute(chosen, number if file.suffix in PROGRAMS else seed)
    typer.echo(summary.json(file) if json else str(summary))
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
        _usage(str(problem))


@app.command(context_settings=OPTIONS)
def trace(
    file: File,
    arguments: Arguments = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for report.html and the timeline")] = Path(
        "softsm-trace"
    ),
    arg: Arg = None,
    arch: Arch = "",
    entry: Entry = None,
    grid: Sides = "1",
    block: Block = "",
    cluster: Cluster = "",
    shared: Shared = 0,
    clang_flags: Clang = "",
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
    execute = _program_of(file, arguments, arg, arch, sms, PtxOptions(entry, grid, block, cluster, shared), clang_flags)
    _writable(output)
    made = tracing(output, title=file.name, order=order, seed=seed, strict=strict, check=check)
    made_by = None
    try:
        with _program_errors(file, but=(SoftsmError,)), made as made_by:
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


@app.command(context_settings=OPTIONS)
def time(
    file: File,
    arguments: Arguments = None,
    arg: Arg = None,
    entry: Entry = None,
    grid: Sides = "1",
    block: Block = "",
    cluster: Cluster = "",
    shared: Shared = 0,
    clang_flags: Clang = "",
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
    json: Annotated[bool, typer.Option(help="print JSON")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="folder for a timeline of each launch")] = None,
) -> None:
    """Predict how long each launch takes on a GPU, and say what it waits for.

    Only some CTAs of each grid run, and products are not computed: results of the program are wrong.
    `softsm.checking()` inside it is off."""
    from softsm.commands import time as command

    for given in (file, compare):
        if given is not None and not given.is_file():
            _usage(f"there is no file {given}")
    try:
        target, device = command.target(arch or _target_of(file), gpu)
        if clock is not None:
            accepted.positive("clock", clock)
    except ValueError as problem:
        _usage(str(problem))
    if output is not None:
        _writable(output)
    if compare_arguments is not None and compare is None:
        _usage(f"compare_arguments: got {compare_arguments!r}, accepted only with --compare")
    lines = [arguments or [], (arguments or []) if compare_arguments is None else shlex.split(compare_arguments)]
    kernel = PtxOptions(entry, grid, block, cluster, shared)
    timers, ends = [], []
    for given, line in zip((file, compare), lines):
        if given is not None:
            execute = _program_of(given, line, arg, target, int(device["sms"]), kernel, clang_flags, quiet=True)
            aside = redirect_stdout(sys.stderr) if json else nullcontext()  # what the program prints is no JSON
            with command.timed(device, clock, values) as timer, command.ending(given) as end, aside:
                execute("eager", 0)
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
        _usage(f"numbers: got {unknown[0]}, there are exhibits {min(everything)} to {max(everything)}")
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
def serve(idle: Annotated[float, typer.Option(help="minutes without a request after which it ends")] = 60.0) -> None:
    """Stay resident, so that `softsm check`, `run`, `trace` and `time`, and `pytest --softsm`, begin at once.

    Runs in the foreground until you interrupt it. SOFTSM_SERVE=0 keeps a command from using it."""
    from softsm.commands.serve import Server, preload

    if idle <= 0:
        _usage(f"idle: got {idle}, accepted are numbers > 0")
    path = resident.socket_path()
    if resident.alive(path):
        typer.echo(f"softsm serve runs already ({path})", err=True)
        raise typer.Exit(1)
    preload()
    try:
        server = Server(path, run_command)
    except (OSError, ValueError) as problem:
        _usage(f"softsm serve: {problem}")
    typer.echo(f"softsm serve: process {os.getpid()}, ends after {idle:g} minutes without a request", err=True)
    try:
        server.run(60 * idle)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


class PtxOptions(NamedTuple):
    entry: str | None
    grid: str
    block: str
    cluster: str
    shared: int
    save: list[str] = []


def _program_of(
    file: Path,
    arguments: list[str] | None,
    arg: list[str] | None,
    arch: str,
    sms: int,
    kernel: PtxOptions,
    clang_flags: str,
    ranks: int = 1,
    quiet: bool = False,
) -> Callable[[str, int], None]:
    """What runs the file: execute(order, seed)."""
    if file.suffix != ".py" and ranks != 1:
        _usage(f"ranks: got {ranks}, accepted for Python programs")
    if file.suffix in PROGRAMS and arg:
        _usage(f"arg: got {arg[0]!r}, accepted for PTX; options of a program of this name go behind --")
    if file.suffix == ".cu":
        from softsm.commands.cuda import CudaFile

        program = CudaFile(
            file, arguments or [], arch or os.environ.get("SOFTSM") or "sm_100a", shlex.split(clang_flags)
        )
        return lambda order, seed: program.run(sms, order, seed)
    if file.suffix == ".py":
        return lambda order, seed: _program(file, arguments or [], arch, sms, ranks, order, seed)
    if arguments and arg:
        _usage(f"arg: got {arg[0]!r} and {arguments[0]!r}, accepted is one of the two ways to give arguments")
    from softsm.commands.ptx import PtxFile

    given = PtxFile(file, arguments or arg or [], arch, *kernel)

    def execute(order: str, seed: int) -> None:
        try:
            given.launch(sms=sms, order=order, seed=seed, quiet=quiet)
        except ValueError as problem:
            _usage(f"{file}: {problem}")

    return execute


def _target_of(file: Path) -> str:
    """The architecture that a PTX file names, as far as softsm emulates it."""
    found = re.search(r"^\s*\.target\s+(sm_\w+)", file.read_text(), re.M) if file.suffix == ".ptx" else None
    return {"sm_90": "sm_90a", "sm_100": "sm_100a", "sm_103": "sm_103a"}.get(found[1].rstrip("af"), "") if found else ""


def _accept(
    file: Path, arguments: list[str] | None, arch: str, sms: int, order: str, orders: tuple[str, ...], seed: int
) -> None:
    """Refuse what cannot be meant, in one line."""
    from softsm.doors.triton.in_use import ARCHITECTURES

    if not file.is_file():
        _usage(f"there is no file {file}")
    try:
        accepted.one_of("order", order, orders)
        accepted.whole("sms", sms, 1, accepted.MOST_SMS)
        accepted.whole("seed", seed, 0)
        if arch:
            accepted.one_of("arch", arch, tuple(ARCHITECTURES))
    except ValueError as problem:
        _usage(str(problem))
    _no_typos(file, arguments or [])


def _no_typos(file: Path, arguments: list[str]) -> None:
    """An option that softsm does not have, and nearly has, was not meant for the program."""
    before = sys.argv[: sys.argv.index("--")] if "--" in sys.argv else sys.argv
    for name in (word.partition("=")[0] for word in arguments):
        near = difflib.get_close_matches(name, KNOWN, 1, 0.8)
        meant = near and not name.startswith(near[0]) and (file.suffix not in PROGRAMS or name in before)
        if name.startswith("--") and meant:
            _usage(f"{name}: there is no such option; did you mean {near[0]}? Options of the program go behind --")
        if file.suffix not in PROGRAMS and name.startswith("-"):
            _usage(f"{name}: there is no such option, and a kernel in PTX has no command line")


def _writable(folder: Path) -> None:
    """Made before the program runs, which may take long."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        _usage(f"output: got {folder}, accepted is a folder to write to ({problem.strerror})")


def _program(file: Path, arguments: list[str], arch: str, sms: int, ranks: int, order: str, seed: int) -> None:
    """Runs as `python file arguments` would, or torchrun, with softsm under Triton and under the CUDA driver interface,
    and device="cuda" meaning CPU tensors."""
    import runpy

    if "torch" not in sys.modules:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # this process does not use the GPU, if there is one
    from softsm.doors.driver.functions import driver
    from softsm.doors.triton.install import use
    from softsm.engine.options import options

    try:
        softsm = use(arch or os.environ.get("SOFTSM") or "sm_100a", cuda_shim=True, sms=sms, ranks=ranks)
    except ValueError as problem:
        _usage(str(problem))
    sys.argv = [str(file), *arguments]
    sys.path.insert(0, str(file.resolve().parent))
    with softsm, options(order=order, seed=seed), driver(softsm.arch, sms, at_import=True):
        if ranks == 1:
            runpy.run_path(str(file), run_name="__main__")
        else:
            code = compile(file.read_bytes(), str(file), "exec")
            softsm.run(lambda rank: exec(code, {"__name__": "__main__", "__file__": str(file)}))


@contextmanager
def _program_errors(file: Path, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """An exception of the program is shown as `python file` would: without the frames that led to it."""
    from softsm.errors import SoftsmError

    passed: tuple[type[BaseException], ...] = (typer.Exit, *but)
    try:
        yield
    except passed:
        raise
    except Exception as problem:
        if file.suffix != ".py" and isinstance(problem, SoftsmError):
            typer.echo(f"{file}: {problem}", err=True)
            raise typer.Exit(1) from None
        frames = problem.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != str(file):
            frames = frames.tb_next
        traceback.print_exception(problem.with_traceback(frames))
        raise typer.Exit(1) from None


def _usage(message: str) -> NoReturn:
    """The command line is wrong."""
    typer.echo(message, err=True)
    raise typer.Exit(2)


def run_command(kind: str, arguments: list[str]) -> int:
    """In a copy of the resident process."""
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
