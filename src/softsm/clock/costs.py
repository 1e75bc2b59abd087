"""What each machine instruction costs: its pipe, how long it holds the pipe, when its result is there.

An interval is in cycles of one scheduler per warp instruction: 1 is a full pipe of 32 lanes, 8 one of four lanes. The
numbers come from clock/parameters.py, by the name of the pipe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from softsm.clock import replay
from softsm.clock.parameters import Gpu
from softsm.clock.sass import WARPGROUP_PRODUCTS, Code

# Pipes of a scheduler. Opcodes are matched by their longest prefix.
PIPES = ("control", "fma", "alu", "imad", "mufu", "half", "uniform", "memory", "convert", "hmma", "fp64", "pack")
_TABLE = {
    "fma": "FFMA FADD FMUL FFMA2 FADD2 FMUL2",
    "imad": "IMAD IDP",
    "alu": "FMNMX FSEL FSET FSETP FSWZADD IADD3 IADD ISETP LEA LOP3 LOP PLOP3 SEL SHF PRMT SGXT VIADD VIADDMNMX VIMNMX "
    "IMNMX "
    "VABSDIFF IABS BMSK MOV P2R R2P I2FP LOP32 FMNMX3 VIMNMX3 VOTE VOTEU CS2R FCHK",
    "mufu": "MUFU",
    "half": "HADD2 HMUL2 HFMA2 HMNMX2 HSET2 HSETP2",
    "uniform": "U R2UR S2UR REDUX",
    "memory": "LD ST SHFL ATOM RED LDGSTS LDSM STSM SYNCS ARRIVES CCTL LDTM STTM S2R MATCH BMOV QSPC",
    "convert": "F2F F2I I2F FRND POPC FLO BREV I2I F2I.FTZ I2F.RP",
    "pack": "F2FP",
    "hmma": "HMMA IMMA QMMA OMMA",
    "fp64": "D",
}
_PREFIXES = sorted(((op, pipe) for pipe, ops in _TABLE.items() for op in ops.split()), key=lambda x: -len(x[0]))
_CONTROL = (
    "BRA",
    "BRX",
    "EXIT",
    "RET",
    "CALL",
    "BSSY",
    "BSYNC",
    "NOP",
    "WARPSYNC",
    "WARPGROUP",
    "BAR",
    "DEPBAR",
    "LDGDEPBAR",
    "MEMBAR",
    "FENCE",
    "ERRBAR",
    "NANOSLEEP",
    "USETMAXREG",
    "UTMA",
    "UTC",
    "UBLK",
    "UCGABAR",
    *WARPGROUP_PRODUCTS,
    "LDC",
    "ULDC",
    "ELECT",
    "PREEXIT",
    "ACQBULK",
    "YIELD",
    "BREAK",
    "UMEMSETS",
    "LDCU",
)


def pipe_of(opcode: str) -> str:
    if opcode.startswith(_CONTROL):
        return "control"
    for prefix, pipe in _PREFIXES:
        if opcode.startswith(prefix) and (prefix not in ("U", "D") or opcode[1:2].isupper()):
            return pipe
    return "control"


@dataclass
class Costs:
    """Arrays over the machine instructions of a kernel; one more entry for events that have none."""

    kind: np.ndarray
    pipe: np.ndarray
    interval: np.ndarray
    latency: np.ndarray
    read_at: np.ndarray
    read_of: np.ndarray
    write_at: np.ndarray
    write_of: np.ndarray
    units: np.ndarray
    extra: np.ndarray
    port: np.ndarray  # shared-memory cycles of a product
    tensor: np.ndarray
    heavy: np.ndarray  # of the pipes that a product under way is slowed down by


def product(opcode: str, text: str) -> tuple[float, float]:
    """(cycles of the tensor core, cycles of the shared-memory port) of one HGMMA."""
    shape = re.search(r"64x(\d+)x(\d+)", opcode)
    n = int(shape[1]) if shape else 64
    in_registers = not text.split(",")[1].strip().startswith("gdesc")
    return n / 2, (32 * n + (0 if in_registers else 2048)) / 128


def latency_of(opcode: str, gpu: Gpu, pipe: str) -> float:
    for prefix, name in (
        ("MUFU", "latency.mufu"),
        ("SHFL", "latency.shfl"),
        ("LDS", "latency.lds"),
        ("LDSM", "latency.lds"),
        ("S2R", "latency.s2r"),
        ("S2UR", "latency.s2r"),
        ("R2UR", "latency.r2ur"),
        ("LDC", "latency.ldc"),
        ("ULDC", "latency.ldc"),
        ("LDL", "load.l1"),
        ("ATOMS", "latency.atoms"),
        ("HMMA", "latency.hmma"),
        ("VOTE", "latency.vote"),
        ("REDUX", "latency.redux"),
        ("F2FP", "latency.pack"),
    ):
        if opcode.startswith(prefix):
            return gpu[name]
    if pipe == "uniform":
        return gpu["latency.uniform"]
    if pipe == "convert":
        return gpu["latency.convert"]
    return gpu["latency.alu"]


def costs_of(code: Code, gpu: Gpu, access: dict, l1: float = 1.0) -> Costs:
    """l1: share of the sectors asked for again that are found in L1."""
    n = len(code.instructions) + 1
    kind, pipe = np.zeros(n, np.int64), np.zeros(n, np.int64)
    interval, latency = np.ones(n), np.full(n, 4.0)
    units, extra, port, tensor = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n, np.int64)
    heavy = np.zeros(n)
    read_at, write_at = [0], [0]
    read_of: list[int] = []
    write_of: list[int] = []
    shared_line: dict[int, int] = {}
    for ins in code.instructions:  # several machine instructions may share what a PTX line does
        if ins.opcode.startswith(("LDS", "STS", "LDG", "STG", "LD.", "ST.", "ATOM", "RED")):
            shared_line[ins.line] = shared_line.get(ins.line, 0) + 1
    for i, ins in enumerate(code.instructions):
        name = pipe_of(ins.opcode)
        pipe[i] = PIPES.index(name)
        interval[i] = gpu[f"interval.{name}"]
        latency[i] = latency_of(ins.opcode, gpu, name)
        op = ins.opcode
        if op.startswith(("FFMA2", "FADD2", "FMUL2")):
            interval[i] = gpu["interval.fma2"]
        heavy[i] = float(name in ("fma", "imad"))
        if op.startswith(WARPGROUP_PRODUCTS):
            kind[i] = replay.PRODUCT
            units[i], port[i] = product(op, ins.text)
            extra[i] = float("gsb0" in ins.text)
            interval[i] = gpu["product.issue"]
        elif op.startswith("WARPGROUP.DEPBAR"):
            kind[i] = replay.PRODUCT_WAIT
            extra[i] = int(ins.text.split(",")[-1].strip(), 0)
        elif op.startswith(("LDS", "STS", "LDSM", "STSM", "ATOMS")):
            kind[i] = replay.SHARED
            found = access.get(ins.line)
            width = 4 if ".128" in op else 2 if ".64" in op else 1
            if op.startswith(("LDSM", "STSM")):
                width = int(op[-1]) if op[-1] in "24" else 1
            # What the addresses say, shared out over the machine instructions of the line; at least the bytes.
            known = found.units / found.looks / max(1, min(shared_line[ins.line], 8)) if found and found.looks else 0
            units[i] = max(known if found and found.space == "shared" else 0, width)
            latency[i] = gpu["latency.lds"]
        elif op.startswith(("LDG", "LD.", "ATOMG", "ATOM.")) and not op.startswith(("LDGSTS", "LDGDEPBAR")):
            kind[i] = replay.READ
            found = access.get(ins.line)
            width = 16 if ".128" in op else 8 if ".64" in op else 4
            units[i] = 32 * width
            if found and found.looks:
                fetched = found.missed + (1 - l1) * (found.units - found.missed)
                units[i] = 32 * fetched / found.looks / max(1, shared_line[ins.line])
            if found and found.tensors:
                tensor[i] = max(found.tensors, key=found.tensors.get)
        elif op.startswith(("STG", "ST.", "RED")):
            kind[i] = replay.WRITE
            found = access.get(ins.line)
            width = 16 if ".128" in op else 8 if ".64" in op else 4
            units[i] = (
                32 * found.units / found.looks / max(1, shared_line[ins.line]) if found and found.looks else 32 * width
            )
        elif op.startswith(("LDTM", "STTM")):
            kind[i] = replay.TENSOR_READ if op.startswith("LDTM") else replay.TENSOR_WRITE
            found_n = re.search(r"\.x(\d+)", op)
            units[i] = 128 * (int(found_n[1]) if found_n else 1)
        elif op.startswith(("BRA", "BRX")) and not ins.guarded:
            kind[i] = replay.TAKEN
        elif op.startswith("MEMBAR"):
            interval[i] = gpu["membar"]
            kind[i] = replay.TAKEN
        elif op.startswith("HMMA"):
            interval[i] = gpu["interval.hmma"] * (0.5 if "1688" in op and "16816" not in op else 1)
        read_of += ins.reads
        write_of += ins.writes
        read_at.append(len(read_of))
        write_at.append(len(write_of))
    read_at.append(len(read_of))
    write_at.append(len(write_of))
    return Costs(
        kind,
        pipe,
        interval,
        latency,
        np.array(read_at),
        np.array(read_of or [0]),
        np.array(write_at),
        np.array(write_of or [0]),
        units,
        extra,
        port,
        tensor,
        heavy,
    )
