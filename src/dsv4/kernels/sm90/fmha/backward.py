"""Gradients of fmha on sm_90a, without atomics: the same bits on every run.

backward_rows         delta and the exponent of every query row. Then, at head dims 64 and 128,

backward_keys         dK and dV
backward_dq           dQ

and at the others a chain of kernels and matrix products:

backward_scores       P and dS of a slab of heads (or of rows of one head), in the dtype, to memory
torch's products      dV = P^T dO, dK = dS^T Q, dQ = dS K

The chain makes five products of the size of the scores, as many as there must be; a slab holds 4 bytes per score. Where
not every query sees every key, the products go by pieces of rows (dQ) and of keys (dK, dV), each with the range that it
sees. Varlen batches go sequence by sequence, which reads cu_seqlens on the host.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from dsv4.fmha.backward import FmhaBackward
from dsv4.fmha.problem import FmhaProblem
from dsv4.kernels.compat import TensorDescriptor, gl
from dsv4.kernels.shared.fmha.backward_rows import backward_rows
from dsv4.kernels.shared.fmha.prepare import is_aligned, row_strides
from dsv4.kernels.shared.fmha.tiles import NO_BOUND
from dsv4.kernels.shared.softmax import LOG2E
from dsv4.kernels.sm90.fmha.backward_dq import backward_dq
from dsv4.kernels.sm90.fmha.backward_keys import backward_keys
from dsv4.kernels.sm90.fmha.backward_scores import backward_scores

SLAB_BYTES = 1 << 30  # of P and dS together
# Of rows and of keys, where not everything is seen: with 8 an eighth too much is multiplied. At head dim 256 those
# products would be over before the next could be launched.
PIECES = {256: 4, 512: 8}
TILE = 128
FUSED = (64, 128)  # head dims without a chain
# P is at most 1 and dS is scaled by what bounds it: fp16 has no exponents to lose.
FP16_P_SCALE = 2.0**14
FP16_MOST = 2.0**14


def supports(b: FmhaBackward) -> str | None:
    """None, or why these kernels cannot run the problem."""
    return "paged keys have no gradient" if b.forward.kind == "paged" else None


def backward(b: FmhaBackward) -> None:
    """Fill b.dq, b.dk, b.dv and b.dsink, those that are not None."""

    def run(p: FmhaProblem, *tensors: Any) -> None:
        if p.head_dim in FUSED:
            Fused(p, *tensors[:6]).run(*tensors[6:])
        else:
            Chain(p, *tensors[:6]).run(*tensors[6:])

    by_sequence(b, run)


def by_sequence(b: FmhaBackward, run: Callable[..., None]) -> None:
    """run(p, q, k, v, dout, lse2, delta, dq, dk, dv) for a dense batch, or for each sequence of a varlen one; what it
    gets is what a Chain gets."""
    p = b.forward
    if p.kind == "dense":
        _dense(b, run)
        return
    for x in (b.dq, b.dk, b.dv, b.dsink):
        if x is not None:
            x.zero_()
    starts_q, starts_k = p.cu_seqlens_q.tolist(), p.cu_seqlens_k.tolist()
    for n in range(p.batch):
        rows, keys = slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2])
        if rows.start >= rows.stop or keys.start >= keys.stop:
            continue
        one = replace(
            p, kind="dense", q=p.q[None, rows], k=p.k[None, keys], v=p.v[None, keys], out=p.out[None, rows],
            lse=p.lse[rows].T[None], max_seqlen_q=rows.stop - rows.start, max_seqlen_k=keys.stop - keys.start,
            cu_seqlens_q=None, cu_seqlens_k=None,
        )  # fmt: skip
        dsink = None if b.dsink is None else torch.empty_like(b.dsink)
        _dense(FmhaBackward(
            one, b.dout[None, rows], None if b.dlse is None else b.dlse[rows].T[None],
            *(None if x is None else x[None, where] for x, where in ((b.dq, rows), (b.dk, keys), (b.dv, keys))), dsink,
        ), run)  # fmt: skip
        if dsink is not None:
            b.dsink.add_(dsink)


def _dense(b: FmhaBackward, run: Callable[..., None]) -> None:
    p = b.forward
    group = p.group
    # Keys before the first window: nobody sees them, they may hold NaN, and their gradient is 0. There are none behind:
    # the last query sees the last key.
    unseen = 0 if p.left < 0 else min(max(0, p.max_seqlen_k - p.max_seqlen_q - p.left), p.max_seqlen_k)
    for x in (b.dk, b.dv):
        if x is not None:
            x[:, :unseen].zero_()
    lse2, delta, plain = _rows(b)
    if b.dsink is not None:
        lse = p.lse.unflatten(1, (p.kv_heads, group)).transpose(2, 3)  # [B, Hkv, T, G], as plain
        share = torch.sigmoid(p.sink.view(p.kv_heads, 1, group) - lse)
        b.dsink.copy_(-(torch.where(lse == float("-inf"), 0, share) * plain.view(lse.shape)).sum((0, 2)).flatten())
    if b.dq is None and b.dk is None and b.dv is None:
        return
    q, dout = _packed(p.q, group), _packed(b.dout, group)
    k, v = (addressable(x[:, unseen:].transpose(1, 2)) for x in (p.k, p.v))
    dq = None if b.dq is None else b.dq.transpose(1, 2) if group == 1 else torch.empty_like(q)
    dk, dv = (None if x is None else x[:, unseen:].transpose(1, 2) for x in (b.dk, b.dv))
    run(p, q, k, v, dout, lse2, delta, dq, dk, dv)
    if b.dq is not None and group > 1:
        b.dq.copy_(dq.unflatten(2, (p.max_seqlen_q, group)).permute(0, 2, 1, 3, 4).flatten(2, 3))


def _rows(b: FmhaBackward) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 [B, Hkv, T * G] each: the exponent to subtract (base 2), delta with the LSE's gradient in it, dO . O."""
    p = b.forward
    out, dout = (x if is_aligned(x) and x.stride(-1) == 1 else x.contiguous() for x in (p.out, b.dout))
    rows = p.batch * p.max_seqlen_q * p.q_heads
    lse2, delta, plain = torch.empty(3, p.batch, p.kv_heads, p.max_seqlen_q * p.group, device=p.q.device).unbind(0)
    sink = p.lse if p.sink is None else p.sink  # or unread
    dlse = p.lse if b.dlse is None else b.dlse
    arguments = [
        out, dout, p.lse, dlse, sink, lse2, delta, plain, rows, p.max_seqlen_q, p.q_heads, p.group,
        int(p.sink is not None), int(b.dlse is not None), *row_strides(out), *row_strides(dout),
        p.lse.stride(0), p.lse.stride(2), p.lse.stride(1), dlse.stride(0), dlse.stride(2), dlse.stride(1),
    ]  # fmt: skip
    backward_rows[(-(-rows // 16),)](*arguments, D=p.head_dim, ROWS=16, num_warps=4)
    return lse2, delta, plain


def _packed(x: Tensor, group: int) -> Tensor:
    """[B, T, Hq, D] as [B, Hkv, T * G, D]; a copy where one stride for the packed rows does not exist."""
    if group == 1:
        return addressable(x.transpose(1, 2))
    packed = x.unflatten(2, (-1, group)).transpose(1, 2).reshape(x.shape[0], -1, x.shape[1] * group, x.shape[3])
    return addressable(packed)  # of an expanded tensor, reshape makes a view


def addressable(x: Tensor) -> Tensor:
    """What TMA and BLAS can address; else a copy."""
    dense = x.stride(-1) == 1 and all(s > 0 for s, n in zip(x.stride(), x.shape) if n > 1)
    return x if dense and is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


@cache
def _panel(columns: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(columns * 2, 16, rank=rank)


def descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    strides = [s if n > 1 else TILE for s, n in zip(x.stride()[:-1], x.shape)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, _panel(block[-1], len(block)))


class Fused:
    """Without scores in memory. q, dout [B, Hkv, R, D], k, v [B, Hkv, S, D]; lse2, delta [B, Hkv, R]."""

    def __init__(self, p: FmhaProblem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse2: Tensor, delta: Tensor):
        self.p, self.q, self.k, self.v, self.dout, self.lse2, self.delta = p, q, k, v, dout, lse2, delta
        self.batch, self.heads, self.rows, self.width = q.shape
        self.keys, self.pairs = k.shape[2], q.shape[0] * q.shape[1]
        self.fp16 = q.dtype == torch.float16
        self.factor = ds_scale(dout, v) if self.fp16 else lse2  # or unread
        self.sizes = (
            self.rows, self.rows // p.group, self.keys, p.group, NO_BOUND if p.left < 0 else p.left,
            NO_BOUND if p.right < 0 else p.right, self.heads,
        )  # fmt: skip
        self.constants = dict(D=self.width, SLOTS=2, SCALED=self.fp16, LOAD_REGS=24, num_warps=4)

    def run(self, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None) -> None:
        """dq [B, Hkv, R, D], dk, dv [B, Hkv, S, D]."""
        made = [x if x is not None and addressable(x) is x else torch.empty_like(y)
                for x, y in ((dq, self.q), (dk, self.k), (dv, self.v))]  # fmt: skip
        if dk is not None or dv is not None:
            self._keys(made[1], made[2])
        if dq is not None:
            self._rows(made[0])
        for x, y in zip((dq, dk, dv), made):
            if x is not None and y is not x:
                x.copy_(y)

    def _keys(self, dk: Tensor, dv: Tensor) -> None:
        scale = self.p.softmax_scale
        backward_keys[(-(-self.keys // TILE) * self.pairs,)](
            *(descriptor(x, [1, 1, 64, 64]) for x in (self.q, self.k, self.dout, self.v, dk, dv)), self.lse2,
            self.delta, self.factor, scale * LOG2E.value, scale, FP16_P_SCALE, *self.sizes,
            GRADIENT_REGS=240, **self.constants,
        )  # fmt: skip

    def _rows(self, dq: Tensor) -> None:
        operands = ((self.q, 64), (self.k, TILE), (self.dout, 64), (self.v, TILE), (dq, 64))
        scale = self.p.softmax_scale
        backward_dq[(-(-self.rows // TILE) * self.pairs,)](
            *(descriptor(x, [1, 1, rows, 64]) for x, rows in operands), self.lse2, self.delta, self.factor,
            scale * LOG2E.value, scale, *self.sizes, DQ_REGS=240, **self.constants,
        )  # fmt: skip


@dataclass(frozen=True)
class Slab:
    """What one launch of backward_scores covers: pairs (sequence, KV head) and packed rows of each."""

    pairs: slice
    rows: slice


class Chain:
    """Slab by slab: scores, then products. q, dout [B, Hkv, R, D], k, v [B, Hkv, S, D]; lse2, delta [B, Hkv, R]."""

    kernel = backward_scores
    stored = [1, 64, 64]  # of P and dS at once
    options = dict(SLOTS=6, SCORE_REGS=240, LOAD_REGS=24)

    def __init__(self, p: FmhaProblem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse2: Tensor, delta: Tensor):
        self.p, self.q, self.k, self.v, self.dout, self.lse2, self.delta = p, q, k, v, dout, lse2, delta
        self.batch, self.heads, self.rows, self.width = q.shape
        self.keys = k.shape[2]
        self.masked = p.left >= 0 or p.right >= 0
        self.fp16 = q.dtype == torch.float16
        self.ds_scale = ds_scale(dout, v) if self.fp16 else lse2.flatten()[:1]  # or unread

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
            for n in range(slab.pairs.start // self.heads, (slab.pairs.stop - 1) // self.heads + 1):
                begin = max(slab.pairs.start - n * self.heads, 0)
                heads = slice(begin, min(slab.pairs.stop - n * self.heads, self.heads))
                at = n * self.heads + begin - slab.pairs.start
                here = slice(at, at + heads.stop - begin)
                self._products(p_slab[here], ds_slab[here], n, heads, slab.rows, dq, dk, dv, sums if cut else None)
            if cut and slab.rows.stop == self.rows:
                n, head = divmod(slab.pairs.start, self.heads)
                for x, name in ((dk, "k"), (dv, "v")):
                    if x is not None:
                        x[n, head : head + 1].copy_(sums[name])
                sums.clear()

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
            *(descriptor(x, [1, 1, TILE, 64]) for x in (self.q, self.k, self.dout, self.v)),
            *(descriptor(x, self.stored) for x in (p_slab, ds_slab)),
            self.lse2.flatten(0, 1)[slab.pairs], self.delta.flatten(0, 1)[slab.pairs], self.ds_scale,
            p.softmax_scale * LOG2E.value, FP16_P_SCALE, self.rows, rows, slab.rows.start, self.rows // p.group,
            self.keys, p.group, NO_BOUND if p.left < 0 else p.left, NO_BOUND if p.right < 0 else p.right,
            self._pieces(rows), self._pieces(self.keys), pairs, slab.pairs.start, self.heads,
        ]  # fmt: skip
        grid = (min(items, multiprocessors(self.q.device)),)
        type(self).kernel[grid](*arguments, D=self.width, SCALED=self.fp16, num_warps=4, **self.options)

    def _products(self, p_slab, ds_slab, n: int, heads: slice, rows: slice, dq, dk, dv, sums) -> None:
        """Everything of heads [h] of one sequence: p_slab, ds_slab [h, rows, padded keys]."""
        q, dout, k = self.q[n, heads, rows], self.dout[n, heads, rows], self.k[n, heads]
        size = rows.stop - rows.start
        p_alpha = 1 / FP16_P_SCALE if self.fp16 else 1.0
        if dq is not None:
            for begin, end in _ranges(size, self._pieces(size)):
                first, last = self._keys_of(rows.start + begin, rows.start + end)
                into = dq[n, heads, rows][:, begin:end]
                self._product(ds_slab[:, begin:end, first:last], k[:, first:last], into, True)
        for name, target, left, right in (("k", dk, ds_slab, q), ("v", dv, p_slab, dout)):
            if target is None:
                continue
            into = target[n, heads]
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


def ds_scale(dout: Tensor, v: Tensor) -> Tensor:
    """For fp16: a power of two that brings |dS| <= 2 |dO| |v| near the top of its range. fp32 [1]."""
    longest = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax() for x in (dout, v)]
    most = 2 * longest[0] * longest[1]
    return torch.exp2(torch.log2(FP16_MOST / torch.where(most == 0, 1.0, most)).floor()).reshape(1)


def multiprocessors(device: torch.device) -> int:
    """Of the GPU, or of the emulator."""
    if device.type == "cuda":
        return _of_gpu(device)
    active = driver.active
    return active.utils.get_device_properties(active.get_current_device())["multiprocessor_count"]


@cache
def _of_gpu(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _ranges(size: int, piece: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + piece, size)) for begin in range(0, size, piece)]
