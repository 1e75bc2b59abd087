"""The wheel `dsv4-cubins` (tools/cubins.py): kernels that were compiled ahead of time by the Triton whose code is
fastest for each architecture. If it is installed, launches use its kernels without a setting.

It holds one folder of `dsv4 compile` for each architecture, and the hash of the kernel sources that they were compiled
from. dsv4 warns about a wheel of other sources and does not use it. ``DSV4_CUBINS=0`` switches it off.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import warnings
from functools import cache
from pathlib import Path

from dsv4.runtime.settings import settings

PACKAGE = "dsv4_cubins"
SOURCES = "sources"  # the file with the hash


@cache
def source_hash() -> str:
    """Return the hash of all kernel source files: a cubin made from others is stale."""
    here = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(here.glob("**/kernels/**/*.py")):
        digest.update(str(path.relative_to(here)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def installed() -> Path | None:
    """Return the folder of the installed wheel, whether it fits or not."""
    found = importlib.util.find_spec(PACKAGE)
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


def fits(root: Path) -> bool:
    """Return whether the kernels of a wheel were compiled from the sources of this dsv4."""
    record = root / SOURCES
    return record.is_file() and record.read_text().strip() == source_hash()


@cache
def folder(arch: str) -> Path | None:
    """Return the folder of the installed wheel for an architecture; None without a wheel that fits."""
    root = installed() if settings.cubins else None
    if root is None or not (root / arch).is_dir():
        return None
    if not fits(root):
        warnings.warn(
            f"{root}: its kernels were compiled from other sources than those of this dsv4; Triton compiles them "
            "instead. Install the dsv4-cubins of this version, or set DSV4_CUBINS=0",
            stacklevel=2,
        )
        return None
    return root / arch


@cache
def compiler_of(directory: Path) -> tuple[int, int] | None:
    """Return the Triton that compiled the kernels of a directory, by one of its records; None for an empty one."""
    for path in directory.glob("*.json"):
        major, minor = json.loads(path.read_text())["triton"].split(".")[:2]
        return int(major), int(minor)
    return None
