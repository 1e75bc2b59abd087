"""python tools/cubins.py: the wheel dsv4-cubins, kernels compiled ahead of time for machines of any Triton.

Each architecture is compiled by the Triton whose code for it is fastest (benchmarks/NOTES.md, section 3): Hopper's by
the oldest that is accepted, which tools/environments.py installs next to the environment, Blackwell's by the
environment's own. No GPU is needed; all kernels take one to two hours on two cores. The wheel has no code, fits one
version of the kernel sources, and is found by src/dsv4/runtime/cubins.py where it is installed.

    python tools/cubins.py                                    everything, into dist/
    python tools/cubins.py --arch sm_90a -- --kind v4         a part: what follows `--` goes to `dsv4 compile`
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
OLDEST = Path(sys.prefix) / "triton-3.6.0"
COMPILERS = {"sm_90a": OLDEST, "sm_100a": None, "sm_103a": None}  # None: the environment's own
PROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "dsv4-cubins"
version = "{version}"
description = "The kernels of dsv4, compiled ahead of time"
license = "Apache-2.0"
requires-python = "{python}"
dependencies = ["dsv4=={version}"]

[tool.setuptools]
packages = ["dsv4_cubins"]

[tool.setuptools.package-data]
dsv4_cubins = ["sources", "*/*.json", "*/*.cubin"]
"""


def compile_into(package: Path, arch: str, options: list[str]) -> None:
    """`dsv4 compile` with the architecture's Triton in front of the environment's."""
    beside = COMPILERS[arch]
    if beside is not None and not beside.exists():
        # A machine whose own Triton is the oldest needs no other.
        beside = None
    paths = [*([str(beside)] if beside else []), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_DISABLE_LINE_INFO": "1"}
    command = [sys.executable, "-m", "dsv4", "compile", "--arch", arch, "-o", str(package / arch), *options]
    subprocess.run(command, env=env, check=True)


def describe(tree: Path) -> None:
    """Write all that the wheel holds besides the kernels."""
    sys.path.insert(0, str(ROOT / "src"))
    from dsv4.runtime import cubins

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = PROJECT.format(version=project["version"], python=project["requires-python"])
    (tree / "pyproject.toml").write_text(text)
    package = tree / cubins.PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text('"""Compiled kernels, which dsv4 finds here."""\n')
    (package / cubins.SOURCES).write_text(cubins.source_hash() + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", choices=COMPILERS, help="default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory for the wheel")
    parser.add_argument("--tree", type=Path, default=ROOT / "build" / "cubins", help="directory to compile in")
    parser.add_argument("options", nargs="*", help="of `dsv4 compile`; default: --dtype bf16 --dtype fp16")
    given = parser.parse_args()
    given.tree = given.tree.resolve()  # pip would look for a package with the name of a plain folder
    shutil.rmtree(given.tree, ignore_errors=True)
    given.tree.mkdir(parents=True)
    describe(given.tree)
    for arch in given.arch or COMPILERS:
        compile_into(given.tree / "dsv4_cubins", arch, given.options or ["--dtype", "bf16", "--dtype", "fp16"])
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", given.out, given.tree]
    subprocess.run([*map(str, command)], check=True)


if __name__ == "__main__":
    main()
