"""Fused multi-head attention: dense, varlen and paged. reference/forward.py is the maths; the rules are stated here."""

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from dsv4.fmha import head_dims, problem
from dsv4.fmha import plan as plans
from dsv4.fmha.options import DOCS, FmhaKeywords, FmhaOptions, VarlenKeywords
from dsv4.runtime import checks, operators
from dsv4.runtime.calls import Operation, Shapes
from dsv4.runtime.options import reject_unknown, set_signature

Both = tuple[Tensor, Tensor]  # out, lse
Result = Tensor | Both

RULES = (
    """

    Per sequence with T queries and S keys, query head h reading KV head ``h // (Hq / Hkv)``::

        s_ij = softmax_scale * (q_i . k_j)                 softmax_scale defaults to D ** -0.5
        seen = i + S - T - left <= j <= i + S - T + right  window = (left, right), -1 = no bound; causal: right = 0
        out_i = sum_seen e^(s_ij) v_j / (sum_seen e^(s_ij) + e^sink_h)
        lse_i = log(sum_seen e^(s_ij))                     natural log, without the sink

    Rules:
        Hq is a multiple of Hkv; q, k, v share dtype and device. bfloat16 and float16 everywhere, float32 on the cpu
        backend. k and v may both be float8_e4m3fn (an FP8 cache), with k_scale and v_scale; nothing has a gradient
        then. The last dimension has stride 1; all other strides are arbitrary.
        The kernels have head dims 64, 128, 256 and 512. fmha and fmha_varlen accept every head dim D from 1 to 512, and
        values of another head dim Dv, which out then has: q, k, v are copied with columns of zeros up to the next of
        the four. fmha_paged does not copy its cache and accepts the four.
        sink: fp32 [Hq], the logit of a key whose value is 0; -inf = none, +inf = out 0.
        For a query that sees no key, out is 0 and lse is -inf, with or without a sink.
        Rows of k and v that no query of the sequence sees may contain NaN or inf; rows that are seen must be finite.
        Scores may have any size, except at head dim 64 on Hopper: from 2^30 in base 2 on (2^27 in float16) rows may
        be NaN there. The kernels' gradients of a row are NaN if its lse exceeds 1.8e8 in size.
        fmha and fmha_varlen have gradients with respect to q, k, v, sink and lse (first order, reverse mode). With
        out=, plan= or paged keys there are none: an input that requires grad raises an error under grad mode.

    Args:"""
    + DOCS.rstrip()
    + """

    Raises:
        ValueError: names the argument, the value it got and what is accepted. Checks of tensor values always run
            on a CPU, and on a GPU with DSV4_CHECK=1 in the environment; without them lengths are clamped, and a page
            that does not exist is not read.
"""
)


# The keyword arguments are those of FmhaKeywords. The return type depends on return_lse alone.


@overload
def fmha(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **_: Unpack[FmhaKeywords]) -> Tensor: ...
@overload
def fmha(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **_: Unpack[FmhaKeywords]) -> Both: ...
@overload
def fmha(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **_: Unpack[FmhaKeywords]) -> Result: ...
def fmha(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Result:
    """Compute attention of q [B, T, Hq, D] to k [B, S, Hkv, D], v [B, S, Hkv, Dv] -> [B, T, Hq, Dv], lse [B, Hq, T]."""
    return _call(FMHA, (q, k, v), (None, None), **keywords)


@overload
def fmha_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **_: Unpack[VarlenKeywords],
) -> Tensor: ...
@overload
def fmha_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[True],
    **_: Unpack[VarlenKeywords],
) -> Both: ...
@overload
def fmha_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: bool,
    **_: Unpack[VarlenKeywords],
) -> Result: ...
def fmha_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **keywords: Any,
) -> Result:
    """Compute attention within sequences packed end to end: q [total_q, Hq, D], k [total_k, Hkv, D], v [.., Hkv, Dv].

    cu_seqlens_q, cu_seqlens_k: int32 [B + 1], starting at 0, non-decreasing; sequence n has rows cu[n] .. cu[n+1] - 1.
    Rows of q past the last sequence give out 0, lse -inf. max_seqlen_q, max_seqlen_k: upper bounds on the sequence
    lengths; without them a GPU launch is sized for the worst case. No sequence may be longer.
    -> out [total_q, Hq, Dv], lse [total_q, Hq].
    """
    return _call(FMHA_VARLEN, (q, k, v, cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), **keywords)


@overload
def fmha_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **_: Unpack[FmhaKeywords],
) -> Tensor: ...
@overload
def fmha_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    return_lse: Literal[True],
    **_: Unpack[FmhaKeywords],
) -> Both: ...
@overload
def fmha_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    return_lse: bool,
    **_: Unpack[FmhaKeywords],
) -> Result: ...
def fmha_paged(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor, **keywords: Any
) -> Result:
    """Compute attention of q [B, T, Hq, D] to keys in pages [P, page, Hkv, D] of any size and stride.

    block_table: int32 [B, max_pages]; key j of sequence n is row ``j % page`` of page ``block_table[n, j // page]``.
    lengths: int32 [B], the number of keys S of each sequence. Table entries past the length are not read.
    -> out [B, T, Hq, D], lse [B, Hq, T].
    """
    return _call(FMHA_PAGED, (q, k_pages, v_pages, block_table, lengths), (None, None), **keywords)


def _call(
    op: Operation,
    tensors: tuple,
    bounds: tuple,
    /,
    *,
    sink=None,
    k_scale=None,
    v_scale=None,
    return_lse=False,
    out=None,
    plan=None,
    backend="auto",
    **options: Any,
) -> Result:
    try:
        checked = FmhaOptions.checked(*bounds, **options)
    except TypeError:
        reject_unknown(op.name, options, FmhaKeywords)
        raise
    if return_lse is not False:
        checks.flag("return_lse", return_lse)
    backend = checks.backend(backend)
    tensors = (*tensors, sink, k_scale, v_scale)
    if problem.in_e4m3(tensors[1]):
        checks.forward_only(**dict(zip(op.tensors, tensors)))
    if op is not FMHA_PAGED and head_dims.needs_padding(tensors[0], tensors[2], 4 if op is FMHA else 3):
        if plan is not None or not head_dims.kernels_take(tensors, backend):
            return _padded(op, tensors, checked, return_lse, out, plan, backend)
    return operators.call(op, tensors, checked, return_lse, out, plan, backend)


def _padded(op: Operation, tensors: tuple, options: FmhaOptions, return_lse: bool, out, plan, backend: str) -> Result:
    q, k, v = tensors[:3]
    wide, options = head_dims.padded(tensors, options)
    into = None
    if out is not None:
        accepted = (q.dtype, torch.float32)  # fp32: partial results
        checks.tensor("out", out, (*q.shape[:-1], v.shape[-1]), accepted, like=("q", q), unit_last=False)
        checks.writable("out", out)
        checks.apart("out", out, dict(q=q, k=k, v=v))
        checks.forward_only(**dict(zip(op.tensors, tensors)), out=out)
        if out.dtype != q.dtype:
            into = torch.empty(wide[0].shape, dtype=torch.float32, device=q.device)
    made, lse = operators.call(op, wide, options, True, into, plan, backend)
    made = made[..., : v.shape[-1]]
    made = made.contiguous() if out is None else out.copy_(made)
    return (made, lse) if return_lse else made


for _function, _keywords in ((fmha, FmhaKeywords), (fmha_varlen, VarlenKeywords), (fmha_paged, FmhaKeywords)):
    set_signature(_function, _keywords, _call, FmhaOptions.checked)
    if _function.__doc__:  # absent under python -OO
        _function.__doc__ = _function.__doc__.rstrip() + RULES


KV, PAGES = ("k", "v"), ("k_pages", "v_pages")
SEQUENCES = ("same_sequences", "cu_seqlens_q", "cu_seqlens_k")
BOUNDS = ("max_seqlen_q", "max_seqlen_k")
OPTIONAL = ("sink", "k_scale", "v_scale")


def _from_operator(build: Callable[..., problem.FmhaProblem]) -> Callable[..., problem.FmhaProblem]:
    """Return its arguments by name: tensors and fields of the options."""

    def built(**arguments: Any) -> problem.FmhaProblem:
        fields = {name: arguments.pop(name) for name in FmhaOptions._fields if name in arguments}
        return build(options=FmhaOptions(**fields), **arguments)

    return built


def _outputs(arguments: dict[str, Any]) -> Shapes:
    q = arguments["q"]
    width = arguments["v" if "v" in arguments else "v_pages"].shape[-1]
    return ((*q.shape[:-1], width), q.dtype), (problem.lse_shape(q.shape), torch.float32)


FMHA = Operation(
    "fmha",
    "fmha",
    ("q", *KV, *OPTIONAL),
    3,
    FmhaOptions,
    ("out", "lse"),
    _outputs,
    _from_operator(problem.dense),
    problem.check_values,
    (4,),
    (("same_kv", *KV),),
    plans.reserved,
    plans.warmup_calls,
    without=BOUNDS,
)
FMHA_VARLEN = Operation(
    "fmha_varlen",
    "fmha",
    ("q", *KV, "cu_seqlens_q", "cu_seqlens_k", *OPTIONAL),
    5,
    FmhaOptions,
    ("out", "lse"),
    _outputs,
    _from_operator(problem.varlen),
    problem.check_values,
    (3,),
    (("same_kv", *KV), SEQUENCES),
    plans.reserved_varlen,
    plans.warmup_calls,
    positional=BOUNDS,
)
FMHA_PAGED = Operation(
    "fmha_paged",
    "fmha",
    ("q", *PAGES, "block_table", "lengths", *OPTIONAL),
    5,
    FmhaOptions,
    ("out", "lse"),
    _outputs,
    _from_operator(problem.paged),
    problem.check_values,
    (4,),
    (("same_kv", *PAGES),),
    plans.reserved,
    plans.warmup_calls,
    without=BOUNDS,
)
for _operation in (FMHA, FMHA_VARLEN, FMHA_PAGED):
    operators.define_operation(_operation)
