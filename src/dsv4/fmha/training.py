"""fmha and fmha_varlen with gradients: their training operators. backward.py says what a backend receives."""

from typing import Any

import torch
from torch import Tensor

from dsv4.fmha.backward import FmhaBackward
from dsv4.fmha.problem import FmhaProblem
from dsv4.runtime import gradients, operators

TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
OPTIONS = (
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, SymInt left, SymInt right, float? softmax_scale, bool deterministic, "
    "str backend"
)


def call(given: dict[str, Any], return_lse: bool, plain: bool) -> Any:
    """The public function, its arguments checked, when a gradient will be asked for."""
    out, lse = gradients.forward("fmha", plain, *(given.get(name) for name in ARGUMENTS))
    return (out, lse) if return_lse else out


ARGUMENTS = (
    "q", "k", "v", "sink", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "window_left",
    "window_right", "softmax_scale", "deterministic", "backend",
)  # fmt: skip


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The real kernel, and the fake one: what it calls has its own."""
    from dsv4.fmha.api import fmha, fmha_varlen

    q, k, v, sink, cu_q, cu_k, max_q, max_k, left, right, scale, deterministic, backend = arguments
    options = dict(window=(left, right), sink=sink, softmax_scale=scale, deterministic=deterministic, backend=backend)
    with torch.no_grad():
        if cu_q is None:
            return fmha(q, k, v, return_lse=True, **options)
        return fmha_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k, return_lse=True, **options)


def _problem(q, k, v, sink, cu_q, cu_k, out, lse, max_q, max_k, left, right, scale) -> FmhaProblem:
    kind: Any = "dense" if cu_q is None else "varlen"
    tokens = q.shape[1] if cu_q is None else max_q or q.shape[0]
    keys = k.shape[1] if cu_q is None else max_k or k.shape[0]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return FmhaProblem(
        kind, q, k, v, left, right, scale, tokens, keys, sink, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, out=out, lse=lse
    )


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.options = inputs[6:]


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    *tensors, out, lse = ctx.saved_tensors
    none = (None,) * 13
    if dout is None and dlse is None:
        return none
    asked = list(ctx.needs_input_grad[:4])
    *options, deterministic, backend = ctx.options
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    tensors = (dout, dlse, *tensors, out, lse)
    grads = gradients.backward("fmha", tensors, *options, deterministic, backend, asked)
    return *(gradients.or_none(x, want) for x, want in zip(grads, asked)), *none[4:]


def _backward(dout, dlse, q, k, v, sink, cu_q, cu_k, out, lse, *rest: Any) -> tuple[Tensor, ...]:
    *options, deterministic, backend, asked = rest
    p = _problem(q, k, v, sink, cu_q, cu_k, out, lse, *options)
    made = [gradients.gradient_like(x, want) for x, want in zip((q, k, v, sink), asked)]
    dout = torch.zeros_like(out) if dout is None else dout
    if dout.numel() == 0 or p.no_keys():
        for x in made:
            x.zero_()
    else:
        dq, dk, dv, dsink = (gradients.or_none(x, want) for x, want in zip(made, asked))
        request = FmhaBackward(p, dout, dlse, dq, dk, dv, dsink, deterministic)
        gradients.run(request, q.device, backend, "dsv4.fmha.backward_cpu")
    return tuple(made)


def _fake_backward(dout, dlse, q, k, v, sink, cu_q, cu_k, out, lse, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(gradients.gradient_like(x, want) for x, want in zip((q, k, v, sink), rest[-1]))


gradients.define(
    "fmha",
    f"{TENSORS}, {OPTIONS}",
    "(Tensor, Tensor)",
    (_forward, _forward),
    f"Tensor? dout, Tensor? dlse, {TENSORS}, Tensor out, Tensor lse, {OPTIONS}, bool[] asked",
    "(Tensor, Tensor, Tensor, Tensor)",
    (_backward, _fake_backward),
    _save,
    _gradients,
)
operators.TRAINING["fmha"] = operators.TRAINING["fmha_varlen"] = ("q", "k", "v", "sink"), call
