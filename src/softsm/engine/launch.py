"""Loads a kernel from PTX and launches it on arrays.

    kernel = softsm.load(ptx_text)
    kernel.launch(grid=(4,), block=(128,), args=[x, y, n], shared=0)

Arguments are NumPy arrays or torch CPU tensors (passed as pointers, their whole storage becomes accessible), ints,
floats, raw bytes (one parameter each), tensor maps (`softsm.tensor_map`), or anything with `data_ptr()`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import math
import struct
import sys
from dataclasses import replace

import numpy as np

from softsm import accepted
from softsm.engine import processes, tensor_waits
from softsm.engine import program as pg
from softsm.engine.assemble import Assembler, load_chapters, micro_numbers
from softsm.engine.options import Options, current_options
from softsm.engine.scheduler import Machine
from softsm.engine.special_registers import special_value
from softsm.engine.warps import Cta
from softsm.errors import Fault, PtxError
from softsm.memory import multicast
from softsm.memory.global_memory import PARAMETERS, GlobalMemory
from softsm.memory.map_argument import TensorMapArgument
from softsm.ptx.ast import Function, Instruction, Module, Symbol, referenced
from softsm.ptx.declarations import TYPE_BYTES

SM_SHARED = 233_472  # bytes of shared memory of an SM of sm_90 and sm_100
CTA_SHARED = 232_448  # the most of it for one CTA
SM_THREADS = 2048
SM_CTAS = 32
SPARE_BYTES = 1 << 20  # bytes of register files that a kernel keeps between launches
BLOCK_SIDES, CLUSTER_SIDES, CLUSTER_CTAS = (1024, 1024, 64), (16, 16, 16), 16
# Options of one launch.
CHANGES = tuple("arch order seed sms budget patience processes dependent follows workspace".split())


def ctas_per_sm(threads: int, shared: int, tmem_columns: int) -> int:
    """Returns how many CTAs a multiprocessor holds. shared: bytes, with those that the system reserves in each CTA."""
    limits = [SM_CTAS, SM_THREADS // max(threads, 1), SM_SHARED // max(shared, 1)]
    return max(1, min(*limits, 512 // tmem_columns if tmem_columns else SM_CTAS))


@contextlib.contextmanager
def no_garbage():
    """Disables garbage collection. A launch leaves no reference cycles, but creates hundreds of thousands of objects,
    and each full collection would traverse everything that torch and Triton have loaded."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@functools.lru_cache(maxsize=256)
def load(ptx: str, name: str | None = None) -> Kernel:
    """Parses PTX and decodes the kernel called `name`, or the only one. Raises PtxError for anything unsupported."""
    from softsm.ptx import parse

    module = parse(ptx)
    entries = [f for f in module.functions.values() if f.entry]
    if name is not None:
        entries = [f for f in entries if f.name == name]
    if len(entries) != 1:
        known = ", ".join(f.name for f in module.functions.values() if f.entry) or "none"
        raise PtxError(f"name: got {name!r}, the module has these entries: {known}")
    return Kernel(module, entries[0], any(x.races for x in current_options().sessions))  # it is launched there next


def one_memory(memories: list) -> GlobalMemory:
    """Returns the first GPU's memory, with the allocations of the others: GPUs can access each other's memory."""
    for given in memories:
        if given is not None and not isinstance(given, GlobalMemory):
            accepted.refuse("memory", given, "None and a GlobalMemory")
    memory = memories[0] or GlobalMemory()
    for other in memories[1:]:
        for a in other.allocations if other is not None else ():
            memory.add(a.start, a.size, a.name, a)
    multicast.add_members(memory)
    return memory


def run(machine: Machine, kernels: list[Kernel]) -> None:
    """Runs a launch to its end. Its observer learns how it ends."""
    observer = machine.observer
    with no_garbage():  # no collection until the launch's objects are freed
        try:
            machine.run()
        except BaseException as failure:
            if observer is not None:
                observer.ended(failure)
            raise
        else:
            if observer is not None:
                observer.ended(None)
            machine.global_memory.check_copies()
        finally:
            Kernel.executed += machine.steps
            machine.close()
            for x in kernels:
                x.keep_few_files()


class Kernel:
    executed: int = 0  # warp instructions of all launches of this process so far

    def __init__(self, module: Module, function: Function, checking: bool = False):
        from softsm.engine.blocks import Blocks
        from softsm.engine.interpreter import interpreter
        from softsm.engine.mma_chains import Tables
        from softsm.isa import product_chain, tcgen05

        load_chapters()
        self.module, self.function, self.name, self.checking = module, function, function.name, checking
        self.program = Assembler(module, function, micro_numbers(), checking).assemble()
        if checking:
            tensor_waits.mark(self.program)
        calls = ((i, self.program.macros[int(r[2])]) for i, r in enumerate(self.program.code) if r[0] in pg.MACROS)
        self.macro_at = dict(calls)
        products = {i: m.operands for i, m in self.macro_at.items() if m.function is tcgen05.do_mma}
        product_chain.mark(self.program, products)
        if checking:
            self.products = Tables(self.program, products)
        self.interpreter = interpreter(self.program)
        self.blocks = Blocks(self.program, checking)
        self.tmem_columns = max(
            (
                int(m.instruction.operands[1].value)
                for m in self.program.macros
                if m.instruction.name.startswith("tcgen05.alloc") and hasattr(m.instruction.operands[1], "value")
            ),
            default=0,
        )
        self.twin: Kernel | None = None  # see assembled
        self.spare_files: list = []  # register files of warps that have exited
        self.variables: dict[str, np.ndarray] = {}  # .global and .const variables of the module
        self.place_variables()

    # ---- module variables --------------------------------------------------------------------------------------

    def place_variables(self) -> None:
        for v in self.module.variables:
            if v.space in ("global", "const"):
                raw = np.zeros(max(v.size, 1) + v.align, np.uint8)
                start = -raw.ctypes.data % max(v.align, 1)
                self.variables[v.name] = raw[start : start + max(v.size, 1)]
        for v in self.module.variables:
            if v.space in ("global", "const") and v.initial:
                self.variables[v.name][:] = np.frombuffer(self.initial_bytes(v).ljust(v.size, b"\0"), np.uint8)

    def share(self, variables: dict[str, np.ndarray]) -> None:
        """Uses the variables of another kernel of the module."""
        self.variables = variables
        if self.twin is not None:
            self.twin.variables = variables

    def initial_bytes(self, v) -> bytes:
        code = {"f32": "f", "f64": "d"}.get(v.type) or "BHIQ"[TYPE_BYTES[v.type].bit_length() - 1]
        if v.type[0] == "s":
            code = code.lower()
        out = []
        for x in v.initial:
            if isinstance(x, Symbol) and x.name in self.module.functions:
                # The symbol is in a table of virtual functions. Nothing is there: calls through a register are
                # rejected.
                x = 16 + 16 * list(self.module.functions).index(x.name)
            elif isinstance(x, Symbol):
                x = self.variables[x.name].ctypes.data + x.offset
            if code in "BHIQ":
                x = int(x) & (1 << 8 * struct.calcsize(code)) - 1
            out.append(struct.pack("<" + code, x))
        return b"".join(out)

    # ---- launch ------------------------------------------------------------------------------------------------

    def launch(
        self, grid, block, args=(), *, shared: int = 0, cluster=(1, 1, 1), memory: GlobalMemory | None = None, **changes
    ) -> Machine | None:
        """Runs the grid to its end. Returns the machine for inspection, or None to a rank of `softsm.ranks`."""
        meeting = current_options().meeting
        if meeting is not None:
            meeting.launch(self, grid, block, args, shared, cluster, memory, changes)
            return None
        return self.launch_together([self], grid, block, [args], [memory], shared, cluster, changes)

    def launch_together(
        self, kernels: list[Kernel | None], grid, block, args: list, memories: list, shared: int, cluster, changes: dict
    ) -> Machine:
        """Runs the same grid on all GPUs at the same time, each with its kernel and arguments. The kernels, of which
        this is the first, are equal or compiled from one source with different constants. None: the GPU is idle."""
        chosen = self.chosen(changes)
        races = any(x.races for x in chosen.sessions)
        kernels = [x and x.assembled(races) for x in kernels]
        if races != self.checking:
            return self.assembled(races).launch_together(kernels, grid, block, args, memories, shared, cluster, changes)
        grid, block, cluster = self.sides(grid, block, cluster)
        self.check_shared(shared)
        memory = one_memory(memories)
        parameters = [None if x is None else x.pack(values, memory) for x, values in zip(kernels, args)]
        present = [x for x in dict.fromkeys(kernels) if x is not None]
        if self.checking and len(present) > 1 and any(x.products.works for x in present):
            raise ValueError(
                f"ranks: {self.name} has tcgen05.mma and was compiled for each rank, which cannot be checked; name the "
                "rank in @gluon.jit(do_not_specialize=[...])"
            )
        for name, raw in (item for x in present for item in x.variables.items()):
            memory.add(raw.ctypes.data, raw.nbytes, f"variable {name}", raw)
        for buffer in (x for x in parameters if x is not None):
            memory.add(buffer.ctypes.data, buffer.nbytes, PARAMETERS, buffer)
        machine = Machine(kernels, grid, block, shared, cluster, memory, parameters, chosen)
        if machine.left:
            run(machine, present)
        return machine

    def chosen(self, changes: dict) -> Options:
        """Returns the options of a launch."""
        unknown = [name for name in changes if name not in CHANGES]
        if unknown:
            raise TypeError(
                f"launch: got {unknown[0]}=; accepted: grid, block, args, shared, cluster, memory, {', '.join(CHANGES)}"
            )
        chosen = replace(current_options(), **{"arch": self.module.target, **changes})
        if not all(x.computes for x in chosen.sessions):
            chosen = replace(chosen, sessions=tuple(x for x in chosen.sessions if not x.needs_values))
        for session in chosen.sessions:
            chosen = session.options(chosen)
        return chosen

    def sides(self, grid, block, cluster) -> tuple[tuple[int, ...], ...]:
        """Returns the three sides of each; ValueError if the kernel cannot be launched so."""
        grid, block = accepted.sides("grid", grid), accepted.sides("block", block, BLOCK_SIDES, least=1)
        cluster = self.function.directives.get("reqnctapercluster", cluster)
        cluster = accepted.sides("cluster", cluster, CLUSTER_SIDES, least=1)
        ctas, threads = math.prod(cluster), math.prod(block)
        if ctas > CLUSTER_CTAS:
            raise ValueError(f"cluster: got {cluster}, that is {ctas} CTAs; accepted: 1 to {CLUSTER_CTAS}")
        if threads > 1024:
            raise ValueError(f"block: got {block}, that is {threads} threads; accepted: 1 to 1024")
        required = accepted.sides("reqntid", self.function.directives.get("reqntid", block))
        if required != block:
            raise ValueError(f"block: got {block}, the kernel requires {required} (.reqntid)")
        if any(g % c for g, c in zip(grid, cluster)):
            raise ValueError(f"grid: got {grid}, each side must be a multiple of the cluster {cluster}")
        return grid, block, cluster

    def check_shared(self, shared: int) -> None:
        total = accepted.whole("shared", shared, 0) + self.program.shared_static
        if total > CTA_SHARED:
            static = self.program.shared_static
            raise ValueError(f"shared: got {shared} bytes and {static} static ones; a CTA has {CTA_SHARED}")

    def pack(self, args, memory: GlobalMemory) -> np.ndarray:
        """Returns the parameter buffer, 64-byte aligned. Storages of array arguments become known allocations."""
        params = self.function.params
        if not isinstance(args, (list, tuple)):
            accepted.refuse("args", args, "a list of the kernel's arguments")
        if len(args) != len(params):
            names = ", ".join(p.name for p in params)
            raise ValueError(f"args: got {len(args)}, {self.name} accepts {len(params)} ({names})")
        raw = np.zeros(self.program.param_bytes + 192, np.uint8)
        start = -raw.ctypes.data % 128
        buffer = raw[start : start + max(self.program.param_bytes, 1)]
        for value, p in zip(args, params):
            data = argument_bytes(value, p, memory)
            if len(data) != p.size:
                raise ValueError(f"args: parameter {p.name} has {p.size} bytes, got {len(data)}")
            at = self.program.param_offsets[p.name]
            buffer[at : at + p.size] = np.frombuffer(data, np.uint8)
        return buffer

    def assembled(self, checking: bool) -> Kernel:
        """Returns the same kernel for the race checker, or for runs without it. Both share module variables."""
        if checking == self.checking:
            return self
        if self.twin is None:
            self.twin = Kernel(self.module, self.function, checking)
            self.twin.twin, self.twin.variables = self, self.variables
        return self.twin

    @functools.cached_property
    def independent(self) -> bool:
        """Whether its clusters do not communicate."""
        return processes.independent(self.module, self.program.specials)

    @functools.cached_property
    def launches_dependents(self) -> bool:
        """Whether the next grid may begin before this one has ended."""
        reached = referenced(self.module, self.function)
        bodies = [self.function.body, *(f.body for f in self.module.functions.values() if f.name in reached)]
        return any(
            isinstance(x, Instruction) and x.name == "griddepcontrol.launch_dependents" for body in bodies for x in body
        )

    # ---- what the machine asks of its kernel -------------------------------------------------------------------

    def occupancy(self, machine: Machine) -> int:
        return ctas_per_sm(math.prod(machine.block), machine.shared_limit, self.tmem_columns)

    def new_tensor_memory(self, machine: Machine):
        if not machine.arch.startswith("sm_10"):
            return None
        from softsm.memory.tensor_memory import TensorMemory

        return TensorMemory()

    def new_files(self):
        """Returns register files of one warp with their constant rows. Later warps use them again, so a register that a
        kernel reads before writing has an arbitrary value, as on the device."""
        p = self.program
        R, Q, P = aligned((p.nr, 32), np.uint32), aligned((p.nq, 32), np.uint64), np.zeros(p.np_, np.uint32)
        P[0] = pg.ALL
        for bank, (rows, values) in zip((R, Q, P), self.constant_rows):
            bank[rows] = values
        S, local = np.zeros(1, pg.WARP_STATE).view(np.int64), np.zeros((32, max(p.local_bytes, 1)), np.uint8)
        S[pg.S_LOCAL], S[pg.S_LOCAL_SIZE] = local.ctypes.data, local.shape[1]
        S[pg.S_R], S[pg.S_Q], S[pg.S_P] = R.ctypes.data, Q.ctypes.data, P.ctypes.data
        S[pg.S_CODE], S[pg.S_POOL] = self.blocks.code.ctypes.data, p.pool.ctypes.data
        S[pg.S_BLOCKS] = self.blocks.table.ctypes.data
        return R, Q, P, S, local

    @functools.cached_property
    def constant_rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the (rows, values) of constants in the files R, Q and P."""
        p = self.program
        rows = [(np.array(list(c), np.int64), list(c.values())) for c in (p.constants_r, p.constants_q, p.constants_p)]
        (r, of_r), (q, of_q), (predicates, of_p) = rows
        return [
            (r, np.array(of_r, np.uint32)[:, None]),
            (q, np.array(of_q, np.uint64)[:, None]),
            (predicates, np.array(of_p, np.uint32)),
        ]

    def keep_few_files(self) -> None:
        """Frees register files between launches. A process may hold hundreds of kernels, and a warp of a large one uses
        half a megabyte."""
        one = sum(part.nbytes for part in self.spare_files[0]) if self.spare_files else 1
        del self.spare_files[SPARE_BYTES // one :]

    def launch_rows(self, machine: Machine, parameters: np.ndarray):
        """Returns the rows and values that all warps of a launch on one GPU share: parameters and addresses."""
        p = self.program
        R: dict[int, int] = {}
        Q: dict[int, int] = {}
        for (offset, size, signed, wide), row in p.parameters.items():
            value = int.from_bytes(parameters[offset : offset + size].tobytes(), "little", signed=signed)
            (Q if wide else R)[row] = value & (0xFFFFFFFFFFFFFFFF if wide else pg.ALL)
        for bank, row, name, offset in p.symbol_rows:
            if name == pg.PARAM_SPACE:
                Q[row] = parameters.ctypes.data
            elif name in self.variables:
                Q[row] = self.variables[name].ctypes.data + offset
            elif name in p.local_variables:
                (Q if bank == "Q" else R)[row] = p.local_variables[name] + offset
            elif name not in p.shared_variables:
                raise Fault("address", f"{name} has no address here")
        table = np.zeros((max(len(machine.global_memory.starts), 1), 2), np.uint64)
        if machine.global_memory.starts:
            table[:, 0], table[:, 1] = machine.global_memory.lo, machine.global_memory.hi
        machine.allocation_table = table
        return [
            (np.array(list(rows), np.int64), np.array(list(rows.values()), dtype)[:, None])
            for rows, dtype in ((R, np.uint32), (Q, np.uint64))
        ]

    def fill_registers(self, machine: Machine, cta: Cta, index: int, R, Q, P, S, local) -> None:
        p = self.program
        for bank, (rows, values) in zip((R, Q), machine.launch_rows[cta.gpu]):
            if len(rows):
                bank[rows] = values
        for bank, row, name, offset in p.symbol_rows:
            if name in p.shared_variables:
                (Q if bank == "Q" else R)[row] = cta.shared_base + p.shared_variables[name] + offset
        for name, (bank, row) in p.specials.items():
            {"R": R, "Q": Q, "P": P}[bank][row] = special_value(machine, cta, index, name)
        if p.local_bytes:
            local[:] = 0xFF
        S[pg.S_WRITES] = S[pg.S_HIT] = S[pg.S_RACES] = 0  # `new_files` has set the addresses of the files
        S[pg.S_ALIVE], S[pg.S_PHASES] = pg.ALL, cta.phases_address
        S[pg.S_UNWATCHED] = machine.unwatched
        idle = S[pg.S_IDLE] = machine.unwatched and machine.options.order == "eager"
        compared = self.checking and machine.follower is None and machine.options.order != "random"
        S[pg.S_LATEST] = machine.options.order == "latest"
        S[pg.S_COLUMNS] = cta.columns.ctypes.data if (idle or compared) and cta.tmem is not None else 0
        if S[pg.S_COLUMNS]:
            lane = 32 * (index % 4)
            S[pg.S_TENSOR], S[pg.S_TENSOR_LANE] = cta.tmem.address + 4 * lane, lane << 16
        S[pg.S_SHARED], S[pg.S_SHARED_SIZE], S[pg.S_SHARED_BASE] = cta.shared_address, len(cta.shared), cta.shared_base
        S[pg.S_ALLOC], S[pg.S_NALLOC] = machine.allocation_table.ctypes.data, len(machine.global_memory.starts)

    def memory_event(self, machine: Machine, warp, fragment, status: int, lanes: int) -> None:
        from softsm.isa.slow_memory import memory_event

        if status != pg.SLOW_MEMORY:
            raise warp.fault("internal", f"the interpreter does not know opcode {self.program.code[fragment.pc, 0]}")
        memory_event(machine, warp, fragment, lanes)

    def cta_exit(self, machine: Machine, cta: Cta) -> None:
        for hook in machine.cta_exit_hooks:
            hook(cta)

    def print(self, machine: Machine, text: str) -> None:
        machine.output.append(text)
        sys.stdout.write(text)


def aligned(shape: tuple[int, int], dtype) -> np.ndarray:
    """Returns a zeroed array on a 64-byte boundary."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(nbytes + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + nbytes].view(dtype).reshape(shape)


def argument_bytes(value, p, memory: GlobalMemory, in_place: bool = False) -> bytes:
    """Returns the bytes of a parameter. Unless `in_place`, a kernel gets a copy of a read-only array: a store
    to a file that is mapped so would end the process."""
    name, forms = f"args: parameter {p.name}", "arrays, CPU tensors, numbers, bytes and tensor maps"
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, TensorMapArgument):
        argument_bytes(value.array, p, memory, in_place=True)  # makes the map's memory known
        return bytes(value)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            accepted.refuse(name, value, forms)
        if value.ndim == 0 and value.nbytes == p.size:
            return value.tobytes()
        owner = value
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        held = owner
        if not owner.flags.writeable and not in_place:
            held = owner.copy(order="K")
            memory.copies.append((p.name, owner, held))
        memory.add(held.ctypes.data, held.nbytes, f"argument {p.name}", held)
        return struct.pack("<Q", held.ctypes.data + value.ctypes.data - owner.ctypes.data)
    if isinstance(value, np.generic):
        return value.tobytes()
    if hasattr(value, "untyped_storage"):
        if value.device.type != "cpu" or value.is_sparse:
            accepted.refuse(name, value, forms)
        storage = value.untyped_storage()
        memory.add(storage.data_ptr(), storage.nbytes(), f"argument {p.name}", storage)
        return struct.pack("<Q", value.data_ptr())
    if hasattr(value, "data_ptr"):
        return struct.pack("<Q", value.data_ptr())
    if hasattr(value, "__bytes__"):
        return bytes(value)
    if isinstance(value, float) or (isinstance(value, int) and p.type in ("f32", "f64")):
        if p.type[0] not in "fb":
            accepted.refuse(name, value, f"ints, for .{p.type}")
        return struct.pack("<d", value) if p.size == 8 else bytes(ctypes.c_float(value))  # 1e40 is inf
    if isinstance(value, int):
        bits = 8 * p.size
        if not -(1 << bits - 1) <= value < 1 << bits:
            accepted.refuse(name, value, f"ints of {bits} bits")
        return (value & (1 << bits) - 1).to_bytes(p.size, "little")
    accepted.refuse(name, value, forms)
