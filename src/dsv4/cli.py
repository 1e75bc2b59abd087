"""The `dsv4` command. Each subcommand is a module of `dsv4.commands` with one typer function."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Annotated, NoReturn

import typer

import dsv4
from dsv4.commands import bench, compile, demo, doctor, kernels, support, verify

app = typer.Typer(
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


app.command("demo")(demo.demo)
app.command("verify")(verify.verify)
app.command("doctor")(doctor.doctor)
app.command("support")(support.support)
app.command("bench")(bench.bench)
app.command("compile")(compile.compile)
app.command("kernels")(kernels.kernels)


def main() -> None:
    # Triton 3.9 warns that this default will change; kernels are tested with fusion on.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
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
