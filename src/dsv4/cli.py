"""The `dsv4` command. Each subcommand is a module of `dsv4.commands` with one typer function."""

from __future__ import annotations

import typer

from dsv4.commands import demo, doctor, support, verify

app = typer.Typer(
    help="Attention for DeepSeek-V4-class models: run it, verify it, ask what this machine can do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("demo")(demo.demo)
app.command("verify")(verify.verify)
app.command("doctor")(doctor.doctor)
app.command("support")(support.support)


def main() -> None:
    app(prog_name="dsv4")
