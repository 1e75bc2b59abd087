"""DeepSeek-V4.1's indexer in the suite `index`: 32 heads with FP4 keys and queries, compared with FP8 keys.

A consumer has 2048 blocks of 8 rows, which index_blocks kept for other queries; FP8 keys, DeepGEMM and torch have no
such thing and score all rows. Keys lie in pages of 64 rows. FLOP = 2 x rows x 32 x 128; bytes = keys that must be read,
once. A list is right where no row outside it scores more than one inside it, but for the rounding of the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dsv4
from dsv4.bench import peers
from dsv4.caches.index_keys import IndexCache, quantize_queries, quantize_queries_fp4
from dsv4.caches.mxfp4_keys import INDEX_68

HEADS, DIMS, PAGE, TOPK, BLOCKS, BLOCK = 32, 128, 64, 512, 2048, 8
ERROR = 1e-2  # relative to the largest score: products of e4m3 on Hopper's tensor cores keep 14 bits of a sum


@dataclass(frozen=True)
class Fp4Case:
    requests: int
    keys: int
    consumer: bool = False

    @property
    def name(self) -> str:
        kind = f"consumer fp4 {self.requests} requests" if self.consumer else f"decode fp4 {self.requests} x 1 queries"
        return f"index {kind} x {self.keys} keys, {HEADS} heads, topk {TOPK}"

    @property
    def rows(self) -> int:
        return self.requests * (min(self.keys, BLOCKS * BLOCK) if self.consumer else self.keys)

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * HEADS * DIMS

    @property
    def bytes(self) -> float:
        return float(self.rows * INDEX_68.row_bytes)

    def on_device(self, aot: Path | None = None) -> Fp4Contest:
        return Fp4Contest(self)


class Fp4Contest:
    def __init__(self, case: Fp4Case) -> None:
        self.case = case
        n, pages = case.requests, case.keys // PAGE
        rows = torch.randn(n * pages * PAGE, DIMS, device="cuda").bfloat16()
        self.q, self.weights = (torch.randn(s, device="cuda") for s in ((n, HEADS, DIMS), (n, HEADS)))
        self.fp4, self.fp8 = IndexCache.pack(rows, format=INDEX_68), IndexCache.pack(rows)
        self.q4, self.scales = quantize_queries_fp4(self.q)
        self.q8, self.w8 = quantize_queries(self.q, self.weights)
        lengths = torch.full((n,), case.keys, dtype=torch.int32, device="cuda")
        self.table = torch.randperm(n * pages, device="cuda").int().view(n, pages)
        self.more: dict[str, Any] = dict(lengths=lengths, block_table=self.table, request_rows=True, backend="cuda")
        self.blocks = None
        if case.consumer:
            self.source, self.source_scales = quantize_queries_fp4(torch.randn_like(self.q))
            _, self.blocks = self.kept_blocks()

    def kept_blocks(self, plan: dsv4.Plan | None = None) -> tuple[Tensor, Tensor]:
        given = (self.source, self.fp4, self.weights, TOPK, BLOCKS)
        return dsv4.index_blocks(*given, q_scales=self.source_scales, plan=plan, **self.more)

    def contenders(self) -> peers.Calls:
        n, keys = self.case.requests, self.case.keys
        out = torch.empty(n, TOPK, dtype=torch.int32, device="cuda")
        plan = dsv4.plan(dsv4.index_topk, batch=n, q_heads=HEADS, kv_heads=1, head_dim=DIMS, max_seqlen_k=keys)
        ours: dict[str, Any] = dict(**self.more, out=out, plan=plan)
        given = (self.q4, self.fp4, self.weights, TOPK)
        yield "dsv4", lambda: dsv4.index_topk(*given, q_scales=self.scales, blocks=self.blocks, **ours)
        if self.case.consumer:
            yield "dsv4, all rows", lambda: dsv4.index_topk(*given, q_scales=self.scales, **ours)
        yield "dsv4, FP8 keys", lambda: dsv4.index_topk(self.q8, self.fp8, self.w8, TOPK, **ours)
        if gemm := peers.DeepGEMM():
            q, lengths = self.q8.view(n, 1, HEADS, DIMS), self.more["lengths"].view(n, 1)
            scores = gemm.paged(q, self.fp8.page_view(), self.w8, lengths, self.table)
            yield "DeepGEMM + torch.topk, FP8 keys", lambda: torch.topk(scores(), TOPK, -1).indices
        yield "torch", self._torch()

    def _torch(self) -> Callable[[], Tensor]:
        n = self.case.requests
        keys = self._keys(self.fp4, slice(None)).bfloat16().view(n, self.case.keys, DIMS)
        q, w = self._queries().bfloat16(), self.weights.bfloat16()
        hidden = None if self.blocks is None else ~torch.stack([self._inside(i) for i in range(n)])

        def run() -> Tensor:
            scores = (torch.bmm(q, keys.mT).relu_() * w[..., None]).sum(1)
            return torch.topk(scores if hidden is None else scores.masked_fill_(hidden, -torch.inf), TOPK, -1).indices

        return run

    def _keys(self, cache: IndexCache, some: Any) -> Tensor:
        return cache.unpack(torch.float32).view(-1, PAGE, DIMS)[self.table[some].long()].flatten(-3, -2)

    def _queries(self) -> Tensor:
        return INDEX_68.dequantize(self.q4, self.scales[..., None].contiguous().view(torch.uint8), torch.float32)

    def _inside(self, n: int) -> Tensor:
        """Return which rows of a request a consumer looks into."""
        assert self.blocks is not None
        kept = torch.zeros(self.case.keys // BLOCK, dtype=torch.bool, device="cuda")
        kept[self.blocks[n][self.blocks[n] >= 0].long()] = True
        return kept.repeat_interleave(BLOCK)

    def error(self, name: str, result: Tensor) -> float:
        """Return the most that a row outside the list of the last query scores above the least one in it, over the
        bound."""
        if "FP8" in name:
            scores = self.w8[-1] @ (self.q8[-1].float() @ self._keys(self.fp8, -1).T).relu()
        else:
            scores = self.weights[-1] @ (self._queries()[-1] @ self._keys(self.fp4, -1).T).relu()
        if self.case.consumer and name in ("dsv4", "torch"):
            scores = scores.masked_fill(~self._inside(-1), -torch.inf)
        places = result[-1].long()
        if len(places.unique()) != TOPK:
            return float("inf")
        outside = scores.index_fill(0, places, -torch.inf)
        bound = ERROR * scores[scores > -torch.inf].abs().max()
        return float((outside.max() - scores[places].min()).clamp_min(0) / bound)


@dataclass(frozen=True)
class Fp4Token(Fp4Case):
    """All indexers of V4.1-Flash for a token: three over rows of two tokens, one that keeps blocks, four consumers."""

    consumer: bool = True

    @property
    def name(self) -> str:
        return f"index token fp4 1 requests x {self.keys} keys, {HEADS} heads, topk {TOPK}, 8 indexers"

    @property
    def rows(self) -> int:
        return 3 * (self.keys // 2) + self.keys + 4 * super().rows

    def on_device(self, aot: Path | None = None) -> Fp4TokenContest:
        return Fp4TokenContest(self)


class Fp4TokenContest(Fp4Contest):
    """The contest of Fp4Token, whose result is the list of the last consumer."""

    def __init__(self, case: Fp4Case) -> None:
        super().__init__(case)
        self.pairs = [Fp4Contest(Fp4Case(1, case.keys // 2)) for _ in range(3)]

    def contenders(self) -> peers.Calls:
        sizes: dict[str, Any] = dict(batch=1, q_heads=HEADS, kv_heads=1, head_dim=DIMS, max_seqlen_k=self.case.keys)
        plan, source = dsv4.plan(dsv4.index_topk, **sizes), dsv4.plan(dsv4.index_blocks, **sizes)

        def fp4() -> Tensor:
            for x in self.pairs:
                dsv4.index_topk(x.q4, x.fp4, x.weights, TOPK, q_scales=x.scales, plan=plan, **x.more)
            _, blocks = self.kept_blocks(source)
            more: dict[str, Any] = dict(q_scales=self.scales, blocks=blocks, plan=plan, **self.more)
            return [dsv4.index_topk(self.q4, self.fp4, self.weights, TOPK, **more) for _ in range(4)][-1]

        def fp8() -> Tensor:
            layers = [*self.pairs, *[self] * 5]
            return [dsv4.index_topk(x.q8, x.fp8, x.w8, TOPK, plan=plan, **x.more) for x in layers][-1]

        yield "dsv4", fp4
        yield "dsv4, FP8 keys, all rows", fp8


CASES = [
    Fp4Case(1, 131072),
    Fp4Case(32, 32768),
    Fp4Case(1, 1 << 20),
    Fp4Case(1, 131072, consumer=True),
    Fp4Case(32, 32768, consumer=True),
    Fp4Token(1, 1 << 20),
]
