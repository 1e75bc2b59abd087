"""Gradients of a varlen batch by kernels that take dense ones: cu_seqlens is read on the host.

A long sequence goes alone, as views: its launches take the host half a millisecond, and leave parts of the GPU idle.
Short ones go together as a dense batch of copies where that is possible: sequences of one size,
and under a causal mask also sequences that all have as many keys more than queries, filled up at the end. There, row i
sees keys up to i + keys - queries, so no row of a sequence sees a key that was filled in; the LSE of a row that was
filled in is -inf, so it sees nothing.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.fmha import backward
from dsv4.fmha.backward import FMHA_BACKWARD, FmhaBackward
from dsv4.fmha.kernels.backward import TILE, Kernels, prepare_dense
from dsv4.fmha.problem import FmhaProblem
from dsv4.runtime import calls
from dsv4.runtime.calls import Given
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program

SHORT = 8 * TILE  # queries, and keys


class Span(NamedTuple):
    """A sequence: its rows of q and of k."""

    q: slice
    k: slice

    @property
    def queries(self) -> int:
        return self.q.stop - self.q.start

    @property
    def keys(self) -> int:
        return self.k.stop - self.k.start


def prepare_by_sequence(b: FmhaBackward, target: Target, program: Program, kernels: Kernels) -> None:
    """A dense batch; or the sequences of a varlen one, each a call of its own."""
    if b.forward.kind == "dense":
        prepare_dense(b, program, kernels)
    else:
        program.compute(partial(by_sequence, target), b)


def by_sequence(target: Target, b: FmhaBackward) -> None:
    p = b.forward
    for x in (b.dq, b.dk, b.dv, b.dsink):
        if x is not None:
            x.zero_()
    for spans in together(p):
        dsink = None if b.dsink is None else torch.empty_like(b.dsink)
        if len(spans) == 1:
            _dense_call(target, _alone(b, spans[0], dsink))
        else:
            batch = Copies(b, spans, dsink)
            _dense_call(target, batch.request)
            batch.give_back()
        if dsink is not None:
            b.dsink.add_(dsink)


def _dense_call(target: Target, b: FmhaBackward) -> None:
    tensors, options, outputs = backward.given(b)
    options = options._replace(max_seqlen_q=None, max_seqlen_k=None)  # of the whole batch
    wanted = tuple(x is not None for x in outputs)
    calls.run_on(FMHA_BACKWARD, Given(tensors, options, wanted, outputs), target.backend, target, b.q.device)


def together(p: FmhaProblem) -> Iterator[list[Span]]:
    """The sequences that have a gradient, those together that go together."""
    short: dict[tuple[int, int], list[Span]] = {}
    for span in _spans(p):
        if max(span.queries, span.keys) > SHORT:
            yield [span]
        elif p.right == 0:
            short.setdefault((span.keys - span.queries, -(-span.queries // TILE)), []).append(span)
        else:
            short.setdefault((span.keys, span.queries), []).append(span)
    for spans in short.values():
        # Copies of no more than the batch itself.
        queries, keys = max(x.queries for x in spans), max(x.keys for x in spans)
        count = max(1, min(p.q.shape[0] // queries, p.k.shape[0] // keys))
        for begin in range(0, len(spans), count):
            yield spans[begin : begin + count]


def _spans(p: FmhaProblem) -> Iterator[Span]:
    starts = []
    for cu, size in ((p.cu_seqlens_q, p.q.shape[0]), (p.cu_seqlens_k, p.k.shape[0])):
        starts.append([min(max(x, 0), size) for x in cu.tolist()])
    for n in range(p.batch):
        span = Span(*(slice(*x[n : n + 2]) for x in starts))
        if span.queries > 0 and span.keys > 0:
            yield span


def _as_dense(p: FmhaProblem, queries: int, keys: int, **tensors: Tensor) -> FmhaProblem:
    sizes = dict(max_seqlen_q=queries, max_seqlen_k=keys, cu_seqlens_q=None, cu_seqlens_k=None)
    return replace(p, kind="dense", **sizes, **tensors)


def _alone(b: FmhaBackward, span: Span, dsink: Tensor | None) -> FmhaBackward:
    p, (rows, keys) = b.forward, span
    tensors = dict(q=p.q[None, rows], k=p.k[None, keys], v=p.v[None, keys], out=p.out[None, rows])
    one = _as_dense(p, span.queries, span.keys, **tensors, lse=p.lse[rows].T[None])
    return FmhaBackward(
        one,
        b.dout[None, rows],
        None if b.dlse is None else b.dlse[rows].T[None],
        *(None if x is None else x[None, where] for x, where in ((b.dq, rows), (b.dk, keys), (b.dv, keys))),
        dsink,
    )


class Copies:
    """Sequences as a dense batch."""

    def __init__(self, b: FmhaBackward, spans: list[Span], dsink: Tensor | None):
        self.b, self.count = b, len(spans)
        self.queries, self.keys = max(x.queries for x in spans), max(x.keys for x in spans)
        p = b.forward
        self.rows = self._places([x.q for x in spans], self.queries)
        self.key_rows = self._places([x.k for x in spans], self.keys)
        q, out, dout = (self._copied(x, self.rows, self.queries) for x in (p.q, p.out, b.dout))
        k, v = (self._copied(x, self.key_rows, self.keys) for x in (p.k, p.v))
        lse = self._copied(p.lse, self.rows, self.queries, float("-inf")).transpose(1, 2)
        dlse = None if b.dlse is None else self._copied(b.dlse, self.rows, self.queries).transpose(1, 2)
        made = (None if x is None else torch.empty_like(y) for x, y in ((b.dq, q), (b.dk, k), (b.dv, v)))
        problem = _as_dense(p, self.queries, self.keys, q=q, k=k, v=v, out=out, lse=lse)
        self.request = FmhaBackward(problem, dout, dlse, *made, dsink)

    def give_back(self) -> None:
        """The gradients, to where they belong."""
        given, made = self.b, self.request
        for x, y, (there, here) in (
            (given.dq, made.dq, self.rows),
            (given.dk, made.dk, self.key_rows),
            (given.dv, made.dv, self.key_rows),
        ):
            if x is not None:
                x.index_copy_(0, there, y.flatten(0, 1)[here])

    def _places(self, slices: list[slice], size: int) -> Tensor:
        """[2, rows]: where a row is in the batch, and where in the copy of `size` rows a sequence."""
        first, end = torch.tensor([(x.start, x.stop) for x in slices]).unbind(1)
        each = end - first
        owner = torch.repeat_interleave(each)
        row = torch.arange(len(owner)) - (each.cumsum(0) - each)[owner]
        return torch.stack([first[owner] + row, owner * size + row]).to(self.b.dout.device)

    def _copied(self, x: Tensor, places: Tensor, size: int, fill: float = 0.0) -> Tensor:
        there, here = places
        made = x.new_full((self.count * size, *x.shape[1:]), fill)
        return made.index_copy_(0, here, x[there]).unflatten(0, (self.count, size))
