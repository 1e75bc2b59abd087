"""The CUDA driver interface, called as the libraries do that load libcuda.so.1."""

import ctypes
import struct
import subprocess
import sys

import numpy as np
import pytest

import softsm
from softsm.doors.driver.functions import LINKED, NOT_FOUND, Driver
from softsm.errors import Fault

SCALE = b"""
.version 8.0 .target sm_90a .address_size 64
.global .align 4 .u32 factor = 3;
.visible .entry scale(.param .u64 to, .param .u64 from, .param .u32 n)
{
  .reg .b32 %r<8>; .reg .b64 %rd<8>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [to]; ld.param.u64 %rd2, [from]; ld.param.u32 %r1, [n];
  mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x; mad.lo.u32 %r5, %r2, %r3, %r4;
  setp.ge.u32 %p1, %r5, %r1; @%p1 ret;
  mul.wide.u32 %rd3, %r5, 4; add.u64 %rd4, %rd2, %rd3; ld.global.u32 %r6, [%rd4];
  ld.global.u32 %r7, [factor]; mul.lo.u32 %r6, %r6, %r7; add.u64 %rd5, %rd1, %rd3; st.global.u32 [%rd5], %r6; ret;
}\0"""
N = 100
Q, I = ctypes.c_uint64, ctypes.c_int


class Library:
    """libcuda.so.1 by its name; a call that fails raises."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")

    def __getattr__(self, name):
        def call(*arguments):
            given = [Q(x) if isinstance(x, int) else x for x in arguments]
            status = getattr(self.library, name)(*given)
            if status:
                raise OSError(f"{name}: {status}")

        return call

    def answer(self, name, *arguments, kind=Q):
        found = kind()
        getattr(self, name)(ctypes.byref(found), *arguments)
        return found.value


def prepared():
    cuda = Library()
    cuda.cuInit(0)
    module = cuda.answer("cuModuleLoadData", SCALE)
    kernel = cuda.answer("cuModuleGetFunction", module, b"scale")
    host = np.arange(N, dtype=np.uint32)
    source, target = cuda.answer("cuMemAlloc_v2", 4 * N), cuda.answer("cuMemAlloc_v2", 4 * N)
    cuda.cuMemcpyHtoD_v2(source, host.ctypes.data, 4 * N)
    return cuda, module, kernel, source, target


def arguments(*values):
    boxes = [Q(x) for x in values]
    table = (Q * len(boxes))(*(ctypes.addressof(box) for box in boxes))
    table.boxes = boxes
    return table


def result(cuda, target):
    out = np.zeros(N, np.uint32)
    cuda.cuMemcpyDtoH_v2(out.ctypes.data, target, 4 * N)
    return out


def test_a_module_is_loaded_and_launched():
    with softsm.driver("sm_90a", sms=7):
        cuda, module, kernel, source, target = prepared()
        assert cuda.answer("cuDeviceGetAttribute", 16, 0, kind=I) == 7
        assert cuda.answer("cuDeviceGetAttribute", 75, 0, kind=I) == 9
        cuda.cuLaunchKernel(kernel, 4, 1, 1, 32, 1, 1, 0, 0, arguments(target, source, N), None)
        np.testing.assert_array_equal(result(cuda, target), 3 * np.arange(N))
        at, size, five = Q(), Q(), I(5)
        cuda.cuModuleGetGlobal_v2(ctypes.byref(at), ctypes.byref(size), module, b"factor")
        assert size.value == 4
        cuda.cuMemcpyHtoD_v2(at.value, ctypes.addressof(five), 4)
        config = struct.pack("<7I4xQQI4x", 4, 1, 1, 32, 1, 1, 0, 0, 0, 0)
        cuda.cuLaunchKernelEx(config, kernel, arguments(target, source, N), None)
        np.testing.assert_array_equal(result(cuda, target), 5 * np.arange(N))


def test_a_kernel_may_be_kept_from_one_run_to_the_next():
    """As in a module that the program imports: `softsm check` runs the program once for each order."""
    with softsm.driver("sm_90a"):
        kernel = prepared()[2]
    with softsm.driver("sm_90a"):
        cuda, _, other, source, target = prepared()
        assert other != kernel
        cuda.cuLaunchKernel(kernel, 4, 1, 1, 32, 1, 1, 0, 0, arguments(target, source, N), None)
        np.testing.assert_array_equal(result(cuda, target), 3 * np.arange(N))


def test_functions_are_found_by_name_and_version():
    with softsm.driver("sm_90a"):
        library = ctypes.CDLL("libcuda.so.1")
        at, status = ctypes.c_void_p(), I(7)
        ask = library.cuGetProcAddress_v2
        assert ask(b"cuDriverGetVersion", ctypes.byref(at), 12000, Q(0), ctypes.byref(status)) == 0 and not status.value
        version = I()
        assert ctypes.CFUNCTYPE(I, ctypes.c_void_p)(at.value)(ctypes.addressof(version)) == 0 and version.value >= 12000
        assert ask(b"cuTexRefCreate", ctypes.byref(at), 12000, Q(0), ctypes.byref(status)) == NOT_FOUND and status.value


def test_arguments_may_be_one_buffer():
    """CU_LAUNCH_PARAM_BUFFER_POINTER, as PyCUDA launches."""
    with softsm.driver("sm_90a"):
        cuda, _, kernel, source, target = prepared()
        held = ctypes.create_string_buffer(struct.pack("<QQI", target, source, N), 20)
        size = Q(20)
        extra = (Q * 5)(1, ctypes.addressof(held), 2, ctypes.addressof(size), 0)
        cuda.cuLaunchKernel(kernel, 4, 1, 1, 32, 1, 1, 0, 0, None, extra)
        np.testing.assert_array_equal(result(cuda, target), 3 * np.arange(N))
    with pytest.raises(softsm.errors.SoftsmError, match="scale: the arguments have 16 bytes; needed: 20"):
        with softsm.driver("sm_90a"):
            cuda, _, kernel, *_ = prepared()
            size.value = 16
            with pytest.raises(OSError, match="cuLaunchKernel"):
                cuda.cuLaunchKernel(kernel, 4, 1, 1, 32, 1, 1, 0, 0, None, extra)


def test_a_multiprocessor_keeps_a_kib_of_shared_memory_for_each_cta():
    """228 KiB in all; static shared memory counts, too."""
    name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
    with softsm.driver("sm_90a"):
        cuda, _, kernel, *_ = prepared()
        blocks = [
            cuda.answer(name, kernel, x, Q(y << 10), kind=I) for x, y in ((32, 113), (32, 114), (1024, 0), (32, 0))
        ]
        assert blocks == [2, 1, 2, 32]
        static = SCALE.replace(b".reg .pred", b".shared .b8 tile[1024]; .reg .pred")
        kernel = cuda.answer("cuModuleGetFunction", cuda.answer("cuModuleLoadData", static), b"scale")
        assert [cuda.answer(name, kernel, 32, Q(x << 10), kind=I) for x in (112, 113)] == [2, 1]


def test_modules_of_files_and_memory_of_other_kinds(tmp_path):
    (tmp_path / "scale.ptx").write_bytes(SCALE[:-1])
    with softsm.driver("sm_90a"):
        cuda = Library()
        module = cuda.answer("cuModuleLoad", str(tmp_path / "scale.ptx").encode())
        assert cuda.answer("cuModuleGetFunction", module, b"scale")
        with pytest.raises(OSError, match="cuModuleLoad: 301"):
            cuda.answer("cuModuleLoad", b"nowhere.ptx")
        at, pitch, start, size, major, minor = Q(), Q(), Q(), Q(), I(), I()
        cuda.cuMemAllocPitch_v2(ctypes.byref(at), ctypes.byref(pitch), 600, 3, 4)
        cuda.cuMemGetAddressRange_v2(ctypes.byref(start), ctypes.byref(size), at.value + 700)
        assert (pitch.value, start.value, size.value) == (1024, at.value, 3072)
        cuda.cuMemsetD16_v2(at.value, 0x1234, 5)
        assert ctypes.string_at(at.value, 10) == b"\x34\x12" * 5
        cuda.cuDeviceComputeCapability(ctypes.byref(major), ctypes.byref(minor), 0)
        assert (major.value, minor.value) == (9, 0)


def test_a_function_that_others_link_against_is_there_and_says_that_it_does_nothing():
    with pytest.raises(softsm.errors.SoftsmError, match="CUDA driver has no cuTexRefCreate"), softsm.driver("sm_90a"):
        library = ctypes.CDLL("libcuda.so.1")
        assert all(hasattr(library, name) and hasattr(library, f"{name}_v2") for name in LINKED)
        assert library.cuTexRefCreate(ctypes.byref(Q())) == 801


def test_findings_and_faults_reach_the_program():
    text = ctypes.c_char_p()
    with softsm.checking() as report, pytest.raises(Fault, match="out-of-bounds"), softsm.driver("sm_90a"):
        cuda, _, kernel, source, target = prepared()
        cuda.cuMemFree_v2(source)
        with pytest.raises(OSError) as told:
            cuda.cuLaunchKernel(kernel, 4, 1, 1, 32, 1, 1, 0, 0, arguments(target, source, N), None)
        cuda.cuGetErrorString(700, ctypes.byref(text))
        said = bytes(text.value)
    assert str(told.value) == "cuLaunchKernel: 700" and b"out-of-bounds" in said
    assert report.codes() == ["out-of-bounds"]


def test_errors_have_names_and_the_launch_is_not_lost():
    text = ctypes.c_char_p()

    def named(status):
        cuda.cuGetErrorName(status, ctypes.byref(text))
        return text.value

    with softsm.driver("sm_90a"):
        cuda, _, kernel, source, target = prepared()
        given = arguments(target, source, N)
        for call, threads in ((kernel, 2048), (0x77, 32)):
            with pytest.raises(OSError, match="cuLaunchKernel: (1|400)$"):
                cuda.cuLaunchKernel(call, 4, 1, 1, threads, 1, 1, 0, 0, given, None)
        assert [named(1), named(400), named(700)] == [
            b"CUDA_ERROR_INVALID_VALUE",
            b"CUDA_ERROR_INVALID_HANDLE",
            b"CUDA_ERROR_ILLEGAL_ADDRESS",
        ]
        cuda.cuGetErrorString(1, ctypes.byref(text))
        assert text.value == b"invalid value"
        with pytest.raises(OSError, match="cuGetErrorName: 1"):
            named(77)
        cuda.cuLaunchKernel(kernel, 4, 1, 1, 32, 1, 1, 0, 0, given, None)
        np.testing.assert_array_equal(result(cuda, target), 3 * np.arange(N))


def in_streams(cuda, kernel, target, source, *streams):
    for stream in streams:
        cuda.cuLaunchKernel(kernel, 4, 1, 1, 32, 1, 1, 0, stream, arguments(target, source, N), None)
        source = target


@pytest.mark.parametrize("ordered", [True, False])
def test_work_of_two_streams_needs_an_order(ordered):
    with softsm.checking() as report, softsm.driver("sm_90a"):
        cuda, _, kernel, source, target = prepared()
        streams = [cuda.answer("cuStreamCreate", 1) for _ in range(2)]
        event = cuda.answer("cuEventCreate", 0)
        in_streams(cuda, kernel, target, source, streams[0])
        cuda.cuEventRecord(event, streams[0])
        if ordered:
            cuda.cuStreamWaitEvent(streams[1], event, 0)
        in_streams(cuda, kernel, source, target, streams[1])
        cuda.cuStreamSynchronize(streams[1])
        np.testing.assert_array_equal(result(cuda, source), 9 * np.arange(N))
    assert set(report.codes()) == (set() if ordered else {"race"})
    if not ordered:
        assert "the kernel scale in stream 1" in str(report) and "test_functions.py:" in str(report)


@pytest.mark.parametrize("joined", [True, False])
def test_a_graph_is_captured_and_launched(joined, capsys):
    with softsm.checking() as report, softsm.driver("sm_90a"):
        cuda, _, kernel, source, target = prepared()
        stream, event = cuda.answer("cuStreamCreate", 1), cuda.answer("cuEventCreate", 0)
        cuda.cuStreamBeginCapture_v2(stream, 0)
        cuda.cuMemsetD32Async(target, 7, N, stream)
        cuda.cuEventRecord(event, stream)
        other = cuda.answer("cuStreamCreate", 1)
        cuda.cuStreamWaitEvent(other, event, 0)
        in_streams(cuda, kernel, target, source, other)
        cuda.cuEventRecord(event, other)
        out, graph = np.zeros(N, np.uint32), Q()
        if not joined:
            with pytest.raises(OSError, match="cuStreamEndCapture: 904"):
                cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
            assert "does not wait for all others of the capture" in capsys.readouterr().err
            return
        status = I()
        cuda.cuStreamIsCapturing(other, ctypes.byref(status))
        assert status.value == 1
        cuda.cuStreamWaitEvent(stream, event, 0)
        cuda.cuMemcpyDtoHAsync_v2(out.ctypes.data, target, 4 * N, stream)
        cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
        assert not out.any() and result(cuda, target)[5] != 15
        executable = cuda.answer("cuGraphInstantiateWithFlags", graph.value, 0)
        cuda.cuGraphDestroy(graph.value)
        for _ in range(2):
            cuda.cuGraphLaunch(executable, stream)
        cuda.cuStreamSynchronize(stream)
        np.testing.assert_array_equal(out, 3 * np.arange(N))
    assert not report.codes(), report


@pytest.mark.parametrize("call", ["cuFuncSetAttribute", "cuKernelSetAttribute"])
def test_much_shared_memory_must_be_asked_for(call, capsys):
    with softsm.driver("sm_90a"):
        cuda, _, kernel, source, target = prepared()
        launch = kernel, 4, 1, 1, 32, 1, 1, 100_000, 0, arguments(target, source, N), None
        with pytest.raises(OSError, match="cuLaunchKernel: 1$"):
            cuda.cuLaunchKernel(*launch)
        assert "scale: 100000 bytes of dynamic shared memory need cuFuncSetAttribute" in capsys.readouterr().err
        getattr(cuda, call)(*((kernel, 8, 100_000) if call == "cuFuncSetAttribute" else (8, 100_000, kernel, 0)))
        cuda.cuLaunchKernel(*launch)
        with pytest.raises(OSError, match=f"{call}: 1$"):
            getattr(cuda, call)(*((kernel, 8, 300_000) if call == "cuFuncSetAttribute" else (8, 300_000, kernel, 0)))


def test_what_is_no_ptx_is_refused():
    with pytest.raises(softsm.errors.SoftsmError, match="softsm runs PTX"), softsm.driver("sm_90a"):
        cuda = Library()
        with pytest.raises(OSError, match="cuModuleLoadData: 200"):
            cuda.answer("cuModuleLoadData", b"\x7fELF\0")


def test_behind_the_block_the_driver_is_gone():
    with softsm.driver("sm_90a"):
        cuda = Library()
        cuda.cuInit(0)
    with pytest.raises(OSError, match="cuInit: 4"):
        cuda.cuInit(0)
    cuda.cuMemFree_v2(16)  # libraries clean up when Python ends
    cuda.cuCtxPopCurrent_v2(ctypes.byref(Q()))


def test_every_name_is_served():
    names = Driver.functions()
    assert len(names) > 60 and names == sorted(set(names)) and all(name.startswith("cu") for name in names)


LOADS = "import ctypes\nlibrary = ctypes.CDLL('libcuda.so.1')\n"


@pytest.mark.slow
@pytest.mark.parametrize("loads", ["from cuda.bindings import library\n", LOADS])
def test_a_program_that_loads_the_library(tmp_path, loads):
    """`softsm run` makes softsm the driver when a package is imported that asks for it (a stand-in for the package
    tells when), or at once where the program names the library."""
    package = tmp_path / "cuda" / "bindings"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LOADS)
    program = tmp_path / "program.py"
    program.write_text(
        loads + "import ctypes\nversion = ctypes.c_int()\n"
        "assert library.cuDriverGetVersion(ctypes.byref(version)) == 0\nprint('driver', version.value)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "softsm", "run", str(program)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "driver 12080" in done.stdout, done.stderr
