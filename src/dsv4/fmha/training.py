"""fmha and fmha_varlen with gradients: their training operators. backward.py defines what a backend receives."""

from typing import Any

from dsv4.fmha.api import FMHA, FMHA_VARLEN
from dsv4.fmha.backward import FMHA_BACKWARD
from dsv4.runtime import gradients
from dsv4.runtime.calls import Operation

TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"


def _forward(tensors: dict[str, Any]) -> Operation:
    return FMHA if tensors["cu_seqlens_q"] is None else FMHA_VARLEN


gradients.define_operation("fmha", FMHA_BACKWARD, TENSORS, _forward, (FMHA, FMHA_VARLEN))
