"""Gradients of fmha where accumulators for a kernel of their own would not fit: P and dS to memory, then products.

backward_scores       P and dS of a slab of heads (or of rows of one head), in the dtype, to memory
torch's products      dV = P^T dO, dK = dS^T Q, dQ = dS K

These are five products of the size of the scores, as many as there must be; a slab holds 4 bytes per score. Where not
every query sees every key, the products go by pieces of rows (dQ) and of keys (dK, dV), each with the range that it
sees. Ranges of keys are multiples of 8, with zeros past the last key: cuBLAS takes 5 to 8 times as long for others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from dsv4.fmha.kernels.backward import FP16_P_SCALE, TILE, Packed, descriptor
from dsv4.fmha.kernels.score_tiles import ScoreScales, SlabSizes, SlabTerms
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program, Slot

SLAB_BYTES = 1 << 30  # of P and dS together
# Of rows and of keys, where not everything is seen: with 8 an eighth too much is multiplied. At head dim 256 those
# products would be over before the next could be launched.
PIECES = {256: 4, 512: 8}
UNIT = 8  # keys


@dataclass(frozen=True)
class Slab:
    """What one launch of backward_scores covers: pairs (sequence, KV head) and packed rows of each."""

    pairs: slice
    rows: slice

    @property
    def size(self) -> tuple[int, int]:
        return self.pairs.stop - self.pairs.start, self.rows.stop - self.rows.start


class Chain:
    """Slab by slab: scores, then products."""

    kernel: ClassVar[Any]  # backward_scores of the architecture
    stored: ClassVar[list[int]]  # of P and dS at once
    options: ClassVar[dict[str, int]]  # ring slots, registers of the roles

    def __init__(self, target: Target, program: Program, x: Packed):
        self.target, self.program, self.x, self.p = target, program, x, x.p
        self.batch, self.heads, self.rows, self.keys = x.batch, x.heads, x.rows, x.keys
        self.masked = x.p.left >= 0 or x.p.right >= 0
        self.whole_keys = -(-self.keys // UNIT) * UNIT
        self.k, self.dk, self.dv = x.k, x.dk, x.dv
        if self.whole_keys > self.keys:
            self.k = self._longer("k")
            program.copy(self.k[:, :, : self.keys], x.k)
            program.fill(self.k[:, :, self.keys :], 0)
            self.dk, self.dv = (None if y is None else self._longer(n) for n, y in (("dk", x.dk), ("dv", x.dv)))

    def _longer(self, name: str) -> Slot:
        shape = (self.batch, self.heads, self.whole_keys, self.x.width)
        return self.program.workspace(f"whole {name}", shape, self.x.q.dtype)

    def prepare(self) -> None:
        x, program, slabs = self.x, self.program, self._slabs()
        cut = slabs[0].rows.stop < self.rows  # rows of a pair in several slabs: dK and dV are summed in fp32
        padded = -(-self.keys // TILE) * TILE
        pairs, rows = slabs[0].pairs.stop, slabs[0].rows.stop
        buffers = program.workspace("P and dS", (2, pairs, rows, padded), x.q.dtype)
        if self.whole_keys > self.keys:
            program.fill(buffers[..., self.keys : self.whole_keys], 0)
        sums = {
            name: program.workspace(f"sum of d{name}", (1, self.whole_keys, x.width), torch.float32)
            for name, wanted in (("k", x.dk), ("v", x.dv))
            if cut and wanted is not None
        }
        for slab in slabs:
            p_slab, ds_slab = (buffers[n, : slab.size[0], : slab.size[1]] for n in (0, 1))
            self._scores(slab, p_slab, ds_slab)
            if slab.rows.start == 0:
                for total in sums.values():
                    program.fill(total, 0)
            for here, place in self._batches(slab.pairs):
                self._products(p_slab[here], ds_slab[here], place, slab.rows, sums)
            if cut and slab.rows.stop == self.rows:
                n, head = divmod(slab.pairs.start, self.heads)
                for into, name in ((self.dk, "k"), (self.dv, "v")):
                    if into is not None:
                        program.copy(into[n, head : head + 1], sums[name])
        for into, found in ((x.dk, self.dk), (x.dv, self.dv)):
            if into is not None and found is not into:
                program.copy(into, found[:, :, : self.keys])

    def _batches(self, pairs: slice) -> Iterator[tuple[slice, tuple]]:
        """What torch can multiply at once, pairs with one stride between them: (which pairs of the slab, where they are
        in [B, Hkv]). All heads of a sequence; or all sequences of a head, where there are more of them."""
        first, begin = divmod(pairs.start, self.heads)
        last, end = divmod(pairs.stop, self.heads)
        if begin == end == 0 and last - first > self.heads:
            for head in range(self.heads):
                yield slice(head, None, self.heads), (slice(first, last), head)
            return
        for n in range(first, last + (end > 0)):
            heads = slice(begin if n == first else 0, end if n == last else self.heads)
            at = n * self.heads - pairs.start
            yield slice(at + heads.start, at + heads.stop), (n, heads)

    def _slabs(self) -> list[Slab]:
        per_row = 4 * -(-self.keys // TILE) * TILE
        all_pairs = self.batch * self.heads
        pairs = min(all_pairs, SLAB_BYTES // (per_row * self.rows))
        if pairs >= self.heads:
            pairs -= pairs % self.heads  # whole sequences
        if pairs:
            return [Slab(slice(z, min(z + pairs, all_pairs)), slice(0, self.rows)) for z in range(0, all_pairs, pairs)]
        # By tokens, so that no group is cut, and by tiles.
        unit = TILE * self.p.group
        rows = max(unit, SLAB_BYTES // per_row // unit * unit)
        return [
            Slab(slice(z, z + 1), slice(r, min(r + rows, self.rows)))
            for z in range(all_pairs)
            for r in range(0, self.rows, rows)
        ]

    def _pieces(self, size: int) -> int:
        """Rows, or keys, of a piece."""
        return size if not self.masked else max(-(-size // PIECES[self.x.width] // TILE) * TILE, 4 * TILE)

    def _scores(self, slab: Slab, p_slab: Slot, ds_slab: Slot) -> None:
        x, (pairs, rows) = self.x, slab.size
        num_tiles = pairs * -(-rows // TILE) * -(-self.keys // TILE)
        lse2, delta = (y.flatten(0, 1)[slab.pairs] for y in (x.lse2, x.delta))
        p_keys, ds_keys = (y[..., : self.keys] for y in (p_slab, ds_slab))
        read = {name: descriptor(y, [1, 1, TILE, 64]) for name, y in
                (("q_desc", x.q), ("k_desc", x.k), ("dout_desc", x.dout), ("v_desc", x.v))}  # fmt: skip
        arguments = read | dict(
            p_desc=descriptor(p_keys, self.stored),
            ds_desc=descriptor(ds_keys, self.stored),
            terms=SlabTerms(lse2, delta, self.rows),
            sizes=SlabSizes(
                rows=rows,
                row_begin=slab.rows.start,
                row_piece=self._pieces(rows),
                key_piece=self._pieces(self.whole_keys),
                pairs=pairs,
                pair_begin=slab.pairs.start,
                **{name: size for name, size in x.sizes.items() if name != "rows"},
            ),
            scales=ScoreScales(x.scale, FP16_P_SCALE, x.ds_scale),
        )
        grid = (min(num_tiles, self.target.num_sms),)
        options = dict(D=x.width, SCALED=x.fp16, num_warps=4, **self.options)
        self.program.launch(type(self).kernel, grid, arguments, **options)

    def _products(self, p_slab: Slot, ds_slab: Slot, place: tuple, rows: slice, sums: dict[str, Slot]) -> None:
        """Everything of the pairs at a place of [B, Hkv]: p_slab, ds_slab [pairs, rows, padded keys]."""
        x, size = self.x, rows.stop - rows.start
        q, dout = x.q[place][:, rows], x.dout[place][:, rows]
        p_alpha = 1 / FP16_P_SCALE if x.fp16 else 1.0
        if x.dq is not None:
            k, dq = self.k[place], x.dq[place][:, rows]
            for begin, end in _ranges(size, self._pieces(size)):
                first, last = self._keys_of(rows.start + begin, rows.start + end)
                self._product(dq[:, begin:end], ds_slab[:, begin:end, first:last], k[:, first:last], True)
        for name, target, left, right in (("k", self.dk, ds_slab, q), ("v", self.dv, p_slab, dout)):
            if target is None:
                continue
            into = sums[name] if sums else target[place]
            for begin, end in _ranges(self.whole_keys, self._pieces(self.whole_keys)):
                first, last = self._rows_of(begin, end, rows)
                turned = left[:, first:last, begin:end].transpose(1, 2)
                self._product(into[:, begin:end], turned, right[:, first:last], name == "k", p_alpha, add=bool(sums))

    def _product(self, into: Slot, a: Slot, b: Slot, of_ds: bool, alpha: float = 1.0, add: bool = False) -> None:
        """into = a @ b times what the operands were scaled by; `add`: to what is there, in fp32."""
        if a.shape[2] == 0:
            if not add:
                self.program.fill(into, 0)
            return
        alpha = self.p.softmax_scale if of_ds else alpha
        scaled = of_ds and self.x.fp16
        on_gpu = self.program.device.type == "cuda"
        if on_gpu and not add and not scaled:
            self.program.compute(partial(_multiply, alpha), into, a, b)
        else:
            ds_scale = self.x.ds_scale if scaled else None
            self.program.compute(partial(_multiply_in_fp32, alpha, add, on_gpu), into, a, b, ds_scale)

    def _keys_of(self, begin: int, end: int) -> tuple[int, int]:
        """The keys that some of the packed rows begin .. end see, in whole units."""
        tokens, group = self.rows // self.p.group, self.p.group
        offset = self.keys - tokens
        first = 0 if self.p.left < 0 else max(0, begin // group + offset - self.p.left)
        last = self.keys if self.p.right < 0 else min(self.keys, (end - 1) // group + offset + self.p.right + 1)
        if first >= last:
            return 0, 0
        return first // UNIT * UNIT, -(-last // UNIT) * UNIT

    def _rows_of(self, begin: int, end: int, rows: slice) -> tuple[int, int]:
        """The rows of the slab, counted from its first, that see some of the keys begin .. end."""
        group, size = self.p.group, rows.stop - rows.start
        offset = self.keys - self.rows // group
        first = 0 if self.p.right < 0 else max(0, (begin - offset - self.p.right) * group - rows.start)
        end = min(end, self.keys)
        last = size if self.p.left < 0 else min(size, (end - 1 - offset + self.p.left + 1) * group - rows.start)
        return min(first, size), max(last, min(first, size))


def _multiply(alpha: float, into: Tensor, a: Tensor, b: Tensor) -> None:
    torch.baddbmm(into, a, b, beta=0, alpha=alpha, out=into)


def _multiply_in_fp32(
    alpha: float, add: bool, on_gpu: bool, into: Tensor, a: Tensor, b: Tensor, ds_scale: Tensor | None
) -> None:
    total = torch.bmm(a, b, out_dtype=torch.float32) if on_gpu else torch.bmm(a.float(), b.float())
    total *= alpha
    if ds_scale is not None:
        total /= ds_scale
    if add:
        into += total
    else:
        into.copy_(total)


def _ranges(size: int, piece: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + piece, size)) for begin in range(0, size, piece)]
