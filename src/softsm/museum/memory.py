"""Exhibits about order and memory: missing fences, commits of the wrong thread, tensor maps, NaN rows."""

from __future__ import annotations

import numpy as np

from softsm.memory.tensor_map import DataType, Swizzle, encode_tiled
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
    "tensor-map",
)
def tensor_maps(bug: bool) -> Program | Report:
    """Encoding refuses each mistake by the name of the field; the alignment of the map itself shows at its
    first use."""
    data = on_boundary(np.zeros((64, 64), np.uint16))
    base = data.ctypes.data
    wrong = {
        "global_strides": dict(strides=(100,)),
        "global_address": dict(base=base + 2),
        "box_dim": dict(box=(128, 32)),
    }
    report = Report()
    for field, change in wrong.items():
        try:
            encoded(**{"base": base, **(change if bug else {})})
        except ValueError as error:
            if field not in str(error):
                report.add(Diagnostic("refusal", f"{field} is wrong, but the message says: {error}"))
            continue
        if bug:
            report.add(Diagnostic("refusal", f"a map with wrong {field} was accepted"))
    if report:
        return report
    # The map lies in global memory, at the address in %rd1: the bug is off by 16 bytes.
    image = np.zeros(256, np.uint8)
    image[16 * bug : 16 * bug + 128] = np.frombuffer(encoded(base), np.uint8)
    load = t.tma_load("a", "%rd10", "0, 0", "bar")
    body = (
        t.init("bar")
        + f"add.s64 %rd10, %rd1, {16 * bug};\n"
        + t.only("%p0", t.expect("bar", 4096) + load)
        + t.wait("bar", 0)
    )
    shared = ".shared .align 1024 .b8 a[4096]; .shared .align 8 .b64 bar;"
    return Program(
        t.kernel(body, "map x", shared=shared, target="sm_90a", version="8.6"), [image, Kept(data)]
    )


class Kept:
    """An argument passed as it is, so that its address stays the one in the map."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __call__(self, arrays) -> np.ndarray:
        return self.array


@exhibit(25, "shared memory written by ordinary stores, read by a product without fence.proxy.async", "race")
def no_proxy_fence(bug: bool) -> Program:
    body = t.fill("a", 4096) + ("" if bug else "fence.proxy.async;\n") + "bar.sync 0;\n"
    return whole(
        body + t.only("%p0", t.mma("%r3", "%rd10", "%rd11", t.idesc()) + t.commit("bar")) + read(), 16.0
    )


@exhibit(26, "commit issued by another thread than the product's", "race", "deadlock")
def foreign_commit(bug: bool) -> Program:
    body = t.only("thread 0", t.mma("%r3", "%rd10", "%rd11", t.idesc()))
    body += t.only("thread 1" if bug else "thread 0", t.commit("bar"))
    return whole(body + read(), 16.0)


@exhibit(27, "masked gather loads a NaN row and multiplies it by 0", "nan")
def nan_row(bug: bool) -> Program:
    """Row 5 of K is padding full of NaN. The twin writes zeros where the row is masked."""
    k = K[:ROWS].copy()
    k[5] = np.nan
    clean = K[:ROWS].copy()
    clean[5] = 0
    mask = (
        ""
        if bug
        else "setp.eq.u32 %p4, %r94, 5;\n"
        + "".join(f"selp.b32 %r{100 + i}, 0, %r{100 + i}, %p4;\n" for i in range(4))
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
