"""The `dsv4` command. Each subcommand is a module of `dsv4.commands` with one typer function."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
import typer.core

import dsv4
from dsv4.commands import bench, compile, completion, demo, doctor, hub, kernels, show, support, verify
from dsv4.runtime import dispatch


class Commands(typer.core.TyperGroup):
    """Every error in one style: `dsv4 COMMAND: what is wrong` on stderr, with exit status 2. The statuses of all
    commands: 0 nothing wrong, 1 something was found wrong, 2 wrong usage or nothing could run."""

    def main(self, *args: Any, **options: Any) -> Any:
        alone = options.pop("standalone_mode", True)
        try:
            status = super().main(*args, **options | {"standalone_mode": False})
        except show.UsageError as problem:
            # no text: no argument at all, and typer has shown the help
            if text := show.told(problem):
                print(f"{problem.ctx.command_path if problem.ctx else 'dsv4'}: {text}", file=sys.stderr)
            sys.exit(2)
        except typer.Abort:
            print("dsv4: interrupted", file=sys.stderr)
            sys.exit(130)
        return sys.exit(status or 0) if alone else status


app = typer.Typer(
    cls=Commands,
    help="Attention for DeepSeek-V4-class models: run it, verify it, ask what this machine can do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def show_version(asked: bool) -> None:
    if asked:
        print(dsv4.__version__)
        raise typer.Exit()


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Options of no subcommand."""


def add(name: str, command: Callable[..., None], needs_triton: bool = False) -> None:
    """A file or directory that cannot be read or written is wrong usage, and so is a missing Triton."""

    @functools.wraps(command)
    def named(*args: Any, **options: Any) -> None:
        try:
            if needs_triton and dispatch.triton_version() is None:
                show.refuse("needs Triton, which is not installed: pip install triton")
            command(*args, **options)
        except OSError as problem:
            if problem.filename is None:
                raise
            show.refuse(f"{problem.filename}: {problem.strerror}")

    app.command(name)(named)


add("demo", demo.demo)
add("verify", verify.verify)
add("doctor", doctor.doctor)
add("support", support.support, needs_triton=True)
add("bench", bench.bench)
add("compile", compile.compile, needs_triton=True)
add("kernels", kernels.kernels, needs_triton=True)
add("hub", hub.hub)
add("completion", completion.completion)


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
