"""What a compiled kernel costs, by the assembler's own account: registers, spills, and where the spills are.

The tools are those of the Triton wheel: ptxas with ``-v`` for the totals, cuobjdump for the SASS. Their output is kept
in Triton's cache, by the PTX: `dsv4 kernels` assembles what has changed since it last ran. A spill is a store to or
load from local memory (STL, LDL). It lies in a main loop when a backward branch encloses both it and a tensor-core,
tensor-memory-load or exponential instruction.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORK = re.compile(r"\b(UTC[A-Z]*MMA|LDTM|STTM|MUFU\.EX2|UTMALDG|LDGSTS)\b")
SPILL = re.compile(r"\b(STL|LDL)\b")
BRANCH = re.compile(r"\bBRA\b.*?0x([0-9a-f]+)")
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")


@dataclass(frozen=True)
class Figures:
    """The figures of a kernel. registers: at launch; setmaxnreg: those that the PTX requests for partitions."""

    registers: int
    setmaxnreg: tuple[int, ...]
    threads: int
    shared: int  # bytes
    tensor_memory: int  # columns
    stack: int  # bytes
    spill_stores: int  # bytes
    spill_loads: int  # bytes
    loop_spills: int  # instructions that spill inside a main loop
    instructions: int


def tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def assembled(ptx: str, arch: str) -> tuple[str, str]:
    """Return (what ptxas reports, the SASS)."""
    import triton
    from triton.runtime.cache import get_cache_manager

    options = ["-v", "--regAllocOptLevel=2", f"--gpu-name={arch}"]
    kept = get_cache_manager(hashlib.sha256(f"{triton.__version__} {options}\n{ptx}".encode()).hexdigest())
    found = kept.get_file("figures.json")
    if found is not None:
        said, sass = json.loads(Path(found).read_text())
        return said, sass
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        source.write_text(ptx)
        command = [tool("ptxas-blackwell"), *options, str(source), "-o", str(cubin)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [tool("cuobjdump"), "-sass", str(cubin)]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kept.put(json.dumps([said, sass]), "figures.json", binary=False)
    return said, sass


def figures(compiled: Any, arch: str) -> Figures:
    """Return the figures of a kernel that `triton.compile` made for ``arch`` (sm_100a, sm_90a)."""
    ptx = compiled.asm["ptx"]
    said, sass = assembled(ptx, arch)
    lines = instructions(sass)
    return Figures(
        registers=_number(r"Used (\d+) registers", said),
        setmaxnreg=tuple(sorted({int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)})),
        threads=compiled.metadata.num_warps * 32,
        shared=compiled.metadata.shared,
        tensor_memory=compiled.metadata.tmem_size or 0,
        stack=_number(r"(\d+) bytes stack frame", said),
        spill_stores=_number(r"(\d+) bytes spill stores", said),
        spill_loads=_number(r"(\d+) bytes spill loads", said),
        loop_spills=len(loop_spills(lines)),
        instructions=len(lines),
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def instructions(sass: str) -> list[tuple[int, str]]:
    """Return (address, text) of every instruction of the first function in cuobjdump's output."""
    return [(int(m[1], 16), m[2].strip()) for m in LINE.finditer(sass)]


def loop_spills(lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the spills inside main loops. Those are the innermost loops that hold work: one around all of a warp's
    code (a worker waits for its next partition) is none."""
    loops = []
    for address, text in lines:
        branch = BRANCH.search(text)
        if branch and int(branch[1], 16) <= address:
            loops.append((int(branch[1], 16), address))
    work = [address for address, text in lines if WORK.search(text)]
    main = [loop for loop in loops if any(loop[0] <= a <= loop[1] for a in work)]
    main = [a for a in main if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in main)]
    return [
        (address, text)
        for address, text in lines
        if SPILL.search(text) and any(begin <= address <= end for begin, end in main)
    ]
