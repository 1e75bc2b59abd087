"""Python packages that load PTX through the CUDA driver, as their users call them; softsm is the driver. None of them
is in the environment of `make test`: `pip install cuda-core cuda-bindings==12.9.4`, and PyCUDA builds itself."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry shift(.param .u64 x, .param .u32 n)
{
    .shared .align 4 .b8 tile[512];
    .reg .b32 %r<12>; .reg .b64 %rd<4>; .reg .pred %p; .reg .f32 %f<3>;
    ld.param.u64 %rd1, [x]; ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %tid.x; mad.lo.u32 %r4, %r2, 128, %r3;
    mad.wide.u32 %rd2, %r4, 4, %rd1; ld.global.f32 %f1, [%rd2];
    mov.u32 %r5, tile; mad.lo.u32 %r6, %r3, 4, %r5; st.shared.f32 [%r6], %f1;
    bar.sync 0;
    add.u32 %r7, %r3, 1; and.b32 %r7, %r7, 127; mad.lo.u32 %r8, %r7, 4, %r5; ld.shared.f32 %f2, [%r8];
    setp.ge.u32 %p, %r4, %r1; @%p ret;
    st.global.f32 [%rd2], %f2;
    ret;
}
"""
START = f"import ctypes\nimport numpy as np\nPTX = '''{PTX}'''\nhost = np.arange(512, dtype=np.float32)\n"
END = """
want = np.roll(np.arange(512, dtype=np.float32).reshape(4, 128), -1, axis=1).reshape(-1)
print("right" if (out == want).all() else "wrong")
"""
CORE = """
from cuda.core import Device, LaunchConfig, ObjectCode, launch
device = Device()
device.set_current()
stream = device.create_stream()
kernel = ObjectCode.from_ptx(PTX.encode()).get_kernel("shift")
buffer = device.allocate(2048, stream=stream)
ctypes.memmove(int(buffer.handle), host.ctypes.data, 2048)
launch(stream, LaunchConfig(grid=4, block=128), kernel, buffer, np.int32(512))
stream.sync()
out = np.empty_like(host)
ctypes.memmove(out.ctypes.data, int(buffer.handle), 2048)
"""
BINDINGS = """
from cuda.bindings import driver as cu
def of(found):
    assert not found[0], found
    return found[1] if len(found) > 1 else None
of(cu.cuInit(0))
of(cu.cuCtxSetCurrent(of(cu.cuDevicePrimaryCtxRetain(of(cu.cuDeviceGet(0))))))
kernel = of(cu.cuModuleGetFunction(of(cu.cuModuleLoadData(PTX.encode() + b"\\0")), b"shift"))
at = of(cu.cuMemAlloc(2048))
of(cu.cuMemcpyHtoD(at, host.ctypes.data, 2048))
given = (int(at), 512), (ctypes.c_void_p, ctypes.c_int)
of(cu.cuLaunchKernel(kernel, 4, 1, 1, 128, 1, 1, 0, 0, given, 0))
out = np.empty_like(host)
of(cu.cuMemcpyDtoH(out.ctypes.data, at, 2048))
"""
PYCUDA = """
import pycuda.autoinit
import pycuda.driver as cuda
kernel = cuda.module_from_buffer(PTX.encode()).get_function("shift")
out = host.copy()
kernel(cuda.InOut(out), np.int32(512), grid=(4, 1), block=(128, 1, 1))
"""
PACKAGES = {"cuda.core": CORE, "cuda.bindings": BINDINGS, "pycuda": PYCUDA}


def missing(name: str) -> bool:
    try:
        return find_spec(name) is None
    except ModuleNotFoundError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.skipif(missing(x), reason=f"{x} is not installed")) for x in PACKAGES]
)
def test_a_program_of_the_package(tmp_path, name):
    """It is right; and without the barrier of its kernel softsm names the race."""
    for planted in (False, True):
        text = START + PACKAGES[name] + END
        (tmp_path / "program.py").write_text(text.replace("bar.sync 0;", "") if planted else text)
        command = [sys.executable, "-m", "softsm", "check", str(tmp_path / "program.py"), "--arch", "sm_90a"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
        assert done.returncode == planted, done.stdout + done.stderr
        said = ("race: ", "put a barrier") if planted else ("right", "nothing found")
        assert all(word in done.stdout for word in said), done.stdout
