"""The suite `v4` times v4_attention and FlashMLA.

Rows are picked at random from a pool: of 8192 rows for prefill, else larger than the L2. FLOP = 4 x queries x heads x
rows x 512; bytes = the rows that queries list, each counted once per query, though the tiles of 64 heads of a query
each read them. FlashMLA has 64 or 128 heads: fewer are padded for it. Its schedule is made before it is timed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dsv4
from dsv4 import reference
from dsv4.bench import peers

LARGE = 200_000  # rows: 205 MB in bf16, 117 MB in FP8
ERROR = 4e-3  # relative, of four queries against the oracle: twice what rounding to bf16 makes
PAGE = 64
HCA_PAGE = 2


@dataclass(frozen=True)
class V4Case:
    queries: int
    heads: int
    window: int  # rows that a query picks
    compressed: int
    fp8: bool
    pool: int = LARGE
    each: int = 0  # queries of a request, whose compressed rows a block table names; 0: a list

    @property
    def name(self) -> str:
        kind = "prefill" if self.queries > 512 else "decode"
        rows = f"{self.window}+{self.compressed}" if self.compressed else f"{self.window}"
        where = f"by block table, {self.each} queries each" if self.each else f"of {self.pool}"
        return f"v4 {kind} {'fp8' if self.fp8 else 'bf16'} {self.queries} x {self.heads} heads x {rows} {where}"

    @property
    def flops(self) -> float:
        return 4.0 * self.queries * self.heads * (self.window + self.compressed) * 512

    @property
    def bytes(self) -> float:
        return float(self.queries * (self.window + self.compressed) * (584 if self.fp8 else 1024))

    def on_device(self, aot: Path | None = None) -> V4Contest:
        return V4Contest(self)


@dataclass
class V4Contest:
    case: V4Case
    q: Tensor = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        rows = torch.randn(case.pool, 512, device="cuda").bfloat16()
        self.pool = dsv4.Fp8Cache.pack(rows, rows_per_page=PAGE) if case.fp8 else rows
        self.plain = self.pool.unpack()[: case.pool] if isinstance(self.pool, dsv4.Fp8Cache) else rows
        self.q = torch.randn(case.queries, case.heads, 512, device="cuda").bfloat16()
        self.sink = torch.randn(case.heads, device="cuda")
        self.window = self._pick(case.window)
        self.listed = self.table = None
        if case.each:
            requests, pages = case.queries // case.each, case.compressed // HCA_PAGE
            self.hca = dsv4.Fp8Cache.pack(
                torch.randn(requests * case.compressed, 512, device="cuda").bfloat16(), rows_per_page=HCA_PAGE
            )
            self.table = torch.randperm(requests * pages, device="cuda").int().view(requests, pages)
            numbers = self.table[:, :, None] * HCA_PAGE + torch.arange(HCA_PAGE, device="cuda", dtype=torch.int32)
            self.listed = numbers.view(requests, -1).repeat_interleave(case.each, 0)
        elif case.compressed:
            self.listed = self._pick(case.compressed)
        everything = torch.arange(case.queries, device="cuda")
        self.some = everything[:: max(1, case.queries // 4)]
        second = () if self.listed is None else (self._compressed_plain(), self.listed[self.some])
        self.want, _ = reference.v4_attention(
            self.q[self.some], self.plain, self.window[self.some], *second, sink=self.sink
        )

    def _pick(self, count: int) -> Tensor:
        return torch.randint(0, self.case.pool, (self.case.queries, count), device="cuda", dtype=torch.int32)

    def _compressed_plain(self) -> Tensor:
        return self.hca.unpack() if self.case.each else self.plain

    def contenders(self) -> peers.Calls:
        case, out = self.case, torch.empty_like(self.q)
        given: list[Any] = [self.q, self.pool, self.window]
        options: dict[str, Any] = {}
        if self.table is not None:
            given += [self.hca]
            starts = torch.arange(0, case.queries + 1, case.each, dtype=torch.int32, device="cuda")
            lengths = torch.full((case.queries,), case.compressed, dtype=torch.int32, device="cuda")
            options = dict(compressed_block_table=self.table, compressed_lengths=lengths, request_starts=starts)
        elif self.listed is not None:
            given += [self.pool, self.listed]
        yield "dsv4", lambda: dsv4.v4_attention(*given, **options, sink=self.sink, out=out)
        flash = peers.FlashMLA()
        if not flash:
            return
        if case.fp8 and case.queries <= 512:
            extra = self.hca if case.each else self.pool
            second = (None, None) if self.listed is None else (pages_of(extra), self.listed)
            yield "FlashMLA", flash.decode(self.q, pages_of(self.pool), self.window, *second, self.sink)
        elif not case.fp8 and case.heads in (64, 128):
            lists = self.window if self.listed is None else torch.cat([self.window, self.listed], 1)
            yield "FlashMLA", flash.prefill(self.q, self.plain, lists, self.sink)

    def error(self, name: str, result: Any) -> float:
        error = float((result[self.some].double() - self.want).norm() / self.want.norm()) / ERROR
        return error if error == error else float("inf")


def pages_of(cache: dsv4.Fp8Cache) -> Tensor:
    """Return pages as engines have them: uint8 [pages, rows, 1, 584]."""
    size = (cache.pages, cache.rows_per_page, 1, 584)
    return cache.storage.as_strided(size, (cache.page_stride, 584, 584, 1))


CASES = [
    *(V4Case(4096, heads, rows, 0, False, 8192) for heads in (64, 128) for rows in (512, 1024, 2048)),
    V4Case(4096, 64, 128, 512, False), V4Case(4096, 64, 128, 512, True), V4Case(4096, 128, 128, 1024, False),
    *(V4Case(b, 64, 128, rows, True) for rows in (512, 1024) for b in (1, 2, 8, 32, 128, 256)),
    *(V4Case(b, 128, 128, rows, True) for rows in (512, 1024) for b in (1, 2, 8, 32, 128, 256)),
    *(V4Case(128, heads, 128, 512, True) for heads in (8, 16, 32)),
    V4Case(16, 64, 128, 8192, True, each=1), V4Case(64, 64, 128, 8192, True, each=4),
    V4Case(1, 64, 128, 512, False), V4Case(128, 64, 128, 512, False),
    V4Case(2000, 128, 1536, 0, False, 40_000), V4Case(1024, 64, 2048, 0, False, 65_536),
    V4Case(48, 128, 128, 1536, True), V4Case(96, 128, 128, 512, True),
]  # fmt: skip
