"""Fused multi-head attention: dense, varlen and paged. The maths is in reference.py; the rules are stated here."""

from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from dsv4.fmha import plan as plans
from dsv4.fmha import problem
from dsv4.runtime import checks, operators
from dsv4.runtime.calls import Operation, Shapes
from dsv4.runtime.plan import Plan

Both = tuple[Tensor, Tensor]  # out, lse
Result = Tensor | Both

RULES = """

    Per sequence with T queries and S keys, query head h reading KV head ``h // (Hq / Hkv)``::

        s_ij = softmax_scale * (q_i . k_j)                 softmax_scale defaults to D ** -0.5
        seen = i + S - T - left <= j <= i + S - T + right  window = (left, right), -1 = no bound; causal: right = 0
        out_i = sum_seen e^(s_ij) v_j / (sum_seen e^(s_ij) + e^sink_h)
        lse_i = log(sum_seen e^(s_ij))                     natural log, without the sink

    Rules:
        Head dim D is 64, 128, 256 or 512; Hq is a multiple of Hkv; q, k, v share dtype and device. bfloat16 and
        float16 everywhere, float32 on the cpu backend. The last dimension has stride 1; all other strides
        are arbitrary.
        sink: fp32 [Hq], the logit of a key whose value is 0; -inf = none, +inf = out 0.
        For a query that sees no key, out is 0 and lse is -inf, with or without a sink.
        Rows of k and v that no query of the sequence sees may contain NaN or inf; rows that are seen must be finite.
        fmha and fmha_varlen have gradients with respect to q, k, v, sink and lse (first order, reverse mode). With
        out=, plan= or paged keys there are none: an input that requires grad raises an error under grad mode.

    Args:
        causal, window: see above; both count from the bottom right corner.
        return_lse: return ``(out, lse)``, lse in fp32.
        out: tensor to write to and return; its last stride is 1, and it overlaps no input. Its dtype is q's,
            or fp32 for partial results that are merged (dsv4.merge_states) and rounded once.
        plan: a :class:`dsv4.Plan` from :func:`dsv4.plan`, with preallocated buffers (CUDA graphs). With a plan and
            out= nothing is allocated if strides are multiples of 16 bytes; other tensors are copied.
        deterministic: a sequence gives the same bits in every run and every batch, and on a CPU with any number of
            threads (it uses one).
        backend: "auto" (by the device of q), "cuda", "softsm" (the GPU kernels, emulated), "cpu".

    Raises:
        ValueError: names the argument, the value it got and what is accepted. Checks of tensor values always run
            on a CPU, and on a GPU with DSV4_CHECK=1 in the environment; without them lengths are clamped, and a page
            that does not exist is not read.
"""


class Options(TypedDict, total=False):
    """What the three functions share, for type checkers: the return type depends on return_lse alone."""

    causal: bool
    window: tuple[int, int]
    sink: Tensor | None
    softmax_scale: float | None
    out: Tensor | None
    plan: Plan | None
    deterministic: bool
    backend: str


class VarlenOptions(Options, total=False):
    max_seqlen_q: int | None
    max_seqlen_k: int | None


@overload
def fmha(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **_: Unpack[Options]) -> Tensor: ...
@overload
def fmha(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **_: Unpack[Options]) -> Both: ...
@overload
def fmha(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **_: Unpack[Options]) -> Result: ...
def fmha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    plan: Plan | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Result:
    """Attention of q [B, T, Hq, D] to k, v [B, S, Hkv, D] -> out [B, T, Hq, D], lse [B, Hq, T]."""
    return _call(
        "fmha", (q, k, v, sink), (), causal, window, softmax_scale, return_lse, out, plan, deterministic, backend
    )


@overload
def fmha_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    *, return_lse: Literal[False] = ..., **_: Unpack[VarlenOptions],
) -> Tensor: ...  # fmt: skip
@overload
def fmha_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    *, return_lse: Literal[True], **_: Unpack[VarlenOptions],
) -> Both: ...  # fmt: skip
@overload
def fmha_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    *, return_lse: bool, **_: Unpack[VarlenOptions],
) -> Result: ...  # fmt: skip
def fmha_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    plan: Plan | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Result:
    """Attention within sequences packed end to end: q [total_q, Hq, D], k, v [total_k, Hkv, D].

    cu_seqlens_q, cu_seqlens_k: int32 [B + 1], starting at 0, non-decreasing; sequence n has rows cu[n] .. cu[n+1] - 1.
    Rows of q past the last sequence give out 0, lse -inf. max_seqlen_q, max_seqlen_k: upper bounds on the sequence
    lengths; without them a GPU launch is sized for the worst case. No sequence may be longer.
    -> out [total_q, Hq, D], lse [total_q, Hq].
    """
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, sink)
    bounds = (checks.bound("max_seqlen_q", max_seqlen_q), checks.bound("max_seqlen_k", max_seqlen_k))
    return _call(
        "fmha_varlen", tensors, bounds, causal, window, softmax_scale, return_lse, out, plan, deterministic, backend
    )


@overload
def fmha_paged(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor,
    *, return_lse: Literal[False] = ..., **_: Unpack[Options],
) -> Tensor: ...  # fmt: skip
@overload
def fmha_paged(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor,
    *, return_lse: Literal[True], **_: Unpack[Options],
) -> Both: ...  # fmt: skip
@overload
def fmha_paged(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor,
    *, return_lse: bool, **_: Unpack[Options],
) -> Result: ...  # fmt: skip
def fmha_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    plan: Plan | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Result:
    """Attention of q [B, T, Hq, D] to keys in pages [P, page, Hkv, D] of any size and stride.

    block_table: int32 [B, max_pages]; key j of sequence n is row ``j % page`` of page ``block_table[n, j // page]``.
    lengths: int32 [B], the number of keys S of each sequence. Table entries past the length are not read.
    -> out [B, T, Hq, D], lse [B, Hq, T].
    """
    tensors = (q, k_pages, v_pages, block_table, lengths, sink)
    return _call(
        "fmha_paged", tensors, (), causal, window, softmax_scale, return_lse, out, plan, deterministic, backend
    )


for _function in (fmha, fmha_varlen, fmha_paged):
    if _function.__doc__:  # absent under python -OO
        _function.__doc__ = _function.__doc__.rstrip() + RULES


def _call(
    name: str, tensors: tuple, bounds: tuple, causal, window, softmax_scale, return_lse, out, plan, deterministic,
    backend,
) -> Result:  # fmt: skip
    """Here numbers and flags get their types, which the key of a call cannot tell apart; their values are checked, like
    the tensors, where the problem is built."""
    left, right = checks.two_ints(window)
    if checks.flag("causal", causal) and left >= -1 and right >= -1:  # else it is refused as it was given
        right = 0
    scale, deterministic = checks.scale(softmax_scale), checks.flag("deterministic", deterministic)
    options = (False, left, right, scale, deterministic, *bounds)  # causal is folded into the window
    checks.flag("return_lse", return_lse)
    return operators.call(OPERATIONS[name], tensors, options, return_lse, out, plan, checks.backend(backend))


OPTIONS = (
    "*, bool causal=False, SymInt window_left=-1, SymInt window_right=-1, Tensor? sink=None, "
    "float? softmax_scale=None, bool deterministic=False"
)
KV, PAGES = ("k", "v"), ("k_pages", "v_pages")
NUMBERS = ("causal", "window_left", "window_right", "softmax_scale", "deterministic")
BOUNDS = ("max_seqlen_q", "max_seqlen_k")


def _from_operator(build: Callable[..., problem.FmhaProblem]) -> Callable[..., problem.FmhaProblem]:
    """An operator takes no tuple: the window travels as two numbers."""

    def built(*, window_left: int, window_right: int, **arguments: Any) -> problem.FmhaProblem:
        return build(window=(window_left, window_right), **arguments)

    return built


def _outputs(arguments: dict[str, Any]) -> Shapes:
    q = arguments["q"]
    return (q.shape, q.dtype), (problem.lse_shape(q.shape), torch.float32)


OPERATIONS = {
    op.name: op
    for op in (
        Operation(
            "fmha", "fmha", ("q", *KV, "sink"), 3, NUMBERS, ("out", "lse"), _outputs, _from_operator(problem.dense),
            problem.check_values, (4,), ("same_kv", *KV), plans.reserved, plans.warmup_calls,
        ),
        Operation(
            "fmha_varlen", "fmha", ("q", *KV, "cu_seqlens_q", "cu_seqlens_k", "sink"), 5, (*NUMBERS, *BOUNDS),
            ("out", "lse"), _outputs, _from_operator(problem.varlen), problem.check_values, (3,), ("same_kv", *KV),
            plans.reserved_varlen, plans.warmup_calls,
        ),
        Operation(
            "fmha_paged", "fmha", ("q", *PAGES, "block_table", "lengths", "sink"), 5, NUMBERS, ("out", "lse"), _outputs,
            _from_operator(problem.paged), problem.check_values, (4,), ("same_kv", *PAGES),
            plans.reserved, plans.warmup_calls,
        ),
    )
}  # fmt: skip
TENSORS = {
    "fmha": "Tensor q, Tensor k, Tensor v",
    "fmha_varlen": "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None",
    "fmha_paged": "Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor lengths",
}
for _name, _tensors in TENSORS.items():
    operators.define_operation(OPERATIONS[_name], f"{_tensors}, {OPTIONS}")
