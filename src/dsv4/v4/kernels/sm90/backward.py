"""Gradients of v4_attention on sm_90a: v4/kernels/backward.py with the kernel of this folder."""

from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program
from dsv4.v4.backward import V4Backward
from dsv4.v4.kernels.backward import prepare_sparse, supports
from dsv4.v4.kernels.sm90.backward_sparse import backward_sparse

__all__ = ["prepare", "supports"]


def prepare(b: V4Backward, target: Target, program: Program) -> None:
    """Fill b.dq, b.dwindow, b.dcompressed and b.dsink, those that are not None."""
    registers = dict(KEYS_REGS=232, GATHER_REGS=40)
    prepare_sparse(b, program, backward_sparse, registers, order_of_registers=True, finds_dot=True)
