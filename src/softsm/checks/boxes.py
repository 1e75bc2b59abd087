"""Checks TMA boxes: the bytes of global memory that they cover, and boxes outside their tensor."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from softsm.checks.order import address_of
from softsm.memory.box_copy import ADDRESSES, Region, _row_region
from softsm.report.diagnostics import Diagnostic


class BoxChecks:
    """The part of the checker for boxes of TMA loads."""

    def __init__(self, checker):
        self.checker = checker

    def filled(self, w, box) -> None:
        """Reports a TMA load whose box lies wholly outside its tensor and yields only fill values."""
        if self.checker.strict and not len(box_spans(box)):
            m = box.map
            outside = [
                f"{c} of dimension {i} (0 to {d - 1})"
                for i, (c, d) in enumerate(zip(box.coords, m.dims))
                if not -m.box[i] < c < d
            ]
            rows = len(box.rows) if box.rows is not None else m.rows
            self.checker.report.add(
                Diagnostic(
                    "out-of-bounds-fill",
                    f"the box at {box.coords} of {m.describe()} lies outside the tensor: all {rows} rows are "
                    f"filled; coordinate {', '.join(outside) or 'of every row'}",
                    (self.checker.findings.party(w, None, "loads it"),),
                )
            )


class Spans(NamedTuple):
    """Bytes of global memory, int64 [n, 2], counted from `first`."""

    first: int
    table: np.ndarray
    at: int  # address of the table
    end: int  # the greatest end in it


def spans_of(box) -> Spans | None:
    """Returns the bytes of global memory that a TMA box covers, or None. Relative to their first byte they are the same
    for all boxes of a map that lie inside the tensor."""
    m, coords = box.map, box.coords
    if box.rows is None and all([0 <= c <= d - r for c, d, r in zip(coords, m.dims, m.reach)]):
        first = m.base + coords[0] * m.data_type.bits // 8
        for c, stride in zip(coords[1:], m.strides):
            first += c * stride
        first &= ADDRESSES
        found = m.tables.get("spans")
        if found is None:
            table = box_spans(box) - first
            found = m.tables["spans"] = Spans(0, table, address_of(table), int(table[:, 1].max()))
        return found._replace(first=first)
    table = box_spans(box)
    return Spans(0, table, address_of(table), int(table[:, 1].max())) if len(table) else None


def box_spans(box) -> np.ndarray:
    """Returns the bytes of global memory that a TMA box covers: int64 [n, 2]."""
    if box.rows is not None:  # gather, scatter, im2col: addresses of rows, None outside the tensor
        _, first, length = _row_region(box.map, box.coords[0])
        rows = [r for r in box.rows if r is not None and length]
        starts = np.array([box.map.base + r + first & ADDRESSES for r in rows], np.int64)
    else:
        region = Region(box.map, box.coords)
        if not region.nbytes:
            return np.empty((0, 2), np.int64)
        starts, length = np.array([region.address], np.int64), region.shape[-1]
        for count, stride in zip(region.shape[:-1], region.strides[:-1]):
            if count > 1:
                starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
    spans = np.empty((len(starts), 2), np.int64)
    spans[:, 0] = starts
    np.add(starts, length, out=spans[:, 1])
    return spans
