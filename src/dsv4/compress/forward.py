"""compress with checked arguments: it runs a kernel if there is one, else torch code.

Bits: a row depends only on its own slots, never on how the tokens were divided into calls. So every reduction here is
a fixed tree of elementwise operations; torch's own reductions may add in another order for another shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4.caches import kv as caches
from dsv4.caches.kv import Pool
from dsv4.compress.problem import CompressProblem, CompressState, Parameters, problem_of
from dsv4.runtime import dispatch

BLOCK_BYTES = 64 << 20  # bytes of tokens (fp32) at once; cutting a long prompt changes no bit


def run(
    kv: Tensor,
    gate: Tensor | None,
    state: CompressState | None,
    given: Parameters,
    out: Pool | None,
    slots: Tensor | None,
    backend: str,
) -> tuple[Any, CompressState]:
    # Under torch.compile the code stays torch code.
    in_torch = backend == "auto" and (kv.is_meta or torch.compiler.is_compiling())
    found = "cpu" if in_torch else dispatch.resolve(backend, kv.device, "kv")
    if found != "cpu":
        p = problem_of(kv, gate, state, given, out, slots)
        if backend != "auto" or _reason(p) is None:
            return _by_kernel(p, kv, found, out)
    rows, after = _in_torch(kv, gate, state, given)
    if out is None:
        return rows, after
    assert slots is not None
    caches.write_rows(out, slots.flatten(), rows.flatten(0, -2))
    return out, after


def _reason(p: CompressProblem) -> str | None:
    """Return None, or why the kernels of the tensors' GPU cannot run the problem."""
    if not dispatch.has_kernels(p.kv.device):
        return "there are none"
    return dispatch.kernel_module("compress", dispatch.cuda_target(p.kv.device).capability).supports(p)


def _by_kernel(p: CompressProblem, kv: Tensor, found: str, out: Pool | None) -> tuple[Any, CompressState]:
    if p.kv.shape[0] and p.windows + p.new_kv.shape[1]:
        with dispatch.entered(found, kv.device) as target:
            module = dispatch.kernel_module("compress", target.capability)
            if (reason := module.supports(p)) is not None:
                raise ValueError(f"backend: {found!r} cannot run this compress problem: {reason}")
            module.run(p)
    rows = p.rows if p.rows is None or kv.ndim == 3 else p.rows[0]
    new_kv, new_gate = (x if kv.ndim == 3 else x[0] for x in (p.new_kv, p.new_gate))
    return (rows if out is None else out), CompressState(new_kv, new_gate, p.seen + kv.shape[-2])


def _in_torch(
    kv: Tensor, gate: Tensor | None, state: CompressState | None, given: Parameters
) -> tuple[Tensor, CompressState]:
    d, m = given.norm_weight.shape[0], given.m
    length, block = kv.shape[-2], max(m, BLOCK_BYTES // max(4 * kv[..., :1, :].numel(), 1))
    if length > block:
        parts = []
        for begin in range(0, length, block):
            some = slice(begin, begin + block)
            part, state = _in_torch(kv[..., some, :], None if gate is None else gate[..., some, :], state, given)
            parts.append(part)
        assert state is not None
        return torch.cat(parts, -2), state
    compute = torch.float64 if kv.dtype == torch.float64 else torch.float32
    overlap = kv.shape[-1] == 2 * d
    seen = 0 if state is None else state.tokens
    total = seen + kv.shape[-2]
    new_kv = kv.to(compute)
    new_gate = torch.zeros_like(new_kv) if gate is None else gate.to(compute)
    if given.position_bias is not None:
        slot = (torch.arange(kv.shape[-2], device=kv.device) + seen) % m
        new_gate = new_gate + given.position_bias.to(compute)[slot]
    if state is not None:
        new_kv, new_gate = torch.cat([state.kv, new_kv], -2), torch.cat([state.gate, new_gate], -2)
    first = seen // m  # the window of the first unfinished token
    windows = total // m - first  # finished by these tokens
    # Tokens at the front that belong to the finished window before `first` (CSA only).
    before = m if overlap and first > 0 else 0
    value, logit = _slots(new_kv, new_gate, windows, before, m, d, overlap)
    positions = torch.arange(first, first + windows, device=kv.device) * m
    rows = pooled(value, logit, given.norm_weight, given.eps, given.cos_sin, positions)
    drop = before + (windows - (1 if overlap else 0)) * m if windows else 0  # CSA keeps the last finished window
    after = CompressState(new_kv[..., drop:, :].clone(), new_gate[..., drop:, :].clone(), total)
    return rows.to(given.dtype), after


def pooled(
    value: Tensor, logit: Tensor, norm_weight: Tensor, eps: float, cos_sin: Tensor | None, positions: Tensor
) -> Tensor:
    """Pool slots [..., n, slots, d] by their gates -> rows [..., n, d], normed, and rotated at positions [n]."""
    d = value.shape[-1]
    weight = (logit - logit.amax(-2, keepdim=True)).exp()
    rows = _tree_sum((weight * value).mT)[..., 0] / _tree_sum(weight.mT)[..., 0]
    rows = rows * torch.rsqrt(_tree_sum(rows * rows) / d + eps) * norm_weight.to(rows.dtype)
    return rows if cos_sin is None else _rope(rows, cos_sin, positions)


def _slots(kv: Tensor, gate: Tensor, windows: int, before: int, m: int, d: int, overlap: bool) -> tuple[Tensor, Tensor]:
    """Cut both, [..., tokens, width], into [..., windows, slots, d]; the first window starts at token `before`."""

    def slots(x: Tensor, missing: float) -> Tensor:
        own = x[..., before : before + windows * m, :]
        own = own.reshape(*x.shape[:-2], windows, m, x.shape[-1])  # the compiler cannot trace unflatten
        if not overlap:
            return own
        a, b = own[..., :d], own[..., d:]
        if before:
            earlier = x[..., :m, :d].unsqueeze(-3)
        else:
            earlier = torch.full_like(a[..., :1, :, :], missing)  # row 0 of the sequence: no window before it
        return torch.cat([torch.cat([earlier, a[..., :-1, :, :]], -3), b], -2)

    if windows == 0:
        none = kv.new_zeros(*kv.shape[:-2], 0, 2 * m if overlap else m, d)
        return none, none
    return slots(kv, 0.0), slots(gate, float("-inf"))


def _tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dim, kept with size 1, by halving: the same additions whatever the other dims are."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        pair = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([pair, x[..., 2 * half :]], -1) if x.shape[-1] % 2 else pair
    return x


def _rope(rows: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate the interleaved pairs of the last dims of rows [..., n, d] by the angle of positions [n]."""
    r = cos_sin.shape[1]
    cos, sin = cos_sin[positions].to(rows.dtype).chunk(2, -1)  # [n, r / 2]
    even, odd = rows[..., -r::2], rows[..., rows.shape[-1] - r + 1 :: 2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([rows[..., :-r], turned], -1)
