"""fmha and fmha_varlen with gradients: their training operators. backward.py says what a backend receives."""

from typing import Any

from dsv4.fmha.api import OPERATIONS
from dsv4.fmha.backward import FMHA_BACKWARD, OPTIONS, TENSORS
from dsv4.runtime import gradients
from dsv4.runtime.calls import Operation

SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k",
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, SymInt left, SymInt right, float? softmax_scale, bool deterministic",
)


def _forward(tensors: tuple, options: tuple) -> tuple[Operation, tuple, tuple]:
    """The operation of the forward pass, with its tensors and options."""
    q, k, v, sink, cu_q, cu_k = tensors
    *bounds, left, right, scale, deterministic = options
    common = (False, left, right, scale, deterministic)
    if cu_q is None:
        return OPERATIONS["fmha"], (q, k, v, sink), common
    return OPERATIONS["fmha_varlen"], (q, k, v, cu_q, cu_k, sink), (*common, *bounds)


def _inputs(given: dict[str, Any]) -> tuple:
    """The arguments of the training operator from those of fmha or fmha_varlen."""
    given = given | dict(left=given["window_left"], right=given["window_right"])
    return tuple(given.get(name) for name in (*TENSORS, *OPTIONS))


gradients.define_operation("fmha", FMHA_BACKWARD, SCHEMA, _forward, dict(fmha=_inputs, fmha_varlen=_inputs))
