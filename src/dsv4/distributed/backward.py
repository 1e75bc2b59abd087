"""Gradients of dsv4.distributed.forward: prefill, by ring and by gather, and unshard.

Besides its keys, the backward pass of a part needs only out and lse of the whole, which every rank has for its own
queries; so the gradients of the parts add up. dQ stays on the rank of its queries. dK and dV are sums over the ranks,
in fp32. With method="ring" they travel with their keys around the ring a second time, and return to their rank after
as many steps as there are ranks. With "gather" every rank computes them for all keys, then the ranks exchange them.

Every part's gradient is rounded to the dtype once, as the partial results of the forward pass are. The order of the
sums is fixed, so that they have the same bits on every run.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv4.distributed.attend import Setting, attend, cut, ring
from dsv4.distributed.ranks import gathered_whole, global_rank, piece_numbers, pieces_of, rank_and_size, swapped
from dsv4.fmha.backward_cpu import sink_terms
from dsv4.fmha.options import FmhaOptions


class Prefill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, setting: Setting) -> Any:
        out, lse = attend(q, k, v, sink, setting)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.setting = setting
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = Prefill.gradients(ctx, *grads)
        return *(None if x is None else OnlyOnce.apply(x, *ctx.saved_tensors, *grads) for x in found), None

    @staticmethod
    @torch.no_grad()
    def gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        # A rank whose result was not used takes part as well: its keys have gradients from the others.
        dout = torch.zeros_like(out) if dout is None else dout
        wanted = ctx.needs_input_grad
        queries = Queries(ctx.setting, q, sink, out, lse, dout, dlse, wanted[0])
        dk, dv = queries.gradients_of(k, v)
        dsink = None
        if sink is not None and wanted[3]:
            delta = (dout.float() * out.float()).sum(-1).permute(2, 0, 1)  # [H, B, T]
            dsink = sink_terms(lse.transpose(0, 1), sink, delta).to(sink.dtype)
        return queries.dq, dk.to(k.dtype) if wanted[1] else None, dv.to(v.dtype) if wanted[2] else None, dsink


class OnlyOnce(torch.autograd.Function):
    """Pass a gradient through unchanged; differentiating it again raises an error that names the operation."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Any) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("dsv4.distributed.prefill: double backward is not supported")


class Queries:
    """This rank's queries in a backward pass. dq is complete after gradients_of."""

    def __init__(
        self,
        setting: Setting,
        q: Tensor,
        sink: Tensor | None,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        want_q: bool,
    ):
        self.setting, self.sink, self.want_q = setting, sink, want_q
        self.rank, self.size = rank_and_size(setting.group)
        self.pieces = pieces_of(q.shape[1], setting.order)
        self.piece = q.shape[1] // self.pieces
        self.tensors = q, out, dout
        self.lse, self.dlse = lse, dlse
        self.sum_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device) if want_q else None

    @property
    def dq(self) -> Tensor | None:
        return None if self.sum_q is None else self.sum_q.to(self.tensors[0].dtype)

    def gradients_of(self, k: Tensor, v: Tensor) -> Tensor:
        """Return dk and dv of this rank's keys, fp32 [2, B, T, Hkv, D]."""
        setting = self.setting
        if setting.method == "gather":
            whole_k, whole_v = (gathered_whole(x, 1, setting.order, setting.group) for x in (k, v))
            sums = torch.zeros(2, *whole_k.shape, dtype=torch.float32, device=k.device)
            self.add(0, whole_k, whole_v, sums)
            return scattered(sums, 2, setting.order, setting.group)
        sums = torch.zeros(2, *k.shape, dtype=torch.float32, device=k.device)
        for parts in ring(k, v, self.pieces, setting.order, setting.group):
            for n, (first, some_k, some_v) in enumerate(parts):
                self.add(first, some_k, some_v, sums[:, :, n * self.piece : (n + 1) * self.piece])
            sums = passed_on(sums, setting.group)
        return sums

    def add(self, first: int, k: Tensor, v: Tensor, sums: Tensor) -> None:
        """Add this rank's shares of dk and dv of the keys from `first` on to sums [2, B, S, Hkv, D], and its share of
        dq.
        """
        setting = self.setting
        for n, number in enumerate(piece_numbers(self.rank, self.size, setting.order)):
            part = cut(self.piece, k.shape[1], number * self.piece - first, setting.left, setting.right)
            if part is None:
                continue
            t, s, window = part
            rows = slice(n * self.piece, n * self.piece + t)
            q, out, dout = (x[:, rows] for x in self.tensors)
            dlse = None if self.dlse is None else self.dlse[:, :, rows]
            options = FmhaOptions.of(window, softmax_scale=setting.softmax_scale, deterministic=setting.deterministic)
            dq, dk, dv, _ = torch.ops.dsv4.fmha_backward(
                dout=dout,
                dlse=dlse,
                q=q,
                k=k[:, :s],
                v=v[:, :s],
                sink=self.sink,
                cu_seqlens_q=None,
                cu_seqlens_k=None,
                out=out,
                lse=self.lse[:, :, rows],
                **options._asdict(),
                backend=setting.backend,
                asked=[self.want_q, True, True, False],
            )
            sums[0, :, :s] += dk
            sums[1, :, :s] += dv
            if self.sum_q is not None:
                self.sum_q[:, rows] += dq


class Unshard(torch.autograd.Function):
    """Give every rank the whole; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, order: str, group: Any) -> Tensor:
        ctx.where = dim, order, group
        return gathered_whole(x, dim, order, group)

    @staticmethod
    @once_differentiable  # backward reads only the incoming gradient, so torch would differentiate it again
    def backward(ctx: Any, *grads: Any) -> Any:
        return scattered(grads[0], *ctx.where), None, None, None


def scattered(whole: Tensor, dim: int, order: str, group: Any) -> Tensor:
    """Return this rank's part of the sum over the ranks of a whole tensor: the reverse of unshard."""
    _, size = rank_and_size(group)
    if size == 1:
        return whole
    pieces = whole.chunk(size * pieces_of(None, order), dim)
    send = [torch.cat([pieces[n] for n in piece_numbers(r, size, order)], dim) for r in range(size)]
    return swapped(send, group).float().sum(0).to(whole.dtype)


def passed_on(x: Tensor, group: Any) -> Tensor:
    """Pass x on to the next rank; return that of the rank before."""
    import torch.distributed as dist

    rank, size = rank_and_size(group)
    if size == 1:
        return x
    after, before = (global_rank(group, (rank + step) % size) for step in (1, -1))
    there = torch.empty_like(x)
    moves = [dist.P2POp(dist.isend, x, after, group), dist.P2POp(dist.irecv, there, before, group)]
    for move in dist.batch_isend_irecv(moves):
        move.wait()
    return there
