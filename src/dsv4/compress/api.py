"""Compressed rows of DeepSeek-V4 and V4.1: every m tokens become one row, all at once or step by step, with the same
bits.

Per token j of a sequence the model projects its hidden state to kv_j and gate_j; position_bias[j % m] is added to the
gate. Row w pools the slots of its window with a softmax over the slots, separately for every channel:

    HCA   width d       row w = sum_j softmax_j(gate_j) * kv_j            over the m tokens of window w
    CSA   width 2d      the same over 2m slots: the first half (a) of the m tokens of window w - 1,
                        and the second half (b) of the m tokens of window w; row 0 has only its own m slots

then RMSNorm with weight, then RoPE at position m * w. The lightning indexer's keys are the CSA form at width 128.
DeepSeek-V4.1 has the HCA form with m = 2, and with m = 1, both without position_bias; a row of one token needs no gate.
"""

from __future__ import annotations

from typing import Any, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor

from dsv4.caches import kv as caches
from dsv4.caches.kv import Pool
from dsv4.caches.pages import FLOATS, ROW_NUMBERS, PackedRows
from dsv4.compress import forward, training
from dsv4.compress.problem import CompressState, Parameters, state_size, windows_of
from dsv4.runtime import checks
from dsv4.runtime.checks import Backend

Target = TypeVar("Target", bound=Pool)


class Keywords(TypedDict, total=False):
    """What type checkers see: the return type depends on out alone."""

    ratio: int | None
    cos_sin: Tensor | None
    state: CompressState | None
    eps: float
    dtype: torch.dtype | None
    slots: Tensor | None
    backend: Backend


@overload
def compress(
    kv: Tensor,
    gate: Tensor | None,
    position_bias: Tensor | None,
    norm_weight: Tensor,
    *,
    out: None = ...,
    **_: Unpack[Keywords],
) -> tuple[Tensor, CompressState]: ...
@overload
def compress(
    kv: Tensor,
    gate: Tensor | None,
    position_bias: Tensor | None,
    norm_weight: Tensor,
    *,
    out: Target,
    **_: Unpack[Keywords],
) -> tuple[Target, CompressState]: ...
def compress(
    kv: Tensor,
    gate: Tensor | None,
    position_bias: Tensor | None,
    norm_weight: Tensor,
    *,
    ratio: int | None = None,
    cos_sin: Tensor | None = None,
    state: CompressState | None = None,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
    out: Pool | None = None,
    slots: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Any, CompressState]:
    """Pool the next L tokens of a sequence -> (the rows that they finish [..., n, d], the state after them).

    Call ``rows, state = compress(kv, gate, ...)``, then ``compress(..., state=state)`` for the tokens that follow: the
    rows of all calls together are bit for bit those of one call with all tokens. Token m * (w + 1) - 1 finishes row w
    and already sees it (see dsv4.index_topk).

    Args:
        kv, gate: [L, width] or [B, L, width], the projections of the tokens, without position_bias. width = d is HCA,
            width = 2d is CSA (a-half first). All B sequences are at the same position. gate may be None for HCA with a
            ratio of 1, whose softmax has one slot.
        position_bias: [m, width]; m is the compression ratio. May be None; then pass the ratio.
        ratio: m, needed only without position_bias.
        norm_weight: [d], the weight of the RMSNorm.
        cos_sin: fp32 [positions, r], r/2 cosines then r/2 sines (dsv4.reference.rope_table); row w is rotated at m * w.
            None leaves RoPE to the caller.
        state: from the previous call; None at the start of a sequence.
        dtype: of the rows; default that of kv. Arithmetic is fp32 (fp64 for fp64 kv).
        out, slots: a pool of rows (a tensor [rows, d] or [pages, page, d], a :class:`dsv4.Fp8Cache` for d = 512, or
            a :class:`dsv4.IndexCache` for d = 128) and the row numbers int32 or int64 [..., n] in it that get the rows;
            -1 drops a row. Rows are rounded to dtype first. The pool is returned instead of the rows. It overlaps
            neither kv nor gate.
        backend: "auto" (a kernel if it can run the problem, else torch), "cuda" and "softsm" (the kernel), "cpu".

    Gradients exist with respect to kv, gate, position_bias and norm_weight, for a whole sequence at once: with state=
    or out= an input that requires grad raises an error under grad mode, and the returned state is detached.
    """
    learning = (
        torch.is_grad_enabled()
        and state is None
        and out is None
        and any(isinstance(x, Tensor) and x.requires_grad for x in (kv, gate, position_bias, norm_weight))
    )
    d, m = _check(kv, gate, position_bias, norm_weight, ratio, cos_sin, state, learning)
    if dtype is not None:
        checks.dtype("dtype", dtype, FLOATS)
    eps = checks.number("eps", eps, "a finite number >= 0")
    if eps < 0:
        checks.fail("eps", eps, "a finite number >= 0")
    checks.backend(backend)
    seen = 0 if state is None else state.tokens
    n = windows_of(seen, kv.shape[-2], m)
    _check_target(out, slots, kv, gate, d, n)
    given = Parameters(position_bias, norm_weight, cos_sin, eps, dtype or kv.dtype, m)
    if learning:
        rows, new_kv, new_gate = training.call(kv, gate, given, backend)
        return rows, CompressState(new_kv, new_gate, kv.shape[-2])
    return forward.run(kv, gate, state, given, out, slots, backend)


def _check(kv, gate, position_bias, norm_weight, ratio, cos_sin, state, learning) -> tuple[int, int]:
    """Check everything except values -> (d, m)."""
    if not checks.is_tensor(kv) or kv.ndim not in (2, 3):
        checks.fail("kv", checks.describe(kv), "a tensor [L, width] or [B, L, width]")
    batch, width = tuple(kv.shape[:-2]), kv.shape[-1]
    like = ("kv", kv)
    checks.tensor("kv", kv, tuple(kv.shape), FLOATS, unit_last=False)
    if gate is not None:
        checks.tensor("gate", gate, tuple(kv.shape), FLOATS, like=like, unit_last=False)
    checks.tensor("norm_weight", norm_weight, ("d",), FLOATS, like=like, unit_last=False)
    d = norm_weight.shape[0]
    if d == 0 or width not in (d, 2 * d):
        checks.fail("kv", f"width {width} with norm_weight [{d}]", "width d (HCA) or 2 d (CSA), norm_weight [d]")
    if position_bias is not None:
        checks.tensor("position_bias", position_bias, ("m", width), FLOATS, like=like, unit_last=False)
        m = position_bias.shape[0]
        if m == 0:
            checks.fail("position_bias", "shape [0, ...]", f"shape [m, {width}], m >= 1")
        if ratio is not None and checks.whole(ratio) != m:
            checks.fail("ratio", ratio, f"None, or {m} with this position_bias")
    elif ratio is None:
        checks.fail("ratio", None, "an int >= 1 without position_bias")
    else:
        m = checks.at_least(1, "ratio", ratio)
    if gate is None and (m != 1 or width != d or position_bias is not None):
        checks.fail("gate", None, "a tensor, unless a row is one token: width d, ratio 1, no position_bias")
    given = dict(kv=kv, gate=gate, position_bias=position_bias, norm_weight=norm_weight)
    (checks.no_tangents if learning else checks.forward_only)(**given)
    checks.forward_only(cos_sin=cos_sin)
    seen = 0
    if state is not None:
        if not isinstance(state, CompressState):
            checks.fail("state", checks.describe(state), "None or the state that compress returned")
        seen = checks.at_least(0, "state.tokens", state.tokens)
        tokens = state_size(seen, m, width == 2 * d)
        compute = torch.float64 if kv.dtype == torch.float64 else torch.float32
        for name, x in (("kv", state.kv), ("gate", state.gate)):
            checks.tensor(f"state.{name}", x, (*batch, tokens, width), (compute,), like=like, unit_last=False)
        checks.forward_only(**{"state.kv": state.kv, "state.gate": state.gate})
    if cos_sin is not None:
        checks.tensor("cos_sin", cos_sin, ("positions", "r"), FLOATS[2:], like=like, unit_last=False)
        r, last = cos_sin.shape[1], ((seen + kv.shape[-2]) // m - 1) * m
        if r == 0 or r % 2 or r > d:
            checks.fail("cos_sin", f"width {r}", f"an even width from 2 to {d}: cosines, then sines")
        if last >= cos_sin.shape[0] and last >= seen // m * m:
            checks.fail("cos_sin", f"{cos_sin.shape[0]} positions", f"at least {last + 1}, to rotate the last row")
    return d, m


def _check_target(out: Any, slots: Any, kv: Tensor, gate: Tensor | None, d: int, n: int) -> None:
    if (out is None) != (slots is None):
        checks.fail("out, slots", "one of them", "both or neither")
    if out is None:
        return
    like = ("kv", kv)
    if isinstance(out, PackedRows):
        kind, width = f"an {type(out).__name__}", out.format.values
        if d != width:
            checks.fail("out", f"{kind} for rows of {d}", f"{kind} for rows of {width}")
        if out.device != kv.device:
            checks.fail("out", f"{kind} on {out.device}", f"the device of kv, {kv.device}")
    else:
        if not checks.is_tensor(out) or out.ndim not in (2, 3):
            accepted = "None, a tensor [rows, d] or [pages, page, d], an Fp8Cache or an IndexCache"
            checks.fail("out", checks.describe(out), accepted)
        checks.output("out", out, (*out.shape[:-1], d), (out.dtype,), {"kv": kv})
        checks.forward_only(out=out)
        checks.dtype("out", out.dtype, FLOATS)
    checks.apart("out", out.storage if isinstance(out, PackedRows) else out, {"kv": kv, "gate": gate})
    checks.tensor("slots", slots, (*kv.shape[:-2], n), ROW_NUMBERS, like=like, unit_last=False)
    if checks.values_checked(kv):
        checks.in_range("slots", slots, -1, caches.pool_size(out) - 1)
