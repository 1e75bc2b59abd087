"""The gradients of v4_attention as an operation: its validated request is the input of every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dsv4.caches import kv as caches
from dsv4.runtime import calls
from dsv4.runtime.calls import Operation
from dsv4.v4.options import V4Options
from dsv4.v4.problem import V4Problem


@dataclass(frozen=True, eq=False)
class V4Backward:
    """forward has out and lse, as the forward pass left them; its rows are tensors where their gradient is wanted.

    dout is the gradient of out, dlse that of lse. dwindow and dcompressed have the shape of their pools; rows that
    no query lists get gradient 0. None = not wanted.
    """

    operation: ClassVar[str] = "v4"
    backward: ClassVar[bool] = True
    empty_outputs: ClassVar[dict[str, float]] = {"dq": 0.0, "dwindow": 0.0, "dcompressed": 0.0, "dsink": 0.0}

    forward: V4Problem
    dout: Tensor  # [N, H, D]
    dlse: Tensor | None = None  # [N, H]
    dq: Tensor | None = None
    dwindow: Tensor | None = None
    dcompressed: Tensor | None = None
    dsink: Tensor | None = None  # fp32 [H]

    q = property(lambda self: self.forward.q)
    deterministic = property(lambda self: self.forward.deterministic)

    def no_keys(self) -> bool:
        """Return whether every gradient is 0 by the shapes alone."""
        return self.forward.no_keys()


TENSORS = (
    "q", "window", "compressed", "sink", "window_indices", "compressed_indices", "window_lengths",
    "compressed_lengths", "compressed_block_table", "request_starts", "cos_sin", "positions",
)  # fmt: skip
DIFFERENTIABLE = TENSORS[:4]


def _build(*, q, window, compressed, compressed_block_table, dout, dlse, **others) -> V4Backward:
    """Build the request; the forward pass has checked its arguments."""
    options = V4Options(**{name: others.pop(name) for name in V4Options._fields})
    forward = V4Problem(
        q=q,
        window=caches.from_parts(window, *options.window_pages),
        compressed=caches.from_parts(compressed, *options.compressed_pages),
        block_table=compressed_block_table,
        options=options.resolved(q.shape[-1]),
        **others,
    )
    return V4Backward(forward, dout, dlse)


V4_BACKWARD = Operation(
    "v4_attention_backward",
    "v4",
    (*TENSORS, "out", "lse", "dout", "dlse"),
    2,
    V4Options,
    ("dq", "dwindow", "dcompressed", "dsink"),
    calls.like(DIFFERENTIABLE),
    _build,
    falls_back=True,
    backward=True,
)
