"""`dsv4 completion bash|zsh|fish` prints a script that completes subcommands and options. The words are in the
script: asking the program itself, as typer's own completion does, starts a Python at every key."""

from __future__ import annotations

from typing import Annotated

import typer

from dsv4_command.usage import one_of

SHELLS = ("bash", "zsh", "fish")
BASH = """\
_dsv4() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words
    case "${{COMP_WORDS[1]}}" in
{cases}
        *) words="{commands}" ;;
    esac
    [ "$COMP_CWORD" = 1 ] && words="{commands}"
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _dsv4 dsv4
"""


def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish", callback=one_of(SHELLS))], context: typer.Context
) -> None:
    """Print a script that completes commands and options: source <(dsv4 completion bash)."""
    root = context.find_root().command
    words = {name: options(command) for name, command in root.commands.items()}  # type: ignore[attr-defined]
    print(fish(words) if shell == "fish" else bash(words, zsh=shell == "zsh"), end="")


def options(command: object) -> list[str]:
    found = [o for p in command.params for o in (*p.opts, *p.secondary_opts)]  # type: ignore[attr-defined]
    return [*(o for o in found if o.startswith("--")), "--help"]


def bash(words: dict[str, list[str]], zsh: bool) -> str:
    cases = "\n".join(f'        {name}) words="{" ".join(each)}" ;;' for name, each in words.items())
    start = "autoload -U +X bashcompinit && bashcompinit\n" if zsh else ""
    return start + BASH.format(cases=cases, commands=" ".join(words))


def fish(words: dict[str, list[str]]) -> str:
    first = f'complete -c dsv4 -n __fish_use_subcommand -a "{" ".join(words)}"\n'
    return first + "".join(
        f'complete -c dsv4 -n "__fish_seen_subcommand_from {name}" -l {option.removeprefix("--")}\n'
        for name, each in words.items()
        for option in each
    )
