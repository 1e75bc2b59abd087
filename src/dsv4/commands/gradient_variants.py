"""Which launches `dsv4 compile` compiles for gradients. Nothing is computed: tensors have shapes and no memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.fmha import problem
from dsv4.fmha.backward import FmhaBackward
from dsv4.runtime import calls, dispatch
from dsv4.runtime.program import Launch
from dsv4.v4 import problem as v4_problem
from dsv4.v4.backward import V4Backward

# Query heads of a KV head. On Hopper a TMA box holds those that go together, if they are a power of two: each has its
# variant. Groups of 3 are packed by copies, or each head alone, and their shares of dK and dV are summed.
GROUPS = (1, 2, 3, 4, 8, 16)
KV_HEADS = 132  # enough for every SM, so that all heads of a group go together
FEW_HEADS = 32  # too few work tiles to loop over them
# (tokens, sequences, causal): a dense batch, a varlen batch, one whose sequences are ordered by length.
BATCHES = (256, 0, False), (256, 1, False), (1024, 2, True)
# Above head dim 128 the heads of a group are not packed. Tiles of products are small where they are few.
UNPACKED, FEW_OR_MANY = (1, 3), (1, 4 * KV_HEADS)


def fmha_launches(head_dim: int, dtype: torch.dtype, arch: str, **options: Any) -> list[Launch]:
    """Return the launches of fmha's and fmha_varlen's gradients, whatever the mask or the sink, with dQ summed in any
    order; without groups, also always in the same one. options: of fmha."""
    found = []
    sizes = [*itertools.product(GROUPS, (KV_HEADS, FEW_HEADS)), (1, 1)]
    if head_dim > 128:
        sizes = list(itertools.product(UNPACKED, FEW_OR_MANY))
    for (tokens, sequences, causal), (group, kv_heads) in itertools.product(BATCHES, sizes):
        shape = (tokens,) if sequences else (1, tokens)

        def draw(heads: int, shape: tuple[int, ...] = shape) -> Tensor:
            return torch.empty(*shape, heads, head_dim, dtype=dtype, device="meta")

        starts = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
        q, k, v = draw(kv_heads * group), draw(kv_heads), draw(kv_heads)
        p = problem.varlen(q, k, v, starts, starts, causal=causal) if sequences else problem.dense(q, k, v)
        p = replace(p, out=torch.empty_like(q), lse=torch.empty(p.lse_shape, device="meta"))
        for deterministic in (False, True) if group == 1 else (False,):
            p = replace(p, options=p.options._replace(deterministic=deterministic, **options))
            b = FmhaBackward(p, torch.empty_like(q), None, *(torch.empty_like(x) for x in (q, k, v)))
            found += calls.launches_of(b, dispatch.compile_target(arch))
    return found


def v4_launches(heads: int, rope: int, dtype: torch.dtype, arch: str) -> list[Launch]:
    """Return the launches of v4_attention's gradients: added up in any order or always in the same one, rotated back or
    not, positions of 32 and 64 bits."""
    found = []
    for deterministic, positions in itertools.product((False, True), (None, torch.int32, torch.int64)):
        q, rows = (torch.empty(n, dtype=dtype, device="meta") for n in ((1, heads, 512), (64, 512)))
        numbers = torch.empty(1, 64, dtype=torch.int32, device="meta")
        turn = None
        if positions is not None:
            turn = torch.empty(16, rope, device="meta"), torch.empty(1, dtype=positions, device="meta")
        p = v4_problem.build(q, rows, numbers, rows, numbers, inverse_rope=turn, deterministic=deterministic)
        p = replace(p, out=torch.empty_like(q), lse=torch.empty(p.lse_shape, device="meta"))
        dq, d_window, d_compressed = (torch.empty_like(x) for x in (q, rows, rows))
        request = V4Backward(p, q, None, dq, d_window, d_compressed)
        found += calls.launches_of(request, dispatch.compile_target(arch))
    return found
