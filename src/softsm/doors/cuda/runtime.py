"""The CUDA runtime of a program that runs in softsm: memory, variables, launches. host.cpp is its other half.

Device memory is host memory, and everything is complete when a call returns. With several devices, a kernel waits until
the program waits for its device; then the next kernels of all devices run together, as far as they are the same. What a
kernel does wrong cannot be raised through the program's own frames: the call returns an error, as it would on a GPU,
and `call` raises it when the program has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from softsm.doors.cuda.compile import Program
from softsm.doors.cuda.graphs import CALLS, Graphs, Refused
from softsm.doors.cuda.guards import Guards, pages
from softsm.doors.cuda.streams import DEFAULT, GRAPH, IN_ORDER, Place, Streams, named
from softsm.engine.launch import CTA_SHARED, SM_SHARED, SM_THREADS, Kernel, ctas_per_sm, load
from softsm.engine.program import SHARED_START
from softsm.engine.ranks import Launch, together
from softsm.memory import tensor_map_image
from softsm.memory.global_memory import GlobalMemory
from softsm.ptx.cplusplus import readable

SUCCESS, INVALID_VALUE, NO_MEMORY, INVALID_CONFIGURATION = 0, 1, 2, 9
INVALID_SYMBOL, INVALID_FUNCTION, INVALID_DEVICE, LAUNCH_FAILURE, TOO_LARGE = 13, 98, 101, 719, 720
STATUS = {"out-of-bounds": 700, "assert": 710, "misaligned": 716}  # by code: the CUDA error of what stopped a kernel
CREATED, RECORDED, WAITED, AWAITED, AWAITED_EVENT = range(5)  # what happens to a stream or an event
BETWEEN = 3  # cudaMemcpyDeviceToDevice
DEPENDENT, COOPERATIVE = 1, 2  # how a kernel is launched
WITHOUT_ASKING = 48 << 10  # bytes of shared memory; more of them need cudaFuncSetAttribute
ALIGNED = 512  # alignment of cudaMalloc
MOST_BYTES = 1 << 36

INT, UINT, SIZE, AT, TEXT = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
# name: (result, arguments), in the order of `struct Served` in host.cpp
SERVED: dict[str, tuple[Any, tuple]] = {
    "malloc": (INT, (AT, SIZE, INT, AT)),
    "free": (INT, (AT, AT)),
    "copy": (INT, (AT, AT, SIZE, INT, AT, INT)),
    "set": (INT, (AT, UINT, SIZE, AT, INT)),
    "symbol": (INT, (AT, AT, SIZE)),
    "launch": (INT, (AT, AT, AT, SIZE, INT, AT)),
    "most_shared": (INT, (AT, INT)),
    "attribute": (INT, (AT, INT)),
    "encode": (INT, (AT, INT, UINT, AT, AT, AT, AT, AT, INT, INT, INT, INT)),
    "occupancy": (INT, (AT, INT, SIZE)),
    "devices": (INT, ()),
    "select": (INT, (INT,)),
    "synchronise": (INT, ()),
    "stream": (INT, (INT, AT, AT)),
    "graph": (INT, (INT, AT, AT, SIZE)),
    "module": (None, (TEXT,)),
    "function": (None, (AT, TEXT)),
    "variable": (None, (AT, TEXT)),
}


def listed(at: int, kind: Any, count: int) -> list[int]:
    return list((kind * count).from_address(at)) if count else []


class Runtime:
    """The state of one run of a program."""

    ASKING, ALLOCATES, FREES = "cudaFuncSetAttribute", "cudaMalloc", "cudaFree"  # what programs call
    COPIES, SETS = "cudaMemcpy", "cudaMemset"

    def __init__(self, arch: str, sms: int, ranks: int = 1, **options: Any):
        self.arch, self.sms, self.options = arch, sms, options
        self.device = 0  # device that the program has selected
        self.waiting: list[list[Launch]] = [[] for _ in range(ranks)]  # kernels of each device
        self.behind: set[int] = set()  # devices whose next kernel waits for an event
        self.kernels: dict[int, Kernel] = {}  # by address of the host function
        self.names: dict[int, str] = {}  # names of variables, by address of the host's shadow
        self.variables: dict[str, np.ndarray] = {}
        self.live: dict[int, tuple[int, np.ndarray]] = {}  # address -> size, what keeps it
        self.freed: list[tuple[int, int, str]] = []
        self.texts: list[str] = []
        self.dynamic: dict[Kernel, int] = {}  # most bytes of dynamic shared memory that the program requested
        self.workspace = np.zeros(2, np.uint32)  # for cooperative launches: the size, and the barrier of the grid
        self.count = 0
        self.failure: BaseException | None = None
        self.serves = INT()  # calls of `served` that have not returned
        self.streams, self.library = Streams(), Path()
        self.graphs = Graphs(self)
        self.guards: Guards | None = None
        self.where = ctypes.c_ssize_t()  # where the last call is, as an offset in the library
        self.given: Place | str | None = None  # where the program gave the work of a graph that runs now
        self.flush: Callable[[], None] = lambda: None  # prints what the host has buffered first

    def served(self, name: str, function: Callable) -> Callable:
        """Wraps a function that C calls: no exception leaves it."""
        result = SERVED[name][0]

        def call(*arguments: Any) -> int | None:
            self.serves.value += 1
            try:
                self.look()
                return function(*arguments)
            except Refused as refused:
                if refused.args[0]:
                    print(f"softsm: {refused}", file=sys.stderr)
                return refused.status
            except BaseException as problem:
                self.failure = self.failure or problem
                return None if result is None else self.failed()
            finally:
                if self.guards is not None:
                    self.guards.protect(self.streams.guards())
                self.serves.value -= 1

        return call

    def look(self) -> None:
        """Takes note of what the host has accessed since the last call."""
        for access in self.guards.lift() if self.guards is not None else ():
            self.streams.accessed(access.at, bool(access.writes), Place(self.library, access.place))

    def failed(self) -> int:
        """Returns the CUDA error that the program gets."""
        return STATUS.get(getattr(self.failure, "code", ""), LAUNCH_FAILURE)

    # ---- modules -----------------------------------------------------------------------------------------------

    def module(self, ptx: bytes) -> None:
        self.texts.append(ptx.decode())

    def function(self, host: int, name: bytes) -> None:
        entry = re.compile(rf"\.entry\s+{re.escape(name.decode())}\b")
        kernel = load(next(text for text in self.texts if entry.search(text)), name.decode())
        if not self.variables:  # fresh for this run, and one set for all kernels of the module
            kernel.place_variables()
            self.variables = kernel.variables
        kernel.share(self.variables)
        self.kernels[host] = kernel

    def variable(self, host: int, name: bytes) -> None:
        self.names[host] = name.decode()

    def symbol(self, at: int, host: int, end: int) -> int:
        self.synchronise()
        if end:  # a copy, for which the host waits
            self.graphs.of(DEFAULT)
        array = self.variables.get(self.names.get(host, ""))
        if array is None:
            return INVALID_SYMBOL
        if end > array.nbytes:
            return INVALID_VALUE
        if end:
            self.streams.host_waits(DEFAULT)
        AT.from_address(at).value = array.ctypes.data
        return SUCCESS

    # ---- memory ------------------------------------------------------------------------------------------------

    def malloc(self, at: int, size: int, host: int, stream: int | None = IN_ORDER) -> int:
        if size > MOST_BYTES:
            return NO_MEMORY
        if stream == IN_ORDER:
            self.graphs.forbid(self.ALLOCATES)
        raw = pages(size) if host else np.empty(size + ALIGNED, np.uint8)
        start = -(-raw.ctypes.data // ALIGNED) * ALIGNED
        if host:
            self.streams.reachable[start] = size
        AT.from_address(at).value = start

        def run(stream: int) -> int:
            raw.fill(0xA5)  # what cudaMalloc returns is not zero
            self.count += 1
            self.live[start] = size, raw
            self.transfer(stream, f"{self.ALLOCATES}Async", [(start, size, True)])
            return SUCCESS

        return self.does("malloc", stream, run)

    def free(self, at: int | None, stream: int | None = IN_ORDER) -> int:
        """Frees memory: behind all work, or in a stream."""
        if not at:
            return SUCCESS
        if stream == IN_ORDER:
            self.graphs.forbid(self.FREES)

        def run(stream: int) -> int:
            self.synchronise()
            size, raw = self.live.pop(at, (0, None))
            if raw is None:
                return INVALID_VALUE
            if stream == IN_ORDER:
                self.streams.host_waits_for_all()
            self.transfer(stream, f"{self.FREES}Async", [(at, size, True)])
            self.streams.forget(at, size)
            self.streams.reachable.pop(at, None)
            self.freed.append((at, size, f"memory (cudaMalloc of {size} bytes)"))
            return SUCCESS

        return self.does("free", stream, run)

    def holds(self, at: int | None, size: int) -> bool:
        return at is not None and any(start <= at and at + size <= start + n for start, (n, _) in self.live.items())

    def does(self, kind: str, stream: int | None, run: Callable[[int], int]) -> int:
        """Does work of a stream, on the selected device, or leaves it to the graph that is captured."""
        at, device, place = named(stream or DEFAULT), self.device, self.place()

        def later(lane: int) -> int:
            before = self.device, self.given
            self.device, self.given = device, place
            try:
                return run(lane)
            finally:
                self.device, self.given = before

        return SUCCESS if self.graphs.takes(at, kind, later) else run(at)

    def transfer(self, stream: int, name: str, ranges: list[tuple[int, int, bool]], waits: bool = False) -> None:
        if stream != IN_ORDER and self.devices() == 1:
            self.streams.transfer(stream, name, self.place(), ranges, waits)

    def place(self) -> Place | str:
        return self.given or Place(self.library, self.where.value)

    def copy(
        self, to: int | None, source: int | None, size: int, kind: int, stream: int | None = IN_ORDER, waits: int = 1
    ) -> int:
        """Copies. kind: cudaMemcpyKind. A device address that no allocation holds is an error, as on a GPU.
        waits: the host waits for the copy."""
        return self.does("copy", stream, lambda at: self.copied(to, source, size, kind, at, waits))

    def copied(self, to: int | None, source: int | None, size: int, kind: int, stream: int, waits: int) -> int:
        self.synchronise()
        if self.failure is not None:  # an error stays
            return self.failed()
        device = {1: (to,), 2: (source,), 3: (to, source)}.get(kind, ())
        symbols = [(a.ctypes.data, a.nbytes) for a in self.variables.values()]
        for at in device:
            inside = at is not None and any(s <= at and at + size <= s + n for s, n in symbols)
            if size and not self.holds(at, size) and not inside:
                return INVALID_VALUE
        if size:
            ctypes.memmove(to, source, size)  # type: ignore[arg-type]
        # Memory that is not the runtime's own is staged, if not by a graph: a copy from it has read it when the call
        # returns, and the host waits for one into it.
        ranges = [(at, size, at == to) for at in (to, source) if at is not None and self.holds(at, size)]
        name, staged = self.COPIES + ("" if waits else "Async"), not stream & GRAPH and not self.holds(to, size)
        self.transfer(stream, name, ranges, staged or bool(waits) and kind != BETWEEN)
        return SUCCESS

    def set(self, to: int | None, value: int, count: int, stream: int | None = IN_ORDER, width: int = 1) -> int:
        """Sets `count` elements of `width` bytes."""
        size, pattern = count * width, (value & (1 << 8 * width) - 1).to_bytes(width, "little")

        def run(stream: int) -> int:
            self.synchronise()
            if self.failure is not None:
                return self.failed()
            if size and not self.holds(to, size):
                return INVALID_VALUE
            if size:
                ctypes.memmove(to, pattern * count, size)  # type: ignore[arg-type]
            self.transfer(stream, self.SETS, [(to or 0, size, True)])
            return SUCCESS

        return self.does("set", stream, run)

    def stream(self, what: int, stream: int | None, event: int | None) -> int:
        """Serves calls that order streams, see host.cpp."""
        at, by = named(stream or DEFAULT), event or 0
        if what in (AWAITED, AWAITED_EVENT):
            self.graphs.awaited(at, by)
        if what == WAITED and self.devices() > 1:
            self.behind.add(self.device)
        if what in (AWAITED, AWAITED_EVENT):
            status = self.synchronise()
            if status or self.failure is not None:
                return status or self.failed()
        if what == CREATED:
            self.streams.created()
        elif what == RECORDED and not self.graphs.recorded(by, at):
            self.streams.record(by, at)
        elif what == WAITED and not self.graphs.waits(at, by):
            self.streams.wait(at, by)
        elif what == AWAITED and stream == IN_ORDER:
            self.streams.host_waits_for_all()
        elif what == AWAITED:
            self.streams.host_waits(at)
        elif what == AWAITED_EVENT:
            self.streams.host_waits_for_event(by)
        return SUCCESS

    def memory(self) -> GlobalMemory:
        known = GlobalMemory()
        for number, (start, (size, raw)) in enumerate(self.live.items()):
            known.add(start, size, f"allocation {number} (cudaMalloc of {size} bytes)", raw)
        known.freed = self.freed
        known.add(self.workspace.ctypes.data, self.workspace.nbytes, "the barrier of the grid", self.workspace)
        return known

    # ---- launches ----------------------------------------------------------------------------------------------

    def most_shared(self, host: int, size: int) -> int:
        """Serves cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, size)"""
        return self.may_use(self.kernels.get(host), size)

    def may_use(self, kernel: Kernel | None, size: int) -> int:
        if kernel is None:
            return INVALID_FUNCTION
        if not 0 <= size <= CTA_SHARED - kernel.program.shared_static:
            return INVALID_VALUE
        self.dynamic[kernel] = size
        return SUCCESS

    def launch(self, host: int, shape: int, args: int, shared: int, how: int, stream: int | None) -> int:
        sides, kernel = listed(shape, UINT, 9), self.kernels.get(host)
        cluster = [max(n, 1) for n in sides[6:]]
        return self.start(kernel, sides[:3], sides[3:6], cluster, args, shared, how, stream or DEFAULT)

    def start(
        self,
        kernel: Kernel | None,
        grid: Sequence[int],
        block: Sequence[int],
        cluster: Sequence[int],
        args: int,
        shared: int,
        how: int = 0,
        stream: int = DEFAULT,
    ) -> int:
        """Starts a kernel. args: the address of the addresses of the arguments"""
        if kernel is None:
            return INVALID_FUNCTION
        if shared > max(self.dynamic.get(kernel, 0), WITHOUT_ASKING - kernel.program.shared_static):
            text = f"{shared} bytes of dynamic shared memory need {self.ASKING} before the launch"
            print(f"softsm: {readable(kernel.name)}: {text}", file=sys.stderr)
            return INVALID_VALUE
        if self.failure is not None:
            return self.failed()
        if 0 in grid:  # Triton skips such a launch, CUDA rejects it
            print(f"softsm: {readable(kernel.name)}: grid: got {tuple(grid)}; accepted: 1 or more", file=sys.stderr)
            return INVALID_CONFIGURATION
        if how & COOPERATIVE and math.prod(grid) > self.sms * self.resident(kernel, math.prod(block), shared):
            return TOO_LARGE
        params = kernel.function.params
        values = [ctypes.string_at(at, p.size) for at, p in zip(listed(args, ctypes.c_uint64, len(params)), params)]
        changes = {"arch": self.arch, "sms": self.sms, "dependent": bool(how & DEPENDENT), **self.options}
        if how & COOPERATIVE and self.devices() == 1:
            changes["workspace"] = self.workspace.ctypes.data
        shape = tuple(grid), tuple(block), shared, tuple(cluster), tuple(sorted(changes.items()))
        ordered = self.device in self.behind
        self.behind.discard(self.device)

        def run(stream: int) -> int:
            self.waiting[self.device].append(Launch(kernel, shape, values, None, ordered))
            return self.synchronise(stream) if self.devices() == 1 else SUCCESS

        return self.does("kernel", stream, run)

    def graph(self, what: int, a: int | None, b: int | None, number: int) -> int:
        """Serves graphs, see graphs.py."""
        return getattr(self.graphs, CALLS[what])(a or 0, b or 0, number)

    def devices(self) -> int:
        return len(self.waiting)

    def select(self, device: int) -> int:
        if not 0 <= device < self.devices():
            return INVALID_DEVICE
        self.device = device
        return SUCCESS

    def synchronise(self, stream: int = DEFAULT) -> int:
        """Run what waits on this device, together with the same on others. stream: of the kernel of a single device"""
        status, follows = SUCCESS, False
        while self.waiting[self.device] and self.failure is None:
            first = self.waiting[self.device][0]
            alike = [bool(x) and (x[0].kernel, x[0].shape) == (first.kernel, first.shape) for x in self.waiting]
            launches = [x.pop(0) if same else None for x, same in zip(self.waiting, alike)]
            first.memory = self.memory()
            self.flush()
            try:
                if self.devices() > 1:
                    together(launches, follows and not any(x is not None and x.ordered for x in launches))
                else:
                    self.streams.launch(stream, readable(first.kernel.name), self.place(), first.run)
            except ValueError as problem:  # the launch is invalid: too many threads, a grid that clusters do not divide
                print(f"softsm: {readable(first.kernel.name)}: {problem}", file=sys.stderr)
                status = INVALID_CONFIGURATION
            follows = True
        return status

    def occupancy(self, host: int, threads: int, shared: int) -> int:
        return self.resident(self.kernels.get(host), threads, shared)

    def resident(self, kernel: Kernel | None, threads: int, shared: int) -> int:
        """Returns how many CTAs of the kernel a multiprocessor holds."""
        static, columns = (kernel.program.shared_static, kernel.tmem_columns) if kernel is not None else (0, 0)
        return ctas_per_sm(threads, SHARED_START + static + shared, columns)

    def attribute(self, at: int, attribute: int) -> int:
        number = int("".join(c for c in self.arch if c.isdigit()))
        known = {
            1: 1024, 2: 1024, 3: 1024, 4: 64, 5: 2**31 - 1, 6: 65535, 7: 65535, 8: 49152, 9: 65536, 10: 32, 12: 65536,
            16: self.sms, 38: 50 << 20, 39: SM_THREADS, 41: 1, 75: number // 10, 76: number % 10, 78: 1, 81: SM_SHARED,
            82: 65536, 83: 1, 95: 1, 97: CTA_SHARED, 106: 32, 115: 1, 120: 1,
        }  # fmt: skip
        if attribute not in known:
            return INVALID_VALUE
        INT.from_address(at).value = known[attribute]
        return SUCCESS

    def encode(self, to, kind, rank, address, dims, strides, box, steps, *rest) -> int:
        """Serves cuTensorMapEncodeTiled"""
        try:
            sizes, strides = listed(dims, ctypes.c_uint64, rank), listed(strides, ctypes.c_uint64, rank - 1)
            box, steps = listed(box, UINT, rank), listed(steps, UINT, rank)
            image = tensor_map_image.encode_tiled(kind, rank, address or 0, sizes, strides, box, steps, *rest)
        except ValueError as problem:
            print(f"softsm: cuTensorMapEncodeTiled: {problem}", file=sys.stderr)
            return INVALID_VALUE
        ctypes.memmove(to, image, tensor_map_image.NBYTES)
        return SUCCESS

    # ---- the program -------------------------------------------------------------------------------------------

    def call(self, program: Program, words: Sequence[str]) -> int:
        """Runs main() and returns its status, then raises what stopped a kernel."""
        functions = [
            ctypes.CFUNCTYPE(result, *arguments)(self.served(name, getattr(self, name)))
            for name, (result, arguments) in SERVED.items()
        ]
        table = (AT * len(functions))(*(ctypes.cast(f, AT) for f in functions))
        listed_words = (TEXT * (len(words) + 1))(*(word.encode() for word in words), None)
        with tempfile.TemporaryDirectory() as folder, printed() as flush:
            own = shutil.copy(program.library, Path(folder) / "program.so")  # static variables of its own
            library = ctypes.CDLL(str(own))
            self.serves = INT.in_dll(library, "softsm_serves")
            if self.devices() == 1 and self.streams.checks is not None:
                self.guards = Guards(library)
            self.where, self.library = ctypes.c_ssize_t.in_dll(library, "softsm_where"), program.library

            def flush_all() -> None:
                library.softsm_flush()
                flush()

            self.flush = flush_all
            status = library.softsm_main(table, len(words), listed_words)
            self.look()
            for device in range(self.devices()):
                self.select(device)
                self.synchronise()
        if self.failure is not None:
            raise self.failure
        return status


@contextlib.contextmanager
def printed() -> Iterator[Callable[[], None]]:
    """Sends what C prints where Python's prints go: standard output may be redirected in Python alone."""
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        saved, at = os.dup(1), 0
        os.dup2(file.fileno(), 1)

        def flush() -> None:
            nonlocal at
            end = os.fstat(file.fileno()).st_size
            text = os.pread(file.fileno(), end - at, at).decode(errors="replace")
            at = end
            forward(text)

        def forward(text: str) -> None:
            os.dup2(saved, 1)
            try:
                sys.stdout.write(text)
                sys.stdout.flush()
            finally:
                os.dup2(file.fileno(), 1)

        try:
            yield flush
            flush()
        finally:
            os.dup2(saved, 1)
            os.close(saved)
