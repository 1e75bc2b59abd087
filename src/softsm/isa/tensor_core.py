"""What a tensor core computes: decode operands, multiply, accumulate. Pure functions on arrays.

Products are exact in float32 for every 16-bit and smaller format, and sums are float32 in no promised order, which
is all PTX promises ("at least single precision"). tf32 operands lose their 13 low bits. 8-bit integers are exact: a
sum of 32 products stays below 2**24.

Shapes: A is [M, K], B is [N, K] (both "rows of k"), and products come transposed, [N, M], the way tensor memory
holds D.
"""

from __future__ import annotations

import numpy as np

from softsm import formats
from softsm.memory import swizzle
from softsm.memory.swizzle import Descriptor

_STORAGE = {"f16": np.uint16, "bf16": np.uint16, "tf32": np.uint32}


def element_bytes(name: str) -> int:
    """Bytes an operand element takes in shared memory (a sub-byte one of kind f8f6f4: its container)."""
    return {"f16": 2, "bf16": 2, "tf32": 4}.get(name, 1)


def shared_operand(
    shared: np.ndarray, floor: int, descriptor: Descriptor, k_major: bool, rows: int, k: int, name: str, what: str
) -> np.ndarray:
    """The operand a descriptor names, float32 [rows, k] (rows = m or n)."""
    per = 16 // element_bytes(name)
    if k_major:
        data = swizzle.read(shared, floor, descriptor, True, rows, k // per, what)  # [rows, bytes of k]
    else:
        data = swizzle.read(shared, floor, descriptor, False, k, -(-rows // per), what)  # [k, bytes of rows]
    if name in _STORAGE:
        values = formats.decode(data.view(_STORAGE[name]), name)
    elif formats.BITS[name] < 8:
        values = formats.decode(formats.unpack_padded(data, name), name)
    else:
        values = formats.decode(data, name)
    return values if k_major else values.T[:rows]


def shared_fp4(shared: np.ndarray, floor: int, descriptor: Descriptor, rows: int, k: int, what: str) -> np.ndarray:
    """Operand of kinds mxf4 and mxf4nvf4: K-major e2m1, two in a byte without padding; float32 [rows, k]."""
    data = swizzle.read(shared, floor, descriptor, True, rows, k // 32, what)
    return formats.decode(formats.unpack_nibbles(data), "e2m1")


def tensor_operand(cells: np.ndarray, name: str, packed_fp4: bool = False) -> np.ndarray:
    """A from tensor memory: cells uint32 [columns, lanes] of consecutive k -> float32 [lanes, k]."""
    if name == "tf32":
        return formats.decode(cells, "tf32").T
    columns, lanes = cells.shape
    if name in ("f16", "bf16"):
        halves = np.empty((columns, 2, lanes), np.uint16)
        halves[:, 0], halves[:, 1] = cells & 0xFFFF, cells >> 16
        return formats.decode(halves.reshape(columns * 2, lanes), name).T
    containers = np.ascontiguousarray(cells.T).view(np.uint8)  # [lanes, 4*columns]
    if packed_fp4:
        return formats.decode(formats.unpack_nibbles(containers), "e2m1")
    return formats.decode_container(containers, name)


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[M, K] x [N, K] -> [N, M], in slices of 64 rows of A: OpenBLAS is twice as fast on narrow outputs when K is 16."""
    m, n = a.shape[0], b.shape[0]
    out = np.empty((n, m), np.result_type(a, b))
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is the program's business
        for i in range(0, m, 64):
            np.matmul(b, a[i : i + 64].T, out=out[:, i : i + 64])
    return out


def scaled(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Block scaling: values [rows, k] times scales [rows, blocks], each for k/blocks neighbours. Exact: float32 where
    the exponents leave room for the product of two such operands, float64 otherwise."""
    rows, k = values.shape
    finite = scales[np.isfinite(scales) & (scales != 0)]
    wide = finite.size and (finite.max() > 2.0**40 or finite.min() < 2.0**-40)
    dtype = np.float64 if wide else np.float32
    blocks = scales.shape[1]
    return (values.reshape(rows, blocks, k // blocks).astype(dtype) * scales[:, :, None].astype(dtype)).reshape(rows, k)


def accumulate(
    cells: np.ndarray, product: np.ndarray, kind: str, add: bool, scale_exponent: int = 0, saturate: bool = False
) -> np.ndarray:
    """New D as uint32 cells. cells and product have one shape; kind 'f32', 'f16' or 's32'; add: D = A*B + D*2^-s."""
    with np.errstate(invalid="ignore", over="ignore"):
        if kind == "s32":
            total = product.astype(np.int64)
            if add:
                total += cells.view(np.int32)
            if saturate:
                total = total.clip(-(1 << 31), (1 << 31) - 1)
            return total.astype(np.int32).view(np.uint32)
        if kind == "f16":
            if add:
                old = cells.astype(np.uint16).view(np.float16).astype(np.float32)
                product = product + (np.ldexp(old, -scale_exponent) if scale_exponent else old)
            return product.astype(np.float16).view(np.uint16).astype(np.uint32)
        if add:
            old = cells.view(np.float32)
            product = product + (np.ldexp(old, -scale_exponent) if scale_exponent else old)
        return np.asarray(product, np.float32).view(np.uint32)
