"""The state of a sequence, and the problem that a kernel of compress receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dsv4.caches.kv import Pool


class CompressState(NamedTuple):
    """What a sequence carries from one call to the next. It is never modified in place, so you can go back to an older
    state (rejected draft tokens).

    kv, gate  [..., t, width]: the tokens that still matter, gate with position_bias added. These are the tokens of the
              unfinished window, after (CSA) the m tokens of the finished window before it.
    tokens    tokens seen so far
    """

    kv: Tensor
    gate: Tensor
    tokens: int


class Parameters(NamedTuple):
    """What stays the same from call to call of a sequence. The operators of training.py have these arguments, too."""

    position_bias: Tensor | None  # [m, width]
    norm_weight: Tensor  # [d]
    cos_sin: Tensor | None
    eps: float
    dtype: torch.dtype  # dtype of a row, before it is stored
    m: int  # the ratio


@dataclass(frozen=True, eq=False)
class CompressProblem:
    """One call for the kernels. Tokens are counted from the first one that the old state keeps."""

    operation: ClassVar[str] = "compress"

    kv: Tensor  # [B, L, width]
    gate: Tensor | None  # [B, L, width]; None with a ratio of 1: a row is its token
    given: Parameters
    old_kv: Tensor | None  # fp32 [B, kept, width]
    old_gate: Tensor | None
    seen: int  # tokens before this call
    new_kv: Tensor  # fp32 [B, what the state keeps, width], to be filled
    new_gate: Tensor
    rows: Tensor | None = None  # [B, windows, d], to be filled; or
    pool: Pool | None = None  # the pool that receives the rows, ...
    slots: Tensor | None = None  # ... int32 or int64 [B, windows]: in these rows

    q = property(lambda self: self.kv)  # a tensor on the device of the problem
    m = property(lambda self: self.given.m)
    d = property(lambda self: self.given.norm_weight.shape[0])
    overlap = property(lambda self: self.kv.shape[-1] == 2 * self.d)
    kept = property(lambda self: 0 if self.old_kv is None else self.old_kv.shape[1])
    base = property(lambda self: self.seen - self.kept)
    first_window = property(lambda self: self.seen // self.m)
    windows = property(lambda self: windows_of(self.seen, self.kv.shape[1], self.m))
    drop = property(lambda self: self.kept + self.kv.shape[1] - self.new_kv.shape[1])


def windows_of(seen: int, tokens: int, m: int) -> int:
    """Return the number of rows that this many tokens finish."""
    return (seen + tokens) // m - seen // m


def state_size(seen: int, m: int, overlap: bool) -> int:
    """Return the tokens that the state keeps: the unfinished window, and for CSA the finished one before it."""
    return seen % m + (m if overlap and seen >= m else 0)


def problem_of(
    kv: Tensor, gate: Tensor | None, state: CompressState | None, given: Parameters, out, slots
) -> CompressProblem:
    old_kv, old_gate, seen = (None, None, 0) if state is None else state

    def batched(x: Tensor | None) -> Tensor | None:
        return x if x is None or kv.ndim == 3 else x[None]

    kv3 = kv if kv.ndim == 3 else kv[None]
    b, length, width = kv3.shape
    d = given.norm_weight.shape[0]
    size = state_size(seen + length, given.m, width == 2 * d)
    new_kv, new_gate = (torch.empty(b, size, width, dtype=torch.float32, device=kv.device) for _ in "kg")
    rows = None
    if out is None:
        rows = torch.empty(b, windows_of(seen, length, given.m), d, dtype=given.dtype, device=kv.device)
    old_kv, old_gate = (None if x is None or x.shape[-2] == 0 else batched(x) for x in (old_kv, old_gate))
    return CompressProblem(kv3, batched(gate), given, old_kv, old_gate, seen, new_kv, new_gate, rows, out, slots)
