"""Gradients of fmha on sm_90a, without atomics: the same bits on every run.

head dim    kernels                                                          products of the size of the scores
64, 128     backward_rows; backward_keys: dK and dV; backward_dq: dQ         7
256, 512    backward_rows; the chain (shared/fmha/chain.py)                  5
            with backward_scores of this folder
"""

from typing import Any

import torch
from torch import Tensor

from dsv4.fmha.backward import FmhaBackward
from dsv4.fmha.problem import FmhaProblem
from dsv4.kernels.shared.fmha.backward import (
    FP16_P_SCALE,
    TILE,
    addressable,
    by_sequence,
    descriptor,
    ds_scale,
    supports,
)
from dsv4.kernels.shared.fmha.chain import Chain
from dsv4.kernels.shared.fmha.tiles import NO_BOUND
from dsv4.kernels.shared.softmax import LOG2E
from dsv4.kernels.sm90.fmha.backward_dq import backward_dq
from dsv4.kernels.sm90.fmha.backward_keys import backward_keys
from dsv4.kernels.sm90.fmha.backward_scores import backward_scores
from dsv4.runtime import launch

__all__ = ["backward", "supports"]


def backward(b: FmhaBackward) -> None:
    """Fill b.dq, b.dk, b.dv and b.dsink, those that are not None."""
    way = Tiled if b.forward.head_dim <= 128 else HopperChain

    def run(p: FmhaProblem, *tensors: Any) -> None:
        way(p, *tensors[:6]).run(*tensors[6:])

    by_sequence(b, run)


class HopperChain(Chain):
    kernel = backward_scores
    stored = [1, 64, 64]
    options = dict(SLOTS=6, SCORE_REGS=240, LOAD_REGS=24)


class Tiled:
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
        launch.now(
            backward_keys, (-(-self.keys // TILE) * self.pairs,), self.lse2, self.delta, self.factor,
            *(descriptor(x, [1, 1, 64, 64]) for x in (self.q, self.k, self.dout, self.v, dk, dv)),
            scale * LOG2E.value, scale, FP16_P_SCALE, *self.sizes, GRADIENT_REGS=240, **self.constants,
        )  # fmt: skip

    def _rows(self, dq: Tensor) -> None:
        operands = ((self.q, 64), (self.k, TILE), (self.dout, 64), (self.v, TILE), (dq, 64))
        scale = self.p.softmax_scale
        launch.now(
            backward_dq, (-(-self.rows // TILE) * self.pairs,), self.lse2, self.delta, self.factor,
            *(descriptor(x, [1, 1, rows, 64]) for x, rows in operands), scale * LOG2E.value, scale, *self.sizes,
            DQ_REGS=240, **self.constants,
        )  # fmt: skip
