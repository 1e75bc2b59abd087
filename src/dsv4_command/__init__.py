"""The command `dsv4`: its options and its exit status. `import dsv4` imports torch, which takes seconds. So this is a
package of its own, which imports dsv4 only when a command begins its work: help and wrong usage do not wait."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial, wraps
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from dsv4_command.completion import completion
from dsv4_command.usage import UsageError, file_to_write, one_of, refuse, told

# What the work accepts; tests/dsv4/test_cli.py compares.
ARCHS = ("sm_90a", "sm_100a", "sm_103a")
BACKENDS = ("auto", "cuda", "softsm", "cpu")
DTYPES = ("bf16", "fp16")
HEAD_DIMS = (64, 128, 256, 512)
KINDS = ("dense", "varlen", "paged", "v4", "index", "compress", "model", "fmha-backward", "v4-backward", "v4.1",
         "softcap", "e4m3", "moe")  # fmt: skip
KV_LOADS = ("rows", "pages", "cp_async")
OPERATIONS = ("fmha", "v4")
BENCH_SUITES = ("dense", "varlen", "v4", "index", "moe", "backward", "all")
VERIFY_SUITES = ("seeds", "fmha", "v4", "backward", "all")
SHAPES = ("fixed", "random")


class Commands(typer.core.TyperGroup):
    """Every error in one style: `dsv4 COMMAND: what is wrong` on stderr, with exit status 2. The statuses of all
    commands: 0 nothing wrong, 1 something was found wrong, 2 wrong usage or nothing could run."""

    def main(self, *args: Any, **options: Any) -> Any:
        alone = options.pop("standalone_mode", True)
        try:
            status = super().main(*args, **options | {"standalone_mode": False})
        except UsageError as problem:
            # no text: no argument at all, and typer has shown the help
            if text := told(problem):
                print(f"{self.path(problem, args, options)}: {text}", file=sys.stderr)
            sys.exit(2)
        except typer.Abort:
            print("dsv4: interrupted", file=sys.stderr)
            sys.exit(130)
        return sys.exit(status or 0) if alone else status

    def path(self, problem: Any, args: tuple[Any, ...], options: dict[str, Any]) -> str:
        """Return `dsv4 COMMAND`. The parser's own errors do not name the command."""
        if problem.ctx:
            return problem.ctx.command_path
        given = (args[0] if args else options.get("args")) or sys.argv[1:]
        return " ".join(["dsv4", *[x for x in given if x in self.commands][:1]])


app = typer.Typer(
    cls=Commands,
    help="Attention for DeepSeek-V4-class models: run it, verify it, and show what this machine can run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(asked: bool) -> None:
    if asked:
        print(f"dsv4 {version_of('dsv4')}")
        raise typer.Exit()


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Options of no subcommand."""


def command(options: Callable[..., None], needs_triton: bool = False) -> None:
    """Make a subcommand of a function without a body. Its parameters are the options and its docstring the help; the
    work is the function of its name in the module of its name in dsv4.commands. A file or directory that cannot be read
    or written is wrong usage, and so is a missing Triton."""
    name = options.__name__

    @app.command(name)
    @wraps(options)
    def run(**given: Any) -> None:
        work = getattr(imported(f"dsv4.commands.{name}"), name)
        try:
            if needs_triton and imported("dsv4.runtime.dispatch").triton_version() is None:
                refuse("needs Triton, which is not installed: pip install triton")
            work(**given)
        except OSError as problem:
            if problem.filename is None:
                raise
            refuse(f"{problem.filename}: {problem.strerror}")


def imported(name: str) -> Any:
    """Import a module. In a terminal the command shows what it waits for."""
    waiting = sys.stderr.isatty() and "torch" not in sys.modules
    if waiting:
        print("loading torch ...", end="", file=sys.stderr, flush=True)
    module = importlib.import_module(name)
    if waiting:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return module


def of(accepted: Iterable[Any], text: str = "") -> Any:
    """Return an option that accepts some values, which its help lists before the text."""
    listed = ", ".join(map(str, accepted))
    return typer.Option(help=listed + text, callback=one_of(accepted))


def file(text: str, *names: str) -> Any:
    """Return an option that names a file to write."""
    return typer.Option(*names, help=text, callback=file_to_write)


Seed = Annotated[int | None, typer.Option(help="repeat a run; without it inputs are fresh")]


@command
def demo(seed: Seed = None) -> None:
    """Run each kind of DeepSeek-V4 layer and of FMHA on the best backend here; compare it with the fp64 oracle."""


@command
def verify(
    suite: Annotated[str, of(VERIFY_SUITES)] = "all",
    backend: Annotated[str, of(BACKENDS)] = "auto",
    arch: Annotated[str | None, of(ARCHS, ": the GPU's own, or the one softsm emulates")] = None,
    json_file: Annotated[Path | None, file("write every measurement to this file; - is stdout", "--json")] = None,
    seed: Seed = None,
    match: Annotated[str, typer.Option(help="only cases whose name contains this")] = "",
    head_dim: Annotated[int | None, typer.Option(help="only cases of this head dim")] = None,
    check: Annotated[
        bool, typer.Option(help="softsm: look for races; asynchronous operations complete as late as possible")
    ] = True,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="processes; for softsm one per core")] = 1,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="one line per case")] = False,
) -> None:
    """Compare the operations with the fp64 oracle.

    Exit status: 0 if every case passed, 1 if one failed, 2 if none could run.

    Outputs are full of NaN before each call. Inputs are drawn anew in each run; the seed that repeats them is printed.
    """


@command
def doctor(
    run: Annotated[bool, typer.Option("--run", help="also run small cases in softsm (compiles kernels)")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Show what this machine can run, and why it cannot run the rest: versions, GPUs, backends, plug-ins, environment.

    Exit status 1 if something that should work does not."""


@partial(command, needs_triton=True)
def support(
    write: Annotated[Path | None, typer.Option(help="put the table between the marks in this file")] = None,
) -> None:
    """Print which backend runs what, as a Markdown table generated from the code."""


@command
def bench(
    suite: Annotated[str, of(BENCH_SUITES)] = "dense",
    shapes: Annotated[str, of(SHAPES, " (cases drawn by --seed, --count of each suite)")] = "fixed",
    seed: Annotated[int, typer.Option(help="seed of --shapes random")] = 0,
    count: Annotated[int, typer.Option(help="cases of each suite with --shapes random")] = 20,
    match: Annotated[str, typer.Option(help="only cases whose name contains this")] = "",
    repeats: Annotated[
        int, typer.Option(help="timed replays per call; fewer where they take more than a second, but 5 at least")
    ] = 30,
    peers: Annotated[
        str, typer.Option(help="only peers whose name contains one of these words, separated by commas")
    ] = "",
    aot: Annotated[Path | None, typer.Option(help="also time the kernels of this `dsv4 compile` directory")] = None,
    as_json: Annotated[Path | None, file("write the measurements to this file", "--json")] = None,
    plot: Annotated[Path | None, file("draw the measurements into this file (needs matplotlib)")] = None,
    limit: Annotated[float, typer.Option(help="start no case after this many seconds")] = float("inf"),
    recorded: Annotated[
        Path | None, typer.Option("--from", help="measure nothing: read this --json file, or all of a folder")
    ] = None,
    write: Annotated[Path | None, file("put a summary into this file, between its marks")] = None,
) -> None:
    """Time dsv4 and every importable peer, alternating: CUDA-graph replays with a cold L2, medians, clocks.

    Peers: torch, FlashMLA, FFPA, DeepGEMM, Humming, flash-attn 2 to 4. A wheel unpacked into a folder on PYTHONPATH
    is enough; the docstring of dsv4.bench.peers has the commands.
    """


@partial(command, needs_triton=True)
def compile(  # noqa: A001 - the command's name
    out: Annotated[Path, typer.Option("--out", "-o", help="directory to write to")],
    arch: Annotated[str, of(ARCHS)] = "sm_90a",
    head_dim: Annotated[list[int] | None, of(HEAD_DIMS, "; default all")] = None,
    dtype: Annotated[list[str] | None, of(DTYPES, "; default bf16")] = None,
    kind: Annotated[list[str] | None, of(KINDS, "; default all")] = None,
    page_size: Annotated[int, typer.Option(min=1, help="rows per page of the paged kernels")] = 64,
    model: Annotated[Path | None, typer.Option(help="config.json of a DeepSeek-V4; default V4-Flash")] = None,
    index_rows: Annotated[int, typer.Option(min=64, help="rows that a block table has room for")] = 65536,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = os.cpu_count() or 1,
) -> None:
    """Compile the kernels ahead of time into a directory; DSV4_AOT=DIR then launches from there, without a compiler."""


@partial(command, needs_triton=True)
def kernels(
    arch: Annotated[str, of(("sm_100a",))] = "sm_100a",
    head_dim: Annotated[list[int] | None, of(HEAD_DIMS, "; default all")] = None,
    kv_load: Annotated[list[str] | None, of(KV_LOADS, "; default all")] = None,
    operation: Annotated[list[str] | None, of(OPERATIONS, "; default both")] = None,
    write: Annotated[Path | None, file("write the page to this file")] = None,
) -> None:
    """Show registers, memory and spills of every variant, and the instruction budget of its main loop."""


@command
def hub(out: Annotated[Path, typer.Option(help="directory for build/torch-universal; must be empty or new")]) -> None:
    """Write dsv4's attention as a kernel for the Hugging Face hub."""


app.command()(completion)


def main() -> None:
    status = 0
    try:
        app(prog_name="dsv4")
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else int(done.code is not None)
    leave(status)


def leave(status: int) -> NoReturn:
    """Exit. Once Triton has compiled a Gluon kernel its bindings end every program with a page about leaked functions;
    so then the interpreter is not torn down: exit handlers run, buffers are flushed, and the process ends."""
    if "triton._C.libtriton" in sys.modules:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
