"""Which launches `dsv4 compile` compiles for DeepSeek-V4.1: its rows, its FP4 index keys with two levels, its ratios.

Nothing is computed: a problem's tensors are never read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from dsv4.caches.formats import NVFP4_288
from dsv4.caches.index_keys import IndexCache
from dsv4.caches.kv import Mxfp8Cache, Nvfp4Cache
from dsv4.caches.mxfp4_keys import INDEX_68
from dsv4.caches.pages import ROW_NUMBERS
from dsv4.compress import problem as compressor
from dsv4.index import problem as index_problem
from dsv4.index.problem import IndexProblem
from dsv4.runtime import dispatch
from dsv4.runtime.program import Launch

BLOCKS = 2048  # blocks that a source layer keeps
PAGES = (64, 32)  # rows: multiples of 64, and others
ROUNDED = ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))  # (weights, scores to bf16)


def index_problems(each: int, heads: int, topk: int, rows: int) -> Iterator[IndexProblem]:
    """Return problems with FP4 queries: a source that keeps blocks, a consumer of them, and neither; scores in fp32 and
    rounded to bf16."""
    counts_of_requests = sorted({max(n // each, 1) for n in (1, 4, 8, 16)} | {4 * dispatch.DEFAULT_NUM_SMS})
    kinds = ("", "source", "consumer")
    some = itertools.product(counts_of_requests, (True, False) if each == 1 else (True,), PAGES)
    for requests, starts, page in some:
        n, pages = requests * each, -(-rows // page)
        keys = IndexCache.empty(2, page, format=INDEX_68).page_view()
        more: dict[str, Any] = dict(
            block_table=torch.zeros(1, pages, dtype=torch.int32).expand(requests, pages),
            q_scales=torch.zeros(n, heads, dtype=torch.int32),
            lengths=torch.zeros(n, dtype=torch.int32),
        )
        if starts:
            more["request_starts"] = torch.zeros(requests + 1, dtype=torch.int32)
        q = torch.zeros(n, heads, INDEX_68.data_bytes, dtype=torch.uint8)
        numbers = torch.zeros(1, BLOCKS, dtype=torch.int32).expand(n, BLOCKS)
        for kind, (dtype, rounded), own_rows in itertools.product(kinds, ROUNDED, (False, True)):
            more |= dict(bf16_scores=rounded, request_rows=own_rows, topk_blocks=BLOCKS if kind == "source" else 0)
            more["blocks"] = numbers if kind == "consumer" else None
            p = index_problem.build(q, keys, torch.empty(n, heads, dtype=dtype), topk, **more)
            kept = torch.empty(n, BLOCKS, dtype=torch.int32) if kind == "source" else None
            yield replace(p, out=torch.empty(n, topk, dtype=torch.int32), blocks=kept)


def compress_launches(d: int, rope: int, arch: str) -> list[Launch]:
    """Return launches: two tokens to a row and one, to rows, to a pool and to FP4 pages; window rows, compressed
    rows and keys into pages; the output of attention for wo_a."""
    from dsv4.caches.kernels.mxfp8 import write_mxfp8
    from dsv4.caches.kernels.pack import write_rows
    from dsv4.caches.quantize import like

    kernels = dispatch.kernel_module("compress", dispatch.compile_target(arch).capability)
    found: list[Launch] = []
    types = (torch.bfloat16, torch.float32)
    for m, kv_type, weight, turned, numbers in itertools.product((2, 1), types, types, (False, True), ROW_NUMBERS):
        kv, cos_sin = torch.empty(1, m, d, dtype=kv_type), torch.empty(16, rope) if turned else None
        given = compressor.Parameters(None, torch.empty(d, dtype=weight), cos_sin, 1e-20, torch.bfloat16, m)
        pools: list[Any] = [None, torch.empty(2, 8, d, dtype=torch.bfloat16)]
        if d == NVFP4_288.values:
            pools.append(Nvfp4Cache.empty(1, 64))
        for pool in pools:
            slots = None if pool is None else torch.zeros(1, 1, dtype=numbers)
            kernels.run(compressor.problem_of(kv, None if m == 1 else kv, None, given, pool, slots), found.append)
    keys = IndexCache.empty(1, 64, format=INDEX_68)
    for cache, rows, numbers in itertools.product(
        (Mxfp8Cache.empty(1, 32), Nvfp4Cache.empty(1, 64), keys), types, ROW_NUMBERS
    ):
        slots = torch.zeros(1, dtype=numbers)
        write_rows(cache, slots, torch.empty(1, cache.format.values, dtype=rows), found.append)
    out = torch.empty(1, d, dtype=torch.bfloat16)
    write_mxfp8(out, *like(out), found.append)
    return found
