"""Expert parallelism: every rank of a group has its own tokens and some of the experts.

Rank r of R has experts r E to (r + 1) E - 1 of R E; ids number all of them. The result is that of one call of dsv4.moe
with all experts, bit for bit if both run the kernels of one architecture: a slot is computed by the rank of its expert
and added up, in the order of slots, by the rank of its token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.distributed.ranks import gather, rank_and_size, swapped
from dsv4.moe import api, cpu, problem
from dsv4.moe.experts import Fp4Experts
from dsv4.moe.options import Activations, MoeOptions
from dsv4.runtime import checks, dispatch
from dsv4.runtime.checks import Backend
from dsv4.runtime.program import Program, tensors_of

REGION = 128  # bytes that a part of the memory begins at a multiple of
MOST_RANKS = 72  # ranks that reach each other's memory by NVLink, at most


class ExpertMemory:
    """Memory of the ranks of a group that all of them reach (torch's symmetric memory), for ``moe(fused=...)``. Every
    rank makes one with the same numbers; any layer may use it, one call at a time.

    tokens: of a rank, at most; hidden: H; topk: k; device: this rank's GPU.
    """

    def __init__(self, tokens: int, hidden: int, topk: int, group: Any = None, device: torch.device | str = "cuda"):
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        self.tokens = checks.at_least(1, "tokens", tokens)
        self.hidden, self.topk = checks.at_least(1, "hidden", hidden), checks.at_least(1, "topk", topk)
        self.rank, self.ranks = rank_and_size(group)
        self.group = group
        if self.ranks > MOST_RANKS:
            checks.fail("group", f"{self.ranks} ranks", f"at most {MOST_RANKS}")
        slots = tokens * topk
        sizes = (REGION, slots * 4, slots * 4, tokens * hidden * 2, slots * hidden * 2)
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + -(-size // REGION) * REGION)
        whole = symmetric.empty(ends[-1], dtype=torch.uint8, device=torch.device(device))
        everyone: Any = dist.group.WORLD if group is None else group
        self._handle = symmetric.rendezvous(whole, everyone)
        parts = [whole[begin : begin + size] for begin, size in zip(ends, sizes)]
        self.signals = parts[0].view(torch.int32)
        self.signals.zero_()
        self.ids = parts[1].view(torch.int32).view(tokens, topk)
        self.weights = parts[2].view(torch.float32).view(tokens, topk)
        self.x = parts[3].view(torch.bfloat16).view(tokens, hidden)
        self.slots = parts[4].view(torch.bfloat16).view(tokens, topk, hidden)
        self.call = torch.zeros(1, dtype=torch.int32, device=whole.device)
        pointers = [int(p) for p in self._handle.buffer_ptrs]
        away = [p - pointers[self.rank] for p in pointers]
        assert all(n % 16 == 0 for n in away), "allocations begin at multiples of 16 bytes"
        self.distance = torch.tensor([n // 16 for n in away], dtype=torch.int64, device=whole.device)
        self._prepared: dict[tuple, Any] = {}
        self._handle.barrier()  # no rank signals before all words are 0


class Ranks(NamedTuple):
    """The ranks, as the preparation of the kernel needs them: slots of a program, and numbers."""

    distance: Any
    signals: Any
    call: Any
    rank: int
    size: int


def moe(
    x: Tensor,
    experts: Fp4Experts,
    ids: Tensor,
    weights: Tensor,
    *,
    activations: Activations = "fp8_128",
    limit: float = 10.0,
    shared: tuple[Tensor, Tensor] | None = None,
    deterministic: bool = False,
    fused: ExpertMemory | None = None,
    group: Any = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute :func:`dsv4.moe` of this rank's tokens with the experts of all ranks. Every rank must call it.

    Args:
        x, weights: as in dsv4.moe, of this rank; without ``fused`` every rank has as many tokens.
        experts: those of this rank, as many as the others have.
        ids: int32 or int64 [T, k]: numbers of experts among those of all ranks, -1 = none.
        activations, limit, shared, deterministic, backend: as in dsv4.moe. shared: the same on every rank.
        fused: None sends tokens to all ranks and outputs of slots back by collectives. An :class:`ExpertMemory`: on
            sm_100a one kernel on each rank that reads and writes the memory of the others; tokens may differ in number.
        group: of torch.distributed; that of ``fused`` if it is given.
    """
    checks.tensor("x", x, ("T", "H"), checks.FLOATS)
    checks.forward_only(x=x, weights=weights)
    if not isinstance(experts, Fp4Experts):
        checks.fail("experts", checks.describe(experts), "a dsv4.Fp4Experts")
    if fused is not None and not isinstance(fused, ExpertMemory):
        checks.fail("fused", checks.describe(fused), "None or a dsv4.distributed.ExpertMemory")
    if fused is not None and group is not None and group is not fused.group:
        checks.fail("group", checks.describe(group), "None, or the group of fused")
    _, size = rank_and_size(group if fused is None else fused.group)
    like = ("x", x)
    checks.tensor("ids", ids, (x.shape[0], "k"), problem.INTEGERS, like=like, unit_last=False)
    checks.tensor("weights", weights, tuple(ids.shape), (torch.float32,), like=like, unit_last=False)
    if checks.values_checked(ids):
        checks.in_range("ids", ids, -1, size * experts.experts - 1)
    options = MoeOptions.checked(
        activations, limit, experts.format, experts.spread.greatest, deterministic, experts.layout, fused is not None
    )
    if fused is None:
        return _by_collectives(x, experts, ids, weights, options, shared, group, backend)
    return _in_one_kernel(x, experts, ids, weights, options, shared, fused, checks.backend(backend))


def _by_collectives(
    x: Tensor,
    experts: Fp4Experts,
    ids: Tensor,
    weights: Tensor,
    options: MoeOptions,
    shared: Any,
    group: Any,
    backend: Backend,
) -> Tensor:
    rank, size = rank_and_size(group)
    count, (tokens, k) = experts.experts, ids.shape
    all_x, all_ids, all_weights = (
        torch.cat(gather(y, group, name)) for y, name in ((x, "x"), (ids, "ids"), (weights, "weights"))
    )
    mine = torch.where(all_ids // count == rank, all_ids - rank * count, -1)
    how: Any = dict(activations=options.activations, limit=options.limit, deterministic=options.deterministic)
    _, slots = api.moe(all_x, experts, mine, all_weights, return_slots=True, backend=backend, **how)
    back = swapped(slots.view(size, tokens, k, -1).unbind(), group)  # [ranks, tokens, k, H]
    owner = (ids.long().clamp(min=0) // count)[None, :, :, None].expand(1, -1, -1, x.shape[1])
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for one in back.gather(0, owner)[0].unbind(1):
        total += one
    if shared is not None:
        made = _problem(x, experts, ids, weights, options, shared)
        total += cpu.shared(made).to(x.dtype)
    return total.to(x.dtype)


def _in_one_kernel(
    x: Tensor,
    experts: Fp4Experts,
    ids: Tensor,
    weights: Tensor,
    options: MoeOptions,
    shared: Any,
    memory: ExpertMemory,
    backend: str,
) -> Tensor:
    tokens = x.shape[0]
    if tokens > memory.tokens or x.shape[1] != memory.hidden or ids.shape[1] != memory.topk:
        room = f"up to {memory.tokens} tokens of {memory.hidden}, {memory.topk} experts each"
        checks.fail("fused", f"memory for {room}, with x {list(x.shape)} and ids {list(ids.shape)}", "memory for these")
    if x.dtype != torch.bfloat16:
        checks.fail("x", f"dtype {x.dtype} with fused", "torch.bfloat16")
    found = dispatch.resolve(backend, x.device)
    if found == "cpu":
        checks.fail("fused", "memory, with backend 'cpu'", "None there")
    memory.x[:tokens].copy_(x)
    memory.ids[:tokens].copy_(ids)
    memory.ids[tokens:].fill_(-1)
    memory.weights[:tokens].copy_(weights)
    memory.call.add_(1)
    out = torch.empty_like(memory.x)
    made = _problem(memory.x, experts, memory.ids, memory.weights, options, shared)
    made = replace(made, out=out, slots=memory.slots)
    tensors = tensors_of(made) | dict(distance=memory.distance, signals=memory.signals, call=memory.call)
    with dispatch.entered(found, x.device) as target:
        key = (target, options, *((name, y.shape, y.dtype, y.data_ptr() % 16) for name, y in tensors.items()))
        ready = memory._prepared.get(key)
        if ready is None:
            ready = memory._prepared[key] = _prepare(made, tensors, target, memory)
        ready.run([*tensors.values()], [y.data_ptr() for y in tensors.values()])
    return out[:tokens]


def _prepare(
    made: problem.MoeProblem, tensors: dict[str, Tensor], target: dispatch.Target, memory: ExpertMemory
) -> Any:
    from dsv4.runtime.launch import Ready

    module = dispatch.kernel_module("moe", target.capability)
    refused = module.supports(made)
    if refused is not None:
        raise ValueError(f"backend: {target.backend!r} cannot run this moe problem: {refused}")
    program = Program(tensors, made.x.device)
    names = dict(zip(tensors, program.slots))
    ranks = Ranks(names["distance"], names["signals"], names["call"], memory.rank, memory.ranks)
    module.prepare(program.slots_of(made), target, program, ranks)
    return Ready(program, target)


def _problem(
    x: Tensor, e: Fp4Experts, ids: Tensor, weights: Tensor, options: MoeOptions, shared: Any
) -> problem.MoeProblem:
    above, down = api.pair("shared", shared) if shared is not None else (None, None)
    shared_weights = dict(shared_w13=above, shared_w2=down)
    return problem.build(x, ids=ids, weights=weights, **e.tensors, **shared_weights, **options._asdict())
