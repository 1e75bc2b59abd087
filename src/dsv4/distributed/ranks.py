"""Which rank of a group has which pieces of a sequence, and how ranks exchange tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.runtime import checks

ORDERS = ("zigzag", "contiguous")
NOTED = 256  # bytes in which ranks exchange dtype and shape


def piece_numbers(rank: int, size: int, order: str) -> tuple[int, ...]:
    """Return the pieces of the sequence that a rank has."""
    return (rank, 2 * size - 1 - rank) if order == "zigzag" else (rank,)


def pieces_of(tokens: int | None, order: str) -> int:
    """Return how many pieces of the sequence a rank with this many tokens has."""
    checks.one_of("order", order, ORDERS)
    pieces = 2 if order == "zigzag" else 1
    if tokens is not None and tokens % pieces:
        checks.fail("order", f"'zigzag' with {tokens} tokens on a rank", "an even number of them, or 'contiguous'")
    return pieces


def check_alike(name: str, x: Tensor, group: Any) -> None:
    """Raise an error on all ranks unless every rank has a tensor of this shape and dtype. This runs only where values
    are checked (see checks): on a GPU it would cost a round over the ranks."""
    import torch.distributed as dist

    if not checks.values_checked(x):
        return
    mine = torch.zeros(NOTED, dtype=torch.uint8, device=x.device)
    noted = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}".encode()[:NOTED]
    mine[: len(noted)] = torch.tensor(list(noted), dtype=torch.uint8, device=x.device)
    all_ranks = [torch.empty_like(mine) for _ in range(rank_and_size(group)[1])]
    dist.all_gather(all_ranks, mine, group=group)
    for rank, other in enumerate(all_ranks):
        if not torch.equal(other, mine):
            theirs = bytes(other.tolist()).rstrip(b"\0").decode()
            checks.fail(
                name,
                f"{checks.describe(x)}, and on rank {rank} of the group {theirs}",
                "tensors of one shape and dtype on all ranks",
            )


def gather(x: Tensor, group: Any, name: str = "x") -> list[Tensor]:
    """Return every rank's x."""
    import torch.distributed as dist

    check_alike(name, x, group)
    result = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(rank_and_size(group)[1])]
    dist.all_gather(result, x.contiguous(), group=group)
    return result


def exchange(x: Tensor, dim: int, group: Any, name: str) -> list[Tensor]:
    """Return this rank's share, along dim, of every rank's x."""
    check_alike(name, x, group)
    return list(swapped(x.chunk(rank_and_size(group)[1], dim), group).unbind())


def swapped(parts: Sequence[Tensor], group: Any) -> Tensor:
    """Send part r to rank r -> the parts for this rank, stacked. One tensor: gloo of torch 2.11 accepts no lists."""
    import torch.distributed as dist

    given = torch.stack([*parts])
    result = torch.empty_like(given)
    dist.all_to_all_single(result, given, group=group)
    return result


def rank_and_size(group: Any) -> tuple[int, int]:
    """Return (rank, size) in the group."""
    import torch.distributed as dist

    accepted = "None or a group of torch.distributed with this rank"
    if not dist.is_available() or not dist.is_initialized():
        checks.fail("group", "no process group", f"{accepted}, after init_process_group")
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group returns to ranks outside
        checks.fail("group", "a group that this rank is not in", accepted)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        checks.fail("group", checks.describe(group), accepted)
    return dist.get_rank(group), dist.get_world_size(group)


def global_rank(group: Any, rank: int) -> int:
    """Return the rank in the world, which point-to-point calls need."""
    import torch.distributed as dist

    return rank if group is None else dist.get_global_rank(group, rank)


def gathered_whole(x: Tensor, dim: int, order: str, group: Any) -> Tensor:
    _, size = rank_and_size(group)
    if size == 1:
        return x.view_as(x)
    parts = [part.chunk(pieces_of(None, order), dim) for part in gather(x, group)]
    whole = {n: parts[r][p] for r in range(size) for p, n in enumerate(piece_numbers(r, size, order))}
    return torch.cat([whole[n] for n in range(len(whole))], dim)
