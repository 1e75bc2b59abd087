"""Pages of KV rows for several requests: who has which page, and in which row of a pool a token's row lies.

There are two kinds of page. A *token page* stands for ``page_tokens`` tokens of a request in every compressed pool of
the model: page p of a ratio-m pool holds the ``page_tokens / m`` rows of those tokens, so one list of page numbers
serves all layers. A *window page* holds one row per token; it goes back as soon as no token to come can see its rows.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4.caches import Fp8Cache
from dsv4.compressor import CompressState
from dsv4.v4_problem import Pool


class Pages:
    """The page numbers that nobody has."""

    def __init__(self, count: int):
        self.free = list(range(count - 1, -1, -1))

    def take(self, n: int) -> list[int]:
        return [self.free.pop() for _ in range(n)]

    def give(self, pages: list[int]) -> None:
        self.free.extend(reversed(pages))


@dataclass
class Request:
    """One sequence."""

    tokens: int = 0  # seen so far
    pages: list[int] = field(default_factory=list)  # token pages, from token 0 on
    window: list[int] = field(default_factory=list)  # window pages, ...
    first: int = 0  # ... from this one of the sequence on
    states: dict[Hashable, CompressState] = field(default_factory=dict)  # of each compressor

    def needs(self, new: int, page_tokens: int, window_page: int) -> tuple[int, int]:
        """(token pages, window pages) that are missing for so many more tokens."""
        end = self.tokens + new
        return -(-end // page_tokens) - len(self.pages), -(-end // window_page) - self.first - len(self.window)

    def behind(self, window: int, window_page: int) -> list[int]:
        """The window pages that the next token does not see any more; they are no longer this request's."""
        passed = max(0, self.tokens - window + 1) // window_page - self.first
        if passed <= 0:
            return []
        gone, self.window = self.window[:passed], self.window[passed:]
        self.first += passed
        return gone


def pool(pages: int, rows: int, width: int, fp8: bool, dtype: torch.dtype, device: torch.device) -> Pool:
    if fp8:
        return Fp8Cache.empty(pages, rows, device=device)
    return torch.zeros(pages, rows, width, dtype=dtype, device=device)


def write(target: Pool, slots: Tensor, rows: Tensor) -> None:
    """Rows [n, width] to the row numbers slots [n]."""
    if isinstance(target, Fp8Cache):
        target.write(slots, rows)
    else:
        target.view(-1, target.shape[-1])[slots] = rows.to(target.dtype)


def table(lists: list[list[int]], device: torch.device) -> Tensor:
    """Page lists as a block table, int32 [requests, longest]; 0 where there is no page."""
    longest = max(map(len, lists), default=0)
    return torch.tensor([x + [0] * (longest - len(x)) for x in lists], dtype=torch.int32, device=device)


def slots(line: Tensor, numbers: Tensor, rows: int) -> Tensor:
    """Row numbers of a sequence [...] -> row numbers of the pool; line: its page numbers, rows of them in a page."""
    return line[numbers // rows] * rows + numbers % rows
