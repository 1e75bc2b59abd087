"""Compressed rows whose states an engine keeps: contiguous tokens of many requests, with fixed shapes.

vLLM writes kv and gate (with its bias) of every token to pages of fp32 lines, which hold as long a history as a row
needs. A token that ends a window then makes a row of that window's lines. The arithmetic is :func:`dsv4.compress`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.caches.pages import PackedRows
from dsv4.compress.forward import pooled
from dsv4.runtime import checks, dispatch


def compress_pages(
    states: Tensor,
    tokens: Tensor,
    requests: Tensor,
    positions: Tensor,
    block_table: Tensor,
    slots: Tensor,
    norm_weight: Tensor,
    cos_sin: Tensor,
    out: PackedRows,
    *,
    ratio: int,
    eps: float = 1e-6,
    backend: str = "auto",
) -> None:
    """Write the rows that N tokens finish to `out`.

    Args:
        states: fp32 [pages, lines, 2 * width], kv then gate; width d (HCA) or 2 d (CSA). Token t of request r is line
            ``t % lines`` of page ``block_table[r, t // lines]``. The tokens of this call are already there.
        tokens: int32 or int64 [N]; below 0: no token, nothing is made.
        requests, positions: int32 or int64 [N], the request of each token and its place there.
        block_table: int32 [R, pages].
        slots: int32 or int64 [N]; row of `out` for the row that the token finishes, -1: none.
        norm_weight: [d]. cos_sin: fp32 [positions, r], as in dsv4.compress.
        out: an :class:`dsv4.Fp8Cache` for d = 512, an :class:`dsv4.IndexCache` for d = 128. Rows are rounded to bf16
            first.
        ratio: tokens of a window.
    """
    checks.tensor("states", states, ("pages", "lines", "2 * width"), (torch.float32,))
    like, n = ("states", states), positions.shape[0]
    if not isinstance(out, PackedRows):
        checks.fail("out", checks.describe(out), "a dsv4.Fp8Cache or a dsv4.IndexCache")
    d = out.format.values
    if states.shape[2] not in (2 * d, 4 * d):
        checks.fail("states", f"lines of {states.shape[2]}", f"{2 * d} (HCA) or {4 * d} (CSA) with this out")
    for name, x in (("tokens", tokens), ("requests", requests), ("positions", positions), ("slots", slots)):
        checks.tensor(name, x, (n,), (torch.int32, torch.int64), like=like)
    checks.tensor("block_table", block_table, ("R", "pages"), (torch.int32,), like=like)
    checks.tensor("norm_weight", norm_weight, (d,), (torch.float32, torch.bfloat16, torch.float16), like=like)
    checks.tensor("cos_sin", cos_sin, ("positions", "r"), (torch.float32, torch.bfloat16), like=like)
    ratio, eps = checks.at_least(1, "ratio", ratio), checks.number("eps", eps)
    found = dispatch.resolve(checks.backend(backend), states.device, "states")
    if n == 0:
        return
    if found == "cpu":
        _in_torch(states, tokens, requests, positions, block_table, slots, norm_weight, cos_sin, out, ratio, eps)
        return
    with dispatch.entered(found, states.device):
        from dsv4.compress.kernels import pages

        pages.run(states, tokens, requests, positions, block_table, slots, norm_weight, cos_sin, out, ratio, eps)


def _in_torch(states, tokens, requests, positions, block_table, slots, norm_weight, cos_sin, out, ratio, eps) -> None:
    d, lines = norm_weight.shape[0], states.shape[1]
    width = states.shape[2] // 2
    last = (((positions + 1) % ratio == 0) & (tokens >= 0) & (slots >= 0)).nonzero()[:, 0]
    if not len(last):
        return
    end = positions[last].long()
    count = ratio * width // d
    token = end[:, None] + 1 - count + torch.arange(count, device=end.device)  # [rows, count]
    page = block_table[requests[last].long()[:, None], token.clamp_min(0) // lines].long()
    kv, gate = states[page, token.clamp_min(0) % lines].split(width, -1)  # [rows, count, width]
    if width == 2 * d:  # the first half of the previous window, then the second half of this one
        kv, gate = (torch.cat([x[:, :ratio, :d], x[:, ratio:, d:]], 1) for x in (kv, gate))
    gate = gate.masked_fill((token < 0)[..., None], float("-inf"))
    kv = kv.masked_fill((token < 0)[..., None], 0)
    rows = pooled(kv, gate, norm_weight.float(), eps, cos_sin.float(), end // ratio * ratio)
    out.write(slots[last], rows.bfloat16())
