"""Places for several requests: who has which page, and the numbers of one step, laid out for the device.

There are two kinds of page. A *token page* stands for ``page_tokens`` tokens of a request in every compressed pool of
the model: page p of a ratio-m pool holds the ``page_tokens / m`` rows of those tokens, so one list of page numbers
serves all layers. A *window page* holds one row per token; it goes back as soon as no token to come can see its rows.

A request also has a *line*: its number in the block tables and in the states of the compressors. Every pool has one
page, and every table one line, more than requests can have: what must not be written anywhere is written there, which
keeps shapes free of values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dsv4.caches.kv import Fp8Cache, Pool


class Numbers:
    """The numbers that no request has: of pages, of lines."""

    def __init__(self, count: int):
        self.free = list(range(count - 1, -1, -1))

    def take(self, n: int) -> list[int]:
        return [self.free.pop() for _ in range(n)]

    def give(self, numbers: list[int]) -> None:
        self.free.extend(reversed(numbers))


@dataclass
class Request:
    """One sequence."""

    line: int
    tokens: int = 0  # seen so far
    pages: list[int] = field(default_factory=list)  # token pages, from token 0 on
    window: list[int] = field(default_factory=list)  # window pages, ...
    first: int = 0  # ... from this one of the sequence on


class Places:
    """Pages and lines, and tables of them on the host: page j of a sequence is tables[line, j], its window page j is
    windows[line, j % width], as the pages that no token sees any more are given back.
    """

    def __init__(
        self, requests: int, pages: int, page_tokens: int, per_request: int, window: int, window_page: int, chunk: int
    ):
        self.page_tokens, self.window, self.window_page, self.page_count = page_tokens, window, window_page, pages
        self.spare_page = pages
        touched = -(-(window - 1) // window_page) + 1  # pages that a window touches
        self.window_page_count = requests * (touched + 1) + -(-chunk // window_page)
        self.pages, self.window_pages, self.lines = Numbers(pages), Numbers(self.window_page_count), Numbers(requests)
        self.tables = np.full((requests + 1, per_request), pages, dtype=np.int32)
        width = touched + 1 + -(-chunk // window_page)
        self.windows = np.full((requests + 1, width), self.window_page_count, dtype=np.int32)

    def needs(self, request: Request, new: int) -> tuple[int, int]:
        """Return (token pages, window pages) that are missing for this many more tokens."""
        end = request.tokens + new
        window = -(-end // self.window_page) - request.first - len(request.window)
        return -(-end // self.page_tokens) - len(request.pages), window

    def extend(self, request: Request, new: int) -> None:
        """Add pages for this many more tokens; the caller has seen that there are enough."""
        tokens, window = self.needs(request, new)
        if tokens:
            begin = len(request.pages)
            request.pages += self.pages.take(tokens)
            self.tables[request.line, begin : len(request.pages)] = request.pages[begin:]
        if window:
            begin = request.first + len(request.window)
            taken = self.window_pages.take(window)
            request.window += taken
            self.windows[request.line, np.arange(begin, begin + window) % self.windows.shape[1]] = taken

    def shrink(self, request: Request, pages: int, window: int) -> None:
        """Shrink back to this many pages."""
        self.pages.give(request.pages[pages:])
        self.window_pages.give(request.window[window:])
        del request.pages[pages:], request.window[window:]

    def pass_by(self, request: Request) -> None:
        """Give back the window pages that the next token does not see any more."""
        passed = max(0, request.tokens - self.window + 1) // self.window_page - request.first
        if passed > 0:
            self.window_pages.give(request.window[:passed])
            del request.window[:passed]
            request.first += passed

    def leave(self, request: Request) -> None:
        self.shrink(request, 0, 0)
        self.lines.give([request.line])


class Upload:
    """Arrays of a step to the device in one copy; the views stay where they are, so that a graph can read them.

    Every array begins at a multiple of 16 bytes: kernels compiled ahead of time count on it."""

    def __init__(self, device: torch.device, **sizes: tuple[int, ...]):
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        room = {name: -(-int(np.prod(size)) // 4) * 4 for name, size in sizes.items()}
        total = sum(room.values())
        pinned = device.type == "cuda"
        self.staging = torch.zeros(total, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self.target = torch.zeros(total, dtype=torch.int32, device=device)
        self.copied = torch.cuda.Event() if pinned else None
        begin = 0
        for name, size in sizes.items():
            end = begin + int(np.prod(size))
            self.host[name] = self.staging[begin:end].view(size).numpy()
            self.device[name] = self.target[begin:end].view(size)
            begin += room[name]

    def begin(self) -> dict[str, np.ndarray]:
        """Return the arrays to fill, when the device has read what they held before."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.host

    def send(self) -> None:
        self.target.copy_(self.staging, non_blocking=True)
        if self.copied is not None:
            self.copied.record()


def pool(pages: int, rows: int, width: int, fp8: bool, dtype: torch.dtype, device: torch.device) -> Pool:
    """Return pages 0 .. pages - 1, and the one for what must not be written."""
    if fp8:
        return Fp8Cache.empty(pages + 1, rows, device=device)
    return torch.zeros(pages + 1, rows, width, dtype=dtype, device=device)
