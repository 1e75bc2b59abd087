"""Compressed rows of DeepSeek-V4: every m tokens become one row, all at once or step by step, with the same bits.

Per token j of a sequence the model projects its hidden state to kv_j and gate_j; position_bias[j % m] is added to the
gate. Row w pools the slots of its window with a softmax over the slots, separately for every channel:

    HCA   width d       row w = sum_j softmax_j(gate_j) * kv_j            over the m tokens of window w
    CSA   width 2d      the same over 2m slots: the first half (a) of the m tokens of window w - 1,
                        and the second half (b) of the m tokens of window w; row 0 has only its own m slots

then RMSNorm with weight, then RoPE at position m * w. The lightning indexer's keys are the CSA form at width 128.

Bits: a row depends only on its own slots, never on how the tokens were divided into calls. So every reduction here is
a fixed tree of elementwise operations; torch's own reductions may add in another order for another shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dsv4.caches import kv as caches
from dsv4.caches.pages import FLOATS, ROW_NUMBERS, PackedRows
from dsv4.compress import training
from dsv4.runtime import checks, dispatch
from dsv4.v4.problem import Pool

BLOCK_BYTES = 64 << 20  # tokens (fp32) taken at once; a long prompt is cut, which changes no bit


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


@dataclass(frozen=True, eq=False)
class CompressProblem:
    """One call for the kernels. Tokens are counted from the first one that the old state keeps."""

    operation: ClassVar[str] = "compress"

    kv: Tensor  # [B, L, width]
    gate: Tensor  # [B, L, width]
    position_bias: Tensor  # [m, width]
    norm_weight: Tensor  # [d]
    cos_sin: Tensor | None
    old_kv: Tensor | None  # fp32 [B, kept, width]
    old_gate: Tensor | None
    seen: int  # tokens before this call
    eps: float
    dtype: torch.dtype  # of a row, before it is stored
    new_kv: Tensor  # fp32 [B, what the state keeps, width], to be filled
    new_gate: Tensor
    rows: Tensor | None = None  # [B, windows, d], to be filled; or
    pool: Pool | None = None  # written to, ...
    slots: Tensor | None = None  # ... int32 or int64 [B, windows]: in these rows

    q = property(lambda self: self.kv)  # whose device counts
    d = property(lambda self: self.norm_weight.shape[0])
    m = property(lambda self: self.position_bias.shape[0])
    overlap = property(lambda self: self.kv.shape[-1] == 2 * self.d)
    kept = property(lambda self: 0 if self.old_kv is None else self.old_kv.shape[1])
    base = property(lambda self: self.seen - self.kept)
    first_window = property(lambda self: self.seen // self.m)
    windows = property(lambda self: windows_of(self.seen, self.kv.shape[1], self.m))
    drop = property(lambda self: self.kept + self.kv.shape[1] - self.new_kv.shape[1])


def windows_of(seen: int, tokens: int, m: int) -> int:
    """Rows that so many tokens finish."""
    return (seen + tokens) // m - seen // m


def state_size(seen: int, m: int, overlap: bool) -> int:
    """Tokens that the state keeps after so many: the unfinished window, and for CSA the finished one before it."""
    return seen % m + (m if overlap and seen >= m else 0)


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
    out: Pool | None = None,
    slots: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Any, CompressState]:
    """Pool the next L tokens of a sequence -> (the rows that they finish [..., n, d], the state after them).

    Call ``rows, state = compress(kv, gate, ...)``, then ``compress(..., state=state)`` for the tokens that follow: the
    rows of all calls together are bit for bit those of one call with all tokens. Token m * (w + 1) - 1 finishes row w
    and already sees it (see dsv4.index_topk).

    Args:
        kv, gate: [L, width] or [B, L, width], the projections of the tokens, without position_bias. width = d is HCA,
            width = 2d is CSA (a-half first). All B sequences are at the same position.
        position_bias: [m, width]; m is the compression ratio.
        norm_weight: [d], the weight of the RMSNorm.
        cos_sin: fp32 [positions, r], r/2 cosines then r/2 sines (dsv4.reference.rope_table); row w is rotated at m * w.
            None leaves RoPE to the caller.
        state: from the call before; None at the start of a sequence.
        dtype: of the rows; default that of kv. Arithmetic is fp32 (fp64 for fp64 kv).
        out, slots: a pool of rows (a tensor [rows, d] or [pages, page, d], a :class:`dsv4.Fp8Cache` for d = 512, or
            a :class:`dsv4.IndexCache` for d = 128) and the row numbers int32 or int64 [..., n] in it that get the rows;
            -1 drops a row. Rows are rounded to dtype first. The pool is returned instead of the rows.
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
    d, m = _check(kv, gate, position_bias, norm_weight, cos_sin, state, learning)
    if dtype is not None:
        checks.dtype("dtype", dtype, FLOATS)
    eps = checks.number("eps", eps, "a finite number >= 0")
    if eps < 0:
        checks.fail("eps", eps, "a finite number >= 0")
    checks.backend(backend)
    seen = 0 if state is None else state.tokens
    n = windows_of(seen, kv.shape[-2], m)
    _check_target(out, slots, kv, d, n)
    if learning:
        rows, new_kv, new_gate = training.call(
            kv, gate, position_bias, norm_weight, cos_sin, eps, dtype or kv.dtype, backend
        )
        return rows, CompressState(new_kv, new_gate, kv.shape[-2])
    found = "cpu" if kv.is_meta and backend == "auto" else dispatch.resolve(backend, kv.device, "kv")
    given = (position_bias, norm_weight, cos_sin, eps, dtype or kv.dtype)
    # What torch.compile traces stays torch code.
    if found != "cpu" and (backend != "auto" or not torch.compiler.is_compiling()):
        p = problem_of(kv, gate, state, given, out, slots)
        if backend != "auto" or _reason(p) is None:
            return _by_kernel(p, kv, found, out)
    rows, after = _in_torch(kv, gate, state, given)
    if out is None:
        return rows, after
    assert slots is not None
    caches.write_rows(out, slots.flatten(), rows.flatten(0, -2))
    return out, after


def problem_of(kv: Tensor, gate: Tensor, state: CompressState | None, given: tuple, out, slots) -> CompressProblem:
    position_bias, norm_weight, cos_sin, eps, dtype = given
    old_kv, old_gate, seen = (None, None, 0) if state is None else state

    def batched(x: Tensor | None) -> Tensor | None:
        return x if x is None or kv.ndim == 3 else x[None]

    kv3, gate3 = (kv, gate) if kv.ndim == 3 else (kv[None], gate[None])
    b, length, width = kv3.shape
    d, m = norm_weight.shape[0], position_bias.shape[0]
    size = state_size(seen + length, m, width == 2 * d)
    new_kv, new_gate = (torch.empty(b, size, width, dtype=torch.float32, device=kv.device) for _ in "kg")
    rows = None
    if out is None:
        rows = torch.empty(b, windows_of(seen, length, m), d, dtype=dtype, device=kv.device)
    old_kv, old_gate = (None if x is None or x.shape[-2] == 0 else batched(x) for x in (old_kv, old_gate))
    return CompressProblem(
        kv3, gate3, position_bias, norm_weight, cos_sin, old_kv, old_gate, seen, eps, dtype, new_kv, new_gate, rows,
        out, slots,
    )  # fmt: skip


def _reason(p: CompressProblem) -> str | None:
    """None, or why the kernels of the GPU that the tensors are on cannot run the problem."""
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


def _in_torch(kv: Tensor, gate: Tensor, state: CompressState | None, given: tuple) -> tuple[Tensor, CompressState]:
    position_bias, norm_weight, cos_sin, eps, dtype = given
    d, m = norm_weight.shape[0], position_bias.shape[0]
    length, block = kv.shape[-2], max(m, BLOCK_BYTES // max(4 * kv[..., :1, :].numel(), 1))
    if length > block:
        parts = []
        for begin in range(0, length, block):
            some = slice(begin, begin + block)
            part, state = _in_torch(kv[..., some, :], gate[..., some, :], state, given)
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
    drop = before + (windows - (1 if overlap else 0)) * m if windows else 0  # CSA keeps the last finished window
    after = CompressState(new_kv[..., drop:, :].clone(), new_gate[..., drop:, :].clone(), total)
    return rows.to(dtype), after


def pooled(
    value: Tensor, logit: Tensor, norm_weight: Tensor, eps: float, cos_sin: Tensor | None, positions: Tensor
) -> Tensor:
    """Slots [..., n, slots, d] and their gates -> rows [..., n, d], normed, and rotated at positions [n]."""
    d = value.shape[-1]
    weight = (logit - logit.amax(-2, keepdim=True)).exp()
    rows = _tree_sum((weight * value).mT)[..., 0] / _tree_sum(weight.mT)[..., 0]
    rows = rows * torch.rsqrt(_tree_sum(rows * rows) / d + eps) * norm_weight.to(rows.dtype)
    return rows if cos_sin is None else _rope(rows, cos_sin, positions)


def _slots(kv: Tensor, gate: Tensor, windows: int, before: int, m: int, d: int, overlap: bool) -> tuple[Tensor, Tensor]:
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


def _check(kv, gate, position_bias, norm_weight, cos_sin, state, learning=False) -> tuple[int, int]:
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
        checks.fail("kv", f"width {width} with norm_weight [{d}]", "width d (HCA) or 2 d (CSA), norm_weight [d]")
    checks.tensor("position_bias", position_bias, ("m", width), FLOATS, like=like, unit_last=False)
    m = position_bias.shape[0]
    if m == 0:
        checks.fail("position_bias", "shape [0, ...]", f"shape [m, {width}], m >= 1")
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


def _check_target(out: Any, slots: Any, kv: Tensor, d: int, n: int) -> None:
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
        checks.output("out", out, (*out.shape[:-1], d), out.dtype, {"kv": kv})
        checks.dtype("out", out.dtype, FLOATS)
    checks.tensor("slots", slots, (*kv.shape[:-2], n), ROW_NUMBERS, like=like, unit_last=False)
    if checks.values_checked(kv):
        checks.in_range("slots", slots, -1, caches.pool_size(out) - 1)
