"""Part of the suite `v4`: v4_attention with the rows of DeepSeek-V4.1, 528 bytes in the window and 288 compressed.

The contenders are our own kernels with what engines store on Hopper, V4's 584-byte rows ("dsv4 584"), or with bf16 rows
for prefill, and FlashMLA with the same. Rows are picked at random from two pools. The bytes are those of V4.1's rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dsv4
from dsv4 import reference
from dsv4.bench import peers
from dsv4.bench.v4 import ERROR, LARGE, pages_of
from dsv4.caches.kv import Pool

WINDOW_PAGE, COMPRESSED_PAGE = 32, 64


@dataclass(frozen=True)
class V41Case:
    queries: int
    heads: int
    window: int = 128  # rows that a query picks
    compressed: int = 512
    pool: int = LARGE

    @property
    def name(self) -> str:
        kind = "prefill" if self.queries > 512 else "decode"
        return f"v4.1 {kind} {self.queries} x {self.heads} heads x {self.window}+{self.compressed} of {self.pool}"

    @property
    def flops(self) -> float:
        return 4.0 * self.queries * self.heads * (self.window + self.compressed) * 512

    @property
    def bytes(self) -> float:
        return float(self.queries * (self.window * 528 + self.compressed * 288))

    def on_device(self, aot: Path | None = None) -> V41Contest:
        return V41Contest(self)


class V41Contest:
    def __init__(self, case: V41Case, device: str = "cuda") -> None:
        self.case, self.device = case, device
        rows = [torch.randn(case.pool, 512, device=device).bfloat16() for _ in range(2)]
        self.q = torch.randn(case.queries, case.heads, 512, device=device).bfloat16()
        self.sink = torch.randn(case.heads, device=device)
        self.lists = [self._pick(case.window), self._pick(case.compressed)]
        self.pools: dict[str, tuple[Pool, Pool]] = {
            "dsv4": (
                dsv4.Mxfp8Cache.pack(rows[0], rows_per_page=WINDOW_PAGE),
                dsv4.Nvfp4Cache.pack(rows[1], rows_per_page=COMPRESSED_PAGE),
            )
        }
        if case.queries > 512:
            self.pools["dsv4 bf16"] = (rows[0], rows[1])
        else:
            old = [dsv4.Fp8Cache.pack(x, rows_per_page=COMPRESSED_PAGE) for x in rows]
            self.pools["dsv4 584"] = (old[0], old[1])
        self.some = torch.arange(case.queries, device=device)[:: max(1, case.queries // 4)]
        self.want = {name: self._definition(*pools) for name, pools in self.pools.items()}

    def _pick(self, count: int) -> Tensor:
        return torch.randint(0, self.case.pool, (self.case.queries, count), device=self.device, dtype=torch.int32)

    def _definition(self, window: Pool, compressed: Pool) -> Tensor:
        lists = [x[self.some] for x in self.lists]
        return reference.v4_attention(self.q[self.some], window, lists[0], compressed, lists[1], sink=self.sink)[0]

    def contenders(self) -> peers.Calls:
        for name, (window, compressed) in self.pools.items():
            yield name, self._call(window, compressed)
        flash = peers.FlashMLA()
        if flash and "dsv4 584" in self.pools:
            pages = [pages_of(x) for x in self.pools["dsv4 584"] if isinstance(x, dsv4.Fp8Cache)]
            yield "FlashMLA, 584", flash.decode(self.q, pages[0], self.lists[0], pages[1], self.lists[1], self.sink)
        elif flash and self.case.heads in (64, 128):
            window, compressed = self.pools["dsv4 bf16"]
            assert isinstance(window, Tensor) and isinstance(compressed, Tensor)
            lists = torch.cat([self.lists[0], self.lists[1] + self.case.pool], 1)
            yield "FlashMLA, bf16", flash.prefill(self.q, torch.cat([window, compressed]), lists, self.sink)

    def _call(self, window: Pool, compressed: Pool) -> Any:
        out = torch.empty_like(self.q)
        return lambda: dsv4.v4_attention(
            self.q, window, self.lists[0], compressed, self.lists[1], sink=self.sink, out=out
        )

    def error(self, name: str, result: Any) -> float:
        want = self.want[name] if name in self.want else self.want[[*self.want][1]]
        error = float((result[self.some].double() - want).norm() / want.norm()) / ERROR
        return error if error == error else float("inf")


CASES = [
    *(V41Case(b, 64) for b in (1, 2, 8, 16, 32, 64, 128, 256)),
    *(V41Case(b, heads) for heads in (8, 16) for b in (1, 32, 128)),
    V41Case(128, 32),
    V41Case(4096, 64, pool=8192),
    V41Case(4096, 64, pool=100_000),
]
