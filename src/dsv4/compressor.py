"""Compressed rows of DeepSeek-V4: every m tokens become one row, at once or step by step with the same bits.

Per token j of a sequence the model projects its hidden state to kv_j and gate_j; position_bias[j % m] is added to the
gate. Row w pools the slots of its window with a softmax over the slots, separately for every channel:

    HCA   width d       row w = sum_j softmax_j(gate_j) * kv_j            over the m tokens of window w
    CSA   width 2d      the same over 2m slots: the first half (a) of the m tokens of window w - 1,
                        and the second half (b) of the m tokens of window w; row 0 has only its own m slots

then RMSNorm with weight, then RoPE at position m * w. The lightning indexer's keys are the CSA form at width 128.

Bits: a row depends on its own slots alone, never on how the tokens were cut into calls. So every reduction here is a
fixed tree of elementwise operations; torch's own reductions may add in another order for another shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4 import checks

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
BLOCK_BYTES = 64 << 20  # tokens (fp32) taken at once; a long prompt is cut, which changes no bit


class CompressState(NamedTuple):
    """What a sequence carries from one call to the next; never changed in place, so an older one can be gone back to
    (rejected draft tokens).

    kv, gate  [..., t, width]: the tokens that still matter, gate with position_bias added. These are the tokens of the
              unfinished window, after (CSA) the m tokens of the finished window before it.
    tokens    tokens seen so far
    """

    kv: Tensor
    gate: Tensor
    tokens: int


def compress(
    kv: Tensor,
    gate: Tensor,
    position_bias: Tensor,
    norm_weight: Tensor,
    *,
    cos_sin: Tensor | None = None,
    state: CompressState | None = None,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, CompressState]:
    """Pool the next L tokens of a sequence -> (the rows that they finish [..., n, d], the state after them).

    With ``rows, state = compress(kv, gate, ...)`` and then ``compress(..., state=state)`` for the tokens that follow,
    the rows of all calls together are, bit for bit, those of one call with all tokens. Row w is finished by token
    m * (w + 1) - 1, and visible to it (see dsv4.index_topk).

    Args:
        kv, gate: [L, width] or [B, L, width], the projections of the tokens, without position_bias. width = d is HCA,
            width = 2d is CSA (a-half first). All B sequences are at the same token.
        position_bias: [m, width]; m is the compression ratio.
        norm_weight: [d], the weight of the RMSNorm.
        cos_sin: fp32 [positions, r], r/2 cosines then r/2 sines (dsv4.reference.rope_table); row w is rotated at m * w.
            None leaves RoPE to the caller.
        state: from the call before; None at the start of a sequence.
        dtype: of the rows; default that of kv. Arithmetic is fp32 (fp64 for fp64 kv).
    """
    d, m = _check(kv, gate, position_bias, norm_weight, cos_sin, state)
    if dtype is not None:
        checks.dtype("dtype", dtype, FLOATS)
    eps = checks.number("eps", eps)
    length, block = kv.shape[-2], max(m, BLOCK_BYTES // max(4 * kv[..., :1, :].numel(), 1))
    if length > block:
        parts = []
        for begin in range(0, length, block):
            some = slice(begin, begin + block)
            part, state = compress(
                kv[..., some, :], gate[..., some, :], position_bias, norm_weight,
                cos_sin=cos_sin, state=state, eps=eps, dtype=dtype,
            )  # fmt: skip
            parts.append(part)
        assert state is not None
        return torch.cat(parts, -2), state
    compute = torch.float64 if kv.dtype == torch.float64 else torch.float32
    overlap = kv.shape[-1] == 2 * d
    seen = 0 if state is None else state.tokens
    total = seen + kv.shape[-2]
    slot = (torch.arange(kv.shape[-2], device=kv.device) + seen) % m
    new_kv, new_gate = kv.to(compute), gate.to(compute) + position_bias.to(compute)[slot]
    if state is not None:
        new_kv, new_gate = torch.cat([state.kv, new_kv], -2), torch.cat([state.gate, new_gate], -2)
    first = seen // m  # the window of the first unfinished token
    windows = total // m - first  # finished by these tokens
    # Tokens at the front that belong to the finished window before `first` (CSA only).
    before = m if overlap and first > 0 else 0
    value, logit = _slots(new_kv, new_gate, windows, before, m, d, overlap)
    positions = torch.arange(first, first + windows, device=kv.device) * m
    rows = pooled(value, logit, norm_weight, eps, cos_sin, positions)
    drop = (
        before + (windows - (1 if overlap else 0)) * m if windows else 0
    )  # CSA keeps the last finished window
    after = CompressState(new_kv[..., drop:, :].clone(), new_gate[..., drop:, :].clone(), total)
    return rows.to(dtype or kv.dtype), after


def pooled(
    value: Tensor, logit: Tensor, norm_weight: Tensor, eps: float, cos_sin: Tensor | None, positions: Tensor
) -> Tensor:
    """Slots [..., n, slots, d] and their gates -> rows [..., n, d], normed, and rotated at positions [n]."""
    d = value.shape[-1]
    weight = (logit - logit.amax(-2, keepdim=True)).exp()
    rows = _tree_sum((weight * value).mT)[..., 0] / _tree_sum(weight.mT)[..., 0]
    rows = rows * torch.rsqrt(_tree_sum(rows * rows) / d + eps) * norm_weight.to(rows.dtype)
    return rows if cos_sin is None else _rope(rows, cos_sin, positions)


def _slots(
    kv: Tensor, gate: Tensor, windows: int, before: int, m: int, d: int, overlap: bool
) -> tuple[Tensor, Tensor]:
    """[..., tokens, width] -> [..., windows, slots, d] of both; the first window starts at token `before`."""

    def slots(x: Tensor, missing: float) -> Tensor:
        own = x[..., before : before + windows * m, :].unflatten(-2, (windows, m))
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


def _check(kv, gate, position_bias, norm_weight, cos_sin, state) -> tuple[int, int]:
    """(d, m), after looking at everything but values."""
    if not checks.is_tensor(kv) or kv.ndim not in (2, 3):
        checks.fail("kv", checks.describe(kv), "a tensor [L, width] or [B, L, width]")
    batch, width = tuple(kv.shape[:-2]), kv.shape[-1]
    like = ("kv", kv)
    checks.tensor("kv", kv, tuple(kv.shape), FLOATS, unit_last=False)
    checks.tensor("gate", gate, tuple(kv.shape), FLOATS, like=like, unit_last=False)
    checks.tensor("norm_weight", norm_weight, ("d",), FLOATS, like=like, unit_last=False)
    d = norm_weight.shape[0]
    if d == 0 or width not in (d, 2 * d):
        checks.fail(
            "kv", f"width {width} with norm_weight [{d}]", "width d (HCA) or 2 d (CSA), norm_weight [d]"
        )
    checks.tensor("position_bias", position_bias, ("m", width), FLOATS, like=like, unit_last=False)
    m = position_bias.shape[0]
    if m == 0:
        checks.fail("position_bias", "shape [0, ...]", f"shape [m, {width}], m >= 1")
    checks.forward_only(
        kv=kv, gate=gate, position_bias=position_bias, norm_weight=norm_weight, cos_sin=cos_sin
    )
    seen = 0
    if state is not None:
        if not isinstance(state, CompressState):
            checks.fail("state", checks.describe(state), "None or the state that compress returned")
        seen = checks.at_least(0, "state.tokens", state.tokens)
        # The unfinished window, and for CSA the finished one before it.
        tokens = seen % m + (m if width == 2 * d and seen >= m else 0)
        compute = torch.float64 if kv.dtype == torch.float64 else torch.float32
        for name, x in (("kv", state.kv), ("gate", state.gate)):
            checks.tensor(f"state.{name}", x, (*batch, tokens, width), (compute,), like=like, unit_last=False)
    if cos_sin is not None:
        checks.tensor("cos_sin", cos_sin, ("positions", "r"), FLOATS[2:], like=like, unit_last=False)
        r, last = cos_sin.shape[1], ((seen + kv.shape[-2]) // m - 1) * m
        if r == 0 or r % 2 or r > d:
            checks.fail("cos_sin", f"width {r}", f"an even width from 2 to {d}: cosines, then sines")
        if last >= cos_sin.shape[0] and last >= seen // m * m:
            checks.fail(
                "cos_sin", f"{cos_sin.shape[0]} positions", f"at least {last + 1}, to rotate the last row"
            )
    return d, m
