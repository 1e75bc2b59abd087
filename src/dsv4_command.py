"""What the command `dsv4` starts with. `import dsv4` imports torch, which takes seconds: this module stands outside the
package, so that the command answers at once."""

from __future__ import annotations

import sys
from importlib.metadata import version

_begun = False


def begin() -> None:
    """Answer what needs no torch, or say that it is being loaded. `python -m dsv4` imports the package before anything
    of ours runs, so its __init__ calls this first."""
    global _begun
    _begun = True
    if sys.argv[1:] == ["--version"]:
        print(version("dsv4"))
        sys.exit()
    if sys.stderr.isatty():
        print("loading torch ...", end="", file=sys.stderr, flush=True)


def main() -> None:
    if not _begun:
        begin()
    from dsv4 import cli

    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    cli.main()
