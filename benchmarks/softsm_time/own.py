"""Shapes of this library's kernels, drawn at random: predicted, committed, then measured.

python benchmarks/timing.py --own N --predict --json FILE     # then --own N --measure on an H200, --own N --table
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

from softsm_time import library
from softsm_time.case import Case
from softsm_time.library import backward, compress, fmha, index, v4, v4_backward


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
        yield library.varlen(
            [r.randint(50, longest) for _ in range(batch)], heads, r.choice((64, 128)), r.random() < 0.5
        )


def gradients(r: random.Random) -> Iterator[Case]:
    for d in r.sample((64, 128, 256, 512), 4) * 9:
        batch, heads, tokens = r.choice((1, 2, 4)), r.choice((8, 16)), r.choice((1024, 2048, 4096))
        yield backward(batch, heads, tokens, d, r.random() < 0.5)


def listed(r: random.Random) -> Iterator[Case]:
    while True:
        heads, compressed = r.choice((64, 128)), r.choice((384, 512, 1024))
        yield v4(r.choice((2, 24, 96, 300)), heads, 128, compressed, True)
        yield v4(r.choice((700, 2000, 4096)), heads, 128, compressed, r.random() < 0.5, r.choice((8192, 40000)))


def listed_gradients(r: random.Random) -> Iterator[Case]:
    while True:
        queries, heads, rows, pool = r.choice((1024, 3000)), r.choice((64, 128)), r.choice((384, 640)), 12000
        yield v4_backward(queries, heads, rows, pool)


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
