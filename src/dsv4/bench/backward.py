"""The suite `backward` times the gradients of fmha and v4_attention, and those of torch, FFPA and flash-attn.

TFLOP/s count 2.5 times the forward's products, whatever a kernel computes again; bytes are inputs and gradients, once
each. Autograd runs a backward pass on the stream of its forward pass, so no CUDA graph can be made of it alone: it is
called, and the GPU's time counts, as in training, where the host is ahead. In "eager" cases the GPU is idle, and the
host's time counts too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import dsv4
from dsv4 import reference
from dsv4.bench import peers
from dsv4.bench.dense import DenseCase
from dsv4.bench.timing import Mode
from dsv4.reference import backward as reference_backward

ERROR = 1e-2  # relative, of one head against fp32: several times what rounding P, dS and the result to bf16 makes


@dataclass(frozen=True)
class BackwardCase:
    forward: DenseCase
    mode: Mode = "queued"

    @property
    def name(self) -> str:
        return self.forward.name

    @property
    def flops(self) -> float:
        return 2.5 * self.forward.flops

    @property
    def bytes(self) -> float:
        """q, k, v, out and dout read, dq, dk and dv written."""
        case = self.forward
        return 2.0 * case.batch * case.head_dim * (4 * case.queries * case.q_heads + 4 * case.keys * case.kv_heads)

    def on_device(self, aot: Path | None = None) -> BackwardContest:
        q, k, v = self.forward.inputs()
        return BackwardContest(self.forward, q, k, v, torch.randn_like(q))


@dataclass
class BackwardContest:
    case: DenseCase
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    expected: dict[int, list[Tensor]] = field(default_factory=dict)  # reference results, by KV head

    def contenders(self) -> peers.Calls:
        inputs = (self.q, self.k, self.v)
        for name, deterministic in (("dsv4", False), ("dsv4 deterministic", True)):
            yield (
                name,
                peers.gradients(
                    lambda q, k, v, sure=deterministic: dsv4.fmha(q, k, v, causal=self.case.causal, deterministic=sure),
                    inputs,
                    self.dout,
                ),
            )
        yield from peers.dense_backward(*inputs, self.dout, self.case.causal)

    def error(self, name: str, result: Any) -> float:
        """Return the error of the last sequence's first and last KV heads, against fp32; the worst of dq, dk and dv."""
        case, worst = self.case, 0.0
        group = case.q_heads // case.kv_heads
        for head in (0, case.kv_heads - 1):
            heads = slice(head * group, (head + 1) * group)
            if head not in self.expected:
                self.expected[head] = self._in_fp32(head, heads)
            own = slice(head, head + 1)
            for got, where, right in zip(result, (heads, own, own), self.expected[head]):
                error = float((got[-1, :, where].float() - right).norm() / right.norm()) / ERROR
                if error != error:
                    return float("inf")
                worst = max(worst, error)
        return worst

    def _in_fp32(self, head: int, heads: slice) -> list[Tensor]:
        """Return dq [T, G, D], dk and dv [S, 1, D] of one KV head, by blocks of queries: all scores need gigabytes."""
        case, scale = self.case, self.case.head_dim**-0.5
        k, v = (x[-1, :, head].float() for x in (self.k, self.v))
        dq = torch.empty_like(self.q[-1, :, heads], dtype=torch.float32)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for g in range(heads.stop - heads.start):
            for begin in range(0, case.queries, 2048):
                some = slice(begin, begin + 2048)
                q, dout = (x[-1, some, heads.start + g].float() for x in (self.q, self.dout))
                s = q @ k.T * scale
                if case.causal:
                    hidden = torch.ones_like(s, dtype=torch.bool).triu(1 + case.keys - case.queries + begin)
                    s.masked_fill_(hidden, float("-inf"))
                p = torch.softmax(s, -1)
                dv += p.T @ dout
                dp = dout @ v.T
                ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
                dq[some, g] = ds @ k
                dk += ds.T @ q
        return [dq, dk[:, None], dv[:, None]]


@dataclass(frozen=True)
class V4BackwardCase:
    """A case in which every query sees `window` rows before it and `listed` of a quarter as many compressed ones,
    at random.
    """

    queries: int
    heads: int
    window: int
    listed: int
    dtype: torch.dtype = torch.bfloat16
    mode: ClassVar[Mode] = "queued"

    @property
    def name(self) -> str:
        rows = f"{self.window}+{self.listed}" if self.listed else f"{self.window}"
        fp16 = " fp16" if self.dtype == torch.float16 else ""
        return f"backward v4{fp16} {self.queries} x {self.heads} heads x {rows}"

    @property
    def flops(self) -> float:
        return 10.0 * self.queries * self.heads * (self.window + self.listed) * 512

    @property
    def bytes(self) -> float:
        """Rows as often as they are listed; q, out and dout read, dq written."""
        return 1024.0 * self.queries * (self.window + self.listed + 4 * self.heads)

    def on_device(self, aot: Path | None = None) -> V4BackwardContest:
        return V4BackwardContest(self)


@dataclass
class V4BackwardContest:
    case: V4BackwardCase
    device: str = "cuda"
    compared: int = 8  # queries, from the first

    def __post_init__(self) -> None:
        case, device = self.case, self.device

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=case.dtype)

        position = torch.arange(case.queries, device=device, dtype=torch.int32)
        self.q, self.dout = draw(case.queries, case.heads, 512), draw(case.queries, case.heads, 512)
        self.rows = [draw(case.queries + case.window, 512)]
        self.lists = [position[:, None] + torch.arange(case.window, device=device, dtype=torch.int32)]
        if case.listed:
            size = max(case.queries // 4, case.listed)
            self.rows.append(draw(size, 512))
            self.lists.append(torch.rand(case.queries, size, device=device).argsort(1)[:, : case.listed].int())
        self.sink = torch.randn(case.heads, device=device)
        self.rope = (reference.rope_table(case.queries, 64, device=device), position)

    def contenders(self) -> peers.Calls:
        for name, deterministic in (("dsv4", False), ("dsv4 deterministic", True)):

            def forward(q: Tensor, sink: Tensor, *rows: Tensor, sure: bool = deterministic) -> Tensor:
                given = [x for pair in zip(rows, self.lists) for x in pair]
                return dsv4.v4_attention(q, *given, sink=sink, inverse_rope=self.rope, deterministic=sure)

            yield name, peers.gradients(forward, (self.q, self.sink, *self.rows), self.dout)
        yield from self._peers()

    def _peers(self) -> peers.Calls:
        """Return the peers' calls. They have one pool and no inverse RoPE, so they get dO rotated as q was."""
        first = 0
        lists = []
        for rows, listed in zip(self.rows, self.lists):
            lists.append(listed + first)
            first += rows.shape[0]
        pool, indices = torch.cat(self.rows), torch.cat(lists, 1)
        out, lse = dsv4.v4_attention(self.q, pool, indices, sink=self.sink, return_lse=True)
        dout = reference.apply_rope(self.dout, self.rope[0], self.rope[1]).to(self.dout.dtype)
        yield from peers.v4_backward(self.q, pool, indices, self.sink, out, lse, dout)

    def error(self, name: str, result: Any) -> float:
        """Return the error of dq of the first queries. The gradients of rows are sums over all queries: they agree if
        dq does."""
        some = slice(0, self.compared)
        given = [x for rows, lists in zip(self.rows, self.lists) for x in (rows, lists[some])]
        want = reference_backward.v4_attention(
            self.q[some], *given, dout=self.dout[some], sink=self.sink, inverse_rope=(self.rope[0], self.rope[1][some])
        ).q
        error = float((result[0][some].double() - want).norm() / want.norm()) / ERROR
        return error if error == error and all(x.isfinite().all() for x in result) else float("inf")


def training(
    head_dim: int,
    causal: bool,
    batch: int = 4,
    heads: int = 16,
    kv_heads: int = 16,
    tokens: int = 4096,
    mode: Mode = "queued",
) -> BackwardCase:
    name = f"backward {'eager ' if mode == 'idle' else ''}{'causal' if causal else 'full'} hd{head_dim}"
    if (batch, kv_heads, tokens) != (4, 16, 4096):
        name += f" ({batch}, {heads}:{kv_heads}, {tokens})"
    return BackwardCase(DenseCase(name, batch, heads, kv_heads, tokens, tokens, head_dim, causal), mode)


EITHER: tuple[Mode, Mode] = ("queued", "idle")
CASES = [  # first the cases that a time limit should not cut off
    *(training(512, causal) for causal in (False, True)),
    *(training(512, causal, 1, tokens=16384) for causal in (False, True)),
    V4BackwardCase(4096, 64, 128, 512),
    V4BackwardCase(4096, 128, 128, 1024),
    *(training(d, causal) for d in (256, 128, 64) for causal in (False, True)),
    V4BackwardCase(4096, 64, 128, 512, torch.float16),
    V4BackwardCase(4096, 64, 128, 0),
    V4BackwardCase(4096, 64, 128, 32),
    *(training(128, causal, 1, tokens=16384) for causal in (False, True)),
    *(training(d, True, 2, 32, 4, 8192) for d in (512, 128)),
    *(training(128, causal, 3, 20, 20, 5000) for causal in (False, True)),
    training(128, True, 1, 40, 8, 12288),
    training(64, True, 2, 64, 8, 4096),
    training(64, False, 8, 8, 8, 8192),
    *(training(128, True, 16, 16, 16, 512, mode) for mode in EITHER),
    *(training(128, False, 6, 12, 12, 1024, mode) for mode in EITHER),
]
