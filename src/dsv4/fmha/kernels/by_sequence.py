"""Gradients of a varlen batch by several calls. A call has neighbouring sequences that the chain accepts together, or
one that is too long for that. The host reads cu_seqlens.

The chain accepts most batches as they are. This file handles those without a bound on the lengths of their sequences,
and those with sequences so long that their launches cost the host less time than the GPU.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.fmha import backward
from dsv4.fmha.backward import FMHA_BACKWARD, FmhaBackward
from dsv4.fmha.kernels.backward import Kernels, OneHeadEach, prepare_at_once
from dsv4.fmha.kernels.chain import SlabTiles, takes
from dsv4.fmha.problem import FmhaProblem
from dsv4.runtime import calls
from dsv4.runtime.calls import Given
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program


def prepare_by_sequence(
    b: FmhaBackward, target: Target, program: Program, kernels: Kernels, one_head_each: OneHeadEach | None = None
) -> None:
    """Add the launches for a batch as it is; or for the sequences of a varlen batch, in a call each."""
    if takes(b.forward):
        prepare_at_once(b, program, kernels, one_head_each=one_head_each)
    else:
        program.compute(partial(by_sequence, target), b)


def by_sequence(target: Target, b: FmhaBackward) -> None:
    for x in (b.dq, b.dk, b.dv, b.dsink):
        if x is not None:
            x.zero_()
    for run in runs(b.forward):
        dsink = None if b.dsink is None else torch.empty_like(b.dsink)
        part = _varlen(b, run, dsink) if len(run) > 1 else _dense(b, run, dsink)
        tensors, options, outputs = backward.given(part)
        wanted = tuple(x is not None for x in outputs)
        calls.run_on(FMHA_BACKWARD, Given(tensors, options, wanted, outputs), target.backend, target, b.q.device)
        if dsink is not None:
            b.dsink.add_(dsink)


class Run(NamedTuple):
    """Contiguous sequences: where each begins, and where the last ends."""

    q: list[int]
    k: list[int]
    first: int  # number of the first sequence

    def __len__(self) -> int:
        return len(self.q) - 1


def runs(p: FmhaProblem) -> Iterator[Run]:
    """Yield all sequences, as many together as the chain accepts; one alone only if it has queries and keys."""
    starts = []
    for cu, size in ((p.cu_seqlens_q, p.q.shape[0]), (p.cu_seqlens_k, p.k.shape[0])):
        starts.append([min(max(x, 0), size) for x in cu.tolist()])
    first = 0
    while first < p.batch:
        end, longest = first + 1, (0, 0)
        while end <= p.batch:
            longest = tuple(max(most, x[end] - x[end - 1]) for most, x in zip(longest, starts))
            tokens = starts[0][end] - starts[0][first]
            if end > first + 1 and SlabTiles.find(p.group, tokens, end - first, *longest) is None:
                break
            end += 1
        run = Run(*(x[first:end] for x in starts), first)
        if len(run) > 1 or run.q[-1] > run.q[0] and run.k[-1] > run.k[0]:
            yield run
        first = end - 1


def _part(b: FmhaBackward, run: Run, dsink: Tensor | None, **forward: Any) -> FmhaBackward:
    p, rows, keys = b.forward, slice(run.q[0], run.q[-1]), slice(run.k[0], run.k[-1])
    one = replace(p, q=p.q[rows], k=p.k[keys], v=p.v[keys], out=p.out[rows], lse=p.lse[rows], **forward)
    dlse = None if b.dlse is None else b.dlse[rows]
    gradients = (None if x is None else x[at] for x, at in ((b.dq, rows), (b.dk, keys), (b.dv, keys)))
    return FmhaBackward(one, b.dout[rows], dlse, *gradients, dsink)


def _varlen(b: FmhaBackward, run: Run, dsink: Tensor | None) -> FmhaBackward:
    p, numbers = b.forward, slice(run.first, run.first + len(run) + 1)
    bounds = {f"max_seqlen_{x}": max(v - u for u, v in pairwise(cu)) for x, cu in (("q", run.q), ("k", run.k))}
    starts = dict(cu_seqlens_q=p.cu_seqlens_q[numbers] - run.q[0], cu_seqlens_k=p.cu_seqlens_k[numbers] - run.k[0])
    return _part(b, run, dsink, **starts, **bounds, options=p.options._replace(**bounds))


def _dense(b: FmhaBackward, run: Run, dsink: Tensor | None) -> FmhaBackward:
    x = _part(b, run, dsink)
    p = x.forward
    one = replace(
        p,
        kind="dense",
        q=p.q[None],
        k=p.k[None],
        v=p.v[None],
        out=p.out[None],
        lse=p.lse.T[None],
        max_seqlen_q=p.q.shape[0],
        max_seqlen_k=p.k.shape[0],
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        options=p.options._replace(max_seqlen_q=None, max_seqlen_k=None),
    )
    gradients = (None if y is None else y[None] for y in (x.dq, x.dk, x.dv))
    return FmhaBackward(one, x.dout[None], None if x.dlse is None else x.dlse.T[None], *gradients, dsink)
