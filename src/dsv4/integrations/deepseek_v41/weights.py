"""Weights as the checkpoint has them, and the roundings that DeepSeek-V4.1 makes between its products.

Plain torch, and none of dsv4's own formats: the oracle rests on this file. A value is rounded to the nearest one that
its format has, ties to even.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

FP8_MAX, FP4_MAX = 448.0, 6.0
BLOCK = 32  # rows and columns of FP8 weights with one scale; columns of FP4 weights


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which products and norms are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _grouped(x: Tensor, group: int) -> Tensor:
    return x.to(wide(x.dtype)).unflatten(-1, (-1, group))


def _power_above(x: Tensor) -> Tensor:
    """Return the least power of two that is not less."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


def _to_e2m1(x: Tensor) -> Tensor:
    """Round to e2m1: steps of 0.5 below 2, of 1 below 4, of 2 up to 6."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(x.dtype)
    return torch.copysign((size / step).round() * step, x).clamp(-FP4_MAX, FP4_MAX)


def fp8_32(x: Tensor) -> Tensor:
    """Round to e4m3 with a power of two for 32 values: activations of FP8 and FP4 weights, and rows of the window."""
    groups = _grouped(x, 32)
    scale = _power_above(groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) / FP8_MAX)
    codes = (groups / scale).float().to(torch.float8_e4m3fn)
    return (codes.to(groups.dtype) * scale).flatten(-2).to(x.dtype)


def fp4_32(x: Tensor) -> Tensor:
    """Round to e2m1 with a power of two for 32 values: keys and queries of the indexer."""
    groups = _grouped(x, 32)
    scale = _power_above(groups.abs().amax(-1, keepdim=True).clamp_min(FP4_MAX * 2.0**-126) / FP4_MAX)
    return (_to_e2m1(groups / scale) * scale).flatten(-2).to(x.dtype)


def fp4_16(x: Tensor) -> Tensor:
    """Round to e2m1 with an e4m3 scale for 16 values: compressed rows."""
    groups = _grouped(x, 16)
    scale = (groups.abs().amax(-1, keepdim=True) / FP4_MAX).clamp(2.0**-9, FP8_MAX)
    scale = scale.float().to(torch.float8_e4m3fn).to(groups.dtype)
    return (_to_e2m1(groups / scale) * scale).flatten(-2).to(x.dtype)


class Fp8Linear(nn.Module):
    """y = round(x) W^T: weight e4m3 [out, in], scale e8m0 for 32 x 32 of them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        shape = -(-outputs // BLOCK), -(-inputs // BLOCK)
        self.weight = _frozen(torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn))
        self.scale = _frozen(torch.empty(shape, dtype=torch.float8_e8m0fnu))

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in]; bf16 holds it exactly."""
        n, k = self.weight.shape
        scale = self.scale.float().repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
        return (self.weight.float() * scale).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return product(fp8_32(x), self.numbers(wide(x.dtype)))

    @torch.no_grad()
    def fill(self, std: float) -> None:
        """Fill it at random, for a model without a checkpoint."""
        n, k = self.weight.shape
        x = torch.randn(-(-n // BLOCK) * BLOCK, -(-k // BLOCK) * BLOCK, device=self.weight.device) * std
        blocks = x.view(x.shape[0] // BLOCK, BLOCK, -1, BLOCK)
        scale = _power_above(blocks.abs().amax((1, 3)) / FP8_MAX)
        codes = (blocks / scale[:, None, :, None]).reshape(x.shape)[:n, :k].to(torch.float8_e4m3fn)
        self.weight.copy_(codes), self.scale.copy_(scale.to(torch.float8_e8m0fnu))


class Fp4Linear(nn.Module):
    """y = round(x) W^T: weight [out, in / 2], two e2m1 to a byte, the low bits first; scale e8m0 [out, in / 32]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = _frozen(torch.empty(outputs, inputs // 2, dtype=torch.int8))
        self.scale = _frozen(torch.empty(outputs, inputs // BLOCK, dtype=torch.float8_e8m0fnu))

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in]."""
        positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=self.weight.device)
        codes = self.weight.view(torch.uint8).long()
        values = torch.cat([positive, -positive])[torch.stack([codes & 15, codes >> 4], -1)].flatten(1)
        return (values.unflatten(1, (-1, BLOCK)) * self.scale.float()[..., None]).flatten(1).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return product(fp8_32(x), self.numbers(wide(x.dtype)))

    @torch.no_grad()
    def fill(self, std: float) -> None:
        """Fill it at random, for a model without a checkpoint: any code, scales near std / 2."""
        self.weight.copy_(torch.randint_like(self.weight, -128, 128))
        near = _power_above(torch.tensor(std / 2)) * 2.0 ** torch.randint(-1, 2, self.scale.shape)
        self.scale.copy_(near.to(torch.float8_e8m0fnu))


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width), requires_grad=False), eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(wide(x.dtype))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x W^T, summed in fp32 or fp64, in the dtype of x."""
    return (x.to(wide(x.dtype)) @ weight.to(wide(x.dtype)).T).to(x.dtype)


def _frozen(x: Tensor) -> nn.Parameter:
    return nn.Parameter(x, requires_grad=False)
