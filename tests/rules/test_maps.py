"""Tensor maps that the kernel changes itself: released behind the change, acquired before the copy."""

import numpy as np
import pytest
from ruling import holds

from softsm.memory.tensor_map import DataType
from softsm.memory.tensor_map_image import encode_tiled
from softsm.museum import text as t

SHARED = ".shared .align 1024 .b8 a[4096]; .shared .align 128 .b8 made[128]; .shared .align 8 .b64 bar;"
X, OUT = np.arange(1024, dtype=np.uint32), np.zeros(1024, np.uint32)
RELEASE = "fence.proxy.tensormap::generic.release.gpu;\n"
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%rd3], 128;\n"
CHANGE = "tensormap.replace.tile.global_address.global.b1024.b64 [%rd3], %rd1;\n"
PUBLISH = (
    "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [made], %rd1;\n"
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd3], [made], 128;\n"
)
LOAD = t.expect("bar", 4096) + t.tma_load("a", "%rd3", "0, 0", "bar")
READ = "mov.u32 %r40, a;\nshl.b32 %r41, %r0, 2;\nadd.u32 %r40, %r40, %r41;\nld.shared.u32 %r42, [%r40];\n"


def tensor_map(arrays):
    """The argument `maps`: [32 rows, 32 columns] of u32, boxes of 32 x 32, where the kernel can change it."""
    raw = np.zeros(192, np.uint8)
    image = raw[-raw.ctypes.data % 64 :][:128]
    made = bytes(encode_tiled(DataType.UINT32, 2, arrays[0].ctypes.data, (32, 32), (128,), (32, 32)))
    image[:] = np.frombuffer(made, np.uint8)
    return image


ARGS = [X, OUT, tensor_map]


def changed(keep):
    """Warp 0 changes the map in place; warp 1 copies with it. `keep`: what is left of release, barrier, acquire."""
    first = t.only("%p0", CHANGE + (RELEASE if "release" in keep else ""))
    second = t.only("thread 32", (ACQUIRE if "acquire" in keep else "") + LOAD)
    body = t.init("bar") + first + ("bar.sync 0;\n" if "barrier" in keep else "") + second + t.wait("bar", 0) + READ
    return t.kernel(body, "x out maps", shared=SHARED, target="sm_90a", version="8.6")


@pytest.mark.parametrize("missing", ["release", "barrier", "acquire"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_map_changed_in_place_is_released_and_acquired(missing, strict):
    all_of = ("release", "barrier", "acquire")

    def make(keep):
        return changed([x for x in all_of if keep or x != missing])

    report = holds(make, args=ARGS, strict=strict)
    (finding,) = report.diagnostics
    assert "tensor map" in finding.message and "fence.proxy.tensormap" in finding.fix, str(report)


def test_a_published_map_is_acquired():
    """tensormap.cp_fenceproxy releases by itself; the fence of one thread serves others behind a barrier."""

    def make(keep):
        fill = "mul.wide.u32 %rd6, %r2, 4;\nadd.s64 %rd6, %rd3, %rd6;\nld.global.u32 %r43, [%rd6];\n"
        fill += "mov.u32 %r44, made;\nmad.lo.u32 %r44, %r2, 4, %r44;\nst.shared.u32 [%r44], %r43;\n"
        fill += "bar.warp.sync 0xffffffff;\n"
        first = t.only("warp 0", fill + PUBLISH + (ACQUIRE if keep else ""))
        body = t.init("bar") + first + "bar.sync 0;\n" + t.only("thread 32", LOAD) + t.wait("bar", 0) + READ
        return t.kernel(body, "x out maps", shared=SHARED, target="sm_90a", version="8.6")

    holds(make, args=ARGS)


@pytest.mark.parametrize("strict", [True, False])
def test_a_map_written_by_ordinary_stores_is_acquired(strict):
    """A map is copied from shared memory word by word: the copy engine may have kept the old one."""

    def make(keep):
        store = "mul.wide.u32 %rd6, %r2, 4;\nadd.s64 %rd6, %rd3, %rd6;\nld.global.u32 %r43, [%rd6];\n"
        store += "st.global.u32 [%rd6], %r43;\n" + RELEASE
        second = t.only("thread 32", (ACQUIRE if keep else "") + LOAD)
        body = t.init("bar") + t.only("warp 0", store) + "bar.sync 0;\n" + second + t.wait("bar", 0) + READ
        return t.kernel(body, "x out maps", shared=SHARED, target="sm_90a", version="8.6")

    (finding,) = holds(make, args=ARGS, strict=strict).diagnostics
    assert "tensor map" in finding.message and "acquire" in finding.fix
