"""Gradients of fmha where accumulators for a kernel of their own would not fit: P and dS to memory, then products.

backward_scores       P and dS of a slab of heads (or of rows of one head), in the dtype, to memory
torch's products      dV = P^T dO, dK = dS^T Q, dQ = dS K

These are five products of the size of the scores, as many as there must be; a slab holds 4 bytes per score. Where not
every query sees every key, the products go by pieces of rows (dQ) and of keys (dK, dV), each with the range that it
sees.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dsv4.fmha.kernels.backward import FP16_P_SCALE, TILE, descriptor
from dsv4.fmha.kernels.tiles import NO_BOUND
from dsv4.fmha.problem import FmhaProblem
from dsv4.kernels.softmax import LOG2E
from dsv4.runtime import dispatch, launch

SLAB_BYTES = 1 << 30  # of P and dS together
# Of rows and of keys, where not everything is seen: with 8 an eighth too much is multiplied. At head dim 256 those
# products would be over before the next could be launched.
PIECES = {256: 4, 512: 8}


@dataclass(frozen=True)
class Slab:
    """What one launch of backward_scores covers: pairs (sequence, KV head) and packed rows of each."""

    pairs: slice
    rows: slice


class Chain:
    """Slab by slab: scores, then products. q, dout [B, Hkv, R, D], k, v [B, Hkv, S, D]; lse2, delta [B, Hkv, R];
    ds_scale [1], for fp16."""

    kernel: ClassVar[Any]  # backward_scores of the architecture
    stored: ClassVar[list[int]]  # of P and dS at once
    options: ClassVar[dict[str, int]]  # ring slots, registers of the roles

    def __init__(
        self, p: FmhaProblem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse2: Tensor, delta: Tensor,
        ds_scale: Tensor,
    ):  # fmt: skip
        self.p, self.q, self.k, self.v, self.dout, self.lse2, self.delta = p, q, k, v, dout, lse2, delta
        self.batch, self.heads, self.rows, self.width = q.shape
        self.keys = k.shape[2]
        self.masked = p.left >= 0 or p.right >= 0
        self.fp16 = q.dtype == torch.float16
        self.ds_scale = ds_scale

    def run(self, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None) -> None:
        slabs = self._slabs()
        cut = slabs[0].rows.stop < self.rows  # rows of a pair in several slabs: dK and dV are summed in fp32
        padded = -(-self.keys // TILE) * TILE
        pairs, rows = slabs[0].pairs.stop, slabs[0].rows.stop
        buffers = torch.empty(2, pairs, rows, padded, dtype=self.q.dtype, device=self.q.device)
        sums: dict[str, Tensor] = {}
        for slab in slabs:
            p_slab, ds_slab = buffers[:, : slab.pairs.stop - slab.pairs.start, : slab.rows.stop - slab.rows.start]
            self._scores(slab, p_slab[..., : self.keys], ds_slab[..., : self.keys])
            for here, place in self._batches(slab.pairs):
                self._products(p_slab[here], ds_slab[here], place, slab.rows, dq, dk, dv, sums if cut else None)
            if cut and slab.rows.stop == self.rows:
                n, head = divmod(slab.pairs.start, self.heads)
                for x, name in ((dk, "k"), (dv, "v")):
                    if x is not None:
                        x[n, head : head + 1].copy_(sums[name])
                sums.clear()

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
        return size if not self.masked else max(-(-size // PIECES[self.width] // TILE) * TILE, 4 * TILE)

    def _scores(self, slab: Slab, p_slab: Tensor, ds_slab: Tensor) -> None:
        p, rows = self.p, slab.rows.stop - slab.rows.start
        pairs = slab.pairs.stop - slab.pairs.start
        items = pairs * -(-rows // TILE) * -(-self.keys // TILE)
        arguments = [
            self.lse2.flatten(0, 1)[slab.pairs], self.delta.flatten(0, 1)[slab.pairs], self.ds_scale,
            *(descriptor(x, [1, 1, TILE, 64]) for x in (self.q, self.k, self.dout, self.v)),
            *(descriptor(x, self.stored) for x in (p_slab, ds_slab)),
            p.softmax_scale * LOG2E.value, FP16_P_SCALE, self.rows, rows, slab.rows.start, self.rows // p.group,
            self.keys, p.group, NO_BOUND if p.left < 0 else p.left, NO_BOUND if p.right < 0 else p.right,
            self._pieces(rows), self._pieces(self.keys), pairs, slab.pairs.start, self.heads,
        ]  # fmt: skip
        grid = (min(items, num_sms(self.q.device)),)
        launch.now(type(self).kernel, grid, *arguments, D=self.width, SCALED=self.fp16, num_warps=4, **self.options)

    def _products(self, p_slab, ds_slab, place: tuple, rows: slice, dq, dk, dv, sums) -> None:
        """Everything of the pairs at a place of [B, Hkv]: p_slab, ds_slab [pairs, rows, padded keys]."""
        q, dout, k = self.q[place][:, rows], self.dout[place][:, rows], self.k[place]
        size = rows.stop - rows.start
        p_alpha = 1 / FP16_P_SCALE if self.fp16 else 1.0
        if dq is not None:
            for begin, end in _ranges(size, self._pieces(size)):
                first, last = self._keys_of(rows.start + begin, rows.start + end)
                into = dq[place][:, rows][:, begin:end]
                self._product(ds_slab[:, begin:end, first:last], k[:, first:last], into, True)
        for name, target, left, right in (("k", dk, ds_slab, q), ("v", dv, p_slab, dout)):
            if target is None:
                continue
            into = target[place]
            if sums is not None:
                into = sums.setdefault(name, torch.zeros(into.shape, dtype=torch.float32, device=q.device))
            for begin, end in _ranges(self.keys, self._pieces(self.keys)):
                first, last = self._rows_of(begin, end, rows)
                x, y = left[:, first:last, begin:end].mT, right[:, first:last]
                self._product(x, y, into[:, begin:end], name == "k", p_alpha, add=sums is not None)

    def _product(self, x: Tensor, y: Tensor, into: Tensor, of_ds: bool, alpha: float = 1.0, add: bool = False) -> None:
        """into = x @ y times what the operands were scaled by; `add`: to what is there, in fp32."""
        if x.shape[2] == 0:
            if not add:
                into.zero_()
            return
        alpha = self.p.softmax_scale if of_ds else alpha
        if x.is_cuda and not add and not (of_ds and self.fp16):
            torch.baddbmm(into, x, y, beta=0, alpha=alpha, out=into)
            return
        total = torch.bmm(x, y, out_dtype=torch.float32) if x.is_cuda else torch.bmm(x.float(), y.float())
        total *= alpha
        if of_ds and self.fp16:
            total /= self.ds_scale
        if add:
            into += total
        else:
            into.copy_(total)

    def _keys_of(self, begin: int, end: int) -> tuple[int, int]:
        """The keys that some of the packed rows begin .. end see."""
        tokens, group = self.rows // self.p.group, self.p.group
        offset = self.keys - tokens
        first = 0 if self.p.left < 0 else max(0, begin // group + offset - self.p.left)
        last = self.keys if self.p.right < 0 else min(self.keys, (end - 1) // group + offset + self.p.right + 1)
        return min(first, self.keys), max(last, min(first, self.keys))

    def _rows_of(self, begin: int, end: int, rows: slice) -> tuple[int, int]:
        """The rows of the slab, counted from its first, that see some of the keys begin .. end."""
        group, size = self.p.group, rows.stop - rows.start
        offset = self.keys - self.rows // group
        first = 0 if self.p.right < 0 else max(0, (begin - offset - self.p.right) * group - rows.start)
        last = size if self.p.left < 0 else min(size, (end - 1 - offset + self.p.left + 1) * group - rows.start)
        return min(first, size), max(last, min(first, size))


def num_sms(device: torch.device) -> int:
    """Of the GPU, or of the emulator."""
    if device.type == "meta":  # only compiled
        return dispatch.DEFAULT_NUM_SMS
    target = dispatch.cuda_target(device) if device.type == "cuda" else dispatch.softsm_target()
    return target.num_sms


def _ranges(size: int, piece: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + piece, size)) for begin in range(0, size, piece)]
