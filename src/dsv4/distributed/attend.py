"""The forward pass of prefill, after its arguments were checked, with and without autograd."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.distributed.ranks import check_alike, gathered_whole, global_rank, piece_numbers, pieces_of, rank_and_size
from dsv4.fmha.api import fmha
from dsv4.merge import merge_states


class Setting(NamedTuple):
    """The arguments of prefill that are not tensors."""

    left: int
    right: int
    softmax_scale: float | None
    order: str
    method: str
    group: Any
    deterministic: bool
    backend: str


def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, setting: Setting) -> tuple[Tensor, Tensor]:
    """Run prefill, whose arguments are checked -> out, lse."""
    left, right, softmax_scale, order, method, group, deterministic, backend = setting
    rank, size = rank_and_size(group)
    pieces = pieces_of(q.shape[1], order)
    piece = q.shape[1] // pieces
    options: dict[str, Any] = dict(softmax_scale=softmax_scale, deterministic=deterministic, backend=backend)
    queries = list(zip((n * piece for n in piece_numbers(rank, size, order)), q.split(piece, 1) if piece else [q]))
    states = [State(x, q.dtype if method == "gather" else torch.float32) for _, x in queries]
    if method == "gather":
        whole_k = gathered_whole(k, 1, order, group)
        whole_v = whole_k if v is k else gathered_whole(v, 1, order, group)
        rounds: Iterable[list[tuple[int, Tensor, Tensor]]] = [[(0, whole_k, whole_v)]]
    else:
        rounds = ring(k, v, pieces, order, group)
    for keys in rounds:
        for (start, x), state in zip(queries, states):
            for first, some_k, some_v in keys:
                state.attend(
                    x, some_k, some_v, start - first, left, right, options, sink if method == "gather" else None
                )
    done = [state.result(q.dtype, sink if method == "ring" else None) for state in states]
    return torch.cat([x for x, _ in done], 1), torch.cat([x for _, x in done], 2)


def cut(t: int, s: int, shift: int, left: int, right: int) -> tuple[int, int, tuple[int, int]] | None:
    """Return the queries and keys, from the first on, that matter, and fmha's window for them; None if no query sees a
    key.

    There are t queries and s keys. Query i sees key j iff i + shift - left <= j <= i + shift + right; -1 = no bound.

    fmha counts from the bottom right corner, i + S - T, so the corner must lie between the bounds: keys past the
    reach of the last query, and queries whose reach begins past the last key, are cut off: they change nothing.
    """
    if right >= 0:
        s = min(s, t + shift + right)
    if left >= 0:
        t = min(t, s - shift + left)
    if s <= 0 or t <= 0:
        return None
    corner = s - t
    return t, s, (corner - shift + left if left >= 0 else -1, shift + right - corner if right >= 0 else -1)


class State:
    """The partial result of a piece of queries. dtype: fp32 if partial results are merged, so that the result is
    rounded once; q's if there is one call."""

    def __init__(self, q: Tensor, dtype: torch.dtype):
        b, t, heads, _ = q.shape
        self.out = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
        self.lse = torch.full((b, heads, t), float("-inf"), dtype=torch.float32, device=q.device)
        self.parts = 0

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, shift: int, left: int, right: int, options: dict, sink: Tensor | None
    ) -> None:
        """Attend to one part of the keys; `cut` determines which of them are seen."""
        part = cut(q.shape[1], k.shape[1], shift, left, right)
        if part is None:
            return
        t, s, window = part
        out = torch.empty(q[:, :t].shape, dtype=self.out.dtype, device=q.device)
        lse = fmha(q[:, :t], k[:, :s], v[:, :s], window=window, sink=sink, return_lse=True, out=out, **options)[1]
        if self.parts > 0:
            out, lse = merge_states([self.out[:, :t], out], [self.lse[:, :, :t], lse])
        self.out[:, :t], self.lse[:, :, :t] = out, lse
        self.parts += 1

    def result(self, dtype: torch.dtype, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = (self.out, self.lse) if sink is None else merge_states([self.out], [self.lse], sink)
        return out.to(dtype), lse


def ring(k: Tensor, v: Tensor, pieces: int, order: str, group: Any) -> Iterator[list[tuple[int, Tensor, Tensor]]]:
    """Yield the pieces of keys of each rank, this one first: (position of the first, k, v). The next ones travel
    meanwhile."""
    import torch.distributed as dist

    rank, size = rank_and_size(group)
    here = [k.contiguous()] if v is k else [k.contiguous(), v.contiguous()]
    for name, x in zip("kv", here):
        check_alike(name, x, group)
    # Alternate between two sets of buffers; the first keys are the caller's and must not be overwritten.
    buffers = [[torch.empty_like(x) for x in here] for _ in range(min(size - 1, 2))]
    after, before = (global_rank(group, (rank + step) % size) for step in (1, -1))
    for step in range(size):
        moves: list[Any] = []
        there = buffers[step % len(buffers)] if step + 1 < size else []
        if there:
            moves = [dist.P2POp(dist.isend, x, after, group) for x in here]
            moves += [dist.P2POp(dist.irecv, x, before, group) for x in there]
            moves = dist.batch_isend_irecv(moves)
        numbers = piece_numbers((rank - step) % size, size, order)
        piece = k.shape[1] // pieces
        yield [
            (n * piece, here[0][:, p * piece : (p + 1) * piece], here[-1][:, p * piece : (p + 1) * piece])
            for p, n in enumerate(numbers)
        ]
        for move in moves:
            move.wait()
        here = there
