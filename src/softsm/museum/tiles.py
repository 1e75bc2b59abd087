"""Pieces of a tiny attention kernel in PTX: swizzled tiles of 128-byte bf16 rows, and products over head dim 64."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np

from softsm.memory.tensor_map import DataType, Swizzle
from softsm.memory.tensor_map_image import encode_tiled
from softsm.museum import text as t

D = 64  # head dim: 128 bytes of bf16
ROWS = 32  # keys of a tile
_labels = itertools.count()

SHARED = f""".shared .align 1024 .b8 q_tile[16384]; .shared .align 1024 .b8 k_tile[{ROWS * 128}];
.shared .align 8 .b64 bar; .shared .align 8 .b64 full; .shared .align 8 .b64 full2; .shared .align 4 .b32 place;"""


def draw(seed: int, *shape: int) -> np.ndarray:
    """Draws bf16 values, 4096 different ones in a random order, so that a wrong element can be identified."""
    count = int(np.prod(shape))
    rng = np.random.default_rng(seed)
    codes = np.concatenate([rng.permutation(4096) for _ in range(-(-count // 4096))])[:count]
    return (0x3800 + codes % 2048 + 0x8000 * (codes // 2048)).astype(np.uint16).view(ml_dtypes.bfloat16).reshape(shape)


def copy_tile(name: str, source: str, rows: int, stride: int, flip: str = "and.b32 %r96, %r94, 7;") -> str:
    """All 128 threads copy rows of 128 bytes, `stride` bytes apart, into a tile with the 128-byte swizzle.
    flip: %r96 = what the chunk number is XORed with, from the row in %r94."""
    label = f"COPY{next(_labels)}"
    return f"""mov.u32 %r93, %r0;
{label}: setp.ge.u32 %p10, %r93, {rows * 8};
@%p10 bra {label}_END;
shr.u32 %r94, %r93, 3;
and.b32 %r95, %r93, 7;
mul.wide.u32 %rd32, %r94, {stride};
mul.wide.u32 %rd33, %r95, 16;
add.s64 %rd32, %rd32, %rd33;
add.s64 %rd32, {source}, %rd32;
ld.global.v4.b32 {{%r100, %r101, %r102, %r103}}, [%rd32];
{flip}
xor.b32 %r95, %r95, %r96;
shl.b32 %r95, %r95, 4;
shl.b32 %r94, %r94, 7;
mov.u32 %r97, {name};
add.u32 %r97, %r97, %r94;
add.u32 %r97, %r97, %r95;
st.shared.v4.b32 [%r97], {{%r100, %r101, %r102, %r103}};
add.u32 %r93, %r93, 128;
bra {label};
{label}_END:
"""


def describe(to: str, name: str) -> str:
    return t.descriptor(to, name, lbo=16, sbo=1024, swizzle=2)


def product(d: str, a: str, b: str, n: int = ROWS) -> str:
    """One thread issues D = A B^T over head dim 64, in four steps of 32 bytes."""
    lines = []
    for step in range(D // 16):
        lines += [
            f"add.s64 %rd34, {a}, {2 * step};",
            f"add.s64 %rd35, {b}, {2 * step};",
            t.mma(d, "%rd34", "%rd35", t.idesc(n=n), int(step > 0)),
        ]
    return "\n".join(lines)


def write_out(n: int = ROWS, base: str = "%rd3", offset: int = 0, stride: int = ROWS) -> str:
    """Each thread reads its row of the accumulator at %r4 and writes it to base[row, :]."""
    lines = [
        t.load("%r4", 100, n) + t.WAIT_LD + f"mul.wide.u32 %rd36, %r0, {4 * stride};\nadd.s64 %rd36, {base}, %rd36;\n"
    ]
    lines += [f"st.global.b32 [%rd36+{4 * i + 4 * offset}], %r{100 + i};\n" for i in range(n)]
    return "".join(lines)


START = t.init("bar", "full", "full2") + t.alloc(64) + t.lanes_of_warp("%r4")
PUBLISH = "fence.proxy.async;\nbar.sync 0;\n"
READ_ACC = t.wait("bar", 0) + t.AFTER


def tensor_of(index: int, rows: int, box: int = ROWS):
    """Returns a maker of the tensor map of argument `index`: bf16 [rows, 64], boxes of `box` rows, 128-byte swizzle."""

    def make(arrays):
        return encode_tiled(
            DataType.BFLOAT16, 2, arrays[index].ctypes.data, (D, rows), (128,), (D, box), swizzle=Swizzle.B128
        )

    return make


def scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return q.astype(np.float32) @ k.astype(np.float32).T


def close(got: np.ndarray, want: np.ndarray) -> bool:
    return bool(np.allclose(got, want, rtol=1e-4, atol=1e-4))
