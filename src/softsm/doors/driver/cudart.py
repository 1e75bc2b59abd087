"""libcudart, as far as TileLang needs it to find a GPU and to ask about it. Programs in CUDA C++ have another runtime
(doors/cuda)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from softsm.doors.driver import library

if TYPE_CHECKING:
    from softsm.doors.driver.functions import Driver

SONAMES = ("libcudart.so.12", "libcudart.so.13")
TAIL = """
const char *cudaGetErrorString(int status) { return status ? "an error of softsm's CUDA driver" : "no error"; }
const char *cudaGetErrorName(int status) { return status ? "cudaErrorUnknown" : "cudaSuccess"; }
"""
SAME = {  # function of the runtime: the driver's, with the same arguments
    "cudaDeviceGetAttribute": "cuDeviceGetAttribute",
    "cudaGetDeviceCount": "cuDeviceGetCount",
    "cudaGetDevice": "cuCtxGetDevice",
    "cudaSetDevice": "cuInit",
    "cudaDeviceSynchronize": "cuCtxSynchronize",
    "cudaMalloc": "cuMemAlloc",
    "cudaFree": "cuMemFree",
    "cudaMemGetInfo": "cuMemGetInfo",
    "cudaStreamSynchronize": "cuStreamSynchronize",
    "cudaGetLastError": "cuInit",
    "cudaPeekAtLastError": "cuInit",
}


def load(driver: Driver) -> Callable[[], None]:
    """Loads the libraries; returns what ends that."""

    def serve(name: str, a: list[int]) -> int:
        return driver.serve(SAME[name], a)

    text = library.source(list(SAME), TAIL)
    ends = [library.loaded(x, text, list(SAME), serve) for x in SONAMES if not library.is_another(x)]
    return library.all_of(ends)
