"""What the command `dsv4` starts with. `import dsv4` imports torch, which takes seconds: this module stands outside the
package, so that the command answers at once."""

from __future__ import annotations

import sys
from importlib.metadata import version


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(version("dsv4"))
        return
    waiting = sys.stderr.isatty()
    if waiting:
        print("loading torch ...", end="", file=sys.stderr, flush=True)
    from dsv4 import cli

    if waiting:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    cli.main()
