"""The options of index_topk and index_blocks: all arguments but tensors. A new option is a keyword and a field here."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

from torch import Tensor

from dsv4.runtime import checks
from dsv4.runtime.checks import Backend
from dsv4.runtime.plan import Plan


class Keywords(TypedDict, total=False):
    """What type checkers see: the return type depends on return_scores alone."""

    positions: Tensor | None
    ratio: int
    lengths: Tensor | None
    block_table: Tensor | None
    request_starts: Tensor | None
    scale: float | None
    request_rows: bool
    q_scales: Tensor | None
    bf16_scores: bool
    out: Tensor | None
    plan: Plan | None
    backend: Backend


class TopkKeywords(Keywords, total=False):
    blocks: Tensor | None


class IndexOptions(NamedTuple):
    topk: int
    topk_blocks: int = 0  # of index_blocks
    ratio: int = 4
    scale: float | None = None
    request_rows: bool = False
    bf16_scores: bool = False

    @classmethod
    def checked(
        cls,
        topk: Any,
        topk_blocks: Any = 0,
        /,
        ratio: Any = 4,
        scale: Any = None,
        request_rows: Any = False,
        bf16_scores: Any = False,
    ) -> IndexOptions:
        return cls(
            _count("topk", topk),
            _count("topk_blocks", topk_blocks) if topk_blocks else 0,
            checks.at_least(1, "ratio", ratio),
            None if scale is None else checks.number("scale", scale),
            checks.flag("request_rows", request_rows),
            checks.flag("bf16_scores", bf16_scores),
        )


def _count(name: str, x: Any) -> int:
    if checks.at_least(0, name, x) >= 1 << 31:
        checks.fail(name, x, "an int below 2**31: row numbers have 32 bits")
    return x
