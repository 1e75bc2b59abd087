"""Lists the launches that `dsv4 compile` compiles, from problems that together need every variant, kind by kind.

Nothing is computed: the tensors of a problem are never read, and kernels that are launched alone add their launches to
a list. A variant depends on types and on compile-time constants, not on the number of tokens. Only `index_topk` has
variants by the capacity of a request's block table, too.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.caches.index_keys import IndexCache
from dsv4.caches.kv import Fp8Cache, Mxfp8Cache, Nvfp4Cache
from dsv4.caches.pages import ROW_NUMBERS
from dsv4.compress import problem as compressor
from dsv4.fmha import problem
from dsv4.fmha.problem import FmhaProblem
from dsv4.index import problem as index_problem
from dsv4.index.problem import IndexProblem
from dsv4.runtime import aot, calls, dispatch
from dsv4.runtime.program import Launch
from dsv4.v4 import problem as v4_problem
from dsv4.v4.problem import V4Problem

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OF_V4 = ("v4", "index", "compress", "model")  # everything that a layer of DeepSeek-V4 launches, in bf16; v4 in fp16 too
ONLY_V4 = (*OF_V4, "v4-backward", "v4.1", "moe")
OF_FMHA = ("dense", "varlen", "paged")
OPTIONS = {"softcap": 50.0}  # options of fmha that need other variants, whatever their value
KINDS = (*OF_FMHA, *OF_V4, "fmha-backward", "v4-backward", "v4.1", *OPTIONS, "e4m3", "moe")
ROWS = ("bf16", "fp8", "mixed")  # rows of V4 attention; mixed: FP8 in the window, plain in the compressed pool
# Formats of window and compressed rows; None is a tensor.
POOLS = {"fp8": (Fp8Cache, Fp8Cache), "mixed": (Fp8Cache, None), "v4.1": (Mxfp8Cache, Nvfp4Cache)}
NAMED = ("window only", "list", "table")  # how a call selects compressed rows
# Phases: many rows; one tile and two, which differ for e4m3; enough rows that CTAs loop; one row per head; split keys
PHASES = ("prefill", "tile", "tiles", "large", "decode", "split")
ROWS_OF = {"prefill": 768, "tile": 64, "tiles": 128, "large": 69632}


class Sizes(NamedTuple):
    """The sizes of a DeepSeek-V4 model; the defaults are V4-Flash's."""

    hidden: int = 4096
    q_lora: int = 1024
    streams: int = 4
    heads: int = 64
    head_dim: int = 512
    rope: int = 64
    index_heads: int = 64
    fp4_index_heads: int = 32  # DeepSeek-V4.1's
    index_dims: int = 128
    topk: int = 512
    ratios: tuple[int, int] = (4, 128)  # CSA, HCA
    page_size: int = 64
    index_rows: int = 65536  # capacity of the block table of a request
    experts: int = 256
    experts_of_token: int = 6

    @classmethod
    def read(cls, path: Path) -> Sizes:
        """Read the sizes from the config.json of a checkpoint."""
        names = dict(hidden="hidden_size", q_lora="q_lora_rank", streams="hc_mult", heads="num_attention_heads",
                     head_dim="head_dim", rope="qk_rope_head_dim", index_heads="index_n_heads",
                     index_dims="index_head_dim", topk="index_topk", experts="n_routed_experts",
                     experts_of_token="num_experts_per_tok")  # fmt: skip
        try:
            config = json.loads(path.read_text())
        except ValueError:
            config = None
        if not isinstance(config, dict):
            raise ValueError(f"{path}: got no JSON object; accepted: the config.json of a DeepSeek-V4")
        config = config.get("text_config", config)  # in V4.1 the text model is nested
        missing = [name for name in names.values() if not isinstance(config.get(name), int)]
        if missing:
            raise ValueError(f"{path}: got no {', '.join(missing)}; accepted: the config.json of a DeepSeek-V4")
        return cls(fp4_index_heads=config["index_n_heads"], **{mine: config[name] for mine, name in names.items()})


# Check everything, also pages that no TMA box fits, and many rows
EVERYTHING = ((KINDS, Sizes()), (("paged", "index"), Sizes(page_size=1, index_rows=2**20)))


def wanted(kinds: Iterable[str], dims: Iterable[int], dtypes: Iterable[str]) -> list[tuple]:
    """Return the parts of the work, each for one process, as (kind, which part)."""
    kinds, dims, dtypes = list(kinds), list(dims), list(dtypes)
    parts = of_fmha(kinds, dims, dtypes)
    if "e4m3" in kinds:
        parts += [("e4m3", *part) for part in of_fmha(OF_FMHA, dims, dtypes)]
    for option in filter(kinds.__contains__, OPTIONS):
        parts += [(option, *part) for part in of_fmha((*OF_FMHA, "fmha-backward"), dims, dtypes)]
    if 512 in dims:
        rows = [x for x in (*ROWS, "fp16") if ("fp16" if x == "fp16" else "bf16") in dtypes]
        if "v4" in kinds:
            parts += [("v4", *x) for x in itertools.product(rows, NAMED) if x != ("mixed", "window only")]
        if "v4-backward" in kinds:
            parts += [("v4-backward", dtype) for dtype in dtypes]
    if 512 in dims and "bf16" in dtypes:
        if "index" in kinds:
            parts += [("index", *x) for x in itertools.product((False, True), (1, 2, 4, 16))]
        parts += [(kind,) for kind in ("compress", "model") if kind in kinds]
        if "v4.1" in kinds:
            what = [*(("attention", x) for x in NAMED), *(("index", x) for x in (1, 2, 4)), ("compress",)]
            parts += [("v4.1", *x) for x in what]
        if "moe" in kinds:
            parts += [("moe", *x) for x in itertools.product(("route", "mxfp4", "nvfp4"), (False, True))]
    return parts


def of_fmha(kinds: Iterable[str], dims: list[int], dtypes: list[str]) -> list[tuple]:
    plain = [kind for kind in kinds if kind in OF_FMHA]
    parts: list[tuple] = [
        (kind, d, dtype, phase) for d, dtype, kind, phase in itertools.product(dims, dtypes, plain, PHASES)
    ]
    if "fmha-backward" in kinds:
        parts += [("fmha-backward", *x) for x in itertools.product(dims, dtypes)]
    return parts


def launches(part: tuple, sizes: Sizes, arch: str) -> list[Launch]:
    """Return the launches of one part of `wanted`."""
    from . import gradient_variants, moe_variants, v41_variants  # import Triton, which the command line must not

    kind, *rest = part
    codes, option = kind == "e4m3", {kind: OPTIONS[kind]} if kind in OPTIONS else {}
    if codes or option:
        kind, *rest = rest
    target = dispatch.compile_target(arch)
    if kind == "compress":
        return compress_launches(sizes, arch)
    if kind == "model":
        return model_launches(sizes)
    if kind == "fmha-backward":
        return gradient_variants.fmha_launches(rest[0], DTYPES[rest[1]], arch, **option)
    if kind == "v4-backward":
        return gradient_variants.v4_launches(sizes.heads, sizes.rope, DTYPES[rest[0]], arch)
    if kind == "v4.1" and rest[0] == "compress":
        return v41_variants.compress_launches(sizes.head_dim, sizes.rope, arch)
    if kind == "v4":
        found: Iterable[Any] = v4_problems(*rest)
    elif kind == "v4.1" and rest[0] == "attention":
        found = v4_problems("v4.1", rest[1])
    elif kind == "v4.1":
        found = v41_variants.index_problems(rest[1], sizes.fp4_index_heads, sizes.topk, sizes.index_rows)
    elif kind == "index":
        found = index_problems(rest[0], rest[1], sizes)
    elif kind == "moe":
        found = moe_variants.problems(rest[0], rest[1], sizes.hidden, sizes.experts, sizes.experts_of_token, arch)
    else:
        found = problems(rest[0], rest[1], kind, rest[2], sizes.page_size)
    if option:
        found = (replace(p, options=p.options._replace(**option)) for p in found)
    if codes:
        found = map(in_e4m3, found)
    made = []
    for p in found:
        made += calls.launches_of(p, target)
    return made


def in_e4m3(p: Any) -> Any:
    """Return the problem with an FP8 cache and scales."""
    k = torch.empty(p.k.shape, dtype=torch.float8_e4m3fn, device=p.k.device)
    scales = [torch.empty(1, device=p.k.device) for _ in "kv"]
    return replace(p, k=k, v=k.view_as(k) if p.same_kv else torch.empty_like(k), k_scale=scales[0], v_scale=scales[1])


def v4_problems(rows: str, named: str) -> Iterator[V4Problem]:
    """Yield problems of V4 attention (with unset tensors) that need the variants of this description."""
    for wide in (False, True):
        for splits in (1, 4, 8, 16, 128):  # a different variant merges each
            yield v4_small(rows, named, splits, wide=wide)
        for splits, queries in ((1, 1), (2, 5), (1, 64)):  # 128 heads: a pair of CTAs on Blackwell, V4.1 rows unpacked
            yield v4_small(rows, named, splits, heads=128, wide=wide, queries=queries)
        for splits in (1, 2):  # Hopper: FP8 rows unpacked first, plain ones in L2
            yield v4_small(rows, named, splits, wide=wide, queries=64)
        yield v4_small(rows, named, wide=wide, queries=528, width=32)  # Hopper: several tiles of plain rows per CTA
        if rows in ("fp8", "v4.1"):
            yield v4_small(rows, named, wide=wide, queries=1300, width=768, room=600)  # unpacked first, not in L2
        if rows in ("fp8", "mixed", "v4.1", "bf16", "odd pages"):
            # Hopper: whole tiles first, few heads and tables in two launches.
            for queries, width, heads in ((136, 512, 64), (160, 2000, 64), (136, 512, 16), (136, 512, 32)):
                for room in (600,) if rows in POOLS else (64, 600):
                    yield v4_small(rows, named, 0, heads, wide, queries, width, room)
        if rows in ("fp8", "v4.1", "bf16", "odd pages"):
            yield from v4_decode_problems(rows, named, wide)


def v4_decode_problems(rows: str, named: str, wide: bool) -> Iterator[V4Problem]:
    """Yield the cases that differ on Hopper: few work tiles of 16 heads, whole, and split so that each variant of the
    combine kernel merges them; tiles of 32 heads with blocks of 64 and 128 rows; few heads of many queries; many tiles.
    Each is (queries, heads, splits, blocks of 64 rows)."""
    of_16 = ((1, 64, 1, 1), (1, 64, 1, 2), (1, 64, 4, 4), (1, 64, 8, 8), (1, 64, 16, 16), (1, 16, 64, 64))
    of_32 = ((40, 64, 1, 1), (40, 64, 1, 2), (5, 64, 9, 9), (8, 64, 6, 11))
    # Many partial results are stored in fp16, few in fp32.
    not_few = tuple((132, 64, splits, 2) for splits in (1, 2, 8, 16, 32, 64, 128, 256))
    in_fp32 = ((40, 64, 2, 12), (10, 64, 8, 40), (5, 64, 16, 80), (1, 64, 64, 600))
    few_heads = ((128, 16, 1, 10), (32, 16, 4, 10), (64, 16, 2, 34), (40, 64, 1, 3), (32, 32, 4, 10))
    for queries, heads, splits, blocks in (*of_16, *of_32, *few_heads, *not_few, *in_fp32):
        width = 64 * (blocks if named == "window only" else blocks - 1)
        if width > 0:
            yield v4_small(rows, named, splits, heads, wide, queries, width)


@cache
def unset_pages(count: int, cls: type) -> torch.Tensor:
    """Allocate pages of 64 packed rows; each problem gets its own view of them."""
    return torch.empty(count * cls.stride_for(64), dtype=torch.uint8)  # type: ignore[attr-defined]


def v4_small(
    rows: str,
    named: str,
    splits: int = 1,
    heads: int = 64,
    wide: bool = False,
    queries: int = 1,
    width: int = 0,
    room: int = 64,
) -> V4Problem:
    """Return a small problem. rows: one of ROWS, `v4.1`, `fp16` (for q too), or `odd pages`, plain rows at uneven
    distances. wide: positions have 64 bits. width: of the window's list; with it there are at most 64 compressed rows.
    room: pages of the pools with it; 64 are too many to unpack first for few queries,
    600 for plain rows to stay in L2."""
    dtype = torch.float16 if rows == "fp16" else torch.bfloat16
    q = torch.empty(queries, heads, 512, dtype=dtype)

    def pool(cls: type | None) -> Any:
        if cls is not None:
            return cls(unset_pages(room if width else 2, cls).view(-1), 64)
        count = 4 if queries == 64 else 8 * room  # with 4 rows, every row is listed often
        pages = torch.empty(count, 8 * 512 + (64 if rows == "odd pages" else 0), dtype=dtype)
        return pages[:, : 8 * 512].view(count, 8, 512)

    window, compressed = POOLS.get(rows, (None, None))
    numbers = torch.zeros(queries, width or 128, dtype=torch.int32)
    more: dict[str, Any] = {}
    further = numbers if width == 0 else numbers[:, : 1 if named == "table" else 64].contiguous()
    if named != "window only":
        more["compressed"] = pool(compressed)
        more["compressed_lengths"] = torch.zeros(queries, dtype=torch.int32)
        more["compressed_block_table" if named == "table" else "compressed_indices"] = further
    if wide:
        more["inverse_rope"] = (torch.empty(16, 64), torch.zeros(queries, dtype=torch.int64))
    p = v4_problem.build(q, pool(window), numbers, **more)
    return replace(p, out=torch.empty_like(q), lse=torch.empty(p.lse_shape), num_splits=splits)


def problems(head_dim: int, dtype: str, kind: str, phase: str, page_size: int = 64) -> Iterator[FmhaProblem]:
    """Yield problems (with unset tensors) that need the variants of this description."""
    options: dict[str, Any] = dict(dtype=DTYPES[dtype])
    if phase == "large" and (kind == "paged" or head_dim == 512):
        return  # no separate kernel
    queries = ROWS_OF.get(phase, 1)
    several: tuple[int, ...] = (1,) if phase in ROWS_OF else (8,)
    if head_dim == 64 and kind == "dense" and phase == "large":
        several = (1, 5)  # a diagonal of packed rows that does not meet the corners of tiles
    # CTAs that loop have variants by which tiles of keys need a mask: with as many keys as queries, the diagonal meets
    # the corners of the tiles, with one key more it does not.
    masks = [((-1, -1), 4096)] + [((-1, 0), queries), ((-1, 0), queries + 1), ((5, -1), 4096)] * (phase == "large")
    masks += [((-1, 0), queries)] * (phase == "prefill")  # a short prompt
    masks += [((-1, -1), 64)] * (head_dim == 64 and phase in ("prefill", "decode"))  # few keys
    # Different variants merge up to 4, 8, 16 and more splits; at head dim 512, many rows have a variant for each power
    # of two.
    split: dict[int, tuple[int, ...]] = {1: (4, 8, 16, 128)}
    if head_dim == 512:
        split |= {200: (4, 8), 64: (16, 32, 64, 128, 256)}
    same = (False, True) if head_dim == 512 else (False,)
    starts = (False, True) if kind == "varlen" and phase == "large" else (False,)  # queries and keys share it
    batches = split if phase == "split" else (1,)
    for batch, same_kv, (window, keys), heads in itertools.product(batches, same, masks, several):
        if kind == "varlen":
            q = torch.empty(batch * queries, heads, head_dim, **options)
            k = torch.empty(keys, 1, head_dim, **options)
            v = k if same_kv else torch.empty_like(k)
            cu = torch.zeros(batch + 1, dtype=torch.int32)
            p = problem.varlen(q, k, v, cu, cu.clone(), max_seqlen_q=queries, window=window)
        elif kind == "paged":
            q = torch.empty(batch, queries, heads, head_dim, **options)
            k = torch.empty(2, page_size, 1, head_dim, **options)
            v = k if same_kv else torch.empty_like(k)
            table = torch.zeros(batch, keys // page_size, dtype=torch.int32)
            p = problem.paged(q, k, v, table, torch.zeros(batch, dtype=torch.int32))
        else:
            q = torch.empty(batch, queries, heads, head_dim, **options)
            k = torch.empty(batch, keys, 1, head_dim, **options)
            p = problem.dense(q, k, k if same_kv else torch.empty_like(k), window=window)
        p = replace(p, same_kv=same_kv)
        out, lse = torch.empty_like(p.q), torch.empty(p.lse_shape)
        if phase in ("prefill", "tile", "tiles"):  # few heads: keys are split, at head dim 512 also into fp16
            split[1] = (1, 4, 32) if head_dim == 512 else (1, 4)
        for splits in (1,) if phase in ("large", "decode") else split[batch]:
            for same_sequences in starts:
                yield replace(p, out=out, lse=lse, num_splits=splits, same_sequences=same_sequences)


def index_problems(fp8: bool, each: int, sizes: Sizes) -> Iterator[IndexProblem]:
    """Yield problems with `each` queries per request and keys in pages."""
    pages = -(-sizes.index_rows // sizes.page_size)
    # Numbers of queries for which several CTAs, ever fewer, choose the rows of one (index_shares); one CTA each; many.
    counts_of_requests = sorted({max(n // each, 1) for n in (1, 4, 8, 16)} | {4 * dispatch.DEFAULT_NUM_SMS})
    heads, dims = sizes.index_heads, sizes.index_dims
    for requests, starts in itertools.product(counts_of_requests, (True, False) if each == 1 else (True,)):
        n = requests * each
        q, weights = torch.empty(n, heads, dims, dtype=torch.bfloat16), torch.empty(n, heads, dtype=torch.bfloat16)
        k = torch.empty(2, sizes.page_size, dims, dtype=torch.bfloat16)
        if fp8:
            if dims != 128:
                return  # IndexCache has keys of 128 values
            q, weights = q.to(torch.float8_e4m3fn), weights.float()
            k = IndexCache.empty(2, sizes.page_size).page_view()
        more: dict[str, Any] = dict(block_table=torch.zeros(1, pages, dtype=torch.int32).expand(requests, pages))
        if starts:
            more["request_starts"] = torch.zeros(requests + 1, dtype=torch.int32)
        for dtype, own_rows in itertools.product((torch.int32, torch.int64), (False, True)):
            counts = {"lengths" if own_rows else "positions": torch.zeros(n, dtype=dtype)}
            p = index_problem.build(q, k, weights, sizes.topk, **more, **counts, request_rows=own_rows)
            yield replace(p, out=torch.empty(n, sizes.topk, dtype=torch.int32))


def compress_launches(sizes: Sizes, arch: str) -> list[Launch]:
    """Return the launches of dsv4.compress into rows, a pool and FP8 pages, also from an engine's states, and those
    that write rows and index keys into FP8 pages."""
    from dsv4.caches.kernels.pack import write_rows
    from dsv4.compress.kernels import pages

    (csa, hca), main, keys = sizes.ratios, sizes.head_dim, sizes.index_dims
    kernels = dispatch.kernel_module("compress", dispatch.compile_target(arch).capability)
    parts = ((csa, main, True), (hca, main, False), (csa, keys, True))
    found: list[Launch] = []
    for part, parameters, numbers in itertools.product(parts, (torch.bfloat16, torch.float32), ROW_NUMBERS):
        for pool in (None, torch.empty(2, 8, part[1], dtype=torch.bfloat16), _packed(part[1])):
            kernels.run(_compress_problem(*part, sizes.rope, parameters, pool, numbers), found.append)
        kernels.run(_compress_problem(*part, 0, parameters, None, numbers), found.append)
    one, table = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32)
    cos_sin = torch.empty(16, sizes.rope)
    for (m, d, overlap), parameters in itertools.product(parts, (torch.bfloat16, torch.float32)):
        if (made := _packed(d)) is not None:
            states, weight = torch.empty(1, 4, 2 * d * (1 + overlap)), torch.empty(d, dtype=parameters)
            pages.run(states, one, one.int(), one, table, one, weight, cos_sin, made, m, 1e-6, found.append)
    for rows, numbers in itertools.product((torch.bfloat16, torch.float32), ROW_NUMBERS):
        slots = torch.zeros(1, dtype=numbers)
        write_rows(Fp8Cache.empty(1, 64), slots, torch.empty(1, 512, dtype=rows), found.append)
        write_rows(IndexCache.empty(1, 64), slots, torch.empty(1, 128, dtype=rows), found.append)
    return found


def _packed(d: int) -> Fp8Cache | IndexCache | None:
    """Return FP8 pages for rows of d values, or None."""
    return Fp8Cache.empty(1, 64) if d == 512 else IndexCache.empty(1, 64) if d == 128 else None


def _compress_problem(
    m: int, d: int, overlap: bool, rope: int, parameters: torch.dtype, pool: Any, numbers: torch.dtype
) -> compressor.CompressProblem:
    """Return a problem of one window. parameters: of bias and norm weight. rope 0: the caller rotates rows."""
    width = d * (1 + overlap)
    kv = torch.empty(1, m, width, dtype=torch.bfloat16)
    bias, weight = torch.empty(m, width, dtype=parameters), torch.empty(d, dtype=parameters)
    slots = None if pool is None else torch.zeros(1, 1, dtype=numbers)
    given = compressor.Parameters(bias, weight, torch.empty(16, rope) if rope else None, 1e-6, kv.dtype, m)
    return compressor.problem_of(kv, kv, None, given, pool, slots)


def model_launches(sizes: Sizes) -> list[Launch]:
    """Return the launches between the products of a layer (elementwise.py): norms, RoPE, rows into pages, streams."""
    from dsv4.caches.kernels.normed_rows import normed
    from dsv4.compress.kernels.rings import compress_rings
    from dsv4.kernels.hyper_connections import collapse, spread

    def bf16(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)

    one = torch.zeros(1, dtype=torch.int64)
    cos_sin, main, keys, h = torch.empty(16, sizes.rope), sizes.head_dim, sizes.index_dims, sizes.streams
    pools: list[Any] = [bf16(2, 8, main), Fp8Cache.empty(1, 64)]
    found: list[Launch] = []
    note: dict[str, Any] = dict(launch=found.append)
    for d in (sizes.hidden, sizes.q_lora):
        normed(bf16(1, d), eps=1e-6, weight=bf16(d), **note)
    normed(bf16(1, sizes.heads, main), eps=1e-6, rope=(cos_sin, one), **note)
    normed(bf16(1, sizes.index_heads, keys), rope=(cos_sin, one), **note)
    for pool in pools:
        normed(bf16(1, main), eps=1e-6, weight=bf16(main), rope=(cos_sin, one), to=pool, slots=one, **note)
    for m, d, overlap, made in (
        *((sizes.ratios[0], main, True, pool) for pool in pools),
        *((sizes.ratios[1], main, False, pool) for pool in pools),
        (sizes.ratios[0], keys, True, bf16(2, 8, keys)),
    ):
        width = d * (1 + overlap)
        states = torch.empty(2 * m, width), torch.empty(2 * m, width)
        compress_rings(
            bf16(1, width),
            bf16(1, width),
            bf16(m, width),
            bf16(d),
            1e-6,
            cos_sin,
            states,
            (one, one, one, one, one),
            made,
            one,
            one,
            **note,
        )
    for n in (1, 128, 512):  # the forms of project_streams
        streams, weight = bf16(n, h, sizes.hidden), bf16(sizes.hidden)
        for parameters in (torch.bfloat16, torch.float32):
            outputs = (2 + h) * h
            fn, base, scale = (
                torch.empty(*s, dtype=parameters) for s in ((outputs, h * sizes.hidden), (outputs,), (3,))
            )
            collapse(streams, fn, base, scale, 2, 1e-6, 1e-6, weight, 1e-6, **note)
    streams = streams[:1]
    spread(streams, bf16(1, sizes.hidden), torch.empty(1, h), torch.empty(1, h, h), **note)
    return found


# ---------------------------------------------------------------------------------------------------- a few of them


def representative(launches: Iterable[Launch], most: int | None = None, every_size: bool = False) -> list[Launch]:
    """Return a few launches that together have every value of every compile-time constant and every type of every
    argument, not every combination. Launches that add most come first, at most `most` per kernel. Of sizes (head dims,
    keys of a tile) only the smallest and the largest count, unless every_size."""
    by_choices = {_choices(x): x for x in launches}
    missing: set[tuple] = set().union(*by_choices)
    few: dict[str, list[Launch]] = defaultdict(list)
    if not every_size:
        missing -= _sizes_between(missing)
    while missing:
        best = max(by_choices, key=lambda x: len(x & missing))
        missing -= best
        few[by_choices[best].kernel.__name__].append(by_choices[best])
    return [x for of_kernel in few.values() for x in of_kernel[:most]]


def _choices(launch: Launch) -> frozenset[tuple]:
    """Return what a launch fixes at compile time, except the numbers of registers and warps, which no line of a kernel
    reads, and descriptors, which follow from pointers and sizes."""
    types = [(i, t) for i, t in enumerate(aot.argument_types(launch.arguments)) if not t.startswith("tensordesc")]
    constants = [x for x in launch.constants.items() if not x[0].endswith(("REGS", "reg", "warps"))]
    return frozenset((launch.kernel.__name__, *x) for x in (*types, *constants))


def _sizes_between(choices: set[tuple]) -> set[tuple]:
    """Return the sizes between the smallest and the largest of a constant. A value of at most 8 is not a size."""
    sizes: dict[tuple, list[int]] = defaultdict(list)
    for kernel, name, value in choices:
        if isinstance(name, str) and type(value) is int and value > 8:
            sizes[kernel, name].append(value)
    return {(*key, x) for key, values in sizes.items() for x in values if min(values) < x < max(values)}
