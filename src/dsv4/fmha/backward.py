"""A validated request for the gradients of fmha: what every backend receives."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dsv4.fmha.problem import FmhaProblem


@dataclass(frozen=True, eq=False)
class FmhaBackward:
    """forward has out and lse, as the forward pass left them. dq, dk, dv and dsink are to be filled; None = not wanted.

    dout is the gradient of out, dlse that of lse (None: nobody used it). Kind dense or varlen; rows of no sequence get
    gradient 0, and so do keys that nobody sees.
    """

    operation: ClassVar[str] = "fmha"

    forward: FmhaProblem
    dout: Tensor  # as out
    dlse: Tensor | None = None  # as lse
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsink: Tensor | None = None  # fp32 [Hq]
    deterministic: bool = False
