"""The gradients of fmha as an operation: its validated request is what every backend receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dsv4.fmha.options import FmhaOptions
from dsv4.fmha.problem import FmhaProblem, bound
from dsv4.runtime import calls
from dsv4.runtime.calls import Operation


@dataclass(frozen=True, eq=False)
class FmhaBackward:
    """forward has out and lse, as the forward pass left them. dq, dk, dv and dsink are to be filled; None = not wanted.

    dout is the gradient of out, dlse that of lse (None: it was not used). Kind dense or varlen; rows of no sequence get
    gradient 0, and so do keys that no query sees.
    """

    operation: ClassVar[str] = "fmha"
    backward: ClassVar[bool] = True
    empty_outputs: ClassVar[dict[str, float]] = {"dq": 0.0, "dk": 0.0, "dv": 0.0, "dsink": 0.0}

    forward: FmhaProblem
    dout: Tensor  # the same shape as out
    dlse: Tensor | None = None  # the same shape as lse
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsink: Tensor | None = None  # fp32 [Hq]

    q = property(lambda self: self.forward.q)
    deterministic = property(lambda self: self.forward.deterministic)

    def no_keys(self) -> bool:
        """Whether the shapes alone make every gradient 0."""
        return self.forward.no_keys()


TENSORS = ("q", "k", "v", "sink", "cu_seqlens_q", "cu_seqlens_k")
DIFFERENTIABLE = TENSORS[:4]


def _build(q, k, v, sink, cu_seqlens_q, cu_seqlens_k, out, lse, dout, dlse, **fields) -> FmhaBackward:
    """Build the request from arguments that the forward pass has checked."""
    dense, options = cu_seqlens_q is None, FmhaOptions(**fields).resolved(q.shape[-1])
    forward = FmhaProblem(
        "dense" if dense else "varlen",
        q,
        k,
        v,
        options,
        q.shape[1] if dense else bound("max_seqlen_q", options.max_seqlen_q, q.shape[0]),
        k.shape[1] if dense else bound("max_seqlen_k", options.max_seqlen_k, k.shape[0]),
        sink,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        out=out,
        lse=lse,
    )
    return FmhaBackward(forward, dout, dlse)


FMHA_BACKWARD = Operation(
    "fmha_backward",
    "fmha",
    (*TENSORS, "out", "lse", "dout", "dlse"),
    3,
    FmhaOptions,
    ("dq", "dk", "dv", "dsink"),
    calls.like(DIFFERENTIABLE),
    _build,
    falls_back=True,
    backward=True,
)


def given(b: FmhaBackward) -> tuple[tuple, FmhaOptions, tuple]:
    """Return (tensors, options, outputs to be filled) of a request, in the order of the operation."""
    p = b.forward
    tensors = (p.q, p.k, p.v, p.sink, p.cu_seqlens_q, p.cu_seqlens_k, p.out, p.lse, b.dout, b.dlse)
    return tensors, p.options, (b.dq, b.dk, b.dv, b.dsink)
