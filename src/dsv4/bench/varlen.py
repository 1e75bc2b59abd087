"""The suite `varlen`: fmha_varlen and its gradients, flash-attn and torch, on sequences of many lengths."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dsv4
from dsv4.bench import peers
from dsv4.bench.backward import ERROR as GRADIENT_ERROR
from dsv4.bench.dense import ERROR
from dsv4.bench.timing import Mode

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class VarlenCase:
    """`batch` sequences of `shortest` to `longest` tokens, uniform, by the numbers themselves: the same everywhere."""

    batch: int
    q_heads: int
    kv_heads: int
    shortest: int
    longest: int
    head_dim: int
    causal: bool = True
    gradient: bool = False

    @property
    def mode(self) -> Mode:
        return "queued" if self.gradient else "graph"  # see timing.py

    @property
    def name(self) -> str:
        what = "varlen backward" if self.gradient else "varlen"
        sizes = f"({self.batch}, {self.q_heads}:{self.kv_heads}, {self.shortest} to {self.longest})"
        return f"{what} {'causal' if self.causal else 'full'} hd{self.head_dim} {sizes}"

    @property
    def lengths(self) -> list[int]:
        draw = random.Random(f"{self.batch} {self.shortest} {self.longest}")
        return [draw.randint(self.shortest, self.longest) for _ in range(self.batch)]

    @property
    def flops(self) -> float:
        pairs = sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lengths)
        return (2.5 if self.gradient else 1) * 4.0 * self.q_heads * pairs * self.head_dim

    @property
    def bytes(self) -> float:
        """Each input read once, each result written once."""
        factor = 2 if self.gradient else 1
        return factor * 4.0 * sum(self.lengths) * self.head_dim * (self.q_heads + self.kv_heads)

    def on_device(self, aot: Path | None = None, device: str = "cuda") -> VarlenContest:
        total = sum(self.lengths)
        starts = torch.tensor([0, *self.lengths], device=device).cumsum(0).int()
        heads = (self.q_heads, self.kv_heads, self.kv_heads, self.q_heads)
        q, k, v, dout = (torch.randn(total, n, self.head_dim, device=device, dtype=torch.bfloat16) for n in heads)
        return VarlenContest(self, (q, k, v), dout, starts)


@dataclass
class VarlenContest:
    case: VarlenCase
    inputs: Inputs
    dout: Tensor
    starts: Tensor

    def contenders(self) -> peers.Calls:
        longest, causal = max(self.case.lengths), self.case.causal

        def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return dsv4.fmha_varlen(
                q, k, v, self.starts, self.starts, causal=causal, max_seqlen_q=longest, max_seqlen_k=longest
            )

        calls: list[tuple[str, Callable[..., Any]]] = [("dsv4", ours), *peers.varlen(self.starts, longest, causal)]
        for name, call in calls:
            if self.case.gradient:
                yield name, peers.gradients(call, self.inputs, self.dout)
            else:
                yield name, partial(self._first, call)

    def _first(self, call: Callable[..., Any]) -> Tensor:
        return peers.first(call(*self.inputs))

    def error(self, name: str, result: Any) -> float:
        """Return the error of the last sequence's last query head, or of the gradients of its KV head, against fp32."""
        case, group = self.case, self.case.q_heads // self.case.kv_heads
        rows = slice(int(self.starts[-2]), int(self.starts[-1]))
        heads = [slice(-group, None), slice(-1, None), slice(-1, None)]
        q, k, v = (x[rows, h].float().transpose(0, 1) for x, h in zip(self.inputs, heads))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        s = leaves[0] @ leaves[1].mT * case.head_dim**-0.5
        if case.causal:
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
        out = torch.softmax(s, -1) @ leaves[2]
        if not case.gradient:
            return _distance(result[rows, heads[0]], out.detach()) / ERROR
        out.backward(self.dout[rows, heads[0]].float().transpose(0, 1))
        return max(_distance(x[rows, h], y.grad) for x, h, y in zip(result, heads, leaves)) / GRADIENT_ERROR


def _distance(got: Tensor, want: Any) -> float:
    error = float((got.float().transpose(0, 1) - want).norm() / want.norm())
    return float("inf") if error != error else error


CASES = [
    VarlenCase(64, 16, 16, 100, 2000, 128), VarlenCase(64, 32, 8, 100, 2000, 128),
    VarlenCase(64, 16, 16, 100, 2000, 128, causal=False), VarlenCase(48, 16, 4, 200, 3000, 64),
    VarlenCase(48, 12, 12, 200, 3000, 64, causal=False), VarlenCase(24, 8, 2, 200, 3000, 256),
    VarlenCase(40, 8, 8, 100, 2000, 192), VarlenCase(300, 8, 8, 10, 300, 128), VarlenCase(6, 16, 4, 50, 12000, 128),
    VarlenCase(8, 8, 8, 100, 700, 128), VarlenCase(16, 8, 8, 100, 1200, 128),
    VarlenCase(64, 16, 16, 100, 2000, 128, gradient=True), VarlenCase(48, 16, 4, 200, 3000, 64, gradient=True),
    VarlenCase(300, 8, 8, 10, 300, 128, gradient=True),
]  # fmt: skip
