"""Compile before the first real call: every kind of call within a plan's capacities is run once."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor

from dsv4.runtime import checks
from dsv4.runtime.checks import Backend
from dsv4.runtime.plan import Plan, plan


class Kinds(NamedTuple):
    """The kinds of calls to run."""

    page_size: int
    same_kv: tuple[bool, ...]  # whether k is v
    fp8: tuple[bool, ...]  # whether rows are packed
    deterministic: tuple[bool, ...]


class PlanKeywords(TypedDict):
    """The arguments of :func:`plan`."""

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_seqlen_k: int
    max_seqlen_q: NotRequired[int]
    device: NotRequired[torch.device | str | None]
    deterministic: NotRequired[bool]


# Operations -> (plan, q [batch, max_seqlen_q, heads, head dim], kinds) -> (tensors, options) of calls.
# operators.define_operation puts them here.
CALLS: dict[str, Callable[[Plan, Tensor, Kinds], Iterator[tuple[tuple, dict]]]] = {}


def warmup(
    operation: Callable,
    *,
    dtype: torch.dtype = torch.bfloat16,
    backend: Backend = "auto",
    page_size: int = 64,
    same_kv: bool | None = None,
    fp8: bool | None = None,
    **capacities: Unpack[PlanKeywords],
) -> Plan:
    """Make the plan for these capacities and run the operation with it, to compile what calls of that size need.

    It accepts the arguments of :func:`plan`, and the dtype and backend of later calls. Which kernel a call uses depends
    on whether there is a causal mask, whether dense keys fill whole tiles, whether deterministic is set (if the plan
    has space for it), whether k is v and, for v4_attention, whether rows are FP8 (only with bf16) and how compressed
    rows are listed. Each combination is run once; same_kv and fp8 restrict this to one kind. fmha's functions are run
    with k and v in e4m3 where fp8 is True, and not where it is None. page_size: rows per page
    (fmha_paged, index_topk and Fp8Cache). index_topk is run with pages, for lists of 512 and 1024. Returns the plan.
    """
    name = getattr(operation, "__name__", None)
    if name not in CALLS:
        checks.fail("operation", checks.describe(operation), ", ".join(f"dsv4.{o}" for o in CALLS))
    made = plan(operation, **capacities)
    checks.backend(backend)
    checks.dtype("dtype", dtype, checks.FLOATS)
    page = min(checks.at_least(1, "page_size", page_size), made.max_seqlen_k)
    if fp8 is None and dtype != torch.bfloat16:
        fp8 = False
    orders = (False, True) if capacities.get("deterministic", True) else (False,)
    kinds = Kinds(page, _kinds("same_kv", same_kv), _kinds("fp8", fp8), orders)
    q = torch.zeros(made.batch, made.max_seqlen_q, made.q_heads, made.head_dim, dtype=dtype, device=made.scratch.device)
    for tensors, options in CALLS[made.operation](made, q, kinds):
        operation(*tensors, **options, plan=made, backend=backend)
    return made


def _kinds(name: str, only: bool | None) -> tuple[bool, ...]:
    return (False, True) if only is None else (checks.flag(name, only),)
