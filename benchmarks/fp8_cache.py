"""Decode with an FP8 cache beside a bf16 cache, in one process: ``python benchmarks/fp8_cache.py`` on a GPU.

Both calls take turns (dsv4.bench.timing). A rate counts the bytes of keys and values, each read once; the error is that
of the FP8 call against the same codes in a bf16 cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import dsv4
from dsv4.bench import timing


class Case(NamedTuple):
    batch: int
    q_heads: int
    kv_heads: int
    keys: int
    head_dim: int
    page: int = 64
    queries: int = 1


CASES = [
    Case(64, 64, 8, 8192, 128),
    Case(32, 64, 8, 8192, 256),
    Case(64, 64, 8, 8192, 64),
    Case(64, 8, 1, 8192, 128),
    Case(16, 32, 8, 4096, 128, 16),
    Case(8, 64, 8, 32768, 128),
    Case(4, 32, 8, 8192, 128, queries=512),
]


def measured(case: Case) -> str:
    pages = -(-case.keys // case.page)
    shape = (case.batch * pages, case.page, case.kv_heads, case.head_dim)
    q = torch.randn(case.batch, case.queries, case.q_heads, case.head_dim, device="cuda", dtype=torch.bfloat16)
    codes = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn) for _ in "kv"]
    plain = [x.to(torch.bfloat16) for x in codes]
    table = torch.randperm(case.batch * pages, device="cuda").view(case.batch, pages).int()
    lengths = torch.full((case.batch,), case.keys, device="cuda", dtype=torch.int32)
    one = torch.ones((), device="cuda")
    calls = {
        "bf16": lambda: dsv4.fmha_paged(q, *plain, table, lengths, causal=True),
        "e4m3": lambda: dsv4.fmha_paged(q, *codes, table, lengths, causal=True, k_scale=one, v_scale=one),
    }
    want, got = (call().float() for call in calls.values())
    samples, refused = timing.time_calls(calls, repeats=20)
    assert not refused, refused
    elements = 2 * case.batch * case.keys * case.kv_heads * case.head_dim
    times = [
        f"{name} {samples[name].microseconds:.1f} us, {size * elements / samples[name].microseconds / 1e6:.2f} TB/s"
        for name, size in (("bf16", 2), ("e4m3", 1))
    ]
    return f"{tuple(case)}: {'; '.join(times)}; error {float((got - want).norm() / want.norm()):.1e}"


if __name__ == "__main__":
    for case in CASES:
        print(measured(case), flush=True)
