"""The command line of softsm."""

import sys


def main() -> None:
    sys.exit("softsm: there is no command line yet")
