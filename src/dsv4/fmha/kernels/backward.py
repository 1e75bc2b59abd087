"""Gradients of fmha: from a request to what the kernels of an architecture get. Shared by all architectures.

A varlen batch goes to the kernels as it is where they take it (head dims 64 and 128), else by_sequence.py makes dense
ones of it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.fmha.backward import FmhaBackward
from dsv4.fmha.kernels.backward_rows import backward_rows
from dsv4.fmha.kernels.prepare import row_strides
from dsv4.kernels.compat import TensorDescriptor, gl
from dsv4.runtime import launch

TILE = 128
# P is at most 1 and dS is scaled by what bounds it: fp16 has no exponents to lose.
FP16_P_SCALE = 2.0**14
FP16_MOST = 2.0**14


def supports(b: FmhaBackward) -> str | None:
    """None, or why no kernel can run the problem."""
    return "paged keys have no gradient" if b.forward.kind == "paged" else None


class Sequences(NamedTuple):
    """Of a varlen batch that goes to the kernels as a dense batch of one."""

    cu_q: Tensor
    cu_k: Tensor

    @property
    def count(self) -> int:
        return len(self.cu_q) - 1


def at_once(b: FmhaBackward, run: Callable[..., None]) -> None:
    """run(p, q, k, v, dout, lse2, delta, factor, dq, dk, dv, sequences) for a batch of either kind; sequences is None
    for a dense one. factor: of dS in fp16. A gradient that run makes instead of filling the one it gets must be 0 in
    rows of no sequence."""
    p = b.forward
    if p.kind == "dense":
        dense(b, run, None)
        return
    for x in (b.dq, b.dk, b.dv):
        if x is not None:
            x.zero_()
    one = replace(
        p, kind="dense", q=p.q[None], k=p.k[None], v=p.v[None], out=p.out[None], lse=p.lse.T[None],
        max_seqlen_q=p.q.shape[0], max_seqlen_k=p.k.shape[0], cu_seqlens_q=None, cu_seqlens_k=None,
    )  # fmt: skip
    dlse = None if b.dlse is None else b.dlse.T[None]
    gradients = (None if x is None else x[None] for x in (b.dq, b.dk, b.dv))
    dense(FmhaBackward(one, b.dout[None], dlse, *gradients, b.dsink), run, Sequences(p.cu_seqlens_q, p.cu_seqlens_k))


def dense(b: FmhaBackward, run: Callable[..., None], *sequences: Sequences | None) -> None:
    p, varlen = b.forward, any(sequences)
    group = p.group
    # Keys before the first window: nobody sees them, they may hold NaN, and their gradient is 0. There are none behind:
    # the last query sees the last key.
    unseen = 0 if varlen or p.left < 0 else min(max(0, p.max_seqlen_k - p.max_seqlen_q - p.left), p.max_seqlen_k)
    k, v, dk, dv = p.k, p.v, b.dk, b.dv
    if unseen:
        for x in (dk, dv):
            if x is not None:
                x[:, :unseen].zero_()
        k, v, dk, dv = (None if x is None else x[:, unseen:] for x in (k, v, dk, dv))
    dout = addressable(b.dout)
    lse2, delta, plain = _rows(b, dout)
    if b.dsink is not None:
        lse = p.lse.unflatten(1, (p.kv_heads, group)).transpose(2, 3)  # [B, Hkv, T, G], as plain
        share = torch.sigmoid(p.sink.view(p.kv_heads, 1, group) - lse)
        b.dsink.copy_(-(torch.where(lse == float("-inf"), 0, share) * plain.view(lse.shape)).sum((0, 2)).flatten())
    if b.dq is None and b.dk is None and b.dv is None:
        return
    q, dout = _packed(p.q, group), _packed(dout, group)
    k, v = addressable(k.transpose(1, 2)), addressable(v.transpose(1, 2))
    dq = None if b.dq is None else b.dq.transpose(1, 2) if group == 1 else made_like(q, varlen)
    dk, dv = (None if x is None else x.transpose(1, 2) for x in (dk, dv))
    factor = ds_scale(dout, v, b.dlse, p.lse) if p.q.dtype == torch.float16 else lse2  # or unread
    run(p, q, k, v, dout, lse2, delta, factor, dq, dk, dv, *sequences)
    if b.dq is not None and group > 1:
        into, found = b.dq.unflatten(2, (-1, group)), dq.unflatten(2, (-1, group)).transpose(1, 2)
        if addressable(b.dq) is b.dq:
            into, found = into.view(torch.int64), found.view(torch.int64)
        into.copy_(found)


def made_like(x: Tensor, varlen: bool) -> Tensor:
    """Room for a gradient; of a varlen batch the kernels write the rows of its sequences only."""
    return torch.zeros_like(x) if varlen else torch.empty_like(x)


def _rows(b: FmhaBackward, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 [B, Hkv, T * G] each: the exponent to subtract (base 2), delta with the LSE's gradient in it, dO . O."""
    p = b.forward
    out = addressable(p.out)
    rows = p.batch * p.max_seqlen_q * p.q_heads
    # Of one tensor the second and third part would be aligned or not, and kernels compiled for either.
    shape = (p.batch, p.kv_heads, p.max_seqlen_q * p.group)
    lse2, delta, plain = (torch.empty(shape, dtype=torch.float32, device=p.q.device) for _ in range(3))
    # The LSE of a sequence may begin anywhere, and a kernel would be compiled for that.
    lse, dlse, sink = (x if x is None or x.data_ptr() % 16 == 0 else x.clone() for x in (p.lse, b.dlse, p.sink))
    sink, dlse = (lse if x is None else x for x in (sink, dlse))  # or unread
    arguments = [
        out, dout, lse, dlse, sink, lse2, delta, plain, rows, p.max_seqlen_q, p.q_heads, p.group,
        int(p.sink is not None), int(b.dlse is not None), *row_strides(out), *row_strides(dout),
        lse.stride(0), lse.stride(2), lse.stride(1), dlse.stride(0), dlse.stride(2), dlse.stride(1),
    ]  # fmt: skip
    launch.now(backward_rows, (-(-rows // 16),), *arguments, D=p.head_dim, ROWS=16, num_warps=4)
    return lse2, delta, plain


def _packed(x: Tensor, group: int) -> Tensor:
    """[B, T, Hq, D] as [B, Hkv, T * G, D]; a copy where one stride for the packed rows does not exist."""
    if group == 1:
        return addressable(x.transpose(1, 2))
    x = addressable(x)  # also of an expanded tensor, of which reshape would make a view
    wide = x.view(torch.int64)  # numbers of two bytes torch copies at a third of the speed
    packed = wide.unflatten(2, (-1, group)).transpose(1, 2).reshape(x.shape[0], -1, x.shape[1] * group, wide.shape[3])
    return packed.view(x.dtype)


def addressable(x: Tensor) -> Tensor:
    """What TMA and BLAS can address; else a copy."""
    *strides, last = x.stride()
    if last == 1 and x.data_ptr() % 16 == 0:
        for stride, size in zip(strides, x.shape):
            if size > 1 and (stride <= 0 or stride % 8):
                break
        else:
            return x
    return x.clone(memory_format=torch.contiguous_format)


@cache
def _panel(columns: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(columns * 2, 16, rank=rank)


def descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """Of an addressable tensor. TensorDescriptor's own checks of that take 6 to 10 us, nine times in a call."""
    shape = list(x.shape)
    strides = [stride if size > 1 else TILE for stride, size in zip(x.stride(), shape)]
    strides[-1] = 1
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = x, shape, strides
    made.block_shape, made.layout = block, _panel(block[-1], len(block))
    return made


def ds_scale(dout: Tensor, v: Tensor, dlse: Tensor | None, lse: Tensor) -> Tensor:
    """For fp16: a power of two that brings |dS| <= 2 |dO| |v| + |dL| near the top of its range. fp32 [1]."""
    norms = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) for x in (dout, v))
    # Rows of no sequence and keys that nobody sees may hold anything.
    longest = [torch.where(norm.isfinite(), norm, 0).amax() for norm in norms]
    most = 2 * longest[0] * longest[1]
    if dlse is not None:
        most = most + torch.where(dlse.isfinite() & (lse > float("-inf")), dlse.abs(), 0).amax()
    return torch.exp2(torch.log2(FP16_MOST / torch.where(most == 0, 1.0, most)).floor()).reshape(1)
