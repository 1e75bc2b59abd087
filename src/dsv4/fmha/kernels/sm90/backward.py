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
from dsv4.fmha.kernels.backward import (
    FP16_P_SCALE,
    TILE,
    Sequences,
    addressable,
    at_once,
    descriptor,
    made_like,
    supports,
)
from dsv4.fmha.kernels.by_sequence import by_sequence
from dsv4.fmha.kernels.chain import Chain
from dsv4.fmha.kernels.sm90.backward_dq import backward_dq
from dsv4.fmha.kernels.sm90.backward_keys import backward_keys
from dsv4.fmha.kernels.sm90.backward_scores import backward_scores
from dsv4.fmha.kernels.tiles import NO_BOUND
from dsv4.fmha.problem import FmhaProblem
from dsv4.kernels.softmax import LOG2E
from dsv4.runtime import launch

__all__ = ["backward", "supports"]


def backward(b: FmhaBackward) -> None:
    """Fill b.dq, b.dk, b.dv and b.dsink, those that are not None."""
    if b.forward.head_dim <= 128:
        at_once(b, tiled)
    else:
        by_sequence(b, chain)


def tiled(p: FmhaProblem, *given: Any) -> None:
    *tensors, sequences = given
    Tiled(p, *tensors[:7], sequences).run(*tensors[7:])


def chain(p: FmhaProblem, *tensors: Any) -> None:
    HopperChain(p, *tensors[:7]).run(*tensors[7:])


class HopperChain(Chain):
    kernel = backward_scores
    stored = [1, 64, 64]
    options = dict(SLOTS=6, SCORE_REGS=240, LOAD_REGS=24)


class Tiled:
    """Without scores in memory. q, dout [B, Hkv, R, D], k, v [B, Hkv, S, D]; lse2, delta [B, Hkv, R]; factor [1], of dS
    in fp16."""

    def __init__(
        self, p: FmhaProblem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse2: Tensor, delta: Tensor,
        factor: Tensor, sequences: Sequences | None,
    ):  # fmt: skip
        self.sequences, self.factor = sequences, factor
        self.p, self.q, self.k, self.v, self.dout, self.lse2, self.delta = p, q, k, v, dout, lse2, delta
        self.batch, self.heads, self.rows, self.width = q.shape
        self.keys, self.pairs = k.shape[2], q.shape[0] * q.shape[1]
        self.fp16 = q.dtype == torch.float16
        self.q_box, self.dout_box = (descriptor(x, [1, 1, 64, 64]) for x in (q, dout))  # both kernels take them
        self.sizes = (
            self.rows, self.rows // p.group, self.keys, p.group, NO_BOUND if p.left < 0 else p.left,
            NO_BOUND if p.right < 0 else p.right, self.heads,
        )  # fmt: skip
        self.constants = dict(D=self.width, SLOTS=2, SCALED=self.fp16, VARLEN=sequences is not None, num_warps=4)

    def run(self, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None) -> None:
        """dq [B, Hkv, R, D], dk, dv [B, Hkv, S, D]."""
        made = [x if x is not None and addressable(x) is x else made_like(y, self.sequences is not None)
                for x, y in ((dq, self.q), (dk, self.k), (dv, self.v))]  # fmt: skip
        if dk is not None or dv is not None:
            self._keys(made[1], made[2])
        if dq is not None:
            self._rows(made[0])
        for x, y in zip((dq, dk, dv), made):
            if x is not None and y is not x:
                x.copy_(y)

    def _tiles(self, rows: int) -> int:
        """Of a pair; for sequences as many as there may be."""
        return -(-rows // TILE) if self.sequences is None else rows // TILE + self.sequences.count

    def _registers(self, of_keys: bool) -> tuple[int, int]:
        """Of the gradient roles and of load, which needs more for sequences; at head dim 128 dK and dV leave none."""
        return (240, 24) if self.sequences is None or of_keys and self.width == 128 else (232, 40)

    def _starts(self) -> tuple[Tensor, Tensor, int]:
        return (self.lse2, self.lse2, 0) if self.sequences is None else (*self.sequences, self.sequences.count)

    def _keys(self, dk: Tensor, dv: Tensor) -> None:
        scale, (*starts, count) = self.p.softmax_scale, self._starts()
        roles, load = self._registers(of_keys=True)
        k, v, *outputs = (descriptor(x, [1, 1, 64, 64]) for x in (self.k, self.v, dk, dv))
        launch.now(
            backward_keys, (self._tiles(self.keys) * self.pairs,), self.lse2, self.delta, self.factor,
            self.q_box, k, self.dout_box, v, *outputs, dk, dv, *starts,
            scale * LOG2E.value, scale, FP16_P_SCALE, *self.sizes, count, *dk.stride()[1:3], *dv.stride()[1:3],
            GRADIENT_REGS=roles, LOAD_REGS=load, **self.constants,
        )  # fmt: skip

    def _rows(self, dq: Tensor) -> None:
        scale, (*starts, count) = self.p.softmax_scale, self._starts()
        roles, load = self._registers(of_keys=False)
        k, v = (descriptor(x, [1, 1, TILE, 64]) for x in (self.k, self.v))
        launch.now(
            backward_dq, (self._tiles(self.rows) * self.pairs,), self.lse2, self.delta, self.factor,
            self.q_box, k, self.dout_box, v, descriptor(dq, [1, 1, 64, 64]), dq, *starts, scale * LOG2E.value, scale,
            *self.sizes, count, *dq.stride()[1:3], DQ_REGS=roles, LOAD_REGS=load, **self.constants,
        )  # fmt: skip
