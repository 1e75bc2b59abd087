"""V4 attention on sm_100a: what the host tells the kernel, which is in listed.py."""

from dsv4.kernels.shared.v4_launch import forward_listed, supports
from dsv4.kernels.sm100.listed import v4_listed
from dsv4.v4_problem import V4Problem

__all__ = ["forward", "supports"]

STEP = 64  # rows per step: one block
REGISTERS = dict(GATHER_REGS=128, WARP_REGS=120)


def forward(p: V4Problem) -> None:
    forward_listed(p, v4_listed, STEP, REGISTERS)
