"""Reads the machine code of a kernel as text, from ptxas and nvdisasm of Triton's wheel.

Every instruction has the PTX line it came from (nvdisasm -gp). This module executes nothing: the model needs the
instructions' number, order, pipes, and what ptxas tells the scheduler about them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from softsm.errors import SoftsmError

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[0-9T]+)\s+)?([A-Z][A-Za-z0-9_.]*)\s*(.*?);")
_CODE = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")
_LINE = re.compile(r'//## File ".nv_debug_ptx_txt", line (\d+)')
_OLDER = re.compile(r"Unsupported \.version .*current version is '([\d.]+)'")
_PTX_VERSION = re.compile(r"^(\s*\.version\s+)[\d.]+", re.M)
_LABEL = re.compile(r"^(\.L_[A-Za-z0-9_]+|[A-Za-z_$][\w$.]*):")
WARPGROUP_PRODUCTS = ("HGMMA", "QGMMA", "IGMMA")
NONE = 7  # no scoreboard
ENDS = ("BRA", "BRX", "EXIT", "RET", "CALL", "BREAK", "JMP")


class ToolError(SoftsmError):
    """Raised when ptxas or nvdisasm of Triton's wheel fails."""


@dataclass(slots=True)
class Sass:
    index: int
    opcode: str
    text: str
    line: int  # line of the PTX; 0 if unknown
    guarded: bool
    stall: int = 1  # cycles until the warp may issue the next one
    sets: int = NONE  # the scoreboard that is set until the result is ready
    holds: int = NONE  # the one that is set until the operands have been read
    waits: int = 0  # the scoreboards that must be released, as bits
    block: int = 0


@dataclass
class Code:
    instructions: list[Sass]
    blocks: list[range]  # basic blocks, in order of their addresses
    registers: int
    spills: int  # bytes stored
    labels: dict[str, int] = field(default_factory=dict)
    costs: dict = field(default_factory=dict)  # by name of a GPU: costs.py
    lowering: Any = None  # lower.py

    @functools.cached_property
    def places(self) -> dict[str, list[int]]:
        """Instructions by opcode."""
        found: dict[str, list[int]] = {}
        for i, ins in enumerate(self.instructions):
            found.setdefault(ins.opcode, []).append(i)
        return found

    @functools.cached_property
    def loads(self) -> dict[int, tuple[int, int]]:
        """PTX lines with loads of global memory -> block and number of the first machine instruction of each."""
        found: dict[int, tuple[int, int]] = {}
        for i, ins in enumerate(self.instructions):
            if ins.opcode.startswith(("LDG.", "LD.")):
                found.setdefault(ins.line, (ins.block, i))
        return found


def _wheel() -> tuple[Any, Any]:
    """Returns Triton and its compiler for NVIDIA GPUs."""
    try:
        import triton
        from triton.backends.nvidia import compiler
    except ImportError as missing:
        why = "softsm time needs Triton's wheel, which holds ptxas and nvdisasm: pip install triton"
        raise ToolError(why) from missing
    return triton, compiler


def tool(name: str, arch: str) -> str:
    """Returns the path of ptxas (the one that Triton uses for this target) or nvdisasm."""
    triton, compiler = _wheel()
    if name == "ptxas":
        number = int(re.search(r"\d+", arch)[0])  # type: ignore[index]
        return str(compiler.get_ptxas(number).path)
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _version() -> str:
    return _wheel()[0].__version__


def assembled(ptx: str, arch: str) -> tuple[bytes, str]:
    """Returns (the cubin, ptxas's report)."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "k.ptx", Path(folder) / "k.cubin"
        source.write_text(ptx)
        newer = tuple(map(int, _version().split(".")[:2])) >= (3, 9)
        options = ["--regAllocOptLevel=2"] if newer else []
        command = [
            tool("ptxas", arch),
            "-lineinfo",
            "-v",
            *options,
            f"--gpu-name={arch}",
            str(source),
            "-o",
            str(cubin),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if older := _OLDER.search(done.stderr):  # clang names a newer version, whether the code needs it or not
            source.write_text(_PTX_VERSION.sub(rf"\g<1>{older[1]}", ptx, count=1))
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ToolError(f"ptxas: {done.stderr.strip()[:500]}")
        return cubin.read_bytes(), done.stderr


_ENTRY = re.compile(r"^[ \t]*(?:\.(?:visible|weak)\s+)?\.entry\s+([\w$.]+)")


@functools.lru_cache(maxsize=64)
def alone(ptx: str, name: str) -> str:
    """Returns the PTX with empty lines for all kernels but one: the machine code of a module is read as one kernel."""
    if ptx.count(".entry") < 2:
        return ptx
    out, other, depth, opened = [], False, 0, False
    for line in ptx.split("\n"):
        if not other and (found := _ENTRY.match(line)) and found[1] != name:
            other, depth, opened = True, 0, False
        out.append("" if other else line)
        if other:
            code = line.partition("//")[0]
            depth += code.count("{") - code.count("}")
            opened |= "{" in code
            other = depth > 0 or not opened
    return "\n".join(out)


@functools.lru_cache(maxsize=128)
def disassemble(ptx: str, arch: str) -> tuple[str, str]:
    """Returns (nvdisasm's text, ptxas's report), cached on disk by the hash of PTX, target and Triton's version."""
    from softsm.engine.cache import cache_folder

    key = hashlib.sha256(f"{_version()} {arch} -hex\n{ptx}".encode()).hexdigest()[:24]
    kept = cache_folder() / "sass" / f"{key}.json"
    if kept.exists():
        return tuple(json.loads(kept.read_text()))  # type: ignore[return-value]
    code, report = assembled(ptx, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(code)
        cubin.flush()
        # nvdisasm's dataflow analysis, a third of its time, only adds the targets of table branches.
        analysed = [] if "brx" in ptx else ["-ndf"]
        command = [tool("nvdisasm", arch), "-c", "-gp", "-hex", *analysed, cubin.name]
        text = subprocess.run(command, capture_output=True, text=True)
        if text.returncode:
            raise ToolError(f"nvdisasm: {text.stderr.strip()[:500]}")
    kept.parent.mkdir(parents=True, exist_ok=True)
    scratch = kept.with_suffix(".tmp")
    scratch.write_text(json.dumps([text.stdout, report]))
    scratch.replace(kept)
    return text.stdout, report


def control(code: int) -> tuple[int, int, int, int]:
    """Returns (stall, sets, holds, waits), which ptxas encodes in an instruction's upper half for the scheduler. The
    encoding is undocumented and the same from Volta to Blackwell (arXiv 1804.06826, 2503.20481)."""
    return code >> 41 & 15, code >> 46 & 7, code >> 49 & 7, code >> 52 & 63


def read(text: str, report: str) -> Code:
    instructions: list[Sass] = []
    labels: dict[str, int] = {}
    line = 0
    leaders = {0}
    upper = False  # the next row has the upper half of an instruction
    for row in text.splitlines():
        if found := _LINE.search(row):
            line = int(found[1])
        elif upper and (found := _CODE.search(row)):
            ins = instructions[-1]
            ins.stall, ins.sets, ins.holds, ins.waits = control(int(found[1], 16))
            upper = False
        elif found := _LABEL.match(row):
            labels[found[1]] = len(instructions)
            leaders.add(len(instructions))
        elif found := _INSTRUCTION.match(row):
            _, guard, opcode, operands = found.groups()
            instructions.append(Sass(len(instructions), opcode, operands.strip(), line, bool(guard)))
            if opcode.split(".")[0] in ENDS:
                leaders.add(len(instructions))
            upper = _CODE.search(row) is not None
    while instructions and _is_padding(instructions[-1], labels):
        instructions.pop()
    edges = sorted(x for x in leaders if x < len(instructions))
    blocks = [range(a, b) for a, b in zip(edges, [*edges[1:], len(instructions)])]
    for number, block in enumerate(blocks):
        for i in block:
            instructions[i].block = number
    used = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores", report)
    return Code(instructions, blocks, int(used[1]) if used else 255, int(spilled[1]) if spilled else 0, labels)


def _is_padding(ins: Sass, labels: dict[str, int]) -> bool:
    """Behind the code stand a jump to itself and nothing. The code's own last jump may lead back to a loop."""
    to_itself = any(labels.get(name) == ins.index for name in re.findall(r"\.L_\w+", ins.text))
    return ins.opcode == "NOP" or (ins.opcode == "BRA" and to_itself)


@functools.lru_cache(maxsize=64)
def code_of(ptx: str, arch: str) -> Code:
    return read(*disassemble(ptx, arch))
