"""Where a microbenchmark runs: on the GPU through the CUDA driver API, or in softsm (whose clock means nothing).

A kernel is PTX text. Every warp leaves four numbers: %clock64 and %globaltimer when its measured part begins, and when
it ends. From them come cycles, nanoseconds and the clock of the multiprocessor, for every single launch.
"""

from __future__ import annotations

import ctypes
import hashlib
import statistics
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

WARPS = 32  # stamps per CTA


def tools() -> Path:
    """The folder of Triton's own ptxas and nvdisasm."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@cache
def assembled(ptx: str) -> bytes:
    """The cubin of a PTX text; RuntimeError with the assembler's words where it has none or serialises wgmma."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "k.ptx", Path(folder) / "k.cubin"
        source.write_text(ptx)
        done = subprocess.run([tools() / "ptxas", "-arch=sm_90a", "-o", cubin, source], capture_output=True, text=True)
        if done.returncode or "wgmma" in done.stderr:
            raise RuntimeError(f"ptxas: {(done.stderr or done.stdout).strip()[:400]}")
        return cubin.read_bytes()


def assemble_all(texts: list[str], threads: int = 16) -> None:
    """Fill the cache; what fails will say so when it is launched."""

    def attempt(ptx: str) -> None:
        try:
            assembled(ptx)
        except RuntimeError:
            pass

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(attempt, texts))


def disassembled(ptx: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(assembled(ptx))
        file.flush()
        return subprocess.run([tools() / "nvdisasm", "-c", file.name], capture_output=True, text=True).stdout


@dataclass
class Stamps:
    """[CTA, warp, (clock, timer)] at the beginning and at the end; 0 where a warp left none."""

    begin: np.ndarray
    end: np.ndarray

    def select(self, warps: slice | None) -> tuple[np.ndarray, np.ndarray]:
        b, e = self.begin[:, warps or slice(None)], self.end[:, warps or slice(None)]
        there = e[..., 0] > 0
        low = np.where(there[..., None], b, np.iinfo(np.int64).max).min(1)
        return low, np.where(there[..., None], e, 0).max(1)

    def cycles(self, warps: slice | None = None) -> float:
        """Median over CTAs of the cycles from the first warp's begin to the last one's end."""
        low, high = self.select(warps)
        return float(np.median(high[:, 0] - low[:, 0]))

    def ns(self, warps: slice | None = None) -> float:
        low, high = self.select(warps)
        return float(np.median(high[:, 1] - low[:, 1]))

    def span_ns(self) -> float:
        """From the first begin on the GPU to the last end."""
        low, high = self.select(None)
        return float(high[:, 1].max() - low[:, 1].min())

    def ramp_ns(self) -> float:
        """From the first CTA's begin to the last one's."""
        low, _ = self.select(None)
        return float(low[:, 1].max() - low[:, 1].min())

    def mhz(self) -> float:
        """Over all CTAs: short launches give a coarse figure, since the timer moves in steps."""
        low, high = self.select(None)
        ns = float((high[:, 1] - low[:, 1]).mean())
        return float((high[:, 0] - low[:, 0]).mean() / ns * 1e3) if ns > 0 else 0.0


class Attribute(ctypes.Structure):
    """CUlaunchAttribute; its value is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


class Config(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = [
        *((f"{what}_{side}", ctypes.c_uint) for what in ("grid", "block") for side in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


class Gpu:
    """Launches through the driver API, in torch's context and on its current stream."""

    name, most = "gpu", 2 << 30  # bytes of a buffer

    def __init__(self) -> None:
        import torch

        self.torch = torch
        torch.cuda.init()
        self.stamps = torch.zeros(8192 * WARPS * 4, dtype=torch.int64, device="cuda")
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.functions: dict[str, ctypes.c_void_p] = {}
        self.buffers: dict[str, object] = {}
        self.device = torch.cuda.get_device_name()

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.driver, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'').decode()}")

    def memory(self, nbytes: int) -> int:
        """The address of a buffer of random bf16 values, made once per size."""
        key = f"{nbytes}"
        if key not in self.buffers:
            self.buffers[key] = self.torch.randn(nbytes // 2, device="cuda", dtype=self.torch.bfloat16)
        return self.buffers[key].data_ptr()  # type: ignore[attr-defined]

    def flush(self) -> None:
        """Other data into the L2."""
        if "flush" not in self.buffers:
            self.buffers["flush"] = self.torch.zeros(64 << 20, device="cuda")
        self.buffers["flush"].sum()  # type: ignore[attr-defined]

    def function(self, ptx: str, shared: int) -> ctypes.c_void_p:
        key = f"{hashlib.sha256(ptx.encode()).hexdigest()} {max(shared, 48 << 10)}"
        if key not in self.functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self.call("cuModuleLoadData", ctypes.byref(module), assembled(ptx))
            self.call("cuModuleGetFunction", ctypes.byref(function), module, b"k")
            if shared > 48 << 10:
                self.call("cuFuncSetAttribute", function, 8, shared)
            self.functions[key] = function
        return self.functions[key]

    def tensor_map(self, address: int, rows: int, columns: int, box_rows: int, box_columns: int) -> bytes:
        """The map of a bf16 matrix, 128-byte swizzle."""
        buffer = (ctypes.c_uint8 * 192)()
        aligned = (ctypes.c_uint8 * 128).from_buffer(buffer, -ctypes.addressof(buffer) % 64)
        self.call("cuTensorMapEncodeTiled", ctypes.byref(aligned), 9, 2, ctypes.c_void_p(address),
                  (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(columns * 2),
                  (ctypes.c_uint32 * 2)(box_columns, box_rows), (ctypes.c_uint32 * 2)(1, 1), 0, 3, 2, 0)  # fmt: skip
        return bytes(aligned)

    def launch(self, ptx: str, grid: int, threads: int, shared: int, source: int, n: int, m: int, map: bytes,
               early: bool = False) -> None:  # fmt: skip
        """early: it may begin before the grid before it has ended (programmatic dependent launch)."""
        function = self.function(ptx, shared)
        block = (ctypes.c_uint8 * 192)()
        aligned = (ctypes.c_uint8 * 128).from_buffer(block, -ctypes.addressof(block) % 64)
        ctypes.memmove(aligned, map.ljust(128, b"\0"), 128)
        values = [
            ctypes.c_uint64(self.stamps.data_ptr()),
            ctypes.c_uint64(source),
            ctypes.c_uint32(n),
            ctypes.c_uint32(m),
            aligned,
        ]
        pointers = (ctypes.c_void_p * 5)(*(ctypes.addressof(v) for v in values))
        stream = ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream)
        attribute = Attribute(6, 0, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        config = Config(grid, 1, 1, threads, 1, 1, shared, stream, ctypes.pointer(attribute), int(early))
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)

    def run(self, ptx, grid, threads, shared=0, source=0, n=1, m=0, map=b"", before=None) -> Stamps:
        self.stamps[: grid * WARPS * 4].zero_()
        if before is not None:
            before()
        self.launch(ptx, grid, threads, shared, source, n, m, map)
        self.torch.cuda.synchronize()
        found = self.stamps[: grid * WARPS * 4].cpu().numpy().reshape(grid, WARPS, 4)
        return Stamps(found[..., :2], found[..., 2:])

    def graph_behind_us(self, calls) -> float:
        """The same, behind a pass over 256 MB: the host has queued all of it before the GPU gets there."""
        return self.graph_us(calls, before=self.flush)

    def graph_us(self, calls, repeats: int = 20, before=None) -> float:
        """Median time of a CUDA graph of these calls, events around its replay."""
        torch = self.torch
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        times = []
        for _ in range(repeats + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
            if before is not None:
                before()
            else:
                self.buffers["flush"][:1024].sum()  # type: ignore[index]
            begin.record()
            graph.replay()
            end.record()
            times.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(b.elapsed_time(e) * 1e3 for b, e in times[3:])


class Softsm:
    """One CTA, few rounds: shows that the kernel is a legal program. Figures mean nothing."""

    name, device, most = "softsm", "softsm", 8 << 20

    def __init__(self) -> None:
        self.buffers: dict[int, np.ndarray] = {}

    def memory(self, nbytes: int) -> int:
        nbytes = min(nbytes, self.most)
        if nbytes not in self.buffers:
            self.buffers[nbytes] = np.zeros(nbytes + 1024, np.uint8)
        return self.buffers[nbytes].ctypes.data + -self.buffers[nbytes].ctypes.data % 1024

    def flush(self) -> None:
        pass

    def tensor_map(self, address: int, rows: int, columns: int, box_rows: int, box_columns: int) -> bytes:
        from softsm.memory import tensor_map_image

        return tensor_map_image.encode_tiled(
            data_type=9, rank=2, global_address=address, global_dim=[columns, rows], global_strides=[columns * 2],
            box_dim=[box_columns, box_rows], swizzle=3, l2_promotion=2)  # fmt: skip

    def run(self, ptx, grid, threads, shared=0, source=0, n=1, m=0, map=b"", before=None) -> Stamps:
        import softsm
        from softsm.memory.global_memory import GlobalMemory

        memory = GlobalMemory()
        for raw in self.buffers.values():
            memory.add(raw.ctypes.data, raw.nbytes, "source", raw)
        grid, n = min(grid, 2), min(n, 3)
        stamps = np.zeros(grid * WARPS * 4, np.int64)
        softsm.load(ptx).launch(
            grid, threads, [stamps, source, n, m, map.ljust(128, b"\0")], shared=shared, memory=memory, sms=2
        )
        found = stamps.reshape(grid, WARPS, 4)
        return Stamps(found[..., :2], found[..., 2:])
