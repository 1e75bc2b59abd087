"""Gradients of v4_attention on sm_100a: Hopper's way from a request to launches, with the kernel of this folder."""

from dsv4.kernels.sm90.v4 import backward as hopper
from dsv4.kernels.sm90.v4.backward import supports
from dsv4.kernels.sm100.v4.backward_listed import backward_listed
from dsv4.v4.backward import V4Backward

__all__ = ["backward", "supports"]


def backward(b: V4Backward) -> None:
    """Fill b.dq, b.dwindow, b.dcompressed and b.dsink, those that are not None."""
    hopper.run(b, backward_listed, dict(ADD_REGS=136, GATHER_REGS=104, MMA_REGS=104))
