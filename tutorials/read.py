"""python tutorials/read.py [NUMBER ...]: read chapters, run their checks, and see what softsm shows."""

import os
import sys
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

FOLDER = Path(__file__).parent


def read(path: Path, console: Console) -> None:
    chapter = import_module(path.stem)
    console.print(Markdown(chapter.__doc__))
    for name in [name for name in vars(chapter) if name.startswith("check_")]:
        getattr(chapter, name)()
        console.print(f"[green]ok[/] {name.removeprefix('check_').replace('_', ' ')}")
    chapter.show()


def main(*chapters: str) -> None:
    """Read the chapters of these numbers or files; of none: all."""
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "src")]
    wanted = [f"{int(Path(name).name.split('_')[0]):02}_" for name in chapters]
    console = Console(highlight=False)
    for path in sorted(FOLDER.glob("[0-9]*.py")):
        if not wanted or path.name[:3] in wanted:
            read(path, console)
    sys.stdout.flush()
    os._exit(0)  # Triton's bindings end a program that compiled a Gluon kernel with a page about leaked functions


if __name__ == "__main__":
    main(*sys.argv[1:])
