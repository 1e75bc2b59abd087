"""Options of index_topk and index_blocks, besides their tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.runtime import checks


class IndexOptions(NamedTuple):
    topk: int
    ratio: int = 4
    scale: float | None = None
    request_rows: bool = False
    bf16_scores: bool = False

    @classmethod
    def checked(cls, topk: Any, ratio: Any, scale: Any, request_rows: Any, bf16_scores: Any) -> IndexOptions:
        return cls(
            checked_topk(topk),
            checks.at_least(1, "ratio", ratio),
            None if scale is None else checks.number("scale", scale),
            checks.flag("request_rows", request_rows),
            checks.flag("bf16_scores", bf16_scores),
        )


class BlockOptions(NamedTuple):
    topk: int
    topk_blocks: int
    ratio: int = 4
    scale: float | None = None
    request_rows: bool = False
    bf16_scores: bool = False

    @classmethod
    def checked(
        cls, topk: Any, topk_blocks: Any, ratio: Any, scale: Any, request_rows: Any, bf16_scores: Any
    ) -> BlockOptions:
        rest = IndexOptions.checked(topk, ratio, scale, request_rows, bf16_scores)
        checked_topk(topk, 1)
        return cls(rest.topk, checked_topk(topk_blocks, 1, "topk_blocks"), *rest[1:])


def checked_topk(topk: Any, least: int = 0, name: str = "topk") -> int:
    if checks.at_least(least, name, topk) >= 1 << 31:
        checks.fail(name, topk, "an int below 2**31: row numbers have 32 bits")
    return topk
