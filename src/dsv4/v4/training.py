"""v4_attention with gradients: its training operators. backward.py defines the input of a backend.

Packed rows have no gradient; q and sink still have theirs.
"""

from dsv4.runtime import gradients
from dsv4.v4.api import V4_ATTENTION
from dsv4.v4.backward import TENSORS, V4_BACKWARD

REQUIRED = ("q", "window", "window_indices")
SCHEMA = ", ".join(f"Tensor{'' if name in REQUIRED else '?'} {name}" for name in TENSORS)

gradients.define_operation("v4_attention", V4_BACKWARD, SCHEMA, lambda tensors: V4_ATTENTION, (V4_ATTENTION,))
