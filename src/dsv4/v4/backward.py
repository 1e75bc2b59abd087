"""A validated request for the gradients of v4_attention: what every backend receives."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dsv4.v4.problem import V4Problem


@dataclass(frozen=True, eq=False)
class V4Backward:
    """forward has out and lse, as the forward pass left them; its rows are tensors where their gradient is wanted.

    dout is the gradient of out, dlse that of lse. dwindow and dcompressed have the shape of their pools; rows that
    nobody lists get gradient 0. None = not wanted.
    """

    operation: ClassVar[str] = "v4"

    forward: V4Problem
    dout: Tensor  # [N, H, D]
    dlse: Tensor | None = None  # [N, H]
    dq: Tensor | None = None
    dwindow: Tensor | None = None
    dcompressed: Tensor | None = None
    dsink: Tensor | None = None  # fp32 [H]
    deterministic: bool = False
