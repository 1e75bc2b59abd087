"""The operands and the arithmetic of a wgmma product: four warps, sums in the order of k.

Products that continue the same accumulator are computed as one with a longer k (`Chain`).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from softsm.engine import program as pg
from softsm.engine.warps import Warp
from softsm.isa import fragments, sparsity, tensor_core, tensor_kernels
from softsm.isa.tensor_product import multiply_add
from softsm.memory import swizzle
from softsm.memory.swizzle import Descriptor

ROWS = np.arange(64)


class Shape(NamedTuple):
    """The shape and types that the instruction's name gives."""

    n: int
    k: int
    d: str
    a: str
    b: str
    saturate: bool
    negate: bool
    a_k_major: bool
    b_k_major: bool
    sparse: bool = False

    @property
    def given(self) -> int:
        """The number of elements in a row of A that the operand holds."""
        return self.k // 2 if self.sparse else self.k


class Part(NamedTuple):
    """One warp's share of one wgmma.mma_async."""

    warp: Warp
    line: int
    shape: Shape
    d_rows: np.ndarray
    a: Descriptor | np.ndarray  # descriptor, or the rows of A's registers
    b: Descriptor
    add: bool
    d_set: int  # D's registers as bits
    a_set: int  # A's, 0 where it lies in shared memory
    where: np.ndarray | None = None  # int [16, k/2]: columns of the given elements of A, where it is sparse

    @property
    def key(self) -> tuple[int, int, int, bool]:
        """The values that must be the same for all four warps."""
        return self.line, self.a.raw if isinstance(self.a, Descriptor) else -1, self.b.raw, self.add


class Chain(NamedTuple):
    """Products [first, end) of a group that accumulate into the same registers, so that they are one with a longer k.
    The other fields follow from their descriptors."""

    first: int
    end: int
    k: int
    a: tuple[tensor_core.Tile | np.ndarray, ...]  # A of each product: its tile, or registers
    b: tuple[tensor_core.Tile, ...]
    low: int  # first byte of shared memory
    high: int
    spans: np.ndarray  # bytes of all operands, for the checkers
    spans_at: int  # the table's address


def chains_of(parts: list[Part]) -> tuple[Chain, ...]:
    cuts = [i for i in range(len(parts)) if i == 0 or not continues(parts[i - 1], parts[i])]
    return tuple(chain_of(parts, first, end) for first, end in zip(cuts, [*cuts[1:], len(parts)]))


def chain_of(parts: list[Part], first: int, end: int) -> Chain:
    a: list[tensor_core.Tile | np.ndarray] = []
    b, spans, k = [], [], 0
    low, high = 1 << 30, 0
    for part in parts[first:end]:
        s = part.shape
        for source, k_major, rows, count, _ in tiles(part):
            spans.append(swizzle.spans(source, k_major, rows, count))
            begin, past = swizzle.footprint(source, k_major, rows, count)
            low, high = min(low, begin), max(high, past)
        if s.d == "f32":
            if isinstance(part.a, Descriptor):
                a.append(tensor_core.tile(part.a, s.a_k_major, 64, s.given, s.a, ROWS, True))
            else:
                a.append(part.a)
            b.append(tensor_core.tile(part.b, s.b_k_major, s.n, s.k, s.b, np.arange(k, k + s.k), False))
        k += s.k
    table = np.concatenate(spans)
    return Chain(first, end, k, tuple(a), tuple(b), low, high, table, table.ctypes.data)


def continues(old: Part, new: Part) -> bool:
    """Returns whether the new product accumulates further into the same registers, so that both can be one with a
    longer k. All warps run the same lines."""
    a, b = old.shape, new.shape
    same = (a.n, a.d, a.negate) == (b.n, b.d, b.negate) and a.d == "f32"
    return same and new.add and np.array_equal(old.d_rows, new.d_rows)


def tiles(part: Part) -> list[tuple[Descriptor, bool, int, int, str]]:
    """Returns (descriptor, K-major, rows of the table, chunks, name) of the operands in shared memory."""
    s = part.shape
    out = []
    both = ((part.a, s.a_k_major, 64, s.given, "A", s.a), (part.b, s.b_k_major, s.n, s.k, "B", s.b))
    for source, k_major, rows, k, name, element in both:
        if isinstance(source, Descriptor):
            per = tensor_core.chunk_elements(element)
            out.append((source, k_major, *((rows, k // per) if k_major else (k, -(-rows // per))), name))
    return out


def check_footprints(cta, part: Part) -> None:
    for source, k_major, rows, count, name in tiles(part):
        swizzle.locate(cta.shared, pg.SHARED_START, source, k_major, rows, count, f"operand {name} of wgmma")


# ---- arithmetic ---------------------------------------------------------------------------------------------------


def operand_a(parts: tuple[Part, ...], cta) -> np.ndarray:
    """Returns A of the warpgroup by lanes (stride 2), without the last two rows (zeros, NaNs)."""
    s = parts[0].shape
    if isinstance(parts[0].a, Descriptor):
        what = "operand A of wgmma"
        a = tensor_core.shared_lanes(
            cta.shared, pg.SHARED_START, parts[0].a, s.a_k_major, 64, s.given, s.a, ROWS, 2, what
        )[:-2]
    else:
        a = np.empty((s.given, 64), np.uint32)
        for i, part in enumerate(parts):
            a[:, 16 * i : 16 * i + 16] = fragments.left(part.warp.R[part.a], s.a).T.view(np.uint32)
    return expanded(parts, a.reshape(s.given, 64)).reshape(s.k * 2, 32)


def expanded(parts: tuple[Part, ...], a: np.ndarray) -> np.ndarray:
    """Returns A as [k, 64 rows], expanded if it is sparse."""
    return sparsity.expand(a.T, columns_of(parts)).T if parts[0].shape.sparse else a


def columns_of(parts: tuple[Part, ...]) -> np.ndarray:
    """Returns the columns of the elements that a sparse A gives: int [64, k/2]."""
    return np.concatenate([part.where for part in parts])


def write_registers(part: Part, result: np.ndarray, lane: int) -> None:
    if part.shape.d == "f32":
        tensor_kernels.fragments(result, 2, lane, part.warp.R, part.d_rows, 1)
    else:
        part.warp.R[part.d_rows] = fragments.accumulator_registers(result, part.shape.d)


def perform(chain: list[tuple[Part, ...]], plan: Chain) -> list[np.ndarray]:
    """Computes one product, or several that accumulate into the same registers; returns D of each of the four warps."""
    first = chain[0][0]
    s, cta = first.shape, first.warp.cta
    d = np.empty((s.n * 2, 32), np.uint32)  # [n * 2, 32]: lane = row of the product
    if s.d != "f32":
        return perform_alone(chain[0], d)
    a = np.empty((plan.k, 64), np.uint32)
    b = np.empty((-(-s.n // 16) * 16, plan.k), np.uint32)  # MN-major chunks may reach past the last row
    k, aside = 0, []
    for parts, of_a, of_b in zip(chain, plan.a, plan.b):
        shape = parts[0].shape
        given = np.empty((shape.given, 64), np.uint32) if shape.sparse else a[k : k + shape.k]
        if isinstance(of_a, np.ndarray):
            per = fragments.PER_REGISTER[shape.a]
            table = tensor_core.decoding(shape.a)
            for i, part in enumerate(parts):
                tensor_kernels.left(part.warp.R, of_a, per, table, given, 16 * i)
        else:
            of_a.read(cta.shared, given)
        of_b.read(cta.shared, b)
        if shape.sparse:
            a[k : k + shape.k] = expanded(parts, given)
            left, right = a[k : k + shape.k].view(np.float32).T, b[: s.n, k : k + shape.k].view(np.float32)
            aside.append(sparsity.set_aside(left, columns_of(parts), right))
        k += shape.k
    if s.negate:
        b ^= np.uint32(1 << 31)
    if first.add:
        for i, part in enumerate(chain[0]):
            tensor_kernels.fragments(d, 2, 16 * i, part.warp.R, part.d_rows, 0)
    multiply_add(d, 0, both_halves(s.n), a, b.view(np.float32), 1.0 if first.add else 0.0)
    for terms in aside:
        if terms is not None:
            total = d.view(np.float32).reshape(s.n, 64)
            fresh = total - terms if s.negate else total + terms
            d = np.where(np.isnan(fresh), np.uint32(tensor_core.CANONICAL_NAN), fresh.view(np.uint32)).reshape(-1, 32)
    return [d] * 4


@cache
def both_halves(n: int) -> np.ndarray:
    """Returns the plan of tensor_product for 64 rows."""
    return np.array([[pg.ALL, 0, n], [pg.ALL, 0, n]], np.int64)


def perform_alone(parts: tuple[Part, ...], d: np.ndarray) -> list[np.ndarray]:
    """Computes a product with f16 or s32 sums."""
    s, cta = parts[0].shape, parts[0].warp.cta
    a = operand_a(parts, cta)
    b = tensor_core.shared_rows(
        cta.shared, pg.SHARED_START, parts[0].b, s.b_k_major, s.n, s.k, s.b, "operand B of wgmma"
    )
    if s.negate:
        b = np.negative(b)
    aside = None
    if s.sparse:
        aside = sparsity.set_aside(a.reshape(s.k, 64).view(np.float32).T, columns_of(parts), b)
    multiply_add(d, 0, both_halves(s.n), np.concatenate([a, tensor_core.lane_rows(0, 2)]), b, 0.0)
    product = d.view(np.float32).reshape(s.n, 64)
    if aside is not None:
        product = product + aside
    out = []
    for i, part in enumerate(parts):
        old = fragments.accumulator(part.warp.R[part.d_rows], s.d)  # uint32 [n, 16]
        out.append(tensor_core.accumulate(old, product[:, 16 * i : 16 * i + 16], s.d, parts[0].add, 0, s.saturate))
    return out
