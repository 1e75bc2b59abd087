"""The machine code of a kernel: ptxas and nvdisasm of Triton's wheel, read as text.

Every instruction knows the PTX line it came from (nvdisasm -gp). Nothing is executed here: instructions are counted,
their registers and their order are what the model needs.
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

from softsm.errors import SoftsmError

# One number for every register a warp can wait for: R0.., UR0.., P0.., UP0..
UNIFORM, PREDICATE, UNIFORM_PREDICATE, REGISTERS = 256, 320, 328, 336

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[0-9T]+)\s+)?([A-Z][A-Za-z0-9_.]*)\s*(.*?);")
_LINE = re.compile(r'//## File ".nv_debug_ptx_txt", line (\d+)')
_LABEL = re.compile(r"^(\.L_[A-Za-z0-9_]+|[A-Za-z_$][\w$.]*):")
_REGISTER = re.compile(r"\b(UR|R|UP|P)(\d+)(\.64)?\b")
_BASE = {"R": 0, "UR": UNIFORM, "P": PREDICATE, "UP": UNIFORM_PREDICATE}
_NO_RESULT = (
    "ST",
    "RED",
    "SYNCS.ARRIVE",
    "UTMA",
    "BAR",
    "BRA",
    "BRX",
    "EXIT",
    "NOP",
    "WARP",
    "DEPBAR",
    "LDGDEPBAR",
    "MEMBAR",
    "FENCE",
    "LDGSTS",
    "ARRIVES",
    "UTC",
    "CCTL",
    "ERRBAR",
    "BSYNC",
    "UBLK",
    "USETMAXREG",
    "NANOSLEEP",
    "UCGABAR",
    "R2P",
)
WARPGROUP_PRODUCTS = ("HGMMA", "QGMMA", "IGMMA")
ENDS = ("BRA", "BRX", "EXIT", "RET", "CALL", "BREAK", "JMP")


class ToolError(SoftsmError):
    """ptxas or nvdisasm of Triton's wheel did not do its part."""


@dataclass(slots=True)
class Sass:
    index: int
    opcode: str
    text: str
    line: int  # of the PTX; 0 if unknown
    guarded: bool
    writes: tuple[int, ...]
    reads: tuple[int, ...]
    block: int = 0


@dataclass
class Code:
    instructions: list[Sass]
    blocks: list[range]  # basic blocks, in order of their addresses
    registers: int
    spills: int  # bytes stored
    labels: dict[str, int] = field(default_factory=dict)


def tool(name: str, arch: str) -> str:
    """The path of ptxas (the one Triton takes for this target) or nvdisasm."""
    try:
        import triton
        from triton.backends.nvidia import compiler
    except ImportError as missing:
        raise ToolError("softsm time needs Triton's wheel, which holds ptxas and nvdisasm") from missing
    if name == "ptxas":
        number = int(re.search(r"\d+", arch)[0])  # type: ignore[index]
        return str(compiler.get_ptxas(number).path)
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _version() -> str:
    import triton

    return triton.__version__


@functools.lru_cache(maxsize=128)
def disassemble(ptx: str, arch: str) -> tuple[str, str]:
    """(nvdisasm's text, ptxas's report); kept on disk by the hash of the PTX, the target and Triton's version."""
    from softsm.engine.build import cache_folder

    key = hashlib.sha256(f"{_version()} {arch}\n{ptx}".encode()).hexdigest()[:24]
    kept = cache_folder() / "sass" / f"{key}.json"
    if kept.exists():
        return tuple(json.loads(kept.read_text()))  # type: ignore[return-value]
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "k.ptx", Path(folder) / "k.cubin"
        source.write_text(ptx)
        options = ["--regAllocOptLevel=2"] if _version() >= "3.9" else []
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
        if done.returncode:
            raise ToolError(f"ptxas: {done.stderr.strip()[:500]}")
        text = subprocess.run([tool("nvdisasm", arch), "-c", "-gp", str(cubin)], capture_output=True, text=True)
        if text.returncode:
            raise ToolError(f"nvdisasm: {text.stderr.strip()[:500]}")
    kept.parent.mkdir(parents=True, exist_ok=True)
    scratch = kept.with_suffix(".tmp")
    scratch.write_text(json.dumps([text.stdout, done.stderr]))
    scratch.replace(kept)
    return text.stdout, done.stderr


def registers_of(opcode: str, operands: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(written, read) as numbers of REGISTERS."""
    parts = _split(operands)
    no_result = opcode.startswith(_NO_RESULT)
    writes: list[int] = []
    reads: list[int] = []
    first = 0
    if not no_result and parts:
        while first < len(parts):
            found = re.fullmatch(r"(UR|R|UP|P)(\d+|Z|T)(\.64)?", parts[first])
            if found is None or (
                first
                and found[1] in ("R", "UR")
                and not (opcode.startswith("LOP3") and first == 1 and parts[0][0] == "P")
            ):
                break
            if found[2].isdigit():
                width = _width(opcode, True) if found[1] in ("R", "UR") else 1
                writes += range(_BASE[found[1]] + int(found[2]), _BASE[found[1]] + int(found[2]) + width)
            first += 1
            if found[1] in ("P", "UP") and opcode.startswith(("SEL", "FSEL", "SHFL")) and first > 1:
                break
    for n, part in enumerate(parts[first:], first):
        for kind, number, wide in _REGISTER.findall(part):
            at = _BASE[kind] + int(number)
            width = 2 if wide else 1
            if kind == "R" and "[" not in part:
                width = _width(opcode, False) if n == len(parts) - 1 or opcode.startswith(WARPGROUP_PRODUCTS) else 1
            if opcode.startswith(WARPGROUP_PRODUCTS) and (kind != "R" or n != 1):
                continue  # descriptors are written long before, the accumulator belongs to the tensor core
            reads += range(at, at + width)
    if opcode.startswith(WARPGROUP_PRODUCTS):
        writes = []
    return tuple(dict.fromkeys(x for x in writes if x < REGISTERS)), tuple(
        dict.fromkeys(x for x in reads if x < REGISTERS)
    )


def _split(operands: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, c in enumerate(operands):
        depth += (c in "[({") - (c in "])}")
        if c == "," and depth == 0:
            parts.append(operands[start:i].strip())
            start = i + 1
    last = operands[start:].strip()
    return [*parts, last] if last else parts


def _width(opcode: str, result: bool) -> int:
    """Registers of a result, or of the data of a store."""
    if opcode.startswith(WARPGROUP_PRODUCTS):
        return 4
    if not result and not opcode.startswith("ST"):
        return 1
    if opcode.startswith(("LDSM", "STSM", "LDTM", "STTM")):
        found = re.search(r"\.x(\d+)", opcode)
        if found:
            return int(found[1])
        return int(opcode[-1]) if opcode[-1] in "24" else 1
    if ".128" in opcode:
        return 4
    if ".64" in opcode or ".WIDE" in opcode or opcode == "CS2R" or opcode.startswith(("D", "UIMAD.WIDE")):
        return 2
    return 1


def read(text: str, report: str) -> Code:
    instructions: list[Sass] = []
    labels: dict[str, int] = {}
    line = 0
    leaders = {0}
    for row in text.splitlines():
        if found := _LINE.search(row):
            line = int(found[1])
        elif found := _LABEL.match(row):
            labels[found[1]] = len(instructions)
            leaders.add(len(instructions))
        elif found := _INSTRUCTION.match(row):
            _, guard, opcode, operands = found.groups()
            writes, reads = registers_of(opcode, operands)
            if guard and guard.strip("!")[-1] != "T":
                kind = "UP" if guard.lstrip("!").startswith("U") else "P"
                reads = (*reads, _BASE[kind] + int(guard.strip("!UP")))
            instructions.append(Sass(len(instructions), opcode, operands.strip(), line, bool(guard), writes, reads))
            if opcode.split(".")[0] in ENDS:
                leaders.add(len(instructions))
    while instructions and instructions[-1].opcode in ("NOP", "BRA"):  # padding behind the code
        instructions.pop()
    edges = sorted(x for x in leaders if x < len(instructions))
    blocks = [range(a, b) for a, b in zip(edges, [*edges[1:], len(instructions)])]
    for number, block in enumerate(blocks):
        for i in block:
            instructions[i].block = number
    used = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores", report)
    return Code(instructions, blocks, int(used[1]) if used else 255, int(spilled[1]) if spilled else 0, labels)


@functools.lru_cache(maxsize=64)
def code_of(ptx: str, arch: str) -> Code:
    return read(*disassemble(ptx, arch))
