"""v4_attention with gradients: its training operators. backward.py says what a backend receives.

Packed rows have no gradient; q and sink have theirs beside them.
"""

from typing import Any

from dsv4.runtime import gradients
from dsv4.runtime.calls import Operation
from dsv4.v4.api import V4_ATTENTION
from dsv4.v4.backward import OPTIONS, PAGING, TENSORS, V4_BACKWARD

REQUIRED = ("q", "window", "window_indices")
SCHEMA = (
    ", ".join(f"Tensor{'' if name in REQUIRED else '?'} {name}" for name in TENSORS),
    ", ".join(f"{kind} {name}" for name, kind in PAGING.items()) + ", float? softmax_scale, bool deterministic",
)


def _forward(tensors: tuple, options: tuple) -> tuple[Operation, tuple, tuple]:
    """The operation of the forward pass, with its tensors and options."""
    given = dict(zip((*TENSORS, *OPTIONS), (*tensors, *options)))
    op = V4_ATTENTION
    return op, tuple(given[name] for name in op.tensors), tuple(given[name] for name in op.options)


def _inputs(given: dict[str, Any]) -> tuple:
    """The arguments of the training operator from those of v4_attention."""
    return tuple(given[name] for name in (*TENSORS, *OPTIONS))


gradients.define_operation("v4_attention", V4_BACKWARD, SCHEMA, _forward, {"v4_attention": _inputs})
