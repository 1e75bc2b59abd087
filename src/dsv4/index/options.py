"""What index_topk is asked for, beside its tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.runtime import checks


class IndexOptions(NamedTuple):
    topk: int
    ratio: int = 4
    scale: float | None = None
    request_rows: bool = False

    @classmethod
    def checked(cls, topk: Any, ratio: Any, scale: Any, request_rows: Any) -> IndexOptions:
        return cls(
            checked_topk(topk),
            checks.at_least(1, "ratio", ratio),
            None if scale is None else checks.number("scale", scale),
            checks.flag("request_rows", request_rows),
        )


def checked_topk(topk: Any) -> int:
    if checks.at_least(0, "topk", topk) >= 1 << 31:
        checks.fail("topk", topk, "an int below 2**31: row numbers have 32 bits")
    return topk
