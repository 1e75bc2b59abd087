"""Which ptxas makes the machine code of a Hopper kernel that Triton compiles.

Triton 3.9 assembles sm_90a with ptxas 13.4, which spills where ptxas 12 does not: the V4 kernel that gathers FP8 rows
has 353 loads and stores of local memory, with 12.9 it has 154. ptxas 12.9 is in the same wheel, for GPUs before
Hopper. So the kernel is assembled again, from the PTX that Triton made. Triton 3.6 to 3.8 use ptxas 12 for Hopper
anyway. Only the code of this package is concerned, and nothing of Triton is changed.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.nvidia import compiler
from triton.runtime.cache import get_cache_manager

HOPPER = 90
ACCEPTED = "8.8"  # version of PTX that ptxas 12.9 knows
OPTIONS = ("-lineinfo", "--regAllocOptLevel=2", "--gpu-name=sm_90a")  # Triton's own


def cubin_of(compiled: Any) -> bytes:
    """Return the machine code of a compiled kernel, from the better assembler if there is one."""
    theirs, ptx = compiled.asm["cubin"], compiled.asm.get("ptx")  # None: Triton keeps machine code only
    target, older = compiled.metadata.target, knobs.nvidia.ptxas
    if ptx is None or target.backend != "cuda" or target.arch != HOPPER:
        return theirs
    if _major(compiler.get_ptxas(HOPPER)) < 13 or _major(older) >= 13:
        return theirs
    ptx = re.sub(r"^\.version .*", f".version {ACCEPTED}", ptx, count=1, flags=re.MULTILINE)
    return _assembled(ptx, older) or theirs


def _major(ptxas: Any) -> int:
    return int(ptxas.version.split(".")[0])


def _assembled(ptx: str, ptxas: Any) -> bytes | None:
    """Return the machine code, kept in Triton's cache; None if this ptxas rejects the PTX."""
    options = (*OPTIONS, *["-suppress-debug-info"] * knobs.compilation.disable_line_info)
    key = f"{ptxas.version} {options}\n{ptx}"
    kept = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    found = kept.get_file("kernel.cubin")
    if found is None:
        with tempfile.TemporaryDirectory() as folder:
            source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
            source.write_text(ptx)
            command = [ptxas.path, *options, str(source), "-o", str(cubin)]
            if subprocess.run(command, capture_output=True).returncode:
                return None
            found = kept.put(cubin.read_bytes(), "kernel.cubin", binary=True)
    return Path(found).read_bytes()
