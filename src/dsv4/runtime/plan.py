"""Plans: how many ways the keys of a problem are split, and the buffers for it, allocated once for a capacity.

A plan depends only on capacities, never on tensor values, so a CUDA graph captured with it stays valid while lengths
change. One plan serves any problem within its capacities, one call at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.runtime import checks


class Capacities(NamedTuple):
    """The largest problem of a plan: `batch` sequences with at most these numbers of queries and keys each."""

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_seqlen_q: int
    max_seqlen_k: int


# Operations that accept a plan -> (capacities, SMs of the GPU, whether deterministic calls must fit) -> (KV splits,
# fp32 words of scratch memory). operators.define_operation puts them here.
RULES: dict[str, Callable[[Capacities, int, bool], tuple[int, int]]] = {}


@dataclass(frozen=True, eq=False)
class Plan:
    """What :func:`dsv4.plan` reserves for calls within a capacity. One plan serves one call at a time."""

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

    @property
    def capacities(self) -> tuple[int, ...]:
        """The capacities as the operators accept them, in the order of CAPACITIES."""
        heads = self.q_heads, self.kv_heads, self.head_dim
        return (self.num_splits, self.batch, *heads, self.max_seqlen_q, self.max_seqlen_k)


# Arguments of an operator that accompany a plan's scratch memory.
CAPACITIES = ("num_splits", "batch", "q_heads", "kv_heads", "head_dim", "max_seqlen_q", "max_seqlen_k")


def check(name: str, problem: Any, capacities: list[int]) -> None:
    """Raise ValueError unless a plan with these capacities serves this problem of the operation ``name``."""
    have = dict(zip(CAPACITIES, capacities))
    for size in ("q_heads", "kv_heads", "head_dim"):
        if getattr(problem, size) != have[size]:
            checks.fail("plan", f"{size}={have[size]}", f"{size}={getattr(problem, size)}, as the tensors")
    # A varlen problem's bounds may be loose (all rows in one sequence), so its rows count.
    if name == "fmha_varlen":
        have["rows"] = have["batch"] * have["max_seqlen_q"] * have["q_heads"]
        sizes = {"batch": problem.batch, "rows": problem.q.shape[0] * problem.q_heads}
    else:
        sizes = {size: getattr(problem, size) for size in ("batch", "max_seqlen_q", "max_seqlen_k")}
    for key, size in sizes.items():
        if size > have[key]:
            checks.fail("plan", f"capacity {key}={have[key]}", f"at least {size}, as the tensors")


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
    """Make a plan for ``operation``: dsv4.fmha, fmha_varlen, fmha_paged, v4_attention, index_topk, index_blocks or
    moe.

    The capacities are batch sequences of at most max_seqlen_q queries and max_seqlen_k keys each. For paged attention
    max_seqlen_k is the width of the block table times the page size. For v4_attention batch is the number of queries,
    kv_heads is 1 and max_seqlen_k is the width of both lists together (or of the block table times the page size). For
    index_topk batch is the number of queries, kv_heads is 1 and max_seqlen_k is the number of rows of a sequence (or of
    the block table). For moe batch is the number of tokens, q_heads that of a token's slots, kv_heads that of experts,
    head_dim the hidden size and max_seqlen_k the size inside an expert. device defaults to "cuda" if there is one, else
    "cpu"; on a CPU there is one split and no buffer. deterministic: also reserve space for calls with
    deterministic=True: up to about 1/16 of the bytes of batch * max_seqlen_k keys, where k is v. With False, a GPU
    rejects such calls if the space is missing.
    """
    name = getattr(operation, "__name__", None)
    if name not in RULES:
        checks.fail("operation", checks.describe(operation), ", ".join(f"dsv4.{o}" for o in RULES))
    sizes = dict(batch=batch, q_heads=q_heads, kv_heads=kv_heads, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    sizes = {key: checks.at_least(1, key, size) for key, size in sizes.items()}
    if name == "moe":
        checks.at_least(1, "head_dim", head_dim)
    else:
        checks.head_dim("head_dim", head_dim)
        checks.head_ratio(q_heads, kv_heads, "q_heads")
    checks.flag("deterministic", deterministic)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    where = checks.device("device", default if device is None else device)
    splits, words = 1, 0
    if where.type == "cuda":
        num_sms = torch.cuda.get_device_properties(where).multi_processor_count
        splits, words = RULES[name](Capacities(head_dim=head_dim, **sizes), num_sms, deterministic)
    scratch = torch.empty(words, dtype=torch.float32, device=where)
    return Plan(name, head_dim=head_dim, num_splits=splits, scratch=scratch, **sizes)
