"""Triton's key of itself, kept on disk.

Triton hashes its compiler, half a gigabyte, in every process that compiles or looks for a kernel: 2.5 seconds, more
than all of softsm. While softsm is in use the key is made once, and kept under the names, sizes and times of the files
that it is made of.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

PARTS = ("_C", "backends", "compiler", "language", "runtime")


def files_of(package: Path) -> str:
    """Returns a hash that differs when a file of the package does, by name, size and time."""
    found = []
    for part in PARTS:
        for folder, folders, names in os.walk(package / part):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(names):
                stat = os.stat(os.path.join(folder, name))
                found.append(f"{folder}/{name} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def kept(triton_key: Callable[[], str], package: Path) -> Callable[[], str]:
    """Returns the same function with its result kept on disk from the first call on."""

    @functools.cache
    def key() -> str:
        from softsm.engine.cache import cache_folder, write

        path = cache_folder() / "triton_key" / files_of(package)
        try:
            return path.read_text()
        except OSError:
            made = triton_key()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, made.encode())
        except OSError:  # a cache that cannot be written costs time only
            pass
        return made

    return key
