"""Gradients of fmha where accumulators for one kernel would not fit: P and dS to memory, then products.

backward_scores       P and dS of a slab of heads (or of rows of one head), in the dtype, to memory
backward_products     dV = P^T dO, dK = dS^T Q, dQ = dS K

These are five products of the size of the scores, as many as there must be; a slab holds 4 bytes per score. cuBLAS
multiplies up to 7 % faster without a mask, but needs a launch for each head or sequence and each range of rows, copies
for a number of keys that is not a multiple of 8, and fp32 results to add: (4, 3, 806) causal at head dim 256 takes 25
launches and 1.5 ms with it, 3 and 0.3 without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dsv4.fmha.kernels.backward import FP16_P_SCALE, TILE, Packed, descriptor, is_addressable, made_like
from dsv4.fmha.kernels.backward_arguments import GradientScales
from dsv4.fmha.kernels.product_tiles import ProductOptions
from dsv4.fmha.kernels.score_tiles import ScoreScales, SlabSizes, SlabTerms
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program, Slot

SLAB_BYTES = 1 << 30  # of P and dS together


@dataclass(frozen=True)
class Slab:
    """What one launch of each kernel covers: pairs (sequence, KV head) and packed rows of each."""

    pairs: slice
    rows: slice

    @property
    def size(self) -> tuple[int, int]:
        return self.pairs.stop - self.pairs.start, self.rows.stop - self.rows.start


class Chain:
    """Slab by slab: scores, then products."""

    scores: ClassVar[Any]  # the kernels of the architecture
    products: ClassVar[Any]
    box_rows: ClassVar[int]  # of what they write by TMA
    tile_rows: ClassVar[int]  # rows, or keys, of a tile of products
    score_options: ClassVar[dict[str, int]]  # ring slots, registers of the roles
    product_options: ClassVar[dict[str, int]]

    def __init__(self, target: Target, program: Program, x: Packed):
        self.target, self.program, self.x = target, program, x
        wanted = dict(dq=x.dq, dk=x.dk, dv=x.dv)
        self.gradients = {name: y for name, y in wanted.items() if y is not None}

    def prepare(self) -> None:
        x, program, slabs = self.x, self.program, self._slabs()
        pairs, rows = slabs[0].size
        buffers = program.workspace("P and dS", (2, pairs, rows, -(-x.keys // TILE) * TILE), x.q.dtype)
        sums = x.lse2  # unread
        if rows < x.rows:  # dK and dV are added up
            size = 2 * -(-x.keys // self.tile_rows) * self.tile_rows * x.width
            sums = program.workspace("sums of dv and dk", (size,), torch.float32)
        made = {
            name: y if is_addressable(y) else made_like(program, y.shape, y.dtype, None)
            for name, y in self.gradients.items()
        }
        for slab in slabs:
            p, ds = (buffers[n, : slab.size[0], : slab.size[1], : x.keys] for n in (0, 1))
            self._scores(slab, p, ds)
            self._products(slab, p, ds, made, sums)
        for name, y in self.gradients.items():
            if y is not made[name]:
                program.copy(y, made[name])

    def _slabs(self) -> list[Slab]:
        x = self.x
        per_row = 4 * -(-x.keys // TILE) * TILE
        all_pairs = x.batch * x.heads
        pairs = min(all_pairs, SLAB_BYTES // (per_row * x.rows))
        if pairs:
            return [Slab(slice(z, min(z + pairs, all_pairs)), slice(0, x.rows)) for z in range(0, all_pairs, pairs)]
        # By tokens, so that no group is cut, and by tiles.
        unit = TILE * x.p.group
        rows = max(unit, SLAB_BYTES // per_row // unit * unit)
        return [
            Slab(slice(z, z + 1), slice(r, min(r + rows, x.rows)))
            for z in range(all_pairs)
            for r in range(0, x.rows, rows)
        ]

    def _sizes(self, slab: Slab) -> SlabSizes:
        pairs, rows = slab.size
        sizes = self.x.sizes | dict(rows=rows)
        return SlabSizes(row_begin=slab.rows.start, pairs=pairs, pair_begin=slab.pairs.start, **sizes)

    def _scores(self, slab: Slab, p: Slot, ds: Slot) -> None:
        x, (pairs, rows) = self.x, slab.size
        lse2, delta = (y.flatten(0, 1)[slab.pairs] for y in (x.lse2, x.delta))
        read = {f"{name}_desc": descriptor(getattr(x, name), [1, 1, TILE, 64]) for name in ("q", "k", "dout", "v")}
        arguments = read | dict(
            p_desc=descriptor(p, [1, self.box_rows, 64]),
            ds_desc=descriptor(ds, [1, self.box_rows, 64]),
            terms=SlabTerms(lse2, delta, x.rows),
            sizes=self._sizes(slab),
            scales=ScoreScales(x.scale, FP16_P_SCALE, x.ds_scale),
        )
        tiles = pairs * -(-rows // TILE) * -(-x.keys // TILE)
        self._launch(type(self).scores, tiles, arguments, self.score_options)

    def _products(self, slab: Slab, p: Slot, ds: Slot, made: dict[str, Slot], sums: Slot) -> None:
        x, (pairs, rows) = self.x, slab.size
        read = {f"{name}_desc": descriptor(getattr(x, name), [1, 1, 64, 64]) for name in ("q", "k", "dout")}
        written = {
            f"{name}_desc": descriptor(made.get(name, x.k), [1, 1, self.box_rows, 64]) for name in ("dq", "dk", "dv")
        }
        of_keys, of_rows = (-(-size // self.tile_rows) for size in (x.keys, rows))
        tiles = (2 * of_keys + of_rows) * (x.width // 256)
        arguments = (
            read
            | written
            | dict(
                p_desc=descriptor(p, [1, 64, 64]),
                ds_desc=descriptor(ds, [1, 64, 64]),
                sums_ptr=sums,
                sizes=self._sizes(slab),
                opts=ProductOptions(
                    **{name: int(name in made) for name in ("dv", "dk", "dq")},
                    at_once=self._pairs_at_once(pairs, tiles),
                    add=int(slab.rows.start > 0),
                    keep=int(slab.rows.stop < x.rows),
                ),
                scales=GradientScales(x.scale, FP16_P_SCALE, x.p.softmax_scale, x.ds_scale),
            )
        )
        self._launch(type(self).products, tiles * pairs, arguments, self.product_options)

    def _pairs_at_once(self, pairs: int, tiles: int) -> int:
        """Without a mask, as few as keep every SM busy: their operands stay in the L2. Under a mask tiles differ, and
        many must be ordered by their length: (4, 16, 4096) at head dim 256 takes 1784 us with 2 tiles for each SM, 1508
        with 8."""
        p = self.x.p
        waves = 8 if p.left >= 0 or p.right >= 0 else 1
        return min(pairs, -(-waves * self.target.num_sms // tiles))

    def _launch(self, kernel: Any, tiles: int, arguments: dict[str, Any], options: dict[str, int]) -> None:
        constants = dict(D=self.x.width, M=self.tile_rows, SCALED=self.x.fp16, num_warps=4, **options)
        self.program.launch(kernel, (min(tiles, self.target.num_sms),), arguments, **constants)
