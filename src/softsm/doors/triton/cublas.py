"""Triton's wrapper of cuBLAS, which programs compare themselves with, done by torch on the CPU.

Part of the cuda shim: `triton._C.libtriton.nvidia.cublas.CublasLt` opens libcublas when it is made.
"""

from __future__ import annotations

import torch

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


class CublasLt:
    def __init__(self, workspace: torch.Tensor):
        pass

    def matmul(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        """Computes c = a b^T."""
        c.copy_(a.float() @ b.float().t())

    def gemm(self, a, b, c, d, alpha: float, beta: float) -> None:
        """Computes d = alpha a b^T + beta c."""
        d.copy_(alpha * (a.float() @ b.float().t()) + beta * c.float())

    def block_scaled_matmul_mxfp8(self, a, b, out, scale_a, scale_b) -> None:
        left = a.float() * _scales(torch.exp2(scale_a.view(torch.uint8).float() - 127), a.shape[0], 32)
        right = b.float() * _scales(torch.exp2(scale_b.view(torch.uint8).float() - 127), b.shape[0], 32)
        out.copy_(left @ right.t())

    def block_scaled_matmul_nvfp4(self, a, b, out, scale_a, scale_b) -> None:
        left, right = (
            _unpacked(x) * _scales(s.view(torch.float8_e4m3fn).float(), x.shape[0], 16)
            for x, s in ((a, scale_a), (b, scale_b))
        )
        out.copy_(left @ right.t())


def _scales(flat: torch.Tensor, rows: int, vector: int) -> torch.Tensor:
    """Scale factors in cuBLAS' order (blocks of 128 rows x 4 factors, rows r and r + 32 side by side) -> [rows, K]."""
    blocks = flat.reshape(rows // 128, -1, 32, 4, 4)  # block of rows, block of factors, row % 32, row // 32, factor
    return blocks.permute(0, 3, 2, 1, 4).reshape(rows, -1).repeat_interleave(vector, 1)


def _unpacked(x: torch.Tensor) -> torch.Tensor:
    """Unpacks two e2m1 numbers per byte, the first in the low half."""
    return E2M1[torch.stack([x & 15, x >> 4], -1).reshape(x.shape[0], -1).long()]
