"""Shapes of this library's kernels, drawn at random: predicted, committed, then measured.

python benchmarks/timing.py --own N --predict --json FILE     # then --own N --measure on an H200, --own N --table
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import torch
from timing_case import Call, Case, values
from timing_cases import backend, compress, fmha, index, v4

import dsv4


def draw(seed: int) -> list[Case]:
    out: dict[str, Case] = {}
    for name, (kind, many) in KINDS.items():
        made = kind(random.Random(f"{seed} {name}"))
        out |= {c.name: c for c in itertools.islice(made, many)}
    return list(out.values())


def dense(r: random.Random) -> Iterator[Case]:
    for d in r.sample((64, 128, 256, 512), 4) * 9:
        tokens = r.choice((700, 1500, 3000, 5000, 8192))
        heads, batch = r.choice((8, 12, 16, 32)), r.choice((1, 2, 4))
        yield fmha(batch, heads, heads // r.choice((1, 4)), tokens, tokens, d, r.random() < 0.5)


def decode(r: random.Random) -> Iterator[Case]:
    for d in r.sample((64, 128, 256, 512), 4) * 9:
        heads = r.choice((16, 32, 64))
        keys = 1 if d == 512 else heads // r.choice((4, 8))
        yield fmha(r.choice((1, 8, 24, 96)), heads, keys, 1, r.choice((3000, 8192, 20000)), d, same=d == 512)


def varlen(r: random.Random) -> Iterator[Case]:
    while True:
        batch, longest, heads = r.choice((6, 16, 40)), r.choice((1000, 3000)), r.choice((8, 16))
        yield _varlen([r.randint(50, longest) for _ in range(batch)], heads, r.choice((64, 128)), r.random() < 0.5)


def _varlen(lengths: list[int], heads: int, d: int, causal: bool) -> Case:
    def make(device: str) -> Call:
        q, k, v = (values(sum(lengths), heads, d, device=device) for _ in "qkv")
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        out, most = torch.empty_like(q), max(lengths)
        return lambda: dsv4.fmha_varlen(q, k, v, ends, ends, max_seqlen_q=most, max_seqlen_k=most, causal=causal,
                                        out=out, backend=backend(device))  # fmt: skip

    shape = f"{len(lengths)} x {heads} x up to {max(lengths)}"
    return Case(f"fmha varlen hd{d} {shape}{' causal' * causal}", "fmha varlen", make)


def gradients(r: random.Random) -> Iterator[Case]:
    for d in r.sample((64, 128, 256, 512), 4) * 9:
        batch, heads, tokens = r.choice((1, 2, 4)), r.choice((8, 16)), r.choice((1024, 2048, 4096))
        yield _gradients(batch, heads, tokens, d, r.random() < 0.5)


def _gradients(batch: int, heads: int, tokens: int, d: int, causal: bool) -> Case:
    """Forward and backward pass in one graph. Nothing is added to gradients of the call before."""

    def make(device: str) -> Call:
        given = [values(batch, tokens, heads, d, device=device).requires_grad_() for _ in "qkv"]
        dout = values(batch, tokens, heads, d, device=device)
        return lambda: torch.autograd.grad(dsv4.fmha(*given, causal=causal, backend=backend(device)), given, dout)

    shape = f"{batch} x {heads} x {tokens}{' causal' * causal}"
    return Case(f"fmha forward and backward hd{d} {shape}", "fmha backward", make)


def listed(r: random.Random) -> Iterator[Case]:
    while True:
        heads, compressed = r.choice((64, 128)), r.choice((384, 512, 1024))
        yield v4(r.choice((2, 24, 96, 300)), heads, 128, compressed, True)
        yield v4(r.choice((700, 2000, 4096)), heads, 128, compressed, r.random() < 0.5, r.choice((8192, 40000)))


def listed_gradients(r: random.Random) -> Iterator[Case]:
    while True:
        queries, heads, rows, pool = r.choice((1024, 3000)), r.choice((64, 128)), r.choice((384, 640)), 12000
        yield _listed_gradients(queries, heads, rows, pool)


def _listed_gradients(queries: int, heads: int, rows: int, pool: int) -> Case:
    def make(device: str) -> Call:
        q, kv = (values(*s, 512, device=device).requires_grad_() for s in ((queries, heads), (pool,)))
        sink, dout = values(heads, device=device, dtype=torch.float32), values(queries, heads, 512, device=device)
        picks = torch.randint(0, pool, (queries, rows), device=device, dtype=torch.int32)
        return lambda: torch.autograd.grad(
            dsv4.v4_attention(q, kv, picks, sink=sink, backend=backend(device)), (q, kv), dout
        )

    return Case(f"v4 forward and backward {queries} x {heads} x {rows} of {pool}", "v4 backward", make)


def indexing(r: random.Random) -> Iterator[Case]:
    while True:
        yield index(r.choice((4, 24, 64)), 1, r.choice((8192, 32768)))
        yield index(1, r.choice((256, 700)), r.choice((8192, 16384)))


def compressing(r: random.Random) -> Iterator[Case]:
    for kind in r.sample(("csa", "keys", "hca"), 3) * 9:
        yield compress(kind, r.choice((1024, 3072, 8192)))


KINDS: dict[str, tuple[Callable[[random.Random], Iterator[Case]], int]] = {
    "dense": (dense, 4),
    "decode": (decode, 3),
    "varlen": (varlen, 2),
    "listed": (listed, 3),
    "indexing": (indexing, 2),
    "compressing": (compressing, 2),
    "gradients": (gradients, 3),
    "listed gradients": (listed_gradients, 1),
}
