"""Runs instructions on softsm and, where there is one, on a real GPU, and compares both with what is expected.

A test hands over inputs and instructions; one kernel holds them all: each thread takes one set of inputs, executes
every instruction and stores every result. Comparison is bit for bit unless a bound is given.

Where a CUDA driver and a device are present the same PTX goes through it (ctypes, nothing but NumPy is needed).
`on_silicon.py` runs all tests so, without pytest, and keeps what was measured.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

SIZES = {"b16": 2, "b32": 4, "b64": 8, "pred": 4}
DTYPES = {"b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "pred": np.uint32}


@dataclass
class Case:
    """One instruction (or a few) writing {d} from the inputs {a}, {b}, ...; `expected` maps one set of input bits to
    the result's bits. `bound` (got, want, inputs) -> deviation in units of what is allowed makes it approximate."""

    text: str
    result: str
    expected: Callable
    bound: Callable | None = None
    target: str = "sm_90"
    exact_on_device: bool = True  # False: PTX leaves the result open, the device's is not compared


@dataclass
class Record:
    """What one test measured on the device."""

    device: str = ""
    results: int = 0
    worst: dict[str, float] = field(default_factory=dict)  # approximate: largest deviation, 1 = all that is allowed
    refused: dict[str, str] = field(default_factory=dict)  # instructions that the driver rejects
    disagreements: list[dict] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)  # PTX that ran

    def clear(self) -> None:
        self.results = 0
        for part in (self.worst, self.refused, self.disagreements, self.texts):
            part.clear()

    def kept(self) -> dict:
        return {k: v for k, v in vars(self).items() if k not in ("device", "texts")}


RECORD = Record()


def kernel(inputs: dict[str, tuple[str, np.ndarray]], cases: Sequence[Case], version: str) -> str:
    """Return PTX text whose parameters are the input arrays and the result array (8 bytes per case and thread)."""
    n = len(next(iter(inputs.values()))[1])
    params = ", ".join(f".param .u64 p_{name}" for name in [*inputs, "out"])
    lines = [
        "mov.u32 %tid, %tid.x;",
        "mov.u32 %cta, %ctaid.x;",
        "mov.u32 %size, %ntid.x;",
        "mad.lo.u32 %tid, %cta, %size, %tid;",
        "ld.param.u64 %out, [p_out];",
        "mul.wide.u32 %at, %tid, 8;",
        "add.u64 %out, %out, %at;",
    ]
    declared = []
    for name, (kind, _) in inputs.items():
        declared.append(f".reg .{kind} %{name};")
        lines += [
            f"ld.param.u64 %at, [p_{name}];",
            f"mul.wide.u32 %off, %tid, {SIZES[kind]};",
            "add.u64 %at, %at, %off;",
            f"ld.global.{kind} %{name}, [%at];",
        ]
    for k, case in enumerate(cases):
        text = case.text.format(d="%d", **{name: f"%{name}" for name in inputs})
        if case.result == "pred":
            text += " selp.b32 %s, 1, 0, %d;"
            body = f"{{ .reg .pred %d; .reg .b32 %s; {text} st.global.b32 [%out+{8 * n * k}], %s; }}"
        else:
            body = f"{{ .reg .{case.result} %d; {text} st.global.{case.result} [%out+{8 * n * k}], %d; }}"
        lines.append(body)
    target = max((c.target for c in cases), key=lambda t: int("".join(filter(str.isdigit, t))))
    return "\n".join(
        [
            f".version {version}",
            f".target {target}",
            ".address_size 64",
            f".visible .entry k({params})",
            "{",
            ".reg .b32 %tid, %cta, %size; .reg .b64 %out, %at, %off;",
            *declared,
            *lines,
            "ret;",
            "}",
            "",
        ]
    )


def rename_tid(text: str) -> str:
    """%tid is a special register: give ours another name."""
    for name in ("tid", "cta", "size"):
        text = text.replace(f"%{name},", f"%my{name},").replace(f"%{name};", f"%my{name};")
    return text


def run_ptx(
    ptx: str,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    *,
    grid: int = 1,
    block: int = 32,
    shared: int = 0,
) -> dict[str, list[np.ndarray]]:
    """Run kernel `k(inputs..., outputs...)`; returns {'softsm': outputs, 'device': outputs} of the engines present."""
    results = {}
    if have_softsm():
        import softsm

        arrays = [np.ascontiguousarray(x).copy() for x in inputs]
        written = [x.copy() for x in outputs]
        softsm.load(ptx).launch(grid, block, [*arrays, *written], shared=shared)
        results["softsm"] = written
    device = cuda()
    if device is not None and device.accepts(ptx):
        results["device"] = device.run(ptx, inputs, outputs, grid, block, shared)
    return results


def check(inputs: dict[str, tuple[str, np.ndarray]], cases: Sequence[Case], *, version: str = "8.0") -> None:
    """Run all cases over all inputs on every engine and compare with the expectation."""
    n = len(next(iter(inputs.values()))[1])
    block = 32 if n <= 32 else 128
    padded = -(-n // block) * block
    arrays = {k: (t, np.resize(np.array(x, np.uint64).astype(DTYPES[t]), padded)) for k, (t, x) in inputs.items()}
    ptx = rename_tid(kernel(arrays, cases, version))
    out = np.zeros((len(cases), padded), np.uint64)
    launch = {"grid": padded // block, "block": block}
    try:
        results = run_ptx(ptx, [x for _, x in arrays.values()], [out], **launch)
    except Refused as error:
        if len(cases) > 1:  # find out which instruction it is
            for case in cases:
                check(inputs, [case], version=version)
            return
        RECORD.refused[cases[0].text] = str(error)
        raise AssertionError(f"device: {cases[0].text} refused: {error}") from None
    columns = [[int(v) for v in x[:n]] for _, x in arrays.values()]
    failures = []
    for k, case in enumerate(cases):
        want = [case.expected(*row) for row in zip(*columns)]
        mask = (1 << 8 * SIZES[case.result]) - 1
        for engine, (got,) in results.items():
            bits = [int(x) & mask for x in got[k, :n]]
            if engine == "device":
                RECORD.results += n
                if not case.exact_on_device:
                    continue
            failures += compare(case, engine, bits, [int(w) & mask for w in want], list(zip(*columns)))
    assert not failures, "\n".join(failures[:20])


def compare(case: Case, engine: str, got: list[int], want: list[int], rows: list[tuple]) -> list[str]:
    wrong, worst = [], 0.0
    for g, w, row in zip(got, want, rows):
        if case.bound is None:
            if g != w:
                wrong.append((row, g, w))
        elif g != w:
            deviation = case.bound(g, w, row)
            worst = max(worst, deviation)
            if not deviation <= 1:
                wrong.append((row, g, w))
    if case.bound is not None and engine == "device":
        RECORD.worst[case.text] = max(worst, RECORD.worst.get(case.text, 0.0))
    if not wrong:
        return []
    row, g, w = wrong[0]
    text = (
        f"{engine}: {case.text} of {', '.join(hex(x) for x in row)} gave {g:#x}, expected {w:#x} "
        f"({len(wrong)} of {len(rows)} differ)"
    )
    if engine == "device":
        examples = [{"inputs": [hex(x) for x in r], "device": hex(a), "expected": hex(b)} for r, a, b in wrong[:12]]
        RECORD.disagreements.append({"instruction": case.text, "differ": len(wrong), "examples": examples})
    return [text]


@functools.cache
def have_softsm() -> bool:
    return importlib.util.find_spec("numba") is not None and importlib.util.find_spec("softsm") is not None


# ---------------------------------------------------------------- the CUDA driver, by ctypes


class Refused(Exception):
    """The driver rejects the PTX."""


class Device:
    """A CUDA device through libcuda alone."""

    def __init__(self, lib):
        self.lib = lib
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        name = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", name, 100, device)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(major), 75, device)
        self.call("cuDeviceGetAttribute", ctypes.byref(minor), 76, device)
        self.capability = major.value * 10 + minor.value
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.version = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
        RECORD.device = f"{name.value.decode()} (sm_{self.capability})"

    def call(self, function: str, *args) -> None:
        code = getattr(self.lib, function)(*args)
        if code:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{function}: {text.value.decode() if text.value else code}")

    def accepts(self, ptx: str) -> bool:
        """Can this device run PTX for that target?"""
        target = ptx.split(".target", 1)[1].split()[0].rstrip(",")
        number = int("".join(filter(str.isdigit, target)))
        return number == self.capability if target[-1] in "af" else number <= self.capability

    @functools.lru_cache(maxsize=64)  # noqa: B019 - one device per process
    def function(self, ptx: str):
        log = ctypes.create_string_buffer(8192)
        options = (ctypes.c_int * 2)(5, 6)  # error log buffer, its size
        values = (ctypes.c_void_p * 2)(ctypes.cast(log, ctypes.c_void_p), ctypes.c_void_p(len(log)))
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        text = ctypes.create_string_buffer(ptx.encode())
        try:
            self.call("cuModuleLoadDataEx", ctypes.byref(module), text, 2, options, values)
        except RuntimeError as error:
            raise Refused(f"{error}: {log.value.decode(errors='replace').strip()}") from None
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"k")
        return function

    def run(self, ptx, inputs, outputs, grid, block, shared) -> list[np.ndarray]:
        function, pointers = self.function(ptx), []
        RECORD.texts.add(ptx)
        arrays = [np.ascontiguousarray(x) for x in (*inputs, *outputs)]
        for x in arrays:
            p = ctypes.c_uint64()
            self.call("cuMemAlloc_v2", ctypes.byref(p), ctypes.c_size_t(max(x.nbytes, 1)))
            self.call("cuMemcpyHtoD_v2", p, ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(x.nbytes))
            pointers.append(p)
        params = (ctypes.c_void_p * len(pointers))(*(ctypes.cast(ctypes.byref(p), ctypes.c_void_p) for p in pointers))
        if shared > 48 * 1024:
            self.call("cuFuncSetAttribute", function, 8, shared)
        self.call("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, shared, None, params, None)
        self.call("cuCtxSynchronize")
        results = []
        for x, p in zip(outputs, pointers[len(inputs) :]):
            y = np.empty_like(np.ascontiguousarray(x))
            self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(y.ctypes.data), p, ctypes.c_size_t(y.nbytes))
            results.append(y)
        for p in pointers:
            self.call("cuMemFree_v2", p)
        return results


@functools.cache
def cuda() -> Device | None:
    try:
        return Device(ctypes.CDLL("libcuda.so.1"))
    except (OSError, RuntimeError):
        return None
