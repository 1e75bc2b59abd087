"""v4_attention on a CPU, for cpu.py: SDPA with a dense mask as its peer, and the memory that it needs."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import dsv4

WINDOW, TOPK, RATIO = 128, 512, 4
GIB = 1 << 30


def layer(kind: str, queries: int, heads: int, context: int, dtype: torch.dtype):
    """The last `queries` tokens of a context: arguments of v4_attention, and the same as a mask over all rows."""
    g = torch.Generator().manual_seed(0)
    compressed_rows = context // RATIO if kind == "csa" else 0
    q = torch.randn(queries, heads, 512, generator=g).to(dtype)
    pool = torch.randn(context + compressed_rows, 512, generator=g).to(dtype)
    positions = torch.arange(context - queries, context)
    window = (positions[:, None] - torch.arange(WINDOW - 1, -1, -1)).clamp_min(-1).int()
    args = [q, pool[:context], window]
    seen = torch.zeros(queries, len(pool), dtype=torch.bool)
    seen.scatter_(1, window.long(), True)
    if kind == "csa":
        score = torch.rand(queries, compressed_rows, generator=g)
        score.masked_fill_(torch.arange(compressed_rows) >= ((positions + 1) // RATIO)[:, None], -1)
        chosen = score.topk(TOPK).indices
        args += [pool[context:], chosen.int()]
        seen.scatter_(1, chosen + context, True)
    return args, pool, seen


def beside_dense_sdpa() -> Iterator[tuple[str, Callable, Callable]]:
    """(name, v4_attention, SDPA with a dense mask over the same rows), in fp32.

    Not in bf16: many CPUs have no bf16 instructions, and there SDPA takes minutes for what is half a second in fp32.
    """
    queries, heads, context = 64, 64, 8192
    for kind in ("swa", "csa"):
        args, pool, seen = layer(kind, queries, heads, context, torch.float32)
        q, kv = (args[0].transpose(0, 1)[None], pool.expand(1, heads, *pool.shape))  # [1, H, T, 512], [1, H, S, 512]
        yield (
            f"v4: {kind.upper()}, {queries} queries x {heads} heads, {context} tokens, float32",
            lambda a=args: dsv4.v4_attention(*a),
            lambda q=q, kv=kv, m=seen: scaled_dot_product_attention(q, kv, kv, attn_mask=m)[0].transpose(0, 1),
        )


def memory(queries: int = 4096, heads: int = 64, rows: int = WINDOW + TOPK) -> dict:
    """Peak memory of one call above what its arguments and result hold."""
    q = torch.randn(queries, heads, 512, dtype=torch.bfloat16)
    pool = torch.randn(8192, 512, dtype=torch.bfloat16)
    lists = torch.randint(0, len(pool), (queries, rows), dtype=torch.int32)
    args = [q, pool, lists[:, :WINDOW].contiguous(), pool, lists[:, WINDOW:].contiguous()]
    out = torch.zeros_like(q)
    dsv4.v4_attention(*[a[:8] if a is not pool else a for a in args])  # threads and libraries have their buffers now
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here (Linux)
    before = resident("VmRSS")
    begin = time.perf_counter()
    dsv4.v4_attention(*args, out=out)
    seconds = time.perf_counter() - begin
    extra = resident("VmHWM") - before
    return dict(
        name=f"{queries} queries x {heads} heads x {rows} rows",
        extra_gib=extra / GIB,
        seconds=seconds,
        gflops=4 * queries * heads * rows * 512 / seconds / 1e9,
    )


def resident(field: str) -> int:
    """Bytes, from /proc/self/status."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024
