"""Runs the file of `softsm run`, `check`, `trace` and `time`, a Python program, PTX or CUDA C++, and rejects wrong
command lines."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from softsm import accepted
from softsm.commands.options import RunOptions

if TYPE_CHECKING:
    from click import UsageError
else:
    UsageError = typer.BadParameter.__base__  # class of click, or of the copy of click in newer typers

OWN = (typer.Exit, UsageError)  # exceptions of the command itself, not of the program that it runs
PROGRAMS = (".py", ".cu")  # files with their own command line


def to_run(
    program: RunOptions, arch: str, sms: int, ranks: int = 1, save: list[str] | None = None, quiet: bool = False
) -> Callable[[str, int], None]:
    """Returns execute(order, seed), which runs the file."""
    file, arguments, arg = program.file, program.arguments or [], program.arg or []
    if file.suffix not in PROGRAMS and ranks != 1:
        usage(f"ranks: got {ranks}; accepted: with Python and CUDA C++ programs")
    if file.suffix in PROGRAMS and arg:
        usage(f"arg: got {arg[0]!r}; accepted: with PTX; options of a program of this name go after --")
    if file.suffix == ".cu":
        from softsm.commands.cuda import CudaFile

        target = arch or os.environ.get("SOFTSM") or "sm_100a"
        try:
            compiled = CudaFile(file, arguments, target, shlex.split(program.clang_flags), ranks)
        except ValueError as problem:
            usage(str(problem))
        return lambda order, seed: compiled.run(sms, order, seed)
    if file.suffix == ".py":
        return lambda order, seed: _program(file, arguments, arch, sms, ranks, order, seed)
    if arguments and arg:
        usage(f"arg: got {arg[0]!r} and {arguments[0]!r}; accepted: one of the two ways to give arguments")
    from softsm.commands.ptx import PtxFile

    given = PtxFile(program, arguments or arg, arch, save or [])

    def execute(order: str, seed: int) -> None:
        try:
            given.launch(sms=sms, order=order, seed=seed, quiet=quiet)
        except ValueError as problem:
            usage(f"{file}: {problem}")

    return execute


def target_of(file: Path) -> str:
    """Returns the architecture that a PTX file names, as far as softsm emulates it."""
    found = re.search(r"^[^/\n]*\.target\s+(sm_\w+)", file.read_text(), re.M) if file.suffix == ".ptx" else None
    return {"sm_90": "sm_90a", "sm_100": "sm_100a", "sm_103": "sm_103a"}.get(found[1].rstrip("af"), "") if found else ""


def accept(program: RunOptions, options: list[str]) -> None:
    """Rejects a file that does not exist, and an option that resembles one of the command's: it was not meant for the
    program."""
    file = program.file
    exists(file, options)
    before = sys.argv[: sys.argv.index("--")] if "--" in sys.argv else sys.argv
    for name in (word.partition("=")[0] for word in program.arguments or []):
        near = difflib.get_close_matches(name, options, 1, 0.8)
        meant = near and not name.startswith(near[0]) and (file.suffix not in PROGRAMS or name in before)
        if name.startswith("--") and meant:
            usage(f"{name}: there is no such option; did you mean {near[0]}? Options of the program go after --")
        if file.suffix not in PROGRAMS and name.startswith("-"):
            usage(f"{name}: there is no such option, and a kernel in PTX has no command line")


def accept_run(arch: str, sms: int, order: str, orders: tuple[str, ...], seed: int) -> None:
    """Rejects values that make no sense, with one line."""
    from softsm.doors.triton.in_use import ARCHITECTURES

    try:
        accepted.one_of("order", order, orders)
        accepted.whole("sms", sms, 1, accepted.MOST_SMS)
        accepted.whole("seed", seed, 0)
        if arch:
            accepted.one_of("arch", arch, tuple(ARCHITECTURES))
    except ValueError as problem:
        usage(str(problem))


def exists(file: Path, options: Iterable[str] = ()) -> None:
    if file.is_file():
        return
    name = str(file).partition("=")[0]
    if name.startswith("-"):  # an unknown option before the file
        near = difflib.get_close_matches(name, options, 1, 0.8)
        usage(f"{name}: there is no such option{f'; did you mean {near[0]}?' if near else ''}")
    usage(f"there is no file {file}")


def writable(folder: Path) -> None:
    """Creates the folder before the program runs, since a run may be long."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        usage(f"output: got {folder}; accepted: a folder to write to ({problem.strerror})")


def _program(file: Path, arguments: list[str], arch: str, sms: int, ranks: int, order: str, seed: int) -> None:
    """Runs the file as `python file arguments` would, or torchrun, with softsm under Triton and under the CUDA driver
    interface, and device="cuda" meaning CPU tensors."""
    import runpy

    if "torch" not in sys.modules:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # this process does not use the GPU, if there is one
    with loading("triton"):
        from softsm.doors.driver.loading import driver
        from softsm.doors.triton.install import use
        from softsm.engine.options import options

        try:
            softsm = use(arch or os.environ.get("SOFTSM") or "sm_100a", cuda_shim=True, sms=sms, ranks=ranks)
        except (ValueError, ImportError) as problem:
            usage(str(problem))
    os.environ.setdefault("TILELANG_EXECUTION_BACKEND", "nvrtc")  # TileLang's others run nvcc
    sys.argv = [str(file), *arguments]
    sys.path.insert(0, str(file.resolve().parent))
    text = file.read_bytes()
    late = b"libcuda" not in text and b"libnvrtc" not in text  # a program may load a library itself
    with softsm, options(order=order, seed=seed), driver(softsm.arch, sms, at_import=late):
        if ranks == 1:
            runpy.run_path(str(file), run_name="__main__")
        else:
            code = compile(file.read_bytes(), str(file), "exec")
            softsm.run(lambda rank: exec(code, {"__name__": "__main__", "__file__": str(file)}))


@contextmanager
def loading(package: str) -> Iterator[None]:
    """Shows in a terminal that a command waits for its imports, unless they include nothing new."""
    shown = sys.stderr.isatty() and package not in sys.modules
    if shown:
        print("loading softsm ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def program_errors(file: Path, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Shows an exception of the program as `python file` would, without the frames that led to the program."""
    from softsm.errors import SoftsmError

    passed: tuple[type[BaseException], ...] = (*OWN, *but)
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


def told(problem: Any) -> str:
    """Returns the line of an error. Each begins with the option as the user writes it, with the argument or with the
    command, whoever found the error."""
    text, kind = problem.format_message(), type(problem).__name__
    given = getattr(problem, "param", None)
    name = getattr(problem, "option_name", None) if given is None else given.opts[0]
    if kind == "NoSuchOption":
        return f"{name}: there is no such option{_near(problem.option_name, problem.possibilities)}"
    if kind == "BadOptionUsage":
        return f"{name}: " + ("needs a value" if "requires" in text else "has no value")
    if kind == "MissingParameter":
        return f"{name}: is missing"
    if kind == "BadParameter" and text.startswith("Invalid value"):
        return f"{name}: {_wrong_value(problem)}"
    if unknown := re.match("No such command '(.*?)'", text):
        return f"{unknown[1]}: there is no such command{_near(unknown[1], problem.ctx.command.commands)}"
    if many := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", text):
        return f"{many[1]}: there is no such argument"
    own, colon, rest = text.partition(":")
    for one in problem.ctx.command.params if problem.ctx else ():
        if colon and one.name == own:
            return f"{one.opts[0]}:{rest}"
    return text


def _wrong_value(problem: Any) -> str:
    """Returns what was given and what is accepted; the exception that typer wraps has the value."""
    message = problem.message[:1].lower() + problem.message[1:].partition(", unable to")[0]
    errors = getattr(problem.__context__, "errors", None)
    if errors is None:  # an older typer, whose message has the value
        return message
    return f"got {errors()[0]['input']!r}; {message.replace('input should be', 'accepted:')}"


def _near(name: str, known: Iterable[str] | None) -> str:
    closest = difflib.get_close_matches(name, known or (), 1, 0.4)
    return f"; did you mean {closest[0]}?" if closest else ""


def usage(message: str) -> NoReturn:
    """Raises the error for a wrong command line; `softsm.cli.Commands` prints it."""
    raise UsageError(message)
