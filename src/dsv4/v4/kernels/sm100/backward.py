"""Gradients of v4_attention on sm_100a: v4/kernels/backward.py with the kernel of this folder."""

from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program
from dsv4.v4.backward import V4Backward
from dsv4.v4.kernels.backward import prepare_sparse, supports
from dsv4.v4.kernels.sm100.backward_sparse import backward_sparse

__all__ = ["prepare", "supports"]


def prepare(b: V4Backward, target: Target, program: Program) -> None:
    """Fill b.dq, b.dwindow, b.dcompressed and b.dsink, those that are not None."""
    prepare_sparse(b, program, backward_sparse, dict(ADD_REGS=104, GATHER_REGS=80, MMA_REGS=64))
