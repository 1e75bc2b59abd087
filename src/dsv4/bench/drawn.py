"""Cases drawn at random, by a seed: `dsv4 bench --shapes random --seed N`.

A fixed list invites tuning to it. These are sizes that people have, at no round numbers: lengths and batches are
log-uniform, head counts and groups those of published models. A case fits into 24 GB, without the bf16 weights of
torch's experts, and takes an H200 at most about 50 ms. The same seed gives the same cases on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from dsv4.bench.backward import BackwardCase, V4BackwardCase
from dsv4.bench.dense import DenseCase
from dsv4.bench.index import PAGE, IndexCase
from dsv4.bench.index_fp4 import BLOCK, BLOCKS, Fp4Case
from dsv4.bench.moe import FLASH, PRO, V41, MoeCase
from dsv4.bench.v4 import V4Case
from dsv4.bench.v41 import V41Case
from dsv4.bench.varlen import VarlenCase

MOST_FLOPS = 2.5e13  # FLOPs of a forward pass, at most
MOST_BYTES = 8e9
MOST_KEYS = 4_000_000  # keys of all requests, in fp32 and both formats
HEAD_DIMS = (64, 128, 128, 256, 512)  # 128 is what most models have
GROUPS = (1, 1, 4, 5, 8)


def cases(suite: str, seed: int, count: int) -> list[Any]:
    """Return `count` cases of a suite."""
    draw = random.Random(f"{suite} {seed}")
    found: dict[str, Any] = {}
    while len(found) < count:
        case = DRAW[suite](draw)
        if case.flops <= MOST_FLOPS and case.bytes <= MOST_BYTES:
            found.setdefault(case.name, case)
    return list(found.values())


def between(draw: random.Random, low: int, high: int) -> int:
    """Draw a log-uniform number."""
    return round(low * (high / low) ** draw.random())


def dense(draw: random.Random) -> DenseCase:
    return decode(draw) if draw.random() < 0.25 else prefill(draw)


def prefill(draw: random.Random) -> DenseCase:
    d, group, causal = draw.choice(HEAD_DIMS), draw.choice(GROUPS), draw.random() < 0.6
    kv_heads, batch, tokens = between(draw, 1, 24), between(draw, 1, 24), between(draw, 200, 16000)
    name = f"prefill hd{d} ({batch}, {kv_heads * group}:{kv_heads}, {tokens}{', causal' if causal else ''})"
    return DenseCase(name, batch, kv_heads * group, kv_heads, tokens, tokens, d, causal)


def decode(draw: random.Random) -> DenseCase:
    d = draw.choice(HEAD_DIMS)
    latents = d == 512
    kv_heads, group = (1, draw.choice((16, 64, 128))) if latents else (between(draw, 1, 16), draw.choice(GROUPS))
    batch, keys = between(draw, 1, 200), between(draw, 500, 120_000)
    name = f"decode hd{d} ({batch}, {kv_heads * group}:{kv_heads}, {keys})"
    return DenseCase(name, batch, kv_heads * group, kv_heads, 1, keys, d, same_kv=latents)


def backward(draw: random.Random) -> BackwardCase | V4BackwardCase:
    if draw.random() < 0.2:
        return V4BackwardCase(between(draw, 500, 6000), draw.choice((64, 128)), 128, between(draw, 1, 32) * 32)
    case = prefill(draw)
    while 3 * case.flops > MOST_FLOPS:
        case = prefill(draw)
    return BackwardCase(DenseCase(case.name.replace("prefill", "backward"), *case.sizes))


def v4(draw: random.Random) -> V4Case | V41Case:
    if draw.random() < 0.3:
        return v41(draw)
    rows = between(draw, 2, 32) * 64
    if draw.random() < 0.35:
        heads = draw.choice((64, 128))
        return V4Case(between(draw, 600, 12_000), heads, 128, rows, False, between(draw, 8000, 200_000))
    return V4Case(between(draw, 1, 400), draw.choice((8, 16, 32, 64, 64, 128, 128)), 128, rows, True)


def v41(draw: random.Random) -> V41Case:
    rows, heads = between(draw, 2, 16) * 64, draw.choice((8, 16, 32, 64, 64))
    if draw.random() < 0.25:
        return V41Case(between(draw, 600, 6000), 64, 128, rows, between(draw, 8000, 200_000))
    return V41Case(between(draw, 1, 400), heads, 128, rows)


def index(draw: random.Random) -> IndexCase | Fp4Case:
    if draw.random() < 0.3:
        keys = between(draw, BLOCK * BLOCKS // PAGE, 1_000_000 // PAGE) * PAGE
        return Fp4Case(between(draw, 1, min(64, MOST_KEYS // keys)), keys, draw.random() < 0.5)
    each = draw.choice((1, 1, 2, 4))
    keys = between(draw, 2000 // PAGE, 200_000 // PAGE) * PAGE
    return IndexCase(between(draw, 1, 200), each, keys, draw.choice((512, 1024)), fp8=True)


def varlen(draw: random.Random) -> VarlenCase:
    d, group, causal = draw.choice((64, 128, 128, 256)), draw.choice(GROUPS), draw.random() < 0.7
    kv_heads, batch = between(draw, 1, 16), between(draw, 2, 300)
    shortest = between(draw, 10, 2000)
    longest = between(draw, shortest, 10 * shortest)
    return VarlenCase(batch, kv_heads * group, kv_heads, shortest, longest, d, causal, draw.random() < 0.3)


def moe(draw: random.Random) -> MoeCase:
    return MoeCase(draw.choice((FLASH, FLASH, V41, PRO)), between(draw, 1, 10_000), draw.random() < 0.4)


DRAW: dict[str, Callable[[random.Random], Any]] = {
    "dense": dense,
    "varlen": varlen,
    "v4": v4,
    "index": index,
    "moe": moe,
    "backward": backward,
}
