"""Exhibits about order and memory: missing fences, commits of the wrong thread, tensor maps, NaN rows."""

from __future__ import annotations

import warnings

import numpy as np

from softsm.memory.tensor_map import DataType, Swizzle
from softsm.memory.tensor_map_image import encode_tiled
from softsm.museum import text as t
from softsm.museum import tiles
from softsm.museum.exhibits import Program, exhibit, on_boundary
from softsm.museum.operands import K, Q
from softsm.museum.tensor import read, whole
from softsm.museum.tiles import ROWS, D
from softsm.report.diagnostics import Diagnostic, Report


def encoded(base: int, dims=(64, 32), strides=(128,), box=(64, 32), swizzle=Swizzle.B128) -> bytes:
    return encode_tiled(DataType.BFLOAT16, 2, base, dims, strides, box, swizzle=swizzle)


@exhibit(
    22,
    "tensor map: strides in elements, unaligned base, box wider than the swizzle, map not 64-byte aligned",
    strides_in_elements=("tensor-map",),
    unaligned_base=("tensor-map",),
    wide_box=("tensor-map",),
    unaligned_map=("tensor-map",),
)
def tensor_maps(bug: str) -> Program | Report:
    """Encoding rejects a wrong base or box and names the field. The driver accepts 64, the row's elements, as a stride,
    so that is only a warning. A misaligned map is found at its first use."""
    data = on_boundary(np.zeros((64, 64), np.uint16))
    base = data.ctypes.data
    mistakes: dict[str, dict] = {
        "strides_in_elements": dict(strides=(64,)),
        "unaligned_base": dict(base=base + 2),
        "wide_box": dict(box=(128, 32)),
    }
    wrong = mistakes.get(bug, {})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            encoded(**{"base": base, **wrong})
    except ValueError as error:
        return Report([Diagnostic("tensor-map", str(error))])
    # The map lies in global memory, at the address in %rd1.
    shift = 16 if bug == "unaligned_map" else 0

    def image(arrays) -> np.ndarray:
        bytes_ = on_boundary(np.zeros(256, np.uint8))
        bytes_[shift : shift + 128] = np.frombuffer(encoded(**{"base": base, **wrong}), np.uint8)
        return bytes_

    load = t.tma_load("a", "%rd10", "0, 0", "bar")
    body = t.init("bar") + f"add.s64 %rd10, %rd1, {shift};\n"
    body += t.only("%p0", t.expect("bar", 4096) + load) + t.wait("bar", 0)
    shared = ".shared .align 1024 .b8 a[4096]; .shared .align 8 .b64 bar;"
    return Program(t.kernel(body, "map x", shared=shared, target="sm_90a", version="8.6"), [image, Kept(data)])


class Kept:
    """An argument passed as it is, so that its address stays the one in the map."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __call__(self, arrays) -> np.ndarray:
        return self.array


@exhibit(25, "shared memory written by ordinary stores, read by a product without fence.proxy.async", "race")
def no_proxy_fence(bug: str) -> Program:
    body = t.fill("a", 4096) + ("" if bug else "fence.proxy.async;\n") + "bar.sync 0;\n"
    return whole(body + t.only("%p0", t.mma("%r3", "%rd10", "%rd11", t.idesc()) + t.commit("bar")) + read(), 16.0)


@exhibit(26, "commit issued by another thread than the product's", "race", "deadlock")
def foreign_commit(bug: str) -> Program:
    body = t.only("thread 0", t.mma("%r3", "%rd10", "%rd11", t.idesc()))
    body += t.only("thread 1" if bug else "thread 0", t.commit("bar"))
    return whole(body + read(), 16.0)


@exhibit(27, "masked gather loads a NaN row and multiplies it by 0", "nan")
def nan_row(bug: str) -> Program:
    """Row 5 of K is padding full of NaN. The twin writes zeros where the row is masked."""
    k = K[:ROWS].copy()
    k[5] = np.nan
    clean = K[:ROWS].copy()
    clean[5] = 0
    mask = (
        ""
        if bug
        else "setp.eq.u32 %p4, %r94, 5;\n" + "".join(f"selp.b32 %r{100 + i}, 0, %r{100 + i}, %p4;\n" for i in range(4))
    )
    body = tiles.START + tiles.copy_tile("q_tile", "%rd1", 128, 128)
    body += tiles.copy_tile("k_tile", "%rd2", ROWS, 128, mask + "and.b32 %r96, %r94, 7;")
    body += tiles.describe("%rd10", "q_tile") + tiles.describe("%rd11", "k_tile") + tiles.PUBLISH
    body += t.only("%p0", tiles.product("%r3", "%rd10", "%rd11") + t.commit("bar"))
    body += tiles.READ_ACC + tiles.write_out() + t.dealloc(64)
    right = tiles.scores(Q, clean)
    assert k.shape == (ROWS, D)
    return Program(
        t.kernel(body, "q k out", shared=tiles.SHARED),
        [Q, k, np.zeros((128, ROWS), np.float32)],
        right=lambda arrays: tiles.close(arrays[2], right),
    )
