"""The suite `dense` times fmha, torch's backends, FFPA (head dim 512) and flash-attn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dsv4
from dsv4.bench import peers
from dsv4.runtime import checks, dispatch

ERROR = 1e-2  # relative, of one head against fp32: several times what rounding P and the output to bf16 makes


@dataclass(frozen=True)
class DenseCase:
    """T queries of each of B sequences on S keys. same_kv: the keys are the values (MQA latents)."""

    name: str
    batch: int
    q_heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool = False
    same_kv: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def sizes(self) -> tuple[Any, ...]:
        """All but the name."""
        return tuple(getattr(self, field.name) for field in fields(self)[1:])

    @property
    def flops(self) -> float:
        """The FLOPs of the two products; with a causal mask only those of visible scores."""
        t, s = self.queries, self.keys
        pairs = t * s - (t * (t - 1) // 2 if self.causal else 0)
        return 4.0 * self.batch * self.q_heads * pairs * self.head_dim

    @property
    def bytes(self) -> float:
        """Each input read once, the output written once."""
        kv = self.keys * self.kv_heads * (1 if self.same_kv else 2)
        return 2.0 * self.batch * self.head_dim * (kv + 2 * self.queries * self.q_heads)

    def inputs(self, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
        def draw(tokens: int, heads: int) -> Tensor:
            return torch.randn(self.batch, tokens, heads, self.head_dim, device=device, dtype=self.dtype)

        q, k = draw(self.queries, self.q_heads), draw(self.keys, self.kv_heads)
        return q, k, k if self.same_kv else draw(self.keys, self.kv_heads)

    def on_device(self, aot: Path | None = None) -> DenseContest:
        return DenseContest(self, aot, *self.inputs())


@dataclass
class DenseContest:
    case: DenseCase
    aot: Path | None
    q: Tensor
    k: Tensor
    v: Tensor

    def contenders(self) -> peers.Calls:
        case, q, k, v = self.case, self.q, self.k, self.v
        plan = None
        if case.head_dim in checks.HEAD_DIMS:
            plan = dsv4.plan(
                dsv4.fmha,
                batch=case.batch,
                q_heads=case.q_heads,
                kv_heads=case.kv_heads,
                head_dim=case.head_dim,
                max_seqlen_q=case.queries,
                max_seqlen_k=case.keys,
            )
        out = torch.empty_like(q)
        yield "dsv4", lambda: dsv4.fmha(q, k, v, causal=case.causal, plan=plan, out=out)
        yield from self._ahead_of_time(plan, out)
        yield from peers.dense(q, k, v, case.causal)

    def _ahead_of_time(self, plan: dsv4.Plan | None, out: Tensor) -> peers.Calls:
        if self.aot is None:
            return
        yield "dsv4 aot", self._from_files(self.aot, plan, out)

    def _from_files(self, directory: Path, plan: dsv4.Plan | None, out: Tensor) -> Callable[[], Any]:
        def call() -> Tensor:
            dispatch.use_aot(directory, only=True)
            try:
                dsv4.fmha(self.q, self.k, self.v, causal=self.case.causal, plan=plan, out=out)
            finally:
                dispatch.use_aot(None)
            return out

        return call

    def error(self, name: str, result: Any) -> float:
        """Return the error of the last sequence's first and last query heads, against fp32."""
        case, worst = self.case, 0.0
        if result.shape != self.q.shape:
            raise RuntimeError(f"{name}: got a result of shape {list(result.shape)}; accepted: {list(self.q.shape)}")
        for head in (0, case.q_heads - 1):
            kv_head = head // (case.q_heads // case.kv_heads)
            q, k, v = (x[-1, :, h].float() for x, h in ((self.q, head), (self.k, kv_head), (self.v, kv_head)))
            for begin in range(0, case.queries, 4096):  # in blocks: the scores of 16384 queries would need gigabytes
                s = q[begin : begin + 4096] @ k.T * case.head_dim**-0.5
                if case.causal:
                    hidden = torch.ones_like(s, dtype=torch.bool).triu(1 + case.keys - case.queries + begin)
                    s = s.masked_fill(hidden, float("-inf"))
                want = torch.softmax(s, -1) @ v
                got = result[-1, begin : begin + 4096, head].float()
                error = float((got - want).norm() / want.norm()) / ERROR
                worst = error if error != error else max(worst, error)
                if worst != worst:
                    return float("inf")
        return worst


def prefill(
    head_dim: int, causal: bool, batch: int = 4, kv_heads: int = 16, keys: int = 4096, heads: int = 0
) -> DenseCase:
    name = f"prefill {'causal' if causal else 'full'} hd{head_dim}"
    heads = heads or (32 if kv_heads == 4 else 16)
    if (batch, kv_heads, keys) != (4, 16, 4096):
        name += f" ({batch}, {heads}:{kv_heads}, {keys})"
    return DenseCase(name, batch, heads, kv_heads, keys, keys, head_dim, causal)


CASES = [
    *(prefill(d, causal) for d in (64, 128, 256, 512) for causal in (False, True)),
    *(prefill(d, causal, 1, 16, 16384) for d in (64, 128, 256, 512) for causal in (False, True)),
    *(prefill(d, causal, 2, 4, 8192) for d in (128, 512) for causal in (False, True)),
    *(prefill(128, causal, 3, 20, 5000, 20) for causal in (False, True)),
    prefill(128, True, 1, 8, 12288, 40),
    prefill(64, True, 2, 8, 4096, 64),
    prefill(64, False, 8, 8, 8192, 8),
    prefill(256, True, 2, 8, 6000, 8),
    prefill(256, False, 1, 2, 10000, 16),
    *(prefill(d, causal) for d in (96, 192) for causal in (False, True)),
    prefill(128, True, 2, 16, 2048),
    prefill(128, True, 16, 16, 512),
    prefill(128, False, 6, 12, 1024, 12),
    DenseCase("decode hd512 64:1 b48 x 6000", 48, 64, 1, 1, 6000, 512, same_kv=True),
    DenseCase("decode hd512 64:1 b128 x 4096", 128, 64, 1, 1, 4096, 512, same_kv=True),
    DenseCase("decode hd512 64:1 b1 x 65536", 1, 64, 1, 1, 65536, 512, same_kv=True),
    DenseCase("decode hd128 64:8 b64 x 8192", 64, 64, 8, 1, 8192, 128),
]
