"""Gradients of v4_attention on sm_100a: the way of shared/v4/backward.py, with the kernel of this folder."""

from dsv4.v4.backward import V4Backward
from dsv4.v4.kernels.backward import run, supports
from dsv4.v4.kernels.sm100.backward_listed import backward_listed

__all__ = ["backward", "supports"]


def backward(b: V4Backward) -> None:
    """Fill b.dq, b.dwindow, b.dcompressed and b.dsink, those that are not None."""
    run(b, backward_listed, dict(ADD_REGS=136, GATHER_REGS=104, MMA_REGS=104))
