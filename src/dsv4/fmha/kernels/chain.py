"""Gradients of fmha whose accumulators would not fit into one kernel: write P and dS to memory, then multiply.

backward_scores       writes P and dS of a slab of heads (or of rows of one head), in the dtype, to memory
backward_products     dV = P^T dO, dK = dS^T Q, dQ = dS K

These are five products of the size of the scores, the minimum; a slab holds 4 bytes per score. slabs.py describes
how the sequences of a varlen batch lie in it. cuBLAS multiplies up to 7 % faster without a mask, but needs a
launch for each head or sequence and each range of rows, copies if the number of keys is not a multiple of 8, and
fp32 results to add: (4, 3, 806) causal at head dim 256 needs 25 launches and 1.5 ms with it, 3 and 0.3 ms without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from dsv4.fmha.kernels.backward import FP16_P_SCALE, TILE, Packed, descriptor, is_addressable, made_like, row_tiles
from dsv4.fmha.kernels.backward_arguments import GradientScales
from dsv4.fmha.kernels.product_tiles import ProductOptions
from dsv4.fmha.kernels.ragged import NOT_RAGGED, RaggedOperands, ragged_descriptor
from dsv4.fmha.kernels.score_tiles import ScoreScales, SlabTerms
from dsv4.fmha.kernels.slabs import SlabSequences, SlabSizes
from dsv4.fmha.problem import FmhaProblem
from dsv4.kernels.compat import TensorDescriptor
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program, Slot

SLAB_BYTES = 1 << 30  # bytes of P and dS together
LEAST_TOKENS = 100  # tokens of a query head, from which on it is not packed with others


@dataclass(frozen=True)
class Slab:
    """The work of one launch of each kernel: pairs (sequence, KV head) and packed rows of each."""

    pairs: slice
    rows: slice
    tiles: tuple[int, int] = (0, 0)  # varlen: range of the first row tile of a sequence

    @property
    def size(self) -> tuple[int, int]:
        return self.pairs.stop - self.pairs.start, self.rows.stop - self.rows.start


class SlabTiles(NamedTuple):
    """Tiles of 128 rows, and of 128 keys, that P and dS of a KV head of a varlen batch have in a slab."""

    rows: int  # all of them, or `window` and those of the longest sequence
    keys: int
    window: int

    @staticmethod
    def find(group: int, tokens: int, sequences: int, longest_q: int, longest_k: int) -> SlabTiles | None:
        """Return the tiles of a slab, or None if two sequences as long as the longest do not fit."""
        keys, longest = -(-longest_k // TILE), -(-longest_q * group // TILE)
        every = tokens * group // TILE + sequences
        fit = SLAB_BYTES // (4 * TILE * TILE * max(keys, 1))
        if fit >= every:
            return SlabTiles(every, keys, every)
        return SlabTiles(fit, keys, fit - longest) if fit >= 2 * longest else None


def takes(p: FmhaProblem) -> bool:
    """Return whether the chain accepts the batch as it is."""
    return (
        p.kind == "dense" or SlabTiles.find(p.group, p.q.shape[0], p.batch, p.max_seqlen_q, p.max_seqlen_k) is not None
    )


def one_head_each(p: FmhaProblem) -> bool:
    """Return whether query heads are not packed: then Q, dO and dQ need no copies, but tiles are cut by
    tokens of one head, not by rows of all. P and dS of the heads that share keys must be in one slab."""
    if p.group == 1 or p.max_seqlen_q < LEAST_TOKENS or p.deterministic and p.kind == "varlen":
        return False
    if p.kind == "dense":
        return 4 * -(-p.max_seqlen_k // TILE) * TILE * p.max_seqlen_q * p.group <= SLAB_BYTES
    slab_tiles = SlabTiles.find(1, p.q.shape[0], p.batch, p.max_seqlen_q, p.max_seqlen_k)
    return slab_tiles is not None and 4 * TILE * TILE * slab_tiles.rows * slab_tiles.keys * p.group <= SLAB_BYTES


class Chain:
    """The chain of launches: scores, then products, slab by slab."""

    scores: ClassVar[Any]  # the kernels of the architecture
    products: ClassVar[Any]
    box_rows: ClassVar[int]  # rows of the boxes that they write by TMA
    tile_rows: ClassVar[int]  # rows, or keys, of a tile of products
    score_options: ClassVar[dict[str, int]]  # ring slots, registers of the roles
    product_options: ClassVar[dict[str, int]]

    def __init__(self, target: Target, program: Program, x: Packed):
        self.target, self.program, self.x = target, program, x
        wanted = dict(dq=x.dq, dk=x.dk, dv=x.dv)
        self.gradients = {name: y for name, y in wanted.items() if y is not None}
        self.share = x.heads // x.k.shape[1]  # pairs that share K and V
        self.slab_tiles = None
        if (s := x.sequences) is not None:
            self.slab_tiles = SlabTiles.find(x.pack, x.p.max_seqlen_q, s.count, s.longest_q, s.longest_k)

    def prepare(self) -> None:
        x, program, slabs = self.x, self.program, self._slabs()
        pairs, rows = slabs[0].size
        keys = -(-x.keys // TILE) * TILE if self.slab_tiles is None else self.slab_tiles.keys * TILE
        buffers = program.workspace("P and dS", (2, pairs, rows, keys), x.q.dtype)
        sums = x.lse2  # not read
        if self.slab_tiles is None and rows < x.rows:  # dK and dV are summed over slabs
            size = 2 * -(-x.keys // self.tile_rows) * self.tile_rows * x.width
            sums = program.workspace("sums of dv and dk", (size,), torch.float32)
        made = {
            name: y if is_addressable(y) else made_like(program, y.shape, y.dtype, x.sequences)
            for name, y in self.gradients.items()
        }
        for name in ("dk", "dv"):
            if self.slab_tiles is not None and x.p.left >= 0 and name in made:
                program.fill(made[name], 0)  # gradients of keys that no query sees
        for slab in slabs:
            p, ds = (buffers[n, : slab.size[0], : slab.size[1], : min(keys, x.keys)] for n in (0, 1))
            self._scores(slab, p, ds)
            self._products(slab, p, ds, made, sums)
        for name, y in self.gradients.items():
            if y is not made[name]:
                program.copy(y, made[name])

    def _slabs(self) -> list[Slab]:
        x = self.x
        all_pairs = x.batch * x.heads
        if (slab_tiles := self.slab_tiles) is not None:
            every = row_tiles(x.rows, x.sequences)
            pairs = (
                max(1, SLAB_BYTES // (4 * TILE * TILE * max(slab_tiles.rows * slab_tiles.keys, 1)) // self.share)
                * self.share
            )
            return [
                Slab(
                    slice(z, min(z + pairs, all_pairs)),
                    slice(0, slab_tiles.rows * TILE),
                    (begin, begin + slab_tiles.window),
                )
                for z in range(0, all_pairs, pairs)
                for begin in range(0, every, slab_tiles.window)
            ]
        per_row = 4 * -(-x.keys // TILE) * TILE
        pairs = min(all_pairs, SLAB_BYTES // (per_row * x.rows) // self.share * self.share)
        if pairs:
            return [Slab(slice(z, min(z + pairs, all_pairs)), slice(0, x.rows)) for z in range(0, all_pairs, pairs)]
        # Split at multiples of tokens, so that no group is cut, and of tiles.
        unit = TILE * x.p.group
        rows = max(unit, SLAB_BYTES // per_row // unit * unit)
        return [
            Slab(slice(z, z + 1), slice(r, min(r + rows, x.rows)))
            for z in range(all_pairs)
            for r in range(0, x.rows, rows)
        ]

    def _sizes(self, slab: Slab) -> SlabSizes:
        pairs, rows = slab.size
        sizes = self.x.sizes | (dict(rows=rows) if self.slab_tiles is None else {})
        return SlabSizes(row_begin=slab.rows.start, pairs=pairs, pair_begin=slab.pairs.start, share=self.share, **sizes)

    def _sequences(self, slab: Slab) -> SlabSequences:
        if (s := self.x.sequences) is None or self.slab_tiles is None:
            return SlabSequences(self.x.lse2, self.x.lse2, 0, 0, 0, 0, 0)
        return SlabSequences(s.cu_q, s.cu_k, s.count, *slab.tiles, self.slab_tiles.rows, self.slab_tiles.keys)

    def _operands(self, tensors: dict[str, Slot], rows: int) -> tuple[dict[str, TensorDescriptor], RaggedOperands]:
        """Return descriptors with boxes of 64 columns."""
        box = [1, 1, rows, 64]
        if self.slab_tiles is None:
            return {f"{name}_desc": descriptor(y, box) for name, y in tensors.items()}, NOT_RAGGED
        found = {name: ragged_descriptor(y, box) for name, y in tensors.items()}
        ragged = NOT_RAGGED._replace(**{name: place for name, (_, place) in found.items()})
        return {f"{name}_desc": desc for name, (desc, _) in found.items()}, ragged

    def _scores(self, slab: Slab, p: Slot, ds: Slot) -> None:
        x, (pairs, rows) = self.x, slab.size
        lse2, delta = (y.flatten(0, 1)[slab.pairs] for y in (x.lse2, x.delta))
        read, ragged = self._operands({name: getattr(x, name) for name in ("q", "k", "dout", "v")}, TILE)
        arguments = read | dict(
            ragged=ragged,
            sequences=self._sequences(slab),
            p_desc=descriptor(p, [1, self.box_rows, 64]),
            ds_desc=descriptor(ds, [1, self.box_rows, 64]),
            terms=SlabTerms(lse2, delta, x.rows),
            sizes=self._sizes(slab),
            scales=ScoreScales(x.scale, FP16_P_SCALE, x.ds_scale),
        )
        tiles = pairs * -(-rows // TILE) * (-(-x.keys // TILE) if self.slab_tiles is None else self.slab_tiles.keys)
        self._launch(type(self).scores, tiles, arguments, self.score_options)

    def _products(self, slab: Slab, p: Slot, ds: Slot, made: dict[str, Slot], sums: Slot) -> None:
        x, (pairs, rows) = self.x, slab.size
        read, ragged = self._operands({name: getattr(x, name) for name in ("q", "k", "dout")}, 64)
        written, places = self._operands({name: made.get(name, x.k) for name in ("dq", "dk", "dv")}, self.box_rows)
        ragged = ragged._replace(dq=places.dq, dk=places.dk, dv=places.dv)
        if (s := x.sequences) is None:
            of_keys, of_rows = (-(-size // self.tile_rows) for size in (x.keys, rows))
        else:
            of_keys, of_rows = (size // self.tile_rows + s.count for size in (x.keys, x.rows))
        tiles = (2 * of_keys + self.share * of_rows) * (x.width // 256)
        pairs //= self.share
        arguments = (
            read
            | written
            | dict(
                p_desc=descriptor(p, [1, 64, 64]),
                ds_desc=descriptor(ds, [1, 64, 64]),
                ragged=ragged,
                sums_ptr=sums,
                sizes=self._sizes(slab),
                sequences=self._sequences(slab),
                opts=ProductOptions(
                    **{name: int(name in made) for name in ("dv", "dk", "dq")},
                    at_once=self._pairs_at_once(pairs, tiles),
                    add=int(slab.rows.start > 0),
                    keep=int(self.slab_tiles is None and slab.rows.stop < x.rows),
                ),
                scales=GradientScales(x.scale, FP16_P_SCALE, x.p.softmax_scale, x.ds_scale),
            )
        )
        self._launch(type(self).products, tiles * pairs, arguments, self.product_options)

    def _pairs_at_once(self, pairs: int, tiles: int) -> int:
        """Return the pairs per slab. Without a mask, these are as few as keep every SM busy: their operands stay in L2.
        Under a mask tiles differ, and many must be ordered by length: (4, 16, 4096) at head dim 256 takes 1784 us with
        2 tiles per SM, 1508 with 8."""
        p = self.x.p
        waves = 8 if p.left >= 0 or p.right >= 0 else 1
        return min(pairs, -(-waves * self.target.num_sms // tiles))

    def _launch(self, kernel: Any, tiles: int, arguments: dict[str, Any], options: dict[str, int]) -> None:
        constants = dict(
            D=self.x.width, M=self.tile_rows, SCALED=self.x.fp16, VARLEN=self.slab_tiles is not None, num_warps=4
        )
        self.program.launch(kernel, (min(tiles, self.target.num_sms),), arguments, **constants, **options)
