"""The suite `index` times index_topk, DeepGEMM's scores and torch; also compress and the writing of rows.

The indexer has 64 heads of 128 dims; keys lie in pages of 64 rows, every request has its own, and all are seen. FLOP =
2 x queries x keys x 64 x 128; bytes = keys, each read once. torch: bmm in bf16, relu, weights, sum, topk of contiguous
keys; with FP8 keys, of the same keys in bf16. DeepGEMM gives scores of FP8 keys; with torch.topk after it, it does
what index_topk does; its scores alone have their own line. A list is right where no row outside it scores more than one
inside it, but for the rounding of the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dsv4
from dsv4.bench import index_fp4, peers
from dsv4.caches.formats import FP8_584
from dsv4.caches.index_keys import quantize_queries, unpacked
from dsv4.compress import forward as compressor
from dsv4.reference import rope_table

HEADS, DIMS, PAGE = 64, 128, 64
# Relative to the largest score: the error of a sum over 64 heads in bf16, and of the products of e4m3 on Hopper's
# tensor cores, which keep 14 bits of a sum.
ERROR = 1e-2
SCORES_ALONE = "DeepGEMM, scores alone"


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


@dataclass(frozen=True)
class IndexCase:
    requests: int
    each: int  # queries of a request
    keys: int
    topk: int
    fp8: bool = False

    @property
    def name(self) -> str:
        kind = "prefill" if self.each > 16 else "decode"
        dtype = "fp8" if self.fp8 else "bf16"
        return f"index {kind} {dtype} {self.requests} x {self.each} queries x {self.keys} keys, topk {self.topk}"

    @property
    def flops(self) -> float:
        return 2.0 * self.requests * self.each * self.keys * HEADS * DIMS

    @property
    def bytes(self) -> float:
        return float(self.requests * self.keys * (132 if self.fp8 else 2 * DIMS))

    def on_device(self, aot: Path | None = None) -> IndexContest:
        return IndexContest(self)


class IndexContest:
    def __init__(self, case: IndexCase) -> None:
        self.case = case
        n, pages = case.requests * case.each, case.keys // PAGE
        self.q, self.weights = bf16(n, HEADS, DIMS), bf16(n, HEADS)
        self.pool = bf16(case.requests * pages, PAGE, DIMS)
        self.table = torch.randperm(len(self.pool), device="cuda").int().view(case.requests, pages)
        self.lengths = torch.full((n,), case.keys, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(0, n + 1, case.each, dtype=torch.int32, device="cuda") if case.each > 1 else None
        if case.fp8:
            self.cache = dsv4.IndexCache.pack(self.pool.flatten(0, 1), rows_per_page=PAGE)
            self.q8, self.w8 = quantize_queries(self.q, self.weights)

    def contenders(self) -> peers.Calls:
        yield "dsv4", self._ours()
        yield "torch", self._torch()
        if self.case.fp8:
            yield from self._deep_gemm()

    def _deep_gemm(self) -> peers.Calls:
        case, gemm = self.case, peers.DeepGEMM()
        if not gemm:
            return
        if case.each > 16:
            line = self.table[0].long()
            values, scales = unpacked(self.cache.page_view()[line])
            scores = gemm.contiguous(self.q8, values.flatten(0, 1), scales.flatten(), self.w8, self.lengths)
        else:
            q, lengths = self.q8.view(case.requests, case.each, HEADS, DIMS), self.lengths.view(case.requests, -1)
            scores = gemm.paged(q, self.cache.page_view(), self.w8, lengths, self.table)
        yield "DeepGEMM + torch.topk", lambda: torch.topk(scores(), case.topk, -1).indices
        yield SCORES_ALONE, scores

    def _ours(self) -> Callable[[], Tensor]:
        case, n = self.case, len(self.q)
        out = torch.empty(n, case.topk, dtype=torch.int32, device="cuda")
        plan = dsv4.plan(dsv4.index_topk, batch=n, q_heads=HEADS, kv_heads=1, head_dim=DIMS, max_seqlen_k=case.keys)
        given = (self.q8, self.cache, self.w8) if case.fp8 else (self.q, self.pool, self.weights)
        return lambda: dsv4.index_topk(
            *given,
            case.topk,
            lengths=self.lengths,
            block_table=self.table,
            request_starts=self.starts,
            out=out,
            plan=plan,
            backend="cuda",
        )

    def rows(self, request: int) -> Tensor:
        """Return the keys [keys, DIMS] of a request, as they are stored."""
        return self.pool[self.table[request].long()].flatten(0, 1)

    def _torch(self) -> Callable[[], list[Tensor]]:
        case = self.case
        rows = self.pool[self.table.long()].view(case.requests, case.keys, DIMS)
        heads = self.q.view(case.requests, case.each * HEADS, DIMS)
        w = self.weights.view(case.requests, case.each, HEADS, 1)
        step = max(1, min(case.each, (4 << 30) // (case.requests * HEADS * case.keys * 2)))  # 4 GB of products at once

        def part(some: slice) -> Tensor:
            products = torch.bmm(heads[:, some.start * HEADS : some.stop * HEADS], rows.mT).relu_()
            scores = (products.view(case.requests, -1, HEADS, case.keys) * w[:, some]).sum(2)
            return torch.topk(scores, case.topk, -1).indices

        parts = [slice(begin, min(begin + step, case.each)) for begin in range(0, case.each, step)]
        return lambda: [part(some) for some in parts]

    def error(self, name: str, result: Any) -> float:
        """Return the most that a row outside the list of the last query scores above the least one in it, over the
        bound."""
        if name == SCORES_ALONE:
            return 0.0  # the lists made of them are checked
        last = len(self.q) - 1
        request = last // self.case.each
        products = (self.q[last].float() @ self.rows(request).float().T).relu()
        scores = self.weights[last].float() @ products  # [keys]
        if self.case.fp8 and name != "torch":
            values, scales = unpacked(self.cache.page_view()[self.table[request].long()])
            products = (self.q8[last].float() @ values.float().flatten(0, 1).T).relu()
            scores = self.w8[last] @ products * scales.flatten()
        places = self.places(name, result)
        if len(places.unique()) != self.case.topk:
            return float("inf")
        inside = scores[places]
        outside = scores.clone()
        outside[places] = -torch.inf
        return float((outside.max() - inside.min()).clamp_min(0) / (ERROR * scores.abs().max()))

    def places(self, name: str, result: Any) -> Tensor:
        """Return the list of the last query, as rows of its request."""
        if name != "dsv4":
            return result[-1].view(-1, self.case.topk)[-1] if isinstance(result, list) else result[-1]
        place_of = torch.empty_like(self.table[-1])
        found = result[-1].long()
        line = torch.full((len(self.pool),), -1, device="cuda")
        line[self.table[-1].long()] = torch.arange(len(place_of), device="cuda")
        return line[found // PAGE] * PAGE + found % PAGE


@dataclass(frozen=True)
class SmallCase:
    """A case of compress for a prompt or of the token that finishes a row; rows into FP8 pages."""

    name: str
    make: Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]  # ours, torch's
    bytes: float
    flops: float = 0.0

    def on_device(self, aot: Path | None = None) -> SmallContest:
        return SmallContest(*self.make())


@dataclass
class SmallContest:
    ours: Callable[[], Any]
    torchs: Callable[[], Any]

    def contenders(self) -> peers.Calls:
        yield "dsv4", self.ours
        yield "torch", self.torchs

    def error(self, name: str, result: Any) -> float:
        return 0.0  # the tests compare the two bit for bit, or nearly so


def compressing(d: int, m: int, overlap: bool, tokens: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    width = d * (1 + overlap)
    rest: dict[str, Any] = dict(
        position_bias=torch.randn(m, width, device="cuda"),
        norm_weight=torch.rand(d, device="cuda"),
        cos_sin=rope_table(8192, 64, 160000.0, factor=16.0).cuda(),
    )
    state = None
    if tokens == 1:
        _, state = dsv4.compress(bf16(4 * m - 1, width), bf16(4 * m - 1, width), **rest)
    kv, gate = bf16(tokens, width), bf16(tokens, width)
    given = compressor.Parameters(**rest, eps=1e-6, dtype=kv.dtype, m=m)
    return lambda: dsv4.compress(kv, gate, **rest, state=state), lambda: compressor._in_torch(kv, gate, state, given)


def writing(rows: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return two calls that write a row: the kernel, and what torch does of it without waiting for the device."""
    cache, x = dsv4.Fp8Cache.empty(200, 64, device="cuda"), bf16(rows, 512)
    slots = torch.randperm(cache.rows, device="cuda")[:rows]
    return lambda: cache.write(slots, x), lambda: FP8_584.quantize(x)


KINDS = (("csa", 512, 4, True), ("index keys", 128, 4, True), ("hca", 512, 128, False))
SIZES = (
    (1, 1, 16384, 512), (1, 1, 65536, 512), (32, 1, 16384, 512), (32, 1, 65536, 512), (128, 1, 16384, 512),
    (128, 1, 65536, 512), (128, 1, 16384, 1024), (32, 2, 16384, 512), (32, 4, 16384, 512), (1, 4096, 16384, 512),
    (1, 4096, 16384, 1024), (8, 1, 8192, 512), (200, 1, 8192, 512), (16, 1, 200_000, 2048),
)  # fmt: skip

CASES: list[Any] = [
    *(IndexCase(*sizes, fp8) for fp8 in (True, False) for sizes in SIZES),
    *index_fp4.CASES,
    *(
        SmallCase(
            f"compress {kind} {tokens} tokens",
            lambda sizes=sizes, tokens=tokens: compressing(*sizes, tokens),
            4.0 * tokens * sizes[0] * (1 + sizes[2]),
        )
        for kind, *sizes in KINDS
        for tokens in (1, 4096)
    ),
    *(
        SmallCase(f"write {rows} FP8 rows", lambda rows=rows: writing(rows), rows * (1024.0 + 584))
        for rows in (1, 128, 4096)
    ),
]
