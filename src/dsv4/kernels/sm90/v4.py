"""V4 attention on sm_90a: what the host tells the kernel, which is in listed.py."""

from dsv4.kernels.shared.v4_launch import forward_listed, supports
from dsv4.kernels.sm90.listed import v4_listed
from dsv4.v4_problem import V4Problem

__all__ = ["forward", "supports"]

STEP = 128  # rows per step: two blocks of 64
REGISTERS = dict(RIGHT_REGS=216, GATHER_REGS=72)


def forward(p: V4Problem) -> None:
    forward_listed(p, v4_listed, STEP, REGISTERS)
