"""The cost of each machine instruction: its pipe, how long it holds the pipe, and its latency.

An interval is in cycles of one scheduler per warp instruction: 1 is a full pipe of 32 lanes, 8 one of four lanes. The
numbers are in parameters.py, by the name of the pipe.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from softsm.timing_model import machine
from softsm.timing_model.parameters import Gpu
from softsm.timing_model.sass import NONE, WARPGROUP_PRODUCTS, Code, Sass

# Pipes of a scheduler, and the kinds of instructions that share the pipe of another kind: ptxas issues FFMA two cycles
# after IMAD or HFMA2, LOP3 two after F2FP, and MUFU eight after F2I. Opcodes are matched by their longest prefix.
PIPES = ("control", "fma", "alu", "mufu", "half", "uniform", "memory", "hmma", "fp64")
SHARING = {"imad": "fma", "half": "fma", "pack": "alu", "convert": "mufu"}
COMPUTES = ("fma", "imad", "alu", "pack", "mufu", "half", "convert")  # they compete with products for register ports
_TABLE = {
    "fma": "FFMA FADD FMUL FFMA2 FADD2 FMUL2",
    "imad": "IMAD IDP VIADD",
    "alu": "FMNMX FSEL FSET FSETP FSWZADD IADD3 IADD ISETP LEA LOP3 LOP PLOP3 SEL SHF PRMT SGXT VIADDMNMX VIMNMX IMNMX "
    "HMNMX2 VHMNMX "
    "VABSDIFF IABS BMSK MOV P2R R2P I2FP LOP32 FMNMX3 VIMNMX3 VOTE VOTEU CS2R FCHK",
    "mufu": "MUFU",
    "half": "HADD2 HMUL2 HFMA2 HSET2 HSETP2",
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


@functools.cache
def pipe_of(opcode: str) -> str:
    if opcode.startswith(_CONTROL):
        return "control"
    for prefix, pipe in _PREFIXES:
        if opcode.startswith(prefix) and (prefix not in ("U", "D") or opcode[1:2].isupper()):
            return pipe
    return "control"


def place_of(opcode: str) -> int:
    """Returns the number of the pipe that an instruction occupies."""
    kind = pipe_of(opcode)
    return PIPES.index(kind if opcode.startswith("HFMA2.MMA") else SHARING.get(kind, kind))


@dataclass
class Costs:
    """One row per machine instruction of a kernel, and one for events without an instruction. Columns: machine.py."""

    ints: np.ndarray
    values: np.ndarray
    accesses: list[tuple[int, int, int]]  # loads and stores: instruction, PTX line, bytes per lane
    products: bool  # whether the tensor core runs asynchronously to the warps


def product(opcode: str, text: str) -> tuple[float, float]:
    """Returns (cycles of the tensor core, cycles of the shared-memory port) of one HGMMA."""
    shape = re.search(r"64x(\d+)x(\d+)", opcode)
    n = int(shape[1]) if shape else 64
    in_registers = not text.split(",")[1].strip().startswith("gdesc")
    return n / 2, (32 * n + (0 if in_registers else 2048)) / 128


LATENCIES = (
    ("MUFU", "latency.mufu"),
    ("SHFL", "latency.shfl"),
    ("LDS", "latency.lds"),
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
    ("SYNCS.PHASECHK", "mbarrier.try"),
    ("MEMBAR.ALL.GPU", "membar.gpu"),
    ("MEMBAR.SC.GPU", "membar.gpu"),
    ("MEMBAR.ALL.SYS", "membar.gpu"),
    ("MEMBAR.SC.SYS", "membar.gpu"),
)


GENERIC = {machine.READ: "latency.lds", machine.WRITE: "latency.lds", machine.ATOMIC: "latency.atoms"}


def latency_of(opcode: str, gpu: Gpu, pipe: str) -> float:
    for prefix, name in LATENCIES:
        if opcode.startswith(prefix):
            return gpu[name]
    return gpu[f"latency.{pipe}" if pipe in ("uniform", "convert") else "latency.alu"]


def lane_bytes(op: str) -> int:
    """Returns the bytes that the opcode accesses per lane."""
    if op.startswith(("LDSM", "STSM")):
        return 4 * (int(op[-1]) if op[-1] in "24" else 1)
    if vector := re.search(r"\.F32x(\d)", op):  # atomic operations
        return 4 * int(vector[1])
    return 16 if ".128" in op else 8 if ".64" in op else 4


def _kind(ins: Sass) -> tuple[int, float, float, float]:
    """Returns (kind, units, extra, port) of a machine instruction, as far as its text tells."""
    op = ins.opcode
    if op.startswith(WARPGROUP_PRODUCTS):
        units, port = product(op, ins.text)
        return machine.PRODUCT, units, float("gsb0" in ins.text), port
    if op.startswith("WARPGROUP.DEPBAR"):
        return machine.PRODUCT_WAIT, 0, int(ins.text.split(",")[-1].strip(), 0), 0
    if op.startswith("LDS") and ins.guarded and ins.text == "RZ, [RZ]":
        return machine.PLAIN, 0, 0, 0  # never executed: ptxas puts three before cp.async
    if op.startswith("SHFL"):  # uses the crossbar of shared memory (benchmarks/microbench, crossbar)
        return machine.SHARED, 1, 0, 0
    if op.startswith(("LDS", "STS", "ATOMS")):
        return machine.SHARED, lane_bytes(op) / 4, float(op.startswith("LD")), 0
    if op.startswith(("ATOMG", "ATOM.", "RED")) and not op.startswith("REDUX"):
        return machine.ATOMIC, 32 * lane_bytes(op), 0, 0
    if op.startswith(("LDG.", "LD.")):
        return machine.READ, 32 * lane_bytes(op), 1, 0
    if op.startswith(("STG", "ST.")):
        return machine.WRITE, 32 * lane_bytes(op), 0, 0
    if op.startswith(("LDL", "STL")):
        return machine.READ if op.startswith("LDL") else machine.WRITE, 0, 0, 0
    if op.startswith(("LDTM", "STTM")):
        found = re.search(r"\.x(\d+)", op)
        return machine.TENSOR_READ if op[0] == "L" else machine.TENSOR_WRITE, 128 * int(found[1] if found else 1), 0, 0
    if op.startswith(("BRA", "BRX")) and not ins.guarded:
        return machine.TAKEN, 0, 0, 0
    if op.startswith("MEMBAR"):
        return machine.MEMBAR, 0, 0, 0
    return machine.PLAIN, 0, 0, 0


def _interval(op: str, pipe: str, gpu: Gpu) -> float:
    if op.startswith(("FFMA2", "FADD2", "FMUL2")):
        return gpu["interval.fma2"]
    if op.startswith(WARPGROUP_PRODUCTS):
        return gpu["product.issue"]
    if op.startswith("MEMBAR"):
        return gpu["membar"]
    if op.startswith(("STS", "STG")) and lane_bytes(op) > 4:
        return gpu["interval.store.128" if lane_bytes(op) == 16 else "interval.store.64"]
    if op.startswith(("IMAD.HI", "IMAD.WIDE")):
        return 2 * gpu["interval.imad"]
    if op.startswith("HMMA") and "1688" in op and "16816" not in op:
        return gpu["interval.hmma"] / 2
    return gpu[f"interval.{pipe}"]


def _beside(op: str, pipe: str, gpu: Gpu) -> float:
    if not gpu.arch.startswith("sm_90"):  # accumulators are not in registers
        return 1.0
    key = "beside.logic" if op.startswith(("LOP3", "SHF", "PRMT")) else f"beside.{pipe}"
    return gpu[key] if key in gpu.values else 1.0


def fixed_costs(code: Code, gpu: Gpu) -> Costs:
    """Returns the costs that do not depend on a run."""
    r = machine
    n = len(code.instructions) + 1
    ints, values = np.zeros((n, 8), np.int64), np.zeros((n, 8))
    ints[-1, [r.STALL, r.SETS, r.HOLDS]] = 1, NONE, NONE
    values[-1, [r.INTERVAL, r.LATENCY, r.BESIDE]] = 1, 4, 1
    accesses = []
    for i, ins in enumerate(code.instructions):
        op, name = ins.opcode, pipe_of(ins.opcode)
        kind, units, extra, port = _kind(ins)
        quiet = kind in (r.PLAIN, r.TAKEN)
        ints[i] = kind, place_of(op), max(ins.stall, 1), ins.sets, ins.holds, ins.waits, 0, quiet
        if op.startswith("LDGSTS") and ".BYPASS" not in op:
            units = gpu["copy.l1"]
        narrow = f"product.rs.{round(2 * units)}"
        if kind == r.PRODUCT and port * 4 == 2 * units and narrow in gpu.values:  # A in registers
            units = gpu[narrow]
        values[i] = (_interval(op, name, gpu), latency_of(op, gpu, name), units, extra, _beside(op, name, gpu),
                     name in COMPUTES, port, 0)  # fmt: skip
        if kind == r.READ:
            values[i, r.FIRST] = i
        if kind in (r.SHARED, r.READ, r.WRITE, r.ATOMIC) and not op.startswith(("LDL", "STL", "SHFL")):
            accesses.append((i, ins.line, lane_bytes(op)))
    products = any(ins.opcode.startswith((*WARPGROUP_PRODUCTS, "UTC")) for ins in code.instructions)
    return Costs(ints, values, accesses, products)


def costs_of(code: Code, gpu: Gpu, access: dict, l1: float = 1.0, changing: list[float] | None = None,
             absent: list[float] | None = None, spilled: float = 0.0,
             executed: np.ndarray | None = None) -> Costs:  # fmt: skip
    """Returns the costs for a run. l1: share of the re-requested sectors that hit L1; changing: time of atomic
    operations on each tensor relative to a store; absent: the share of a tensor's words that other CTAs have not
    brought into L1; spilled: the share of local memory that L1 does not hold; executed: how often the sampled warps
    execute each instruction."""
    r = machine
    fixed = code.costs.get(gpu.name)
    if fixed is None:
        fixed = code.costs[gpu.name] = fixed_costs(code, gpu)
    ints, values = fixed.ints.copy(), fixed.values.copy()
    came: Counter[int] = Counter()
    if executed is not None:
        for i, line, _ in fixed.accesses:
            came[line] += int(executed[i])
    loads: dict[int, list[int]] = {}  # loads by PTX line
    for i, line, width in fixed.accesses:
        found = access.get(line)
        if found is None or not found.looks:
            if code.instructions[i].guarded or ints[i, r.KIND] == r.READ:  # the predicate was never true
                ints[i, r.KIND] = r.PLAIN
                values[i, r.LATENCY] = gpu["latency.alu"]
            continue
        kind = ints[i, r.KIND]
        if found.space == "shared" and kind in GENERIC:  # the address is of shared memory
            values[i, [r.UNITS, r.EXTRA, r.LATENCY]] = 1, kind == r.READ, gpu[GENERIC[kind]]
            kind = ints[i, r.KIND] = r.SHARED
        # Machine instructions per PTX instruction: ptxas splits a wide one.
        pieces = max(1, round(found.bytes / found.looks / (32 * width)))
        each = found.looks * pieces
        # In some warps the predicate is false in every lane, or they have left the program before.
        each *= max(1.0, came[line] / (found.ran * pieces))
        if kind == r.SHARED:
            if found.space == "shared":
                values[i, r.UNITS] = max(found.units / each, values[i, r.UNITS])
        elif kind == r.READ:
            copies = loads.setdefault(line, [])
            copies.append(i)
            values[i, r.FIRST] = copies[(len(copies) - 1) % pieces]
            fetched, often = (
                a + (1 - l1) * b for a, b in ((found.missed, found.distant), (found.missing, found.again))
            )
            often = min(often, found.looks)  # the others hit L1 entirely
            if found.missing > found.again:
                values[i, r.LATER] = found.later / found.missing
            values[i, r.UNITS] = 32 * fetched / max(often, 1e-9) * found.looks / each
            values[i, r.EXTRA] = often / found.looks
            values[i, r.LSU_CYCLES] = found.wavefronts / each
            if found.tensors:
                tensor = ints[i, r.TENSOR] = max(found.tensors, key=found.tensors.get)
                values[i, r.UNITS] *= absent[tensor] if absent and 0 <= tensor < len(absent) else 1.0
        else:
            values[i, r.UNITS], values[i, r.LSU_CYCLES] = 32 * found.units / each, found.lines / each
            if kind == r.WRITE:
                part = gpu["hbm.write"] / gpu["l2.parts"]
                values[i, r.UNITS] = found.sent(part) / each
                values[i, r.EXTRA] = found.bytes < part * found.lines
            if kind == r.ATOMIC and found.tensors:
                tensor = max(found.tensors, key=found.tensors.get)
                values[i, r.UNITS] *= changing[tensor] if changing and 0 <= tensor < len(changing) else 1.0
    for i, ins in enumerate(code.instructions if code.spills else ()):
        if ins.opcode.startswith("LDL") and spilled:
            values[i, r.UNITS], values[i, r.EXTRA], ints[i, r.TENSOR] = 32 * lane_bytes(ins.opcode), spilled, -1
        elif ins.opcode.startswith("STL"):  # L1 writes all of them through to L2
            values[i, r.UNITS] = 32 * lane_bytes(ins.opcode)
    return Costs(ints, values, fixed.accesses, fixed.products)
