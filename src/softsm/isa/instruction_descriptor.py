"""The 32-bit instruction descriptor of tcgen05.mma: types, shape, transposes, scale-factor ids; decoded and checked.

bits     f16 tf32 f8f6f4 i8        mxf8f6f4                 mxf4 mxf4nvf4
0-1      sparsity selector         -                        -
2        sparse                    sparse                   sparse
3        saturate (i8)             -                        -
4-5      D: f16 0, f32 1, s32 2    B scale id               B scale id (0, 2)
7-9      A type                    A type                   A type (e2m1 = 1)
10-12    B type                    B type                   B type (bits 10-11)
13, 14   negate A, B (not i8)      same                     same
15, 16   A, B are MN-major         same                     0
17-22    N >> 3                    same                     same
23       0                         scales ue8m0 = 1         ue8m0 = 1, ue4m3 = 0
24-28    M >> 4                    same                     same
29-30    -                         A scale id               A scale id (0, 2)
30-31    .ws: maximum shift        -                        bit 31: K = 96 (sm_103)
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from softsm.errors import Fault

BLOCK_SCALED = ("mxf8f6f4", "mxf4", "mxf4nvf4")
K_OF_KIND = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_TYPES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _F8F6F4,
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": _F8F6F4,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
_SELECTORS = ("this kind accepts 0", "this kind accepts 0 or 1")
_RESULTS = {"f16": {0: "f16", 1: "f32"}, "tf32": {1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"}, "i8": {2: "s32"}}


class InstructionDescriptor(NamedTuple):
    kind: str
    m: int
    n: int
    k: int
    a: str  # element formats
    b: str
    d: str  # 'f32', 'f16', 's32'
    negate: bool  # whether the product is negated
    a_k_major: bool
    b_k_major: bool
    saturate: bool
    scale: str  # '', 'ue8m0' or 'ue4m3'
    a_scale_id: int
    b_scale_id: int
    sparse: bool = False
    selector: int = 0  # which column of a pair has the metadata

    @property
    def given(self) -> int:
        """The number of elements in a row of A that the operand holds."""
        return self.k // 2 if self.sparse else self.k


def _shape_error(kind: str, m: int, n: int, group: int, ws: bool, sparse: bool) -> str | None:
    """Returns None if the shape is legal, else the accepted shapes."""
    if ws:
        columns = (64, 128) if sparse else (64, 128, 256)
        if m in (32, 64, 128) and n in columns:
            return None
        return f".ws{'.sp' * sparse} accepts M 32, 64 or 128 and N {', '.join(map(str, columns))}"
    if group == 2:
        if sparse and kind in BLOCK_SCALED and m != 256:
            return f"cta_group::2 with a sparse kind::{kind} accepts M 256"
        if m not in (128, 256):
            return "cta_group::2 accepts M 128 or 256"
        return None if n in range(16, 257, 16) else "cta_group::2 accepts N 16..256 in steps of 16"
    rows = (128,) if kind in BLOCK_SCALED else (64, 128)
    if m not in rows:
        return f"cta_group::1 with kind::{kind} accepts M {' or '.join(map(str, rows))}"
    if kind == "i8":
        legal = n in (8, 16, 24, 32, *range(48, 257, 16))
        return None if legal else "kind::i8 accepts N 8, 16, 24, 32, 48, 64, ... 256"
    return None if n in range(8, 257, 8) else "cta_group::1 accepts N 8..256 in steps of 8"


@lru_cache(maxsize=4096)
def decode(value: int, kind: str, group: int = 1, ws: bool = False, sparse: bool = False) -> InstructionDescriptor:
    """Decodes the descriptor, or raises Fault('idesc') that names the wrong field."""

    def wrong(text: str) -> Fault:
        return Fault("idesc", f"instruction descriptor 0x{value:08x} of kind::{kind}: {text}")

    block = kind in BLOCK_SCALED
    if value >> 2 & 1 != sparse:
        asks = ("dense", "sparse")
        raise wrong(f"bit 2 asks for a {asks[not sparse]} product, the instruction is {asks[sparse]}")
    selector = value & 3 if sparse and not block else 0
    if selector > (kind in ("f16", "tf32")):
        raise wrong(f"sparsity selector {selector} in bits 0-1; {_SELECTORS[kind in ('f16', 'tf32')]}")
    types = _TYPES[kind]
    a = types.get(value >> 7 & 7)
    b = types.get(value >> 10 & (3 if kind in ("mxf4", "mxf4nvf4") else 7))
    if a is None or b is None:
        name, first = ("A", 7) if a is None else ("B", 10)
        accepted = ", ".join(f"{c} = {t}" for c, t in types.items())
        raise wrong(f"type {value >> first & 7} of {name} in bits {first}-{first + 2}; accepted: {accepted}")
    d = "f32"
    if not block:
        d = _RESULTS[kind].get(value >> 4 & 3, "")
        if not d:
            accepted = ", ".join(f"{c} = {t}" for c, t in _RESULTS[kind].items())
            raise wrong(f"type {value >> 4 & 3} of D in bits 4-5; accepted: {accepted}")
        if kind == "f16" and (a != b or (a == "bf16" and d != "f32")):
            raise wrong(f"A {a}, B {b}, D {d}; accepted: f16 x f16 -> f16 or f32, and bf16 x bf16 -> f32")
    m, n = (value >> 24 & 31) << 4, (value >> 17 & 63) << 3
    text = _shape_error(kind, m, n, group, ws, sparse)
    if text is not None:
        raise wrong(f"M = {m}, N = {n}; {text}")
    negate = bool((value >> 13 & 1) ^ (value >> 14 & 1))
    if kind == "i8" and value >> 13 & 3:
        raise wrong("kind::i8 cannot negate (bits 13-14)")
    transposed = value >> 15 & 3
    if transposed and kind in ("mxf4", "mxf4nvf4"):
        raise wrong("packed 4-bit operands are K-major: bits 15-16 must be 0")
    scale, a_id, b_id = "", 0, 0
    if block:
        scale = "ue8m0" if value >> 23 & 1 else "ue4m3"
        if scale == "ue4m3" and kind != "mxf4nvf4":
            raise wrong("scale type ue4m3 (bit 23 = 0); this kind accepts ue8m0 (1)")
        a_id, b_id = value >> 29 & 3, value >> 4 & 3
        if kind != "mxf8f6f4":
            if value >> 31:
                raise wrong("bit 31 asks for K = 96, which exists on sm_103 only")
            if a_id & 1 or b_id & 1:
                raise wrong(f"scale-factor ids A {a_id}, B {b_id}; accepted: 0 and 2")
    return InstructionDescriptor(
        kind,
        m,
        n,
        K_OF_KIND[kind] << sparse,
        a,
        b,
        d,
        negate,
        not transposed & 1,
        not transposed >> 1,
        bool(value >> 3 & 1) and kind == "i8",
        scale,
        a_id,
        b_id,
        sparse,
        selector,
    )


def encode(
    kind: str,
    m: int,
    n: int,
    a: str,
    b: str,
    d: str = "f32",
    *,
    a_mn: bool = False,
    b_mn: bool = False,
    negate_a: bool = False,
    negate_b: bool = False,
    saturate: bool = False,
    scale: str = "ue8m0",
    a_scale_id: int = 0,
    b_scale_id: int = 0,
    sparse: bool = False,
    selector: int = 0,
) -> int:
    """Returns the inverse of `decode`, for tests and explanations."""
    codes = {name: code for code, name in _TYPES[kind].items()}
    value = codes[a] << 7 | codes[b] << 10 | negate_a << 13 | negate_b << 14 | a_mn << 15 | b_mn << 16
    value |= n >> 3 << 17 | m >> 4 << 24 | sparse << 2 | selector
    if kind in BLOCK_SCALED:
        return value | b_scale_id << 4 | (scale == "ue8m0") << 23 | a_scale_id << 29
    return value | {name: code for code, name in _RESULTS[kind].items()}[d] << 4 | saturate << 3
