"""Split-KV plans: how many ways the keys of a problem are split, and the buffers for it, sized once by capacity.

A plan depends on capacities only, never on tensor values, so a CUDA graph captured with it stays right while lengths
change. One plan serves any problem within its capacities, one call at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.caches import HEAD_DIM, Fp8Cache
from dsv4.runtime import checks

OPERATIONS = ("fmha", "fmha_varlen", "fmha_paged", "v4_attention", "index_topk")
ROWS_PER_TILE = 64  # query rows (tokens x grouped heads) that one thread block takes
STEP = 128  # keys that a kernel takes at a time; a split is one or more of them
MAX_SPLITS = 256
# deterministic=True: keys per split and ROWS_PER_TILE rows; the most splits; rows per KV head that are not split
DETERMINISTIC_KEYS = 2048
DETERMINISTIC_SPLITS = 32
DETERMINISTIC_ROWS = 1024
# index_topk: scores that one thread block chooses from; the widest lists, at most half of that, so that a round leaves
# less than it was given; bytes of the scores held at once
INDEX_PIECE = 16384
MAX_TOPK = 4096
INDEX_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class Plan:
    operation: str
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_seqlen_q: int
    max_seqlen_k: int
    num_splits: int
    scratch: Tensor  # fp32, flat: num_splits * rows * (head_dim + 1), or what deterministic calls need if that is more

    @property
    def rows(self) -> int:
        """Query rows: one per token and query head."""
        return self.batch * self.max_seqlen_q * self.q_heads

    def check(self, operation: str, problem: Any) -> None:
        """ValueError unless this plan was made for such a problem. Reads shapes only."""
        if operation != self.operation:
            checks.fail("plan", f"a plan for {self.operation}", f"a plan for {operation}")
        if problem.q.device != self.scratch.device:
            checks.fail(
                "plan", f"a plan on {self.scratch.device}", f"a plan on {problem.q.device}, the device of q"
            )
        for name in ("q_heads", "kv_heads", "head_dim"):
            if getattr(problem, name) != getattr(self, name):
                checks.fail(
                    "plan",
                    f"{name}={getattr(self, name)}",
                    f"{name}={getattr(problem, name)}, as the tensors",
                )
        # A varlen problem's bounds may be loose (all rows in one sequence), so its rows are what counts.
        if operation == "fmha_varlen":
            sizes = {"batch": problem.batch, "rows": problem.q.shape[0] * problem.q_heads}
        else:
            sizes = {name: getattr(problem, name) for name in ("batch", "max_seqlen_q", "max_seqlen_k")}
        for name, size in sizes.items():
            if size > getattr(self, name):
                checks.fail(
                    "plan", f"capacity {name}={getattr(self, name)}", f"at least {size}, as the tensors"
                )


def plan(
    operation: Callable,
    *,
    batch: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    max_seqlen_k: int,
    max_seqlen_q: int = 1,
    device: torch.device | str | None = None,
    deterministic: bool = True,
) -> Plan:
    """Size a plan for ``operation`` (dsv4.fmha, fmha_varlen, fmha_paged, v4_attention, index_topk) by its capacities.

    batch sequences of at most max_seqlen_q queries and max_seqlen_k keys each. For paged attention max_seqlen_k is
    the width of the block table times the page size. For v4_attention batch is the number of queries, kv_heads is 1
    and max_seqlen_k is the width of both lists together (or of the block table times the page size). For index_topk
    batch is the number of queries, kv_heads is 1, max_seqlen_k the rows of a sequence (or of the block table).
    device defaults to "cuda" where there is one, else "cpu"; on a CPU one split is used and no buffer.
    deterministic: leave room for calls with deterministic=True too: up to about 1/16 of the bytes of batch *
    max_seqlen_k keys, where k is v. With False a GPU refuses such calls if the room is missing.
    """
    name = getattr(operation, "__name__", None)
    if name not in OPERATIONS:
        checks.fail("operation", checks.describe(operation), ", ".join(f"dsv4.{o}" for o in OPERATIONS))
    sizes = dict(
        batch=batch, q_heads=q_heads, kv_heads=kv_heads, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k
    )
    sizes = {key: checks.at_least(1, key, size) for key, size in sizes.items()}
    checks.head_dim("head_dim", head_dim)
    checks.head_ratio(q_heads, kv_heads, "q_heads")
    checks.flag("deterministic", deterministic)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    where = checks.device("device", default if device is None else device)
    if name == "index_topk":
        words = index_block(batch, max_seqlen_k) * index_words(max_seqlen_k)
        words = words if where.type == "cuda" else 0
        return Plan(name, head_dim=head_dim, num_splits=1, scratch=torch.empty(words, device=where), **sizes)
    splits = 1 if where.type != "cuda" else _splits(_multiprocessors(where), **sizes)
    partials = 0 if splits == 1 else splits * batch * max_seqlen_q * q_heads
    if deterministic and where.type == "cuda" and name == "v4_attention":
        partials = max(partials, max(deterministic_cut(q_heads, max_seqlen_k)[0], 1) * batch * q_heads)
    if deterministic and where.type == "cuda" and name in ("fmha", "fmha_paged"):
        group = q_heads // kv_heads
        for t in range(1, max_seqlen_q + 1):
            n, _ = deterministic_cut(t * group, max_seqlen_k)
            if n == 0:
                break
            partials = max(partials, n * batch * t * q_heads)
    scratch = torch.empty(partials * (head_dim + 1), dtype=torch.float32, device=where)
    return Plan(name, head_dim=head_dim, num_splits=splits, scratch=scratch, **sizes)


def warmup(
    operation: Callable,
    *,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    page_size: int = 64,
    same_kv: bool | None = None,
    fp8: bool | None = None,
    **capacities,
) -> Plan:
    """Make the plan for these capacities and run the operation with it: what calls of that size need gets compiled.

    The arguments of :func:`plan`, and dtype and backend of the calls to come. Calls differ in the kernel they take by
    whether a causal mask is given, deterministic is set (if the plan has room for that), k is v, and, for
    v4_attention, whether rows are FP8 and how compressed rows are named: every kind is run once. same_kv and fp8 say
    that only those, or none, will come. page_size: rows of a page (fmha_paged, index_topk, and Fp8Cache). index_topk is
    run with pages, for lists of 512 and 1024. Returns the plan.
    """
    made = plan(operation, **capacities)
    checks.backend(backend)
    checks.dtype("dtype", dtype, checks.FLOATS)
    page = min(checks.at_least(1, "page_size", page_size), made.max_seqlen_k)
    packed, same = _kinds("fp8", fp8), _kinds("same_kv", same_kv)
    q = torch.zeros(
        made.batch, made.max_seqlen_q, made.q_heads, made.head_dim, dtype=dtype, device=made.scratch.device
    )
    if made.operation == "index_topk":
        for tensors, options in _index_calls(made, q[:, 0], page):
            operation(*tensors, **options, plan=made, backend=backend)
        return made
    masks: list[dict[str, bool]]
    if made.operation == "v4_attention":
        calls, masks = _v4_calls(made, q[:, 0], page, packed), [{}]
    else:
        calls, masks = _fmha_calls(made, q, page, same), [dict(causal=False), dict(causal=True)]
    orders = (False, True) if capacities.get("deterministic", True) else (False,)
    for tensors, options in calls:
        for mask in masks:
            for deterministic in orders:
                operation(*tensors, **options, **mask, deterministic=deterministic, plan=made, backend=backend)
    return made


def _kinds(name: str, only: bool | None) -> tuple[bool, ...]:
    return (False, True) if only is None else (checks.flag(name, only),)


def _fmha_calls(made: Plan, q: Tensor, page_size: int, same_kv: tuple[bool, ...]) -> Iterator[tuple[tuple, dict]]:
    """(tensors, options) of a call with one key per sequence, for each kind."""
    starts = torch.arange(made.batch + 1, dtype=torch.int32, device=q.device)
    for same in same_kv:
        if made.operation == "fmha_paged":
            k = q.new_zeros(1, page_size, made.kv_heads, made.head_dim)
            table = torch.zeros(made.batch, 1, dtype=torch.int32, device=q.device)
            yield (q, k, k if same else k.clone(), table, torch.ones_like(table[:, 0])), {}
            continue
        k = q.new_zeros(made.batch, 1, made.kv_heads, made.head_dim)
        v = k if same else k.clone()
        if made.operation == "fmha_varlen":
            yield (q.flatten(0, 1), k[:, 0], v[:, 0], starts * made.max_seqlen_q, starts), {}
        else:
            yield (q, k, v), {}


def _v4_calls(made: Plan, q: Tensor, page_size: int, fp8: tuple[bool, ...]) -> Iterator[tuple[tuple, dict]]:
    """(tensors, options) of a call with one listed row, for each kind of pool and of compressed rows that fit."""
    numbers = torch.zeros(made.batch, 1, dtype=torch.int32, device=q.device)
    for packed in fp8:
        if packed and made.head_dim != HEAD_DIM:
            continue
        rows = q.new_zeros(page_size, made.head_dim)
        pool = Fp8Cache.pack(rows, rows_per_page=page_size) if packed else rows
        yield (q, pool, numbers), {}
        if made.max_seqlen_k > 1:
            yield (q, pool, numbers, pool, numbers), {}
        if made.max_seqlen_k > page_size:
            paged = pool if packed else rows[None]
            yield (q, pool, numbers, paged), dict(compressed_block_table=numbers, compressed_lengths=numbers[:, 0] + 1)


def _index_calls(made: Plan, q: Tensor, page_size: int) -> Iterator[tuple[tuple, dict]]:
    """(tensors, options) of a call in which every query is its own request, and of one with one request."""
    k, weights = q.new_zeros(1, page_size, made.head_dim), q[..., 0]
    lengths = torch.ones(len(q), dtype=torch.int32, device=q.device)
    table = torch.zeros(len(q), made.max_seqlen_k // page_size, dtype=torch.int32, device=q.device)
    starts = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
    for topk in (512, 1024):
        yield (q, k, weights, topk), dict(lengths=lengths, block_table=table)
        yield (q, k, weights, topk), dict(lengths=lengths, block_table=table[:1], request_starts=starts)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def choose_splits(tiles: int, multiprocessors: int, keys: int) -> int:
    """KV splits for ``tiles`` thread blocks' worth of query rows that see at most ``keys`` keys each.

    Time in units of STEP keys: tiles * n blocks run in rounds, each block costs its steps and one more to start and
    finish; merging costs one, and a little per split.
    """
    steps = -(-keys // STEP)

    def cost(n: int) -> float:
        rounds = -(-tiles * n // multiprocessors)
        return rounds * (-(-steps // n) + 1) + (1 + n / 64 if n > 1 else 0)

    return min(range(1, max(1, min(steps, MAX_SPLITS)) + 1), key=cost)


def index_words(capacity: int, topk: int = MAX_TOPK) -> int:
    """fp32 words that index_topk needs for a query with so many rows: the scores, and what each round of the choice
    keeps (an ordered score and a number)."""
    kept = 1 << (max(min(topk, capacity), 1) - 1).bit_length()
    words = items = capacity
    while True:
        pieces = -(-items // max(INDEX_PIECE, kept))
        words += 2 * pieces * kept
        if pieces <= 1:
            return words
        items = pieces * kept


def index_block(queries: int, capacity: int, topk: int = MAX_TOPK) -> int:
    """Queries whose scores are held at once."""
    return max(1, min(queries, INDEX_BYTES // (4 * index_words(capacity, topk))))


def deterministic_cut(rows: int, keys: int) -> tuple[int, int]:
    """(splits, least keys of one) for sequences of at most ``keys`` keys and ``rows`` query rows per KV head; (0, 0) =
    they are not split.

    A sequence is cut in the same places whatever ``keys`` says: every so many, or into the most splits if those are
    longer. The more rows, the longer the splits, so that the partial results stay small beside the keys.
    """
    if rows >= DETERMINISTIC_ROWS:
        return 0, 0
    each = DETERMINISTIC_KEYS * -(-rows // ROWS_PER_TILE)
    return min(-(-(keys + 2 * STEP) // each), DETERMINISTIC_SPLITS), each  # a range may start within a step


def _splits(
    multiprocessors: int, *, batch: int, q_heads: int, kv_heads: int, max_seqlen_q: int, max_seqlen_k: int
) -> int:
    tiles = batch * kv_heads * -(-max_seqlen_q * (q_heads // kv_heads) // ROWS_PER_TILE)
    return choose_splits(tiles, multiprocessors, max_seqlen_k)
