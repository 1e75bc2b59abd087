"""Programs that compile CUDA C++ while they run: libnvrtc as they load it, with clang behind it."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

import softsm
from softsm.doors.cuda.compile import CompileError, find_clang
from softsm.doors.driver import library, nvrtc

SAXPY = """
template <typename T> __global__ void saxpy(T a, const T* x, T* out, int n) {
    __shared__ T tile[128];
    int i = blockIdx.x * 128 + threadIdx.x;
    tile[threadIdx.x] = x[i];
    BARRIER;
    if (i < n) out[i] = a * tile[(threadIdx.x + 1) & 127];
}
__constant__ int table[4];
"""


@pytest.fixture(scope="module")
def clang():
    try:
        find_clang()
    except CompileError as problem:
        pytest.skip(str(problem))


def listed(*words: str) -> ctypes.Array:
    return (ctypes.c_char_p * max(len(words), 1))(*(x.encode() for x in words))


def created(lib: ctypes.CDLL, text: str, headers: dict[str, str] | None = None) -> ctypes.c_void_p:
    made, given = ctypes.c_void_p(), headers or {}
    contents, names = listed(*given.values()), listed(*given)
    assert lib.nvrtcCreateProgram(ctypes.byref(made), text.encode(), b"saxpy.cu", len(given), contents, names) == 0
    return made


def log_of(lib: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    assert lib.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert lib.nvrtcGetProgramLog(program, text) == 0
    return text.value.decode()


def ptx_of(lib: ctypes.CDLL, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    assert lib.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert lib.nvrtcGetCUBIN(program, text) == 0
    return text.raw


@pytest.fixture
def libraries():
    with softsm.driver("sm_90a") as state:
        yield SimpleNamespace(
            cu=ctypes.CDLL("libcuda.so.1"), nvrtc=ctypes.CDLL("libnvrtc.so.12"), state=state,
            newer=ctypes.CDLL("libnvrtc.so.13"), runtime=ctypes.CDLL("libcudart.so.12"),
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("barrier", ["__syncthreads()", ""])
def test_a_template_is_compiled_named_and_launched(clang, libraries, barrier):
    lib, cu = libraries.nvrtc, libraries.cu
    program = created(lib, SAXPY)
    for name in (b"saxpy<float>", b"&table"):
        assert lib.nvrtcAddNameExpression(program, name) == 0
    options = listed("--gpu-architecture=sm_90a", "-DBARRIER=" + barrier, "--std=c++17", "-lineinfo")
    assert lib.nvrtcCompileProgram(program, len(options), options) == 0, log_of(lib, program)
    names = {}
    for name in (b"saxpy<float>", b"&table"):
        found = ctypes.c_char_p()
        assert lib.nvrtcGetLoweredName(program, name, ctypes.byref(found)) == 0
        names[name] = found.value
    assert names[b"&table"] == b"table"
    module, function, at = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
    assert cu.cuModuleLoadData(ctypes.byref(module), ptx_of(lib, program)) == 0
    assert lib.nvrtcDestroyProgram(ctypes.byref(program)) == 0 and not program.value
    assert cu.cuModuleGetFunction(ctypes.byref(function), module, names[b"saxpy<float>"]) == 0
    assert cu.cuMemAlloc_v2(ctypes.byref(at), 2048) == 0
    x = np.arange(256, dtype=np.float32)
    assert cu.cuMemcpyHtoD_v2(at, ctypes.c_void_p(x.ctypes.data), 1024) == 0
    out = ctypes.c_uint64(at.value + 1024)
    values = [ctypes.c_float(2), at, out, ctypes.c_int(256)]
    args = (ctypes.c_void_p * 4)(*(ctypes.addressof(v) for v in values))
    with softsm.checking() as report:
        assert cu.cuLaunchKernel(function, 2, 1, 1, 128, 1, 1, 0, None, args, None) == 0
    found = np.empty(256, np.float32)
    assert cu.cuMemcpyDtoH_v2(ctypes.c_void_p(found.ctypes.data), out, 1024) == 0
    assert (found == 2 * np.roll(x.reshape(2, 128), -1, axis=1).reshape(-1)).all() or not barrier
    assert ["race" in str(report), "saxpy.cu:7 in" in str(report)] == [not barrier] * 2, str(report)


@pytest.mark.slow
def test_headers_of_the_program_and_functions_without_an_attribute(clang, libraries):
    """-default-device: these are the device's, also in front of a kernel, but not what the text includes."""
    text = (
        '#include "twice.h"\nint more(int x) { return twice(x) + 1; }\n__global__ void k(int* p) { *p = more(*p); }\n'
    )
    program = created(libraries.nvrtc, text, {"twice.h": "__device__ inline int twice(int x) { return 2 * x; }\n"})
    options = listed("-default-device", "-arch=compute_90")
    assert libraries.nvrtc.nvrtcCompileProgram(program, 2, options) == 0, log_of(libraries.nvrtc, program)
    assert b".target sm_90\n" in ptx_of(libraries.nvrtc, program)


@pytest.mark.slow
def test_an_error_of_the_compiler_is_in_the_log(clang, libraries, capfd):
    program = created(libraries.nvrtc, "__global__ void k() { nothing(); }")
    assert libraries.nvrtc.nvrtcCompileProgram(program, 0, None) == nvrtc.COMPILATION
    assert "saxpy.cu:1:23: error: use of undeclared identifier 'nothing'" in log_of(libraries.nvrtc, program)
    assert "nothing" in capfd.readouterr().err


def test_an_unknown_option_is_rejected_by_name(libraries):
    program = created(libraries.nvrtc, "")
    assert libraries.nvrtc.nvrtcCompileProgram(program, 1, listed("--turbo")) == nvrtc.INVALID_OPTION
    assert "unrecognized option --turbo" in log_of(libraries.nvrtc, program)


def test_states_and_versions(libraries):
    lib, version = libraries.newer, (ctypes.c_int(), ctypes.c_int())
    assert lib.nvrtcVersion(*map(ctypes.byref, version)) == 0
    assert (version[0].value, version[1].value) == nvrtc.VERSION
    size, program = ctypes.c_size_t(), created(lib, "")
    assert lib.nvrtcGetPTXSize(program, ctypes.byref(size)) == nvrtc.INVALID_PROGRAM
    assert lib.nvrtcGetLoweredName(program, b"k", ctypes.byref(size)) == nvrtc.NO_NAMES_BEFORE
    assert lib.nvrtcGetPTXSize(ctypes.c_void_p(999), ctypes.byref(size)) == nvrtc.INVALID_PROGRAM
    lib.nvrtcGetErrorString.restype = ctypes.c_char_p
    assert lib.nvrtcGetErrorString(nvrtc.COMPILATION) == b"NVRTC_ERROR_COMPILATION"


def test_a_library_that_torch_has_loaded_stays(libraries):
    assert library.is_another("libc.so.6")
    assert not library.is_another("libnvrtc.so.12") and not library.is_another("libnothing.so.1")


def test_the_runtime_library_knows_the_gpu(libraries):
    found = ctypes.c_int()
    assert libraries.runtime.cudaDeviceGetAttribute(ctypes.byref(found), 75, 0) == 0
    assert found.value == 9


@pytest.mark.parametrize(
    ("given", "arch", "flags", "default_device"),
    [
        (["--gpu-architecture=compute_90a"], "sm_90a", [], False),
        (["-arch=sm_100f", "-default-device"], "sm_100a", [], True),
        (["-I", "a", "--include-path=b", "-Ic", "-I/x/include/cuda/std"], "sm_90a", ["-Ia", "-Ib", "-Ic"], False),
        (["-DN=2", "-D", "M", "--define-macro=K=1"], "sm_90a", ["-DN=2", "-DM", "-DK=1"], False),
        (["--use_fast_math", "--fmad=false", "--fmad=true"], "sm_90a", ["-ffast-math", "-ffp-contract=off"], False),
        (["-O3", "--expt-relaxed-constexpr", "-Wno-all"], "sm_90a", [], False),
        (["-std=c++20", "-pch", "-G", "--maxrregcount=32", "-diag-suppress", "20012"], "sm_90a", ["-std=c++20"], False),
    ],
)
def test_options(given, arch, flags, default_device):
    assert nvrtc.options_of(given, "sm_90a") == (arch, flags, default_device)


def test_what_is_included_and_kernels_stay_outside():
    text = "// #include __global__ {\n#include <a>\n__global__ void k(int*) { }\nint f();"
    region = nvrtc.for_device(text)
    assert region.count(nvrtc.BEGIN) == region.count(nvrtc.END) == 3
    assert f"{nvrtc.END}\n#include <a>\n{nvrtc.BEGIN}\n#line 3\n" in region
    assert f"{nvrtc.END} __global__ void k(int*) {{ {nvrtc.BEGIN}" in region
